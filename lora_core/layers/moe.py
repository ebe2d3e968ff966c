"""FusedMoEWithLoRA: experts with adapters, and the cores that compute their base part.

A core computes the experts of one module in two products with an activation between them, and lets
deltas in at the two places where LoRA needs it. It always returns a fresh tensor: an in-place core
and a second stream that still reads `hidden_states`, a shared expert's, would race, and inside a CUDA
graph the result would be garbage now and then. So the wrapper gives its core a configuration of its
own, out of place whatever the base module's says, and the base module keeps what it had.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lora_core.batch import BatchInfo
from lora_core.errors import TensorMismatchError, UnsupportedOpError
from lora_core.layers.base import ForwardGate, LoRALayer
from lora_core.moe import MoELoRABackend, MoELoRAWeights, MoERoute, MoERouting
from lora_core.sites import Site
from lora_core.weights import SliceLayout


@dataclass(frozen=True)
class CoreConfig:
    """How a core runs.

    Attributes:
        inplace: write the result into `hidden_states`. Faster by one allocation, and safe only while
            nobody else reads them.
    """

    inplace: bool = False


class ExpertsDeltas(Protocol):
    """What a core calls at the two places where adapters come in."""

    def gate_up(self, out: Tensor) -> None:
        """Add to the result of the first product, `[T, k, N]`, in place."""

    def down(self, x: Tensor, out: Tensor) -> None:
        """Add to the second product, in place, from the activated values `[T, k, I]`.

        `out` is `[T, k, H]`, before the router's factors, or `[T, H]`, their sum.
        """


class ExpertsCore(ABC):
    """Computes the experts of one module.

    Attributes:
        config: how it runs.
        num_experts: E, those of this rank.
        top_k_ids: ids outside of `0..E-1` contribute nothing.
    """

    config: CoreConfig
    num_experts: int

    @abstractmethod
    def with_config(self, config: CoreConfig) -> Self:
        """The same weights under another configuration; this one stays as it is."""

    @abstractmethod
    def run(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        deltas: ExpertsDeltas | None = None,
    ) -> Tensor:
        """The sum over each row's experts, times the router's factors.

        Args:
            hidden_states: `[T, H]`; written only where `config.inplace`.
            topk_ids: `[T, k]`.
            topk_weights: `[T, k]`.
            deltas: of the adapters; needs a core that is out of place.

        Returns:
            `[T, H]`; `hidden_states` itself where `config.inplace`.
        """


class TransformersExpertsCore(ExpertsCore):
    """Runs the packed experts of transformers by their own forward, and joins in at the activation.

    Everything the base computes is computed by the base's own code on its own shapes, so a row
    without an adapter gets the base's bits. Between the products it calls `self._apply_gate`, or
    `self.act_fn` of experts that are not gated: there the stand-in for `self` adds the delta, and
    keeps the activated values for the second product.
    """

    _PAIR_ORDER = ("batched_mm", "grouped_mm")

    def __init__(self, module: nn.Module, config: CoreConfig | None = None) -> None:
        self.module, self.config = module, config or CoreConfig()
        self.num_experts = int(module.num_experts)  # type: ignore[arg-type]

    def with_config(self, config: CoreConfig) -> Self:
        """Another view of the same module."""
        return type(self)(self.module, config)

    def run(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        deltas: ExpertsDeltas | None = None,
    ) -> Tensor:
        """The module's own forward, with the deltas let in."""
        module: Any = self.module
        if deltas is None:
            out: Tensor = module(hidden_states, topk_ids, topk_weights)
        else:
            stand_in = _StandIn(module, topk_ids, deltas, self._order(topk_ids))
            out = type(module).forward(stand_in, hidden_states, topk_ids, topk_weights)
            deltas.down(stand_in.activated(), out)
        return hidden_states.copy_(out) if self.config.inplace else out

    def _order(self, topk_ids: Tensor) -> Tensor | None:
        """Which pair is at which row between the products; None: pairs are in order.

        Raises:
            UnsupportedOpError: an implementation whose order is unknown.
        """
        implementation = self.module.config._experts_implementation  # type: ignore[union-attr]  # noqa: SLF001
        if implementation not in self._PAIR_ORDER:
            raise UnsupportedOpError(
                backend="transformers experts",
                op=f"adapters on {type(self.module).__name__}",
                limit=f"experts_implementation {' or '.join(self._PAIR_ORDER)}",
                value=implementation,
            )
        if implementation == "batched_mm":
            return None
        return torch.sort(topk_ids.reshape(-1)).indices  # as grouped_mm does it


