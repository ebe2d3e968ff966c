"""What every wrapped module shares: when it is active, and what it shows of the module it wraps."""

from __future__ import annotations

from typing import Any

from torch import nn

from lora_core.backend import LoRABackend
from lora_core.errors import NoBatchPreparedError
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

    The wrapper shares the base's own parameters, buffers and children (the same dictionaries), so
    `state_dict`, `named_parameters` and `.to()` see the base's names and nothing else; every other
    attribute of the base is visible through the wrapper.

    Args:
        base_layer: the module to wrap; it is never changed.
        site: its place in the model.
        gate: of the manager.
    """

    base_layer: nn.Module
    site: Site
    gate: ForwardGate
    weights: LoRAWeights | None

    def __init__(self, base_layer: nn.Module, site: Site, gate: ForwardGate) -> None:
        super().__init__()
        for shared in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
            object.__setattr__(self, shared, getattr(base_layer, shared))
        # not registered: a child would show up in state_dict under a name of its own
        object.__setattr__(self, "base_layer", base_layer)
        self.training = base_layer.training
        self.site, self.gate, self.weights = site, gate, None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_layer":
                raise
            return getattr(self.base_layer, name)

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
        if rows and gate.adapters_loaded and not gate.base_allowed and gate.backend.batch_info is None:
            raise NoBatchPreparedError(
                f"{self.site.name}: a forward of {rows} rows ran without a prepared batch while "
                f"{gate.adapters_loaded} adapters are loaded. Use `with manager.batch(...)`, or "
                "`with manager.base_only()` if the base model alone is meant."
            )
