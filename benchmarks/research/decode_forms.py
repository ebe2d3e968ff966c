"""Times the decode forms of this folder on the sites of an 8B model: `python -m benchmarks.research.decode_forms`.

Added microseconds per site over the base product, as the benchmarks measure it. `--compile I/N` only
fills the kernel cache with every N-th variant, so that several processes can share the work.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import dense
from benchmarks.grid import DenseCell
from benchmarks.research.fused_decode import FusedDecode, Tiles
from benchmarks.research.fused_decode import fused_decode as fused_kernel
from benchmarks.research.wide_base import WideBase, expand_wide
from benchmarks.timing import BASE, capture, paired_rounds, timer

SITES = {
    "o": (4096, (4096,)),
    "qkv": (4096, (4096, 1024, 1024)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
    "qkv70tp8": (8192, (1024, 128, 128)),
}
POINTS = (  # tokens, adapters, rank, slots of the pool
    (32, 8, 16, 8), (1, 1, 16, 8), (128, 8, 16, 8), (64, 8, 64, 8), (32, 32, 64, 32),
)  # fmt: skip
WIDE_UP_TO = 1600
"""Spare rows above which the wide base is not tried."""


def fused_tiles(site: str, tokens: int) -> Iterator[Tiles]:
    """Variants of the one-launch form."""
    if tokens > 64:
        return
    small = tokens <= 16
    if site in ("o", "qkv", "down"):
        yield Tiles(BN=32, BK=128, STAGES=8 if small else 6)
        yield Tiles(BN=32, BK=256, STAGES=5 if small else 4)
        yield Tiles(BN=32, BK=128, STAGES=8 if small else 6, PDL=True)
        yield Tiles(BN=32, BK=256, STAGES=4, warps=8)
        yield Tiles(BN=16, BK=256, STAGES=5 if small else 4)
        yield Tiles(BN=64, BK=128, SPLIT=2, STAGES=5 if small else 4)
        yield Tiles(BN=128, BK=64, SPLIT=4, STAGES=5)
    elif site == "gate_up":
        yield Tiles(BN=32, BK=128, STAGES=5)
        yield Tiles(BN=32, BK=256, STAGES=4)
        yield Tiles(BN=64, BK=128, STAGES=4)
        yield Tiles(BN=64, BK=128, STAGES=4, PDL=True)
        yield Tiles(BN=64, BK=64, STAGES=6)
        yield Tiles(BN=128, BK=64, STAGES=5)
        yield Tiles(BN=128, BK=128, STAGES=3, warps=8)
    else:
        yield Tiles(BN=32, BK=128, SPLIT=4, STAGES=5, H_SPLIT=8)
        yield Tiles(BN=16, BK=256, SPLIT=2, STAGES=5, H_SPLIT=8)
        yield Tiles(BN=32, BK=128, SPLIT=8, STAGES=5, H_SPLIT=8)
        yield Tiles(BN=32, BK=128, SPLIT=4, STAGES=5, H_SPLIT=8, PDL=True)


def wide_choices(tokens: int) -> Iterator[dict[str, Any]]:
    """Variants of the expand behind a wide base."""
    yield {"bm": 16, "bn": 64, "br": 16, "warps": 4, "pdl": False}
    yield {"bm": 16, "bn": 64, "br": 16, "warps": 4, "pdl": True}
    yield {"bm": 16, "bn": 128, "br": 16, "warps": 4, "pdl": True}
    yield {"bm": 16, "bn": 32, "br": 16, "warps": 2, "pdl": True}
    yield {"bm": 16, "bn": 128, "br": 64, "warps": 4, "pdl": True}


def cells() -> Iterator[DenseCell]:
    """The cells tried."""
    for tokens, adapters, rank, slots in POINTS:
        for site, (k, widths) in SITES.items():
            yield DenseCell(site, k, widths, tokens, adapters, rank, slots, 64, "even", tokens, 2.5)


def compile_share(index: int, total: int) -> None:
    """Fill the kernel cache with variants `index, index + total, ...`."""
    device, bf = torch.device("cuda"), torch.bfloat16
    t, i, f = (torch.empty(16, dtype=d, device=device) for d in (bf, torch.int32, torch.float32))
    jobs = []
    for cell in cells():
        groups = min(cell.max_loras, cell.tokens)
        for tiles in fused_tiles(cell.site, cell.tokens):
            jobs.append(("fused", cell, groups, tiles))
        if sum(cell.widths) and cell.max_loras * len(cell.widths) * cell.max_rank <= WIDE_UP_TO:
            jobs += [("wide", cell, groups, choice) for choice in wide_choices(cell.tokens)]
    for form, cell, groups, choice in jobs[index::total]:
        try:
            if form == "fused":
                launch = FusedDecode(
                    cell.K, cell.widths, cell.max_rank, groups, cell.tokens, choice, device
                )
                fused_kernel.warmup(t, t, t, t, i, f, i, i, f, f, i, t, cell.tokens, cell.max_rank,
                                    grid=(1,), **launch.constants)  # fmt: skip
            else:
                n, slices = sum(cell.widths), len(cell.widths)
                row = n + cell.max_loras * slices * cell.max_rank
                ends = [*(sum(cell.widths[: j + 1]) for j in range(slices - 1)), n, n][:2]
                expand_wide.warmup(t, t, i, f, i, i, i, i, cell.max_rank, N=n, ROW=row, SLICES=slices,
                                   FIRST_END=ends[0], SECOND_END=ends[1], BM=choice["bm"], BN=choice["bn"],
                                   BR=choice["br"], PDL=choice["pdl"], num_warps=choice["warps"],
                                   launch_pdl=choice["pdl"], grid=(1,))  # fmt: skip
        except Exception as error:  # noqa: BLE001 - a variant that does not compile is reported when timed
            print(
                "compile",
                form,
                cell.site,
                cell.tokens,
                choice,
                type(error).__name__,
                str(error)[:200],
            )


def measure(cell: DenseCell) -> dict[str, Any]:
    """All forms at one cell."""
    device = torch.device("cuda")
    problem = dense.build(cell, device=device, dtype=torch.bfloat16)
    backend = dense.load_backend("torch", device=device)
    weights = [
        dense.fill(backend, base, a, cell) for base, a in zip(problem.bases, problem.adapters)
    ]
    slots = problem.row_slots.int()
    distinct = sorted(set(slots.tolist()) - {-1})
    bound = min(cell.max_loras, cell.tokens)
    groups = torch.tensor(
        distinct + [-1] * (bound - len(distinct)), dtype=torch.int32, device=device
    )
    replays, errors = {BASE: capture(dense.base_step(problem), device)}, {}

    def contender(name: str, make: Any) -> None:
        try:
            replays[name] = capture(make(), device)
        except Exception as error:  # noqa: BLE001 - one variant must not end the run
            errors[name] = f"{type(error).__name__}: {str(error)[:160]}"

    def fused(tiles: Tiles) -> Any:
        launch = FusedDecode(cell.K, cell.widths, cell.max_rank, bound, cell.tokens, tiles, device)
        return lambda: [
            launch(
                problem.x, base.weight, w.a, w.b.contiguous(), w.ranks, w.scalings, slots, groups
            )
            for base, w in zip(problem.bases, weights)
        ]

    weights = [type(w)(w.a, w.b.contiguous(), w.ranks, w.scalings, w.layout) for w in weights]
    for tiles in fused_tiles(cell.site, cell.tokens):
        name = "fused " + " ".join(f"{k}{v}" for k, v in asdict(tiles).items() if getattr(Tiles(), k) != v
                                   or k in ("BN", "BK", "STAGES"))  # fmt: skip
        contender(name, lambda tiles=tiles: fused(tiles))
    timed_only = set()
    if cell.max_loras * len(cell.widths) * cell.max_rank <= WIDE_UP_TO:
        wide = [
            WideBase(base.weight, w.a, w.b, w.ranks, w.scalings, cell.widths, slots)
            for base, w in zip(problem.bases, weights)
        ]
        contender("wide product only", lambda: lambda: [layer.product(problem.x) for layer in wide])
        timed_only.add("wide product only")
        for choice in wide_choices(cell.tokens):

            def make(choice: dict[str, Any] = choice) -> Any:
                made = [
                    WideBase(
                        base.weight, w.a, w.b, w.ranks, w.scalings, cell.widths, slots, **choice
                    )
                    for base, w in zip(problem.bases, weights)
                ]
                for one, other in zip(made, wide):
                    one.weight = other.weight
                return lambda: [layer(problem.x) for layer in made]

            contender("wide " + " ".join(f"{k}{v}" for k, v in choice.items()), make)
    checked = {n: r for n, r in replays.items() if n not in timed_only}
    errors_found = dense.check(problem, checked, errors)
    names = [n for n in replays if n == BASE or n in errors_found or n in timed_only]
    paired = paired_rounds(timer(replays, device), names, layers=dense.LAYERS, enough=lambda p: True,
                           min_rounds=21, seconds=0.6)  # fmt: skip
    estimates = paired.estimates()
    order = sorted(estimates, key=lambda n: estimates[n].median)
    print(f"{cell.site} T={cell.tokens} x{cell.adapters} r{cell.rank} S{cell.max_loras}: "
          f"base {sorted(paired.base)[paired.rounds // 2]:.1f}", flush=True)  # fmt: skip
    for name in order:
        e = estimates[name]
        print(f"   {e.median:7.2f} [{e.low:.2f}, {e.high:.2f}]  {name}", flush=True)
    for name, what in errors.items():
        print(f"   !! {name}: {what}", flush=True)
    return {**cell.asked(), "base_us": sorted(paired.base)[paired.rounds // 2],
            "forms": {n: [estimates[n].median, estimates[n].low, estimates[n].high] for n in order},
            "errors": errors}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", help="I/N")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget-s", type=float, default=60.0)
    options = parser.parse_args()
    if options.compile:
        index, total = map(int, options.compile.split("/"))
        compile_share(index, total)
        return
    began, rows = time.perf_counter(), []
    for cell in cells():
        if time.perf_counter() - began > options.budget_s:
            print("time is up")
            break
        try:
            rows.append(measure(cell))
        except Exception as error:  # noqa: BLE001 - one cell must not end the run
            print(cell.site, cell.tokens, type(error).__name__, str(error)[:300], flush=True)
        torch.cuda.empty_cache()
        if options.out:
            options.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
