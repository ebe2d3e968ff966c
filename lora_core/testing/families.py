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


def every_family() -> list[Family[Any]]:
    """Every family that this release has."""
    return [_import(*home) for home in _HOMES.values()]


def family_of(name: str) -> Family[Any]:
    """The family that a backend is registered in; dense where a name is in both.

    Raises:
        BackendNotFoundError: no backend has that name.
    """
    for family, home in _HOMES.items():
        if name in registry().found[family]:
            return _import(*home)
    load_backend(name)  # raises, naming what there is
    raise BackendNotFoundError(name)


def _import(module: str, attribute: str) -> Family[Any]:
    family: Family[Any] = getattr(import_module(module), attribute)
    return family
