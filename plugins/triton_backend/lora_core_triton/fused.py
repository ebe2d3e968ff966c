"""product: `out = x @ W^T + bias + h' @ B^T`, the base product with the expand inside.

    h'[t, r] = scale(t) * scaling[slot(t), s] * h[t, s, r]      rounded to the dtype of x
    out[t, c] = sum_k x[t, k] W[c, k] + bias[c] + sum_r h'[t, r] B[slot(t), c, r]

s is the slice that column c belongs to, r stays below the rank of (slot, s). A persistent product fed by
tensor descriptors, which writes the output once and never reads it. A tile of rows that lies within
one request adds that request's delta to its accumulator; the loads that this takes stand in front of
the tile's own product, which hides them. Rows of tiles that several requests share, or that end in
padding, are left to `seams_kernel`, which adds to the rows of one request alone: no value of a
neighbour can reach them. Which tiles those are depends on the lengths of the requests, never on adapters.
"""

# Triton reads the parameters of kernels itself, annotations would be noise:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202, D103

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lora_core.triton_kit import INTERPRETED, Launch, Tile, dot
from lora_core.weights import LoRAWeights, SliceLayout
from lora_core_triton.fused_plan import Plan

_SEAM_COLUMNS = (16, 1) if INTERPRETED else (128, 4)
"""Columns of a block of a seam, and blocks of one program: most programs of a graph find no seam."""


@triton.jit
def _place(tile, row_tiles, BAND: tl.constexpr, COLUMNS: tl.constexpr):
    """(row tile, column tile): BAND row tiles are done together for all columns, for the cache."""
    band, at = tile // (BAND * COLUMNS), tile % (BAND * COLUMNS)
    in_band = tl.maximum(tl.minimum(row_tiles - band * BAND, BAND), 1)  # past the end: any
    return band * BAND + at % in_band, at // in_band


