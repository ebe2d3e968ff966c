"""Site: what the adapter loader, the pool and the layers agree on about one wrapped module."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self

from lora_core.errors import TensorMismatchError
from lora_core.weights import SliceLayout

SiteKind = Literal["linear", "embedding", "lm_head", "experts"]


@dataclass(frozen=True)
class Shard:
    """The part of a site that one rank holds: adapters come whole, and are cut by it.

    A range may run past the end of what it cuts, or lie behind it: what is missing is padding, and
    zero. Ranks of adapters are never cut, so a small rank fits any number of processes.

    Attributes:
        inputs: of the K inputs, of an embedding of its vocabulary; None: all of them.
        outputs: per slice, of its width; None: all of them.
    """

    inputs: range | None = None
    outputs: tuple[range, ...] | None = None

    @classmethod
    def columns(
        cls, layout: SliceLayout, rank: int, size: int, copies: Sequence[int] | None = None
    ) -> Self:
        """Outputs, slice by slice: of q|k|v each rank has its part of q, of k and of v.

        Args:
            layout: of the whole site.
            rank: within the group of the layer.
            size: of that group.
            copies: per slice, how many neighbouring ranks hold the same part, such as the KV heads
                where there are fewer of them than ranks; None: 1.

        Raises:
            TensorMismatchError: a width that does not divide.
        """
        parts = []
        for width, copy in zip(layout.widths, copies or (1,) * layout.num_slices, strict=True):
            if copy < 1 or size % copy:
                raise TensorMismatchError(
                    f"Shard.columns: {copy} copies of a slice cannot be spread over {size} ranks"
                )
            parts.append(even_part(width, rank // copy, size // copy))
        return cls(outputs=tuple(parts))

    @classmethod
    def rows(cls, in_features: int, rank: int, size: int) -> Self:
        """Inputs; every rank then has a summand of each output.

        Raises:
            TensorMismatchError: inputs that do not divide.
        """
        return cls(inputs=even_part(in_features, rank, size))

    @property
    def is_first(self) -> bool:
        """Whether this rank contributes what must enter a sum over the ranks once."""
        return self.inputs is None or self.inputs.start == 0


def even_part(total: int, rank: int, size: int) -> range:
    """Part `rank` of `size` equal ones.

    Raises:
        TensorMismatchError: `total` does not divide.
    """
    if not 0 <= rank < size or total % size:
        raise TensorMismatchError(
            f"{total} features cannot be cut into {size} equal parts, of which part {rank} is wanted"
        )
    return range(rank * (total // size), (rank + 1) * (total // size))


def padded_part(total: int, rank: int, size: int, *, multiple: int = 1) -> range:
    """Part `rank` of `size` equal ones, after padding `total` to a multiple of `size * multiple`."""
    each = -(-total // (size * multiple)) * multiple
    return range(rank * each, (rank + 1) * each)


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
        shard: the part of it that this rank holds; None: all. The other fields are the whole site's.
    """

    name: str
    kind: SiteKind
    in_features: int
    layout: SliceLayout
    slice_names: tuple[str, ...]
    shard: Shard | None = None

    @cached_property
    def local(self) -> Site:
        """What of it is here: the site itself, or one of the shard's size."""
        shard = self.shard
        if shard is None:
            return self
        return dataclasses.replace(
            self,
            in_features=self.in_features if shard.inputs is None else len(shard.inputs),
            layout=self.layout
            if shard.outputs is None
            else SliceLayout(tuple(map(len, shard.outputs))),
            shard=None,
        )
