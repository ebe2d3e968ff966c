"""Combine: `out[t] = sum over the pairs of row t, in order, of weight[pair] * x[pair]`."""

# Triton reads the parameters of kernels itself, annotations would be noise:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def combine_pairs(
    p_x,  # [P, N]
    p_weights,  # [P]
    p_out,  # [T, N], written
    N,
    TOP_K: tl.constexpr,
    BN: tl.constexpr,
):
    """One row, one block of N: program (row, block)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    m_columns = columns < N
    total = tl.zeros([BN], tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = row * TOP_K + choice
        factor = tl.load(p_weights + pair).to(tl.float32)
        total += (
            tl.load(p_x + pair * N + columns, mask=m_columns, other=0.0).to(tl.float32) * factor
        )
    tl.store(p_out + row * N + columns, total.to(p_out.dtype.element_ty), mask=m_columns)
