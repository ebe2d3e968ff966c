"""Tiny models, adapters made by PEFT itself, and the same model with wrapped layers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_core.layers.embedding import LoRAEmbedding
from lora_core.layers.linear import LoRALinear, linear_features
from lora_core.layers.lm_head import LoRALMHead
from lora_core.manager import LoRAManager, LoRARequest
from lora_core.sites import Site
from lora_core.torch_backend import TorchBackend
from lora_core.weights import SliceLayout

VOCAB, HIDDEN = 64, 32
IDS = torch.arange(24).reshape(2, 12) * 7 % VOCAB


def llama(*, tie: bool = False, layers: int = 2, classify: bool = False, **config) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(0)
    kind = LlamaForSequenceClassification if classify else LlamaForCausalLM
    return kind(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tie,
            pad_token_id=0,
            **config,
        )
    ).eval()


def classifier() -> nn.Module:
    return llama(classify=True)


def tied_llama() -> nn.Module:
    return llama(tie=True)


def qwen2() -> nn.Module:
    """Biases on q, k and v."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return _shaken(
        Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=VOCAB,
                hidden_size=HIDDEN,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                tie_word_embeddings=False,
            )
        )
    )


def gpt2() -> nn.Module:
    """Conv1D, whose weight is [K, N]; c_proj of the attention is square."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return _shaken(
        GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB,
                n_embd=HIDDEN,
                n_layer=2,
                n_head=4,
                n_positions=64,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    )


def phi3() -> nn.Module:
    """qkv_proj and gate_up_proj are single linears."""
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    return Phi3ForCausalLM(
        Phi3Config(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
        )
    ).eval()


def gemma3() -> nn.Module:
    """The embedding multiplies what it looks up."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            pad_token_id=0,
        )
    ).eval()


def _shaken(model: nn.Module) -> nn.Module:
    """Biases begin as zeros; here they are not."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.5)
    return model.eval()


def peft_adapter(model: nn.Module, folder: Path, *, save: bool = True, **config) -> nn.Module:
    """Wrap `model` with PEFT, give everything trainable random values, and save the adapter."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of tied weights and of saved embeddings
        wrapped = get_peft_model(model, LoraConfig(init_lora_weights=False, **config)).eval()
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "magnitude" in name:
                    parameter.mul_(1 + 0.5 * torch.rand_like(parameter))
                elif parameter.requires_grad:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        if save:
            wrapped.save_pretrained(folder)
    return wrapped


def wrap(model: nn.Module, manager: LoRAManager, *, packed: dict[str, tuple] | None = None) -> dict:
    """Wrap every linear and embedding of `model` in place and register the layers.

    `packed`: end of a module's name -> (widths, names of its slices).
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    layers = {}
    for name, module in list(model.named_modules()):
        if not name:
            continue
        parent_name, _, leaf = name.rpartition(".")
        widths, parts = (packed or {}).get(leaf, (None, None))
        slice_names = (name,) if parts is None else tuple(f"{parent_name}.{p}" for p in parts)
        features = linear_features(module)
        if isinstance(module, nn.Embedding):
            layout = SliceLayout((module.embedding_dim,))
            site = Site(name, "embedding", module.num_embeddings, layout, slice_names)
            layer = LoRAEmbedding(module, site, manager.gate)
        elif features is not None:
            kind = "lm_head" if module is head else "linear"
            layout = SliceLayout(widths or (features[1],))
            site = Site(name, kind, features[0], layout, slice_names)
            layer = (LoRALMHead if kind == "lm_head" else LoRALinear)(module, site, manager.gate)
        else:
            continue
        setattr(model.get_submodule(parent_name), leaf, layer)
        layers[name] = layer
    manager.add_layers(layers)
    return layers


def make_manager(**options) -> LoRAManager:
    return LoRAManager(TorchBackend(device="cpu"), **{"max_loras": 2, "max_rank": 16, **options})


@torch.no_grad()
def logits_of(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    return model(input_ids=ids).logits


@torch.no_grad()
def mixed_logits(manager: LoRAManager, model: nn.Module, names: list, ids: Tensor = IDS) -> Tensor:
    """One forward, row i of `ids` with adapter `names[i]`."""
    requests = [LoRARequest(name, ids.shape[1]) for name in names]
    with manager.batch(requests):
        return model(input_ids=ids).logits


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def config_of(folder: Path) -> dict:
    return json.loads((folder / "adapter_config.json").read_text())


def write_adapter(folder: Path, config: dict, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({k: t.contiguous() for k, t in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


class Parts(nn.Module):
    """Plain linears `name -> (inputs, outputs)` behind dotted names, for adapters made by hand."""

    def __init__(self, **shapes: tuple[int, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, (inputs, outputs) in shapes.items():
            setattr(self, name, nn.Linear(inputs, outputs, bias=False))


def lora(module: str, rank: int, inputs: int, outputs: int, *, seed: int = 0) -> dict[str, Tensor]:
    """A and B of one module under PEFT's keys."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"base_model.model.{module}.lora_A.weight": torch.randn(rank, inputs, generator=generator),
        f"base_model.model.{module}.lora_B.weight": torch.randn(outputs, rank, generator=generator),
    }


def config(**fields) -> dict:
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **fields}
