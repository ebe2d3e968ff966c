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
from lora_core.capabilities import GraphKind
from lora_core.workspace import GraphRoom
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


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a batch that goes to the device, as one block of words.

    Attributes:
        words: row pointers [max_requests + 1], at `slots_at` the requests' slots [max_requests],
            then the work lists.
        slots_at: word offset of the slots.
        lists: the list of all rows, then one per lm_head pass; in graph mode always two.
        num_tokens: rows of the batch.
        highest_slot: of the batch, `NO_LORA` without adapters.
    """

    words: Ints
    slots_at: int
    lists: tuple[WorkList, ...]
    num_tokens: int
    highest_slot: int


@lru_cache(maxsize=128)
def plan_batch(
    lengths: tuple[int, ...],
    slots: tuple[int, ...],
    logits: tuple[tuple[int, ...], ...],
    scales: tuple[float, ...] | None,
    graph: GraphKind | None,
    room: GraphRoom | None,
    gathered_max_rows: int,
) -> Plan:
    """The words of a batch. Kept: decode forwards repeat their batch until a request comes or goes.

    Args:
        lengths: tokens of each request.
        slots: slot of each request.
        logits: per lm_head pass, rows of each request.
        scales: factor of each request, or None.
        graph: kind of the static buffer, or None.
        room: what `init_graph` made for that kind, or None.
        gathered_max_rows: eager lists of up to so many rows are gathered.
    """
    requests = len(lengths)
    of_requests = np.fromiter(slots, np.int32, requests)
    bits = None if scales is None else np.fromiter(scales, np.float32, requests).view(np.int32)
    covered = [Segments.of(of_requests, kept, bits) for kept in (lengths, *logits)]
    whole = covered[0]
    most, rooms = requests, eager_rooms(requests, covered, gathered_max_rows)
    if graph is not None and room is not None:
        most, rooms = room.max_requests, graph_rooms(graph, *room)
    words, slots_at = np.zeros(rooms[-1].end, np.int32), _slots_at(most)
    words[: requests + 1] = whole.indptr
    words[requests + 1 : most + 1] = whole.num_rows
    words[slots_at : slots_at + requests] = of_requests
    words[slots_at + requests : slots_at + most] = NO_LORA
    lists = [fill(words, place, rows) for place, rows in zip(rooms, covered, strict=False)]
    if len(lists) < len(rooms):  # a captured lm_head reads the second list, whoever replays
        first, second = rooms
        words[second.tiles_at : second.end] = words[first.tiles_at : first.end]
        lists.append(WorkList(second, lists[0].num_rows, lists[0].num_tiles))
    return Plan(
        words, slots_at, tuple(lists), whole.num_rows, int(whole.slots.max(initial=NO_LORA))
    )


def eager_rooms(requests: int, lists: list[Segments], gathered_max_rows: int) -> list[Room]:
    """Exactly the room that these lists need."""
    rooms: list[Room] = []
    at = _lists_at(requests)
    for segments in lists:
        gathered = segments.num_rows <= gathered_max_rows
        groups = len(set(segments.slots.tolist())) if gathered else len(segments.slots)
        tile_rows = tables.GATHERED_TILE_ROWS if gathered else tables.CONTIGUOUS_TILE_ROWS
        rooms.append(lay_out(at, segments.live_rows, groups, tile_rows, gathered=gathered))
        at = rooms[-1].end
    return rooms


def graph_rooms(kind: GraphKind, max_requests: int, max_tokens: int) -> list[Room]:
    """Room for any batch of a graph kind: all rows, and the rows of one lm_head pass."""
    gathered = kind != "prefill"
    tile_rows = tables.GATHERED_TILE_ROWS if gathered else tables.CONTIGUOUS_TILE_ROWS
    at = _lists_at(max_requests)
    first = lay_out(at, max_tokens, max_requests, tile_rows, gathered=gathered)
    return [first, lay_out(first.end, max_tokens, max_requests, tile_rows, gathered=gathered)]


def _slots_at(max_requests: int) -> int:
    return _up(max_requests + 1)


def _lists_at(max_requests: int) -> int:
    return _slots_at(max_requests) + _up(max_requests)


def _rows_of(first: Ints, lengths: Ints) -> Ints:
    """All rows of the segments, in order."""
    before = lengths.cumsum() - lengths
    return np.arange(int(lengths.sum())) + (first - before).repeat(lengths)


def _up(words: int) -> int:
    return (words + 15) // 16 * 16
