"""The memory a backend owns besides `batch_info`, in its three per-instance homes.

A fourth home, pure caches keyed by shape, lives at module level and never in an instance. The
conformance suite poisons `scratch` between forwards and `static` after a reset, and wants `sync`
to be zero between ops.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class StagingEntry:
    """One pinned host buffer of int32 words, and the event of the copy that last read it."""

    def __init__(self, words: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.tensor = torch.empty(words, dtype=torch.int32, pin_memory=self._cuda)
        self.host = self.tensor.numpy()
        self._filled = self.tensor  # what was sent last: batches of one size share the view
        self._copied: torch.Event | None = None
        if self._cuda:  # torch.Event records in a seventh of the time that torch.cuda.Event takes
            self._copied = torch.Event(device)
            self._copied.record(
                torch.accelerator.current_stream(device)
            )  # this device's from now on

    @property
    def free(self) -> bool:
        """Whether the last copy out of this buffer has finished."""
        return self._copied is None or self._copied.query()

    def send(self, target: Tensor) -> None:
        """Copy the first `target.numel()` words to the device, without waiting for it."""
        words = target.numel()
        if self._filled.numel() != words:
            self._filled = self.tensor[:words]
        target.copy_(self._filled, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class StagingRing:
    """Pinned host buffers for metadata: each is used again only after its own copy has finished.

    Grows instead of waiting, so that preparing a batch never synchronises.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.entries: list[StagingEntry] = []

    def acquire(self, words: int) -> StagingEntry:
        """A buffer of at least `words` int32 words that no copy still reads.

        Fill `entry.host` (a numpy view), then call `entry.send(device_tensor)` once.
        """
        for index, entry in enumerate(self.entries):
            if entry.free and entry.host.size >= words:
                # oldest first: the one most likely to be free stays in front
                self.entries.append(self.entries.pop(index))
                return entry
        self.entries = [e for e in self.entries if not e.free or e.host.size >= words]
        entry = StagingEntry(max(1024, 1 << (words - 1).bit_length()), self.device)
        self.entries.append(entry)
        return entry


class GraphRoom(NamedTuple):
    """What `init_graph` allocated room for."""

    max_requests: int
    max_tokens: int


class Workspace:
    """The homes of a backend's memory.

    Attributes:
        graph_room: the sizes given to `init_graph`, per kind.
        scratch: buffers that say nothing about any batch; may be overwritten at any time between ops.
            Never replace one that a captured graph may still use: allocate it in `init_graph`.
        sync: counters and flags that kernels use to agree; all zero between ops.
        static: graph buffers at fixed addresses, filled by `prepare_batch(graph=...)`.
        staging: pinned host buffers on their way to the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.graph_room: dict[str, GraphRoom] = {}
        self.scratch: dict[str, Tensor] = {}
        self.sync: dict[str, Tensor] = {}
        self.static: dict[str, Tensor] = {}
        self.staging = StagingRing(device)
