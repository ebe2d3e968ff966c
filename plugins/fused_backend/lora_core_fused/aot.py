"""The decode kernel with every tile of its table, for `python -m lora_core.triton_kit.aot`."""

from __future__ import annotations

from lora_core.triton_kit import AotCase
from lora_core.weights import SliceLayout
from lora_core_fused import decode, tables

_TYPES = {"fp32": 4, "fp16": 2, "bf16": 2}
_OPTIONS = ("num_warps", "launch_pdl")
_INTEGERS = (
    *("num_rows", "K", "tiles", "tiles_at", "rows_at", "scales_at", "x_row", "w_row"),
    *("a_slot", "a_slice", "a_rank", "b_slot", "b_column", "b_rank"),
)


def cases() -> list[AotCase]:
    """Every tile, dtype and number of rows; even and odd shapes."""
    found = []
    for dtype, size in _TYPES.items():
        for index, tile in enumerate(tables.DECODE.tiles()):
            if (index == 0) != (size == 4):  # the first rule is float32's
                continue
            for bm in (16, 32, 64):
                for layout, even in (
                    (SliceLayout((4096, 1024, 1024)), True),
                    (SliceLayout((100,)), False),
                ):
                    bound = decode.constexprs(tile, layout, 64, bm, not even, even, even)
                    options = {name: bound.pop(name) for name in _OPTIONS if name in bound}
                    odd = frozenset({"x", "w", "a", "x_row", "w_row", "a_rank", "K"})
                    found.append(
                        AotCase(
                            label=f"decode[{dtype} tile{index} rows{bm} even={even}]",
                            kernel=decode.decode_kernel,
                            types={
                                **dict.fromkeys(
                                    ("out", "x", "w", "bias", "a", "b", "h"), f"*{dtype}"
                                ),
                                **dict.fromkeys(("ranks", "meta", "sync"), "*i32"),
                                **dict.fromkeys(("scalings", "parts"), "*fp32"),
                                **dict.fromkeys(_INTEGERS, "i32"),
                            },
                            constexprs=bound,
                            options=options,
                            archs=frozenset({"sm90", "sm100"}) if even else None,  # overtakes
                            max_stack=64,  # of the path for a B that is not finite
                            ones=frozenset({"b_column" if even else "b_rank"}),
                            unaligned=frozenset({"num_rows", "tiles"})
                            | (frozenset() if even else odd),
                        )
                    )
    return found
