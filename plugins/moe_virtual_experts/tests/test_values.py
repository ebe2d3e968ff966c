"""The kernels against a float64 oracle, aimed at their seams: tiles that do not fill, ranks that end
inside a block, K that ends inside a split, blocks of h, both forms, both layouts of the pool.

Runs in the interpreter (`TRITON_INTERPRET=1`) or on a GPU.
"""

from __future__ import annotations

import math

import pytest
import torch

from lora_core import MoELoRAWeights, MoERouting, SliceLayout
from lora_core.testing.moe_oracle import PairDeltas, pair_deltas
from lora_core.triton_kit import INTERPRETED, Rule, Tile, TileTable
from lora_core_moe_virtual_experts import tiles
from lora_core_moe_virtual_experts.backend import VirtualExpertsBackend

pytestmark = pytest.mark.skipif(
    VirtualExpertsBackend.unavailable_reason() is not None,
    reason=str(VirtualExpertsBackend.unavailable_reason()),
)
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
FORMS = {"one-by-one": 0, "grouped": 1}


@pytest.fixture
def backend():
    return VirtualExpertsBackend()


@pytest.fixture(params=FORMS, ids=str)
def form(request, monkeypatch):
    """Both forms at every size, with splits of K and blocks of N that do not divide."""
    grouped = FORMS[request.param]
    fix(monkeypatch, "ROUTE", GROUPED=grouped, BM=32 if grouped else 16)
    fix(monkeypatch, "ROWS", GROUPED=grouped, BM=16)
    fix(monkeypatch, "SHRINK", BC=16, BK=16, SPLITS=3)
    fix(monkeypatch, "EXPAND", BM=16, BN=16, LOOPS=3, AHEAD=2)
    fix(monkeypatch, "EXPAND_PAIR", BN=16)
    return request.param


def fix(monkeypatch, table, **constexprs):
    keys = getattr(tiles, table).keys
    monkeypatch.setattr(
        tiles, table, TileTable(table, keys, [Rule(Tile(constexprs, 4, 2), "test")])
    )


def make_weights(
    device, *, experts, ranks, max_rank, inputs, widths, dtype, shared_a=False, shared_b=False
):
    """Random adapters; everything past a rank is NaN."""
    g = torch.Generator().manual_seed(7)
    n, slots = len(widths), len(ranks)
    a = torch.randn(slots, 1 if shared_a else experts, n, max_rank, inputs, generator=g)
    b = torch.randn(slots, 1 if shared_b else experts, sum(widths), max_rank, generator=g)
    layout = SliceLayout(tuple(widths))
    for slot, of_slot in enumerate(ranks):
        for s, rank in enumerate(of_slot):
            a[slot, :, s, rank:] = math.nan
            b[slot, :, layout.offsets[s] : layout.offsets[s + 1], rank:] = math.nan
    return MoELoRAWeights(
        a=(a / math.sqrt(inputs)).to(dtype).to(device),
        b=b.to(dtype).to(device),
        ranks=torch.tensor(ranks, dtype=torch.int32, device=device),
        scalings=torch.rand(slots, n, generator=g).to(device) + 0.5,
        layout=layout,
        num_experts=experts,
    )


def make_routing(device, *, slots, num_slots, experts, top_k, ids=None, expert_map=None):
    g = torch.Generator().manual_seed(len(slots))
    if ids is None:
        ids = torch.rand(len(slots), experts, generator=g).topk(top_k, 1).indices.int()
    return MoERouting(
        topk_ids=ids.to(device),
        topk_weights=torch.rand(ids.shape, generator=g).to(device),
        slots=torch.tensor(slots, dtype=torch.int32, device=device),
        num_experts=experts,
        num_slots=num_slots,
        expert_map=None if expert_map is None else expert_map.to(device),
    )


def assert_adds(
    out: torch.Tensor, base: torch.Tensor, want: PairDeltas, dtype: torch.dtype
) -> None:
    """`out` is base plus delta within rounding, and base bit for bit where nothing is added."""
    out, base = out.cpu(), base.cpu()
    worst = (
        (out.double() - base.double() - want.delta).abs() / (want.scale + base.abs() + 1)
    ).max()
    assert worst.item() <= TOLERANCE[dtype]
    assert torch.equal(out[~want.touched], base[~want.touched])
    assert want.touched.any()


