"""What every wrapped module shares: when it is active, and what it shows of the module it wraps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, ClassVar, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from lora_core.backend import BaseModule, LoRABackend
from lora_core.errors import LoRACoreError, NoBatchPreparedError, UnsupportedOpError
from lora_core.sites import Site
from lora_core.weights import LoRAWeights


class ForwardGate:
    """One per manager, read by all of its layers before each call.

    Attributes:
        backend: the instance whose batch is live: that of the current lane.
        adapters_loaded: how many adapters the manager holds; with none, nobody can forget to prepare.
        base_allowed: whether running the base model without a batch is intended right now
            (`manager.idle()`, `manager.base_only()`).
    """

    __slots__ = ("adapters_loaded", "backend", "base_allowed")

    def __init__(self, backend: LoRABackend[Any]) -> None:
        self.backend = backend
        self.adapters_loaded = 0
        self.base_allowed = False


class LoRALayer(nn.Module):
    """A module with adapters around `base_layer`, indistinguishable from it while inactive.

    The wrapper shares the base's own parameters, buffers and children (the same dictionaries) and
    leaves saving, loading and moving them to the base, so `state_dict`, `named_parameters` and
    `.to()` see the base's names and nothing else; every other attribute of the base is visible
    through the wrapper.

    Args:
        base_layer: the module to wrap; it is never changed.
        site: its place in the model.
        gate: of the manager.

    Attributes:
        base: `base_layer` as backends see it, made once.
        dtype: of the activations that the site computes with, and so of its adapters.
        weights: of the site, None until the manager puts adapters there.
        handle: int64 scalar on the host, what compiled graphs call this layer by; a tensor, because
            graphs are shared by layers that differ in tensors, but specialised to integers.
    """

    base_layer: nn.Module
    base: BaseModule
    dtype: torch.dtype
    site: Site
    gate: ForwardGate
    weights: LoRAWeights | None
    handle: Tensor

    live: ClassVar[WeakValueDictionary[int, LoRALayer]] = WeakValueDictionary()
    """Every layer that exists, by handle."""

    _handles: ClassVar[count[int]] = count()

    def __init__(self, base_layer: nn.Module, site: Site, gate: ForwardGate) -> None:
        super().__init__()
        for shared in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
            object.__setattr__(self, shared, getattr(base_layer, shared))
        # not registered: a child would show up in state_dict under a name of its own
        object.__setattr__(self, "base_layer", base_layer)
        self.training = base_layer.training
        self.site, self.gate, self.weights = site, gate, None
        number = next(self._handles)
        self.handle = torch.tensor(number, device="cpu")
        self.live[number] = self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_layer":
                raise
            return getattr(self.base_layer, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise LoRACoreError(
            f"{self.site.name}: a wrapped layer cannot be copied, because the copy would share its manager and "
            "its batches. Detach first, copy, attach both."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_layer!r})"

    # -- the base owns its tensors: its class may have its own way with them ----------------------

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        move: Any = self.base_layer._apply  # noqa: SLF001 - a module's way to override .to()
        move(fn, recurse)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.base_layer._save_to_state_dict(destination, prefix, keep_vars)  # noqa: SLF001 - likewise

    def _load_from_state_dict(self, *args: Any) -> None:
        self.base_layer._load_from_state_dict(*args)  # noqa: SLF001 - likewise

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the base as well."""
        self.training = mode
        self.base_layer.train(mode)
        return self

    # -- when adapters apply ----------------------------------------------------------------------

    @property
    def lora_active(self) -> bool:
        """Whether adapters can apply: weights are set and a batch is prepared."""
        return self.weights is not None and self.gate.backend.batch_info is not None

    def require_intended(self, rows: int) -> None:
        """Refuse a base-model answer that nobody asked for.

        Raises:
            NoBatchPreparedError: adapters are loaded, there are rows, and no batch is prepared
                outside `manager.idle()` and `manager.base_only()`.
        """
        gate = self.gate
        if (
            rows
            and gate.adapters_loaded
            and not gate.base_allowed
            and gate.backend.batch_info is None
        ):
            raise NoBatchPreparedError(
                f"{self.site.name}: a forward of {rows} rows ran without a prepared batch while "
                f"{gate.adapters_loaded} adapters are loaded. Use `with manager.batch(...)`, or "
                "`with manager.base_only()` if the base model alone is meant."
            )

    def refuse_training(self, x: Tensor) -> None:
        """Refuse an input that a gradient is wanted of: adapters are applied outside autograd.

        Raises:
            UnsupportedOpError: `x` requires grad and gradients are enabled.
        """
        if x.requires_grad and torch.is_grad_enabled():
            raise UnsupportedOpError(
                backend=self.gate.backend.name,
                op=f"training through {self.site.name}",
                limit="inference, under torch.no_grad() or torch.inference_mode()",
                value="an input that requires grad",
            )
