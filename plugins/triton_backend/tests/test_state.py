"""What instances and calls that share weights must not share."""

from __future__ import annotations

import pytest
import torch

from lora_core import LoRABatch, SliceLayout, load_backend
from lora_core_triton.backend import TritonBackend

pytestmark = pytest.mark.skipif(
    TritonBackend.unavailable_reason() is not None, reason=str(TritonBackend.unavailable_reason())
)
BATCH = LoRABatch([1, 1], [0, 1], "decode")


def _weights(backend, *, in_features, layout):
    weights = backend.allocate_weights(
        num_slots=2, max_rank=8, in_features=in_features, layout=layout, dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(0)
    weights.a.copy_(torch.randn(weights.a.shape, generator=generator))
    weights.b.copy_(torch.randn(weights.b.shape, generator=generator))
    weights.ranks.fill_(8)
    weights.scalings.fill_(1.0)
    return weights


def test_two_instances_split_sums_with_counters_of_their_own():
    """Micro-batches overlap: with counters in common, one would take the other's sums for its own."""
    first, second = load_backend("triton"), load_backend("triton")
    weights = _weights(first, in_features=1024, layout=SliceLayout((16,)))
    x = torch.randn(2, 1024, generator=torch.Generator().manual_seed(1)).to(first.device)
    for backend in (first, second):
        backend.prepare_batch(BATCH)
        backend.shrink(x, weights)
    first.workspace.sync["arrived"].fill_(99)  # as if sums of the first were half done
    h = second.shrink(x, weights)
    wanted = torch.einsum("trk,tk->tr", weights.a[:, 0].double(), x.double())
    assert torch.allclose(h[:, 0].double(), wanted, rtol=1e-4, atol=1e-3)
    assert (first.workspace.sync["arrived"] == 99).all()
    assert not second.workspace.sync["arrived"].any()


def test_an_expand_of_strided_h_takes_the_strides_of_its_own_h():
    backend = load_backend("triton")
    weights = _weights(backend, in_features=32, layout=SliceLayout((16, 16)))
    backend.prepare_batch(BATCH)
    h = torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(1)).to(backend.device)
    wide = torch.full((2, 4, 24), torch.nan, device=backend.device)
    wide[:, ::2, 8:16] = h
    wanted = backend.expand(h, weights, torch.zeros(2, 32, device=backend.device))
    got = backend.expand(wide[:, ::2, 8:16], weights, torch.zeros(2, 32, device=backend.device))
    assert wanted.any()
    assert torch.equal(got, wanted)
