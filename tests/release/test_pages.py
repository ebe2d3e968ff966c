"""docs/troubleshooting.md has every error, and messages as the source has them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from lora_core import errors

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\w+Error)` \| `(.+?)` \|", PAGE, re.MULTILINE)


def test_every_error_has_its_line():
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert len(classes) > 15
    assert {name for name in classes if f"`{name}`" not in PAGE} == set()
    assert {error for error, _ in ROWS} <= classes


@pytest.fixture(scope="module")
def messages() -> list[str]:
    """Every string of the source, with `…` for what is filled in."""
    found = []
    for path in (REPOSITORY / "lora_core").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@pytest.mark.parametrize("message", [message for _, message in ROWS])
def test_messages_are_those_of_the_source(messages, message):
    reason = re.search(r"cannot run here: (.+)", message)
    wanted = ["backend … cannot run here: …", reason[1]] if reason else [message]
    for text in wanted:
        pattern = re.compile(".*".join(re.escape(part) for part in text.split("…")))
        assert any(pattern.search(known) for known in messages), text
