"""SGLang 0.5.23's own LoRA manager, memory pool and layers compute through lora_core, on a CPU.

SGLang's wheel is unpacked, without its requirements, beside the torch that is here; it is fetched
once, into build/engines. `LORA_CORE_TEST_SGLANG` names folders that have it and what it imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE, REPOSITORY = Path(__file__).parent, Path(__file__).parents[2]
SGLANG = "sglang==0.5.23"
LAYERS = {
    "ColumnParallelLinearWithLoRA",
    "MergedColumnParallelLinearWithLoRA",
    "ParallelLMHeadWithLoRA",
    "QKVParallelLinearWithLoRA",
    "ReplicatedLinearWithLoRA",
    "RowParallelLinearWithLoRA",
    "VocabParallelEmbeddingWithLoRA",
}
FORWARDS, REPLAYS, SITES, FURTHER_PASSES = 8, 5, 8, 3 + 1


def pip(*arguments: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"{SGLANG} cannot be had here: {done.stderr.strip().splitlines()[-1]}")


@pytest.fixture(scope="module")
def sglang() -> list[str]:
    """Folders with SGLang and with what its lora package imports."""
    if given := os.environ.get("LORA_CORE_TEST_SGLANG"):
        return given.split(os.pathsep)
    root = REPOSITORY / "build" / "engines" / SGLANG
    if not (root / "complete").exists():
        pip("download", "--quiet", "--no-deps", "--dest", root, SGLANG)
        (wheel,) = root.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(root / "sglang")
        wheel.unlink()
        pip("install", "--quiet", "--no-deps", "--target", root / "imports", "msgspec")
        (root / "complete").touch()
    return [str(root / "sglang"), str(root / "imports")]


@pytest.mark.parametrize(
    ("dense", "experts"), [("torch", "torch"), ("triton", "virtual_experts"), ("csgmv", "auto")]
)
def test_layers_of_sglang_compute_each_rows_own_adapter(sglang, dense, experts):
    done = subprocess.run(
        [sys.executable, HERE / "sglang_engine.py", sglang[0]],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sglang]),
            "LORA_CORE_SGLANG": dense,
            "LORA_CORE_SGLANG_MOE": experts,
            "TRITON_INTERPRET": "1",  # SGLang's Triton backend runs beside
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["backend"] == ["lora_core.integrations._sglang_backend", dense, dense]
    assert set(report["layers"]) == LAYERS
    assert len(report["errors"]) == (FORWARDS + REPLAYS) * SITES + FURTHER_PASSES
    assert max(report["errors"].values()) < 2e-6, report["errors"]
    triton, torch_native = report["differences"]["triton"], report["differences"]["torch_native"]
    assert len(triton) == FORWARDS * SITES + FURTHER_PASSES
    assert len(torch_native) == FORWARDS * (SITES - 1)
    assert max(*triton.values(), *torch_native.values()) < 2e-6, report["differences"]
    assert len(report["told"]) == FORWARDS
    assert all(report["told"].values()), report["told"]
    for added in report["experts"]:
        assert max(added["gate_up"], added["down"]) < 2e-6, added
