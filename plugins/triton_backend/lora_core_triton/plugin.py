"""What lora_core discovers: two backends, described without importing torch or triton."""

from __future__ import annotations

from lora_core import BackendSpec, hookimpl


@hookimpl
def lora_core_backends() -> list[BackendSpec]:
    """`triton`, and `triton_fused`, which is never taken unasked: it computes base rows itself."""
    return [
        BackendSpec(
            name="triton",
            summary="segment kernels in Triton, for CUDA GPUs",
            target="lora_core_triton.backend:TritonBackend",
            priority=100,
        ),
        BackendSpec(
            name="triton_fused",
            summary="triton, with the base product computed by its own kernel at prefill on Hopper: faster "
            "there, base rows differ from the module's by rounding",
            target="lora_core_triton.fused_backend:FusedTritonBackend",
            priority=-10,
        ),
    ]
