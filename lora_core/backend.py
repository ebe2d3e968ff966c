"""LoRABackend: the contract between engines and kernels. docs/contract.md numbers its clauses."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from lora_core import contract as _contract
from lora_core._family import Placed, check_signature, still_abstract
from lora_core.batch import BatchInfo, LoRABatch
from lora_core.capabilities import Capabilities, GraphKind, Op
from lora_core.errors import (
    BatchMismatchError,
    ContractError,
    GraphNotInitializedError,
    NoBatchPreparedError,
    TensorMismatchError,
    UnsupportedOpError,
)
from lora_core.weights import LoRAWeights, SliceLayout
from lora_core.workspace import GraphRoom, Workspace

InfoT = TypeVar("InfoT", bound=BatchInfo)


class BaseModule(Protocol):
    """The wrapped module as a backend sees it: called like the module, always out of place.

    `weight` (`[N, K]`, or `[V, N]` of an embedding) and `bias` (`[N]`) are plain tensors where the
    module has such, else None: a quantised module shows no weight.
    """

    @property
    def weight(self) -> Tensor | None:
        """The plain weight, read anew at every use."""
        ...

    @property
    def bias(self) -> Tensor | None:
        """The plain bias."""
        ...

    def __call__(self, x: Tensor, /) -> Tensor:
        """The module's own output, a fresh tensor."""
        ...


