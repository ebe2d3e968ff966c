"""The one operator through which compiled graphs reach the layers.

A graph must not hold what changes between forwards: the batch, the slots, whether anything is
active. It hands the operator a layer's handle, and the operator looks the layer and its batch up
when it runs. The base product stays in the graph, and eager calls never come here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lora_core.backend import BaseModule
from lora_core.layers.base import LoRALayer

_library = torch.library.Library("lora_core", "DEF")  # type: ignore[no-untyped-call]
# cudagraph_unsafe: a recorded CUDA graph would replay the batch it was recorded with
_library.define(  # type: ignore[no-untyped-call]
    "add_delta(Tensor x, Tensor(a!) out, Tensor handle, int logits_pass) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,),
)


def add_delta(x: Tensor, out: Tensor, handle: Tensor, logits_pass: int) -> None:
    """Turn a base module's output into the layer's, in place, if a batch is prepared when this runs.

    Args:
        x: `[..., K]`, or integer ids `[...]` of an embedding.
        out: `[..., N]`, what the base module made of x.
        handle: int64 scalar on the host, of the layer.
        logits_pass: of an lm_head; -1 for other layers.
    """
    torch.ops.lora_core.add_delta(x, out, handle, logits_pass)


class _Computed:
    """A base module whose output is known already; every backend finds it through `base(x)`."""

    __slots__ = ("_base", "_out", "_x")

    def __init__(self, base: BaseModule, x: Tensor, out: Tensor) -> None:
        self._base, self._x, self._out = base, x, out

    @property
    def weight(self) -> Tensor | None:
        return self._base.weight

    @property
    def bias(self) -> Tensor | None:
        return self._base.bias

    def __call__(self, x: Tensor, /) -> Tensor:
        return self._out if x is self._x else self._base(x)


def _run(x: Tensor, out: Tensor, handle: Tensor, logits_pass: int) -> None:
    layer = LoRALayer.live[int(handle)]
    weights, backend = layer.weights, layer.gate.backend
    if weights is None or backend.batch_info is None or not x.numel():
        layer.require_intended(x.numel())
        return
    columns = out.shape[-1]
    # a base that is viewed as rows is written through; any other layout is copied back below
    target = out.view(-1, columns) if out.is_contiguous() else out.reshape(-1, columns).contiguous()
    if weights.is_embedding:
        rows = x.reshape(-1)
        result = backend.embedding(rows, _Computed(layer.base, rows, target), weights)
    else:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        base = _Computed(layer.base, rows, target)
        if logits_pass < 0:
            result = backend.linear(rows, base, weights)
        else:
            result = backend.lm_head(rows, base, weights, logits_pass=logits_pass)
    if result.data_ptr() != out.data_ptr():
        out.copy_(result.view(out.shape))


def _fake(x: Tensor, out: Tensor, handle: Tensor, logits_pass: int) -> None:
    """Nothing to infer: the operator returns nothing, and `out` keeps its shape."""


# disabled: what a backend does inside is not for dynamo to trace, whatever runs the graph
_library.impl("add_delta", torch.compiler.disable(_run), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("lora_core::add_delta", _fake, lib=_library)
