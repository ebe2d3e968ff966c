"""Laws of experts: what must hold bit for bit, and what must be refused."""

# ruff: noqa: ARG001, ARG005 - checks and their cases share one signature

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lora_core.batch import LoRABatch
from lora_core.errors import TensorMismatchError, UnsupportedOpError
from lora_core.plugins import load_backend
from lora_core.testing.capture import Captured
from lora_core.testing.compare import assert_same_bits
from lora_core.testing.engine import Level, NotRunHere
from lora_core.testing.guards import PoisonedAllocations, Unchanged
from lora_core.testing.moe_case import OPS, MoECase, MoEProblem, MoESubject
from lora_core.testing.moe_family import MOE


def _each(subject: MoESubject, level: Level) -> Sequence[MoECase]:
    return [MoECase(op=op) for op in OPS]


def _differences(left: Tensor, right: Tensor) -> Tensor:
    """Rows that differ in any bit."""
    return (left.view(torch.int32) != right.view(torch.int32)).flatten(1).any(1).cpu()


@MOE.check(
    "X4",
    cases=lambda subject, level: [
        MoECase(op=op, ids=((1, bad), (bad, bad), (bad, 2)), slots=(0, 0, 1))
        for op in OPS
        for bad in (-1, 4, 1 << 20)
    ][:: 1 if level != "smoke" else 2],
    cause="an id or a slot is used as an index before it is checked",
)
def ids_and_slots_out_of_range_are_inert(subject: MoESubject, case: MoECase) -> None:
    """Pairs without an expert of this rank or without an adapter change no bit, and read no weight."""
    problem = MoEProblem(case, subject.device)
    for tensor in (problem.weights.a, problem.weights.b):  # what is not asked for is NaN
        kept = tensor[0, 1].clone(), tensor[1, 2].clone()
        tensor.fill_(math.nan)
        tensor[0, 1], tensor[1, 2] = kept
    problem.base.fill_(-0.0)
    out = problem.run(subject.new_moe()).cpu()
    if not bool(out.isfinite().all()):
        raise AssertionError("a weight was read that no pair asked for")
    live = torch.tensor([[True, False], [False, False], [False, True]])
    inert = ~live.any(1) if case.op == "down_rows" else ~live
    assert_same_bits(out[inert], problem.base.cpu()[inert], "pairs without an adapter")
    if not bool((out[~inert] != 0).any(-1).all()):
        raise AssertionError("a pair with an adapter got no delta")
    problem.routing.slots.fill_(len(case.ranks))  # type: ignore[union-attr]
    assert_same_bits(problem.run(subject.new_moe()), problem.base, "slots past the pool")


@MOE.check(
    "X5",
    cases=lambda subject, level: [
        MoECase(
            op=op, expert_map=(-1, 2, -1, 0, 3, 1), ids=((1, 0), (5, 6), (-1, 3)), slots=(0, 1, 0)
        )
        for op in OPS
    ],
    cause="the map is not applied, or an id past it is looked up",
)
def expert_map(subject: MoESubject, case: MoECase) -> None:
    """Global ids through a map give the bits of the local ids."""
    mapped = MoEProblem(case, subject.device).run(subject.new_moe())
    local = case.but(expert_map=None, ids=((2, -1), (1, -1), (-1, 0)))
    assert_same_bits(mapped, MoEProblem(local, subject.device).run(subject.new_moe()), case.op)


@MOE.check("X7", cases=_each, cause="a kernel writes its result, or a rotated x, over its input")
def experts_inputs_are_never_written(subject: MoESubject, case: MoECase) -> None:
    """x, ids, routing weights, slots and adapters keep every bit."""
    problem = MoEProblem(case, subject.device)
    routing, weights = problem.routing, problem.weights
    assert routing.slots is not None
    inputs = {
        "x": problem.x,
        "topk_ids": routing.topk_ids,
        "topk_weights": routing.topk_weights,
        "slots": routing.slots,
        "a": weights.a,
        "b": weights.b,
        "ranks": weights.ranks,
        "scalings": weights.scalings,
    }
    before = Unchanged(inputs)
    problem.run(subject.new_moe())
    before.check()


@MOE.check(
    "X8",
    cases=_each,
    cause="a product whose shape follows from how many pairs share an expert, or NaN times zero",
)
def experts_neighbours_change_nothing(subject: MoESubject, case: MoECase) -> None:
    """Other rows' values, NaNs, adapters and experts change no bit of a row."""
    case = case.but(slots=(0, 1, 0, 1), ids=((0, 1), (1, 2), (3, 1), (2, 0)))
    before = MoEProblem(case, subject.device).run(subject.new_moe())
    other = MoEProblem(
        case.but(slots=(0, -1, 1, 1), ids=((0, 1), (0, -1), (0, 1), (2, 0))), subject.device
    )
    x = other.x.clone()
    x[1:3] = math.nan
    after = other.run(subject.new_moe(), x=x)
    assert_same_bits(after[[0, 3]], before[[0, 3]], "rows whose neighbours changed")


