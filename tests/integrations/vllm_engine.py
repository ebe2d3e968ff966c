"""vLLM's own LoRA layers and LRU manager, on a CPU, over lora_core's wrapper: run by test_vllm_layers.py.

Prints the largest error of every forward against float64, relative to the largest output.
"""

# ruff: noqa: E402, RUF012, T201 - vLLM is imported after the plugin is registered

from __future__ import annotations

import json
import tempfile

import torch
from torch.nn import functional

from lora_core.integrations.vllm import register

register()  # vLLM calls it by the entry point of an installation

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.lora import LoRAConfig
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.lora.layers import LoRAMapping
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

K, HEAD, RANK, VOCAB = 64, 16, 8, 128
PARTS = {"embed_tokens": ("embed_tokens",), "lm_head": ("lm_head",), "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # fmt: skip
SIZES = {
    "embed_tokens": K,
    "lm_head": VOCAB,
    "q_proj": 64,
    "k_proj": 32,
    "v_proj": 32,
    "gate_proj": 48,
    "up_proj": 48,
    "down_proj": 64,
}


INPUTS = {"down_proj": 48, "embed_tokens": VOCAB}


class Model(torch.nn.Module):
    """Enough of a model for vLLM to find, wrap and fill its linear layers."""

    supports_lora = True
    packed_modules_mapping = {name: list(parts) for name, parts in PARTS.items() if len(parts) > 1}
    embedding_modules = {"embed_tokens": "input_embeddings", "lm_head": "output_embeddings"}
    is_3d_moe_weight = is_non_gated_moe = False

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(K, HEAD, 4, 2, bias=False, params_dtype=torch.float32)
        self.gate_up_proj = MergedColumnParallelLinear(K, [48, 48], bias=False, params_dtype=torch.float32)  # fmt: skip
        self.down_proj = RowParallelLinear(48, K, bias=False, params_dtype=torch.float32)
        self.embed_tokens = VocabParallelEmbedding(VOCAB, K, params_dtype=torch.float32)
        self.lm_head = ParallelLMHead(VOCAB, K, params_dtype=torch.float32)
        self.logits_processor = LogitsProcessor(VOCAB)
        self.config = type("Config", (), {"model_type": "tiny"})()
        for layer in (
            self.qkv_proj,
            self.gate_up_proj,
            self.down_proj,
            self.embed_tokens,
            self.lm_head,
        ):
            layer.weight.data.normal_()
            layer.cpu_linear = functional.linear  # vLLM's CPU extension is not in its CUDA wheel


def adapter(number: int) -> dict[str, LoRALayerWeights]:
    torch.manual_seed(number)
    rank = (2, 8, 5)[number % 3]
    return {
        part: LoRALayerWeights(
            part, rank, 2 * rank, torch.randn(rank, INPUTS.get(part, K)), torch.randn(SIZES[part], rank),
        )
        for part in SIZES
        if (number, part) != (2, "k_proj")  # an adapter without one of the packed parts
    }  # fmt: skip


def expected(name: str, x: torch.Tensor, weight: torch.Tensor, ids: list[int]) -> torch.Tensor:
    weight = weight[:VOCAB].double()  # vLLM pads the vocabulary
    y = functional.linear(x.double(), weight.T if name == "embed_tokens" else weight)
    for row, number in enumerate(ids):
        at = 0
        for part in PARTS[name]:
            lora = adapter(number).get(part) if number else None
            if lora is not None:
                h = lora.lora_a.double() @ x[row].double()
                y[row, at : at + SIZES[part]] += 2.0 * (lora.lora_b.double() @ h)
            at += SIZES[part]
    return y


def main() -> None:
    config = VllmConfig()
    with set_current_vllm_config(config), torch.inference_mode():
        init_distributed_environment(
            1, 0, distributed_init_method=f"file://{tempfile.mktemp()}", backend="gloo"
        )
        initialize_model_parallel(1, 1)
        torch.manual_seed(0)
        model = Model()
        bases = {name: getattr(model, name).weight.data.clone() for name in PARTS}
        lora_config = LoRAConfig(max_lora_rank=RANK, max_loras=2, max_cpu_loras=3, lora_dtype=torch.float32)  # fmt: skip
        manager = LRUCacheLoRAModelManager(
            model, 8, 32, VOCAB, lora_config, torch.device("cpu"), config
        )
        for number in (1, 2, 3):
            manager.add_adapter(LoRAModel(number, RANK, adapter(number)))
        errors = {}
        for step, (ids, padding) in enumerate(
            [([1, 1, 0, 2, 0], 0), ([3, 0, 3, 1], 2), ([0, 0], 0), ([2, 3, 3], 5), ([1], 0)]
        ):
            for number in sorted(set(ids) - {0}):
                manager.activate_adapter(number)
            manager.set_adapter_mapping(LoRAMapping(tuple(ids), tuple(ids), is_prefill=True))
            for name in PARTS:
                layer = getattr(model, name)
                x = torch.randn(len(ids) + padding, INPUTS.get(name, K))
                if name == "embed_tokens":
                    tokens = torch.randint(0, VOCAB, (len(ids) + padding,))
                    got, x = layer(tokens), functional.one_hot(tokens, VOCAB)
                elif name == "lm_head":
                    x = x[: len(ids)]  # the sampled rows, which are never padded
                    got = model.logits_processor(layer, x)
                else:
                    got = layer(x)
                got = got[0] if isinstance(got, tuple) else got
                wanted = expected(name, x, bases[name], (ids + [0] * padding)[: len(x)])
                errors[f"{step} {name}"] = float((got.double() - wanted).abs().max() / wanted.abs().max())  # fmt: skip
        (wrapper,) = manager.punica_wrapper_mapping.values()
        print(
            json.dumps(
                {
                    "wrapper": type(wrapper).__module__,
                    "backend": wrapper.tokens.name,
                    "layers": sorted(type(m).__name__ for m in manager.modules.values()),
                    "errors": errors,
                }
            )
        )


if __name__ == "__main__":
    main()
