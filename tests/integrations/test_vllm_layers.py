"""vLLM 0.33's own LoRA layers and LRU manager compute through lora_core, on a CPU.

vLLM's wheel is unpacked beside the torch that is here, without installing its requirements; what its
modules import is fetched too, once, into build/engines. `LORA_CORE_TEST_VLLM` names folders that have
both already.
"""

from __future__ import annotations

import pytest

from tests.integrations.engines import folders_of, report_of

pytestmark = pytest.mark.slow

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


@pytest.fixture(scope="module")
def vllm() -> list[str]:
    """Folders with vLLM and with what it imports."""
    return folders_of(VLLM, IMPORTS)


@pytest.mark.parametrize("backend", ["torch", "triton", "csgmv"])
def test_layers_of_vllm_compute_each_rows_own_adapter(vllm, backend):
    environment = {
        "LORA_CORE_VLLM": backend,
        "VLLM_TARGET_DEVICE": "cpu",
        **({"TRITON_INTERPRET": "1"} if backend != "torch" else {}),
    }
    report = report_of("vllm_engine.py", vllm, environment)
    assert report["wrapper"] == "lora_core.integrations._vllm_punica"
    assert report["backend"] == backend
    assert set(report["layers"]) == LINEAR | {
        "LogitsProcessorWithLoRA",
        "VocabParallelEmbeddingWithLoRA",
    }
    assert len(report["errors"]) == 5 * 5  # forwards, each through every layer
    assert max(report["errors"].values()) < 2e-6, report["errors"]
