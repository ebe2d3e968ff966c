"""Tile tables: the first match wins, and a table that cannot be right is refused."""

from __future__ import annotations

import pytest
import torch

from lora_core.triton_kit import Rule, Tile, TileTable, family

SMALL, LARGE, HOPPER = Tile({"BM": 16}), Tile({"BM": 64}, num_warps=8), Tile({"BM": 32})


def table() -> TileTable:
    return TileTable(
        "shrink",
        ["rows", "rank"],
        [
            Rule(HOPPER, "measured", family="sm90", where={"rows": (1, 512), "rank": (64, 128)}),
            Rule(SMALL, "few rows", where={"rows": (1, 512)}),
            Rule(LARGE, "the rest"),
        ],
    )


@pytest.mark.parametrize(
    ("gpu", "rows", "rank", "expected"),
    [
        ("sm90", 512, 64, HOPPER),
        ("sm90", 513, 64, LARGE),
        ("sm90", 1, 16, SMALL),
        ("sm80", 1, 64, SMALL),
        ("cpu", 8192, 8, LARGE),
    ],
)
def test_the_first_matching_rule_wins(gpu: str, rows: int, rank: int, expected: Tile) -> None:
    assert table().pick(gpu, rows=rows, rank=rank) == expected


def test_tiles_lists_every_tile_once() -> None:
    rules = [Rule(SMALL, "a", family="sm80"), Rule(SMALL, "b", family="sm90"), Rule(LARGE, "c")]
    assert TileTable("t", [], rules).tiles() == [SMALL, LARGE]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([Rule(SMALL, "only sm90", family="sm90")], "must end with a rule for any family"),
        ([Rule(SMALL, "x", where={"tokens": (1, 2)}), Rule(LARGE, "y")], "unknown shape names"),
        ([Rule(SMALL, "x", where={"rows": (9, 2)}), Rule(LARGE, "y")], "empty band"),
        (
            [
                Rule(SMALL, " "),
            ],
            "needs its reason",
        ),
        ([Rule(SMALL, "x"), Rule(LARGE, "y")], "always matches first"),
        (
            [
                Rule(SMALL, "x", where={"rows": (1, 9)}),
                Rule(LARGE, "y", family="sm90", where={"rows": (2, 8)}),
                Rule(LARGE, "z"),
            ],
            "always matches first",
        ),
        ([Rule(Tile({"BN": 1}), "x", family="sm90"), Rule(LARGE, "y")], "the first rule sets"),
    ],
)
def test_a_table_that_cannot_be_right_is_refused(rules: list[Rule], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TileTable("t", ["rows"], rules)


def test_pick_wants_exactly_the_tables_keys() -> None:
    with pytest.raises(ValueError, match=r"keyed by \['rank', 'rows'\], got \['rows'\]"):
        table().pick("sm90", rows=1)


def test_family_of_a_cpu() -> None:
    assert family(torch.device("cpu")) == "cpu"