@pytest.mark.parametrize(
    ("dtype", "shared", "widths"),
    [
        (torch.float32, False, (20, 20)),
        (torch.float32, True, (20, 20)),
        (torch.float32, False, (33,)),
        *((dtype, True, (20, 20)) for dtype in DTYPES[1:]),
    ],
    ids=str,
)
def test_gate_up(backend, form, dtype, shared, widths):
    n = len(widths)
    weights = make_weights(
        backend.device,
        experts=4,
        ranks=[[7] * n, [1] + [20] * (n - 1), [0] * n],
        max_rank=20,
        inputs=50,
        widths=widths,
        dtype=dtype,
        shared_a=shared,
    )
    routing = make_routing(
        backend.device, slots=[0, 1, -1, 2, 1, 0], num_slots=3, experts=4, top_k=2
    )
    x = torch.randn(6, 50).to(dtype).to(backend.device)
    base = torch.randn(6, 2, sum(widths)).to(dtype).to(backend.device)
    out = backend.gate_up(x, weights, backend.route(routing), base.clone())
    assert_adds(out, base, pair_deltas(x.cpu(), weights, routing), dtype)


@pytest.mark.parametrize("shared", [False, True], ids=["per-expert", "shared-outer"])
@pytest.mark.parametrize("out_form", ["pairs", "pairs-weighted", "rows"], ids=str)
def test_down(backend, form, shared, out_form):
    weights = make_weights(
        backend.device,
        experts=4,
        ranks=[[5], [16], [0]],
        max_rank=16,
        inputs=40,
        widths=(25,),
        dtype=torch.float32,
        shared_b=shared,
    )
    routing = make_routing(backend.device, slots=[0, 1, -1, 2, 1], num_slots=3, experts=4, top_k=2)
    x = torch.randn(5, 2, 40, device=backend.device)
    base = torch.randn((5, 25) if out_form == "rows" else (5, 2, 25), device=backend.device)
    out = backend.down(
        x, weights, backend.route(routing), base.clone(), routed_weights=out_form != "pairs"
    )
    want = pair_deltas(x.cpu(), weights, routing)
    if out_form != "pairs":
        factor = routing.topk_weights.double().cpu().unsqueeze(-1)
        want = PairDeltas(want.delta * factor, want.touched, want.scale)
    if out_form == "rows":
        want = PairDeltas(want.delta.sum(1), want.touched.any(1), want.scale.sum(1))
    assert_adds(out, base, want, torch.float32)


@pytest.mark.parametrize("rows", [False, True], ids=["pairs", "rows"])
def test_overwriting(backend, form, rows):
    """What `out` held before does not matter, and what gets no delta is zero."""
    weights = make_weights(
        backend.device,
        experts=4,
        ranks=[[5], [0]],
        max_rank=8,
        inputs=24,
        widths=(20,),
        dtype=torch.float32,
    )
    routing = make_routing(backend.device, slots=[0, -1, 1], num_slots=2, experts=4, top_k=2)
    x = torch.randn(3, 2, 24, device=backend.device)
    out = torch.full((3, 20) if rows else (3, 2, 20), math.nan, device=backend.device)
    backend.down(x, weights, backend.route(routing), out, accumulate=False)
    want = pair_deltas(x.cpu(), weights, routing)
    if rows:
        factor = routing.topk_weights.double().cpu().unsqueeze(-1)
        want = PairDeltas((want.delta * factor).sum(1), want.touched.any(1), want.scale.sum(1))
    assert_adds(out, torch.zeros_like(out), want, torch.float32)


def test_a_group_larger_than_a_tile(backend, form):
    """40 pairs of one virtual expert: tiles of 32 and 8, in parts of 16."""
    weights = make_weights(
        backend.device,
        experts=2,
        ranks=[[4]],
        max_rank=4,
        inputs=16,
        widths=(16,),
        dtype=torch.float32,
    )
    ids = torch.ones(40, 1, dtype=torch.int32)
    routing = make_routing(backend.device, slots=[0] * 40, num_slots=1, experts=2, top_k=1, ids=ids)
    x, base = (torch.randn(40, 16, device=backend.device) for _ in range(2))
    out = backend.gate_up(x, weights, backend.route(routing), base.unsqueeze(1).clone())
    assert_adds(out, base.unsqueeze(1), pair_deltas(x.cpu(), weights, routing), torch.float32)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
