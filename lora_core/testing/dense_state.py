"""Batch state: one value, set by prepare and gone after reset; nothing else is remembered."""

# ruff: noqa: ARG001 - checks and their cases share one signature
from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor, nn

from lora_core.backend import LoRABackend
from lora_core.batch import BatchInfo, LoRABatch, token_slots
from lora_core.capabilities import GraphKind, Op
from lora_core.errors import NoBatchPreparedError
from lora_core.layers.base import ForwardGate, LoRALayer
from lora_core.layers.linear import LoRALinear
from lora_core.sites import Site
from lora_core.testing.compare import assert_same_bits
from lora_core.testing.dense_case import DenseCase, Problem
from lora_core.testing.dense_family import DENSE
from lora_core.testing.dense_grid import (
    HOLES,
    LONG,
    MANY,
    MIXED,
    NONE,
    PACKED,
    PLAIN,
    claimed,
    dtypes,
    few,
    one,
)
from lora_core.testing.engine import Level, Violation
from lora_core.testing.guards import poison_scratch
from lora_core.testing.snapshot import assert_remembers_nothing, remember, remember_value
from lora_core.testing.subject import Subject
from lora_core.workspace import StagingEntry

Call = Callable[[LoRABackend[Any]], Tensor]


def calls(subject: Subject, problem: Problem) -> dict[str, Call]:
    """Every claimed op on a problem's tensors, by its name in the contract."""
    weights, base, x = problem.weights, problem.base, problem.x
    ops: dict[str, Call] = {
        "shrink": lambda backend: backend.shrink(x, weights),
        "expand": lambda backend: backend.expand(problem.hidden(), weights, problem.out().tensor),
        "linear": lambda backend: backend.linear(x, base, weights),
    }
    if subject.capabilities.supports(Op.EMBEDDING):
        shape = problem.case.but(
            K=61, widths=(20,), ranks=tuple(max(r) for r in problem.case.slice_ranks)
        )
        table = Problem(subject, shape, embedding=True)
        ops["embedding"] = lambda backend: backend.embedding(table.x, table.base, table.weights)
    if subject.capabilities.supports(Op.LM_HEAD):
        rows = sum(problem.case.batch.pass_lengths(0))
        ops["lm_head"] = lambda backend: backend.lm_head(x[:rows], base, weights, logits_pass=0)
    return ops


def assert_no_batch(
    subject: Subject, problem: Problem, backend: LoRABackend[Any], when: str
) -> None:
    """No batch is prepared, and every op says so."""
    if backend.batch_info is not None:
        raise Violation("B1", f"batch_info is {backend.batch_info!r} {when}, not None")
    for op, call in calls(subject, problem).items():
        try:
            result = call(backend)
        except NoBatchPreparedError as error:
            if op not in str(error):
                raise Violation(
                    "B6", f"{op} {when}: the error does not name it: {error}"
                ) from error
        except Exception as error:
            raise Violation(
                "B6",
                f"{op} {when} raised {type(error).__name__} ({error}), not NoBatchPreparedError",
            ) from error
        else:
            raise Violation(
                "B6",
                f"{op} {when} returned {type(result).__name__}, it must raise NoBatchPreparedError",
            )


@DENSE.check(
    "B1", cases=one, cause="prepare_batch returns one object and keeps another, or forgets `return`"
)
def batch_info(subject: Subject, case: DenseCase) -> None:
    """batch_info is what prepare_batch returned, until reset."""
    assert subject.backend_class.batch_info is None, "batch_info is set in the class body"
    assert subject.new().batch_info is None, "batch_info of a new instance is not None"
    backend = subject.new()
    for batch in (case.batch, PLAIN.batch):
        info = backend.prepare_batch(batch)
        assert isinstance(info, BatchInfo), f"prepare_batch returned {info!r}, not a BatchInfo"
        assert backend.batch_info is info, "batch_info is not what prepare_batch returned"
        kind = type(info).__name__
        assert _is_frozen(info), f"{kind} can be changed: it must be a frozen dataclass"
    backend.reset_batch_state()
    assert backend.batch_info is None, "batch_info is not None after reset_batch_state"


