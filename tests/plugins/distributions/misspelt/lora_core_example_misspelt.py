"""Implements `lora_core_backend`; the hook is `lora_core_backends`."""

from lora_core import BackendSpec, hookimpl


@hookimpl
def lora_core_backend() -> list[BackendSpec]:
    return [BackendSpec("unheard", "never found", "lora_core_example_misspelt:Nothing")]
