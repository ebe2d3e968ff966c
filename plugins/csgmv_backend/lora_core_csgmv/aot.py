"""Every kernel with every tile that its table gives, for `python -m lora_core.triton_kit.aot`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from lora_core.triton_kit import AotCase, Tile, TileTable
from lora_core_csgmv.kernels.expand import expand
from lora_core_csgmv.kernels.shrink import shrink
from lora_core_csgmv.tiles import EXPAND, SHRINK, parameters

_DTYPES = {
    "bf16": 2,
    "fp32": 4,
}  # fp16 differs from bf16 in nothing but the name of the instruction
_SITES = (((4096,), 16), ((4096, 1024, 1024), 64), ((4096,), 128))  # widths of the slices, max_rank
_ROWS = (1, 32, 128, 512, 2048, 4096, 8192)
_FAMILIES = ("sm80", "sm90", "sm100")
_MAX_STACK = (
    32  # a spill of a few words outside the loops, in the branch for more than 32 rows of A
)
_VARYING = frozenset({"num_rows", "room"})  # of a batch: nothing is compiled in about them


def cases() -> list[AotCase]:
    """What a GPU may be asked to run."""
    return [*_shrinks(), *_expands()]


def _shrinks() -> Iterator[AotCase]:
    pointers = {"ranks": "*i32", "arrivals": "*i32", "segments": "*i32", "partials": "*fp32"}
    integers = "room num_rows in_features stride_x stride_slot stride_slice stride_rank stride_k"
    for (widths, max_rank), dtype, family, tile in _tiles(SHRINK):
        constexprs = {"MAX_RANK": max_rank, "NUM_SLICES": len(widths), "SPLIT": 512, "EVEN": True}
        yield AotCase(
            label=f"csgmv shrink[{dtype} n{len(widths)} R{max_rank} {_text(tile)}]",
            kernel=shrink,
            types={
                **pointers,
                **dict.fromkeys(("x", "a", "h"), f"*{dtype}"),
                **dict.fromkeys(integers.split(), "i32"),
            },
            constexprs={**constexprs, **tile.constexprs, "PARALLEL": bool(tile["PARALLEL"])},
            options=_options(tile),
            unaligned=_VARYING,
            ones=frozenset({"stride_k"}),
            archs=frozenset({family}),
            max_stack=_MAX_STACK,
        )


def _expands() -> Iterator[AotCase]:
    pointers = {"ids": "*i32", "ranks": "*i32", "scalings": "*fp32", "segments": "*i32"}
    integers = "room num_rows stride_out stride_h stride_h_rank stride_h_slot stride_slot stride_n stride_rank"
    for (widths, max_rank), dtype, family, tile in _tiles(EXPAND):
        constexprs = {
            "MAX_RANK": max_rank,
            "WIDTHS": widths,
            "GATHER": False,
            "OVERTAKES": family != "sm80",
        }
        yield AotCase(
            label=f"csgmv expand[{dtype} n{len(widths)} R{max_rank} {_text(tile)}]",
            kernel=expand,
            types={
                **pointers,
                **dict.fromkeys(("out", "h", "b"), f"*{dtype}"),
                **dict.fromkeys(integers.split(), "i32"),
            },
            constexprs={
                **constexprs,
                **tile.constexprs,
                "BLOCK_R": min(tile["BLOCK_R"], max_rank),
            },
            options=_options(tile),
            unaligned=_VARYING,
            ones=frozenset({"stride_n", "stride_h_rank"}),
            archs=frozenset({family}),
            max_stack=_MAX_STACK,
        )


def _tiles(table: TileTable) -> Iterator[tuple[tuple[tuple[int, ...], int], str, str, Tile]]:
    """(site, dtype, family, tile) for every tile that the table picks somewhere, each once."""
    seen = set()
    for (site, (dtype, size), family), rows in product(
        product(_SITES, _DTYPES.items(), _FAMILIES), _ROWS
    ):
        tile = table.pick(family, rows=rows, width=len(site[0]) * site[1], bytes=size)
        key = (site, dtype, family, _text(tile))
        if key not in seen:
            seen.add(key)
            yield site, dtype, family, tile


def _options(tile: Tile) -> dict[str, Any]:
    return {name: value for name, value in parameters(tile).items() if name not in tile.constexprs}


def _text(tile: Tile) -> str:
    return " ".join(
        f"{name.removeprefix('BLOCK_')}{value:d}" for name, value in parameters(tile).items()
    )
