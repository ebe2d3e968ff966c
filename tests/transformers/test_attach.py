"""attach changes a model in place and detach undoes it, bit for bit."""

import copy
import json

import accelerate
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from lora_core import load_backend
from lora_core.errors import (
    AdapterInUseError,
    AdapterNotFoundError,
    AttachError,
    BackendNotFoundError,
    UnsupportedOpError,
)
from lora_core.integrations.transformers import attach, detach
from lora_core.layers.base import LoRALayer
from lora_core.layers.embedding import LoRAEmbedding
from lora_core.layers.linear import LoRALinear, OpaqueLinear
from lora_core.layers.lm_head import LoRALMHead
from tests.layers.helpers import QuantisedLinear
from tests.transformers.tiny import FAMILIES, make_adapter, make_model, peft_model, prompts

GREEDY = {"max_new_tokens": 5, "do_sample": False}


def snapshot(model):
    """Everything that attach could disturb: module objects, their attributes, their tensors' bits."""
    return (
        {name: (module, dict(vars(module))) for name, module in model.named_modules()},
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
    )


def assert_unchanged(model, before):
    modules, tensors = before
    now, now_tensors = snapshot(model)
    assert list(now) == list(modules)
    for name, (module, attributes) in modules.items():
        assert now[name][0] is module, name
        assert now[name][1].keys() == attributes.keys(), name
        for key in ("forward", "generate", "_hf_hook", "_old_forward"):
            assert now[name][1].get(key) is attributes.get(key), (name, key)
    assert list(now_tensors) == list(tensors)
    assert all(torch.equal(now_tensors[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_detach_restores_the_very_modules(name, tmp_path):
    model = make_model(name)
    inputs = prompts(2)
    before = snapshot(model)
    expected = model.generate(**inputs, **GREEDY)
    folder = make_adapter(model, tmp_path, seed=0, r=2, target_modules="all-linear")

    manager = attach(model, "torch")
    manager.load_adapter("one", folder)
    assert not torch.equal(model.generate(**inputs, **GREEDY, adapter_names=["one"] * 2), expected)
    detach(model)

    assert_unchanged(model, before)
    assert torch.equal(model.generate(**inputs, **GREEDY), expected)
    with pytest.raises(ValueError, match="adapter_names"):  # transformers' own refusal
        model.generate(**inputs, **GREEDY, adapter_names=["one"] * 2)
    with pytest.raises(AdapterNotFoundError):
        manager.pin("one")


@pytest.mark.parametrize("name", FAMILIES)
def test_state_dict_and_saved_model_are_the_bases_own(name, tmp_path):
    model = make_model(name)
    folder = make_adapter(model, tmp_path / "adapter", seed=0, r=2, target_modules="all-linear")
    model.save_pretrained(tmp_path / "before")
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}

    attach(model, "torch").load_adapter("one", folder)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    assert model.num_parameters() == sum(
        {t.data_ptr(): t.numel() for t in model.parameters()}.values()
    )
    model.save_pretrained(tmp_path / "after")
    saved = [load_file(tmp_path / when / "model.safetensors") for when in ("before", "after")]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[0][key], saved[1][key]) for key in saved[0])
    configs = [
        json.loads((tmp_path / when / "config.json").read_text()) for when in ("before", "after")
    ]
    assert configs[0] == configs[1]


def test_attach_again_after_detach(tmp_path):
    model = make_model("llama")
    folder = make_adapter(model, tmp_path, seed=0, r=2, target_modules=["q_proj"])
    inputs, answers = prompts(2), []
    for _ in range(2):
        attach(model, "torch").load_adapter("one", folder)
        answers.append(model.generate(**inputs, **GREEDY, adapter_names=["one", None]))
        detach(model)
    assert torch.equal(*answers)


EXPECTED_SITES = {
    "llama": {"self_attn.q_proj": (32,), "mlp.gate_proj": (40,)},
    "phi3": {"self_attn.qkv_proj": (32, 16, 16), "mlp.gate_up_proj": (40, 40)},
    "gpt2": {"attn.c_attn": (96,), "mlp.c_fc": (128,)},
}