def _is_frozen(value: object) -> bool:
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


@DENSE.check(
    "B6",
    "B4",
    "B1",
    cases=one,
    cause="an op that reads metadata before asking whether a batch is prepared",
)
def no_batch(subject: Subject, case: DenseCase) -> None:
    """Ops refuse to run before the first prepare, and after every reset."""
    problem = Problem(subject, case)
    backend = subject.new()
    assert_no_batch(subject, problem, backend, "before the first prepare")
    backend.reset_batch_state()
    assert_no_batch(subject, problem, backend, "after a reset before the first prepare")
    backend.prepare_batch(case.batch)
    problem.assert_linear(problem.linear(backend), "linear after an early reset")
    backend.reset_batch_state()
    assert_no_batch(subject, problem, backend, "after a reset")
    backend.reset_batch_state()
    assert_no_batch(subject, problem, backend, "after a second reset")
    backend.prepare_batch(case.batch)
    problem.assert_linear(problem.linear(backend), "linear after two resets")


@DENSE.check(
    "B2", "B4", "I3",
    cases=few,
    cause="an attribute set in prepare_batch or in an op: put it into the BatchInfo dataclass, or into its home "
    "in the workspace",
)  # fmt: skip
def remembers_nothing(subject: Subject, case: DenseCase) -> None:
    """Nothing on the instance or its class changes, but batch_info and the workspace's homes."""
    problem = Problem(subject, case)
    kinds: list[GraphKind | None] = [None, *sorted(subject.capabilities.graphs)]
    for kind in kinds:
        if kind is not None and not _fits_kind(case, kind):
            continue
        backend = subject.new()
        if kind is not None:
            backend.init_graph(kind, max_requests=64, max_tokens=max(64, case.tokens))
        mode = case.batch.mode if kind is None else kind
        where = "in eager mode" if kind is None else f"with a {kind} graph batch"
        before = remember(backend)
        backend.prepare_batch(dataclasses.replace(case.batch, mode=mode), graph=kind)
        assert_remembers_nothing(before, remember(backend), f"after prepare_batch {where}")
        for op, call in calls(subject, problem).items():
            call(backend)
            assert_remembers_nothing(before, remember(backend), f"after {op} {where}")
        backend.reset_batch_state()
        assert_remembers_nothing(before, remember(backend), f"after reset {where}")


def _fits_kind(case: DenseCase, kind: GraphKind) -> bool:
    return kind != "decode" or max(case.lengths, default=0) <= 1


class _Breaking(Sequence[int]):
    """Host integers that stop answering after some reads, to break a prepare half-way."""

    def __init__(self, values: Sequence[int]) -> None:
        self.values = list(values)
        self.broken = False

    def _live(self) -> list[int]:
        if self.broken:
            raise RuntimeError("these integers are broken on purpose")
        return self.values

    def __len__(self) -> int:
        return len(self._live())

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self._live()[index]


@contextmanager
def _failing_send() -> Iterator[None]:
    """Inside, no copy to the device succeeds."""
    original = StagingEntry.send

    def send(self: StagingEntry, target: Tensor) -> None:
        raise RuntimeError("this copy fails on purpose")

    StagingEntry.send = send  # type: ignore[method-assign]
    try:
        yield
    finally:
        StagingEntry.send = original  # type: ignore[method-assign]


