"""Laws: what must hold bit for bit whatever the values are."""

# ruff: noqa: ARG001 - checks and their cases share one signature
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lora_core.backend import LoRABackend
from lora_core.testing.compare import assert_same_bits
from lora_core.testing.dense_case import DenseCase, Problem
from lora_core.testing.dense_family import DENSE
from lora_core.testing.dense_grid import (
    HOLES,
    LARGER,
    LONG,
    MANY,
    MIXED,
    NONE,
    PACKED,
    PLAIN,
    claimed,
    few,
)
from lora_core.testing.engine import Level
from lora_core.testing.subject import Subject


def _spans(lengths: Sequence[int]) -> list[slice]:
    """Rows of each request."""
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def _run(subject: Subject, problem: Problem, h: Tensor | None = None) -> dict[str, Tensor]:
    """shrink, expand into a given out, and linear, on a fresh backend."""
    backend = problem.prepared(subject)
    out = problem.out().tensor
    with problem.guarded(backend):
        mine = backend.shrink(problem.x, problem.weights)
        expanded = backend.expand(problem.hidden() if h is None else h, problem.weights, out)
        linear = backend.linear(problem.x, problem.base, problem.weights)
    return {"shrink": mine, "expand": expanded, "linear": linear}


def _assert_request(
    actual: dict[str, Tensor], expected: dict[str, Tensor], problem: Problem, request: int,
    rows: tuple[slice, slice], why: str, ops: Sequence[str] = ("shrink", "expand", "linear"),
) -> None:  # fmt: skip
    """One request's rows are the same bits in both results; of h only what is specified."""
    slot = problem.case.slots[request]
    for op in ops:
        left, right = actual[op][rows[0]], expected[op][rows[1]]
        if op == "shrink":
            ranks = (
                problem.case.slice_ranks[slot] if slot != NONE else [0] * len(problem.case.widths)
            )
            live = (
                torch.arange(left.shape[-1], device=left.device)
                < torch.tensor(ranks, device=left.device)[:, None]
            )
            left, right = left[:, live], right[:, live]
        assert_same_bits(left, right, f"{op} of request {request} (slot {slot}) {why}")


