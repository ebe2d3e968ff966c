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
from lora_core.staged import ONE, Rows, counting
from lora_core_triton import tables

Ints = NDArray[np.signedinteger]
"""The bits of the scale 1.0."""


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """Where the parts of one work list stand in the buffer, and how much fits.

    Equal rooms are one object (`lay_out`), so that launches are found by it in no time.

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


class WorkList(NamedTuple):
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
        slots: of each tile.
        counts: rows of each tile.
        first: row of each tile; contiguous only.
        rows: gathered only, `tile_rows` for each tile; those past a tile's count mean nothing.
        scales: bits of the scale of each tile, gathered: of each of `rows`. None for 1.
        highest_slot: `NO_LORA` when there is no tile.
        gathered: which form.
    """

    num_rows: int
    slots: Ints
    counts: Ints
    first: Ints | None
    rows: Ints | None
    scales: Ints | None
    highest_slot: int
    gathered: bool


def cut(slots: Ints, listed: Rows, scales: Ints | None, *, gathered: bool) -> Cut:
    """Cut one list into tiles.

    Args:
        slots: of each request.
        listed: its rows.
        scales: bits of each request's scale, or None for 1.
        gathered: which form.
    """
    rows, indptr, num_rows = listed
    if gathered and rows is None:
        return _gather(num_rows, slots, None, scales)
    if rows is None:
        rows = np.ones(len(slots), np.int32)
    live = (slots >= 0) & (rows > 0)
    slots, first, rows = slots[live], indptr[:-1][live], rows[live]
    scales = None if scales is None else scales[live]
    if not gathered:
        return _split(num_rows, slots, first, rows, scales)
    before = rows.cumsum() - rows
    row = (first - before).repeat(rows) + counting(int(rows.sum()))
    scales = None if scales is None else scales.repeat(rows)
    return _gather(num_rows, slots.repeat(rows), row, scales)


def _gather(num_rows: int, slots: Ints, rows: Ints | None, scales: Ints | None) -> Cut:
    """Rows ordered by slot; every slot begins a tile of its own.

    Args:
        num_rows: rows that belong to requests.
        slots: of each row that may have an adapter.
        rows: number of each of them, or None when they are all rows.
        scales: of each of them.
    """
    size = tables.GATHERED_TILE_ROWS
    keys = slots + 1  # so that rows without an adapter come first
    counts = np.bincount(keys, minlength=1)
    # every slot is filled up to whole tiles, and the sort brings what fills it up behind its rows
    short = -counts & (size - 1)
    short[0] = 0
    keys = np.concatenate((keys, counting(len(short)).repeat(short)))
    sortable = (
        keys.astype(np.int16) if len(counts) <= _INT16 else keys
    )  # a radix sort up to 16 bits
    order = sortable.argsort(kind="stable")[counts[0] :]
    of_tile = keys.take(order[::size])
    missing = short.take(of_tile)
    if len(order) > size:  # of a slot's last tile only
        missing[:-1] *= of_tile[1:] != of_tile[:-1]
    return Cut(
        num_rows=num_rows,
        slots=of_tile - 1,
        counts=size - missing,
        first=None,
        rows=order if rows is None else rows.take(order, mode="clip"),
        scales=None if scales is None else scales.take(order, mode="clip"),
        highest_slot=len(counts) - 2,
        gathered=True,
    )


def _split(num_rows: int, slots: Ints, first: Ints, rows: Ints, scales: Ints | None) -> Cut:
    """Tiles within each request."""
    size = tables.CONTIGUOUS_TILE_ROWS
    tiles_of = (rows + (size - 1)) // size
    done = counting(int(tiles_of.sum())) - (tiles_of.cumsum() - tiles_of).repeat(tiles_of)
    done *= size
    slots = slots.repeat(tiles_of)
    return Cut(
        num_rows=num_rows,
        slots=slots,
        counts=np.minimum(rows.repeat(tiles_of) - done, size),
        first=first.repeat(tiles_of) + done,
        rows=None,
        scales=None if scales is None else scales.repeat(tiles_of),
        highest_slot=int(slots.max(initial=NO_LORA)),
        gathered=False,
    )


def write(host: Ints, room: Room, part: Cut) -> WorkList:
    """Put a list at its place, its tail dead."""
    total, at = len(part.slots), room.tiles_at
    end = at + 4 * total
    host[at:end:4] = part.slots
    host[at + 2 : end : 4] = part.counts
    if total != room.max_tiles:
        host[end : at + 4 * room.max_tiles : 4] = NO_LORA
    scales = ONE if part.scales is None else part.scales
    if part.rows is not None:
        words = len(part.rows)
        host[room.rows_at : room.rows_at + words] = part.rows
        host[room.scales_at : room.scales_at + words] = scales
    elif part.first is not None:
        host[at + 1 : end : 4] = part.first
        host[at + 3 : end : 4] = scales
    return WorkList(room, part.num_rows, total)


_INT16 = 1 << 15


@lru_cache(maxsize=4096)
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


def eager_rooms(most_requests: int, parts: Sequence[Cut]) -> list[Room]:
    """Room for these lists, in steps: batches of about one size share their rooms."""
    rooms: list[Room] = []
    at = lists_at(most_requests)
    for part in parts:
        rooms.append(lay_out(at, step(len(part.slots)), gathered=part.gathered))
        at = rooms[-1].end
    return rooms


def step(count: int) -> int:
    """`count` rounded up to a power of two, 8 at least: how much eager batches reserve."""
    return max(8, 1 << max(count - 1, 0).bit_length())


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