@DENSE.check(
    "B5", cases=one, cause="the old batch is cleared, or the new one set, in the wrong order"
)
def failing_prepare(subject: Subject, case: DenseCase) -> None:
    """A prepare that fails leaves no batch; the next one works."""
    problem = Problem(subject, case)
    broken = LoRABatch(_Breaking(case.lengths), _Breaking(case.slots), case.mode)
    broken.lengths.broken = True  # type: ignore[attr-defined]
    half = LoRABatch(list(case.lengths), _Breaking(case.slots), case.mode)
    half.slots.broken = True  # type: ignore[attr-defined]
    kind: GraphKind = min(subject.capabilities.graphs, default="decode")
    attempts: list[tuple[str, Callable[[LoRABackend[Any]], object]]] = [
        ("lengths that raise", lambda backend: backend.prepare_batch(broken)),
        ("slots that raise", lambda backend: backend.prepare_batch(half)),
        (
            "a graph kind without init_graph",
            lambda backend: backend.prepare_batch(MANY.batch, graph=kind),
        ),
    ]
    for why, attempt in attempts:
        backend = problem.prepared(subject)
        try:
            attempt(backend)
        except Exception:  # noqa: BLE001, S110 - which error is another check's matter
            pass
        else:
            raise AssertionError(f"prepare_batch with {why} did not raise")
        assert_no_batch(subject, problem, backend, f"after a prepare that failed ({why})")
        backend.prepare_batch(case.batch)
        problem.assert_linear(
            problem.linear(backend), f"linear after a prepare that failed ({why})"
        )
    backend = problem.prepared(subject)
    with _failing_send():
        try:
            backend.prepare_batch(HOLES.batch)
        except RuntimeError:
            assert_no_batch(subject, problem, backend, "after a prepare whose copy failed")
    backend.prepare_batch(case.batch)
    problem.assert_linear(problem.linear(backend), "linear after a prepare whose copy failed")


class _FailingBase:
    """A base module that raises."""

    weight: Tensor | None = None
    bias: Tensor | None = None

    def __call__(self, x: Tensor, /) -> Tensor:  # noqa: ARG002 - the signature of a base
        raise RuntimeError("this base fails on purpose")


@DENSE.check(
    "B7",
    cases=one,
    cause="an op that changes state, or a counter in sync, before it checks its input",
)
def failing_op(subject: Subject, case: DenseCase) -> None:
    """After an op that failed, the batch and every tensor are as they were."""
    problem = Problem(subject, case)
    backend = problem.prepared(subject)
    first = problem.linear(backend)
    info, before = backend.batch_info, remember(backend)
    out = problem.out()
    bad = torch.zeros(case.rows, case.K + 1, dtype=problem.dtype, device=problem.device)
    wrong_h = torch.zeros(case.rows, len(case.widths), case.R + 1, device=problem.device)
    attempts: dict[str, Callable[[], object]] = {
        "linear with a failing base": lambda: backend.linear(
            problem.x, _FailingBase(), problem.weights
        ),
        "linear with a wrong K": lambda: backend.linear(bad, problem.base, problem.weights),
        "shrink with a wrong K": lambda: backend.shrink(bad, problem.weights),
        "expand with a wrong R": lambda: backend.expand(wrong_h, problem.weights, out.tensor),
    }
    for why, attempt in attempts.items():
        with problem.guarded(backend):
            try:
                attempt()
            except Exception:  # noqa: BLE001 - which error is another check's matter
                failed = True
            else:
                failed = subject.capabilities.owns_base and "failing base" in why
        assert failed, f"{why} did not raise"
        out.check(f"out after {why}")
        assert backend.batch_info is info, f"batch_info changed during {why}"
        assert_remembers_nothing(before, remember(backend), f"after {why}")
        live = slice(0, case.tokens)
        assert_same_bits(problem.linear(backend)[live], first[live], f"linear after {why}")


@DENSE.check(
    "B11", cases=one, cause="the engine's lists kept in batch_info instead of their values"
)
def engine_lists(subject: Subject, case: DenseCase) -> None:
    """Lists that the engine fills again after prepare_batch change nothing."""
    problem = Problem(subject, case)
    lengths, slots, kept = list(case.lengths), list(case.slots), list(case.lengths)
    logits = [kept] if subject.capabilities.supports(Op.LM_HEAD) else []
    backend = subject.new()
    info = backend.prepare_batch(LoRABatch(lengths, slots, case.mode, logits))
    for values in (lengths, slots, kept):
        values[:] = [1, 1, 0]
    problem.assert_linear(problem.linear(backend), "linear after the engine's lists were reused")
    indptr = [sum(case.lengths[:i]) for i in range(len(case.lengths) + 1)]
    _assert_view(info, indptr, list(case.slots), subject)
    if logits:
        head = backend.lm_head(problem.x, problem.base, problem.weights, logits_pass=0)
        problem.assert_linear(head, "lm_head after the engine's lists were reused")


