"""Tile table of the product with the expand inside: data, each row with its reason.

Shape names: `rows` of x rounded up to a power of two, `columns` of the output, `k` its inputs, `step`: the largest power
of two up to 256 that every slice begins at a multiple of, `bytes` per element.
"""

from __future__ import annotations

from lora_core.triton_kit import INTERPRETED, Rule, Tile, TileTable
from lora_core.weights import SliceLayout

FUSED_FROM = 1 if INTERPRETED else 2048
"""Rows from which the table is asked: below, the product has too few tiles to fill a GPU."""

PLAN_ROWS = 16 if INTERPRETED else 128
"""Rows of a tile of the product; an interpreted product takes long enough with small ones."""


def _tile(BN: int, BK: int, warps: int, *, HALVES: int = 0) -> Tile:
    names = {"BM": PLAN_ROWS, "BN": BN, "BK": BK, "BR": 16, "BAND": 8, "HALVES": HALVES}
    return Tile(names, num_warps=warps, num_stages=3)


TWO_KERNELS = Tile(dict.fromkeys(("BM", "BN", "BK", "BR", "BAND", "HALVES"), 0))
"""The base module's own product, and the triton backend's shrink and expand behind it."""

PRODUCT = TileTable(
    "product",
    ["rows", "columns", "k", "step", "bytes"],
    [
        Rule(TWO_KERNELS, "float32 products are not for tensor cores", where={"bytes": (4, 4)}),
        Rule(
            _tile(BN=16, BK=32, warps=4),
            "the interpreter: small tiles show every seam",
            family="cpu",
            where={"step": (16, 256)},
        ),
        Rule(
            TWO_KERNELS,
            "tiles would cross from one slice into the next; in blocks of 128 columns qkv of 70B at TP 8 takes "
            "103, two kernels 62",
            where={"step": (1, 128)},
        ),
        Rule(
            _tile(BN=256, BK=64, warps=8, HALVES=1),
            "the longest sums: down of 70B -16 (-90 to 58), in one store 179 (100 to 248), two kernels 280",
            family="sm90",
            where={"k": (16384, 1 << 30)},
        ),
        Rule(
            _tile(BN=256, BK=64, warps=8),
            "r16, 8 adapters, shrink included, against two kernels: T=8192 o 53, 79; qkv 81, 114; gate_up 186, "
            "356; down 107, 152; T=2048 o 20, 25; qkv 36, 47; gate_up 64, 97; down 53, 55. Stored in halves o 61, "
            "gate_up 282; in quarters with 4 stages 63, 281; 128 columns and 2 programs on a multiprocessor 63, 227",
            family="sm90",
        ),
        Rule(TWO_KERNELS, "not measured on other GPUs"),
    ],
)


def column_step(layout: SliceLayout) -> int:
    """The widest block of columns, a power of two up to 256, that never crosses into another slice."""
    step = 256
    while any(offset % step for offset in layout.offsets[1:-1]):
        step //= 2
    return step
