"""The whole decoder: what is compared is the same computation, and every row is there."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs CUDA, or TRITON_INTERPRET=1", allow_module_level=True)

from benchmarks import decoder
from benchmarks.decoder import BASE, Base, Decoder, Ours, Point, Shape
from benchmarks.dense import Failures
from benchmarks.timing import Replay

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DENSE = Shape("small", 2, 64, 4, 2, 16, 48, 50)
EXPERTS = Shape("small-experts", 2, 64, 4, 2, 16, 32, 64, experts=8, top_k=2)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(decoder, "CONTEXT", 16)
    monkeypatch.setattr(decoder, "PREFILL_TOKENS", 16)


def test_router_is_softmax_over_the_largest():
    model = Decoder(EXPERTS, device=DEVICE, dtype=torch.float32)
    x = torch.randn(5, 64, device=DEVICE)
    ids, factors = model._route(0, x)
    largest, where = (x @ model.routers[0].T).topk(2, 1)
    order = where.argsort(1)
    assert torch.equal(ids.long(), where.gather(1, order))
    torch.testing.assert_close(factors, largest.softmax(1).gather(1, order))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("shape", [DENSE, EXPERTS], ids=lambda shape: shape.name)
def test_adapters_are_applied_at_every_site(shape, phase):
    """The same hidden states as a base whose weights are merged with one adapter, for all requests."""
    point = Point(phase, 2, 1)
    model = Decoder(shape, device=DEVICE, dtype=torch.float32)
    cells = {n: point.cell(n, k, widths) for n, (k, widths) in shape.sites.items()}
    pools = decoder._pools(model, cells, 1)
    name = "torch+torch" if shape.experts else "torch"
    step = model.step(point)
    found = step(Ours(model, name, cells, pools, point))[1]
    before = step(Base(model))[1]
    for layer in range(shape.layers):
        for site, base in model.bases[layer].items():
            adapters, row = pools.linear[layer][site], 0
            for s, width in enumerate(cells[site].widths):
                span = slice(row, row + width)
                base.weight[span] += adapters.b[0][span] @ adapters.a[0][s]
                row += width
        if shape.experts:
            core = model.cores[layer]
            for weight, own in ((core.gate_up, pools.gate_up), (core.down, pools.down)):
                width = own[layer].layout.widths[0]
                for s in range(own[layer].layout.num_slices):
                    span = slice(s * width, (s + 1) * width)
                    weight.data[:, span] += own[layer].b[0][:, span] @ own[layer].a[0][:, s]
    merged = step(Base(model))[1]
    assert (merged - before).norm() > 0.1 * before.norm()
    torch.testing.assert_close(found, merged, rtol=1e-3, atol=1e-3)


def test_rows_of_a_point():
    rows = [
        row
        for found in decoder.rows(
            EXPERTS, ["torch+torch"], None, device=DEVICE, points=[Point("decode", 2, 2)],
            dtype=torch.float32, seconds=0.01,
        )
        for row in found
    ]  # fmt: skip
    assert [(row["backend"], row["adapters"]) for row in rows] == [
        ("torch+torch", 2),
        (decoder.OUT_OF_PLACE, 0),
    ]
    assert all(row["tokens_per_second"] > 0 for row in rows)


def test_a_contender_that_leaves_its_delta_out_is_dropped():
    def replay(value):
        return Replay(lambda: None, [torch.zeros(1), torch.full((4,), value)], list)

    replays = {BASE: replay(0.0), "a": replay(1.0), "b": replay(1.1), "lazy": replay(0.0)}
    failures = Failures()
    decoder._check(replays, failures)
    assert list(replays) == [BASE, "a", "b"]
    assert "lazy" in failures.found
