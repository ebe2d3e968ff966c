"""The contract for experts: MoELoRABackend, and the values that go in and out of it.

A *pair* is one (token, expert) that the router chose; its *virtual expert* is (slot, expert), the
adapter's own expert. Tokens are grouped by virtual expert once per forward: `route` does that, and
both projections of every layer that shares the routing use the result. The backend keeps no state
about a batch: everything a forward needs is in its `MoERoute`, so there is nothing to reset.

Expert kernels do not depend on the dense backend. All they take from it is the slot of each row:

- local layout, `MoERouting.local(info, ...)`: the rows are those of this rank's prepared batch;
- global layout, `MoERouting(slots=...)`: the slots travelled with rows gathered from other ranks, so
  that a rank whose own batch is empty still applies their adapters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from lora_core import contract as _contract
from lora_core._family import Placed, check_signature, still_abstract
from lora_core.backend import BackendConfig
from lora_core.batch import BatchInfo, token_slots
from lora_core.capabilities import DTypeName
from lora_core.errors import ContractError, TensorMismatchError, UnsupportedOpError
from lora_core.weights import SliceLayout

_ID_DTYPES = (torch.int32, torch.int64)
_METHODS = ("route", "gate_up", "down", "allocate_weights", "row_slots")


class MoECapabilities(BaseModel):
    """The claims of one expert backend; what is missing must refuse."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtypes: frozenset[DTypeName]
    device_types: frozenset[str] = Field(description="torch device types, such as 'cuda'")
    graphs: bool = Field(
        default=False, description="route, gate_up and down may be captured together"
    )
    max_rank: int | None = Field(default=None, ge=1, description="None: no limit")
    max_slices: int | None = Field(default=None, ge=1, description="None: no limit")
    deterministic: bool = Field(default=True, description="two equal runs give equal bits")


@dataclass(frozen=True, eq=False, kw_only=True)
class MoERouting:
    """Which experts each row goes to, and with which adapter: device tensors, read and never written.

    Ids of -1 or out of range, slots of `NO_LORA` or out of range: no delta, and no weight is read.

    Attributes:
        topk_ids: int32 or int64 `[T, k]`; local expert ids, or global ones if there is an `expert_map`.
        topk_weights: floating `[T, k]`, the router's factors.
        slots: int32 `[T]`, slot of each row's adapter; None: no row has one.
        num_experts: E, experts that this rank holds.
        num_slots: S, slots of the pool.
        expert_map: int32 or int64 `[global experts]`, global id -> local id or -1, for expert
            parallelism; None: `topk_ids` are local.

    Raises:
        TensorMismatchError: shapes, dtypes or devices that do not fit each other.
    """

    topk_ids: Tensor
    topk_weights: Tensor
    slots: Tensor | None
    num_experts: int
    num_slots: int
    expert_map: Tensor | None = None

    def __post_init__(self) -> None:
        ids, weights, slots, mapping = self.topk_ids, self.topk_weights, self.slots, self.expert_map
        if ids.dim() != 2 or ids.dtype not in _ID_DTYPES or ids.shape[1] < 1:
            raise TensorMismatchError(
                f"MoERouting.topk_ids is {tuple(ids.shape)} {ids.dtype}: expected [T, k] int32 or int64, k >= 1"
            )
        if weights.shape != ids.shape or not weights.is_floating_point():
            raise TensorMismatchError(
                f"MoERouting.topk_weights is {tuple(weights.shape)} {weights.dtype}: expected floating "
                f"{tuple(ids.shape)} like topk_ids"
            )
        if slots is not None and (slots.shape != ids.shape[:1] or slots.dtype != torch.int32):
            raise TensorMismatchError(
                f"MoERouting.slots is {tuple(slots.shape)} {slots.dtype}: expected int32 [{ids.shape[0]}], "
                "one per row of topk_ids"
            )
        if mapping is not None and (mapping.dim() != 1 or mapping.dtype not in _ID_DTYPES):
            raise TensorMismatchError(
                f"MoERouting.expert_map is {tuple(mapping.shape)} {mapping.dtype}: expected int32 or int64 "
                "[global experts]"
            )
        if self.num_experts < 1 or self.num_slots < 1:
            raise TensorMismatchError(
                f"MoERouting of {self.num_slots} slots and {self.num_experts} experts: both must be at least 1"
            )
        for name, tensor in (("topk_weights", weights), ("slots", slots), ("expert_map", mapping)):
            if tensor is not None and tensor.device != ids.device:
                raise TensorMismatchError(
                    f"MoERouting.{name} is on {tensor.device}, but topk_ids are on {ids.device}"
                )

    @classmethod
    def local(
        cls,
        info: BatchInfo | None,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        num_experts: int,
        num_slots: int,
        expert_map: Tensor | None = None,
    ) -> MoERouting:
        """The local layout: rows are those of a prepared dense batch, whichever backend prepared it.

        Args:
            info: `backend.batch_info` of the dense backend; None, or an eager batch without
                adapters: no row has one.
            topk_ids: `[T', k]`; rows past the batch are padding.
            topk_weights: `[T', k]`.
            num_experts: E.
            num_slots: S.
            expert_map: global id -> local id.
        """
        return cls(
            topk_ids=topk_ids,
            topk_weights=topk_weights,
            slots=local_slots(info, topk_ids.shape[0]),
            num_experts=num_experts,
            num_slots=num_slots,
            expert_map=expert_map,
        )

    @property
    def num_tokens(self) -> int:
        """T, rows, padding included."""
        return self.topk_ids.shape[0]

    @property
    def top_k(self) -> int:
        """k, experts per row."""
        return self.topk_ids.shape[1]

    @property
    def inert(self) -> bool:
        """Whether it is known on the host that no pair has an adapter: ops launch nothing."""
        return self.slots is None or self.topk_ids.shape[0] == 0


