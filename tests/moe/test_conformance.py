"""The reference for experts passes the suite that others are held to."""

from __future__ import annotations

from lora_core.testing import MoEConformance


class TestTorchExperts(MoEConformance):
    backend = "torch"
    device = "cpu"
    level = "standard"
