"""`h[t, s, r] = sum_k A[slot(t), s, r, k] * x[t, k]`, for all slices at once.

One unit of work is one segment, or one segment and one part of K. Rows of A that count, those below
the rank of their slice, are packed: a q|k|v adapter of rank 16 is 48 rows of one product, and x is
read once. A is the left operand, so that the instruction that multiplies, and with it every
rounding, follows from the number of these rows and never from how many tokens share the call.

K is cut into parts of SPLIT, each summed from zero, and the sums are added in ascending order:
either by one program, or by as many programs as there are parts, of which the last to arrive adds
what all have left in `partials`. Both give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lora_core.triton_kit import dot
from lora_core_csgmv.kernels.work import rows_of, segment


@triton.jit(do_not_specialize=["num_rows", "room_segments"])
def shrink(
    x,  # [T', K] - rows of the batch
    a,  # [S, n, R, K] - stacked A
    ranks,  # [S, n] int32
    h,  # [T', n, R] float32 or dtype of x - result
    partials,  # [parts, T', n * R] float32 - what each part of K sums to; unused unless PARALLEL
    arrivals,  # [segments] int32 - zero between launches; unused unless PARALLEL
    segments,  # block of segments
    num_rows,  # T'
    in_features,  # K
    stride_x,
    stride_slot,
    stride_slice,
    stride_rank,
    stride_k,
    room_segments,
    MAX_RANK: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,  # SPLIT divides K
    PARALLEL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid: any number of programs; each takes every `num_programs`-th unit of work."""
    parts = tl.cdiv(in_features, SPLIT)
    units = tl.load(segments)
    if PARALLEL:
        units *= parts
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        index = unit
        part = 0
        if PARALLEL:
            index = unit // parts
            part = unit % parts
        first, end, slot = segment(segments, index, room_segments)
        a_slot = a + slot * stride_slot
        ranks_slot = ranks + slot * NUM_SLICES
        count = 0  # rows of A that count
        for s in tl.static_range(NUM_SLICES):
            count += tl.load(ranks_slot + s)
        if NUM_SLICES * MAX_RANK <= 16:
            _segment(x, a_slot, ranks_slot, h, partials, arrivals, segments, num_rows, in_features,
                     stride_x, stride_slice, stride_rank, stride_k, room_segments, index, part, parts,
                     first, end, count, MAX_RANK, NUM_SLICES, SPLIT, EVEN, PARALLEL, 16, BLOCK_T, BLOCK_K)
        elif count <= 16:
            _segment(x, a_slot, ranks_slot, h, partials, arrivals, segments, num_rows, in_features,
                     stride_x, stride_slice, stride_rank, stride_k, room_segments, index, part, parts,
                     first, end, count, MAX_RANK, NUM_SLICES, SPLIT, EVEN, PARALLEL, 16, BLOCK_T, BLOCK_K)
        elif count <= 32:
            _segment(x, a_slot, ranks_slot, h, partials, arrivals, segments, num_rows, in_features,
                     stride_x, stride_slice, stride_rank, stride_k, room_segments, index, part, parts,
                     first, end, count, MAX_RANK, NUM_SLICES, SPLIT, EVEN, PARALLEL, 32, BLOCK_T, BLOCK_K)
        else:
            _segment(x, a_slot, ranks_slot, h, partials, arrivals, segments, num_rows, in_features,
                     stride_x, stride_slice, stride_rank, stride_k, room_segments, index, part, parts,
                     first, end, count, MAX_RANK, NUM_SLICES, SPLIT, EVEN, PARALLEL, 64, BLOCK_T, BLOCK_K)