def local_slots(info: BatchInfo | None, rows: int) -> Tensor | None:
    """The slot of each row of a prepared batch, int32 `[rows]`; None: no row has an adapter.

    Args:
        info: `batch_info` of a dense backend, or None.
        rows: to cover; those past the batch are padding.
    """
    if info is None or (info.graph is None and not info.has_active_lora):
        return None
    return token_slots(info, rows)


@dataclass(frozen=True, eq=False, kw_only=True)
class MoERoute:
    """A routing, grouped: made by `route`, read by both projections; backends extend it."""

    routing: MoERouting


@dataclass(frozen=True, eq=False)
class MoELoRAWeights:
    """Stacked A and B of one projection of an experts module, over S slots and E experts.

    gate_up has K = H inputs and widths (I, I), or (I,) where experts are not gated; down has K = I
    and widths (H,). A matrix that all experts of an adapter share (shared-outer: A of gate_up, B of
    down) has 1 in place of E. Rows past a slot's rank and unused slots may hold anything.

    Attributes:
        a: `[S, E or 1, n_slices, R, K]`, contiguous in its last dimension.
        b: `[S, E or 1, N, R]`, dtype of `a`, contiguous in its last dimension.
        ranks: int32 `[S, n_slices]`, 0..R.
        scalings: float32 `[S, n_slices]`, the factor on each slice's delta.
        layout: widths of the slices, sum N.
        num_experts: E.

    Raises:
        TensorMismatchError: shapes, dtypes, devices or expert counts that do not fit each other.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    scalings: Tensor
    layout: SliceLayout
    num_experts: int

    def __post_init__(self) -> None:
        n, out = self.layout.num_slices, self.layout.out_features
        if self.a.dim() != 5 or self.a.shape[2] != n or self.a.stride(-1) != 1:
            raise TensorMismatchError(
                f"MoELoRAWeights.a has shape {tuple(self.a.shape)} and strides {self.a.stride()}: expected "
                f"[S, E, {n}, R, K], contiguous in K"
            )
        slots, _, _, max_rank, _ = self.a.shape
        if (
            self.b.dim() != 4
            or self.b.shape[0] != slots
            or tuple(self.b.shape[2:]) != (out, max_rank)
        ):
            raise TensorMismatchError(
                f"MoELoRAWeights.b has shape {tuple(self.b.shape)}: expected [{slots}, E, {out}, {max_rank}]"
            )
        if self.b.stride(-1) != 1:
            raise TensorMismatchError(
                f"MoELoRAWeights.b has strides {self.b.stride()}: its ranks must be contiguous"
            )
        for name, experts in (("a", self.a.shape[1]), ("b", self.b.shape[1])):
            if experts not in (1, self.num_experts):
                raise TensorMismatchError(
                    f"MoELoRAWeights.{name} holds {experts} experts: expected {self.num_experts}, or 1 where "
                    "all experts share it"
                )
        expected = {
            "b": (self.b, tuple(self.b.shape), self.a.dtype),
            "ranks": (self.ranks, (slots, n), torch.int32),
            "scalings": (self.scalings, (slots, n), torch.float32),
        }
        for name, (tensor, shape, dtype) in expected.items():
            if (
                tuple(tensor.shape) != shape
                or tensor.dtype != dtype
                or tensor.device != self.a.device
            ):
                raise TensorMismatchError(
                    f"MoELoRAWeights.{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}: "
                    f"expected {shape} {dtype} on {self.a.device}"
                )

    @property
    def num_slots(self) -> int:
        """S, the slots of the pool."""
        return self.a.shape[0]

    @property
    def max_rank(self) -> int:
        """R, the rank that every slot has room for."""
        return self.a.shape[3]

    @property
    def in_features(self) -> int:
        """K."""
        return self.a.shape[4]

    @property
    def shared_a(self) -> bool:
        """Whether one A serves all experts of an adapter."""
        return self.a.shape[1] == 1

    @property
    def shared_b(self) -> bool:
        """Whether one B serves all experts of an adapter."""
        return self.b.shape[1] == 1


RouteT = TypeVar("RouteT", bound=MoERoute)


class MoELoRABackend(Placed, ABC, Generic[RouteT]):
    """One family of expert kernels behind the contract. It holds no state about any batch.

    Attributes:
        name: what `load_moe_backend` calls it.
        contract: the contract version it was written against, such as "1.0".
        capabilities: what it claims.
        device: where it runs.
        config: as given to `load_moe_backend`.
    """

    name: ClassVar[str]
    contract: ClassVar[str]
    capabilities: ClassVar[MoECapabilities]

    def __init__(
        self, *, device: torch.device | str | None = None, config: BackendConfig | None = None
    ) -> None:
        self.device = self.resolve_device(device)
        self.config = config if config is not None else BackendConfig()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for method in _METHODS:
            if method in vars(cls):
                check_signature(MoELoRABackend, cls, method)
        if still_abstract(cls):
            return
        for attribute in ("name", "contract", "capabilities"):
            if not hasattr(cls, attribute):
                raise ContractError(
                    f"{cls.__qualname__} does not set the class attribute {attribute!r}"
                )
        if not isinstance(cls.capabilities, MoECapabilities):
            raise ContractError(
                f"{cls.__qualname__}.capabilities must be a lora_core.MoECapabilities"
            )
        _contract.parse_version(cls.contract)

    def allocate_weights(
        self,
        *,
        num_slots: int,
        num_experts: int,
        max_rank: int,
        in_features: int,
        layout: SliceLayout,
        dtype: torch.dtype,
        shared_a: bool = False,
        shared_b: bool = False,
    ) -> MoELoRAWeights:
        """Room for the adapters of one projection: every rank 0, so nothing is applied yet."""
        n, out = layout.num_slices, layout.out_features
        a_experts, b_experts = (1 if shared else num_experts for shared in (shared_a, shared_b))

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        return MoELoRAWeights(
            a=zeros(num_slots, a_experts, n, max_rank, in_features, dtype=dtype),
            b=zeros(num_slots, b_experts, out, max_rank, dtype=dtype),
            ranks=zeros(num_slots, n, dtype=torch.int32),
            scalings=zeros(num_slots, n, dtype=torch.float32),
            layout=layout,
            num_experts=num_experts,
        )

    def row_slots(self, info: BatchInfo | None, rows: int) -> Tensor | None:
        """The slot of each row of a prepared batch, int32 `[rows]`; None: no row has an adapter.

        Overridden by backends that find them faster; read from the request view alone.

        Args:
            info: `batch_info` of any dense backend, or None.
            rows: to cover; those past the batch are padding.
        """
        return local_slots(info, rows)

    @abstractmethod
    def route(self, routing: MoERouting) -> RouteT:
        """Group the pairs of one forward by virtual expert, for every layer with this routing.

        Nothing synchronises. The result refers to `routing`'s tensors; it is valid until they change.

        Raises:
            UnsupportedOpError: more slots, experts or ids than this backend claims.
        """

    @abstractmethod
    def gate_up(
        self,
        x: Tensor,
        weights: MoELoRAWeights,
        route: RouteT,
        out: Tensor,
        *,
        accumulate: bool = True,
    ) -> Tensor:
        """`out[t, j] += scaling * B[slot, expert] @ A[slot, expert] @ x[t]`, slice by slice.

        Args:
            x: `[T, H]`, the unquantised input of the experts; never written.
            weights: of gate_up, or of the only up projection.
            route: of this forward.
            out: `[T, k, N]` contiguous, the base's result before the activation; changed in place.
            accumulate: False: `out` is overwritten instead, zero where there is no delta, for a
                runner that adds it in a kernel of its own.

        Returns:
            `out` itself.

        Raises:
            TensorMismatchError: tensors that do not fit each other.
        """

    @abstractmethod
    def down(
        self,
        x: Tensor,
        weights: MoELoRAWeights,
        route: RouteT,
        out: Tensor,
        *,
        routed_weights: bool = False,
        accumulate: bool = True,
    ) -> Tensor:
        """`out[t, j] += scaling * B[slot, expert] @ A[slot, expert] @ x[t, j]`.

        Args:
            x: `[T, k, I]`, the activated, unquantised values of each pair; never written.
            weights: of down.
            route: of this forward.
            out: `[T, k, H]` contiguous, one row per pair; or `[T, H]`, the sum over the pairs of a
                row, each times its routing weight. Changed in place.
            routed_weights: multiply each pair's delta by its routing weight; implied for `[T, H]`.
            accumulate: as in `gate_up`.

        Returns:
            `out` itself.

        Raises:
            TensorMismatchError: tensors that do not fit each other.
        """

    # -- helpers for implementations -------------------------------------------------------------

    def _require_claimed(self, op: str, weights: MoELoRAWeights) -> None:
        """Refuse weights beyond what is claimed.

        Raises:
            UnsupportedOpError: dtype, rank or number of slices.
        """
        claims = self.capabilities
        dtype = str(weights.a.dtype).removeprefix("torch.")
        if dtype not in claims.dtypes:
            raise UnsupportedOpError(
                backend=self.name, op=op, limit=f"dtypes {sorted(claims.dtypes)}", value=dtype
            )
        for limit, asked in (
            ("max_rank", weights.max_rank),
            ("max_slices", weights.layout.num_slices),
        ):
            most = getattr(claims, limit)
            if most is not None and asked > most:
                raise UnsupportedOpError(
                    backend=self.name, op=op, limit=f"{limit} {most}", value=asked
                )

    def _require_fit(
        self, op: str, x: Tensor, weights: MoELoRAWeights, routing: MoERouting, out: Tensor
    ) -> None:
        """The checks that both projections need, in one place; host integers only.

        Raises:
            TensorMismatchError: expert or slot counts, shapes, dtypes or devices that do not fit.
            UnsupportedOpError: weights beyond what is claimed.
        """
        self._require_claimed(op, weights)
        tokens, k = routing.topk_ids.shape
        if (weights.num_experts, weights.num_slots) != (routing.num_experts, routing.num_slots):
            raise TensorMismatchError(
                f"backend {self.name!r}: {op} got weights of {weights.num_slots} slots and "
                f"{weights.num_experts} experts, but a routing of {routing.num_slots} slots and "
                f"{routing.num_experts} experts"
            )
        x_shape = (
            (tokens, weights.in_features) if op == "gate_up" else (tokens, k, weights.in_features)
        )
        if tuple(x.shape) != x_shape or x.stride(-1) != 1:
            raise TensorMismatchError(
                f"backend {self.name!r}: {op} got x of shape {tuple(x.shape)} and strides {x.stride()}, "
                f"expected {x_shape}, contiguous in its last dimension, to fit weights.a "
                f"{tuple(weights.a.shape)} and topk_ids {tuple(routing.topk_ids.shape)}"
            )
        pairs_shape, reduced = (
            (tokens, k, weights.layout.out_features),
            (tokens, weights.layout.out_features),
        )
        allowed = (pairs_shape, reduced) if op == "down" else (pairs_shape,)
        if tuple(out.shape) not in allowed or not out.is_contiguous():
            raise TensorMismatchError(
                f"backend {self.name!r}: {op} got out of shape {tuple(out.shape)} and strides {out.stride()}, "
                f"expected contiguous {' or '.join(map(str, allowed))}"
            )
        for name, tensor in (("x", x), ("out", out)):
            if tensor.dtype != weights.a.dtype or tensor.device != weights.a.device:
                raise TensorMismatchError(
                    f"backend {self.name!r}: {op} got {name} of {tensor.dtype} on {tensor.device}, but the "
                    f"adapter weights are {weights.a.dtype} on {weights.a.device}"
                )
        if routing.topk_ids.device != weights.a.device:
            raise TensorMismatchError(
                f"backend {self.name!r}: {op} got a routing on {routing.topk_ids.device}, but the adapter "
                f"weights are on {weights.a.device}"
            )
