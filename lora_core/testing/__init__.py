"""The conformance suite for backends: subclass one class, name the backend, and have every check.

Lazy: importing this imports neither torch nor pydantic; a name does when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lora_core.testing.conformance import BackendConformance as BackendConformance
    from lora_core.testing.conformance import Conformance as Conformance
    from lora_core.testing.conformance import MoEConformance as MoEConformance
    from lora_core.testing.dense_case import DenseCase as DenseCase
    from lora_core.testing.engine import CheckFailed as CheckFailed
    from lora_core.testing.engine import Family as Family
    from lora_core.testing.engine import NotRunHere as NotRunHere
    from lora_core.testing.runner import run_check as run_check
    from lora_core.testing.subject import Subject as Subject

_HOMES = {
    "BackendConformance": "conformance",
    "CheckFailed": "engine",
    "Conformance": "conformance",
    "DenseCase": "dense_case",
    "Family": "engine",
    "MoEConformance": "conformance",
    "NotRunHere": "engine",
    "Subject": "subject",
    "run_check": "runner",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 - the names are the keys of _HOMES


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'lora_core.testing' has no attribute {name!r}")
    value = getattr(import_module(f"lora_core.testing.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
