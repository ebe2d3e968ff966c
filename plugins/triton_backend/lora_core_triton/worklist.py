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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lora_core.batch import NO_LORA
from lora_core.capabilities import GraphKind
from lora_core_triton import tables

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


class Cut(NamedTuple):
    """One list, cut into tiles, before it has a place.

    Attributes:
        num_rows: rows that belong to requests.
        total: tiles.
        slots: of each tile.
        first: row of each tile; contiguous only.
        counts: rows of each tile.
        scales: bits of each tile's scale, contiguous only, or None for 1.
        rows: gathered only: the rows, sorted by slot,
        to: where each goes,
        row_scales: and its scale's bits, or None for 1.
        highest_slot: `NO_LORA` when there is no tile.
        gathered: which form.
    """

    num_rows: int
    total: int
    slots: Ints
    first: Ints | None
    counts: Ints
    scales: Ints | None
    rows: Ints | None
    to: Ints | None
    row_scales: Ints | None
    highest_slot: int
    gathered: bool


class Rows(NamedTuple):
    """The rows of each request in one list.

    Attributes:
        lengths: [bs].
        indptr: [bs + 1], where each begins, and the end.
        one_each: whether every request has exactly one: the usual decode.
    """

    lengths: Ints
    indptr: Ints
    one_each: bool


def rows_of(lengths: Sequence[int]) -> Rows:
    """Host integers as arrays."""
    requests = len(lengths)
    if isinstance(lengths, list | tuple) and lengths.count(1) == requests:
        return _one_each(requests)
    rows = np.fromiter(lengths, np.int32, requests)
    indptr = np.zeros(requests + 1, np.int32)
    rows.cumsum(out=indptr[1:])
    return Rows(rows, indptr, one_each=False)


@lru_cache(maxsize=1024)
def _one_each(requests: int) -> Rows:
    indptr = np.arange(requests + 1, dtype=np.int32)
    return Rows(np.ones(requests, np.int32), indptr, one_each=True)


def cut(slots: Ints, listed: Rows, scales: Ints | None, *, gathered: bool) -> Cut:
    """Cut one list into tiles.

    Args:
        slots: of each request.
        listed: its rows.
        scales: bits of each request's scale, or None for 1.
        gathered: which form.
    """
    rows, indptr, one_each = listed
    num_rows, first = int(indptr[-1]), indptr[:-1]
    if not one_each or slots.min(initial=0) < 0:
        live = (slots >= 0) & (rows > 0)
        slots, first, rows = slots[live], first[live], rows[live]
        scales = None if scales is None else scales[live]
    if not len(slots):
        none = slots[:0]
        return Cut(num_rows, 0, none, none, none, None, none, none, None, NO_LORA, gathered)
    return (_gather if gathered else _split)(num_rows, slots, first, rows, scales, one_each)


def _gather(
    num_rows: int, slots: Ints, first: Ints, rows: Ints, scales: Ints | None, one_each: bool
) -> Cut:
    """Rows sorted by slot; every slot begins a tile of its own."""
    if not one_each:
        before = rows.cumsum() - rows
        first = (first - before).repeat(rows) + np.arange(int(rows.sum()))
        slots = slots.repeat(rows)
        scales = None if scales is None else scales.repeat(rows)
    order = slots.argsort(kind="stable")
    counts = np.bincount(slots)
    highest = len(counts) - 1
    slots = counts.nonzero()[0]
    counts = counts[slots]
    tiles_of = (counts + (tables.GATHERED_TILE_ROWS - 1)) // tables.GATHERED_TILE_ROWS
    ends = tiles_of.cumsum()
    gaps = (ends - tiles_of) * tables.GATHERED_TILE_ROWS - (counts.cumsum() - counts)
    to = (np.arange(len(order)) + gaps.repeat(counts)).astype(np.intp, copy=False)
    total = int(ends[-1])
    if total != len(slots):
        done = (np.arange(total) - (ends - tiles_of).repeat(tiles_of)) * tables.GATHERED_TILE_ROWS
        slots = slots.repeat(tiles_of)
        counts = np.minimum(counts.repeat(tiles_of) - done, tables.GATHERED_TILE_ROWS)
    row_scales = None if scales is None else scales[order]
    return Cut(
        num_rows, total, slots, None, counts, None, first[order], to, row_scales, highest, True
    )


