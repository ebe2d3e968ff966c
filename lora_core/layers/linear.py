"""LoRALinear: plain, transposed, packed and quantised linear modules."""

from __future__ import annotations

from typing import TypeGuard, cast

import torch
from torch import Tensor, nn

from lora_core.backend import BaseModule
from lora_core.layers import compiled
from lora_core.layers.base import ForwardGate, LoRALayer
from lora_core.sites import Site


class PlainLinear:
    """`nn.Linear` as a backend sees it; reads the parameters anew, so they may be replaced."""

    __slots__ = ("module",)

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def weight(self) -> Tensor | None:
        """`[N, K]`."""
        weight: Tensor | None = self.module.weight  # type: ignore[assignment]
        return weight

    @property
    def bias(self) -> Tensor | None:
        """`[N]`, or None."""
        bias: Tensor | None = self.module.bias  # type: ignore[assignment]
        return bias

    def __call__(self, x: Tensor, /) -> Tensor:
        """The module's own output."""
        out: Tensor = self.module(x)
        return out


class TransposedLinear(PlainLinear):
    """transformers' Conv1D: a linear that stores its weight as `[K, N]`."""

    __slots__ = ()

    @property
    def weight(self) -> Tensor | None:
        """`[N, K]`, a view."""
        weight = super().weight
        return None if weight is None else weight.T


class OpaqueLinear(PlainLinear):
    """A linear of unknown inside, such as a quantised one: only its call and its bias are used."""

    __slots__ = ()

    @property
    def weight(self) -> Tensor | None:
        """None: not a plain tensor."""
        return None

    @property
    def bias(self) -> Tensor | None:
        """`[N]` where the module has a plain one."""
        bias = getattr(self.module, "bias", None)
        plain = isinstance(bias, Tensor) and bias.is_floating_point() and bias.dim() == 1
        return bias if plain else None

    def __call__(self, x: Tensor, /) -> Tensor:
        """The module's own output, copied where it may be the input: the caller adds into it."""
        out: Tensor = self.module(x)
        shared = out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        return out.clone() if shared else out


class _WholeInput:
    """A base that is called with the input as the model gave it, before it was cut into rows.

    For inputs whose rows had to be copied: some modules round differently on another layout, and
    rows without an adapter must equal the base bit for bit.
    """

    __slots__ = ("_base", "_rows", "_whole")

    def __init__(self, base: BaseModule, whole: Tensor, rows: Tensor) -> None:
        self._base, self._whole, self._rows = base, whole, rows

    @property
    def weight(self) -> Tensor | None:
        return self._base.weight

    @property
    def bias(self) -> Tensor | None:
        return self._base.bias

    def __call__(self, x: Tensor, /) -> Tensor:
        if x is not self._rows:
            return self._base(x)
        out = self._base(self._whole)
        return out.reshape(-1, out.shape[-1])


class LoRALinear(LoRALayer):
    """A linear module `[..., K] -> [..., N]` with adapters, of one or several packed slices.

    Args:
        base_layer: `nn.Linear`, transformers' `Conv1D`, or anything that is called like them.
        site: its place; `site.layout` says which slices the output is packed of.
        gate: of the manager.
        dtype: of the activations; needed only where the module shows no plain weight.
    """

    def __init__(
        self,
        base_layer: nn.Module,
        site: Site,
        gate: ForwardGate,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(base_layer, site, gate)
        self.base = view_linear(base_layer)
        weight = self.base.weight
        self.dtype = dtype or (torch.get_default_dtype() if weight is None else weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`base_layer(x)`, plus each row's adapter while a batch is prepared."""
        return self._forward(x, logits_pass=None)

    def _forward(self, x: Tensor, *, logits_pass: int | None) -> Tensor:
        if torch.compiler.is_compiling():
            self.refuse_training(x)
            out: Tensor = self.base_layer(x)
            out = out.clone() if out is x else out
            compiled.add_delta(x, out, self.handle, -1 if logits_pass is None else logits_pass)
            return out
        weights, backend = self.weights, self.gate.backend
        if weights is None or backend.batch_info is None or not x.numel():
            self.require_intended(x.numel() // x.shape[-1])
            unchanged: Tensor = self.base_layer(x)
            return unchanged
        self.refuse_training(x)
        base = self.base
        if x.is_contiguous():
            rows = x if x.dim() == 2 else x.view(-1, x.shape[-1])
        elif x.dim() == 2 and x.stride(1) == 1:
            rows = x
        else:
            rows = x.reshape(-1, x.shape[-1]).contiguous()
            base = _WholeInput(base, x, rows)
        if logits_pass is None:
            out = backend.linear(rows, base, weights)
        else:
            out = backend.lm_head(rows, base, weights, logits_pass=logits_pass)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], -1)


def view_linear(module: nn.Module) -> PlainLinear:
    """How a backend gets to see a linear module: with its weight only where that is plain."""
    kind, weight, features = type(module), getattr(module, "weight", None), linear_features(module)
    if "forward" in vars(module) or features is None or not _is_plain(weight):
        return OpaqueLinear(module)
    in_features, out_features = features
    if kind.forward is nn.Linear.forward and weight.shape == (out_features, in_features):
        return PlainLinear(module)
    if _is_conv1d(module) and weight.shape == (in_features, out_features):
        return TransposedLinear(module)
    return OpaqueLinear(module)


def _is_plain(weight: object) -> TypeGuard[Tensor]:
    """Whether this holds numbers as they are: quantised weights are subclasses, or integers."""
    return type(weight) in {nn.Parameter, Tensor} and cast("Tensor", weight).is_floating_point()


def linear_features(module: nn.Module) -> tuple[int, int] | None:
    """`(K, N)` of a module that looks like a linear, else None."""
    names = ("nx", "nf") if _is_conv1d(module) else ("in_features", "out_features")
    k, n = (getattr(module, name, None) for name in names)
    return (k, n) if isinstance(k, int) and isinstance(n, int) else None


def _is_conv1d(module: nn.Module) -> bool:
    """Whether this is transformers' Conv1D, told without importing transformers."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
