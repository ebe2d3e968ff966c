"""Host microseconds of what a forward pays per batch and per site: `python host.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from lora_core import LoRABatch, SliceLayout, load_backend
from lora_core.triton_kit import INTERPRETED


def microseconds(call: Callable[[], object], repeats: int = 200) -> float:
    """Median over rounds of the mean time until the call returns; the device is not waited for."""
    for _ in range(20):
        call()
    rounds = []
    for _ in range(9):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        rounds.append((time.perf_counter() - start) / repeats * 1e6)
    return sorted(rounds)[4]


def main() -> None:
    backend = load_backend("triton")
    backend.init_graph("decode", max_requests=256, max_tokens=256)
    backend.init_graph("prefill", max_requests=256, max_tokens=16384)
    for requests in (1, 32, 256):
        slots = [i % 8 for i in range(requests)]
        batches = {
            "decode": LoRABatch([1] * requests, slots, "decode"),
            "prefill": LoRABatch([8192 // requests] * requests, slots, "prefill"),
        }
        for mode, batch in batches.items():
            for graph in (None, mode):

                def prepare(batch: LoRABatch = batch, graph: Any = graph) -> None:
                    backend.prepare_batch(batch, graph=graph)

                where = "graph" if graph else "eager"
                print(f"prepare {requests:3d} {mode} {where}: {microseconds(prepare):6.1f}")
    if INTERPRETED:
        return
    weights = backend.allocate_weights(
        num_slots=8,
        max_rank=64,
        in_features=256,
        layout=SliceLayout((256, 64, 64)),
        dtype=torch.bfloat16,
    )
    weights.ranks.fill_(16)
    x = torch.randn(32, 256, device=backend.device, dtype=torch.bfloat16)
    w = torch.randn(384, 256, device=backend.device, dtype=torch.bfloat16)
    backend.prepare_batch(LoRABatch([1] * 32, [i % 8 for i in range(32)], "decode"))
    h, out = backend.shrink(x, weights), torch.mm(x, w.T)
    base = microseconds(lambda: torch.mm(x, w.T), 50)
    site = microseconds(lambda: backend.linear(x, lambda x: torch.mm(x, w.T), weights), 50)
    print(
        f"eager site: base {base:.1f}, with LoRA {site:.1f}, added {site - base:.1f}; "
        f"shrink {microseconds(lambda: backend.shrink(x, weights), 50):.1f}, "
        f"expand {microseconds(lambda: backend.expand(h, weights, out), 50):.1f}"
    )


if __name__ == "__main__":
    main()
