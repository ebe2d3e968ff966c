"""The family of dense checks: what `LoRABackend` promises."""

from __future__ import annotations

from lora_core.testing.engine import Family
from lora_core.testing.subject import Subject

DENSE: Family[Subject] = Family(
    name="dense",
    subject=Subject,
    modules=(
        "lora_core.testing.dense_values",
        "lora_core.testing.dense_laws",
        "lora_core.testing.dense_state",
        "lora_core.testing.dense_graphs",
        "lora_core.testing.dense_errors",
        "lora_core.testing.dense_property",
    ),
)
