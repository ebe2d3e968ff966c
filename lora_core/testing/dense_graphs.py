"""Graphs: static buffers at fixed addresses, captured once and replayed with every later batch."""

# ruff: noqa: ARG001 - checks and their cases share one signature
from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lora_core.backend import LoRABackend
from lora_core.batch import BatchInfo, LoRABatch, token_slots
from lora_core.capabilities import DTypeName, GraphKind, Op
from lora_core.errors import GraphNotInitializedError
from lora_core.testing.capture import Captured
from lora_core.testing.compare import assert_same_bits
from lora_core.testing.dense_case import DenseCase, Problem
from lora_core.testing.dense_family import DENSE
from lora_core.testing.dense_grid import MIXED, NONE, claimed, dtypes
from lora_core.testing.dense_state import assert_no_batch
from lora_core.testing.engine import Level, Violation
from lora_core.testing.guards import no_synchronisation, poison, poison_scratch
from lora_core.testing.snapshot import remember_value
from lora_core.testing.subject import Subject

_REQUESTS, _TOKENS = 12, 20

_DECODE = (
    ((1,), (0,)),
    ((1,) * 5, (1, NONE, 2, 0, 2)),
    ((1, 1), (2, 1)),
    ((1,) * 12, (0, 1, 2, 3, NONE, 0, 1, 2, 3, NONE, 0, 3)),
    ((1, 0, 1, 0), (3, 1, NONE, 2)),
    ((1, 1, 1), (NONE, NONE, NONE)),
    ((), ()),
)
_SEVERAL = (
    ((4,), (1,)),
    ((3, 1, 5, 2, 4), (0, NONE, 2, 1, 3)),
    ((7, 6), (3, 0)),
    ((0, 9, 0, 2, 0), (1, 2, 0, NONE, 3)),
    ((1,) * 12, (0, 1, 2, 3, NONE, 0, 1, 2, 3, NONE, 0, 3)),
    ((20,), (2,)),
    ((2, 3), (NONE, NONE)),
)

_BatchParts = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class GraphCase:
    """A graph kind, and the batch it is captured with.

    Attributes:
        kind: of the graph.
        lengths: of the captured batch.
        slots: of the captured batch.
        rows: of x during the capture; batches of more tokens are left out.
        dtype: of everything.
        requests: room of the graph; more than a dozen are replayed by number alone.
    """

    kind: GraphKind
    lengths: tuple[int, ...]
    slots: tuple[int, ...]
    rows: int = _TOKENS
    dtype: DTypeName = "float32"
    requests: int = _REQUESTS

    @property
    def id(self) -> str:
        """`decode-1requests-1adapters-rows20-float32`."""
        used = sum(slot != NONE for slot in self.slots)
        first = f"{self.kind}-{len(self.lengths)}requests-{used}adapters"
        return f"{first}-rows{self.rows}-{self.dtype}"

    def batches(self) -> Iterator[_BatchParts]:
        """What is replayed: growing, shrinking, without adapters, empty, full."""
        if self.requests > _REQUESTS:
            for count in (33, 64, 4):
                yield (1,) * count, tuple(i % 5 - 1 for i in range(count))
            return
        for lengths, slots in _DECODE if self.kind == "decode" else _SEVERAL:
            if sum(lengths) <= self.rows:
                yield lengths, slots


def _graph_cases(subject: Subject, level: Level) -> Sequence[GraphCase]:
    cases = []
    first = dtypes(subject)[0] if dtypes(subject) else "float32"
    kinds = sorted(subject.capabilities.graphs)
    for kind in kinds:
        one = ((1,), (0,)) if kind == "decode" else ((4,), (0,))
        bare = ((1, 1), (NONE, NONE)) if kind == "decode" else ((2, 3), (NONE, NONE))
        many = _DECODE[3] if kind == "decode" else _SEVERAL[1]
        cases += [GraphCase(kind, *bare, dtype=first)]
        if level == "smoke" and subject.interpreted and kind != kinds[0]:
            continue  # an interpreter takes seconds per case
        cases += [GraphCase(kind, *one, dtype=first)]
        cases += [GraphCase(kind, many[0], many[1], rows=16, dtype=first)]
        if level != "smoke":
            cases += [GraphCase(kind, *bare, dtype=dtype) for dtype in dtypes(subject)[1:]]
            cases += [GraphCase(kind, *bare, rows=64, dtype=first, requests=64)]
    return cases


