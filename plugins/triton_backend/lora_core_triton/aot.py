"""Every kernel with every tile of its table, for `python -m lora_core.triton_kit.aot`."""

from __future__ import annotations

from collections.abc import Iterator

from lora_core.triton_kit import AotCase, Rule, Tile, TileTable
from lora_core.weights import SliceLayout
from lora_core_triton import expand, fused, fused_tables, shrink, tables
from lora_core_triton.worklist import Room, lay_out

_SIZES = {"fp32": 4, "fp16": 2, "bf16": 2}
_OPTIONS = ("num_warps", "num_stages", "launch_pdl")
_QKV = SliceLayout((4096, 1024, 1024))
_ODD = SliceLayout((100,))
_OVERTAKING = frozenset({"sm90", "sm100"})  # griddepcontrol
_FUSED = frozenset({"sm90"})  # where the table of the product has tiles


def cases() -> list[AotCase]:
    """Shrink and expand: dtypes, both forms of the work list, even and odd shapes. Product and seams."""
    return [*_shrink_cases(), *_expand_cases(), *_product_cases(), *_seams_cases()]


def _combinations(table: TileTable) -> Iterator[tuple[str, Tile, Room, frozenset[str] | None]]:
    """(dtype, tile, room, archs) as they can meet: a rule for 4 bytes is for float32 alone."""
    seen: list[tuple[str, Tile, bool]] = []
    for rule in table.rules:
        for dtype, size in _SIZES.items():
            for gathered in (True, False):
                room = lay_out(0, 1, gathered=gathered)
                fits = (
                    rule.tile["BM"] == room.tile_rows
                    if gathered
                    else rule.tile["BM"] <= room.tile_rows
                )
                key = (dtype, rule.tile, gathered)
                if fits and (size == 4) == _is_for_float32(rule) and key not in seen:
                    seen.append(key)
                    archs = None if rule.family is None else frozenset({rule.family})
                    yield dtype, rule.tile, room, archs


def _is_for_float32(rule: Rule) -> bool:
    return rule.where.get("bytes") == (4, 4)


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
    for dtype, tile, room, archs in _combinations(tables.SHRINK):
        for even in (True, False):
            bound = shrink.constexprs(tile, 3 if even else 1, 64, room, even, tile["GROUP"] == 0)
            odd = frozenset[str]() if even else frozenset({"x", "a", "x_row", "a_rank", "K"})
            yield AotCase(
                label=f"shrink[{dtype} {_words(tile)} gathered={room.gathered} even={even}]",
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
                options={name: bound.pop(name) for name in _OPTIONS if name in bound},
                constexprs=bound,
                unaligned=odd | {"splits", "group"},
                archs=archs,
                max_stack=_shrink_stack(dtype, tile),
            )


def _shrink_stack(dtype: str, tile: Tile) -> int:
    if dtype == "fp32":
        return 32  # operands live in registers
    if (tile["BC"], tile["BK"]) == (128, 128):
        return 128  # Triton 3.9; 3.6, with which the tile was timed, spills nothing
    return 0


def _expand_cases() -> Iterator[AotCase]:
    integers = (
        *("tiles_at", "rows_at", "scales_at", "out_row", "h_row", "h_slice"),
        *("b_slot", "b_column", "b_rank", "slots"),
    )
    for dtype, tile, room, archs in _combinations(tables.EXPAND):
        for layout, embedding in ((_QKV, False), (_ODD, False), (_ODD, True)):
            odd, overtakes = layout is _ODD, bool(tile["OVERTAKES"]) and layout is _QKV
            ranks = max(64, tile["BR"])
            bound = expand.constexprs(tile, layout, ranks, room, embedding, overtakes)
            yield AotCase(
                label=f"expand[{dtype} {_words(tile)} gathered={room.gathered} "
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
                options={name: bound.pop(name) for name in _OPTIONS if name in bound},
                constexprs=bound,
                ones=frozenset({"b_rank" if odd else "b_column"}),
                unaligned=frozenset({"out_row", "out"}) if odd else frozenset(),
                archs=archs or (_OVERTAKING if overtakes else None),
            )


def _product_cases() -> Iterator[AotCase]:
    tiles = {rule.tile for rule in fused_tables.PRODUCT.rules if rule.family == "sm90"}
    for tile in sorted(tiles, key=_words):
        for dtype in ("fp16", "bf16"):
            for has_bias in (False, True):
                bound = fused.constexprs(tile, _QKV, has_bias, 132)
                bm, bn, bk = (bound[name] for name in ("BM", "BN", "BK"))
                descriptors = {
                    "x_desc": f"tensordesc<{dtype}[{bm}, {bk}]>",
                    "w_desc": f"tensordesc<{dtype}[{bn}, {bk}]>",
                    "out_desc": f"tensordesc<{dtype}[{bm}, {bn // 2 if tile['HALVES'] else bn}]>",
                }
                yield AotCase(
                    label=f"product[{dtype} {_words(tile)} bias={has_bias}]",
                    kernel=fused.product_kernel,
                    types={
                        "h": "*fp32",
                        **descriptors,
                        "bias": f"*{dtype}",
                        "b": f"*{dtype}",
                        "ranks": "*i32",
                        "scalings": "*fp32",
                        "plan": "*i32",
                        **dict.fromkeys(
                            ("num_rows", "num_planned", "K", "h_row", "h_slice"), "i32"
                        ),
                        **dict.fromkeys(("b_slot", "b_column", "b_rank"), "i32"),
                    },
                    options={name: bound.pop(name) for name in _OPTIONS if name in bound},
                    constexprs=bound,
                    ones=frozenset({"b_column"}),
                    unaligned=frozenset({*descriptors, "num_rows", "num_planned"}),
                    archs=_FUSED,
                )


def _seams_cases() -> Iterator[AotCase]:
    for dtype in ("fp16", "bf16"):
        bound = fused.seam_constexprs(_QKV, fused_tables.PLAN_ROWS)
        yield AotCase(
            label=f"seams[{dtype}]",
            kernel=fused.seams_kernel,
            types={
                "out": f"*{dtype}",
                "h": "*fp32",
                "b": f"*{dtype}",
                "ranks": "*i32",
                "scalings": "*fp32",
                "seams": "*i32",
                **dict.fromkeys(
                    ("out_row", "h_row", "h_slice", "b_slot", "b_column", "b_rank"), "i32"
                ),
            },
            options={name: bound.pop(name) for name in _OPTIONS if name in bound},
            constexprs=bound,
            ones=frozenset({"b_column"}),
            archs=_FUSED,
        )


def _words(tile: Tile) -> str:
    shape = " ".join(f"{name}{value}" for name, value in tile.constexprs.items())
    return f"{shape} w{tile.num_warps} s{tile.num_stages}"
