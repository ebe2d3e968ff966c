"""Tile tables of this backend's kernels: data, each row with its reason.

Shape names: `rows` of x rounded up to a power of two, `slices` of the site, `columns` of its output,
`bytes` per element.

Times are microseconds by `benchmarks/tune.py` on one H200 (torch 2.11, Triton 3.6), on top of the base
product or alone, as each says; compare within one run only. Runs 1 and 2 timed earlier forms of both
kernels, run 3 the present ones.
"""

from __future__ import annotations

from lora_core.triton_kit import Rule, Tile, TileTable

GATHERED_TILE_ROWS = 16
"""Rows of a gathered tile: the smallest that fills a tensor-core product."""
CONTIGUOUS_TILE_ROWS = 64
"""Rows of a contiguous tile; kernels cut it into programs of BM rows."""
GATHERED_MAX_ROWS = 512
"""Eager batches up to here are gathered: rows of one slot are too few to stand side by side."""


def band(rows: int) -> int:
    """`rows` rounded up to a power of two: the shape name that tables know it by."""
    return 1 << max(rows - 1, 0).bit_length()


OVERLAP_MAX_ROWS = 256
"""In a graph of up to so many rows, shrink runs beside the base product. Run 1, overlapped against in
turn: o T=32 5.4, 8.9; qkv T=128 of 32 adapters 18.8, 20.8; o T=512 19.6, 16.4, so not there."""

SHRINK = TileTable(
    "shrink",
    ["rows", "slices", "bytes"],
    [
        # BC: packed columns at most; adapters of up to 16 ranks a slice take that many.
        # GROUP: splits of one program, 0: all of them, in sequence
        Rule(
            Tile({"BM": 16, "BC": 16, "BK": 64, "GROUP": 1}, num_warps=4, num_stages=3),
            "float32 products are not for tensor cores: small tiles keep them in registers",
            where={"bytes": (4, 4), "rows": (1, 512)},
        ),
        Rule(
            Tile({"BM": 16, "BC": 16, "BK": 64, "GROUP": 0}, num_warps=4, num_stages=3),
            "float32, many rows: one program runs through all splits",
            where={"bytes": (4, 4)},
        ),
        Rule(
            Tile({"BM": 16, "BC": 64, "BK": 128, "GROUP": 1}, num_warps=4, num_stages=4),
            "run 2, beside the base: qkv r16 T=32 5.5, 5.9 with 32 columns, 7.0 with 16; T=128 of 32 "
            "adapters 15.6, 17.3, 20.3; gate_up r64 T=32 of 32 adapters 54.7, 57.0, 68.6",
            where={"rows": (1, 512)},
        ),
        Rule(
            Tile({"BM": 16, "BC": 64, "BK": 128, "GROUP": 0}, num_warps=4, num_stages=4),
            "run 3, alone, r16, T=2048: gate_up 11.7, 16.5 with 32 rows; o 10.8, 13.3",
            where={"rows": (513, 2048)},
        ),
        Rule(
            Tile({"BM": 32, "BC": 128, "BK": 128, "GROUP": 0}, num_warps=8, num_stages=3),
            "run 3, alone, r16, T=4096: qkv of 8 shards 37.9, 42.6 with 64 rows, 39.8 with 16",
            where={"rows": (2049, 4096)},
        ),
        Rule(
            Tile({"BM": 64, "BC": 128, "BK": 128, "GROUP": 0}, num_warps=8, num_stages=3),
            "run 3, alone, T=8192: gate_up r64 60, 80 with 32 rows; o r64 27, 30; down r64 86, 106; qkv r16 32, 38",
        ),
    ],
)

EXPAND = TileTable(
    "expand",
    ["rows", "columns", "ranks", "bytes"],
    [
        # BR: ranks at a time at most; up to 16 ranks take 16.
        # PANEL: blocks of columns of one program, the next on its way while one is multiplied.
        # OVERTAKES: start before the base product has finished, where a caller allows it
        Rule(
            Tile({"BM": 16, "BN": 64, "BR": 16, "PANEL": 1, "OVERTAKES": 0}, 4, 2),
            "float32 products are not for tensor cores: small tiles keep them in registers",
            where={"bytes": (4, 4)},
        ),
        Rule(
            Tile({"BM": 16, "BN": 128, "BR": 64, "PANEL": 1, "OVERTAKES": 1}, 4, 3),
            "run 2, r16, after the base alone: o T=1 1.6, T=32 2.4, down T=32 2.3, and without overtaking "
            "2.8, 3.3, 3.3",
            family="sm90",
            where={"rows": (1, 256), "columns": (1, 4096)},
        ),
        Rule(
            Tile({"BM": 16, "BN": 128, "BR": 64, "PANEL": 1, "OVERTAKES": 0}, 4, 3),
            "run 3: gate_up T=32 7.8, T=128 8.0, of 128 adapters 56.8; with 16 ranks at most 9.1, 9.4, 63.9",
            where={"rows": (1, 512)},
        ),
        Rule(
            Tile({"BM": 64, "BN": 128, "BR": 64, "PANEL": 1, "OVERTAKES": 0}, 8, 3),
            "run 3, r16: qkv of 8 shards T=4096 9.5, 14.7 with panels, which are wider than its slices",
            where={"columns": (1, 2048)},
        ),
        Rule(
            Tile({"BM": 64, "BN": 128, "BR": 128, "PANEL": 1, "OVERTAKES": 0}, 4, 3),
            "run 3, T=8192 r128: gate_up 448, qkv 92; in panels of 2 452, 98, of 4 522, 114",
            where={"ranks": (65, 1 << 20)},
        ),
        Rule(
            Tile({"BM": 64, "BN": 128, "BR": 64, "PANEL": 4, "OVERTAKES": 0}, 8, 3),
            "run 3, T=8192: gate_up r64 299, r16 263, o r64 45; without panels 338, 285, 50; with 32 rows "
            "421, 313, 60; 256 columns at once 479, 395, 67",
        ),
    ],
)
