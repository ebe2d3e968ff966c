"""Every timed call is compared with float32, computed from the adapters themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SAMPLED_ROWS = 512
"""Rows compared per layer; the first layer is compared in full."""
ALLOWED_OVER_TORCH = 2.0
"""RMS error allowed, as a multiple of plain torch in the same dtype on the same inputs."""


@dataclass(frozen=True)
class Adapters:
    """The adapters of one layer, exactly as large as they are.

    Attributes:
        a: per adapter `[n_slices, r, K]`.
        b: per adapter `[N, r]`.
        offsets: where each slice begins in the output, and the end.
    """

    a: list[Tensor]
    b: list[Tensor]
    offsets: Sequence[int]

    def delta(self, x: Tensor, row_slots: Tensor, dtype: torch.dtype) -> Tensor:
        """`[rows, N]`: the sum that every kernel must add, each product in `dtype`."""
        out = torch.zeros(x.shape[0], self.offsets[-1], dtype=dtype, device=x.device)
        for slot, (a, b) in enumerate(zip(self.a, self.b, strict=True)):
            rows = (row_slots == slot).nonzero().squeeze(1)
            if not len(rows):
                continue
            picked = x[rows].to(dtype)
            for s, (start, end) in enumerate(zip(self.offsets, self.offsets[1:], strict=False)):
                h = picked @ a[s].to(dtype).mT
                out[rows, start:end] = h @ b[start:end].to(dtype).mT
        return out


def sample_rows(num_rows: int, device: torch.device) -> Tensor:
    """Evenly spaced rows, the first and the last among them; all when there are few."""
    count = min(num_rows, SAMPLED_ROWS)
    return torch.linspace(0, num_rows - 1, count, device=device).round().long().unique()


def relative_rms(out: Tensor, reference: Tensor) -> float:
    """`rms(out - reference) / rms(reference)`; infinite when anything is not finite."""
    error = (out.float() - reference).norm() / reference.norm()
    return float(error) if bool(torch.isfinite(error)) else float("inf")


class Oracle:
    """Float32 results of a layer, and how far plain torch in the timed dtype is from them."""

    def __init__(
        self, x: Tensor, weight: Tensor, adapters: Adapters, row_slots: Tensor, rows: Tensor
    ) -> None:
        picked, slots = x[rows], row_slots[rows]
        self.rows = rows
        self.expected = picked.float() @ weight.float().mT
        self.expected += adapters.delta(picked, slots, torch.float32)
        plain = picked @ weight.mT + adapters.delta(picked, slots, x.dtype)
        self.allowed = ALLOWED_OVER_TORCH * relative_rms(plain, self.expected)

    def fault(self, out: Tensor) -> str | None:
        """What is wrong with `out [T, N]`, or None; `error` of it afterwards is in `last`."""
        self.last = relative_rms(out[self.rows], self.expected)
        if self.last <= self.allowed:
            return None
        return f"wrong result: relative rms error {self.last:.3g}, allowed {self.allowed:.3g}"
