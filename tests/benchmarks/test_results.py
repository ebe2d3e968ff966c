"""Result files: resuming, merging, and never mixing two runs in a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results import ResultFile, better, cell_key, merge

CELL = {"site": "o", "K": 4096, "widths": [4096], "tokens": 32, "mix": "even", "limit_us": 2.5}


def measured(**outcome: Any) -> dict[str, Any]:
    return {
        **CELL,
        "base_us": 14.0,
        "ours": {"triton": 5.0},
        "peers": {"other": 7.0},
        "interval_us": {},
        "counts": True,
        **outcome,
    }


def file(path: Path, commit: str = "abc", card: str = "card") -> ResultFile:
    return ResultFile(path, card=card, versions={"torch": "2"}, commit=commit)


def test_the_key_is_what_was_asked() -> None:
    assert cell_key(measured()) == cell_key(CELL)
    assert cell_key({**CELL, "tokens": 8}) != cell_key(CELL)


def test_a_file_holds_card_versions_commit_and_rows(tmp_path: Path) -> None:
    results = file(tmp_path / "deep" / "dense.json")
    results.add(measured())
    held = json.loads((tmp_path / "deep" / "dense.json").read_text())
    assert set(held) == {"card", "versions", "commit", "rows"}
    assert held["rows"][0]["ours"] == {"triton": 5.0}
    assert held["rows"][0]["commit"] == "abc"


def test_a_second_run_goes_on_where_the_first_stopped(tmp_path: Path) -> None:
    file(tmp_path / "dense.json").add(measured())
    again = file(tmp_path / "dense.json")
    assert again.has(CELL, ["triton"])
    assert not again.has({**CELL, "tokens": 8}, ["triton"])
    assert not again.has(CELL, ["triton", "csgmv"])  # a backend that was not there
    assert not file(tmp_path / "dense.json", commit="def").has(CELL, ["triton"])


def test_a_cell_that_does_not_count_is_measured_again(tmp_path: Path) -> None:
    results = file(tmp_path / "dense.json")
    results.add(measured(counts=False))
    assert not results.has(CELL, ["triton"])


def test_a_failure_counts_as_measured(tmp_path: Path) -> None:
    results = file(tmp_path / "dense.json")
    results.add(measured(ours={}, errors={"triton": "RuntimeError"}))
    assert results.has(CELL, ["triton"])


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        (measured(base_us=1.0), measured(base_us=2.0), 2.0),
        (measured(base_us=1.0), measured(base_us=2.0, counts=False), 1.0),
        (measured(base_us=1.0, counts=False), measured(base_us=2.0, counts=False), 2.0),
        (measured(base_us=1.0), measured(base_us=2.0, peers={}), 1.0),
        (measured(base_us=1.0, ours={}), measured(base_us=2.0), 2.0),
    ],
    ids=["newer", "newer-does-not-count", "neither-counts", "newer-lacks-peers", "newer-has-more"],
)
def test_merging_chooses_one_whole_row(
    old: dict[str, Any], new: dict[str, Any], kept: float
) -> None:
    chosen = better(old, new)
    assert chosen["base_us"] == kept
    assert chosen in (old, new)


def test_merge_joins_cells_of_several_files(tmp_path: Path) -> None:
    file(tmp_path / "a.json").add(measured())
    file(tmp_path / "b.json", commit="def").add({**measured(), "tokens": 8})
    assert merge(tmp_path / "all.json", [tmp_path / "a.json", tmp_path / "b.json"]) == 2
    held = json.loads((tmp_path / "all.json").read_text())
    assert {row["commit"] for row in held["rows"]} == {"abc", "def"}


def test_two_cards_do_not_mix(tmp_path: Path) -> None:
    file(tmp_path / "a.json").add(measured())
    file(tmp_path / "b.json", card="other").add(measured())
    with pytest.raises(ValueError, match="'other'"):
        merge(tmp_path / "all.json", [tmp_path / "a.json", tmp_path / "b.json"])
    with pytest.raises(ValueError, match="two cards"):
        file(tmp_path / "a.json", card="other")


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    results = file(tmp_path / "dense.json")
    results.add(measured())
    before = (tmp_path / "dense.json").read_text()
    with pytest.raises(TypeError):
        results.add(measured(errors={"triton": object()}))
    assert (tmp_path / "dense.json").read_text() == before
