"""LoRAEmbedding, plain and scaled."""

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from lora_core.errors import NoBatchPreparedError
from lora_core.layers.embedding import LoRAEmbedding
from tests.layers.helpers import expected_delta, make_gate, make_site, make_weights, prepare

V, N = 11, 6
FACTOR = 2.5

BASES = {
    "plain": (lambda: nn.Embedding(V, N), 1.0),
    "padding-index": (lambda: nn.Embedding(V, N, padding_idx=0), 1.0),
    "scaled": (lambda: Gemma3TextScaledWordEmbedding(V, N, 0, FACTOR), FACTOR),
}


@pytest.fixture(autouse=True)
def _inference():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def make_layer(base):
    layer = LoRAEmbedding(base, make_site("embedding", V, N), make_gate())
    layer.weights = make_weights(V, N, embedding=True)
    return layer


@pytest.mark.parametrize(("base", "factor"), BASES.values(), ids=BASES)
@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 2, 3)], ids=str)
def test_each_row_gets_its_own_adapter(base, factor, shape):
    layer = make_layer(base())
    ids = torch.randint(0, V, shape)
    lengths, slots = [2, 1, 3], [1, -1, 2]
    prepare(layer.gate, lengths, slots)
    out, base_out = layer(ids), layer.base_layer(ids)

    assert out.shape == base_out.shape
    assert torch.equal(out.view(-1, N)[2], base_out.view(-1, N)[2])
    expected = base_out.view(-1, N).double() + factor * expected_delta(
        ids.view(-1), layer.weights, lengths, slots
    )
    torch.testing.assert_close(out.view(-1, N).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("base", "factor"), BASES.values(), ids=BASES)
def test_whole_replacement_weight_is_scaled_as_the_module_does(base, factor):
    layer, ids = make_layer(base()), torch.randint(0, V, (4,))
    layer.weights.ranks.zero_()
    layer.weights.full[0] = torch.randn(V, N)
    prepare(layer.gate, [3, 1], [0, 1])
    out = layer(ids)
    torch.testing.assert_close(out[:3], layer.weights.full[0][ids[:3]] * factor)
    assert torch.equal(out[3:], layer.base_layer(ids)[3:])


@pytest.mark.parametrize(("base", "factor"), BASES.values(), ids=BASES)
def test_inactive_is_the_base(base, factor):
    layer, ids = make_layer(base()), torch.randint(0, V, (2, 3))
    assert torch.equal(layer(ids), layer.base_layer(ids))
    layer.gate.adapters_loaded = 1
    with pytest.raises(NoBatchPreparedError):
        layer(ids)
    assert layer(ids[:0]).shape == (0, 3, N)
