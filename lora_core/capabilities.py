"""What a backend can do, as data. Imports no torch, so that tools can read it cheaply."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Mode = Literal["decode", "prefill", "verify"]
"""decode: one token per request; prefill: any number; verify: several, of a draft."""

GraphKind = Literal["decode", "prefill", "verify"]
"""The graphs a backend can serve, named after the batches that they replay."""

DTypeName = Literal["float32", "float16", "bfloat16"]


class Op(StrEnum):
    """The operations of the contract that a backend may claim."""

    LINEAR = "linear"
    """shrink, expand and linear; claimed by every backend."""
    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    DORA = "dora"
    """`LoRAWeights.output_scale` in `linear`."""
    BIAS = "bias"
    """`LoRAWeights.bias`: a bias of the adapter's own."""
    FULL_WEIGHT = "full_weight"
    """`LoRAWeights.full`: whole replacement weights from `modules_to_save`."""
    SCALES = "scales"
    """`LoRABatch.scales`: a factor per request."""


class Capabilities(BaseModel):
    """The claims of one backend: each is tested over its range, and what is missing must refuse.

    A misspelt field is an error, not a silent default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ops: frozenset[Op] = frozenset({Op.LINEAR})
    dtypes: frozenset[DTypeName]
    device_types: frozenset[str] = Field(description="torch device types, such as 'cuda'")
    modes: frozenset[Mode] = frozenset({"decode", "prefill", "verify"})
    graphs: frozenset[GraphKind] = frozenset()
    max_rank: int | None = Field(default=None, ge=1, description="None: no limit")
    max_slices: int | None = Field(default=None, ge=1, description="None: no limit")
    deterministic: bool = Field(default=True, description="two equal runs give equal bits")
    batch_invariant: bool = Field(
        default=False,
        description="shrink, and expand into a given out, give equal bits for a request whatever "
        "batch it is part of",
    )
    owns_base: bool = Field(
        default=False,
        description="linear computes the base product itself: NO_LORA rows equal its own result "
        "without adapters bit for bit, and the base module's within rounding",
    )

    def supports(self, op: Op) -> bool:
        """Whether `op` is claimed."""
        return op in self.ops
