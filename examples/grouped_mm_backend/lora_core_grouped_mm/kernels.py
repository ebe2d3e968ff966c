"""One product for all requests: `torch._grouped_mm`, a group per request."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_ALIGNED = 4  # float32 values in the 16 bytes that _grouped_mm wants between two rows


def grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """`y[t] = weights[g] @ x[t]` for the rows t of every group g.

    A group is a request and not an adapter: a row's sum must not depend on how many rows of other
    requests use the same adapter, and a product of other shape may sum in another order.

    Args:
        x: float32 `[T, K]`.
        weights: float32 `[G, N, K]`.
        ends: int32 `[G]`, one past the last row of each group.

    Returns:
        float32 `[T, N]`.
    """
    missing = -x.shape[1] % _ALIGNED
    x, weights = functional.pad(x, (0, missing)), functional.pad(weights, (0, missing))
    return torch._grouped_mm(x, weights.mT, offs=ends)  # noqa: SLF001 - the point of this example
