"""What the ops mean, in float64, one request at a time. Shares no code with any backend.

Every tensor is widened to float64 first, so the only error left is far below that of any dtype a
backend may claim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lora_core.weights import LoRAWeights


def shrink(x: Tensor, weights: LoRAWeights, lengths: Sequence[int], slots: Sequence[int]) -> Tensor:
    """`h[t, s] = A[slot(t), s] @ x[t]`, float64 `[T', n_slices, R]`; unspecified entries are NaN."""
    n, max_rank = weights.layout.num_slices, weights.max_rank
    h = torch.full((x.shape[0], n, max_rank), torch.nan, dtype=torch.float64, device=x.device)
    ranks = weights.ranks.tolist()
    for rows, slot, _ in _requests(lengths, slots):
        for s in range(n):
            live = ranks[slot][s]
            h[rows, s, :live] = x[rows].double() @ weights.a[slot, s, :live].double().T
    return h


def delta(
    h: Tensor,
    weights: LoRAWeights,
    lengths: Sequence[int],
    slots: Sequence[int],
    scales: Sequence[float] | None = None,
) -> Tensor:
    """`scale * scaling * B @ h`, slice by slice, float64 `[T', N]`; 0 where nothing applies."""
    layout = weights.layout
    total = torch.zeros(h.shape[0], layout.out_features, dtype=torch.float64, device=h.device)
    ranks, scalings = weights.ranks.tolist(), weights.scalings.double().tolist()
    for rows, slot, request in _requests(lengths, slots):
        begin = 0
        for s, width in enumerate(layout.widths):
            live = ranks[slot][s]
            if live:
                b = weights.b[slot, begin : begin + width, :live].double()
                # float32 scales: what the device is given
                factor = (
                    1.0
                    if scales is None
                    else torch.tensor(scales[request], dtype=torch.float32).item()
                )
                total[rows, begin : begin + width] = (
                    scalings[slot][s] * factor * (h[rows, s, :live].double() @ b.T)
                )
            begin += width
    return total


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weights: LoRAWeights,
    lengths: Sequence[int],
    slots: Sequence[int],
    scales: Sequence[float] | None = None,
) -> Tensor:
    """`output_scale * (x @ W^T + delta) + bias + adapter's bias`, float64 `[T', N]`."""
    product = x.double() @ weight.double().T
    for rows, slot, _ in _requests(lengths, slots):
        if slot in weights.full:
            product[rows] = x[rows].double() @ weights.full[slot].double().T
    product += delta(shrink(x, weights, lengths, slots), weights, lengths, slots, scales)
    for rows, slot, _ in _requests(lengths, slots):
        if weights.output_scale is not None:
            product[rows] *= weights.output_scale[slot].double()
        if weights.bias is not None:
            product[rows] += weights.bias[slot].double()
    return product if bias is None else product + bias.double()


def embedding(
    ids: Tensor,
    table: Tensor,
    weights: LoRAWeights,
    lengths: Sequence[int],
    slots: Sequence[int],
    scales: Sequence[float] | None = None,
) -> Tensor:
    """`table[id] + scaling * B @ A[slot, id]`, float64 `[T', N]`."""
    out = table.double()[ids]
    h = torch.full(
        (len(ids), 1, weights.max_rank), torch.nan, dtype=torch.float64, device=ids.device
    )
    for rows, slot, _ in _requests(lengths, slots):
        if slot in weights.full:
            out[rows] = weights.full[slot].double()[ids[rows]]
        h[rows, 0] = weights.a[slot].double()[ids[rows]]
    return out + delta(h, weights, lengths, slots, scales)


def _requests(lengths: Sequence[int], slots: Sequence[int]) -> Iterator[tuple[slice, int, int]]:
    """(rows, slot, index) of every request that has rows and an adapter."""
    begin = 0
    for index, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
        if length and slot >= 0:
            yield slice(begin, begin + length), slot, index
        begin += length
