"""The kernels as the tables launch them over a range of shapes, for `python -m lora_core.triton_kit.aot`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import triton

from lora_core.triton_kit import AotCase, Tile
from lora_core_moe_virtual_experts import tiles
from lora_core_moe_virtual_experts.backend import rank_block, vector_of
from lora_core_moe_virtual_experts.kernels.combine import combine_pairs
from lora_core_moe_virtual_experts.kernels.expand import expand
from lora_core_moe_virtual_experts.kernels.expand_pair import expand_pair
from lora_core_moe_virtual_experts.kernels.product import experts_product
from lora_core_moe_virtual_experts.kernels.reduce import reduce_pairs
from lora_core_moe_virtual_experts.kernels.route import (
    compact_tiles,
    count_chunks,
    place_pairs,
    route_few,
    scan_counts,
)
from lora_core_moe_virtual_experts.kernels.shrink import shrink
from lora_core_moe_virtual_experts.kernels.slots import row_slots

_INTS = ("P", "K", "W", "N", "G", "S", "E", "KEYS", "CHUNKS", "BLOCKS", "TILES", "REQUESTS", "ROWS")
_TYPES = {
    "p_x": "*{x}",
    "p_w": "*{x}",
    "p_scales": "*{x}",
    "p_a": "*{x}",
    "p_b": "*{x}",
    "p_out": "*{x}",
    "p_delta": "*{x}",
    "p_h": "*fp32",
    "p_scalings": "*fp32",
    "p_weights": "*fp32",
}
_MODELS = ((2048, 768, 128), (7168, 2048, 32))  # hidden, intermediate, experts of a rank
_TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
_SLOTS, _TOP_K = 8, 8


def cases() -> list[AotCase]:
    """One case per different kernel: decode to prefill in bfloat16, and a few in other forms."""
    return [*_route_cases(), *_product_cases(), *_shared_cases(), *_core_cases()]


def _types(kernel: Any, constants: dict[str, Any], dtype: str) -> dict[str, str]:
    """Run-time parameter -> Triton type: pointers and strides by how they are named."""
    kinds = {}
    for name in kernel.arg_names:
        if name in constants:
            continue
        if name.startswith("p_"):
            kinds[name] = _TYPES.get(name, "*i32").format(x=dtype)
        else:
            kinds[name] = "i64" if name == "s_slot" else "i32"
    return kinds


def _case(
    kernel: Any, label: str, constants: dict[str, Any], dtype: str, tile: Tile | None = None
) -> AotCase:
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages} if tile else {}
    integers = frozenset(
        name for name in kernel.arg_names if name in _INTS and name not in {"K", "W"}
    )
    warps = f" warps{tile.num_warps} stages{tile.num_stages}" if tile else ""
    return AotCase(
        label=f"{kernel.__name__}[{label}{warps}]",
        kernel=kernel,
        types=_types(kernel, constants, dtype),
        constexprs=constants,
        options=options,
        unaligned=integers,
        max_stack=8,  # Triton 3.9 keeps one address there, far below the register limit; 3.6 none
    )


def _route_cases() -> Iterator[AotCase]:
    kinds = {"TOP_K": 8, "HAS_MAP": True}
    yield _case(
        route_few,
        "BM16",
        {**kinds, "BM": 16, "BR": 4, "BC": 2048, "PDL": False},
        "i32",
        Tile({}, num_warps=8),
    )
    yield _case(compact_tiles, "", {"BC": 2048, "PDL": False}, "i32", Tile({}, num_warps=8))
    yield _case(count_chunks, "", {**kinds, "CHUNK": 256, "BR": 16, "PDL": False}, "i32")
    for block in (16, 512):
        scan = {"BM": 64, "BCH": min(256, 8192 // block), "BKEY": block, "PDL": False}
        yield _case(scan_counts, f"keys{block}", scan, "i32", Tile({}, num_warps=8))
        place = {"BM": 64, "BKEY": block, "BB": 128, "CHUNK": 256, "BR": 32, "PDL": False}
        yield _case(place_pairs, f"keys{block}", place, "i32")
    yield _case(row_slots, "", {"BT": 32, "BQ": 128}, "i32")
    yield _case(reduce_pairs, "bf16", {**kinds, "ACCUMULATE": True, "BN": 512}, "bf16")


def _product_cases() -> Iterator[AotCase]:
    seen: set[str] = set()
    shapes = [("bf16", 16, model, tokens) for model in _MODELS for tokens in _TOKENS]
    shapes += [("bf16", rank, _MODELS[0], tokens) for rank in (4, 64) for tokens in (8, 2048)]
    shapes += [("bf16", 32, model, 128) for model in _MODELS]
    shapes += [("fp32", 16, _MODELS[0], tokens) for tokens in (8, 2048)]
    for dtype, rank, (hidden, inner, experts), tokens in shapes:
        pairs = tokens * _TOP_K
        route = tiles.ROUTE.pick("sm90", pairs=pairs, spread=pairs // (_SLOTS * experts))
        for slices, inputs, width in ((2, hidden, inner), (1, inner, hidden)):
            for case in _both(dtype, slices, rank, inputs, width, pairs, route):
                if case.label not in seen:
                    seen.add(case.label)
                    yield case


def _shared_cases() -> Iterator[AotCase]:
    """Where experts share A: shrink over rows, sorted by slot or not, and expand that reads its h."""
    kinds = {"TOP_K": 0, "HAS_MAP": False, "SLICES": 2, "R": 16, "PDL": False, "PAIRS": False}
    for block_m in (16, 64):
        own = {"GROUPED": block_m > 16, "SPLITS": 1, "BM": block_m, "BC": 32, "BK": 128}
        tile = Tile({}, num_warps=4, num_stages=3)
        yield _case(shrink, f"bf16 rows {_short(own)}", {**kinds, **own}, "bf16", tile)
    rest = {"ROUTED": False, "ACCUMULATE": True, "SPLITS": 1, "BM": 16, "PARTS": 2, "BN": 128}
    rest |= {"LOOPS": 8, "AHEAD": 1, "BR": 16, "VEC": 8, "GROUPED": True, "BY_ROW": True}
    constants = {**kinds, **rest, "TOP_K": 8}
    del constants["PAIRS"]
    yield _case(expand, "bf16 rows", constants, "bf16", Tile({}, num_warps=4, num_stages=2))


def _core_cases() -> Iterator[AotCase]:
    """The base product of the cores, plain and packed, and the sum over a row's experts."""
    picked = {
        tiles.PRODUCT.pick("sm90", spread=spread, packed=packed): bool(packed)
        for packed in (0, 1)
        for spread in (1, 64, 512)
    }
    for tile, packed in picked.items():
        own = {"TOP_K": 8, "PAIRS": False, "INT4": packed, "GROUP": 64 if packed else 1}
        own |= {name: tile[name] for name in ("BM", "BN", "BK")}
        case = _case(experts_product, f"bf16 {_short(own)}", own, "bf16", tile)
        if packed:
            case = replace(case, types={**case.types, "p_w": "*u8"})
        yield case
    yield _case(combine_pairs, "bf16", {"TOP_K": 8, "BN": 512}, "bf16")