def _split(
    num_rows: int, slots: Ints, first: Ints, rows: Ints, scales: Ints | None, one_each: bool
) -> Cut:
    """Tiles within each request."""
    if not one_each:
        size = tables.CONTIGUOUS_TILE_ROWS
        tiles_of = (rows + (size - 1)) // size
        ends = tiles_of.cumsum()
        done = (np.arange(int(ends[-1])) - (ends - tiles_of).repeat(tiles_of)) * size
        slots, first = slots.repeat(tiles_of), first.repeat(tiles_of) + done
        rows = np.minimum(rows.repeat(tiles_of) - done, size)
        scales = None if scales is None else scales.repeat(tiles_of)
    highest = int(slots.max())
    return Cut(num_rows, len(slots), slots, first, rows, scales, None, None, None, highest, False)


def write(host: Ints, room: Room, part: Cut) -> WorkList:
    """Put a list at its place, its tail dead."""
    tiles = host[room.tiles_at : room.tiles_at + 4 * room.max_tiles].reshape(room.max_tiles, 4)
    total = part.total
    tiles[:total, 0] = part.slots
    tiles[:total, 2] = part.counts
    tiles[total:, 0] = NO_LORA
    if part.to is not None and part.rows is not None:
        host[room.rows_at : room.scales_at][part.to] = part.rows
        scales = host[room.scales_at : room.end]
        if part.row_scales is None:
            scales[: total * room.tile_rows] = ONE
        else:
            scales[part.to] = part.row_scales
    elif part.first is not None:
        tiles[:total, 1] = part.first
        tiles[:total, 3] = ONE if part.scales is None else part.scales
    return WorkList(room, part.num_rows, total)


def lay_out(at: int, max_tiles: int, *, gathered: bool) -> Room:
    """Reserve the words of one list of up to `max_tiles` tiles from offset `at` on."""
    tile_rows = tables.GATHERED_TILE_ROWS if gathered else tables.CONTIGUOUS_TILE_ROWS
    rows_at = at + _up(4 * max_tiles)
    each = _up(tile_rows * max_tiles) if gathered else 0
    return Room(at, rows_at, rows_at + each, rows_at + 2 * each, max_tiles, tile_rows, gathered)


def most_tiles(rows: int, segments: int, tile_rows: int) -> int:
    """The most tiles that `rows` rows in at most `segments` segments can make."""
    segments = min(segments, rows)
    return segments + (rows - segments) // tile_rows


def eager_rooms(requests: int, parts: Sequence[Cut]) -> list[Room]:
    """Exactly the room that these lists need."""
    rooms: list[Room] = []
    at = lists_at(requests)
    for part in parts:
        rooms.append(lay_out(at, part.total, gathered=part.gathered))
        at = rooms[-1].end
    return rooms


@lru_cache(maxsize=256)
def graph_rooms(kind: GraphKind, max_requests: int, max_tokens: int) -> tuple[Room, Room]:
    """Room for any batch of a graph kind: all rows, and the rows of one lm_head pass."""
    gathered = kind != "prefill"
    tile_rows = tables.GATHERED_TILE_ROWS if gathered else tables.CONTIGUOUS_TILE_ROWS
    most = most_tiles(max_tokens, max_requests, tile_rows)
    first = lay_out(lists_at(max_requests), most, gathered=gathered)
    return first, lay_out(first.end, most, gathered=gathered)


def slots_at(max_requests: int) -> int:
    """Word offset of the requests' slots, behind the `max_requests + 1` row pointers."""
    return _up(max_requests + 1)


def lists_at(max_requests: int) -> int:
    """Word offset of the first work list, behind the slots."""
    return slots_at(max_requests) + _up(max_requests)


def _up(words: int) -> int:
    return (words + 15) // 16 * 16
