"""LoRALinear: plain, transposed, packed and quantised linear modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

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
        return self.module._parameters["weight"]

    @property
    def bias(self) -> Tensor | None:
        """`[N]`, or None."""
        return self.module._parameters["bias"]

    def __call__(self, x: Tensor, /) -> Tensor:
        return self.module(x)  # type: ignore[no-any-return]


class TransposedLinear(PlainLinear):
    """transformers' Conv1D: a linear that stores its weight as `[K, N]`."""

    __slots__ = ()

    @property
    def weight(self) -> Tensor | None:
        """`[N, K]`, a view."""
        weight = self.module._parameters["weight"]
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
        return bias if isinstance(bias, Tensor) and bias.is_floating_point() and bias.dim() == 1 else None

    def __call__(self, x: Tensor, /) -> Tensor:
        out: Tensor = self.module(x)
        # the caller adds into what it gets, and a strange module may hand back its input
        return out.clone() if out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() else out


class _WholeInput:
    """A base that is called with the input as the model gave it, before it was cut into rows.

    For inputs whose rows had to be copied: some base modules round differently on another layout, and
    rows without an adapter must equal the base bit for bit.
    """

    __slots__ = ("base", "rows", "whole")

    def __init__(self, base: PlainLinear, whole: Tensor, rows: Tensor) -> None:
        self.base, self.whole, self.rows = base, whole, rows

    @property
    def weight(self) -> Tensor | None:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def __call__(self, x: Tensor, /) -> Tensor:
        if x is not self.rows:
            return self.base(x)
        out = self.base(self.whole)
        return out.reshape(-1, out.shape[-1])


class LoRALinear(LoRALayer):
    """A linear module `[..., K] -> [..., N]` with adapters, of one or several packed slices.

    Args:
        base_layer: `nn.Linear`, transformers' `Conv1D`, or anything that is called like them.
        site: its place; `site.layout` says which slices the output is packed of.
        gate: of the manager.
        dtype: of the activations; only needed where the module shows no plain weight.
    """

    base: PlainLinear

    def __init__(
        self, base_layer: nn.Module, site: Site, gate: ForwardGate, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(base_layer, site, gate)
        self.base = view_linear(base_layer)
        weight = self.base.weight
        self.dtype = dtype or (weight.dtype if weight is not None else torch.get_default_dtype())

    def forward(self, x: Tensor) -> Tensor:
        """`base_layer(x)`, plus each row's adapter while a batch is prepared."""
        return self._forward(x, logits_pass=None)

    def _forward(self, x: Tensor, *, logits_pass: int | None) -> Tensor:
        if torch.compiler.is_compiling():
            self.refuse_training(x)
            out: Tensor = self.base_layer(x)
            compiled.add_delta(x, out, self.handle, -1 if logits_pass is None else logits_pass)
            return out
        weights, backend = self.weights, self.gate.backend
        if weights is None or backend.batch_info is None or not x.numel():
            self.require_intended(x.numel())
            return self.base_layer(x)  # type: ignore[no-any-return]
        self.refuse_training(x)
        rows, base = x, self.base
        if x.dim() != 2 or x.stride(1) != 1:
            rows = x.reshape(-1, x.shape[-1]).contiguous()
            if not x.is_contiguous():
                base = _WholeInput(base, x, rows)
        if logits_pass is None:
            out = backend.linear(rows, base, weights)
        else:
            out = backend.lm_head(rows, base, weights, logits_pass=logits_pass)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])


def view_linear(module: nn.Module) -> PlainLinear:
    """How a backend gets to see a linear module: with its weight only where that is plain."""
    weight = module._parameters.get("weight")
    features = linear_features(module)
    if (
        features is not None
        and "forward" not in vars(module)
        and type(weight) in {nn.Parameter, Tensor}
        and weight is not None
        and weight.is_floating_point()
    ):
        in_features, out_features = features
        if type(module).forward is nn.Linear.forward and weight.shape == (out_features, in_features):
            return PlainLinear(module)
        if _is_conv1d(module) and weight.shape == (in_features, out_features):
            return TransposedLinear(module)
    return OpaqueLinear(module)


def linear_features(module: nn.Module) -> tuple[int, int] | None:
    """`(K, N)` of a module that looks like a linear, else None."""
    found: Any
    if _is_conv1d(module):
        found = (module.nx, module.nf)
    else:
        found = (getattr(module, "in_features", None), getattr(module, "out_features", None))
    k, n = found
    return (k, n) if isinstance(k, int) and isinstance(n, int) else None


def _is_conv1d(module: nn.Module) -> bool:
    """Whether this is transformers' Conv1D, told without importing transformers."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