def _kinds(subject: Subject, level: Level) -> Sequence[GraphCase]:
    seen: dict[str, GraphCase] = {}
    for case in _graph_cases(subject, "smoke"):
        seen.setdefault(case.kind, case)
    return list(seen.values())


class Rig:
    """A backend with a graph initialised, a pool of four adapters, and inputs that stay in place."""

    def __init__(
        self, subject: Subject, case: GraphCase, *, embedding: bool = False, base_bias: bool = True
    ) -> None:
        self.subject, self.case = subject, case
        widths = (24,) if embedding else (32, 17)
        ranks = (8, 3, 5, 1) if embedding else ((8, 2), (3, 8), (5, 0), (1, 7))
        if subject.capabilities.max_slices == 1 and not embedding:
            widths, ranks = (49,), (8, 3, 5, 1)
        pool = DenseCase(
            lengths=(1,) * 4, slots=(0, 1, 2, 3), ranks=ranks, widths=widths, K=40, dtype=case.dtype,
            mode=case.kind, bias=base_bias and not embedding,
        )  # fmt: skip
        self.pool = Problem(subject, pool, embedding=embedding)
        self.embedding = embedding
        self.backend = subject.new()
        tokens = max(case.rows, _TOKENS)
        self.backend.init_graph(case.kind, max_requests=case.requests, max_tokens=tokens)
        kind = torch.int64 if embedding else self.pool.dtype
        self.x = torch.zeros(
            (case.rows,) if embedding else (case.rows, pool.K), dtype=kind, device=subject.device
        )
        self._turn = 0

    def load(self, lengths: Sequence[int], slots: Sequence[int], **parts: Any) -> Problem:
        """Prepare a batch and put new inputs in place; returns the problem that it is."""
        self._turn += 1
        drawn = self.pool.case.but(
            lengths=tuple(lengths),
            slots=tuple(slots),
            seed=self._turn,
            padding=self.case.rows - sum(lengths),
            **parts,
        )
        problem = self.pool.with_batch(drawn)
        if self.embedding:
            generator = torch.Generator().manual_seed(self._turn)
            ids = torch.randint(0, self.pool.case.K, (self.case.rows,), generator=generator)
            self.x.copy_(ids)
        else:
            self.x.copy_(problem.x)
            self.x[sum(lengths) :].fill_(0.5)
        problem.x = self.x
        self.backend.prepare_batch(drawn.batch, graph=self.case.kind)
        return problem

    def linear(self) -> Tensor:
        """The op to capture."""
        return self.backend.linear(self.x, self.pool.base, self.pool.weights)

    def assert_replayed(self, problem: Problem, result: Tensor, what: str) -> None:
        """Live rows are right; padded rows are the base's own bits."""
        problem.assert_linear(result, what)
        live = problem.case.tokens
        if not self.subject.capabilities.owns_base:
            base = self.pool.base.value(self.x)
            assert_same_bits(result[live:], base[live:], f"padded rows of {what}")


@DENSE.check(
    "G3", "G4", "S7", "G2",
    cases=_graph_cases,
    cause="a grid, count, slot list or branch decided during the capture instead of read from static buffers; "
    "the tail of a static buffer not cleared by a smaller batch",
)  # fmt: skip
def graph_replay(subject: Subject, case: GraphCase) -> None:
    """A graph captured with one batch, or none with adapters, serves every other that fits."""
    rig = Rig(subject, case)
    captured_with = rig.load(case.lengths, case.slots)
    captured = Captured(subject.device, rig.linear)
    captured.replay()
    rig.assert_replayed(
        captured_with, captured.result, f"the batch it was captured with ({captured_with.case!r})"
    )
    batches = list(case.batches())
    for lengths, slots in batches if subject.interpreted else (*batches, *reversed(batches)):
        problem = rig.load(lengths, slots)
        captured.replay()
        what = f"a replay with lengths {list(lengths)} and slots {list(slots)}, captured with {list(case.slots)}"
        rig.assert_replayed(problem, captured.result, what)


