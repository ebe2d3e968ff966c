"""VirtualExpertsBackend: pairs grouped by (slot, expert), each group one small product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
from torch import Tensor
from typing_extensions import override

from lora_core.moe import MoECapabilities, MoELoRABackend, MoELoRAWeights, MoERoute, MoERouting
from lora_core.triton_kit import INTERPRETED, family
from lora_core_moe_virtual_experts import tiles
from lora_core_moe_virtual_experts.kernels.bound import bound, dependent_launch
from lora_core_moe_virtual_experts.kernels.expand import expand
from lora_core_moe_virtual_experts.kernels.reduce import reduce_pairs
from lora_core_moe_virtual_experts.kernels.route import launch_route, max_tiles
from lora_core_moe_virtual_experts.kernels.shrink import shrink


@dataclass(frozen=True, eq=False, kw_only=True)
class VirtualRoute(MoERoute):
    """The pairs of a forward by virtual expert.

    Attributes:
        grouped: whether pairs were sorted. If not, every pair is a tile of its own, and the three
            tensors below are the routing's own ids, slots and expert map.
        block_m: BM, most pairs of a tile.
        num_tiles: how many tiles the grids cover; those past the real ones are empty.
        order: int32 `[P]`, pairs by place.
        tiles: int32 `[num_tiles, 4]`, key, first place and pairs of each tile.
        count: int32 `[1]`, how many tiles there are.
    """

    grouped: bool
    block_m: int
    num_tiles: int
    order: Tensor
    tiles: Tensor
    count: Tensor


class VirtualExpertsBackend(MoELoRABackend[VirtualRoute]):
    """Two launches per projection: shrink over tiles and splits of K, expand over tiles and N."""

    name: ClassVar[str] = "virtual_experts"
    contract: ClassVar[str] = "1.0"
    capabilities: ClassVar[MoECapabilities] = MoECapabilities(
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        device_types=frozenset({"cpu", "cuda"} if INTERPRETED else {"cuda"}),
        graphs=True,
    )

    @override
    def route(self, routing: MoERouting) -> VirtualRoute:
        mapping = routing.topk_ids if routing.expert_map is None else routing.expert_map
        pairs = routing.topk_ids.numel()
        tile = tiles.ROUTE.pick(
            family(self.device),
            pairs=pairs,
            spread=pairs // (routing.num_slots * routing.num_experts),
        )
        block_m = tile["BM"]
        if routing.slots is None or pairs == 0 or not tile["GROUPED"]:
            slots = routing.topk_ids if routing.slots is None else routing.slots
            return VirtualRoute(
                routing=routing,
                grouped=False,
                block_m=block_m,
                num_tiles=pairs,
                order=routing.topk_ids,
                tiles=slots,
                count=mapping,
            )
        order, table, count = launch_route(routing, block_m)
        return VirtualRoute(
            routing=routing,
            grouped=True,
            block_m=block_m,
            num_tiles=max_tiles(routing, block_m),
            order=order,
            tiles=table,
            count=count,
        )

    @override
    def gate_up(
        self,
        x: Tensor,
        weights: MoELoRAWeights,
        route: VirtualRoute,
        out: Tensor,
        *,
        accumulate: bool = True,
    ) -> Tensor:
        self._require_fit("gate_up", x, weights, route.routing, out)
        if route.routing.inert:
            return out if accumulate else out.zero_()
        return self._apply(x, weights, route, out, routed_weights=False, accumulate=accumulate)

    @override
    def down(
        self,
        x: Tensor,
        weights: MoELoRAWeights,
        route: VirtualRoute,
        out: Tensor,
        *,
        routed_weights: bool = False,
        accumulate: bool = True,
    ) -> Tensor:
        self._require_fit("down", x, weights, route.routing, out)
        if route.routing.inert:
            return out if accumulate else out.zero_()
        if out.dim() == 3:
            return self._apply(
                x, weights, route, out, routed_weights=routed_weights, accumulate=accumulate
            )
        per_pair = torch.empty(
            *route.routing.topk_ids.shape, out.shape[1], dtype=x.dtype, device=x.device
        )
        self._apply(x, weights, route, per_pair, routed_weights=True, accumulate=False)
        self._reduce(per_pair, weights, route.routing, out, accumulate=accumulate)
        return out

    def _apply(
        self,
        x: Tensor,
        weights: MoELoRAWeights,
        route: VirtualRoute,
        out: Tensor,
        *,
        routed_weights: bool,
        accumulate: bool,
    ) -> Tensor:
        h = self._shrink(x, weights, route)
        self._expand(h, weights, route, out, routed_weights=routed_weights, accumulate=accumulate)
        return out

    def _shrink(self, x: Tensor, weights: MoELoRAWeights, route: VirtualRoute) -> Tensor:
        """H of every place, float32 `[splits, P, slices * R]`."""
        a, pairs = weights.a, route.routing.topk_ids.numel()
        columns = weights.layout.num_slices * weights.max_rank
        tile = tiles.SHRINK.pick(
            family(self.device), pairs=pairs, inputs=weights.in_features, columns=columns
        )
        splits, block_c = tile["SPLITS"], min(tile["BC"], max(16, triton.next_power_of_2(columns)))
        h = torch.empty(splits, pairs, columns, dtype=torch.float32, device=x.device)
        bound(
            shrink,
            PAIRS=x.dim() == 3,
            SPLITS=splits,
            BM=route.block_m,
            BC=block_c,
            BK=tile["BK"],
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **self._kinds(weights, route),
        )(
            (route.num_tiles, splits, triton.cdiv(columns, block_c)),
            *(x, a, weights.ranks, h, route.order, route.tiles, route.count),
            *(pairs, weights.in_features, *_sizes(route.routing)),
            *(x.stride(-2), a.stride(0), 0 if weights.shared_a else a.stride(1)),
            *(a.stride(2), a.stride(3)),
        )
        return h

    def _expand(
        self,
        h: Tensor,
        weights: MoELoRAWeights,
        route: VirtualRoute,
        out: Tensor,
        *,
        routed_weights: bool,
        accumulate: bool,
    ) -> None:
        b, slices = weights.b, weights.layout.num_slices
        splits, pairs, columns = h.shape
        width = weights.layout.widths[0]
        tile = tiles.EXPAND.pick(family(self.device), pairs=pairs, outputs=width, columns=columns)
        block_m = min(tile["BM"], route.block_m)
        parts = route.block_m // block_m
        loops = min(tile["LOOPS"], triton.cdiv(width, tile["BN"]))
        bound(
            expand,
            ROUTED=routed_weights,
            ACCUMULATE=accumulate,
            SPLITS=splits,
            BM=block_m,
            PARTS=parts,
            BN=tile["BN"],
            LOOPS=loops,
            BR=max(16, triton.next_power_of_2(weights.max_rank)),
            VEC=vector_of(weights.max_rank),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **self._kinds(weights, route),
        )(
            (route.num_tiles * parts, triton.cdiv(width, tile["BN"] * loops), slices),
            *(h, b, weights.ranks, weights.scalings, route.routing.topk_weights, out),
            *(route.order, route.tiles, route.count, pairs, width, *_sizes(route.routing)),
            *(b.stride(0), 0 if weights.shared_b else b.stride(1), b.stride(2)),
        )

    def _kinds(self, weights: MoELoRAWeights, route: VirtualRoute) -> dict[str, object]:
        """The constants that both kernels have."""
        pdl = dependent_launch(self.device)
        return {
            "TOP_K": route.routing.top_k,
            "HAS_MAP": route.routing.expert_map is not None,
            "GROUPED": route.grouped,
            "SLICES": weights.layout.num_slices,
            "R": weights.max_rank,
            "PDL": pdl,
            "launch_pdl": pdl,
        }

    def _reduce(
        self,
        per_pair: Tensor,
        weights: MoELoRAWeights,
        routing: MoERouting,
        out: Tensor,
        *,
        accumulate: bool,
    ) -> None:
        mapping, slots = routing.expert_map, routing.slots
        assert slots is not None
        block_n = 512
        bound(
            reduce_pairs,
            TOP_K=routing.top_k,
            HAS_MAP=mapping is not None,
            ACCUMULATE=accumulate,
            BN=block_n,
            num_warps=4,
        )(
            (routing.num_tokens, triton.cdiv(out.shape[1], block_n), 1),
            *(per_pair, weights.ranks, out, routing.topk_ids, slots),
            routing.topk_ids if mapping is None else mapping,
            *(out.shape[1], *_sizes(routing)),
        )


def _sizes(routing: MoERouting) -> tuple[int, int, int]:
    """Entries of the expert map, slots, experts."""
    mapped = 0 if routing.expert_map is None else routing.expert_map.shape[0]
    return mapped, routing.num_slots, routing.num_experts


def vector_of(rank: int) -> int:
    """Elements of B that one load may take: the largest power of two, up to 8, that divides R."""
    return min(8, rank & -rank)
