"""The code of docs/engines.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def test_the_code_of_the_page():
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    seen: dict = {}
    for block in blocks:
        exec(compile(block, PAGE, "exec"), seen)
    assert len(blocks) == 4
    assert (seen["first"].shape, seen["second"].shape) == ((1, 16), (3, 16))
    weights, base = seen["weights"], seen["base"]
    delta = 0.5 * seen["x"][2] @ weights.a[1, 0].T @ weights.b[1].T
    torch.testing.assert_close(seen["replayed"][2], base(seen["x"][2]) + delta)
    assert seen["backend"].batch_info is None