@DENSE.check(
    "G5", "G8",
    cases=_graph_cases,
    cause="reset clears batch_info and leaves the static slots of the last batch in place",
)  # fmt: skip
def stray_replay(subject: Subject, case: GraphCase) -> None:
    """After a reset a replay adds nothing; static storage may be overwritten, and serves again."""
    rig = Rig(subject, case)
    rig.load(case.lengths, case.slots)
    captured = Captured(subject.device, rig.linear)
    for lengths, slots in case.batches():
        problem = rig.load(lengths, slots)
        captured.replay()
        rig.assert_replayed(problem, captured.result, "a replay before the reset")
        rig.backend.reset_batch_state()
        rig.x.fill_(0.25)
        captured.replay()
        base = rig.pool.base.value(rig.x)
        what = f"a stray replay after reset, last batch lengths {list(lengths)} slots {list(slots)}"
        if subject.capabilities.owns_base:
            bare = problem.with_batch(
                problem.case.but(lengths=(case.rows,), slots=(NONE,), padding=0)
            )
            bare.x = rig.x
            bare.assert_linear(captured.result, what)
        else:
            assert_same_bits(captured.result, base, what)
        for tensor in rig.backend.workspace.static.values():
            poison(tensor)
    problem = rig.load(case.lengths, case.slots)
    captured.replay()
    rig.assert_replayed(problem, captured.result, "a replay after static storage was overwritten")


@DENSE.check(
    "G2", "G8",
    cases=_kinds,
    cause="a static buffer allocated again by prepare_batch, or dropped by reset_batch_state",
)  # fmt: skip
def static_addresses(subject: Subject, case: GraphCase) -> None:
    """No prepare and no reset changes the address of a static buffer."""
    rig = Rig(subject, case)
    at_first = _addresses(rig.backend)
    assert at_first, "init_graph left nothing in workspace.static: that is where graph buffers live"
    seen: dict[str, int] = {}
    for lengths, slots in case.batches():
        rig.load(lengths, slots)
        _assert_in_place(rig.backend, at_first, f"prepare_batch of lengths {list(lengths)}")
        info = rig.backend.batch_info
        assert info is not None
        for path, address in _info_addresses(info).items():
            if seen.setdefault(path, address) != address:
                raise Violation(
                    "G2",
                    f"{path} moved from {seen[path]:#x} to {address:#x} in a later prepare_batch",
                )
        if len(lengths) % 2:
            rig.backend.reset_batch_state()
            _assert_in_place(rig.backend, at_first, "reset_batch_state")


def _addresses(backend: LoRABackend[Any]) -> dict[str, int]:
    found = remember_value(backend.workspace.static, "workspace.static")
    return {path: state.address for path, state in found.items() if hasattr(state, "address")}


def _info_addresses(info: BatchInfo) -> dict[str, int]:
    table = info.request_table()
    return {
        "req_seg_indptr": info.req_seg_indptr.untyped_storage().data_ptr(),
        "request_table().seg_indptr": table.seg_indptr.data_ptr(),
        "request_table().slots": table.slots.data_ptr(),
    }


def _assert_in_place(backend: LoRABackend[Any], expected: dict[str, int], when: str) -> None:
    found = _addresses(backend)
    if found != expected:
        moved = sorted({path for path in found | expected if found.get(path) != expected.get(path)})
        raise Violation("G2", f"{', '.join(moved)} moved, appeared or vanished in {when}")


