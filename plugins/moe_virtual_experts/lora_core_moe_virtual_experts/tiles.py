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
            "hardly a pair shares its virtual expert: sorting costs 5 us and saves none",
            where={"pairs": (0, 64)},
        ),
        Rule(
            Tile({"GROUPED": 0, "BM": 16}),
            "Qwen T=32, 8 adapters: 33 us, sorted 42; DeepSeek (spread 1) the other way, 86 and 81",
            where={"pairs": (0, 256), "spread": (0, 0)},
        ),
        Rule(
            Tile({"GROUPED": 1, "BM": 16}),
            "Qwen T=512: shrink and expand 121 us, at 32 127; DeepSeek 141, at 32 147",
            where={"pairs": (0, 8192)},
        ),
        Rule(
            Tile({"GROUPED": 1, "BM": 16}),
            "few pairs share a virtual expert",
            where={"spread": (0, 7)},
        ),
        Rule(
            Tile({"GROUPED": 1, "BM": 32}),
            "Qwen T=2048: shrink of gate_up 39.5 us, at 16 43.7, at 64 42",
            where={"spread": (0, 47)},
        ),
        Rule(
            Tile({"GROUPED": 1, "BM": 64}),
            "weights are read once per 64 pairs: DeepSeek T=2048 shrink 49 us, at 32 66, at 16 88",
        ),
    ),
)

ROWS = TileTable(
    "virtual experts rows",
    ("rows",),
    (
        Rule(
            Tile({"GROUPED": 0, "BM": 16}),
            "A of a slot stays in the cache: reading it once per row costs less than sorting rows",
            where={"rows": (0, 256)},
        ),
        Rule(Tile({"GROUPED": 1, "BM": 64}), "as pairs are grouped when many share a key"),
    ),
)

SHRINK = TileTable(
    "virtual experts shrink",
    ("pairs", "inputs", "columns"),
    (
        Rule(
            Tile({"BC": 64, "BK": 128, "SPLITS": 8}, num_warps=4, num_stages=4),
            "8 pairs must fill 132 processors: 2.5 us, with 4 splits 3.4, with 2 5.1",
            where={"pairs": (0, 16)},
        ),
        Rule(
            Tile({"BC": 64, "BK": 128, "SPLITS": 4}, num_warps=4, num_stages=5),
            "DeepSeek T=8: 10.1 us, with 2 warps 10.9",
            where={"pairs": (0, 128), "inputs": (4096, MANY)},
        ),
        Rule(
            Tile({"BC": 64, "BK": 128, "SPLITS": 4}, num_warps=2, num_stages=4),
            "Qwen T=8: 5.1 and 2.8 us, with one split 10.9 and 4.8",
            where={"pairs": (0, 128)},
        ),
        Rule(
            Tile({"BC": 64, "BK": 256, "SPLITS": 2}, num_warps=2, num_stages=3),
            "DeepSeek T=32, caches cold: 30.3 us, blocks of 128 with 4 warps 31.3",
            where={"pairs": (0, 512), "inputs": (4096, MANY)},
        ),
        Rule(
            Tile({"BC": 64, "BK": 128, "SPLITS": 1}, num_warps=2, num_stages=4),
            "Qwen T=32: 11.6 and 4.5 us; few bytes to h count",
            where={"pairs": (0, 512)},
        ),
        Rule(
            Tile({"BC": 64, "BK": 256, "SPLITS": 1}, num_warps=4, num_stages=3),
            "DeepSeek T=128, rank 32: 58.1 us, blocks of 128 in two splits 65.0",
            where={"pairs": (0, 1024), "inputs": (4096, MANY), "columns": (33, MANY)},
        ),
        Rule(
            Tile({"BC": 64, "BK": 256, "SPLITS": 2}, num_warps=2, num_stages=3),
            "DeepSeek T=128: 31.3 us, blocks of 128 36.6",
            where={"pairs": (0, 1024), "inputs": (4096, MANY)},
        ),
        Rule(
            Tile({"BC": 64, "BK": 128, "SPLITS": 2}, num_warps=2, num_stages=4),
            "T=128: Qwen 24.5 and 7.9 us, DeepSeek down 7.6",
            where={"pairs": (0, 1024)},
        ),
        Rule(
            Tile({"BC": 64, "BK": 256, "SPLITS": 1}, num_warps=2, num_stages=3),
            "T=512, caches cold: Qwen 44.2 and 14.0 us, blocks of 128 46.0 and 15.3; DeepSeek 41.0 and 14.7",
            where={"pairs": (0, 8192)},
        ),
        Rule(
            Tile({"BC": 64, "BK": 128, "SPLITS": 1}, num_warps=4, num_stages=3),
            "DeepSeek T=8192: 158 and 73 us",
            where={"inputs": (4096, MANY)},
        ),
        Rule(
            Tile({"BC": 64, "BK": 64, "SPLITS": 1}, num_warps=4, num_stages=3),
            "Qwen T=8192: 59 and 36 us, T=2048 39 and 17",
        ),
    ),
)

