"""LoRALinear over every kind of linear module, against a sum over rows in float64."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lora_core.errors import BatchMismatchError, NoBatchPreparedError, UnsupportedOpError
from lora_core.layers.linear import (
    LoRALinear,
    OpaqueLinear,
    PlainLinear,
    TransposedLinear,
    linear_features,
)
from lora_core.torch_backend import TorchBackend
from tests.layers.helpers import (
    QuantisedLinear,
    expected_delta,
    make_gate,
    make_site,
    make_weights,
    prepare,
)

K, N = 12, 10

BASES = {
    "linear": lambda: nn.Linear(K, N, bias=False),
    "linear-bias": lambda: nn.Linear(K, N),
    "conv1d": lambda: Conv1D(N, K),
    "quantised": lambda: QuantisedLinear(K, N),
}


@pytest.fixture(autouse=True)
def _inference():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def make_layer(base=None, *widths):
    base = base or nn.Linear(K, N)
    layer = LoRALinear(base, make_site("linear", K, *(widths or (N,))), make_gate())
    layer.weights = make_weights(K, *(widths or (N,)))
    return layer


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
@pytest.mark.parametrize("widths", [(N,), (6, 2, 2), (5, 5), (1, 4, 2, 3)], ids=str)
def test_each_row_gets_its_own_adapter(base, widths):
    layer = make_layer(base(), *widths)
    lengths, slots = [3, 2, 0, 4, 1], [1, -1, 0, 2, 1]
    x = torch.randn(10, K)
    prepare(layer.gate, lengths, slots)

    expected = layer.base_layer(x).double() + expected_delta(x, layer.weights, lengths, slots)
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)


SHAPES = {
    "2d": lambda: torch.randn(6, K),
    "3d": lambda: torch.randn(2, 3, K),
    "4d": lambda: torch.randn(1, 2, 3, K),
    "strided-columns": lambda: torch.randn(6, 2 * K)[:, K:],
    "strided-3d": lambda: torch.randn(2, 7, K)[:, 4:],
    "last-token": lambda: torch.randn(6, 9, K)[:, -1:],
    "transposed": lambda: torch.randn(K, 6).T,
    "transposed-3d": lambda: torch.randn(3, 2, K).transpose(0, 1),
    "unaligned": lambda: torch.randn(6 * K + 1)[1:].view(6, K),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_any_layout_of_the_input(base, shape, dtype):
    layer = make_layer(base().to(dtype))
    layer.weights = make_weights(K, N, dtype=dtype)
    x = shape().to(dtype)
    if type(layer.base_layer) is Conv1D and x.dim() == 3 and not x.is_contiguous():
        x = x.contiguous()  # Conv1D itself takes no other
    lengths, slots = [2, 2, 2], [0, -1, 2]
    prepare(layer.gate, lengths, slots)
    before = x.clone()
    out = layer(x)

    base_out = layer.base_layer(x)
    assert out.shape == base_out.shape
    out, base_out = out.reshape(-1, N), base_out.reshape(-1, N)
    assert torch.equal(out[2:4], base_out[2:4])  # NO_LORA rows: bit for bit the base
    expected = base_out.double() + expected_delta(x.reshape(-1, K), layer.weights, lengths, slots)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(x, before)


def test_backends_may_call_the_base_with_rows_of_their_own():
    """Such as one that computes a batch in pieces, here of an input whose rows had to be copied."""

    class Pieces(TorchBackend):
        def linear(self, x, base, weights):
            whole = super().linear(x, base, weights)
            assert base.weight.shape == (N, K)
            plain = torch.nn.functional.linear(x[:2], base.weight, base.bias)
            torch.testing.assert_close(base(x[:2]), plain)
            return whole

    layer = make_layer()
    layer.gate.backend = Pieces(device="cpu")
    prepare(layer.gate, [3, 3], [0, 1])
    x = torch.randn(2, 6, K)[:, ::2]
    expected = layer.base_layer(x).view(6, N).double() + expected_delta(
        x.reshape(6, K), layer.weights, [3, 3], [0, 1]
    )
    torch.testing.assert_close(layer(x).view(6, N).double(), expected, rtol=1e-5, atol=1e-5)


def test_inactive_layer_calls_the_base_as_it_is():
    calls = []

    class Spy(nn.Linear):
        def forward(self, x):
            calls.append(x)
            return super().forward(x)

    layer = make_layer(Spy(K, N))
    x = torch.randn(2, 3, K)
    out = layer(x)
    assert calls[0] is x
    assert torch.equal(out, layer.base_layer(x))

    prepare(layer.gate, [3, 3], [0, 1])
    layer.weights = None
    layer(x)
    assert calls[-1] is x


def test_active_only_with_weights_and_a_batch():
    layer = make_layer()
    assert not layer.lora_active
    prepare(layer.gate, [1], [0])
    assert layer.lora_active
    layer.weights = None
    assert not layer.lora_active


def test_step_without_adapters_after_one_with_them_is_the_base():
    layer, x = make_layer(), torch.randn(4, K)
    expected = layer.base_layer(x)
    prepare(layer.gate, [4], [0])
    assert not torch.equal(layer(x), expected)
    layer.gate.backend.reset_batch_state()
    assert torch.equal(layer(x), expected)
    prepare(layer.gate, [4], [-1])
    assert torch.equal(layer(x), expected)


def test_forward_without_a_batch_while_adapters_are_loaded_is_an_error():
    layer, x = make_layer(), torch.randn(2, K)
    layer.gate.adapters_loaded = 1
    with pytest.raises(NoBatchPreparedError, match=r"block\.proj.*manager\.batch"):
        layer(x)
    layer.weights = None  # a site that no adapter touches speaks up all the same
    with pytest.raises(NoBatchPreparedError):
        layer(x)
    layer.gate.base_allowed = True
    assert torch.equal(layer(x), layer.base_layer(x))


def test_empty_input_needs_no_batch():
    layer = make_layer()
    layer.gate.adapters_loaded = 1
    assert layer(torch.empty(0, K)).shape == (0, N)
    assert layer(torch.empty(2, 0, K)).shape == (2, 0, N)
    prepare(layer.gate, [4, 4], [0, 1])
    assert layer(torch.empty(0, K)).shape == (0, N)


def test_fewer_rows_than_prepared_is_an_error():
    layer = make_layer()
    prepare(layer.gate, [4], [0])
    with pytest.raises(BatchMismatchError, match=r"3 rows.*4"):
        layer(torch.randn(3, K))


def test_input_that_requires_grad_is_refused_by_name():
    layer = make_layer()
    x = torch.randn(2, K, requires_grad=True)
    prepare(layer.gate, [2], [0])
    layer(x)  # under no_grad
    with torch.enable_grad():
        with pytest.raises(UnsupportedOpError, match=r"training through block\.proj"):
            layer(x)
        layer.gate.backend.reset_batch_state()
        assert layer(x).requires_grad  # inactive: the base, gradients and all


VIEWS = {
    "linear": (PlainLinear, True),
    "linear-bias": (PlainLinear, True),
    "conv1d": (TransposedLinear, True),
    "quantised": (OpaqueLinear, False),
}


@pytest.mark.parametrize("name", VIEWS)
def test_what_a_backend_sees_of_the_base(name):
    base = BASES[name]()
    layer, (kind, shows_weight) = make_layer(base), VIEWS[name]
    assert type(layer.base) is kind
    assert layer.base is layer.base
    if shows_weight:
        x = torch.randn(3, K)
        plain = nn.functional.linear(x, layer.base.weight, layer.base.bias)
        torch.testing.assert_close(plain, base(x))
    else:
        assert layer.base.weight is None
        assert layer.base.bias is base.bias


def test_replaced_parameters_are_seen():
    layer = make_layer()
    layer.base_layer.weight = nn.Parameter(torch.ones(N, K))
    assert layer.base.weight is layer.base_layer.weight
    assert layer.weight is layer.base_layer.weight


def test_packed_or_changed_weights_are_not_shown():
    packed = nn.Linear(K, N)
    packed.weight = nn.Parameter(torch.zeros(N * K // 2, 1))  # as 4-bit weights are stored
    patched = nn.Linear(K, N)
    patched.forward = lambda x: x[..., :N]
    for base in (packed, patched):
        assert LoRALinear(base, make_site("linear", K, N), make_gate()).base.weight is None


def test_strange_base_that_returns_its_input_is_copied():
    class Same(nn.Module):
        in_features = out_features = K

        def forward(self, x):
            return x

    layer = LoRALinear(Same(), make_site("linear", K, K), make_gate(), dtype=torch.float32)
    layer.weights = make_weights(K, K)
    x = torch.randn(2, K)
    before = x.clone()
    prepare(layer.gate, [2], [0])
    assert not torch.equal(layer(x), before)
    assert torch.equal(x, before)


def test_dtype_follows_the_activations():
    assert make_layer(nn.Linear(K, N).bfloat16()).dtype == torch.bfloat16
    layer = LoRALinear(
        QuantisedLinear(K, N), make_site("linear", K, N), make_gate(), dtype=torch.float16
    )
    assert layer.dtype == torch.float16


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Linear(3, 4), (3, 4)),
        (Conv1D(4, 3), (3, 4)),
        (QuantisedLinear(3, 4), (3, 4)),
        (nn.Bilinear(3, 3, 4), None),
        (nn.LayerNorm(3), None),
        (nn.Conv1d(3, 4, 1), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_counts_as_a_linear(module, expected):
    assert linear_features(module) == expected
