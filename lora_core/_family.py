"""What dense and expert backends share: where they run, and how their definitions are checked."""

from __future__ import annotations

import inspect
from typing import ClassVar, Protocol

import torch

from lora_core.errors import ContractError


class _Claims(Protocol):
    @property
    def device_types(self) -> frozenset[str]: ...


class Placed:
    """A backend class that claims device types."""

    capabilities: ClassVar[_Claims]

    @classmethod
    def unavailable_reason(cls, device: torch.device | None = None) -> str | None:
        """Why this backend cannot run here (on `device`, or anywhere), or None when it can."""
        types = sorted(cls.capabilities.device_types)
        if device is not None and device.type not in types:
            return f"it runs on {', '.join(types)}, not on {device.type}"
        usable = [t for t in types if t != "cuda" or torch.cuda.is_available()]
        if not usable or (device is not None and device.type not in usable):
            return "torch sees no CUDA device"
        return None

    @classmethod
    def default_device(cls) -> torch.device:
        """The device used when none is named: the first CUDA device where claimed and present."""
        if "cuda" in cls.capabilities.device_types and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @classmethod
    def resolve_device(cls, device: torch.device | str | None) -> torch.device:
        """`device` with its index, or the default one."""
        resolved = torch.device(device) if device is not None else cls.default_device()
        if (
            str(resolved) == "cuda"
        ):  # without an index, it would compare unequal to its own tensors'
            resolved = torch.device("cuda", torch.cuda.current_device())
        return resolved


def still_abstract(cls: type) -> bool:
    """Whether `cls` leaves an abstract method open; `inspect.isabstract` is not set up this early."""
    return any(
        getattr(getattr(cls, name, None), "__isabstractmethod__", False) for name in dir(cls)
    )


def check_signature(family: type, cls: type, method: str) -> None:
    """Refuse an override whose parameters are not exactly those of the contract `family`.

    Raises:
        ContractError: other names, order or kinds.
    """
    wanted = inspect.signature(getattr(family, method))
    found = inspect.signature(getattr(cls, method)).parameters
    if [(p.name, p.kind) for p in wanted.parameters.values()] != [
        (p.name, p.kind) for p in found.values()
    ]:
        raise ContractError(
            f"{cls.__qualname__}.{method} has parameters ({', '.join(found)}), the contract's are {wanted}: "
            "tensors first, everything after them keyword-only, no *args or **kwargs"
        )