class _StandIn:
    """`self` of a packed experts module for one forward: its own attributes, with deltas let in."""

    def __init__(
        self, module: nn.Module, topk_ids: Tensor, deltas: ExpertsDeltas, order: Tensor | None
    ) -> None:
        self._module, self._shape = module, topk_ids.shape
        self._deltas, self._order = deltas, order
        self._activated: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def _apply_gate(self, rows: Tensor) -> Tensor:
        return self._between(rows, self._module._apply_gate)  # noqa: SLF001 - its class has a way of its own

    @property
    def act_fn(self) -> Any:
        activation: Any = self._module.act_fn
        if self._module.has_gate:
            return activation
        return lambda rows: self._between(rows, activation)

    def _between(self, rows: Tensor, activation: Any) -> Tensor:
        order = self._order
        pairs = rows if order is None else torch.empty_like(rows).index_copy_(0, order, rows)
        self._deltas.gate_up(pairs.view(*self._shape, -1))
        activated: Tensor = activation(pairs if order is None else pairs.index_select(0, order))
        self._activated = activated
        return activated

    def activated(self) -> Tensor:
        """`[T, k, I]`, in the order of the pairs."""
        rows = self._activated
        assert rows is not None
        if self._order is not None:
            rows = torch.empty_like(rows).index_copy_(0, self._order, rows)
        return rows.view(*self._shape, -1)


def is_packed_experts(module: nn.Module) -> bool:
    """Whether a module is transformers' packed experts, weights of all experts in one tensor."""
    return all(
        hasattr(module, name) for name in ("has_gate", "is_transposed", "is_concatenated")
    ) and (isinstance(getattr(module, "down_proj", None), nn.Parameter))


def wrap_packed_experts(
    name: str, module: nn.Module, gate: ForwardGate, experts: MoELoRABackend[Any]
) -> FusedMoEWithLoRA:
    """Wrap transformers' packed experts.

    Where a base stores the outputs of gate and up in turn (`is_concatenated` is False), they are one
    slice, in the base's own order.

    Args:
        name: of the module, in the model.
        module: for which `is_packed_experts` holds.
        gate: of the manager.
        experts: the backend of the deltas.
    """
    inside: Any = module
    first = "gate_up_proj" if inside.has_gate else "up_proj"
    hidden, inner = inside.down_proj.shape[-2:]
    if inside.is_transposed:
        hidden, inner = inner, hidden
    widths: tuple[int, ...] = (inner,)
    slice_names: tuple[str, ...] = (f"{name}.{first}",)
    if inside.has_gate and inside.is_concatenated:
        widths, slice_names = (inner, inner), (f"{name}.gate_proj", f"{name}.up_proj")
    elif inside.has_gate:
        widths = (2 * inner,)
    down = f"{name}.down_proj"
    return FusedMoEWithLoRA(
        module,
        Site(f"{name}.{first}", "experts", hidden, SliceLayout(widths), slice_names),
        Site(down, "experts", inner, SliceLayout((hidden,)), (down,)),
        gate,
        experts,
    )


