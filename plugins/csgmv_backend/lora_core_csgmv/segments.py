"""Rows ordered by adapter and cut into chunks: what one launch of the kernels works through.

Everything here is host arithmetic in numpy over requests, never over tokens one by one; the result
is written straight into a staging buffer of int32 words, which goes to the device in one copy.

A block of segments lies in memory like this, each part starting at a multiple of 4 words (16 bytes):

    count, 0, 0, 0 | indptr [room.segments + 4] | slots [room.segments]
                   | permutation [room.rows] | scales [room.rows], float32, where asked for

`permutation[indptr[i] : indptr[i + 1]]` are the rows of x that segment i covers, all of adapter
`slots[i]`. Rows of the base model are in no segment: no kernel touches them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int32]

CHUNKS = ((1024, 16), (4096, 32), (1 << 62, 64))
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
        scaled: whether a factor per row follows the permutation.
        slots_at: first word of the slots; the count is word 0, indptr starts at word 4.
        permutation_at: first word of the permutation.
        scales_at: first word of the scales.
        words: length of the block.
    """

    segments: int
    rows: int
    scaled: bool
    slots_at: int
    permutation_at: int
    scales_at: int
    words: int


@lru_cache(maxsize=4096)
def room_for(*, requests: int, rows: int, scaled: bool) -> SegmentRoom:
    """Room for every batch of up to that many requests and rows."""
    segments = 0
    for limit, chunk in CHUNKS:
        covered = min(rows, limit)
        # every adapter adds at most one segment to the full ones, and no segment is empty
        segments = max(segments, min(covered, covered // chunk + requests))
    segments, rows = _aligned(segments), _aligned(rows)
    permutation_at = 8 + 2 * segments
    scales_at = permutation_at + rows
    return SegmentRoom(
        segments, rows, scaled, 8 + segments, permutation_at, scales_at, scales_at + scaled * rows
    )


class Plan(NamedTuple):
    """Segments on the host, ready to be written into a block.

    Attributes:
        indptr: `[segments + 1]`, into the permutation.
        slots: `[segments]`.
        permutation: rows of x, ordered by adapter, in request order within one.
        request_of: request of each row of the permutation, where asked for.
    """

    indptr: Words
    slots: Words
    permutation: Words
    request_of: Words

    def write(self, block: Words, room: SegmentRoom, scales: NDArray[np.float32] | None) -> None:
        """Fill `block`; what lies past the used part stays as it is, and no kernel reads it."""
        count, rows = len(self.slots), len(self.permutation)
        block[0] = count
        block[4 : 5 + count] = self.indptr
        block[room.slots_at : room.slots_at + count] = self.slots
        block[room.permutation_at : room.permutation_at + rows] = self.permutation
        if scales is not None:
            scales.view(np.int32).take(self.request_of, out=block[room.scales_at : room.scales_at + rows])
        elif room.scaled:
            block[room.scales_at : room.scales_at + rows] = _ONE


_ONE = int(np.float32(1.0).view(np.int32))  # the bits of 1.0
_NOTHING = np.empty(0, np.int32)
EMPTY = Plan(np.zeros(1, np.int32), _NOTHING, _NOTHING, _NOTHING)


def plan_segments(
    slots: Words, ends: Words, lengths: Words | None, *, rows: int, scaled: bool = False
) -> Plan:
    """Order the rows of a batch by adapter and cut them into chunks.

    Args:
        slots: int32 `[bs]`, negative for the base model.
        ends: int32 `[bs]`, running sum of the lengths.
        lengths: int32 `[bs]`, or None when every request has exactly one row.
        rows: sum of the lengths, from which the chunk size follows.
        scaled: also tell the request of each row.
    """
    chunk = chunk_size(rows)
    order = slots.argsort(kind="stable")  # requests, by adapter; those of the base model come first
    keys = slots.take(order)
    base_only = int(keys.searchsorted(0))
    order, keys = order[base_only:].astype(np.int32), keys[base_only:]
    if not len(keys):
        return EMPTY

    if lengths is None:
        permutation = request_of = order
        request_ends = counting(len(order) + 1)[1:]
    else:
        counts = lengths.take(order)
        request_ends = counts.cumsum(dtype=np.int32)
        # request i covers rows ends - counts ..; its place in the permutation ends at request_ends
        permutation = (ends.take(order) - request_ends).repeat(counts)
        permutation += counting(len(permutation))
        request_of = order.repeat(counts) if scaled else _NOTHING

    last = np.empty(len(keys), np.bool_)  # the last request of each adapter
    last[-1] = True
    np.not_equal(keys[1:], keys[:-1], out=last[:-1])
    ends_of = request_ends[last]  # per adapter, in the permutation
    starts_of = np.empty_like(ends_of)
    starts_of[0] = 0
    starts_of[1:] = ends_of[:-1]

    pieces = (ends_of - starts_of + (chunk - 1)) // chunk
    piece_ends = pieces.cumsum(dtype=np.int32)
    count = int(piece_ends[-1])
    indptr = counting(count + 1) * np.int32(chunk)
    indptr[:-1] += (starts_of - (piece_ends - pieces) * np.int32(chunk)).repeat(pieces)
    indptr[-1] = len(permutation)
    return Plan(indptr, keys[last].repeat(pieces), permutation, request_of)


_numbers = np.arange(4096, dtype=np.int32)


def counting(count: int) -> Words:
    """0, 1, ..., count - 1; to be read, never written."""
    global _numbers  # noqa: PLW0603 - a pure cache
    if count > len(_numbers):
        _numbers = np.arange(2 * count, dtype=np.int32)
    return _numbers[:count]
