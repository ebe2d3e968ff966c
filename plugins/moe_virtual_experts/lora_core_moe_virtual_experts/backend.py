"""VirtualExpertsBackend: pairs grouped by (slot, expert), each group one small product."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
import triton
from torch import Tensor
from typing_extensions import override

from lora_core.batch import BatchInfo
from lora_core.moe import MoECapabilities, MoELoRABackend, MoELoRAWeights, MoERoute, MoERouting
from lora_core.triton_kit import INTERPRETED, Launch, TileTable, family
from lora_core_moe_virtual_experts import tiles
from lora_core_moe_virtual_experts.kernels.bound import DEPENDENT_LAUNCH, bound
from lora_core_moe_virtual_experts.kernels.expand import expand
from lora_core_moe_virtual_experts.kernels.reduce import reduce_pairs
from lora_core_moe_virtual_experts.kernels.route import launch_route, max_tiles
from lora_core_moe_virtual_experts.kernels.shrink import shrink
from lora_core_moe_virtual_experts.kernels.slots import row_slots

_ROWS, _REQUESTS = 32, 128  # of one program of row_slots


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
    def row_slots(self, info: BatchInfo | None, rows: int) -> Tensor | None:
        if info is None or (info.graph is None and not info.has_active_lora):
            return None
        seg_indptr, slots = info.request_table()
        out = torch.empty(rows, dtype=torch.int32, device=slots.device)
        if rows:
            launch = bound(row_slots, BT=_ROWS, BQ=_REQUESTS, num_warps=4)
            grid = (triton.cdiv(rows, _ROWS), 1, 1)
            launch(grid, seg_indptr, slots, out, slots.shape[0], rows)
        return out

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
        a, routing = weights.a, route.routing
        plan = _plan_shrink(
            tiles.SHRINK, family(self.device), _kinds(weights, route), x.dim() == 3,
            routing.topk_ids.numel(), weights.in_features, route.num_tiles, route.block_m,
        )  # fmt: skip
        h = torch.empty(plan.h_shape, dtype=torch.float32, device=x.device)
        plan.launch(
            plan.grid,
            *(x, a, weights.ranks, h, route.order, route.tiles, route.count),
            *(plan.h_shape[1], weights.in_features, *_sizes(routing)),
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
        b, width = weights.b, weights.layout.widths[0]
        plan = _plan_expand(
            tiles.EXPAND, family(self.device), _kinds(weights, route), routed_weights, accumulate,
            tuple(h.shape), width, route.num_tiles, route.block_m,
        )  # fmt: skip
        plan.launch(
            plan.grid,
            *(h, b, weights.ranks, weights.scalings, route.routing.topk_weights, out),
            *(route.order, route.tiles, route.count, h.shape[1], width, *_sizes(route.routing)),
            *(b.stride(0), 0 if weights.shared_b else b.stride(1), b.stride(2)),
        )

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


class _Kinds(NamedTuple):
    """The constants that both kernels have."""

    top_k: int
    has_map: bool
    grouped: bool
    slices: int
    rank: int

    def constants(self, gpu: str) -> dict[str, object]:
        """As the kernels name them."""
        pdl = gpu in DEPENDENT_LAUNCH
        return {
            "TOP_K": self.top_k,
            "HAS_MAP": self.has_map,
            "GROUPED": self.grouped,
            "SLICES": self.slices,
            "R": self.rank,
            "PDL": pdl,
            "launch_pdl": pdl,
        }


def _kinds(weights: MoELoRAWeights, route: VirtualRoute) -> _Kinds:
    routing = route.routing
    return _Kinds(
        routing.top_k,
        routing.expert_map is not None,
        route.grouped,
        weights.layout.num_slices,
        weights.max_rank,
    )


class _Plan(NamedTuple):
    """A launch of one shape, worked out once."""

    launch: Launch
    grid: tuple[int, int, int]
    h_shape: tuple[int, int, int]


@lru_cache(maxsize=4096)
def _plan_shrink(
    table: TileTable,
    gpu: str,
    kinds: _Kinds,
    per_pair: bool,
    pairs: int,
    inputs: int,
    num_tiles: int,
    block_m: int,
) -> _Plan:
    columns = kinds.slices * kinds.rank
    tile = table.pick(gpu, pairs=pairs, inputs=inputs, columns=columns)
    splits, block_c = tile["SPLITS"], min(tile["BC"], max(16, triton.next_power_of_2(columns)))
    launch = bound(
        shrink,
        PAIRS=per_pair,
        SPLITS=splits,
        BM=block_m,
        BC=block_c,
        BK=tile["BK"],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **kinds.constants(gpu),
    )
    grid = (num_tiles, splits, triton.cdiv(columns, block_c))
    return _Plan(launch, grid, (splits, pairs, columns))


@lru_cache(maxsize=4096)
def _plan_expand(
    table: TileTable,
    gpu: str,
    kinds: _Kinds,
    routed: bool,
    accumulate: bool,
    h_shape: tuple[int, int, int],
    width: int,
    num_tiles: int,
    most: int,
) -> _Plan:
    splits, pairs, columns = h_shape
    tile = table.pick(gpu, pairs=pairs, outputs=width, columns=columns)
    block_m = min(tile["BM"], most)
    parts = most // block_m
    loops = min(tile["LOOPS"], triton.cdiv(width, tile["BN"]))
    launch = bound(
        expand,
        ROUTED=routed,
        ACCUMULATE=accumulate,
        SPLITS=splits,
        BM=block_m,
        PARTS=parts,
        BN=tile["BN"],
        LOOPS=loops,
        BR=max(16, triton.next_power_of_2(kinds.rank)),
        VEC=vector_of(kinds.rank),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **kinds.constants(gpu),
    )
    grid = (num_tiles * parts, triton.cdiv(width, tile["BN"] * loops), kinds.slices)
    return _Plan(launch, grid, h_shape)


def _sizes(routing: MoERouting) -> tuple[int, int, int]:
    """Entries of the expert map, slots, experts."""
    mapped = 0 if routing.expert_map is None else routing.expert_map.shape[0]
    return mapped, routing.num_slots, routing.num_experts


def vector_of(rank: int) -> int:
    """Elements of B that one load may take: the largest power of two, up to 8, that divides R."""
    return min(8, rank & -rank)
