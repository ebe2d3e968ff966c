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

from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lora_core.staged import ONE, Rows, counting

Words = NDArray[np.int32]
Ints = NDArray[np.signedinteger]

CHUNKS = ((1024, 16), (4096, 32), (1 << 62, 64))
"""(up to this many rows, chunk size, a power of two): small chunks while the chip has more places than work, larger
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

    indptr: Ints
    slots: Ints
    permutation: Ints
    scales: NDArray[np.float32] | None

    def write(self, block: Words, room: SegmentRoom) -> int:
        """Fill `block`; what lies past the used part stays as it is, and no kernel reads it.

        Returns:
            how many segments there are.
        """
        count = len(self.slots)
        block[0] = count
        block[4 : 5 + count] = self.indptr
        block[room.slots_at : room.slots_at + count] = self.slots
        scales = ONE if self.scales is None else self.scales.view(np.int32)
        block[room.scales_at : room.scales_at + count] = scales
        block[room.permutation_at : room.permutation_at + len(self.permutation)] = self.permutation
        return count


def plan_segments(slots: Words, rows: Rows, *, scales: NDArray[np.float32] | None = None) -> Plan:
    """Order the rows of a batch by adapter and cut them into chunks.

    Args:
        slots: int32 `[bs]`, negative for the base model.
        rows: of each request.
        scales: `[bs]`, a factor per request; requests of one adapter but different factors share no
            segment.
    """
    lengths, indptr, num_rows = rows
    chunk = _chunk(chunk_size(num_rows))
    # a group is an adapter with a factor, of which there are `per` to each; the base model comes first
    keys, per, factors = slots + _ONE_MORE, 1, None
    if scales is not None and len(scales):
        factors, which = np.unique(scales, return_inverse=True)
        per = len(factors)
        keys = keys * per + which
    of_group = np.bincount(keys, minlength=per)  # requests
    sortable = keys.astype(np.int16) if len(of_group) <= _INT16 else keys  # up to 16 bits by radix
    base_only = of_group[0] if per == 1 else of_group[:per].sum()
    order = sortable.argsort(kind="stable")[base_only:]
    permutation = order
    if lengths is not None:
        counts = lengths.take(order)
        # a request's rows stand from indptr on; their places in the permutation end at the sum so far
        permutation = (indptr.take(order) + counts - counts.cumsum()).repeat(counts)
        permutation += counting(len(permutation), np.intp)
        of_group = np.bincount(keys, lengths, minlength=per).astype(np.intp)  # from here on, rows
    of_group[:per] = 0

    short = -of_group & chunk.mask  # rows that the last chunk of a group lacks
    chunks = (of_group + short) >> chunk.shift
    # of each segment, the group before its own: where the sums up to it stand, and the adapter's slot
    before = counting(len(chunks) - 1, np.intp).repeat(chunks[1:])
    bounds = counting(len(before) + 1, np.intp) * chunk.rows
    bounds[:-1] -= np.add.accumulate(short).take(before)
    bounds[-1] = len(permutation)
    if factors is None:
        return Plan(bounds, before, permutation, None)
    groups = before + 1
    return Plan(bounds, groups // per - 1, permutation, factors.take(groups % per))


class _Chunk(NamedTuple):
    """Numbers as arrays: numpy computes with them in half the time that Python's take."""

    rows: Ints
    mask: Ints
    shift: Ints


@cache
def _chunk(rows: int) -> _Chunk:
    return _Chunk(np.array(rows), np.array(rows - 1), np.array(rows.bit_length() - 1))


_ONE_MORE = np.array(1, np.int32)
_INT16 = 1 << 15
