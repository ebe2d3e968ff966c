"""Expand: `out[pair, s * W + n] (+)= scaling * w[pair] * sum over r of B[key, s * W + n, r] * h[place, s, r]`.

One program makes the output of one part of a tile for LOOPS blocks of one slice. It loads B and `out`
AHEAD blocks before it multiplies; and launched while shrink still runs, it loads the first ones
before it waits for h. Where all experts share A, h has one entry per row (BY_ROW), not per place.
"""

# Triton reads the parameters of kernels itself, annotations would be noise:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from lora_core.triton_kit import dot
from lora_core_moe_virtual_experts.kernels.tile import load_tile


@triton.jit
def expand(
    p_h,  # [SPLITS, P, SLICES * R] float32; P counts rows where BY_ROW
    p_b,  # [S, E, SLICES * W, R]
    p_ranks,  # [S, SLICES] int32
    p_scalings,  # [S, SLICES] float32
    p_weights,  # [P] - routing weights; read where ROUTED
    p_out,  # [P, SLICES * W], changed
    p_order,  # see load_tile
    p_tiles,
    p_map,
    P,
    W,
    G,
    S,
    E,
    s_slot,  # strides of b, in elements
    s_expert,  # 0 where all experts share B
    s_row,
    TOP_K: tl.constexpr,
    HAS_MAP: tl.constexpr,
    GROUPED: tl.constexpr,
    BY_ROW: tl.constexpr,
    ROUTED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    SLICES: tl.constexpr,
    R: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    PARTS: tl.constexpr,
    BN: tl.constexpr,
    LOOPS: tl.constexpr,
    AHEAD: tl.constexpr,
    BR: tl.constexpr,
    VEC: tl.constexpr,
    PDL: tl.constexpr,
):
    """One part of a tile, LOOPS blocks of one slice: program (tile and part, blocks, slice)."""
    index = tl.program_id(0)
    s = tl.program_id(2)
    key, count, places, pairs, m_pairs = load_tile(
        index // PARTS,
        index % PARTS,
        p_order,
        p_tiles,
        p_map,
        G,
        S,
        E,
        TOP_K,
        HAS_MAP,
        GROUPED,
        BM,
    )
    if count <= 0:
        end_after_shrink(PDL)
        return
    live = key < S * E
    slot = key // E
    factor = tl.load(p_scalings + slot * SLICES + s, mask=live, other=0.0)
    rank = tl.load(p_ranks + slot * SLICES + s, mask=live, other=0)
    ranks = tl.arange(0, BR)
    m_ranks = ranks < rank
    # Whole vectors are loaded, and what lies past the slot's rank is cut off in registers: a mask
    # that ends inside a vector would make every load one element wide. Few ranks are all read, at
    # once, before the slot's own is known.
    m_vectors = ranks < tl.where(live, R, 0)
    if BR > 16:
        m_vectors = m_vectors & (ranks // VEC * VEC < rank)
    columns = tl.program_id(1) * (BN * LOOPS) + tl.arange(0, BN)
    p_rows = p_out + pairs.to(tl.int64)[:, None] * (SLICES * W) + s * W
    p_b_ranks = (
        p_b
        + slot.to(tl.int64) * s_slot
        + (key % E).to(tl.int64) * s_expert
        + (s * W).to(tl.int64) * s_row
        + ranks[None, :]
    )
    factors = tl.full([BM], 1.0, tl.float32) * factor
    if ROUTED:
        factors *= tl.load(p_weights + pairs, mask=m_pairs, other=0.0).to(tl.float32)
    b_b, b_old = _load_block(p_b_ranks, m_vectors, p_rows, m_pairs, columns, W, s_row, ACCUMULATE)
    b_b2, b_old2 = b_b, b_old
    if (AHEAD > 1) & (LOOPS > 1):
        b_b2, b_old2 = _load_block(
            p_b_ranks, m_vectors, p_rows, m_pairs, columns + BN, W, s_row, ACCUMULATE
        )
    if rank == 0:
        end_after_shrink(PDL)
        if not ACCUMULATE:
            zeros = tl.zeros([BM, BN], p_out.dtype.element_ty)
            for loop in tl.static_range(LOOPS):
                here = columns + loop * BN
                tl.store(p_rows + here[None, :], zeros, mask=m_pairs[:, None] & (here < W)[None, :])
        return

    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    if BY_ROW:
        places = pairs // TOP_K
    h = tl.zeros([BM, BR], tl.float32)
    for split in tl.static_range(SPLITS):
        h_rows = (split * P + places).to(tl.int64) * (SLICES * R) + s * R
        m_h = m_pairs[:, None] & m_ranks[None, :]
        h += tl.load(p_h + h_rows[:, None] + ranks[None, :], mask=m_h, other=0.0)
    h = h.to(p_b.dtype.element_ty)
    for loop in tl.static_range(LOOPS):
        here = columns + loop * BN
        now_b, now_old = b_b, b_old
        b_b, b_old = b_b2, b_old2
        if loop + AHEAD < LOOPS:
            b_b2, b_old2 = _load_block(
                p_b_ranks, m_vectors, p_rows, m_pairs, here + AHEAD * BN, W, s_row, ACCUMULATE
            )
            if AHEAD == 1:
                b_b, b_old = b_b2, b_old2
        now_b = tl.where(m_ranks[None, :], now_b, 0.0)
        acc = dot(h, tl.trans(now_b), tl.zeros([BM, BN], tl.float32)) * factors[:, None]
        if ACCUMULATE:
            acc += now_old.to(tl.float32)
        mask = m_pairs[:, None] & (here < W)[None, :]
        tl.store(p_rows + here[None, :], acc.to(p_out.dtype.element_ty), mask=mask)


@triton.jit
def end_after_shrink(PDL: tl.constexpr):
    """Of a program that needs no h: kernels after this one rely on shrink having ended, so one waits."""
    if PDL:  # noqa: SIM102 - a constant, and a branch
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
            cuda.gdc_wait()


@triton.jit
def _load_block(
    p_b_ranks,  # [1, BR] - the first row of the slice
    m_vectors,  # [BR]
    p_rows,  # [BM, 1] - the rows of out
    m_pairs,  # [BM]
    columns,  # [BN]
    W,
    s_row,
    ACCUMULATE: tl.constexpr,
):
    """Of one block: B [BN, BR], and out [BM, BN] where it is added to."""
    m_columns = columns < W
    b_b = tl.load(
        p_b_ranks + columns.to(tl.int64)[:, None] * s_row,
        mask=m_columns[:, None] & m_vectors[None, :],
        other=0.0,
    )
    b_old = b_b  # unused where nothing is added to
    if ACCUMULATE:
        b_old = tl.load(
            p_rows + columns[None, :], mask=m_pairs[:, None] & m_columns[None, :], other=0.0
        )
    return b_b, b_old
