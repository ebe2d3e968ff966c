"""TritonBackend: the contract over two kernels, shrink and expand, and one work list per batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lora_core.backend import BackendConfig, BaseModule
from lora_core.batch import NO_LORA, LoRABatch
from lora_core.capabilities import Capabilities, GraphKind, Op
from lora_core.errors import BatchMismatchError, TensorMismatchError
from lora_core.staged import StagedBackend, StagedBatchInfo, int32, rows_of
from lora_core.triton_kit import INTERPRETED
from lora_core.weights import LoRAWeights, SliceLayout
from lora_core.workspace import GraphRoom
from lora_core_triton import tables
from lora_core_triton.expand import expand
from lora_core_triton.shrink import shrink
from lora_core_triton.worklist import (
    Room,
    WorkList,
    cut,
    eager_rooms,
    graph_rooms,
    most_tiles,
    slots_at,
    step,
    write,
)

_COUNTERS = 1 << 14
"""Words of `workspace.sync`: tiles times column blocks of the largest batch whose sums are split."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TritonBatchInfo(StagedBatchInfo):
    """The batch's work list, and one per lm_head pass, in one device buffer.

    Attributes:
        work: all rows.
        passes: rows of each lm_head pass.
        highest_slot: of the batch, `NO_LORA` without adapters.
    """

    work: WorkList
    passes: tuple[WorkList, ...]
    highest_slot: int

    @property
    def meta(self) -> Tensor:
        """The buffer that kernels read."""
        return self.words


