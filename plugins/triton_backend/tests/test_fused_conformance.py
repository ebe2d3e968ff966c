from lora_core.testing import BackendConformance


class TestTritonFused(BackendConformance):
    backend = "triton_fused"
