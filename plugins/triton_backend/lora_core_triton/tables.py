"""Tile tables of this backend's kernels: data, each row with its reason.

Shape names: `rows` of x rounded up to a power of two, `slices` of the site, `columns` of its output,
`bytes` per element.

Times are microseconds on top of the base product, by `benchmarks/tune.py` on one H200 (torch 2.11,
Triton 3.6), in two runs; compare within one run only. Run 1 timed the first form of both kernels
(splits of 256). Run 2 timed expand as it is now, and shrink with its loop over a split unrolled and two
stages; shrink's present loop and stages have not been timed.
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
            Tile({"BM": 16, "BC": 16, "BK": 128, "GROUP": 1}, num_warps=4, num_stages=4),
            "run 2, beside the base, r16, T=32 of 8 adapters: down 8.6, 10.7 with 32 columns, 13.2 with "
            "64; o 5.0, 5.0, 5.2",
            where={"rows": (1, 512), "slices": (1, 1)},
        ),
        Rule(
            Tile({"BM": 16, "BC": 64, "BK": 128, "GROUP": 1}, num_warps=4, num_stages=4),
            "run 2, beside the base: qkv r16 T=32 5.5, 5.9 with 32 columns, 7.0 with 16; T=128 of 32 "
            "adapters 15.6, 17.3, 20.3; gate_up r64 T=32 of 32 adapters 54.7, 57.0, 68.6",
            where={"rows": (1, 512)},
        ),
        Rule(
            Tile({"BM": 32, "BC": 32, "BK": 64, "GROUP": 2}, num_warps=4, num_stages=4),
            "too few tiles of rows to fill the GPU with one program each; not measured",
            where={"rows": (513, 2048), "slices": (1, 2)},
        ),
        Rule(
            Tile({"BM": 32, "BC": 64, "BK": 64, "GROUP": 2}, num_warps=4, num_stages=4),
            "the same, one pass over x for three slices of rank 16; not measured",
            where={"rows": (513, 2048)},
        ),
        Rule(
            Tile({"BM": 32, "BC": 32, "BK": 64, "GROUP": 0}, num_warps=4, num_stages=4),
            "enough rows to fill the GPU; not measured with this loop (run 2: o T=8192 r16 29 with 3 stages)",
            where={"slices": (1, 2)},
        ),
        Rule(
            Tile({"BM": 32, "BC": 64, "BK": 64, "GROUP": 0}, num_warps=4, num_stages=4),
            "the same, one pass over x for three slices of rank 16; not measured",
        ),
    ],
)

_FEW = Tile({"BM": 16, "BN": 128, "BR": 16, "OVERTAKES": 0}, num_warps=4, num_stages=3)
_FEW_EARLY = Tile({"BM": 16, "BN": 128, "BR": 16, "OVERTAKES": 1}, num_warps=4, num_stages=3)
_EARLY_REASON = (
    "run 2, r16, after the base alone: o T=1 1.6, T=32 2.4, down T=32 2.3, and without overtaking 2.8, "
    "3.3, 3.3; with shrink beside the base o T=1 2.8 and 3.6, T=32 4.9 and 5.0; run 1: qkv T=32 lost 0.5"
)

EXPAND = TileTable(
    "expand",
    ["rows", "columns", "bytes"],
    [
        # OVERTAKES: start before the base product has finished, where a caller allows it
        Rule(
            Tile({"BM": 16, "BN": 64, "BR": 16, "OVERTAKES": 0}, num_warps=4, num_stages=2),
            "float32 products are not for tensor cores: small tiles keep them in registers",
            where={"bytes": (4, 4)},
        ),
        Rule(
            _FEW_EARLY, _EARLY_REASON, family="sm90", where={"rows": (1, 256), "columns": (1, 4096)}
        ),
        Rule(
            _FEW,
            "run 2, r16, after the base alone: qkv T=32 3.6, of 32 adapters at T=128 6.9 (8.0 with 64 "
            "columns, 7.2 with 256); gate_up r64 T=32 of 32 adapters 37.9 (51.7 with 64 ranks a block)",
            where={"rows": (1, 512)},
        ),
        Rule(
            Tile({"BM": 32, "BN": 128, "BR": 16, "OVERTAKES": 0}, num_warps=4, num_stages=3),
            "r16, o T=8192: run 2 45, 47 with 16 rows, 44 with 64; gate_up T=2048: run 1 94, 105, 104",
        ),
    ],
)
