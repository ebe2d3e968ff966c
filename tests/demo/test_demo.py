"""The demo's own arithmetic, and (slow) the whole demo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo

    return demo


def test_the_batch_is_of_many_rows_with_mixed_adapters(demo):
    names = [row.adapter for row in demo.MIXED]
    assert len(names) >= 8
    assert set(names) == {None, *demo.TRAINED, *demo.RANDOM}
    assert len({row.adapter for row in demo.TIMED}) == len(demo.TIMED) == 8


def test_equal_answers_do_not_differ(demo):
    assert demo.first_difference([1, 2], [1, 2], torch.zeros(2, 4)) is None


def test_the_first_difference_is_measured_in_the_references_logits(demo):
    logits = torch.zeros(3, 4)
    logits[1, 2], logits[1, 3] = 5.0, 4.75
    assert demo.first_difference([0, 3, 1], [0, 2, 2], logits) == (1, 0.25)


def test_an_answer_that_ends_early_is_no_tie(demo):
    assert demo.first_difference([0], [0, 2], torch.zeros(2, 4)) == (1, float("inf"))


def test_an_answer_ends_with_its_turn(demo):
    assert demo.answer_of(torch.tensor([4, 5, 2, 2, 2]), end=2) == [4, 5, 2]
    assert demo.answer_of(torch.tensor([4, 5]), end=2) == [4, 5]


def test_models_on_shared_weights_are_two_models_with_one_memory(demo):
    first = torch.nn.Sequential(torch.nn.Linear(2, 2))
    second = demo.share_weights(first)
    second[0] = torch.nn.Identity()
    assert isinstance(first[0], torch.nn.Linear)
    third = demo.share_weights(first)
    assert third[0] is not first[0]
    assert third[0].weight is first[0].weight


@pytest.mark.parametrize("name", ["pirate", "json", "sql"])
def test_trained_adapters_are_small_bfloat16_safetensors(name):
    from safetensors import safe_open

    file = EXAMPLES / "adapters" / name / "adapter_model.safetensors"
    with safe_open(file, "pt") as tensors:
        keys = list(tensors.keys())
        dtypes = {tensors.get_tensor(key).dtype for key in keys}
    assert dtypes == {torch.bfloat16}


def test_trained_adapters_are_each_of_another_make():
    def config(name):
        return json.loads((EXAMPLES / "adapters" / name / "adapter_config.json").read_text())

    pirate, as_json, sql = config("pirate"), config("json"), config("sql")
    assert (pirate["r"], pirate["target_modules"]) == (4, ["q_proj", "v_proj"])
    assert (as_json["r"], as_json["use_rslora"], len(as_json["target_modules"])) == (8, True, 7)
    assert sql["r"] == 16
    assert sql["rank_pattern"]
    assert sql["alpha_pattern"]
    assert "lm_head" in sql["target_modules"]
    sizes = [f.stat().st_size for f in (EXAMPLES / "adapters").glob("*/*.safetensors")]
    assert len(sizes) == 3
    assert sum(sizes) < 12e6


@pytest.mark.slow
def test_the_whole_demo(tmp_path):
    """Every row as PEFT has it. Speed is the demo's to show: a shared machine proves nothing."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "demo.py", "--runs", "1", "--output", tmp_path / "demo.json"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "demo.json").read_text())
    assert set(report) == {
        "rows",
        "adapters",
        "identical_rows",
        "ties",
        "tokens_per_second",
        "base_tokens_per_second",
        "peft_mixed_tokens_per_second",
    }
    assert report["identical_rows"] + len(report["ties"]) == report["rows"] == 17
    assert report["adapters"] == 8
    assert all(tie["margin"] <= 1e-4 for tie in report["ties"])
    assert report["tokens_per_second"] > report["peft_mixed_tokens_per_second"] > 0
