"""Tiny random mixture-of-experts models of transformers, one per kind of experts module."""

from __future__ import annotations

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)

_COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_CONFIGS = {
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_COMMON, intermediate_size=48, moe_intermediate_size=24, head_dim=8, num_experts=4
    ),
    "mixtral": lambda: MixtralConfig(**_COMMON, intermediate_size=24, num_local_experts=4),
    "olmoe": lambda: OlmoeConfig(**_COMMON, intermediate_size=24, num_experts=4),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**_COMMON, "num_key_value_heads": 4},
        intermediate_size=48,
        moe_intermediate_size=24,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "gpt_oss": lambda: GptOssConfig(
        **_COMMON, intermediate_size=24, head_dim=8, num_local_experts=4
    ),
}
MODELS = tuple(_CONFIGS)


def tiny_model(kind: str, implementation: str = "grouped_mm") -> nn.Module:
    """A random float32 model whose weights are large enough for an adapter to show."""
    torch.manual_seed(0)
    config = _CONFIGS[kind]()
    config._experts_implementation = implementation
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "experts" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The packed experts modules by name."""
    return {
        name: module for name, module in model.named_modules() if hasattr(module, "is_concatenated")
    }
