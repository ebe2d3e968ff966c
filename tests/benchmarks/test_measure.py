"""Pairing, the check of every timed call, and rows, with the reference backend on the CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks import dense, moe, report
from benchmarks.check import Oracle, sample_rows
from benchmarks.grid import DenseCell, MoECell
from benchmarks.timing import BASE, Paired, paired_rounds

CPU = torch.device("cpu")
CELL = DenseCell("toy", 64, (48, 16), 8, 3, 8, 4, 16, "half base-only", 8, 1.0)
EXPERTS = MoECell("toy", 64, 32, 4, 2, 8, 3, 8, "per_expert", 4, 1.0)


def test_differences_are_paired_within_a_round() -> None:
    drift = iter(range(0, 1000, 100))

    def time_round(order: Sequence[str]) -> dict[str, float]:
        slow = next(drift)
        return {name: slow + {BASE: 80.0, "a": 88.0, "b": 96.0}[name] for name in order}

    paired = paired_rounds(
        time_round, [BASE, "a", "b"], layers=8, enough=lambda _: True, min_rounds=7
    )
    assert paired.rounds == 7
    assert paired.added == {"a": [1.0] * 7, "b": [2.0] * 7}


def test_every_contender_begins_a_round_in_turn() -> None:
    orders = []

    def time_round(order: Sequence[str]) -> dict[str, float]:
        orders.append(list(order))
        return dict.fromkeys(order, 1.0)

    paired_rounds(time_round, [BASE, "a", "b"], layers=1, enough=lambda _: True, min_rounds=3)
    assert orders == [[BASE, "a", "b"], [BASE, "a", "b"], ["a", "b", BASE], ["b", BASE, "a"]]


def test_rounds_go_on_until_it_is_enough() -> None:
    asked = []

    def enough(paired: Paired) -> bool:
        asked.append(paired.rounds)
        return len(asked) == 3

    paired = paired_rounds(
        lambda order: dict.fromkeys(order, 1.0), [BASE, "a"], layers=1, enough=enough, min_rounds=5
    )
    assert (paired.rounds, asked) == (15, [5, 10, 15])


def test_a_slow_cell_is_given_up_after_its_time() -> None:
    ticks = iter(range(0, 10_000, 10))
    paired = paired_rounds(
        lambda order: dict.fromkeys(order, 1.0), [BASE, "a"], layers=1, enough=lambda _: False,
        seconds=1.0, clock=lambda: float(next(ticks)),
    )  # fmt: skip
    assert paired.rounds == 5


def test_the_oracle_agrees_with_a_loop_over_rows() -> None:
    problem = dense.build(CELL, device=CPU, dtype=torch.float32, layers=1)
    (base,), (adapters,) = problem.bases, problem.adapters
    oracle = Oracle(problem.x, base.weight, adapters, problem.row_slots, torch.arange(8))
    for t, slot in enumerate(problem.row_slots.tolist()):
        expected = base.weight @ problem.x[t]
        for s, (start, end) in enumerate([(0, 48), (48, 64)]):
            if slot >= 0:
                expected[start:end] += adapters.b[slot][start:end] @ (
                    adapters.a[slot][s] @ problem.x[t]
                )
        torch.testing.assert_close(oracle.expected[t], expected)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: out[3].zero_(),
        lambda out: out[0, 5].fill_(float("nan")),
        lambda out: out.mul_(1.02),
    ],
    ids=["a-row-missing", "a-nan", "two-percent"],
)
def test_a_wrong_output_is_found(spoil: object) -> None:
    problem = dense.build(CELL, device=CPU, dtype=torch.bfloat16, layers=1)
    (base,), (adapters,) = problem.bases, problem.adapters
    oracle = Oracle(problem.x, base.weight, adapters, problem.row_slots, sample_rows(8, CPU))
    right = (
        base(problem.x).float() + adapters.delta(problem.x, problem.row_slots, torch.float32)
    ).bfloat16()
    assert oracle.fault(right) is None
    spoil(right)  # type: ignore[operator]
    assert "wrong result" in (oracle.fault(right) or "")


def test_base_and_delta_are_of_one_size() -> None:
    problem = dense.build(CELL, device=CPU, dtype=torch.float32, layers=1)
    base = problem.bases[0](problem.x)
    delta = problem.adapters[0].delta(problem.x, problem.row_slots, torch.float32)
    live = problem.row_slots >= 0
    assert 0.3 < float(delta[live].norm() / base[live].norm()) < 3.0
    assert not delta[~live].any()


def wrong_peer(**asked: object) -> dict[str, object]:
    def base_alone(layer: int, x: Tensor, base: object) -> Tensor:
        return base()  # type: ignore[operator, no-any-return]

    def broken(layer: int, x: Tensor, base: object) -> Tensor:
        raise RuntimeError("no such kernel")

    return {"base_alone": base_alone, "broken": broken}


def test_a_row_has_what_is_right_and_names_what_is_not() -> None:
    kit = SimpleNamespace(dense=wrong_peer)
    row = dense.measure(CELL, ["torch", "absent"], kit, device=CPU, layers=2, seconds=0.05)  # type: ignore[arg-type]
    assert CELL.asked().items() <= row.items()
    assert set(row["ours"]) == set(row["interval_us"]) == set(row["error"]) == {"torch"}
    assert row["peers"] == {}
    assert "wrong result" in row["errors"]["base_alone"]
    assert "no such kernel" in row["errors"]["broken"]
    assert "absent" in row["errors"]
    low, high = row["interval_us"]["torch"]
    assert low <= row["ours"]["torch"] <= high


@pytest.mark.parametrize("layout", ["per_expert", "shared_outer"])
def test_an_experts_row_is_checked(layout: str) -> None:
    cell = MoECell(**{**EXPERTS.asked(), "layout": layout})

    def experts(*, out13: Tensor, **asked: object) -> dict[str, object]:
        return {"nothing_there": lambda: None, "wrong": lambda: out13.fill_(1.0)}

    ours = ["torch", "torch:deltas"]
    row = moe.measure(cell, ours, SimpleNamespace(moe=experts), device=CPU, seconds=0.05)  # type: ignore[arg-type]
    assert set(row["ours"]) == set(ours)
    assert max(row["error"][name] for name in ours) < 0.01
    assert set(row["peers"]) == {
        "nothing_there"
    }  # cannot be compared: it leaves its delta elsewhere
    assert "wrong result of gate_up" in row["errors"]["wrong"]


def test_bars() -> None:
    row = {
        "limit_us": 2.5,
        "peers": {"a": 9.0, "b": 4.0},
        "ours": {"x": 3.0},
        "tokens": 32,
        "site": "o",
    }
    assert report.best_peer_us(row) == 4.0
    assert report.bar_us(row) == 1.25 * 2.5  # more than half of 4.0
    assert report.bar_us({**row, "peers": {"a": 9.0}}) == 4.5
    assert report.best_peer_us({**row, "peers": {"a": -1.0}}) == 2.5  # no faster than the limit
    assert report.ratios([row]) == {"dense decode": [(0.75, row)]}


def test_the_summary_counts_what_reached_its_bar(tmp_path: Path) -> None:
    def row(tokens: int, ours: float) -> dict[str, object]:
        return {
            "site": "o", "tokens": tokens, "adapters": 1, "rank": 16, "limit_us": 2.0, "ours": {"x": ours},
            "peers": {"a": 8.0},
        }  # fmt: skip

    path = tmp_path / "dense.json"
    path.write_text(json.dumps({"rows": [row(1, 2.0), row(8, 8.0), row(4096, -3.0)]}))
    _, _, decode, prefill = report.summary([path]).splitlines()
    assert (
        decode == "| x | dense decode | 2 | 0.50 | 1 | 1 | o T=8 x1 r16: 1.00; o T=1 x1 r16: 0.25 |"
    )
    # what adds less than nothing counts as a tenth
    assert prefill.startswith("| x | dense prefill | 1 | 0.10 | 1 | 0 |")
