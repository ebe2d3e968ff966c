"""Tile tables of this backend's kernels: data, each row with its reason.

Shape names: `rows` of x rounded up to a power of two of at least 16, `columns` N, `k` K, `bytes` per
element.
"""

from __future__ import annotations

from lora_core.triton_kit import Rule, Tile, TileTable

RIDES_UP_TO = 64
"""Rows up to which the base product is bound by reading its weight, so that LoRA rides along."""


def band(rows: int) -> int:
    """`rows` rounded up to a power of two, at least 16."""
    return max(16, 1 << max(rows - 1, 0).bit_length())


def _decode(BN: int, BK: int, stages: int, SPLIT: int = 1, warps: int = 4, CHUNK: int = 8) -> Tile:
    constexprs = {
        "BN": BN,
        "BK": BK,
        "SPLIT": SPLIT,
        "BKH": 128,
        "H_SPLIT": 4,
        "CHUNK": CHUNK,
        "AHEAD": 8,
    }
    return Tile(constexprs, num_warps=warps, num_stages=stages)


DECODE = TileTable(
    "decode",
    ["rows", "columns", "k", "bytes"],
    [
        Rule(
            Tile(
                {"BN": 32, "BK": 32, "SPLIT": 2, "BKH": 32, "H_SPLIT": 2, "CHUNK": 2, "AHEAD": 0},
                num_stages=2,
            ),
            "float32 products are not for tensor cores: small tiles keep them in registers",
            where={"bytes": (4, 4)},
        ),
        Rule(
            _decode(BN=32, BK=128, stages=5, SPLIT=4),
            "few columns: K is split to fill the GPU",
            where={"columns": (1, 3072)},
        ),
        Rule(
            _decode(BN=64, BK=128, stages=4),
            "many columns: enough programs as it is",
            where={"columns": (16384, 1 << 30)},
        ),
        Rule(_decode(BN=32, BK=128, stages=5), "one program per multiprocessor"),
    ],
)
