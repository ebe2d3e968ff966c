"""Expand: `out[pair, s * W + n] (+)= scaling * w[pair] * sum over r of B[key, s * W + n, r] * h[place, s, r]`.

One program makes the output of one tile for one block of one slice, and reads that part of B once.
Launched while shrink still runs, it loads B and `out` before it waits for h.
"""

# Triton reads the parameters of kernels itself, annotations would be noise:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from lora_core.triton_kit import dot
from lora_core_moe_virtual_experts.kernels.tile import load_tile


@triton.jit
def expand(
    p_h,  # [SPLITS, P, SLICES * R] float32
    p_b,  # [S, E, SLICES * W, R]
    p_ranks,  # [S, SLICES] int32
    p_scalings,  # [S, SLICES] float32
    p_weights,  # [P] - routing weights; read where ROUTED
    p_out,  # [P, SLICES * W], changed
    p_order,  # see load_tile
    p_tiles,
    p_num_tiles,
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
    ROUTED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    SLICES: tl.constexpr,
    R: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile, one block of one slice: program (tile, block, slice)."""
    tile = tl.program_id(0)
    part = tl.program_id(2)  # the slice
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    m_columns = columns < W
    key, places, pairs, m_pairs = load_tile(
        tile, p_order, p_tiles, p_num_tiles, G, S, E, TOP_K, HAS_MAP, GROUPED, BM
    )
    slot = key // E
    rank = tl.load(p_ranks + slot * SLICES + part, mask=key < S * E, other=0)
    p_rows = p_out + pairs.to(tl.int64)[:, None] * (SLICES * W) + part * W + columns[None, :]
    mask = m_pairs[:, None] & m_columns[None, :]
    if rank == 0:
        if PDL:  # a kernel after this one relies on shrink having finished
            cuda.gdc_wait()
        if not ACCUMULATE:
            tl.store(p_rows, tl.zeros([BM, BN], p_out.dtype.element_ty), mask=mask)
        return
    ranks = tl.arange(0, BR)
    m_ranks = ranks < rank
    p_b_rows = (
        p_b
        + slot.to(tl.int64) * s_slot
        + (key % E).to(tl.int64) * s_expert
        + (part * W + columns).to(tl.int64) * s_row
    )
    b_b = tl.load(
        p_b_rows[:, None] + ranks[None, :], mask=m_columns[:, None] & m_ranks[None, :], other=0.0
    )  # [BN, BR]
    factor = tl.load(p_scalings + slot * SLICES + part)
    factors = tl.full([BM], 1.0, tl.float32) * factor
    if ROUTED:
        factors *= tl.load(p_weights + pairs, mask=m_pairs, other=0.0).to(tl.float32)
    if ACCUMULATE:
        b_old = tl.load(p_rows, mask=mask, other=0.0)
    if PDL:
        cuda.gdc_wait()
    m_h = m_pairs[:, None] & m_ranks[None, :]
    h = tl.zeros([BM, BR], tl.float32)
    for split in tl.static_range(SPLITS):
        h_rows = (split * P + places).to(tl.int64) * (SLICES * R) + part * R
        h += tl.load(p_h + h_rows[:, None] + ranks[None, :], mask=m_h, other=0.0)
    acc = dot(h.to(b_b.dtype), tl.trans(b_b), tl.zeros([BM, BN], tl.float32)) * factors[:, None]
    if ACCUMULATE:
        acc += b_old.to(tl.float32)
    tl.store(p_rows, acc.to(p_out.dtype.element_ty), mask=mask)
