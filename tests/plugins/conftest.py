"""Distributions outside this repository's own, built for real and installed each in a folder of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SOURCES = Path(__file__).parent / "distributions"
REPOSITORY = Path(__file__).parents[2]

Ask = Callable[..., Any]


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> dict[str, Path]:
    """Distribution -> the folder it is installed in, metadata and entry points included."""
    root = tmp_path_factory.mktemp("distributions")
    sources = [
        shutil.copytree(source, root / "sources" / source.name)
        for source in sorted(SOURCES.iterdir())
    ]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index",
         "--no-build-isolation", "--wheel-dir", root / "wheels", *sources],
        check=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    folders = {}
    for wheel in (root / "wheels").glob("*.whl"):
        name = wheel.name.split("-")[0].removeprefix("lora_core_example_")
        folders[name] = root / "installed" / name
        zipfile.ZipFile(wheel).extractall(folders[name])
    assert sorted(folders) == [source.name for source in sources]
    return folders


@pytest.fixture
def ask(installed) -> Ask:
    """Runs Python in a new process that has some of the distributions; returns what it assigns to `answer`."""

    def run(code: str, *distributions: str, **environment: str) -> Any:
        script = f"import json\n{textwrap.dedent(code)}\nprint(json.dumps(answer))"
        path = [str(REPOSITORY), *(str(installed[name]) for name in distributions)]
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run
