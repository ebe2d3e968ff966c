"""LoRACoreBackend: what SGLang's LoRA layers call, over any lora_core backend.

SGLang stacks the c projections of a site in one A, `[S, c·R, K]`, packed at each slot's live rank r:
slice i is rows i·r .. (i+1)·r. To a lora_core backend that is one slice of rank c·r. Its result is
packed in the same way, so that before B each row's columns are moved to where a slice of room R
begins; B is `[S, N, R]`, unscaled, as lora_core has it. Ranks and scalings come with the batch and
lie at fixed addresses, shared by all sites.

The pruned rows of lm_head are a second batch, alive beside that of all rows, and always eager:
hence two backend instances. Experts, and the absorbed kv_b_proj of MLA, are not a LoRA backend's
business in SGLang: its own kernels read the batch from `batch_info`, which is filled for them. Those of
experts make way for lora_core's where `LORA_CORE_SGLANG_MOE` says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from sglang.srt.environ import envs
from sglang.srt.lora.backend.base_backend import BaseLoRABackend
from sglang.srt.lora.utils import LoRABatchInfo, get_lm_head_pruned_lens
from torch import Tensor

from lora_core.backend import LoRABackend
from lora_core.batch import NO_LORA, BatchInfo, LoRABatch, token_slots
from lora_core.capabilities import GraphKind, Mode
from lora_core.errors import (
    BatchMismatchError,
    GraphNotInitializedError,
    NoBatchPreparedError,
    TensorMismatchError,
    UnsupportedOpError,
)
from lora_core.integrations.sglang import MOE_VARIABLE, NAME, dense_backend
from lora_core.weights import LoRAWeights, SliceLayout
from lora_core.workspace import StagingRing

MAX_SLICES = 8
"""Projections that one site may pack: SGLang's own models have up to four."""


class ForwardMode(Protocol):
    """The questions that are asked of SGLang's forward mode."""

    def is_idle(self) -> bool: ...
    def is_decode(self) -> bool: ...
    def is_target_verify(self) -> bool: ...
    def is_extend(self) -> bool: ...


class SpecInfo(Protocol):
    """Of speculative decoding."""

    draft_token_num: int


class ForwardBatch(Protocol):
    """What is read of SGLang's forward batch; host values only."""

    batch_size: int
    forward_mode: ForwardMode
    extend_seq_lens_cpu: Sequence[int]
    spec_info: SpecInfo


def refuse(op: str, *, limit: str, value: object) -> UnsupportedOpError:
    """The error for what SGLang asks and this integration cannot do."""
    return UnsupportedOpError(backend=f"{NAME} in SGLang", op=op, limit=limit, value=value)


def request_lengths(forward_batch: ForwardBatch) -> tuple[list[int], Mode]:
    """Rows of each request, and what lora_core calls such a batch.

    Raises:
        UnsupportedOpError: a forward mode that no adapter is applied in.
    """
    mode, requests = forward_batch.forward_mode, forward_batch.batch_size
    if mode.is_idle():
        return [0] * requests, "prefill"
    if mode.is_decode():
        return [1] * requests, "decode"
    if mode.is_target_verify():
        return [forward_batch.spec_info.draft_token_num] * requests, "verify"
    if mode.is_extend():
        return list(forward_batch.extend_seq_lens_cpu), "prefill"
    raise refuse("prepare_lora_batch", limit="idle, decode, extend and target verify", value=mode)


@dataclass(frozen=True)
class PrunedRows:
    """Rows that LogitsProcessor keeps for one call of lm_head; stands in for SGLang's batch info.

    Attributes:
        batch: kept rows of each run of requests with one adapter.
        expected_tokens: their number, which the layer compares with its input.
    """

    use_cuda_graph: ClassVar[bool] = False

    batch: LoRABatch

    @property
    def expected_tokens(self) -> int:
        """Rows of this call."""
        return self.batch.num_tokens


