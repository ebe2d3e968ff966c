"""Tile tables of this backend's kernels: data, each row with its reason.

Shape names: `rows` of x rounded up to a power of two, `rank` the pool's max_rank, `columns` of the
output, `bytes` per element.
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


OVERLAP_MAX_ROWS = 512
"""In a graph of up to so many rows, shrink runs beside the base product, which leaves the GPU room."""

SHRINK = TileTable(
    "shrink",
    ["rows", "rank", "bytes"],
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
            "few rows, small rank: a program per split reads A with the whole GPU",
            where={"rows": (1, 512), "rank": (1, 16)},
        ),
        Rule(
            Tile({"BM": 16, "BC": 32, "BK": 128, "GROUP": 1}, num_warps=4, num_stages=4),
            "few rows: a program per split reads A with the whole GPU",
            where={"rows": (1, 512)},
        ),
        Rule(
            Tile({"BM": 32, "BC": 32, "BK": 64, "GROUP": 2}, num_warps=4, num_stages=4),
            "too few tiles of rows to fill the GPU with one program each",
            where={"rows": (513, 2048)},
        ),
        Rule(
            Tile({"BM": 32, "BC": 32, "BK": 64, "GROUP": 0}, num_warps=4, num_stages=4),
            "enough rows to fill the GPU: no partial sums in memory",
        ),
    ],
)

EXPAND = TileTable(
    "expand",
    ["rows", "columns", "bytes"],
    [
        Rule(
            Tile({"BM": 16, "BN": 64, "BR": 16, "OVERTAKES": 0}, num_warps=4, num_stages=2),
            "float32 products are not for tensor cores: small tiles keep them in registers",
            where={"bytes": (4, 4)},
        ),
        Rule(
            Tile({"BM": 16, "BN": 64, "BR": 16, "OVERTAKES": 0}, num_warps=2, num_stages=3),
            "few rows: many small programs hide the latency of their few loads",
            where={"rows": (1, 512)},
        ),
        Rule(
            Tile({"BM": 32, "BN": 128, "BR": 16, "OVERTAKES": 0}, num_warps=4, num_stages=3),
            "bound by reading and writing out",
        ),
    ],
)
