"""What lora_core discovers: one backend, described without importing torch or triton."""

from __future__ import annotations

from lora_core import BackendSpec, hookimpl


@hookimpl
def lora_core_backends() -> list[BackendSpec]:
    """The `triton` backend."""
    return [
        BackendSpec(
            name="triton",
            summary="segment kernels in Triton, for CUDA GPUs",
            target="lora_core_triton.backend:TritonBackend",
            priority=100,
        )
    ]
