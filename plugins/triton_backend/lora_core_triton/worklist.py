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

    tiles   [n, 4]   slot (-1: dead), first (into `rows`, or the row itself), count, scale bits
    rows    [T]      gathered only: row of x
    scales  [T]      gathered only: float32 bits
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lora_core.batch import NO_LORA

Ints = NDArray[np.int32]
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


def lay_out(at: int, *, max_tiles: int, max_rows: int, tile_rows: int, gathered: bool) -> Room:
    """Reserve the words of one list from offset `at` (divisible by 16) on."""
    rows_at = at + _up(4 * max_tiles)
    scales_at = rows_at + (_up(max_rows) if gathered else 0)
    end = scales_at + (_up(max_rows) if gathered else 0)
    return Room(at, rows_at, scales_at, end, max_tiles, tile_rows, gathered)


def most_tiles(rows: int, segments: int, tile_rows: int) -> int:
    """The most tiles that `rows` rows in at most `segments` segments can make."""
    segments = min(segments, rows)
    return segments + (rows - segments) // tile_rows


def live_segments(
    slots: Ints, lengths: Ints, indptr: Ints, scales: Ints | None
) -> tuple[Ints, Ints, Ints, Ints | None]:
    """(slot, first row, length, scale bits) of the requests that have rows and an adapter."""
    live = (slots != NO_LORA) & (lengths > 0)
    if live.all():
        return slots, indptr[:-1], lengths, scales
    return slots[live], indptr[:-1][live], lengths[live], None if scales is None else scales[live]


def count_tiles(lengths: Ints, tile_rows: int) -> int:
    """Tiles of contiguous segments."""
    return int(((lengths + (tile_rows - 1)) // tile_rows).sum())


def fill(
    host: Ints, room: Room, segments: tuple[Ints, Ints, Ints, Ints | None], num_rows: int
) -> WorkList:
    """Write one list into the host buffer, its tail dead.

    Args:
        host: the whole buffer.
        room: where to write.
        segments: as `live_segments` returns them.
        num_rows: rows that belong to requests.
    """
    slots, first, lengths, scales = segments
    if room.gathered and len(slots):
        rows = _rows_of(first, lengths)
        per_row = slots if len(rows) == len(slots) else np.repeat(slots, lengths)
        order = np.argsort(per_row, kind="stable")
        host[room.rows_at : room.rows_at + len(rows)] = rows[order]
        bits = host[room.scales_at : room.scales_at + len(rows)]
        if scales is None:
            bits[:] = ONE
        else:
            per_row_scale = scales if len(rows) == len(slots) else np.repeat(scales, lengths)
            bits[:] = per_row_scale[order]
        by_slot = np.bincount(per_row)
        slots = np.flatnonzero(by_slot)
        lengths, scales = by_slot[slots], None
        first = np.cumsum(lengths) - lengths
    per_segment = (lengths + (room.tile_rows - 1)) // room.tile_rows
    total = int(per_segment.sum())
    tiles = host[room.tiles_at : room.tiles_at + 4 * room.max_tiles].reshape(room.max_tiles, 4)
    if total == len(slots):  # one tile each: the usual decode
        tiles[:total, 0], tiles[:total, 1], tiles[:total, 2] = slots, first, lengths
        tiles[:total, 3] = ONE if scales is None else scales
    else:
        segment = np.repeat(np.arange(len(slots)), per_segment)
        before = np.cumsum(per_segment) - per_segment
        done = (np.arange(total) - before[segment]) * room.tile_rows
        tiles[:total, 0] = slots[segment]
        tiles[:total, 1] = first[segment] + done
        tiles[:total, 2] = np.minimum(lengths[segment] - done, room.tile_rows)
        tiles[:total, 3] = ONE if scales is None else scales[segment]
    tiles[total:, 0] = NO_LORA
    return WorkList(room, num_rows, total)


def _rows_of(first: Ints, lengths: Ints) -> Ints:
    """All rows of the segments, in order."""
    total = int(lengths.sum())
    if total == len(first):
        return first
    before = np.cumsum(lengths) - lengths
    return np.arange(total, dtype=np.int32) + np.repeat(first - before, lengths).astype(np.int32)


def _up(words: int) -> int:
    return (words + 15) // 16 * 16
