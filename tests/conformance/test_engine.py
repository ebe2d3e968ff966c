"""Registering, choosing and running checks: on a family of its own, without any backend."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field

import pytest
import torch

from lora_core.errors import BackendNotFoundError, ContractError
from lora_core.testing import CheckFailed, Family, NotRunHere, engine, run_check, runner
from lora_core.testing.engine import Instance, Once, Violation


@dataclass
class Thing:
    """A subject whose checks do what it says."""

    fails: set[str] = field(default_factory=set)
    label: str = "thing"
    contract: str = "1.0"
    unavailable: NotRunHere | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def as_code(self) -> str:
        return "Thing()"


@dataclass(frozen=True)
class Number:
    value: int

    @property
    def id(self) -> str:
        return f"n{self.value}"


def _family() -> Family[Thing]:
    family: Family[Thing] = Family("things", Thing, ())

    @family.check("V1", "S1", cases=lambda s, level: [Number(1), Number(2)], cause="a wrong sum")
    def add(subject: Thing, case: Number) -> None:
        """One and one are two."""
        assert f"add[{case.id}]" not in subject.fails, f"found {case.value}"

    @family.check("B1", since="1.1", cause="too new")
    def later(subject: Thing, case: Once) -> None:
        """A rule of the next version."""
        assert "later" not in subject.fails

    @family.check("S8", cause="32 bits")
    def far(subject: Thing, case: Once) -> None:
        """Needs a device."""
        raise NotRunHere("cuda", "this runs on cpu")

    return family


def test_plan_has_every_case_of_every_check():
    plan = _family().plan(Thing(), "smoke")
    assert [instance.id for instance in plan] == ["add[n1]", "add[n2]", "later[once]", "far[once]"]


def test_two_cases_of_one_id_are_refused():
    family: Family[Thing] = Family("things", Thing, ())
    family.check("V1", cases=lambda s, level: [Number(1), Number(1)], cause="x")(
        lambda subject, case: None
    )
    with pytest.raises(ContractError, match="two cases named n1"):
        family.plan(Thing(), "smoke")


def test_two_checks_of_one_name_are_refused():
    family = _family()

    def add(subject: Thing, case: Once) -> None:
        """Again."""

    with pytest.raises(ContractError, match="two things checks are named 'add'"):
        family.check("V1", cause="x")(add)


def test_outcomes():
    report = runner.run(_family(), Thing(fails={"add[n2]", "later"}), level="smoke")
    outcomes = {result.id: result.outcome for result in report.results}
    assert outcomes == {
        "add[n1]": "passed",
        "add[n2]": "failed",
        "later[once]": "preview_failed",
        "far[once]": "not_run_for_hardware",
    }
    assert not report.ok


def test_a_preview_cannot_fail_the_run():
    assert runner.run(_family(), Thing(fails={"later"}), level="smoke").ok


@pytest.mark.parametrize("key", ["add[n2]", "add"])
def test_an_expected_failure_is_strict(key):
    fails = {"add[n1]", "add[n2]"} if key == "add" else {key}
    expected = {key: "known, issue 7"}
    report = runner.run(_family(), Thing(fails=fails), level="smoke", expected_failures=expected)
    assert fails == {result.id for result in report.of("expected_failure")}
    fixed = runner.run(_family(), Thing(), level="smoke", expected_failures=expected)
    assert "remove the expectation" in fixed.of("failed")[0].detail


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        ({"subtract": "?"}, "'subtract'"),
        ({"add[n3]": "?"}, "'add\\[n3\\]'"),
        ({"add": " "}, "no reason"),
    ],
)
def test_an_expectation_that_names_nothing_or_gives_no_reason_is_an_error(expected, words):
    with pytest.raises(ContractError, match=words):
        runner.run(_family(), Thing(), level="smoke", expected_failures=expected)


def test_a_message_has_clause_finding_cause_and_the_call_to_repeat():
    instance = _family().plan(Thing(), "smoke")[0]
    with pytest.raises(CheckFailed) as failed:
        engine.run_instance(instance, Thing(fails={"add[n1]"}))
    message = str(failed.value)
    for words in (
        "backend 'thing' fails add[n1]: One and one are two.",
        "clause V1: linear, shrink and expand are within",
        "also cites S1",
        "found 1",
        "usual cause: a wrong sum",
        "add(Thing(), Number(value=1))",
    ):
        assert words in message


def test_a_violation_names_its_own_clause():
    message = engine.describe(
        _family().plan(Thing(), "smoke")[0], Thing(), Violation("I1", "x was written")
    )
    assert "clause I1: inputs are never written" in message


def test_any_exception_of_a_check_is_a_failure_that_says_where():
    def broken(subject: Thing, case: Once) -> None:
        """Breaks."""
        raise KeyError("missing")

    instance = Instance(engine.Check("broken", broken, ("V1",), engine.once, "1.0", "x"), Once())
    with pytest.raises(CheckFailed, match=r"KeyError: 'missing'(.|\n)*test_engine\.py:"):
        engine.run_instance(instance, Thing())


def test_a_subject_that_cannot_run_here_runs_nothing():
    missing = NotRunHere("cuda", "no such device")
    report = runner.run(_family(), Thing(unavailable=missing), level="smoke")
    assert {"not_run_for_hardware"} == {result.outcome for result in report.results}
    with pytest.raises(NotRunHere):
        engine.run_instance(_family().plan(Thing(), "smoke")[0], Thing(unavailable=missing))


def test_run_check_writes_the_report_and_returns_0(tmp_path, monkeypatch):
    family = _family()
    monkeypatch.setattr(runner, "family_of", lambda name, only: family)
    monkeypatch.setattr(family, "subject", lambda name, device: Thing(label=name))
    shown, path = io.StringIO(), tmp_path / "report.json"
    assert run_check("thing", json_path=path, stream=shown) == 0
    report = json.loads(path.read_text())
    assert report["passed"] == ["add[n1]", "add[n2]", "later[once]"]
    assert report["failed"] == []
    assert [entry["id"] for entry in report["not_run_for_hardware"]] == ["far[once]"]
    assert report["versions"]["torch"] == torch.__version__
    assert report["device"].startswith("cpu")
    assert "add                          2 passed" in shown.getvalue()


def test_run_check_returns_1_and_shows_the_message(tmp_path, monkeypatch):
    family = _family()
    monkeypatch.setattr(runner, "family_of", lambda name, only: family)
    monkeypatch.setattr(
        family, "subject", lambda name, device: Thing(label=name, fails={"add[n2]"})
    )
    shown = io.StringIO()
    assert run_check("thing", stream=shown, json_path=tmp_path / "r.json") == 1
    assert "FAILED add[n2]" in shown.getvalue()
    assert [entry["id"] for entry in json.loads((tmp_path / "r.json").read_text())["failed"]] == [
        "add[n2]"
    ]


def test_a_required_device_turns_what_was_not_run_into_failures(monkeypatch):
    family = _family()
    monkeypatch.setattr(runner, "family_of", lambda name, only: family)
    monkeypatch.setattr(family, "subject", lambda name, device: Thing(label=name))
    assert run_check("thing", require_device="cuda", stream=io.StringIO()) == 1
    assert run_check("thing", require_device="xpu", stream=io.StringIO()) == 0


def test_a_lost_device_ends_the_run(monkeypatch):
    monkeypatch.setattr(runner, "_is_lost", lambda device: True)
    report = runner.run(_family(), Thing(fails={"add[n1]"}), level="smoke")
    assert [result.id for result in report.results] == ["add[n1]", "device"]
    assert "lost in add[n1]; 3 checks after it were not run" in report.results[-1].detail


def test_run_check_of_an_unknown_name_names_what_there_is():
    with pytest.raises(BackendNotFoundError, match="torch"):
        run_check("tortch", stream=io.StringIO())
