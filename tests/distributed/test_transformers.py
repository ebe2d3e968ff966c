"""Models cut by transformers' own tensor parallelism, through `attach`, against the whole model in one process."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from lora_core.distributed import RankedManager
from lora_core.errors import (
    AdapterMismatchError,
    AttachError,
    NoBatchPreparedError,
    UnsupportedAdapterError,
    UnsupportedOpError,
)
from lora_core.integrations.transformers import attach, detach
from lora_core.layers import parallel
from tests.distributed import world

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": False}),
    "llama-tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2-bias": (transformers.Qwen2Config, {"tie_word_embeddings": False}),
    "phi3-packed": (transformers.Phi3Config, {"tie_word_embeddings": False}),
}
TARGETS = {
    "linears": {"target_modules": "all-linear"},
    "head": {"target_modules": ["lm_head", "embed_tokens"]},
}
IDS = torch.tensor([[0, 0, 5, 9, 33], [7, 2, 61, 40, 12], [3, 63, 3, 8, 1], [4, 11, 50, 31, 29]])
MASK = (IDS != 0).long()
NAMES = ["linears", None, "head", "linears"]
NEW = 6


def write_model(folder, family):
    """A random model and, from PEFT, its adapters, on disk."""
    kind, extra = FAMILIES[family]
    torch.manual_seed(0)
    config = kind(**{**COMMON, **extra})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1 or parameter.abs().max() == 0:
            parameter.data.normal_(0, 0.2)
    model.save_pretrained(folder / "model")
    for seed, (name, targets) in enumerate(TARGETS.items()):
        whole = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
        torch.manual_seed(seed)
        settings = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **targets)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about tied weights
            get_peft_model(whole, settings).save_pretrained(folder / name)
    return folder


def generated(model, **options):
    out = model.generate(
        input_ids=IDS.to(model.device),
        attention_mask=MASK.to(model.device),
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return out.sequences, torch.stack(out.logits)


def cut_model(folder, size):
    from transformers.distributed import DistributedConfig

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model",
        dtype=torch.float32,
        distributed_config=DistributedConfig(tp_plan="auto", tp_size=size),
    ).eval()


def serve(rank, size, folder):
    """Tokens and logits of one mixed batch over all ranks; then the model again as it was."""
    model = cut_model(folder, size)
    plain = generated(model)
    names = {name: type(module) for name, module in model.named_modules()}
    manager = attach(model, world.here.backend, max_loras=2, max_rank=4)
    assert isinstance(manager, RankedManager)
    kinds = {type(layer) for layer in manager.layers.values()}
    for name in TARGETS:
        manager.load_adapter(name, folder / name)
    out = generated(model, adapter_names=NAMES)
    base = generated(model, adapter_names=None)
    assert all(torch.equal(a, b) for a, b in zip(base, plain, strict=True))
    assert torch.equal(out[1][:, 1], plain[1][:, 1])  # the row without an adapter, bit for bit
    detach(model)
    assert {name: type(module) for name, module in model.named_modules()} == names
    assert all(torch.equal(a, b) for a, b in zip(generated(model), plain, strict=True))
    return [part.cpu() for part in out], sorted(kind.__name__ for kind in kinds)


def refusals(rank, size, folder):
    model = cut_model(folder, size)
    with pytest.raises(UnsupportedOpError, match="max_cpu_loras"):
        attach(model, world.here.backend, max_cpu_loras=8)
    manager = attach(model, world.here.backend, max_loras=2, max_rank=4)
    with pytest.raises(AttachError):
        attach(model, world.here.backend)
    with pytest.raises(AdapterMismatchError):
        manager.load_adapter("other", other_model())
    dora = other_model(inputs=COMMON["hidden_size"])
    dora[0]["use_dora"] = True
    dora[1]["base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"] = torch.ones(
        COMMON["hidden_size"]
    )
    with pytest.raises(UnsupportedAdapterError, match=r"only a part of .*q_proj.*norms"):
        manager.load_adapter("dora", dora)
    assert manager.adapters() == {}
    manager.load_adapter("linears", folder / "linears")
    with pytest.raises(NoBatchPreparedError):
        model(IDS.to(model.device))  # nobody said which adapter


def other_model(inputs=20):
    q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    tensors = {f"{q}A.weight": torch.ones(2, inputs), f"{q}B.weight": torch.ones(32, 2)}
    return {"peft_type": "LORA", "r": 2, "lora_alpha": 2}, tensors


def assert_equal_to_one_process(results, folder):
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    manager = attach(whole, "torch", max_loras=2, max_rank=4)
    for name in TARGETS:
        manager.load_adapter(name, folder / name)
    with torch.no_grad():
        sequences, logits = generated(whole, adapter_names=NAMES)
        bare = generated(whole, adapter_names=None)
    for (theirs, their_logits), _ in results:
        assert torch.equal(theirs, sequences)
        torch.testing.assert_close(their_logits, logits, rtol=1e-4, atol=1e-4)
    assert (logits[0, 0] - bare[1][0, 0]).abs().max() > 1e-2  # the adapters do something
    assert (logits[0, 2] - bare[1][0, 2]).abs().max() > 1e-2


KINDS = {"LoRAColumnParallelLinear", "LoRAParallelLMHead", "LoRARowParallelLinear"}


def mixture(rank, size, folder):
    """Attention takes adapters; experts are cut by a style of their own, and theirs are refused."""
    model = cut_model(folder, size)
    with torch.no_grad():
        plain = model(IDS).logits
    manager = attach(model, world.here.backend, max_loras=2, max_rank=4)
    assert not any("experts" in name for name in manager.layers)
    prefix = "base_model.model.model.layers.0"
    experts = {
        f"{prefix}.mlp.experts.0.down_proj.lora_A.weight": torch.ones(2, 16),
        f"{prefix}.mlp.experts.0.down_proj.lora_B.weight": torch.ones(32, 2),
    }
    config, tensors = other_model(inputs=COMMON["hidden_size"])
    with pytest.raises(UnsupportedAdapterError, match="experts that are not wrapped"):
        manager.load_adapter("experts", (config, {**tensors, **experts}))
    manager.load_adapter("attention", (config, tensors))
    out = model(IDS, adapter_names=["attention", None, None, "attention"]).logits
    assert torch.equal(out[1:3], plain[1:3])
    return out


@pytest.mark.slow
def test_experts_that_are_cut_are_left_alone(gloo2, tmp_path):
    config = transformers.Qwen3MoeConfig(
        **COMMON, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=8
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    manager = attach(whole, "torch", max_loras=2, max_rank=4)
    manager.load_adapter("attention", other_model(inputs=COMMON["hidden_size"]))
    with torch.no_grad():
        expected = whole(IDS, adapter_names=["attention", None, None, "attention"]).logits
    for out in gloo2.run(mixture, tmp_path):
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_two_ranks_answer_as_one_process(world2, tmp_path):
    folder = write_model(tmp_path, "llama-tied")
    results = world2.run(serve, folder)
    assert set(results[0][1]) == KINDS | {parallel.LoRAVocabParallelEmbedding.__name__}
    assert_equal_to_one_process(results, folder)
    world2.run(refusals, folder)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama-tied"}))
def test_families(gloo2, tmp_path, family):
    folder = write_model(tmp_path, family)
    results = gloo2.run(serve, folder)
    assert set(results[0][1]) >= KINDS
    assert_equal_to_one_process(results, folder)


@pytest.mark.slow
def test_four_ranks(world4, tmp_path):
    folder = write_model(tmp_path, "llama")
    assert_equal_to_one_process(world4.run(serve, folder), folder)
