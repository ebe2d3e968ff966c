"""`h[t, s, r] = sum_k x[t, k] * A[slot(t), s, r, k]`, for all slices at once.

Rows of A that count, those below the rank of their slice, are packed: a q|k|v adapter of rank 16 is
48 rows of one product, and x is read once. One unit of work is one segment and up to 64 such rows,
and with PARALLEL one part of K.

K is cut into parts of SPLIT, each the sum of chains of at most 128 inputs (of one block in float32,
see `lora_core.triton_kit.dot`), and the parts' sums are added in ascending order:
either by one program, or by as many programs as there are parts, of which the last to arrive adds
what all have left in `partials`. Both give the same bits, which follow from K alone.
"""

# Triton reads the parameters of kernels itself, annotations would be noise:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import triton
import triton.language as tl

from lora_core.triton_kit import add_product, dot
from lora_core_csgmv.kernels.work import rows_at, segment_at

ROWS_OF_A = tl.constexpr(64)
"""Packed rows of A in one unit of work, at most."""


@triton.jit(do_not_specialize=["num_rows", "room"])
def shrink(
    x,  # [T', K] - rows of the batch
    a,  # [S, n, R, K] - stacked A
    ranks,  # [S, n] int32
    h,  # [T', n, R] float32 or dtype of x - result
    partials,  # [parts, T', n * R] float32 - what each part of K sums to; unused unless PARALLEL
    arrivals,  # int32 - zero between launches; unused unless PARALLEL
    segments,  # block of segments
    room,  # segments that the block has room for
    num_rows,  # T'
    in_features,  # K
    stride_x,
    stride_slot,
    stride_slice,
    stride_rank,
    stride_k,
    MAX_RANK: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,  # SPLIT divides K
    PARALLEL: tl.constexpr,  # a part of K per program
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid: any number of programs; each takes every `num_programs`-th unit of work."""
    WIDTH: tl.constexpr = NUM_SLICES * MAX_RANK
    BLOCKS: tl.constexpr = (WIDTH + ROWS_OF_A - 1) // ROWS_OF_A
    parts = tl.cdiv(in_features, SPLIT)
    share = BLOCKS  # units of one segment
    if PARALLEL:
        share = BLOCKS * parts
    count = tl.load(segments)
    first, end, slot = segment_at(segments, tl.program_id(0) // share, room)
    unit = tl.program_id(0)
    while unit < count * share:
        block = unit % BLOCKS
        part = unit % share // BLOCKS
        m0 = block * ROWS_OF_A
        ranks_slot = ranks + slot * NUM_SLICES
        live = 0 - m0  # rows of A that count, from m0 on
        for s in tl.static_range(NUM_SLICES):
            live += tl.load(ranks_slot + s)
        tensors = x, a + slot * stride_slot, ranks_slot, h, partials
        axis = in_features, stride_k, part, parts
        strides = stride_x, stride_slice, stride_rank
        for t0 in range(first, end, BLOCK_T):
            position = t0 + tl.arange(0, BLOCK_T)
            row, t_live = rows_at(segments, position, end, num_rows, room)
            rows = row, t_live, position, num_rows
            arrival = arrivals + t0 * BLOCKS + block
            if live > 0:
                if WIDTH <= 16:
                    _tile(
                        tensors,
                        axis,
                        strides,
                        rows,
                        m0,
                        arrival,
                        MAX_RANK,
                        NUM_SLICES,
                        SPLIT,
                        EVEN,
                        PARALLEL,
                        16,
                        BLOCK_T,
                        BLOCK_K,
                    )
                elif WIDTH <= 32 or live <= 32:
                    _tile(
                        tensors,
                        axis,
                        strides,
                        rows,
                        m0,
                        arrival,
                        MAX_RANK,
                        NUM_SLICES,
                        SPLIT,
                        EVEN,
                        PARALLEL,
                        32,
                        BLOCK_T,
                        BLOCK_K,
                    )
                else:
                    _tile(
                        tensors,
                        axis,
                        strides,
                        rows,
                        m0,
                        arrival,
                        MAX_RANK,
                        NUM_SLICES,
                        SPLIT,
                        EVEN,
                        PARALLEL,
                        64,
                        BLOCK_T,
                        BLOCK_K,
                    )
        unit += tl.num_programs(0)
        first, end, slot = segment_at(segments, unit // share, room)


@triton.jit
def _tile(
    tensors,
    axis,
    strides,
    rows,
    m0,
    arrival,
    MAX_RANK: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    PARALLEL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_M packed rows of A for BLOCK_T rows of x."""
    x, a_slot, ranks_slot, h, partials = tensors
    in_features, stride_k, part, parts = axis
    stride_x, stride_slice, stride_rank = strides
    row, t_live, position, num_rows = rows
    WIDTH: tl.constexpr = NUM_SLICES * MAX_RANK
    STEPS: tl.constexpr = SPLIT // BLOCK_K
    CHAIN_STEPS: tl.constexpr = min(128, SPLIT) // BLOCK_K
    ONE_BY_ONE: tl.constexpr = (CHAIN_STEPS <= 1) | (x.dtype.element_ty == tl.float32)
    m = m0 + tl.arange(0, BLOCK_M)
    column, m_live = _columns(ranks_slot, m, MAX_RANK, NUM_SLICES, BLOCK_M)
    wide = column.to(tl.int64)
    p_a = a_slot + (wide // MAX_RANK) * stride_slice + (wide % MAX_RANK) * stride_rank
    p_x = x + row * stride_x
    first_step = 0
    last_step = STEPS * parts
    if PARALLEL:
        first_step = STEPS * part
        last_step = first_step + STEPS
    b_h = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    b_sum = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    b_chain = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    for step in range(first_step, last_step):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        m_x, m_a = t_live[:, None], m_live[:, None]
        if not EVEN:
            m_x, m_a = m_x & (k < in_features)[None, :], m_a & (k < in_features)[None, :]
        b_x = tl.load(p_x[:, None] + k[None, :], mask=m_x, other=0.0)
        b_a = tl.load(p_a[:, None] + k[None, :] * stride_k, mask=m_a, other=0.0)
        if ONE_BY_ONE:
            b_sum = add_product(b_x, tl.trans(b_a), b_sum)
        else:
            b_chain = dot(b_x, tl.trans(b_a), b_chain)
            complete = step % CHAIN_STEPS == CHAIN_STEPS - 1
            b_sum = tl.where(complete, b_sum + b_chain, b_sum)
            b_chain = tl.where(complete, 0.0, b_chain)
        if not PARALLEL:
            complete = step % STEPS == STEPS - 1
            b_h = tl.where(complete, b_h + b_sum, b_h)
            b_sum = tl.where(complete, 0.0, b_sum)
    if PARALLEL:
        # dead rows of A sum to zero and are stored too: a mask that may end anywhere would make every
        # element a store of its own
        m_sum = t_live[:, None] & (m < WIDTH)[None, :]
        p_sum = partials + position[:, None].to(tl.int64) * WIDTH + m[None, :]
        size = tl.full([], WIDTH, tl.int64) * num_rows  # of one part
        tl.store(p_sum + part * size, b_sum, mask=m_sum)
        tl.debug_barrier()  # every thread has stored its sums before the arrival is announced
        if tl.atomic_add(arrival, 1, sem="acq_rel") == parts - 1:
            b_part = tl.load(p_sum, mask=m_sum, other=0.0, cache_modifier=".cg")
            for i in range(1, parts):
                b_next = tl.load(p_sum + i * size, mask=m_sum, other=0.0, cache_modifier=".cg")
                b_h += b_part
                b_part = b_next
            b_h += b_part
            _store(h, b_h, row, t_live, column, m_live, MAX_RANK, NUM_SLICES)
            tl.store(arrival, 0)
    else:
        _store(h, b_h, row, t_live, column, m_live, MAX_RANK, NUM_SLICES)


@triton.jit
def _columns(
    ranks_slot, m, MAX_RANK: tl.constexpr, NUM_SLICES: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Packed row m of A -> its column `slice * R + r` in h, and whether there is one; [BLOCK_M]."""
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
def _store(h, b_h, row, t_live, column, m_live, MAX_RANK: tl.constexpr, NUM_SLICES: tl.constexpr):
    """Write `b_h` to its rows and columns of h."""
    if NUM_SLICES == 1:
        m_live = column < MAX_RANK  # as for the sums: zeros past the rank make whole vectors
    p_h = h + row[:, None] * (NUM_SLICES * MAX_RANK) + column[None, :]
    tl.store(p_h, b_h.to(h.dtype.element_ty), mask=t_live[:, None] & m_live[None, :])
