"""Experts: what LoRA adds to gate_up and down of one experts layer, routing included, caches cold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.check import ALLOWED_OVER_TORCH, relative_rms
from benchmarks.dense import Failures
from benchmarks.grid import MoECell
from benchmarks.results import Row
from benchmarks.stats import counts
from benchmarks.timing import BASE, Paired, Replay, capture, paired_rounds, timer
from lora_core import load_moe_backend
from lora_core.moe import MoELoRAWeights, MoERouting
from lora_core.weights import SliceLayout

REPEATS = 4
"""Cold calls in one replay."""
_FLUSH_BYTES = 256 << 20
_CHECKED_PAIRS = 2048
_PRODUCT = "base product"
FORMS = ("", ":deltas")
"""Of a backend: adding to the base's result, and overwriting what is there with the delta."""


@dataclass(frozen=True)
class Problem:
    """One cell made concrete. L adapters, E experts, r rank, H hidden, I intermediate.

    Attributes:
        cell: what is asked.
        x: `[T, H]`.
        x_down: `[T * k, I]`.
        topk_ids: int32 `[T, k]`.
        topk_weights: float32 `[T, k]`.
        a13: `[L, E or 1, 2r, H]`; rows of gate first.
        b13: `[L, E, 2I, r]`.
        a2: `[L, E, r, I]`.
        b2: `[L, E or 1, H, r]`.
        out13: `[T, k, 2I]`, zeroed before every call.
        out2: `[T, k, H]`, zeroed before every call.
    """

    cell: MoECell
    x: Tensor
    x_down: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    a13: Tensor
    b13: Tensor
    a2: Tensor
    b2: Tensor
    out13: Tensor
    out2: Tensor

    @property
    def decode(self) -> bool:
        """Whether every request has one token."""
        return self.cell.tokens <= 512

    @property
    def seq_lens(self) -> list[int]:
        """Tokens of each request: one each at decode, else one request per adapter."""
        cell = self.cell
        return [1] * cell.tokens if self.decode else [cell.tokens // cell.adapters] * cell.adapters

    @property
    def slots(self) -> list[int]:
        """Adapter of each request, round-robin."""
        return [i % self.cell.adapters for i in range(len(self.seq_lens))]

    @property
    def row_slots(self) -> Tensor:
        """int32 `[T]`."""
        rows = torch.tensor(self.slots).repeat_interleave(torch.tensor(self.seq_lens))
        return rows.int().to(self.x.device)


def build(cell: MoECell, *, device: torch.device, dtype: torch.dtype) -> Problem:
    """Random weights, uniform routing."""
    generator = torch.Generator(device).manual_seed(1)
    hidden, inter, experts, rank, k = (
        cell.hidden,
        cell.intermediate,
        cell.experts,
        cell.rank,
        cell.top_k,
    )
    shared = cell.layout == "shared_outer"

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, generator=generator) * scale

    scores = torch.rand(cell.tokens, experts, device=device, generator=generator)
    return Problem(
        cell=cell,
        x=normal(cell.tokens, hidden),
        x_down=normal(cell.tokens * k, inter),
        topk_ids=scores.topk(k, 1).indices.int().contiguous(),
        topk_weights=torch.softmax(scores[:, :k], -1).contiguous(),
        a13=normal(cell.adapters, 1 if shared else experts, 2 * rank, hidden, scale=hidden**-0.5),
        b13=normal(cell.adapters, experts, 2 * inter, rank, scale=rank**-0.5),
        a2=normal(cell.adapters, experts, rank, inter, scale=inter**-0.5),
        b2=normal(cell.adapters, 1 if shared else experts, hidden, rank, scale=rank**-0.5),
        out13=torch.zeros(cell.tokens, k, 2 * inter, device=device, dtype=dtype),
        out2=torch.zeros(cell.tokens, k, hidden, device=device, dtype=dtype),
    )


