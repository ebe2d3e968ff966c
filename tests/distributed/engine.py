"""An engine's own parallel modules, as small as they can be, and adapters for them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lora_core.adapters.sharding import cut_weight
from lora_core.layers.parallel import side_by_side
from lora_core.sites import Site


def numbers(seed: int, *shape: int) -> Tensor:
    """float32, the same in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class ParallelLinear(nn.Module):
    """A rank's part of a whole weight."""

    def __init__(self, site: Site, weight: Tensor, bias: Tensor | None, group, **flags) -> None:
        super().__init__()
        self.weight = nn.Parameter(cut_weight(weight, site), requires_grad=False)
        own = None
        if bias is not None:
            own = cut_weight(bias[:, None], Site("", "linear", 1, site.layout, (), _columns(site)))
            own = nn.Parameter(own[:, 0].clone(), requires_grad=False)
        self.bias, self.site, self.group = own, site, group
        for name, flag in flags.items():
            setattr(self, name, flag)


def _columns(site):
    from lora_core.sites import Shard

    return site.shard and Shard(outputs=site.shard.outputs)


class Column(ParallelLinear):
    def forward(self, x):
        out = functional.linear(x, self.weight, self.bias)
        if getattr(self, "gather_output", False):
            out = side_by_side(out, self.group)[..., : self.site.layout.out_features]
        return out


class Row(ParallelLinear):
    def forward(self, x):
        part = self.site.shard.inputs
        if not getattr(self, "input_is_parallel", True):
            x = x[..., part.start : part.stop]
        out = functional.linear(x, self.weight)
        if getattr(self, "reduce_results", True):
            dist.all_reduce(out, group=self.group)
        elif part.start:
            return out
        return out if self.bias is None else out + self.bias


class VocabularyRows(ParallelLinear):
    def forward(self, ids):
        own = ids - self.site.shard.inputs.start
        elsewhere = (own < 0) | (own >= len(self.weight))
        out = functional.embedding(own.masked_fill(elsewhere, 0), self.weight)
        out = out.masked_fill(elsewhere.unsqueeze(-1), 0)
        dist.all_reduce(out, group=self.group)
        return out


def adapter(seed: int, shapes: dict[str, tuple[int, int]], rank: int, alpha: float, embeddings=()):
    """(config, tensors) of PEFT: `shapes` has (inputs, outputs) by module."""
    tensors = {}
    for index, (name, (inputs, outputs)) in enumerate(shapes.items()):
        kind, end = ("lora_embedding_", "") if name in embeddings else ("lora_", ".weight")
        prefix = f"base_model.model.{name}.{kind}"
        tensors[f"{prefix}A{end}"] = numbers(seed * 100 + index, rank, inputs) / inputs**0.5
        tensors[f"{prefix}B{end}"] = numbers(seed * 100 + 50 + index, outputs, rank)
    return {"peft_type": "LORA", "r": rank, "lora_alpha": alpha}, tensors


def delta(source, name: str, *, embedding=False) -> Tensor:
    """float64 `[N, K]` of one module (embedding: `[V, N]`)."""
    config, tensors = source
    middle = "lora_embedding_{}" if embedding else "lora_{}.weight"
    a, b = (tensors[f"base_model.model.{name}.{middle.format(part)}"].double() for part in "AB")
    product = config["lora_alpha"] / config["r"] * b @ a
    return product.T if embedding else product
