from lora_core.testing import MoEConformance


class TestVirtualExperts(MoEConformance):
    backend = "virtual_experts"
