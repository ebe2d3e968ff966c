"""Traps around a backend: poisoned memory, canary bands, inputs compared, reads by the host seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lora_core.backend import LoRABackend
from lora_core.testing.compare import bits
from lora_core.testing.engine import Violation

INT_POISON = -7
"""Where memory holds integers: no slot, no row, no length, and below zero like NO_LORA."""

_aten = torch.ops.aten
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}


def poison(tensor: Tensor) -> None:
    """Fill with what no result may contain."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(torch.nan)
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(INT_POISON if tensor.dtype.is_signed else 0xF9)


class PoisonedAllocations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it so
    """Inside, memory that torch calls uninitialised is full of NaN."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY and result.device.type != "meta":
            poison(result)
        return result


class Banded:
    """A tensor inside a larger buffer of canaries: rows and columns around it may not change.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        device: of the tensor.
        margin: elements before and after; an odd number makes the storage unaligned.
        pad_columns: further elements in each row of the last dimension, so that rows are strided.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        margin: int = 64,
        pad_columns: int = 0,
    ) -> None:
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size + (pad_columns if len(strides) == 1 else 0))
        extent = shape[0] * strides[0] if shape else 1
        self.buffer = torch.empty(extent + 2 * margin, dtype=dtype, device=device)
        poison(self.buffer)
        self._geometry = (shape, tuple(strides), margin)
        self.tensor = self.buffer.as_strided(*self._geometry)
        self._saved = self.buffer.clone()

    def arm(self) -> None:
        """Remember the buffer as it is now."""
        self._saved = self.buffer.clone()

    def check(self, name: str, *, written: bool = False) -> None:
        """Nothing changed since `arm`, or with `written` nothing outside the tensor.

        Raises:
            Violation: something did.
        """
        expected = self._saved
        if written:
            expected = self._saved.clone()
            expected.as_strided(*self._geometry).copy_(self.tensor)
        changed = bits(self.buffer) != bits(expected)
        if bool(changed.any()):
            at = int(changed.nonzero()[0]) - self._geometry[2]
            inside = "around" if written else "in or around"
            raise Violation(
                "I2" if written else "I1",
                f"{int(changed.sum())} elements {inside} {name} were written, the first at element {at} from "
                f"its beginning; the tensor is {tuple(self._geometry[0])} with strides {self._geometry[1]}",
            )


class Unchanged:
    """Named tensors that may not change between two moments."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._before = {name: (tensor, tensor.clone()) for name, tensor in tensors.items()}

    def check(self) -> None:
        """Every tensor has the bits it had.

        Raises:
            Violation: one does not.
        """
        for name, (tensor, before) in self._before.items():
            changed = bits(tensor) != bits(before)
            if bool(changed.any()):
                index = tuple(changed.nonzero()[0].tolist())
                raise Violation(
                    "I1",
                    f"{name} was written: {int(changed.sum())} elements changed, the first at {list(index)} from "
                    f"{before[index].item()!r} to {tensor[index].item()!r}",
                )


def poison_scratch(backend: LoRABackend[Any]) -> None:
    """Overwrite `workspace.scratch`, as clause I3 allows at any time between ops."""
    for tensor in backend.workspace.scratch.values():
        poison(tensor)


def assert_sync_zero(backend: LoRABackend[Any]) -> None:
    """`workspace.sync` is all zero between ops.

    Raises:
        Violation: it is not.
    """
    for name, tensor in backend.workspace.sync.items():
        if bool((tensor != 0).any()):
            found = tensor.flatten()[:8].tolist()
            raise Violation("I3", f"workspace.sync[{name!r}] is not zero after an op: {found}")


class HostReads(TorchFunctionMode):
    """Refuses to let the host read a tensor's values: on a CUDA device each would wait for it.

    On a CPU nothing waits, but the call is the same, so the rule can be watched there.
    """

    _READS = frozenset(
        {
            "item",
            "tolist",
            "numpy",
            "__bool__",
            "__int__",
            "__float__",
            "__index__",
            "__array__",
            "nonzero",
            "equal",
        }
    )

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in self._READS or (
            name in {"cpu", "to"} and self._leaves_device(name, args, kwargs or {})
        ):
            shape = tuple(args[0].shape)
            raise Violation(
                "R1", f"the host read a tensor's values: Tensor.{name}() of shape {shape}"
            )
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _leaves_device(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if name == "cpu":
            return True
        targets = [*args[1:], *kwargs.values()]
        return (
            any(
                (isinstance(t, str) and t.startswith("cpu"))
                or (isinstance(t, torch.device) and t.type == "cpu")
                for t in targets
            )
            and args[0].device.type != "cpu"
        )


@contextmanager
def no_synchronisation(device: torch.device) -> Iterator[None]:
    """Inside, waiting for the device is an error: by the driver's own watch on CUDA, else by calls."""
    if device.type == "cuda":
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    else:
        with HostReads():
            yield
