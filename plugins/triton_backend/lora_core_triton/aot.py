"""Every kernel with every tile of its table, for `python -m lora_core.triton_kit.aot`."""

from __future__ import annotations

from collections.abc import Iterator

from lora_core.triton_kit import AotCase, Tile, TileTable
from lora_core.weights import SliceLayout
from lora_core_triton import expand, shrink, tables

_TYPES = {"fp32": 4, "fp16": 2, "bf16": 2}
_OPTIONS = ("num_warps", "num_stages", "launch_pdl")
_QKV = SliceLayout((4096, 1024, 1024))
_ODD = SliceLayout((100,))


def cases() -> list[AotCase]:
    """Shrink and expand: dtypes, both forms of the work list, even and odd shapes."""
    return [*_shrink_cases(), *_expand_cases()]


def _fits(tile: Tile, table_tiles_of_float32: list[Tile], size: int) -> bool:
    """float32 rows of a table are for float32 alone, the others for 16 bits alone."""
    return (tile in table_tiles_of_float32) == (size == 4)


def _float32(table: TileTable) -> list[Tile]:
    return [rule.tile for rule in table.rules if rule.where.get("bytes") == (4, 4)]


def _shrink_cases() -> Iterator[AotCase]:
    integers = (
        "tiles_at",
        "rows_at",
        "K",
        "x_row",
        "a_slot",
        "a_slice",
        "a_rank",
        "splits",
        "group",
    )
    for dtype, size in _TYPES.items():
        for tile in tables.SHRINK.tiles():
            if not _fits(tile, _float32(tables.SHRINK), size):
                continue
            for gathered in (True, False):
                for even in (True, False):
                    rows = tables.GATHERED_TILE_ROWS if gathered else tables.CONTIGUOUS_TILE_ROWS
                    if tile["BM"] > rows or (gathered and tile["BM"] != rows):
                        continue
                    bound = shrink.constexprs(
                        tile, 3 if even else 1, 64, gathered, rows, even, tile["GROUP"] == 0
                    )
                    options = {name: bound.pop(name) for name in _OPTIONS if name in bound}
                    yield AotCase(
                        label=f"shrink[{dtype} {_words(tile)} gathered={gathered} even={even}]",
                        kernel=shrink.shrink_kernel,
                        types={
                            "x": f"*{dtype}",
                            "meta": "*i32",
                            "a": f"*{dtype}",
                            "ranks": "*i32",
                            "h": "*fp32",
                            "partial": "*fp32",
                            "arrived": "*i32",
                            **dict.fromkeys(integers, "i32"),
                        },
                        constexprs=bound,
                        options=options,
                        max_stack=32 if size == 4 else 0,  # float32 operands live in registers
                        unaligned=frozenset({"splits", "group"})
                        | (frozenset() if even else frozenset({"x", "a", "x_row", "a_rank", "K"})),
                    )


def _expand_cases() -> Iterator[AotCase]:
    integers = (
        *("tiles_at", "rows_at", "scales_at", "out_row", "h_row", "h_slice"),
        *("b_slot", "b_column", "b_rank"),
    )
    for dtype, size in _TYPES.items():
        for tile in tables.EXPAND.tiles():
            if not _fits(tile, _float32(tables.EXPAND), size):
                continue
            for gathered in (True, False):
                for layout, embedding in ((_QKV, False), (_ODD, False), (_ODD, True)):
                    rows = tables.GATHERED_TILE_ROWS if gathered else tables.CONTIGUOUS_TILE_ROWS
                    if tile["BM"] > rows or (gathered and tile["BM"] != rows):
                        continue
                    bound = expand.constexprs(tile, layout, 64, gathered, rows, embedding)
                    options = {name: bound.pop(name) for name in _OPTIONS if name in bound}
                    odd = layout is _ODD
                    yield AotCase(
                        label=f"expand[{dtype} {_words(tile)} gathered={gathered} "
                        f"slices={layout.num_slices} embedding={embedding}]",
                        kernel=expand.expand_kernel,
                        types={
                            "out": f"*{dtype}",
                            "h": f"*{dtype}" if embedding else "*fp32",
                            "meta": "*i32",
                            "b": f"*{dtype}",
                            "ranks": "*i32",
                            "scalings": "*fp32",
                            "ids": "*i64" if embedding else "*i32",
                            **dict.fromkeys(integers, "i32"),
                        },
                        constexprs=bound,
                        options=options,
                        ones=frozenset({"b_rank" if odd else "b_column"}),
                        unaligned=frozenset({"out_row", "out"}) if odd else frozenset(),
                    )


def _words(tile: Tile) -> str:
    shape = " ".join(f"{name}{value}" for name, value in tile.constexprs.items())
    return f"{shape} w{tile.num_warps} s{tile.num_stages}"
