"""Every kind of adapter that PEFT saves gives the logits that PEFT gives; base rows stay the base's."""

from __future__ import annotations

import pytest
import torch

from lora_core.errors import AdapterMismatchError, UnsupportedAdapterError
from tests.adapters.helpers import (
    IDS,
    classifier,
    config_of,
    gemma3,
    gpt2,
    llama,
    logits_of,
    make_manager,
    mixed_logits,
    peft_adapter,
    phi3,
    qwen2,
    tensors_of,
    tied_llama,
    wrap,
)

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
PHI_PACKED = {
    "qkv_proj": ((32, 16, 16), ("q_proj", "k_proj", "v_proj")),
    "gate_up_proj": ((48, 48), ("gate_proj", "up_proj")),
}

CASES = {
    "q-v": (llama, {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}),
    "K1-rslora": (
        llama,
        {"r": 16, "lora_alpha": 16, "use_rslora": True, "target_modules": ATTENTION},
    ),
    "K2-patterns": (
        llama,
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ATTENTION,
            "rank_pattern": {"layers.1.self_attn.q_proj": 16, "v_proj": 3},
            "alpha_pattern": {"layers.1.self_attn.q_proj": 128, "^model.layers.0.*o_proj": 3},
        },
    ),
    "K2-patterns-rslora": (
        llama,
        {
            "r": 4,
            "target_modules": ATTENTION,
            "use_rslora": True,
            "rank_pattern": {"q_proj|k_proj": 9},
        },
    ),
    "K4-all-linear": (llama, {"r": 4, "target_modules": "all-linear"}),
    "K4-regex": (llama, {"r": 4, "target_modules": r".*\.layers\.1\..*(q|down)_proj"}),
    "parameters-square": (
        llama,
        {"r": 4, "target_modules": [], "target_parameters": ["q_proj.weight"]},
    ),
    "parameters-oblong": (
        llama,
        {"r": 4, "target_modules": [], "target_parameters": ["k_proj.weight", "down_proj.weight"]},
    ),
    "layers-to-transform": (
        llama,
        {
            "r": 4,
            "target_modules": ["q_proj"],
            "layers_to_transform": [1],
            "layers_pattern": "layers",
        },
    ),
    "K5-dora-square": (llama, {"r": 4, "target_modules": ["q_proj", "o_proj"], "use_dora": True}),
    "K5-dora-oblong": (
        llama,
        {"r": 4, "target_modules": ["k_proj", "down_proj"], "use_dora": True},
    ),
    "K5-dora-bias": (
        qwen2,
        {"r": 4, "target_modules": ATTENTION, "use_dora": True, "use_rslora": True},
    ),
    "K5-dora-conv1d": (
        gpt2,
        {"r": 4, "target_modules": ["c_proj", "c_attn"], "use_dora": True, "fan_in_fan_out": True},
    ),
    "K5-dora-head": (llama, {"r": 4, "target_modules": ["lm_head"], "use_dora": True}),
    "conv1d": (
        gpt2,
        {"r": 4, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    ),
    "K6-conv1d-whole": (
        gpt2,
        {"r": 4, "target_modules": ["c_attn"], "modules_to_save": ["c_fc"], "fan_in_fan_out": True},
    ),
    "K6-whole-head": (
        llama,
        {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ),
    "K6-whole-head-tied": (
        tied_llama,
        {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ),
    "K6-whole-embedding-tied": (
        tied_llama,
        {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ),
    "K6-whole-both-tied": (
        tied_llama,
        {
            "r": 4,
            "target_modules": ["q_proj"],
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
    ),
    "K6-whole-scaled-embedding": (
        gemma3,
        {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ),
    "K6-score": (classifier, {"r": 4, "target_modules": ["q_proj"], "task_type": "SEQ_CLS"}),
    "K6-linear-with-bias-whole": (
        qwen2,
        {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["k_proj"]},
    ),
    "embedding": (
        llama,
        {"r": 4, "target_modules": ["embed_tokens", "q_proj"], "use_rslora": True},
    ),
    "embedding-scaled": (gemma3, {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}),
    "embedding-tied": (tied_llama, {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}),
    "embedding-and-head-tied": (
        tied_llama,
        {"r": 4, "target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    ),
    "head": (llama, {"r": 4, "target_modules": ["lm_head", "q_proj"]}),
    "head-tied": (tied_llama, {"r": 4, "target_modules": ["lm_head", "q_proj"]}),
    "bias-lora-only": (qwen2, {"r": 4, "target_modules": ["q_proj"], "bias": "lora_only"}),
    "bias-all": (qwen2, {"r": 4, "target_modules": ["q_proj"], "bias": "all"}),
    "lora-bias": (
        qwen2,
        {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj"], "lora_bias": True},
    ),
    "K16-phi-one-slice": (phi3, {"r": 4, "target_modules": ["qkv_proj", "gate_up_proj"]}),
    "K5-dora-phi": (
        phi3,
        {"r": 4, "target_modules": ["qkv_proj", "gate_up_proj"], "use_dora": True},
    ),
}


@pytest.mark.parametrize(("make", "config"), CASES.values(), ids=CASES)
def test_logits_equal_those_of_peft(make, config, tmp_path):
    expected = logits_of(peft_adapter(make(), tmp_path, **config))
    base = logits_of(make())
    assert (expected - base).abs().max() > 1e-3  # else anything would pass

    manager, model = make_manager(), make()
    wrap(model, manager)
    manager.load_adapter("a", tmp_path)

    torch.testing.assert_close(
        mixed_logits(manager, model, ["a", "a"]), expected, rtol=1e-4, atol=1e-5
    )
    mixed = mixed_logits(manager, model, ["a", None])
    torch.testing.assert_close(mixed[0], expected[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(mixed_logits(manager, model, [None, None]), base)
    torch.testing.assert_close(mixed[1], base[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_k16_fused_adapter_on_a_packed_site(use_dora, tmp_path):
    """One A for q|k|v: every slice reads it, with its own rows of B."""
    config = {"r": 4, "target_modules": ["qkv_proj", "gate_up_proj"], "use_dora": use_dora}
    expected = logits_of(peft_adapter(phi3(), tmp_path, **config))

    manager, model = make_manager(), phi3()
    layers = wrap(model, manager, packed=PHI_PACKED)
    manager.load_adapter("a", tmp_path)

    torch.testing.assert_close(
        mixed_logits(manager, model, ["a", "a"]), expected, rtol=1e-4, atol=1e-5
    )
    weights = layers["model.layers.0.self_attn.qkv_proj"].weights
    assert weights.ranks[manager.adapters()["a"].slot].tolist() == [4, 4, 4]


def test_two_adapters_of_different_make_in_one_batch(tmp_path):
    a = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    b = {"r": 16, "target_modules": "all-linear", "use_rslora": True, "use_dora": True}
    of_a = logits_of(peft_adapter(llama(), tmp_path / "a", **a))
    of_b = logits_of(peft_adapter(llama(), tmp_path / "b", **b))

    manager, model = make_manager(), llama()
    wrap(model, manager)
    manager.load_adapter("a", tmp_path / "a")
    manager.load_adapter("b", tmp_path / "b")

    mixed = mixed_logits(manager, model, ["b", "a"])
    torch.testing.assert_close(mixed[0], of_b[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mixed[1], of_a[1], rtol=1e-4, atol=1e-5)


def test_from_the_live_peft_object(tmp_path):
    """The state dict and configuration object of a running PEFT model, no files at all."""
    from peft import get_peft_model_state_dict

    peft_model = peft_adapter(
        llama(), tmp_path, save=False, r=4, target_modules={"q_proj", "o_proj"}
    )
    expected = logits_of(peft_model)

    manager, model = make_manager(), llama()
    wrap(model, manager)
    info = manager.load_adapter(
        "a", (peft_model.peft_config["default"], get_peft_model_state_dict(peft_model))
    )

    assert info.source is None
    torch.testing.assert_close(
        mixed_logits(manager, model, ["a", "a"]), expected, rtol=1e-4, atol=1e-5
    )


def test_state_dict_with_the_adapter_name_left_in(tmp_path):
    """`lora_A.default.weight`, as in `model.state_dict()`."""
    peft_model = peft_adapter(
        llama(),
        tmp_path,
        r=4,
        target_modules=["q_proj"],
        use_dora=True,
        modules_to_save=["lm_head"],
    )
    expected = logits_of(peft_model)
    tensors = {
        key: value
        for key, value in peft_model.state_dict().items()
        if ".default" in key and "original_module" not in key
    }
    manager, model = make_manager(), llama()
    wrap(model, manager)
    manager.load_adapter("a", (config_of(tmp_path), tensors))
    torch.testing.assert_close(
        mixed_logits(manager, model, ["a", "a"]), expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_k44_adapters_are_cast_once_to_the_model(dtype, tmp_path):
    """A float32 adapter on a half model: the tensors in the slot are the rounded ones, bit for bit."""
    peft_adapter(llama(), tmp_path, r=4, target_modules=["q_proj"])
    manager, model = make_manager(), llama().to(dtype)
    layers = wrap(model, manager)
    manager.load_adapter("a", tmp_path)
    manager.prefetch("a")

    name = "model.layers.0.self_attn.q_proj"
    weights, slot = layers[name].weights, manager.adapters()["a"].slot
    saved = tensors_of(tmp_path)[f"base_model.model.{name}.lora_A.weight"]
    assert saved.dtype == torch.float32
    assert torch.equal(weights.a[slot, 0, :4], saved.to(dtype))


def test_k44_half_adapter_on_a_float32_model(tmp_path):
    peft_model = peft_adapter(llama(), tmp_path, r=4, target_modules=["q_proj"])
    manager, model = make_manager(), llama()
    wrap(model, manager)
    half = {key: value.half() for key, value in tensors_of(tmp_path).items()}
    manager.load_adapter("a", (config_of(tmp_path), half))
    for key, value in peft_model.named_parameters():
        if "lora_" in key:
            value.data = value.data.half().float()
    torch.testing.assert_close(
        mixed_logits(manager, model, ["a", "a"]), logits_of(peft_model), rtol=1e-4, atol=1e-5
    )


REFUSED = {
    "K6-whole-layernorm": (
        llama,
        {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"]},
        AdapterMismatchError,
        r"input_layernorm",
    ),
    "bias-of-layernorm": (
        gpt2,
        {"target_modules": ["c_attn"], "bias": "all", "fan_in_fan_out": True},
        AdapterMismatchError,
        r"transformer\.\S*ln_",
    ),
    "trainable-tokens": (
        llama,
        {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]},
        UnsupportedAdapterError,
        r"trainable_token_indices .*trainable tokens",
    ),
    "parameters-conv1d": (
        gpt2,
        {"target_modules": [], "target_parameters": ["attn.c_proj.weight"]},
        UnsupportedAdapterError,
        r"target_parameters names the weight of transformer.h.0.attn.c_proj",
    ),
    "dora-embedding": (
        llama,
        {"target_modules": ["embed_tokens"], "use_dora": True},
        UnsupportedAdapterError,
        r"DoRA of an embedding",
    ),
}


@pytest.mark.parametrize(("make", "config", "error", "match"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_applied_is_refused_by_name(make, config, error, match, tmp_path):
    peft_adapter(make(), tmp_path, r=4, **config)
    manager, model = make_manager(), make()
    wrap(model, manager)
    with pytest.raises(error, match=match):
        manager.load_adapter("a", tmp_path)
    assert manager.adapters() == {}
    assert manager.stats().device_bytes == 0
    assert torch.equal(logits_of(model), logits_of(make()))


def test_saved_base_weights_of_another_model_are_refused(tmp_path):
    """PEFT saves the base weight beside an adapter of an embedding; it must be this model's."""
    peft_adapter(llama(), tmp_path, r=4, target_modules=["embed_tokens"])
    manager, model = make_manager(), llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[3, 5] += 0.1
    wrap(model, manager)
    with pytest.raises(AdapterMismatchError, match=r"embed_tokens.* another base model"):
        manager.load_adapter("a", tmp_path)


def test_saved_base_weights_may_be_the_rounded_or_unrounded_ones(tmp_path):
    peft_adapter(llama(), tmp_path, r=4, target_modules=["embed_tokens", "lm_head"])
    manager, model = make_manager(), llama().bfloat16()
    wrap(model, manager)
    assert manager.load_adapter("a", tmp_path).max_rank == 4
    assert mixed_logits(manager, model, ["a", None], IDS).isfinite().all()
