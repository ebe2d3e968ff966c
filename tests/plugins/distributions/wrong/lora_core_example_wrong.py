"""Registers well, and leads nowhere."""

from lora_core import BackendSpec, hookimpl


@hookimpl
def lora_core_backends() -> list[BackendSpec]:
    module = "lora_core_example_wrong_backends"
    return [
        BackendSpec("nowhere", "its module is missing", "lora_core_example_missing:Backend"),
        BackendSpec("classless", "its class is missing", f"{module}:Missing"),
        BackendSpec("tomorrow", "written against a later contract", f"{module}:Tomorrow"),
        BackendSpec("renamed", "its class has another name", f"{module}:Renamed"),
        BackendSpec("elsewhere", "needs what is not there", f"{module}:Elsewhere"),
        BackendSpec("nervous", "its own check of the hardware fails", f"{module}:Nervous"),
    ]
