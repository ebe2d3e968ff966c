"""Shrink: `h[split, place, s * R + r] = sum over k of one split of A[key, s, r, k] * x[row, k]`.

One program multiplies the rows of one tile with the live rows of its virtual expert's A over one
split of K. The splits are summed by expand, in fixed order. Where all experts of an adapter share A,
the tiles are of rows, not of pairs (TOP_K of 0), and h has one entry per row, in the rows' order.
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
def shrink(
    p_x,  # [T, K], or [P, K] where PAIRS - rows
    p_a,  # [S, E, slices, R, K]
    p_ranks,  # [S, slices] int32
    p_h,  # [SPLITS, P, slices * R] float32, out; P counts rows where TOP_K is 0
    p_order,  # see load_tile
    p_tiles,
    p_map,
    P,
    K,
    G,
    S,
    E,
    s_x,  # strides, in elements
    s_slot,
    s_expert,  # 0 where all experts share A
    s_slice,
    s_rank,
    TOP_K: tl.constexpr,
    HAS_MAP: tl.constexpr,
    GROUPED: tl.constexpr,
    PAIRS: tl.constexpr,
    SLICES: tl.constexpr,
    R: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile, one split of K, one block of h: program (tile, split, block)."""
    if PDL:  # whatever ran before has finished; expand may be put in place meanwhile
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    key, count, places, pairs, m_pairs = load_tile(
        tile, 0, p_order, p_tiles, p_map, G, S, E, TOP_K, HAS_MAP, GROUPED, BM
    )
    if (key >= S * E) | (count <= 0):
        return
    slot = key // E
    columns = tl.program_id(2) * BC + tl.arange(0, BC)  # of h: slice and rank
    slices = columns // R
    ranks = tl.load(p_ranks + slot * SLICES + slices, mask=slices < SLICES, other=0)
    m_columns = columns % R < ranks
    m_a = slices < SLICES  # of few ranks all are read, before the slot's own are known
    if R > 16:
        m_a = m_columns
        if tl.max(ranks, 0) == 0:
            return
    rows = pairs
    if TOP_K == 0:
        places = pairs
    elif not PAIRS:
        rows = pairs // TOP_K
    p_rows = p_x + rows.to(tl.int64) * s_x
    p_a_rows = (
        p_a
        + slot.to(tl.int64) * s_slot
        + (key % E).to(tl.int64) * s_expert
        + slices.to(tl.int64) * s_slice
        + (columns % R) * s_rank
    )
    per_split = tl.cdiv(tl.cdiv(K, BK), SPLITS) * BK
    first = split * per_split
    acc = tl.zeros([BM, BC], tl.float32)
    for start in range(first, min(first + per_split, K), BK):
        ks = start + tl.arange(0, BK)
        m_ks = ks < K
        b_x = tl.load(
            p_rows[:, None] + ks[None, :], mask=m_pairs[:, None] & m_ks[None, :], other=0.0
        )
        b_a = tl.load(p_a_rows[:, None] + ks[None, :], mask=m_a[:, None] & m_ks[None, :], other=0.0)
        acc = dot(b_x, tl.trans(b_a), acc)  # [BM, BC]
    h_rows = (split * P + places).to(tl.int64) * (SLICES * R)
    mask = m_pairs[:, None] & m_columns[None, :]
    tl.store(p_h + h_rows[:, None] + columns[None, :], acc, mask=mask)
