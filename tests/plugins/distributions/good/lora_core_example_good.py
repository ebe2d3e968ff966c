"""The plugin: says what it has, and imports nothing heavy."""

from lora_core import BackendSpec, hookimpl


@hookimpl
def lora_core_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="example",
            summary="one product per request, in float64",
            target="lora_core_example_good_backend:ExampleBackend",
            priority=-10,
        )
    ]
