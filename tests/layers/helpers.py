"""Hand-made adapters for one layer, and what the layer must give, computed row by row."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lora_core import LoRABatch, LoRAWeights, SliceLayout
from lora_core.layers.base import ForwardGate
from lora_core.sites import Site
from lora_core.torch_backend import TorchBackend

SLOTS, MAX_RANK = 3, 4


def make_gate() -> ForwardGate:
    return ForwardGate(TorchBackend(device="cpu"))


def make_site(kind: str, in_features: int, *widths: int) -> Site:
    names = (
        ("block.proj",) if len(widths) == 1 else tuple(f"block.part{i}" for i in range(len(widths)))
    )
    return Site("block.proj", kind, in_features, SliceLayout(widths), names)


def make_weights(
    in_features: int, *widths: int, dtype=torch.float32, embedding=False
) -> LoRAWeights:
    """Slot s has rank s + 1 (slot 2's last slice: 0); whatever lies past a rank is NaN."""
    n, out = len(widths), sum(widths)
    shape = (SLOTS, in_features, MAX_RANK) if embedding else (SLOTS, n, MAX_RANK, in_features)
    a = torch.randn(shape, dtype=dtype)
    b = torch.randn(SLOTS, out, MAX_RANK, dtype=dtype)
    ranks = torch.tensor([[s + 1] * n for s in range(SLOTS)], dtype=torch.int32)
    if n > 1:
        ranks[2, -1] = 0
    for slot in range(SLOTS):
        b[slot, :, ranks[slot].max() :] = torch.nan
        if embedding:
            a[slot, :, ranks[slot, 0] :] = torch.nan
        else:
            for s in range(n):
                a[slot, s, ranks[slot, s] :] = torch.nan
    scalings = torch.rand(SLOTS, n) + 0.5
    return LoRAWeights(a=a, b=b, ranks=ranks, scalings=scalings, layout=SliceLayout(widths))


def expected_delta(x: Tensor, weights: LoRAWeights, lengths: list[int], slots: list[int]) -> Tensor:
    """float64 `[T, N]`, from `x` `[T, K]` or the ids `[T]` of an embedding."""
    out = torch.zeros(len(x), weights.layout.out_features, dtype=torch.float64)
    rows = [slot for slot, length in zip(slots, lengths, strict=True) for _ in range(length)]
    for row, slot in enumerate(rows):
        if slot < 0:
            continue
        for s in range(weights.layout.num_slices):
            rank = int(weights.ranks[slot, s])
            span = slice(weights.layout.offsets[s], weights.layout.offsets[s + 1])
            if weights.is_embedding:
                h = weights.a[slot, x[row], :rank].double()
            else:
                h = weights.a[slot, s, :rank].double() @ x[row].double()
            out[row, span] = weights.scalings[slot, s].double() * (
                weights.b[slot, span, :rank].double() @ h
            )
    return out


def prepare(gate: ForwardGate, lengths: list[int], slots: list[int], **batch) -> None:
    gate.backend.prepare_batch(LoRABatch(lengths, slots, **batch))


class QuantisedLinear(nn.Module):
    """A linear that stores int8 codes and shows no plain weight, as quantised libraries do."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer(
            "codes", torch.randint(-127, 127, (out_features, in_features), dtype=torch.int8)
        )
        self.register_buffer("scale", torch.rand(out_features, 1) / 127)
        self.bias = nn.Parameter(torch.randn(out_features))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.codes.to(x.dtype) * self.scale.to(x.dtype), self.bias)
