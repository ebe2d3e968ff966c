from lora_core.testing import BackendConformance


class TestTriton(BackendConformance):
    backend = "triton"
