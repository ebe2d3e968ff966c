"""Every distribution that `lora-core new-backend` writes passes its own suite, before a line is changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lora_core.cli import main
from lora_core.errors import PluginError
from lora_core.scaffold.generate import new_backend

REPOSITORY = Path(__file__).parents[2]
FEW_OPS, ALL_OPS = ("linear",), ("linear", "embedding", "lm_head", "moe")


def run(*command: str | Path, at: Path, site: Path | None = None) -> str:
    """Output of a command that must succeed, in a folder, with `site` before the installed packages."""
    path = os.pathsep.join(str(part) for part in (site, REPOSITORY) if part)
    done = subprocess.run(
        [str(part) for part in command], cwd=at, capture_output=True, text=True, check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install(folder: Path, site: Path) -> None:
    """What `pip install` would put into an environment, into a folder of its own, without network."""
    run(
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
        "--no-build-isolation", "--target", site, folder.resolve(), at=folder,
    )  # fmt: skip


def suite(folder: Path, site: Path, *options: str) -> str:
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options)
    return run(*command, at=folder, site=site)


def test_the_default_passes_its_suite_once_installed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new-backend", "mine"]) == 0
    assert "pip install --editable '.[testing]'" in capsys.readouterr().out
    install(Path("lora-core-mine"), tmp_path / "site")
    shutil.rmtree(tmp_path / "lora-core-mine" / "lora_core_mine")  # the installed one is tested
    out = suite(tmp_path / "lora-core-mine", tmp_path / "site")
    assert " passed" in out
    assert "skipped" not in out


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("ops", [("linear", "embedding"), ("moe",), ALL_OPS], ids="-".join)
def test_every_variant_passes_its_suite_once_installed(tmp_path, ops, kernel):
    folder = new_backend("mine", ops=ops, kernel=kernel, directory=tmp_path / "mine")
    install(folder, tmp_path / "site")
    shutil.rmtree(folder / "lora_core_mine")
    assert " passed" in suite(folder, tmp_path / "site")


@pytest.mark.slow
def test_the_triton_kernel_is_what_runs(tmp_path):
    folder = new_backend("mine", kernel="triton", directory=tmp_path / "mine")
    kernels = folder / "lora_core_mine" / "kernels.py"
    kernels.write_text(kernels.read_text().replace("acc += tl.sum", "acc += 1.01 * tl.sum"))
    install(folder, tmp_path / "site")
    with pytest.raises(AssertionError, match="fails shrink"):
        suite(folder, tmp_path / "site", "-x", "-k", "test_shrink")


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_what_is_written_is_formatted_linted_and_typed(tmp_path, kernel):
    folder = new_backend("mine", ops=ALL_OPS, kernel=kernel, directory=tmp_path / "mine")
    settings = ["--config", REPOSITORY / "pyproject.toml", "--no-cache"]
    run(sys.executable, "-m", "ruff", "format", "--check", *settings, folder, at=folder)
    run(sys.executable, "-m", "ruff", "check", *settings, folder / "lora_core_mine", at=folder)
    run(
        sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", "--untyped-calls-exclude=triton",
        "--cache-dir", tmp_path / "cache", "lora_core_mine", at=folder,
    )  # fmt: skip


def test_only_what_was_asked_for_is_claimed(tmp_path):
    folder = new_backend("mine", ops=("embedding",), directory=tmp_path / "mine")
    backend = (folder / "lora_core_mine" / "backend.py").read_text()
    assert "ops=frozenset({Op.LINEAR, Op.EMBEDDING})," in backend
    assert not (folder / "lora_core_mine" / "moe.py").exists()
    assert (folder / "tests" / "test_conformance.py").read_text() == (
        "from lora_core.testing import BackendConformance\n\n\n"
        'class TestMine(BackendConformance):\n    backend = "mine"\n'
    )


def test_its_plugin_imports_neither_torch_nor_triton(tmp_path):
    folder = new_backend("mine", ops=ALL_OPS, kernel="triton", directory=tmp_path / "mine")
    code = (
        "import sys, lora_core_mine.plugin as p\n"
        "print([s.target for f in (p.lora_core_backends, p.lora_core_moe_backends) for s in f()])\n"
        "assert not {'torch', 'triton'} & set(sys.modules)"
    )
    assert run(sys.executable, "-c", code, at=folder) == (
        "['lora_core_mine.backend:MineBackend', 'lora_core_mine.moe:MineMoEBackend']\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["My-Kernels"], "cannot be named 'My-Kernels'"),
        (["class"], "cannot be named 'class'"),
        (["torch"], "'torch' is taken by lora-core"),
        (["mine", "--ops", "linear,convolution"], "--ops has convolution"),
        (["mine", "--ops", ""], "--ops has nothing"),
        (["mine", "--directory", "."], "nothing is overwritten"),
    ],
    ids=["capitals", "keyword", "taken", "unknown-op", "no-op", "exists"],
)
def test_what_cannot_be_is_refused_and_writes_nothing(
    tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    assert main(["new-backend", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_kernel_language_is_refused(tmp_path):
    with pytest.raises(PluginError, match="'cuda' is none of torch, triton"):
        new_backend("mine", kernel="cuda", directory=tmp_path / "mine")  # type: ignore[arg-type]


def test_a_triton_plugin_says_how_to_run_without_a_gpu(tmp_path):
    readmes = {
        kernel: (new_backend("mine", kernel=kernel, directory=tmp_path / kernel) / "README.md").read_text()
        for kernel in ("torch", "triton")
    }  # fmt: skip
    assert "`TRITON_INTERPRET=1 lora-core check mine`" in readmes["triton"]
    assert "TRITON_INTERPRET" not in readmes["torch"]


@pytest.mark.parametrize("chosen", [False, True])
def test_the_doctor_knows_the_interpreter_too(monkeypatch, tmp_path, chosen):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code = (
        "import os, torch; torch.cuda.is_available = lambda: False\n"
        f"os.environ.update({{'TRITON_INTERPRET': '1'}} if {chosen} else {{}})\n"
        "from lora_core.doctor import examine\n"
        "print(*(f'{f.state} {f.advice}' for f in examine().findings if f.name == 'triton'))"
    )
    told = run(sys.executable, "-c", code, at=tmp_path).strip()
    assert told.endswith("with TRITON_INTERPRET=1" if not chosen else "available")
