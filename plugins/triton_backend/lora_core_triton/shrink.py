"""shrink: `h[t, s, r] = sum_k x[t, k] * A[slot(t), s, r, k]` for r below the slot's rank.

The sum over k is cut into splits of `SPLIT` inputs, whatever the batch: each split is one chain of
products, and h is the sum of the splits in order. Few rows: a program per split, and whoever
finishes last adds the splits up. Many rows: one program runs through them. The order of every
addition is the same, so h does not depend on the batch that a row is part of.

The ranks of all slices are packed side by side, slice after slice, so that x is read once for all
of them and nothing is read or computed past a rank.
"""

# Triton reads the parameters of kernels itself, annotations would be noise:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, D103

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lora_core.triton_kit import Launch, Tile, dot, family
from lora_core.weights import LoRAWeights
from lora_core_triton.tables import SHRINK, band
from lora_core_triton.worklist import WorkList

SPLIT = 256
"""Inputs of one split; part of the arithmetic, so it is no tuning parameter."""


@triton.jit
def shrink_kernel(
    x,  # [T', K] - input rows
    meta,  # int32 - the work list's buffer
    a,  # [S, n, R, K]
    ranks,  # int32 [S, n]
    h,  # float32 [T', n, R] - result
    partial,  # float32 [tiles, column blocks, splits, BM, BC] - unused when SEQUENTIAL
    arrived,  # int32 [tiles, column blocks] - zero before and after; unused when SEQUENTIAL
    tiles_at,
    rows_at,
    K,
    x_row,
    a_slot,
    a_slice,
    a_rank,
    splits,
    group,  # splits of one program
    NUM_SLICES: tl.constexpr,
    MAX_RANK: tl.constexpr,
    GATHERED: tl.constexpr,
    SUBTILES: tl.constexpr,  # programs that share one tile of rows
    EVEN_K: tl.constexpr,  # K is a multiple of SPLIT
    SEQUENTIAL: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
):
    p_group, p_column, p_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    p_meta = meta + tiles_at + (p_tile // SUBTILES) * 4
    slot = tl.load(p_meta)
    if slot < 0:
        return
    begin = (p_tile % SUBTILES) * BM
    count = tl.load(p_meta + 2) - begin
    if count <= 0:
        return
    first = tl.load(p_meta + 1) + begin

    # packed columns: which slice and rank each one is
    o_c = p_column * BC + tl.arange(0, BC)
    o_slice = tl.zeros((BC,), tl.int32)
    o_rank = o_c
    total_rank = 0
    for s in tl.static_range(NUM_SLICES):
        past = o_c >= total_rank
        o_slice = tl.where(past, s, o_slice)
        o_rank = tl.where(past, o_c - total_rank, o_rank)
        total_rank += tl.load(ranks + slot * NUM_SLICES + s)
    if p_column * BC >= total_rank:
        return
    m_c = o_c < total_rank

    o_m = tl.arange(0, BM)
    m_m = o_m < count
    if GATHERED:
        o_row = tl.load(meta + rows_at + first + o_m, mask=m_m, other=0).to(tl.int64)
    else:
        o_row = (first + o_m).to(tl.int64)
    o_k = tl.arange(0, BK)
    p_x = x + o_row[:, None] * x_row + o_k[None, :]  # [BM, BK]
    p_a = (
        a
        + slot.to(tl.int64) * a_slot
        + (o_slice.to(tl.int64) * a_slice + o_rank * a_rank)[None, :]
        + o_k[:, None]
    )  # [BK, BC]

    b_h = tl.zeros((BM, BC), tl.float32)
    block = (p_tile * tl.num_programs(1) + p_column).to(tl.int64)
    p_partial = partial + block * splits * (BM * BC) + o_m[:, None] * BC + tl.arange(0, BC)[None, :]
    for split in range(p_group * group, tl.minimum(p_group * group + group, splits)):
        b_split = tl.zeros((BM, BC), tl.float32)
        for step in tl.static_range(SPLIT // BK):
            k = split * SPLIT + step * BK
            if EVEN_K:
                m_x = m_m[:, None]
                m_a = m_c[None, :]
            else:
                m_x = m_m[:, None] & (o_k < K - k)[None, :]
                m_a = m_c[None, :] & (o_k < K - k)[:, None]
            b_x = tl.load(p_x + k, mask=m_x, other=0.0)
            b_a = tl.load(p_a + k, mask=m_a, other=0.0)
            b_split = dot(b_x, b_a, b_split)
        if SEQUENTIAL:
            b_h += b_split
        else:
            tl.store(p_partial + split * (BM * BC), b_split)

    p_h = h + o_row[:, None] * (NUM_SLICES * MAX_RANK) + (o_slice * MAX_RANK + o_rank)[None, :]
    m_h = m_m[:, None] & m_c[None, :]
    if SEQUENTIAL:
        tl.store(p_h, b_h, mask=m_h)
    else:
        tl.debug_barrier()  # every thread's part is written before one of them says so
        if tl.atomic_add(arrived + block, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            for start in range(0, splits, 8):
                for i in tl.static_range(8):  # eight loads in flight; past the end adds 0.0
                    b_h += tl.load(
                        p_partial + (start + i) * (BM * BC),
                        mask=m_h & (tl.full((1, 1), start + i, tl.int32) < splits),
                        other=0.0,
                        cache_modifier=".cg",  # written by other programs: not from L1
                    )
            tl.store(p_h, b_h, mask=m_h)
            tl.store(arrived + block, 0)


def shrink(
    x: Tensor, weights: LoRAWeights, work: WorkList, meta: Tensor, arrived: Tensor, tiles: int
) -> Tensor:
    """Launch the kernel.

    Args:
        x: [T', K].
        weights: of the site.
        work: the rows to do.
        meta: int32, the buffer that `work` describes.
        arrived: int32 zeros; when there are too few, one program runs through all splits.
        tiles: row tiles to launch; those past the filled ones are dead.

    Returns:
        float32 [T', n, R].
    """
    a, n, max_rank, room = weights.a, weights.layout.num_slices, weights.max_rank, work.room
    num_rows, k = x.shape
    h = torch.empty(num_rows, n, max_rank, dtype=torch.float32, device=x.device)
    tile = SHRINK.pick(family(x.device), rows=band(num_rows), rank=max_rank, bytes=x.element_size())
    splits = -(-k // SPLIT)
    columns, programs = -(-n * max_rank // tile["BC"]), tiles * (room.tile_rows // tile["BM"])
    group, partial = tile["GROUP"] or splits, h
    if group >= splits or programs * columns > arrived.numel():
        group = splits
    else:
        size = programs * columns * splits * tile["BM"] * tile["BC"]
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
    launch = _launch(
        tile, n, max_rank, room.gathered, room.tile_rows, k % SPLIT == 0, group == splits
    )
    launch(
        (-(-splits // group), columns, programs),
        *(x, meta, a, weights.ranks, h, partial, arrived, room.tiles_at, room.rows_at, k),
        *(x.stride(0), a.stride(0), a.stride(1), a.stride(2), splits, group),
    )
    return h


@cache
def _launch(
    tile: Tile,
    n: int,
    max_rank: int,
    gathered: bool,
    tile_rows: int,
    even_k: bool,
    sequential: bool,
) -> Launch:
    return Launch(
        shrink_kernel, **constexprs(tile, n, max_rank, gathered, tile_rows, even_k, sequential)
    )


def constexprs(
    tile: Tile,
    n: int,
    max_rank: int,
    gathered: bool,
    tile_rows: int,
    even_k: bool,
    sequential: bool,
) -> dict[str, Any]:
    """Everything that is compiled into the kernel, by parameter name."""
    return {
        "NUM_SLICES": n,
        "MAX_RANK": max_rank,
        "GATHERED": gathered,
        "SUBTILES": tile_rows // tile["BM"],
        "EVEN_K": even_k,
        "SEQUENTIAL": sequential,
        "SPLIT": SPLIT,
        "BM": tile["BM"],
        "BC": tile["BC"],
        "BK": tile["BK"] if even_k else min(tile["BK"], 32),  # element-wise loads need registers
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
