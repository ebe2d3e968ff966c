"""StagedBackend: the state of a batch as one buffer of words, filled on the host and sent in one copy."""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from lora_core.backend import InfoT, LoRABackend
from lora_core.batch import LoRABatch, RequestTable
from lora_core.capabilities import GraphKind
from lora_core.workspace import GraphRoom

_INDPTR, _SLOTS = ", indptr", ", slots"  # views of a buffer stand beside it


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
        self._neutralise(kind)

    def _request_tables(self, kind: GraphKind, requests: int) -> tuple[RequestTable, RequestTable]:
        """The request view of a graph buffer: exact for `requests`, and whole."""
        static = self.workspace.static
        whole = RequestTable(static[kind + _INDPTR], static[kind + _SLOTS])
        if requests == self.workspace.graph_room[kind].max_requests:
            return whole, whole
        return RequestTable(whole.seg_indptr[: requests + 1], whole.slots[:requests]), whole


def int32(values: Sequence[int]) -> NDArray[np.int32]:
    """`np.array(values, np.int32)` in less than half the time; read-only."""
    return np.frombuffer(struct.pack(f"{len(values)}i", *values), np.int32)
