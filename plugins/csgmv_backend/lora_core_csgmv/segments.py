"""Rows ordered by adapter and cut into chunks: what one launch of the kernels works through.

Everything here is host arithmetic in numpy over requests, never over tokens one by one; the result
is written straight into a staging buffer of int32 words, which goes to the device in one copy.

A block of segments lies in memory like this, each part starting at a multiple of 4 words (16 bytes):

    count, 0, 0, 0 | indptr [room.segments + 4] | slots [room.segments]
                   | scales [room.segments], float32 | permutation [room.rows]

`permutation[indptr[i] : indptr[i + 1]]` are the rows of x that segment i covers, all of adapter
`slots[i]` with the factor `scales[i]`. Rows of the base model are in no segment: no kernel touches
them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int32]

CHUNKS = ((1024, 16), (1 << 62, 32))
"""(up to this many rows, chunk size): small chunks while the chip has more places than work, larger
ones once a chunk's weights would be read again and again."""


def chunk_size(num_rows: int) -> int:
    """Rows per segment for a batch of `num_rows`."""
    for limit, chunk in CHUNKS:
        if num_rows <= limit:
            return chunk
    raise AssertionError("the last row of CHUNKS covers everything")


def _aligned(words: int) -> int:
    return -(-words // 4) * 4


class SegmentRoom(NamedTuple):
    """The extent of one block of segments, and where its parts begin; see `room_for`.

    Attributes:
        segments: room for this many segments, a multiple of 4.
        rows: room for this many rows, a multiple of 4.
        slots_at: first word of the slots; the count is word 0, indptr starts at word 4.
        scales_at: first word of the scales.
        permutation_at: first word of the permutation.
        words: length of the block.
    """

    segments: int
    rows: int
    slots_at: int
    scales_at: int
    permutation_at: int
    words: int


@lru_cache(maxsize=4096)
def room_for(*, requests: int, rows: int) -> SegmentRoom:
    """Room for every batch of up to that many requests and rows."""
    segments = 0
    for limit, chunk in CHUNKS:
        covered = min(rows, limit)
        # a group of requests adds at most one segment to the full ones, and no segment is empty
        segments = max(segments, min(covered, covered // chunk + requests))
    segments, rows = _aligned(segments), _aligned(rows)
    slots_at = 8 + segments
    return SegmentRoom(
        segments,
        rows,
        slots_at,
        slots_at + segments,
        slots_at + 2 * segments,
        slots_at + 2 * segments + rows,
    )


class Plan(NamedTuple):
    """Segments on the host, ready to be written into a block.

    Attributes:
        indptr: `[segments + 1]`, into the permutation.
        slots: `[segments]`.
        permutation: rows of x, ordered by adapter, in request order within one.
        scales: float32 `[segments]`, or None when every factor is 1.
    """

    indptr: Words
    slots: Words
    permutation: Words
    scales: NDArray[np.float32] | None

    def write(self, block: Words, room: SegmentRoom) -> None:
        """Fill `block`; what lies past the used part stays as it is, and no kernel reads it."""
        count = len(self.slots)
        block[0] = count
        block[4 : 5 + count] = self.indptr
        block[room.slots_at : room.slots_at + count] = self.slots
        scales = _ONE if self.scales is None else self.scales.view(np.int32)
        block[room.scales_at : room.scales_at + count] = scales
        block[room.permutation_at : room.permutation_at + len(self.permutation)] = self.permutation


_ONE = int(np.float32(1.0).view(np.int32))  # the bits of 1.0
_NOTHING = np.empty(0, np.int32)
EMPTY = Plan(np.zeros(1, np.int32), _NOTHING, _NOTHING, None)


def plan_segments(
    slots: Words,
    ends: Words,
    lengths: Words | None,
    *,
    rows: int,
    scales: NDArray[np.float32] | None = None,
) -> Plan:
    """Order the rows of a batch by adapter and cut them into chunks.

    Args:
        slots: int32 `[bs]`, negative for the base model.
        ends: int32 `[bs]`, running sum of the lengths.
        lengths: int32 `[bs]`, or None when every request has exactly one row.
        rows: sum of the lengths, from which the chunk size follows.
        scales: `[bs]`, a factor per request; requests of one adapter but different factors share no
            segment.
    """
    chunk = chunk_size(rows)
    # by adapter; requests of the base model come first
    order = slots.argsort(kind="stable") if scales is None else np.lexsort((scales, slots))
    keys = slots.take(order)
    base_only = int(keys.searchsorted(0))
    requests: Words = order[base_only:].astype(np.int32)
    keys = keys[base_only:]
    if not len(keys):
        return EMPTY

    if lengths is None:
        permutation = requests
        request_ends = counting(len(requests) + 1)[1:]
    else:
        counts = lengths.take(requests)
        request_ends = counts.cumsum(dtype=np.int32)
        # request i covers rows ends - counts ..; its place in the permutation ends at request_ends
        permutation = (ends.take(requests) - request_ends).repeat(counts)
        permutation += counting(len(permutation))

    last = np.empty(len(keys), np.bool_)  # the last request of each group that may share segments
    last[-1] = True
    np.not_equal(keys[1:], keys[:-1], out=last[:-1])
    if scales is not None:
        scales = scales.take(requests)
        last[:-1] |= scales[1:] != scales[:-1]
    ends_of = request_ends[last]  # per group, in the permutation
    starts_of = np.empty_like(ends_of)
    starts_of[0] = 0
    starts_of[1:] = ends_of[:-1]

    pieces = (ends_of - starts_of + np.int32(chunk - 1)) // np.int32(chunk)
    piece_ends = pieces.cumsum(dtype=np.int32)
    indptr = counting(int(piece_ends[-1]) + 1) * np.int32(chunk)
    indptr[:-1] += (starts_of - (piece_ends - pieces) * np.int32(chunk)).repeat(pieces)
    indptr[-1] = len(permutation)
    return Plan(
        indptr,
        keys[last].repeat(pieces),
        permutation,
        None if scales is None else scales[last].repeat(pieces),
    )


_numbers = np.arange(4096, dtype=np.int32)


def counting(count: int) -> Words:
    """0, 1, ..., count - 1; to be read, never written."""
    global _numbers  # a pure cache
    if count > len(_numbers):
        _numbers = np.arange(2 * count, dtype=np.int32)
    return _numbers[:count]
