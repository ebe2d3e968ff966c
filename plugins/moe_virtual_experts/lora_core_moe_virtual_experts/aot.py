"""Every kernel with every tile that the tables hold, for `python -m lora_core.triton_kit.aot`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton

from lora_core.triton_kit import AotCase, Tile
from lora_core_moe_virtual_experts import tiles
from lora_core_moe_virtual_experts.backend import vector_of
from lora_core_moe_virtual_experts.kernels.expand import expand
from lora_core_moe_virtual_experts.kernels.reduce import reduce_pairs
from lora_core_moe_virtual_experts.kernels.route import (
    count_chunks,
    place_pairs,
    route_few,
    scan_counts,
)
from lora_core_moe_virtual_experts.kernels.shrink import shrink

_INTS = ("P", "K", "W", "N", "G", "S", "E", "KEYS", "CHUNKS", "BLOCKS")
_TYPES = {
    "p_x": "*{x}",
    "p_a": "*{x}",
    "p_b": "*{x}",
    "p_out": "*{x}",
    "p_delta": "*{x}",
    "p_h": "*fp32",
    "p_scalings": "*fp32",
    "p_weights": "*fp32",
}
_RANKS = ((2, 16), (1, 64), (2, 4))  # slices and R


def cases() -> list[AotCase]:
    """One case per kernel, tile and dtype, at the ranks most used."""
    return [*_route_cases(), *_product_cases()]


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
    return AotCase(
        label=f"{kernel.__name__}[{label}]",
        kernel=kernel,
        types=_types(kernel, constants, dtype),
        constexprs=constants,
        options=options,
        unaligned=integers,
    )


def _route_cases() -> Iterator[AotCase]:
    kinds = {"TOP_K": 8, "HAS_MAP": True}
    yield _case(route_few, "BM16", {**kinds, "BM": 16, "BR": 4, "BC": 2048}, "i32")
    yield _case(count_chunks, "", {**kinds, "CHUNK": 256, "BR": 32}, "i32")
    for block in (16, 512):
        scan = {"BM": 64, "BCH": min(256, 8192 // block), "BKEY": block, "PDL": False}
        yield _case(scan_counts, f"keys{block}", scan, "i32", Tile({}, num_warps=8))
        place = {"BM": 64, "BKEY": block, "BB": 128, "CHUNK": 256, "BR": 32, "PDL": False}
        yield _case(place_pairs, f"keys{block}", place, "i32")
    yield _case(reduce_pairs, "bf16", {**kinds, "ACCUMULATE": True, "BN": 512}, "bf16")


def _product_cases() -> Iterator[AotCase]:
    for dtype in ("bf16", "fp32"):
        for slices, rank in _RANKS:
            for route in tiles.ROUTE.tiles():
                kinds = {
                    "TOP_K": 8,
                    "HAS_MAP": False,
                    "GROUPED": bool(route["GROUPED"]),
                    "SLICES": slices,
                    "R": rank,
                    "BM": route["BM"],
                    "PDL": False,
                }
                label = f"{dtype} {slices}x{rank} BM{route['BM']} grouped{route['GROUPED']}"
                columns = max(16, triton.next_power_of_2(slices * rank))
                for tile in tiles.SHRINK.tiles():
                    own = {
                        "PAIRS": slices == 1,
                        "SPLITS": tile["SPLITS"],
                        "BC": min(tile["BC"], columns),
                        "BK": tile["BK"],
                    }
                    yield _case(shrink, f"{label} {own}", {**kinds, **own}, dtype, tile)
                for tile in tiles.EXPAND.tiles():
                    own = {
                        "ROUTED": slices == 1,
                        "ACCUMULATE": True,
                        "SPLITS": 2,
                        "BM": min(tile["BM"], route["BM"]),
                        "PARTS": route["BM"] // min(tile["BM"], route["BM"]),
                        "BN": tile["BN"],
                        "LOOPS": tile["LOOPS"],
                        "BR": max(16, triton.next_power_of_2(rank)),
                        "VEC": vector_of(rank),
                    }
                    yield _case(expand, f"{label} {own}", {**kinds, **own}, dtype, tile)