def _views(subject: Subject, level: Level) -> Sequence[DenseCase]:
    chunky = PLAIN.but(lengths=(40, 3))
    empty = PLAIN.but(lengths=(), slots=())
    hollow = PLAIN.but(lengths=(0, 0, 0), slots=(1, NONE, 0))
    bare = PLAIN.but(slots=(NONE, NONE))
    return claimed(
        subject, (PLAIN, MIXED, HOLES, MANY, LONG, chunky, empty, hollow, bare), every_dtype=False
    )


@DENSE.check(
    "B8",
    cases=_views,
    cause="the request view built from the backend's own chunks or sorted segments, or without empty requests",
)
def request_view(subject: Subject, case: DenseCase) -> None:
    """req_seg_indptr and req_slots have one entry per request, in order."""
    info = subject.new().prepare_batch(case.batch)
    indptr = [sum(case.lengths[:i]) for i in range(len(case.lengths) + 1)]
    _assert_view(info, indptr, list(case.slots), subject)
    assert info.num_tokens == case.tokens, (
        f"num_tokens is {info.num_tokens}, expected {case.tokens}"
    )
    assert info.num_requests == len(case.lengths)
    assert info.mode == case.mode, f"mode is {info.mode!r}, expected {case.mode!r}"
    assert info.graph is None, f"graph is {info.graph!r} in eager mode"
    active = any(
        slot != NONE and length for slot, length in zip(case.slots, case.lengths, strict=True)
    )
    assert info.has_active_lora is active, (
        f"has_active_lora is {info.has_active_lora!r}, expected {active}"
    )
    rows = [
        slot for slot, length in zip(case.slots, case.lengths, strict=True) for _ in range(length)
    ]
    found = token_slots(info, case.tokens + 3).tolist()
    assert found == [*rows, NONE, NONE, NONE], (
        f"token_slots gives {found}, expected {rows} and padding"
    )


def _assert_view(info: BatchInfo, indptr: list[int], slots: list[int], subject: Subject) -> None:
    for name, tensor, expected in (
        ("req_seg_indptr", info.req_seg_indptr, indptr),
        ("req_slots", info.req_slots, slots),
    ):
        assert tensor.dtype == torch.int32, f"{name} is {tensor.dtype}, expected int32"
        assert tensor.device == subject.device, (
            f"{name} is on {tensor.device}, expected {subject.device}"
        )
        assert tensor.tolist() == expected, f"{name} is {tensor.tolist()}, expected {expected}"


@DENSE.check(
    "S10", "B9",
    cases=few,
    cause="ranks, scalings or a packed copy of the weights kept from an earlier op, by address",
)  # fmt: skip
def rewritten_slots(subject: Subject, case: DenseCase) -> None:
    """Adapters that move into used slots between ops are applied, and nothing of those before."""
    problem = Problem(subject, case)
    weights, backend = problem.weights, subject.new()
    for turn in range(4):
        backend.prepare_batch(case.batch)
        problem.assert_linear(problem.linear(backend), f"linear after {turn} changes of every slot")
        drawn = tuple(
            tuple((rank * 5 + turn + slot) % (case.R + 1) for rank in ranks)
            for slot, ranks in enumerate(case.slice_ranks)
        )
        problem.case = case.but(ranks=drawn)
        for tensor in (weights.a, weights.b, weights.scalings):
            tensor.fill_(torch.nan)
        weights.ranks.copy_(torch.tensor(drawn, dtype=torch.int32))
        for slot in range(len(drawn)):
            problem.fill_slot(slot)
        weights.scalings.mul_(1.0 + turn)
        problem.arm()
        if turn % 2:  # also within one batch
            problem.assert_linear(problem.linear(backend), "linear after a change within a batch")


