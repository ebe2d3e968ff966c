"""Tile choices as data: forms, block sizes and splits by shape, with the reason of each row.

Shapes: `pairs` P; `spread` P / (slots * experts), pairs per virtual expert if all were used;
`inputs` K; `columns` slices * R of h; `outputs` N.
"""

from __future__ import annotations

from lora_core.triton_kit import Rule, Tile, TileTable

MANY = 1 << 40

ROUTE = TileTable(
    "virtual experts route",
    ("pairs", "spread"),
    (
        Rule(
            Tile({"GROUPED": 0, "BM": 16}),
            "hardly a pair shares its virtual expert",
            where={"pairs": (0, 64)},
        ),
        Rule(Tile({"GROUPED": 1, "BM": 16}), "groups of a few pairs", where={"spread": (0, 15)}),
        Rule(Tile({"GROUPED": 1, "BM": 32}), "groups of about 16 to 32", where={"spread": (0, 31)}),
        Rule(Tile({"GROUPED": 1, "BM": 64}), "large groups: weights are read once per 64 pairs"),
    ),
)

SHRINK = TileTable(
    "virtual experts shrink",
    ("pairs", "inputs", "columns"),
    (
        Rule(
            Tile({"BC": 64, "BK": 128, "SPLITS": 16}, num_warps=4, num_stages=3),
            "8 pairs must fill 132 processors",
            where={"pairs": (0, 16), "inputs": (2048, MANY)},
        ),
        Rule(
            Tile({"BC": 64, "BK": 128, "SPLITS": 6}, num_warps=4, num_stages=3),
            "as above, a shorter K",
            where={"pairs": (0, 16)},
        ),
        Rule(
            Tile({"BC": 64, "BK": 128, "SPLITS": 4}, num_warps=4, num_stages=4),
            "some 64 pairs",
            where={"pairs": (0, 128)},
        ),
        Rule(
            Tile({"BC": 64, "BK": 128, "SPLITS": 2}, num_warps=4, num_stages=4),
            "some 256 tiles",
            where={"pairs": (0, 512)},
        ),
        Rule(Tile({"BC": 64, "BK": 128, "SPLITS": 1}, num_warps=4, num_stages=4), "tiles enough"),
    ),
)

EXPAND = TileTable(
    "virtual experts expand",
    ("pairs", "outputs", "columns"),
    (
        Rule(
            Tile({"BM": 16, "BN": 64, "LOOPS": 1}, num_warps=2),
            "8 pairs: more programs",
            where={"pairs": (0, 16)},
        ),
        Rule(
            Tile({"BM": 16, "BN": 256, "LOOPS": 1}, num_warps=4),
            "one wave",
            where={"pairs": (0, 1024)},
        ),
        Rule(Tile({"BM": 32, "BN": 128, "LOOPS": 4}, num_warps=4), "tiles enough: read ahead"),
    ),
)
