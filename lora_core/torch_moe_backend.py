"""TorchMoEBackend: the reference for experts, in plain torch on any device.

Every pair gathers its own A and B and multiplies them, in chunks of rows. Slots, ids and ranks are
read on the device only, so nothing synchronises and a graph follows what is written later; and the
shape of every product depends on nothing that another row brings along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lora_core.moe import MoECapabilities, MoELoRABackend, MoELoRAWeights, MoERoute, MoERouting

_CHUNK_ELEMENTS = 1 << 24
"""Gathered weight elements at a time: 64 MiB of float32."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TorchRoute(MoERoute):
    """Which weights each pair uses; 0 stands in for what must not be read.

    Attributes:
        live: bool `[T, k]`, pairs with an adapter and an expert of this rank.
        slots: int64 `[T, k]`, 0 where not live.
        experts: int64 `[T, k]`, 0 where not live.
    """

    live: Tensor
    slots: Tensor
    experts: Tensor


class TorchMoEBackend(MoELoRABackend[TorchRoute]):
    """Everything the contract has, for reading and for comparing with; slow on a GPU."""

    name: ClassVar[str] = "torch"
    contract: ClassVar[str] = "1.0"
    capabilities: ClassVar[MoECapabilities] = MoECapabilities(
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        device_types=frozenset({"cpu", "cuda"}),
        graphs=True,
    )

    @override
    def route(self, routing: MoERouting) -> TorchRoute:
        ids = routing.topk_ids.long()
        if routing.slots is None:
            nothing = torch.zeros_like(ids)
            return TorchRoute(routing=routing, live=nothing.bool(), slots=nothing, experts=nothing)
        if routing.expert_map is not None:
            mapping = routing.expert_map.long()
            known = (ids >= 0) & (ids < mapping.shape[0])
            ids = torch.where(known, mapping[torch.where(known, ids, 0)], -1)
        slots = routing.slots.long().unsqueeze(1).expand_as(ids)
        live = (ids >= 0) & (ids < routing.num_experts) & (slots >= 0) & (slots < routing.num_slots)
        return TorchRoute(
            routing=routing,
            live=live,
            slots=torch.where(live, slots, 0),
            experts=torch.where(live, ids, 0),
        )

    @override
    def gate_up(
        self,
        x: Tensor,
        weights: MoELoRAWeights,
        route: TorchRoute,
        out: Tensor,
        *,
        accumulate: bool = True,
    ) -> Tensor:
        self._require_fit("gate_up", x, weights, route.routing, out)
        per_pair = x.unsqueeze(1).expand(-1, route.routing.top_k, -1)
        return self._apply(
            per_pair, weights, route, out, routed_weights=False, accumulate=accumulate
        )

    @override
    def down(
        self,
        x: Tensor,
        weights: MoELoRAWeights,
        route: TorchRoute,
        out: Tensor,
        *,
        routed_weights: bool = False,
        accumulate: bool = True,
    ) -> Tensor:
        self._require_fit("down", x, weights, route.routing, out)
        return self._apply(
            x,
            weights,
            route,
            out,
            routed_weights=routed_weights or out.dim() == 2,
            accumulate=accumulate,
        )

    def _apply(
        self,
        x: Tensor,
        weights: MoELoRAWeights,
        route: TorchRoute,
        out: Tensor,
        *,
        routed_weights: bool,
        accumulate: bool,
    ) -> Tensor:
        if route.routing.inert:
            return out if accumulate else out.zero_()
        top_k, max_rank = route.routing.top_k, weights.max_rank
        per_pair = max_rank * (
            weights.layout.num_slices * weights.in_features + weights.layout.out_features
        )
        chunk = max(1, _CHUNK_ELEMENTS // (per_pair * top_k))
        for start in range(0, x.shape[0], chunk):
            rows = slice(start, start + chunk)
            delta, touched = self._deltas(x[rows], weights, route, rows)
            if routed_weights:
                delta *= route.routing.topk_weights[rows].float().unsqueeze(-1)
            if out.dim() == 2:
                delta = torch.where(touched, delta, 0).sum(1)
                touched = touched.any(1)
            old = out[rows]
            # where nothing is added the old bits stay: adding 0.0 would turn -0.0 into 0.0
            changed = (old.float() + delta).to(old.dtype) if accumulate else delta.to(old.dtype)
            old.copy_(torch.where(touched, changed, old if accumulate else 0))
        return out

    def _deltas(
        self, x: Tensor, weights: MoELoRAWeights, route: TorchRoute, rows: slice
    ) -> tuple[Tensor, Tensor]:
        """The delta of every pair, float32 `[t, k, N]`, and where there is one, bool of that shape."""
        layout = weights.layout
        slots, experts = route.slots[rows].flatten(), route.experts[rows].flatten()
        a = weights.a[slots, 0 if weights.shared_a else experts].float()  # [p, n, R, K]
        b = weights.b[slots, 0 if weights.shared_b else experts].float()  # [p, N, R]
        ranks, scalings = weights.ranks[slots], weights.scalings[slots]  # [p, n]
        h = torch.bmm(a.flatten(1, 2), x.reshape(-1, x.shape[-1], 1).float()).view(a.shape[:3])
        delta = torch.empty(len(slots), layout.out_features, device=x.device)
        touched = torch.empty(delta.shape, dtype=torch.bool, device=x.device)
        for s in range(layout.num_slices):
            span = slice(layout.offsets[s], layout.offsets[s + 1])
            past = torch.arange(weights.max_rank, device=x.device) >= ranks[:, s : s + 1]  # [p, R]
            own_h = (h[:, s] * scalings[:, s : s + 1]).masked_fill(past, 0)
            own_b = b[:, span].masked_fill(past.unsqueeze(1), 0)
            delta[:, span] = torch.bmm(own_b, own_h.unsqueeze(-1)).squeeze(-1)
            touched[:, span] = (route.live[rows].flatten() & (ranks[:, s] > 0)).unsqueeze(-1)
        shape = (*x.shape[:2], layout.out_features)
        return delta.view(shape), touched.view(shape)
