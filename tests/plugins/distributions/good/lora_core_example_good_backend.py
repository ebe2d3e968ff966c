"""The backend: the smallest one that keeps the contract. Slow, and exact in float64."""

from __future__ import annotations

from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from lora_core import (
    BatchInfo,
    Capabilities,
    GraphKind,
    LoRABackend,
    LoRABatch,
    LoRAWeights,
    Op,
)
from lora_core.errors import UnsupportedOpError


class ExampleBackend(LoRABackend[BatchInfo]):
    """A product per request; knows plain linears in eager mode."""

    name: ClassVar[str] = "example"
    contract: ClassVar[str] = "1.0"
    capabilities: ClassVar[Capabilities] = Capabilities(
        dtypes=frozenset({"float32"}), device_types=frozenset({"cpu"})
    )

    def prepare_batch(self, batch: LoRABatch, *, graph: GraphKind | None = None) -> BatchInfo:
        self.reset_batch_state()
        if graph is not None:
            raise UnsupportedOpError(
                backend=self.name, op="prepare_batch", limit="graph kinds []", value=graph
            )
        if batch.scales is not None:
            raise self._unclaimed(Op.SCALES, where="prepare_batch")
        self.batch_info = BatchInfo(
            num_tokens=batch.num_tokens,
            mode=batch.mode,
            graph=None,
            has_active_lora=any(
                slot >= 0 and length
                for slot, length in zip(batch.slots, batch.lengths, strict=True)
            ),
            req_seg_indptr=torch.tensor([0, *accumulate(batch.lengths)], dtype=torch.int32),
            req_slots=torch.tensor(list(batch.slots), dtype=torch.int32),
        )
        return self.batch_info

    def reset_batch_state(self) -> None:
        self.batch_info = None

    def shrink(self, x: Tensor, weights: LoRAWeights) -> Tensor:
        info = self._require_linear("shrink", x, weights)
        self._require_rows("shrink", len(x), info.num_tokens)
        h = torch.zeros(len(x), weights.layout.num_slices, weights.max_rank)
        for slot, rows in self._segments(info):
            for s, rank in enumerate(weights.ranks[slot].tolist()):
                h[rows, s, :rank] = (
                    x[rows].double() @ weights.a[slot, s, :rank].double().T
                ).float()
        return h

    def expand(self, h: Tensor, weights: LoRAWeights, out: Tensor) -> Tensor:
        info = self._require_batch("expand")
        self._require_rows("expand", len(h), info.num_tokens)
        for slot, rows in self._segments(info):
            for s, rank in enumerate(weights.ranks[slot].tolist()):
                if rank:
                    columns = slice(weights.layout.offsets[s], weights.layout.offsets[s + 1])
                    delta = h[rows, s, :rank].double() @ weights.b[slot, columns, :rank].double().T
                    out[rows, columns] += (delta * weights.scalings[slot, s]).to(out.dtype)
        return out

    def _segments(self, info: BatchInfo) -> list[tuple[int, slice]]:
        bounds = info.req_seg_indptr.tolist()
        return [
            (slot, slice(bounds[i], bounds[i + 1]))
            for i, slot in enumerate(info.req_slots.tolist())
            if slot >= 0 and bounds[i] < bounds[i + 1]
        ]
