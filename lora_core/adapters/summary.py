"""What an adapter folder holds, without a model: for people who look before they load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lora_core.adapters.checkpoint import CONFIG_FILE, read_files
from lora_core.adapters.config import AdapterConfig
from lora_core.adapters.packing import ModuleTensors, group_by_module, refuse_unknown
from lora_core.errors import UnsupportedAdapterError

_EXTRAS = {
    "magnitude": "DoRA",
    "bias": "bias",
    "b_bias": "bias of B",
    "weight": "whole weight",
    "base_weight": "copy of the base weight",
    "alpha": "alpha of its own",
}


@dataclass(frozen=True)
class ModuleSummary:
    """One module of an adapter.

    Attributes:
        name: as the file has it, PEFT's prefix taken off.
        rank: of A and B, None without them.
        scaling: factor on the delta, None where it cannot be told.
        shape: (outputs, inputs) of the delta, None without one.
        extras: what it brings besides, in words.
    """

    name: str
    rank: int | None
    scaling: float | None
    shape: tuple[int, int] | None
    extras: tuple[str, ...]


@dataclass(frozen=True)
class AdapterSummary:
    """One adapter folder.

    Attributes:
        where: the folder.
        modules: by name.
        refused: why it would be refused whatever the model, one line each; empty: it would not be.
        notes: what the configuration names and the file does not have.
        nbytes: of all tensors.
    """

    where: str
    modules: tuple[ModuleSummary, ...]
    refused: tuple[str, ...]
    notes: tuple[str, ...]
    nbytes: int


def summarise(folder: str | Path, *, root: Path | None = None) -> AdapterSummary:
    """Read an adapter folder and say what is in it, refused features included.

    Raises:
        AdapterFormatError: missing, unreadable, corrupted or forbidden files.
    """
    text, tensors, where = read_files(Path(folder), root=root)
    refused, config = [], None
    try:
        config = AdapterConfig.parse(text, where=f"{where}/{CONFIG_FILE}")
    except UnsupportedAdapterError as error:
        refused.append(str(error))
    modules, unknown = group_by_module(tensors, where)
    try:
        refuse_unknown(unknown, len(tensors), where)
    except UnsupportedAdapterError as error:
        refused.append(str(error))
    return AdapterSummary(
        where=where,
        modules=tuple(_summary(name, parts, config) for name, parts in sorted(modules.items())),
        refused=tuple(refused),
        notes=tuple(
            config.idle_patterns(n for n, p in modules.items() if p.a is not None) if config else ()
        ),
        nbytes=sum(t.numel() * t.element_size() for t in tensors.values()),
    )


def _summary(name: str, parts: ModuleTensors, config: AdapterConfig | None) -> ModuleSummary:
    extras = tuple(text for part, text in _EXTRAS.items() if part in parts.keys)
    if parts.a is None or parts.b is None:
        return ModuleSummary(name, None, None, None, extras)
    rank = parts.a.shape[0]
    alpha = None
    if config is not None:
        alpha = float(parts.alpha) if parts.alpha is not None else config.alpha_of(name)
    return ModuleSummary(
        name=name,
        rank=rank,
        scaling=None if config is None or alpha is None else config.scaling(rank=rank, alpha=alpha),
        shape=(parts.b.shape[0], parts.a.shape[-1]),
        extras=extras,
    )
