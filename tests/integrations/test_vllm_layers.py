"""vLLM 0.33's own LoRA layers and LRU manager compute through lora_core, on a CPU.

vLLM's wheel is unpacked beside the torch that is here, without installing its requirements; what its
modules import is fetched too, once, into build/engines. `LORA_CORE_TEST_VLLM` names folders that have
both already.
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
VLLM = "vllm==0.33.0"
IMPORTS = """
aiohappyeyeballs aiohttp aiosignal anyio apache-tvm-ffi attrs blake3 cachetools cbor2 certifi
charset-normalizer cloudpickle diskcache distro einops fastapi frozenlist h11 httpcore httpx httpx2
idna importlib-metadata jiter jsonschema jsonschema-specifications lark llguidance msgspec multidict
openai openai-harmony opentelemetry-api opentelemetry-sdk opentelemetry-semantic-conventions
partial-json-parser pillow prometheus-client propcache protobuf psutil py-cpuinfo pybase64
pydantic-settings python-json-logger pyzmq referencing requests rpds-py sentencepiece setproctitle six
sniffio starlette tiktoken urllib3 uvloop watchfiles xgrammar yarl zipp
""".split()  # noqa: SIM905 - a list to read
LINEAR = {
    "MergedColumnParallelLinearWithLoRA",
    "MergedQKVParallelLinearWithLoRA",
    "RowParallelLinearWithLoRA",
}


def pip(*arguments: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"{VLLM} cannot be had here: {done.stderr.strip().splitlines()[-1]}")


@pytest.fixture(scope="module")
def vllm() -> list[str]:
    """Folders with vLLM and with what it imports."""
    if given := os.environ.get("LORA_CORE_TEST_VLLM"):
        return given.split(os.pathsep)
    root = REPOSITORY / "build" / "engines" / VLLM
    if not (root / "complete").exists():
        pip("download", "--quiet", "--no-deps", "--dest", root, VLLM)
        (wheel,) = root.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(root / "vllm")
        wheel.unlink()
        pip("install", "--quiet", "--no-deps", "--target", root / "imports", *IMPORTS)
        (root / "complete").touch()
    return [str(root / "vllm"), str(root / "imports")]


@pytest.mark.parametrize("backend", ["torch", "triton", "csgmv"])
def test_layers_of_vllm_compute_each_rows_own_adapter(vllm, backend):
    interpreted = backend != "torch"
    done = subprocess.run(
        [sys.executable, HERE / "vllm_engine.py"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *vllm]),
            "LORA_CORE_VLLM": backend,
            "VLLM_TARGET_DEVICE": "cpu",
            "OMP_NUM_THREADS": "1",
            **({"TRITON_INTERPRET": "1"} if interpreted else {}),
        },
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["wrapper"] == "lora_core.integrations._vllm_punica"
    assert report["backend"] == backend
    assert set(report["layers"]) == LINEAR | {
        "LogitsProcessorWithLoRA",
        "VocabParallelEmbeddingWithLoRA",
    }
    assert len(report["errors"]) == 5 * 5  # forwards, each through every layer
    assert max(report["errors"].values()) < 2e-6, report["errors"]