def _sequences(subject: Subject, level: Level) -> Sequence[DenseCase]:
    shape = DenseCase(
        lengths=(1,) * 5,
        slots=(0, 1, 2, 3, 4),
        ranks=((8, 2), (3, 8), (1, 0), (0, 5), (7, 7)),
        widths=(32, 17),
    )
    return claimed(subject, (shape,), every_dtype=level != "smoke" and not subject.interpreted)


@DENSE.check(
    "B9", "N8", "B4", "I3",
    cases=_sequences,
    cause="metadata kept because lengths, or a hash of them, repeat; a buffer sized by an earlier batch",
)  # fmt: skip
def many_batches(subject: Subject, case: DenseCase) -> None:
    """Random batches on one instance, eager and for graphs, give what each gives on a fresh one."""
    rng = random.Random(17)
    pool = Problem(subject, case)
    backend = _with_graphs(subject)
    lengths: tuple[int, ...] = ()
    for turn in range(12 if subject.interpreted else 200):
        drawn, kind = _draw(rng, subject, case.but(seed=turn), lengths if turn % 3 == 0 else None)
        lengths = drawn.lengths
        problem = pool.with_batch(drawn)
        if rng.random() < 0.5:
            backend.reset_batch_state()
        poison_scratch(backend)
        backend.prepare_batch(drawn.batch, graph=kind)
        what = f"batch {turn} ({drawn!r}, graph={kind!r})"
        result = problem.linear(backend)
        problem.assert_linear(result, f"linear of {what}")
        if subject.capabilities.deterministic:
            fresh = _with_graphs(subject)
            fresh.prepare_batch(drawn.batch, graph=kind)
            alone, live = problem.linear(fresh), slice(0, drawn.tokens)
            assert_same_bits(
                result[live], alone[live], f"linear of {what} on a used and a fresh one"
            )
        for index, kept in enumerate(drawn.logits):
            x = problem.x[: sum(kept)].contiguous()
            with problem.guarded(backend):
                head = backend.lm_head(x, problem.base, problem.weights, logits_pass=index)
            problem.assert_linear(head, f"lm_head, pass {index}, of {what}", kept, x)


def _with_graphs(subject: Subject) -> LoRABackend[Any]:
    """A fresh backend with room for small graphs of every claimed kind."""
    backend = subject.new()
    for kind in sorted(subject.capabilities.graphs):
        backend.init_graph(kind, max_requests=8, max_tokens=72)
    return backend


def _draw(
    rng: random.Random, subject: Subject, case: DenseCase, lengths: tuple[int, ...] | None
) -> tuple[DenseCase, GraphKind | None]:
    """A random batch over the case's five slots, and the graph kind it is for.

    With `lengths` given they are kept, if the mode allows, so that only slots and parts differ.
    """
    claims = subject.capabilities
    mode = rng.choice(sorted(claims.modes))
    if lengths is None or (mode == "decode" and max(lengths, default=0) > 1):
        most = 1 if mode == "decode" else rng.choice((2, 9))
        lengths = tuple(rng.randint(0, most) for _ in range(rng.randrange(7)))
    kind = mode if mode in claims.graphs and rng.random() < 0.3 else None
    passes: list[tuple[int, ...]] = []
    if claims.supports(Op.LM_HEAD) and rng.random() < 0.4:
        count = 1 if kind else rng.randint(1, 2)
        passes = [tuple(rng.randint(0, n) for n in lengths) for _ in range(count)]
    scaled = claims.supports(Op.SCALES) and rng.random() < 0.3
    drawn = case.but(
        lengths=lengths,
        slots=tuple(rng.choice((NONE, 0, 1, 2, 3, 4)) for _ in lengths),
        mode=mode,
        logits=tuple(passes),
        scales=tuple(rng.choice((0.5, 1.0, 3.0)) for _ in lengths) if scaled else None,
        padding=rng.choice((0, 0, 2)),
    )
    return drawn, kind


