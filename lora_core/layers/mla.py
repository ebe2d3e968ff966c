"""Adapters on MLA's kv_b_proj where attention never multiplies by it: the absorbed form.

Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) keeps a latent `c [C]` per token, and
kv_b_proj expands it to each head's key and value, `[W_k; W_v] c`. At decode engines multiply queries
by W_k and attention's output by W_v instead, and never expand. With an adapter the weight is
`W + s * B @ A`, so both need a correction of their own:

    q_absorbed[t, h] += s * A^T (B_k[h]^T q[t, h])        o[t, h] += s * B_v[h] (A latent[t, h])

All rows that a query attends to belong to its own request, so the slot of the query is the slot of
the keys. Plain torch, for any dense backend: it reads the request view alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lora_core.batch import BatchInfo
from lora_core.errors import TensorMismatchError
from lora_core.moe import local_slots
from lora_core.weights import LoRAWeights


def correct_absorbed_query(
    query: Tensor, weights: LoRAWeights, info: BatchInfo | None, out: Tensor, *, value_dim: int
) -> Tensor:
    """Add the adapters' part to queries that were multiplied by W_k.

    Args:
        query: `[T', heads, key_dim]`, the part of the query without position; never written.
        weights: of kv_b_proj: one slice, K = C, and per head the rows of its key, then of its value.
        info: the prepared batch; None: nothing is added.
        out: `[T', heads, C]`, changed in place.
        value_dim: rows of each head's value.

    Returns:
        `out` itself.

    Raises:
        TensorMismatchError: shapes that do not fit.
    """
    heads, key_dim = query.shape[1:]
    b = _per_head(weights, heads, key_dim + value_dim)[:, :, :key_dim]  # [S, heads, key_dim, R]
    _require(out, (query.shape[0], heads, weights.in_features), "out")
    slots = local_slots(info, query.shape[0])
    if slots is None:
        return out
    picked = _pick(weights, slots)
    inner = torch.einsum("thk,thkr->thr", query.float(), _masked(b[picked.slots].float(), picked))
    delta = torch.einsum("thr,trc->thc", inner, _masked_rows(weights, picked))
    return _add(out, delta, picked)


def correct_absorbed_value(
    latent: Tensor, weights: LoRAWeights, info: BatchInfo | None, out: Tensor
) -> Tensor:
    """Add the adapters' part to attention outputs that were multiplied by W_v.

    Args:
        latent: `[T', heads, C]`, attention's output in the latent space; never written.
        weights: of kv_b_proj, see `correct_absorbed_query`.
        info: the prepared batch; None: nothing is added.
        out: `[T', heads, value_dim]`, changed in place.

    Returns:
        `out` itself.

    Raises:
        TensorMismatchError: shapes that do not fit.
    """
    rows, heads, value_dim = out.shape
    _require(latent, (rows, heads, weights.in_features), "latent")
    width, rest = divmod(weights.layout.out_features, heads)
    if rest or width <= value_dim:
        raise TensorMismatchError(
            f"kv_b_proj of {weights.layout.out_features} outputs has no {heads} heads with keys beside "
            f"values of {value_dim}"
        )
    b = _per_head(weights, heads, width)[:, :, width - value_dim :]  # [S, heads, value_dim, R]
    slots = local_slots(info, rows)
    if slots is None:
        return out
    picked = _pick(weights, slots)
    inner = torch.einsum("thc,trc->thr", latent.float(), _masked_rows(weights, picked))
    delta = torch.einsum("thr,thvr->thv", inner, _masked(b[picked.slots].float(), picked))
    return _add(out, delta, picked)


class _Picked:
    """Which slot each row uses: `slots` int64 `[T]`, 0 where `live` is False, and live ranks `[T, R]`."""

    def __init__(self, slots: Tensor, live: Tensor, ranks: Tensor, scalings: Tensor) -> None:
        self.slots, self.live, self.ranks, self.scalings = slots, live, ranks, scalings


def _pick(weights: LoRAWeights, slots: Tensor) -> _Picked:
    valid = (slots >= 0) & (slots < weights.num_slots)
    index = torch.where(valid, slots, 0).long()
    rank = weights.ranks[index, 0]
    ranks = torch.arange(weights.max_rank, device=slots.device) < rank.unsqueeze(1)
    return _Picked(index, valid & (rank > 0), ranks, weights.scalings[index, 0])


def _masked(b: Tensor, picked: _Picked) -> Tensor:
    """B `[T, heads, width, R]` without what lies past a rank."""
    return b.masked_fill(~picked.ranks[:, None, None, :], 0)


def _masked_rows(weights: LoRAWeights, picked: _Picked) -> Tensor:
    """A `[T, R, C]` of each row, without what lies past its rank."""
    return weights.a[picked.slots, 0].float().masked_fill(~picked.ranks.unsqueeze(2), 0)


def _add(out: Tensor, delta: Tensor, picked: _Picked) -> Tensor:
    """Rows without an adapter keep their bits: adding 0.0 would turn -0.0 into 0.0."""
    total = (out.float() + delta * picked.scalings[:, None, None]).to(out.dtype)
    return out.copy_(torch.where(picked.live[:, None, None], total, out))


def _per_head(weights: LoRAWeights, heads: int, width: int) -> Tensor:
    """B as `[S, heads, width, R]`."""
    if weights.layout.num_slices != 1 or weights.layout.out_features != heads * width:
        raise TensorMismatchError(
            f"kv_b_proj has outputs {weights.layout.widths}: expected one slice of {heads} heads x {width}"
        )
    return weights.b.reshape(weights.num_slots, heads, width, weights.max_rank)


def _require(tensor: Tensor, shape: tuple[int, ...], name: str) -> None:
    if tuple(tensor.shape) != shape:
        raise TensorMismatchError(f"{name} is {tuple(tensor.shape)}, expected {shape}")
