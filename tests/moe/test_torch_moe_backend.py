"""The torch reference for experts against a float64 oracle, and what the contract says of it."""

from __future__ import annotations

import math

import pytest
import torch

import lora_core
from lora_core import MoELoRAWeights, MoERouting, SliceLayout, load_backend, load_moe_backend
from lora_core.batch import LoRABatch
from lora_core.errors import BackendNotFoundError, ContractError, TensorMismatchError
from lora_core.moe import MoELoRABackend
from lora_core.testing.moe_oracle import pair_deltas

HIDDEN, INTER, EXPERTS, SLOTS, RANK = 24, 12, 5, 3, 6
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def make_weights(
    *,
    inputs=HIDDEN,
    widths=(INTER, INTER),
    shared_a=False,
    shared_b=False,
    ranks=None,
    dtype=torch.float32,
    seed=0,
):
    """Random weights; everything past a slot's rank, and slot 2 as a whole where unused, is NaN."""
    g = torch.Generator().manual_seed(seed)
    n, out = len(widths), sum(widths)
    ranks = ranks or [[RANK] * n, [3] + [1] * (n - 1), [0] * n]
    a = torch.randn(SLOTS, 1 if shared_a else EXPERTS, n, RANK, inputs, generator=g) / math.sqrt(
        inputs
    )
    b = torch.randn(SLOTS, 1 if shared_b else EXPERTS, out, RANK, generator=g)
    offset = 0
    for s, width in enumerate(widths):
        for slot in range(SLOTS):
            a[slot, :, s, ranks[slot][s] :] = math.nan
            b[slot, :, offset : offset + width, ranks[slot][s] :] = math.nan
        offset += width
    return MoELoRAWeights(
        a=a.to(dtype),
        b=b.to(dtype),
        ranks=torch.tensor(ranks, dtype=torch.int32),
        scalings=torch.tensor([[0.5 + i + s for s in range(n)] for i in range(SLOTS)]),
        layout=SliceLayout(tuple(widths)),
        num_experts=EXPERTS,
    )


def make_routing(slots, *, top_k=2, ids=None, seed=1, expert_map=None):
    g = torch.Generator().manual_seed(seed)
    tokens = len(slots)
    if ids is None:
        ids = torch.rand(tokens, EXPERTS, generator=g).topk(top_k, dim=1).indices.int()
    return MoERouting(
        topk_ids=ids,
        topk_weights=torch.rand(ids.shape, generator=g),
        slots=torch.tensor(slots, dtype=torch.int32),
        num_experts=EXPERTS,
        num_slots=SLOTS,
        expert_map=expert_map,
    )


def assert_close(actual, expected, scale, dtype):
    worst = ((actual.double() - expected).abs() / (scale + 1)).max().item()
    assert worst <= TOLERANCE[dtype], f"error {worst:.2e} relative to the terms"


