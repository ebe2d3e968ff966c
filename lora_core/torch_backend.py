"""TorchBackend: the reference, in plain torch on any device, and the default where nothing else is.

Three forms of the same sum, chosen by the batch alone, so that the shapes of every product depend
on nothing that a neighbour brings along:

- few rows on a CPU: the form of few_rows.py;
- other eager CPU batches: a pair of products per request, cut to the adapter's own rank;
- graphs and other devices: masked products over all rows per slot, reading slots, ranks and
  scalings on the device, so that a captured graph follows what is prepared later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from lora_core import few_rows
from lora_core.backend import BaseModule, LoRABackend
from lora_core.batch import NO_LORA, BatchInfo, LoRABatch, RequestTable
from lora_core.capabilities import Capabilities, GraphKind, Op
from lora_core.errors import (
    BatchMismatchError,
    TensorMismatchError,
    UnsupportedOpError,
)
from lora_core.weights import LoRAWeights, SliceLayout
from lora_core.workspace import GraphRoom


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows one op covers: of the whole batch, or of one lm_head pass.

    Attributes:
        num_rows: rows that belong to requests.
        segments: (slot, first row, end row, scale) of every request with rows and an adapter.
        row_slots: host, slot of every row.
        row_scales: host, factor of every row, or None when every factor is 1.
        slots: int32 on the device, slot of every row; in graph mode for the whole static buffer.
        scales: float32 beside `slots`, or None when every factor is 1 (eager only).
    """

    num_rows: int
    segments: tuple[tuple[int, int, int, float], ...]
    row_slots: tuple[int, ...]
    row_scales: tuple[float, ...] | None
    slots: Tensor
    scales: Tensor | None


@dataclass(frozen=True, kw_only=True, eq=False)
class TorchBatchInfo(BatchInfo):
    """The batch's rows, and those of each lm_head pass."""

    rows: Rows
    passes: tuple[Rows, ...]


