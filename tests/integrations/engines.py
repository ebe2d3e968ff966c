"""Engines from their wheels, unpacked beside the torch that is here, without their requirements."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE, REPOSITORY = Path(__file__).parent, Path(__file__).parents[2]


def folders_of(requirement: str, imports: Sequence[str]) -> list[str]:
    """Folders with an engine and with what its modules import, fetched once, into build/engines.

    `LORA_CORE_TEST_<ENGINE>` names folders that have both already. Skips where pip cannot fetch them.
    """
    engine = requirement.partition("==")[0]
    if given := os.environ.get(f"LORA_CORE_TEST_{engine.upper()}"):
        return given.split(os.pathsep)
    root = REPOSITORY / "build" / "engines" / requirement
    if not (root / "complete").exists():
        _pip(requirement, "download", "--quiet", "--no-deps", "--dest", root, requirement)
        (wheel,) = root.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(root / engine)
        wheel.unlink()
        _pip(requirement, "install", "--quiet", "--no-deps", "--target", root / "imports", *imports)
        (root / "complete").touch()
    return [str(root / engine), str(root / "imports")]


def report_of(
    script: str, folders: Sequence[str], environment: Mapping[str, str], *arguments: str
) -> dict[str, Any]:
    """What a script of this folder says, in a process that finds the engine: its last line, JSON."""
    done = subprocess.run(
        [sys.executable, HERE / script, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *folders]),
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def _pip(requirement: str, *arguments: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"{requirement} cannot be had here: {done.stderr.strip().splitlines()[-1]}")
