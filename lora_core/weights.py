"""The stacked adapter weights of one site, as every backend sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from lora_core.errors import TensorMismatchError


@dataclass(frozen=True)
class SliceLayout:
    """The projections packed in one site, by output width: q|k|v is `(4096, 1024, 1024)`."""

    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise TensorMismatchError(f"SliceLayout needs widths of at least 1, got {self.widths}")

    @property
    def num_slices(self) -> int:
        """Number of packed projections."""
        return len(self.widths)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each slice begins in the output, and the end: `num_slices + 1` numbers."""
        return tuple(accumulate(self.widths, initial=0))

    @property
    def out_features(self) -> int:
        """N, the sum of the widths."""
        return self.offsets[-1]


@dataclass(frozen=True, eq=False)
class LoRAWeights:
    """Stacked A and B of one site over S slots; R = max_rank, K inputs, N outputs.

    All tensors lie on one device at fixed addresses and are rewritten in place when an adapter
    moves in, so that captured graphs see it. Rows past an adapter's own rank, and whole slots that
    hold no adapter, may hold anything, NaN included; a rank of 0 makes a slice inert.

    Attributes:
        a: `[S, n_slices, R, K]`; of an embedding `[S, V, R]`, gathered by row.
        b: `[S, N, R]`, dtype of `a`.
        ranks: int32 `[S, n_slices]`, 0..R.
        scalings: float32 `[S, n_slices]`, the factor on each slice's delta.
        layout: widths of the slices, sum N.
        output_scale: DoRA, float32 `[S, N]`: `y = output_scale * (base without bias + delta) + bias`;
            1 for adapters without DoRA. None where no adapter uses it.
        bias: float32 `[S, N]`, added to the rows of a slot: the adapter's bias minus the base's.
            None where no adapter has one.
        full: slot -> `[N, K]` (embedding: `[V, N]`), a whole weight used instead of the base's.

    Raises:
        TensorMismatchError: shapes, dtypes or devices that do not fit each other.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    scalings: Tensor
    layout: SliceLayout
    output_scale: Tensor | None = None
    bias: Tensor | None = None
    full: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        slots, n = self.a.shape[0], self.layout.num_slices
        out = self.layout.out_features
        if not (self.is_embedding or (self.a.dim() == 4 and self.a.shape[1] == n)):
            raise TensorMismatchError(
                f"LoRAWeights.a has shape {tuple(self.a.shape)}: expected [S, {n}, R, K], "
                "or [S, V, R] for an embedding of one slice"
            )
        expected = {
            "b": (self.b, (slots, out, self.max_rank), self.a.dtype),
            "ranks": (self.ranks, (slots, n), torch.int32),
            "scalings": (self.scalings, (slots, n), torch.float32),
            "output_scale": (self.output_scale, (slots, out), torch.float32),
            "bias": (self.bias, (slots, out), torch.float32),
        }
        for name, (tensor, shape, dtype) in expected.items():
            if tensor is None:
                continue
            if (
                tuple(tensor.shape) != shape
                or tensor.dtype != dtype
                or tensor.device != self.a.device
            ):
                raise TensorMismatchError(
                    f"LoRAWeights.{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}: "
                    f"expected {shape} {dtype} on {self.a.device}"
                )

    @cached_property
    def is_embedding(self) -> bool:
        """Whether `a` is `[S, V, R]`, gathered by token id."""
        return self.a.dim() == 3 and self.layout.num_slices == 1

    @cached_property
    def num_slots(self) -> int:
        """S, the slots of the pool."""
        return self.a.shape[0]

    @cached_property
    def max_rank(self) -> int:
        """R, the rank that every slot has room for."""
        return self.a.shape[2]

    @cached_property
    def in_features(self) -> int:
        """K, or V for an embedding."""
        return self.a.shape[1] if self.is_embedding else self.a.shape[3]
