"""docs/quickstart.md, as a reader follows it after the installation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.release.pages import REPOSITORY, blocks

INSTALL, CODE, ANSWERS, SHELL = blocks("docs/quickstart.md")


@pytest.fixture
def examples(tmp_path):
    """`examples/`, where the page leads, in a place that may be written to."""
    folder = tmp_path / "examples"
    folder.mkdir()
    for entry in (REPOSITORY / "examples").iterdir():
        (folder / entry.name).symlink_to(entry)
    return folder


def run(command: list[str], at: Path) -> list[str]:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
    }
    done = subprocess.run(
        command, cwd=at, env=environment, capture_output=True, text=True, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_code_prints_what_the_page_shows(examples):
    (examples / "quickstart.py").write_text(CODE.text)
    assert run([sys.executable, "quickstart.py"], examples) == ANSWERS.text.splitlines()


@pytest.mark.slow
def test_the_commands_answer_the_same(examples):
    out = run(["bash", "-ec", SHELL.text], examples)
    assert json.loads(out[0])["answer"] == ANSWERS.text.splitlines()[0]
    assert any("q_proj" in line for line in out)
    assert any(line.startswith("torch ") for line in out)


def test_the_page_installs_what_exists():
    lines = INSTALL.text.splitlines()
    assert lines[-1] == "cd examples"
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert f"MODEL   := {lines[1].split()[-1]}" in makefile  # the package the demo uses
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f"\n{extra} = [" in project for extra in ("transformers", "gguf"))
