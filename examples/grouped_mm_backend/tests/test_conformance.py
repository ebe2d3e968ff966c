"""Three lines, and every check of the contract."""

from lora_core.testing import BackendConformance


class TestGroupedMM(BackendConformance):
    """On the CPU, which is all that it claims."""

    backend = "grouped_mm"