@MOE.check(
    "X9", cases=_each, cause="0.0 is added where nothing should be, or a dead rank is multiplied"
)
def rows_without_a_delta_keep_their_bits(subject: MoESubject, case: MoECase) -> None:
    """NO_LORA rows and rows of rank 0 keep the base's bits, the sign of zero too."""
    problem = MoEProblem(case, subject.device)
    problem.base.fill_(-0.0)
    with PoisonedAllocations():  # type: ignore[no-untyped-call]
        out = problem.run(subject.new_moe())
    changed = _differences(out, problem.base)
    expected = problem.touched.flatten(1).any(1)
    if not torch.equal(changed, expected):
        raise AssertionError(
            f"rows {changed.nonzero().flatten().tolist()} changed, expected "
            f"{expected.nonzero().flatten().tolist()} (slots {case.slots}, ranks {case.ranks})"
        )
    if not bool(out.isfinite().all()):
        raise AssertionError("memory past a rank or never written reached the result")


@MOE.check("X10", cases=_each, cause="atomic sums in no order, or an order that depends on timing")
def experts_are_deterministic(subject: MoESubject, case: MoECase) -> None:
    """The same call gives the same bits, from a new route, an old one, and a new instance."""
    problem = MoEProblem(case.but(slots=(0, 1, -1, 0, 1) * 2), subject.device)
    backend = subject.new_moe()
    route = backend.route(problem.routing)
    first = problem.run(backend, route=route)
    for instance, again in ((backend, route), (backend, None), (subject.new_moe(), None)):
        assert_same_bits(problem.run(instance, route=again), first, case.op)


@MOE.check("X14", cause="a route holds state of one projection, or an instance that of a batch")
def one_route_serves_both_projections(subject: MoESubject, case: object) -> None:
    """gate_up and down from one route, in either order and among other forwards, as from their own."""
    up = MoEProblem(MoECase(op="gate_up"), subject.device)
    down = MoEProblem(MoECase(op="down"), subject.device)
    down.routing = up.routing
    expected = {problem: problem.run(subject.new_moe()) for problem in (up, down)}
    backend = subject.new_moe()
    route = backend.route(up.routing)
    MoEProblem(MoECase(slots=(1, 1, 1), seed=5), subject.device).run(backend)
    for problem in (down, up, down):
        assert_same_bits(problem.run(backend, route=route), expected[problem], problem.case.op)


@MOE.check(
    "X11",
    "X12",
    cases=lambda subject, level: (
        [MoECase(op=op, slots=(-1,) * 5) for op in OPS] if subject.moe_capabilities.graphs else []
    ),
    cause="ids, slots or ranks read on the host, or a grid that follows from what was captured",
)
def experts_in_a_graph(subject: MoESubject, case: MoECase) -> None:
    """A graph captured without adapters applies what is in its tensors when it is replayed."""
    problem, backend = MoEProblem(case, subject.device), subject.new_moe()
    live = MoEProblem(case.but(slots=(0, 1, 2, 1, 0), seed=1), subject.device)
    out = problem.base.clone()

    def forward() -> Tensor:
        out.copy_(problem.base)
        return problem.into(backend, backend.route(problem.routing), out)

    captured = Captured(subject.device, forward)
    assert_same_bits(out, problem.base, "captured without adapters")
    routing, other = problem.routing, live.routing
    assert routing.slots is not None
    assert other.slots is not None
    pairs = (
        (problem.x, live.x),
        (problem.base, live.base),
        (routing.topk_ids, other.topk_ids),
        (routing.topk_weights, other.topk_weights),
        (routing.slots, other.slots),
        (problem.weights.a, live.weights.a),
        (problem.weights.b, live.weights.b),
        (problem.weights.scalings, live.weights.scalings),
    )
    for target, source in pairs:
        target.copy_(source)
    captured.replay()
    assert_same_bits(out, live.run(subject.new_moe()), "replayed with adapters")
    routing.slots.fill_(-1)
    captured.replay()
    assert_same_bits(out, live.base, "replayed without adapters")