@triton.jit
def _delta_of(
    row_tile, column_tile, h, b, ranks, scalings, plan, num_planned, h_row, h_slice, b_slot, b_column,
    OFFSETS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Of a tile: its rank, 0 for none; its factor; pointers to h [BM, 1] and B [1, BN]; columns there are."""
    NUM_SLICES: tl.constexpr = len(OFFSETS) - 1
    column = column_tile * BN
    s = 0
    for i in tl.static_range(1, NUM_SLICES):
        s += (column >= OFFSETS[i]).to(tl.int32)
    planned = row_tile < num_planned
    slot = tl.load(plan + row_tile * 2, mask=planned, other=-1)
    scale = tl.load(plan + row_tile * 2 + 1, mask=planned, other=0).to(tl.float32, bitcast=True)
    rank = tl.load(ranks + slot * NUM_SLICES + s, mask=slot >= 0, other=0)
    scaling = tl.load(scalings + slot * NUM_SLICES + s, mask=slot >= 0, other=0.0)
    factor = tl.where(rank > 0, scale * scaling, 0.0)  # the scale of a dead tile may be NaN
    o_m, o_n = row_tile * BM + tl.arange(0, BM), column + tl.arange(0, BN)
    p_h = h + o_m.to(tl.int64)[:, None] * h_row + s * h_slice
    p_b = b + slot.to(tl.int64) * b_slot + o_n.to(tl.int64)[None, :] * b_column
    return rank, factor, p_h, p_b, (o_n < OFFSETS[NUM_SLICES])[None, :]


@triton.jit
def _ranks_of(r0, rank, p_h, p_b, b_rank, m_n, BR: tl.constexpr):
    """BR ranks of h [BM, BR] and B [BR, BN], zero from `rank` on."""
    r = r0 + tl.arange(0, BR)
    b_h = tl.load(p_h + r[None, :], mask=(r < rank)[None, :], other=0.0)
    b_b = tl.load(p_b + r.to(tl.int64)[:, None] * b_rank, mask=(r < rank)[:, None] & m_n, other=0.0)
    return b_h, b_b


@triton.jit(do_not_specialize=["num_rows", "num_planned"])
def product_kernel(
    h,  # float32 [T', n, R]
    x_desc,  # [T', K]
    w_desc,  # [N, K]
    out_desc,  # [T', N]
    bias,  # [N]
    b,  # [S, N, R]
    ranks,  # int32 [S, n]
    scalings,  # float32 [S, n]
    plan,  # int32 [tiles, 2] - slot of a tile of rows, -1: none, or several; bits of its scale
    num_rows,
    num_planned,  # tiles of the plan; those past it are padding
    K,
    h_row,
    h_slice,
    b_slot,
    b_column,
    b_rank,
    OFFSETS: tl.constexpr,  # first column of each slice, and the end
    HAS_BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,  # ranks of a block past the first 16
    BAND: tl.constexpr,
    HALVES: tl.constexpr,  # a tile is stored in two halves, which takes less shared memory
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
):
    N: tl.constexpr = OFFSETS[len(OFFSETS) - 1]
    COLUMNS: tl.constexpr = (N + BN - 1) // BN
    row_tiles = tl.cdiv(num_rows, BM)
    next_row, next_column = _place(tl.program_id(0), row_tiles, BAND, COLUMNS)
    rank, factor, p_h, p_b, m_n = _delta_of(
        next_row, next_column, h, b, ranks, scalings, plan, num_planned, h_row, h_slice, b_slot, b_column,
        OFFSETS, BM, BN,
    )  # fmt: skip
    b_h, b_b = _ranks_of(0, rank, p_h, p_b, b_rank, m_n, 16)
    for tile in range(tl.program_id(0), row_tiles * COLUMNS, PROGRAMS):
        row, column = next_row * BM, next_column * BN
        # first of all the delta: a product behind the loop would serialise the products inside
        acc = dot((b_h * factor).to(b_b.dtype), b_b, tl.zeros((BM, BN), tl.float32))
        for r in range(16, rank, BR):
            more_h, more_b = _ranks_of(r, rank, p_h, p_b, b_rank, m_n, BR)
            acc = dot((more_h * factor).to(more_b.dtype), more_b, acc)
        # the next tile's loads are hidden by this tile's product
        next_row, next_column = _place(tile + PROGRAMS, row_tiles, BAND, COLUMNS)
        rank, factor, p_h, p_b, m_n = _delta_of(
            next_row, next_column, h, b, ranks, scalings, plan, num_planned, h_row, h_slice, b_slot, b_column,
            OFFSETS, BM, BN,
        )  # fmt: skip
        b_h, b_b = _ranks_of(0, rank, p_h, p_b, b_rank, m_n, 16)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            acc = dot(x_desc.load([row, k]), w_desc.load([column, k]).T, acc)
        if HAS_BIAS:
            o_n = column + tl.arange(0, BN)
            acc += tl.load(bias + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
        if HALVES:
            left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
            out_desc.store([row, column], left.to(out_desc.dtype))
            out_desc.store([row, column + BN // 2], right.to(out_desc.dtype))
        else:
            out_desc.store([row, column], acc.to(out_desc.dtype))


@triton.jit
def seams_kernel(
    out,  # [T', N] - added to in place
    h,  # float32 [T', n, R]
    b,  # [S, N, R]
    ranks,  # int32 [S, n]
    scalings,  # float32 [S, n]
    seams,  # int32 [seams, 4] - slot (-1: none), first row, end, bits of the scale
    out_row,
    h_row,
    h_slice,
    b_slot,
    b_column,
    b_rank,
    OFFSETS: tl.constexpr,  # first column of each slice, and the end
    BM: tl.constexpr,  # rows of a seam at most
    BN: tl.constexpr,
    BLOCKS: tl.constexpr,  # of BN columns for one program
):
    NUM_SLICES: tl.constexpr = len(OFFSETS) - 1
    p_seam = seams + tl.program_id(1) * 4
    slot = tl.load(p_seam)
    if slot < 0:
        return
    begin, end = tl.load(p_seam + 1), tl.load(p_seam + 2)
    scale = tl.load(p_seam + 3).to(tl.float32, bitcast=True)
    o_m, o_r = begin + tl.arange(0, BM), tl.arange(0, 16)
    own = (o_m < end)[:, None]
    for i in range(BLOCKS):
        column = (tl.program_id(0) * BLOCKS + i) * BN
        s = 0
        for j in tl.static_range(1, NUM_SLICES):
            s += (column >= OFFSETS[j]).to(tl.int32)
        o_n = column + tl.arange(0, BN)
        m_n = (o_n < OFFSETS[NUM_SLICES])[None, :]
        rank = tl.load(ranks + slot * NUM_SLICES + s)
        factor = tl.load(scalings + slot * NUM_SLICES + s) * scale
        if rank > 0:
            p_out = out + o_m.to(tl.int64)[:, None] * out_row + o_n[None, :]
            p_h = h + o_m.to(tl.int64)[:, None] * h_row + s * h_slice
            p_b = b + slot.to(tl.int64) * b_slot + o_n.to(tl.int64)[None, :] * b_column
            b_out = tl.load(p_out, mask=own & m_n, other=0.0).to(tl.float32)
            delta = tl.zeros((BM, BN), tl.float32)
            for r0 in range(0, rank, 16):
                r = r0 + o_r
                b_h = tl.load(p_h + r[None, :], mask=own & (r < rank)[None, :], other=0.0)
                b_b = tl.load(p_b + r[:, None] * b_rank, mask=(r < rank)[:, None] & m_n, other=0.0)
                delta = dot((b_h * factor).to(b_b.dtype), b_b, delta)
            tl.store(p_out, (b_out + delta).to(out.dtype.element_ty), mask=own & m_n)


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    h: Tensor | None,
    weights: LoRAWeights,
    plan: Plan,
    tile: Tile,
) -> Tensor:
    """Launch the product, and the seams behind it.

    Args:
        x: [T', K].
        weight: [N, K] of the base.
        bias: [N] of the base, or None.
        h: float32 [rows, n, R], of `shrink`, at least T' rows; None: the batch has no adapter.
        weights: of the site.
        plan: of the batch.
        tile: how to launch.

    Returns:
        [T', N].
    """
    rows, k = x.shape
    b, layout = weights.b, weights.layout
    n = layout.out_features
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    bm, bn, bk = tile["BM"], tile["BN"], tile["BK"]
    programs = _programs(x.device)
    strides = (0, 0) if h is None else (h.stride(0), h.stride(1))
    _product(tile, layout, bias is not None, programs, x.dtype)(
        (programs, 1, 1),
        weights.scalings if h is None else h,
        TensorDescriptor.from_tensor(x, [bm, bk]),
        TensorDescriptor.from_tensor(weight, [bn, bk]),
        TensorDescriptor.from_tensor(out, [bm, bn // 2 if tile["HALVES"] else bn]),
        *(out if bias is None else bias, b, weights.ranks, weights.scalings, plan.tiles),
        *(rows, 0 if h is None else len(plan.tiles), k, *strides),
        *(b.stride(0), b.stride(1), b.stride(2)),
    )
    if h is not None and len(plan.seams):
        step, blocks = _SEAM_COLUMNS
        _seams(layout, bm)(
            (triton.cdiv(n, step * blocks), len(plan.seams), 1),
            *(out, h, b, weights.ranks, weights.scalings, plan.seams, out.stride(0), *strides),
            *(b.stride(0), b.stride(1), b.stride(2)),
        )
    return out


@cache
def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _product(
    tile: Tile, layout: SliceLayout, has_bias: bool, programs: int, _: torch.dtype
) -> Launch:
    """One per dtype: a launch cannot tell descriptors of two dtypes apart."""
    return Launch(product_kernel, **constexprs(tile, layout, has_bias, programs))


@cache
def _seams(layout: SliceLayout, bm: int) -> Launch:
    return Launch(seams_kernel, **seam_constexprs(layout, bm))


def constexprs(tile: Tile, layout: SliceLayout, has_bias: bool, programs: int) -> dict[str, Any]:
    """Everything that is compiled into the product, by parameter name, and its launch options."""
    return {
        "OFFSETS": layout.offsets,
        "HAS_BIAS": has_bias,
        **tile.constexprs,
        "PROGRAMS": programs,
        "STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def seam_constexprs(layout: SliceLayout, bm: int) -> dict[str, Any]:
    """The same of the seams."""
    step, blocks = _SEAM_COLUMNS
    return {"OFFSETS": layout.offsets, "BM": bm, "BN": step, "BLOCKS": blocks, "num_warps": 8}
