"""The CPU form for few rows: the right sum, and bits that no neighbour can change."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lora_core import LoRABatch, SliceLayout, load_backend
from lora_core.few_rows import MAX_ROWS, StackedWeights
from lora_core.weights import LoRAWeights

K, R, S = 40, 16, 5
RANKS = [3, 16, 0, 8, 9]
LAYOUTS = {"plain": (24,), "qkv": (24, 8, 8)}


@pytest.fixture
def backend():
    return load_backend("torch", device="cpu")


def stacked(backend, widths, seed=0) -> StackedWeights:
    """Random adapters of RANKS, the second slice of each one rank smaller, garbage everywhere else."""
    weights = backend.allocate_weights(
        num_slots=S, max_rank=R, in_features=K, layout=SliceLayout(widths), dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(seed)
    weights.a.fill_(torch.nan)
    weights.b.fill_(torch.nan)
    for slot, rank in enumerate(RANKS):
        for s in range(len(widths)):
            mine = max(0, rank - s)
            weights.ranks[slot, s] = mine
            weights.scalings[slot, s] = 0.5 + slot + s
            weights.a[slot, s, :mine] = torch.randn(mine, K, generator=generator)
            span = slice(weights.layout.offsets[s], weights.layout.offsets[s + 1])
            weights.b[slot, span, :mine] = torch.randn(widths[s], mine, generator=generator)
    return weights


def expected_delta(x, weights, row_slots, row_scales) -> torch.Tensor:
    """Row by row in float64."""
    out = torch.zeros(len(x), weights.layout.out_features, dtype=torch.float64)
    for row, slot in enumerate(row_slots):
        if slot < 0:
            continue
        for s in range(weights.layout.num_slices):
            rank = int(weights.ranks[slot, s])
            span = slice(weights.layout.offsets[s], weights.layout.offsets[s + 1])
            h = weights.a[slot, s, :rank].double() @ x[row].double()
            factor = float(weights.scalings[slot, s]) * row_scales[row]
            out[row, span] = factor * (weights.b[slot, span, :rank].double() @ h)
    return out


BATCHES = {
    "all slots": ([1, 1, 1, 1, 1], [4, 3, 2, 1, 0]),
    "base rows between": ([1, 1, 1, 1], [-1, 0, -1, 3]),
    "base first, ragged": ([2, 0, 3, 1], [-1, 1, 4, 0]),
    "one row": ([1], [1]),
    "rank 0 alone": ([2], [2]),
    "nobody": ([2, 1], [-1, -1]),
}


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("scales", [False, True], ids=["", "scales"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_delta_is_that_of_float64(backend, layout, batch, scales, padding):
    lengths, slots = BATCHES[batch]
    factors = [1.0 + i / 4 for i in range(len(slots))] if scales else None
    weights = stacked(backend, LAYOUTS[layout])
    base = torch.nn.Linear(K, weights.layout.out_features)
    x = torch.randn(sum(lengths) + padding, K)
    row_slots = [slot for slot, length in zip(slots, lengths, strict=True) for _ in range(length)]
    row_scales = [
        1.0 if factors is None else factors[i]
        for i, length in enumerate(lengths)
        for _ in range(length)
    ]
    backend.prepare_batch(LoRABatch(lengths=lengths, slots=slots, scales=factors))
    with torch.no_grad():
        plain = base(x)
        fused = backend.linear(x, base, weights)
        split = backend.expand(backend.shrink(x, weights), weights, base(x))
    rows = len(row_slots)
    delta = expected_delta(x, weights, row_slots, row_scales)[:rows]
    torch.testing.assert_close(
        (fused - plain)[:rows].double(), delta, rtol=1e-5, atol=1e-5 * (1 + delta.abs().max())
    )
    assert torch.equal(fused[:rows], split[:rows])
    base_rows = [row for row in range(len(x)) if row >= rows or row_slots[row] < 0]
    assert torch.equal(fused[base_rows], plain[base_rows])


@pytest.mark.parametrize("max_rank", [1, 7, 8, 9, 16, 20, 64])
def test_bands_cover_every_rank_once(backend, max_rank):
    weights = backend.allocate_weights(
        num_slots=2,
        max_rank=max_rank,
        in_features=8,
        layout=SliceLayout((4,)),
        dtype=torch.float32,
    )
    weights.a.copy_(torch.arange(weights.a.numel()).view_as(weights.a))
    x = torch.randint(-3, 4, (3, 8)).float()  # small integers: every order of the sum is exact
    weights.ranks.fill_(max_rank)
    backend.prepare_batch(LoRABatch(lengths=[1, 2], slots=[1, 0]))
    h = backend.shrink(x, weights)
    expected = torch.stack([weights.a[slot, 0] @ x[row] for row, slot in enumerate([1, 0, 0])])
    assert torch.equal(expected, h[:, 0])
    assert sum(product.shape[1] for product in weights.products) == 2 * max_rank


def test_the_form_is_taken_up_to_its_limits(backend):
    def allocate(slots, dtype=torch.float32) -> LoRAWeights:
        return backend.allocate_weights(
            num_slots=slots, max_rank=16, in_features=8, layout=SliceLayout((8,)), dtype=dtype
        )

    assert isinstance(allocate(32), StackedWeights)
    assert not isinstance(allocate(33), StackedWeights)
    assert not isinstance(allocate(8, torch.bfloat16), StackedWeights)


@pytest.mark.parametrize("rows", [MAX_ROWS, MAX_ROWS + 1])
def test_both_sides_of_the_row_limit_agree_with_contiguous_weights(backend, rows):
    weights = stacked(backend, (24,))
    plain = LoRAWeights(
        a=weights.a.contiguous(),
        b=weights.b.contiguous(),
        ranks=weights.ranks,
        scalings=weights.scalings,
        layout=weights.layout,
    )
    base = torch.nn.Linear(K, 24)
    x = torch.randn(rows, K)
    backend.prepare_batch(LoRABatch(lengths=[1] * rows, slots=[i % 6 - 1 for i in range(rows)]))
    with torch.no_grad():
        torch.testing.assert_close(
            backend.linear(x, base, weights), backend.linear(x, base, plain), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("neighbours", [[0, 1, 2, 3], [4, 4, 4, 4], [-1, -1, -1, -1]])
def test_a_row_has_the_same_bits_whoever_its_neighbours_are(backend, neighbours):
    weights = stacked(backend, (24,))
    other = stacked(backend, (24,), seed=1)
    for tensor, replaced in ((other.a, weights.a), (other.b, weights.b)):
        tensor[3] = replaced[3]  # the row's own adapter stays, every other one changes
    x = torch.randn(5, K)
    y = x.clone()
    y[:4] = torch.inf
    results = []
    for rows, pool, slots in ((x, weights, [1, 1, 1, 1, 3]), (y, other, [*neighbours, 3])):
        out = torch.full((5, 24), -0.0)
        backend.prepare_batch(LoRABatch(lengths=[1] * 5, slots=slots))
        results.append(backend.expand(backend.shrink(rows, pool), pool, out)[4])
    assert torch.equal(*results)


def test_new_ranks_and_scalings_apply_at_once(backend):
    """Plans are kept by value: an adapter that moves into a slot in place must not meet an old one."""
    weights = stacked(backend, (24,))
    x = torch.randn(2, K)
    backend.prepare_batch(LoRABatch(lengths=[2], slots=[1]))
    before = backend.expand(backend.shrink(x, weights), weights, torch.zeros(2, 24))
    weights.scalings[1] *= 2
    doubled = backend.expand(backend.shrink(x, weights), weights, torch.zeros(2, 24))
    weights.ranks[1] = 0
    nothing = backend.expand(backend.shrink(x, weights), weights, torch.zeros(2, 24))
    torch.testing.assert_close(doubled, 2 * before)
    assert torch.equal(nothing, torch.zeros(2, 24))


def test_replaced_fields_keep_the_layout(backend):
    weights = stacked(backend, (24,))
    scaled = dataclasses.replace(weights, output_scale=torch.ones(S, 24))
    assert isinstance(scaled, StackedWeights)
    assert scaled.products[1].data_ptr() == weights.products[1].data_ptr()


@pytest.mark.parametrize("slots", [[1, -1, 3, -1, 4], [-1, -1, -1, 1, -1]], ids=["most", "few"])
def test_rows_without_a_delta_keep_their_zeros_signs(backend, slots):
    weights = stacked(backend, (24,))
    base_rows = [row for row, slot in enumerate(slots) if slot < 0]
    out = torch.full((6, 24), -0.0)
    out[:, ::2] = 0.0
    before = out.clone().view(torch.int32)
    backend.prepare_batch(LoRABatch(lengths=[1] * 5, slots=slots))
    h = backend.shrink(torch.randn(6, K), weights)
    backend.expand(h, weights, out)
    assert torch.equal(out.view(torch.int32)[[*base_rows, 5]], before[[*base_rows, 5]])
    assert not torch.equal(out.view(torch.int32), before)