def test_ids_and_slots_out_of_range_are_never_read(backend, form, ids_dtype):
    """K32. NaN weights everywhere but in the one virtual expert that may be used."""
    weights = make_weights(
        backend.device,
        experts=3,
        ranks=[[4], [4]],
        max_rank=4,
        inputs=16,
        widths=(16,),
        dtype=torch.float32,
    )
    for tensor in (weights.a, weights.b):
        kept = tensor[1, 2].clone()
        tensor.fill_(math.nan)
        tensor[1, 2] = kept
    ids = torch.tensor([[2, -1], [3, 2], [2, 1 << 20], [-7, 2]], dtype=ids_dtype)
    routing = make_routing(
        backend.device, slots=[1, 1, 2, -3], num_slots=2, experts=3, top_k=2, ids=ids
    )
    x = torch.randn(4, 16, device=backend.device)
    base = torch.full((4, 2, 16), -0.0, device=backend.device)
    out = backend.gate_up(x, weights, backend.route(routing), base.clone()).cpu()
    live = torch.tensor([[True, False], [False, True], [False, False], [False, False]])
    assert torch.equal(out[~live].view(torch.int32), base.cpu()[~live].view(torch.int32))
    assert torch.isfinite(out).all()
    assert (out[live] != 0).all()


def test_expert_map(backend, form):
    """K37: this rank holds the odd global experts."""
    weights = make_weights(
        backend.device,
        experts=3,
        ranks=[[4]],
        max_rank=4,
        inputs=16,
        widths=(16,),
        dtype=torch.float32,
    )
    mapping = torch.tensor([-1, 0, -1, 1, -1, 2], dtype=torch.int32)
    ids = torch.tensor([[1, 0], [5, 6], [-1, 3]], dtype=torch.int32)
    common = {"slots": [0, 0, 0], "num_slots": 1, "experts": 3, "top_k": 2}
    routing = make_routing(backend.device, ids=ids, expert_map=mapping, **common)
    x, base = (
        torch.randn(3, 16, device=backend.device),
        torch.randn(3, 2, 16, device=backend.device),
    )
    out = backend.gate_up(x, weights, backend.route(routing), base.clone())
    want = pair_deltas(x.cpu(), weights, routing)
    assert_adds(out, base, want, torch.float32)
    assert want.touched[..., 0].tolist() == [[True, False], [True, False], [False, True]]


def test_a_strided_x_is_read_where_it_lies(backend, form):
    weights = make_weights(
        backend.device,
        experts=2,
        ranks=[[4]],
        max_rank=4,
        inputs=16,
        widths=(16,),
        dtype=torch.float32,
    )
    big = torch.randn(3, 40, device=backend.device)
    routing = make_routing(backend.device, slots=[0, 0, -1], num_slots=1, experts=2, top_k=2)
    base = torch.randn(3, 2, 16, device=backend.device)
    route = backend.route(routing)
    strided = backend.gate_up(big[:, 5:21], weights, route, base.clone())
    assert torch.equal(
        strided, backend.gate_up(big[:, 5:21].contiguous(), weights, route, base.clone())
    )


def test_neighbours_change_nothing(backend, form):
    """Other rows' values, NaNs, adapters and experts leave a row's bits alone, at a fixed shape."""
    weights = make_weights(
        backend.device,
        experts=3,
        ranks=[[4, 4], [2, 3]],
        max_rank=4,
        inputs=24,
        widths=(16, 16),
        dtype=torch.float32,
    )
    common = {"num_slots": 2, "experts": 3, "top_k": 2}
    x, base = (
        torch.randn(4, 24, device=backend.device),
        torch.randn(4, 2, 32, device=backend.device),
    )

    def run(x, slots, ids):
        routing = make_routing(
            backend.device, slots=slots, ids=torch.tensor(ids, dtype=torch.int32), **common
        )
        return backend.gate_up(x, weights, backend.route(routing), base.clone())[[0, 3]]

    before = run(x, [0, 1, 0, 1], [[0, 1], [1, 2], [0, 1], [2, 0]])
    x = x.clone()
    x[1:3] = math.nan
    assert torch.equal(before, run(x, [0, -1, 1, 1], [[0, 1], [-1, 0], [2, 1], [2, 0]]))


def test_inputs_are_never_written(backend, form):
    weights = make_weights(
        backend.device,
        experts=3,
        ranks=[[4]],
        max_rank=4,
        inputs=16,
        widths=(16,),
        dtype=torch.float32,
    )
    routing = make_routing(backend.device, slots=[0, -1], num_slots=1, experts=3, top_k=2)
    inputs = (
        torch.randn(2, 2, 16, device=backend.device),
        *(routing.topk_ids, routing.topk_weights, routing.slots, weights.a, weights.b),
    )
    kept = [tensor.clone() for tensor in inputs]
    backend.down(
        inputs[0], weights, backend.route(routing), torch.zeros(2, 16, device=backend.device)
    )
    for tensor, old in zip(inputs, kept, strict=True):
        assert torch.equal(tensor.nan_to_num(), old.nan_to_num())
