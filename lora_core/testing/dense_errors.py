"""Claims and refusals: what is not claimed, or does not fit, raises the right error and changes nothing."""

# ruff: noqa: ARG001 - checks and their cases share one signature
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import torch

from lora_core.backend import BackendConfig, LoRABackend
from lora_core.batch import LoRABatch
from lora_core.capabilities import Capabilities, DTypeName, GraphKind, Mode, Op
from lora_core.contract import check_supported
from lora_core.errors import (
    BatchMismatchError,
    ContractError,
    InvalidBatchError,
    TensorMismatchError,
    UnsupportedOpError,
)
from lora_core.testing.dense_case import DenseCase, Problem
from lora_core.testing.dense_family import DENSE
from lora_core.testing.dense_grid import MIXED, PLAIN, claimed, dtypes, one
from lora_core.testing.engine import Level, Violation
from lora_core.testing.subject import Subject
from lora_core.weights import LoRAWeights, SliceLayout


def _refuses(
    call: Callable[[], object], error: type[Exception], what: str, clause: str
) -> Exception:
    """The error that `call` raises, of the wanted type.

    Raises:
        Violation: it raises another, or none.
    """
    try:
        result = call()
    except error as raised:
        return raised
    except Exception as raised:
        raise Violation(
            clause, f"{what} raised {type(raised).__name__} ({raised}), not {error.__name__}"
        ) from raised
    raise Violation(
        clause, f"{what} returned {type(result).__name__}, it must raise {error.__name__}"
    )


def _unsupported(subject: Subject, call: Callable[[], object], what: str) -> None:
    raised = _refuses(call, UnsupportedOpError, what, "C2")
    assert isinstance(raised, UnsupportedOpError)
    assert raised.backend == subject.backend_class.name, (
        f"{what}: the error names backend {raised.backend!r}"
    )
    for word in (raised.backend, raised.op, raised.limit, str(raised.value)):
        assert word, f"{what}: the error leaves out one of backend, op, limit and value: {raised}"
        assert word in str(raised), f"{what}: the message does not have {word!r}: {raised}"


def _batchable(subject: Subject) -> LoRABatch:
    return dataclasses.replace(PLAIN.batch, lengths=(1, 1), mode=min(subject.capabilities.modes))


@DENSE.check("C2", cases=one, cause="an op inherited or delegated in silence, without the claim")
def unclaimed_ops(subject: Subject, case: DenseCase) -> None:
    """Ops and parts of weights that are not claimed raise UnsupportedOpError."""
    claims = subject.capabilities
    problem = Problem(subject, case)
    backend = problem.prepared(subject)
    weights, shape = problem.weights, (len(case.ranks), problem.layout.out_features)
    table = Problem(subject, case.but(K=61), embedding=True)
    ones = torch.ones(shape, device=subject.device)
    whole = torch.zeros_like(problem.base.weight)  # type: ignore[arg-type]
    attempts: list[tuple[Op, Callable[[], object]]] = [
        (Op.EMBEDDING, lambda: backend.embedding(table.x, table.base, table.weights)),
        (Op.LM_HEAD, lambda: backend.lm_head(problem.x, problem.base, weights)),
        (Op.DORA, _with(backend, problem, output_scale=ones)),
        (Op.BIAS, _with(backend, problem, bias=ones)),
        (Op.FULL_WEIGHT, _with(backend, problem, full={0: whole})),
    ]
    for op, call in attempts:
        if not claims.supports(op):
            with problem.guarded(backend):
                _unsupported(subject, call, f"{op.value}, unclaimed,")
    if claims.supports(Op.EMBEDDING):  # parts that no embedding has: dropping them would be silent
        for name, odd in (
            ("output_scale", dataclasses.replace(table.weights, output_scale=ones)),
            ("bias", dataclasses.replace(table.weights, bias=ones)),
        ):
            call = partial(backend.embedding, table.x, table.base, odd)
            _unsupported(subject, call, f"embedding with {name}")
    if not claims.supports(Op.SCALES):
        scaled = dataclasses.replace(case.batch, scales=[0.5] * len(case.lengths))
        _unsupported(
            subject, lambda: backend.prepare_batch(scaled), "prepare_batch with scales, unclaimed,"
        )
        if backend.batch_info is not None:
            raise Violation("B5", "batch_info is not None after a refused prepare_batch")


def _with(backend: LoRABackend[Any], problem: Problem, **parts: Any) -> Callable[[], object]:
    weights = dataclasses.replace(problem.weights, **parts)
    return lambda: backend.linear(problem.x, problem.base, weights)


