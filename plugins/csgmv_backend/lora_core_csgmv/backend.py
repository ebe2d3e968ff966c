"""CsgmvBackend: chunked SGMV. Rows are ordered by adapter and cut into chunks, the unit of work."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lora_core.backend import BackendConfig, BaseModule
from lora_core.batch import NO_LORA, LoRABatch
from lora_core.capabilities import Capabilities, DTypeName, GraphKind, Op
from lora_core.errors import BatchMismatchError, TensorMismatchError
from lora_core.staged import StagedBackend, int32, rows_of
from lora_core.triton_kit import INTERPRETED, family
from lora_core.weights import LoRAWeights, SliceLayout
from lora_core.workspace import GraphRoom
from lora_core_csgmv.batch import CsgmvBatchInfo, Segments
from lora_core_csgmv.launches import ARRIVALS, Site, band, expand_call, shrink_call, site_of
from lora_core_csgmv.segments import plan_segments, room_for

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


class CsgmvBackend(StagedBackend[CsgmvBatchInfo]):
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
    def _graph_words(self, kind: GraphKind, room: GraphRoom) -> int:
        segments = room_for(requests=room.max_requests, rows=room.max_tokens)
        # of the whole batch, and of its one lm_head pass
        return _table(room.max_requests).words + 2 * segments.words

    @override
    def _slots_at(self, max_requests: int) -> int:
        return _table(max_requests).slots_at

    @override
    def _neutralise(self, kind: GraphKind) -> None:
        """No requests and no segments: captured kernels find nothing to do."""
        static = self.workspace.static[kind]
        table = _table(self.workspace.graph_room[kind].max_requests)
        static.zero_()
        static[table.slots_at : table.words].fill_(NO_LORA)

    @override
    def _prepare(self, batch: LoRABatch, graph: GraphKind | None) -> CsgmvBatchInfo:
        requests, slots = len(batch.lengths), int32(batch.slots)
        listed = [rows_of(lengths) for lengths in (batch.lengths, *batch.logits)]
        _, indptr, tokens = listed[0]
        scales = None if batch.scales is None else np.array(batch.scales, np.float32)
        if graph is None:
            table = _table(requests)
            rooms = [room_for(requests=requests, rows=rows.num_rows) for rows in listed]
            words = table.words
            for room in rooms:
                words += room.words
            target = self.workspace.sync["arrivals"].new_empty(words)  # sooner than by torch.empty
            blocks = [target[table.words :]]
            if len(rooms) > 1:  # a split of one takes three times as long
                blocks = list(blocks[0].split_with_sizes([room.words for room in rooms]))
        else:
            limits = self._require_graph(
                graph, requests=requests, tokens=tokens, passes=len(batch.logits)
            )
            table = _table(limits.max_requests)
            room = room_for(requests=limits.max_requests, rows=limits.max_tokens)
            rooms, words = [room, room], table.words + 2 * room.words
            target, *blocks = [self.workspace.static[name] for name in _static_names(graph)]

        plans = [plan_segments(slots, rows, scales=scales) for rows in listed]
        if len(plans) != len(rooms):  # a captured lm_head reads the second block, whoever replays
            plans, listed = plans * 2, listed * 2
        entry = self.workspace.staging.acquire(words)
        host = entry.host
        host[: requests + 1] = indptr
        host[table.slots_at : table.slots_at + requests] = slots
        if requests != table.requests:
            host[1 + requests : table.slots_at] = tokens
            host[table.slots_at + requests : table.words] = NO_LORA
        at, segments = table.words, []
        for plan, rows, room, block in zip(plans, listed, rooms, blocks, strict=True):
            length = plan.write(host[at : at + room.words], room)
            at += room.words
            segments.append(
                Segments(
                    num_rows=rows.num_rows,
                    length=length,
                    covered=len(plan.permutation),
                    block=block,
                    room=room,
                    bound=length if graph is None else room.segments,
                    fixed=graph is not None,
                )
            )
        entry.send(target)
        whole = segments[0]
        return CsgmvBatchInfo(
            num_tokens=tokens,
            mode=batch.mode,
            graph=graph,
            has_active_lora=whole.length > 0,
            static_requests=None if graph is None else self._static_requests(graph),
            words=target,
            requests=requests,
            slots_at=table.slots_at,
            segments=whole,
            passes=tuple(segments[1:]) or (whole,),
            highest_slot=int(plans[0].slots[-1]) if whole.length else NO_LORA,
        )

    @override
    def _add_static(self, kind: GraphKind, room: GraphRoom) -> None:
        words = room_for(requests=room.max_requests, rows=room.max_tokens).words
        name, *parts = _static_names(kind)
        at, static = _table(room.max_requests).words, self.workspace.static
        blocks = static[name][at:].split_with_sizes((words, words))
        static.update(zip(parts, blocks, strict=True))

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
            self._require_slots("shrink", weights, info)
            self._check("shrink", x, x.shape[1], weights)
            self._shrink(x, weights, site_of(weights), info.segments, h)
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
            self._require_accepted("expand", weights)
            self._require_slots("expand", weights, info)
            self._check("expand", out, weights.layout.out_features, weights)
            self._expand(h.contiguous(), weights, site_of(weights), out, info.segments)
        return out

    @override
    def linear(self, x: Tensor, base: BaseModule, weights: LoRAWeights) -> Tensor:
        info = self._require_linear("linear", x, weights)
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
        return self._linear("lm_head", x, base, weights, info, info.passes[logits_pass])

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
            self._require_accepted("embedding", weights)
            self._require_slots("embedding", weights, info)
            self._check("embedding", out, weights.layout.out_features, weights)
            site, ids = site_of(weights), input_ids.contiguous()
            self._expand(weights.a, weights, site, out, info.segments, ids)
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
        rows, eager = x.shape[0], info.graph is None
        self._require_rows(op, rows, segments.num_rows)
        self._require_plain(weights, op=op)
        if eager and not segments.length:
            return base(x)
        self._require_slots(op, weights, info)
        if x.stride(1) != 1:
            self._check(op, x, x.shape[1], weights)
        site, side = site_of(weights), None if eager else self._side
        # between our own kernels h may be as narrow as the product rounds it to anyway
        h = self._h(rows, site, weights) if eager else x.new_empty((rows, *site.h_row))
        if side is None:
            out = base(x)
            self._shrink(x, weights, site, segments, h)
        else:
            main = torch.cuda.current_stream(self.device)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                self._shrink(x, weights, site, segments, h)
            try:
                out = base(x)
            finally:
                main.wait_stream(side)
        self._check(op, out, weights.layout.out_features, weights)
        overtakes = side is not None and rows <= _FEW_ROWS and self._chip in _MAY_OVERTAKE
        self._expand(h, weights, site, out, segments, None, overtakes)
        return out

    def _shrink(
        self, x: Tensor, weights: LoRAWeights, site: Site, segments: Segments, h: Tensor
    ) -> None:
        rows = x.shape[0]
        if not rows:
            return
        block, room = segments.block, segments.room
        partials = arrivals = self.workspace.sync["arrivals"]
        key = (rows - 1).bit_length(), h.dtype
        call = site.shrinks.get(key)
        if call is None:
            call = site.shrinks[key] = shrink_call(self._chip, x, weights, h, arrivals, segments)
        if call.partials:
            partials = self._partials(call.partials * rows, scratch=not segments.fixed)
        grid = self._programs(min(segments.bound, rows) * call.units, segments), 1, 1
        call.launch(grid, x, h, partials, arrivals, block, room.segments, rows, x.stride(0))

    def _partials(self, words: int, *, scratch: bool) -> Tensor:
        """Room for partial sums: scratch that grows, or in a graph memory of the graph's own."""
        found = self.workspace.scratch.get("partials") if scratch else None
        if found is None or found.numel() < words:
            found = torch.empty(words, dtype=torch.float32, device=self.device)
            if scratch:
                self.workspace.scratch["partials"] = found
        return found

    def _h(self, rows: int, site: Site, weights: LoRAWeights) -> Tensor:
        """Scratch `[at least rows, n_slices, R]` in the dtype of the weights, good until the next call."""
        found = self.workspace.scratch.get(site.h_name)
        if found is None or found.shape[0] < rows:
            found = weights.b.new_empty((band(rows), *site.h_row))
            self.workspace.scratch[site.h_name] = found
        return found

    def _expand(
        self,
        h: Tensor,
        weights: LoRAWeights,
        site: Site,
        out: Tensor,
        segments: Segments,
        ids: Tensor | None = None,
        overtakes: bool = False,
    ) -> None:
        rows = out.shape[0]
        if not rows:
            return
        block, kind = segments.block, None if ids is None else ids.dtype
        key = (rows - 1).bit_length(), out.dtype, h.dtype, kind, overtakes
        call = site.expands.get(key)
        if call is None:
            call = site.expands[key] = expand_call(
                self._chip, h, weights, out, ids, segments, overtakes=overtakes
            )
        grid = self._programs(min(segments.bound, rows) * call.units, segments), 1, 1
        source = block if ids is None else ids
        call.launch(grid, out, h, source, block, segments.room.segments, rows, out.stride(0))

    def _programs(self, units: int, segments: Segments) -> int:
        """As many as there is work; in a graph, where `units` is only a bound, as fill the chip."""
        if not segments.fixed:
            return units
        return min(units, self._multiprocessors * _PROGRAMS_PER_SM)

    def _require_slots(self, op: str, weights: LoRAWeights, info: CsgmvBatchInfo) -> None:
        """Refuse weights of fewer slots than the batch names.

        Raises:
            BatchMismatchError: they are.
        """
        if info.highest_slot >= weights.num_slots:
            raise BatchMismatchError(
                f"backend {self.name!r}: {op} got weights of {weights.num_slots} slots, but the prepared batch "
                f"names slot {info.highest_slot}"
            )

    def _check(self, op: str, tensor: Tensor, columns: int, weights: LoRAWeights) -> None:
        """What the kernels take for granted about x or out; host integers only.

        Raises:
            TensorMismatchError: not `[rows, columns]`, another device than the weights, or columns that
                are not contiguous.
        """
        b, shape = weights.b, tensor.shape
        if (
            len(shape) != 2
            or shape[1] != columns
            or tensor.device != b.device
            or tensor.stride(1) != 1
        ):
            raise TensorMismatchError(
                f"backend {self.name!r}: {op} got a tensor {tuple(tensor.shape)} of strides {tensor.stride()} "
                f"on {tensor.device}, expected [rows, {columns}] with contiguous columns on {b.device}"
            )


class _Table(NamedTuple):
    """The request view at the head of the words: indptr, then slots."""

    requests: int
    slots_at: int
    words: int  # up to the next multiple of 4


@cache
def _static_names(kind: GraphKind) -> tuple[str, str, str]:
    """The buffer of a graph kind, and in it the blocks of all rows and of the one lm_head pass."""
    return kind, f"{kind}, all rows", f"{kind}, lm_head"


@cache
def _table(requests: int) -> _Table:
    return _Table(requests, 1 + requests, -(-(1 + 2 * requests) // 4) * 4)
