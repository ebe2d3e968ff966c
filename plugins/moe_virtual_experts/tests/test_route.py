"""The sort: the same order as a stable sort by key, and tiles that cover it, at any size."""

from __future__ import annotations

import pytest
import torch

from lora_core import MoERouting
from lora_core_moe_virtual_experts.backend import VirtualExpertsBackend
from lora_core_moe_virtual_experts.kernels import route as route_module
from lora_core_moe_virtual_experts.kernels.route import (
    launch_route,
    launch_row_route,
    max_tiles,
)

pytestmark = pytest.mark.skipif(
    VirtualExpertsBackend.unavailable_reason() is not None,
    reason=str(VirtualExpertsBackend.unavailable_reason()),
)
DEVICE = VirtualExpertsBackend.default_device()


def make(tokens, slots, experts, top_k, seed=0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=g, dtype=torch.int32)
    rows = torch.randint(-1, slots + 1, (tokens,), generator=g, dtype=torch.int32)
    return MoERouting(
        topk_ids=ids.to(DEVICE),
        topk_weights=torch.ones(tokens, top_k, device=DEVICE),
        slots=rows.to(DEVICE),
        num_experts=experts,
        num_slots=slots,
    )


def keys_of(routing):
    slots, ids = routing.slots.cpu().unsqueeze(1), routing.topk_ids.cpu()
    live = (slots >= 0) & (slots < routing.num_slots) & (ids >= 0) & (ids < routing.num_experts)
    inert = routing.num_slots * routing.num_experts
    return torch.where(live, slots * routing.num_experts + ids, inert).flatten()


@pytest.mark.parametrize("chunked", [False, True], ids=["few", "many"])
@pytest.mark.parametrize(
    ("tokens", "slots", "experts", "top_k"),
    [
        (1, 1, 1, 1),
        (5, 3, 4, 2),
        (67, 2, 3, 4),
        (150, 8, 256, 2),
        (40, 32, 128, 8),
    ],
    ids=str,
)
def test_sorts_and_tiles(chunked, tokens, slots, experts, top_k, monkeypatch):
    if chunked:
        monkeypatch.setattr(route_module, "FEW_PAIRS", 0)
    monkeypatch.setattr(route_module, "_COMPACT_ABOVE", 60)
    routing = make(tokens, slots, experts, top_k)
    order, table = (tensor.cpu() for tensor in launch_route(routing, 16))
    keys = keys_of(routing)
    assert torch.equal(order.long(), torch.sort(keys, stable=True).indices)
    assert len(table) == max_tiles(tokens * top_k, slots * experts, 16)
    found = sorted((t for t in table.tolist() if t[2] > 0), key=lambda tile: tile[1])
    expected, first = [], 0
    for key, size in zip(*torch.unique(keys, return_counts=True), strict=True):
        expected += [
            [int(key), first + start, min(16, int(size) - start)]
            for start in range(0, int(size), 16)
        ]
        first += int(size)
    assert [tile[:3] for tile in found] == expected


@pytest.mark.parametrize("chunked", [False, True], ids=["few", "many"])
def test_the_bound_on_tiles_holds_for_the_worst_routing(chunked, monkeypatch):
    """Every pair a virtual expert of its own: no routing has more tiles."""
    if chunked:
        monkeypatch.setattr(route_module, "FEW_PAIRS", 0)
    routing = MoERouting(
        topk_ids=torch.arange(12, dtype=torch.int32, device=DEVICE).view(3, 4),
        topk_weights=torch.ones(3, 4, device=DEVICE),
        slots=torch.zeros(3, dtype=torch.int32, device=DEVICE),
        num_experts=12,
        num_slots=1,
    )
    _, table = launch_route(routing, 16)
    assert int((table[:, 2] == 1).sum()) == 12


@pytest.mark.parametrize("few", [0, 2048], ids=["many", "few"])
def test_rows_are_sorted_by_slot(few, monkeypatch):
    """Where experts share A; slots out of range come last."""
    monkeypatch.setattr(route_module, "FEW_PAIRS", few)
    slots = torch.tensor([2, 0, -1, 2, 1, 3, 2, 0, -5, 2], dtype=torch.int32, device=DEVICE)
    order, table = (tensor.cpu() for tensor in launch_row_route(slots, 3, 2))
    assert order.tolist() == [1, 7, 4, 0, 3, 6, 9, 2, 5, 8]
    real = sorted(tile[:3] for tile in table.tolist() if tile[2] > 0)
    assert real == [[0, 0, 2], [1, 2, 1], [2, 3, 2], [2, 5, 2], [3, 7, 2], [3, 9, 1]]


@pytest.mark.slow
def test_no_table_outgrows_shared_memory():
    """K33: 32 slots of 512 experts, more pairs than one launch compares."""
    routing = make(300, 32, 512, 8)
    order, _ = launch_route(routing, 16)
    assert torch.equal(order.cpu().long(), torch.sort(keys_of(routing), stable=True).indices)
