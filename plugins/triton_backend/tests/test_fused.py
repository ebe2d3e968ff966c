"""The product with the expand inside, against a float64 oracle and a plain reading of the plan.

The conformance suite covers the contract; these cases aim at the seams: tiles that straddle requests,
ranks past the first block, and what may and may not decide which form a site takes. Runs in the
interpreter (`TRITON_INTERPRET=1`) or on a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import lora_core_triton.fused_backend as fused
from lora_core import LoRABatch, load_backend
from lora_core.errors import UnsupportedOpError
from lora_core.triton_kit import INTERPRETED
from lora_core.weights import LoRAWeights, SliceLayout
from lora_core_triton import fused_plan
from lora_core_triton.fused_backend import FusedTritonBackend
from lora_core_triton.fused_tables import PLAN_ROWS, column_step

RANKS = (16, 0, 33, 8)
PADDING = 3
WIDTHS = (64, 32, 32) if INTERPRETED else (512, 256, 256)
K = 72 if INTERPRETED else 264
SCALE = PLAN_ROWS // 16  # lengths below are given for tiles of 16 rows

on_device = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        FusedTritonBackend.unavailable_reason() is not None,
        reason=str(FusedTritonBackend.unavailable_reason()),
    ),
]
needs_device: Callable[[Any], Any] = lambda test: [test := mark(test) for mark in on_device][-1]  # noqa: E731


class Site:
    """One linear site with a pool of adapters; everything past a rank is NaN."""

    def __init__(
        self,
        backend: Any,
        *,
        widths: tuple[int, ...] = WIDTHS,
        k: int = K,
        dtype: torch.dtype = torch.float16,
        bias: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        layout = SliceLayout(widths)
        self.backend = backend
        self.weights: LoRAWeights = backend.allocate_weights(
            num_slots=len(RANKS), max_rank=40, in_features=k, layout=layout, dtype=dtype
        )
        for tensor in (self.weights.a, self.weights.b, self.weights.scalings):
            tensor.fill_(torch.nan)
        for slot, rank in enumerate(RANKS):
            a = torch.randn(len(widths), rank, k, generator=generator) * k**-0.5
            b = torch.randn(sum(widths), rank, generator=generator)
            self.weights.a[slot, :, :rank] = a.to(self.weights.a)
            self.weights.b[slot, :, :rank] = b.to(self.weights.b)
            self.weights.ranks[slot] = rank
            self.weights.scalings[slot] = torch.arange(1, len(widths) + 1) / 4
        torch.manual_seed(1)
        self.base = nn.Linear(k, sum(widths), bias=bias).to(self.weights.a).requires_grad_(False)

    def x(self, rows: int) -> Tensor:
        generator = torch.Generator().manual_seed(rows)
        return torch.randn(rows, self.base.in_features, generator=generator).to(self.weights.a)

    def linear(self, x: Tensor, batch: LoRABatch, base: Any = None) -> Tensor:
        self.backend.prepare_batch(batch)
        out: Tensor = self.backend.linear(x, base or self.base, self.weights)
        return out

    def expected(self, x: Tensor, batch: LoRABatch) -> Tensor:
        out = x.double() @ self.base.weight.double().mT
        if self.base.bias is not None:
            out += self.base.bias.double()
        row = 0
        for i, (length, slot) in enumerate(zip(batch.lengths, batch.slots, strict=True)):
            rows = slice(row, row + length)
            for s, (start, end) in enumerate(itertools.pairwise(self.weights.layout.offsets)):
                if slot >= 0:
                    rank = RANKS[slot]
                    h = x[rows].double() @ self.weights.a[slot, s, :rank].double().mT
                    delta = h @ self.weights.b[slot, start:end, :rank].double().mT
                    scale = 1.0 if batch.scales is None else batch.scales[i]
                    out[rows, start:end] += scale * self.weights.scalings[slot, s].double() * delta
            row += length
        return out


@pytest.fixture(autouse=True)
def _small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small batches have a product, on a GPU as in the interpreter."""
    monkeypatch.setattr(fused, "FUSED_FROM", 24)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every product that was computed."""
    seen: list[int] = []
    real = fused.product

    def product(x: Tensor, *args: Any) -> Tensor:
        seen.append(len(x))
        return real(x, *args)

    monkeypatch.setattr(fused, "product", product)
    return seen


def scaled(*lengths: int) -> list[int]:
    return [length * SCALE for length in lengths]


BATCHES = {
    "uneven": LoRABatch(scaled(20, 0, 33, 7, 11, 40), [0, 2, 2, -1, 1, 3]),
    "one": LoRABatch(scaled(128), [2]),
    "aligned": LoRABatch(scaled(64, 64), [-1, 0]),
    "many-in-a-tile": LoRABatch([2] * (35 * SCALE), [i % 5 - 1 for i in range(35 * SCALE)]),
    "one-slot-twice": LoRABatch(scaled(24, 24), [2, 2]),
    "base": LoRABatch(scaled(70), [-1]),
}


@needs_device
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", BATCHES)
def test_linear_is_base_plus_delta(name: str, bias: bool, products: list[int]) -> None:
    site = Site(load_backend("triton_fused"), bias=bias)
    batch = BATCHES[name]
    batch = LoRABatch(
        batch.lengths, batch.slots, scales=[1.0 + i / 8 for i in range(len(batch.slots))]
    )
    x = site.x(batch.num_tokens + PADDING)
    expected = site.expected(x, batch)
    x[batch.num_tokens :] = torch.nan
    got = site.linear(x, batch)
    live = slice(0, batch.num_tokens)
    error = (got.double() - expected)[live]
    assert float(error.norm() / expected[live].norm()) < 6e-4
    assert products == [len(x)]


@needs_device
def test_neighbours_do_not_matter() -> None:
    """Bitwise: values, NaN, ranks and adapters of the requests that share a tile."""
    site = Site(load_backend("triton_fused"))
    lengths = scaled(20, 33, 7, 11)
    batch = LoRABatch(lengths, [0, 2, -1, 3])
    x = site.x(sum(lengths))
    before = site.linear(x, batch).clone()
    mine = [*range(lengths[0]), *range(sum(lengths[:2]), sum(lengths))]
    for slots in ([0, 0, -1, 3], [0, -1, -1, 3], [0, 1, -1, 3]):
        assert torch.equal(site.linear(x, LoRABatch(lengths, slots))[mine], before[mine])
    poisoned = x.clone()
    poisoned[lengths[0] : sum(lengths[:2])] = torch.nan
    assert torch.equal(site.linear(poisoned, batch)[mine], before[mine])
    site.weights.b[2, 5, 3] = torch.nan
    after = site.linear(x, batch)
    assert torch.equal(after[mine], before[mine])
    assert after[lengths[0] : sum(lengths[:2]), 5].isnan().all()


@needs_device
@pytest.mark.parametrize("graph", [None, "prefill"])
def test_rows_without_an_adapter_are_those_of_a_batch_without_adapters(graph: Any) -> None:
    backend = load_backend("triton_fused")
    lengths = scaled(20, 33, 7, 11)
    if graph is not None:
        backend.init_graph(graph, max_requests=6, max_tokens=sum(lengths) + PADDING)
    site = Site(backend)
    x = site.x(sum(lengths) + PADDING)

    def linear(slots: list[int]) -> Tensor:
        backend.prepare_batch(LoRABatch(lengths, slots), graph=graph)
        return backend.linear(x, site.base, site.weights).clone()

    mixed, alone = linear([0, -1, 2, -1]), linear([-1] * 4)
    of_base = [*range(lengths[0], sum(lengths[:2])), *range(sum(lengths[:3]), len(x))]
    assert torch.equal(mixed[of_base], alone[of_base])
    assert not torch.equal(mixed, alone)
    backend.reset_batch_state()
    fresh = load_backend("triton_fused")
    fresh.prepare_batch(LoRABatch(lengths, [-1] * 4))
    assert torch.equal(fresh.linear(x, site.base, site.weights)[of_base], alone[of_base])


@needs_device
def test_a_graphs_static_plan_serves_every_batch_that_fits(products: list[int]) -> None:
    backend = load_backend("triton_fused")
    backend.init_graph("prefill", max_requests=6, max_tokens=100 * SCALE)
    site = Site(backend)
    homes = {name: tensor.data_ptr() for name, tensor in backend.workspace.static.items()}
    x = site.x(100 * SCALE)
    for lengths, slots in (
        (scaled(50, 50), [0, 2]),
        (scaled(20, 0, 33, 7, 11), [3, 2, -1, 2, 0]),
        (scaled(3), [2]),
        (scaled(100), [3]),
    ):
        batch = LoRABatch(lengths, slots)
        backend.prepare_batch(batch, graph="prefill")
        got = backend.linear(x, site.base, site.weights)
        expected = site.expected(x, batch)
        assert float((got.double() - expected).norm() / expected.norm()) < 6e-4
    assert products == [len(x)] * 4
    assert homes == {name: tensor.data_ptr() for name, tensor in backend.workspace.static.items()}
    backend.reset_batch_state()
    assert all((backend.workspace.static["prefill plan"] == -1).tolist())


class Quantised:
    weight = None
    bias = None

    def __init__(self, base: nn.Linear) -> None:
        self._base = base

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._base(x)
        return out


def hooked(base: nn.Linear) -> nn.Linear:
    base.register_forward_hook(lambda _module, _inputs, out: out * 2)
    return base


FALLBACKS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor], Callable[[Any], Any]]] = {
    "no plain weight": ({}, Tensor.clone, Quantised),
    "forward hooks": ({}, Tensor.clone, hooked),
    "no tile pays": ({"dtype": torch.float32}, Tensor.clone, lambda base: base),
    "16 bytes": ({"k": 76}, Tensor.clone, lambda base: base),
    "steps of 16 bytes": ({"widths": (60,)}, Tensor.clone, lambda base: base),
    "dtype and layout": ({"widths": (40, 24)}, Tensor.clone, lambda base: base),
    "not contiguous": (
        {},
        lambda x: x.new_zeros(len(x), x.shape[1] + 1)[:, : x.shape[1]].copy_(x),
        lambda base: base,
    ),
    "fewer than 24 rows": ({}, lambda x: x[:5], lambda base: base),
}


@needs_device
@pytest.mark.parametrize("why", FALLBACKS)
def test_what_does_not_fit_takes_two_kernels(why: str, products: list[int]) -> None:
    """And has the bits of the triton backend, and says why."""
    sizes, of_x, of_base = FALLBACKS[why]
    site, plain = (Site(load_backend(name), **sizes) for name in ("triton_fused", "triton"))
    x = of_x(site.x(48 * SCALE))
    batch = LoRABatch([len(x) - 2, 2], [0, 2])
    base = of_base(site.base)
    assert torch.equal(site.linear(x, batch, base), plain.linear(x, batch, base))
    assert products == []
    assert why in str(FusedTritonBackend.why_two_kernels(x, base, site.weights))


@needs_device
def test_a_strided_input_is_read_where_it_lies(products: list[int]) -> None:
    """Rows of another stride are no reason to fall back, as long as descriptors can address them."""
    site = Site(load_backend("triton_fused"))
    wide = torch.full(
        (48 * SCALE, 2 * K), torch.nan, dtype=torch.float16, device=site.base.weight.device
    )
    x = wide[:, K:]
    x.copy_(site.x(len(x)))
    batch = LoRABatch([len(x)], [2])
    assert torch.equal(site.linear(x, batch), site.linear(x.clone(), batch))
    assert products == [len(x)] * 2


@needs_device
def test_a_graph_kind_that_is_refused_allocates_nothing() -> None:
    backend = load_backend("triton_fused")
    kind: Any = "encode"
    with pytest.raises(UnsupportedOpError, match="init_graph"):
        backend.init_graph(kind, max_requests=4, max_tokens=4096)
    assert not backend.workspace.static


def test_a_plan_that_cannot_be_sent_leaves_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = load_backend("triton_fused")
    backend.init_graph("prefill", max_requests=2, max_tokens=64 * SCALE)
    batch = LoRABatch(scaled(64), [0])

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(fused_plan, "send", fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            backend.prepare_batch(batch, graph="prefill")
    assert backend.batch_info is None
    slots = backend.workspace.static["prefill"]
    backend.reset_batch_state()
    other = load_backend("triton_fused")
    other.init_graph("prefill", max_requests=2, max_tokens=64 * SCALE)
    assert torch.equal(slots, other.workspace.static["prefill"])


requests = st.lists(
    st.tuples(st.integers(0, 5 * PLAN_ROWS), st.integers(-1, 3), st.sampled_from([1.0, -0.5])),
    max_size=12,
)


@given(requests, st.booleans())
def test_plan_covers_every_row_with_an_adapter_once(
    batch: list[tuple[int, int, float]], has_scales: bool
) -> None:
    lengths, slots, scales = (np.array([r[i] for r in batch]) for i in range(3))
    bits = scales.astype(np.float32).view(np.int32) if has_scales else None
    tiles, seams = fused_plan.make(lengths.astype(np.int32), slots.astype(np.int32), bits)
    found: dict[int, tuple[int, float]] = {}
    runs = [
        (slot, i * PLAN_ROWS, (i + 1) * PLAN_ROWS, scale)
        for i, (slot, scale) in enumerate(tiles.tolist())
    ]
    for slot, begin, end, scale in [*runs, *seams.tolist()]:
        assert end - begin <= PLAN_ROWS
        for row in range(begin, end if slot >= 0 else begin):
            assert row not in found
            found[row] = slot, float(np.int32(scale).view(np.float32))
    expected, row = {}, 0
    for length, slot, scale in batch:
        for t in range(row, row + length if slot >= 0 else row):
            expected[t] = slot, scale if has_scales else 1.0
        row += length
    assert found == expected
    assert len(seams) <= 2 * len(batch)


@given(requests, st.lists(st.integers(-1, 3), min_size=12, max_size=12))
def test_plan_depends_on_lengths_alone(
    batch: list[tuple[int, int, float]], others: list[int]
) -> None:
    """Whose rows are in a tile of their own does not change with the adapters of the others."""
    lengths = np.array([r[0] for r in batch], np.int32)
    for mine, (_, slot, _) in enumerate(batch):
        if slot < 0:
            continue
        slots = np.array(others[: len(batch)], np.int32)
        slots[mine] = 9
        alone = np.full(len(batch), -1, np.int32)
        alone[mine] = 9
        (tiles, seams), (own_tiles, own_seams) = (
            fused_plan.make(lengths, s, None) for s in (slots, alone)
        )
        assert ((tiles[:, 0] == 9) == (own_tiles[:, 0] == 9)).all()
        assert seams[seams[:, 0] == 9].tolist() == own_seams.tolist()


def test_column_step_is_the_widest_that_no_slice_begins_within() -> None:
    widths = {
        (4096, 1024, 1024): 256,
        (1024, 128, 128): 128,
        (3584, 3584): 256,
        (100,): 256,
        (40, 24): 8,
    }
    assert {w: column_step(SliceLayout(w)) for w in widths} == widths
