"""Launch parameters as data: see `lora_core.triton_kit.TileTable`.

Keys: `rows` of x, `width` = slices x max_rank, `bytes` of an element.
What a sum's rounding depends on is not in these tables but in `split_length`, a function of K alone.
"""

from __future__ import annotations

from typing import Any

from lora_core.triton_kit import Rule, Tile, TileTable

MIN_SPLIT = 128
"""Every BLOCK_K is at most half of it: a loop of one step would be folded into the sum around it."""


def parameters(tile: Tile) -> dict[str, Any]:
    """Constexprs and launch options of a tile as keyword arguments of `Launch`."""
    return {**tile.constexprs, "num_warps": tile.num_warps, "num_stages": tile.num_stages}


def split_length(in_features: int) -> int:
    """Length of the parts that K is summed in: 512 where it divides K, else 256, else what covers it.

    512 and not more, because at decode the parts are what fills the chip: on an H200, o T=1 5.3 us for
    the shrink after the base product, against 6.5 with 1024.
    """
    for length in (512, 256):
        if in_features % length == 0:
            return length
    return 512 if in_features > 512 else max(MIN_SPLIT, 1 << (in_features - 1).bit_length())


def _shrink(block_t: int, block_k: int, parallel: int, *, warps: int = 4, stages: int = 3) -> Tile:
    return Tile({"BLOCK_T": block_t, "BLOCK_K": block_k, "PARALLEL": parallel}, warps, stages)


def _expand(block_t: int, block_n: int, block_r: int, group: int = 1, *, warps: int = 4) -> Tile:
    return Tile(
        {"BLOCK_T": block_t, "BLOCK_N": block_n, "BLOCK_R": block_r, "GROUP": group}, warps, 1
    )


_ANY = 1 << 62

SHRINK = TileTable(
    "csgmv shrink",
    ("rows", "width", "bytes"),
    (
        Rule(
            _shrink(16, 64, 1),
            "interpreter: one shape for any number of rows, both forms",
            "cpu",
            {"rows": (0, 32)},
        ),
        Rule(
            _shrink(16, 64, 0), "interpreter: one shape for any number of rows, both forms", "cpu"
        ),
        Rule(
            _shrink(16, 32, 1),
            "float32: small operands in registers",
            where={"bytes": (4, 4), "rows": (0, 2048)},
        ),
        Rule(_shrink(16, 32, 0), "float32: small operands in registers", where={"bytes": (4, 4)}),
        Rule(
            _shrink(16, 128, 1),
            "decode: as many programs as K has parts; o T=32 r16 5.8 us, with 64 inputs at a time 6.0",
            where={"rows": (0, 1024)},
        ),
        Rule(
            _shrink(32, 64, 1, warps=8, stages=4),
            "few segments, K in parallel: o T=2048 10 us, 17 with one program per segment",
            where={"rows": (0, 2048)},
        ),
        Rule(
            _shrink(64, 128, 0, warps=8, stages=3),
            "prefill: segments fill the chip without splitting K; with 32 rows and "
            "all else changed too, T=8192 in all: down r64 199 us, 145 with 64; qkv r128 519, 333",
            "sm90",
            {"rows": (4097, _ANY)},
        ),
        Rule(
            _shrink(32, 128, 0, warps=8, stages=4),
            "128 segments: splitting K would write more sums than x is long; qkv of 8 shards "
            "T=4096 in all 152 us split, 60 in one with 64 rows; `triton` takes 38 for its shrink with 32, 43 with 64",
        ),
    ),
)

EXPAND = TileTable(
    "csgmv expand",
    ("rows", "width", "bytes"),
    (
        Rule(_expand(16, 64, 32), "interpreter: one shape for any number of rows", "cpu"),
        Rule(_expand(16, 64, 16), "float32: small operands in registers", where={"bytes": (4, 4)}),
        Rule(
            _expand(16, 128, 64),
            "decode: one block of rows, up to 64 ranks in flight at once",
            where={"rows": (0, 1024)},
        ),
        Rule(
            _expand(32, 128, 32, 2, warps=8),
            "as for prefill, in smaller groups: there are few segments",
            where={"rows": (0, 4096)},
        ),
        Rule(
            _expand(32, 128, 32, 4, warps=8),
            "prefill: the next block of columns is on its way while this one is multiplied; 8 warps "
            "exchange half as often as 4 on the way between product and memory, 11 % at gate_up T=8192. Tiles "
            "of 64 rows fill the registers: gate_up r16 483 us in all, 379 with these",
        ),
    ),
)
