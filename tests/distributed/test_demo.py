"""The distributed demo's own comparison, and (slow) the whole demo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
END = 9


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo_distributed

    return demo_distributed


def compared(demo, ours, theirs, logits=None):
    logits = torch.zeros(4, len(theirs), 10) if logits is None else logits
    return demo.compare([torch.tensor(row) for row in ours], torch.tensor(theirs), logits, END)


def test_equal_rows_are_neither_ties_nor_wrong(demo):
    assert compared(demo, [[1, 2, 9, 0]], [[1, 2, 9, 7]]) == (
        [],
        [],
    )  # what follows the end is idle


def test_a_row_that_has_fewer_steps_counts_as_far_as_it_goes(demo):
    assert compared(demo, [[1, 2]], [[1, 2, 3, 4]]) == ([], [])
    assert compared(demo, [[1, 3]], [[1, 2, 3, 4]])[0] == [{"row": 0, "step": 1, "margin": 0.0}]


def test_rows_that_differ_by_more_than_a_tie_are_wrong(demo):
    logits = torch.zeros(4, 2, 10)
    logits[2, 1, 4] = 1.0
    ties, wrong = compared(demo, [[1, 2, 3, 4], [1, 2, 5, 4]], [[1, 2, 3, 4], [1, 2, 4, 4]], logits)
    assert (ties, wrong) == ([], [{"row": 1, "step": 2, "margin": 1.0}])


@pytest.mark.slow
def test_every_row_is_as_in_one_process(tmp_path):
    path = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo_distributed.py"), "--output", str(path)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    report = json.loads(path.read_text())
    ties = [tie["part"] for tie in report["ties"]]
    for part in ("tp", "dp"):
        assert report[f"{part}_identical_rows"] + ties.count(part) == report["rows"] == 17
