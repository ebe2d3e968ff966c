"""Backends that cannot be loaded here."""

from __future__ import annotations

from typing import ClassVar

import torch

from lora_core.torch_backend import TorchBackend


class Tomorrow(TorchBackend):
    name: ClassVar[str] = "tomorrow"
    contract: ClassVar[str] = "1.99"


class Renamed(TorchBackend):
    name: ClassVar[str] = "another"


class Elsewhere(TorchBackend):
    name: ClassVar[str] = "elsewhere"

    @classmethod
    def unavailable_reason(cls, device: torch.device | None = None) -> str | None:
        return "the abacus is not plugged in"


class Nervous(TorchBackend):
    name: ClassVar[str] = "nervous"

    @classmethod
    def unavailable_reason(cls, device: torch.device | None = None) -> str | None:
        raise OSError("driver\nnot found")
