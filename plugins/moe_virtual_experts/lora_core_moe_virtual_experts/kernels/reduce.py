"""Reduce: `out[t] (+)= sum over the pairs of row t, in order, of delta[pair]`, where there is one."""

# Triton reads the parameters of kernels itself, annotations would be noise:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl

from lora_core_moe_virtual_experts.kernels.keys import load_keys


@triton.jit
def reduce_pairs(
    p_delta,  # [P, N]
    p_ranks,  # [S] int32
    p_out,  # [T, N], changed
    p_ids,  # [P] - expert ids
    p_slots,  # [T] int32 - slots of the rows
    p_map,  # [G] - global id -> local expert
    N,
    G,
    S,
    E,
    TOP_K: tl.constexpr,
    HAS_MAP: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BN: tl.constexpr,
):
    """One row, one block of N: program (row, block)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    m_columns = columns < N
    total = tl.zeros([BN], tl.float32)
    touched = 0
    for choice in tl.static_range(TOP_K):
        pair = row * TOP_K + choice
        key = load_keys(p_ids, p_slots, p_map, pair, True, G, S, E, TOP_K, HAS_MAP)
        rank = tl.load(p_ranks + key // E, mask=key < S * E, other=0)
        m_delta = columns < tl.where(rank > 0, N, 0)
        delta = tl.load(p_delta + pair * N + columns, mask=m_delta, other=0.0)
        total += delta.to(tl.float32)
        touched += rank
    p_row = p_out + row * N + columns
    if touched > 0:
        if ACCUMULATE:
            total += tl.load(p_row, mask=m_columns, other=0.0).to(tl.float32)
        tl.store(p_row, total.to(p_out.dtype.element_ty), mask=m_columns)
    elif not ACCUMULATE:
        tl.store(p_row, tl.zeros([BN], p_out.dtype.element_ty), mask=m_columns)
