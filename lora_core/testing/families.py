"""Which family of checks a backend belongs to."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lora_core.errors import BackendNotFoundError
from lora_core.plugins import Family as FamilyName
from lora_core.plugins import load_backend, registry
from lora_core.testing.engine import Family

_HOMES: dict[FamilyName, tuple[str, str]] = {
    "dense": ("lora_core.testing.dense_family", "DENSE"),
    "moe": ("lora_core.testing.moe_family", "MOE"),
}


def family_of(name: str) -> Family[Any]:
    """The family that a backend is registered in; dense where a name is in both.

    Raises:
        BackendNotFoundError: no backend has that name.
    """
    for family, (module, attribute) in _HOMES.items():
        if name in registry().found[family]:
            found: Family[Any] = getattr(import_module(module), attribute)
            return found
    load_backend(name)  # raises, naming what there is
    raise BackendNotFoundError(name)
