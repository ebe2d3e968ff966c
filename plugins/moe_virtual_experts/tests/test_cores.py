"""The Triton cores: right values, never in place inside the wrapper, and the race that this prevents."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from lora_core import LoRABatch, SliceLayout, load_backend
from lora_core.errors import TensorMismatchError
from lora_core.layers.base import ForwardGate
from lora_core.layers.moe import CoreConfig, FusedMoEWithLoRA
from lora_core.sites import Site
from lora_core_moe_virtual_experts.backend import VirtualExpertsBackend
from lora_core_moe_virtual_experts.cores import (
    ExpertsWeight,
    TritonExpertsCore,
    pack_int4,
)

pytestmark = pytest.mark.skipif(
    VirtualExpertsBackend.unavailable_reason() is not None,
    reason=str(VirtualExpertsBackend.unavailable_reason()),
)
DEVICE = VirtualExpertsBackend.default_device()
EXPERTS, HIDDEN, INNER, TOP_K, GROUP = 3, 32, 16, 2, 16


def make(kind: str, *, inplace: bool = False, dtype=torch.float32):
    """A core, and the weights it computes with, in float32."""
    g = torch.Generator().manual_seed(3)
    first = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=g).to(dtype).to(DEVICE) / HIDDEN**0.5
    second = torch.randn(EXPERTS, HIDDEN, INNER, generator=g).to(dtype).to(DEVICE) / INNER**0.5
    if kind == "plain":
        pair = ExpertsWeight(first), ExpertsWeight(second)
        real = first.float(), second.float()
    else:
        pair = pack_int4(first, GROUP), pack_int4(second, GROUP)
        real = tuple(map(unpack, pair))
    return TritonExpertsCore(*pair, config=CoreConfig(inplace=inplace)), real


def unpack(weight: ExpertsWeight) -> torch.Tensor:
    low, high = weight.data & 15, weight.data >> 4
    halves = torch.stack([low, high], -1).flatten(2).float() - 8
    return halves * weight.scales.float().repeat_interleave(weight.group, 2)


def by_hand(real, x, ids, weights):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        for j, expert in enumerate(ids[t].tolist()):
            if 0 <= expert < EXPERTS:
                first, second = (w[expert].double().cpu() for w in real)
                gate, up = (first @ x[t].double().cpu()).chunk(2)
                out[t] += float(weights[t, j]) * (second @ (functional.silu(gate) * up))
    return out


def inputs(rows=5):
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(0, EXPERTS, (rows, TOP_K), generator=g, dtype=torch.int32)
    return (
        torch.randn(rows, HIDDEN, generator=g).to(DEVICE),
        ids.to(DEVICE),
        torch.rand(rows, TOP_K, generator=g).to(DEVICE),
    )


class Base(nn.Module):
    """An experts module of an engine: a core and nothing else."""

    def __init__(self, core):
        super().__init__()
        self.core = core
        self.anchor = nn.Parameter(torch.zeros(1, device=DEVICE))

    def forward(self, x, ids, weights):
        return self.core.run(x, ids, weights)


def wrap(core):
    """A wrapper around it with one random adapter in slot 0."""
    gate = ForwardGate(load_backend("torch", device=DEVICE))
    names = "experts.gate_up_proj", "experts.down_proj"
    layer = FusedMoEWithLoRA(
        Base(core),
        Site(names[0], "experts", HIDDEN, SliceLayout((INNER, INNER)), names[:1]),
        Site(names[1], "experts", INNER, SliceLayout((HIDDEN,)), names[1:]),
        gate,
        VirtualExpertsBackend(),
    )
    g = torch.Generator().manual_seed(9)
    for projection in (layer.gate_up, layer.down):
        projection.allocate(1, 4)
        for tensor in (projection.weights.a, projection.weights.b):
            tensor.copy_(torch.randn(tensor.shape, generator=g) * 0.3)
        projection.weights.ranks.fill_(4)
        projection.weights.scalings.fill_(1.0)
    return gate, layer


@pytest.mark.parametrize("kind", ["plain", "int4"])
def test_values(kind):
    core, real = make(kind)
    x, ids, weights = inputs()
    ids[0, 1], ids[1] = -1, EXPERTS
    found = core.run(x, ids, weights).cpu()
    torch.testing.assert_close(found.double(), by_hand(real, x, ids, weights), rtol=1e-5, atol=1e-5)
    assert not found[1].any()


@pytest.mark.parametrize("kind", ["plain", "int4"])
def test_a_base_in_place_is_wrapped_out_of_place(kind):
    base, _ = make(kind, inplace=True)
    gate, layer = wrap(base)
    assert base.config.inplace
    assert not layer.core.config.inplace
    x, ids, weights = inputs()
    kept = x.clone()
    plain = make(kind)[0].run(x, ids, weights)
    for slots in ([-1] * 5, [0, -1, 0, 0, -1]):
        gate.backend.prepare_batch(LoRABatch([1] * 5, slots))
        out = layer(x, ids, weights)
        assert torch.equal(x, kept)
        same = (out == plain).all(1).tolist()
        assert same == [slot == -1 for slot in slots]
    assert torch.equal(base.run(x, ids, weights), plain)
    assert torch.equal(x, plain), "alone, the base still runs in place"


def test_int4_rounds_to_a_fifteenth_of_the_largest_of_its_group():
    weight = torch.randn(2, 8, 32)
    packed = pack_int4(weight, GROUP)
    step = packed.scales.repeat_interleave(GROUP, 2)
    assert ((unpack(packed) - weight).abs() <= step / 2 + 1e-6).all()
    assert packed.data.numel() * 2 == weight.numel()


def test_weights_that_cannot_be():
    with pytest.raises(TensorMismatchError, match="with scales"):
        ExpertsWeight(torch.zeros(2, 8, 16, dtype=torch.uint8))
    with pytest.raises(TensorMismatchError, match="groups that divide 32"):
        ExpertsWeight(torch.zeros(2, 8, 16, dtype=torch.uint8), torch.ones(2, 8, 5))
    with pytest.raises(TensorMismatchError, match="3 experts, down has 2"):
        TritonExpertsCore(ExpertsWeight(torch.zeros(3, 8, 4)), ExpertsWeight(torch.zeros(2, 4, 4)))


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA device")
@pytest.mark.parametrize("kind", ["plain", "int4"])
@pytest.mark.parametrize("inplace", [True, False], ids=["in-place-races", "wrapped-never"])
def test_a_shared_expert_on_a_second_stream(kind, inplace):
    """A shared expert still reads hidden_states while the experts run, in a captured graph.

    A delay makes it late every time: with an in-place core its input is overwritten every time, with
    the wrapper's core never.
    """
    core, _ = make(kind, inplace=True)
    gate, layer = wrap(core)
    gate.backend.init_graph("decode", max_requests=8, max_tokens=8)
    gate.backend.prepare_batch(LoRABatch([1] * 5, [0, -1, 0, 0, -1], mode="decode"), graph="decode")
    source, ids, weights = inputs()
    x, seen = source.clone(), torch.empty_like(source)
    run = core.run if inplace else layer
    run(x, ids, weights)
    main, side = torch.cuda.Stream(), torch.cuda.Stream()

    def forward():
        x.copy_(source)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)  # about a millisecond
            seen.copy_(x)  # what the shared expert reads
        run(x, ids, weights)
        torch.cuda.current_stream().wait_stream(side)

    main.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(main):
        forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=main):
            forward()
    spoiled = 0
    for _ in range(20):
        seen.zero_()
        graph.replay()
        torch.cuda.synchronize()
        spoiled += not torch.equal(seen, source)
    assert spoiled == (20 if inplace else 0)
