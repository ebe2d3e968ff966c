"""expand: `out[t, c] += scale(t) * scaling[slot(t), s] * sum_r h[t, s, r] * B[slot(t), c, r]`.

s is the slice that column c belongs to; r stays below the rank of (slot, s). One program per tile of
rows and block of columns, a block never crossing from one slice into the next. Rows of rank 0 are not
touched (adding 0.0 would turn -0.0 into 0.0).

With EMBEDDING, h is A itself, `[S, V, R]`, and a row's ranks are gathered by its token id.
"""

# Triton reads the parameters of kernels itself, annotations would be noise:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, D103

from __future__ import annotations

from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lora_core.triton_kit import Launch, Tile, dot, family
from lora_core.weights import LoRAWeights, SliceLayout
from lora_core_triton.sites import cached
from lora_core_triton.tables import EXPAND, band
from lora_core_triton.worklist import Room, WorkList


@triton.jit
def expand_kernel(
    out,  # [T', N] - added to in place
    h,  # float32 [T', n, R]; EMBEDDING: A [S, V, R]
    meta,  # int32 - the work list's buffer
    b,  # [S, N, R]
    ranks,  # int32 [S, n]
    scalings,  # float32 [S, n]
    ids,  # integers [T']; EMBEDDING only
    tiles_at,
    rows_at,
    scales_at,
    out_row,
    h_row,
    h_slice,  # EMBEDDING: the stride of a slot
    b_slot,
    b_column,
    b_rank,
    OFFSETS: tl.constexpr,  # first column of each slice, and the end
    FIRST_BLOCKS: tl.constexpr,  # first column block of each slice
    MAX_RANK: tl.constexpr,
    GATHERED: tl.constexpr,
    SUBTILES: tl.constexpr,  # programs that share one tile of rows
    EMBEDDING: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    OVERTAKES: tl.constexpr,  # may start before the kernel before it has finished
):
    p_block, p_program = tl.program_id(0), tl.program_id(1)
    p_tile = p_program // SUBTILES
    o_m = (p_program % SUBTILES) * BM + tl.arange(0, BM)
    p_meta = meta + tiles_at + p_tile * 4
    slot = tl.load(p_meta)
    count = tl.load(p_meta + 2)
    if GATHERED:
        o_row = tl.load(meta + rows_at + p_tile * BM + o_m).to(tl.int64)
        b_scale = tl.load(meta + scales_at + p_tile * BM + o_m).to(tl.float32, bitcast=True)
        b_scale = b_scale[:, None]
    else:
        o_row = (tl.load(p_meta + 1) + o_m).to(tl.int64)
        b_scale = tl.load(p_meta + 3).to(tl.float32, bitcast=True)
    if (slot < 0) | (count <= (p_program % SUBTILES) * BM):
        if OVERTAKES:  # to finish before the kernel before would hide it from the one after
            tl.extra.cuda.gdc_wait()
        return
    m_m = o_m < count

    NUM_SLICES: tl.constexpr = len(FIRST_BLOCKS)
    s = 0
    column = p_block * BN
    end = OFFSETS[1]
    for i in tl.static_range(1, NUM_SLICES):
        if p_block >= FIRST_BLOCKS[i]:
            s = i
            column = OFFSETS[i] + (p_block - FIRST_BLOCKS[i]) * BN
            end = OFFSETS[i + 1]
    o_n = column + tl.arange(0, BN)
    m_n = o_n < end
    m_out = m_m[:, None] & m_n[None, :]
    o_r = tl.arange(0, BR)
    slot64 = slot.to(tl.int64)
    p_out = out + o_row[:, None] * out_row + o_n[None, :]  # [BM, BN]
    p_b = b + slot64 * b_slot + o_n.to(tl.int64)[None, :] * b_column  # [1, BN]

    # the first block of ranks is loaded while the rank is still on its way, and cut to it afterwards
    rank = tl.load(ranks + slot * NUM_SLICES + s)
    scaling = tl.load(scalings + slot * NUM_SLICES + s)
    o_b = o_r.to(tl.int64)[:, None] * b_rank  # [BR, 1]
    b_b = tl.load(p_b + o_b, mask=(o_r < MAX_RANK)[:, None] & m_n[None, :], other=0.0)
    if OVERTAKES:  # until here nothing was read that the kernel before this one writes
        tl.extra.cuda.gdc_wait()
    if EMBEDDING:
        o_id = tl.load(ids + o_row, mask=m_m, other=0).to(tl.int64)
        p_h = h + slot64 * h_slice + o_id[:, None] * h_row + o_r[None, :]  # [BM, BR]
    else:
        p_h = h + o_row[:, None] * h_row + s * h_slice + o_r[None, :]  # [BM, BR]
    b_h = tl.load(p_h, mask=m_m[:, None] & (o_r < MAX_RANK)[None, :], other=0.0)
    b_out = tl.load(p_out, mask=m_out, other=0.0)
    if rank == 0:
        return
    b_b = tl.where((o_r < rank)[:, None], b_b, 0.0)
    b_h = tl.where((o_r < rank)[None, :], b_h, 0.0)

    b_delta = dot(b_h.to(b_b.dtype), b_b, tl.zeros((BM, BN), tl.float32))
    for r in range(BR, rank, BR):
        m_r = o_r < rank - r
        b_h = tl.load(p_h + r, mask=m_m[:, None] & m_r[None, :], other=0.0)
        o_b = (o_r + r).to(tl.int64)[:, None] * b_rank
        b_b = tl.load(p_b + o_b, mask=m_r[:, None] & m_n[None, :], other=0.0)
        b_delta = dot(b_h.to(b_b.dtype), b_b, b_delta)
    b_sum = b_out.to(tl.float32) + b_delta * (b_scale * scaling)
    tl.store(p_out, b_sum.to(out.dtype.element_ty), mask=m_out)


