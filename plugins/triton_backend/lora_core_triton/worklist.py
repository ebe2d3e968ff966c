"""The work list: which rows belong to which slot, cut into tiles of rows for the kernels.

A tile is up to `tile_rows` rows of one slot. Kernels run one row of programs per tile, so there are
no programs that start only to find nothing, and each adapter's weights are read once per tile.
Two forms:

- gathered: rows of all requests of a slot are brought together, whatever order they stand in
  (decode and verify: many requests of a token or a few). A row index and a scale per row.
- contiguous: the requests themselves are the segments (prefill). A tile is a run of rows, and the
  request's scale stands in the tile.

Everything is int32 words of one device buffer, at offsets divisible by 16 so that no kernel is
compiled twice for the same shape:

    tiles   [n, 4]           slot (-1: dead), first row (contiguous only), count, scale bits
    rows    [n, tile_rows]   gathered only: row of x; entries past a tile's count mean nothing
    scales  [n, tile_rows]   gathered only: float32 bits

A kernel finds everything about its tile from the tile's number alone, without a chain of loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lora_core.batch import NO_LORA

Ints = NDArray[np.signedinteger]
ONE = int(np.float32(1.0).view(np.int32))
"""The bits of the scale 1.0."""


@dataclass(frozen=True, slots=True)
class Room:
    """Where the parts of one work list stand in the buffer, and how much fits.

    Attributes:
        tiles_at: word offset of `tiles`; `max_tiles` fit.
        rows_at: word offset of `rows`.
        scales_at: word offset of `scales`.
        end: first word after all parts, divisible by 16.
        max_tiles: tiles that fit.
        tile_rows: rows of a tile.
        gathered: which form.
    """

    tiles_at: int
    rows_at: int
    scales_at: int
    end: int
    max_tiles: int
    tile_rows: int
    gathered: bool


@dataclass(frozen=True, slots=True)
class WorkList:
    """One filled work list.

    Attributes:
        room: its place in the buffer.
        num_rows: rows that belong to requests, of adapters or not.
        num_tiles: tiles filled; further ones are dead.
    """

    room: Room
    num_rows: int
    num_tiles: int


@dataclass(frozen=True, slots=True)
class Segments:
    """The rows of every request in one list: of the batch, or of one lm_head pass.

    Attributes:
        indptr: [bs + 1], rows of request i are indptr[i] .. indptr[i + 1].
        num_rows: rows that belong to requests.
        slots, first, lengths: slot, first row and rows of each request with rows and an adapter.
        scales: its scale's bits, or None for 1.
        live_rows: the sum of `lengths`.
    """

    indptr: Ints
    num_rows: int
    slots: Ints
    first: Ints
    lengths: Ints
    scales: Ints | None
    live_rows: int

    @classmethod
    def of(cls, slots: Ints, lengths: Sequence[int], scales: Ints | None) -> Segments:
        """Segments of requests with these slots, rows and scale bits."""
        requests = len(slots)
        if isinstance(lengths, list | tuple) and lengths.count(1) == requests:
            indptr, rows = _one_each(requests)
        else:
            rows = np.fromiter(lengths, np.int32, requests)
            indptr = np.zeros(requests + 1, np.int32)
            rows.cumsum(out=indptr[1:])
        num_rows = live_rows = int(indptr[-1])
        first = indptr[:-1]
        live = np.minimum(rows - 1, slots) >= 0
        if not live.all():
            slots, first, rows = slots[live], first[live], rows[live]
            scales = None if scales is None else scales[live]
            live_rows = int(rows.sum())
        return cls(indptr, num_rows, slots, first, rows, scales, live_rows)


@lru_cache(maxsize=64)
def _one_each(requests: int) -> tuple[Ints, Ints]:
    """(indptr, rows) of requests of one row: the usual decode."""
    return np.arange(requests + 1, dtype=np.int32), np.ones(requests, np.int32)


def lay_out(at: int, rows: int, segments: int, tile_rows: int, *, gathered: bool) -> Room:
    """Reserve the words of one list from offset `at` (divisible by 16) on.

    Args:
        at: first free word.
        rows: most rows with an adapter.
        segments: most requests with an adapter.
        tile_rows: rows of a tile.
        gathered: which form.
    """
    max_tiles = most_tiles(rows, segments, tile_rows)
    rows_at = at + _up(4 * max_tiles)
    each = _up(tile_rows * max_tiles) if gathered else 0
    return Room(at, rows_at, rows_at + each, rows_at + 2 * each, max_tiles, tile_rows, gathered)


def most_tiles(rows: int, segments: int, tile_rows: int) -> int:
    """The most tiles that `rows` rows in at most `segments` segments can make."""
    segments = min(segments, rows)
    return segments + (rows - segments) // tile_rows


def fill(host: Ints, room: Room, segments: Segments) -> WorkList:
    """Write one list into the host buffer, its tail dead."""
    slots, first, lengths = segments.slots, segments.first, segments.lengths
    scales, live_rows = segments.scales, segments.live_rows
    if room.gathered and len(slots):
        per_row, row = slots, first
        if live_rows != len(slots):
            per_row, row = slots.repeat(lengths), _rows_of(first, lengths)
            scales = None if scales is None else scales.repeat(lengths)
        order = per_row.argsort(kind="stable")
        by_slot = np.bincount(per_row)
        slots = by_slot.nonzero()[0]
        lengths = by_slot[slots]
        first = lengths.cumsum() - lengths
        # every slot begins a tile of its own: sorted rows, with gaps
        tiles_of = -(-lengths // room.tile_rows)
        gaps = (tiles_of.cumsum() - tiles_of) * room.tile_rows - first
        to = np.arange(live_rows) + gaps.repeat(lengths)
        host[room.rows_at : room.scales_at][to] = row[order]
        host[room.scales_at : room.end][to] = ONE if scales is None else scales[order]
        scales = None
    per_segment = (lengths + (room.tile_rows - 1)) // room.tile_rows
    total = int(per_segment.sum())
    tiles = host[room.tiles_at : room.tiles_at + 4 * room.max_tiles].reshape(room.max_tiles, 4)
    if total != len(slots):
        segment = np.arange(len(slots)).repeat(per_segment)
        done = (np.arange(total) - (per_segment.cumsum() - per_segment)[segment]) * room.tile_rows
        slots, first = slots[segment], first[segment] + done
        lengths = np.minimum(lengths[segment] - done, room.tile_rows)
        scales = None if scales is None else scales[segment]
    live = tiles[:total]
    live[:, 0], live[:, 1], live[:, 2] = slots, first, lengths
    live[:, 3] = ONE if scales is None else scales
    tiles[total:, 0] = NO_LORA
    return WorkList(room, segments.num_rows, total)


def copy_list(host: Ints, source: WorkList, room: Room) -> WorkList:
    """The same list once more, at another room of the same size."""
    host[room.tiles_at : room.end] = host[source.room.tiles_at : source.room.end]
    return WorkList(room, source.num_rows, source.num_tiles)


def _rows_of(first: Ints, lengths: Ints) -> Ints:
    """All rows of the segments, in order."""
    before = lengths.cumsum() - lengths
    return np.arange(int(lengths.sum())) + (first - before).repeat(lengths)


def _up(words: int) -> int:
    return (words + 15) // 16 * 16
