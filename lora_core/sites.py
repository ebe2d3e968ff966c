"""Site: what the adapter loader, the pool and the layers agree on about one wrapped module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lora_core.weights import SliceLayout

SiteKind = Literal["linear", "embedding", "lm_head", "experts"]


@dataclass(frozen=True)
class Site:
    """One module that adapters change.

    Attributes:
        name: dotted path in the model, such as "model.layers.0.self_attn.q_proj".
        kind: which op of the contract serves it.
        in_features: K, or V of an embedding.
        layout: widths of the packed projections.
        slice_names: dotted paths that adapters may use for each slice of a packed site, such as
            "model.layers.0.self_attn.q_proj" for the first slice of "...qkv_proj"; for a plain site
            just its own name. An adapter that names the packed site itself covers all slices.
    """

    name: str
    kind: SiteKind
    in_features: int
    layout: SliceLayout
    slice_names: tuple[str, ...]
