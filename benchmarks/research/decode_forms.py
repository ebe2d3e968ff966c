"""Times the decode forms of this folder on the sites of an 8B model: `python -m benchmarks.research.decode_forms`.

Added microseconds per site over the base product, as the benchmarks measure it. `--compile I/N` only
fills the kernel cache with every N-th variant, so that several processes can share the work.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import dense
from benchmarks.grid import DenseCell
from benchmarks.research.fused import decode
from benchmarks.research.fused.backend import FusedBackend
from benchmarks.research.fused.tables import band
from benchmarks.research.wide_base import WideBase, expand_wide
from benchmarks.timing import BASE, capture, paired_rounds, timer
from lora_core.batch import LoRABatch
from lora_core.triton_kit import Tile
from lora_core.triton_kit.launch import FIXED_OPTIONS
from lora_core.weights import SliceLayout

SITES = {
    "o": (4096, (4096,)),
    "qkv": (4096, (4096, 1024, 1024)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
    "qkv70tp8": (8192, (1024, 128, 128)),
}
POINTS = (  # tokens, adapters, rank, slots of the pool
    (32, 8, 16, 8), (1, 1, 16, 8), (64, 8, 16, 8), (128, 8, 16, 8), (32, 32, 64, 32),
)  # fmt: skip
WIDE_UP_TO = 1600
"""Spare rows above which the wide base is not tried."""


def fused_tiles(site: str, tokens: int) -> Iterator[Tile]:
    """Variants of the one-launch form."""
    if tokens > 128:
        return
    make = partial(tile, band(tokens))
    if site in ("o", "qkv", "down"):
        yield make(64, 128, split=2)
        yield make(64, 128, split=2, ahead=0)
        yield make(64, 128, split=2, ahead=16)
        yield make(64, 128, split=2, h_split=2)
        yield make(64, 64, split=2)
        yield make(64, 128, split=4)
        yield make(128, 64, split=4)
    elif site == "gate_up":
        yield make(64, 128)
        yield make(64, 128, ahead=0)
        yield make(64, 128, ahead=16)
        yield make(64, 64)
        yield make(64, 128, split=2)
        yield make(128, 64)
        yield make(128, 64, warps=8)
        yield make(128, 64, split=2)
    else:
        yield make(32, 128, split=4)
        yield make(64, 128, split=4)
        yield make(64, 128, split=8)
        yield make(64, 64, split=8)


def tile(
    bm: int, bn: int, bk: int, *, split: int = 1, warps: int = 4, ahead: int = 8, h_split: int = 4
) -> Tile:
    """One choice, as many stages as let two programs share a multiprocessor."""
    chunk = 8 if bm <= 32 else 4
    stages = max(2, min(8, (113 * 1024 - bn * chunk * 32) // ((bn + bm) * bk * 2)))
    names = {
        "BN": bn,
        "BK": bk,
        "SPLIT": split,
        "BKH": 128,
        "H_SPLIT": h_split,
        "CHUNK": chunk,
        "AHEAD": ahead,
    }
    return Tile(names, num_warps=warps, num_stages=stages)


def words(tile: Tile) -> str:
    """A choice in a few words."""
    names = " ".join(f"{k}{tile[k]}" for k in ("BN", "BK", "SPLIT", "H_SPLIT", "AHEAD"))
    return f"{names} st{tile.num_stages} w{tile.num_warps}"


def wide_choices() -> Iterator[dict[str, Any]]:
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
    jobs: list[tuple[str, DenseCell, Any]] = []
    for cell in cells():
        jobs += [("fused", cell, choice) for choice in fused_tiles(cell.site, cell.tokens)]
        if cell.max_loras * len(cell.widths) * cell.max_rank <= WIDE_UP_TO:
            jobs += [("wide", cell, choice) for choice in wide_choices()]
    for form, cell, choice in jobs[index::total]:
        try:
            if form == "fused":
                layout, bm = SliceLayout(cell.widths), band(cell.tokens)
                bound = decode.constexprs(
                    choice, layout, 64, bm, False, decode.even_k(choice, cell.K), True
                )
                r, k, n = cell.max_rank, cell.K, sum(cell.widths)
                slices, at = layout.num_slices, 1008
                decode.decode_kernel.warmup(
                    t, t, t, t, t, t, i, f, i, t, f, i, cell.tokens, k, 9, at, at, at, k, k,
                    slices * r * k, r * k, k, n * r, 1, n, grid=(1,), **FIXED_OPTIONS, **bound,
                )  # fmt: skip
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
        dense.fill(backend, base, a, cell)
        for base, a in zip(problem.bases, problem.adapters, strict=True)
    ]
    slots = problem.row_slots.int()
    ours = FusedBackend(device=device)
    ours.init_graph("decode", max_requests=cell.requests, max_tokens=cell.tokens)
    info = ours.prepare_batch(LoRABatch(cell.seq_lens, cell.slots, "decode"), graph="decode")
    by_rank = [
        dense.fill(ours, base, a, cell)
        for base, a in zip(problem.bases, problem.adapters, strict=True)
    ]
    replays, errors = {BASE: capture(dense.base_step(problem), device)}, {}

    def contender(name: str, make: Any) -> None:
        try:
            replays[name] = capture(make(), device)
        except Exception as error:  # noqa: BLE001 - one variant must not end the run
            errors[name] = f"{type(error).__name__}: {str(error)[:160]}"

    def fused(choice: Tile, ours: Any, info: Any) -> Any:
        def step() -> list[torch.Tensor]:
            return [
                decode.decode(
                    problem.x, base.weight, None, w, info.work, info.meta,
                    ours._tiles(info, info.work, cell.tokens, w), ours.workspace.sync["fused"], choice,
                )
                for base, w in zip(problem.bases, by_rank, strict=True)
            ]  # fmt: skip

        return step

    weights = [type(w)(w.a, w.b.contiguous(), w.ranks, w.scalings, w.layout) for w in weights]
    timed_only = set()
    idle = FusedBackend(device=device)
    idle.init_graph("decode", max_requests=cell.requests, max_tokens=cell.tokens)
    nobody = idle.prepare_batch(
        LoRABatch(cell.seq_lens, [-1] * cell.requests, "decode"), graph="decode"
    )
    for index, choice in enumerate(fused_tiles(cell.site, cell.tokens)):
        contender(f"fused {words(choice)}", partial(fused, choice, ours, info))
        if index == 0:
            contender("fused, no adapter", partial(fused, choice, idle, nobody))
            timed_only.add("fused, no adapter")
    if cell.max_loras * len(cell.widths) * cell.max_rank <= WIDE_UP_TO:
        wide = [
            WideBase(base.weight, w.a, w.b, w.ranks, w.scalings, cell.widths, slots)
            for base, w in zip(problem.bases, weights, strict=True)
        ]
        contender("wide product only", lambda: lambda: [layer.product(problem.x) for layer in wide])
        timed_only.add("wide product only")
        for choice in wide_choices():

            def make(choice: dict[str, Any] = choice) -> Any:
                made = [
                    WideBase(
                        base.weight, w.a, w.b, w.ranks, w.scalings, cell.widths, slots, **choice
                    )
                    for base, w in zip(problem.bases, weights, strict=True)
                ]
                for one, other in zip(made, wide, strict=True):
                    one.weight = other.weight
                return lambda: [layer(problem.x) for layer in made]

            contender("wide " + " ".join(f"{k}{v}" for k, v in choice.items()), make)
    checked = {n: r for n, r in replays.items() if n not in timed_only}
    errors_found = dense.check(problem, checked, errors)
    names = [n for n in replays if n == BASE or n in errors_found or n in timed_only]
    paired = paired_rounds(timer(replays, device), names, layers=dense.LAYERS, enough=lambda _: True,
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
