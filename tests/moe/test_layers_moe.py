"""FusedMoEWithLoRA on the packed experts of transformers: equal to merged weights, in one mixed batch."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from transformers.integrations.moe import use_experts_implementation  # noqa: E402

from lora_core import LoRABatch, SliceLayout, load_backend, load_moe_backend  # noqa: E402
from lora_core.errors import (  # noqa: E402
    NoBatchPreparedError,
    TensorMismatchError,
    UnsupportedOpError,
)
from lora_core.layers.base import ForwardGate  # noqa: E402
from lora_core.layers.moe import (  # noqa: E402
    CoreConfig,
    FusedMoEWithLoRA,
    TransformersExpertsCore,
    wrap_packed_experts,
)
from lora_core.sites import Site  # noqa: E402
from tests.moe.models import MODELS, experts_of, tiny_model  # noqa: E402

RANKS, SCALINGS, LENGTH = (3, 4), (0.5, 2.0), 5


def wrap(model: nn.Module, *, shared_outer: bool = False, only: str | None = None):
    """Every experts module wrapped, with two random adapters; (gate, layers by name)."""
    gate = ForwardGate(load_backend("torch", device="cpu"))
    backend, layers = load_moe_backend("torch", device="cpu"), {}
    for name, module in experts_of(model).items():
        layer = wrap_packed_experts(name, module, gate, backend)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer)
        for projection, which in ((layer.gate_up, "gate_up"), (layer.down, "down")):
            if only in {None, which}:
                fill(projection, backend, module, which, shared_outer=shared_outer)
        layers[name] = layer
    return gate, layers


def fill(projection, backend, module, which, *, shared_outer):
    site, g = projection.site, torch.Generator().manual_seed(len(projection.site.name))
    weights = backend.allocate_weights(
        num_slots=len(RANKS),
        num_experts=module.num_experts,
        max_rank=max(RANKS),
        in_features=site.in_features,
        layout=site.layout,
        dtype=projection.dtype,
        shared_a=shared_outer and which == "gate_up",
        shared_b=shared_outer and which == "down",
    )
    weights.a.copy_(torch.randn(weights.a.shape, generator=g) / math.sqrt(site.in_features))
    weights.b.copy_(torch.randn(weights.b.shape, generator=g))
    for slot, (rank, scaling) in enumerate(zip(RANKS, SCALINGS, strict=True)):
        weights.a[slot, :, :, rank:] = math.nan
        weights.b[slot, ..., rank:] = math.nan
        weights.ranks[slot], weights.scalings[slot] = rank, scaling
    projection.weights = weights


def merged(model: nn.Module, layers, slot: int) -> nn.Module:
    """A copy of the base model whose experts have one adapter multiplied into their weights."""
    plain = copy.deepcopy(model)
    for name, layer in layers.items():
        module = plain.get_submodule(name)
        for projection, parameter in (
            (layer.gate_up, module.gate_up_proj),
            (layer.down, module.down_proj),
        ):
            weights = projection.weights
            if weights is None:
                continue
            rank, offsets = RANKS[slot], weights.layout.offsets
            for expert in range(module.num_experts):
                parts = []
                for s in range(weights.layout.num_slices):
                    a = weights.a[slot, 0 if weights.shared_a else expert, s, :rank]
                    b = weights.b[slot, 0 if weights.shared_b else expert]
                    parts.append(b[offsets[s] : offsets[s + 1], :rank].double() @ a.double())
                delta = SCALINGS[slot] * torch.cat(parts)
                parameter.data[expert] += (delta.T if module.is_transposed else delta).float()
    return plain


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", MODELS, ids=str)
@torch.no_grad()
def test_a_mixed_batch_equals_merged_weights(kind, implementation):
    model = tiny_model(kind, implementation)
    base = copy.deepcopy(model)
    gate, layers = wrap(model)
    ids = torch.arange(3 * LENGTH).view(3, LENGTH) % 32
    gate.backend.prepare_batch(LoRABatch([LENGTH] * 3, [0, -1, 1]))
    out = model(ids).logits
    torch.testing.assert_close(out[1], base(ids).logits[1], rtol=1e-5, atol=1e-5)
    for row, slot in ((0, 0), (2, 1)):
        want = merged(base, layers, slot)(ids[row : row + 1]).logits[0]
        torch.testing.assert_close(out[row], want, rtol=1e-4, atol=1e-4)
        assert (out[row] - base(ids).logits[row]).abs().max() > 1e-2, "the adapter does something"


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", MODELS, ids=str)
@torch.no_grad()
def test_rows_on_the_base_model_have_its_bits(kind, implementation):
    model = tiny_model(kind, implementation)
    name, base = next(iter(copy.deepcopy(experts_of(model)).items()))
    gate, layers = wrap(model)
    gate.backend.prepare_batch(LoRABatch([1] * 5, [0, -1, 1, -1, 0]))
    arguments = (torch.randn(5, 32), torch.rand(5, 4).topk(2).indices, torch.rand(5, 2))
    same = (layers[name](*arguments) == base(*arguments)).all(1)
    assert same.tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("only", ["gate_up", "down"])
@torch.no_grad()
def test_one_projection_alone(only):
    """K34: only gate_up, only down_proj."""
    model = tiny_model("qwen3_moe")
    base = copy.deepcopy(model)
    gate, layers = wrap(model, only=only)
    ids = torch.arange(LENGTH).view(1, -1)
    gate.backend.prepare_batch(LoRABatch([LENGTH], [1]))
    torch.testing.assert_close(
        model(ids).logits, merged(base, layers, 1)(ids).logits, rtol=1e-4, atol=1e-4
    )


@torch.no_grad()
def test_shared_outer():
    model = tiny_model("mixtral")
    base = copy.deepcopy(model)
    gate, layers = wrap(model, shared_outer=True)
    assert next(iter(layers.values())).gate_up.weights.shared_a
    ids = torch.arange(LENGTH).view(1, -1)
    gate.backend.prepare_batch(LoRABatch([LENGTH], [0]))
    torch.testing.assert_close(
        model(ids).logits, merged(base, layers, 0)(ids).logits, rtol=1e-4, atol=1e-4
    )


class TestWhenAdaptersApply:
    @pytest.fixture
    def wrapped(self):
        model = tiny_model("qwen3_moe")
        base = copy.deepcopy(experts_of(model))
        gate, layers = wrap(model)
        name = next(iter(layers))
        arguments = (
            torch.randn(4, 32),
            torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0]]),
            torch.rand(4, 2),
        )
        return layers[name], base[name], gate, arguments

    @torch.no_grad()
    def test_inactive_it_is_the_base(self, wrapped):
        layer, base, gate, arguments = wrapped
        assert not layer.lora_active
        assert torch.equal(layer(*arguments), base(*arguments))
        gate.backend.prepare_batch(LoRABatch([4], [-1]))
        assert torch.equal(layer(*arguments), base(*arguments))
        gate.backend.prepare_batch(LoRABatch([4], [0]))
        assert layer.lora_active
        assert not torch.equal(layer(*arguments), base(*arguments))
        gate.backend.reset_batch_state()
        assert torch.equal(layer(*arguments), base(*arguments))

    @torch.no_grad()
    def test_a_forgotten_batch_is_an_error(self, wrapped):
        layer, base, gate, arguments = wrapped
        gate.adapters_loaded = 2
        with pytest.raises(
            NoBatchPreparedError, match=r"experts.gate_up_proj: a forward of 4 rows"
        ):
            layer(*arguments)
        gate.base_allowed = True
        assert torch.equal(layer(*arguments), base(*arguments))

    @torch.no_grad()
    def test_slots_that_travel_with_rows_apply_on_an_idle_rank(self, wrapped):
        """Data-parallel attention: this rank has no batch, the rows came from another."""
        layer, base, gate, arguments = wrapped
        gate.adapters_loaded = 2
        slots = torch.tensor([0, -1, 1, 1], dtype=torch.int32)
        idle = layer(*arguments, slots=slots)
        gate.backend.prepare_batch(LoRABatch([1, 1, 2], [0, -1, 1]))
        assert torch.equal(idle, layer(*arguments))
        assert torch.equal(idle[1], base(*arguments)[1])

    @torch.no_grad()
    def test_hidden_states_are_never_written(self, wrapped):
        layer, _, gate, arguments = wrapped
        kept = [tensor.clone() for tensor in arguments]
        gate.backend.prepare_batch(LoRABatch([4], [1]))
        layer(*arguments)
        for tensor, old in zip(arguments, kept, strict=True):
            assert torch.equal(tensor, old)

    def test_training_through_it_is_refused(self, wrapped):
        layer, _, gate, (x, ids, weights) = wrapped
        gate.backend.prepare_batch(LoRABatch([4], [1]))
        with pytest.raises(UnsupportedOpError, match="training through"):
            layer(x.requires_grad_(), ids, weights)

    @torch.no_grad()
    def test_an_implementation_of_unknown_order_is_refused(self, wrapped):
        layer, base, gate, arguments = wrapped
        layer.base_layer.config._experts_implementation = "eager"
        assert torch.equal(layer(*arguments), base(*arguments))
        gate.backend.prepare_batch(LoRABatch([4], [0]))
        with pytest.raises(UnsupportedOpError, match=r"grouped_mm.*asked for eager"):
            layer(*arguments)

    def test_state_dict_keeps_the_bases_names(self, wrapped):
        layer, base, _, _ = wrapped
        assert list(layer.state_dict()) == list(base.state_dict())
        assert layer.num_experts == base.num_experts


class TestInPlace:
    """A core that writes into hidden_states is never used, whatever the base asks for."""

    class InPlaceBase(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.packed = module
            self.core = TransformersExpertsCore(module, CoreConfig(inplace=True))

        def forward(self, hidden_states, topk_ids, topk_weights):
            return self.core.run(hidden_states, topk_ids, topk_weights)

    @torch.no_grad()
    def test_the_wrapper_has_its_own_configuration(self):
        name, module = next(iter(experts_of(tiny_model("qwen3_moe")).items()))
        sites = wrap_packed_experts(name, module, None, None)
        base = self.InPlaceBase(module)
        gate = ForwardGate(load_backend("torch", device="cpu"))
        backend = load_moe_backend("torch", device="cpu")
        layer = FusedMoEWithLoRA(base, sites.gate_up.site, sites.down.site, gate, backend)
        fill(layer.gate_up, backend, module, "gate_up", shared_outer=False)
        assert base.core.config.inplace
        assert not layer.core.config.inplace
        x, ids, weights = torch.randn(3, 32), torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
        kept = x.clone()
        for slots in ([-1, -1, -1], [0, 1, -1]):
            gate.backend.prepare_batch(LoRABatch([1, 1, 1], slots))
            out = layer(x, ids, weights)
            assert torch.equal(x, kept)
            assert out.data_ptr() != x.data_ptr()
        untouched = module(x, ids, weights)
        assert torch.equal(base(x, ids, weights), untouched)
        assert torch.equal(x, untouched), "the base itself still runs in place"


def test_two_sites_that_are_no_experts_module_are_refused():
    module = next(iter(experts_of(tiny_model("qwen3_moe")).values()))
    gate = ForwardGate(load_backend("torch", device="cpu"))
    first = Site("x.gate_up_proj", "experts", 32, SliceLayout((24, 24)), ("x.gate_up_proj",))
    second = Site("x.down_proj", "experts", 25, SliceLayout((32,)), ("x.down_proj",))
    with pytest.raises(TensorMismatchError, match="no two projections of one experts module"):
        FusedMoEWithLoRA(module, first, second, gate, load_moe_backend("torch", device="cpu"))


@use_experts_implementation(has_gate=False)
class PlainExperts(nn.Module):
    """Packed experts without a gate, as transformers would declare them."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = 4
        self.up_proj = nn.Parameter(torch.randn(4, 24, 32) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(4, 32, 24) * 0.2)
        self.act_fn = nn.ReLU()

    def forward(self, hidden_states, topk_ids, topk_weights):
        raise NotImplementedError


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@torch.no_grad()
def test_experts_that_are_not_gated(implementation):
    """K34."""
    config = transformers.PretrainedConfig()
    config._experts_implementation = implementation
    module = PlainExperts(config)
    gate = ForwardGate(load_backend("torch", device="cpu"))
    backend = load_moe_backend("torch", device="cpu")
    layer = wrap_packed_experts("mlp.experts", module, gate, backend)
    assert (layer.gate_up.site.name, layer.gate_up.site.layout.widths) == (
        "mlp.experts.up_proj",
        (24,),
    )
    for projection, which in ((layer.gate_up, "gate_up"), (layer.down, "down")):
        fill(projection, backend, module, which, shared_outer=False)
    x, ids, factors = torch.randn(3, 32), torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.rand(3, 2)
    gate.backend.prepare_batch(LoRABatch([1, 1, 1], [0, -1, 1]))
    out = layer(x, ids, factors)
    for row, slot in enumerate((0, None, 1)):
        expected = torch.zeros(32, dtype=torch.float64)
        for expert, factor in zip(ids[row].tolist(), factors[row], strict=True):
            first, second = (
                whole(projection.weights, parameter[expert], slot, expert)
                for projection, parameter in (
                    (layer.gate_up, module.up_proj),
                    (layer.down, module.down_proj),
                )
            )
            expected += factor.double() * (second @ (first @ x[row].double()).relu())
        torch.testing.assert_close(out[row].double(), expected, rtol=1e-4, atol=1e-4)