def our_call(problem: Problem, name: str) -> Callable[[], None]:
    """A backend through the contract: route, gate_up, down.

    `NAME:deltas` writes the delta over `out` and reads nothing of it (`accumulate=False`), as a peer
    does that leaves the adding to others; plain `NAME` adds.
    """
    cell, x = problem.cell, problem.x
    name, _, form = name.partition(":")
    adds = form != "deltas"
    backend = load_moe_backend(name, device=x.device)

    def pool(layout: tuple[int, ...], a: Tensor, b: Tensor) -> MoELoRAWeights:
        slices, rank = len(layout), cell.rank
        weights = backend.allocate_weights(
            num_slots=cell.max_loras, num_experts=cell.experts, max_rank=rank,
            in_features=a.shape[-1], layout=SliceLayout(layout), dtype=x.dtype,
            shared_a=a.shape[1] == 1, shared_b=b.shape[1] == 1,
        )  # fmt: skip
        weights.a.fill_(float("nan"))
        weights.b.fill_(float("nan"))
        weights.a[: cell.adapters] = a.unflatten(2, (slices, rank))
        weights.b[: cell.adapters] = b
        weights.ranks[: cell.adapters] = rank
        weights.scalings[: cell.adapters] = 1.0
        return weights

    gate_up = pool((cell.intermediate, cell.intermediate), problem.a13, problem.b13)
    down = pool((cell.hidden,), problem.a2, problem.b2)
    routing = MoERouting(
        topk_ids=problem.topk_ids, topk_weights=problem.topk_weights, slots=problem.row_slots,
        num_experts=cell.experts, num_slots=cell.max_loras,
    )  # fmt: skip
    x_down = problem.x_down.view(cell.tokens, cell.top_k, -1)

    def call() -> None:
        route = backend.route(routing)
        backend.gate_up(x, gate_up, route, problem.out13, accumulate=adds)
        backend.down(x_down, down, route, problem.out2, routed_weights=True, accumulate=adds)

    return call


def peer_calls(problem: Problem, kit: ModuleType | None) -> dict[str, Callable[[], None]]:
    """The peers on the same tensors."""
    if kit is None:
        return {}
    cell = problem.cell
    calls: dict[str, Callable[[], None]] = kit.moe(
        seq_lens=problem.seq_lens, slots=problem.slots, rank=cell.rank, num_experts=cell.experts,
        topk_ids=problem.topk_ids, topk_weights=problem.topk_weights, x=problem.x,
        x_down=problem.x_down, A13=problem.a13, B13=problem.b13, A2=problem.a2, B2=problem.b2,
        out13=problem.out13, out2=problem.out2,
    )  # fmt: skip
    return calls


def base_call(problem: Problem) -> Callable[[], None]:
    """The two grouped products of the experts themselves, rows already sorted by expert."""
    cell, x = problem.cell, problem.x
    counts = torch.bincount(problem.topk_ids.flatten(), minlength=cell.experts)
    ends = counts.cumsum(0).int()
    token = problem.topk_ids.flatten().argsort(stable=True) // cell.top_k
    sorted_x = x[token]
    w13 = torch.randn(
        cell.experts, cell.hidden, 2 * cell.intermediate, device=x.device, dtype=x.dtype
    )
    w2 = torch.randn(cell.experts, cell.intermediate, cell.hidden, device=x.device, dtype=x.dtype)

    def call() -> None:
        functional.grouped_mm(sorted_x, w13, offs=ends)
        functional.grouped_mm(problem.x_down, w2, offs=ends)

    return call


