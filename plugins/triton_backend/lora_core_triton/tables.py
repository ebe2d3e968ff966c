"""Tile tables of this backend's kernels: data, each row with its reason.

Shape names: `rows` of x rounded up to a power of two, `slices` of the site, `columns` of its output,
`bytes` per element.

Times are microseconds by `benchmarks/tune.py` on one H200 (torch 2.11, Triton 3.6), on top of the base
product or alone, as each says; compare within one run only. Runs 1 and 2 timed earlier forms of both
kernels, run 3 expand and the sizes of shrink, run 4 the kernels as they are. In both every tile of
these tables gave the same bits, tiles of 64 rows included.
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
            "run 4, beside the base: down r16 T=8 5.9, 6.4 with 3 stages; r64 T=32 12.6, 12.9, and 14.1 with 2; "
            "o r64 T=32 7.6, 7.8, 8.4 (16 columns, run 1's form: 11.1); gate_up T=32 7.7, 8.1, 8.2",
            where={"rows": (1, 512)},
        ),
        Rule(
            Tile({"BM": 16, "BC": 64, "BK": 128, "GROUP": 0}, num_warps=4, num_stages=5),
            "run 4, alone, r16, T=2048: down 32, 37 with 4 stages; gate_up 15.1, 15.7; o 11.0, 12.3; in "
            "groups of 4 splits 34, 14.9, 10.6",
            where={"rows": (513, 2048)},
        ),
        Rule(
            Tile({"BM": 64, "BC": 128, "BK": 128, "GROUP": 0}, num_warps=8, num_stages=4),
            "alone, T=8192, run 4: o r16 23, r64 25, down r64 75; with 3 stages and 4 warps 27, 30, 90. Two "
            "slices and more were timed with 3 stages (gate_up r64 55, r128 97, r16 35) and, r16, with 64 "
            "columns in 4 stages (28); run 3, 32 rows: gate_up r64 80, down r64 106",
            family="sm90",
            where={"rows": (4097, 1 << 62)},
        ),
        Rule(
            Tile({"BM": 32, "BC": 64, "BK": 128, "GROUP": 0}, num_warps=8, num_stages=4),
            "run 4, alone, r16, T=4096: qkv of 8 shards 38.0, 42.5 with 4 warps and 3 stages, 44.6 with 128 "
            "columns; run 3: 42.6 with 64 rows",
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
            "run 4, after the base alone: down T=8 2.4, 3.3 without overtaking; o T=32 r16 2.4, 3.2, r64 3.7, "
            "4.5; on wider outputs it loses (qkv T=8 3.9, 3.3; gate_up T=8 9.1, 7.8)",
            family="sm90",
            where={"rows": (1, 256), "columns": (1, 4096)},
        ),
        Rule(
            Tile({"BM": 16, "BN": 128, "BR": 64, "PANEL": 4, "OVERTAKES": 0}, 4, 3),
            "run 4, gate_up r16: T=8 6.6, 7.8 without panels; T=32 6.7, 7.6; T=128 7.3, 8.0, of 128 adapters 63, "
            "63; but r64 of 32 adapters 38.5, 35.9",
            where={"rows": (2, 512), "columns": (16384, 1 << 62)},
        ),
        Rule(
            Tile({"BM": 16, "BN": 128, "BR": 64, "PANEL": 1, "OVERTAKES": 0}, 4, 3),
            "run 4: qkv T=1 2.9, 4.6 in panels of 4; T=8 3.3, 4.7; gate_up of 8192 inputs T=1 1.9, 3.2; run 3: "
            "gate_up T=32 7.8, and 9.1 with 16 ranks at most",
            where={"rows": (1, 512)},
        ),
        Rule(
            Tile({"BM": 64, "BN": 64, "BR": 64, "PANEL": 1, "OVERTAKES": 0}, 4, 3),
            "run 4, r16: qkv of 8 shards T=4096 8.9, 9.3 with 128 columns; run 3: 14.7 in panels of 4, which "
            "are wider than its slices",
            family="sm90",
            where={"columns": (1, 2048)},
        ),
        Rule(
            Tile({"BM": 64, "BN": 64, "BR": 128, "PANEL": 2, "OVERTAKES": 0}, 4, 3),
            "run 4, T=8192 r128: gate_up 460, qkv 94; with 128 columns and no panels 472, 97; run 3: with 32 "
            "rows 585, 117",
            family="sm90",
            where={"ranks": (65, 1 << 62)},
        ),
        Rule(
            Tile({"BM": 64, "BN": 128, "BR": 64, "PANEL": 4, "OVERTAKES": 0}, 8, 3),
            "run 3, T=8192: gate_up r64 299, r16 263, o r64 45; without panels 338, 285, 50; with 32 rows "
            "421, 313, 60; 256 columns at once 479, 395, 67. Run 4: half the columns and warps are as good, "
            "panels of 8 within 5 %",
            family="sm90",
        ),
        Rule(
            Tile({"BM": 32, "BN": 128, "BR": 64, "PANEL": 1, "OVERTAKES": 0}, 4, 3),
            "other tensor cores: the bits of 64 rows, another instruction, were compared on sm90 alone",
        ),
    ],
)
