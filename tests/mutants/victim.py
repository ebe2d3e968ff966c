"""A small backend that is right, written to be broken: every mutant is a copy with one change.

One form for every batch: each row gathers its own slot's A and B. All decisions are taken on the
device, so the same code serves eager batches and graphs, and every row is summed by itself, so it is
batch_invariant. Slow, and short.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch.nn import functional

from lora_core.backend import LoRABackend
from lora_core.batch import NO_LORA, BatchInfo, RequestTable
from lora_core.capabilities import Capabilities, Op
from lora_core.errors import BatchMismatchError, TensorMismatchError, UnsupportedOpError
from lora_core.workspace import GraphRoom


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of the batch, or of one lm_head pass: slot and scale of each, on the device."""

    count: int
    slots: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Info(BatchInfo):
    """Rows of the batch and of each pass."""

    rows: Rows
    passes: tuple[Rows, ...]


class Victim(LoRABackend):
    """Everything that the contract has."""

    name = "victim"
    contract = "1.0"
    capabilities = Capabilities(
        ops=frozenset(Op),
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        device_types=frozenset({"cpu", "cuda"}),
        graphs=frozenset({"decode", "prefill", "verify"}),
        batch_invariant=True,
    )

    # -- batch state ---------------------------------------------------------------------------------

    def prepare_batch(self, batch, *, graph=None):
        self.reset_batch_state()
        requests, tokens = len(batch.lengths), sum(batch.lengths)
        covered = [list(batch.lengths), *(list(kept) for kept in batch.logits)]
        if graph is None:
            room, sizes = requests, [sum(lengths) for lengths in covered]
            words = 2 * room + 1 + 2 * sum(sizes)
            target = torch.empty(words, dtype=torch.int32, device=self.device)
        else:
            passes = len(batch.logits)
            limits = self._require_graph(graph, requests=requests, tokens=tokens, passes=passes)
            room, sizes = limits.max_requests, [limits.max_tokens] * 2
            covered = [covered[0], covered[-1]]
            words = 2 * room + 1 + 2 * sum(sizes)
            target = self.workspace.static[graph]
        entry = self.workspace.staging.acquire(words)
        self._fill(entry.host[:words], batch, room, sizes, covered)
        entry.send(target)
        self.batch_info = self._describe(batch, graph, target, room, sizes, covered)
        return self.batch_info

    def _fill(self, host, batch, room, sizes, covered) -> None:
        """`[indptr | slots | slots of rows, scales of rows | the same per pass]`."""
        requests = len(batch.lengths)
        indptr = [0, *accumulate(batch.lengths)]
        host[: room + 1] = indptr[-1]
        host[: requests + 1] = indptr
        host[room + 1 : 2 * room + 1] = NO_LORA
        host[room + 1 : room + 1 + requests] = list(batch.slots)
        at = 2 * room + 1
        scales = [1.0] * requests if batch.scales is None else list(batch.scales)
        for size, lengths in zip(sizes, covered, strict=True):
            used = sum(lengths)
            host[at : at + size] = NO_LORA
            host[at : at + used] = np.repeat(np.asarray(batch.slots, np.int32), lengths)
            factors = host[at + size : at + 2 * size].view(np.float32)
            factors[:] = 1.0
            factors[:used] = np.repeat(np.asarray(scales, np.float32), lengths)
            at += 2 * size

    def _describe(self, batch, graph, target, room, sizes, covered) -> Info:
        requests = len(batch.lengths)
        rows, at = [], 2 * room + 1
        for size, lengths in zip(sizes, covered, strict=True):
            slots = target[at : at + size]
            scales = target[at + size : at + 2 * size].view(torch.float32)
            rows.append(Rows(sum(lengths), slots, scales))
            at += 2 * size
        pairs = zip(batch.slots, batch.lengths, strict=True)
        active = any(slot != NO_LORA and n for slot, n in pairs)
        static = RequestTable(target[: room + 1], target[room + 1 : 2 * room + 1])
        return Info(
            num_tokens=sum(batch.lengths),
            mode=batch.mode,
            graph=graph,
            has_active_lora=active,
            req_seg_indptr=target[: requests + 1],
            req_slots=target[room + 1 : room + 1 + requests],
            static_requests=None if graph is None else static,
            rows=rows[0],
            passes=tuple(rows[1:]) or (rows[0],),
        )

    def reset_batch_state(self) -> None:
        info = self.batch_info
        self.batch_info = None
        if info is not None and info.graph is not None:
            self._neutralise(info.graph)

    def init_graph(self, kind, *, max_requests, max_tokens) -> None:
        if kind not in self.capabilities.graphs:
            raise UnsupportedOpError(
                backend=self.name, op="init_graph", limit=f"{self.capabilities.graphs}", value=kind
            )
        words = 2 * max_requests + 1 + 4 * max_tokens
        self.workspace.static[kind] = torch.empty(words, dtype=torch.int32, device=self.device)
        self.workspace.graph_room[kind] = GraphRoom(max_requests, max_tokens)
        self._neutralise(kind)

    def _neutralise(self, kind) -> None:
        room = self.workspace.graph_room[kind].max_requests
        self.workspace.static[kind][: room + 1].zero_()
        self.workspace.static[kind][room + 1 :].fill_(NO_LORA)

    # -- ops -----------------------------------------------------------------------------------------

    def shrink(self, x, weights):
        info = self._require_linear("shrink", x, weights)
        self._require_rows("shrink", x.shape[0], info.num_tokens)
        return self._shrink(x, weights, info.rows)

    def expand(self, h, weights, out):
        info = self._require_batch("expand")
        self._require_supported("expand", weights)
        self._check_expand(h, weights, out)
        self._require_rows("expand", out.shape[0], info.num_tokens)
        self._expand(h, weights, out, info.rows)
        return out

    def linear(self, x, base, weights):
        info = self._require_linear("linear", x, weights)
        self._require_rows("linear", x.shape[0], info.num_tokens)
        return self._linear(x, base, weights, info.rows, info)

    def lm_head(self, x, base, weights, *, logits_pass=0):
        info = self._require_linear("lm_head", x, weights)
        if not 0 <= logits_pass < len(info.passes):
            raise BatchMismatchError(f"lm_head pass {logits_pass} of {len(info.passes)}")
        rows = info.passes[logits_pass]
        self._require_rows("lm_head", x.shape[0], rows.count)
        return self._linear(x, base, weights, rows, info)

    def embedding(self, input_ids, base, weights):
        info = self._require_batch("embedding")
        if input_ids.dim() != 1 or not weights.is_embedding:
            raise TensorMismatchError("embedding wants ids [rows] and a [S, V, R]")
        self._require_supported("embedding", weights)
        if weights.output_scale is not None or weights.bias is not None:
            raise UnsupportedOpError(
                backend=self.name, op="embedding", limit="A and B", value="output_scale or bias"
            )
        self._require_rows("embedding", len(input_ids), info.num_tokens)
        out = base(input_ids)
        slots = self._slots(info.rows, len(input_ids))
        ids = input_ids.clamp(0, weights.in_features - 1)
        for slot, whole in weights.full.items():
            out.copy_(torch.where((slots == slot)[:, None], functional.embedding(ids, whole), out))
        h = self._of_slot(weights.a, slots.clamp(min=0), ids).float()[:, None]
        self._expand(h, weights, out, info.rows)
        return out

    # -- the sums ------------------------------------------------------------------------------------

    def _linear(self, x, base, weights, rows, info):
        out = base(x)
        if info.graph is None and not info.has_active_lora:
            return out
        slots = self._slots(rows, x.shape[0])
        mine = (slots >= 0)[:, None]
        own = slots.clamp(min=0)
        for slot, whole in weights.full.items():
            replaced = functional.linear(x, whole, base.bias)
            out.copy_(torch.where((slots == slot)[:, None], replaced, out))
        h = self._shrink(x, weights, rows)
        if weights.output_scale is None and weights.bias is None:
            self._expand(h, weights, out, rows)
            return out
        total = out.float()
        if weights.output_scale is not None:
            bias = 0.0 if base.bias is None else base.bias.float()
            total = total - bias
            self._expand(h, weights, total, rows)
            total = total * weights.output_scale[own] + bias
        else:
            self._expand(h, weights, total, rows)
        if weights.bias is not None:
            total = total + weights.bias[own]
        out.copy_(torch.where(mine, total.to(out.dtype), out))
        return out

    def _shrink(self, x, weights, rows):
        slots = self._slots(rows, x.shape[0]).clamp(min=0)
        a = self._of_slot(weights.a, slots).float()  # [T', n, R, K]
        return (x.float()[:, None, None, :] * a).sum(-1)

    def _expand(self, h, weights, out, rows) -> None:
        layout = weights.layout
        slots = self._slots(rows, out.shape[0])
        mine, own = slots >= 0, slots.clamp(min=0)
        ranks, scalings = weights.ranks[own], weights.scalings[own]  # [T', n]
        b = self._of_slot(weights.b, own).float()  # [T', N, R]
        columns = torch.arange(weights.max_rank, device=out.device)
        scales = self._scales(rows, out.shape[0])
        for s in range(layout.num_slices):
            span = slice(layout.offsets[s], layout.offsets[s + 1])
            live = (columns < ranks[:, s, None]) & mine[:, None]  # [T', R]
            product = torch.where(live[:, None], h[:, s, None] * b[:, span], 0.0)
            delta = product.sum(-1) * (scalings[:, s] * scales)[:, None]
            applies = live[:, :1]  # a rank of 0 adds nothing, not even 0.0
            total = (out[:, span].float() + delta).to(out.dtype)
            out[:, span] = torch.where(applies, total, out[:, span])

    @staticmethod
    def _of_slot(stacked, *index):
        """Rows of a pool by slot, and by id for an embedding."""
        return stacked[index]

    @staticmethod
    def _slots(rows, num_rows):
        """int64 `[num_rows]`, NO_LORA past the batch."""
        slots = rows.slots[:num_rows].long()
        return functional.pad(slots, (0, num_rows - len(slots)), value=NO_LORA)

    @staticmethod
    def _scales(rows, num_rows):
        """float32 `[num_rows]`, 1 past the batch."""
        scales = rows.scales[:num_rows]
        return functional.pad(scales, (0, num_rows - len(scales)), value=1.0)

    def _check_expand(self, h, weights, out) -> None:
        expected = (out.shape[0], weights.layout.num_slices, weights.max_rank)
        wrong = tuple(h.shape) != expected or h.dtype != torch.float32
        if wrong or out.dim() != 2 or out.shape[1] != weights.layout.out_features:
            raise TensorMismatchError(
                f"expand got h {tuple(h.shape)} {h.dtype} and out {tuple(out.shape)}"
            )