class ExpertsProjection:
    """gate_up or down of one experts module: a site of its own.

    Args:
        site: of kind "experts".
        dtype: of its adapters.
        experts: the backend of its deltas.
        total_experts: experts of the model.
        expert_ids: those that this rank holds, in the order of its local ids; None: all.
        transposed: the base stores this projection as `[E, in, out]`.

    Attributes:
        weights: None until adapters are put there.
    """

    def __init__(
        self,
        site: Site,
        dtype: torch.dtype,
        experts: MoELoRABackend[Any],
        *,
        total_experts: int,
        expert_ids: range | None = None,
        transposed: bool = False,
    ) -> None:
        self.site, self.dtype, self.experts = site, dtype, experts
        self.total_experts, self.transposed = total_experts, transposed
        self.expert_ids = range(total_experts) if expert_ids is None else expert_ids
        self.weights: MoELoRAWeights | None = None

    def allocate(
        self, num_slots: int, max_rank: int, *, shared_a: bool = False, shared_b: bool = False
    ) -> None:
        """Room for adapters, of which none applies yet."""
        with torch.inference_mode(False):  # else nobody could write into them outside of that mode
            self.weights = self.experts.allocate_weights(
                num_slots=num_slots,
                num_experts=len(self.expert_ids),
                max_rank=max_rank,
                in_features=self.site.in_features,
                layout=self.site.layout,
                dtype=self.dtype,
                shared_a=shared_a,
                shared_b=shared_b,
            )

    def nbytes(
        self, num_slots: int, max_rank: int, *, shared_a: bool = False, shared_b: bool = False
    ) -> int:
        """Bytes that `allocate` takes."""
        n, out = self.site.layout.num_slices, self.site.layout.out_features
        a = (1 if shared_a else len(self.expert_ids)) * n * self.site.in_features
        b = (1 if shared_b else len(self.expert_ids)) * out
        return num_slots * (max_rank * (a + b) * self.dtype.itemsize + n * 8)

    def unshare(self, *, a: bool, b: bool) -> bool:
        """Give every expert its own copy of what all of them share; whether anything changed."""
        weights = self.weights
        assert weights is not None
        a, b = a and weights.shared_a, b and weights.shared_b
        experts = len(self.expert_ids)
        if experts == 1 or not (a or b):
            return False
        with torch.inference_mode(False):
            self.weights = dataclasses.replace(
                weights,
                a=weights.a.repeat(1, experts, 1, 1, 1) if a else weights.a,
                b=weights.b.repeat(1, experts, 1, 1) if b else weights.b,
            )
        return True

    def write(
        self,
        slot: int,
        a: Sequence[Tensor | None],
        b: Sequence[Tensor | None],
        ranks: Tensor,
        scalings: Tensor,
    ) -> None:
        """Put an adapter into a slot, without waiting for the device.

        Args:
            slot: where to.
            a: per slice `[E or 1, r, K]`, None for none.
            b: per slice `[E or 1, width, r]`.
            ranks: int32 `[n_slices]`.
            scalings: float32 `[n_slices]`.
        """
        weights = self.weights
        assert weights is not None
        offsets = weights.layout.offsets
        for s, (own_a, own_b) in enumerate(zip(a, b, strict=True)):
            if own_a is not None and own_b is not None:
                rank = own_b.shape[-1]
                weights.a[slot, :, s, :rank].copy_(own_a, non_blocking=True)
                own = weights.b[slot, :, offsets[s] : offsets[s + 1], :rank]
                own.copy_(own_b, non_blocking=True)
        weights.ranks[slot].copy_(ranks, non_blocking=True)
        weights.scalings[slot].copy_(scalings, non_blocking=True)