EXPAND_PAIR = TileTable(
    "virtual experts expand, one pair a program",
    ("pairs", "outputs"),
    (
        Rule(
            Tile({"BN": 128}, num_warps=2),
            "8 pairs must fill 132 processors",
            where={"pairs": (0, 16)},
        ),
        Rule(
            Tile({"BN": 256}, num_warps=2),
            "blocks that divide narrow slices",
            where={"outputs": (0, 1024)},
        ),
        Rule(Tile({"BN": 512}, num_warps=4), "16 KB of B on their way in every program"),
    ),
)

EXPAND = TileTable(
    "virtual experts expand",
    ("pairs", "outputs", "columns"),
    (
        Rule(
            Tile({"BM": 16, "BN": 128, "LOOPS": 8, "AHEAD": 2}, num_warps=4, num_stages=2),
            "with shrink, T=128: Qwen 39.9 and 25.9 us, DeepSeek 49.7 and 37.9; 2 blocks, one ahead, 40.7 "
            "to 49.7; in a loop that is not unrolled 58.8 and 47.3 (cold, of 57.4 and 41.3)",
            where={"pairs": (0, 2048)},
        ),
        Rule(
            Tile({"BM": 16, "BN": 128, "LOOPS": 8, "AHEAD": 1}, num_warps=4, num_stages=2),
            "with shrink, Qwen T=2048: 83 and 71 us, parts of 32 85 and 74",
            where={"pairs": (0, 32768)},
        ),
        Rule(
            Tile({"BM": 32, "BN": 128, "LOOPS": 8, "AHEAD": 1}, num_warps=4, num_stages=2),
            "with shrink, Qwen T=8192: 195 and 217 us, parts of 64 245 and 284",
        ),
    ),
)

PRODUCT = TileTable(
    "experts product",
    ("spread", "packed"),
    (
        Rule(
            Tile({"BM": 16, "BN": 64, "BK": 32}, num_warps=4, num_stages=3),
            "unpacking takes registers: blocks of 64 x 64 spill",
            where={"spread": (0, 15), "packed": (1, 1)},
        ),
        Rule(
            Tile({"BM": 64, "BN": 64, "BK": 32}, num_warps=4, num_stages=3),
            "unpacked once per 64 pairs",
            where={"packed": (1, 1)},
        ),
        Rule(
            Tile({"BM": 16, "BN": 64, "BK": 128}, num_warps=4, num_stages=4),
            "few pairs an expert: its weights are what is read, once",
            where={"spread": (0, 15)},
        ),
        Rule(
            Tile({"BM": 64, "BN": 128, "BK": 64}, num_warps=4, num_stages=4),
            "a tile that most groups fill",
            where={"spread": (0, 127)},
        ),
        Rule(
            Tile({"BM": 128, "BN": 128, "BK": 64}, num_warps=8, num_stages=4),
            "large groups: as many products per load as registers hold",
        ),
    ),
)
