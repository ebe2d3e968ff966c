"""LoRAEmbedding: token embeddings, scaled ones included."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lora_core.layers import compiled
from lora_core.layers.base import ForwardGate, LoRALayer
from lora_core.sites import Site


class PlainEmbedding:
    """`nn.Embedding` as a backend sees it."""

    __slots__ = ("module",)

    def __init__(self, module: nn.Embedding) -> None:
        self.module = module

    @property
    def weight(self) -> Tensor | None:
        """`[V, N]`."""
        return self.module.weight

    @property
    def bias(self) -> Tensor | None:
        """None: embeddings have none."""
        return None

    def __call__(self, input_ids: Tensor, /) -> Tensor:
        """The module's own output."""
        out: Tensor = self.module(input_ids)
        return out


class UnscaledEmbedding(PlainEmbedding):
    """The lookup of a scaled embedding, without the `embed_scale` that its module multiplies by."""

    __slots__ = ()

    def __call__(self, input_ids: Tensor, /) -> Tensor:
        """The rows of the weight."""
        return nn.Embedding.forward(self.module, input_ids)


class LoRAEmbedding(LoRALayer):
    """An embedding `[...] -> [..., N]` with adapters.

    Gemma's embeddings multiply what they look up by `embed_scale`; adapters are trained inside that
    factor, so it is applied after them.
    """

    base_layer: nn.Embedding

    def __init__(self, base_layer: nn.Embedding, site: Site, gate: ForwardGate) -> None:
        super().__init__(base_layer, site, gate)
        own_forward = type(base_layer).forward is not nn.Embedding.forward
        self.scaled = own_forward and hasattr(base_layer, "embed_scale")
        self.base = UnscaledEmbedding(base_layer) if self.scaled else PlainEmbedding(base_layer)
        self.dtype = base_layer.weight.dtype

    def forward(self, input_ids: Tensor) -> Tensor:
        """`base_layer(input_ids)`, plus each row's adapter while a batch is prepared."""
        if torch.compiler.is_compiling():
            out = self.base(input_ids)
            compiled.add_delta(input_ids, out, self.handle, -1)
            return self._scale(out)
        weights, backend = self.weights, self.gate.backend
        if weights is None or backend.batch_info is None or not input_ids.numel():
            self.require_intended(input_ids.numel())
            unchanged: Tensor = self.base_layer(input_ids)
            return unchanged
        out = backend.embedding(input_ids.reshape(-1), self.base, weights)
        return self._scale(out.view(input_ids.shape + out.shape[-1:]))

    def _scale(self, out: Tensor) -> Tensor:
        if not self.scaled:
            return out
        factor: Any = self.base_layer.embed_scale
        scaled: Tensor = out * (factor.to(out.dtype) if isinstance(factor, Tensor) else factor)
        return scaled
