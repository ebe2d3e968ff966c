"""LoRABatch: what an engine hands in. BatchInfo: what a backend keeps of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, get_args

from lora_core.capabilities import GraphKind, Mode
from lora_core.errors import InvalidBatchError

if TYPE_CHECKING:
    from torch import Tensor

NO_LORA = -1
"""The slot of a request that runs on the base model alone."""

_MODES = get_args(Mode)


@dataclass(frozen=True, slots=True)
class LoRABatch:
    """One forward, described by host integers: one entry per request, in row order.

    Args:
        lengths: tokens of each request in this forward, >= 0.
        slots: slot of each request's adapter, `NO_LORA` for the base model.
        mode: what kind of forward this is.
        logits: per lm_head pass, how many rows of each request that pass gets; rows stay in request
            order. Empty means one pass over every row.
        scales: a factor on the delta of each request, or None for 1.

    Raises:
        InvalidBatchError: parts of different length, negative counts, an unknown mode.
    """

    lengths: Sequence[int]
    slots: Sequence[int]
    mode: Mode = "prefill"
    logits: Sequence[Sequence[int]] = ()
    scales: Sequence[float] | None = None

    def __post_init__(self) -> None:
        lengths = self.lengths
        requests = len(lengths)
        if len(self.slots) != requests:
            raise InvalidBatchError(
                f"LoRABatch has {requests} lengths but {len(self.slots)} slots: give one of each per request"
            )
        if self.mode not in _MODES:
            raise InvalidBatchError(f"LoRABatch mode {self.mode!r} is none of {', '.join(_MODES)}")
        if requests:
            # counting costs a tenth of looking for the least: the usual decode has one row each
            one_each = isinstance(lengths, list | tuple) and lengths.count(1) == requests
            if not one_each and min(lengths) < 0:
                raise InvalidBatchError(f"LoRABatch has a negative length: {min(lengths)}")
            if min(self.slots) < NO_LORA:
                raise InvalidBatchError(
                    f"LoRABatch has slot {min(self.slots)}: slots are >= 0, or {NO_LORA} for the base model"
                )
            if not one_each and self.mode == "decode" and max(lengths) > 1:
                raise InvalidBatchError(
                    f"LoRABatch of mode 'decode' has a request of {max(lengths)} tokens: "
                    "decode has one per request, use 'verify' or 'prefill'"
                )
        for index, counts in enumerate(self.logits):
            if len(counts) != requests:
                raise InvalidBatchError(
                    f"LoRABatch logits pass {index} has {len(counts)} counts for {requests} requests"
                )
            if any(
                not 0 <= kept <= length for kept, length in zip(counts, self.lengths, strict=True)
            ):
                raise InvalidBatchError(
                    f"LoRABatch logits pass {index} keeps {list(counts)} rows of requests of "
                    f"{list(self.lengths)} tokens"
                )
        if self.scales is not None and len(self.scales) != requests:
            raise InvalidBatchError(
                f"LoRABatch has {len(self.scales)} scales for {requests} requests: give one each, or None"
            )

    @property
    def num_tokens(self) -> int:
        """T, the rows of x that belong to requests."""
        return sum(self.lengths)

    def pass_lengths(self, logits_pass: int) -> Sequence[int]:
        """Rows of each request in one lm_head pass."""
        return self.logits[logits_pass] if self.logits else self.lengths

    @property
    def num_passes(self) -> int:
        """lm_head passes of this forward, at least one."""
        return max(1, len(self.logits))


class RequestTable(NamedTuple):
    """Which rows belong to which request, and each request's slot."""

    seg_indptr: Tensor  # [n + 1] int32 - rows of request i are seg_indptr[i] .. seg_indptr[i + 1]
    slots: Tensor  # [n] int32 - NO_LORA for the base model


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchInfo:
    """The state of one prepared batch; backends extend it with what their kernels need.

    This view, one entry per request, is the only one that other code may read to map tokens to
    requests, whatever segments a backend cuts for itself.

    Attributes:
        num_tokens: T, rows that belong to requests; further rows of x are padding.
        mode: of the batch.
        graph: the graph kind this was prepared for, None in eager mode.
        has_active_lora: whether any request of at least one token names an adapter.
        req_seg_indptr: int32 `[bs + 1]`, on the backend's device.
        req_slots: int32 `[bs]`, on the backend's device.
        static_requests: in graph mode the whole static buffers behind the two views above, of
            `max_requests` entries: entries past the batch are empty (`seg_indptr` = T, slot
            `NO_LORA`). None in eager mode.
    """

    num_tokens: int
    mode: Mode
    graph: GraphKind | None
    has_active_lora: bool
    req_seg_indptr: Tensor
    req_slots: Tensor
    static_requests: RequestTable | None = None

    @property
    def num_requests(self) -> int:
        """bs, requests of the batch, empty ones included."""
        return int(self.req_slots.shape[0])

    def request_table(self) -> RequestTable:
        """The request view with the extent that a captured kernel needs.

        In graph mode the static buffers, so that a graph captured with one request replays with
        many; else exactly the batch.
        """
        return self.static_requests or RequestTable(self.req_seg_indptr, self.req_slots)


def token_slots(info: BatchInfo, num_rows: int) -> Tensor:
    """The slot of every row, from the request view, without synchronisation and safe to capture.

    Args:
        info: a prepared batch.
        num_rows: rows to cover; those past the batch are padding and get `NO_LORA`.

    Returns:
        int32 `[num_rows]` on the batch's device.
    """
    import torch  # here, so that the types above stay importable without torch

    seg_indptr, slots = info.request_table()
    rows = torch.arange(num_rows, dtype=torch.int32, device=slots.device)
    request = torch.searchsorted(seg_indptr[1:], rows, right=True)
    padded = torch.nn.functional.pad(slots, (0, 1), value=NO_LORA)
    return padded[request]
