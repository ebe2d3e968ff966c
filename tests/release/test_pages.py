"""Pages that are generated, or that have to name everything of a kind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lora_core import errors

DOCS = Path(__file__).parents[2] / "docs"


def test_the_support_page_is_what_the_installed_backends_claim():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "lora_core.support"],
        capture_output=True, text=True, check=True, env=environment, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (DOCS / "support.md").read_text(encoding="utf-8") == done.stdout


def test_every_error_has_its_line_in_troubleshooting():
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert len(classes) > 15
    assert {name for name in classes if f"`{name}`" not in page} == set()
