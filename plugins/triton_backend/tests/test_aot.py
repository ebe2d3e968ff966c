"""The list of kernels to compile ahead of time is whole, and what it describes compiles."""

from __future__ import annotations

import pytest

from lora_core.triton_kit import INTERPRETED
from lora_core.triton_kit.aot import compile_case
from lora_core_triton import tables
from lora_core_triton.aot import cases


@pytest.mark.parametrize("table", [tables.SHRINK, tables.EXPAND], ids=lambda table: table.name)
def test_every_tile_is_in_some_case(table: object) -> None:
    compiled = [
        {
            **case.constexprs,
            "num_warps": case.options["num_warps"],
            "num_stages": case.options["num_stages"],
        }
        for case in cases()
        if case.label.startswith(table.name)
    ]
    for tile in table.tiles():
        shape = {name: tile[name] for name in ("BM", "BN", "BC") if name in tile.constexprs}
        wanted = {**shape, "num_warps": tile.num_warps, "num_stages": tile.num_stages}
        assert any(wanted.items() <= case.items() for case in compiled), tile


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels cannot be compiled")
@pytest.mark.slow
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.label)
def test_case_compiles_within_its_bounds(case: object) -> None:
    assert compile_case(case, "sm90").problem is None