@DENSE.check(
    "N1",
    cases=few,
    cause="a product whose shape or order of summation depends on neighbours, or a mask by multiplication "
    "(0 * NaN is NaN)",
)
def neighbours(subject: Subject, case: DenseCase) -> None:
    """Values, NaNs, ranks and adapters of other requests change no bit of a request's rows."""
    reference = Problem(subject, case)
    before = _run(subject, reference)
    spans = _spans(case.lengths)
    users = [i for i, (slot, rows) in enumerate(zip(case.slots, case.lengths, strict=True)) if rows]
    probed = (
        (users[0], users[-1])
        if subject.interpreted
        else (users[0], users[len(users) // 2], users[-1])
    )
    for request in dict.fromkeys(probed):
        own = case.slots[request]
        others = [i for i in range(len(case.slots)) if i != request]

        def values(problem: Problem, mine: int = request, fill: float = torch.nan) -> None:
            for i in users:
                if i != mine:
                    problem.x[spans[i]] = fill

        def weights(problem: Problem, mine: int = own, fill: float = torch.nan) -> None:
            for slot in range(len(case.ranks)):
                if slot != mine:
                    problem.weights.a[slot] = fill
                    problem.weights.b[slot] = fill
                    problem.weights.scalings[slot] = fill

        def ranks(problem: Problem, mine: int = own) -> None:
            for slot in range(len(case.ranks)):
                if slot != mine:  # what was past a rank becomes live, and what was live does not
                    now = problem.weights.ranks[slot].clone()
                    problem.weights.ranks[slot] = torch.where(now == case.R, 0, case.R)

        bare = tuple(slot if i == request else NONE for i, slot in enumerate(case.slots))
        turned = tuple(
            slot if i == request else (slot + 1) % len(case.ranks)
            for i, slot in enumerate(case.slots)
        )
        variants: list[tuple[str, DenseCase, Callable[[Problem], None]]] = [
            ("when the other requests' values are NaN", case, values),
            ("when the other adapters are NaN", case, weights),
            ("when the other adapters have other ranks", case, ranks),
            ("when the other requests use the base model", case.but(slots=bare), Problem.arm),
            ("when the other requests use other adapters", case.but(slots=turned), Problem.arm),
        ]
        for why, changed, change in variants:
            problem = Problem(subject, case)
            problem.case = changed
            change(problem)
            problem.arm()
            h = reference.hidden()
            for i in others:
                h[spans[i]] = torch.nan if changed is not case else h[spans[i]]
            reference.arm()
            after = _run(subject, problem, h)
            _assert_request(after, before, reference, request, (spans[request],) * 2, why)


@DENSE.check(
    "N2", "N3", "S7",
    cases=few,
    cause="0.0 added to rows without an adapter: -0.0 becomes 0.0",
)  # fmt: skip
def base_rows(subject: Subject, case: DenseCase) -> None:
    """Rows without an adapter, or whose adapter has no such module, are the base's own bits."""
    problem = Problem(subject, case.but(padding=2))
    problem.x[case.tokens :] = 1.0
    problem.arm()
    backend = problem.prepared(subject)
    out = problem.out(fill=-0.0)
    with problem.guarded(backend):
        expanded = backend.expand(problem.hidden(), problem.weights, out.tensor)
    linear = problem.linear(backend)
    if subject.capabilities.owns_base:  # its own result with no adapter at all
        alone = subject.new()
        alone.prepare_batch(dataclasses.replace(case.batch, slots=[NONE] * len(case.slots)))
        base = problem.linear(alone)
    else:
        base = problem.base.value(problem.x)
    offsets = problem.layout.offsets
    zero = torch.full_like(expanded, -0.0)
    spans = [*_spans(case.lengths), slice(case.tokens, case.tokens + 2)]
    for rows, slot in zip(spans, (*case.slots, NONE), strict=True):
        for s, (begin, end) in enumerate(pairwise(offsets)):
            if slot == NONE or case.slice_ranks[slot][s] == 0:
                what = f"rows {rows.start}..{rows.stop} (slot {slot}), slice {s}"
                assert_same_bits(
                    expanded[rows, begin:end], zero[rows, begin:end], f"expand into -0.0, {what}"
                )
                if rows.start < case.tokens or not subject.capabilities.owns_base:
                    assert_same_bits(
                        linear[rows, begin:end], base[rows, begin:end], f"linear, {what}"
                    )


@DENSE.check(
    "N3",
    "N2",
    cases=few,
    cause="a shortcut that is taken by the batch's length and not by its adapters",
)
def no_adapters(subject: Subject, case: DenseCase) -> None:
    """A batch without adapters, one of rank 0 only, and an empty one leave the base's own bits."""
    for why, changed in (
        ("without adapters", case.but(slots=(NONE,) * len(case.slots))),
        ("of rank 0 only", case.but(ranks=(0,) * len(case.ranks))),
        ("of no requests", case.but(lengths=(), slots=(), padding=3)),
        ("of empty requests", case.but(lengths=(0,) * len(case.lengths), padding=2)),
        ("of no rows", case.but(lengths=(0,) * len(case.lengths))),
    ):
        problem = Problem(subject, changed)
        problem.x.fill_(1.0)
        problem.arm()
        backend = problem.prepared(subject)
        out = problem.out(fill=-0.0)
        with problem.guarded(backend):
            expanded = backend.expand(problem.hidden(), problem.weights, out.tensor)
        assert_same_bits(
            expanded, torch.full_like(expanded, -0.0), f"expand into -0.0 of a batch {why}"
        )
        linear = problem.linear(backend)
        assert linear.shape[0] == changed.rows, (
            f"linear of a batch {why} returned {linear.shape[0]} rows"
        )
        if not subject.capabilities.owns_base:
            assert_same_bits(linear, problem.base.value(problem.x), f"linear of a batch {why}")


@DENSE.check(
    "N4", "S3",
    cases=few,
    cause="masking by multiplication, a mask that is rounded up to a tile, or rows past the batch taken as live",
)  # fmt: skip
def garbage(subject: Subject, case: DenseCase) -> None:
    """Whatever lies in unused slots, unused ranks and padded rows, live rows have the same bits."""
    case = case.but(padding=4)
    results = []
    for fill in (torch.nan, 0.0, 3.0e4):
        problem = Problem(subject, case)
        weights, used = problem.weights, set(case.slots)
        clean = Problem(subject, case)
        for name in ("a", "b", "scalings"):
            target, source = getattr(weights, name), getattr(clean.weights, name)
            target.copy_(torch.where(source.isnan(), fill, source))
        for slot in set(range(len(case.ranks))) - used:
            weights.ranks[slot] = case.R  # a stale rank
        problem.x[case.tokens :] = fill
        problem.arm()
        h = problem.hidden()
        h.copy_(torch.where(h.isnan(), fill, h))
        problem.arm()
        results.append(_run(subject, problem, h))
    for request, rows in enumerate(_spans(case.lengths)):
        for result in results[1:]:
            _assert_request(
                result,
                results[0],
                problem,
                request,
                (rows, rows),
                "with other garbage in unused places",
            )
    padded = problem.out().tensor[case.tokens :]
    for result in results:
        assert_same_bits(result["expand"][case.tokens :], padded, "padded rows of expand's out")


@DENSE.check("N7", cases=few, cause="atomic additions in whatever order threads arrive")
def repeated(subject: Subject, case: DenseCase) -> None:
    """The same call again gives the same bits, where determinism is claimed."""
    if not subject.capabilities.deterministic:
        Problem(subject, case).assert_linear(_run(subject, Problem(subject, case))["linear"])
        return
    problem = Problem(subject, case)
    first = _run(subject, problem)
    backend = problem.prepared(subject)
    for attempt in range(4 if subject.interpreted else 12):
        again = backend.linear(problem.x, problem.base, problem.weights)
        live = slice(0, case.tokens)
        assert_same_bits(
            again[live], first["linear"][live], f"linear, run {attempt + 2} of the same batch"
        )
    for request, rows in enumerate(_spans(case.lengths)):
        _assert_request(_run(subject, problem), first, problem, request, (rows, rows), "run again")


@DENSE.check(
    "N9", cases=few, cause="the delta replaces rows of the base's output instead of being added"
)
def zero_b(subject: Subject, case: DenseCase) -> None:
    """With B of zeros, linear has the base's values."""
    problem = Problem(subject, case)
    for slot in set(case.slots) - {NONE}:
        problem.weights.b[slot] = 0.0
    problem.arm()
    result = problem.linear(problem.prepared(subject))[: case.tokens]
    base = problem.base.value(problem.x)[: case.tokens]
    if subject.capabilities.owns_base:
        problem.assert_linear(result)
    else:
        assert bool((result == base).all()), "linear with B of zeros differs from the base"


_PAIRS = (
    (PLAIN.but(lengths=(5,), slots=(0,)), MANY.but(mode="prefill")),
    (PLAIN.but(widths=(20,)), PLAIN.but(widths=(130,))),
    (LONG, PLAIN.but(K=100)),
    (PACKED, MIXED),
    (PLAIN, PLAIN.but(ranks=(8, 1), slots=(1, 0))),
)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two cases, run one after the other in both orders."""

    first: DenseCase
    second: DenseCase

    @property
    def id(self) -> str:
        """Both ids."""
        return f"{self.first.id}+{self.second.id}"


def _pairs(subject: Subject, level: Level) -> Sequence[Pair]:
    both = [
        (claimed(subject, (a,), every_dtype=False), claimed(subject, (b,), every_dtype=False))
        for a, b in _PAIRS
    ]
    return [Pair(a[0], b[0]) for a, b in both if a and b]


@DENSE.check(
    "N8", "B9",
    cases=_pairs,
    cause="a compiled kernel, tile choice or buffer kept from the first call and taken for the second",
)  # fmt: skip
def call_order(subject: Subject, case: Pair) -> None:
    """Two batches on one instance, in both orders, give what each gives on a fresh instance."""
    problems = {name: Problem(subject, getattr(case, name)) for name in ("first", "second")}
    alone = {name: problem.linear(problem.prepared(subject)) for name, problem in problems.items()}
    for order in (("first", "second"), ("second", "first")):
        backend = subject.new()
        for name in order:
            problem = problems[name]
            backend.prepare_batch(problem.case.batch)
            result = problem.linear(backend)
            live = slice(0, problem.case.tokens)
            problem.assert_linear(result, f"the {name} batch, in order {order}")
            if subject.capabilities.deterministic:
                assert_same_bits(
                    result[live], alone[name][live], f"the {name} batch, in order {order}"
                )
            backend.reset_batch_state()


def _batches(subject: Subject, level: Level) -> Sequence[DenseCase]:
    shapes = (
        (MIXED, PACKED, LONG)
        if level == "smoke"
        else (MIXED, PACKED, LONG, HOLES, MANY, LARGER[1], LARGER[2])
    )
    return claimed(subject, shapes, every_dtype=level != "smoke")


@DENSE.check(
    "N5", "N6",
    cases=_batches,
    cause="a tile, split or form of the product chosen by the size of the batch while batch_invariant is claimed",
)  # fmt: skip
def other_batches(subject: Subject, case: DenseCase) -> None:
    """A request permuted, lengthened, split or alone keeps its result: its bits where that is claimed."""
    problem = Problem(subject, case)
    h, out = problem.hidden(), problem.out().tensor
    before = _run(subject, problem)
    spans = _spans(case.lengths)
    ops: tuple[Any, ...] = ("shrink", "expand")
    order = list(range(len(case.lengths)))
    permuted = order[1:] + order[:1]
    mode = "prefill" if "prefill" in subject.capabilities.modes else case.mode

    arrangements = [("permuted", [(i, case.lengths[i]) for i in permuted])]
    if mode == "prefill":
        arrangements += [
            (f"request {i} alone", [(i, case.lengths[i])]) for i in order if case.lengths[i]
        ]
        arrangements += [
            (
                "lengthened by copies of its neighbours",
                [(i, case.lengths[i]) for i in order + order],
            )
        ]
        halves = [
            (i, part) for i in order for part in (case.lengths[i] // 2, -(-case.lengths[i] // 2))
        ]
        arrangements += [("split in two requests each", halves)]
    for why, parts in arrangements:
        taken: dict[int, int] = {}
        rows: list[int] = []
        for i, length in parts:
            begin = spans[i].start + taken.get(i, 0) % max(1, case.lengths[i])
            taken[i] = taken.get(i, 0) + length
            rows += range(begin, begin + length)
        changed = case.but(
            lengths=tuple(n for _, n in parts),
            slots=tuple(case.slots[i] for i, _ in parts),
            mode=mode,
        )
        other = Problem(subject, case)
        other.case = changed
        other.x = problem.x[rows].contiguous()
        backend = other.prepared(subject)
        after = {"shrink": backend.shrink(other.x, other.weights), "expand": out[rows].contiguous()}
        backend.expand(h[rows].contiguous(), other.weights, after["expand"])
        if subject.capabilities.batch_invariant:
            for (i, length), at in zip(parts, _spans(changed.lengths), strict=True):
                if length:
                    mine = slice(rows[at.start], rows[at.start] + length)
                    _assert_request(after, before, problem, i, (at, mine), f"when {why}", ops)
        result = backend.linear(other.x, other.base, other.weights)
        other.assert_linear(result, f"linear {why}")


@DENSE.check(
    "R2", cases=few, cause="state kept on the class or in the module instead of the instance"
)
def two_instances(subject: Subject, case: DenseCase) -> None:
    """Two instances with batches of their own do not disturb each other."""
    turned = case.but(slots=tuple(reversed(case.slots)), lengths=tuple(reversed(case.lengths)))
    problems = [Problem(subject, case), Problem(subject, turned)]
    backends: list[LoRABackend[Any]] = [subject.new(), subject.new()]
    assert backends[0] is not backends[1], "load_backend gave the same instance twice"
    for backend, problem in zip(backends, problems, strict=True):
        backend.prepare_batch(problem.case.batch)
    for backend, problem in zip(backends, problems, strict=True):
        problem.assert_linear(problem.linear(backend), "linear beside another instance's batch")
    backends[1].reset_batch_state()
    problems[0].assert_linear(
        problems[0].linear(backends[0]), "linear after another instance's reset"
    )
