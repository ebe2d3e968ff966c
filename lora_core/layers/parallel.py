"""Layers whose modules are cut over several ranks, as tensor parallelism does.

Each holds the part of A and B that belongs to its rank (`Site.shard`), calls the base module's own
product without its collective, adds the delta to that, and then runs the one collective that both
need. Inactive, it calls the base module as it is, collective included, so that ranks with and
without adapters meet in the same one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lora_core.errors import TensorMismatchError, UnsupportedOpError
from lora_core.layers.base import ForwardGate
from lora_core.layers.embedding import LoRAEmbedding
from lora_core.layers.linear import LoRALinear
from lora_core.sites import Shard, Site

Group = dist.ProcessGroup | None
"""The processes that share a layer; None: all."""


def local_tensor(tensor: Tensor | None) -> Tensor | None:
    """What this process holds of a tensor, plain."""
    if tensor is None:
        return None
    to_local: Any = getattr(tensor, "to_local", None)  # of a DTensor
    return (tensor if to_local is None else to_local()).detach()


class LocalLinear:
    """A rank's own product of a sharded linear, without any collective: what backends get as base.

    Args:
        module: has the rank's part of `weight`, and of `bias`.
        bias: whether `bias` belongs to this product; of a row-parallel linear it is added later.
    """

    __slots__ = ("_bias", "module")

    def __init__(self, module: nn.Module, *, bias: bool) -> None:
        self.module, self._bias = module, bias

    @property
    def weight(self) -> Tensor | None:
        """`[N, K]`, this rank's."""
        return local_tensor(self.module.weight)  # type: ignore[arg-type]

    @property
    def bias(self) -> Tensor | None:
        """`[N]`, this rank's, or None."""
        return self.whole_bias if self._bias else None

    @property
    def whole_bias(self) -> Tensor | None:
        """The module's bias, here or added later."""
        return local_tensor(getattr(self.module, "bias", None))

    def __call__(self, x: Tensor, /) -> Tensor:
        """The product."""
        weight = self.weight
        assert weight is not None
        return functional.linear(x, weight, self.bias)


class LocalEmbedding:
    """A rank's own rows of an embedding, looked up by local ids."""

    __slots__ = ("module",)

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def weight(self) -> Tensor | None:
        """`[V, N]`, this rank's."""
        return local_tensor(self.module.weight)  # type: ignore[arg-type]

    @property
    def bias(self) -> Tensor | None:
        """None: embeddings have none."""
        return None

    def __call__(self, input_ids: Tensor, /) -> Tensor:
        """The rows."""
        weight = self.weight
        assert weight is not None
        return functional.embedding(input_ids, weight)


class _LoRAParallelLinear(LoRALinear):
    """What column- and row-parallel layers share.

    Args:
        base_layer: holds this rank's `weight` `[N, K]`; its call includes its collective.
        site: the whole module's, with the `shard` of this rank.
        gate: of the manager.
        group: the processes that share this layer, not those of the world.
    """

    bias_first = True

    def __init__(
        self, base_layer: nn.Module, site: Site, gate: ForwardGate, *, group: Group = None
    ) -> None:
        weight = local_tensor(base_layer.weight)  # type: ignore[arg-type]
        assert weight is not None
        if not weight.is_floating_point():
            raise UnsupportedOpError(
                backend="sharded layers",
                op=f"adapters on {site.name}",
                limit="weights of plain floating-point numbers",
                value=str(weight.dtype),
            )
        super().__init__(base_layer, site, gate, dtype=weight.dtype)
        self.base = self.local = LocalLinear(base_layer, bias=self.bias_first)
        self.group, self.ranks = group, dist.get_world_size(group)
        _check_shape(site, weight, (site.local.layout.out_features, site.local.in_features))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward(self, x: Tensor, *, logits_pass: int | None) -> Tensor:
        if not (self.lora_active and x.numel()):
            return super()._forward(x, logits_pass=logits_pass)
        return self._join(super()._forward(self._part(x), logits_pass=logits_pass))

    def _part(self, x: Tensor) -> Tensor:
        """The input of this rank's product."""
        return x

    def _join(self, out: Tensor) -> Tensor:
        """This rank's product, delta included, to the layer's output."""
        raise NotImplementedError


class LoRAColumnParallelLinear(_LoRAParallelLinear):
    """Column-parallel, merged and q|k|v linears: B is sharded by outputs, A is whole on every rank.

    `gather_output` of the base module, False where it has none, says whether the ranks' outputs are
    put side by side.
    """

    def __init__(
        self,
        base_layer: nn.Module,
        site: Site,
        gate: ForwardGate,
        *,
        group: Group = None,
        gather_output: bool | None = None,
    ) -> None:
        super().__init__(base_layer, site, gate, group=group)
        own = getattr(base_layer, "gather_output", False)
        self.gathers = bool(own if gather_output is None else gather_output)

    def _join(self, out: Tensor) -> Tensor:
        return side_by_side(out, self.group) if self.gathers else out


