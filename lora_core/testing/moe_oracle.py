"""The right answer for experts, the slow way: float64, one pair at a time, plain indexing.

It shares nothing with any backend: no grouping, no masks, no gathered weights. A pair that must not
be touched is simply not visited.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lora_core.moe import MoELoRAWeights, MoERouting


@dataclass(frozen=True, eq=False)
class PairDeltas:
    """What one projection adds, per pair.

    Attributes:
        delta: float64 `[T, k, N]`, 0 where nothing is added.
        touched: bool `[T, k, N]`, where something is added.
        scale: float64 `[T, k, N]`, sum of the magnitudes of the terms: what rounding is relative to.
    """

    delta: Tensor
    touched: Tensor
    scale: Tensor


def pair_deltas(x: Tensor, weights: MoELoRAWeights, routing: MoERouting) -> PairDeltas:
    """The delta of every pair.

    Args:
        x: `[T, K]` or `[T, k, K]`.
        weights: of the projection.
        routing: of the forward.
    """
    tokens, top_k = routing.topk_ids.shape
    layout = weights.layout
    delta = torch.zeros(tokens, top_k, layout.out_features, dtype=torch.float64)
    touched = torch.zeros(delta.shape, dtype=torch.bool)
    scale = torch.zeros_like(delta)
    for token in range(tokens):
        slot = -1 if routing.slots is None else int(routing.slots[token])
        for choice in range(top_k):
            expert = local_expert(routing, token, choice)
            if not 0 <= slot < weights.num_slots or not 0 <= expert < weights.num_experts:
                continue
            row = (x[token] if x.dim() == 2 else x[token, choice]).double().cpu()
            for s in range(layout.num_slices):
                rank = int(weights.ranks[slot, s])
                span = slice(layout.offsets[s], layout.offsets[s + 1])
                a = weights.a[slot, 0 if weights.shared_a else expert, s, :rank].double().cpu()
                b = weights.b[slot, 0 if weights.shared_b else expert, span, :rank].double().cpu()
                scaling = float(weights.scalings[slot, s])
                if rank:
                    delta[token, choice, span] = scaling * (b @ (a @ row))
                    touched[token, choice, span] = True
                    scale[token, choice, span] = abs(scaling) * (b.abs() @ (a.abs() @ row.abs()))
    return PairDeltas(delta, touched, scale)


def local_expert(routing: MoERouting, token: int, choice: int) -> int:
    """This rank's expert of one pair, or -1."""
    expert = int(routing.topk_ids[token, choice])
    if routing.expert_map is None:
        return expert
    return int(routing.expert_map[expert]) if 0 <= expert < len(routing.expert_map) else -1