def whole(weights, base, slot, expert):
    """One expert's weight with one adapter multiplied in, float64."""
    if slot is None:
        return base.double()
    rank = RANKS[slot]
    a, b = weights.a[slot, expert, 0, :rank].double(), weights.b[slot, expert, :, :rank].double()
    return base.double() + SCALINGS[slot] * (b @ a)


@torch.no_grad()
def test_expert_parallel_ranks_add_up_to_the_whole():
    """K37: two ranks hold half of the experts each, with pools and local ids of their own."""
    model = tiny_model("qwen3_moe")
    name, module = next(iter(experts_of(model).items()))
    gate = ForwardGate(load_backend("torch", device="cpu"))
    backend = load_moe_backend("torch", device="cpu")
    full = wrap_packed_experts(name, module, gate, backend)
    for projection, which in ((full.gate_up, "gate_up"), (full.down, "down")):
        fill(projection, backend, module, which, shared_outer=False)
    x, ids, factors = (
        torch.randn(4, 32),
        torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0]]),
        torch.rand(4, 2),
    )
    gate.backend.prepare_batch(LoRABatch([1] * 4, [0, 1, -1, 1]))
    expected, total = full(x, ids, factors), torch.zeros(4, 32)
    for rank in range(2):
        held = range(2 * rank, 2 * rank + 2)
        half = copy.deepcopy(module)
        half.num_experts = 2
        for parameter in ("gate_up_proj", "down_proj"):
            own = getattr(module, parameter)[held.start : held.stop]
            setattr(half, parameter, nn.Parameter(own.clone()))
        layer = FusedMoEWithLoRA(
            half, full.gate_up.site, full.down.site, gate, backend, total_experts=4, expert_ids=held
        )
        for projection, source in ((layer.gate_up, full.gate_up), (layer.down, full.down)):
            projection.allocate(len(RANKS), max(RANKS))
            assert projection.weights.a.shape[1] == 2
            for field in ("a", "b"):
                whole_pool = getattr(source.weights, field)
                getattr(projection.weights, field).copy_(whole_pool[:, held.start : held.stop])
            projection.weights.ranks.copy_(source.weights.ranks)
            projection.weights.scalings.copy_(source.weights.scalings)
        local = torch.where((ids >= held.start) & (ids < held.stop), ids - held.start, 2)
        total += layer(x, local, torch.where(local < 2, factors, 0))
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
