"""Values: every op against float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from lora_core.capabilities import Op
from lora_core.testing import oracle
from lora_core.testing.compare import assert_close, assert_same_bits
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
    grid,
)
from lora_core.testing.engine import Level, Violation
from lora_core.testing.subject import Subject


@DENSE.check(
    "V1", "S1", "S2", "S5", "S7", "S9", "N4", "V8", "V9", "I1", "I2", "I4", "C1",
    cases=grid,
    cause="a mask that misses a tail (K, N, rank or rows), the scaling or rank of another slice or slot, "
    "sums in less than float32",
)  # fmt: skip
def linear(subject: Subject, case: DenseCase) -> None:
    """Linear equals base(x) + scaling * B A x."""
    problem = Problem(subject, case)
    backend = problem.prepared(subject)
    result = problem.linear(backend)
    assert result.shape[0] == case.rows, (
        f"linear got {case.rows} rows and returned {result.shape[0]}"
    )
    problem.assert_linear(result)


@DENSE.check(
    "V1", "S3", "V8", "S9", "I1",
    cases=grid,
    cause="h kept or summed in the dtype of x instead of float32, or tf32 dots; rows of A mixed up",
)  # fmt: skip
def shrink(subject: Subject, case: DenseCase) -> None:
    """Shrink gives h = A x in float32."""
    problem = Problem(subject, case)
    backend = problem.prepared(subject)
    with problem.guarded(backend):
        h = backend.shrink(problem.x, problem.weights)
    problem.assert_fresh(h, backend)
    assert isinstance(h, torch.Tensor), f"shrink returned {h!r}"
    expected_shape = (case.rows, len(case.widths), case.R)
    if (tuple(h.shape), h.dtype) != (expected_shape, torch.float32):
        found = f"{tuple(h.shape)} of {h.dtype}"
        raise Violation("S3", f"shrink returned {found}, expected {expected_shape} of float32")
    expected = oracle.shrink(problem.x[: case.tokens], problem.weights, case.lengths, case.slots)
    assert_close(h[: case.tokens], expected, problem.plain_shrink(), "shrink", problem.where())


@DENSE.check(
    "V1", "S4", "S3", "I1", "I2",
    cases=grid,
    cause="h read at or past the rank, or of a NO_LORA or padded row: all of that is NaN here",
)  # fmt: skip
def expand(subject: Subject, case: DenseCase) -> None:
    """Expand adds scaling * B h into out, and returns out."""
    problem = Problem(subject, case)
    backend = problem.prepared(subject)
    h, out = problem.hidden(), problem.out()
    before = out.tensor.clone()
    with problem.guarded(backend):
        result = backend.expand(h, problem.weights, out.tensor)
    out.check("out", written=True)
    if result is not out.tensor:
        raise Violation(
            "S4", f"expand returned another {type(result).__name__}, expected out itself"
        )
    live = before[: case.tokens]
    delta = oracle.delta(h[: case.tokens], problem.weights, case.lengths, case.slots, case.scales)
    assert_close(
        result[: case.tokens],
        live.double() + delta,
        problem.plain_expand(h, live),
        "expand",
        problem.where(),
    )
    assert_same_bits(
        result[case.tokens :], before[case.tokens :], "padded rows of out", problem.where()
    )


def _embedding_grid(subject: Subject, level: Level) -> Sequence[DenseCase]:
    if not subject.capabilities.supports(Op.EMBEDDING):
        return ()
    shapes = [case.but(K=61) for case in (MIXED, HOLES, MANY, LONG)] + [
        PLAIN.but(padding=2, layout="own")
    ]
    if subject.capabilities.supports(Op.SCALES):
        shapes.append(PLAIN.but(scales=(0.5, 2.0)))
    return claimed(subject, shapes, every_dtype=level != "smoke")


@DENSE.check(
    "V2", "I1", "S9",
    cases=_embedding_grid,
    cause="A of an embedding is [S, V, R], gathered by id, not [S, n, R, K]",
)  # fmt: skip
def embedding(subject: Subject, case: DenseCase) -> None:
    """Embedding equals base(ids) + scaling * B A[ids]."""
    problem = Problem(subject, case, embedding=True)
    if subject.capabilities.supports(Op.FULL_WEIGHT) and len(case.ranks) > 2:
        _with_extras(problem, full=(2,))
    backend = problem.prepared(subject)
    with problem.guarded(backend):
        result = backend.embedding(problem.x, problem.base, problem.weights)
    problem.assert_fresh(result, backend)
    problem.assert_embedding(result)


def _head_grid(subject: Subject, level: Level) -> Sequence[DenseCase]:
    if not subject.capabilities.supports(Op.LM_HEAD):
        return ()
    shapes = [
        MIXED,  # no passes named: one over every row
        MIXED.but(logits=((1, 0, 1, 1, 1, 1),)),
        HOLES.but(logits=((1, 2, 0, 1), (0, 1, 2, 0), (0, 0, 0, 0))),
        LONG.but(logits=((1, 0, 1, 1),), bias=True),
        PLAIN.but(logits=((2, 1),), padding=2),
        MANY.but(logits=((1,) * 8,)),
    ]
    return claimed(subject, shapes, every_dtype=level != "smoke")


@DENSE.check(
    "V3", "S1", "I1",
    cases=_head_grid,
    cause="rows of a pass counted with the lengths of the batch, or the pass kept from an earlier call "
    "instead of taken from the argument",
)  # fmt: skip
def lm_head(subject: Subject, case: DenseCase) -> None:
    """Each pass of lm_head covers its own rows, in whatever order passes run."""
    problem = Problem(subject, case)
    claims = subject.capabilities
    if case.bias:  # what modules_to_save and DoRA bring to a head
        full = (1,) if claims.supports(Op.FULL_WEIGHT) else ()
        _with_extras(
            problem, dora=claims.supports(Op.DORA), bias=claims.supports(Op.BIAS), full=full
        )
    backend = problem.prepared(subject)
    passes = range(case.batch.num_passes)
    for logits_pass in (*reversed(passes), *passes):
        lengths = case.batch.pass_lengths(logits_pass)
        x = problem.x[: sum(lengths) + case.padding]
        with problem.guarded(backend):
            result = backend.lm_head(x, problem.base, problem.weights, logits_pass=logits_pass)
        problem.assert_fresh(result, backend)
        what = f"lm_head of pass {logits_pass} with rows {list(lengths)}"
        problem.assert_linear(result, what, lengths, x[: sum(lengths)])


def _feature_grid(op: Op, *shapes: DenseCase) -> Callable[[Subject, Level], Sequence[DenseCase]]:
    def cases(subject: Subject, level: Level) -> Sequence[DenseCase]:
        if not subject.capabilities.supports(op):
            return ()
        more = (
            [shape.but(padding=3, bias=not shape.bias) for shape in shapes]
            if level != "smoke"
            else []
        )
        return claimed(subject, [*shapes, *more], every_dtype=level != "smoke")

    return cases


def _with_extras(
    problem: Problem, *, dora: bool = False, bias: bool = False, full: Sequence[int] = ()
) -> None:
    """Give the problem's weights the optional parts; NaN in slots that the batch does not use."""
    case, device = problem.case, problem.device
    generator = torch.Generator().manual_seed(case.seed + 5)
    assert problem.base.weight is not None
    shape = (len(case.ranks), problem.layout.out_features)
    used = torch.tensor([slot in case.slots for slot in range(shape[0])]).unsqueeze(1)

    def values(low: float, high: float) -> torch.Tensor:
        drawn = torch.rand(shape, generator=generator) * (high - low) + low
        return torch.where(used, drawn, torch.nan).to(device)

    wholes = {
        slot: (torch.randn(problem.base.weight.shape, generator=generator) * case.K**-0.5)
        .to(problem.dtype)
        .to(device)
        for slot in full
    }
    problem.weights = dataclasses.replace(
        problem.weights,
        output_scale=values(0.5, 2.0) if dora else None,
        bias=values(-1.0, 1.0) if bias else None,
        full=wholes,
    )


