"""The code of docs/lifecycle.md and docs/adapters.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lora_core.layers.linear import LoRALinear
from lora_core.sites import Site
from lora_core.weights import SliceLayout
from tests.adapters.helpers import llama, make_manager, peft_adapter, write_adapter
from tests.adapters.helpers import wrap as wrap_model
from tests.manager.helpers import SHAPES, K, Model, adapter, rows

DOCS = Path(__file__).parents[2] / "docs"


def code_of(page: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL))


@pytest.fixture
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def wrap(model: Model, gate) -> dict:
    for name, linear in model.linears.items():
        site = Site(name, "linear", K, SliceLayout((SHAPES[name],)), (name,))
        model.layers[name] = LoRALinear(linear, site, gate)
    return model.layers


@pytest.mark.usefixtures("_here")
def test_lifecycle_page():
    sources = {name: adapter(seed) for seed, name in enumerate(("sql", "chat", "sql-newer"))}
    for name, source in sources.items():
        write_adapter(Path("adapters") / name, *source)
    model, x = Model(), rows(10)
    seen = {"wrap": wrap, "model": model, "x": x}
    exec(compile(code_of("lifecycle.md"), "docs/lifecycle.md", "exec"), seen)

    y = torch.cat(
        [
            model.expected(x[:5], sources["sql"]),
            model.base(x[5:7]).double(),
            model.expected(x[7:], sources["chat"]),
        ]
    )
    torch.testing.assert_close(seen["y"].double(), y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        seen["y0"].double(), model.expected(x, sources["sql-newer"]), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(seen["y1"], model.base(x))
    assert (seen["admitted"], seen["deferred"]) == (seen["requests"], [])


@pytest.mark.usefixtures("_here")
def test_adapters_page(capsys):
    from peft import get_peft_model_state_dict

    peft_model = peft_adapter(llama(), Path("adapters/sql"), r=4, target_modules=["q_proj"])
    manager = make_manager()
    wrap_model(llama(), manager)
    seen = {
        "manager": manager,
        "peft_model": peft_model,
        "get_peft_model_state_dict": get_peft_model_state_dict,
    }
    exec(compile(code_of("adapters.md"), "docs/adapters.md", "exec"), seen)
    assert manager.version("sql") == manager.version("tuned")
    assert "model.layers.0.self_attn.q_proj 4 2.0 (32, 32) ()" in capsys.readouterr().out
