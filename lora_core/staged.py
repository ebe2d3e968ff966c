"""StagedBackend: the state of a batch as one buffer of words, filled on the host and sent in one copy.

Beside it, what fills such a buffer in few calls of numpy: `int32`, `rows_of`, `counting`.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lora_core.backend import InfoT, LoRABackend
from lora_core.batch import BatchInfo, LoRABatch, RequestTable
from lora_core.capabilities import GraphKind
from lora_core.workspace import GraphRoom

_INDPTR, _SLOTS = ", indptr", ", slots"  # views of a buffer stand beside it

ONE = int(np.float32(1.0).view(np.int32))
"""The bits of the scale 1.0."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedBatchInfo(BatchInfo):
    """A batch in one buffer of words; its request view is made when it is first asked for.

    Attributes:
        words: int32, the buffer; it begins with `requests + 1` row pointers.
        requests: bs.
        slots_at: the word at which the `requests` slots begin.
    """

    req_seg_indptr: Tensor = field(init=False, repr=False)
    req_slots: Tensor = field(init=False, repr=False)
    words: Tensor
    requests: int
    slots_at: int

    def __getattr__(self, name: str) -> Tensor:
        if name == "req_seg_indptr":
            view = self.words[: self.requests + 1]
        elif name == "req_slots":
            view = self.words[self.slots_at : self.slots_at + self.requests]
        else:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        object.__setattr__(self, name, view)
        return view


class StagedBackend(LoRABackend[InfoT]):
    """What backends share whose graph kinds have one static buffer of int32 words each.

    It owns the order of things: the old batch is cleared first, a graph kind that is left or whose
    prepare fails is neutralised. A subclass says how many words a graph kind takes, what a dead
    buffer holds, and makes the state of a batch.
    """

    @abstractmethod
    def _prepare(self, batch: LoRABatch, graph: GraphKind | None) -> InfoT:
        """The state of `batch`: in new memory, or in `workspace.static[graph]`.

        Its copy to the device comes last, so that a failure before it leaves static memory as it was.
        """

    @abstractmethod
    def _graph_words(self, kind: GraphKind, room: GraphRoom) -> int:
        """Words that any batch of up to `room` takes in a graph of this kind."""

    @abstractmethod
    def _slots_at(self, max_requests: int) -> int:
        """The word at which the slots begin in a buffer; the row pointers begin at the first."""

    @abstractmethod
    def _neutralise(self, kind: GraphKind) -> None:
        """Fill `workspace.static[kind]` so that captured kernels find no request and nothing to do."""

    def _add_static(self, kind: GraphKind, room: GraphRoom) -> None:
        """Add to `workspace.static` what else a graph kind needs, or views of its buffer that stay."""

    @override
    def prepare_batch(self, batch: LoRABatch, *, graph: GraphKind | None = None) -> InfoT:
        previous = self.batch_info
        self.batch_info = None
        left = None if previous is None else previous.graph
        if left is not None and left != graph:
            self._neutralise(left)
        try:
            info = self._prepare(batch, graph)
        except BaseException:
            if left is not None and left == graph:  # else it is dead, or was before
                self._neutralise(left)
            raise
        self.batch_info = info
        return info

    @override
    def reset_batch_state(self) -> None:
        info = self.batch_info
        self.batch_info = None
        if info is not None and info.graph is not None:
            self._neutralise(info.graph)

    @override
    def init_graph(self, kind: GraphKind, *, max_requests: int, max_tokens: int) -> None:
        if kind not in self.capabilities.graphs:
            raise self._unclaimed_graph(kind)
        room = GraphRoom(max_requests, max_tokens)
        words, at = self._graph_words(kind, room), self._slots_at(max_requests)
        buffer = torch.empty(words, dtype=torch.int32, device=self.device)
        self.workspace.graph_room[kind] = room
        self.workspace.static[kind] = buffer
        self.workspace.static[kind + _INDPTR] = buffer[: max_requests + 1]
        self.workspace.static[kind + _SLOTS] = buffer[at : at + max_requests]
        self._add_static(kind, room)
        self._neutralise(kind)

    def _static_requests(self, kind: GraphKind) -> RequestTable:
        """The request view of a whole graph buffer."""
        static = self.workspace.static
        return RequestTable(static[kind + _INDPTR], static[kind + _SLOTS])


def int32(values: Sequence[int]) -> NDArray[np.int32]:
    """`np.array(values, np.int32)` in less than half the time; read-only."""
    return np.frombuffer(struct.pack(f"{len(values)}i", *values), np.int32)


class Rows(NamedTuple):
    """The rows of each request in one list.

    Attributes:
        lengths: int32 `[bs]`, or None when every request has exactly one row: the usual decode.
        indptr: int32 `[bs + 1]`, where each begins, and the end.
        num_rows: of all requests.
    """

    lengths: NDArray[np.int32] | None
    indptr: NDArray[np.int32]
    num_rows: int


def rows_of(lengths: Sequence[int]) -> Rows:
    """Host integers as arrays."""
    requests = len(lengths)
    if isinstance(lengths, list | tuple) and lengths.count(1) == requests:
        return Rows(None, counting(requests + 1), requests)
    found = np.fromiter(lengths, np.int32, requests)
    indptr = np.zeros(requests + 1, np.int32)
    found.cumsum(out=indptr[1:])
    return Rows(found, indptr, int(indptr[-1]))


_SignedT = TypeVar("_SignedT", bound=np.signedinteger)
_counted: dict[type[np.signedinteger], NDArray[np.signedinteger]] = {}


@overload
def counting(count: int) -> NDArray[np.int32]: ...
@overload
def counting(count: int, dtype: type[_SignedT]) -> NDArray[_SignedT]: ...
def counting(count: int, dtype: type[np.signedinteger] = np.int32) -> NDArray[np.signedinteger]:
    """0, 1, ..., count - 1, out of a pure cache; to be read, never written."""
    found = _counted.get(dtype)
    if found is None or count > len(found):
        found = _counted[dtype] = np.arange(max(4096, 2 * count), dtype=dtype)
    return found[:count]