def _run_with_extras(subject: Subject, problem: Problem) -> None:
    backend = problem.prepared(subject)
    result = problem.linear(backend)
    problem.assert_linear(result)
    begin = 0
    untouched = problem.base.value(problem.x)
    for length, slot in zip(problem.case.lengths, problem.case.slots, strict=True):
        rows = slice(begin, begin + length)
        if slot == NONE and not subject.capabilities.owns_base:
            assert_same_bits(
                result[rows], untouched[rows], "rows without an adapter", problem.where()
            )
        begin += length


_BIASED = MIXED.but(bias=True)


@DENSE.check(
    "V4",
    cases=_feature_grid(Op.DORA, _BIASED, LONG, PACKED, MANY),
    cause="the base's bias scaled too, or the scale applied to the delta alone",
)
def dora(subject: Subject, case: DenseCase) -> None:
    """With output_scale, linear equals output_scale * (x W + delta) + bias."""
    problem = Problem(subject, case)
    _with_extras(problem, dora=True)
    _run_with_extras(subject, problem)


@DENSE.check(
    "V5",
    cases=_feature_grid(Op.BIAS, _BIASED, LONG, PACKED, MANY),
    cause="the bias added to rows without an adapter, or skipped for slots of rank 0",
)
def adapter_bias(subject: Subject, case: DenseCase) -> None:
    """An adapter's bias is added to the rows of its slot."""
    problem = Problem(subject, case)
    _with_extras(problem, bias=True, dora=subject.capabilities.supports(Op.DORA) and case.bias)
    _run_with_extras(subject, problem)


