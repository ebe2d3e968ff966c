"""What the host pays: preparing one forward, and one eager site."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Literal

import torch

from benchmarks import dense
from benchmarks.grid import DenseCell
from benchmarks.results import Row
from benchmarks.stats import median_interval
from lora_core import load_backend
from lora_core.backend import LoRABackend
from lora_core.batch import LoRABatch

REQUESTS = (1, 32, 256)
_MAX_LORAS, _RANK = 8, 16
_CALLS, _IN_FLIGHT = 400, 20


def host_us(call: Callable[[], object], device: torch.device, *, calls: int = _CALLS) -> float:
    """Median host microseconds of a call that does not wait for the device.

    The device is drained every few calls, outside the timed ones, so that its queue never fills.
    """
    samples = []
    for i in range(calls + calls // 10):
        start = time.perf_counter()
        call()
        took = (time.perf_counter() - start) * 1e6
        if i >= calls // 10:  # the first ones warm up
            samples.append(took)
        if i % _IN_FLIGHT == 0 and device.type == "cuda":
            torch.cuda.synchronize(device)
    return median_interval(samples).median


def added_us(step: Callable[[], object], base: Callable[[], object], device: torch.device) -> float:
    """Median host microseconds of `step` on top of `base`, called in turn: the clock may drift."""
    differences = []
    warm_up = _CALLS // 10
    for i in range(_CALLS + warm_up):
        start = time.perf_counter()
        base()
        between = time.perf_counter()
        step()
        took = (time.perf_counter() - between) - (between - start)
        if i >= warm_up:
            differences.append(took * 1e6)
        if i % _IN_FLIGHT == 0 and device.type == "cuda":
            torch.cuda.synchronize(device)
    return median_interval(differences).median


def rows(backends: Sequence[str], kit: ModuleType | None, *, device: torch.device) -> Iterator[Row]:
    """Every host row: `what, requests, ours_us, peers_us`, and `errors` where something failed."""
    peers = kit.prepare(max_loras=_MAX_LORAS, rank=_RANK, device=device) if kit else {}
    for requests in REQUESTS:
        lengths, slots = [1] * requests, [i % _MAX_LORAS for i in range(requests)]
        graphs: tuple[Literal["decode"] | None, ...] = (None, "decode")
        for graph in graphs:
            failures = dense.Failures()
            ours, theirs = {}, {}
            for name in backends:
                with failures.recorded(name):
                    backend = load_backend(name, device=device)
                    if graph is not None:
                        if graph not in backend.capabilities.graphs:
                            continue
                        backend.init_graph(graph, max_requests=requests, max_tokens=requests)
                    ours[name] = host_us(
                        partial(_prepare, backend, lengths, slots, graph),
                        device,
                    )
            if graph is None:
                for name, prepare in peers.items():
                    with failures.recorded(name):
                        theirs[name] = host_us(partial(prepare, lengths, slots), device)
            what = "prepare_batch, eager" if graph is None else "prepare_batch, decode graph"
            yield _row(what, requests, ours, theirs, failures)
    for cell in _sites():
        failures = dense.Failures()
        problem = dense.build(cell, device=device, dtype=torch.bfloat16, layers=1)
        base = dense.base_step(problem)
        ours, theirs = {}, {}
        for name in backends:
            with failures.recorded(name):
                backend = load_backend(name, device=device)
                step = dense.our_step(problem, backend, graph=False)
                ours[name] = added_us(step, base, device)
        with failures.recorded("peers"):
            for name, step in dense.peer_steps(problem, kit).items():
                with failures.recorded(name):
                    theirs[name] = added_us(step, base, device)
        yield _row(f"one site, eager: {cell.site}", cell.requests, ours, theirs, failures)


def _prepare(
    backend: LoRABackend[Any], lengths: list[int], slots: list[int], graph: Literal["decode"] | None
) -> None:
    backend.prepare_batch(LoRABatch(lengths, slots, "decode"), graph=graph)


def _sites() -> Iterator[DenseCell]:
    for site, k, widths in (("o", 4096, (4096,)), ("qkv", 4096, (4096, 1024, 1024))):
        yield DenseCell(site, k, widths, 32, 8, _RANK, _MAX_LORAS, 64, "even", 32, 2.5)


def _row(what: str, requests: int, ours: dict[str, float], theirs: dict[str, float],
         failures: dense.Failures) -> Row:  # fmt: skip
    row: Row = {"what": what, "requests": requests, "ours_us": ours, "peers_us": theirs}
    return {**row, "errors": failures.found} if failures.found else row
