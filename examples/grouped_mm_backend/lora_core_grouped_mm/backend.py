"""GroupedMMBackend: a backend of its own, from the public names alone."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor
from typing_extensions import override

from lora_core import (
    NO_LORA,
    BatchInfo,
    Capabilities,
    GraphKind,
    LoRABackend,
    LoRABatch,
    LoRAWeights,
    Op,
)
from lora_core.errors import TensorMismatchError, UnsupportedOpError
from lora_core_grouped_mm.kernels import grouped_product


class GroupedMMBackend(LoRABackend[BatchInfo]):
    """Shrink and expand as one grouped product each; `linear` is the contract's own default.

    On a GPU `torch._grouped_mm` returns bfloat16, and h has to be float32: it claims CPUs only.
    """

    name = "grouped_mm"
    contract = "1.0"
    capabilities = Capabilities(
        ops=frozenset({Op.LINEAR}),
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        device_types=frozenset({"cpu"}),
    )

    # -- batch state: a pair ---------------------------------------------------------------------

    @override
    def prepare_batch(self, batch: LoRABatch, *, graph: GraphKind | None = None) -> BatchInfo:
        self.reset_batch_state()  # first, so that nothing is prepared if this fails
        for asked, limit in ((graph, "eager batches"), (batch.scales, "batches without scales")):
            if asked is not None:
                raise UnsupportedOpError(
                    backend=self.name, op="prepare_batch", limit=limit, value=asked
                )
        starts = [0, *accumulate(batch.lengths)]
        self.batch_info = BatchInfo(
            num_tokens=starts[-1],
            mode=batch.mode,
            graph=None,
            has_active_lora=any(
                length and slot != NO_LORA
                for length, slot in zip(batch.lengths, batch.slots, strict=True)
            ),
            req_seg_indptr=torch.tensor(starts, dtype=torch.int32),
            req_slots=torch.tensor(list(batch.slots), dtype=torch.int32),
        )
        return self.batch_info

    @override
    def reset_batch_state(self) -> None:
        self.batch_info = None  # all there is

    # -- ops ---------------------------------------------------------------------------------------

    @override
    def shrink(self, x: Tensor, weights: LoRAWeights) -> Tensor:
        info = self._require_linear("shrink", x, weights)
        self._require_rows("shrink", x.shape[0], info.num_tokens)
        n_slices, max_rank = weights.layout.num_slices, weights.max_rank
        h = torch.zeros(x.shape[0], n_slices, max_rank)
        if info.has_active_lora:
            # requests without an adapter compute with slot 0: nobody reads their h
            a = (
                weights.a[info.req_slots.clamp(min=0)].float().flatten(1, 2)
            )  # [bs, n_slices * R, K]
            live = h[: info.num_tokens]
            live.copy_(self._product(x[: info.num_tokens], a, info).view(live.shape))
        return h

    @override
    def expand(self, h: Tensor, weights: LoRAWeights, out: Tensor) -> Tensor:
        info = self._require_batch("expand")
        self._require_supported("expand", weights)
        layout = weights.layout
        expected = (out.shape[0], layout.num_slices, weights.max_rank)
        if (
            tuple(h.shape) != expected
            or h.dtype != torch.float32
            or out.dim() != 2
            or out.shape[1] != layout.out_features
        ):
            raise TensorMismatchError(
                f"backend {self.name!r}: expand got h {tuple(h.shape)} {h.dtype} and out "
                f"{tuple(out.shape)}, expected h {expected} float32 and out [rows, {layout.out_features}]"
            )
        self._require_rows("expand", h.shape[0], info.num_tokens)
        if not info.has_active_lora:
            return out
        slots = info.req_slots.clamp(min=0)
        lengths = info.req_seg_indptr.diff()
        ranks = torch.where(
            info.req_slots.unsqueeze(1) == NO_LORA, 0, weights.ranks[slots]
        )  # [bs, n]
        past = torch.arange(weights.max_rank) >= ranks.unsqueeze(-1)  # [bs, n_slices, R]
        # what lies past a rank may be NaN, and 0 * NaN is NaN: both factors are masked
        h = h[: info.num_tokens].masked_fill(past.repeat_interleave(lengths, 0), 0)
        for s in range(layout.num_slices):
            span = slice(layout.offsets[s], layout.offsets[s + 1])
            b = weights.b[slots, span].float().masked_fill(past[:, s].unsqueeze(1), 0)
            b *= weights.scalings[slots, s].view(-1, 1, 1)
            delta = self._product(h[:, s], b, info)
            target = out[: info.num_tokens, span]
            # rows without an adapter keep their bits: adding 0.0 would turn -0.0 into 0.0
            touched = (ranks[:, s] > 0).repeat_interleave(lengths).unsqueeze(1)
            target.copy_(torch.where(touched, (target.float() + delta).to(out.dtype), target))
        return out

    def _product(self, x: Tensor, per_request: Tensor, info: BatchInfo) -> Tensor:
        return grouped_product(x.float(), per_request, info.req_seg_indptr[1:])