@DENSE.check(
    "G6", "B8",
    cases=_kinds,
    cause="entries past the batch left from a larger one",
)  # fmt: skip
def static_requests(subject: Subject, case: GraphCase) -> None:
    """The static request table holds the batch and is empty past it, also after a larger batch."""
    rig = Rig(subject, case)
    batches = list(case.batches())
    for lengths, slots in (*batches, *reversed(batches)):
        rig.load(lengths, slots)
        info = rig.backend.batch_info
        assert info is not None
        assert info.graph == case.kind, f"graph is {info.graph!r}, expected {case.kind!r}"
        assert info.static_requests is not None, "static_requests is None in graph mode"
        indptr = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        assert info.req_seg_indptr.tolist() == indptr, (
            f"req_seg_indptr is {info.req_seg_indptr.tolist()}"
        )
        assert info.req_slots.tolist() == list(slots), f"req_slots is {info.req_slots.tolist()}"
        room = _REQUESTS - len(lengths)
        table = info.request_table()
        expected = indptr + [sum(lengths)] * room
        assert table.seg_indptr.tolist() == expected, (
            f"static indptr is {table.seg_indptr.tolist()}, not {expected}"
        )
        filled = [*slots, *[NONE] * room]
        assert table.slots.tolist() == filled, (
            f"static slots are {table.slots.tolist()}, not {filled}"
        )
        rows = [slot for slot, length in zip(slots, lengths, strict=True) for _ in range(length)]
        rows += [NONE] * (case.rows - len(rows))
        found = token_slots(info, case.rows).tolist()
        assert found == rows, f"token_slots gives {found}, expected {rows}"
        rig.backend.reset_batch_state()
        left = table.slots.tolist()
        assert set(left) <= {NONE}, f"static slots after reset are {left}, not {NONE}"


@DENSE.check(
    "G1", "B5", "C2",
    cases=_kinds,
    cause="sizes given to init_graph not compared with the batch: the tail of a buffer is written past its end",
)  # fmt: skip
def graph_limits(subject: Subject, case: GraphCase) -> None:
    """A graph batch before init_graph, or larger than it, is refused and leaves no batch."""
    problem = Problem(subject, claimed(subject, (MIXED,), every_dtype=False)[0])
    backend = subject.new()
    ones = (1,) * (_REQUESTS + 1)
    small = LoRABatch((1, 1), (0, 1), case.kind)
    _assert_graph_refused(subject, problem, backend, small, case.kind, "before init_graph")
    backend.init_graph(case.kind, max_requests=_REQUESTS, max_tokens=_TOKENS)
    too_many = LoRABatch(ones, (0,) * len(ones), case.kind)
    _assert_graph_refused(
        subject, problem, backend, too_many, case.kind, f"of {len(ones)} requests"
    )
    if case.kind != "decode":
        too_long = LoRABatch((_TOKENS, 1), (0, 1), case.kind)
        _assert_graph_refused(
            subject, problem, backend, too_long, case.kind, f"of {_TOKENS + 1} tokens"
        )
    twice = LoRABatch((1, 1), (0, 1), case.kind, logits=((1, 1), (1, 0)))
    _assert_graph_refused(subject, problem, backend, twice, case.kind, "of two logits passes")
    backend.prepare_batch(small, graph=case.kind)


def _assert_graph_refused(
    subject: Subject,
    problem: Problem,
    backend: LoRABackend[Any],
    batch: LoRABatch,
    kind: GraphKind,
    what: str,
) -> None:
    try:
        backend.prepare_batch(batch, graph=kind)
    except GraphNotInitializedError:
        assert_no_batch(subject, problem, backend, f"after a refused graph batch {what}")
        return
    raise AssertionError(
        f"a {kind} graph batch {what} was not refused with GraphNotInitializedError"
    )


@DENSE.check(
    "G7",
    cases=_kinds,
    cause="ranks, scalings or weights read by the host during the capture",
)
def graph_sees_new_adapters(subject: Subject, case: GraphCase) -> None:
    """A captured graph applies adapters that moved in after the capture."""
    rig = Rig(subject, case)
    weights = rig.pool.weights
    rig.load(case.lengths, case.slots)
    captured = Captured(subject.device, rig.linear)
    old = rig.pool.case
    for turn in range(1 if subject.interpreted else 3):
        ranks = tuple(tuple(reversed(ranks)) for ranks in rig.pool.case.slice_ranks)
        rig.pool.case = old.but(ranks=ranks[turn:] + ranks[:turn], seed=30 + turn)
        for tensor in (weights.a, weights.b, weights.scalings):
            tensor.fill_(torch.nan)
        weights.ranks.copy_(torch.tensor(rig.pool.case.slice_ranks, dtype=torch.int32))
        for slot in range(4):
            rig.pool.fill_slot(slot)
        weights.scalings.mul_(0.75 + turn)
        for lengths, slots in case.batches():
            problem = rig.load(lengths, slots)
            captured.replay()
            rig.assert_replayed(
                problem, captured.result, f"a replay after adapters were rewritten, turn {turn}"
            )


