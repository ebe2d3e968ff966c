"""Experts beside every dense backend: the slots of rows are all they share, so the bits are the same.

Eager, in decode and prefill graphs that were captured without adapters, and while a rank is idle;
experts alone, and behind attention in MLA's absorbed form, which takes kv_b_proj's adapters by its two
corrections.
Graphs are CUDA graphs on a GPU; on a CPU every kernel launch is recorded with its arguments and run
again, which is what a graph does.
"""

from __future__ import annotations

import pytest
import torch

from lora_core import (
    LoRABatch,
    LoRAWeights,
    MoERouting,
    SliceLayout,
    list_backends,
    load_backend,
    token_slots,
)
from lora_core.layers.mla import correct_absorbed_query, correct_absorbed_value
from lora_core.plugins import registry
from lora_core.testing.capture import Captured
from lora_core.testing.moe_case import MoECase, MoEProblem
from lora_core.triton_kit import INTERPRETED, Rule, Tile, TileTable
from lora_core_moe_virtual_experts import tiles
from lora_core_moe_virtual_experts.backend import VirtualExpertsBackend

pytestmark = pytest.mark.skipif(
    VirtualExpertsBackend.unavailable_reason() is not None,
    reason=str(VirtualExpertsBackend.unavailable_reason()),
)
DENSE = [spec.name for spec in list_backends() if len(registry().found["dense"][spec.name]) == 1]
BATCHES = {
    "decode": LoRABatch([1, 1, 1, 1, 1], [0, 1, -1, 0, 1], mode="decode"),
    "prefill": LoRABatch([2, 0, 1, 2], [1, 0, -1, 0], mode="prefill"),
}
ROWS = 6  # one more than the batches have: padding


@pytest.fixture(params=DENSE)
def dense(request):
    backend = load_backend(request.param, device=VirtualExpertsBackend.default_device())
    for kind in backend.capabilities.graphs & BATCHES.keys():
        backend.init_graph(kind, max_requests=8, max_tokens=ROWS)
    return backend


SLOW_HERE = [pytest.mark.slow] if INTERPRETED else []


@pytest.fixture(params=[False, pytest.param(True, marks=SLOW_HERE)], ids=["without-mla", "mla"])
def attention(request):
    return Mla() if request.param else None


@pytest.fixture(params=[False, True], ids=["per-expert", "shared-outer"])
def layer(request, attention, monkeypatch):
    if INTERPRETED:  # as few programs as do the work
        rule = Rule(Tile({"BC": 16, "BK": 32, "SPLITS": 1}), "few programs")
        monkeypatch.setattr(tiles, "SHRINK", TileTable("shrink", tiles.SHRINK.keys, [rule]))
    return Layer(attention, shared=request.param)


class Mla:
    """Absorbed attention of one token over fixed latents, with adapters on kv_b_proj in two slots."""

    HEADS, KEY, VALUE, LATENT, RANK = 2, 8, 8, 16, 4

    def __init__(self) -> None:
        g, device = torch.Generator().manual_seed(2), VirtualExpertsBackend.default_device()
        width = self.HEADS * (self.KEY + self.VALUE)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g).to(device)

        self.base = randn(self.HEADS, self.KEY + self.VALUE, self.LATENT) / 4
        self.weights = LoRAWeights(
            a=randn(2, 1, self.RANK, self.LATENT),
            b=randn(2, width, self.RANK) / 4,
            ranks=torch.tensor([[4], [3]], dtype=torch.int32, device=device),
            scalings=torch.tensor([[0.5], [1.5]], device=device),
            layout=SliceLayout((width,)),
        )
        self.latents = randn(5, self.LATENT)  # of earlier tokens

    def run(self, x, info) -> torch.Tensor:
        """`[T, H]` -> `[T, H]`, H = heads * key width = heads * value width."""
        query = x.view(-1, self.HEADS, self.KEY)
        keys, values = self.base[:, : self.KEY], self.base[:, self.KEY :]
        absorbed = (query.unsqueeze(-1) * keys).sum(2)
        correct_absorbed_query(query, self.weights, info, absorbed, value_dim=self.VALUE)
        scores = (absorbed.unsqueeze(2) * self.latents).sum(-1).softmax(-1)  # [T, heads, tokens]
        latent = (scores.unsqueeze(-1) * self.latents).sum(2)
        out = (latent.unsqueeze(2) * values).sum(-1)
        correct_absorbed_value(latent, self.weights, info, out)
        return x + out.flatten(1)

    def expanded(self, x, slots: list[int]) -> torch.Tensor:
        """The same with every row's own merged weight and expanded keys and values, float64."""
        rows = []
        for row, slot in zip(x.double().cpu(), slots, strict=True):
            weight = self.base.double().cpu()
            if slot >= 0:
                rank = int(self.weights.ranks[slot])
                a, b = self.weights.a[slot, 0, :rank], self.weights.b[slot, :, :rank]
                delta = (b.double() @ a.double() * float(self.weights.scalings[slot])).cpu()
                weight = weight + delta.view(weight.shape)
            both = torch.einsum("hwc,nc->nhw", weight, self.latents.double().cpu())
            keys, values = both.split([self.KEY, self.VALUE], 2)
            scores = torch.einsum("hk,nhk->hn", row.view(self.HEADS, self.KEY), keys).softmax(-1)
            rows.append(row + torch.einsum("hn,nhv->hv", scores, values).flatten())
        return torch.stack(rows)


