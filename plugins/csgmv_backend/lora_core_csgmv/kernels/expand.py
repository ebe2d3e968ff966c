"""`out[t, n] += scale(t) * scaling[slot(t), s] * sum_r h[t, s, r] * B[slot(t), n, r]`, in place.

One unit of work is one segment and GROUP blocks of BLOCK_N columns in one slice. Ranks of 16 bits are
summed in chains of 128, whatever BLOCK_R, so the rounding of an element follows from its rank alone. With
GATHER, h is read from the rows of an embedding's A instead.
"""

# Triton reads the parameters of kernels itself, annotations would be noise:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from lora_core.triton_kit import add_product, dot
from lora_core_csgmv.kernels.work import rows_at, scale_at, segment_at


@triton.jit(do_not_specialize=["num_rows", "room"])
def expand(
    out,  # [T', N] - base output, added to
    h,  # [T', n, R] float32 or dtype of b; with GATHER: a, [S, V, R]
    ids,  # [T'] integers, with GATHER: the row of a for each token
    b,  # [S, N, R] - stacked B, any strides
    ranks,  # [S, n] int32
    scalings,  # [S, n] float32
    segments,  # block of segments
    room,  # segments that the block has room for
    num_rows,  # T'
    stride_out,
    stride_h_slot,  # with GATHER: between slots of a
    stride_h,  # between tokens; with GATHER: between vocabulary entries
    stride_h_rank,
    stride_slot,
    stride_n,
    stride_rank,
    MAX_RANK: tl.constexpr,
    WIDTHS: tl.constexpr,  # tuple - columns of each slice
    GATHER: tl.constexpr,
    OVERTAKES: tl.constexpr,  # may start before the kernels it depends on have finished
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,  # ranks at a time; adapters of rank up to 16 take 16
    GROUP: tl.constexpr,
):
    """Grid: any number of programs; each takes every `num_programs`-th unit of work."""
    NUM_SLICES: tl.constexpr = len(WIDTHS)
    STEP: tl.constexpr = BLOCK_N * GROUP
    tiles = 0
    for s in tl.static_range(NUM_SLICES):
        tiles += (WIDTHS[s] + STEP - 1) // STEP
    count = tl.load(segments)
    first, end, slot = segment_at(segments, tl.program_id(0) // tiles, room)
    unit = tl.program_id(0)
    while unit < count * tiles:
        # the slice `this` that the tile lies in, its first column n0, and the end of the slice
        tile = unit % tiles
        this = 0
        n0 = tile * STEP
        n_end = 0 + WIDTHS[0]
        tiles_before = 0
        begin = 0
        for s in tl.static_range(1, NUM_SLICES):
            tiles_before += (WIDTHS[s - 1] + STEP - 1) // STEP
            begin += WIDTHS[s - 1]
            reached = tile >= tiles_before
            this = tl.where(reached, s, this)
            n0 = tl.where(reached, begin + (tile - tiles_before) * STEP, n0)
            n_end = tl.where(reached, begin + WIDTHS[s], n_end)
        rank = tl.load(ranks + slot * NUM_SLICES + this)
        factor = tl.load(scalings + slot * NUM_SLICES + this)
        factor *= scale_at(segments, unit // tiles, room)
        p_b = b + slot * stride_slot
        p_h = h + slot * stride_h_slot + this * MAX_RANK
        for t0 in range(first, end, BLOCK_T):
            row, t_live = rows_at(segments, t0 + tl.arange(0, BLOCK_T), end, num_rows, room)
            rows = row, t_live
            tensors = out, p_h, ids, p_b
            strides = stride_out, stride_h, stride_h_rank, stride_n, stride_rank
            work = rank, factor, n0, n_end
            if rank > 0:
                if BLOCK_R == 16 or rank <= 16:
                    _columns(
                        tensors,
                        strides,
                        work,
                        rows,
                        MAX_RANK,
                        GATHER,
                        OVERTAKES,
                        BLOCK_T,
                        BLOCK_N,
                        GROUP,
                        16,
                        BLOCK_R == 16,
                    )
                else:
                    _columns(
                        tensors,
                        strides,
                        work,
                        rows,
                        MAX_RANK,
                        GATHER,
                        OVERTAKES,
                        BLOCK_T,
                        BLOCK_N,
                        GROUP,
                        BLOCK_R,
                        True,
                    )
        unit += tl.num_programs(0)
        first, end, slot = segment_at(segments, unit // tiles, room)


@triton.jit
def _columns(
    tensors,
    strides,
    work,
    rows,
    MAX_RANK: tl.constexpr,
    GATHER: tl.constexpr,
    OVERTAKES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    MORE: tl.constexpr,  # the rank may exceed BLOCK_R
):
    """GROUP blocks of columns for BLOCK_T rows; what the next block reads is asked for ahead."""
    CHAIN: tl.constexpr = 128  # ranks of 16 bits that are summed in one go: part of the rounding
    out, p_h, ids, p_b = tensors
    stride_out, stride_h, stride_h_rank, stride_n, stride_rank = strides
    rank, factor, n0, n_end = work
    row, t_live = rows
    r = tl.arange(0, BLOCK_R)
    n = n0 + tl.arange(0, BLOCK_N)
    b_b = _load_b(p_b, n, n_end, r, rank, stride_n, stride_rank)
    if OVERTAKES:
        cuda.gdc_wait()  # B and the batch are older than the kernels before; h and out are their results
    if GATHER:
        p_token = p_h + tl.load(ids + row, mask=t_live, other=0).to(tl.int64) * stride_h
    else:
        p_token = p_h + row * stride_h
    b_h = _load_h(p_token, t_live, r, rank, stride_h_rank, MAX_RANK).to(b_b.dtype)
    p_out = out + row * stride_out
    b_out = tl.load(
        p_out[:, None] + n[None, :], mask=t_live[:, None] & (n < n_end)[None, :], other=0.0
    )
    for g in tl.static_range(GROUP):
        if g + 1 < GROUP:
            n_next = n0 + (g + 1) * BLOCK_N + tl.arange(0, BLOCK_N)
            next_b = _load_b(p_b, n_next, n_end, r, rank, stride_n, stride_rank)
            m_next = t_live[:, None] & (n_next < n_end)[None, :]
            next_out = tl.load(p_out[:, None] + n_next[None, :], mask=m_next, other=0.0)
        b_sum = add_product(b_h, b_b, tl.zeros([BLOCK_T, BLOCK_N], tl.float32))
        if MORE and MAX_RANK > BLOCK_R:
            b_before = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)  # chains that are complete
            for r0 in range(BLOCK_R, rank, BLOCK_R):
                b_more = _load_b(p_b, n, n_end, r0 + r, rank, stride_n, stride_rank)
                h_more = _load_h(p_token, t_live, r0 + r, rank, stride_h_rank, MAX_RANK)
                if b_more.dtype == tl.float32:
                    b_sum = add_product(h_more, b_more, b_sum)
                else:
                    if MAX_RANK > CHAIN:  # noqa: SIM102 - decided when it is compiled
                        if r0 % CHAIN == 0:
                            b_before += b_sum
                            b_sum = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
                    b_sum = dot(h_more.to(b_more.dtype), b_more, b_sum)
            b_sum += b_before
        b_new = tl.fma(b_sum, tl.full([BLOCK_T, BLOCK_N], factor, tl.float32), b_out.to(tl.float32))
        m_out = t_live[:, None] & (n < n_end)[None, :]
        tl.store(p_out[:, None] + n[None, :], b_new.to(b_out.dtype), mask=m_out)
        if g + 1 < GROUP:
            n, b_b, b_out = n_next, next_b, next_out


@triton.jit
def _load_b(p_b, n, n_end, r, rank, stride_n, stride_rank):
    """B at ranks `r` and columns `n`, zero at and past `rank`; [BLOCK_R, BLOCK_N]."""
    p = p_b + r[:, None] * stride_rank + n.to(tl.int64)[None, :] * stride_n
    return tl.load(p, mask=(r < rank)[:, None] & (n < n_end)[None, :], other=0.0)


@triton.jit
def _load_h(p_token, t_live, r, rank, stride_h_rank, MAX_RANK: tl.constexpr):
    """Tokens of h at ranks `r`, zero at and past `rank`; [BLOCK_T, BLOCK_R].

    What lies past the rank is replaced after the load, not masked in it: a mask that may end
    anywhere would make every element a load of its own.
    """
    mask = t_live[:, None] & (r < MAX_RANK)[None, :]
    b_h = tl.load(p_token[:, None] + r[None, :] * stride_h_rank, mask=mask, other=0.0)
    return tl.where((r < rank)[None, :], b_h, 0.0)
