"""The product of `triton_fused` with the shrink inside as well. Right in the interpreter, compiled for Hopper, not timed.

- The tiles of the first columns come first. Whoever computes one has x at hand, and computes h of its
  rows too, for which it multiplies 16 columns per slice more; ranks past 16 take passes of their own. Then it
  raises the rows' flag.
- The others add the delta before they start, as `triton_fused` does; those that run beside the first ones add
  it at their end, when h is there.

First tiles are claimed by ticket, and whoever holds one waits for nobody: programs that are not running
yet are never waited for. Which tile adds its delta when depends on its number, so equal inputs give equal
bits. All counters are zero again at the end. Tiles that several requests share get no delta here.
"""

# ruff: noqa: ANN001, ANN201, ANN202 - Triton's jit reads annotations itself
from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lora_core.triton_kit import INTERPRETED, Launch, dot
from lora_core.weights import LoRAWeights
from lora_core_triton.fused import _delta_of, _place, _ranks_of

_ON_GPU = tl.constexpr(not INTERPRETED)


@triton.jit
def _wait(flag):
    if _ON_GPU:
        raised = 0
        while raised == 0:
            raised = tl.inline_asm_elementwise(
                "ld.acquire.gpu.global.u32 $0, [$1];",
                "=r,l",
                [flag],
                tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def _store(out_desc, row, column, acc, BM: tl.constexpr, BN: tl.constexpr, HALVES: tl.constexpr):
    if HALVES:
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        out_desc.store([row, column], left.to(out_desc.dtype))
        out_desc.store([row, column + BN // 2], right.to(out_desc.dtype))
    else:
        out_desc.store([row, column], acc.to(out_desc.dtype))


@triton.jit
def _add(acc, b_h, b_b, rank, factor, p_h, p_b, b_rank, m_n, BR: tl.constexpr):
    acc = dot((b_h * factor).to(b_b.dtype), b_b, acc)
    for r in range(16, rank, BR):
        more_h, more_b = _ranks_of(r, rank, p_h, p_b, b_rank, m_n, BR)
        acc = dot((more_h * factor).to(more_b.dtype), more_b, acc)
    return acc


@triton.jit(do_not_specialize=["num_rows", "num_planned"])
def kernel(
    h,
    x_desc,
    w_desc,
    out_desc,
    half_desc,
    a_desc,
    more_desc,
    b,
    ranks,
    scalings,
    plan,
    sync,
    num_rows,
    num_planned,
    K,
    h_row,
    h_slice,
    b_slot,
    b_column,
    b_rank,
    OFFSETS: tl.constexpr,
    SLICES: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    BH: tl.constexpr,
    BAND: tl.constexpr,
    HALVES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
):
    NUM_SLICES: tl.constexpr = len(OFFSETS) - 1
    N: tl.constexpr = OFFSETS[NUM_SLICES]
    OTHERS: tl.constexpr = (N + BN - 1) // BN - 1
    row_tiles = tl.cdiv(num_rows, BM)
    flags = sync + 2
    tile = tl.atomic_add(sync, 1, sem="relaxed")
    while tile < row_tiles:
        row_tile = tile
        row = row_tile * BM
        slot = tl.load(plan + row_tile * 2, mask=row_tile < num_planned, other=-1)
        first = tl.maximum(slot, 0) * NUM_SLICES
        o_m = row + tl.arange(0, BM)
        m_m = (o_m < num_rows)[:, None]
        p_m = h + o_m.to(tl.int64)[:, None] * h_row
        if MAX_RANK > 16:
            for s in tl.static_range(NUM_SLICES):
                top = tl.load(ranks + first + s, mask=slot >= 0, other=0)
                for r in range(16, top, BH):
                    more = tl.zeros((BM, BH), tl.float32)
                    for k in tl.range(0, K, BK, num_stages=STAGES):
                        b_a = tl.reshape(more_desc.load([first + s, r, k]), (BH, BK))
                        more = dot(x_desc.load([row, k]), b_a.T, more)
                    o_r = r + tl.arange(0, BH)
                    tl.store(
                        p_m + s * h_slice + o_r[None, :], more, mask=m_m & (o_r < top)[None, :]
                    )
        acc = tl.zeros((BM, BN), tl.float32)
        acc_h = tl.zeros((BM, SLICES * 16), tl.float32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            b_x = x_desc.load([row, k])
            acc = dot(b_x, w_desc.load([0, k]).T, acc)
            acc_h = dot(b_x, tl.reshape(a_desc.load([first, 0, k]), (SLICES * 16, BK)).T, acc_h)
        if slot >= 0:
            o_c = tl.arange(0, SLICES * 16)
            m_c = (o_c // 16 < NUM_SLICES) & (o_c % 16 < MAX_RANK)
            tl.store(
                p_m + (o_c // 16)[None, :] * h_slice + (o_c % 16)[None, :],
                acc_h,
                mask=m_m & m_c[None, :],
            )
            tl.debug_barrier()
            tl.atomic_xchg(flags + row_tile, 1, sem="release")
        rank, factor, p_h, p_b, m_n = _delta_of(
            row_tile,
            0,
            h,
            b,
            ranks,
            scalings,
            plan,
            num_planned,
            h_row,
            h_slice,
            b_slot,
            b_column,
            OFFSETS,
            BM,
            BN,
        )
        b_h, b_b = _ranks_of(0, rank, p_h, p_b, b_rank, m_n, 16)
        acc = _add(acc, b_h, b_b, rank, factor, p_h, p_b, b_rank, m_n, BR)
        _store(half_desc, row, 0, acc, BM, BN, True)
        tile = tl.atomic_add(sync, 1, sem="relaxed")
    if OTHERS > 0:
        end = row_tiles * OTHERS
        tile -= row_tiles
        if (tile + row_tiles < PROGRAMS) & (tile < end):
            row_tile, column_tile = _place(tile, row_tiles, BAND, OTHERS)
            row, column = row_tile * BM, (column_tile + 1) * BN
            acc = tl.zeros((BM, BN), tl.float32)
            for k in tl.range(0, K, BK, num_stages=STAGES):
                acc = dot(x_desc.load([row, k]), w_desc.load([column, k]).T, acc)
            rank, factor, p_h, p_b, m_n = _delta_of(
                row_tile,
                column_tile + 1,
                h,
                b,
                ranks,
                scalings,
                plan,
                num_planned,
                h_row,
                h_slice,
                b_slot,
                b_column,
                OFFSETS,
                BM,
                BN,
            )
            if rank > 0:
                _wait(flags + row_tile)
            b_h, b_b = _ranks_of(0, rank, p_h, p_b, b_rank, m_n, 16)
            acc = _add(acc, b_h, b_b, rank, factor, p_h, p_b, b_rank, m_n, BR)
            _store(out_desc, row, column, acc, BM, BN, HALVES)
            tile += PROGRAMS
        next_row, next_column = _place(tile, row_tiles, BAND, OTHERS)
        rank, factor, p_h, p_b, m_n = _delta_of(
            next_row,
            next_column + 1,
            h,
            b,
            ranks,
            scalings,
            plan,
            num_planned,
            h_row,
            h_slice,
            b_slot,
            b_column,
            OFFSETS,
            BM,
            BN,
        )
        if rank > 0:
            _wait(flags + next_row)
        b_h, b_b = _ranks_of(0, rank, p_h, p_b, b_rank, m_n, 16)
        for at in range(tile, end, PROGRAMS):
            row, column = next_row * BM, (next_column + 1) * BN
            acc = _add(
                tl.zeros((BM, BN), tl.float32), b_h, b_b, rank, factor, p_h, p_b, b_rank, m_n, BR
            )
            next_row, next_column = _place(at + PROGRAMS, row_tiles, BAND, OTHERS)
            rank, factor, p_h, p_b, m_n = _delta_of(
                next_row,
                next_column + 1,
                h,
                b,
                ranks,
                scalings,
                plan,
                num_planned,
                h_row,
                h_slice,
                b_slot,
                b_column,
                OFFSETS,
                BM,
                BN,
            )
            if rank > 0:
                _wait(flags + next_row)
            b_h, b_b = _ranks_of(0, rank, p_h, p_b, b_rank, m_n, 16)
            for k in tl.range(0, K, BK, num_stages=STAGES):
                acc = dot(x_desc.load([row, k]), w_desc.load([column, k]).T, acc)
            _store(out_desc, row, column, acc, BM, BN, HALVES)
    tl.debug_barrier()
    if tl.atomic_add(sync + 1, 1, sem="acq_rel") == PROGRAMS - 1:
        for at in range(0, row_tiles, 1024):
            o = at + tl.arange(0, 1024)
            tl.store(flags + o, tl.zeros((1024,), tl.int32), mask=o < row_tiles)
        tl.store(sync, 0)
        tl.store(sync + 1, 0)


@cache
def _launch(bound: tuple[tuple[str, Any], ...]) -> Launch:
    return Launch(kernel, **dict(bound))


def product(
    x: Tensor,
    weight: Tensor,
    weights: LoRAWeights,
    plan: Tensor,
    sync: Tensor,
    *,
    programs: int,
    bm: int = 128,
    bn: int = 256,
    bk: int = 64,
    bh: int = 64,
    band: int = 8,
    halves: bool = False,
) -> Tensor:
    """Launch it.

    Args:
        x: [T, K].
        weight: [N, K] of the base.
        weights: of the site, A contiguous.
        plan: int32 [tiles, 2], per tile of `bm` rows its slot (-1: none) and the bits of its scale.
        sync: int32 zeros, two more than tiles.
        programs: as many as run at once, or any number.
        bm: rows of a tile.
        bn: columns of a tile.
        bk: inputs of a step.
        bh: ranks of a pass past the first 16.
        band: row tiles that are done together for all columns.
        halves: whether tiles are stored in halves.

    Returns:
        [T, N].
    """
    rows, k = x.shape
    a, b, layout = weights.a, weights.b, weights.layout
    n, slices = layout.num_slices, int(triton.next_power_of_2(layout.num_slices))
    h = torch.empty(rows, n, weights.max_rank, dtype=torch.float32, device=x.device)
    out = torch.empty(rows, layout.out_features, dtype=x.dtype, device=x.device)
    bound = {"OFFSETS": layout.offsets, "SLICES": slices, "MAX_RANK": weights.max_rank, "BM": bm, "BN": bn,
             "BK": bk, "BR": 16, "BH": bh, "BAND": band, "HALVES": halves, "PROGRAMS": programs, "STAGES": 3,
             "num_warps": 8, "num_stages": 3}  # fmt: skip

    def ranks(of_slices: int, count: int) -> TensorDescriptor:
        shape, strides = [a.shape[0] * n, a.shape[2], k], [a.stride(1), a.stride(2), 1]
        return TensorDescriptor(a, shape, strides, [of_slices, count, bk])

    _launch(tuple(bound.items()))(
        (programs, 1, 1),
        *(
            h,
            TensorDescriptor.from_tensor(x, [bm, bk]),
            TensorDescriptor.from_tensor(weight, [bn, bk]),
        ),
        TensorDescriptor.from_tensor(out, [bm, bn // 2 if halves else bn]),
        TensorDescriptor.from_tensor(out, [bm, bn // 2]),
        *(ranks(slices, 16), ranks(1, bh), b, weights.ranks, weights.scalings, plan, sync),
        *(rows, len(plan), k, h.stride(0), h.stride(1), b.stride(0), b.stride(1), b.stride(2)),
    )
    return out
