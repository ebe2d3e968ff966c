"""What users install: wheels built without a network, in an environment that has no checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PLUGINS = sorted(p.parent.name for p in REPOSITORY.glob("plugins/*/pyproject.toml"))

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """Distribution -> wheel, built from a copy, so that no build folder is left in the checkout."""
    root = tmp_path_factory.mktemp("wheels")
    ignored = shutil.ignore_patterns("*.egg-info", "build", "__pycache__", ".*")
    core = root / "sources" / "core"
    core.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, core)
    shutil.copytree(REPOSITORY / "lora_core", core / "lora_core", ignore=ignored)
    sources = [core]
    for name in PLUGINS:
        folder = root / "sources" / name
        sources.append(shutil.copytree(REPOSITORY / "plugins" / name, folder, ignore=ignored))
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index",
         "--no-build-isolation", "--wheel-dir", root / "built", *sources],
        check=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return {wheel.name.split("-")[0]: wheel for wheel in (root / "built").glob("*.whl")}


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory) -> Path:
    """A folder with the wheels installed, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
         "--target", folder, *wheels.values()],
        check=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return folder


def run(installed: Path, code: str, cwd: Path) -> str:
    """Python with the installed wheels and their requirements; -S leaves editable installs out."""
    path = os.pathsep.join([str(installed), sysconfig.get_path("purelib")])
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_core_wheel_holds_the_package_and_nothing_else(wheels):
    names = zipfile.ZipFile(wheels["lora_core"]).namelist()
    assert {name.split("/")[0] for name in names} == {"lora_core", "lora_core-0.1.0.dist-info"}
    assert "lora_core/py.typed" in names
    assert "lora_core/integrations/transformers.py" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_every_plugin_is_a_distribution_with_an_entry_point(wheels):
    assert len(wheels) == 1 + len(PLUGINS)
    for name, wheel in wheels.items():
        if name == "lora_core":
            continue
        archive = zipfile.ZipFile(wheel)
        (entry,) = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
        assert "[lora_core.backends]" in archive.read(entry).decode()


def test_an_installation_without_the_checkout_computes(installed, tmp_path):
    code = """
import json, torch, lora_core
backend = lora_core.load_backend("torch", device="cpu")
weights = backend.allocate_weights(
    num_slots=1, max_rank=2, in_features=3, layout=lora_core.SliceLayout((4,)), dtype=torch.float32
)
weights.a.fill_(1), weights.b.fill_(1), weights.ranks.fill_(2), weights.scalings.fill_(0.5)
backend.prepare_batch(lora_core.LoRABatch(lengths=[1], slots=[0]))
out = backend.expand(backend.shrink(torch.ones(1, 3), weights), weights, torch.zeros(1, 4))
print(json.dumps([lora_core.__file__, out.tolist(), [s.name for s in lora_core.list_backends()]]))
"""
    home, out, names = json.loads(run(installed, code, tmp_path).splitlines()[-1])
    assert Path(home).is_relative_to(installed)
    assert out == [[0.5 * 2 * 3] * 4]  # scaling * rank * inputs, all ones
    assert {"torch", "triton", "csgmv"} <= set(names)


def test_the_commands_run_from_the_installation(installed, tmp_path):
    code = "import sys; from lora_core.cli import main; sys.exit(main(['backends', '--json']))"
    listed = json.loads(run(installed, code, tmp_path))
    assert listed["failed"] == {}
    assert {b["name"] for b in listed["backends"]} >= {
        "torch",
        "triton",
        "csgmv",
        "virtual_experts",
    }
