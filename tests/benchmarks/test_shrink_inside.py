"""The product with shrink and expand inside, against float64: ranks past 16, scales, NaN past every rank."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from benchmarks.research.shrink_inside import product
from lora_core.triton_kit import INTERPRETED
from lora_core.weights import LoRAWeights, SliceLayout

TILES = [(0, 1.0), (-1, 0.0), (1, 0.5), (2, 1.0), (-1, 0.0)]


@pytest.mark.skipif(not INTERPRETED, reason="the kernel was never run on a GPU")
@pytest.mark.parametrize("widths", [(64, 32, 32), (64, 64), (32,)], ids=str)
def test_every_tile_has_its_own_delta(widths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layout, n, k = SliceLayout(widths), len(widths), 72
    x, w = torch.randn(80, k).half(), (torch.randn(sum(widths), k) * k**-0.5).half()
    a, b = (torch.randn(3, n, 24, k) * k**-0.5).half(), torch.randn(3, sum(widths), 24).half()
    ranks = torch.tensor([[16, 3, 0], [13, 24, 20], [8, 8, 8]], dtype=torch.int32)[:, :n]
    expected = x.double() @ w.double().mT
    scalings = torch.rand(3, n) + 0.5
    for i, (slot, scale) in enumerate(TILES):
        rows = slice(16 * i, 16 * i + 16)
        for s, (begin, end) in enumerate(itertools.pairwise(layout.offsets)):
            if slot >= 0:
                rank = int(ranks[slot, s])
                h = x[rows].double() @ a[slot, s, :rank].double().mT
                delta = h @ b[slot, begin:end, :rank].double().mT
                expected[rows, begin:end] += scale * float(scalings[slot, s]) * delta
    for slot, s in itertools.product(range(3), range(n)):
        a[slot, s, ranks[slot, s] :] = torch.nan
        b[slot, layout.offsets[s] : layout.offsets[s + 1], ranks[slot, s] :] = torch.nan
    weights = LoRAWeights(a, b, ranks.contiguous(), scalings, layout)
    bits = [(slot, int(np.float32(scale).view(np.int32))) for slot, scale in TILES]
    plan, sync = torch.tensor(bits, dtype=torch.int32), torch.zeros(7, dtype=torch.int32)
    out = product(x, w, weights, plan, sync, programs=3, bm=16, bn=32, bk=32, bh=16, band=2)
    assert float((out.double() - expected).norm() / expected.norm()) < 6e-4
    assert not sync.any()