@MOE.check("X13", cases=_each, cause="shapes are not compared before kernels are launched")
def experts_refuse_what_does_not_fit(subject: MoESubject, case: MoECase) -> None:
    """Tensors that do not fit raise TensorMismatchError and leave out as it was."""
    problem, backend = MoEProblem(case, subject.device), subject.new_moe()
    route, kept = backend.route(problem.routing), problem.base.clone()
    narrow = MoEProblem(case.but(hidden=case.hidden + 1, inner=case.inner + 1), subject.device)
    fewer = MoEProblem(case.but(experts=case.experts + 1), subject.device)
    wrong = {
        "x of another width": (narrow.x, problem.weights, problem.base),
        "x of fewer rows": (problem.x[1:], problem.weights, problem.base),
        "out of another width": (problem.x, problem.weights, narrow.base),
        "another number of experts": (problem.x, fewer.weights, problem.base),
        "x of another dtype": (problem.x.double(), problem.weights, problem.base),
    }
    for what, (x, weights, out) in wrong.items():
        try:
            if case.op == "gate_up":
                backend.gate_up(x, weights, route, out)
            else:
                backend.down(x, weights, route, out)
        except TensorMismatchError:
            continue
        raise AssertionError(f"{what} was accepted")
    assert_same_bits(problem.base, kept, "out after refusals")


@MOE.check("C2", "X13", cause="a limit that is claimed and not checked")
def experts_refuse_what_is_not_claimed(subject: MoESubject, case: object) -> None:
    """Dtypes, ranks and slices beyond the claims raise UnsupportedOpError."""
    claims = subject.moe_capabilities
    beyond = [
        MoECase(dtype=d) for d in ("float32", "float16", "bfloat16") if d not in claims.dtypes
    ]
    dtype = min(claims.dtypes)
    if claims.max_rank is not None:
        beyond.append(MoECase(dtype=dtype, max_rank=claims.max_rank + 1))
    if claims.max_slices is not None and claims.max_slices < 2:
        beyond.append(MoECase(dtype=dtype))
    for unclaimed in beyond:
        problem = MoEProblem(unclaimed, subject.device)
        try:
            problem.run(subject.new_moe())
        except UnsupportedOpError:
            continue
        raise AssertionError(f"{unclaimed.id} is not claimed, and was accepted")


@MOE.check("X16", cause="allocate_weights of another shape, or of ranks that are not 0")
def experts_allocate_weights(subject: MoESubject, case: object) -> None:
    """allocate_weights gives the contract's shapes, and applies nothing."""
    for shared in (False, True):
        like = MoEProblem(MoECase(shared=shared), subject.device)
        weights = subject.new_moe().allocate_weights(
            num_slots=3,
            num_experts=4,
            max_rank=6,
            in_features=32,
            layout=like.weights.layout,
            dtype=torch.float32,
            shared_a=shared,
        )
        if (weights.a.shape, weights.b.shape) != (like.weights.a.shape, like.weights.b.shape):
            raise AssertionError(f"a {tuple(weights.a.shape)}, b {tuple(weights.b.shape)}")
        like.weights = weights
        assert_same_bits(like.run(subject.new_moe()), like.base, "weights without an adapter")


@MOE.check("X12", cases=_each, cause="a count or an id read back by the host")
def experts_never_synchronise(subject: MoESubject, case: MoECase) -> None:
    """Route and ops never wait for the device."""
    if not subject.on_cuda:
        raise NotRunHere("cuda", "torch watches for synchronisation on CUDA devices only")
    problem, backend = MoEProblem(case, subject.device), subject.new_moe()
    problem.run(backend)  # compiles
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem.run(backend)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@MOE.check(
    "X17", cause="empty requests counted as rows, padding, or another extent than the static one"
)
def experts_find_the_slots_of_rows(subject: MoESubject, case: object) -> None:
    """Each row has the slot of its request, padding NO_LORA; None where no row has an adapter."""
    backend, dense = subject.new_moe(), load_backend("torch", device=subject.device)
    dense.init_graph("prefill", max_requests=9, max_tokens=12)
    lengths, slots = [0, 3, 0, 1, 4, 0], [7, 1, 2, -1, 0, 5]
    expected = [1, 1, 1, -1, 0, 0, 0, 0, -1, -1]
    for graph in (None, "prefill"):
        info = dense.prepare_batch(LoRABatch(lengths, slots), graph=graph)
        found = backend.row_slots(info, 10)
        if found is None or found.dtype != torch.int32 or found.tolist() != expected:
            raise AssertionError(f"found {found}, expected int32 {expected} (graph {graph})")
    captured = Captured(subject.device, lambda: backend.row_slots(dense.batch_info, 4))
    dense.prepare_batch(LoRABatch([1, 2], [3, -1]), graph="prefill")
    captured.replay()
    if captured.result.tolist() != [3, -1, -1, -1]:
        raise AssertionError(f"replayed with another batch: {captured.result.tolist()}")
    base_only = dense.prepare_batch(LoRABatch([2], [-1]))
    if backend.row_slots(None, 2) is not None or backend.row_slots(base_only, 2) is not None:
        raise AssertionError("without an adapter there is nothing to find")