@DENSE.check(
    "B2", "B10",
    cases=one,
    cause="a buffer per batch kept in a home of the workspace, or staging that is never used again",
)  # fmt: skip
def flat_memory(subject: Subject, case: DenseCase) -> None:
    """The same batches again and again take no more memory in the workspace."""
    problem = Problem(subject, case)
    backend = subject.new()
    sizes = []
    for turn in range(24):
        backend.prepare_batch(case.but(slots=case.slots[turn % 6 :] + case.slots[: turn % 6]).batch)
        backend.linear(problem.x, problem.base, problem.weights)
        if subject.on_cuda:
            torch.cuda.synchronize(subject.device)
        homes = remember_value(
            [backend.workspace.scratch, backend.workspace.sync, backend.workspace.static], "homes"
        )
        sizes.append((len(homes), len(backend.workspace.staging.entries)))
    assert sizes[-1] == sizes[8], (
        f"entries in scratch, sync and static, and in staging, grew from {sizes[8]} to {sizes[-1]} "
        "in 16 batches of the same shape"
    )


@contextmanager
def _delayed_copies() -> Iterator[Callable[[], None]]:
    """Inside, staging copies wait until the yielded function is called, as behind a busy stream."""
    pending: list[tuple[StagingEntry, Tensor]] = []
    send, free = StagingEntry.send, StagingEntry.free

    def later(self: StagingEntry, target: Tensor) -> None:
        pending.append((self, target))

    def arrive() -> None:
        while pending:
            entry, target = pending.pop(0)
            send(entry, target)

    StagingEntry.send = later  # type: ignore[method-assign]
    StagingEntry.free = property(  # type: ignore[method-assign, assignment]
        lambda self: all(entry is not self for entry, _ in pending)
    )
    try:
        yield arrive
    finally:
        StagingEntry.send = send  # type: ignore[method-assign]
        StagingEntry.free = free  # type: ignore[method-assign]


@DENSE.check(
    "B10",
    cases=one,
    cause="one staging buffer for all batches, or a ring entry used again before its own copy's event",
)
def delayed_copy(subject: Subject, case: DenseCase) -> None:
    """A batch prepared while an earlier one's copy is under way does not change the earlier one."""
    problems = [
        Problem(subject, case),
        Problem(subject, case.but(slots=tuple(reversed(case.slots)), seed=1)),
    ]
    backend = subject.new()
    for problem in problems:  # so that staging exists and nothing else is compiled later
        backend.prepare_batch(problem.case.batch)
        problem.linear(backend)
    if subject.on_cuda:
        results, inputs = [], []
        torch.cuda.synchronize(subject.device)
        for turn in range(6):
            problem = problems[turn % 2]
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # a busy stream: torch has no public name for it
            backend.prepare_batch(problem.case.batch)
            results.append(backend.linear(problem.x, problem.base, problem.weights))
            inputs.append(problem)
        torch.cuda.synchronize(subject.device)
        for turn, (problem, result) in enumerate(zip(inputs, results, strict=True)):
            problem.assert_linear(result, f"linear of batch {turn}, prepared on a busy stream")
        return
    with _delayed_copies() as arrive:
        infos = [backend.prepare_batch(problems[turn % 2].case.batch) for turn in range(6)]
        arrive()
        for turn, info in enumerate(infos):
            slots = list(problems[turn % 2].case.slots)
            lengths = problems[turn % 2].case.lengths
            indptr = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
            _assert_view(info, indptr, slots, subject)
        problems[1].assert_linear(problems[1].linear(backend), "linear after a delayed copy")


