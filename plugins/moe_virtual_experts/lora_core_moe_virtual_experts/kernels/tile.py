"""What a program finds out first: its virtual expert, and the pairs that it works on."""

# Triton reads the parameters of kernels itself, annotations would be noise:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl

from lora_core_moe_virtual_experts.kernels.keys import load_keys


@triton.jit
def load_tile(
    tile,  # which
    part,  # which BM of its pairs
    p_order,  # [P] int32 - pairs by place; the expert ids [P] where not GROUPED
    p_tiles,  # [tiles, 4] int32 - key, first place, pairs; the slots [T] where not GROUPED
    p_map,  # the expert map [G]; read where not GROUPED
    G,
    S,
    E,
    TOP_K: tl.constexpr,
    HAS_MAP: tl.constexpr,
    GROUPED: tl.constexpr,
    BM: tl.constexpr,
):
    """(key, pairs, places [BM], ids of pairs [BM], mask [BM]) of a part of a tile, of 0 pairs or more.

    GROUPED: a tile of a route, several pairs of one virtual expert side by side in `order`. Else
    every pair is a tile of its own, in the order they came, and nothing was sorted.
    """
    lanes = tl.arange(0, BM)
    if GROUPED:
        key = tl.load(p_tiles + tile * 4)
        first = tl.load(p_tiles + tile * 4 + 1) + part * BM
        count = tl.load(p_tiles + tile * 4 + 2) - part * BM
        m_pairs = lanes < count
        places = first + lanes
        pairs = tl.load(p_order + places, mask=m_pairs, other=0)
    else:
        key = load_keys(p_order, p_tiles, p_map, tile, True, G, S, E, TOP_K, HAS_MAP)
        count = 1
        m_pairs = lanes < 1
        places = tile + lanes
        pairs = places
    return key, count, places, pairs, m_pairs
