"""What a backend remembers, found by walking the object: nothing has to be listed by its author."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lora_core.backend import LoRABackend
from lora_core.testing.compare import same_bits
from lora_core.testing.engine import Violation

_HOMES = frozenset({"scratch", "sync", "static", "staging"})
"""Of the workspace: memory that may change; checked in other ways."""

_ATOMS = (
    int,
    float,
    complex,
    str,
    bytes,
    bool,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    range,
)
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type)


@dataclass(frozen=True)
class _TensorState:
    """A tensor by identity and content."""

    address: int
    value: Tensor

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _TensorState)
            and self.address == other.address
            and same_bits(self.value, other.value)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"tensor {tuple(self.value.shape)} {self.value.dtype} at {self.address:#x}, {self.value.flatten()[:6].tolist()}"


Snapshot = dict[str, Any]


def remember(backend: LoRABackend[Any]) -> Snapshot:
    """Every value reachable from the instance and from its classes, by path.

    Left out: `batch_info`, and the homes of the workspace.
    """
    found: Snapshot = {}
    seen: set[int] = set()
    own = {
        name: value
        for name, value in vars(backend).items()
        if name not in {"batch_info", "workspace"}
    }
    _walk(own, "self", found, seen)
    homes = {name: value for name, value in vars(backend.workspace).items() if name not in _HOMES}
    _walk(homes, "self.workspace", found, seen)
    for cls in type(backend).__mro__:
        if not cls.__module__.startswith(("builtins", "abc", "typing")):
            data = {n: v for n, v in vars(cls).items() if not n.startswith("__") and _is_data(v)}
            _walk(data, cls.__name__, found, seen)
    return found


def remember_value(value: Any, path: str) -> Snapshot:
    """Every value reachable from one, by path."""
    found: Snapshot = {}
    _walk(value, path, found, set())
    return found


def assert_remembers_nothing(before: Snapshot, after: Snapshot, when: str) -> None:
    """Both snapshots are equal.

    Raises:
        Violation: with the paths that appeared, vanished or changed.
    """
    lines = [f"{path} appeared: {after[path]!r}" for path in after if path not in before]
    lines += [f"{path} vanished" for path in before if path not in after]
    lines += [
        f"{path} changed from {before[path]!r} to {after[path]!r}"
        for path in before
        if path in after and before[path] != after[path]
    ]
    if lines:
        raise Violation(
            "B2",
            f"the backend remembers something outside batch_info {when}: " + "; ".join(lines[:6]),
        )


def _is_data(value: object) -> bool:
    return not isinstance(value, (*_CODE, classmethod, staticmethod, property)) and not callable(
        value
    )


def _walk(value: Any, path: str, found: Snapshot, seen: set[int]) -> None:
    if isinstance(value, Tensor):
        found[path] = _TensorState(value.data_ptr(), value.detach().clone())
    elif isinstance(value, (*_ATOMS, *_CODE)):
        found[path] = value
    elif id(value) in seen:
        found[path] = f"<seen {type(value).__name__}>"
    else:
        seen.add(id(value))
        found[path] = f"<{type(value).__name__}>"
        for key, child in _children(value):
            _walk(child, f"{path}{key}", found, seen)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield (
                f"[{key!r}]" if not isinstance(key, str) or not key.isidentifier() else f".{key}",
                child,
            )
    elif isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            yield f"[{index}]", child
    elif isinstance(value, (set, frozenset)):
        for child in sorted(value, key=repr):
            yield f"{{{child!r}}}", child
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield f".{field.name}", getattr(value, field.name, None)
    elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        yield ".bytes", value.tobytes()
    else:
        for name, child in getattr(value, "__dict__", {}).items():
            yield f".{name}", child
        for cls in type(value).__mro__:
            for name in getattr(cls, "__slots__", ()):
                if isinstance(name, str) and hasattr(value, name) and not name.startswith("__"):
                    yield f".{name}", getattr(value, name)
