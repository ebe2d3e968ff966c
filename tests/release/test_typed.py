"""`py.typed` is honoured: mypy --strict sees the types of an installed lora_core in a project that uses it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
CONSUMER = """\
from typing_extensions import assert_type

from lora_core import LoRABackend, LoRABatch, LoRAManager, SliceLayout, load_backend


def rows(backend: LoRABackend) -> object:  # a generic class without its parameter
    return backend.prepare_batch(LoRABatch([1], [0])).num_tokens


def manager() -> LoRAManager:
    backend = load_backend("torch")
    assert_type(SliceLayout((1, 2)).out_features, int)
    return LoRAManager(backend, max_loras="four")
"""


@pytest.mark.slow
def test_a_consumer_sees_the_types(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "lora_core", source / "lora_core", ignore=ignored)
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    (site,) = environment.glob("lib/python*/site-packages")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
         "--no-build-isolation", "--target", site, source],
        check=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    (site / "torch_and_others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    consumer = tmp_path / "consumer"
    consumer.mkdir()
    (consumer / "use.py").write_text(CONSUMER)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", environment / "bin" / "python",
         "--cache-dir", tmp_path / "cache", "--no-error-summary", "use.py"],
        cwd=consumer, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    errors = [
        line.split(": error: ")[1] for line in done.stdout.splitlines() if ": error: " in line
    ]
    assert errors == [
        'Missing type arguments for generic type "LoRABackend"  [type-arg]',
        'Argument "max_loras" to "LoRAManager" has incompatible type "str"; expected "int"  [arg-type]',
    ]
