"""The workflows name what exists: targets of the Makefile, files, the version."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

import lora_core

REPOSITORY = Path(__file__).parents[2]


def workflow(name: str) -> dict:
    return yaml.safe_load((REPOSITORY / ".github" / "workflows" / name).read_text(encoding="utf-8"))


def test_ci_runs_what_the_makefile_has():
    targets = workflow("ci.yml")["jobs"]["test"]["strategy"]["matrix"]["target"]
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    local = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert re.findall(r"^make (\S+)", local, re.MULTILINE) == targets


def test_publishing_builds_core_and_every_plugin_of_one_version():
    steps = workflow("publish.yml")["jobs"]["build"]["steps"]
    assert any("for source in . plugins/*" in step.get("run", "") for step in steps)
    plugins = sorted(REPOSITORY.glob("plugins/*"))
    assert len(plugins) >= 3
    for path in (REPOSITORY, *(p for p in plugins if p.is_dir())):
        version = re.search(r'^version = "(.+)"', (path / "pyproject.toml").read_text(), re.MULTILINE)  # fmt: skip
        assert version is not None
        assert version[1] == lora_core.__version__