@DENSE.check(
    "V6",
    cases=_feature_grid(Op.FULL_WEIGHT, _BIASED, LONG, PACKED, MANY),
    cause="the whole weight added to the base's product instead of replacing it",
)
def full_weight(subject: Subject, case: DenseCase) -> None:
    """An adapter's whole weight replaces the base's, for its rows alone."""
    problem = Problem(subject, case)
    _with_extras(problem, full=(0, 2))
    _run_with_extras(subject, problem)


@DENSE.check(
    "V7",
    cases=_feature_grid(
        Op.SCALES,
        MIXED.but(scales=(0.5, 3.0, -1.5, 2.0, 7.0, 0.1)),
        LONG.but(scales=(2.0, 1.0, 5.0, 0.25)),
        MANY.but(scales=(1.0, 0.5, 0.25, 2.0, 3.0, -1.0, 1.5, 4.0)),
        PACKED.but(scales=(0.5, 3.0, -1.5, 2.0, 7.0, 0.1, 1.25)),
    ),
    cause="scales taken by slot or by row instead of by request, or left on from an earlier batch",
)
def scales(subject: Subject, case: DenseCase) -> None:
    """Each request's scale is a factor on its delta."""
    problem = Problem(subject, case)
    problem.assert_linear(problem.linear(problem.prepared(subject)))


def _accumulation_grid(subject: Subject, level: Level) -> Sequence[DenseCase]:
    shape = PLAIN.but(K=256 if level == "smoke" else 4096, widths=(32,), ranks=(8, 8))
    return claimed(subject, (shape,))


@DENSE.check(
    "V8",
    cases=_accumulation_grid,
    cause="partial sums kept in half precision, or float32 dots run as tf32",
)
def accumulation(subject: Subject, case: DenseCase) -> None:
    """Sums over K that half precision cannot hold are exact."""
    problem = Problem(subject, case.but(ones=True))
    # neither the running sum in half precision nor tf32's ten bits could hold what is added
    problem.x[: case.tokens] = 1.0
    step = 2.0**-10 if case.dtype == "float32" else 1.0
    problem.x[: case.tokens, 1::2] = step
    problem.arm()
    backend = problem.prepared(subject)
    with problem.guarded(backend):
        h = backend.shrink(problem.x, problem.weights)
    exact = case.K / 2 * (1.0 + step)
    for slot, rows in ((0, slice(0, case.lengths[0])), (1, slice(case.lengths[0], case.tokens))):
        rank = case.slice_ranks[slot][0]
        expected = torch.full((case.lengths[slot], 1, rank), exact, device=problem.device)
        assert_same_bits(h[rows, :, :rank], expected, "sums of ones, all representable in float32")