class SlotTable:
    """Ranks and scalings of all slots as sites of 1 .. MAX_SLICES slices want them, on the device.

    One buffer, filled with one copy per batch; what sites and captured graphs hold are views of it.

    Attributes:
        packed: slices -> int32 `[S, 1]`, rows of the packed A.
        ranks: slices -> int32 `[S, slices]`, equal along a row.
        scalings: slices -> float32 `[S, slices]`, equal along a row.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self._staging = StagingRing(device)
        sizes = [slots * n for c in range(1, MAX_SLICES + 1) for n in (1, c, c)]
        self._memory = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.packed: dict[int, Tensor] = {}
        self.ranks: dict[int, Tensor] = {}
        self.scalings: dict[int, Tensor] = {}
        parts = iter(torch.split(self._memory, sizes))
        for c in range(1, MAX_SLICES + 1):
            self.packed[c] = next(parts).view(slots, 1)
            self.ranks[c] = next(parts).view(slots, c)
            self.scalings[c] = next(parts).view(torch.float32).view(slots, c)

    def fill(self, ranks: Sequence[int], scalings: Sequence[float]) -> None:
        """Take those of a batch, one per slot; nothing waits for the copy."""
        rank = np.asarray(ranks, np.int32)
        scaling = np.asarray(scalings, np.float32).view(np.int32)
        entry = self._staging.acquire(self._memory.numel())
        parts = [p for c in range(1, MAX_SLICES + 1) for p in (c * rank, rank.repeat(c), scaling.repeat(c))]  # fmt: skip
        np.concatenate(parts, out=entry.host[: self._memory.numel()])
        entry.send(self._memory)


@dataclass
class GraphMetadata:
    """The fixed buffers of one family of captured graphs.

    Attributes:
        kind: of lora_core's graph.
        width: rows that every request has; None: any number.
        requests: int32 `[3·n + 1]`: slot and length of each of n requests, and where they begin.
        info: SGLang's view of it.
    """

    kind: GraphKind
    width: int | None
    requests: Tensor
    info: Any = field(repr=False)


class LoRACoreBackend(BaseLoRABackend):  # type: ignore[misc]
    """SGLang's LoRA compute by the backend that `LORA_CORE_SGLANG` names.

    Args:
        max_loras_per_batch: slots of SGLang's pool.
        device: of the model.
        kwargs: `server_args`, and whatever else a release of SGLang passes.

    Raises:
        UnsupportedOpError: SGLang is told to replace its LoRA layers by experimental ones, which call
            kernels of its own.
    """

    name = NAME

    def __init__(self, max_loras_per_batch: int, device: torch.device, **kwargs: Any) -> None:
        del kwargs
        if envs.SGLANG_EXPERIMENTAL_LORA_OPTI.get():
            raise refuse(
                "start", limit="SGLang's usual LoRA layers", value="SGLANG_EXPERIMENTAL_LORA_OPTI=1"
            )
        super().__init__(max_loras_per_batch, device)
        where = torch.device(device)
        self.rows, self.head = dense_backend(where), dense_backend(where)
        self.table = SlotTable(max_loras_per_batch, where)
        self.supports_prefill_cuda_graph = "prefill" in self.rows.capabilities.graphs
        self._staging = StagingRing(where)
        self._ranks: list[int] = []
        self._decode: GraphMetadata | None = None
        self._prefill: GraphMetadata | None = None
        self._head_rows: PrunedRows | None = None
        self._columns: dict[tuple[int, ...], Tensor] = {}
        self._weights: dict[tuple[object, ...], LoRAWeights] = {}

    @property
    def is_moe_lora(self) -> bool:
        """Whether any layer of experts is wrapped."""
        return bool(self._is_moe_lora)

    @is_moe_lora.setter
    def is_moe_lora(self, value: bool) -> None:
        """Said by each layer of experts when SGLang wraps it."""
        self._is_moe_lora = value
        if value and os.environ.get(MOE_VARIABLE):
            from lora_core.integrations._sglang_experts import install

            install()

    # -- metadata ----------------------------------------------------------------------------------

    def reset_batch_state(self) -> None:
        """Forget the batch; layers are the base model until the next one."""
        super().reset_batch_state()
        self._head_rows = None
        self._columns.clear()
        self.rows.reset_batch_state()
        self.head.reset_batch_state()

    def reset_routing_cache(self) -> None:
        """Let the next forward record anew what it derives from the batch: a capture begins."""
        super().reset_routing_cache()
        self._columns.clear()

    def prepare_lora_batch(
        self,
        forward_batch: ForwardBatch,
        weight_indices: list[int],
        lora_ranks: list[int],
        scalings: list[float],
        use_decode_cuda_graph: bool,
        use_prefill_cuda_graph: bool = False,
    ) -> None:
        """Make `forward_batch` the live one: a new batch, or the fixed buffers of a captured graph."""
        lengths, mode = request_lengths(forward_batch)
        graph = self._graph_for(lengths, use_decode_cuda_graph, use_prefill_cuda_graph)
        if use_decode_cuda_graph and mode == "prefill":
            mode = "verify"  # a block of a diffusion model: several rows of every request
        self._prepare(lengths, mode, weight_indices, lora_ranks, scalings, graph)
        self._add_moe_lora_info(forward_batch, self.batch_info)
        self.lm_head_batch_info, self.lm_head_pass_batch_infos = self._prepare_lm_head_batch_info(
            forward_batch, weight_indices, self.batch_info
        )

    def prepare_lora_token_segments(
        self,
        *,
        segment_lens: list[int],
        weight_indices: list[int],
        lora_ranks: list[int],
        scalings: list[float],
    ) -> None:
        """Make an eager batch of explicit runs of rows the live one."""
        self._prepare(segment_lens, "prefill", weight_indices, lora_ranks, scalings, None)

    def _prepare(
        self,
        lengths: list[int],
        mode: Mode,
        weight_indices: list[int],
        lora_ranks: list[int],
        scalings: list[float],
        graph: GraphMetadata | None,
    ) -> None:
        self.reset_batch_state()
        if len(weight_indices) != len(lengths):
            raise BatchMismatchError(
                f"{NAME} in SGLang: prepare_lora_batch got {len(weight_indices)} weight indices for "
                f"{len(lengths)} requests: give one of each per request"
            )
        if len(lora_ranks) != self.max_loras_per_batch or len(scalings) != len(lora_ranks):
            raise BatchMismatchError(
                f"{NAME} in SGLang: prepare_lora_batch got {len(lora_ranks)} ranks and {len(scalings)} "
                f"scalings for {self.max_loras_per_batch} slots: give one of each per slot"
            )
        self._ranks = list(lora_ranks)
        self.rows.prepare_batch(
            LoRABatch(lengths=lengths, slots=self._slots(weight_indices), mode=mode),
            graph=None if graph is None else graph.kind,
        )
        self.table.fill(lora_ranks, scalings)
        self.batch_info = self._describe(lengths, weight_indices, graph)

    def _slots(self, weight_indices: Sequence[int]) -> list[int]:
        """SGLang gives the base model a slot of rank 0."""
        return [index if self._ranks[index] > 0 else NO_LORA for index in weight_indices]

    def _describe(
        self, lengths: list[int], weight_indices: list[int], graph: GraphMetadata | None
    ) -> Any:
        """SGLang's view of the batch, for its own kernels; requests past a graph's batch are empty."""
        requests, tokens = len(lengths), sum(lengths)
        if graph is None:
            memory = torch.empty(3 * requests + 1, dtype=torch.int32, device=self.device)
            info = self._view(memory)
        else:
            memory, info = graph.requests, graph.info
        room = memory.numel() // 3
        entry = self._staging.acquire(memory.numel())
        host = entry.host[: memory.numel()]
        host[:] = 0
        host[:requests] = weight_indices
        host[room : room + requests] = lengths
        host[2 * room + 1 : 2 * room + 1 + requests] = np.cumsum(lengths)
        host[2 * room + 1 + requests :] = tokens
        entry.send(memory)
        if graph is None or graph is self._decode:
            info.bs = info.num_segments = requests
        if graph is None:
            info.max_len = max(lengths, default=0)
        info.expected_tokens = tokens
        return info

    def _view(self, requests: Tensor, graph_len: int | None = None) -> Any:
        """SGLang's batch info over a buffer; in graphs its grids must cover any length they may get."""
        room = requests.numel() // 3
        return LoRABatchInfo(
            use_cuda_graph=graph_len is not None,
            bs=room,
            num_segments=room,
            weight_indices=requests[:room],
            seg_lens=requests[room : 2 * room],
            seg_indptr=requests[2 * room :],
            lora_ranks=self.table.packed[1].view(-1),
            scalings=self.table.scalings[1].view(-1),
            max_len=graph_len or 0,
        )

    # -- graphs ------------------------------------------------------------------------------------

    def init_decode_cuda_graph_batch_info(
        self, max_bs_in_cuda_graph: int, num_tokens_per_req: int
    ) -> None:
        """Room for graphs of requests of `num_tokens_per_req` rows each: decode, or verify."""
        kind: GraphKind = "decode" if num_tokens_per_req == 1 else "verify"
        self._decode = self._graph(
            kind,
            num_tokens_per_req,
            max_bs_in_cuda_graph,
            max_bs_in_cuda_graph * num_tokens_per_req,
        )

    def init_prefill_cuda_graph_batch_info(
        self, max_num_tokens: int, max_num_requests: int | None = None
    ) -> None:
        """Room for prefill graphs."""
        requests = max_num_tokens if max_num_requests is None else max_num_requests
        self._prefill = self._graph("prefill", None, requests, max_num_tokens)
        self.prefill_cuda_graph_batch_info = self._prefill.info
        self.prefill_cuda_graph_max_bs = requests
        self.prefill_cuda_graph_max_tokens = max_num_tokens

    def _graph(
        self, kind: GraphKind, width: int | None, max_requests: int, max_tokens: int
    ) -> GraphMetadata:
        self.rows.init_graph(kind, max_requests=max_requests, max_tokens=max_tokens)
        memory = torch.zeros(3 * max_requests + 1, dtype=torch.int32, device=self.device)
        return GraphMetadata(kind, width, memory, self._view(memory, width or max_tokens))

    def _graph_for(self, lengths: list[int], decode: bool, prefill: bool) -> GraphMetadata | None:
        if not (decode or prefill):
            return None
        graph, family = (self._decode, "decode") if decode else (self._prefill, "prefill")
        if graph is None:
            raise GraphNotInitializedError(
                f"{NAME} in SGLang: prepare_lora_batch for a {family} graph before "
                f"init_{family}_cuda_graph_batch_info"
            )
        if graph.width is not None and any(length != graph.width for length in lengths):
            raise BatchMismatchError(
                f"{NAME} in SGLang: the decode graphs were captured for requests of {graph.width} rows, "
                f"but this batch has {sorted(set(lengths))}. Capture them for that width, or run it eagerly."
            )
        return graph

    # -- lm_head -----------------------------------------------------------------------------------

    def _prepare_lm_head_batch_info(
        self,
        forward_batch: ForwardBatch,
        weight_indices: list[int],
        batch_info: Any,
    ) -> tuple[PrunedRows | None, list[PrunedRows] | None]:
        """The rows that lm_head gets where they are not all rows, and of each of several passes."""
        del batch_info
        kept = get_lm_head_pruned_lens(forward_batch)
        if kept is None:
            return None, None
        passes = self._get_lm_head_pass_segments(weight_indices, kept)
        return self._pruned(weight_indices, kept), (
            None if passes is None else [self._pruned(*segments) for segments in passes]
        )

    def _pruned(self, weight_indices: Sequence[int], lengths: Sequence[int]) -> PrunedRows:
        return PrunedRows(LoRABatch(lengths=lengths, slots=self._slots(weight_indices)))

    def _live(self, pruned: PrunedRows | None, op: str) -> tuple[LoRABackend[Any], BatchInfo]:
        """The backend whose batch has the rows of a call, and that batch.

        Raises:
            NoBatchPreparedError: there is none.
        """
        if self.batch_info is None or self.rows.batch_info is None:
            raise NoBatchPreparedError(
                f"{NAME} in SGLang: {op} was called while no batch is prepared. Layers must look at "
                "lora_active first."
            )
        if pruned is None:
            return self.rows, self.rows.batch_info
        if pruned is not self._head_rows:
            self.head.prepare_batch(pruned.batch)
            self._head_rows = pruned
        assert self.head.batch_info is not None
        return self.head, self.head.batch_info

    # -- sites: tensors of SGLang as lora_core sees them ---------------------------------------------

    def _site_a(self, a: Tensor, slices: int, op: str) -> LoRAWeights:
        """A of a site, `[S, c·R, K]`, as one slice; B has the width 1 and is not read."""
        self._check_buffer(a, "A", op)
        key = ("a", a.data_ptr(), a.shape, slices)
        if key not in self._weights:
            if not 1 <= slices <= MAX_SLICES or a.shape[1] % slices:
                raise refuse(
                    op, limit=f"1 to {MAX_SLICES} slices of equal rank in A", value=f"{slices} slices in {tuple(a.shape)}"
                )  # fmt: skip
            slots, rank, _ = a.shape
            self._weights[key] = LoRAWeights(
                a=a.unsqueeze(1),
                b=a.new_zeros(slots, 1, rank),
                ranks=self.table.packed[slices],
                scalings=self.table.scalings[1],
                layout=SliceLayout((1,)),
            )
        return self._weights[key]

    def _site_b(self, b: Tensor, offsets: tuple[int, ...], op: str) -> LoRAWeights:
        """B of a site, `[S, N, R]`; A has the width 1 and is not read."""
        self._check_buffer(b, "B", op)
        key = ("b", b.data_ptr(), b.shape, offsets)
        if key not in self._weights:
            slices = len(offsets) - 1
            if not 1 <= slices <= MAX_SLICES:
                raise refuse(op, limit=f"1 to {MAX_SLICES} slices", value=f"offsets {offsets}")
            if offsets[0] != 0 or offsets[-1] != b.shape[1]:
                raise TensorMismatchError(
                    f"{NAME} in SGLang: {op} got output offsets {offsets}, but B is {tuple(b.shape)}: "
                    f"expected them to lead from 0 to {b.shape[1]}"
                )
            self._weights[key] = LoRAWeights(
                a=b.new_zeros(b.shape[0], slices, b.shape[2], 1),
                b=b,
                ranks=self.table.ranks[slices],
                scalings=self.table.scalings[slices],
                layout=SliceLayout(tuple(end - begin for begin, end in pairwise(offsets))),
            )
        return self._weights[key]

    def _check_buffer(self, buffer: Tensor, name: str, op: str) -> None:
        if not isinstance(buffer, Tensor):
            raise refuse(op, limit=f"one tensor as {name}", value=type(buffer).__name__)
        if buffer.dim() != 3 or buffer.shape[0] != self.max_loras_per_batch:
            raise TensorMismatchError(
                f"{NAME} in SGLang: {op} got {name} of shape {tuple(buffer.shape)}, expected three "
                f"dimensions, the first of max_loras_per_batch={self.max_loras_per_batch}"
            )

    # -- compute -----------------------------------------------------------------------------------

    def _unpack(self, packed: Tensor, info: BatchInfo, slices: int, head: bool) -> Tensor:
        """`[T, c·R]`, packed at each row's live rank r, as `[T, c, R]`; past r anything."""
        rows, room = packed.shape
        rank = room // slices
        full = info.graph is None and set(self._ranks) <= {0, rank}  # packed as lora_core wants it
        if slices > 1 and not full:
            key = (head, slices, rank, rows)
            if key not in self._columns:
                slots = token_slots(info, rows).clamp(min=0).long()
                live = self.table.packed[1].view(-1)[slots].long().view(-1, 1, 1)
                slice_ = torch.arange(slices, device=packed.device).view(1, -1, 1)
                columns = slice_ * live + torch.arange(rank, device=packed.device)
                self._columns[key] = columns.clamp(max=room - 1).view(rows, room)
            packed = packed.gather(1, self._columns[key])
        return packed.view(rows, slices, rank)

    def _add(
        self,
        op: str,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        offsets: tuple[int, ...],
        out: Tensor,
        pruned: PrunedRows | None = None,
    ) -> Tensor:
        """`out[:, :N] += scaling * B (A x)`, in place."""
        backend, info = self._live(pruned, op)
        site_a, site_b = self._site_a(a, len(offsets) - 1, op), self._site_b(b, offsets, op)
        if site_a.max_rank != (len(offsets) - 1) * site_b.max_rank:
            raise TensorMismatchError(
                f"{NAME} in SGLang: {op} got A {tuple(a.shape)} and B {tuple(b.shape)} for "
                f"{len(offsets) - 1} slices: expected {(len(offsets) - 1) * site_b.max_rank} rows in A"
            )
        if self._nothing_to_do(info, out):
            return out
        packed = backend.shrink(x, site_a)[:, 0]
        self._expand(op, backend, info, packed, site_b, out)
        return out

    def _expand(
        self,
        op: str,
        backend: LoRABackend[Any],
        info: BatchInfo,
        packed: Tensor,
        site: LoRAWeights,
        out: Tensor,
    ) -> None:
        if packed.shape[1] != site.layout.num_slices * site.max_rank:
            raise TensorMismatchError(
                f"{NAME} in SGLang: {op} got {packed.shape[1]} columns from A, but B has "
                f"{site.layout.num_slices} slices of rank {site.max_rank}"
            )
        h = self._unpack(packed, info, site.layout.num_slices, backend is self.head)
        backend.expand(h, site, out[:, : site.layout.out_features])

    def _nothing_to_do(self, info: BatchInfo, rows: Tensor) -> bool:
        """Eager without adapters, or no rows; a captured graph may be replayed with adapters."""
        return len(rows) == 0 or (info.graph is None and not info.has_active_lora)

    def forward_with_base(
        self,
        layer: Any,
        x: Tensor,
        base_fn: Callable[[], Tensor],
        lora_a: Tensor,
        lora_b: Tensor,
        output_offset: Tensor,
        offsets: tuple[int, ...],
        *,
        all_reduce: Callable[[Tensor], Tensor] | None = None,
        kind: str = "linear",
        pruned_batch_info: PrunedRows | None = None,
    ) -> Tensor:
        """The base module's output plus the delta; where it must be reduced, both at once."""
        del output_offset
        if kind == "embedding":
            h = self.run_lora_a_embedding(x, lora_a, layer.vocab_size, layer.new_embeddings_buffer)
            return self._add_b("embedding", h, lora_b, offsets, base_fn())
        if kind not in {"linear", "lm_head"}:
            raise refuse("forward_with_base", limit="linear, embedding and lm_head", value=kind)
        op = f"forward_with_base of {type(layer).__name__}"
        out = self._add(op, x, lora_a, lora_b, offsets, base_fn(), pruned_batch_info)
        return out if all_reduce is None else all_reduce(out)

    def run_lora_a_sgemm(
        self,
        x: Tensor,
        weights: Tensor,
        *,
        pruned_batch_info: PrunedRows | None = None,
        stack_num: int = 1,
    ) -> Tensor:
        """`x @ A.T`, `[T, c·R]` in the dtype of x, packed as A is; past a row's live rank anything."""
        backend, info = self._live(pruned_batch_info, "run_lora_a_sgemm")
        site = self._site_a(weights, stack_num, "run_lora_a_sgemm")
        if self._nothing_to_do(info, x):
            return x.new_empty(len(x), site.max_rank)  # no row of it is read
        return backend.shrink(x, site)[:, 0].to(x.dtype)

    def run_lora_b_sgemm(
        self,
        x: Tensor,
        weights: Tensor,
        *,
        base_output: Tensor | None = None,
        pruned_batch_info: PrunedRows | None = None,
        output_offset: Tensor | None = None,
        output_offset_cpu: Tensor | None = None,
    ) -> Tensor:
        """`base_output += scaling * x @ B.T`, in place, x packed as `run_lora_a_sgemm` returns it."""
        if output_offset_cpu is None and output_offset is not None and len(output_offset) != 2:
            raise refuse(
                "run_lora_b_sgemm", limit="one slice without output_offset_cpu", value=f"{len(output_offset) - 1} slices"
            )  # fmt: skip
        offsets = (
            (0, weights.shape[1]) if output_offset_cpu is None else _numbers(output_offset_cpu)
        )
        out = base_output if base_output is not None else x.new_zeros(len(x), offsets[-1])
        return self._add_b("run_lora_b_sgemm", x, weights, offsets, out, pruned_batch_info)

    def _add_b(
        self,
        op: str,
        packed: Tensor,
        b: Tensor,
        offsets: tuple[int, ...],
        out: Tensor,
        pruned: PrunedRows | None = None,
    ) -> Tensor:
        backend, info = self._live(pruned, op)
        site = self._site_b(b, offsets, op)
        if not self._nothing_to_do(info, out):
            self._expand(op, backend, info, packed.float(), site, out)
        return out

    def run_qkv_lora(
        self,
        x: Tensor,
        qkv_lora_a: Tensor,
        qkv_lora_b: Tensor,
        *,
        output_offset_cpu: Tensor,
        output_offset: Tensor | None = None,
        max_qkv_out_dim: int | None = None,
        base_output: Tensor | None = None,
        n_slices: int = 3,
    ) -> Tensor:
        """`base_output += scaling * B (A x)`, slice by slice, in place."""
        del output_offset, max_qkv_out_dim
        offsets = _numbers(output_offset_cpu)
        if len(offsets) - 1 != n_slices:
            raise TensorMismatchError(
                f"{NAME} in SGLang: run_qkv_lora got n_slices={n_slices}, but output offsets {offsets}"
            )
        out = base_output if base_output is not None else x.new_zeros(len(x), offsets[-1])
        return self._add("run_qkv_lora", x, qkv_lora_a, qkv_lora_b, offsets, out)

    def run_gate_up_lora(
        self,
        x: Tensor,
        gate_up_lora_a: Tensor,
        gate_up_lora_b: Tensor,
        *,
        output_offset_cpu: Tensor | None = None,
        output_offset: Tensor | None = None,
        base_output: Tensor | None = None,
    ) -> Tensor:
        """`run_qkv_lora` of two slices, of equal width where no offsets say otherwise."""
        if output_offset_cpu is None:
            width = gate_up_lora_b.shape[1] // 2
            output_offset_cpu = torch.tensor([0, width, 2 * width], dtype=torch.int32)
        return self.run_qkv_lora(
            x, gate_up_lora_a, gate_up_lora_b, output_offset_cpu=output_offset_cpu,
            output_offset=output_offset, base_output=base_output, n_slices=2,
        )  # fmt: skip

    def run_lora_a_embedding(
        self,
        input_ids: Tensor,
        weights: Tensor,
        vocab_size: int,
        extra_embeddings: Tensor | None = None,
    ) -> Tensor:
        """Column `ids[t]` of each row's A, `[T, R]`, where A is `[S, R, V]`."""
        if extra_embeddings is not None:
            raise refuse(
                "embedding", limit="the base vocabulary", value=f"embeddings of added tokens {tuple(extra_embeddings.shape)}"
            )  # fmt: skip
        _, info = self._live(None, "run_lora_a_embedding")
        self._check_buffer(weights, "A", "run_lora_a_embedding")
        if self._nothing_to_do(info, input_ids):
            return weights.new_empty(len(input_ids), weights.shape[1])  # no row of it is read
        slots = token_slots(info, len(input_ids)).clamp(min=0).long()
        known = min(vocab_size, weights.shape[2])
        return weights[slots, :, input_ids.clamp(0, known - 1)]  # padding rows may hold any id

    def run_extra_token_embedding(self, *args: Any, **kwargs: Any) -> Tensor:
        """Refused: SGLang itself serves no adapters that add tokens."""
        del args, kwargs
        raise refuse("embedding", limit="the base vocabulary", value="added tokens")


def _numbers(offsets: Tensor) -> tuple[int, ...]:
    """SGLang's output offsets, which it keeps on the host."""
    if offsets.device.type != "cpu":
        raise TensorMismatchError(
            f"{NAME} in SGLang: output_offset_cpu is on {offsets.device}: reading it there would synchronise"
        )
    return tuple(offsets.tolist())
