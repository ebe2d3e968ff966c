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
    """The extent of one block of segments.

    Attributes:
        segments: room for this many segments, a multiple of 4.
        rows: room for this many rows, a multiple of 4.
        scaled: whether a factor per row follows the permutation.
    """

    segments: int
    rows: int
    scaled: bool

    @classmethod
    def at_most(cls, *, requests: int, rows: int, scaled: bool) -> SegmentRoom:
        """Room for every batch of up to that many requests and rows."""
        segments = 0
        for limit, chunk in CHUNKS:
            covered = min(rows, limit)
            # every adapter adds at most one segment to the full ones, and no segment is empty
            segments = max(segments, min(covered, covered // chunk + requests))
        return cls(_aligned(segments), _aligned(rows), scaled)

    @property
    def slots_at(self) -> int:
        """First word of the slots; the count is word 0, indptr starts at word 4."""
        return 8 + self.segments

    @property
    def permutation_at(self) -> int:
        """First word of the permutation."""
        return self.slots_at + self.segments

    @property
    def scales_at(self) -> int:
        """First word of the scales."""
        return self.permutation_at + self.rows

    @property
    def words(self) -> int:
        """Length of the block."""
        return self.scales_at + (self.rows if self.scaled else 0)


class Plan(NamedTuple):
    """Segments on the host, ready to be written into a block.

    Attributes:
        indptr: `[segments + 1]`, into the permutation.
        slots: `[segments]`.
        permutation: rows of x, ordered by adapter, in request order within one.
        request_of: request of each row of the permutation, or None unless asked for.
    """

    indptr: Words
    slots: Words
    permutation: Words
    request_of: Words | None

    def write(self, block: Words, room: SegmentRoom, scales: NDArray[np.float32] | None) -> None:
        """Fill `block`; what lies past the used part stays as it is, and no kernel reads it."""
        count, rows = len(self.slots), len(self.permutation)
        block[0] = count
        block[4 : 5 + count] = self.indptr
        block[room.slots_at : room.slots_at + count] = self.slots
        block[room.permutation_at : room.permutation_at + rows] = self.permutation
        if room.scaled:
            factors = block[room.scales_at : room.scales_at + rows].view(np.float32)
            if scales is None:
                factors.fill(1.0)
            else:
                scales.take(self.request_of, out=factors)


_NOTHING = np.empty(0, np.int32)
EMPTY = Plan(np.zeros(1, np.int32), _NOTHING, _NOTHING, _NOTHING)


def plan_segments(slots: Words, ends: Words, lengths: Words | None, *, rows: int) -> Plan:
    """Order the rows of a batch by adapter and cut them into chunks.

    Args:
        slots: int32 `[bs]`, negative for the base model.
        ends: int32 `[bs]`, running sum of the lengths.
        lengths: int32 `[bs]`, or None when every request has exactly one row.
        rows: sum of the lengths, from which the chunk size follows.
    """
    chunk = chunk_size(rows)
    live = slots >= 0
    if lengths is not None:
        live &= lengths > 0
    chosen = live.nonzero()[0]
    if not len(chosen):
        return EMPTY
    keys = slots.take(chosen)
    by_slot = keys.argsort(kind="stable")
    keys = keys.take(by_slot)
    order = chosen.take(by_slot).astype(np.int32)  # requests, by adapter

    if lengths is None:
        permutation = request_of = order
        request_ends = np.arange(1, len(order) + 1, dtype=np.int32)
    else:
        counts = lengths.take(order)
        request_ends = counts.cumsum(dtype=np.int32)
        # request i covers rows ends - counts ..; its place in the permutation ends at request_ends
        permutation = (ends.take(order) - request_ends).repeat(counts)
        permutation += np.arange(request_ends[-1], dtype=np.int32)
        request_of = order.repeat(counts)

    last = np.empty(len(keys), np.bool_)  # the last request of each adapter
    last[-1] = True
    np.not_equal(keys[1:], keys[:-1], out=last[:-1])
    group_ends = request_ends[last]
    group_slots = keys[last]
    group_starts = np.empty_like(group_ends)
    group_starts[0] = 0
    group_starts[1:] = group_ends[:-1]

    pieces = -(-(group_ends - group_starts) // chunk)
    piece_ends = pieces.cumsum(dtype=np.int32)
    indptr = np.empty(piece_ends[-1] + 1, np.int32)
    np.multiply(np.arange(piece_ends[-1], dtype=np.int32), chunk, out=indptr[:-1])
    indptr[:-1] += (group_starts - (piece_ends - pieces) * chunk).repeat(pieces)
    indptr[-1] = group_ends[-1]
    return Plan(indptr, group_slots.repeat(pieces), permutation, request_of)
