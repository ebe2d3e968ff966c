"""The plan of a product: which tiles of rows are one request's own, and what lies between them.

A tile of `PLAN_ROWS` rows that one request fills gets that request's adapter inside the product. The
other rows of a request, at most one run at its beginning and one at its end, are its seams. Both
depend on the lengths alone: what adapters other requests have moves no row from one to the other.

Everything is int32 words of one device buffer:

    tiles  [ceil(T / PLAN_ROWS), 2]   slot (-1: none, or several), bits of the scale
    seams  [n, 4]                     slot (-1: dead), first row, end, bits of the scale
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lora_core.batch import NO_LORA
from lora_core.staged import ONE
from lora_core.workspace import GraphRoom, StagingRing
from lora_core_triton.fused_tables import PLAN_ROWS


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a batch's tiles and seams lie on the device."""

    tiles: Tensor  # int32 [tiles, 2]
    seams: Tensor  # int32 [seams, 4]


def plan_words(tokens: int, requests: int) -> int:
    """Words for any batch of so many rows and requests."""
    return _seams_at(tokens) + 8 * requests


def view(buffer: Tensor, tokens: int, seams: int) -> Plan:
    """The parts of a buffer for `tokens` rows."""
    tiles, at = -(-tokens // PLAN_ROWS), _seams_at(tokens)
    return Plan(buffer[: 2 * tiles].view(tiles, 2), buffer[at : at + 4 * seams].view(seams, 4))


def make(
    lengths: NDArray[np.int32], slots: NDArray[np.int32], scales: NDArray[np.int32] | None
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Tiles [n, 2] and seams [m, 4] of a batch.

    Args:
        lengths: rows of each request.
        slots: of each request.
        scales: bits of each request's scale, or None for 1.
    """
    end = lengths.cumsum(dtype=np.int32)
    begin = end - lengths
    tiles = np.full((-(-int(lengths.sum()) // PLAN_ROWS), 2), NO_LORA, np.int32)
    live = (slots >= 0) & (lengths > 0)
    begin, end, slots = begin[live], end[live], slots[live]
    bits = np.full(len(slots), ONE, np.int32) if scales is None else scales[live]
    first, last = -(-begin // PLAN_ROWS), end // PLAN_ROWS  # tiles of its own: first .. last - 1
    own = np.maximum(last - first, 0)
    at = (first - (own.cumsum() - own)).repeat(own) + np.arange(int(own.sum()))
    tiles[at, 0], tiles[at, 1] = slots.repeat(own), bits.repeat(own)
    head_end = np.minimum(first * PLAN_ROWS, end)
    tail_begin = np.maximum(last * PLAN_ROWS, head_end)
    seams = np.concatenate(
        [
            np.stack([slots, begin, head_end, bits], 1)[head_end > begin],
            np.stack([slots, tail_begin, end, bits], 1)[end > tail_begin],
        ]
    )
    return tiles, seams.astype(np.int32, copy=False)


def send(
    staging: StagingRing,
    tiles: NDArray[np.int32],
    seams: NDArray[np.int32],
    *,
    device: torch.device,
    static: Tensor | None,
    room: GraphRoom | None,
) -> Plan:
    """Put tiles and seams on the device.

    Args:
        staging: pinned host memory.
        tiles: of the batch.
        seams: of the batch.
        device: where to.
        static: the buffer of a graph kind, or None for new memory.
        room: what that buffer is for.
    """
    tokens = len(tiles) * PLAN_ROWS if room is None else room.max_tokens
    most = len(seams) if room is None else 2 * room.max_requests
    at = _seams_at(tokens)
    words = at + 4 * most
    buffer = torch.empty(words, dtype=torch.int32, device=device) if static is None else static
    entry = staging.acquire(words)
    entry.host[:words] = NO_LORA
    entry.host[: tiles.size] = tiles.reshape(-1)
    entry.host[at : at + seams.size] = seams.reshape(-1)
    entry.send(buffer)
    return view(buffer, tokens, most)


def _seams_at(tokens: int) -> int:
    return (2 * -(-tokens // PLAN_ROWS) + 15) // 16 * 16
