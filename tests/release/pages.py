"""Blocks of code of the documentation, in the order of a page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]


class Block(NamedTuple):
    """One fenced block."""

    kind: str
    text: str


def blocks(page: str | Path) -> list[Block]:
    """Of a page given by its path in the repository."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [Block(kind, code) for kind, code in found]


def python(page: str | Path) -> list[str]:
    """The Python of a page that runs."""
    return [block.text for block in blocks(page) if block.kind == "python"]
