"""CsgmvBackend: chunked SGMV. Rows are ordered by adapter and cut into chunks, the unit of work."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lora_core.backend import BackendConfig, BaseModule, LoRABackend
from lora_core.batch import NO_LORA, LoRABatch, RequestTable
from lora_core.capabilities import Capabilities, DTypeName, GraphKind, Op
from lora_core.errors import BatchMismatchError, TensorMismatchError, UnsupportedOpError
from lora_core.triton_kit import INTERPRETED, family
from lora_core.weights import LoRAWeights, SliceLayout
from lora_core.workspace import GraphRoom
from lora_core_csgmv.batch import CsgmvBatchInfo, Segments
from lora_core_csgmv.launches import ARRIVALS, expand_call, shrink_call
from lora_core_csgmv.segments import counting, plan_segments, room_for

_PROGRAMS_PER_SM = 8
"""In a graph: programs that share the work, whatever the batch turns out to be at replay."""


_FEW_ROWS = 512
"""In a graph, up to here the expand is launched before what it waits for has ended: 0.3 to 0.9 us saved
on an H200."""

_MAY_OVERTAKE = ("sm90", "sm100")
"""GPU families that can launch a kernel before the one it depends on has ended."""

_DTYPES: dict[torch.dtype, DTypeName] = {torch.float32: "float32", torch.float16: "float16"}
if not INTERPRETED:  # Triton's interpreter multiplies the raw bits of bfloat16
    _DTYPES[torch.bfloat16] = "bfloat16"


class CsgmvBackend(LoRABackend[CsgmvBatchInfo]):
    """Segments of one adapter's rows, gathered over the whole batch, each read with one pass over its weights.

    In graphs the shrink runs beside the base product, on a stream of this instance.
    """

    name: ClassVar[str] = "csgmv"
    contract: ClassVar[str] = "1.0"
    capabilities: ClassVar[Capabilities] = Capabilities(
        ops=frozenset({Op.LINEAR, Op.EMBEDDING, Op.LM_HEAD, Op.SCALES}),
        dtypes=frozenset(_DTYPES.values()),
        device_types=frozenset({"cpu"} if INTERPRETED else {"cuda"}),
        graphs=frozenset({"decode", "prefill", "verify"}),
        batch_invariant=True,
    )

    def __init__(
        self, *, device: torch.device | str | None = None, config: BackendConfig | None = None
    ) -> None:
        super().__init__(device=device, config=config)
        cuda = self.device.type == "cuda"
        self._chip = family(self.device)
        self._multiprocessors = (
            torch.cuda.get_device_properties(self.device).multi_processor_count if cuda else 2
        )
        self._side = torch.cuda.Stream(self.device, priority=-1) if cuda else None  # type: ignore[no-untyped-call]
        self.workspace.sync["arrivals"] = torch.zeros(
            ARRIVALS, dtype=torch.int32, device=self.device
        )

    @classmethod
    @override
    def unavailable_reason(cls, device: torch.device | None = None) -> str | None:
        """As the contract says; also names the interpreter, and GPUs that are too old."""
        reason = super().unavailable_reason(device)
        if reason is not None and not INTERPRETED:
            return f"{reason} (TRITON_INTERPRET=1, set before the first import, runs it on the CPU for tests)"
        if reason is None and not INTERPRETED:
            capability = torch.cuda.get_device_capability(device)
            if capability < (8, 0):
                return (
                    f"it needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
                )
        return reason

    # -- batch state -------------------------------------------------------------------------------

    @override
    def prepare_batch(self, batch: LoRABatch, *, graph: GraphKind | None = None) -> CsgmvBatchInfo:
        previous = self.batch_info
        self.batch_info = None
        if previous is not None and previous.graph not in (None, graph):
            self._neutralise(previous.graph)
        try:
            self.batch_info = self._prepare(batch, graph)
        except BaseException:
            if previous is not None and previous.graph is not None and previous.graph == graph:
                self._neutralise(previous.graph)
            raise
        return self.batch_info

    @override
    def reset_batch_state(self) -> None:
        info = self.batch_info
        self.batch_info = None
        if info is not None and info.graph is not None:
            self._neutralise(info.graph)

    @override
    def init_graph(self, kind: GraphKind, *, max_requests: int, max_tokens: int) -> None:
        if kind not in self.capabilities.graphs:
            raise self._unclaimed_graph(kind)
        segments = room_for(requests=max_requests, rows=max_tokens)
        table = _table(max_requests)
        words = table.words + 2 * segments.words  # of the whole batch, and of its one lm_head pass
        self.workspace.static[kind] = torch.empty(words, dtype=torch.int32, device=self.device)
        self.workspace.graph_room[kind] = GraphRoom(max_requests, max_tokens)
        self._neutralise(kind)

    def _neutralise(self, kind: GraphKind) -> None:
        """No requests and no segments: captured kernels find nothing to do."""
        static = self.workspace.static[kind]
        table = _table(self.workspace.graph_room[kind].max_requests)
        static.zero_()
        static[table.slots_at : table.words].fill_(NO_LORA)

    def _prepare(self, batch: LoRABatch, graph: GraphKind | None) -> CsgmvBatchInfo:
        requests, tokens = len(batch.lengths), sum(batch.lengths)
        # rows of the batch, and of each pass
        covered = [tokens, *[sum(kept) for kept in batch.logits]]
        if graph is None:
            table = _table(requests)
            rooms = [room_for(requests=requests, rows=rows) for rows in covered]
            words = table.words + sum([room.words for room in rooms])
            target = torch.empty(words, dtype=torch.int32, device=self.device)
        else:
            limits = self._require_graph(
                graph, requests=requests, tokens=tokens, passes=len(batch.logits)
            )
            table = _table(limits.max_requests)
            room = room_for(requests=limits.max_requests, rows=limits.max_tokens)
            rooms = [room, room]
            target = self.workspace.static[graph]
            words = target.shape[0]

        entry = self.workspace.staging.acquire(words)
        host = entry.host
        slots = host[table.slots_at : table.slots_at + requests]
        ends = host[1 : 1 + requests]
        slots[:] = batch.slots
        host[0] = 0
        lengths = None
        if tokens == requests and batch.mode == "decode":  # one row each
            ends[:] = counting(requests + 1)[1:]
        else:
            lengths = np.array(batch.lengths, np.int32)
            lengths.cumsum(out=ends)
        if requests != table.requests:
            host[1 + requests : table.slots_at] = tokens
            host[table.slots_at + requests : table.words] = NO_LORA
        scales = None if batch.scales is None else np.array(batch.scales, np.float32)

        whole = plan = plan_segments(slots, ends, lengths, rows=tokens, scales=scales)
        views = target.split_with_sizes([table.words, *[room.words for room in rooms]])
        at, segments = table.words, []
        for index, room in enumerate(rooms):
            if index and batch.logits:
                kept = np.array(batch.logits[index - 1], np.int32)
                kept_ends = kept.cumsum(dtype=np.int32)
                plan = plan_segments(slots, kept_ends, kept, rows=covered[index], scales=scales)
            if index and plan is whole:  # a graph's pass over every row
                host[at : at + room.words] = host[at - room.words : at]
            else:
                plan.write(host[at : at + room.words], room)
            segments.append(
                Segments(
                    num_rows=covered[index] if batch.logits else tokens,
                    length=len(plan.slots),
                    covered=len(plan.permutation),
                    block=views[1 + index],
                    room=room,
                    bound=len(plan.slots) if graph is None else room.segments,
                    fixed=graph is not None,
                )
            )
            at += room.words
        entry.send(target)

        static = None
        if graph is not None:
            static = RequestTable(views[0][: table.slots_at], views[0][table.slots_at : table.end])
        active = len(whole.slots) > 0
        return CsgmvBatchInfo(
            num_tokens=tokens,
            mode=batch.mode,
            graph=graph,
            has_active_lora=active,
            req_seg_indptr=views[0][: 1 + requests],
            req_slots=views[0][table.slots_at : table.slots_at + requests],
            static_requests=static,
            segments=segments[0],
            passes=tuple(segments[1:]) or (segments[0],),
            highest_slot=int(whole.slots[-1]) if active else NO_LORA,
        )

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
        """As the contract says, with the columns of B contiguous.

        So an adapter of low rank is read in whole lines however large `max_rank` is.
        """
        plain = super().allocate_weights(
            num_slots=num_slots,
            max_rank=max_rank,
            in_features=in_features,
            layout=layout,
            dtype=dtype,
            embedding=embedding,
        )
        return dataclasses.replace(plain, b=plain.b.mT.contiguous().mT)

    # -- ops ---------------------------------------------------------------------------------------

    @override
    def shrink(self, x: Tensor, weights: LoRAWeights) -> Tensor:
        info = self._require_linear("shrink", x, weights)
        self._require_rows("shrink", x.shape[0], info.num_tokens)
        h = x.new_empty(
            (x.shape[0], weights.layout.num_slices, weights.max_rank), dtype=torch.float32
        )
        if info.graph is not None or info.has_active_lora:
            self._check("shrink", x, x.shape[1], weights, info)
            self._shrink(x, weights, info.segments, h)
        return h

    @override
    def expand(self, h: Tensor, weights: LoRAWeights, out: Tensor) -> Tensor:
        info = self._require_batch("expand")
        expected = (out.shape[0], weights.layout.num_slices, weights.max_rank)
        if tuple(h.shape) != expected or h.dtype != torch.float32 or h.device != out.device:
            raise TensorMismatchError(
                f"backend {self.name!r}: expand got h {tuple(h.shape)} {h.dtype} on {h.device} for out "
                f"{tuple(out.shape)} on {out.device}, expected h {expected} float32 beside out"
            )
        self._require_rows("expand", h.shape[0], info.num_tokens)
        if info.graph is not None or info.has_active_lora:
            self._check("expand", out, weights.layout.out_features, weights, info)
            self._expand(h.contiguous(), weights, out, info.segments)
        return out

    @override
    def linear(self, x: Tensor, base: BaseModule, weights: LoRAWeights) -> Tensor:
        info = self._require_linear("linear", x, weights)
        self._require_rows("linear", x.shape[0], info.num_tokens)
        return self._linear("linear", x, base, weights, info, info.segments)

    @override
    def lm_head(
        self, x: Tensor, base: BaseModule, weights: LoRAWeights, *, logits_pass: int = 0
    ) -> Tensor:
        info = self._require_linear("lm_head", x, weights)
        if not 0 <= logits_pass < len(info.passes):
            raise BatchMismatchError(
                f"backend {self.name!r}: lm_head was asked for logits pass {logits_pass}, but the prepared "
                f"batch has {len(info.passes)}"
            )
        segments = info.passes[logits_pass]
        self._require_rows("lm_head", x.shape[0], segments.num_rows)
        return self._linear("lm_head", x, base, weights, info, segments)

    @override
    def embedding(self, input_ids: Tensor, base: BaseModule, weights: LoRAWeights) -> Tensor:
        info = self._require_batch("embedding")
        if input_ids.dim() != 1 or not weights.is_embedding or input_ids.device != weights.a.device:
            raise TensorMismatchError(
                f"backend {self.name!r}: embedding got ids {tuple(input_ids.shape)} on {input_ids.device} and "
                f"weights.a {tuple(weights.a.shape)} on {weights.a.device}, expected [rows] and [S, V, R] on "
                "one device"
            )
        self._require_rows("embedding", input_ids.shape[0], info.num_tokens)
        self._require_plain(weights, op="embedding")
        out = base(input_ids)
        if info.graph is not None or info.has_active_lora:
            self._check("embedding", out, weights.layout.out_features, weights, info)
            self._expand(weights.a, weights, out, info.segments, ids=input_ids.contiguous())
        return out

    # -- launches ----------------------------------------------------------------------------------

    def _linear(
        self,
        op: str,
        x: Tensor,
        base: BaseModule,
        weights: LoRAWeights,
        info: CsgmvBatchInfo,
        segments: Segments,
    ) -> Tensor:
        self._require_plain(weights, op=op)
        if info.graph is None and not segments.length:
            return base(x)
        self._check(op, x, x.shape[1], weights, info)
        # between our own kernels h may be as narrow as the product rounds it to anyway
        h = x.new_empty((x.shape[0], weights.layout.num_slices, weights.max_rank))
        side = None if info.graph is None else self._side
        if side is None:
            out = base(x)
            self._shrink(x, weights, segments, h)
        else:
            main = torch.cuda.current_stream(self.device)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                self._shrink(x, weights, segments, h)
            try:
                out = base(x)
            finally:
                main.wait_stream(side)
        self._check(op, out, weights.layout.out_features, weights, info)
        overtakes = side is not None and x.shape[0] <= _FEW_ROWS and self._chip in _MAY_OVERTAKE
        self._expand(h, weights, out, segments, overtakes=overtakes)
        return out

    def _shrink(self, x: Tensor, weights: LoRAWeights, segments: Segments, h: Tensor) -> None:
        rows = x.shape[0]
        if not rows:
            return
        arrivals = self.workspace.sync["arrivals"]
        call = shrink_call(self._chip, x, weights, h, arrivals, segments)
        partials = x.new_empty(call.partials, dtype=torch.float32) if call.partials else arrivals
        grid = self._programs(min(segments.bound, rows) * call.units, segments), 1, 1
        call.launch(grid, x, h, partials, segments.block, segments.room.segments, rows, x.stride(0))

    def _expand(
        self,
        h: Tensor,
        weights: LoRAWeights,
        out: Tensor,
        segments: Segments,
        *,
        ids: Tensor | None = None,
        overtakes: bool = False,
    ) -> None:
        rows = out.shape[0]
        if not rows:
            return
        call = expand_call(self._chip, h, weights, out, ids, segments, overtakes=overtakes)
        source = segments.block if ids is None else ids
        grid = self._programs(min(segments.bound, rows) * call.units, segments), 1, 1
        call.launch(
            grid, out, h, source, segments.block, segments.room.segments, rows, out.stride(0)
        )

    def _programs(self, units: int, segments: Segments) -> int:
        """As many as there is work; in a graph, where `units` is only a bound, as fill the chip."""
        if not segments.fixed:
            return units
        return min(units, self._multiprocessors * _PROGRAMS_PER_SM)

    def _check(
        self, op: str, tensor: Tensor, columns: int, weights: LoRAWeights, info: CsgmvBatchInfo
    ) -> None:
        """What the kernels take for granted about x or out, and about the weights; host integers only.

        Raises:
            UnsupportedOpError: a dtype that is not claimed.
            TensorMismatchError: not `[rows, columns]`, another device than the weights, or columns that
                are not contiguous.
            BatchMismatchError: the batch names a slot that the weights do not have.
        """
        b = weights.b
        if b.dtype not in _DTYPES:
            raise UnsupportedOpError(
                backend=self.name,
                op=op,
                limit=f"dtypes {sorted(self.capabilities.dtypes)}",
                value=b.dtype,
            )
        if (
            tensor.dim() != 2
            or tensor.shape[1] != columns
            or tensor.device != b.device
            or tensor.stride(1) != 1
        ):
            raise TensorMismatchError(
                f"backend {self.name!r}: {op} got a tensor {tuple(tensor.shape)} of strides {tensor.stride()} "
                f"on {tensor.device}, expected [rows, {columns}] with contiguous columns on {b.device}"
            )
        if info.highest_slot >= weights.num_slots:
            raise BatchMismatchError(
                f"backend {self.name!r}: {op} got weights of {weights.num_slots} slots, but the prepared batch "
                f"names slot {info.highest_slot}"
            )


class _Table(NamedTuple):
    """The request view at the head of the words: indptr, then slots."""

    requests: int
    slots_at: int
    end: int
    words: int  # up to the next multiple of 4


@cache
def _table(requests: int) -> _Table:
    end = 1 + 2 * requests
    return _Table(requests, 1 + requests, end, -(-end // 4) * 4)
