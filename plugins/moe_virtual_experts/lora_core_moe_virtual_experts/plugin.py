"""What lora_core reads at discovery; imports neither torch nor triton."""

from __future__ import annotations

from lora_core.hookspecs import BackendSpec, hookimpl


@hookimpl
def lora_core_moe_backends() -> list[BackendSpec]:
    """The one backend of this distribution."""
    return [
        BackendSpec(
            "virtual_experts",
            "Triton kernels over (slot, expert) groups, sorted once per forward",
            "lora_core_moe_virtual_experts.backend:VirtualExpertsBackend",
            priority=20,
        )
    ]