def expand(
    h: Tensor,
    weights: LoRAWeights,
    out: Tensor,
    work: WorkList,
    meta: Tensor,
    tiles: int,
    ids: Tensor | None = None,
    *,
    may_overtake: bool = False,
) -> None:
    """Launch the kernel.

    Args:
        h: float32 [T', n, R]; with `ids` it is not read, A is.
        weights: of the site.
        out: [T', N], added to in place.
        work: the rows to do.
        meta: int32, the buffer that `work` describes.
        tiles: row tiles to launch; those past the filled ones are dead.
        ids: integers [T'], of an embedding.
        may_overtake: whether the kernel before this one wrote none of meta and weights, and began
            after those were written; then this one may begin before that one has ended.
    """
    room, source = work.room, h if ids is None else weights.a
    kind = None if ids is None else ids.dtype
    key = ("expand", band(out.shape[0]), room, out.dtype, kind, may_overtake, source.stride())
    site = cached(
        weights,
        key,
        lambda: _Site(source, weights, out, room, meta, ids, may_overtake=may_overtake),
    )
    grid = (site.blocks, tiles * site.programs_per_tile, 1)
    if ids is None:
        site.launch(grid, out, source, meta, out.stride(0))
    else:
        site.launch(grid, out, source, meta, out.stride(0), ids)


class _Site:
    """What stays the same between the calls of one site in one band of rows."""

    def __init__(
        self,
        source: Tensor,
        weights: LoRAWeights,
        out: Tensor,
        room: Room,
        meta: Tensor,
        ids: Tensor | None,
        *,
        may_overtake: bool,
    ) -> None:
        b, embedding = weights.b, ids is not None
        tile = EXPAND.pick(
            family(out.device),
            rows=band(out.shape[0]),
            columns=out.shape[1],
            bytes=b.element_size(),
        )
        overtakes = bool(tile["OVERTAKES"]) and may_overtake
        bound = constexprs(tile, weights.layout, weights.max_rank, room, embedding, overtakes)
        self.blocks = sum(-(-width // tile["BN"]) for width in weights.layout.widths)
        self.programs_per_tile = room.tile_rows // tile["BM"]
        h_row, h_slice = (1, 0) if embedding else (0, 1)
        args = (
            *(out, source, meta, b, weights.ranks, weights.scalings),
            weights.ranks if ids is None else ids,
            *(room.tiles_at, room.rows_at, room.scales_at, out.stride(0)),
            *(source.stride(h_row), source.stride(h_slice)),
            *(b.stride(0), b.stride(1), b.stride(2)),
        )
        varying = (0, 1, 2, 10, 6) if embedding else (0, 1, 2, 10)
        self.launch = _launch(tuple(bound.items())).fix(args, varying).call


@cache
def _launch(bound: tuple[tuple[str, Any], ...]) -> Launch:
    return Launch(expand_kernel, **dict(bound))


def constexprs(
    tile: Tile, layout: SliceLayout, max_rank: int, room: Room, embedding: bool, overtakes: bool
) -> dict[str, Any]:
    """Everything that is compiled into the kernel, by parameter name, and its launch options."""
    blocks = [-(-width // tile["BN"]) for width in layout.widths]
    return {
        "OFFSETS": layout.offsets,
        "FIRST_BLOCKS": tuple(sum(blocks[:i]) for i in range(len(blocks))),
        "MAX_RANK": max_rank,
        "GATHERED": room.gathered,
        "SUBTILES": room.tile_rows // tile["BM"],
        "EMBEDDING": embedding,
        "BM": tile["BM"],
        "BN": tile["BN"],
        "BR": tile["BR"],
        "OVERTAKES": overtakes,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **({"launch_pdl": True} if overtakes else {}),
    }
