"""The code of docs/transformers.md runs, block after block."""

import re
from pathlib import Path

import torch

from tests.transformers.tiny import make_adapter, make_model, peft_model, prompts

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"


def test_every_block_runs(tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 5
    model = make_model("llama", num_hidden_layers=1)
    config = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    folders = [
        make_adapter(model, tmp_path / "adapters" / name, seed=seed, **config)
        for seed, name in enumerate(("sql", "chat"))
    ]
    sql, chat = (peft_model(model, folder) for folder in folders)
    inputs = prompts(3)
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()

    names = {"model": model, "inputs": inputs}
    exec(blocks[0], names)
    tokens = names["tokens"]
    assert tokens[0].tolist() == sql.generate(**inputs, max_new_tokens=16)[0].tolist()
    assert tokens[1].tolist() == chat.generate(**inputs, max_new_tokens=16)[1].tolist()
    for block in blocks[1:]:
        exec(block, names)
    assert type(model.lm_head) is torch.nn.Linear
    torch._dynamo.reset()
