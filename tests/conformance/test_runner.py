"""`lora-core check`: the report, and the same report from several processes."""

from __future__ import annotations

import io
import json

import pytest

from lora_core.errors import BackendUnavailableError
from lora_core.testing.dense_family import DENSE
from lora_core.testing.families import family_of
from lora_core.testing.moe_family import MOE
from lora_core.testing.runner import run_check
from lora_core.testing.subject import Subject


def test_a_name_of_both_families():
    assert family_of("torch") is DENSE
    assert family_of("torch", "moe") is MOE


def test_a_device_that_was_asked_for_and_cannot_be_had():
    with pytest.raises(BackendUnavailableError, match=r"triton.*cpu"):
        run_check("triton", device="cpu", stream=io.StringIO())


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