@pytest.mark.parametrize("name", EXPECTED_SITES)
def test_what_is_wrapped(name):
    model = make_model(name)
    manager = attach(model, "torch")
    stem = "transformer.h.1" if name == "gpt2" else "model.layers.1"
    for leaf, widths in EXPECTED_SITES[name].items():
        assert manager.layers[f"{stem}.{leaf}"].site.layout.widths == widths
    kinds = [type(layer) for layer in manager.layers.values()]
    assert kinds.count(LoRAEmbedding) == 1  # tokens, not positions
    assert kinds.count(LoRALMHead) == 1
    assert model.get_output_embeddings() is manager.layers["lm_head"]


def test_packed_site_knows_its_parts_names():
    site = attach(make_model("phi3"), "torch").layers["model.layers.0.self_attn.qkv_proj"].site
    assert site.slice_names == tuple(f"model.layers.0.self_attn.{part}_proj" for part in "qkv")


@pytest.mark.parametrize("parts", ["q", "qk", "qv", "k", "v", "kv", "qkv"])
def test_adapters_for_parts_of_a_packed_site(parts):
    """Trained on separate projections, applied to a packed one: equal to merging into its rows."""
    model = make_model("phi3")
    widths = {"q": (0, 32), "k": (32, 48), "v": (48, 64)}
    tensors, merged = {}, copy.deepcopy(model)
    for layer in range(2):
        for part in parts:
            start, end = widths[part]
            a, b = torch.randn(3, 32) * 0.2, torch.randn(end - start, 3) * 0.2
            stem = f"base_model.model.model.layers.{layer}.self_attn.{part}_proj"
            tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
            merged.model.layers[layer].self_attn.qkv_proj.weight.data[start:end] += 2.0 * b @ a
    config = {
        "peft_type": "LORA",
        "r": 3,
        "lora_alpha": 6,
        "target_modules": [f"{p}_proj" for p in parts],
    }
    attach(model, "torch").load_adapter("parts", (config, tensors))
    inputs = prompts(2)
    with torch.no_grad():
        mixed = model(**inputs, adapter_names=["parts", None]).logits
        kept = inputs["attention_mask"].bool()
        expected = merged(**inputs).logits[0]
        torch.testing.assert_close(mixed[0][kept[0]], expected[kept[0]], rtol=1e-4, atol=1e-4)


def test_target_modules_have_room_from_the_start_and_alone():
    manager = attach(make_model("llama"), "torch", target_modules=["q_proj", "lm_head"])
    with_room = {name for name, layer in manager.layers.items() if layer.weights is not None}
    assert with_room == {*(f"model.layers.{i}.self_attn.q_proj" for i in range(2)), "lm_head"}


def test_adapter_root_is_where_names_are_looked_up(tmp_path):
    model = make_model("llama")
    make_adapter(model, tmp_path / "one", seed=0, r=2, target_modules=["q_proj"])
    manager = attach(model, "torch", adapter_root=tmp_path)
    assert manager.load_adapter("one").max_rank == 2


# -- refusals: nothing is changed by them ----------------------------------------------------------------


def test_attach_twice_and_detach_twice():
    model = make_model("llama")
    with pytest.raises(AttachError, match="not attached"):
        detach(model)
    attach(model, "torch")
    before = snapshot(model)
    with pytest.raises(AttachError, match="attached already"):
        attach(model, "torch")
    assert_unchanged(model, before)
    detach(model)
    with pytest.raises(AttachError, match="not attached"):
        detach(model)


def test_embeddings_are_not_replaced_under_a_wrapper():
    model = make_model("llama")
    attach(model, "torch")
    before = snapshot(model)
    for call in (
        lambda: model.resize_token_embeddings(70),
        lambda: model.set_input_embeddings(nn.Embedding(70, 32)),
        lambda: model.set_output_embeddings(nn.Linear(32, 70)),
    ):
        with pytest.raises(AttachError, match=r"detach\(model\) first"):
            call()
    assert_unchanged(model, before)
    detach(model)
    assert model.resize_token_embeddings(70).num_embeddings == 70


