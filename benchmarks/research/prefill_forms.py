"""Times the prefill form of `fused` beside the triton backend: `python -m benchmarks.research.prefill_forms`.

`--point I` does one point; several processes with `--compile` fill the kernel cache first.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import dense
from benchmarks.grid import DenseCell
from benchmarks.research.fused.backend import FusedBackend
from benchmarks.timing import BASE, capture, paired_rounds, timer
from lora_core import LoRABatch, load_backend
from lora_core.backend import LoRABackend

POINTS = (
    ("o", 4096, (4096,), 8192, 16), ("gate_up", 4096, (14336, 14336), 8192, 16),
    ("qkv", 4096, (4096, 1024, 1024), 8192, 16), ("down", 14336, (4096,), 8192, 16),
    ("o", 4096, (4096,), 2048, 16), ("gate_up", 4096, (14336, 14336), 2048, 16),
    ("qkv", 4096, (4096, 1024, 1024), 2048, 16), ("down", 14336, (4096,), 2048, 16),
    ("o", 4096, (4096,), 8192, 64),
)  # fmt: skip
LAYERS = 4


def measure(point: tuple[Any, ...], *, seconds: float, compile_only: bool) -> dict[str, Any] | None:
    """One point: the product alone, with the expand inside, and the triton backend."""
    site, k, widths, tokens, rank = point
    cell = DenseCell(site, k, widths, tokens, 8, rank, 8, 64, "even", 8, 2.5)
    device = torch.device("cuda")
    problem = dense.build(
        cell, device=device, dtype=torch.bfloat16, layers=1 if compile_only else LAYERS
    )

    def step(backend: LoRABackend[Any], slots: list[int]) -> Any:
        pools = [
            dense.fill(backend, w, a, cell)
            for w, a in zip(problem.bases, problem.adapters, strict=True)
        ]
        backend.init_graph("prefill", max_requests=cell.requests, max_tokens=tokens)
        backend.prepare_batch(LoRABatch(cell.seq_lens, slots), graph="prefill")

        def run() -> list[Tensor]:
            return [
                backend.linear(problem.x, w, a) for w, a in zip(problem.bases, pools, strict=True)
            ]

        return run

    idle = [-1] * cell.requests
    contenders = {
        "product, no adapter": lambda: step(FusedBackend(device=device), idle),
        "expand inside the product": lambda: step(FusedBackend(device=device), cell.slots),
        "triton": lambda: step(load_backend("triton", device=device), cell.slots),
    }
    replays, errors = {BASE: capture(dense.base_step(problem), device)}, {}
    for name, make in contenders.items():
        try:
            replays[name] = capture(make(), device)
        except Exception as error:  # noqa: BLE001 - one form must not end the run
            errors[name] = f"{type(error).__name__}: {str(error)[:160]}"
    if compile_only:
        return None
    checked = {n: r for n, r in replays.items() if n != "product, no adapter"}
    dense.check(problem, checked, errors)
    paired = paired_rounds(timer(replays, device), list(replays), layers=LAYERS, enough=lambda _: True,
                           min_rounds=11, seconds=seconds)  # fmt: skip
    estimates = paired.estimates()
    base_us = sorted(paired.base)[paired.rounds // 2]
    print(f"{site} T={tokens} r{rank}: base {base_us:.1f}, " + ", ".join(
        f"{n} {e.median:.1f} [{e.low:.1f}, {e.high:.1f}]" for n, e in estimates.items()), errors, flush=True)  # fmt: skip
    forms = {n: [e.median, e.low, e.high] for n, e in estimates.items()}
    return {**cell.asked(), "base_us": base_us, "forms": forms, "errors": errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--point", type=int)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for index, point in enumerate(POINTS):
        if options.point in (None, index):
            try:
                rows.append(measure(point, seconds=0.6, compile_only=options.compile))
            except Exception as error:  # noqa: BLE001 - one point must not end the run
                print(point, type(error).__name__, str(error)[:300], flush=True)
            torch.cuda.empty_cache()
    if options.out:
        options.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
