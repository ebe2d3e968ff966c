"""VirtualExpertsBackend: pairs grouped by (slot, expert), each group one small product."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
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
from lora_core_moe_virtual_experts.kernels.expand_pair import expand_pair
from lora_core_moe_virtual_experts.kernels.reduce import reduce_pairs
from lora_core_moe_virtual_experts.kernels.route import launch_route, launch_row_route
from lora_core_moe_virtual_experts.kernels.shrink import shrink
from lora_core_moe_virtual_experts.kernels.slots import row_slots

_ROWS, _REQUESTS = 32, 128  # of one program of row_slots


@dataclass(frozen=True, eq=False, kw_only=True)
class Tiles:
    """Pairs, or rows, cut into tiles that share a key; see `load_tile`.

    Attributes:
        grouped: whether they were sorted. If not, each is a tile of its own, and the tensors below
            are the routing's own ids, slots and expert map.
        block_m: BM, most entries of a tile.
        num_tiles: how many tiles the grids cover, empty ones included.
        order: int32 `[P]`, entries by place.
        table: int32 `[num_tiles, 4]`, key, first place and entries of each tile.
        mapping: the expert map, or anything where there is none.
    """

    grouped: bool
    block_m: int
    num_tiles: int
    order: Tensor
    table: Tensor
    mapping: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class VirtualRoute(MoERoute):
    """The pairs of a forward by virtual expert.

    Attributes:
        pairs: their tiles.
    """

    pairs: Tiles

    @cached_property
    def rows(self) -> Tiles:
        """The rows by slot, for an A that all experts share; made by the first op that needs them."""
        slots, num_slots = self.routing.slots, self.routing.num_slots
        assert slots is not None
        rows = slots.shape[0]
        tile = tiles.ROWS.pick(family(slots.device), rows=rows)
        if not tile["GROUPED"]:
            return Tiles(
                grouped=False,
                block_m=tile["BM"],
                num_tiles=rows,
                order=slots,
                table=slots,
                mapping=slots,
            )
        block_m = min(tile["BM"], self.pairs.block_m)  # the same bits as pair by pair
        order, table = launch_row_route(slots, num_slots, block_m)
        return Tiles(
            grouped=True,
            block_m=block_m,
            num_tiles=table.shape[0],
            order=order,
            table=table,
            mapping=slots,
        )


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
        ids = routing.topk_ids
        mapping = ids if routing.expert_map is None else routing.expert_map
        tile = tiles.ROUTE.pick(
            family(self.device),
            pairs=ids.numel(),
            spread=ids.numel() // (routing.num_slots * routing.num_experts),
        )
        grouped = bool(tile["GROUPED"]) and not routing.inert
        order, table = ids, ids if routing.slots is None else routing.slots
        if grouped:
            order, table = launch_route(routing, tile["BM"])
        pairs = Tiles(
            grouped=grouped,
            block_m=tile["BM"],
            num_tiles=table.shape[0] if grouped else ids.numel(),
            order=order,
            table=table,
            mapping=mapping,
        )
        return VirtualRoute(routing=routing, pairs=pairs)

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
        self._expand(
            h, weights, route, out, routed_weights=routed_weights, accumulate=accumulate,
            by_row=_by_row(x, weights),
        )  # fmt: skip
        return out

    def _shrink(self, x: Tensor, weights: MoELoRAWeights, route: VirtualRoute) -> Tensor:
        """H, float32 `[splits, P, slices * R]`, of every place; `[splits, T, ...]` where rows share A."""
        a, routing, by_row = weights.a, route.routing, _by_row(x, weights)
        found = route.rows if by_row else route.pairs
        plan = _plan_shrink(
            tiles.SHRINK, family(self.device), _kinds(weights, routing, found.grouped, by_row=by_row),
            x.dim() == 3, routing.topk_ids.numel(), weights.in_features, found.num_tiles, found.block_m,
            routing.num_tokens if by_row else routing.topk_ids.numel(),
        )  # fmt: skip
        h = torch.empty(plan.h_shape, dtype=torch.float32, device=x.device)
        sizes = (0, routing.num_slots, 1) if by_row else _sizes(routing)
        plan.launch(
            plan.grid,
            *(x, a, weights.ranks, h, found.order, found.table, found.mapping),
            *(plan.h_shape[1], weights.in_features, *sizes),
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
        by_row: bool,
    ) -> None:
        b, width, found = weights.b, weights.layout.widths[0], route.pairs
        kinds = _kinds(weights, route.routing, found.grouped)
        forms = (by_row, routed_weights, accumulate)
        sizes = (h.shape[0], route.routing.topk_ids.numel(), width)
        gpu = family(self.device)
        plan = (
            _plan_expand(tiles.EXPAND, gpu, kinds, forms, sizes, found.num_tiles, found.block_m)
            if found.grouped
            else _plan_expand_pair(tiles.EXPAND_PAIR, gpu, kinds, forms, sizes)
        )
        plan.launch(
            plan.grid,
            *(h, b, weights.ranks, weights.scalings, route.routing.topk_weights, out),
            *(found.order, found.table, found.mapping, h.shape[1], width, *_sizes(route.routing)),
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


def _by_row(x: Tensor, weights: MoELoRAWeights) -> bool:
    """Whether h is the same for all experts of a row, and made once for them."""
    return weights.shared_a and x.dim() == 2


def _kinds(
    weights: MoELoRAWeights, routing: MoERouting, grouped: bool, *, by_row: bool = False
) -> _Kinds:
    return _Kinds(
        0 if by_row else routing.top_k,
        routing.expert_map is not None and not by_row,
        grouped,
        weights.layout.num_slices,
        weights.max_rank,
    )


class _Plan(NamedTuple):
    """A launch of one shape, worked out once; and the shape of h, for shrink."""

    launch: Launch
    grid: tuple[int, int, int]
    h_shape: tuple[int, int, int] = (0, 0, 0)


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
    entries: int,
) -> _Plan:
    columns = kinds.slices * kinds.rank
    tile = table.pick(gpu, pairs=pairs, inputs=inputs, columns=columns)
    most = 16 if kinds.top_k == 0 else tile["BC"]  # there are few rows: more, smaller programs
    splits, block_c = tile["SPLITS"], min(most, max(16, triton.next_power_of_2(columns)))
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
    return _Plan(launch, grid, (splits, entries, columns))


_Forms = tuple[bool, bool, bool]
"""Whether h is by row, routing weights are multiplied in, and out is added to."""


@lru_cache(maxsize=4096)
def _plan_expand(
    table: TileTable,
    gpu: str,
    kinds: _Kinds,
    forms: _Forms,
    sizes: tuple[int, int, int],
    num_tiles: int,
    most: int,
) -> _Plan:
    splits, pairs, width = sizes
    tile = table.pick(gpu, pairs=pairs, outputs=width, columns=kinds.slices * kinds.rank)
    block_m = min(tile["BM"], most)
    parts = most // block_m
    loops = min(tile["LOOPS"], triton.cdiv(width, tile["BN"]))
    launch = bound(
        expand,
        SPLITS=splits,
        BM=block_m,
        PARTS=parts,
        BN=tile["BN"],
        LOOPS=loops,
        AHEAD=tile["AHEAD"],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **_expand_constants(gpu, kinds, forms),
        GROUPED=True,
    )
    grid = (num_tiles * parts, triton.cdiv(width, tile["BN"] * loops), kinds.slices)
    return _Plan(launch, grid)


@lru_cache(maxsize=4096)
def _plan_expand_pair(
    table: TileTable, gpu: str, kinds: _Kinds, forms: _Forms, sizes: tuple[int, int, int]
) -> _Plan:
    splits, pairs, width = sizes
    tile = table.pick(gpu, pairs=pairs, outputs=width)
    block_r = rank_block(kinds.rank)
    block_n = max(16, tile["BN"] * 16 // block_r)  # as many registers at any rank
    launch = bound(
        expand_pair,
        SPLITS=splits,
        BN=block_n,
        num_warps=tile.num_warps,
        **_expand_constants(gpu, kinds, forms),
    )
    return _Plan(launch, (pairs, triton.cdiv(width, block_n), kinds.slices))


def _expand_constants(gpu: str, kinds: _Kinds, forms: _Forms) -> dict[str, object]:
    """What both forms of expand have."""
    by_row, routed, accumulate = forms
    constants = kinds.constants(gpu)
    del constants["GROUPED"]
    return {
        **constants,
        "BY_ROW": by_row,
        "ROUTED": routed,
        "ACCUMULATE": accumulate,
        "BR": rank_block(kinds.rank),
        "VEC": vector_of(kinds.rank),
    }


def rank_block(rank: int) -> int:
    """BR, the block that holds all ranks."""
    return max(16, int(triton.next_power_of_2(rank)))


def _sizes(routing: MoERouting) -> tuple[int, int, int]:
    """Entries of the expert map, slots, experts."""
    mapped = 0 if routing.expert_map is None else routing.expert_map.shape[0]
    return mapped, routing.num_slots, routing.num_experts


def vector_of(rank: int) -> int:
    """Elements of B that one load may take: the largest power of two, up to 8, that divides R."""
    return min(8, rank & -rank)
