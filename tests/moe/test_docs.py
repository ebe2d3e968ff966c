"""The code of docs/experts.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

peft = pytest.importorskip("peft")

from lora_core import load_backend  # noqa: E402
from tests.moe.models import tiny_model  # noqa: E402

TEXT = (Path(__file__).parents[2] / "docs" / "experts.md").read_text(encoding="utf-8")
ATTACH, ENGINE, SUITE = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def run(code, **given):
    exec(compile(code, "docs/experts.md", "exec"), given)
    return given


def test_attach(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tiny_model("qwen3_moe")
    settings = peft.LoraConfig(r=4, target_parameters=["mlp.experts.down_proj"], target_modules=[])
    trained = peft.get_peft_model(tiny_model("qwen3_moe"), settings)
    for name, parameter in trained.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    trained.save_pretrained("adapters/sql")
    ids = torch.arange(8).view(2, 4)
    seen = run(ATTACH, model=model, input_ids=ids)
    with torch.no_grad():
        torch.testing.assert_close(seen["logits"][0], trained(ids).logits[0], rtol=1e-4, atol=1e-4)


def test_engine():
    dense = load_backend("torch", device="cpu")
    given = {
        "torch": torch,
        "dense": dense,
        "topk_ids": torch.zeros(5, 2, dtype=torch.int32),
        "topk_weights": torch.ones(5, 2),
        "hidden_states": torch.randn(5, 64),
        "gate_up_out": torch.zeros(5, 2, 64),
    }
    seen = run(ENGINE, **given)
    assert seen["routing"].slots.tolist() == [0, 0, 0, -1, -1]
    assert not seen["gate_up_out"].any()  # no adapter was put into the weights


def test_suite():
    assert run(SUITE)["TestMine"].backend == "torch"