class LoRARowParallelLinear(_LoRAParallelLinear):
    """Row-parallel linears: A is sharded by inputs, B is whole; one all-reduce for base and delta.

    `reduce_results` of the base module, True where it has none, says whether the ranks' outputs are
    summed here; the bias is added after that, and without it by the first rank alone.
    `input_is_parallel`, True where it has none, says whether the input is this rank's part already.
    """

    bias_first = False

    def __init__(
        self,
        base_layer: nn.Module,
        site: Site,
        gate: ForwardGate,
        *,
        group: Group = None,
        input_is_parallel: bool | None = None,
    ) -> None:
        super().__init__(base_layer, site, gate, group=group)
        own = getattr(base_layer, "input_is_parallel", True)
        self.takes_part = bool(own if input_is_parallel is None else input_is_parallel)

    def _part(self, x: Tensor) -> Tensor:
        part = self.site.shard and self.site.shard.inputs
        return x if self.takes_part or not part else x[..., part.start : part.stop]

    def _join(self, out: Tensor) -> Tensor:
        reduces = getattr(self.base_layer, "reduce_results", True)
        if reduces and self.ranks > 1:
            out = out.contiguous()
            dist.all_reduce(out, group=self.group)
        bias = self.local.whole_bias
        first = self.site.shard is None or self.site.shard.is_first
        return out if bias is None or not (reduces or first) else out + bias


class LoRAParallelLMHead(LoRAColumnParallelLinear):
    """A head cut by vocabulary; gathered logits lose the columns that only pad the last ranks."""

    def forward(self, x: Tensor, *, logits_pass: int = 0) -> Tensor:
        """`base_layer(x)`, plus each row's adapter while a batch is prepared.

        Args:
            x: `[..., K]`, the rows of the pass in request order.
            logits_pass: which pass of the batch.
        """
        out: Tensor = self._forward(x, logits_pass=logits_pass)
        return out

    def _join(self, out: Tensor) -> Tensor:
        joined: Tensor = super()._join(out)
        if self.gathers:
            joined = joined[..., : self.site.layout.out_features]
        return joined


class LoRAVocabParallelEmbedding(LoRAEmbedding):
    """An embedding cut by vocabulary: A is sharded with it, one all-reduce for base and delta.

    Args:
        base_layer: holds this rank's rows of `weight`, padding included.
        site: the whole module's, with the `shard` of this rank.
        gate: of the manager.
        group: the processes that share this layer.
    """

    def __init__(
        self, base_layer: nn.Module, site: Site, gate: ForwardGate, *, group: Group = None
    ) -> None:
        super().__init__(base_layer, site, gate)  # type: ignore[arg-type]
        self.base = local = LocalEmbedding(base_layer)
        self.group, self.ranks = group, dist.get_world_size(group)
        self.vocabulary = (site.shard or Shard()).inputs or range(site.in_features)
        weight = local.weight
        assert weight is not None
        _check_shape(site, weight, (len(self.vocabulary), site.layout.out_features))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input_ids: Tensor) -> Tensor:
        """`base_layer(input_ids)`, plus each row's adapter while a batch is prepared."""
        weights, backend = self.weights, self.gate.backend
        if weights is None or backend.batch_info is None or not input_ids.numel():
            return super().forward(input_ids)
        local = input_ids.reshape(-1) - self.vocabulary.start
        elsewhere = (local < 0) | (local >= len(self.vocabulary))
        out = backend.embedding(local.masked_fill(elsewhere, 0), self.base, weights)
        out = out.masked_fill(elsewhere.unsqueeze(1), 0).contiguous()
        if self.ranks > 1:
            dist.all_reduce(out, group=self.group)
        return self._scale(out.view(input_ids.shape + out.shape[-1:]))


def side_by_side(out: Tensor, group: Group) -> Tensor:
    """`[..., N]` of every rank, in their order, along the last dimension."""
    out = out.contiguous()
    parts = [torch.empty_like(out) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, out, group=group)
    return torch.cat(parts, dim=-1)


def _check_shape(site: Site, weight: Tensor, expected: tuple[int, int]) -> None:
    if tuple(weight.shape) != expected:
        raise TensorMismatchError(
            f"{site.name}: this rank's weight is {tuple(weight.shape)}, but its shard of the site is {expected}: "
            f"{site.shard}"
        )