@pytest.fixture
def backend():
    return load_moe_backend("torch", device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["per-expert", "shared-outer"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_gate_up_adds_the_oracles_delta(backend, dtype, shared, gated):
    weights = make_weights(
        widths=(INTER, INTER) if gated else (INTER,), shared_a=shared, dtype=dtype
    )
    routing = make_routing([0, 1, -1, 0, 2, 1])
    x = torch.randn(6, HIDDEN).to(dtype)
    base = torch.randn(6, 2, weights.layout.out_features).to(dtype)
    expected = pair_deltas(x, weights, routing)
    out = backend.gate_up(x, weights, backend.route(routing), base.clone())
    assert_close(out, base.double() + expected.delta, expected.scale + base.abs(), dtype)
    assert torch.equal(out[~expected.touched], base[~expected.touched])
    assert expected.touched[:2].all()
    assert not expected.touched[[2, 4]].any()  # NO_LORA, and a slot of rank 0


@pytest.mark.parametrize("shared", [False, True], ids=["per-expert", "shared-outer"])
@pytest.mark.parametrize("routed", [False, True], ids=["plain", "times-routing-weight"])
def test_down_per_pair(backend, shared, routed):
    weights = make_weights(inputs=INTER, widths=(HIDDEN,), shared_b=shared)
    routing = make_routing([0, 1, -1, 0])
    x, base = torch.randn(4, 2, INTER), torch.randn(4, 2, HIDDEN)
    expected = pair_deltas(x, weights, routing)
    factor = routing.topk_weights.double().unsqueeze(-1) if routed else 1.0
    out = backend.down(x, weights, backend.route(routing), base.clone(), routed_weights=routed)
    assert_close(out, base.double() + factor * expected.delta, expected.scale, torch.float32)


def test_down_reduced_sums_pairs_times_their_routing_weights(backend):
    weights = make_weights(inputs=INTER, widths=(HIDDEN,))
    routing = make_routing([0, 1, -1, 0])
    x, base = torch.randn(4, 2, INTER), torch.randn(4, HIDDEN)
    expected = pair_deltas(x, weights, routing)
    added = (expected.delta * routing.topk_weights.double().unsqueeze(-1)).sum(1)
    out = backend.down(x, weights, backend.route(routing), base.clone())
    assert_close(out, base.double() + added, expected.scale.sum(1), torch.float32)
    assert torch.equal(out[2], base[2])


def test_overwriting_writes_the_delta_and_zero_elsewhere(backend):
    weights, routing = make_weights(), make_routing([0, -1, 2, 1])
    x, out = torch.randn(4, HIDDEN), torch.full((4, 2, 2 * INTER), math.nan)
    expected = pair_deltas(x, weights, routing)
    backend.gate_up(x, weights, backend.route(routing), out, accumulate=False)
    assert_close(out, expected.delta, expected.scale, torch.float32)
    assert torch.equal(out[~expected.touched], torch.zeros(int((~expected.touched).sum())))


def test_chunks_of_rows_give_the_same_bits(backend, monkeypatch):
    weights, routing = make_weights(), make_routing([0, 1, -1, 0, 1, 0, 2])
    x, base = torch.randn(7, HIDDEN), torch.randn(7, 2, 2 * INTER)
    route = backend.route(routing)
    whole = backend.gate_up(x, weights, route, base.clone())
    monkeypatch.setattr("lora_core.torch_moe_backend._CHUNK_ELEMENTS", 1)
    assert torch.equal(backend.gate_up(x, weights, route, base.clone()), whole)


@pytest.mark.parametrize("bad", [-1, EXPERTS, EXPERTS + 7, -9], ids=str)
def test_ids_out_of_range_get_no_delta(backend, bad):
    """K32: -1 and id = E, some and all."""
    weights = make_weights()
    ids = torch.tensor([[0, bad], [bad, bad], [bad, 4]], dtype=torch.int32)
    x, base = torch.randn(3, HIDDEN), torch.full((3, 2, 2 * INTER), -0.0)
    out = backend.gate_up(x, weights, backend.route(make_routing([0, 0, 1], ids=ids)), base.clone())
    inert = ids == bad
    assert torch.equal(out[inert].view(torch.int32), base[inert].view(torch.int32))
    assert (out[~inert] != 0).all()


@pytest.mark.parametrize("slot", [-1, SLOTS, -5], ids=str)
def test_slots_out_of_range_get_no_delta(backend, slot):
    weights, base = make_weights(), torch.full((1, 2, 2 * INTER), -0.0)
    out = backend.gate_up(
        torch.randn(1, HIDDEN), weights, backend.route(make_routing([slot])), base.clone()
    )
    assert torch.equal(out.view(torch.int32), base.view(torch.int32))


def test_expert_map_turns_global_ids_into_local_ones(backend):
    """K37: rank 1 of 2 holds global experts 5..9; the others, and unknown ids, are inert."""
    weights = make_weights()
    mapping = torch.cat(
        [torch.full((5,), -1, dtype=torch.int32), torch.arange(5, dtype=torch.int32)]
    )
    ids = torch.tensor([[5, 2], [9, 10], [-1, 7]], dtype=torch.int32)
    routing = make_routing([0, 0, 0], ids=ids, expert_map=mapping)
    local = make_routing(
        [0, 0, 0], ids=torch.tensor([[0, -1], [4, -1], [-1, 2]], dtype=torch.int32)
    )
    x, base = torch.randn(3, HIDDEN), torch.randn(3, 2, 2 * INTER)
    mapped = backend.gate_up(x, weights, backend.route(routing), base.clone())
    assert torch.equal(mapped, backend.gate_up(x, weights, backend.route(local), base.clone()))
    assert torch.equal(mapped[ids == 2], base[ids == 2])


def test_neighbours_change_nothing(backend):
    """Values, NaNs, adapters and experts of other rows leave a row's bits alone."""
    weights = make_weights()
    x, base = torch.randn(4, HIDDEN), torch.randn(4, 2, 2 * INTER)
    ids = torch.tensor([[0, 1], [1, 2], [3, 1], [4, 0]], dtype=torch.int32)
    before = backend.gate_up(
        x, weights, backend.route(make_routing([0, 1, 0, 1], ids=ids)), base.clone()
    )
    x2, ids2 = x.clone(), ids.clone()
    x2[1:3] = math.nan
    ids2[1:3] = torch.tensor([[0, -1], [0, 1]])
    after = backend.gate_up(
        x2, weights, backend.route(make_routing([0, 0, -1, 1], ids=ids2)), base.clone()
    )
    assert torch.equal(before[[0, 3]], after[[0, 3]])


def test_inputs_are_never_written(backend):
    weights, routing = make_weights(inputs=INTER, widths=(HIDDEN,)), make_routing([0, 1, -1])
    x = torch.randn(3, 2, INTER)
    kept = [t.clone() for t in (x, routing.topk_ids, routing.topk_weights, routing.slots)]
    backend.down(x, weights, backend.route(routing), torch.zeros(3, 2, HIDDEN))
    for old, new in zip(
        kept, (x, routing.topk_ids, routing.topk_weights, routing.slots), strict=True
    ):
        assert torch.equal(old, new)


class TestLayouts:
    """Where the slots come from."""

    def routing(self, info, rows):
        return MoERouting.local(
            info,
            torch.zeros(rows, 1, dtype=torch.int64),
            torch.ones(rows, 1),
            num_experts=EXPERTS,
            num_slots=SLOTS,
        )

    def test_local_slots_are_the_requests_rows(self):
        dense = load_backend("torch", device="cpu")
        info = dense.prepare_batch(LoRABatch([2, 0, 3], [1, 0, -1]))
        assert self.routing(info, 7).slots.tolist() == [1, 1, -1, -1, -1, -1, -1]

    def test_without_a_batch_or_without_adapters_nothing_is_launched(self, backend):
        dense = load_backend("torch", device="cpu")
        weights, out = make_weights(), torch.zeros(2, 1, 2 * INTER)
        for info in (None, dense.prepare_batch(LoRABatch([2], [-1]))):
            routing = self.routing(info, 2)
            assert routing.inert
            assert (
                backend.gate_up(torch.ones(2, HIDDEN), weights, backend.route(routing), out) is out
            )
            assert not out.any()

    def test_a_graph_batch_is_never_inert(self):
        """What is captured without adapters must apply those of a later replay."""
        dense = load_backend("torch", device="cpu")
        dense.init_graph("decode", max_requests=4, max_tokens=4)
        info = dense.prepare_batch(LoRABatch([1, 1], [-1, -1], mode="decode"), graph="decode")
        assert not self.routing(info, 4).inert

    def test_global_slots_apply_on_an_idle_rank(self, backend):
        """An idle rank has no batch of its own; rows gathered from others bring their slots."""
        weights, x = make_weights(), torch.randn(2, HIDDEN)
        gathered = make_routing([1, 0])
        out = backend.gate_up(x, weights, backend.route(gathered), torch.zeros(2, 2, 2 * INTER))
        expected = pair_deltas(x, weights, gathered)
        assert_close(out, expected.delta, expected.scale, torch.float32)
        assert expected.touched.all()

    def test_no_rows(self, backend):
        weights = make_weights()
        routing = make_routing([], ids=torch.empty(0, 2, dtype=torch.int32))
        out = backend.gate_up(
            torch.empty(0, HIDDEN), weights, backend.route(routing), torch.empty(0, 2, 2 * INTER)
        )
        assert out.shape == (0, 2, 2 * INTER)


class TestErrors:
    """Whatever does not fit is refused by name, and `out` stays as it was."""

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"x": torch.zeros(3, HIDDEN + 1)}, r"x of shape \(3, 25\).*expected \(3, 24\)"),
            ({"x": torch.zeros(2, HIDDEN)}, r"x of shape \(2, 24\)"),
            ({"x": torch.zeros(3, HIDDEN, dtype=torch.float16)}, "x of torch.float16"),
            ({"out": torch.zeros(3, 3, 2 * INTER)}, r"out of shape \(3, 3, 24\)"),
            ({"out": torch.zeros(3, 2 * INTER)}, r"out of shape \(3, 24\)"),
            ({"out": torch.zeros(3, 2 * INTER, 2).mT}, "expected contiguous"),
        ],
        ids=["hidden", "rows", "dtype", "top-k", "reduced-gate-up", "strided-out"],
    )
    def test_tensors_that_do_not_fit(self, backend, change, message):
        arguments = {"x": torch.zeros(3, HIDDEN), "out": torch.zeros(3, 2, 2 * INTER)} | change
        route = backend.route(make_routing([0, 0, 0]))
        with pytest.raises(TensorMismatchError, match=message):
            backend.gate_up(arguments["x"], make_weights(), route, arguments["out"])
        assert not arguments["out"].any()

    def test_another_number_of_experts(self, backend):
        routing = MoERouting(
            topk_ids=torch.zeros(1, 1, dtype=torch.int32),
            topk_weights=torch.ones(1, 1),
            slots=torch.zeros(1, dtype=torch.int32),
            num_experts=8,
            num_slots=SLOTS,
        )
        with pytest.raises(
            TensorMismatchError, match=r"3 slots and 5 experts.*3 slots and 8 experts"
        ):
            backend.gate_up(
                torch.zeros(1, HIDDEN),
                make_weights(),
                backend.route(routing),
                torch.zeros(1, 1, 2 * INTER),
            )

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"topk_ids": torch.zeros(3, dtype=torch.int32)}, r"topk_ids is \(3,\)"),
            ({"topk_ids": torch.zeros(3, 2)}, "float32: expected .* int32 or int64"),
            ({"topk_weights": torch.ones(3, 1)}, r"topk_weights is \(3, 1\)"),
            ({"slots": torch.zeros(2, dtype=torch.int32)}, r"slots is \(2,\)"),
            ({"slots": torch.zeros(3, dtype=torch.int64)}, "slots is .* torch.int64"),
            ({"expert_map": torch.zeros(3)}, "expert_map is .* torch.float32"),
            ({"num_experts": 0}, "0 experts"),
        ],
        ids=[
            "ids-1d",
            "ids-float",
            "weights",
            "slots-rows",
            "slots-dtype",
            "map-dtype",
            "no-experts",
        ],
    )
    def test_routings_that_cannot_be(self, change, message):
        good = {
            "topk_ids": torch.zeros(3, 2, dtype=torch.int32),
            "topk_weights": torch.ones(3, 2),
            "slots": torch.zeros(3, dtype=torch.int32),
            "num_experts": EXPERTS,
            "num_slots": SLOTS,
        }
        with pytest.raises(TensorMismatchError, match=message):
            MoERouting(**(good | change))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"a": torch.zeros(2, 3, 2, 4, 8)}, r"a holds 3 experts: expected 5"),
            ({"a": torch.zeros(2, 5, 1, 4, 8)}, r"expected \[S, E, 2, R, K\]"),
            ({"b": torch.zeros(2, 5, 12, 3)}, r"b has shape \(2, 5, 12, 3\)"),
            ({"b": torch.zeros(2, 5, 4, 12).mT}, "ranks must be contiguous"),
            ({"b": torch.zeros(2, 5, 12, 4, dtype=torch.float16)}, "b is .* torch.float16"),
            ({"ranks": torch.zeros(2, 2)}, "ranks is .* torch.float32"),
        ],
        ids=["experts", "slices", "b-rank", "b-strides", "b-dtype", "ranks"],
    )
    def test_weights_that_cannot_be(self, change, message):
        good = {
            "a": torch.zeros(2, 5, 2, 4, 8),
            "b": torch.zeros(2, 5, 12, 4),
            "ranks": torch.zeros(2, 2, dtype=torch.int32),
            "scalings": torch.zeros(2, 2),
        }
        with pytest.raises(TensorMismatchError, match=message):
            MoELoRAWeights(**(good | change), layout=SliceLayout((6, 6)), num_experts=5)

    def test_a_dense_backend_is_named_when_asked_for_as_experts(self):
        with pytest.raises(BackendNotFoundError, match=r"no moe backend is named 'nothing'"):
            load_moe_backend("nothing")

    def test_a_class_with_other_parameters_is_refused_at_definition(self):
        with pytest.raises(ContractError, match=r"gate_up has parameters \(self, x\)"):
            type("Wrong", (MoELoRABackend,), {"gate_up": lambda self, x: x})

    def test_a_class_without_a_name_is_refused_at_definition(self, backend):
        members = {m: vars(type(backend))[m] for m in ("route", "gate_up", "down")}
        with pytest.raises(ContractError, match="does not set the class attribute 'name'"):
            type("Nameless", (MoELoRABackend,), members)


def test_public_names():
    assert {"MoELoRABackend", "MoERouting", "MoELoRAWeights", "load_moe_backend"} <= set(
        lora_core.__all__
    )
    assert [spec.name for spec in lora_core.list_moe_backends()][-1:] == ["torch"]
    assert load_moe_backend("torch", device="cpu").device == torch.device("cpu")


def test_allocated_weights_apply_nothing(backend):
    weights = backend.allocate_weights(
        num_slots=SLOTS,
        num_experts=EXPERTS,
        max_rank=RANK,
        in_features=HIDDEN,
        layout=SliceLayout((INTER, INTER)),
        dtype=torch.float32,
        shared_a=True,
    )
    assert (weights.shared_a, weights.shared_b) == (True, False)
    out = torch.full((2, 2, 2 * INTER), -0.0)
    backend.gate_up(torch.randn(2, HIDDEN), weights, backend.route(make_routing([0, 1])), out)
    assert torch.equal(out.view(torch.int32), torch.full_like(out, -0.0).view(torch.int32))