def _both(
    dtype: str, slices: int, rank: int, inputs: int, width: int, pairs: int, route: Tile
) -> Iterator[AotCase]:
    """Shrink and expand of one projection."""
    columns = slices * rank
    kinds: dict[str, Any] = {
        "TOP_K": _TOP_K,
        "HAS_MAP": False,
        "GROUPED": bool(route["GROUPED"]),
        "SLICES": slices,
        "R": rank,
        "PDL": False,
    }
    label = f"{dtype} {slices}x{rank} {'grouped' if route['GROUPED'] else 'pairs'}"
    tile = tiles.SHRINK.pick("sm90", pairs=pairs, inputs=inputs, columns=columns)
    splits = tile["SPLITS"]
    own = {
        "PAIRS": slices == 1,
        "SPLITS": splits,
        "BM": route["BM"],
        "BC": min(tile["BC"], max(16, triton.next_power_of_2(columns))),
        "BK": tile["BK"],
    }
    yield _case(shrink, f"{label} {_short(own)}", {**kinds, **own}, dtype, tile)
    if not route["GROUPED"]:
        tile = tiles.EXPAND_PAIR.pick("sm90", pairs=pairs, outputs=width)
        own = {
            "BY_ROW": False,
            "ROUTED": slices == 1,
            "ACCUMULATE": True,
            "SPLITS": splits,
            "BN": max(16, tile["BN"] * 16 // rank_block(rank)),
            "BR": rank_block(rank),
            "VEC": vector_of(rank),
        }
        del kinds["GROUPED"]
        yield _case(expand_pair, f"{label} {_short(own)}", {**kinds, **own}, dtype, tile)
        return
    tile = tiles.EXPAND.pick("sm90", pairs=pairs, outputs=width, columns=columns)
    block_m = min(tile["BM"], route["BM"])
    own = {
        "BY_ROW": False,
        "ROUTED": slices == 1,
        "ACCUMULATE": True,
        "SPLITS": splits,
        "BM": block_m,
        "PARTS": route["BM"] // block_m,
        "BN": tile["BN"],
        "LOOPS": min(tile["LOOPS"], triton.cdiv(width, tile["BN"])),
        "AHEAD": tile["AHEAD"],
        "BR": rank_block(rank),
        "VEC": vector_of(rank),
    }
    yield _case(expand, f"{label} {_short(own)}", {**kinds, **own}, dtype, tile)


def _short(constants: dict[str, Any]) -> str:
    return " ".join(f"{name}{int(value)}" for name, value in constants.items())
