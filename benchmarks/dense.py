"""Dense sites: what LoRA adds to the base product of one linear module."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.check import Adapters, Oracle, sample_rows
from benchmarks.grid import DenseCell
from benchmarks.results import Row
from benchmarks.stats import counts
from benchmarks.timing import BASE, Paired, Replay, Step, capture, paired_rounds, timer
from lora_core import load_backend
from lora_core.backend import LoRABackend
from lora_core.batch import LoRABatch
from lora_core.weights import LoRAWeights, SliceLayout

LAYERS = 8
"""Layers of one replay; their weights rotate, so that they do not stay in the cache."""


@dataclass
class Failures:
    """What went wrong with which contender; the others go on.

    Attributes:
        found: contender -> what was raised, or what was wrong.
    """

    found: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def recorded(self, name: str) -> Iterator[None]:
        """Run a block; whatever it raises is kept here."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever fails, the other contenders go on
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = [*str(error).strip().splitlines(), ""][0][:200]
            self.found[name] = f"{type(error).__name__}: {text} ({where.name}:{where.lineno})"


@dataclass(frozen=True)
class Problem:
    """One cell made concrete: inputs, base modules and adapters of every layer."""

    cell: DenseCell
    x: Tensor
    bases: list[nn.Linear]
    adapters: list[Adapters]
    row_slots: Tensor

    @property
    def layout(self) -> SliceLayout:
        """The packed slices."""
        return SliceLayout(self.cell.widths)


def build(
    cell: DenseCell, *, device: torch.device, dtype: torch.dtype, layers: int = LAYERS
) -> Problem:
    """Random weights scaled so that base and delta are of one size: a missing delta shows."""
    generator = torch.Generator(device).manual_seed(hash_of(cell))
    n, k = sum(cell.widths), cell.K

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, generator=generator) * scale

    bases, adapters = [], []
    for _ in range(layers):
        base = nn.Linear(k, n, bias=False, device="meta", dtype=dtype)
        base.weight = nn.Parameter(normal(n, k, scale=k**-0.5), requires_grad=False)
        bases.append(base)
        adapters.append(
            Adapters(
                a=[normal(len(cell.widths), r, k, scale=k**-0.5) for r in cell.ranks],
                b=[normal(n, r, scale=r**-0.5) for r in cell.ranks],
                offsets=list(accumulate(cell.widths, initial=0)),
            )
        )
    slots = torch.tensor(cell.slots).repeat_interleave(torch.tensor(cell.seq_lens))
    return Problem(cell, normal(cell.tokens, k, scale=1.0), bases, adapters, slots.to(device))


def hash_of(cell: DenseCell) -> int:
    """A seed that depends on the cell alone."""
    return sum(ord(c) for c in repr(cell)) * 7919 % 2**31


def base_step(problem: Problem) -> Step:
    """The base alone."""
    return lambda: [base(problem.x) for base in problem.bases]


def our_step(problem: Problem, backend: LoRABackend[Any], *, graph: bool = True) -> Step:
    """A backend, through the contract: weights allocated by it, a batch prepared for a graph.

    The batch is prepared eagerly where the backend claims no such graph, or `graph` is False.

    Rows past an adapter's rank and slots without an adapter are NaN: they must not be read.
    """
    cell = problem.cell
    weights = [
        fill(backend, base, a, cell)
        for base, a in zip(problem.bases, problem.adapters, strict=True)
    ]
    mode = "decode" if cell.decode else "prefill"
    kind = mode if graph and problem.x.is_cuda and mode in backend.capabilities.graphs else None
    if kind is not None:
        backend.init_graph(kind, max_requests=cell.requests, max_tokens=cell.tokens)
    backend.prepare_batch(LoRABatch(cell.seq_lens, cell.slots, mode), graph=kind)
    return lambda: [
        backend.linear(problem.x, base, w) for base, w in zip(problem.bases, weights, strict=True)
    ]


def fill(
    backend: LoRABackend[Any], base: nn.Linear, adapters: Adapters, cell: DenseCell
) -> LoRAWeights:
    """The pool of one site, sized by the cell, with the cell's adapters in its first slots."""
    weights = backend.allocate_weights(
        num_slots=cell.max_loras,
        max_rank=cell.max_rank,
        in_features=cell.K,
        layout=SliceLayout(cell.widths),
        dtype=base.weight.dtype,
    )
    weights.a.fill_(float("nan"))
    weights.b.fill_(float("nan"))
    weights.scalings.fill_(float("nan"))
    for slot, (a, b) in enumerate(zip(adapters.a, adapters.b, strict=True)):
        rank = a.shape[1]
        weights.a[slot, :, :rank] = a
        weights.b[slot, :, :rank] = b
        weights.ranks[slot] = rank
        weights.scalings[slot] = 1.0
    return weights