_FAR = 2**30
"""Elements between neighbouring slots or rows: the third is past 2^31."""


def _far_grid(subject: Subject, level: Level) -> Sequence[DenseCase]:
    if level == "smoke":
        return ()
    shape = DenseCase(lengths=(1, 2, 1), slots=(3, 0, 2), ranks=(8, 8, 5, 8), K=40, widths=(24,))
    half = [case for case in claimed(subject, (shape,)) if case.dtype != "float32"]
    return (half or claimed(subject, (shape,)))[:1]


@DENSE.check(
    "S8",
    cases=_far_grid,
    cause="slot * stride or row * stride computed in 32 bits",
)
def far_slots(subject: Subject, case: DenseCase) -> None:
    """Slots more than 2^31 elements apart are found: the pool is large in address, not in memory."""
    problem = Problem(subject, case)
    plain = problem.weights
    extent = 3 * _FAR + plain.a[0].numel() + plain.b[0].numel()
    subject.require_bytes(2 * extent * plain.a.element_size())
    far = {}
    for name, near in (("a", plain.a), ("b", plain.b)):
        buffer = torch.empty(extent, dtype=near.dtype, device=near.device)
        far[name] = buffer.as_strided(near.shape, (_FAR, *near.stride()[1:]))
        far[name].copy_(near)
    problem.weights = dataclasses.replace(plain, a=far["a"], b=far["b"])
    problem.assert_linear(problem.linear(problem.prepared(subject)))


@DENSE.check(
    "S8",
    cases=_far_grid,
    cause="row * stride computed in 32 bits",
)
def far_rows(subject: Subject, case: DenseCase) -> None:
    """Rows of x and out more than 2^31 elements apart are found."""
    problem = Problem(subject, case)
    extent = (case.rows - 1) * _FAR + max(case.K, problem.layout.out_features)
    subject.require_bytes(2 * extent * problem.x.element_size())
    x = torch.empty(extent, dtype=problem.dtype, device=problem.device).as_strided(
        (case.rows, case.K), (_FAR, 1)
    )
    problem.x = x.copy_(problem.x)
    problem.assert_linear(problem.linear(problem.prepared(subject)), "linear with far rows of x")

    h, near = problem.hidden(), problem.out().tensor
    out = torch.empty(extent, dtype=problem.dtype, device=problem.device).as_strided(
        near.shape, (_FAR, 1)
    )
    out.copy_(near)
    problem.prepared(subject).expand(h, problem.weights, out)
    delta = oracle.delta(h, problem.weights, case.lengths, case.slots)
    assert_close(
        out,
        near.double() + delta,
        problem.plain_expand(h, near),
        "expand into far rows",
        problem.where(),
    )


def _large_grid(subject: Subject, level: Level) -> Sequence[DenseCase]:
    if level != "large":
        return ()
    shape = DenseCase(
        lengths=(131000, 80), slots=(0, 1), ranks=(16, 16), R=16, K=16384, widths=(64,)
    )
    half = [case for case in claimed(subject, (shape, LARGER[1])) if case.dtype != "float32"]
    return half[:1]


@DENSE.check("S8", cases=_large_grid, cause="row * stride computed in 32 bits")
def many_rows(subject: Subject, case: DenseCase) -> None:
    """131080 rows of 16384 inputs: more than 2^31 elements in x itself."""
    subject.require_cuda()
    subject.require_bytes(24 * 2**30)
    problem = Problem(subject, case)
    backend = problem.prepared(subject)
    result = backend.linear(problem.x, problem.base, problem.weights)
    tail = slice(case.tokens - 400, case.tokens)  # across the request boundary, past 2^31
    cut = case.but(lengths=(320, 80))
    near = Problem(subject, cut)
    near.weights, near.base = problem.weights, problem.base
    near.assert_linear(result[tail], "the last rows", cut.lengths, problem.x[tail])
