"""The family of experts checks: what `MoELoRABackend` promises."""

from __future__ import annotations

from lora_core.testing.engine import Family
from lora_core.testing.moe_case import MoESubject

MOE: Family[MoESubject] = Family(
    name="moe",
    subject=MoESubject,
    modules=("lora_core.testing.moe_values", "lora_core.testing.moe_laws"),
)
