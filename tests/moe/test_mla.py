"""MLA: adapters on kv_b_proj in the absorbed form equal the expanded form."""

from __future__ import annotations

import math

import pytest
import torch

from lora_core import LoRABatch, LoRAWeights, SliceLayout, load_backend
from lora_core.errors import TensorMismatchError
from lora_core.layers.mla import correct_absorbed_query, correct_absorbed_value
from lora_core.testing.capture import Captured

HEADS, KEY, VALUE, LATENT, RANK = 3, 6, 5, 16, 4
SLOTS = [0, -1, 1, 2, 0]


def make(seed=0):
    g = torch.Generator().manual_seed(seed)
    base = torch.randn(HEADS * (KEY + VALUE), LATENT, generator=g)
    a, b = (
        torch.randn(3, 1, RANK, LATENT, generator=g),
        torch.randn(3, len(base), RANK, generator=g),
    )
    ranks = torch.tensor([[4], [2], [0]], dtype=torch.int32)
    for slot, rank in enumerate(ranks.flatten().tolist()):
        a[slot, :, rank:], b[slot, :, rank:] = math.nan, math.nan
    scalings = torch.tensor([[0.5], [2.0], [1.0]])
    weights = LoRAWeights(a, b, ranks, scalings, SliceLayout((len(base),)))
    query = torch.randn(len(SLOTS), HEADS, KEY, generator=g)
    latent = torch.randn(len(SLOTS), HEADS, LATENT, generator=g)
    return base, weights, query, latent


def merged(base, weights, slot):
    """The whole weight of one slot, float64 `[heads, key + value, C]`."""
    whole = base.double()
    if slot >= 0:
        rank = int(weights.ranks[slot])
        delta = weights.b[slot, :, :rank].double() @ weights.a[slot, 0, :rank].double()
        whole = whole + float(weights.scalings[slot]) * delta
    return whole.view(HEADS, KEY + VALUE, LATENT)


def absorbed(base, query, latent):
    """Both products of the base weight: what attention has before the corrections."""
    per_head = base.view(HEADS, KEY + VALUE, LATENT)
    return (
        torch.einsum("thk,hkc->thc", query, per_head[:, :KEY]),
        torch.einsum("thc,hvc->thv", latent, per_head[:, KEY:]),
    )


@pytest.fixture
def backend():
    return load_backend("torch", device="cpu")


def test_scores_and_outputs_equal_the_expanded_form(backend):
    """q . (W_k c) as expanded keys have it, and W_v o as expanded values have it."""
    base, weights, query, latent = make()
    info = backend.prepare_batch(LoRABatch([1] * 5, SLOTS, mode="decode"))
    by_key, by_value = absorbed(base, query, latent)
    by_key = correct_absorbed_query(query, weights, info, by_key, value_dim=VALUE)
    by_value = correct_absorbed_value(latent, weights, info, by_value)
    keys = torch.randn(7, LATENT)  # latents of seven earlier tokens
    for row, slot in enumerate(SLOTS):
        weight = merged(base, weights, slot)
        expanded = torch.einsum("hkc,nc->nhk", weight[:, :KEY], keys.double())
        scores = torch.einsum("hk,nhk->nh", query[row].double(), expanded)
        found = torch.einsum("hc,nc->nh", by_key[row].double(), keys.double())
        torch.testing.assert_close(found, scores, rtol=1e-5, atol=1e-4)
        out = torch.einsum("hvc,hc->hv", weight[:, KEY:], latent[row].double())
        torch.testing.assert_close(by_value[row].double(), out, rtol=1e-5, atol=1e-4)


def test_rows_without_an_adapter_and_idle_forwards_keep_their_bits(backend):
    base, weights, query, latent = make()
    by_key, by_value = absorbed(base, query, latent)
    by_key.fill_(-0.0)
    kept = by_key.clone(), by_value.clone()
    for info in (None, backend.prepare_batch(LoRABatch([1] * 5, [-1] * 5, mode="decode"))):
        correct_absorbed_query(query, weights, info, by_key, value_dim=VALUE)
        correct_absorbed_value(latent, weights, info, by_value)
        assert torch.equal(by_key.view(torch.int32), kept[0].view(torch.int32))
        assert torch.equal(by_value, kept[1])
    info = backend.prepare_batch(LoRABatch([1] * 5, SLOTS, mode="decode"))
    correct_absorbed_query(query, weights, info, by_key, value_dim=VALUE)
    changed = (by_key.view(torch.int32) != kept[0].view(torch.int32)).flatten(1).any(1)
    assert changed.tolist() == [True, False, True, False, True]  # slot 2 has rank 0


def test_a_graph_follows_later_batches(backend):
    base, weights, query, latent = make()
    backend.init_graph("decode", max_requests=8, max_tokens=5)
    info = backend.prepare_batch(LoRABatch([1], [-1], mode="decode"), graph="decode")
    start = absorbed(base, query, latent)[1]
    out = start.clone()

    def forward():
        out.copy_(start)
        return correct_absorbed_value(latent, weights, info, out)

    captured = Captured(torch.device("cpu"), forward)
    assert torch.equal(out, start)
    backend.prepare_batch(LoRABatch([1] * 5, SLOTS, mode="decode"), graph="decode")
    captured.replay()
    eager = load_backend("torch", device="cpu")
    info = eager.prepare_batch(LoRABatch([1] * 5, SLOTS, mode="decode"))
    assert torch.equal(out, correct_absorbed_value(latent, weights, info, start.clone()))


def test_shapes_that_do_not_fit():
    _, weights, query, latent = make()
    with pytest.raises(TensorMismatchError, match="3 heads x 12"):
        correct_absorbed_query(query, weights, None, latent.clone(), value_dim=VALUE + 1)
    with pytest.raises(TensorMismatchError, match=r"out is \(5, 3, 15\), expected \(5, 3, 16\)"):
        correct_absorbed_query(query, weights, None, latent[..., 1:], value_dim=VALUE)
    with pytest.raises(TensorMismatchError, match="no 3 heads with keys"):
        correct_absorbed_value(latent, weights, None, torch.zeros(5, 3, 11))
