"""The reference passes its own suite, with no expectation set."""

from __future__ import annotations

from lora_core.testing import BackendConformance


class TestTorch(BackendConformance):
    backend = "torch"
