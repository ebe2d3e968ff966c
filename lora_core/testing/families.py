"""Which family of checks a backend belongs to."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lora_core.errors import BackendNotFoundError
from lora_core.plugins import Family as FamilyName
from lora_core.plugins import load_backend, load_moe_backend, registry
from lora_core.testing.engine import Family

_HOMES: dict[FamilyName, tuple[str, str]] = {
    "dense": ("lora_core.testing.dense_family", "DENSE"),
    "moe": ("lora_core.testing.moe_family", "MOE"),
}


def every_family() -> list[Family[Any]]:
    """Every family that this release has."""
    return [_import(*home) for home in _HOMES.values()]


def family_of(name: str, family: FamilyName | None = None) -> Family[Any]:
    """The family that a backend is registered in; dense where a name is in both.

    Args:
        name: of the backend.
        family: look only there.

    Raises:
        BackendNotFoundError: no backend has that name.
    """
    for candidate, home in _HOMES.items():
        if family in (None, candidate) and name in registry().found[candidate]:
            return _import(*home)
    (load_moe_backend if family == "moe" else load_backend)(name)  # raises, naming what there is
    raise BackendNotFoundError(name)


def _import(module: str, attribute: str) -> Family[Any]:
    family: Family[Any] = getattr(import_module(module), attribute)
    return family