@triton.jit
def _segment(
    x, a_slot, ranks_slot, h, partials, arrivals, segments, num_rows, in_features,
    stride_x, stride_slice, stride_rank, stride_k, room_segments, index, part, parts, first, end, count,
    MAX_RANK: tl.constexpr, NUM_SLICES: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr,
    PARALLEL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """All rows of A of one segment, BLOCK_M at a time."""
    WIDTH: tl.constexpr = NUM_SLICES * MAX_RANK
    for m0 in range(0, count, BLOCK_M):
        column, m_live = _columns(ranks_slot, m0, MAX_RANK, NUM_SLICES, BLOCK_M)
        wide = column.to(tl.int64)
        p_a = a_slot + (wide // MAX_RANK) * stride_slice + (wide % MAX_RANK) * stride_rank
        for t0 in range(first, end, BLOCK_T):
            position = t0 + tl.arange(0, BLOCK_T)
            row, t_live = rows_of(segments, position, end, num_rows, room_segments)
            p_x = x + row * stride_x
            if PARALLEL:
                b_sum = _part(p_x, t_live, p_a, m_live, part, in_features, stride_k, SPLIT, EVEN, BLOCK_M, BLOCK_T, BLOCK_K)
                p_sum = partials + (part * num_rows + position)[None, :].to(tl.int64) * WIDTH + (m0 + tl.arange(0, BLOCK_M))[:, None]
                # dead rows sum to zero; a mask that may end anywhere would make every element a store of its own
                tl.store(p_sum, b_sum, mask=(m0 + tl.arange(0, BLOCK_M) < WIDTH)[:, None] & t_live[None, :])
            else:
                b_h = tl.zeros([BLOCK_M, BLOCK_T], tl.float32)
                for each in range(parts):
                    b_h += _part(p_x, t_live, p_a, m_live, each, in_features, stride_k, SPLIT, EVEN, BLOCK_M, BLOCK_T, BLOCK_K)
                _store(h, b_h, row, t_live, column, m_live, NUM_SLICES, MAX_RANK)
    if PARALLEL:
        tl.debug_barrier()  # every thread has stored its sums before the arrival is announced
        if tl.atomic_add(arrivals + index, 1, sem="acq_rel") == parts - 1:
            step = tl.full([], WIDTH, tl.int64) * num_rows
            for m0 in range(0, count, BLOCK_M):
                column, m_live = _columns(ranks_slot, m0, MAX_RANK, NUM_SLICES, BLOCK_M)
                for t0 in range(first, end, BLOCK_T):
                    position = t0 + tl.arange(0, BLOCK_T)
                    row, t_live = rows_of(segments, position, end, num_rows, room_segments)
                    p_sum = partials + position[None, :].to(tl.int64) * WIDTH + (m0 + tl.arange(0, BLOCK_M))[:, None]
                    m_sum = (m0 + tl.arange(0, BLOCK_M) < WIDTH)[:, None] & t_live[None, :]
                    b_h = tl.zeros([BLOCK_M, BLOCK_T], tl.float32)
                    for _ in tl.range(0, parts, loop_unroll_factor=4):
                        b_h += tl.load(p_sum, mask=m_sum, other=0.0, cache_modifier=".cg")
                        p_sum += step
                    _store(h, b_h, row, t_live, column, m_live, NUM_SLICES, MAX_RANK)
            tl.store(arrivals + index, 0)


@triton.jit
def _columns(ranks_slot, m0, MAX_RANK: tl.constexpr, NUM_SLICES: tl.constexpr, BLOCK_M: tl.constexpr):
    """Packed row m of A -> its column `slice * R + r` in h, and whether there is such a row. [BLOCK_M]."""
    m = m0 + tl.arange(0, BLOCK_M)
    if NUM_SLICES == 1:
        return m, m < tl.load(ranks_slot)
    column = tl.full([BLOCK_M], -1, tl.int32)
    begin = 0
    for s in tl.static_range(NUM_SLICES):
        rank = tl.load(ranks_slot + s)
        column = tl.where((m >= begin) & (m < begin + rank), m - begin + s * MAX_RANK, column)
        begin += rank
    return column, column >= 0


@triton.jit
def _part(
    p_x, t_live, p_a, m_live, part, in_features, stride_k,
    SPLIT: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The sum over one part of K, from zero. Float32 [BLOCK_M, BLOCK_T]."""
    b_sum = tl.zeros([BLOCK_M, BLOCK_T], tl.float32)
    for k0 in range(0, SPLIT, BLOCK_K):
        k = part * SPLIT + k0 + tl.arange(0, BLOCK_K)
        m_a, m_x = m_live[:, None], t_live[:, None]
        if not EVEN:
            m_a, m_x = m_a & (k < in_features)[None, :], m_x & (k < in_features)[None, :]
        b_a = tl.load(p_a[:, None] + k[None, :] * stride_k, mask=m_a, other=0.0)
        b_x = tl.load(p_x[:, None] + k[None, :], mask=m_x, other=0.0)
        b_sum = dot(b_a, tl.trans(b_x), b_sum)
    return b_sum


@triton.jit
def _store(h, b_h, row, t_live, column, m_live, NUM_SLICES: tl.constexpr, MAX_RANK: tl.constexpr):
    if NUM_SLICES == 1:
        m_live = column < MAX_RANK  # as for the sums: zeros past the rank make whole vectors
    p_h = h + row[None, :] * (NUM_SLICES * MAX_RANK) + column[:, None]
    tl.store(p_h, b_h.to(h.dtype.element_ty), mask=m_live[:, None] & t_live[None, :])
