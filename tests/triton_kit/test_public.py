"""The names that plugins outside this repository depend on."""

from __future__ import annotations

from lora_core import triton_kit


def test_public_names() -> None:
    assert triton_kit.__all__ == [
        "INTERPRETED",
        "AotCase",
        "Fixed",
        "Launch",
        "Rule",
        "Tile",
        "TileTable",
        "add_product",
        "dot",
        "family",
    ]
    assert all(hasattr(triton_kit, name) for name in triton_kit.__all__)