class BackendConfig(BaseModel):
    """Optional sizing of a backend; plugins extend it. An unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_loras: int | None = Field(default=None, ge=1, description="slots; None: as the weights say")
    max_rank: int | None = Field(default=None, ge=1, description="None: as the weights say")


_DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}

_accepted: WeakKeyDictionary[LoRAWeights, set[type]] = WeakKeyDictionary()
"""Which classes support which weights; a pure cache, weights are frozen."""

_PAIR = ("prepare_batch", "reset_batch_state")
_METHODS = (*_PAIR, "init_graph", "shrink", "expand", "linear", "embedding", "lm_head")


class LoRABackend(Placed, ABC, Generic[InfoT]):
    """One kernel family behind the contract. One instance: one live batch, one thread, one stream.

    Attributes:
        name: what `load_backend` calls it.
        contract: the contract version it was written against, such as "1.0".
        capabilities: what it claims.
        batch_info: everything about the prepared batch, or None: no batch is prepared. This is the
            only per-batch state; other memory lives in `workspace`, in its homes.
        device: where it runs.
        config: sizing, as given to `load_backend`.
        workspace: memory that is not about a batch.
    """

    name: ClassVar[str]
    contract: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    batch_info: InfoT | None = None

    def __init__(
        self, *, device: torch.device | str | None = None, config: BackendConfig | None = None
    ) -> None:
        self.device = self.resolve_device(device)
        self.config = config if config is not None else BackendConfig()
        self.workspace = Workspace(self.device)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        overridden = [method for method in _PAIR if method in own]
        if len(overridden) == 1:
            (missing,) = set(_PAIR) - set(overridden)
            raise ContractError(
                f"{cls.__qualname__} overrides {overridden[0]} but not {missing}: the two are a pair, "
                "whatever one sets up the other must clear. Override both."
            )
        if own.get("batch_info") is not None:
            raise ContractError(
                f"{cls.__qualname__}.batch_info is {own['batch_info']!r} in the class body: it must stay "
                "None there, the value of an instance without a batch"
            )
        for method in _METHODS:
            if method in own:
                check_signature(LoRABackend, cls, method)
        if not inspect.isabstract(cls) and not still_abstract(cls):
            for attribute in ("name", "contract", "capabilities"):
                if not hasattr(cls, attribute):
                    raise ContractError(
                        f"{cls.__qualname__} does not set the class attribute {attribute!r}"
                    )
            if not isinstance(cls.capabilities, Capabilities):
                raise ContractError(
                    f"{cls.__qualname__}.capabilities must be a lora_core.Capabilities"
                )
            _contract.parse_version(cls.contract)

    # -- batch state: a required pair ----------------------------------------------------------

    @abstractmethod
    def prepare_batch(self, batch: LoRABatch, *, graph: GraphKind | None = None) -> InfoT:
        """Make `batch` the live one, and return its state.

        The previous batch is cleared first, so that after a failure `batch_info` is None. Metadata
        is built in pinned staging and goes over in one asynchronous copy; nothing synchronises.

        Args:
            batch: host integers, one entry per request.
            graph: fill the static buffers of that graph kind in place instead of new ones.

        Raises:
            GraphNotInitializedError: no `init_graph(graph)`, or the batch exceeds it.
            UnsupportedOpError: mode, graph kind or scales that are not claimed.
        """

    @abstractmethod
    def reset_batch_state(self) -> None:
        """Forget the batch: afterwards this instance behaves bit for bit like a newly built one.

        Idempotent, and legal before the first prepare. Static graph buffers stay where they are and
        are neutralised, so that a stray replay adds nothing.
        """

    def init_graph(self, kind: GraphKind, *, max_requests: int, max_tokens: int) -> None:
        """Allocate the static buffers of one graph kind, once.

        Raises:
            UnsupportedOpError: the kind is not claimed.
        """
        raise self._unclaimed_graph(kind)

    def allocate_weights(
        self,
        *,
        num_slots: int,
        max_rank: int,
        in_features: int,
        layout: SliceLayout,
        dtype: torch.dtype,
        embedding: bool = False,
    ) -> LoRAWeights:
        """Room for the adapters of one site: every rank 0, so nothing is applied yet.

        Overridden by backends whose kernels want other strides; shapes are the contract's all the
        same, and every backend accepts plain contiguous weights too.

        Args:
            num_slots: S.
            max_rank: R.
            in_features: K, or V for an embedding.
            layout: slices of the output.
            dtype: of a and b, that of the site's activations.
            embedding: A is `[S, V, R]`.
        """
        n, out = layout.num_slices, layout.out_features
        shape = (
            (num_slots, in_features, max_rank)
            if embedding
            else (num_slots, n, max_rank, in_features)
        )
        return LoRAWeights(
            a=torch.zeros(shape, dtype=dtype, device=self.device),
            b=torch.zeros(num_slots, out, max_rank, dtype=dtype, device=self.device),
            ranks=torch.zeros(num_slots, n, dtype=torch.int32, device=self.device),
            scalings=torch.zeros(num_slots, n, dtype=torch.float32, device=self.device),
            layout=layout,
        )

    # -- ops -----------------------------------------------------------------------------------

    @abstractmethod
    def shrink(self, x: Tensor, weights: LoRAWeights) -> Tensor:
        """`h[t, s] = A[slot(t), s] @ x[t]`.

        Args:
            x: `[T', K]`, T' >= T, rows in request order; last dimension contiguous.
            weights: of the site.

        Returns:
            float32 `[T', n_slices, R]`. Entries at and past a slot's rank, of NO_LORA rows and of
            padding are unspecified.
        """

    @abstractmethod
    def expand(self, h: Tensor, weights: LoRAWeights, out: Tensor) -> Tensor:
        """`out[t] += scale(t) * scaling[slot(t), s] * B[slot(t)] @ h[t, s]`, slice by slice, in place.

        Args:
            h: float32 `[T', n_slices, R]`, as `shrink` returns it.
            weights: of the site.
            out: `[T', N]`, last dimension contiguous.

        Returns:
            `out` itself.
        """

    def linear(self, x: Tensor, base: BaseModule, weights: LoRAWeights) -> Tensor:
        """`base(x)` plus the delta, `[T', N]`.

        Overridden by backends that overlap or fuse the base product.
        """
        info = self._require_linear("linear", x, weights)
        self._require_plain(weights, op="linear")
        self._require_rows("linear", x.shape[0], info.num_tokens)
        out = base(x)
        if info.graph is None and not info.has_active_lora:
            return out
        return self.expand(self.shrink(x, weights), weights, out)

    def embedding(self, input_ids: Tensor, base: BaseModule, weights: LoRAWeights) -> Tensor:
        """`base(ids)` plus `scaling * B[slot(t)] @ A[slot(t), ids[t]]`.

        Args:
            input_ids: integer `[T']`, in 0..V-1 for rows of requests.
            base: the embedding module.
            weights: `a` as `[S, V, R]`.

        Returns:
            `[T', N]`.
        """
        raise self._unclaimed(Op.EMBEDDING)

    def lm_head(
        self, x: Tensor, base: BaseModule, weights: LoRAWeights, *, logits_pass: int = 0
    ) -> Tensor:
        """`base(x)` plus the delta, over the rows of one logits pass.

        Args:
            x: `[T', K]`, T' >= rows of that pass (`LoRABatch.logits[logits_pass]`, or all rows of
                the batch when it names no passes), in request order.
            base: the head.
            weights: of the head, one slice.
            logits_pass: which pass.

        Returns:
            `[T', N]`.
        """
        raise self._unclaimed(Op.LM_HEAD)

    # -- helpers for implementations -------------------------------------------------------------

    def _require_batch(self, op: str) -> InfoT:
        """The prepared batch.

        Raises:
            NoBatchPreparedError: there is none.
        """
        info = self.batch_info
        if info is None:
            raise NoBatchPreparedError(
                f"backend {self.name!r}: {op} was called while no batch is prepared. Call prepare_batch "
                "first, or skip LoRA layers while batch_info is None."
            )
        return info

    def _require_rows(self, op: str, rows: int, needed: int) -> None:
        """Refuse an input that has fewer rows than the batch.

        Raises:
            BatchMismatchError: it has.
        """
        if rows < needed:
            raise BatchMismatchError(
                f"backend {self.name!r}: {op} got {rows} rows, but the prepared batch has {needed}. "
                "Prepare the batch that belongs to this input."
            )

    def _require_graph(
        self, kind: GraphKind, *, requests: int, tokens: int, passes: int
    ) -> GraphRoom:
        """The room of a graph kind, for a batch that fits into it.

        Raises:
            GraphNotInitializedError: no `init_graph(kind)`, or the batch exceeds it.
        """
        room = self.workspace.graph_room.get(kind)
        if room is None:
            raise GraphNotInitializedError(
                f"backend {self.name!r}: prepare_batch(graph={kind!r}) before init_graph({kind!r}, ...)"
            )
        if requests > room.max_requests or tokens > room.max_tokens or passes > 1:
            raise GraphNotInitializedError(
                f"backend {self.name!r}: a {kind!r} graph batch of {requests} requests, {tokens} tokens and "
                f"{passes} logits passes exceeds init_graph's {room.max_requests} requests, "
                f"{room.max_tokens} tokens and one pass. Initialise the graph for the largest batch."
            )
        return room

    def _require_plain(self, weights: LoRAWeights, *, op: str) -> None:
        """Refuse features of `weights` that this backend does not claim.

        Raises:
            UnsupportedOpError: output_scale, bias or full weights without the claim.
        """
        if weights.output_scale is not None and not self.capabilities.supports(Op.DORA):
            raise self._unclaimed(Op.DORA, where=op)
        if weights.bias is not None and not self.capabilities.supports(Op.BIAS):
            raise self._unclaimed(Op.BIAS, where=op)
        if weights.full and not self.capabilities.supports(Op.FULL_WEIGHT):
            raise self._unclaimed(Op.FULL_WEIGHT, where=op)

    def _require_supported(self, op: str, weights: LoRAWeights) -> None:
        """Refuse weights of a dtype, rank or slice count past the claims; host integers only.

        Raises:
            UnsupportedOpError: naming the limit.
        """
        claims, dtype = self.capabilities, weights.a.dtype
        if _DTYPE_NAMES.get(dtype) not in claims.dtypes:
            raise UnsupportedOpError(
                backend=self.name, op=op, limit=f"dtypes {sorted(claims.dtypes)}", value=dtype
            )
        if claims.max_rank is not None and weights.max_rank > claims.max_rank:
            raise UnsupportedOpError(
                backend=self.name,
                op=op,
                limit=f"rank {claims.max_rank}",
                value=f"rank {weights.max_rank}",
            )
        slices = weights.layout.num_slices
        if claims.max_slices is not None and slices > claims.max_slices:
            raise UnsupportedOpError(
                backend=self.name,
                op=op,
                limit=f"{claims.max_slices} slices",
                value=f"{slices} slices",
            )

    def _require_accepted(self, op: str, weights: LoRAWeights) -> None:
        """As `_require_supported`, but looks at weights that it found supported only once.

        Raises:
            UnsupportedOpError: naming the limit.
        """
        accepted = _accepted.get(weights)
        if accepted is None or type(self) not in accepted:
            self._require_supported(op, weights)
            _accepted.setdefault(weights, set()).add(type(self))

    def _require_linear(self, op: str, x: Tensor, weights: LoRAWeights) -> InfoT:
        """The checks that every op over `x [T', K]` needs, in one place; host integers only.

        Raises:
            NoBatchPreparedError: no batch.
            BatchMismatchError: fewer rows than the batch.
            TensorMismatchError: shape, dtype or device of x do not fit the weights.
            UnsupportedOpError: weights past the claims.
        """
        info = self._require_batch(op)
        self._require_accepted(op, weights)
        a = weights.a
        if x.dim() != 2 or x.shape[1] != a.shape[-1]:
            raise TensorMismatchError(
                f"backend {self.name!r}: {op} got x of shape {tuple(x.shape)}, expected "
                f"[rows, {a.shape[-1]}] to fit weights.a {tuple(a.shape)}"
            )
        if x.dtype != a.dtype or x.device != a.device:
            raise TensorMismatchError(
                f"backend {self.name!r}: {op} got x of {x.dtype} on {x.device}, but the adapter weights "
                f"are {a.dtype} on {a.device}"
            )
        return info

    def _unclaimed_graph(self, kind: str) -> UnsupportedOpError:
        """The refusal of a graph kind that `capabilities.graphs` does not list."""
        return UnsupportedOpError(
            backend=self.name,
            op="init_graph",
            limit=f"graph kinds {sorted(self.capabilities.graphs)}",
            value=kind,
        )

    def _unclaimed(self, op: Op, *, where: str | None = None) -> UnsupportedOpError:
        """The refusal of an op that `capabilities.ops` does not list."""
        return UnsupportedOpError(
            backend=self.name,
            op=where or op.value,
            limit=f"ops {sorted(self.capabilities.ops)}",
            value=op.value,
        )
