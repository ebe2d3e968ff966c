"""The entry point of this distribution. Imports neither torch nor triton."""

from __future__ import annotations

from lora_core import BackendSpec, hookimpl


@hookimpl
def lora_core_backends() -> list[BackendSpec]:
    """What this distribution brings."""
    return [
        BackendSpec(
            name="grouped_mm",
            summary="torch._grouped_mm, a group per request",
            target="lora_core_grouped_mm.backend:GroupedMMBackend",
            priority=0,  # raise it when it is faster than what is installed besides
        )
    ]