def peer_steps(problem: Problem, kit: ModuleType | None) -> dict[str, Step]:
    """The peers, each with its own packing, as large as the adapters are."""
    if kit is None:
        return {}
    cell, x = problem.cell, problem.x
    top = max(cell.ranks)

    def stacked(adapters: Adapters) -> tuple[Tensor, Tensor]:
        a = x.new_zeros(cell.adapters, len(cell.widths), top, cell.K)
        b = x.new_zeros(cell.adapters, sum(cell.widths), top)
        for slot, (own_a, own_b) in enumerate(zip(adapters.a, adapters.b, strict=True)):
            a[slot, :, : own_a.shape[1]] = own_a
            b[slot, :, : own_b.shape[1]] = own_b
        return a, b

    pools = [stacked(a) for a in problem.adapters]
    calls = kit.dense(
        seq_lens=cell.seq_lens,
        slots=cell.slots,
        ranks=cell.ranks,
        widths=list(cell.widths),
        A=[a for a, _ in pools],
        B=[b for _, b in pools],
        device=x.device,
    )

    def step(call: Callable[..., Tensor]) -> Step:
        return lambda: [
            call(i, x, lambda base=base: base(x)) for i, base in enumerate(problem.bases)
        ]

    return {name: step(call) for name, call in calls.items()}


def warm(
    cell: DenseCell,
    backends: Sequence[str],
    kit: ModuleType | None,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Run every contender once on one layer, so that its kernels are compiled; nothing is timed."""
    problem = build(cell, device=device, dtype=dtype, layers=1)
    failures = Failures()
    for name in backends:
        with failures.recorded(name):
            our_step(problem, load_backend(name, device=device))()
    with failures.recorded("peers"):
        for name, step in peer_steps(problem, kit).items():
            with failures.recorded(name):
                step()


def measure(
    cell: DenseCell,
    backends: Sequence[str],
    kit: ModuleType | None,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    layers: int = LAYERS,
    seconds: float = 2.0,
) -> Row:
    """One row: base, ours and peers, timed in turn and checked.

    A contender that fails, or computes something else, is named in `errors` and not in `ours` or
    `peers`; the others stand.
    """
    problem = build(cell, device=device, dtype=dtype, layers=layers)
    failures = Failures()
    replays: dict[str, Replay] = {BASE: capture(base_step(problem), device)}
    prepared: dict[str, str] = {}

    for name in backends:
        with failures.recorded(name):
            backend = load_backend(name, device=device)
            replays[name] = capture(our_step(problem, backend), device)
            info = backend.batch_info
            prepared[name] = (info.graph or "eager") if info is not None else "none"
    peers: dict[str, Step] = {}
    with failures.recorded("peers"):
        peers = peer_steps(problem, kit)
    for name, step in peers.items():
        with failures.recorded(name):
            replays[name] = capture(step, device)

    error = check(problem, replays, failures.found)
    names = [BASE, *(name for name in replays if name in error)]

    def enough(paired: Paired) -> bool:
        return counts(paired.estimates(), backends, peers, cell.limit_us)

    paired = paired_rounds(
        timer(replays, device), names, layers=layers, enough=enough, seconds=seconds
    )
    estimates = paired.estimates()
    row: Row = {
        **cell.asked(),
        "base_us": sorted(paired.base)[paired.rounds // 2],
        "ours": {n: estimates[n].median for n in backends if n in estimates},
        "peers": {n: estimates[n].median for n in peers if n in estimates},
        "interval_us": {n: [e.low, e.high] for n, e in estimates.items()},
        "counts": enough(paired),
        "rounds": paired.rounds,
        "error": error,
        "prepared": prepared,
    }
    if failures.found:
        row["errors"] = failures.found
    return row


def check(problem: Problem, replays: dict[str, Replay], errors: dict[str, str]) -> dict[str, float]:
    """Replay every contender once more and compare every layer's output; returns the worst errors.

    The first layer is compared in full, the others on sampled rows. What is wrong goes to `errors`.
    """
    x, rows = problem.x, sample_rows(problem.x.shape[0], problem.x.device)
    everything = torch.arange(x.shape[0], device=x.device)
    worst: dict[str, float] = {}
    for name, replay in replays.items():
        if name != BASE:
            for out in replay.outputs:
                out.fill_(float("nan"))
            replay.run()
            worst[name] = 0.0
    for layer, (base, adapters) in enumerate(zip(problem.bases, problem.adapters, strict=True)):
        oracle = Oracle(
            x, base.weight, adapters, problem.row_slots, everything if layer == 0 else rows
        )
        for name in list(worst):
            fault = oracle.fault(replays[name].outputs[layer])
            worst[name] = max(worst[name], oracle.last)
            if fault is not None:
                errors[name] = f"layer {layer}: {fault}"
                del worst[name]
    return worst
