"""expand: `out[t, c] += scale(t) * scaling[slot(t), s] * sum_r h[t, s, r] * B[slot(t), c, r]`.

s is the slice that column c belongs to; r stays below the rank of (slot, s). One program per tile of
rows and block of columns, a block never crossing from one slice into the next. Rows of rank 0 are not
touched (adding 0.0 would turn -0.0 into 0.0).

With EMBEDDING, h is A itself, `[S, V, R]`, and a row's ranks are gathered by its token id.
"""

# Triton reads the parameters of kernels itself, annotations would be noise:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201, ANN202, D103

from __future__ import annotations

from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lora_core.triton_kit import Launch, Tile, add_product, dot, family
from lora_core.weights import LoRAWeights, SliceLayout
from lora_core_triton.sites import cached
from lora_core_triton.tables import EXPAND, band
from lora_core_triton.worklist import Room, WorkList

CHAIN = 128
"""Ranks of 16 bits that are summed in one go; part of the arithmetic, so it is no tuning parameter."""
_FEW_SLOTS = 32
"""Pools up to here: every program loads all ranks of its slice, a line or two of memory."""


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
    slots,  # S
    OFFSETS: tl.constexpr,  # first column of each slice, and the end
    FIRST_PANELS: tl.constexpr,  # first panel of each slice
    MAX_RANK: tl.constexpr,
    GATHERED: tl.constexpr,
    SUBTILES: tl.constexpr,  # programs that share one tile of rows
    EMBEDDING: tl.constexpr,
    SLOTS: tl.constexpr,  # S rounded up to a power of two, or 0: too many to look at all
    CHAIN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,  # ranks at a time; up to rank 16 they are 16
    PANEL: tl.constexpr,  # blocks of columns of one program
    OVERTAKES: tl.constexpr,  # may start before the kernel before it has finished
):
    p_panel, p_program = tl.program_id(0), tl.program_id(1)
    NUM_SLICES: tl.constexpr = len(FIRST_PANELS)
    s = 0
    column = p_panel * (BN * PANEL)
    end = OFFSETS[1]
    for i in tl.static_range(1, NUM_SLICES):
        if p_panel >= FIRST_PANELS[i]:
            s = i
            column = OFFSETS[i] + (p_panel - FIRST_PANELS[i]) * (BN * PANEL)
            end = OFFSETS[i + 1]
    if SLOTS > 0:  # of all slots, while the tile is still on its way: one round of loads less
        o_s = tl.arange(0, SLOTS)
        p_slots = o_s * NUM_SLICES + s
        b_ranks = tl.load(ranks + p_slots, mask=o_s < slots, other=0)
        b_scalings = tl.load(scalings + p_slots, mask=o_s < slots, other=0.0)
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
    if SLOTS > 0:
        rank = tl.sum(tl.where(o_s == slot, b_ranks, 0))
        factor = b_scale * tl.sum(tl.where(o_s == slot, b_scalings, 0.0))
    else:
        rank = tl.load(ranks + slot * NUM_SLICES + s)
        factor = b_scale * tl.load(scalings + slot * NUM_SLICES + s)
    if rank == 0:
        if OVERTAKES:
            tl.extra.cuda.gdc_wait()
        return
    slot64 = slot.to(tl.int64)
    p_out = out + o_row * out_row
    if EMBEDDING:
        o_id = tl.load(ids + o_row, mask=m_m, other=0).to(tl.int64)
        p_h = h + slot64 * h_slice + o_id * h_row
    else:
        p_h = h + o_row * h_row + s * h_slice
    p_b = b + slot64 * b_slot
    if BR == 16 or rank <= 16:
        _panel(
            *(p_out, p_h, p_b, m_m, column, end, rank, factor, b_column, b_rank),
            *(MAX_RANK, CHAIN, BM, BN, 16, BR == 16, PANEL, OVERTAKES),
        )
    else:
        _panel(
            *(p_out, p_h, p_b, m_m, column, end, rank, factor, b_column, b_rank),
            *(MAX_RANK, CHAIN, BM, BN, BR, True, PANEL, OVERTAKES),
        )