class TritonBackend(StagedBackend[TritonBatchInfo]):
    """Segment kernels: the rows of a slot are the segment, cut into tiles of equal work."""

    name: ClassVar[str] = "triton"
    contract: ClassVar[str] = "1.0"
    capabilities: ClassVar[Capabilities] = Capabilities(
        ops=frozenset({Op.LINEAR, Op.EMBEDDING, Op.LM_HEAD, Op.SCALES}),
        dtypes=frozenset(
            {"float32", "float16"} if INTERPRETED else {"float32", "float16", "bfloat16"}
        ),
        device_types=frozenset({"cpu"} if INTERPRETED else {"cuda"}),
        graphs=frozenset({"decode", "prefill", "verify"}),
        batch_invariant=True,
    )

    def __init__(
        self, *, device: torch.device | str | None = None, config: BackendConfig | None = None
    ) -> None:
        super().__init__(device=device, config=config)
        self.workspace.sync["arrived"] = torch.zeros(
            _COUNTERS, dtype=torch.int32, device=self.device
        )

    @classmethod
    @override
    def unavailable_reason(cls, device: torch.device | None = None) -> str | None:
        reason = super().unavailable_reason(device)
        if reason is None or INTERPRETED:
            return reason
        return f"{reason}; TRITON_INTERPRET=1 runs its kernels on the CPU, slowly, for tests"

    # -- batch state -----------------------------------------------------------------------------

    @override
    def _prepare(self, batch: LoRABatch, graph: GraphKind | None) -> TritonBatchInfo:
        requests, slots, scales = len(batch.lengths), int32(batch.slots), None
        if batch.scales is not None:
            scales = np.fromiter(batch.scales, np.float32, requests).view(np.int32)
        listed = [rows_of(lengths) for lengths in (batch.lengths, *batch.logits)]
        _, indptr, tokens = listed[0]
        rooms: Sequence[Room]
        if graph is None:
            most = step(requests)
            parts = [
                cut(slots, rows, scales, gathered=rows.num_rows <= tables.GATHERED_MAX_ROWS)
                for rows in listed
            ]
            rooms = eager_rooms(most, parts)
            meta = torch.empty(rooms[-1].end, dtype=torch.int32, device=self.device)
        else:
            room = self._require_graph(
                graph, requests=requests, tokens=tokens, passes=len(batch.logits)
            )
            most = room.max_requests
            parts = [cut(slots, rows, scales, gathered=graph != "prefill") for rows in listed]
            if len(parts) == 1:  # a captured lm_head reads the second list, whoever replays
                parts *= 2
            rooms = graph_rooms(graph, most, room.max_tokens)
            meta = self.workspace.static[graph]

        at = slots_at(most)
        entry = self.workspace.staging.acquire(rooms[-1].end)
        host = entry.host
        host[: requests + 1] = indptr
        host[at : at + requests] = slots
        if requests != most and graph is not None:
            host[requests + 1 : most + 1] = tokens
            host[at + requests : at + most] = NO_LORA
        works = tuple([write(host, place, part) for place, part in zip(rooms, parts, strict=True)])
        entry.send(meta)
        return TritonBatchInfo(
            num_tokens=tokens,
            mode=batch.mode,
            graph=graph,
            has_active_lora=works[0].num_tiles > 0,
            static_requests=None if graph is None else self._static_requests(graph),
            words=meta,
            requests=requests,
            slots_at=at,
            work=works[0],
            passes=works[1:] or works,
            highest_slot=parts[0].highest_slot,
        )

    @override
    def _graph_words(self, kind: GraphKind, room: GraphRoom) -> int:
        return graph_rooms(kind, room.max_requests, room.max_tokens)[-1].end

    @override
    def _slots_at(self, max_requests: int) -> int:
        return slots_at(max_requests)

    @override
    def _neutralise(self, kind: GraphKind) -> None:
        """Every tile dead, every request empty."""
        static = self.workspace.static[kind]
        static.fill_(NO_LORA)
        static[: self.workspace.graph_room[kind].max_requests + 1].zero_()

    @override
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
        """As the contract says, with B's columns contiguous: a rank below R is then read densely."""
        plain = super().allocate_weights(
            num_slots=num_slots,
            max_rank=max_rank,
            in_features=in_features,
            layout=layout,
            dtype=dtype,
            embedding=embedding,
        )
        b = torch.zeros(num_slots, max_rank, layout.out_features, dtype=dtype, device=self.device)
        return LoRAWeights(
            a=plain.a, b=b.mT, ranks=plain.ranks, scalings=plain.scalings, layout=layout
        )

    # -- ops -------------------------------------------------------------------------------------

    @override
    def shrink(self, x: Tensor, weights: LoRAWeights) -> Tensor:
        info = self._require_linear("shrink", x, weights)
        self._require_work("shrink", x.shape[0], info, info.work, weights)
        self._require_last_contiguous("shrink", "x", x)
        rows, work = x.shape[0], info.work
        if not self._launches(info, work, rows):
            shape = (rows, weights.layout.num_slices, weights.max_rank)
            return x.new_empty(shape, dtype=torch.float32)
        tiles, scratch = self._tiles(info, work, rows, weights), info.graph is None
        return shrink(x, weights, work, info.meta, self.workspace, tiles, scratch=scratch)

    @override
    def expand(self, h: Tensor, weights: LoRAWeights, out: Tensor) -> Tensor:
        info = self._require_batch("expand")
        expected = (out.shape[0], weights.layout.num_slices, weights.max_rank)
        if (
            tuple(h.shape) != expected
            or h.dtype != torch.float32
            or out.dim() != 2
            or out.shape[1] != weights.layout.out_features
            or out.device != weights.b.device
            or h.device != weights.b.device
        ):
            raise TensorMismatchError(
                f"backend 'triton': expand got h {tuple(h.shape)} {h.dtype} on {h.device} and out "
                f"{tuple(out.shape)} on {out.device}, expected h {expected} float32 and out "
                f"[rows, {weights.layout.out_features}] on {weights.b.device}"
            )
        self._require_accepted("expand", weights)
        self._require_work("expand", h.shape[0], info, info.work, weights)
        self._require_last_contiguous("expand", "h", h)
        self._require_last_contiguous("expand", "out", out)
        if self._launches(info, info.work, h.shape[0]):
            tiles = self._tiles(info, info.work, h.shape[0], weights)
            expand(h, weights, out, info.work, info.meta, tiles)
        return out

    @override
    def linear(self, x: Tensor, base: BaseModule, weights: LoRAWeights) -> Tensor:
        info = self._require_linear("linear", x, weights)
        return self._linear("linear", x, base, weights, info, info.work)

    @override
    def lm_head(
        self, x: Tensor, base: BaseModule, weights: LoRAWeights, *, logits_pass: int = 0
    ) -> Tensor:
        info = self._require_linear("lm_head", x, weights)
        if not 0 <= logits_pass < len(info.passes):
            raise BatchMismatchError(
                f"backend 'triton': lm_head was asked for logits pass {logits_pass}, but the "
                f"prepared batch has {len(info.passes)}"
            )
        return self._linear("lm_head", x, base, weights, info, info.passes[logits_pass])

    @override
    def embedding(self, input_ids: Tensor, base: BaseModule, weights: LoRAWeights) -> Tensor:
        info = self._require_batch("embedding")
        if input_ids.dim() != 1 or not weights.is_embedding or input_ids.is_floating_point():
            raise TensorMismatchError(
                f"backend 'triton': embedding got ids {tuple(input_ids.shape)} {input_ids.dtype} and "
                f"weights.a {tuple(weights.a.shape)}, expected integers [rows] and [S, V, R]"
            )
        if input_ids.device != weights.a.device:
            raise TensorMismatchError(
                f"backend 'triton': embedding got ids on {input_ids.device}, but the adapter weights "
                f"are on {weights.a.device}"
            )
        self._require_accepted("embedding", weights)
        self._require_work("embedding", input_ids.shape[0], info, info.work, weights)
        out = base(input_ids)
        if self._launches(info, info.work, input_ids.shape[0]):
            tiles = self._tiles(info, info.work, input_ids.shape[0], weights)
            ids = input_ids.contiguous()
            expand(weights.a, weights, out, info.work, info.meta, tiles, ids)
        return out

    # -- the two kernels --------------------------------------------------------------------------

    def _linear(
        self,
        op: str,
        x: Tensor,
        base: BaseModule,
        weights: LoRAWeights,
        info: TritonBatchInfo,
        work: WorkList,
    ) -> Tensor:
        rows = x.shape[0]
        self._require_work(op, rows, info, work, weights)
        self._require_last_contiguous(op, "x", x)
        if not self._launches(info, work, rows):
            return base(x)
        meta, tiles = info.meta, self._tiles(info, work, rows, weights)
        if info.graph is None:
            out = base(x)
            h = shrink(x, weights, work, meta, self.workspace, tiles, scratch=True, h_scratch=True)
            expand(h, weights, out, work, meta, tiles)
            return out
        if not self._overlaps(x):
            out = base(x)
            h = shrink(x, weights, work, meta, self.workspace, tiles, scratch=False)
        else:
            main, side = torch.cuda.current_stream(x.device), _side_stream(x.device)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                h = shrink(x, weights, work, meta, self.workspace, tiles, scratch=False)
            out = base(x)
            main.wait_stream(side)
        # Whatever writes weights or the work list has ended before the launch in front of this one
        # began. Of graph batches only, warm-up included: the same kernels are then captured.
        expand(h, weights, out, work, meta, tiles, may_overtake=True)
        return out

    @staticmethod
    def _overlaps(x: Tensor) -> bool:
        """Whether shrink runs beside the base product: captured only, eager events cost too much."""
        return (
            x.is_cuda
            and x.shape[0] <= tables.OVERLAP_MAX_ROWS
            and torch.cuda.is_current_stream_capturing()
        )

    @staticmethod
    def _launches(info: TritonBatchInfo, work: WorkList, rows: int) -> bool:
        """Whether there is anything to launch: in a graph always, a replay may bring adapters."""
        return rows > 0 and (info.graph is not None or work.num_tiles > 0)

    def _tiles(self, info: TritonBatchInfo, work: WorkList, rows: int, weights: LoRAWeights) -> int:
        """Row tiles to launch: eager the filled ones, in a graph as many as a replay could fill."""
        if info.graph is None:
            return work.num_tiles
        segments = self.workspace.graph_room[info.graph].max_requests
        if work.room.gathered:
            segments = weights.num_slots
        return min(most_tiles(rows, segments, work.room.tile_rows), work.room.max_tiles)

    # -- checks, host integers only -----------------------------------------------------------------

    def _require_work(
        self, op: str, rows: int, info: TritonBatchInfo, work: WorkList, weights: LoRAWeights
    ) -> None:
        """Refuse what the kernels could not do: too few rows, no such slot, features, dtypes."""
        self._require_rows(op, rows, work.num_rows)
        self._require_plain(weights, op=op)
        if info.highest_slot >= weights.num_slots:
            raise BatchMismatchError(
                f"backend 'triton': {op} is for a batch that names slot {info.highest_slot}, but the "
                f"adapter weights have {weights.num_slots} slots"
            )

    @override
    def _require_supported(self, op: str, weights: LoRAWeights) -> None:
        super()._require_supported(op, weights)
        self._require_last_contiguous(op, "weights.a", weights.a)

    def _require_last_contiguous(self, op: str, what: str, tensor: Tensor) -> None:
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise TensorMismatchError(
                f"backend 'triton': {op} got {what} of strides {tensor.stride()}: its last dimension "
                "must be contiguous"
            )


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that captured graphs fork to; always joined again within one op."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
