"""prefill: the base product with the expand inside, so that the output is touched once.

    h[t, s] = scale(t) * scaling[slot(t), s] * A[slot(t), s] @ x[t]          (shrink)
    out[t]  = W @ x[t] + bias + sum_s B[slot(t)] @ h[t, s]                   (product, seams)

The product is persistent and fed by tensor descriptors. A tile of rows that lies within one request
adds that request's `h @ B^T` to its accumulator before it is stored; the first 16 ranks are loaded
before the tile's own product, which hides them. Tiles that several requests share are left to a last
kernel, which adds each request to its own rows alone: no value of a neighbour can reach them.
"""

# Triton reads the parameters of kernels itself, annotations would be noise:
# mypy: allow-untyped-defs
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.research.fused import tables
from lora_core.batch import RequestTable
from lora_core.triton_kit import INTERPRETED, Launch, Tile, dot, family
from lora_core.weights import LoRAWeights, SliceLayout
from lora_core_triton.worklist import WorkList


@triton.jit
def shrink_kernel(
    x,  # [T', K]
    meta,  # int32 - the work list's buffer
    a,  # [S, n, R, K]
    ranks,  # int32 [S, n]
    scalings,  # float32 [S, n]
    h,  # [T', n, RANK]
    K,
    tiles_at,
    x_row,
    a_slot,
    a_slice,
    a_rank,
    NUM_SLICES: tl.constexpr,
    SLICES: tl.constexpr,  # NUM_SLICES rounded up to a power of two
    RANK: tl.constexpr,
    SUBTILES: tl.constexpr,  # programs that share one tile of the work list
    EVEN_K: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    p_tile = meta + tiles_at + tl.program_id(0) // SUBTILES * 4
    slot = tl.load(p_tile).to(tl.int64)
    if slot < 0:
        return
    begin = tl.program_id(0) % SUBTILES * BM
    count = tl.load(p_tile + 2) - begin
    if count <= 0:
        return
    first = tl.load(p_tile + 1) + begin
    scale = tl.load(p_tile + 3).to(tl.float32, bitcast=True)
    o_m, o_k = tl.arange(0, BM), tl.arange(0, BK)
    p_x = x + (first + tl.minimum(o_m, count - 1)).to(tl.int64) * x_row
    # all slices at once: column c is rank row c % 16 of slice c // 16
    o_c = tl.arange(0, SLICES * 16)
    s, o_r = o_c // 16, o_c % 16
    rank = tl.load(ranks + slot * NUM_SLICES + s, mask=s < NUM_SLICES, other=0)
    scaling = tl.load(scalings + slot * NUM_SLICES + s, mask=s < NUM_SLICES, other=0.0)
    for r0 in range(0, tl.max(rank), 16):
        r = r0 + o_r
        m_r = r < rank
        p_a = a + slot * a_slot + tl.minimum(s, NUM_SLICES - 1) * a_slice + r.to(tl.int64) * a_rank
        acc = tl.zeros((BM, SLICES * 16), tl.float32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            if EVEN_K:
                b_x = tl.load(p_x[:, None] + (k + o_k)[None, :])
                b_a = tl.load(p_a[:, None] + (k + o_k)[None, :], mask=m_r[:, None], other=0.0)
            else:
                m_k = (o_k < K - k)[None, :]
                b_x = tl.load(p_x[:, None] + (k + o_k)[None, :], mask=m_k, other=0.0)
                b_a = tl.load(p_a[:, None] + (k + o_k)[None, :], mask=m_r[:, None] & m_k, other=0.0)
            acc = dot(b_x, tl.trans(b_a), acc)
        p_h = (
            h + ((first + o_m).to(tl.int64)[:, None] * NUM_SLICES + s[None, :]) * RANK + r[None, :]
        )
        b_h = (acc * (scale * scaling)[None, :]).to(h.dtype.element_ty)
        tl.store(p_h, b_h, mask=(o_m < count)[:, None] & m_r[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_requests"])
def product_kernel(
    x_desc,  # [T', K]
    w_desc,  # [N, K]
    out_desc,  # [T', N]
    bias,  # [N]
    h,  # [T', n, RANK]
    b,  # [S, N, R]
    ranks,  # int32 [S, n]
    seg_indptr,  # int32 [requests + 1]
    slots,  # int32 [requests]
    num_rows,
    num_requests,
    K,
    b_slot,
    b_column,
    b_rank,
    OFFSETS: tl.constexpr,  # first column of each slice, and the end
    RANK: tl.constexpr,
    REQUESTS: tl.constexpr,  # num_requests at most, a power of two
    HAS_BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,  # row tiles that are done together for all columns
    PROGRAMS: tl.constexpr,
):
    NUM_SLICES: tl.constexpr = len(OFFSETS) - 1
    N: tl.constexpr = OFFSETS[NUM_SLICES]
    COLUMNS: tl.constexpr = (N + BN - 1) // BN
    row_tiles = tl.cdiv(num_rows, BM)
    for tile in tl.range(tl.program_id(0), row_tiles * COLUMNS, PROGRAMS, flatten=True):
        in_band = tl.minimum(row_tiles - tile // (BAND * COLUMNS) * BAND, BAND)
        row = (tile // (BAND * COLUMNS) * BAND + tile % (BAND * COLUMNS) % in_band) * BM
        column = tile % (BAND * COLUMNS) // in_band * BN
        s = 0
        for i in tl.static_range(1, NUM_SLICES):
            s += (column >= OFFSETS[i]).to(tl.int32)

        # the request of the tile's first row, and whether the tile is all its own
        o_q = tl.arange(0, REQUESTS)
        ends = tl.load(seg_indptr + 1 + o_q, mask=o_q < num_requests, other=num_rows)
        request = tl.sum((ends <= row).to(tl.int32))
        inside = request < num_requests
        end = tl.load(seg_indptr + 1 + request, mask=inside, other=num_rows)
        slot = tl.load(slots + request, mask=inside, other=-1)
        whole = (end >= tl.minimum(row + BM, num_rows)).to(tl.int1)
        live = whole & (slot >= 0)
        rank = tl.load(ranks + slot * NUM_SLICES + s, mask=live, other=0)
        o_m, o_n, o_r = row + tl.arange(0, BM), column + tl.arange(0, BN), tl.arange(0, 16)
        p_h = h + (o_m.to(tl.int64)[:, None] * NUM_SLICES + s) * RANK + o_r[None, :]
        p_b = (
            b
            + slot.to(tl.int64) * b_slot
            + o_n.to(tl.int64)[None, :] * b_column
            + o_r[:, None] * b_rank
        )
        m_m, m_n = (o_m < num_rows)[:, None], (o_n < N)[None, :]
        first_h = tl.load(p_h, mask=m_m & (o_r < rank)[None, :], other=0.0)
        first_b = tl.load(p_b, mask=(o_r < rank)[:, None] & m_n, other=0.0)

        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            acc = dot(x_desc.load([row, k]), w_desc.load([column, k]).T, acc)

        if HAS_BIAS:
            acc += tl.load(bias + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
        if rank > 0:
            acc = dot(first_h, first_b, acc)
        for i in tl.static_range(
            1, RANK // 16
        ):  # no loop: it would keep the two loops from one pipeline
            if i * 16 < rank:
                m_r = o_r + i * 16 < rank
                b_h = tl.load(p_h + i * 16, mask=m_m & m_r[None, :], other=0.0)
                b_b = tl.load(p_b + i * 16 * b_rank, mask=m_r[:, None] & m_n, other=0.0)
                acc = dot(b_h, b_b, acc)
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        out_desc.store([row, column], left.to(out_desc.dtype))
        out_desc.store([row, column + BN // 2], right.to(out_desc.dtype))


@triton.jit(do_not_specialize=["num_rows"])
def seams_kernel(
    out,  # [T', N] - added to in place
    h,  # [T', n, RANK]
    b,  # [S, N, R]
    ranks,  # int32 [S, n]
    seg_indptr,  # int32 [requests + 1]
    slots,  # int32 [requests]
    num_rows,
    b_slot,
    b_column,
    b_rank,
    OFFSETS: tl.constexpr,
    RANK: tl.constexpr,
    TILE: tl.constexpr,  # rows of a tile of the product
    BN: tl.constexpr,
    OVERTAKES: tl.constexpr,
):
    """The first or last tile of rows of one request, where it shares that tile with another."""
    NUM_SLICES: tl.constexpr = len(OFFSETS) - 1
    request = tl.program_id(1)
    if OVERTAKES:
        tl.extra.cuda.gdc_wait()
    begin, end = tl.load(seg_indptr + request), tl.load(seg_indptr + 1 + request)
    slot = tl.load(slots + request)
    row = begin // TILE * TILE
    if tl.program_id(2) == 1:
        first_tile = row
        row = (end - 1) // TILE * TILE
        if row == first_tile:
            return
    whole = (begin <= row) & (end >= tl.minimum(row + TILE, num_rows))
    if (slot < 0) | (begin >= end) | whole:
        return
    column = tl.program_id(0) * BN
    s = 0
    for i in tl.static_range(1, NUM_SLICES):
        s += (column >= OFFSETS[i]).to(tl.int32)
    rank = tl.load(ranks + slot * NUM_SLICES + s)
    if rank == 0:
        return
    o_m, o_n, o_r = row + tl.arange(0, TILE), column + tl.arange(0, BN), tl.arange(0, 16)
    own = ((o_m >= begin) & (o_m < end))[:, None]
    m_out = own & (o_n < OFFSETS[NUM_SLICES])[None, :]
    p_out = out + o_m.to(tl.int64)[:, None] * OFFSETS[NUM_SLICES] + o_n[None, :]
    p_h = h + (o_m.to(tl.int64)[:, None] * NUM_SLICES + s) * RANK + o_r[None, :]
    p_b = b + slot.to(tl.int64) * b_slot + o_n.to(tl.int64)[None, :] * b_column
    b_out = tl.load(p_out, mask=m_out, other=0.0).to(tl.float32)
    delta = tl.zeros((TILE, BN), tl.float32)
    for r0 in range(0, rank, 16):
        m_r = r0 + o_r < rank
        b_h = tl.load(p_h + r0, mask=own & m_r[None, :], other=0.0)
        m_b = m_r[:, None] & (o_n < OFFSETS[NUM_SLICES])[None, :]
        b_b = tl.load(p_b + (r0 + o_r)[:, None] * b_rank, mask=m_b, other=0.0)
        delta = dot(b_h, b_b, delta)
    tl.store(p_out, (b_out + delta).to(out.dtype.element_ty), mask=m_out)


def prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weights: LoRAWeights,
    work: WorkList,
    meta: Tensor,
    tiles: int,
    table: RequestTable,
) -> Tensor:
    """Launch shrink, product and seams.

    Args:
        x: [T', K].
        weight: [N, K] of the base.
        bias: [N] of the base, or None.
        weights: of the site.
        work: the rows to do, contiguous.
        meta: int32, the buffer that `work` describes.
        tiles: row tiles to launch; those past the filled ones are dead.
        table: the requests.

    Returns:
        [T', N].
    """
    rows, k = x.shape
    layout, a, b = weights.layout, weights.a, weights.b
    n, rank = layout.num_slices, -(-weights.max_rank // 16) * 16
    shape = {"rows": tables.band(rows), "columns": layout.out_features, "k": k}
    h = torch.empty(rows, n, rank, dtype=x.dtype, device=x.device)
    if tiles:
        tile = tables.SHRINK.pick(family(x.device), **shape)
        subtiles = work.room.tile_rows // tile["BM"]
        _shrink_launch(tile, n, rank, subtiles, k % tile["BK"] == 0)(
            (tiles * subtiles, 1, 1),
            *(x, meta, a, weights.ranks, weights.scalings, h, k, work.room.tiles_at),
            *(x.stride(0), a.stride(0), a.stride(1), a.stride(2)),
        )
    out = torch.empty(rows, layout.out_features, dtype=x.dtype, device=x.device)
    tile = tables.PRODUCT.pick(family(x.device), **shape, step=column_step(layout))
    bound = constexprs(
        tile, layout, rank, bias is not None, table.slots.shape[0], _programs(x.device)
    )
    bm, bn, bk = (bound[name] for name in ("BM", "BN", "BK"))
    product_kernel[(bound["PROGRAMS"],)](
        TensorDescriptor.from_tensor(x, [bm, bk]),
        TensorDescriptor.from_tensor(weight, [bn, bk]),
        TensorDescriptor.from_tensor(out, [bm, bn // 2]),
        *(out if bias is None else bias, h, b, weights.ranks, table.seg_indptr, table.slots),
        *(rows, table.slots.shape[0], k, b.stride(0), b.stride(1), b.stride(2)),
        **bound,
    )
    step = 32 if INTERPRETED else 128
    _seams_launch(layout, rank, bm, step, family(x.device) in ("sm90", "sm100"))(
        (layout.out_features // step, table.slots.shape[0], 2),
        *(out, h, b, weights.ranks, table.seg_indptr, table.slots, rows),
        *(b.stride(0), b.stride(1), b.stride(2)),
    )
    return out


def fits(x: Tensor, weight: Tensor, layout: SliceLayout) -> bool:
    """Whether tensor descriptors can address the operands and no tile crosses into another slice."""
    size = x.element_size()
    return (
        x.shape[1] % 64 == 0
        and layout.out_features * size % 16 == 0
        and all(t.stride(0) * size % 16 == 0 and t.data_ptr() % 16 == 0 for t in (x, weight))
        and column_step(layout) >= 128
        and layout.out_features % 128 == 0
    )


def column_step(layout: SliceLayout) -> int:
    """The widest column tile, up to 256, that does not cross into another slice."""
    step = 256
    while any(offset % step for offset in layout.offsets[1:-1]):
        step //= 2
    return step


@cache
def _seams_launch(layout: SliceLayout, rank: int, bm: int, bn: int, overtakes: bool) -> Launch:
    bound = {"OFFSETS": layout.offsets, "RANK": rank, "TILE": bm, "BN": bn, "OVERTAKES": overtakes}
    return Launch(seams_kernel, **bound, num_warps=8, launch_pdl=overtakes)


@cache
def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _shrink_launch(tile: Tile, n: int, rank: int, subtiles: int, even_k: bool) -> Launch:
    return Launch(shrink_kernel, **shrink_constexprs(tile, n, rank, subtiles, even_k))


def shrink_constexprs(tile: Tile, n: int, rank: int, subtiles: int, even_k: bool) -> dict[str, Any]:
    """Everything that is compiled into the shrink, by parameter name."""
    return {
        "NUM_SLICES": n,
        "SLICES": triton.next_power_of_2(n),
        "RANK": rank,
        "SUBTILES": subtiles,
        "EVEN_K": even_k,
        "BM": tile["BM"],
        "BK": tile["BK"],
        "STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
    }


def constexprs(
    tile: Tile, layout: SliceLayout, rank: int, has_bias: bool, requests: int, programs: int
) -> dict[str, Any]:
    """Everything that is compiled into the product, by parameter name."""
    bound = {
        "OFFSETS": layout.offsets,
        "RANK": rank,
        "REQUESTS": max(32, triton.next_power_of_2(requests)),
        "HAS_BIAS": has_bias,
        "PROGRAMS": programs,
        **{name: tile[name] for name in ("BM", "BN", "BK", "BAND")},
    }
    if not INTERPRETED:
        bound |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return bound
