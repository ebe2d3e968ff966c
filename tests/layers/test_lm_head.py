"""LoRALMHead: rows pruned by logits passes, tied weights."""

import pytest
import torch
from torch import nn

from lora_core.errors import BatchMismatchError
from lora_core.layers.lm_head import LoRALMHead
from tests.layers.helpers import expected_delta, make_gate, make_site, make_weights, prepare

K, V = 8, 13
SLOTS = [1, -1, 2]


@pytest.fixture(autouse=True)
def _inference():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def make_head(base=None):
    layer = LoRALMHead(base or nn.Linear(K, V, bias=False), make_site("lm_head", K, V), make_gate())
    layer.weights = make_weights(K, V)
    return layer


def check(head, x, lengths, **pass_argument):
    rows = x.reshape(-1, K)
    expected = head.base_layer(rows).double() + expected_delta(rows, head.weights, lengths, SLOTS)
    out = head(x, **pass_argument).reshape(-1, V)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_every_row_when_no_pass_is_named():
    head = make_head()
    prepare(head.gate, [4, 1, 2], SLOTS)
    check(head, torch.randn(7, K), [4, 1, 2])


def test_last_token_of_each_request():
    head = make_head()
    prepare(head.gate, [4, 4, 4], SLOTS, logits=[[1, 1, 1]])
    hidden = torch.randn(3, 4, K)
    check(head, hidden[:, -1:], [1, 1, 1])


def test_several_passes_each_by_its_index():
    head = make_head()
    passes = [[2, 0, 1], [0, 1, 1], [1, 0, 0]]
    prepare(head.gate, [4, 1, 2], SLOTS, logits=passes)
    for index in (1, 0, 2, 1):  # in any order, repeated: nothing is consumed
        check(head, torch.randn(sum(passes[index]), K), passes[index], logits_pass=index)


def test_a_pass_that_fails_leaves_the_others_right():
    head = make_head()
    passes = [[2, 0, 1], [0, 1, 1]]
    prepare(head.gate, [4, 1, 2], SLOTS, logits=passes)
    with pytest.raises(BatchMismatchError):
        head(torch.randn(1, K), logits_pass=0)
    with pytest.raises(BatchMismatchError, match="pass 2"):
        head(torch.randn(3, K), logits_pass=2)
    check(head, torch.randn(2, K), passes[1], logits_pass=1)


def test_tied_head_leaves_the_embedding_alone():
    embedding = nn.Embedding(V, K)
    base = nn.Linear(K, V, bias=False)
    base.weight = embedding.weight
    before = embedding.weight.clone()
    head = make_head(base)
    assert head.base.weight is embedding.weight
    prepare(head.gate, [1, 1, 1], SLOTS)
    check(head, torch.randn(3, K), [1, 1, 1])
    assert torch.equal(embedding.weight, before)
