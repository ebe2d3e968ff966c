"""The list of kernels to compile ahead of time is whole, and what it describes compiles."""

from __future__ import annotations

import pytest

from lora_core.triton_kit import INTERPRETED
from lora_core.triton_kit.aot import compile_case
from lora_core_moe_virtual_experts import tiles
from lora_core_moe_virtual_experts.aot import cases


@pytest.mark.parametrize(
    ("table", "kernel"),
    [(tiles.SHRINK, "shrink"), (tiles.EXPAND, "expand"), (tiles.EXPAND_PAIR, "expand_pair")],
    ids=["shrink", "expand", "expand_pair"],
)
def test_every_tile_is_in_some_case(table, kernel):
    compiled = [
        (case.constexprs, case.options) for case in cases() if case.kernel.__name__ == kernel
    ]
    for tile in table.tiles():
        names = [name for name in ("BK", "BN", "SPLITS") if name in tile.constexprs]
        if kernel != "shrink":
            names = ["BN"]
        assert any(
            all(constants[name] == tile[name] for name in names)
            and options == {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
            for constants, options in compiled
        ), tile


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels cannot be compiled")
@pytest.mark.slow
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.label)
def test_case_compiles_within_its_bounds(case):
    assert compile_case(case, "sm90").problem is None