@DENSE.check(
    "C2", cases=one, cause="prepare_batch or init_graph that does not look at the capabilities"
)
def unclaimed_modes(subject: Subject, case: DenseCase) -> None:
    """Modes and graph kinds that are not claimed raise UnsupportedOpError."""
    backend = subject.new()
    for mode in get_args(Mode):
        if mode not in subject.capabilities.modes:
            batch = LoRABatch((1, 1), (0, 1), mode)
            _unsupported(subject, partial(backend.prepare_batch, batch), f"mode {mode}, unclaimed,")
    for kind in get_args(GraphKind):
        if kind not in subject.capabilities.graphs:
            call = partial(backend.init_graph, kind, max_requests=2, max_tokens=4)
            _unsupported(subject, call, f"init_graph of kind {kind}, unclaimed,")
    unknown: Any = "other"
    call = partial(backend.init_graph, unknown, max_requests=2, max_tokens=4)
    _unsupported(subject, call, "init_graph of an unknown kind")


@DENSE.check(
    "C2", cases=one, cause="a dtype, rank or slice count past the claim that runs all the same"
)
def unclaimed_ranges(subject: Subject, case: DenseCase) -> None:
    """Dtypes, ranks and slices past the claimed range raise UnsupportedOpError."""
    claims = subject.capabilities
    dtype: DTypeName = dtypes(subject)[0]
    sites = [
        (name, 8, 1) for name in (*get_args(DTypeName), "float64") if name not in claims.dtypes
    ]
    sites += [(dtype, claims.max_rank + 1, 1)] if claims.max_rank is not None else []
    sites += [(dtype, 8, claims.max_slices + 1)] if claims.max_slices is not None else []
    for name, rank, slices in sites:
        kind = getattr(torch, name)
        weights = _zeros(subject, rank=rank, widths=(16,) * slices, dtype=kind)
        x = torch.zeros(2, 40, dtype=kind, device=subject.device)
        h = torch.zeros(2, slices, rank, device=subject.device)
        out = torch.zeros(2, 16 * slices, dtype=kind, device=subject.device)
        backend = subject.new()
        backend.prepare_batch(_batchable(subject))
        what = f"{name} of rank {rank} and {slices} slices, past the claim,"
        _unsupported(subject, partial(backend.shrink, x, weights), f"shrink of {what}")
        _unsupported(subject, partial(backend.expand, h, weights, out), f"expand of {what}")
        base = torch.nn.Linear(40, 16 * slices, dtype=kind, device=subject.device)
        _unsupported(subject, partial(backend.linear, x, base, weights), f"linear of {what}")


def _zeros(
    subject: Subject, *, rank: int, widths: tuple[int, ...], dtype: torch.dtype
) -> LoRAWeights:
    n, layout = len(widths), SliceLayout(widths)
    return LoRAWeights(
        a=torch.zeros(2, n, rank, 40, dtype=dtype, device=subject.device),
        b=torch.zeros(2, layout.out_features, rank, dtype=dtype, device=subject.device),
        ranks=torch.full((2, n), rank, dtype=torch.int32, device=subject.device),
        scalings=torch.ones(2, n, device=subject.device),
        layout=layout,
    )


@DENSE.check("E1", "B7", cases=one, cause="rows of the input not compared with the prepared batch")
def too_few_rows(subject: Subject, case: DenseCase) -> None:
    """Fewer rows than the batch, or a pass that does not exist, raise BatchMismatchError."""
    problem = Problem(subject, case)
    backend = problem.prepared(subject)
    short, weights, base = problem.x[:-1], problem.weights, problem.base
    h, out = problem.hidden(), problem.out()
    calls: dict[str, Callable[[], object]] = {
        "linear with a row too few": lambda: backend.linear(short, base, weights),
        "shrink with a row too few": lambda: backend.shrink(short, weights),
        "shrink without rows": lambda: backend.shrink(problem.x[:0], weights),
        "expand with a row too few": lambda: backend.expand(h[:-1], weights, out.tensor[:-1]),
    }
    if subject.capabilities.supports(Op.EMBEDDING):
        table = Problem(subject, case.but(K=61), embedding=True)
        calls["embedding with a row too few"] = lambda: backend.embedding(
            table.x[:-1], table.base, table.weights
        )
    if subject.capabilities.supports(Op.LM_HEAD):
        calls["lm_head with a row too few"] = lambda: backend.lm_head(short, base, weights)
        calls["lm_head of pass 1 of 1"] = lambda: backend.lm_head(
            problem.x, base, weights, logits_pass=1
        )
        calls["lm_head of pass -1"] = lambda: backend.lm_head(
            problem.x, base, weights, logits_pass=-1
        )
    for what, call in calls.items():
        with problem.guarded(backend):
            _refuses(call, BatchMismatchError, what, "E1")
        out.check(f"out after {what}")
    if subject.capabilities.supports(Op.LM_HEAD):  # a pass that fails half-way leaves the others
        passes = ((1, 0, 1, 1, 1, 1), (2, 0, 1, 1, 1, 1))
        drawn = problem.with_batch(case.but(logits=passes))
        backend.prepare_batch(drawn.case.batch)
        _refuses(
            lambda: backend.lm_head(drawn.x[:5], base, weights, logits_pass=1),
            BatchMismatchError,
            "a short pass",
            "E1",
        )
        drawn.assert_linear(backend.lm_head(drawn.x[:5], base, weights, logits_pass=0), "the other pass", passes[0],
                            drawn.x[:5])  # fmt: skip


