import pytest

from lora_core.testing import BackendConformance


@pytest.mark.slow
class TestTritonFused(BackendConformance):
    backend = "triton_fused"
