"""`lora-core doctor` and `lora-core trace` on real distributions, the broken included."""

from __future__ import annotations

import json

from lora_core.cli import main
from lora_core.doctor import Examination, Finding, examine

EXAMINE = """
from lora_core.doctor import examine
report = examine(device="cpu")
answer = {"ok": report.ok, "text": str(report),
          "found": {f.name: [f.state, f.reason, f.advice] for f in report.findings}}
"""


def test_a_sound_environment_needs_no_repair(ask):
    report = ask(EXAMINE, "good")
    assert report["ok"] is True
    assert report["found"]["torch"] == ["available", "", ""]
    assert report["text"].endswith("nothing to repair")


def test_what_is_broken_is_told_apart_with_what_to_do(ask):
    report = ask(EXAMINE, "wrong", "broken", "misspelt")
    found = report["found"]
    assert report["ok"] is False
    state, reason, advice = found["tomorrow"]
    assert (state, advice) == ("incompatible", "pip install --upgrade lora-core")
    assert "declares contract 1.99" in reason
    state, reason, advice = found["nowhere"]
    assert state == "broken"
    assert "lora_core_example_missing" in reason
    assert "pip install --upgrade lora-core-example-wrong, then pip check" in advice
    assert found["classless"][0] == found["renamed"][0] == "broken"
    assert found["elsewhere"][:2] == ["unavailable", "the abacus is not plugged in"]
    broken = {
        name: entry for name, entry in found.items() if name.startswith(("broken", "misspelt"))
    }
    assert {entry[0] for entry in broken.values()} == {"broken"}
    assert len(broken) == 2
    assert report["text"].endswith("6 to repair")  # not the two that cannot run here


def test_a_name_that_two_distributions_claim_is_shadowed(ask):
    report = ask(EXAMINE, "good", "duplicate")
    (twice,) = [entry for entry in report["found"].values() if entry[0] == "shadowed"]
    assert "LORA_CORE_DISABLE" in twice[2]
    assert report["ok"] is False
    assert (
        "lora-core-example-good and" in report["text"]
        or "and lora-core-example-good" in report["text"]
    )


def test_what_is_switched_off_is_listed_with_the_variable(ask):
    found = ask(EXAMINE, "good", LORA_CORE_DISABLE="good,nothing")["found"]
    assert found["good"][0] == "disabled"
    assert "nothing" not in found


def test_trace_shows_imports_hook_calls_and_failures_in_order(ask):
    steps = ask("from lora_core.doctor import trace\nanswer = trace()", "broken", "good")
    shown = [(step["plugin"], step["step"], step["result"]) for step in steps]
    assert shown[0] == ("lora-core", "lora_core_backends()", "torch")
    imported = next(i for i, s in enumerate(shown) if s[1] == "import lora_core_example_good")
    assert shown[imported + 1][1].endswith("_backends()")
    assert shown[imported + 1][2]
    assert next(s for s in shown if s[1] == "failed")[2].startswith(
        ("ImportError", "ModuleNotFound")
    )
    assert all(step["seconds"] >= 0 for step in steps)


def test_the_commands_print_json(capsys):
    assert main(["doctor", "--json"]) in {0, 1}
    report = json.loads(capsys.readouterr().out)
    assert {"ok", "versions", "devices", "findings"} == set(report)
    assert main(["trace", "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)
    assert set(steps[0]) == {"plugin", "step", "seconds", "result"}
    assert main(["trace"]) == 0
    assert "lora_core_moe_backends()" in capsys.readouterr().out


def test_the_exit_code_tells_faults_from_missing_hardware(monkeypatch, capsys):
    for state, code in (("unavailable", 0), ("broken", 1), ("shadowed", 1), ("incompatible", 1)):
        report = Examination(
            {}, [], [Finding("mine", "dense", "somebody", state, "why", "do this")]
        )
        monkeypatch.setattr("lora_core.doctor.examine", lambda report=report, **_: report)
        assert main(["doctor"]) == code
        assert (
            f"mine (dense) from somebody: {state}: why\n    -> do this\n" in capsys.readouterr().out
        )


def test_versions_name_what_is_installed_and_what_is_not():
    versions = examine().versions
    import pluggy

    assert versions["pluggy"] == pluggy.__version__
    assert versions["contract"] == "1.0"
