"""Expand of pairs that were not sorted: the formula of `expand`, one pair and one block of N a program.

A product with one row has nothing for the tensor cores to share: every row of B is multiplied with h
and summed in registers, in float32. All of a program's loads but h are on their way before it waits.
"""

# Triton reads the parameters of kernels itself, annotations would be noise:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from lora_core_moe_virtual_experts.kernels.expand import end_after_shrink
from lora_core_moe_virtual_experts.kernels.keys import load_keys


@triton.jit
def expand_pair(
    p_h,  # [SPLITS, P, SLICES * R] float32; P counts rows where BY_ROW
    p_b,  # [S, E, SLICES * W, R]
    p_ranks,  # [S, SLICES] int32
    p_scalings,  # [S, SLICES] float32
    p_weights,  # [P] - routing weights; read where ROUTED
    p_out,  # [P, SLICES * W], changed
    p_ids,  # [P] - expert ids
    p_slots,  # [T] int32 - slots of the rows
    p_map,  # [G] - global id -> local expert
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
    BY_ROW: tl.constexpr,
    ROUTED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    SLICES: tl.constexpr,
    R: tl.constexpr,
    SPLITS: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    VEC: tl.constexpr,
    PDL: tl.constexpr,
):
    """One pair, one block of one slice: program (pair, block, slice)."""
    pair = tl.program_id(0)
    s = tl.program_id(2)
    key = load_keys(p_ids, p_slots, p_map, pair, True, G, S, E, TOP_K, HAS_MAP)
    live = key < S * E
    slot = key // E
    rank = tl.load(p_ranks + slot * SLICES + s, mask=live, other=0)
    ranks = tl.arange(0, BR)
    m_ranks = ranks < rank
    m_vectors = ranks < tl.where(live, R, 0)  # whole vectors, see expand
    if BR > 16:
        m_vectors = m_vectors & (ranks // VEC * VEC < rank)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    m_columns = columns < W
    p_row = p_out + pair.to(tl.int64) * (SLICES * W) + s * W + columns
    p_b_rows = (
        p_b
        + slot.to(tl.int64) * s_slot
        + (key % E).to(tl.int64) * s_expert
        + (s * W + columns).to(tl.int64) * s_row
    )
    b_b = tl.load(
        p_b_rows[:, None] + ranks[None, :], mask=m_columns[:, None] & m_vectors[None, :], other=0.0
    )
    if ACCUMULATE:
        b_old = tl.load(p_row, mask=columns < tl.where(live, W, 0), other=0.0)
    factor = tl.load(p_scalings + slot * SLICES + s, mask=live, other=0.0)
    if ROUTED:
        factor *= tl.load(p_weights + pair).to(tl.float32)
    if rank == 0:
        end_after_shrink(PDL)
        if not ACCUMULATE:
            tl.store(p_row, tl.zeros([BN], p_out.dtype.element_ty), mask=m_columns)
        return
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    place = pair
    if BY_ROW:
        place = pair // TOP_K
    h = tl.zeros([BR], tl.float32)
    for split in tl.static_range(SPLITS):
        p_h_row = p_h + (split * P + place).to(tl.int64) * (SLICES * R) + s * R
        h += tl.where(m_ranks, tl.load(p_h_row + ranks, mask=m_vectors, other=0.0), 0.0)
    products = tl.where(m_ranks[None, :], b_b, 0.0).to(tl.float32) * h[None, :]
    acc = tl.sum(products, 1) * factor
    if ACCUMULATE:
        acc += b_old.to(tl.float32)
    tl.store(p_row, acc.to(p_out.dtype.element_ty), mask=m_columns)