def warm(
    cell: MoECell,
    backends: Sequence[str],
    kit: ModuleType | None,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Run every contender once, so that its kernels are compiled; nothing is timed."""
    problem = build(cell, device=device, dtype=dtype)
    failures = Failures()
    for name in backends:
        with failures.recorded(name):
            our_call(problem, name)()
    with failures.recorded("peers"):
        for name, call in peer_calls(problem, kit).items():
            with failures.recorded(name):
                call()


def measure(
    cell: MoECell,
    backends: Sequence[str],
    kit: ModuleType | None,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    seconds: float = 2.0,
) -> Row:
    """One row: ours and peers, timed in turn on top of flushing the cache, and checked."""
    problem = build(cell, device=device, dtype=dtype)
    flush = torch.empty(
        _FLUSH_BYTES if device.type == "cuda" else 1, dtype=torch.uint8, device=device
    )
    failures = Failures()
    replays: dict[str, Replay] = {}

    def contender(name: str, call: Callable[[], None]) -> None:
        copies = [
            torch.empty_like(out) for out in (problem.out13, problem.out2) for _ in range(REPEATS)
        ]

        def step() -> list[Tensor]:
            for i in range(REPEATS):
                flush.zero_()
                problem.out13.zero_()
                problem.out2.zero_()
                call()
                copies[i].copy_(problem.out13)
                copies[REPEATS + i].copy_(problem.out2)
            return copies

        replays[name] = capture(step, device)

    contender(BASE, lambda: None)
    with failures.recorded(_PRODUCT):
        contender(_PRODUCT, base_call(problem))
    for name in backends:
        with failures.recorded(name):
            contender(name, our_call(problem, name))
    peers: dict[str, Callable[[], None]] = {}
    with failures.recorded("peers"):
        peers = peer_calls(problem, kit)
    for name, call in peers.items():
        with failures.recorded(name):
            contender(name, call)

    error = check(
        problem, {n: r for n, r in replays.items() if n not in (BASE, _PRODUCT)}, backends, failures
    )
    timed = [n for n in replays if n in (BASE, _PRODUCT) or n in error]

    def enough(paired: Paired) -> bool:
        return counts(paired.estimates(), backends, peers, cell.limit_us)

    paired = paired_rounds(
        timer(replays, device), timed, layers=REPEATS, enough=enough, seconds=seconds
    )
    estimates = paired.estimates()
    row: Row = {
        **cell.asked(),
        "base_us": estimates[_PRODUCT].median if _PRODUCT in estimates else None,
        "ours": {n: estimates[n].median for n in backends if n in estimates},
        "peers": {n: estimates[n].median for n in peers if n in estimates},
        "interval_us": {n: [e.low, e.high] for n, e in estimates.items() if n != _PRODUCT},
        "counts": enough(paired),
        "rounds": paired.rounds,
        "error": {n: e for n, e in error.items() if e is not None},
    }
    if failures.found:
        row["errors"] = failures.found
    return row


def check(
    problem: Problem, replays: dict[str, Replay], backends: Sequence[str], failures: Failures
) -> dict[str, float | None]:
    """Worst error of each contender over all calls of a replay, on sampled pairs.

    None: a peer that leaves its delta elsewhere than in the outputs, so that nothing can be compared.
    """
    cell, device = problem.cell, problem.x.device
    pairs = torch.arange(cell.tokens * cell.top_k, device=device)
    if len(pairs) > _CHECKED_PAIRS:
        pairs = torch.linspace(0, len(pairs) - 1, _CHECKED_PAIRS, device=device).long()
    expected = [
        delta(problem, pairs, torch.float32),
        delta(problem, pairs, torch.float32, down=True),
    ]
    plain = [
        delta(problem, pairs, problem.x.dtype),
        delta(problem, pairs, problem.x.dtype, down=True),
    ]
    allowed = [
        ALLOWED_OVER_TORCH * relative_rms(p, e) for p, e in zip(plain, expected, strict=True)
    ]
    worst: dict[str, float | None] = {}
    for name, replay in replays.items():
        for out in replay.outputs:
            out.fill_(float("nan"))
        replay.run()
        picked = [out.flatten(0, 1)[pairs] for out in replay.outputs]
        if name not in backends and not any(bool(out.any()) for out in picked):
            worst[name] = None
            continue
        errors = [relative_rms(out, expected[i // REPEATS]) for i, out in enumerate(picked)]
        wrong = [i for i, e in enumerate(errors) if not e <= allowed[i // REPEATS]]
        if wrong:
            what = "gate_up" if wrong[0] < REPEATS else "down"
            failures.found[name] = (
                f"wrong result of {what}: relative rms error {errors[wrong[0]]:.3g}, allowed "
                f"{allowed[wrong[0] // REPEATS]:.3g}"
            )
            continue
        worst[name] = max(errors)
    return worst


def delta(problem: Problem, pairs: Tensor, dtype: torch.dtype, *, down: bool = False) -> Tensor:
    """`[pairs, N]` of some pairs, each product in `dtype`, one pair at a time in a batched product."""
    cell = problem.cell
    token = pairs // cell.top_k
    slot, expert = problem.row_slots.long()[token], problem.topk_ids.flatten().long()[pairs]
    a_all, b_all = (problem.a2, problem.b2) if down else (problem.a13, problem.b13)
    x = problem.x_down[pairs] if down else problem.x[token]
    out = []
    for chunk in torch.arange(len(pairs), device=pairs.device).split(256):
        own, which = slot[chunk], expert[chunk]
        a = a_all[own, which if a_all.shape[1] > 1 else 0].to(dtype)
        b = b_all[own, which if b_all.shape[1] > 1 else 0].to(dtype)
        h = torch.bmm(a, x[chunk, :, None].to(dtype)).squeeze(-1)
        slices, rank = (1, cell.rank) if down else (2, cell.rank)
        width = b.shape[1] // slices
        parts = [
            torch.bmm(b[:, s * width : (s + 1) * width], h[:, s * rank : (s + 1) * rank, None])
            for s in range(slices)
        ]
        part = torch.cat(parts, 1).squeeze(-1)
        if down:
            part = part * problem.topk_weights.flatten()[pairs[chunk], None].to(dtype)
        out.append(part)
    return torch.cat(out)
