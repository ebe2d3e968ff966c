"""A small model of wrapped linears, adapters made by hand, and what a forward must give."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lora_core.layers.linear import LoRALinear
from lora_core.manager import LoRAManager, LoRARequest
from lora_core.sites import Site
from lora_core.torch_backend import TorchBackend
from lora_core.weights import SliceLayout

K = 16
SHAPES = {"q_proj": 12, "k_proj": 8, "v_proj": 8, "o_proj": K}


class Model:
    """Independent linears over the same input; `out` is their outputs side by side."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, bias: bool = False) -> None:
        torch.manual_seed(0)
        self.linears = {name: nn.Linear(K, n, bias=bias, dtype=dtype) for name, n in SHAPES.items()}
        self.layers: dict[str, LoRALinear] = {}

    def attach(self, manager: LoRAManager) -> LoRAManager:
        for name, linear in self.linears.items():
            site = Site(name, "linear", K, SliceLayout((SHAPES[name],)), (name,))
            self.layers[name] = LoRALinear(linear, site, manager.gate)
        manager.add_layers(self.layers)
        return manager

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.layers.values()], dim=1)

    @torch.no_grad()
    def base(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self.linears.values()], dim=1)

    @torch.no_grad()
    def expected(self, x: Tensor, source: tuple) -> Tensor:
        """With the adapter merged into the weights, in float64."""
        config, tensors = source
        outs = []
        for name, linear in self.linears.items():
            weight = linear.weight.double()
            a, b = (tensors.get(f"base_model.model.{name}.lora_{part}.weight") for part in "AB")
            if a is not None:
                weight = weight + config["lora_alpha"] / config["r"] * b.double() @ a.double()
            outs.append(x.double() @ weight.T)
        return torch.cat(outs, dim=1)


def adapter(
    seed: int, modules=("q_proj", "v_proj"), rank: int = 4, alpha: float = 8
) -> tuple[dict, dict]:
    """(config, tensors) with values of their own."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in modules:
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(
            rank, K, generator=generator
        )
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(
            SHAPES[name], rank, generator=generator
        )
    return {"peft_type": "LORA", "r": rank, "lora_alpha": alpha}, tensors


def make(model: Model | None = None, **options) -> tuple[LoRAManager, Model]:
    model = model or Model()
    manager = LoRAManager(TorchBackend(device="cpu"), **{"max_loras": 2, "max_rank": 16, **options})
    return model.attach(manager), model


def rows(count: int = 3, seed: int = 5) -> Tensor:
    return torch.randn(count, K, generator=torch.Generator().manual_seed(seed))


def run(manager: LoRAManager, model: Model, x: Tensor, *names: str | None, lane: int = 0) -> Tensor:
    """One row per name."""
    assert len(names) == len(x)
    with manager.batch([LoRARequest(name) for name in names], mode="decode", lane=lane):
        return model(x)


def assert_runs(manager: LoRAManager, model: Model, sources: dict) -> None:
    """Each named adapter, alone and in one batch beside a base row, gives its own values."""
    x = rows(len(sources) + 1)
    out = run(manager, model, x, *sources, None)
    for row, source in zip(range(len(sources)), sources.values(), strict=True):
        expected = model.expected(x[row : row + 1], source)
        torch.testing.assert_close(out[row : row + 1].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[-1:], model.base(x[-1:]), rtol=1e-5, atol=1e-6)
