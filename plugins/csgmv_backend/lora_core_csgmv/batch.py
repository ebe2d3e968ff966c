"""CsgmvBatchInfo: the prepared batch of this backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lora_core.staged import StagedBatchInfo
from lora_core_csgmv.segments import SegmentRoom


class Segments(NamedTuple):
    """The rows one op covers, of the whole batch or of one lm_head pass, as segments.

    Attributes:
        num_rows: rows that belong to requests, those of the base model included.
        length: segments, on the host.
        covered: rows with an adapter, on the host; the length of the permutation.
        block: int32, on the device: `lora_core_csgmv.segments` describes it.
        room: the extent of `block`.
        bound: no batch that may ever lie in `block` has more segments; the extent of launches.
        fixed: whether `block` is static memory of a graph, so that launches may not follow `length`.
    """

    num_rows: int
    length: int
    covered: int
    block: Tensor
    room: SegmentRoom
    bound: int
    fixed: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class CsgmvBatchInfo(StagedBatchInfo):
    """The request view of the contract, and beside it the segments of this backend.

    Attributes:
        segments: of the whole batch.
        passes: of each lm_head pass.
        highest_slot: of the batch, -1 when no request has an adapter.
    """

    segments: Segments
    passes: tuple[Segments, ...]
    highest_slot: int

    @property
    def seg_indptr(self) -> Tensor:
        """int32 `[segments + 1]`: where each segment begins in `permutation`, and the end."""
        return self.segments.block[4 : 5 + self.segments.length]

    @property
    def seg_slots(self) -> Tensor:
        """int32 `[segments]`: the adapter of each segment, never `NO_LORA`."""
        at = self.segments.room.slots_at
        return self.segments.block[at : at + self.segments.length]

    @property
    def permutation(self) -> Tensor:
        """int32: rows with an adapter, ordered by adapter, in request order within one."""
        at = self.segments.room.permutation_at
        return self.segments.block[at : at + self.segments.covered]