@DENSE.check(
    "E2",
    "B7",
    cases=one,
    cause="shapes trusted: what does not fit is read or written out of bounds",
)
def misfits(subject: Subject, case: DenseCase) -> None:
    """Tensors that do not fit in shape, dtype or device raise TensorMismatchError."""
    problem = Problem(subject, case)
    backend = problem.prepared(subject)
    x, weights, base, rows = problem.x, problem.weights, problem.base, case.rows
    h, band = problem.hidden(), problem.out()
    out = band.tensor
    device = subject.device
    wide = torch.zeros(rows, case.K + 1, dtype=x.dtype, device=device)
    double = x.double()
    elsewhere = torch.empty(rows, case.K, dtype=x.dtype, device="meta")
    calls: dict[str, Callable[[], object]] = {}
    for name, bad in {
        "x of K + 1": wide,
        "x of K - 1": x[:, :-1],
        "x of 1 dimension": x[0],
        "x of 3 dimensions": x.unsqueeze(0),
        "x of float64": double,
        "x on another device": elsewhere,
    }.items():
        calls[f"shrink with {name}"] = partial(backend.shrink, bad, weights)
        calls[f"linear with {name}"] = partial(backend.linear, bad, base, weights)
    calls["expand with h of R - 1"] = lambda: backend.expand(h[:, :, :-1], weights, out)
    calls["expand with h of 2 dimensions"] = lambda: backend.expand(h[:, 0], weights, out)
    calls["expand with h of float64"] = lambda: backend.expand(h.double(), weights, out)
    calls["expand with out of N + 1"] = lambda: backend.expand(
        h, weights, torch.zeros(rows, out.shape[1] + 1, device=device)
    )
    calls["expand with out of more rows than h"] = lambda: backend.expand(
        h, weights, torch.zeros(rows + 1, out.shape[1], dtype=out.dtype, device=device)
    )
    if subject.capabilities.supports(Op.EMBEDDING):
        table = Problem(subject, case.but(K=61), embedding=True)
        calls["embedding with ids of 2 dimensions"] = lambda: backend.embedding(
            table.x.unsqueeze(0), table.base, table.weights
        )
        calls["embedding with weights of a linear"] = lambda: backend.embedding(
            table.x, table.base, weights
        )
    for what, call in calls.items():
        with problem.guarded(backend):
            _refuses(call, TensorMismatchError, what, "E2")
        band.check(f"out after {what}")


@DENSE.check("E3", cases=one, cause="a backend that changes LoRABatch")
def contradictions(subject: Subject, case: DenseCase) -> None:
    """A batch that contradicts itself raises where it is made."""
    bad: list[tuple[str, dict[str, Any]]] = [
        ("of more slots than lengths", {"lengths": (1,), "slots": (0, 1)}),
        ("of a negative length", {"lengths": (1, -1), "slots": (0, 1)}),
        ("of slot -2", {"lengths": (1, 1), "slots": (0, -2)}),
        ("of an unknown mode", {"lengths": (1,), "slots": (0,), "mode": "extend"}),
        ("of two tokens in decode", {"lengths": (2,), "slots": (0,), "mode": "decode"}),
        ("of more kept rows than tokens", {"lengths": (2,), "slots": (0,), "logits": ((3,),)}),
        ("of a pass for other requests", {"lengths": (2,), "slots": (0,), "logits": ((1, 1),)}),
        ("of scales for other requests", {"lengths": (2,), "slots": (0,), "scales": (1.0, 1.0)}),
    ]
    for what, parts in bad:
        _refuses(partial(LoRABatch, **parts), InvalidBatchError, f"a batch {what}", "E3")