def test_models_that_cannot_be_attached(tmp_path):
    base = make_model("llama")
    peft = peft_model(base, make_adapter(base, tmp_path, seed=0, r=2, target_modules=["q_proj"]))
    spread = make_model("llama")
    spread.hf_device_map = {"model": "cpu", "lm_head": "disk"}
    config = transformers.T5Config(
        vocab_size=31,
        d_model=16,
        d_ff=16,
        d_kv=4,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    encoder_decoder = transformers.T5ForConditionalGeneration(config)
    for model, error, message in (
        (peft, AttachError, "adapter layers of its own.*q_proj"),
        (peft.base_model.model, AttachError, "adapter layers of its own"),
        (spread, AttachError, r"spread over cpu, disk.*device_map"),
        (encoder_decoder, UnsupportedOpError, "T5ForConditionalGeneration, an encoder-decoder"),
    ):
        before = snapshot(model)
        with pytest.raises(error, match=message):
            attach(model, "torch")
        assert_unchanged(model, before)


def test_model_without_anything_to_wrap():
    class Bare(transformers.PreTrainedModel):
        config_class = transformers.LlamaConfig

        def __init__(self):
            super().__init__(transformers.LlamaConfig(attn_implementation="eager"))
            self.norm = nn.LayerNorm(4)

        def get_input_embeddings(self):
            return self.norm

        def forward(self, x):
            return self.norm(x)

    with pytest.raises(AttachError, match="Bare has no linear"):
        attach(Bare(), "torch")


def test_bad_backends_and_sizes_leave_the_model_alone():
    model = make_model("llama")
    before = snapshot(model)
    with pytest.raises(BackendNotFoundError, match="torch"):
        attach(model, "trch")
    elsewhere = load_backend("torch", device="cpu")
    elsewhere.device = torch.device("cuda", 1)
    with pytest.raises(AttachError, match=r"on cuda:1.*on cpu"):
        attach(model, elsewhere)
    with pytest.raises(ValueError, match="max_loras"):
        attach(model, "torch", max_loras=0)
    assert_unchanged(model, before)


def test_backend_instance_is_used():
    backend = load_backend("torch", device="cpu")
    assert attach(make_model("llama"), backend).backend is backend


def test_detach_while_an_adapter_is_held_is_refused(tmp_path):
    model = make_model("llama")
    manager = attach(model, "torch")
    other = make_model("llama")
    manager.load_adapter(
        "one", make_adapter(other, tmp_path, seed=0, r=2, target_modules=["q_proj"])
    )
    with manager.acquire("one"), pytest.raises(AdapterInUseError, match="one"):
        detach(model)
    assert isinstance(model.lm_head, LoRALayer)
    detach(model)


# -- hooks, strange linears, other heads ---------------------------------------------------------------------


def test_accelerate_hooks_move_to_the_wrapper_and_back(tmp_path):
    model = make_model("llama")
    folder = make_adapter(model, tmp_path, seed=0, r=2, target_modules="all-linear")
    reference = peft_model(model, folder)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))  # weights come and go
    assert model.lm_head.weight.is_meta
    base = model.lm_head
    hook, hooked_forward = base._hf_hook, base.forward

    attach(model, "torch").load_adapter("one", folder)
    assert model.lm_head._hf_hook is hook
    assert "_hf_hook" not in vars(base)
    inputs = prompts(2)
    with torch.no_grad():
        mixed = model(**inputs, adapter_names=["one", None]).logits
        torch.testing.assert_close(mixed[0], reference(**inputs).logits[0], rtol=1e-4, atol=1e-4)
        assert base.weight.is_meta  # sent away again
        detach(model)
        assert base._hf_hook is hook
        assert base.forward is hooked_forward
        with reference.disable_adapter():
            assert torch.equal(model(**inputs).logits, reference(**inputs).logits)


def test_quantised_linears_work_through_their_call():
    model, merged = make_model("llama"), make_model("llama")
    tensors = {}
    for index in range(2):
        quantised, plain = QuantisedLinear(32, 40), nn.Linear(32, 40)
        a, b = torch.randn(2, 32) * 0.3, torch.randn(40, 2) * 0.3
        plain.weight.data = quantised.codes * quantised.scale + b @ a
        plain.bias.data = quantised.bias.data
        model.model.layers[index].mlp.up_proj = quantised
        merged.model.layers[index].mlp.up_proj = plain
        stem = f"base_model.model.model.layers.{index}.mlp.up_proj"
        tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    quantised_only = copy.deepcopy(model)
    manager = attach(model, "torch")
    layer = manager.layers["model.layers.0.mlp.up_proj"]
    assert isinstance(layer.base, OpaqueLinear)
    assert layer.dtype == torch.float32
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["up_proj"]}
    manager.load_adapter("one", (config, tensors))
    inputs = prompts(2)
    with torch.no_grad():
        mixed = model(**inputs, adapter_names=["one", None]).logits
        torch.testing.assert_close(mixed[0], merged(**inputs).logits[0], rtol=1e-4, atol=1e-4)
        assert torch.equal(mixed[1], quantised_only(**inputs).logits[1])


