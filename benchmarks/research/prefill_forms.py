"""Times the prefill form of this folder: `python -m benchmarks.research.prefill_forms`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import dense
from benchmarks.grid import DenseCell
from benchmarks.research.fused_prefill import Product, Tiles, segments_of, shrink
from benchmarks.timing import BASE, capture, paired_rounds, timer

POINTS = (
    ("o", 4096, (4096,), 8192, 16), ("qkv", 4096, (4096, 1024, 1024), 8192, 16),
    ("o", 4096, (4096,), 2048, 16), ("gate_up", 4096, (14336, 14336), 2048, 16),
    ("down", 14336, (4096,), 8192, 16), ("gate_up", 4096, (14336, 14336), 8192, 16),
    ("qkv", 4096, (4096, 1024, 1024), 2048, 16), ("down", 14336, (4096,), 2048, 16),
    ("qkv70tp8", 8192, (1024, 128, 128), 4096, 16),
)  # fmt: skip
LAYERS = 4


def tiles_of(site: str, tokens: int) -> Iterator[Tiles]:
    """Variants of the product."""
    yield Tiles()
    yield Tiles(STAGES=4)
    yield Tiles(HALVES=False)
    yield Tiles(BM=128, BN=128, STAGES=4, warps=4, HALVES=False)
    yield Tiles(BM=256, BN=128)
    yield Tiles(FLATTEN=False)
    if site == "qkv70tp8":
        yield Tiles(BM=128, BN=128, STAGES=5, warps=8)


def measure(point: tuple[Any, ...], seconds: float) -> dict[str, Any]:
    """All variants at one point."""
    site, k, widths, tokens, rank = point
    cell = DenseCell(site, k, widths, tokens, 8, rank, 8, 64, "even", 8, 2.5)
    device = torch.device("cuda")
    problem = dense.build(cell, device=device, dtype=torch.bfloat16, layers=LAYERS)
    backend = dense.load_backend("torch", device=device)
    weights = [
        dense.fill(backend, base, a, cell) for base, a in zip(problem.bases, problem.adapters)
    ]
    weights = [type(w)(w.a, w.b.contiguous(), w.ranks, w.scalings, w.layout) for w in weights]
    h = torch.full(
        (tokens, len(widths), cell.max_rank), float("nan"), device=device, dtype=torch.bfloat16
    )
    replays, errors, untested = {BASE: capture(dense.base_step(problem), device)}, {}, set()

    def contender(name: str, make: Any) -> None:
        try:
            replays[name] = capture(make(), device)
        except Exception as error:  # noqa: BLE001 - one variant must not end the run
            errors[name] = f"{type(error).__name__}: {str(error)[:160]}"

    best: dict[str, Any] = {}
    for bm, bk, stages, warps in (
        (64, 128, 4, 4),
        (32, 256, 4, 4),
        (16, 256, 4, 4),
        (64, 64, 6, 8),
    ):
        rows = segments_of(cell.seq_lens, cell.slots, bm, device)
        table = _row_blocks(rows, bm, device)

        def shrinks(table: Any = table, bm: int = bm, bk: int = bk, stages: int = stages,
                    warps: int = warps) -> Any:  # fmt: skip
            return lambda: [shrink(problem.x, w.a, w.ranks, table, h, bm=bm, bk=bk, stages=stages,
                                   warps=warps) or h for w in weights]  # fmt: skip

        name = f"shrink bm{bm} bk{bk} st{stages} w{warps}"
        contender(name, shrinks)
        untested.add(name)
        best[name] = (table, bm, bk, stages, warps)

    for tiles in tiles_of(site, tokens):
        tables = segments_of(cell.seq_lens, cell.slots, tiles.BM, device)
        for lora in (False, True):

            def make(tiles: Tiles = tiles, tables: Any = tables, lora: bool = lora) -> Any:
                table, bm, bk, stages, warps = best["shrink bm64 bk128 st4 w4"]
                made = [Product(problem.x, base.weight, h, w.b, w.ranks, w.scalings, widths, tables, tiles,
                                lora=lora) for base, w in zip(problem.bases, weights)]  # fmt: skip

                def step() -> list[torch.Tensor]:
                    out = []
                    for product, w in zip(made, weights):
                        if lora:
                            shrink(
                                problem.x,
                                w.a,
                                w.ranks,
                                table,
                                h,
                                bm=bm,
                                bk=bk,
                                stages=stages,
                                warps=warps,
                            )
                        out.append(product())
                    return out

                return step

            name = f"{'fused' if lora else 'product only'} {tiles}"
            contender(name, make)
            if not lora:
                untested.add(name)
    checked = {n: r for n, r in replays.items() if n not in untested}
    fine = dense.check(problem, checked, errors)
    names = [n for n in replays if n == BASE or n in fine or n in untested]
    paired = paired_rounds(timer(replays, device), names, layers=LAYERS, enough=lambda p: True,
                           min_rounds=11, seconds=seconds)  # fmt: skip
    for samples, base in (
        (paired.added[n], paired.base) for n in paired.added if n.startswith("shrink")
    ):
        samples[:] = [
            s + b for s, b in zip(samples, base, strict=True)
        ]  # alone, not on top of the base
    estimates = paired.estimates()
    order = sorted(estimates, key=lambda n: estimates[n].median)
    base_us = sorted(paired.base)[paired.rounds // 2]
    print(f"{site} T={tokens} r{rank}: base {base_us:.1f} ({paired.rounds} rounds)", flush=True)
    for name in order:
        e = estimates[name]
        print(f"   {e.median:7.1f} [{e.low:.1f}, {e.high:.1f}]  {name}", flush=True)
    for name, what in errors.items():
        print(f"   !! {name}: {what}", flush=True)
    return {**cell.asked(), "base_us": base_us, "errors": errors,
            "forms": {n: [estimates[n].median, estimates[n].low, estimates[n].high] for n in order}}  # fmt: skip


def _row_blocks(
    tables: dict[str, torch.Tensor], bm: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    slots, begins, ends = [], [], []
    for slot, begin, end in zip(*(tables[k].tolist() for k in ("slot", "begin", "end"))):
        for at in range(begin, end, bm):
            slots.append(slot)
            begins.append(at)
            ends.append(min(at + bm, end))
    return tuple(torch.tensor(v, dtype=torch.int32, device=device) for v in (slots, begins, ends))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget-s", type=float, default=60.0)
    parser.add_argument("--cell-s", type=float, default=1.0)
    options = parser.parse_args()
    began, rows = time.perf_counter(), []
    for point in POINTS:
        if time.perf_counter() - began > options.budget_s:
            print("time is up")
            break
        try:
            rows.append(measure(point, options.cell_s))
        except Exception as error:  # noqa: BLE001 - one point must not end the run
            print(point, type(error).__name__, str(error)[:300], flush=True)
        torch.cuda.empty_cache()
        if options.out:
            options.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
