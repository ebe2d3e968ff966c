# ruff: noqa: ANN001, ANN201 - Triton's jit reads annotations itself: only constexpr means anything
"""Expand for few rows, one program per block of columns for all tiles of the work list at once.

The tiles of a gathered work list are laid side by side as the inner dimension of one product: B of
`CHUNK` tiles, 16 ranks each, against h with zeros where a row is not of a tile. Reads `out` once and
has one round of independent loads, where a program per tile has one round per tile.
"""

from __future__ import annotations

from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks import dense
from benchmarks.grid import DenseCell
from benchmarks.timing import BASE, capture, paired_rounds, timer
from lora_core.batch import LoRABatch
from lora_core.triton_kit import Launch, dot
from lora_core.weights import LoRAWeights, SliceLayout
from lora_core_triton.backend import TritonBackend
from lora_core_triton.worklist import WorkList


@triton.jit(do_not_specialize=["tiles", "num_rows"])
def expand_columns(
    out,  # [T', N] - added to in place
    h,  # float32 [T', n, R]
    meta,  # int32 - the work list's buffer
    b,  # [S, N, R]
    ranks,  # int32 [S, n]
    scalings,  # float32 [S, n]
    tiles,
    num_rows,
    tiles_at,
    rows_at,
    scales_at,
    out_row,
    h_row,
    h_slice,
    b_slot,
    b_column,
    b_rank,
    OFFSETS: tl.constexpr,
    FIRST_BLOCKS: tl.constexpr,
    BM: tl.constexpr,  # rows of out, rounded up
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERTAKES: tl.constexpr,
):
    NUM_SLICES: tl.constexpr = len(FIRST_BLOCKS)
    block = tl.program_id(0)
    s = 0
    column = block * BN
    end = OFFSETS[1]
    for i in tl.static_range(1, NUM_SLICES):
        if block >= FIRST_BLOCKS[i]:
            s = i
            column = OFFSETS[i] + (block - FIRST_BLOCKS[i]) * BN
            end = OFFSETS[i + 1]
    o_i, o_n, o_j = tl.arange(0, BM), column + tl.arange(0, BN), tl.arange(0, CHUNK * 16)
    p_out = out + o_i.to(tl.int64)[None, :] * out_row + o_n[:, None]
    m_out = (o_i < num_rows)[None, :] & (o_n < end)[:, None]
    total = tl.zeros((BN, BM), tl.float32)
    for first in range(0, tiles, CHUNK):
        tile, o_r = first + o_j // 16, o_j % 16
        slot = tl.load(meta + tiles_at + 4 * tile, mask=tile < tiles, other=-1)
        count = tl.load(meta + tiles_at + 4 * tile + 2, mask=tile < tiles, other=0)
        row = tl.load(meta + rows_at + first * 16 + o_j, mask=tile < tiles, other=-1)
        scale = tl.load(meta + scales_at + first * 16 + o_j, mask=tile < tiles, other=0)
        row = tl.where((slot >= 0) & (o_r < count), row, -1)
        rank = tl.load(ranks + slot * NUM_SLICES + s, mask=slot >= 0, other=0)
        scaling = tl.load(scalings + slot * NUM_SLICES + s, mask=slot >= 0, other=0.0)
        p_b = b + slot.to(tl.int64)[None, :] * b_slot + o_n.to(tl.int64)[:, None] * b_column
        m_n = (o_n < end)[:, None]
        b_b = tl.load(p_b + o_r[None, :] * b_rank, mask=(o_r < rank)[None, :] & m_n, other=0.0)
        # which tile of the chunk a row belongs to (0: none), and its scale
        is_row = row[None, :] == o_i[:, None]  # [BM, J]
        tile_of = tl.sum(tl.where(is_row, (o_j // 16 + 1)[None, :], 0), 1)
        factor = tl.sum(tl.where(is_row, scale.to(tl.float32, bitcast=True)[None, :], 0.0), 1)
        own = (o_j // 16 + 1)[:, None] == tile_of[None, :]  # [J, BM]
        if OVERTAKES:
            tl.extra.cuda.gdc_wait()
        p_h = h + o_i.to(tl.int64)[None, :] * h_row + s * h_slice + o_r[:, None]
        b_h = tl.load(p_h, mask=own & (o_r < rank)[:, None], other=0.0) * scaling[:, None]
        delta = dot(b_b, b_h.to(b_b.dtype), tl.zeros((BN, BM), tl.float32))
        for r0 in range(16, tl.max(rank), 16):
            m_r = o_r + r0 < rank
            more = tl.load(p_b + (r0 + o_r)[None, :] * b_rank, mask=m_r[None, :] & m_n, other=0.0)
            b_h = tl.load(p_h + r0, mask=own & m_r[:, None], other=0.0) * scaling[:, None]
            delta = dot(more, b_h.to(b_b.dtype), delta)
        total += delta * factor[None, :]
    before = tl.load(p_out, mask=m_out, other=0.0).to(tl.float32)
    tl.store(p_out, (before + total).to(out.dtype.element_ty), mask=m_out & (total != 0))


def expand(h: Tensor, weights: LoRAWeights, out: Tensor, work: WorkList, meta: Tensor, tiles: int, *,
           bn: int = 64, chunk: int = 8, warps: int = 4, overtakes: bool = True) -> None:  # fmt: skip
    """Launch it; for weights without NaN: this form has no path of its own for them."""
    b, rows = weights.b, out.shape[0]
    bm = max(16, triton.next_power_of_2(rows))
    launch, blocks = _launch(weights.layout, bm, bn, chunk, warps, overtakes)
    launch(
        (blocks, 1, 1),
        *(out, h, meta, b, weights.ranks, weights.scalings, tiles, rows),
        *(work.room.tiles_at, work.room.rows_at, work.room.scales_at, out.stride(0)),
        *(h.stride(0), h.stride(1), b.stride(0), b.stride(1), b.stride(2)),
    )


@cache
def _launch(
    layout: SliceLayout, bm: int, bn: int, chunk: int, warps: int, overtakes: bool
) -> tuple[Launch, int]:
    blocks = [-(-width // bn) for width in layout.widths]
    bound = {
        "OFFSETS": layout.offsets,
        "FIRST_BLOCKS": tuple(sum(blocks[:i]) for i in range(len(blocks))),
        "BM": bm, "BN": bn, "CHUNK": chunk, "OVERTAKES": overtakes,
    }  # fmt: skip
    return Launch(expand_columns, **bound, num_warps=warps, launch_pdl=overtakes), sum(blocks)


POINTS = (  # site, K, widths, tokens, adapters, rank, slots of the pool
    ("gate_up", 4096, (14336, 14336), 32, 8, 16, 8), ("qkv", 4096, (4096, 1024, 1024), 32, 8, 16, 8),
    ("o", 4096, (4096,), 32, 8, 16, 8), ("gate_up", 4096, (14336, 14336), 1, 1, 16, 8),
    ("gate_up", 4096, (14336, 14336), 64, 8, 16, 8), ("gate_up", 4096, (14336, 14336), 32, 32, 64, 32),
)  # fmt: skip
CHOICES: tuple[dict[str, int], ...] = (
    {"bn": 64}, {"bn": 128, "warps": 8}, {"bn": 128}, {"bn": 64, "overtakes": False}, {"bn": 64, "chunk": 4},
    {"bn": 32},
)  # fmt: skip


def measure(cell: DenseCell) -> None:
    """Time it beside the triton backend's expand, both behind the base product."""
    device = torch.device("cuda")
    problem = dense.build(cell, device=device, dtype=torch.bfloat16)
    backend = TritonBackend(device=device)
    backend.init_graph("decode", max_requests=cell.tokens, max_tokens=cell.tokens)
    info = backend.prepare_batch(LoRABatch(cell.seq_lens, cell.slots, "decode"), graph="decode")
    sites = []
    for base, adapters in zip(problem.bases, problem.adapters, strict=True):
        weights = dense.fill(backend, base, adapters, cell)
        sites.append((base, weights, backend.shrink(problem.x, weights)))

    def theirs() -> list[Tensor]:
        return [backend.expand(h, weights, base(problem.x)) for base, weights, h in sites]

    def columns(choice: dict[str, int]) -> list[Tensor]:
        outs = []
        for base, weights, h in sites:
            tiles = backend._tiles(info, info.work, cell.tokens, weights)
            outs.append(base(problem.x))
            expand(h, weights, outs[-1], info.work, info.meta, tiles, **choice)
        return outs

    replays = {
        BASE: capture(dense.base_step(problem), device),
        "expand of triton": capture(theirs, device),
    }
    for choice in CHOICES:
        replays[f"columns {choice}"] = capture(partial(columns, choice), device)
    errors: dict[str, str] = {}
    dense.check(problem, replays, errors)
    paired = paired_rounds(timer(replays, device), list(replays), layers=dense.LAYERS, enough=lambda _: True,
                           min_rounds=21, seconds=0.5)  # fmt: skip
    print(
        f"{cell.site} T={cell.tokens} x{cell.adapters} r{cell.rank}",
        {k: v[:90] for k, v in errors.items()},
    )
    for name, e in sorted(paired.estimates().items(), key=lambda item: item[1].median):
        print(f"   {e.median:7.2f} [{e.low:.2f}, {e.high:.2f}]  {name}", flush=True)


def main() -> None:
    """Every point."""
    for site, k, widths, tokens, adapters, rank, slots in POINTS:
        cell = DenseCell(site, k, widths, tokens, adapters, rank, slots, 64, "even", tokens, 2.5)
        try:
            measure(cell)
        except Exception as error:  # noqa: BLE001 - one point must not end the run
            print(site, tokens, type(error).__name__, str(error)[:300], flush=True)


if __name__ == "__main__":
    main()
