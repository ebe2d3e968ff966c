"""Tiny random models of several families, adapters that PEFT makes for them, and PEFT's answers."""

from __future__ import annotations

import copy
import functools
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

VOCAB = 61
NEW_TOKENS = 8

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


@dataclass(frozen=True)
class Family:
    """One architecture, and how its modules are called."""

    config: str
    extra: dict
    attention: tuple[str, ...] = ("q_proj", "v_proj")
    mlp: str = "down_proj"
    embedding: str = "embed_tokens"
    has_bias: bool = False


FAMILIES = {
    "llama": Family("LlamaConfig", {"tie_word_embeddings": False}),
    "qwen2": Family("Qwen2Config", {"tie_word_embeddings": True}, has_bias=True),
    "qwen3": Family("Qwen3Config", {"tie_word_embeddings": False, "head_dim": 8}),
    "mistral": Family("MistralConfig", {"tie_word_embeddings": False, "sliding_window": 6}),
    "phi3": Family("Phi3Config", {"tie_word_embeddings": False}, attention=("qkv_proj",)),
    "phi": Family("PhiConfig", {"tie_word_embeddings": False}, mlp="fc2", has_bias=True),
    "gemma2": Family("Gemma2Config", {"head_dim": 8, "sliding_window": 6}),
    "gemma3": Family(
        "Gemma3TextConfig", {"head_dim": 8, "sliding_window": 8, "tie_word_embeddings": True}
    ),
    "gpt2": Family(
        "GPT2Config", {}, attention=("c_attn",), mlp="c_proj", embedding="wte", has_bias=True
    ),
}  # fmt: skip


def make_model(name: str, *, seed: int = 0, **overrides):
    """A model of random weights, in eval mode, that answers with varied tokens."""
    torch.manual_seed(seed)
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**{**_COMMON, **family.extra, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2)
        elif parameter.abs().max() == 0:
            parameter.data.normal_(0, 0.05)  # biases begin at zero
    return model


def recipes(name: str) -> dict[str, dict]:
    """PEFT configurations for a family, one of each make."""
    family = FAMILIES[name]
    attention, mlp = list(family.attention), family.mlp
    found = {
        "attention": {"r": 4, "target_modules": attention},
        "all-rslora": {
            "r": 8,
            "lora_alpha": 16,
            "use_rslora": True,
            "target_modules": "all-linear",
        },
        "embedding-head": {
            "r": 3,
            "lora_alpha": 6,
            "target_modules": [family.embedding, "lm_head", mlp],
        },
        "dora": {"r": 4, "use_dora": True, "target_modules": [*attention, mlp]},
        "patterns": {
            "r": 2,
            "target_modules": [*attention, mlp],
            "rank_pattern": {attention[0]: 5},
            "alpha_pattern": {mlp: 7},
        },
        "whole-head": {"r": 2, "target_modules": attention, "modules_to_save": ["lm_head"]},
    }
    if family.has_bias:
        found["bias"] = {"r": 2, "target_modules": attention, "bias": "lora_only"}
    return found


def make_adapter(model, folder: Path, *, seed: int, **config) -> Path:
    """A PEFT adapter of random weights for a model, which stays as it is."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT remarks on tied heads and fan_in_fan_out
        peft = get_peft_model(copy.deepcopy(model), LoraConfig(**config))
        for key, parameter in peft.named_parameters():
            if parameter.requires_grad:
                scale = 0.05 if "magnitude" in key else 0.2
                parameter.data.add_(torch.randn_like(parameter) * scale)
        peft.save_pretrained(folder)
    return folder


def peft_model(model, folder: Path | None):
    """The reference: PEFT with one adapter alone, or a plain copy."""
    if folder is None:
        return copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()


def prompts(rows: int, tokens: int = 7, *, seed: int = 1) -> dict[str, torch.Tensor]:
    """Left-padded prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (rows, tokens), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : row % 3] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


@dataclass(frozen=True)
class Workbench:
    """A model, adapters for it on disk, and PEFT's model for each; None is the base."""

    name: str
    model: object
    folders: dict[str, Path]
    references: dict[str | None, object]


@functools.cache
def workbench(name: str) -> Workbench:
    """Made once per family and process; the model comes back detached from every test."""
    model = make_model(name)
    root = Path(tempfile.mkdtemp(prefix=f"lora-core-{name}-"))
    folders = {
        adapter: make_adapter(model, root / adapter, seed=seed, **config)
        for seed, (adapter, config) in enumerate(recipes(name).items())
    }
    references = {adapter: peft_model(model, folder) for adapter, folder in folders.items()}
    return Workbench(name, model, folders, {**references, None: peft_model(model, None)})
