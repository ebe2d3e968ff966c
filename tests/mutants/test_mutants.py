"""The suite rejects deliberately wrong backends, and accepts the one they are made from."""

from __future__ import annotations

import json

import pytest

from lora_core.testing import Subject, runner
from lora_core.testing.dense_family import DENSE
from tests.mutants import run
from tests.mutants.faults import FAULTS
from tests.mutants.victim import Victim

ON_CPU = [fault for fault in FAULTS if not fault.cuda]
FAST = {
    "state_kept_after_reset",
    "scaling_of_neighbouring_slice",
    "adds_zero",
    "masked_by_multiplication",
    "writes_past_out",
    "silent_fallback",
    "one_staging_buffer",
    "capture_without_adapter_records_nothing",
    "graph_tail_not_cleared",
    "prepare_reads_back",
}


def test_there_are_enough_of_them_and_each_is_its_own():
    assert len(ON_CPU) >= 35
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.name for fault in FAULTS} >= FAST
    assert {fault.hint for fault in FAULTS} <= set(DENSE.checks)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, id=f.name, marks=() if f.name in FAST else pytest.mark.slow) for f in ON_CPU],
)
def test_caught_by_the_check_that_should_notice(fault):
    verdict = run.judge(fault, device="cpu")
    assert verdict.caught_by is not None, f"no check notices that {fault.about}"
    assert verdict.caught_by.partition("[")[0] == fault.hint


@pytest.mark.slow
@pytest.mark.parametrize("level", ["smoke", "standard"])
def test_the_victim_itself_is_right(level):
    report = runner.run(DENSE, Subject(Victim, device="cpu"), level=level)
    assert [result.detail for result in report.of("failed")] == []


def test_a_patch_that_does_not_fit_the_victim_is_an_error():
    from dataclasses import replace

    with pytest.raises(ValueError, match="occurs 0 times"):
        run.build(replace(FAULTS[0], patches=(("no such line", ""),)))


def test_the_report(tmp_path, capsys):
    path = tmp_path / "mutants.json"
    assert run.main(["adds_zero", "prepare_waits_for_the_device", "--output", str(path)]) == 0
    report = json.loads(path.read_text())
    assert (report["caught"], report["total"], report["missed"]) == (1, 1, [])
    assert report["mutants"][0]["caught_by"].startswith("base_rows[")
    assert [entry["name"] for entry in report["needs_cuda"]] == ["prepare_waits_for_the_device"]
    assert "1 of 1 caught" in capsys.readouterr().out


def test_a_missed_mutant_fails_the_run(tmp_path, monkeypatch, capsys):
    from dataclasses import replace

    harmless = replace(
        FAULTS[0], patches=(("Slow, and short.", "Slow, and short indeed."),), name="harmless"
    )
    monkeypatch.setattr(run, "FAULTS", (harmless,))
    monkeypatch.setattr(run.DENSE, "plan", lambda subject, level: [])
    assert run.main(["--output", str(tmp_path / "m.json")]) == 1
    assert "MISSED" in capsys.readouterr().out


@pytest.mark.cuda
@pytest.mark.parametrize("fault", [pytest.param(f, id=f.name) for f in FAULTS if f.cuda])
def test_caught_on_cuda(fault):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert run.judge(fault, device="cuda").caught_by is not None
