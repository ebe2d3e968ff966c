"""What is this backend's own, beside the contract: its segments, its two ways to sum K, its graphs."""

from __future__ import annotations

import pytest
import torch

from lora_core import LoRABatch, LoRAWeights, SliceLayout, list_backends
from lora_core.errors import BatchMismatchError, UnsupportedOpError
from lora_core_csgmv import launches, tiles
from lora_core_csgmv.backend import CsgmvBackend

runs_here = pytest.mark.skipif(
    CsgmvBackend.unavailable_reason() is not None,
    reason=f"csgmv cannot run here: {CsgmvBackend.unavailable_reason()}",
)


@pytest.fixture
def backend():
    return CsgmvBackend()


def weights_for(
    backend, *, in_features=96, widths=(64,), max_rank=8, slots=3, dtype=torch.float32, seed=0
):
    generator = torch.Generator().manual_seed(seed)
    layout = SliceLayout(widths)
    a = torch.randn(slots, len(widths), max_rank, in_features, generator=generator)
    b = torch.randn(slots, layout.out_features, max_rank, generator=generator)
    ranks = torch.tensor(
        [[(max_rank - 3 * s - i) % max_rank + 1 for i in range(len(widths))] for s in range(slots)]
    )
    return LoRAWeights(
        a=a.to(backend.device, dtype),
        b=b.to(backend.device, dtype),
        ranks=ranks.to(backend.device, torch.int32),
        scalings=torch.full((slots, len(widths)), 0.5, device=backend.device),
        layout=layout,
    )