class TorchBackend(LoRABackend[TorchBatchInfo]):
    """Everything the contract has, for reading and for comparing with; slow on a GPU.

    A new backend may begin as a subclass that claims less: what `capabilities` leaves out is refused.
    """

    name: ClassVar[str] = "torch"
    contract: ClassVar[str] = "1.0"
    capabilities: ClassVar[Capabilities] = Capabilities(
        ops=frozenset(Op),
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        device_types=frozenset({"cpu", "cuda"}),
        graphs=frozenset({"decode", "prefill", "verify"}),
    )

    # -- batch state -----------------------------------------------------------------------------

    @override
    def prepare_batch(self, batch: LoRABatch, *, graph: GraphKind | None = None) -> TorchBatchInfo:
        self.reset_batch_state()
        if batch.scales is not None and not self.capabilities.supports(Op.SCALES):
            raise self._unclaimed(Op.SCALES, where="prepare_batch")
        lengths, slots = np.asarray(batch.lengths, np.int64), np.asarray(batch.slots, np.int32)
        requests, tokens = len(lengths), int(lengths.sum())
        covered = [lengths, *(np.asarray(counts, np.int64) for counts in batch.logits)]
        if graph is None:
            room_requests, room_rows = requests, [int(kept.sum()) for kept in covered]
            words = 2 * room_requests + 1 + 2 * sum(room_rows)
            target = torch.empty(words, dtype=torch.int32, device=self.device)
        else:
            room = self._require_graph(
                graph, requests=requests, tokens=tokens, passes=len(batch.logits)
            )
            room_requests, room_rows = room.max_requests, [room.max_tokens] * 2
            covered = [covered[0], covered[-1]]
            target = self.workspace.static[graph]
            words = target.numel()

        entry = self.workspace.staging.acquire(words)
        host = entry.host[:words]
        host[room_requests + 1 : 2 * room_requests + 1] = NO_LORA
        host[room_requests + 1 : room_requests + 1 + requests] = slots
        host[0] = 0
        host[1 : requests + 1] = np.cumsum(lengths)
        host[requests + 1 : room_requests + 1] = tokens
        at = 2 * room_requests + 1
        row_slots: list[tuple[int, ...]] = []
        row_scales: list[tuple[float, ...] | None] = []
        scales = np.asarray(batch.scales, np.float32) if batch.scales is not None else None
        for kept, width in zip(covered, room_rows, strict=True):
            per_row = np.repeat(slots, kept)
            row_slots.append(tuple(per_row.tolist()))
            host[at : at + width] = NO_LORA
            host[at : at + len(per_row)] = per_row
            factors = host[at + width : at + 2 * width].view(np.float32)
            factors[:] = 1.0
            if scales is not None:
                factors[: len(per_row)] = np.repeat(scales, kept)
            row_scales.append(None if scales is None else tuple(factors[: len(per_row)].tolist()))
            at += 2 * width
        entry.send(target)

        def rows(index: int, start: int) -> Rows:
            width = room_rows[index]
            return Rows(
                num_rows=int(covered[index].sum()),
                segments=tuple(_segments(batch.slots, covered[index].tolist(), batch.scales)),
                row_slots=row_slots[index],
                row_scales=row_scales[index],
                slots=target[start : start + width],
                scales=target[start + width : start + 2 * width].view(torch.float32)
                if graph is not None or scales is not None
                else None,
            )

        starts = np.cumsum([2 * room_requests + 1, *(2 * width for width in room_rows)]).tolist()
        whole = rows(0, starts[0])
        static = None
        if graph is not None:
            static = RequestTable(
                target[: room_requests + 1], target[room_requests + 1 : starts[0]]
            )
        self.batch_info = TorchBatchInfo(
            num_tokens=tokens,
            mode=batch.mode,
            graph=graph,
            has_active_lora=bool(whole.segments),
            req_seg_indptr=target[: requests + 1],
            req_slots=target[room_requests + 1 : room_requests + 1 + requests],
            static_requests=static,
            rows=whole,
            passes=tuple(rows(i, starts[i]) for i in range(1, len(covered))) or (whole,),
        )
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
        words = 2 * max_requests + 1 + 2 * 2 * max_tokens  # requests; slot and scale of rows, twice
        self.workspace.static[kind] = torch.empty(words, dtype=torch.int32, device=self.device)
        self.workspace.graph_room[kind] = GraphRoom(max_requests, max_tokens)
        self._neutralise(kind)

    def _neutralise(self, kind: GraphKind) -> None:
        requests = self.workspace.graph_room[kind].max_requests
        self.workspace.static[kind][: requests + 1].zero_()
        self.workspace.static[kind][requests + 1 :].fill_(NO_LORA)

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
        if dtype == torch.float32 and self.device.type == "cpu":
            stacked = few_rows.StackedWeights.allocate(
                num_slots=num_slots,
                max_rank=max_rank,
                in_features=in_features,
                layout=layout,
                embedding=embedding,
            )
            if stacked is not None:
                return stacked
        return super().allocate_weights(
            num_slots=num_slots,
            max_rank=max_rank,
            in_features=in_features,
            layout=layout,
            dtype=dtype,
            embedding=embedding,
        )

    # -- ops -------------------------------------------------------------------------------------

    @override
    def shrink(self, x: Tensor, weights: LoRAWeights) -> Tensor:
        info = self._require_linear("shrink", x, weights)
        self._require_rows("shrink", x.shape[0], info.num_tokens)
        return self._shrink(x, weights, info.rows, graph=info.graph)

    @override
    def expand(self, h: Tensor, weights: LoRAWeights, out: Tensor) -> Tensor:
        info = self._require_batch("expand")
        self._require_supported("expand", weights)
        self._check_expand(h, weights, out)
        self._require_rows("expand", h.shape[0], info.num_tokens)
        self._expand(h, weights, out, info.rows, graph=info.graph)
        return out

    @override
    def linear(self, x: Tensor, base: BaseModule, weights: LoRAWeights) -> Tensor:
        info = self._require_linear("linear", x, weights)
        self._require_plain(weights, op="linear")
        self._require_rows("linear", x.shape[0], info.num_tokens)
        return self._linear(x, base, weights, info.rows, info)

    @override
    def lm_head(
        self, x: Tensor, base: BaseModule, weights: LoRAWeights, *, logits_pass: int = 0
    ) -> Tensor:
        if not self.capabilities.supports(Op.LM_HEAD):
            raise self._unclaimed(Op.LM_HEAD)
        info = self._require_linear("lm_head", x, weights)
        self._require_plain(weights, op="lm_head")
        if not 0 <= logits_pass < len(info.passes):
            raise BatchMismatchError(
                f"backend {self.name!r}: lm_head was asked for logits pass {logits_pass}, but the prepared batch "
                f"has {len(info.passes)}"
            )
        rows = info.passes[logits_pass]
        self._require_rows("lm_head", x.shape[0], rows.num_rows)
        return self._linear(x, base, weights, rows, info)

    @override
    def embedding(self, input_ids: Tensor, base: BaseModule, weights: LoRAWeights) -> Tensor:
        if not self.capabilities.supports(Op.EMBEDDING):
            raise self._unclaimed(Op.EMBEDDING)
        info = self._require_batch("embedding")
        if input_ids.dim() != 1 or not weights.is_embedding:
            raise TensorMismatchError(
                f"backend {self.name!r}: embedding got ids of shape {tuple(input_ids.shape)} and weights.a of shape "
                f"{tuple(weights.a.shape)}, expected [rows] and [S, V, R]"
            )
        self._require_supported("embedding", weights)
        self._require_plain(weights, op="embedding")
        if weights.output_scale is not None or weights.bias is not None:
            raise UnsupportedOpError(
                backend=self.name,
                op="embedding",
                limit="A, B and full weights",
                value="output_scale" if weights.output_scale is not None else "bias",
            )
        self._require_rows("embedding", input_ids.shape[0], info.num_tokens)
        out = base(input_ids)
        if info.graph is None and not info.has_active_lora:
            return out
        h = torch.empty(len(input_ids), 1, weights.max_rank, dtype=torch.float32, device=out.device)
        if self._on_host(info.graph):
            for slot, start, end, _ in info.rows.segments:
                ids = input_ids[start:end]
                if slot in weights.full:
                    out[start:end] = functional.embedding(ids, weights.full[slot])
                h[start:end, 0] = weights.a[slot].index_select(0, ids)
        else:
            ids = input_ids.clamp(0, weights.in_features - 1)  # padding rows may hold anything
            for slot in self._slots(weights, info.rows, info.graph):
                mine = self._row_mask(info.rows, slot, len(ids))
                if slot in weights.full:
                    out = torch.where(mine, functional.embedding(ids, weights.full[slot]), out)
                h[:, 0] = torch.where(mine, weights.a[slot].index_select(0, ids), h[:, 0])
        self._expand(h, weights, out, info.rows, graph=info.graph)
        return out

    # -- the sums -----------------------------------------------------------------------------------

    def _on_host(self, graph: GraphKind | None) -> bool:
        """Whether slots and ranks may be read on the host: never on another device or in a graph."""
        return graph is None and self.device.type == "cpu"

    def _few_rows(
        self, rows: Rows, weights: LoRAWeights, num_rows: int, graph: GraphKind | None
    ) -> tuple[few_rows.StackedWeights, few_rows.Plan] | None:
        """What the form for few rows needs, where it applies."""
        if (
            graph is not None
            or rows.num_rows > few_rows.MAX_ROWS
            or not isinstance(weights, few_rows.StackedWeights)
        ):
            return None
        return weights, weights.plan(rows.row_slots, rows.row_scales, num_rows)

    def _linear(
        self, x: Tensor, base: BaseModule, weights: LoRAWeights, rows: Rows, info: TorchBatchInfo
    ) -> Tensor:
        out = base(x)
        if info.graph is None and not rows.segments:
            return out
        if weights.full:
            self._replace(x, base, weights, out, rows, info.graph)
        if weights.output_scale is not None:
            return self._dora(x, base, weights, weights.output_scale, out, rows, info)
        few = self._few_rows(rows, weights, x.shape[0], info.graph)
        if few and out.dtype == torch.float32:
            few_rows.add_delta(x, *few, out)
        else:
            h = self._shrink(x, weights, rows, graph=info.graph)
            self._expand(h, weights, out, rows, graph=info.graph)
        if (extra := weights.bias) is not None:
            self._per_row(out, rows, weights, info.graph, lambda y, slot: y + extra[slot])
        return out

    def _dora(
        self,
        x: Tensor,
        base: BaseModule,
        weights: LoRAWeights,
        output_scale: Tensor,
        out: Tensor,
        rows: Rows,
        info: TorchBatchInfo,
    ) -> Tensor:
        """`output_scale * (base without bias + delta) + bias`, in place in `out`."""
        bias = base.bias.float() if base.bias is not None else torch.zeros((), device=out.device)
        delta = torch.zeros_like(out, dtype=torch.float32)
        h = self._shrink(x, weights, rows, graph=info.graph)
        self._expand(h, weights, delta, rows, graph=info.graph)
        extra = weights.bias if weights.bias is not None else torch.zeros_like(output_scale)
        self._per_row(
            out,
            rows,
            weights,
            info.graph,
            lambda y, slot: y * output_scale[slot] + bias + extra[slot],
            source=out.float() - bias + delta,
        )
        return out

    def _shrink(
        self, x: Tensor, weights: LoRAWeights, rows: Rows, *, graph: GraphKind | None
    ) -> Tensor:
        n, max_rank = weights.layout.num_slices, weights.max_rank
        if few := self._few_rows(rows, weights, x.shape[0], graph):
            return few_rows.shrink(x, *few)
        h = torch.empty(x.shape[0], n, max_rank, dtype=torch.float32, device=x.device)
        if self._on_host(graph):
            ranks = weights.ranks.tolist()
            for slot, start, end, _ in rows.segments:
                x_request = x[start:end].float()
                for s, rank in enumerate(ranks[slot]):
                    if rank:
                        torch.mm(
                            x_request,
                            weights.a[slot, s, :rank].float().T,
                            out=h[start:end, s, :rank],
                        )
            return h
        x32 = x.float()
        for slot in self._slots(weights, rows, graph):
            mine = self._row_mask(rows, slot, x.shape[0]).unsqueeze(-1)
            product = torch.mm(x32, weights.a[slot].float().reshape(-1, x.shape[1]).T)
            h = torch.where(mine, product.view(-1, n, max_rank), h)
        return h

    def _expand(
        self, h: Tensor, weights: LoRAWeights, out: Tensor, rows: Rows, *, graph: GraphKind | None
    ) -> None:
        layout = weights.layout
        if self._on_host(graph):
            few = self._few_rows(rows, weights, out.shape[0], graph)
            if few and out.dtype == torch.float32:
                few_rows.expand(h, *few, out)
                return
            ranks, scalings = weights.ranks.tolist(), weights.scalings.tolist()
            for slot, start, end, scale in rows.segments:
                for s, rank in enumerate(ranks[slot]):
                    if not rank:
                        continue
                    columns = slice(layout.offsets[s], layout.offsets[s + 1])
                    target = out[start:end, columns]
                    h_live, b = h[start:end, s, :rank], weights.b[slot, columns, :rank].float()
                    factor = scalings[slot][s] * scale
                    if target.dtype == torch.float32:
                        target.addmm_(h_live, b.T, alpha=factor)
                    else:
                        target.copy_(target.float() + factor * torch.mm(h_live, b.T))
            return
        ranks_upwards = torch.arange(weights.max_rank, device=out.device)
        total = out.float()
        touched = torch.zeros(out.shape, dtype=torch.bool, device=out.device)
        for slot in self._slots(weights, rows, graph):
            mine = self._row_mask(rows, slot, out.shape[0])
            for s in range(layout.num_slices):
                live = ranks_upwards < weights.ranks[slot, s]
                span = slice(layout.offsets[s], layout.offsets[s + 1])
                b = torch.where(live, weights.b[slot, span].float(), 0.0)
                delta = (
                    torch.mm(torch.where(live & mine, h[:, s], 0.0), b.T)
                    * weights.scalings[slot, s]
                )
                if rows.scales is not None:
                    delta = delta * _rows_of(rows.scales, out.shape[0], 1.0).unsqueeze(-1)
                wanted = mine & (weights.ranks[slot, s] > 0)  # adding 0.0 would turn -0.0 into 0.0
                total[:, span] = torch.where(wanted, total[:, span] + delta, total[:, span])
                touched[:, span] |= wanted
        out.copy_(torch.where(touched, total.to(out.dtype), out))

    def _replace(
        self,
        x: Tensor,
        base: BaseModule,
        weights: LoRAWeights,
        out: Tensor,
        rows: Rows,
        graph: GraphKind | None,
    ) -> None:
        """Rows whose slot brings a whole weight use it instead of the base's."""
        if self._on_host(graph):
            for slot, start, end, _ in rows.segments:
                if slot in weights.full:
                    out[start:end] = functional.linear(x[start:end], weights.full[slot], base.bias)
            return
        for slot in self._slots(weights, rows, graph):
            if slot in weights.full:
                mine = self._row_mask(rows, slot, out.shape[0])
                out.copy_(
                    torch.where(mine, functional.linear(x, weights.full[slot], base.bias), out)
                )

    def _per_row(
        self,
        out: Tensor,
        rows: Rows,
        weights: LoRAWeights,
        graph: GraphKind | None,
        change: Callable[[Tensor, int], Tensor],
        *,
        source: Tensor | None = None,
    ) -> None:
        """`out[rows of slot] = change(source[rows of slot], slot)`, computed in float32."""
        source = out if source is None else source
        if self._on_host(graph):
            for slot, start, end, _ in rows.segments:
                out[start:end] = change(source[start:end].float(), slot).to(out.dtype)
            return
        for slot in self._slots(weights, rows, graph):
            mine = self._row_mask(rows, slot, out.shape[0])
            out.copy_(torch.where(mine, change(source.float(), slot).to(out.dtype), out))

    def _slots(self, weights: LoRAWeights, rows: Rows, graph: GraphKind | None) -> Iterable[int]:
        """Slots to run through: those of the batch, or in a graph all of them."""
        if graph is not None:
            return range(weights.num_slots)
        return sorted({slot for slot, *_ in rows.segments})

    def _row_mask(self, rows: Rows, slot: int, num_rows: int) -> Tensor:
        """Bool `[num_rows, 1]`: rows of one slot; padding belongs to none."""
        return (_rows_of(rows.slots, num_rows, NO_LORA) == slot).unsqueeze(-1)

    def _check_expand(self, h: Tensor, weights: LoRAWeights, out: Tensor) -> None:
        expected = (out.shape[0], weights.layout.num_slices, weights.max_rank)
        if (
            tuple(h.shape) != expected
            or h.dtype != torch.float32
            or out.dim() != 2
            or out.shape[1] != weights.layout.out_features
        ):
            raise TensorMismatchError(
                f"backend {self.name!r}: expand got h {tuple(h.shape)} {h.dtype} and out {tuple(out.shape)}, expected "
                f"h {expected} float32 and out [rows, {weights.layout.out_features}]"
            )


def _segments(
    slots: Sequence[int], lengths: Sequence[int], scales: Sequence[float] | None
) -> Iterable[tuple[int, int, int, float]]:
    start = 0
    for i, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        if length and slot != NO_LORA:
            yield slot, start, start + length, 1.0 if scales is None else float(scales[i])
        start += length


def _rows_of(values: Tensor, num_rows: int, padding: float) -> Tensor:
    """`values` cut or padded to `num_rows`."""
    if values.shape[0] >= num_rows:
        return values[:num_rows]
    return functional.pad(values, (0, num_rows - values.shape[0]), value=padding)
