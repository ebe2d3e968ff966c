"""`lora-core check`: the report, and the same report from several processes."""

from __future__ import annotations

import io
import json

import pytest

from lora_core.testing.dense_family import DENSE
from lora_core.testing.runner import run_check
from lora_core.testing.subject import Subject


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
    assert f"[{len(plan)}/{len(plan)}] passed" in told.getvalue()  # progress, case by case
