"""An engine's own parallel modules, as small as they can be, and adapters for them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lora_core import SliceLayout, load_backend, load_moe_backend
from lora_core.adapters.sharding import cut_weight
from lora_core.distributed import LiveForward, RankedManager
from lora_core.layers.linear import LoRALinear
from lora_core.layers.moe import CoreConfig, ExpertsCore, FusedMoEWithLoRA
from lora_core.layers.parallel import (
    LoRAColumnParallelLinear,
    LoRARowParallelLinear,
    side_by_side,
)
from lora_core.sites import Shard, Site
from tests.distributed import world


def host_numbers(seed: int, *shape: int) -> Tensor:
    """float32, the same in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def numbers(seed: int, *shape: int) -> Tensor:
    """The same on the device of this rank."""
    return host_numbers(seed, *shape).to(world.device)


def dense_backend(name: str | None = None):
    """Of this rank's place."""
    return load_backend(name or world.here.backend, device=world.device)


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
        tensors[f"{prefix}A{end}"] = host_numbers(seed * 100 + index, rank, inputs) / inputs**0.5
        tensors[f"{prefix}B{end}"] = host_numbers(seed * 100 + 50 + index, outputs, rank) / 4
    return {"peft_type": "LORA", "r": rank, "lora_alpha": alpha}, tensors


def delta(source, name: str, *, embedding=False) -> Tensor:
    """float64 `[N, K]` of one module (embedding: `[V, N]`)."""
    config, tensors = source
    middle = "lora_embedding_{}" if embedding else "lora_{}.weight"
    a, b = (
        tensors[f"base_model.model.{name}.{middle.format(part)}"].double().to(world.device)
        for part in "AB"
    )
    product = config["lora_alpha"] / config["r"] * b @ a
    return product.T if embedding else product


H, INNER, EXPERTS, TOP_K = 12, 16, 4, 2
DENSE = {"attn": (H, H), "up": (H, INNER), "down": (INNER, H)}


class LocalExperts(nn.Module):
    """The experts `held` of a model; ids are the model's, those of other ranks contribute nothing."""

    def __init__(self, w13: Tensor, w2: Tensor, held: range) -> None:
        super().__init__()
        self.w13, self.w2 = (
            nn.Parameter(w[held.start : held.stop].clone(), requires_grad=False) for w in (w13, w2)
        )
        local_ids = [held.index(i) if i in held else -1 for i in range(len(w13))]
        self.map = torch.tensor(local_ids, dtype=torch.int32, device=w13.device)
        self.core = LocalCore(self)

    def forward(self, hidden_states, topk_ids, topk_weights):
        return self.core.run(hidden_states, topk_ids, topk_weights)


class LocalCore(ExpertsCore):
    def __init__(self, module: LocalExperts, config: CoreConfig | None = None) -> None:
        self.module, self.config = module, config or CoreConfig()
        self.num_experts = len(module.w13)

    def with_config(self, config):
        return LocalCore(self.module, config)

    def run(self, hidden_states, topk_ids, topk_weights, *, deltas=None):
        own = self.module.map[topk_ids]
        held = (own >= 0).unsqueeze(-1)
        own = own.clamp(min=0)
        pairs = torch.einsum("tknh,th->tkn", self.module.w13[own], hidden_states).contiguous()
        if deltas is not None:
            deltas.gate_up(pairs)
        gate, up = pairs.chunk(2, dim=-1)
        inner = functional.silu(gate) * up
        each = torch.einsum("tkhi,tki->tkh", self.module.w2[own], inner)
        out = (each * topk_weights.unsqueeze(-1)).masked_fill(~held, 0).sum(1)
        if deltas is not None:
            deltas.down(inner.contiguous(), out)
        return out


def full_adapter(seed: int, rank: int = 4, alpha: float = 8, *, shared_outer: bool = False):
    """An adapter of every site of `Model`, experts stacked."""
    config, tensors = adapter(seed, DENSE, rank, alpha)
    shapes = {"gate_up_proj": (H, 2 * INNER), "down_proj": (INNER, H)}
    for index, (name, (inputs, outputs)) in enumerate(shapes.items()):
        outer = shared_outer
        a_experts, b_experts = (
            1 if outer and index == 0 else EXPERTS,
            1 if outer and index == 1 else EXPERTS,
        )
        prefix = f"base_model.model.experts.{name}.lora_"
        a, b = (a_experts, rank, inputs), (b_experts, outputs, rank)
        tensors[f"{prefix}A.weight"] = host_numbers(seed * 9 + index, *a) / 4
        tensors[f"{prefix}B.weight"] = host_numbers(seed * 9 + 5 + index, *b) / 4
    return config, tensors


