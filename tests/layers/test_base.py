"""A wrapped module is indistinguishable from the module it wraps."""

import copy
import io

import pytest
import torch
from torch import nn

from lora_core.errors import LoRACoreError
from lora_core.layers.linear import LoRALinear
from tests.layers.helpers import QuantisedLinear, make_gate, make_site, make_weights, prepare

K, N = 5, 4


def wrap(base):
    layer = LoRALinear(base, make_site("linear", K, N), make_gate())
    layer.weights = make_weights(K, N)
    return layer


def wrapped_model():
    """A model, the same model wrapped, and the wrapper."""
    model = nn.Sequential(nn.Linear(K, K), nn.Linear(K, N), nn.ReLU())
    layer = wrap(model[1])
    wrapped = nn.Sequential(model[0], layer, model[2])
    return model, wrapped, layer


def test_names_of_everything_are_the_bases_own():
    model, wrapped, _ = wrapped_model()
    assert list(wrapped.state_dict()) == list(model.state_dict())
    assert [name for name, _ in wrapped.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    assert [name for name, _ in wrapped.named_modules()] == [
        name for name, _ in model.named_modules()
    ]
    assert all(a is b for a, b in zip(wrapped.parameters(), model.parameters(), strict=True))


def test_attributes_of_the_base_are_visible():
    base = nn.Linear(K, N)
    base.reduce_results = False
    layer = wrap(base)
    assert (layer.in_features, layer.out_features, layer.reduce_results) == (K, N, False)
    assert layer.weight is base.weight
    assert layer.bias is base.bias
    with pytest.raises(AttributeError, match="nonsense"):
        _ = layer.nonsense


def test_saved_and_loaded_through_the_wrapper():
    model, wrapped, _ = wrapped_model()
    file = io.BytesIO()
    torch.save(wrapped.state_dict(), file)
    file.seek(0)
    other = nn.Sequential(nn.Linear(K, K), nn.Linear(K, N), nn.ReLU())
    other.load_state_dict(torch.load(file))
    assert torch.equal(other[1].weight, model[1].weight)

    changed = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    wrapped.load_state_dict(changed)
    assert torch.equal(model[1].weight, torch.ones(N, K))


def test_a_base_that_saves_itself_in_its_own_way():
    class Special(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            destination[prefix + "packed"] = self.weight.detach()

    base = Special(K, N)
    assert (
        list(nn.Sequential(wrap(base)).state_dict())
        == list(nn.Sequential(base).state_dict())
        == ["0.packed"]
    )


def test_casts_and_modes_reach_the_base():
    _, wrapped, layer = wrapped_model()
    wrapped.to(torch.bfloat16)
    assert layer.base_layer.weight.dtype == torch.bfloat16
    assert layer.base.weight is layer.base_layer.weight
    wrapped.eval()
    assert not layer.base_layer.training
    wrapped.train()
    assert layer.base_layer.training
    assert layer.weights.a.dtype == torch.float32  # adapters are no part of the model


def test_a_parameter_set_through_the_wrapper_is_the_bases():
    base = nn.Linear(K, N)
    layer = wrap(base)
    layer.weight = nn.Parameter(torch.zeros(N, K))  # as tie_weights does
    assert base.weight is layer.weight


def test_buffers_of_a_quantised_module_stay_its_own():
    base = QuantisedLinear(K, N)
    assert list(nn.Sequential(wrap(base)).state_dict()) == list(nn.Sequential(base).state_dict())


def test_hooks_run_once_each():
    base, seen = nn.Linear(K, N), []
    base.register_forward_hook(lambda module, args, out: seen.append("base"))
    layer = wrap(base)
    layer.register_forward_hook(lambda module, args, out: seen.append("layer"))
    with torch.no_grad():
        layer(torch.randn(2, K))
        prepare(layer.gate, [2], [0])
        layer(torch.randn(2, K))
    assert seen == ["base", "layer", "base", "layer"]


def test_a_wrapped_layer_is_not_copied():
    with pytest.raises(LoRACoreError, match="Detach first"):
        copy.deepcopy(wrap(nn.Linear(K, N)))


def test_repr_names_the_base():
    assert (
        repr(wrap(nn.Linear(K, N)))
        == "LoRALinear(Linear(in_features=5, out_features=4, bias=True))"
    )
