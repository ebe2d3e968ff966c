"""shrink: `h[t, s, r] = sum_k x[t, k] * A[slot(t), s, r, k]` for r below the slot's rank.

The sum over k is cut into splits of `SPLIT` inputs, whatever the batch: each split is the sum of
chains of `CHAIN` inputs, and h is the sum of the splits in order. Few rows: a program per split, and whoever
finishes last adds the splits up. Many rows: one program runs through them. The order of every
addition is the same, so h does not depend on the batch that a row is part of.

The ranks of all slices are packed side by side, slice after slice, so that x is read once for all
of them and nothing is read or computed past a rank. A gathered tile is one program's rows (BM).
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

from lora_core.triton_kit import Launch, Tile, add_product, dot, family
from lora_core.weights import LoRAWeights
from lora_core.workspace import Workspace
from lora_core_triton.sites import cached
from lora_core_triton.tables import SHRINK, band
from lora_core_triton.worklist import Room, WorkList

SPLIT = 512
"""Inputs of one split; part of the arithmetic, so it is no tuning parameter."""
CHAIN = 128
"""Inputs of 16 bits that are summed in one go; part of the arithmetic likewise."""


@triton.jit
def shrink_kernel(
    x,  # [T', K] - input rows
    meta,  # int32 - the work list's buffer
    a,  # [S, n, R, K]
    ranks,  # int32 [S, n]
    h,  # float32 [T', n, R] - result
    partial,  # float32 [programs of rows, splits, BM, WIDTH] - unused when SEQUENTIAL
    arrived,  # int32 [programs of rows] - zero before and after; unused when SEQUENTIAL
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
    CHAIN: tl.constexpr,
    WIDTH: tl.constexpr,  # packed columns of all slices at full rank, whole blocks
    BM: tl.constexpr,
    FEW: tl.constexpr,  # packed columns at a time, where that is all
    BC: tl.constexpr,  # and otherwise
    BK: tl.constexpr,
):
    p_program = tl.program_id(1)
    p_tile = p_program // SUBTILES
    o_m = (p_program % SUBTILES) * BM + tl.arange(0, BM)
    p_meta = meta + tiles_at + p_tile * 4
    slot = tl.load(p_meta)
    count = tl.load(p_meta + 2)
    if GATHERED:
        o_row = tl.load(meta + rows_at + p_tile * BM + o_m).to(tl.int64)
    else:
        o_row = (tl.load(p_meta + 1) + o_m).to(tl.int64)
    if (slot < 0) | (count <= (p_program % SUBTILES) * BM):
        return
    m_m = o_m < count

    total_rank = 0
    for s in tl.static_range(NUM_SLICES):
        total_rank += tl.load(ranks + slot * NUM_SLICES + s)
    tensors = x + o_row * x_row, a + slot.to(tl.int64) * a_slot, ranks + slot * NUM_SLICES, h
    p_partial = partial + p_program.to(tl.int64) * splits * (BM * WIDTH)
    sizes = K, total_rank, splits, group, a_slice, a_rank
    if FEW == BC or total_rank <= FEW:
        _sums(
            *(tensors, p_partial, arrived + p_program, o_row, m_m, sizes, NUM_SLICES, MAX_RANK),
            *(EVEN_K, SEQUENTIAL, SPLIT, CHAIN, WIDTH, BM, FEW, BK),
        )
    else:
        _sums(
            *(tensors, p_partial, arrived + p_program, o_row, m_m, sizes, NUM_SLICES, MAX_RANK),
            *(EVEN_K, SEQUENTIAL, SPLIT, CHAIN, WIDTH, BM, BC, BK),
        )


@triton.jit
def _sums(
    tensors,  # rows of x [BM], A and ranks of the slot, h
    partial,  # of the program's rows
    arrived,
    o_row,
    m_m,
    sizes,
    NUM_SLICES: tl.constexpr,
    MAX_RANK: tl.constexpr,
    EVEN_K: tl.constexpr,
    SEQUENTIAL: tl.constexpr,
    SPLIT: tl.constexpr,
    CHAIN: tl.constexpr,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
):
    """BC packed columns at a time, all splits of the program."""
    p_x, p_slot, ranks, h = tensors
    K, total_rank, splits, group, a_slice, a_rank = sizes
    p_group = tl.program_id(0)
    o_k = tl.arange(0, BK)
    p_x = p_x[:, None] + o_k[None, :]  # [BM, BK]
    p_slot += o_k[:, None]  # [BK, 1]
    p_partial = partial + tl.arange(0, BM)[:, None] * WIDTH + tl.arange(0, BC)[None, :]  # [BM, BC]

    STEPS: tl.constexpr = SPLIT // BK
    CHAIN_STEPS: tl.constexpr = CHAIN // BK
    ONE_BY_ONE: tl.constexpr = (CHAIN_STEPS <= 1) | (p_x.dtype.element_ty == tl.float32)
    for column in range(0, total_rank, BC):
        o_c = column + tl.arange(0, BC)
        m_c = o_c < total_rank
        o_slice, o_rank = _unpack(o_c, ranks, NUM_SLICES)
        p_a = (
            p_slot + (o_slice.to(tl.int64) * a_slice + o_rank.to(tl.int64) * a_rank)[None, :]
        )  # [BK, BC]
        b_h = tl.zeros((BM, BC), tl.float32)
        b_split = tl.zeros((BM, BC), tl.float32)
        b_chain = tl.zeros((BM, BC), tl.float32)
        first, end = p_group * group, tl.minimum(p_group * group + group, splits)
        for step in range(first * STEPS, end * STEPS):
            k = step * BK
            if EVEN_K:
                m_x = m_m[:, None]
                m_a = m_c[None, :]
            else:
                m_x = m_m[:, None] & (o_k < K - k)[None, :]
                m_a = m_c[None, :] & (o_k < K - k)[:, None]
            b_x = tl.load(p_x + k, mask=m_x, other=0.0)
            b_a = tl.load(p_a + k, mask=m_a, other=0.0)
            if ONE_BY_ONE:
                b_split = add_product(b_x, b_a, b_split)
            else:
                b_chain = dot(b_x, b_a, b_chain)
                if step % CHAIN_STEPS == CHAIN_STEPS - 1:
                    b_split += b_chain
                    b_chain = tl.zeros((BM, BC), tl.float32)
            if step % STEPS == STEPS - 1:  # a split is whole
                if SEQUENTIAL:
                    b_h += b_split
                else:
                    p_split = p_partial + (step // STEPS) * (BM * WIDTH) + column
                    tl.store(p_split, b_split, mask=m_m[:, None] & m_c[None, :])
                b_split = tl.zeros((BM, BC), tl.float32)
        if SEQUENTIAL:
            o_h = (o_slice * MAX_RANK + o_rank)[None, :]
            p_h = h + o_row[:, None] * (NUM_SLICES * MAX_RANK) + o_h
            tl.store(p_h, b_h, mask=m_m[:, None] & m_c[None, :])

    if not SEQUENTIAL:
        DEPTH: tl.constexpr = max(8, 512 // BC)  # partial sums that are on their way at once
        tl.debug_barrier()  # every thread's part is written before one of them says so
        if tl.atomic_add(arrived, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            for column in range(0, total_rank, BC):
                o_c = column + tl.arange(0, BC)
                o_slice, o_rank = _unpack(o_c, ranks, NUM_SLICES)
                m_h = m_m[:, None] & (o_c < total_rank)[None, :]
                b_h = tl.zeros((BM, BC), tl.float32)
                for start in range(0, splits, DEPTH):
                    for i in tl.static_range(DEPTH):  # past the end adds 0.0
                        b_h += tl.load(
                            p_partial + (start + i) * (BM * WIDTH) + column,
                            mask=m_h & (tl.full((1, 1), start + i, tl.int32) < splits),
                            other=0.0,
                            cache_modifier=".cg",  # written by other programs: not from L1
                        )
                o_h = (o_slice * MAX_RANK + o_rank)[None, :]
                tl.store(h + o_row[:, None] * (NUM_SLICES * MAX_RANK) + o_h, b_h, mask=m_h)
            tl.store(arrived, 0)


@triton.jit
def _unpack(o_c, ranks, NUM_SLICES: tl.constexpr):
    """(slice, rank in it) of packed columns."""
    o_slice = tl.zeros_like(o_c)
    o_rank = o_c
    before = 0
    for s in tl.static_range(NUM_SLICES):
        past = o_c >= before
        o_slice = tl.where(past, s, o_slice)
        o_rank = tl.where(past, o_c - before, o_rank)
        before += tl.load(ranks + s)
    return o_slice, o_rank


def shrink(
    x: Tensor,
    weights: LoRAWeights,
    work: WorkList,
    meta: Tensor,
    workspace: Workspace,
    tiles: int,
    *,
    scratch: bool,
    h_scratch: bool = False,
) -> Tensor:
    """Launch the kernel.

    Args:
        x: [T', K].
        weights: of the site.
        work: the rows to do.
        meta: int32, the buffer that `work` describes.
        workspace: its `sync["arrived"]` counts; its scratch holds partial sums if `scratch`.
        tiles: row tiles to launch; those past the filled ones are dead.
        scratch: whether scratch may be used; a graph needs memory of its own.
        h_scratch: whether for h too, which then is good until the next call.

    Returns:
        float32 [T', n, R]; of scratch there may be more rows.
    """
    num_rows, room, arrived = x.shape[0], work.room, workspace.sync["arrived"]
    key = ("shrink", band(num_rows), room)
    site = cached(weights, key, lambda: _Site(x, weights, room, meta, arrived))
    if not h_scratch:
        h = site.nothing.new_empty((num_rows, *site.h_row))
    else:
        h = workspace.scratch.get(site.h_name, site.nothing)
        if h.shape[0] < num_rows:
            h = site.nothing.new_empty((band(num_rows), *site.h_row))
            workspace.scratch[site.h_name] = h
    programs = tiles * site.programs_per_tile
    if site.groups == 1 or programs > site.most_programs:  # not enough counters: no splits
        site.sequential((1, programs, 1), x, meta, h, h, arrived, x.stride(0))
    else:
        partial = _partial(workspace, programs * site.partial_size, scratch=scratch)
        site.split((site.groups, programs, 1), x, meta, h, partial, arrived, x.stride(0))
    return h


class _Site:
    """What stays the same between the calls of one site in one band of rows."""

    def __init__(
        self, x: Tensor, weights: LoRAWeights, room: Room, meta: Tensor, arrived: Tensor
    ) -> None:
        a, n, max_rank, k = weights.a, weights.layout.num_slices, weights.max_rank, x.shape[1]
        tile = SHRINK.pick(
            family(x.device), rows=band(x.shape[0]), slices=n, bytes=x.element_size()
        )
        self.h_row, self.h_name = (n, max_rank), f"h of {n} times {max_rank}"
        self.nothing = some = x.new_empty((0, n, max_rank), dtype=torch.float32)
        splits = -(-k // SPLIT)
        group = tile["GROUP"] or splits  # splits of one program
        self.groups = -(-splits // group)
        self.programs_per_tile = room.tile_rows // tile["BM"]
        self.most_programs = arrived.numel()
        self.partial_size = splits * tile["BM"] * _width(tile, n, max_rank)
        self.split, self.sequential = (
            _launch(tuple(constexprs(tile, n, max_rank, room, k % SPLIT == 0, sequential).items()))
            .fix(
                (
                    *(x, meta, a, weights.ranks, some, some, arrived, room.tiles_at, room.rows_at),
                    *(k, x.stride(0), a.stride(0), a.stride(1), a.stride(2), splits),
                    splits if sequential else group,
                ),
                varying=(0, 1, 4, 5, 6, 10),
            )
            .call
            for sequential in (False, True)
        )


def _partial(workspace: Workspace, size: int, *, scratch: bool) -> Tensor:
    """Room for partial sums: scratch that grows, or in a graph memory of the graph's own."""
    found = workspace.scratch.get("partial") if scratch else None
    if found is None or found.numel() < size:
        found = torch.empty(size, dtype=torch.float32, device=workspace.sync["arrived"].device)
        if scratch:
            workspace.scratch["partial"] = found
    return found


@cache
def _launch(bound: tuple[tuple[str, Any], ...]) -> Launch:
    return Launch(shrink_kernel, **dict(bound))


def _columns(tile: Tile, n: int, max_rank: int) -> int:
    """Packed columns at a time: no more than there are."""
    return min(tile["BC"], max(16, _power_of_two(n * max_rank)))


def _width(tile: Tile, n: int, max_rank: int) -> int:
    """Packed columns of n slices at full rank, in whole blocks."""
    columns = _columns(tile, n, max_rank)
    return -(-n * max_rank // columns) * columns


def _power_of_two(value: int) -> int:
    """`value` rounded up."""
    return 1 << (value - 1).bit_length()


def constexprs(
    tile: Tile, n: int, max_rank: int, room: Room, even_k: bool, sequential: bool
) -> dict[str, Any]:
    """Everything that is compiled into the kernel, by parameter name."""
    columns = _columns(tile, n, max_rank)
    return {
        "NUM_SLICES": n,
        "MAX_RANK": max_rank,
        "GATHERED": room.gathered,
        "SUBTILES": room.tile_rows // tile["BM"],
        "EVEN_K": even_k,
        "SEQUENTIAL": sequential,
        "SPLIT": SPLIT,
        "CHAIN": CHAIN,
        "WIDTH": _width(tile, n, max_rank),
        "BM": tile["BM"],
        "FEW": min(16 * _power_of_two(n), columns),
        "BC": columns,
        "BK": tile["BK"] if even_k else min(tile["BK"], 32),  # element-wise loads need registers
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
