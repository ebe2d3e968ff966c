"""`lora-core check`: the report, and the same report from several processes."""

from __future__ import annotations

import io
import json

import pytest

from lora_core.testing.dense_family import DENSE
from lora_core.testing.runner import run, run_check
from lora_core.testing.subject import Subject


def test_parts_cover_the_plan_once_each():
    subject = Subject("torch", device="cpu")
    plan = [instance.id for instance in DENSE.plan(subject, "smoke")]
    few = 40  # every 40th check: enough to see who runs what
    ran = [result.id for i in (0, 7) for result in run(DENSE, subject, part=(i, few)).results]
    assert plan[0::few] + plan[7::few] == ran


@pytest.mark.slow
def test_processes_report_what_one_process_does(tmp_path):
    told = io.StringIO()
    code = run_check("torch", jobs=2, commit="abc", json_path=tmp_path / "r.json", stream=told)
    report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    plan = [i.id for i in DENSE.plan(Subject("torch"), "smoke")]
    assert code == 0
    assert plan == report["passed"]
    assert report["commit"] == "abc"
    assert "linear " in told.getvalue()
