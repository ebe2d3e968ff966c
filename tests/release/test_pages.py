"""Pages that have to name everything of a kind."""

from __future__ import annotations

from pathlib import Path

from lora_core import errors

DOCS = Path(__file__).parents[2] / "docs"


def test_every_error_has_its_line_in_troubleshooting():
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert len(classes) > 15
    assert {name for name in classes if f"`{name}`" not in page} == set()
