"""Claims the name of the good example."""

from lora_core import BackendSpec, hookimpl


@hookimpl
def lora_core_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            "example", "the same name again", "lora_core_example_good_backend:ExampleBackend"
        )
    ]