@DENSE.check(
    "G8",
    cases=_kinds,
    cause="an intermediate buffer replaced by a larger one after the capture: allocate it in init_graph",
)
def graph_memory(subject: Subject, case: GraphCase) -> None:
    """Dropped references, larger eager batches and new allocations do not disturb a captured graph."""
    rig = Rig(subject, case)
    rig.load(case.lengths, case.slots)
    captured = Captured(subject.device, rig.linear)
    rig.backend.reset_batch_state()
    mode = "prefill" if "prefill" in subject.capabilities.modes else case.kind
    lengths = (1,) * 300 if mode == "decode" else (100, 200)
    eager = rig.pool.with_batch(
        rig.pool.case.but(lengths=lengths, slots=(1, 2) * (len(lengths) // 2), mode=mode)
    )
    rig.backend.prepare_batch(eager.case.batch)
    eager.assert_linear(eager.linear(rig.backend), "a larger eager batch after a capture")
    del eager
    gc.collect()
    if subject.on_cuda:
        torch.cuda.empty_cache()
    taken = [
        torch.full((2**20 if subject.on_cuda else 2**12,), torch.nan, device=subject.device)
        for _ in range(256)
    ]
    for batch in case.batches():
        problem = rig.load(*batch)
        poison_scratch(rig.backend)
        captured.replay()
        rig.assert_replayed(problem, captured.result, "a replay after memory was freed and taken")
    del taken


def _two_kinds(subject: Subject, level: Level) -> Sequence[GraphCase]:
    return _kinds(subject, level)[:-1]  # each with the one after it


@DENSE.check(
    "G2", "G5", "B9",
    cases=_two_kinds,
    cause="one set of static buffers for all kinds, or the buffers of the other kind left live",
)  # fmt: skip
def two_graph_kinds(subject: Subject, case: GraphCase) -> None:
    """Graphs of two kinds on one instance serve in turn, and the idle one adds nothing."""
    kinds = _kinds(subject, "smoke")
    other = kinds[[found.kind for found in kinds].index(case.kind) + 1]
    rigs = [Rig(subject, case), Rig(subject, other)]
    rigs[1].backend = rigs[0].backend
    rigs[0].backend.init_graph(other.kind, max_requests=other.requests, max_tokens=_TOKENS)
    captured = []
    for rig in rigs:
        rig.load(rig.case.lengths, rig.case.slots)
        captured.append(Captured(subject.device, rig.linear))
    for turn, batches in enumerate(zip(case.batches(), other.batches(), strict=False)):
        for at in (0, 1) if turn % 2 else (1, 0):
            rig, idle = rigs[at], rigs[1 - at]
            problem = rig.load(*batches[at])
            captured[at].replay()
            what = f"a {rig.case.kind} replay between {idle.case.kind} ones"
            rig.assert_replayed(problem, captured[at].result, what)
            captured[1 - at].replay()
            if not subject.capabilities.owns_base:
                base = idle.pool.base.value(idle.x)
                what = f"a stray {idle.case.kind} replay while a {rig.case.kind} batch is live"
                assert_same_bits(captured[1 - at].result, base, what)


def _graph_ops(subject: Subject, level: Level) -> Sequence[GraphCase]:
    return [
        case for case in _graph_cases(subject, "smoke") if all(slot == NONE for slot in case.slots)
    ]


@DENSE.check(
    "G3", "G4", "V2", "V3", "V4", "V5", "V6", "V7",
    cases=_graph_ops,
    cause="an op, or an optional part of the weights, that is only right in eager mode",
)  # fmt: skip
def graph_ops(subject: Subject, case: GraphCase) -> None:
    """Every claimed op and part of the weights works in a captured graph."""
    claims = subject.capabilities
    if claims.supports(Op.LM_HEAD):
        rig = Rig(subject, case)
        rig.load(case.lengths, case.slots, logits=((0,) * len(case.lengths),))
        captured = Captured(
            subject.device,
            lambda: rig.backend.lm_head(rig.x, rig.pool.base, rig.pool.weights, logits_pass=0),
        )
        for lengths, slots in case.batches():
            kept = tuple(min(1, length) for length in lengths)
            problem = rig.load(lengths, slots, logits=(kept,))
            captured.replay()
            what = f"lm_head in a graph, lengths {list(lengths)}, slots {list(slots)}"
            problem.assert_linear(captured.result, what, kept)
    if claims.supports(Op.EMBEDDING):
        _embedding_in_graph(Rig(subject, case, embedding=True))
    values = torch.rand(4, 49, generator=torch.Generator().manual_seed(3)).to(subject.device) + 0.5
    if claims.supports(Op.DORA):
        _linear_in_graph(Rig(subject, case), case, "output_scale", output_scale=values)
    if claims.supports(Op.BIAS):
        _linear_in_graph(Rig(subject, case), case, "a bias", bias=values)
    if claims.supports(Op.FULL_WEIGHT):
        rig = Rig(subject, case)
        whole = torch.randn(49, 40, generator=torch.Generator().manual_seed(4)) / 6
        _linear_in_graph(
            rig, case, "full weights", full={1: whole.to(rig.pool.dtype).to(subject.device)}
        )
    if claims.supports(Op.SCALES):
        _linear_in_graph(Rig(subject, case), case, "scales", scaled=True)


def _linear_in_graph(
    rig: Rig, case: GraphCase, what: str, *, scaled: bool = False, **parts: Any
) -> None:
    rig.pool.weights = dataclasses.replace(rig.pool.weights, **parts)
    rig.load(case.lengths, case.slots)
    captured = Captured(rig.subject.device, rig.linear)
    for turn, (lengths, slots) in enumerate(case.batches()):  # every other one without scales
        scales = tuple(0.5 + i for i in range(len(lengths))) if scaled and turn % 2 == 0 else None
        problem = rig.load(lengths, slots, scales=scales)
        captured.replay()
        rig.assert_replayed(
            problem, captured.result, f"linear with {what} in a graph, slots {list(slots)}"
        )


def _embedding_in_graph(rig: Rig) -> None:
    case = rig.case
    rig.load(case.lengths, case.slots)
    captured = Captured(
        rig.subject.device, lambda: rig.backend.embedding(rig.x, rig.pool.base, rig.pool.weights)
    )
    for lengths, slots in case.batches():
        problem = rig.load(lengths, slots)
        captured.replay()
        problem.assert_embedding(captured.result, f"embedding in a graph, slots {list(slots)}")


def _sync_cases(subject: Subject, level: Level) -> Sequence[DenseCase]:
    return claimed(subject, (MIXED,), every_dtype=False)


@DENSE.check(
    "R1",
    cases=_sync_cases,
    cause=".item(), .tolist(), .cpu() or a copy from pageable memory in prepare_batch or an op",
)
def no_reads_by_host(subject: Subject, case: DenseCase) -> None:
    """Preparing and ops never wait for the device."""
    problem = Problem(subject, case)
    backend = subject.new()
    batches: list[tuple[LoRABatch, GraphKind | None]] = [(case.batch, None)]
    for claimed_kind in sorted(subject.capabilities.graphs):
        backend.init_graph(claimed_kind, max_requests=_REQUESTS, max_tokens=_TOKENS)
        lengths = (1, 0, 1, 1, 1, 1) if claimed_kind == "decode" else case.lengths
        batch = dataclasses.replace(case.batch, mode=claimed_kind, lengths=lengths)
        batches.append((batch, claimed_kind))
    for batch, kind in batches * 2:  # the first round compiles and allocates staging
        backend.prepare_batch(batch, graph=kind)
        backend.linear(problem.x, problem.base, problem.weights)
        backend.reset_batch_state()
    out, h = problem.out().tensor, problem.hidden()
    for batch, kind in batches:
        with no_synchronisation(subject.device):
            backend.prepare_batch(batch, graph=kind)
        if subject.on_cuda or kind is not None:  # on a CPU eager ops may read: nothing waits there
            with no_synchronisation(subject.device):
                backend.linear(problem.x, problem.base, problem.weights)
                backend.shrink(problem.x, problem.weights)
                backend.expand(h, problem.weights, out)
        with no_synchronisation(subject.device):
            backend.reset_batch_state()