@triton.jit
def _panel(
    p_out,  # [BM] - rows of out
    p_h,  # [BM] - rows of h, at the slice
    p_b,  # B of the slot
    m_m,
    column,
    end,  # of the slice
    rank,
    factor,  # one, or [BM, 1]
    b_column,
    b_rank,
    MAX_RANK: tl.constexpr,
    CHAIN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    MORE: tl.constexpr,  # the rank may exceed BR
    PANEL: tl.constexpr,
    OVERTAKES: tl.constexpr,
):
    """PANEL blocks of columns; h is loaded once, `out` of the next block before this one is stored."""
    o_r = tl.arange(0, BR)
    o_n = column + tl.arange(0, BN)
    p_b += o_r.to(tl.int64)[:, None] * b_rank  # [BR, 1]
    b_b = _load_b(p_b, o_r, o_n, rank, end, b_column)
    if OVERTAKES:  # until here nothing was read that the kernel before this one writes
        tl.extra.cuda.gdc_wait()
    b_h = _load_h(p_h, m_m, o_r, rank, MAX_RANK).to(b_b.dtype)
    b_out = tl.load(
        p_out[:, None] + o_n[None, :], mask=m_m[:, None] & (o_n < end)[None, :], other=0.0
    )
    for block in tl.static_range(PANEL):
        if block + 1 < PANEL:
            next_b = _load_b(p_b, o_r, o_n + BN, rank, end, b_column)
            m_next = m_m[:, None] & (o_n + BN < end)[None, :]
            next_out = tl.load(p_out[:, None] + (o_n + BN)[None, :], mask=m_next, other=0.0)
        b_delta = dot(b_h, b_b, tl.zeros((BM, BN), tl.float32))
        if MORE and MAX_RANK > BR:
            b_before = tl.zeros((BM, BN), tl.float32)  # chains that are complete
            for r in range(BR, rank, BR):
                h_more = _load_h(p_h + r, m_m, o_r, rank - r, MAX_RANK - r).to(b_b.dtype)
                b_more = _load_b(p_b + r * b_rank, o_r, o_n, rank - r, end, b_column)
                if b_b.dtype == tl.float32:
                    b_delta = add_product(h_more, b_more, b_delta)
                else:
                    if MAX_RANK > CHAIN:  # noqa: SIM102 - decided when it is compiled
                        if r % CHAIN == 0:
                            b_before += b_delta
                            b_delta = tl.zeros((BM, BN), tl.float32)
                    b_delta = dot(h_more, b_more, b_delta)
            b_delta += b_before
        b_sum = b_out.to(tl.float32) + b_delta * factor
        m_out = m_m[:, None] & (o_n < end)[None, :]
        tl.store(p_out[:, None] + o_n[None, :], b_sum.to(b_out.dtype), mask=m_out)
        if block + 1 < PANEL:
            b_b, b_out, o_n = next_b, next_out, o_n + BN


@triton.jit
def _load_b(p_b, o_r, o_n, rank, end, b_column):
    """[BR, BN], zero at and past `rank`."""
    p = p_b + o_n.to(tl.int64)[None, :] * b_column
    return tl.load(p, mask=(o_r < rank)[:, None] & (o_n < end)[None, :], other=0.0)


@triton.jit
def _load_h(p_h, m_m, o_r, rank, max_rank):
    """[BM, BR], zero at and past `rank`.

    Cut after the load: a mask that may end anywhere would make every element a load of its own.
    """
    m_h = m_m[:, None] & (o_r < max_rank)[None, :]
    b_h = tl.load(p_h[:, None] + o_r[None, :], mask=m_h, other=0.0)
    return tl.where((o_r < rank)[None, :], b_h, 0.0)


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
    grid = (site.panels, tiles * site.programs_per_tile, 1)
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
            ranks=weights.max_rank,
            bytes=b.element_size(),
        )
        overtakes = bool(tile["OVERTAKES"]) and may_overtake
        bound = constexprs(
            tile,
            weights.layout,
            weights.max_rank,
            room,
            embedding,
            overtakes,
            slots=weights.num_slots,
        )
        self.panels = sum(_panels(tile, weights.layout))
        self.programs_per_tile = room.tile_rows // tile["BM"]
        h_row, h_slice = (1, 0) if embedding else (0, 1)
        args = (
            *(out, source, meta, b, weights.ranks, weights.scalings),
            weights.ranks if ids is None else ids,
            *(room.tiles_at, room.rows_at, room.scales_at, out.stride(0)),
            *(source.stride(h_row), source.stride(h_slice)),
            *(b.stride(0), b.stride(1), b.stride(2), weights.num_slots),
        )
        varying = (0, 1, 2, 10, 6) if embedding else (0, 1, 2, 10)
        self.launch = _launch(tuple(bound.items())).fix(args, varying).call


@cache
def _launch(bound: tuple[tuple[str, Any], ...]) -> Launch:
    return Launch(expand_kernel, **dict(bound))


def constexprs(
    tile: Tile,
    layout: SliceLayout,
    max_rank: int,
    room: Room,
    embedding: bool,
    overtakes: bool,
    *,
    slots: int = 8,
) -> dict[str, Any]:
    """Everything that is compiled into the kernel, by parameter name, and its launch options."""
    panels = _panels(tile, layout)
    return {
        "OFFSETS": layout.offsets,
        "FIRST_PANELS": tuple(sum(panels[:i]) for i in range(len(panels))),
        "MAX_RANK": max_rank,
        "GATHERED": room.gathered,
        "SUBTILES": room.tile_rows // tile["BM"],
        "EMBEDDING": embedding,
        "SLOTS": 1 << (slots - 1).bit_length() if slots <= _FEW_SLOTS else 0,
        "CHAIN": CHAIN,
        "BM": tile["BM"],
        "BN": tile["BN"],
        "BR": min(tile["BR"], max(16, 1 << (max_rank - 1).bit_length())),
        "PANEL": _panel_blocks(tile, layout),
        "OVERTAKES": overtakes,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **({"launch_pdl": True} if overtakes else {}),
    }


def _panels(tile: Tile, layout: SliceLayout) -> list[int]:
    """Of each slice."""
    width = tile["BN"] * _panel_blocks(tile, layout)
    return [-(-columns // width) for columns in layout.widths]


def _panel_blocks(tile: Tile, layout: SliceLayout) -> int:
    """Blocks of columns of one program: one where odd widths are loaded element by element."""
    return tile["PANEL"] if all(width % 8 == 0 for width in layout.widths) else 1
