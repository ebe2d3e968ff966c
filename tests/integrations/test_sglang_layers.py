"""SGLang 0.5.23's own LoRA manager, memory pool and layers compute through lora_core, on a CPU.

SGLang's wheel is unpacked, without its requirements, beside the torch that is here; it is fetched
once, into build/engines. `LORA_CORE_TEST_SGLANG` names folders that have it and what it imports.
"""

from __future__ import annotations

import pytest

from tests.integrations.engines import folders_of, report_of

pytestmark = pytest.mark.slow

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


@pytest.fixture(scope="module")
def sglang() -> list[str]:
    """Folders with SGLang and with what it imports."""
    return folders_of(SGLANG, ["msgspec"])


@pytest.mark.parametrize(
    ("dense", "experts"), [("torch", "torch"), ("triton", "virtual_experts"), ("csgmv", "auto")]
)
def test_layers_of_sglang_compute_each_rows_own_adapter(sglang, dense, experts):
    environment = {
        "LORA_CORE_SGLANG": dense,
        "LORA_CORE_SGLANG_MOE": experts,
        "TRITON_INTERPRET": "1",  # SGLang's Triton backend runs beside
    }
    report = report_of("sglang_engine.py", sglang, environment, sglang[0])
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
