"""The float64 oracle against sums written out one number at a time."""

from __future__ import annotations

import pytest
import torch

from lora_core.testing import DenseCase, Subject, oracle
from lora_core.testing.dense_case import Problem

CASE = DenseCase(
    lengths=(2, 0, 1, 2), slots=(1, 0, -1, 2), ranks=((3, 0), (2, 4), (0, 1)), K=5, widths=(3, 2), R=4, bias=True,
    scales=(0.5, 1.0, 9.0, -2.0),
)  # fmt: skip


def _slot_and_scale(row):
    return ((1, 0.5), (1, 0.5), (-1, 9.0), (2, -2.0), (2, -2.0))[row]


def _delta(w, x, row, column):
    """One entry of the delta, in python floats."""
    slot, scale = _slot_and_scale(row)
    s, begin = (0, 0) if column < 3 else (1, 3)
    assert begin <= column
    if slot < 0:
        return 0.0
    rank = CASE.slice_ranks[slot][s]
    total = 0.0
    for r in range(rank):
        h = sum(w.a[slot, s, r, k].item() * x[row, k].item() for k in range(CASE.K))
        total += w.b[slot, column, r].item() * h
    return scale * w.scalings[slot, s].item() * total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear(dtype):
    problem = Problem(Subject("torch", device="cpu"), CASE.but(dtype=dtype))
    w, x, base = problem.weights, problem.x, problem.base
    found = oracle.linear(x, base.weight, base.bias, w, CASE.lengths, CASE.slots, CASE.scales)
    for row in range(5):
        for column in range(5):
            product = sum(base.weight[column, k].item() * x[row, k].item() for k in range(CASE.K))
            expected = product + _delta(w, x, row, column) + base.bias[column].item()
            assert expected == pytest.approx(found[row, column].item(), rel=1e-12, abs=1e-12)


def test_optional_parts():
    import dataclasses

    problem = Problem(Subject("torch", device="cpu"), CASE)
    scale, bias = torch.rand(3, 5) + 0.5, torch.rand(3, 5)
    whole = torch.rand(5, 5)
    w = dataclasses.replace(problem.weights, output_scale=scale, bias=bias, full={2: whole})
    x, base = problem.x, problem.base
    found = oracle.linear(x, base.weight, base.bias, w, CASE.lengths, CASE.slots, CASE.scales)
    for row in range(5):
        slot, _ = _slot_and_scale(row)
        weight = whole if slot == 2 else base.weight
        for column in range(5):
            product = sum(weight[column, k].item() * x[row, k].item() for k in range(CASE.K))
            expected = product + _delta(w, x, row, column)
            if slot >= 0:
                expected = expected * scale[slot, column].item() + bias[slot, column].item()
            expected += base.bias[column].item()
            assert expected == pytest.approx(found[row, column].item(), rel=1e-12, abs=1e-12)


def test_shrink_marks_what_is_unspecified():
    problem = Problem(Subject("torch", device="cpu"), CASE)
    h = oracle.shrink(problem.x, problem.weights, CASE.lengths, CASE.slots)
    live = [[[0] * 4] * 2 for _ in range(5)]
    for row in (0, 1):
        live[row] = [[1, 1, 0, 0], [1, 1, 1, 1]]
    for row in (3, 4):
        live[row] = [[0, 0, 0, 0], [1, 0, 0, 0]]
    assert live == (~h.isnan()).int().tolist()


def test_embedding():
    case = CASE.but(widths=(3,), ranks=(3, 2, 4), K=7, bias=False)
    problem = Problem(Subject("torch", device="cpu"), case, embedding=True)
    w, ids, table = problem.weights, problem.x, problem.base.weight
    found = oracle.embedding(ids, table, w, case.lengths, case.slots, case.scales)
    for row, id_ in enumerate(ids.tolist()):
        slot, scale = _slot_and_scale(row)
        for column in range(3):
            expected = table[id_, column].item()
            if slot >= 0:
                terms = (
                    w.b[slot, column, r].item() * w.a[slot, id_, r].item()
                    for r in range(case.ranks[slot])
                )
                expected += scale * w.scalings[slot, 0].item() * sum(terms)
            assert expected == pytest.approx(found[row, column].item(), rel=1e-12, abs=1e-12)


def test_oracle_shares_no_code_with_backends():
    import ast
    from pathlib import Path

    tree = ast.parse(Path(oracle.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name.startswith("lora_core")} == {"lora_core.weights"}