@DENSE.check(
    "I3", cases=few, cause="metadata, or h between ops, kept in scratch; a counter left in sync"
)
def scratch(subject: Subject, case: DenseCase) -> None:
    """Scratch is overwritten between ops, and nothing changes; sync is zero between ops."""
    problem = Problem(subject, case)
    clean = problem.prepared(subject)
    with problem.guarded(clean):
        expected = clean.linear(problem.x, problem.base, problem.weights)
    backend = problem.prepared(subject)
    with problem.guarded(backend):
        h = backend.shrink(problem.x, problem.weights)
    out = problem.base.value(problem.x)
    before = h.clone()
    with problem.guarded(backend):  # poisons scratch again, between shrink and expand
        result = backend.expand(h, problem.weights, out)
    assert_same_bits(h, before, "h, overwritten through scratch")
    problem.assert_linear(result, "expand of a shrink before scratch was overwritten")
    again = problem.linear(backend)
    assert_same_bits(
        again[: case.tokens], expected[: case.tokens], "linear after scratch was overwritten"
    )


@DENSE.check("L1", "L2", cases=one, cause="batch_info not None while no batch is prepared")
def layer_activity(subject: Subject, case: DenseCase) -> None:
    """A layer is active exactly while it has weights and a batch is prepared."""
    problem = Problem(subject, case)
    backend = subject.new()
    gate = ForwardGate(backend)
    site = Site("proj", "linear", case.K, problem.layout, ("proj",))
    weight = problem.base.weight
    assert weight is not None
    module = nn.Linear(
        case.K, weight.shape[0], bias=False, device=subject.device, dtype=problem.dtype
    )
    module.weight = nn.Parameter(weight, requires_grad=False)
    layer = LoRALinear(module, site, gate)
    live = problem.x[: case.tokens]
    base = module(live)
    _assert_active(layer, False, "without weights")
    layer.weights = problem.weights
    _assert_active(layer, False, "before the first batch")
    assert_same_bits(layer(live), base, "a layer before the first batch")
    gate.adapters_loaded = 2
    empty = layer(live[:0])  # that nobody prepared a forward of no rows is no mistake
    assert tuple(empty.shape) == (0, base.shape[1]), f"an empty forward gave {tuple(empty.shape)}"
    _assert_refused(layer, live, "before the first batch")
    backend.prepare_batch(case.batch)
    _assert_active(layer, True, "while a batch is prepared")
    problem.assert_linear(layer(live), "a layer while a batch is prepared")
    backend.reset_batch_state()
    _assert_active(layer, False, "after reset_batch_state")
    _assert_refused(layer, live, "after reset_batch_state")
    gate.base_allowed = True
    assert_same_bits(layer(live), base, "a layer after reset_batch_state")


def _assert_active(layer: LoRALayer, expected: bool, when: str) -> None:
    found = layer.lora_active
    assert found is expected, f"lora_active is {found} {when}"


def _assert_refused(layer: LoRALayer, x: Tensor, when: str) -> None:
    try:
        layer(x)
    except NoBatchPreparedError:
        return
    raise Violation("L2", f"a forward {when} was not refused while adapters are loaded")


def _steps(subject: Subject, level: Level) -> Sequence[DenseCase]:
    return claimed(subject, (PACKED, LONG), every_dtype=False) if dtypes(subject) else ()


@DENSE.check(
    "B9",
    "N2",
    cases=_steps,
    cause="adapter metadata of the step before, applied to a step without adapters",
)
def base_step(subject: Subject, case: DenseCase) -> None:
    """A step without adapters after a step with them, of the same shape, is the base's own bits."""
    problem = Problem(subject, case)
    backend = problem.prepared(subject)
    problem.assert_linear(problem.linear(backend), "linear of the step with adapters")
    backend.prepare_batch(LoRABatch(case.lengths, [NONE] * len(case.slots), case.mode))
    result = problem.linear(backend)[: case.tokens]
    if subject.capabilities.owns_base:
        alone = subject.new()
        alone.prepare_batch(LoRABatch(case.lengths, [NONE] * len(case.slots), case.mode))
        base = problem.linear(alone)
    else:
        base = problem.base.value(problem.x)
    assert_same_bits(result, base[: case.tokens], "linear of the step without adapters")