class FusedMoEWithLoRA(LoRALayer):
    """An experts module with adapters on its two projections.

    The slots of its rows come from the batch of the dense backend, or, where rows were gathered from
    other ranks, travel with them: `forward(..., slots=...)` applies adapters also while this rank
    is idle.

    Args:
        base_layer: called as `(hidden_states, topk_ids, topk_weights)`.
        gate_up: site of the first projection.
        down: site of the second.
        gate: of the manager.
        experts: the backend of the deltas.
        core: computes the base part; None: `base_layer.core` if it has one, else transformers' own.
        dtype: of the activations; None: that of the base's parameters.
        expert_map: int32 `[global experts]`, global id -> local id, where `topk_ids` are global.
        total_experts: experts of the model; None: those of the core.
        expert_ids: the model's experts that this rank holds, for expert parallelism; None: all.

    Raises:
        TensorMismatchError: the two sites, or the numbers of experts, do not fit each other.
    """

    def __init__(
        self,
        base_layer: nn.Module,
        gate_up: Site,
        down: Site,
        gate: ForwardGate,
        experts: MoELoRABackend[Any],
        *,
        core: ExpertsCore | None = None,
        dtype: torch.dtype | None = None,
        expert_map: Tensor | None = None,
        total_experts: int | None = None,
        expert_ids: range | None = None,
    ) -> None:
        super().__init__(base_layer, gate_up, gate)
        inner = gate_up.layout.out_features
        if inner not in {down.in_features, 2 * down.in_features} or (
            gate_up.in_features != down.layout.out_features
        ):
            raise TensorMismatchError(
                f"{gate_up.name} maps {gate_up.in_features} to {inner} and {down.name} maps "
                f"{down.in_features} to {down.layout.out_features}: these are no two projections of one "
                "experts module"
            )
        self.experts, self.expert_map = experts, expert_map
        own = core or getattr(base_layer, "core", None) or TransformersExpertsCore(base_layer)
        # its own copy: a shared expert on a second stream may still read hidden_states
        self.core = own.with_config(dataclasses.replace(own.config, inplace=False))
        self.dtype = dtype or next(base_layer.parameters()).dtype
        held = range(self.core.num_experts) if expert_ids is None else expert_ids
        if len(held) != self.core.num_experts:
            raise TensorMismatchError(
                f"{gate_up.name}: expert_ids names {len(held)} experts, but this rank's core has "
                f"{self.core.num_experts}"
            )
        self.gate_up, self.down = (
            ExpertsProjection(
                site,
                self.dtype,
                experts,
                total_experts=total_experts or len(held),
                expert_ids=held,
                transposed=bool(getattr(base_layer, "is_transposed", False)),
            )
            for site in (gate_up, down)
        )

    @property
    def lora_active(self) -> bool:
        """Whether adapters can apply: one of the projections has weights, and a batch is prepared."""
        return self._has_weights and self.gate.backend.batch_info is not None

    @property
    def _has_weights(self) -> bool:
        return self.gate_up.weights is not None or self.down.weights is not None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        slots: Tensor | None = None,
    ) -> Tensor:
        """The base's result plus each pair's delta, a fresh tensor.

        Args:
            hidden_states: `[T, H]`; never written.
            topk_ids: `[T, k]`.
            topk_weights: `[T, k]`.
            slots: int32 `[T]`, slots that travelled with gathered rows; None: rows are those of the
                prepared batch.
        """
        rows = topk_ids.shape[0]
        routing = self._routing(topk_ids, topk_weights, slots)
        if routing is None or routing.inert:
            if slots is None:
                self.require_intended(rows)
            return self.core.run(hidden_states, topk_ids, topk_weights)
        self.refuse_training(hidden_states)
        deltas = _Deltas(self, hidden_states, self.experts.route(routing))
        return self.core.run(hidden_states, topk_ids, topk_weights, deltas=deltas)

    def _routing(
        self, topk_ids: Tensor, topk_weights: Tensor, slots: Tensor | None
    ) -> MoERouting | None:
        weights = self.gate_up.weights or self.down.weights
        if weights is None:
            return None
        return MoERouting(
            topk_ids=topk_ids,
            topk_weights=topk_weights,
            slots=self._own_slots(topk_ids.shape[0]) if slots is None else slots,
            num_experts=weights.num_experts,
            num_slots=weights.num_slots,
            expert_map=self.expert_map,
        )

    def _own_slots(self, rows: int) -> Tensor | None:
        """Slots of this rank's batch, computed once per eager forward for all of its layers."""
        info = self.gate.backend.batch_info
        if info is None or info.graph is not None:  # a capture must record how slots are found
            return self.experts.row_slots(info, rows)
        slots = _row_slots.get(info)
        if slots is None or slots.shape[0] != rows:
            slots = self.experts.row_slots(info, rows)
            if slots is not None:
                _row_slots[info] = slots
        return slots


_row_slots: WeakKeyDictionary[BatchInfo, Tensor] = WeakKeyDictionary()


class _Deltas:
    """The adapters of one forward of one layer."""

    def __init__(self, layer: FusedMoEWithLoRA, hidden_states: Tensor, route: MoERoute) -> None:
        self._layer, self._x, self._route = layer, hidden_states, route

    def gate_up(self, out: Tensor) -> None:
        weights = self._layer.gate_up.weights
        if weights is not None:
            self._layer.experts.gate_up(self._x, weights, self._route, out)

    def down(self, x: Tensor, out: Tensor) -> None:
        weights = self._layer.down.weights
        if weights is not None:
            self._layer.experts.down(x, weights, self._route, out)