class Model:
    """Attention on a rank's own rows; MLP cut over the ranks, and experts spread over them, on all rows.

    Args:
        manager: of this rank, None for the bare base.
        rank: of `size`.
    """

    def __init__(self, manager, rank: int, size: int, route_to: int | None = None) -> None:
        weights = {
            name: numbers(i, n, k) / k**0.5 for i, (name, (k, n)) in enumerate(DENSE.items())
        }
        self.w13, self.w2 = (
            numbers(10, EXPERTS, 2 * INNER, H) / 4,
            numbers(11, EXPERTS, H, INNER) / 4,
        )
        self.router, self.weights, self.route_to = numbers(12, EXPERTS, H), weights, route_to
        shards = {"up": Shard.columns(SliceLayout((INNER,)), rank, size)}
        shards["down"] = Shard.rows(INNER, rank, size)
        sites = {
            name: Site(name, "linear", k, SliceLayout((n,)), (name,), shards.get(name))
            for name, (k, n) in DENSE.items()
        }
        held = range(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
        self.attn = nn.Linear(H, H, bias=False)
        self.attn.weight = nn.Parameter(weights["attn"].clone(), requires_grad=False)
        self.up = Column(sites["up"], weights["up"], None, None)
        self.down = Row(sites["down"], weights["down"], None, None, reduce_results=True)
        self.experts = LocalExperts(self.w13, self.w2, held)
        if manager is None:
            return
        gate = manager.gate
        self.attn = LoRALinear(self.attn, sites["attn"], gate)
        self.up = LoRAColumnParallelLinear(self.up, sites["up"], gate)
        self.down = LoRARowParallelLinear(self.down, sites["down"], gate)
        names = ("experts.gate_proj", "experts.up_proj")
        self.experts = FusedMoEWithLoRA(
            self.experts,
            Site("experts.gate_up_proj", "experts", H, SliceLayout((INNER, INNER)), names),
            Site("experts.down_proj", "experts", INNER, SliceLayout((H,)), ("experts.down_proj",)),
            gate,
            load_moe_backend(world.here.experts, device=world.device),
            expert_map=self.experts.map,
            total_experts=EXPERTS,
            expert_ids=held,
        )
        layers = [self.attn, self.up, self.down, self.experts.gate_up, self.experts.down]
        manager.add_layers({layer.site.name: layer for layer in layers})

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and weights `[T, k]`; all to the experts of one rank where the test says so."""
        scores = x @ self.router.to(x.dtype).T
        if self.route_to is not None:
            scores[:, self.route_to : self.route_to + TOP_K] += 100
        top = scores.topk(TOP_K)
        return top.indices, top.values.softmax(-1)

    def __call__(self, x: Tensor, live: LiveForward) -> Tensor:
        x = x + self.attn(x)
        assert self.down.reduce_results  # as models do, which look through the wrapper
        with live.everyone():
            mlp = self.down(functional.silu(self.up(live.gather(x))))
        x = x + live.own(mlp)
        rows = live.gather(x)
        ids, weights = self.route(rows)
        options = {"slots": live.slots} if isinstance(self.experts, FusedMoEWithLoRA) else {}
        out = self.experts(rows, ids, weights, **options)
        dist.all_reduce(out)
        return x + live.own(out)

    def expected(self, x: Tensor, source) -> Tensor:
        """In float64 and one process, with the adapter merged; None: the base."""
        w = {name: weight.double() for name, weight in self.weights.items()}
        w13, w2 = self.w13.double(), self.w2.double()
        if source is not None:
            w = {name: weight + delta(source, name) for name, weight in w.items()}
            w13 = w13 + delta(source, "experts.gate_up_proj")
            w2 = w2 + delta(source, "experts.down_proj")
        x = x.double()
        x = x + x @ w["attn"].T
        x = x + functional.silu(x @ w["up"].T) @ w["down"].T
        ids, weights = self.route(x)
        gate, up = torch.einsum("tknh,th->tkn", w13[ids], x).chunk(2, dim=-1)
        each = torch.einsum("tkhi,tki->tkh", w2[ids], functional.silu(gate) * up)
        return x + (each * weights.unsqueeze(-1)).sum(1)


def make(rank: int, size: int, *, route_to: int | None = None, **options):
    """(manager, model) of one rank."""
    options = {"max_loras": 3, "max_rank": 8, **options}
    manager = RankedManager(dense_backend(), **options)
    return manager, Model(manager, rank, size, route_to)
