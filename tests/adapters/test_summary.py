"""What is said of a folder without a model."""

from __future__ import annotations

import pytest
import torch

from lora_core.adapters.summary import ModuleSummary, summarise
from lora_core.errors import AdapterFormatError
from tests.adapters.helpers import config, llama, lora, peft_adapter, write_adapter


def test_modules_ranks_and_scales(tmp_path):
    peft_adapter(
        llama(layers=1),
        tmp_path,
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "k_proj"],
        rank_pattern={"k_proj": 16, "nobody": 3},
        use_dora=True,
        modules_to_save=["lm_head"],
    )
    summary = summarise(tmp_path)
    assert summary.modules == (
        ModuleSummary("lm_head", None, None, None, ("whole weight",)),
        ModuleSummary("model.layers.0.self_attn.k_proj", 16, 0.5, (16, 32), ("DoRA",)),
        ModuleSummary("model.layers.0.self_attn.q_proj", 4, 2.0, (32, 32), ("DoRA",)),
    )
    assert (summary.refused, summary.where) == ((), str(tmp_path))
    assert summary.notes == ("rank_pattern 'nobody' matches no module",)
    assert summary.nbytes == 4 * (64 * 32 + 16 * (32 + 16) + 16 + 4 * 64 + 32)


def test_what_would_be_refused(tmp_path):
    tensors = lora("q_proj", 4, 8, 8) | {"q_proj.lora_diag": torch.ones(4)}
    write_adapter(tmp_path, config(kasa_config={"x": 1}), tensors)
    summary = summarise(tmp_path)
    assert [m.scaling for m in summary.modules] == [None]
    assert "kasa_config" in summary.refused[0]
    assert "q_proj.lora_diag" in summary.refused[1]


def test_damaged_files_are_still_errors(tmp_path):
    write_adapter(tmp_path, config(), lora("q_proj", 4, 8, 8))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(AdapterFormatError):
        summarise(tmp_path)
