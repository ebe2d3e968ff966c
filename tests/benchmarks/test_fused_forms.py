"""The decode form against a loop over rows: mixed ranks, base rows, padding, scales, NaN wherever nothing lies.

Runs in the interpreter (`TRITON_INTERPRET=1`) or on a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from benchmarks.research.fused.backend import FusedBackend
from lora_core import LoRABatch
from lora_core.weights import LoRAWeights, SliceLayout

RANKS = (16, 0, 33, 8)
PADDING = 3

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        FusedBackend.unavailable_reason() is not None, reason="no CUDA device, and not interpreted"
    ),
]


@pytest.fixture
def backend() -> FusedBackend:
    return FusedBackend()


def pool(backend: FusedBackend, widths: tuple[int, ...], k: int, dtype: torch.dtype) -> LoRAWeights:
    weights = backend.allocate_weights(
        num_slots=len(RANKS), max_rank=40, in_features=k, layout=SliceLayout(widths), dtype=dtype
    )
    generator = torch.Generator().manual_seed(0)
    for tensor in (weights.a, weights.b, weights.scalings):
        tensor.fill_(float("nan"))
    for slot, rank in enumerate(RANKS):
        a = torch.randn(len(widths), rank, k, generator=generator) * k**-0.5
        weights.a[slot, :, :rank] = a.to(weights.a)
        weights.b[slot, :, :rank] = torch.randn(sum(widths), rank, generator=generator).to(
            weights.b
        )
        weights.ranks[slot] = rank
        weights.scalings[slot] = torch.arange(1, len(widths) + 1) / 4
    return weights


def linear(k: int, n: int, weights: LoRAWeights, *, bias: bool) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(k, n, bias=bias).to(weights.a).requires_grad_(requires_grad=False)


def expected(x: Tensor, base: nn.Linear, weights: LoRAWeights, batch: LoRABatch) -> Tensor:
    out = x.double() @ base.weight.double().mT
    if base.bias is not None:
        out += base.bias.double()
    row = 0
    for i, (length, slot) in enumerate(zip(batch.lengths, batch.slots, strict=True)):
        for t in range(row, row + length if slot >= 0 else row):
            for s, (start, end) in enumerate(itertools.pairwise(weights.layout.offsets)):
                rank = RANKS[slot]
                h = weights.a[slot, s, :rank].double() @ x[t].double()
                delta = weights.b[slot, start:end, :rank].double() @ h
                scale = 1.0 if batch.scales is None else batch.scales[i]
                out[t, start:end] += scale * weights.scalings[slot, s].double() * delta
        row += length
    return out


def check(out: Tensor, reference: Tensor) -> None:
    assert out.dtype in (torch.float16, torch.float32)
    limit = 2e-3 if out.dtype == torch.float16 else 1e-5
    assert float((out.double() - reference).norm() / reference.norm()) < limit


DECODE_SLOTS = (
    [0, 2, -1, 2, 0, 1, -1, 3],
    [2] * 20,
    [-1, -1, -1],
    [i % 4 for i in range(33)],
    [3],
)


@pytest.mark.parametrize("slots", DECODE_SLOTS, ids=lambda slots: f"T{len(slots)}")
@pytest.mark.parametrize(
    ("widths", "k", "dtype"),
    [
        ((64, 32, 32), 128, torch.float16),
        ((50,), 100, torch.float32),
        ((33, 31), 72, torch.float16),
    ],
    ids=["even", "odd-f32", "odd-slices"],
)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_decode(
    backend: FusedBackend,
    slots: Sequence[int],
    widths: tuple[int, ...],
    k: int,
    dtype: torch.dtype,
    bias: bool,
) -> None:
    weights = pool(backend, widths, k, dtype)
    base = linear(k, sum(widths), weights, bias=bias)
    x = torch.randn(len(slots) + PADDING, k).to(weights.a)
    batch = LoRABatch(
        [1] * len(slots), slots, "decode", scales=[1.0 + i / 8 for i in range(len(slots))]
    )
    backend.prepare_batch(batch)
    check(backend.linear(x, base, weights), expected(x, base, weights, batch))
    assert not backend.workspace.sync["fused"].any()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # inf * 0
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_decode_keeps_a_neighbours_weights_out(backend: FusedBackend, poison: float) -> None:
    weights = pool(backend, (64, 32, 32), 128, torch.float16)
    base = linear(128, 128, weights, bias=False)
    slots = [0, 2, -1, 2, 0, 1, -1, 3] * 3
    x = torch.randn(len(slots), 128).to(weights.a)
    backend.prepare_batch(LoRABatch([1] * len(slots), slots, "decode"))
    before = backend.linear(x, base, weights)
    weights.b[2, 5, 3] = poison
    after = backend.linear(x, base, weights)
    others = [t for t, slot in enumerate(slots) if slot != 2]
    assert torch.equal(after[others], before[others])
    assert not after[1, 5].isfinite()


def test_a_base_without_a_plain_weight_is_called(backend: FusedBackend) -> None:
    weights = pool(backend, (64,), 128, torch.float16)
    base = linear(128, 64, weights, bias=False)
    called = []

    class Quantised:
        weight = None
        bias = None

        def __call__(self, x: Tensor) -> Tensor:
            called.append(x)
            return base(x)

    x = torch.randn(4, 128).to(weights.a)
    batch = LoRABatch([1] * 4, [0, -1, 2, 1], "decode")
    backend.prepare_batch(batch)
    check(backend.linear(x, Quantised(), weights), expected(x, base, weights, batch))
    assert len(called) == 1
