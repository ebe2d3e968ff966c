"""examples/grouped_mm_backend, installed like anybody's distribution, passes its suite."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lora_core

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "grouped_mm_backend"


@pytest.mark.slow
def test_the_example_passes_its_suite_once_installed(tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
         "--no-build-isolation", "--target", site, source],
        check=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    shutil.rmtree(source / "lora_core_grouped_mm")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=source, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(site), str(REPOSITORY))),
            "OMP_NUM_THREADS": "1",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_the_example_imports_public_names_only():
    imported: dict[str, set[str]] = {}
    for path in EXAMPLE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lora_core"):
                imported.setdefault(str(node.module), set()).update(a.name for a in node.names)
            assert not (isinstance(node, ast.Import) and "lora_core" in str(node.names[0].name))
    own = {module for module in imported if module.startswith("lora_core_grouped_mm")}
    assert set(imported) - own == {"lora_core", "lora_core.errors", "lora_core.testing"}
    assert imported["lora_core"] <= set(lora_core.__all__)
