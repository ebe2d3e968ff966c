from lora_core.testing import BackendConformance


class TestFused(BackendConformance):
    backend = "fused"
