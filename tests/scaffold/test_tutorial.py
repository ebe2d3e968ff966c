"""docs/tutorial.md, block by block, in one folder: commands, files, and Python that asserts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)(.*?)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
INSTALL = "pip install --editable '.[testing]'"


class Reader:
    """Somebody who follows the page: has a folder, and installs into a place of their own."""

    def __init__(self, folder: Path) -> None:
        self.site, self.at = folder / "site", folder
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join((str(self.site), str(REPOSITORY))),
            "OMP_NUM_THREADS": "1",
        }

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, shell=True, cwd=self.at, env=self.environment, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip

    def line(self, line: str) -> str:
        """Run one line of a bash block; it must succeed."""
        if line.startswith("cd "):
            self.at = self.at / line.removeprefix("cd ")
            return ""
        if line == INSTALL:  # the same without network: metadata here, code where it is edited
            line = (
                f"python -m pip install -q --no-deps --no-index --no-build-isolation --target {self.site} {self.at}"
                f" && rm -r {self.site}/lora_core_mine {self.at}/build"
                f" && ln -s {self.at}/lora_core_mine {self.site}/lora_core_mine"
            )
        done = self.run(line)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.mark.slow
def test_the_page_works_as_it_stands(tmp_path):
    reader = Reader(tmp_path)
    outputs: dict[str, str] = {}
    for kind, attributes, text in BLOCKS:
        if file := re.search(r'title="(.+?)"', attributes):
            (reader.at / file[1]).write_text(text, encoding="utf-8")
        elif expected := re.search(r'fails="(.+?)"', attributes):
            done = reader.run(text)
            assert done.returncode == 1, done.stdout
            assert f"backend 'mine' fails {expected[1]}[" in done.stdout, done.stdout
            assert "bf16" in done.stdout or "fp16" in done.stdout
        elif kind == "python":
            reader.run(f"cat > here.py <<'EOF'\n{text}\nEOF")
            reader.line("python here.py")
        else:
            for line in text.strip().splitlines():
                outputs[line] = reader.line(line)
    assert re.search(
        r"^mine +dense +0 +lora-core-mine +available", outputs["lora-core backends"], re.MULTILINE
    )
    assert "mine (dense) from lora-core-mine: available" in outputs["lora-core doctor"]
    assert "skipped" not in outputs["pytest -q"]


def test_the_page_has_blocks_of_every_kind():
    assert INSTALL in PAGE
    kinds = [(kind, re.sub(r'="(.*)"', "", attributes).strip()) for kind, attributes, _ in BLOCKS]
    assert {("bash", ""), ("bash", "fails"), ("python", "title"), ("python", "")} == set(kinds)