class Layer:
    """Attention perhaps, then gate_up and down of one experts module with something between them."""

    def __init__(self, attention: Mla | None, *, shared: bool) -> None:
        self.backend, self.attention = VirtualExpertsBackend(), attention
        hidden = Mla.HEADS * Mla.KEY
        case = MoECase(
            slots=(0,) * ROWS, top_k=1, ranks=(4, 3), hidden=hidden, inner=16, shared=shared
        )
        self.up, self.down = (
            MoEProblem(case.but(op=op), self.backend.device) for op in ("gate_up", "down_rows")
        )

    def run(self, info) -> torch.Tensor:
        """With the slots that a prepared batch, or none, gives to rows."""
        x = self.up.x if self.attention is None else self.attention.run(self.up.x, info)
        return self.experts(x, self.local(info))

    def experts(self, x, routing: MoERouting) -> torch.Tensor:
        route = self.backend.route(routing)
        hidden = self.backend.gate_up(x, self.up.weights, route, self.up.base.clone())
        inner = hidden[..., :16] * hidden[..., 16:]
        return self.backend.down(inner, self.down.weights, route, self.down.base.clone())

    def local(self, info) -> MoERouting:
        known = self.up.routing
        return MoERouting(
            topk_ids=known.topk_ids,
            topk_weights=known.topk_weights,
            slots=self.backend.row_slots(info, ROWS),
            num_experts=4,
            num_slots=2,
        )

    def given(self, slots) -> torch.Tensor:
        """The result with these slots, from the reference backend's batch and slots written by hand."""
        known, x = self.up.routing, self.up.x
        if self.attention is not None:
            reference = load_backend("torch", device=self.backend.device)
            batch = LoRABatch([1] * ROWS, slots, mode="decode")
            found = self.attention.run(x, reference.prepare_batch(batch))
            expanded = self.attention.expanded(x, slots)
            torch.testing.assert_close(found.double().cpu(), expanded, rtol=1e-4, atol=1e-4)
            x = found
        return self.experts(
            x,
            MoERouting(
                topk_ids=known.topk_ids,
                topk_weights=known.topk_weights,
                slots=torch.tensor(slots, dtype=torch.int32, device=known.topk_ids.device),
                num_experts=4,
                num_slots=2,
            ),
        )


def rows_of(batch: LoRABatch) -> list[int]:
    slots = [s for s, n in zip(batch.slots, batch.lengths, strict=True) for _ in range(n)]
    return slots + [-1] * (ROWS - len(slots))


@pytest.mark.parametrize("kind", BATCHES)
def test_eager(dense, layer, kind):
    batch = BATCHES[kind]
    found = layer.run(dense.prepare_batch(batch))
    assert torch.equal(found, layer.given(rows_of(batch)))


@pytest.mark.parametrize("kind", BATCHES)
def test_graph(dense, layer, kind):
    batch = BATCHES[kind]
    if kind not in dense.capabilities.graphs:
        assert dense.name not in {"torch", "triton", "csgmv"}
        return
    nothing = LoRABatch([1], [-1], mode=batch.mode)
    dense.prepare_batch(nothing, graph=kind)
    captured = Captured(layer.backend.device, lambda: layer.run(dense.batch_info))
    base = layer.given([-1] * ROWS)
    captured.replay()
    assert torch.equal(captured.result, base)
    dense.prepare_batch(batch, graph=kind)
    captured.replay()
    assert torch.equal(captured.result, layer.given(rows_of(batch)))
    dense.reset_batch_state()
    captured.replay()
    assert torch.equal(captured.result, base), "a stray replay after a reset adds nothing"


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("rows", [0, 3, 6, 45])
def test_slots_of_rows(rows, graph):
    """The same as from the request view in plain torch, padding included."""
    dense = load_backend("torch", device=VirtualExpertsBackend.default_device())
    dense.init_graph("prefill", max_requests=150, max_tokens=64)
    batch = LoRABatch([2, 0, 1, 3] * 4 + [0] * 130, [1, 0, -1, 2] * 4 + [5] * 130)
    info = dense.prepare_batch(batch, graph="prefill" if graph else None)
    found = VirtualExpertsBackend().row_slots(info, rows)
    assert torch.equal(found, token_slots(info, rows))
    assert VirtualExpertsBackend().row_slots(None, rows) is None


def test_idle(dense, layer):
    """No batch: local rows are the base's, rows from other ranks keep their adapters."""
    dense.prepare_batch(BATCHES["decode"])
    dense.reset_batch_state()
    assert layer.local(dense.batch_info).inert
    assert torch.equal(layer.run(dense.batch_info), layer.given([-1] * ROWS))
    assert not torch.equal(layer.given([0, 1, 0, 1, 0, 1]), layer.given([-1] * ROWS))
