"""Values: each op against float64, within twice plain torch's error."""

# ruff: noqa: ARG005 - checks and their cases share one signature

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lora_core.testing.compare import assert_close, assert_same_bits
from lora_core.testing.engine import Level
from lora_core.testing.moe_case import OPS, MoECase, MoEProblem, MoESubject
from lora_core.testing.moe_family import MOE

GRID = (
    MoECase(),
    MoECase(gated=False),
    MoECase(shared=True, seed=1),
    MoECase(op="down", shared=True, seed=2),
    MoECase(op="down_rows", shared=True, top_k=3, seed=3),
    MoECase(op="down", seed=4),
    MoECase(op="down_rows", seed=5),
    MoECase(op="down_rows", accumulate=False, seed=6),
    MoECase(accumulate=False, seed=7),
    MoECase(hidden=33, inner=7, max_rank=5, ranks=(5, 1, 3), seed=8),
    MoECase(op="down", hidden=33, inner=7, max_rank=1, ranks=(1, 0, 1), seed=9),
    MoECase(slots=(1,), top_k=1, experts=1, seed=10),
)
"""Both projections, gated or not, shared or not, odd sizes, one row of one expert."""

WIDE = (
    MoECase(slots=(0, 1, 2) * 8, max_rank=64, ranks=(64, 17, 8), hidden=160, inner=72, seed=11),
    MoECase(
        op="down",
        slots=(0, 1, 2) * 8,
        max_rank=64,
        ranks=(64, 17, 8),
        hidden=160,
        inner=72,
        seed=12,
    ),
    MoECase(slots=(0,) * 70, experts=2, top_k=1, seed=13),
)
"""Ranks and widths past one block, and groups past one tile."""


def _cases(subject: MoESubject, level: Level) -> Sequence[MoECase]:
    claims = subject.moe_capabilities
    dtypes = sorted(claims.dtypes, key=["float32", "float16", "bfloat16"].index)
    small = [case for case in GRID if fits(case, subject)]
    if level == "smoke":
        others = [
            case.but(dtype=dtype) for dtype in dtypes if dtype != "float32" for case in small[:1]
        ]
        return [*(small if "float32" in dtypes else ()), *others]
    return [
        case.but(dtype=dtype) for dtype in dtypes for case in (*small, *WIDE) if fits(case, subject)
    ]


def fits(case: MoECase, subject: MoESubject) -> bool:
    """Whether a case lies in what the backend claims."""
    claims = subject.moe_capabilities
    slices = 2 if case.gated and case.op == "gate_up" else 1
    return not (
        (claims.max_rank is not None and case.max_rank > claims.max_rank)
        or (claims.max_slices is not None and slices > claims.max_slices)
    )


@MOE.check(
    "X1",
    "X2",
    "X3",
    "V8",
    cases=_cases,
    cause="a wrong slice offset, a rank that is not masked, a routing weight left out, or a sum in 16 bits",
)
def experts_values(subject: MoESubject, case: MoECase) -> None:
    """The op is within twice plain torch's error of the float64 result."""
    subject.require_dtype(case.dtype)
    problem = MoEProblem(case, subject.device)
    out = problem.run(subject.new_moe())
    rows = out.cpu().flatten(0, -2)
    expected, plain = problem.expected.flatten(0, -2), problem.plain().flatten(0, -2)
    assert_close(rows, expected, [plain], case.op)


@MOE.check(
    "X6",
    cases=lambda subject, level: [MoECase(op=op, shared=True) for op in OPS],
    cause="the stride over experts of a shared matrix is not zero",
)
def shared_outer_is_the_same_matrix_for_every_expert(subject: MoESubject, case: MoECase) -> None:
    """A shared matrix gives the bits of that matrix repeated for every expert."""
    problem = MoEProblem(case, subject.device)
    shared = problem.run(subject.new_moe())
    weights = problem.weights
    problem.weights = dataclasses.replace(
        weights,
        a=weights.a.expand(-1, case.experts, -1, -1, -1).contiguous(),
        b=weights.b.expand(-1, case.experts, -1, -1).contiguous(),
    )
    assert_same_bits(shared, problem.run(subject.new_moe()), case.op)


@MOE.check(
    "X15",
    cases=lambda subject, level: [
        MoECase(slots=tuple(range(8)), experts=256, ranks=(1,) * 8, max_rank=1, hidden=8, inner=4),
        MoECase(
            slots=tuple(range(32)), experts=128, ranks=(1,) * 32, max_rank=1, hidden=8, inner=4
        ),
        MoECase(slots=(0, 3), experts=512, top_k=8, ranks=(1,) * 4, max_rank=1, hidden=8, inner=4),
    ],
    cause="a table over all virtual experts that outgrows shared memory, or a key that overflows",
)
def many_virtual_experts(subject: MoESubject, case: MoECase) -> None:
    """Slots times experts has no limit but memory."""
    problem = MoEProblem(case, subject.device)
    out = problem.run(subject.new_moe()).cpu().flatten(0, -2)
    assert_close(out, problem.expected.flatten(0, -2), [problem.plain().flatten(0, -2)], case.op)