@DENSE.check(
    "C3",
    cases=one,
    cause="a class attribute that is missing, or another name than the entry point's",
)
def identity(subject: Subject, case: DenseCase) -> None:
    """Name, contract and capabilities are on the class, and a loaded instance is usable at once."""
    cls = subject.backend_class
    assert cls.name == subject.label, (
        f"the class is named {cls.name!r}, but was loaded as {subject.label!r}"
    )
    check_supported(f"backend {cls.name!r}", cls.contract)
    assert isinstance(cls.capabilities, Capabilities)
    assert cls.capabilities.supports(Op.LINEAR), "Op.LINEAR is not claimed: every backend has it"
    assert cls.capabilities.dtypes, "no dtype is claimed"
    assert cls.capabilities.modes, "no mode is claimed"
    backend = subject.new()
    assert backend.device.type in cls.capabilities.device_types, (
        f"it runs on {backend.device}, which is not claimed"
    )
    assert cls.unavailable_reason(backend.device) is None, (
        "unavailable_reason refuses the device that it runs on"
    )
    elsewhere = cls.unavailable_reason(torch.device("meta"))
    assert elsewhere, "unavailable_reason accepts a device type that is not claimed"
    assert isinstance(backend.config, BackendConfig), f"config is {backend.config!r}"
    problem = Problem(subject, case)
    backend.prepare_batch(case.batch)
    problem.assert_linear(problem.linear(backend), "linear of an instance as it was loaded")


@DENSE.check(
    "B3", "C4", cases=one, cause="__init_subclass__ overridden without calling the contract's"
)
def definition(subject: Subject, case: DenseCase) -> None:
    """Subclasses that split the pair, or change parameters, are refused where they are defined."""
    cls = subject.backend_class

    def half_reset() -> type:
        def reset_batch_state(self: Any) -> None: ...

        return type("HalfReset", (cls,), {"reset_batch_state": reset_batch_state})

    def half_prepare() -> type:
        def prepare_batch(self: Any, batch: Any, *, graph: Any = None) -> Any: ...

        return type("HalfPrepare", (cls,), {"prepare_batch": prepare_batch})

    def loose() -> type:
        def shrink(self: Any, x: Any, weights: Any, **kwargs: Any) -> Any: ...

        return type("Loose", (cls,), {"shrink": shrink})

    def stateful() -> type:
        return type("Stateful", (cls,), {"batch_info": 0})

    _refuses(
        half_reset, ContractError, "a class with reset_batch_state and without prepare_batch", "B3"
    )
    _refuses(
        half_prepare,
        ContractError,
        "a class with prepare_batch and without reset_batch_state",
        "B3",
    )
    _refuses(loose, ContractError, "a class whose shrink takes **kwargs", "C4")
    _refuses(stateful, ContractError, "a class with a batch_info in its body", "B3")


def _rooms(subject: Subject, level: Level) -> Sequence[DenseCase]:
    return claimed(
        subject, (MIXED, PLAIN.but(widths=(32, 17)), PLAIN.but(ranks=(4, 4, 4), R=16, K=33))
    )


@DENSE.check(
    "S6", "C1", cases=_rooms, cause="shapes or dtypes of the backend's own layout shown outside"
)
def allocated_weights(subject: Subject, case: DenseCase) -> None:
    """allocate_weights gives the contract's shapes, inert until an adapter is written."""
    dtype = getattr(torch, case.dtype)
    subject.require_dtype(case.dtype)
    kinds = (
        (False, True)
        if subject.capabilities.supports(Op.EMBEDDING) and len(case.widths) == 1
        else (False,)
    )
    for embedding in kinds:
        layout = SliceLayout(case.widths)
        weights = subject.new().allocate_weights(
            num_slots=3,
            max_rank=case.R,
            in_features=case.K,
            layout=layout,
            dtype=dtype,
            embedding=embedding,
        )
        n = layout.num_slices
        shapes = {
            "a": ((3, case.K, case.R) if embedding else (3, n, case.R, case.K), dtype),
            "b": ((3, layout.out_features, case.R), dtype),
            "ranks": ((3, n), torch.int32),
            "scalings": ((3, n), torch.float32),
        }
        for name, expected in shapes.items():
            tensor = getattr(weights, name)
            found = (tuple(tensor.shape), tensor.dtype)
            assert found == expected, f"{name} is {found}, expected {expected}"
            assert tensor.device == subject.device, (
                f"{name} is on {tensor.device}, expected {subject.device}"
            )
        assert not bool(weights.ranks.any()), (
            "ranks of fresh weights are not 0: something would be applied"
        )