def inputs(backend, rows, columns=96, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(backend.device, dtype)


@runs_here
def test_segments_are_not_requests(backend):
    info = backend.prepare_batch(LoRABatch([40, 3], [0, 1]))
    assert info.seg_indptr.tolist() == [0, 16, 32, 40, 43]
    assert info.seg_slots.tolist() == [0, 0, 0, 1]
    assert info.permutation.tolist() == list(range(43))
    assert info.req_seg_indptr.tolist() == [0, 40, 43]
    assert info.req_slots.tolist() == [0, 1]


@runs_here
def test_the_request_view_is_exact_in_a_graph_and_its_tail_is_empty(backend):
    backend.init_graph("prefill", max_requests=5, max_tokens=64)
    backend.prepare_batch(LoRABatch([20, 20, 20, 2, 2], [2, 1, 0, 2, 1]), graph="prefill")
    info = backend.prepare_batch(LoRABatch([40, 3], [0, 1]), graph="prefill")
    assert info.seg_slots.tolist() == [0, 0, 0, 1]
    assert (info.req_seg_indptr.tolist(), info.req_slots.tolist()) == ([0, 40, 43], [0, 1])
    table = info.request_table()
    assert table.seg_indptr.tolist() == [0, 40, 43, 43, 43, 43]
    assert table.slots.tolist() == [0, 1, -1, -1, -1]


@runs_here
def test_requests_of_one_adapter_share_a_segment(backend):
    info = backend.prepare_batch(LoRABatch([1] * 12, [0, 1, -1] * 4, "decode"))
    assert info.seg_slots.tolist() == [0, 1]
    assert info.permutation.tolist() == [0, 3, 6, 9, 1, 4, 7, 10]


def test_ranks_are_summed_alike_in_every_tile_of_a_gpu():
    """Chains of 128 are whole steps of every tile of 16 bits; float32, summed step by step, has one step."""

    def steps(size):
        return {
            tiles.EXPAND.pick("sm90", rows=1 << n, width=64, bytes=size)["BLOCK_R"]
            for n in range(16)
        }

    assert all(128 % step == 0 for step in steps(2))
    assert steps(4) == {16}


@runs_here
def test_both_ways_to_sum_k_give_the_same_bits(backend, monkeypatch):
    """Split over programs and reduced by the last, or summed by one: a function of K and rank alone."""
    weights = weights_for(backend, in_features=1536, widths=(40, 24))
    x = inputs(backend, 7, 1536)
    backend.prepare_batch(LoRABatch([3, 1, 3], [1, -1, 0]))
    h = torch.empty(7, 2, 8, device=backend.device)
    arguments = (x, weights, h, backend.workspace.sync["arrivals"], backend.batch_info.segments)
    # three parts of K, of each row
    assert launches.shrink_call(backend._chip, *arguments).partials == 3 * 16
    split = backend.shrink(x, weights)
    monkeypatch.setattr(launches, "ARRIVALS", 0)  # no counters: one program per segment
    launches._sites.clear()
    assert launches.shrink_call(backend._chip, *arguments).partials == 0
    whole = backend.shrink(x, weights)
    launches._sites.clear()
    for rows, slot in ((slice(0, 3), 1), (slice(4, 7), 0)):
        for s, rank in enumerate(weights.ranks[slot].tolist()):
            assert torch.equal(whole[rows, s, :rank], split[rows, s, :rank])
            wanted = x[rows].double() @ weights.a[slot, s, :rank].double().T
            assert torch.allclose(split[rows, s, :rank].double(), wanted, rtol=1e-4, atol=1e-3)
    assert not backend.workspace.sync["arrivals"].any()


@runs_here
def test_a_captured_extent_serves_more_segments_than_it_saw(backend):
    """The launch of a graph is fixed when it is captured: here one program must do all the work."""
    weights, x = weights_for(backend), inputs(backend, 24)
    batch = LoRABatch([2, 20, 1, 1], [2, 0, -1, 1], "prefill")
    eager = backend.prepare_batch(batch)
    wanted = backend.expand(
        backend.shrink(x, weights), weights, torch.zeros(24, 64, device=backend.device)
    )
    backend.init_graph("prefill", max_requests=4, max_tokens=24)
    info = backend.prepare_batch(batch, graph="prefill")
    assert eager.segments.bound == 4
    assert info.segments.bound >= 4
    backend._programs = lambda units, segments: 1
    found = backend.expand(
        backend.shrink(x, weights), weights, torch.zeros(24, 64, device=backend.device)
    )
    assert torch.equal(wanted, found)


@runs_here
def test_a_replay_after_reset_adds_nothing(backend):
    weights, x = weights_for(backend), inputs(backend, 8)
    backend.init_graph("decode", max_requests=8, max_tokens=8)
    info = backend.prepare_batch(
        LoRABatch([1] * 8, [0, 1, 2, 0, 1, 2, 0, 1], "decode"), graph="decode"
    )
    h, out = backend.shrink(x, weights), torch.zeros(8, 64, device=backend.device)
    backend.reset_batch_state()
    # what a captured launch would do
    backend._expand(h, weights, launches.site_of(weights), out, info.segments)
    assert not out.any()
    backend.prepare_batch(LoRABatch([1] * 8, [0, 1, 2, 0, 1, 2, 0, 1], "decode"), graph="decode")
    with pytest.raises(UnsupportedOpError):
        backend.init_graph("training", max_requests=1, max_tokens=1)


@runs_here
def test_a_failed_prepare_leaves_a_dead_graph(backend):
    weights, x = weights_for(backend), inputs(backend, 4)
    backend.init_graph("decode", max_requests=4, max_tokens=4)
    info = backend.prepare_batch(LoRABatch([1] * 4, [0, 1, 2, 0], "decode"), graph="decode")
    h, out = backend.shrink(x, weights), torch.zeros(4, 64, device=backend.device)
    with pytest.raises(Exception, match="exceeds init_graph"):
        backend.prepare_batch(LoRABatch([1] * 5, [0] * 5, "decode"), graph="decode")
    assert backend.batch_info is None
    backend._expand(h, weights, launches.site_of(weights), out, info.segments)
    assert not out.any()


@runs_here
def test_a_graph_kind_left_for_another_is_dead(backend):
    weights, x = weights_for(backend), inputs(backend, 4)
    backend.init_graph("decode", max_requests=4, max_tokens=4)
    info = backend.prepare_batch(LoRABatch([1] * 4, [0, 1, 2, 0], "decode"), graph="decode")
    h, out = backend.shrink(x, weights), torch.zeros(4, 64, device=backend.device)
    backend.prepare_batch(LoRABatch([2, 2], [0, 1]))
    backend._expand(h, weights, launches.site_of(weights), out, info.segments)
    assert not out.any()


@runs_here
def test_rows_past_the_tensor_are_dropped(backend):
    """A graph captured for 4 rows, replayed for a batch of 8, must not write past its tensors."""
    weights = weights_for(backend)
    backend.init_graph("decode", max_requests=8, max_tokens=8)
    info = backend.prepare_batch(LoRABatch([1] * 8, [0] * 8, "decode"), graph="decode")
    h = torch.ones(4, 1, 8, device=backend.device)
    memory = torch.zeros(8, 64, device=backend.device)
    backend._expand(h, weights, launches.site_of(weights), memory[:4], info.segments)
    assert memory[:4].any(dim=1).all()
    assert not memory[4:].any()


@runs_here
def test_a_slot_that_the_weights_lack_is_named(backend):
    backend.prepare_batch(LoRABatch([1, 1], [0, 7], "decode"))
    with pytest.raises(BatchMismatchError, match="names slot 7"):
        backend.shrink(inputs(backend, 2), weights_for(backend))


@runs_here
def test_allocated_b_has_contiguous_columns(backend):
    weights = backend.allocate_weights(
        num_slots=2, max_rank=8, in_features=16, layout=SliceLayout((24, 8)), dtype=torch.float32
    )
    assert weights.b.shape == (2, 32, 8)
    assert weights.b.stride() == (256, 1, 32)


@pytest.mark.parametrize(
    ("in_features", "length"),
    [
        (4096, 512),
        (14336, 512),
        (3584, 512),
        (768, 256),
        (100, 128),
        (7, 128),
        (2049, 512),
        (600, 512),
    ],
)
def test_parts_of_k_follow_from_k(in_features, length):
    assert tiles.split_length(in_features) == length


def test_a_sum_is_never_one_step():
    """A loop of one step would be folded into the sum around it, and rounded otherwise."""
    shortest = min(tiles.split_length(k) for k in range(1, 5000))
    assert shortest == tiles.MIN_SPLIT
    assert all(
        shortest % (2 * min(tile["BLOCK_K"], shortest // 2)) == 0 for tile in tiles.SHRINK.tiles()
    )


def test_tiles_of_64_rows_stay_where_their_bits_were_compared():
    """From 64 rows on another instruction multiplies: on Hopper it gave the bits of the other, elsewhere who knows."""
    rules = (*tiles.SHRINK.rules, *tiles.EXPAND.rules)
    assert all(rule.tile["BLOCK_T"] < 64 or rule.family == "sm90" for rule in rules)


def test_listing_names_the_backend_and_loads_nothing():
    spec = next(spec for spec in list_backends() if spec.name == "csgmv")
    assert spec.target == "lora_core_csgmv.backend:CsgmvBackend"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("max_rank", [16, 64, 128])
def test_bits_do_not_depend_on_tiles(backend, dtype, max_rank):
    """A request alone, and among so many rows that other tiles and the other way to sum K are taken."""
    weights = weights_for(
        backend, in_features=2048, widths=(384, 128), max_rank=max_rank, dtype=dtype
    )
    x, base = inputs(backend, 5000, 2048, dtype), inputs(backend, 5000, 512, dtype, seed=2)
    backend.init_graph("prefill", max_requests=3, max_tokens=5000)
    found = []
    for rows, graph in ((5, None), (5, "prefill"), (1500, None), (5000, None), (5000, "prefill")):
        backend.prepare_batch(LoRABatch([5, rows - 5], [1, 2]), graph=graph)
        h = backend.shrink(x[:rows], weights)
        out = backend.expand(h, weights, base[:rows].clone())
        live = [h[:5, s, :rank] for s, rank in enumerate(weights.ranks[1].tolist())]
        found.append(torch.cat([out[:5].flatten().float(), *(part.flatten() for part in live)]))
    for other in found[1:]:
        assert torch.equal(found[0].view(torch.int32), other.view(torch.int32))
    wanted = x[:5].double() @ weights.a[1, 0].double().T
    assert torch.allclose(live[0].double(), wanted[:, : live[0].shape[1]], rtol=1e-2, atol=1e-1)


def test_no_step_of_shrink_is_longer_than_a_chain():
    """A longer one would be summed in one go: other bits, and those of a long chain."""
    assert all(rule.tile["BLOCK_K"] <= 128 for rule in tiles.SHRINK.rules)
