"""decode: base product, shrink and expand of one linear site in one launch, for few rows.

    h[t, s] = scale(t) * scaling[slot(t), s] * A[slot(t), s] @ x[t]
    out[t]  = W @ x[t] + bias + sum_s B[slot(t)] @ h[t, s]

Few rows leave the base product waiting for memory, so LoRA rides along:

- the first programs compute h: 16 rank rows at a time, over a part of K, for one tile of the work list
  and one slice. The last of them to arrive sums the parts in their order and writes h for all rows,
  zero for those of other tiles;
- the others each compute a block of columns of the base product, which takes longer, then wait until
  all h are there, add `B @ h` of every tile in registers, and write the output once. Where there are
  too few blocks to fill the GPU, K is split, and the last part to arrive sums them in their order.

With OVERTAKES a launch may begin while the kernel before it finishes; until that has finished, it
only brings the first part of its weights closer, which no kernel writes.

Programs that others wait for come first in the grid, and a GPU starts programs in grid order. Sums
have one order whatever the timing, so equal inputs give equal bits. Counters are zero again at the
end. A product with the zeros of other tiles' rows is exact unless B is not finite; then every tile is
added for its own rows alone.
"""

# Triton reads the parameters of kernels itself, annotations would be noise:
# mypy: allow-untyped-defs
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.research.fused import tables
from lora_core.triton_kit import INTERPRETED, Launch, Tile, dot, family
from lora_core.weights import LoRAWeights, SliceLayout
from lora_core_triton.worklist import WorkList

_ON_GPU = tl.constexpr(not INTERPRETED)
MAX_ROWS = 128
"""What the kernel can do; up to where it pays is the table's business."""