def test_score_head_of_a_classifier(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, num_labels=3,
    )  # fmt: skip
    model = transformers.LlamaForSequenceClassification(config).eval()
    folder = make_adapter(
        model, tmp_path, seed=0, r=2, target_modules=["q_proj"], task_type="SEQ_CLS"
    )
    reference = peft_model(model, folder)
    manager = attach(model, "torch")
    manager.load_adapter("one", folder)
    assert isinstance(manager.layers["score"], LoRALinear)
    inputs = prompts(3)
    with torch.no_grad():
        mixed = model(**inputs, adapter_names=["one", None, "one"]).logits
        alone = reference(**inputs).logits
        torch.testing.assert_close(mixed[[0, 2]], alone[[0, 2]], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(mixed[1], alone[1])


def test_hidden_state_model_without_a_head(tmp_path):
    model = make_model("llama").model
    folder = make_adapter(model, tmp_path, seed=0, r=2, target_modules=["q_proj", "down_proj"])
    reference = peft_model(model, folder)
    attach(model, "torch").load_adapter("one", folder)
    inputs = prompts(2)
    with torch.no_grad():
        mixed = model(**inputs, adapter_names=["one", None]).last_hidden_state
        torch.testing.assert_close(
            mixed[0], reference(**inputs).last_hidden_state[0], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_is_as_near_to_fp32_as_peft_is(dtype, tmp_path):
    exact = make_model("llama")
    folder = make_adapter(exact, tmp_path, seed=0, r=2, target_modules="all-linear")
    model = make_model("llama").to(dtype)
    peft = peft_model(model, folder)
    attach(model, "torch").load_adapter("one", folder)
    inputs = prompts(3)  # row 0 has no padding
    with torch.no_grad():
        expected = peft_model(exact, folder)(**inputs).logits[0]
        errors = [
            (logits[0].float() - expected).square().mean().sqrt()
            for logits in (
                model(**inputs, adapter_names=["one", None, "one"]).logits,
                peft(**inputs).logits,
            )
        ]
    assert errors[0] <= 1.2 * errors[1]


def test_only_the_language_model_of_a_multimodal_one_is_wrapped(tmp_path):
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8,
        patch_size=4, projection_dim=16,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=make_model("llama").config,
        image_token_index=60,
        vision_feature_layer=-1,
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    targets = r".*language_model.*\.(q_proj|down_proj)"
    folder = make_adapter(model, tmp_path, seed=0, r=2, target_modules=targets)
    reference = peft_model(model, folder)
    manager = attach(model, "torch")
    manager.load_adapter("one", folder)
    assert all("vision" not in name and "projector" not in name for name in manager.layers)
    image = torch.randn(2, 3, 8, 8)
    ids = torch.tensor([[60] * 4 + [5, 6, 7], [60] * 4 + [9, 8, 7]])
    inputs = {"input_ids": ids, "pixel_values": image, "attention_mask": torch.ones_like(ids)}
    mixed = model.generate(**inputs, **GREEDY, adapter_names=["one", None])
    assert mixed[0].tolist() == reference.generate(**inputs, **GREEDY)[0].tolist()
    with reference.disable_adapter():
        assert mixed[1].tolist() == reference.generate(**inputs, **GREEDY)[1].tolist()


def test_routed_experts_are_sites_of_their_own():
    config = transformers.Qwen2MoeConfig(
        vocab_size=61, hidden_size=32, intermediate_size=40, moe_intermediate_size=16, num_hidden_layers=1,
        shared_expert_intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, num_experts=4,
        num_experts_per_tok=2, decoder_sparse_step=1,
    )  # fmt: skip
    model = transformers.Qwen2MoeForCausalLM(config).eval()
    names = set(attach(model, "torch").layers)
    assert "model.layers.0.mlp.shared_expert.up_proj" in names
    assert {name for name in names if ".experts" in name} == {
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj",
    }
