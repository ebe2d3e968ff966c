"""Ahead-of-time compilation: what it reports, and that it fails where a kernel exceeds its bounds."""

from __future__ import annotations

import dataclasses
import re

import pytest
import triton
import triton.language as tl

from lora_core.triton_kit import INTERPRETED, AotCase, dot
from lora_core.triton_kit.aot import compile_case

pytestmark = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels cannot be compiled")


@triton.jit
def _product(x, w, y, stride, ROWS: tl.constexpr, INNER: tl.constexpr, COLUMNS: tl.constexpr):
    rows, inner, columns = tl.arange(0, ROWS), tl.arange(0, INNER), tl.arange(0, COLUMNS)
    b_x = tl.load(x + rows[:, None] * stride + inner[None, :])  # [ROWS, INNER]
    b_w = tl.load(w + inner[:, None] * COLUMNS + columns[None, :])  # [INNER, COLUMNS]
    acc = dot(b_x, b_w, tl.zeros((ROWS, COLUMNS), tl.float32))
    tl.store(y + rows[:, None] * COLUMNS + columns[None, :], acc)


CASE = AotCase(
    label="product",
    kernel=_product,
    types={"x": "*bf16", "w": "*bf16", "y": "*fp32", "stride": "i32"},
    constexprs={"ROWS": 16, "INNER": 32, "COLUMNS": 16},
    options={"num_warps": 1},
)


def test_a_case_within_its_bounds_has_no_problem() -> None:
    result = compile_case(CASE, "sm90")
    assert result.problem is None
    assert 0 < result.registers <= 255
    assert result.stack == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_registers": 8}, r"registers \d+ > 8"),
        pytest.param(
            {"constexprs": {"ROWS": 16, "INNER": 4096, "COLUMNS": 16}},
            r"shared \d+ > 232448",
            marks=pytest.mark.slow,
        ),
        ({"constexprs": {"ROWS": 16, "INNER": 24, "COLUMNS": 16}}, "power of 2"),
        (
            {"types": {"x": "*bf16", "w": "*fp16", "y": "*fp32", "stride": "i32"}},
            "CompilationError",
        ),
    ],
    ids=["registers", "shared-memory", "not-a-power-of-two", "mixed-dtypes"],
)
def test_a_case_outside_its_bounds_says_how(change: dict[str, object], message: str) -> None:
    case = dataclasses.replace(CASE, **change)
    problem = compile_case(case, "sm90").problem
    assert problem is not None
    assert re.search(message, problem), problem


def test_a_case_must_describe_every_parameter() -> None:
    case = dataclasses.replace(CASE, types={"x": "*bf16", "w": "*bf16", "y": "*fp32", "z": "i32"})
    with pytest.raises(ValueError, match=r"unknown parameters \['z'\], missing \['stride'\]"):
        compile_case(case, "sm90")
