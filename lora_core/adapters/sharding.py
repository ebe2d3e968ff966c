"""From a whole adapter to what one rank of several holds of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_core.sites import Shard, Site

if TYPE_CHECKING:
    from lora_core.adapters.packing import PackedAdapter, SiteUpdate


def shard_adapter(packed: PackedAdapter, sites: Mapping[str, Site]) -> PackedAdapter:
    """The part of an adapter that this rank needs; sites without a shard stay as they are.

    Args:
        packed: the whole adapter.
        sites: by name, all that it changes.
    """
    return dataclasses.replace(
        packed,
        sites={name: cut_update(update, sites[name]) for name, update in packed.sites.items()},
    )


def cut_update(update: SiteUpdate, site: Site) -> SiteUpdate:
    """What the shard of a site takes of A, B and all else.

    A bias enters the sum over the ranks of a row-parallel site once, so only the first keeps it; an
    output scale multiplies every summand.
    """
    shard = site.shard
    if shard is None:
        return update
    outputs = shard.outputs or (None,) * site.layout.num_slices
    inputs_dim = 0 if site.kind == "embedding" else 1
    return dataclasses.replace(
        update,
        a=tuple(None if a is None else _cut(a, inputs_dim, shard.inputs) for a in update.a),
        b=tuple(
            None if b is None else _cut(b, 0, part)
            for b, part in zip(update.b, outputs, strict=True)
        ),
        output_scale=None
        if update.output_scale is None
        else _cut_outputs(update.output_scale, site),
        bias=None if update.bias is None or not shard.is_first else _cut_outputs(update.bias, site),
        full=None if update.full is None else cut_weight(update.full, site),
    )


def cut_weight(weight: Tensor, site: Site) -> Tensor:
    """A rank's part of a whole weight, `[N, K]` (embedding: `[V, N]`)."""
    shard = site.shard or Shard()
    if site.kind == "embedding":
        return _cut_outputs(_cut(weight, 0, shard.inputs).T, site).T.contiguous()
    return _cut_outputs(_cut(weight, 1, shard.inputs), site)


def _cut_outputs(tensor: Tensor, site: Site) -> Tensor:
    """Rows of `[N, ...]`, slice by slice."""
    shard = site.shard
    if shard is None or shard.outputs is None:
        return tensor
    slices = torch.split(tensor, list(site.layout.widths))
    return torch.cat(
        [_cut(rows, 0, part) for rows, part in zip(slices, shard.outputs, strict=True)]
    )


def _cut(tensor: Tensor, dim: int, part: range | None) -> Tensor:
    """A copy of `part` along `dim`, of its own memory; zeros past the end."""
    if part is None:
        return tensor
    start, stop = (min(end, tensor.shape[dim]) for end in (part.start, part.stop))
    shape = list(tensor.shape)
    shape[dim] = len(part)
    out = tensor.new_zeros(shape)
    out.narrow(dim, 0, stop - start).copy_(tensor.narrow(dim, start, stop - start))
    return out
