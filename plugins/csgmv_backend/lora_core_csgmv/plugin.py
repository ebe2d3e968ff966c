"""The entry point of this plugin. Imports neither torch nor triton."""

from __future__ import annotations

from lora_core.hookspecs import BackendSpec, hookimpl


@hookimpl
def lora_core_backends() -> list[BackendSpec]:
    """The one backend of this distribution."""
    return [
        BackendSpec(
            "csgmv",
            "chunked segments in Triton: rows ordered by adapter, batch-invariant, CUDA graphs",
            "lora_core_csgmv.backend:CsgmvBackend",
            priority=75,
        )
    ]
