"""The dense backend under test, and how fresh instances of it are made."""

from __future__ import annotations

import os
from typing import Any

import torch

from lora_core.backend import LoRABackend
from lora_core.capabilities import Capabilities
from lora_core.contract import CONTRACT_VERSION
from lora_core.errors import BackendUnavailableError
from lora_core.plugins import load_backend
from lora_core.testing.engine import NotRunHere


class Subject:
    """A backend by name, as `load_backend` knows it, or by class; and where it is run.

    Args:
        backend: name or class.
        device: where; None leaves it to the backend.
    """

    unavailable: NotRunHere | None
    capabilities: Capabilities

    def __init__(
        self, backend: str | type[LoRABackend[Any]], *, device: torch.device | str | None = None
    ) -> None:
        self._backend, self._device = backend, device
        self.unavailable = None
        self.label = backend if isinstance(backend, str) else backend.name
        try:
            first = self.new()
        except BackendUnavailableError as error:
            self.unavailable = NotRunHere(_missing_device(device), str(error))
            self.capabilities = Capabilities(dtypes=frozenset(), device_types=frozenset())
            self.contract, self.device = CONTRACT_VERSION, torch.device("cpu")
        else:
            self.backend_class = type(first)
            self.capabilities, self.contract, self.device = (
                first.capabilities,
                first.contract,
                first.device,
            )

    def new(self) -> LoRABackend[Any]:
        """A fresh instance."""
        if isinstance(self._backend, str):
            return load_backend(self._backend, device=self._device)
        return self._backend(device=self._device)

    def as_code(self) -> str:
        """An expression that builds it again."""
        backend = self._backend if isinstance(self._backend, str) else self._backend.__qualname__
        where = "" if self._device is None else f", device={str(self._device)!r}"
        return (
            f"Subject({backend!r}{where})"
            if isinstance(self._backend, str)
            else f"Subject({backend}{where})"
        )

    @property
    def on_cuda(self) -> bool:
        """Whether it runs on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def interpreted(self) -> bool:
        """Whether Triton kernels would run in Triton's interpreter, where bfloat16 is wrong."""
        return self.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"

    def require_cuda(self) -> None:
        """For checks that only a CUDA device can run.

        Raises:
            NotRunHere: there is none, or the subject was put elsewhere.
        """
        if not self.on_cuda:
            raise NotRunHere("cuda", f"this runs on {self.device.type}")

    def require_dtype(self, dtype: str) -> None:
        """For checks in one dtype.

        Raises:
            NotRunHere: Triton's interpreter cannot compute in it.
        """
        if self.interpreted and dtype == "bfloat16":
            raise NotRunHere("cuda", "bfloat16 dots are wrong in Triton's interpreter")

    def require_bytes(self, needed: int) -> None:
        """For checks over a large address range; host memory is not touched, device memory is.

        Raises:
            NotRunHere: the device has less free memory.
        """
        if self.on_cuda:
            free, _ = torch.cuda.mem_get_info(self.device)
            if free < needed:
                raise NotRunHere(
                    "memory", f"{needed / 2**30:.1f} GiB of device memory, {free / 2**30:.1f} free"
                )


def _missing_device(device: torch.device | str | None) -> str:
    return "cuda" if device is None else torch.device(device).type
