"""Layers under torch.compile(fullgraph=True): one graph, batches read when it runs."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from lora_core.errors import NoBatchPreparedError
from lora_core.layers.embedding import LoRAEmbedding
from lora_core.layers.linear import LoRALinear
from lora_core.layers.lm_head import LoRALMHead
from tests.layers.helpers import QuantisedLinear, make_gate, make_site, make_weights, prepare

V, K, N = 17, 12, 10


class Model(nn.Module):
    """Embedding, packed linear, quantised linear, head: one of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, K)
        self.packed = nn.Linear(K, N)
        self.quantised = QuantisedLinear(N, K)
        self.head = nn.Linear(K, V, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(torch.relu(self.quantised(torch.relu(self.packed(x)))) + x)


def wrapped_model(gate):
    model = Model().eval()
    model.embed = LoRAEmbedding(model.embed, make_site("embedding", V, K), gate)
    model.packed = LoRALinear(model.packed, make_site("linear", K, 6, 4), gate)
    model.quantised = LoRALinear(model.quantised, make_site("linear", N, K), gate)
    model.head = LoRALMHead(model.head, make_site("lm_head", K, V), gate)
    model.embed.weights = make_weights(V, K, embedding=True)
    model.packed.weights = make_weights(K, 6, 4)
    model.quantised.weights = make_weights(N, K)
    model.head.weights = make_weights(K, V)
    return model


BATCHES = [  # 20 of them: changing tokens, lengths, slots, nothing prepared in between
    ([5, 3], [0, 1]), ([5, 3], [1, 0]), ([1] * 4, [2, -1, 0, 1]), None, ([7], [-1]), ([9, 2, 6], [0, 0, 2]),
    ([1] * 3, [1, 1, 1]), ([16], [2]), None, None, ([2, 0, 3], [0, 1, 2]), ([3, 3], [-1, -1]), ([12], [0]),
    ([1] * 7, [0, 1, 2, 0, 1, 2, -1]), ([4, 4, 4], [2, 2, 1]), None, ([6], [1]), ([2] * 5, [0, -1, 0, -1, 0]),
    ([31], [1]), ([5, 3], [0, 1]),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_twenty_batches_compile_at_most_twice_and_equal_eager(backend):
    gate = make_gate()
    model = wrapped_model(gate)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for batch in BATCHES:
        gate.backend.reset_batch_state()
        tokens = 8 if batch is None else sum(batch[0])
        ids = torch.randint(0, V, (tokens,))
        if batch is not None:
            prepare(gate, *batch)
        torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-5, atol=1e-5)
    assert counter.frame_count <= 2


def test_adapters_that_arrive_after_compiling_are_seen():
    gate = make_gate()
    model = wrapped_model(gate)
    layers = [model.embed, model.packed, model.quantised, model.head]
    kept = [layer.weights for layer in layers]
    for layer in layers:
        layer.weights = None
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    ids = torch.randint(0, V, (6,))
    torch._dynamo.mark_dynamic(ids, 0)
    prepare(gate, [2, 4], [0, 1])
    without = compiled(ids)
    torch.testing.assert_close(without, model(ids))
    for layer, weights in zip(layers, kept, strict=True):
        layer.weights = weights
    torch.testing.assert_close(compiled(ids), model(ids))
    assert not torch.allclose(compiled(ids), without)
    assert counter.frame_count == 1


def test_equal_layers_share_one_graph():
    """A model whose blocks are compiled one by one, as large models are."""
    gate = make_gate()

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = LoRALinear(nn.Linear(K, K), make_site("linear", K, K), gate)
            self.proj.weights = make_weights(K, K)

        def forward(self, x):
            return torch.relu(self.proj(x))

    blocks = [Block() for _ in range(12)]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = [torch.compile(block, fullgraph=True, backend=counter) for block in blocks]
    prepare(gate, [2, 4], [0, 1])
    x = expected = torch.randn(6, K)
    for block, fast in zip(blocks, compiled, strict=True):
        x, expected = fast(x), block(expected)
    torch.testing.assert_close(x, expected)
    assert counter.frame_count == 1


FEATURES = ["output_scale", "bias", "full"]


@pytest.mark.parametrize("feature", FEATURES)
def test_dora_bias_and_whole_weights_work_compiled_too(feature):
    gate = make_gate()
    layer = LoRALinear(nn.Linear(K, N), make_site("linear", K, N), gate)
    plain = make_weights(K, N)
    extra = (
        {"full": {0: torch.randn(N, K)}} if feature == "full" else {feature: torch.rand(3, N) + 0.5}
    )
    layer.weights = type(plain)(
        plain.a, plain.b, plain.ranks, plain.scalings, plain.layout, **extra
    )
    x = torch.randn(2, 3, K)
    prepare(gate, [2, 1, 3], [0, -1, 1])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    assert not torch.allclose(layer(x), layer.base_layer(x))


def test_strided_input_and_lm_head_pass():
    gate = make_gate()
    head = LoRALMHead(nn.Linear(K, V), make_site("lm_head", K, V), gate)
    head.weights = make_weights(K, V)
    prepare(gate, [4, 4], [0, 2], logits=[[2, 2], [1, 1]])

    def last_tokens(hidden):
        return head(hidden[:, -1:], logits_pass=1)

    hidden = torch.randn(2, 4, K)
    compiled = torch.compile(last_tokens, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden), last_tokens(hidden))


def test_forgotten_batch_is_heard_of_when_the_graph_runs():
    gate = make_gate()
    layer = LoRALinear(nn.Linear(K, N), make_site("linear", K, N), gate)
    layer.weights = make_weights(K, N)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, K)
    torch.testing.assert_close(compiled(x), layer.base_layer(x))
    gate.adapters_loaded = 1
    with pytest.raises(NoBatchPreparedError, match=r"block\.proj"):
        compiled(x)


def test_base_that_returns_its_input_is_copied():
    class Same(nn.Module):
        in_features = out_features = K

        def forward(self, x):
            return x

    gate = make_gate()
    layer = LoRALinear(Same(), make_site("linear", K, K), gate, dtype=torch.float32)
    layer.weights = make_weights(K, K)
    prepare(gate, [3], [0])
    x = torch.randn(3, K)
    before = x.clone()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    assert torch.equal(x, before)


def test_input_that_requires_grad_is_refused():
    gate = make_gate()
    layer = LoRALinear(nn.Linear(K, N), make_site("linear", K, N), gate)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with (
        torch.enable_grad(),
        pytest.raises(Exception, match=r"UnsupportedOpError|training through"),
    ):
        compiled(torch.randn(3, K, requires_grad=True))


def test_eager_calls_do_not_go_through_the_operator(monkeypatch):
    from lora_core.layers import compiled

    monkeypatch.setattr(compiled, "add_delta", None)
    layer = LoRALinear(nn.Linear(K, N), make_site("linear", K, N), make_gate())
    layer.weights = make_weights(K, N)
    prepare(layer.gate, [3], [0])
    assert layer(torch.randn(3, K)).shape == (3, N)
