"""The grid, its batches, and the limits beside it."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from benchmarks.grid import JUDGED, DenseCell, dense_cells, moe_cells, spread
from benchmarks.roofline import dense_limit_us, moe_limit_us


def cell(**changes: object) -> DenseCell:
    asked = {
        "site": "toy", "K": 8, "widths": (4, 2), "tokens": 6, "adapters": 2, "rank": 4, "max_loras": 8, "max_rank": 4,
        "mix": "even", "requests": 6, "limit_us": 1.0,
    }  # fmt: skip
    return DenseCell(**{**asked, **changes})  # type: ignore[arg-type]


def test_the_judged_grid_is_the_file() -> None:
    held = json.loads(JUDGED.read_text())
    asked = [c.asked() for c in dense_cells("judged")]
    assert sorted(map(str, asked)) == sorted(map(str, held["dense"]))
    assert len(asked) == 83
    assert len(moe_cells("judged")) == 24


@pytest.mark.parametrize("name", ["smoke", "judged", "full"])
def test_no_cell_is_there_twice(name: str) -> None:
    for cells in (dense_cells(name), moe_cells(name)):  # type: ignore[arg-type]
        assert not [c for c, n in Counter(cells).items() if n > 1]


def test_full_begins_with_the_judged_cells() -> None:
    judged = dense_cells("judged")
    assert dense_cells("full")[: len(judged)] == judged


def test_batches_of_each_mix() -> None:
    assert cell().slots == [0, 1, 0, 1, 0, 1]
    assert cell(mix="half base-only").slots == [0, -1, 1, -1, 0, -1]
    assert cell(mix="ranks 8,16", adapters=3).ranks == [8, 16, 8]
    assert cell(tokens=1024, requests=2).seq_lens == [512, 512]
    assert cell(tokens=512, requests=512).decode
    assert not cell(tokens=1024).decode


@pytest.mark.parametrize("n", [1, 2, 3, 24, 83])
def test_spread_keeps_every_cell_once(n: int) -> None:
    assert sorted(spread(range(n))) == list(range(n))


def test_the_beginning_of_the_judged_grid_has_every_kind_of_site() -> None:
    first = dense_cells("judged")[:20]
    assert {c.site.removesuffix("tp8").removesuffix("70") for c in first} == {
        "o",
        "qkv",
        "gate_up",
        "down",
    }
    assert {c.decode for c in first} == {True, False}


def test_limits_agree_with_those_of_the_judged_grid() -> None:
    for c in dense_cells("judged"):
        if not c.mix.startswith(
            ("half", "ranks")
        ):  # the file counts the rows and ranks that are live
            own = dense_limit_us(c.K, c.widths, c.rank, c.tokens, c.adapters, decode=c.decode)
            assert own == pytest.approx(c.limit_us, rel=0.01), c
    for m in moe_cells("judged"):
        own = moe_limit_us(
            m.hidden, m.intermediate, m.experts, m.top_k, m.rank, m.tokens, m.adapters, m.layout
        )
        assert own == pytest.approx(m.limit_us, rel=0.01), m
