"""Models that transformers has cut over several processes (`tp_plan="auto"`), as `attach` finds them.

Their sharded weights are DTensors, and each sharded module's `forward` was replaced by one that ends in
the collective of its style. Wrapped, a module's own product is computed on the local part, and the
collective of its style follows the delta.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lora_core.layers.base import ForwardGate, LoRALayer
from lora_core.layers.parallel import (
    LoRAColumnParallelLinear,
    LoRAParallelLMHead,
    LoRARowParallelLinear,
    LoRAVocabParallelEmbedding,
)
from lora_core.sites import Shard, Site

_COLUMNS = {"colwise": False, "colwise_gather_output": True, "colwise_rep": True}
"""Styles cut by outputs: whether they put the outputs of all ranks side by side."""
_PACKED = "packed_colwise"
"""Cut by outputs, each of several slices for itself."""
_ROWS = {"rowwise": True, "rowwise_rep": True, "rowwise_split_input": False}
"""Styles cut by inputs: whether their input is cut already."""
_VOCABULARY = "embedding_rowwise"


def is_sharded(module: nn.Module) -> bool:
    """Whether this process holds only a part of some parameter of a module."""
    return any(
        isinstance(parameter, DTensor) and any(not p.is_replicate() for p in parameter.placements)
        for parameter in module.parameters(recurse=False)
    )


def tensor_parallel_group(model: nn.Module) -> dist.ProcessGroup | None:
    """The processes that share a model; None: it is whole."""
    for module in model.modules():
        if is_sharded(module):
            return _group(module)
    return None


def wrap_sharded(model: Any, site: Site, module: nn.Module, gate: ForwardGate) -> LoRALayer | None:
    """The layer of a sharded linear, embedding or head; None for styles that are not known here.

    Args:
        model: of transformers, whose plan says how its modules are cut.
        site: of the whole module.
        module: to wrap.
        gate: of the manager.
    """
    style = model.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", site.name))
    group = _group(module)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    make: Callable[..., LoRALayer]
    options: dict[str, Any] = {}
    if style == _VOCABULARY and site.kind == "embedding":
        shard, make = Shard(inputs=_chunk(site.in_features, rank, size)), LoRAVocabParallelEmbedding
    elif style in _ROWS and site.kind == "linear":
        shard, make = Shard(inputs=_chunk(site.in_features, rank, size)), LoRARowParallelLinear
        options["input_is_parallel"] = _ROWS[style]
    elif style in _COLUMNS and site.kind != "embedding" and site.layout.num_slices == 1:
        shard = Shard(outputs=(_chunk(site.layout.out_features, rank, size),))
        make = LoRAParallelLMHead if site.kind == "lm_head" else LoRAColumnParallelLinear
        options["gather_output"] = _COLUMNS[style]
    elif style == _PACKED and site.kind == "linear":
        shard, make = Shard.columns(site.layout, rank, size), LoRAColumnParallelLinear
    else:
        return None
    return make(module, dataclasses.replace(site, shard=shard), gate, group=group, **options)


def is_packed(model: Any, name: str) -> bool:
    """Whether a sharded module is cut slice by slice."""
    return bool(model.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)) == _PACKED)


def _group(module: nn.Module) -> dist.ProcessGroup:
    sharded = next(p for p in module.parameters(recurse=False) if isinstance(p, DTensor))
    mesh = sharded.device_mesh
    group: dist.ProcessGroup = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
    return group


def _chunk(total: int, rank: int, size: int) -> range:
    """Part `rank` as DTensor cuts: equal ones, the last smaller where `total` does not divide."""
    each = -(-total // size)
    return range(min(rank * each, total), min((rank + 1) * each, total))