@triton.jit(do_not_specialize=["num_rows", "tiles"])
def decode_kernel(
    out,  # [T', N]
    x,  # [T', K]
    w,  # [N, K]
    bias,  # [N]
    a,  # [S, n, R, K]
    b,  # [S, N, R]
    ranks,  # int32 [S, n]
    scalings,  # float32 [S, n]
    meta,  # int32 - the work list's buffer
    h,  # [n, tiles, RANK, BM] - zero in the columns of rows outside the tile
    parts,  # float32 [H_SPLIT, n, tiles, RANK, 16], then [blocks, SPLIT, BN, BM]
    sync,  # int32 zeros: programs of h done, programs of out gone, then arrivals
    num_rows,
    K,
    tiles,  # row tiles of the work list; those past the filled ones are dead
    tiles_at,
    rows_at,
    scales_at,
    x_row,
    w_row,
    a_slot,
    a_slice,
    a_rank,
    b_slot,
    b_column,
    b_rank,
    OFFSETS: tl.constexpr,  # first column of each slice, and the end
    FIRST_BLOCKS: tl.constexpr,  # first column block of each slice
    BLOCKS: tl.constexpr,  # column blocks of all slices
    RANK: tl.constexpr,  # R rounded up to 16
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,  # every part of K is a multiple of BK and BKH
    BM: tl.constexpr,  # rows, rounded up
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    BKH: tl.constexpr,
    H_SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,  # tiles whose expand is one product
    OVERTAKES: tl.constexpr,  # may start before the kernel before it has finished
    AHEAD: tl.constexpr,  # lines of each row of w to prefetch meanwhile, a power of two
    STAGES: tl.constexpr,
):
    NUM_SLICES: tl.constexpr = len(FIRST_BLOCKS)
    num_h = tiles * (NUM_SLICES * H_SPLIT)
    pid = tl.program_id(0)
    o_i = tl.arange(0, BM)
    if pid < num_h:
        if OVERTAKES:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        _shrink_part(
            x, a, ranks, scalings, meta, h, parts, sync, K, tiles, tiles_at, rows_at, scales_at, x_row, a_slot,
            a_slice, a_rank, pid, NUM_SLICES, RANK, EVEN_K, BM, BKH, H_SPLIT, STAGES,
        )  # fmt: skip
        tl.debug_barrier()
        tl.atomic_add(sync, 1, sem="release")
        return

    block = (pid - num_h) // SPLIT
    part = (pid - num_h) % SPLIT
    s = 0
    column = block * BN
    end = OFFSETS[1]
    for i in tl.static_range(1, NUM_SLICES):
        if block >= FIRST_BLOCKS[i]:
            s = i
            column = OFFSETS[i] + (block - FIRST_BLOCKS[i]) * BN
            end = OFFSETS[i + 1]
    o_n = column + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    # rows and columns past the end repeat the last one, and are not written
    p_w = w + tl.minimum(o_n, end - 1).to(tl.int64) * w_row
    p_x = x + tl.minimum(o_i, num_rows - 1).to(tl.int64) * x_row
    k_part = tl.cdiv(tl.cdiv(K, SPLIT), BK) * BK
    k_begin = part * k_part
    k_end = tl.minimum(k_begin + k_part, K)
    if OVERTAKES:
        if AHEAD > 0:  # 128 bytes at a time
            o_line = k_begin + tl.arange(0, AHEAD) * (
                128 // (w.dtype.element_ty.primitive_bitwidth // 8)
            )
            _prefetch(p_w[:, None] + tl.minimum(o_line, k_end - 1)[None, :])
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    # the tiles and their first ranks of B: loads that are long done when they are needed
    o_t = tl.arange(0, BM)  # there are no more tiles than rows
    t_slot = tl.load(meta + tiles_at + 4 * o_t, mask=o_t < tiles, other=-1)
    t_rank = tl.load(ranks + t_slot * NUM_SLICES + s, mask=t_slot >= 0, other=0)
    live = tl.sum((t_slot >= 0).to(tl.int32))
    top = tl.max(t_rank)
    o_j = tl.arange(0, CHUNK * 16)
    slot = tl.load(meta + tiles_at + 4 * (o_j // 16), mask=o_j // 16 < live, other=0)
    rank = tl.load(ranks + slot * NUM_SLICES + s, mask=o_j // 16 < live, other=0)
    m_b = (o_j % 16 < rank)[None, :] & (o_n < end)[:, None]
    p_b = b + slot.to(tl.int64)[None, :] * b_slot + o_n.to(tl.int64)[:, None] * b_column
    first_b = tl.load(p_b + (o_j % 16)[None, :] * b_rank, mask=m_b, other=0.0)

    acc = tl.zeros((BN, BM), tl.float32)
    for k in tl.range(k_begin, k_end, BK, num_stages=STAGES):
        if EVEN_K:
            b_w = tl.load(p_w[:, None] + (k + o_k)[None, :])
            b_x = tl.load(p_x[:, None] + (k + o_k)[None, :])
        else:
            m_k = (o_k < K - k)[None, :]
            b_w = tl.load(p_w[:, None] + (k + o_k)[None, :], mask=m_k, other=0.0)
            b_x = tl.load(p_x[:, None] + (k + o_k)[None, :], mask=m_k, other=0.0)
        acc = dot(b_w, tl.trans(b_x), acc)

    if SPLIT > 1:
        p_parts = parts + tiles * (H_SPLIT * NUM_SLICES * RANK * 16) + block * (SPLIT * BN * BM)
        o_part = tl.arange(0, BN)[:, None] * BM + o_i[None, :]
        tl.store(p_parts + part * (BN * BM) + o_part, acc)
        tl.debug_barrier()
        arrivals = sync + 2 + NUM_SLICES * BM + block
        if tl.atomic_add(arrivals, 1, sem="acq_rel") < SPLIT - 1:
            return
        acc = tl.zeros((BN, BM), tl.float32)
        for i in tl.static_range(SPLIT):
            acc += tl.load(p_parts + i * (BN * BM) + o_part, cache_modifier=".cg")
        tl.store(arrivals, 0)

    while _peek(sync) < num_h:
        pass
    # counted out as soon as h is there: the count is not waited for at the end
    gone = tl.atomic_add(sync + 1, 1, sem="acq_rel")
    if HAS_BIAS:
        acc += tl.load(bias + o_n, mask=o_n < end, other=0.0).to(tl.float32)[:, None]
    if top > 0:
        p_h = h + s * tiles * (RANK * BM)
        b_h = tl.load(
            p_h + (o_j // 16 * RANK + o_j % 16)[:, None] * BM + o_i[None, :],
            mask=(o_j % 16 < rank)[:, None],
            other=0.0,
            cache_modifier=".cg",
        )
        delta = dot(first_b, b_h, tl.zeros((BN, BM), tl.float32))
        for t in range(0, live, CHUNK):
            tile = t + o_j // 16
            slot = tl.load(meta + tiles_at + 4 * tile, mask=tile < live, other=0)
            rank = tl.load(ranks + slot * NUM_SLICES + s, mask=tile < live, other=0)
            p_b = b + slot.to(tl.int64)[None, :] * b_slot + o_n.to(tl.int64)[:, None] * b_column
            for r0 in range(tl.where(t == 0, 16, 0), top, 16):
                r = r0 + o_j % 16
                b_h = tl.load(
                    p_h + (tile * RANK + r)[:, None] * BM + o_i[None, :],
                    mask=(r < rank)[:, None],
                    other=0.0,
                    cache_modifier=".cg",
                )
                m_b = (r < rank)[None, :] & (o_n < end)[:, None]
                b_b = tl.load(p_b + r[None, :] * b_rank, mask=m_b, other=0.0)
                delta = dot(b_b, b_h, delta)
        # a neighbour's NaN or infinity times the zero of this row would be NaN
        if tl.max((delta - delta != 0).to(tl.int32)) > 0:
            delta = tl.zeros((BN, BM), tl.float32)
            for t in range(live):
                own_slot = tl.load(meta + tiles_at + 4 * t)
                count = tl.load(meta + tiles_at + 4 * t + 2)
                own_rank = tl.load(ranks + own_slot * NUM_SLICES + s)
                o_m, o_r = tl.arange(0, 16), tl.arange(0, 16)
                row = tl.load(meta + rows_at + t * 16 + o_m, mask=o_m < count, other=-1)
                mine = tl.sum((row[:, None] == o_i[None, :]).to(tl.int32), 0) > 0
                own_b = b + own_slot.to(tl.int64) * b_slot + o_n.to(tl.int64)[:, None] * b_column
                own_delta = tl.zeros((BN, BM), tl.float32)
                for r0 in range(0, own_rank, 16):
                    own_r = r0 + o_r
                    h_own = tl.load(
                        p_h + (t * RANK + own_r)[:, None] * BM + o_i[None, :],
                        mask=(own_r < own_rank)[:, None],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    m_own = (own_r < own_rank)[None, :] & (o_n < end)[:, None]
                    b_own = tl.load(own_b + own_r[None, :] * b_rank, mask=m_own, other=0.0)
                    own_delta = dot(b_own, h_own, own_delta)
                delta = tl.where(mine[None, :], own_delta, delta)
        # rows without a delta stay as they are: adding 0.0 would turn -0.0 into 0.0
        acc = tl.where(delta == 0, acc, acc + delta)
    m_out = (o_i < num_rows)[None, :] & (o_n < end)[:, None]
    p_out = out + o_i.to(tl.int64)[None, :] * OFFSETS[NUM_SLICES] + o_n[:, None]
    tl.store(p_out, acc.to(out.dtype.element_ty), mask=m_out)
    if gone == BLOCKS - 1:  # nobody reads the counters any more
        tl.store(sync, 0)
        tl.store(sync + 1, 0)


@triton.jit
def _peek(counter):
    """The value of a counter, and with it what was written before it was raised."""
    if _ON_GPU:
        return tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.u32 $0, [$1];",
            "=r,l",
            [counter],
            tl.int32,
            is_pure=False,
            pack=1,
        )
    return tl.load(counter, volatile=True)


@triton.jit
def _prefetch(pointers):
    """Bring lines into the L2 cache, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers],
        tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _shrink_part(
    x, a, ranks, scalings, meta, h, parts, sync, K, tiles, tiles_at, rows_at, scales_at, x_row, a_slot, a_slice,
    a_rank, pid, NUM_SLICES: tl.constexpr, RANK: tl.constexpr, EVEN_K: tl.constexpr,
    BM: tl.constexpr, BKH: tl.constexpr, H_SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One part of K of h for one tile and one slice; the last part to arrive sums them all."""
    part = pid % H_SPLIT
    s = pid // H_SPLIT % NUM_SLICES
    tile = pid // (H_SPLIT * NUM_SLICES)
    slot = tl.load(meta + tiles_at + 4 * tile)
    if slot >= 0:
        count = tl.load(meta + tiles_at + 4 * tile + 2)
        rank = tl.load(ranks + slot * NUM_SLICES + s)
        scaling = tl.load(scalings + slot * NUM_SLICES + s)
        o_m, o_r, o_k = tl.arange(0, 16), tl.arange(0, 16), tl.arange(0, BKH)
        m_m = o_m < count
        row = tl.load(meta + rows_at + tile * 16 + o_m, mask=m_m, other=0)
        scale = tl.load(meta + scales_at + tile * 16 + o_m, mask=m_m, other=0)
        factor = scale.to(tl.float32, bitcast=True) * scaling
        p_x = x + row.to(tl.int64) * x_row
        k_part = tl.cdiv(tl.cdiv(K, H_SPLIT), BKH) * BKH
        k_begin = part * k_part
        for r0 in range(0, rank, 16):
            r = r0 + o_r
            m_r = r < rank
            p_a = a + slot.to(tl.int64) * a_slot + s * a_slice + r.to(tl.int64) * a_rank
            acc = tl.zeros((16, 16), tl.float32)
            for k in tl.range(k_begin, tl.minimum(k_begin + k_part, K), BKH, num_stages=STAGES):
                m_k = (o_k < K - k)[None, :]
                m_a, m_x = m_r[:, None], m_m[:, None]
                if not EVEN_K:
                    m_a, m_x = m_a & m_k, m_x & m_k
                b_a = tl.load(p_a[:, None] + (k + o_k)[None, :], mask=m_a, other=0.0)
                b_x = tl.load(p_x[:, None] + (k + o_k)[None, :], mask=m_x, other=0.0)
                acc = dot(b_a, tl.trans(b_x), acc)
            p_part = parts + ((part * NUM_SLICES + s) * tiles + tile) * (RANK * 16)
            tl.store(p_part + r[:, None] * 16 + o_m[None, :], acc)
        tl.debug_barrier()
        arrivals = sync + 2 + s * BM + tile
        if tl.atomic_add(arrivals, 1, sem="acq_rel") == H_SPLIT - 1:
            tl.store(arrivals, 0)
            p_h = h + (s * tiles + tile) * (RANK * BM)
            o_i = tl.arange(0, BM)
            for r0 in range(0, rank, 16):
                r = r0 + o_r
                tl.store(
                    p_h + r[:, None] * BM + o_i[None, :], tl.zeros((16, BM), h.dtype.element_ty)
                )
                total = tl.zeros((16, 16), tl.float32)
                for i in tl.static_range(H_SPLIT):
                    p_part = parts + ((i * NUM_SLICES + s) * tiles + tile) * (RANK * 16)
                    from_part = p_part + r[:, None] * 16 + o_m[None, :]
                    total += tl.load(from_part, cache_modifier=".cg")
                tl.debug_barrier()  # the zeros come first
                p_own = p_h + r[:, None] * BM + row[None, :]
                tl.store(p_own, (total * factor[None, :]).to(h.dtype.element_ty), mask=m_m[None, :])


def decode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weights: LoRAWeights,
    work: WorkList,
    meta: Tensor,
    tiles: int,
    sync: Tensor,
    tile: Tile | None = None,
) -> Tensor:
    """Launch the kernel.

    Args:
        x: [T', K], at most `MAX_ROWS` rows.
        weight: [N, K] of the base.
        bias: [N] of the base, or None.
        weights: of the site.
        work: the rows to do, gathered.
        meta: int32, the buffer that `work` describes.
        tiles: row tiles to launch; those past the filled ones are dead.
        sync: int32 zeros, as many as `counters` says.
        tile: instead of the table's, for tuning.

    Returns:
        [T', N].
    """
    rows, k = x.shape
    layout, a, b = weights.layout, weights.a, weights.b
    bm = tables.band(rows)
    tile = tile or tables.DECODE.pick(
        family(x.device), rows=bm, columns=layout.out_features, k=k, bytes=x.element_size()
    )
    rank = -(-weights.max_rank // 16) * 16
    overtakes = family(x.device) in ("sm90", "sm100")
    launch, blocks = _launch(tile, layout, rank, bm, bias is not None, even_k(tile, k), overtakes)
    n, split, h_split = layout.num_slices, tile["SPLIT"], tile["H_SPLIT"]
    out = torch.empty(rows, layout.out_features, dtype=x.dtype, device=x.device)
    h = torch.empty(n * tiles * rank * bm, dtype=x.dtype, device=x.device)
    words = h_split * n * tiles * rank * 16 + (blocks * split * tile["BN"] * bm if split > 1 else 0)
    parts = torch.empty(words, dtype=torch.float32, device=x.device)
    launch(
        (tiles * n * h_split + blocks * split, 1, 1),
        *(out, x, weight, out if bias is None else bias, a, b, weights.ranks, weights.scalings),
        *(meta, h, parts, sync, rows, k, tiles),
        *(work.room.tiles_at, work.room.rows_at, work.room.scales_at),
        *(x.stride(0), weight.stride(0), a.stride(0), a.stride(1), a.stride(2)),
        *(b.stride(0), b.stride(1), b.stride(2)),
    )
    return out


def counters(layout: SliceLayout) -> int:
    """Words of `sync` that a site may need."""
    return 2 + layout.num_slices * MAX_ROWS + sum(-(-width // 16) for width in layout.widths)


def even_k(tile: Tile, k: int) -> bool:
    """Whether no load of K needs a mask."""
    return k % (tile["SPLIT"] * tile["BK"]) == 0 and k % (tile["H_SPLIT"] * tile["BKH"]) == 0


@cache
def _launch(
    tile: Tile,
    layout: SliceLayout,
    rank: int,
    bm: int,
    has_bias: bool,
    even: bool,
    overtakes: bool,
) -> tuple[Launch, int]:
    bound = constexprs(tile, layout, rank, bm, has_bias, even, overtakes)
    return Launch(decode_kernel, **bound), bound["BLOCKS"]


def constexprs(
    tile: Tile,
    layout: SliceLayout,
    rank: int,
    bm: int,
    has_bias: bool,
    even: bool,
    overtakes: bool,
) -> dict[str, Any]:
    """Everything that is compiled into the kernel, by parameter name."""
    blocks = [-(-width // tile["BN"]) for width in layout.widths]
    return {
        "OFFSETS": layout.offsets,
        "FIRST_BLOCKS": tuple(sum(blocks[:i]) for i in range(len(blocks))),
        "BLOCKS": sum(blocks),
        "RANK": rank,
        "HAS_BIAS": has_bias,
        "EVEN_K": even,
        "BM": bm,
        "CHUNK": tile["CHUNK"],
        "OVERTAKES": overtakes,
        "AHEAD": tile["AHEAD"],
        "STAGES": tile.num_stages,
        "launch_pdl": overtakes,
        "num_warps": tile.num_warps,
        **{name: tile[name] for name in ("BN", "BK", "SPLIT", "BKH", "H_SPLIT")},
    }
