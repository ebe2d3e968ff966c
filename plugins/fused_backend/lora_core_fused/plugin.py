"""What lora_core discovers: one backend, described without importing torch or triton."""

from __future__ import annotations

from lora_core import BackendSpec, hookimpl


@hookimpl
def lora_core_backends() -> list[BackendSpec]:
    """The `fused` backend."""
    return [
        BackendSpec(
            name="fused",
            summary="base product and LoRA in one kernel, for CUDA GPUs; computes the base itself",
            target="lora_core_fused.backend:FusedBackend",
            priority=50,
        )
    ]
