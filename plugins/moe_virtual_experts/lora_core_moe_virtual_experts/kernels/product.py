"""The base's own product: `out[pair, n] = sum over k of W[expert, n, k] * x[row, k]`.

INT4: W is packed, two values a byte, the even one low, each `(nibble - 8) * scale` with a scale per
GROUP values of k; it is unpacked where it is multiplied. Pairs without an expert of this rank get 0.
"""

# Triton reads the parameters of kernels itself, annotations would be noise:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl

from lora_core.triton_kit import dot
from lora_core_moe_virtual_experts.kernels.tile import load_tile


@triton.jit
def experts_product(
    p_x,  # [T, K], or [P, K] where PAIRS - rows
    p_w,  # [E, N, K]; INT4: uint8 [E, N, K / 2]
    p_scales,  # INT4: [E, N, K / GROUP]
    p_out,  # [P, N], written
    p_order,  # see load_tile; all slots are 0
    p_tiles,
    K,
    N,
    E,
    s_x,  # stride, in elements
    TOP_K: tl.constexpr,
    PAIRS: tl.constexpr,
    INT4: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """One tile, one block of N: program (tile, block)."""
    expert, count, _places, pairs, m_pairs = load_tile(
        tl.program_id(0), 0, p_order, p_tiles, p_order, 0, 1, E, TOP_K, False, True, BM
    )
    if count <= 0:
        return
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    m_columns = columns < tl.where(expert < E, N, 0)
    rows = pairs if PAIRS else pairs // TOP_K
    p_rows = p_x + rows.to(tl.int64) * s_x
    w_rows = expert.to(tl.int64) * N + columns
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        ks = start + tl.arange(0, BK)
        m_ks = ks < K
        b_x = tl.load(
            p_rows[:, None] + ks[None, :], mask=m_pairs[:, None] & m_ks[None, :], other=0.0
        )
        m_w = m_columns[:, None] & m_ks[None, :]
        if INT4:
            places = w_rows[:, None] * (K // 2) + (ks // 2)[None, :]
            packed = tl.load(p_w + places, mask=m_w, other=0).to(tl.int32)
            nibbles = (packed >> ((ks % 2) * 4)[None, :]) & 15
            places = w_rows[:, None] * (K // GROUP) + (ks // GROUP)[None, :]
            scales = tl.load(p_scales + places, mask=m_w, other=0.0).to(tl.float32)
            b_w = ((nibbles - 8).to(tl.float32) * scales).to(b_x.dtype)
        else:
            b_w = tl.load(p_w + w_rows[:, None] * K + ks[None, :], mask=m_w, other=0.0)
        acc = dot(b_x, tl.trans(b_w), acc)
    mask = m_pairs[:, None] & (columns < N)[None, :]
    p_here = p_out + pairs.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(p_here, acc.to(p_out.dtype.element_ty), mask=mask)
