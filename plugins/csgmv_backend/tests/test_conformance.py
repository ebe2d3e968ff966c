from lora_core.testing import BackendConformance


class TestCsgmv(BackendConformance):
    backend = "csgmv"
