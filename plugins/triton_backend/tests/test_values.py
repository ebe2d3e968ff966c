"""Both kernels against a float64 oracle, over the forms that a batch can take.

The conformance suite covers the contract; these cases aim at the seams of these kernels: tiles that
do not fill, ranks that end inside a block, K that ends inside a split, both layouts of B, both forms
of the work list. Runs in the interpreter (`TRITON_INTERPRET=1`) or on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lora_core import LoRABatch, LoRAWeights, SliceLayout, load_backend
from lora_core.triton_kit import INTERPRETED, Rule, Tile, TileTable
from lora_core_triton import expand as expand_kernel
from lora_core_triton import shrink as shrink_kernel
from lora_core_triton import sites, tables
from lora_core_triton.backend import TritonBackend

pytestmark = pytest.mark.skipif(
    TritonBackend.unavailable_reason() is not None, reason=str(TritonBackend.unavailable_reason())
)
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]


def make_weights(
    backend: Any,
    *,
    ranks: list[list[int]],
    k: int,
    widths: tuple[int, ...],
    dtype: torch.dtype,
    max_rank: int,
    plain: bool,
    seed: int = 0,
) -> LoRAWeights:
    """Random adapters; everything past a rank is NaN."""
    generator = torch.Generator().manual_seed(seed)
    layout = SliceLayout(widths)
    made = backend.allocate_weights(
        num_slots=len(ranks), max_rank=max_rank, in_features=k, layout=layout, dtype=dtype
    )
    if plain:
        made = LoRAWeights(made.a, made.b.contiguous(), made.ranks, made.scalings, layout)
    made.ranks.copy_(torch.tensor(ranks, dtype=torch.int32))
    made.scalings.copy_(torch.rand(made.scalings.shape, generator=generator) + 0.5)
    a = torch.randn(made.a.shape, generator=generator) * k**-0.5
    b = torch.randn(made.b.shape, generator=generator)
    for slot, of_slot in enumerate(ranks):
        for s, rank in enumerate(of_slot):
            a[slot, s, rank:] = torch.nan
            b[slot, layout.offsets[s] : layout.offsets[s + 1], rank:] = torch.nan
    made.a.copy_(a.to(dtype))
    made.b.copy_(b.to(dtype))
    return made


def oracle(x: torch.Tensor, weights: LoRAWeights, batch: LoRABatch) -> torch.Tensor:
    """The delta in float64, row by row."""
    delta = torch.zeros(len(x), weights.layout.out_features, dtype=torch.float64)
    offsets, row = weights.layout.offsets, 0
    a, b, x = weights.a.cpu().double(), weights.b.cpu().double(), x.cpu().double()
    for i, (length, slot) in enumerate(zip(batch.lengths, batch.slots, strict=True)):
        for t in range(row, row + length):
            for s, rank in enumerate(weights.ranks[slot].tolist() if slot >= 0 else []):
                h = a[slot, s, :rank] @ x[t]
                scale = weights.scalings[slot, s].double().item() * (
                    batch.scales[i] if batch.scales else 1.0
                )
                span = slice(offsets[s], offsets[s + 1])
                delta[t, span] += scale * (b[slot, span, :rank] @ h)
        row += length
    return delta


BATCHES = {
    "decode": LoRABatch([1] * 7, [2, 0, 1, -1, 2, 0, 2], mode="decode"),
    "one-row": LoRABatch([1], [1], mode="decode"),
    "verify": LoRABatch([3, 2, 0, 4], [0, 2, 1, -1], mode="verify"),
    "scales": LoRABatch([2, 1, 2], [1, 1, 0], mode="verify", scales=[0.5, 2.0, -1.0]),
    "one-slot-many-rows": LoRABatch([9, 10], [1, 1]),
    "empty-ends": LoRABatch([0, 5, 0], [0, 1, 2]),
}
SHAPES = {
    "plain": (40, (24,), [[3], [1], [4]], 4),
    "slices": (300, (20, 7, 9), [[5, 0, 2], [1, 6, 3], [0, 0, 17]], 17),
    "even": (512, (32, 16), [[16, 16], [8, 16], [16, 0]], 16),
}


@pytest.fixture(params=["gathered", "contiguous"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "contiguous":
        monkeypatch.setattr(tables, "GATHERED_MAX_ROWS", 0)
    return str(request.param)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BATCHES)
def test_linear_is_base_plus_delta(name: str, shape: str, dtype: torch.dtype, form: str) -> None:
    k, widths, ranks, max_rank = SHAPES[shape]
    batch = BATCHES[name]
    backend = load_backend("triton")
    weights = make_weights(
        backend,
        ranks=ranks,
        k=k,
        widths=widths,
        dtype=dtype,
        max_rank=max_rank,
        plain=form == "contiguous",
    )
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch.num_tokens + 2, k, generator=generator).to(backend.device, dtype)
    base = torch.randn(batch.num_tokens + 2, sum(widths), generator=generator).to(
        backend.device, dtype
    )
    x[batch.num_tokens :] = torch.nan
    backend.prepare_batch(batch)
    got = backend.linear(x, lambda _: base.clone(), weights).cpu()
    delta = oracle(x, weights, batch)
    expected = base.cpu().double() + delta
    largest = expected.abs().amax(dim=1, keepdim=True)
    assert ((got.double() - expected).abs() <= 8 * torch.finfo(dtype).eps * largest).all()
    untouched = (delta == 0).all(dim=1)
    assert torch.equal(got[untouched], base.cpu()[untouched])
    assert not backend.workspace.sync["arrived"].any()


def test_the_sum_of_a_row_does_not_depend_on_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """shrink and expand, alone and in company, gathered and contiguous, split and sequential."""
    backend = load_backend("triton")
    weights = make_weights(
        backend,
        ranks=[[5, 3], [16, 9]],
        k=700,
        widths=(20, 30),
        dtype=torch.float16,
        max_rank=16,
        plain=False,
    )
    x = torch.randn(40, 700, generator=torch.Generator().manual_seed(3)).to(
        backend.device, torch.float16
    )
    out = torch.randn(40, 50, generator=torch.Generator().manual_seed(4)).to(
        backend.device, torch.float16
    )

    def run(lengths: list[int], slots: list[int], rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        backend.prepare_batch(LoRABatch(lengths, slots))
        h = backend.shrink(x[rows], weights)
        return h, backend.expand(h, weights, out[rows].clone())

    h_all, out_all = run([10, 7, 23], [0, 1, 0], slice(0, 40))
    for contiguous in (False, True):
        monkeypatch.setattr(tables, "GATHERED_MAX_ROWS", 0 if contiguous else 512)
        for start, length, slot in ((0, 10, 0), (10, 7, 1), (17, 23, 0)):
            rows = slice(start, start + length)
            h, got = run([length], [slot], rows)
            for s in range(2):
                rank = int(weights.ranks[slot, s])
                assert torch.equal(h[:, s, :rank], h_all[rows, s, :rank])
            assert torch.equal(got, out_all[rows])


FORMS = {
    "panels": {"BM": 16, "BN": 16, "BR": 16, "PANEL": 3},
    "wide-ranks": {"BM": 16, "BN": 32, "BR": 64, "PANEL": 1},
    "all": {"BM": 16, "BN": 16, "BR": 32, "PANEL": 2},
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("all", torch.float32), *((name, dtype) for name in FORMS for dtype in DTYPES[1:])],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_expand_in_every_form(
    name: str, dtype: torch.dtype, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Panels past the end of a slice, ranks of one and of several blocks."""
    ranks = [[5, 70], [16, 33], [130, 0]]
    backend = load_backend("triton")
    weights = make_weights(
        backend, ranks=ranks, k=32, widths=(56, 8), dtype=dtype, max_rank=140, plain=False
    )
    tile = Tile({**FORMS[name], "OVERTAKES": 0})
    table = TileTable("expand", tables.EXPAND.keys, [Rule(tile, "a form of its own")])
    monkeypatch.setattr(expand_kernel, "EXPAND", table)
    monkeypatch.setattr(sites, "_sites", type(sites._sites)())
    batch = LoRABatch([17, 3, 2, 1], [2, 0, -1, 1], scales=[1.0, 0.5, 1.0, 2.0])
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(23, 32, generator=generator).to(backend.device, dtype)
    out = torch.randn(23, 64, generator=generator).to(backend.device, dtype)
    backend.prepare_batch(batch)
    h = torch.full((23, 2, 140), torch.nan, dtype=torch.float32, device=backend.device)
    for rows, slot in ((slice(0, 17), 2), (slice(17, 20), 0), (slice(22, 23), 1)):
        for s, rank in enumerate(ranks[slot]):
            h[rows, s, :rank] = x[rows].float() @ weights.a[slot, s, :rank].float().T
    got = backend.expand(h, weights, out.clone()).cpu()
    expected = out.cpu().double() + oracle(x, weights, batch)
    largest = expected.abs().amax(dim=1, keepdim=True)
    assert ((got.double() - expected).abs() <= 8 * torch.finfo(dtype).eps * largest).all()
    assert torch.equal(got[20:22], out[20:22].cpu())


@pytest.mark.parametrize("table", [tables.SHRINK, tables.EXPAND], ids=lambda table: table.name)
def test_what_is_summed_in_one_go_does_not_depend_on_the_tile(table: TileTable) -> None:
    """Chains of 128 are whole steps of every tile; float32, summed step by step, has one step."""
    name = "BK" if table.name == "shrink" else "BR"
    of_float32 = [rule.where.get("bytes") == (4, 4) for rule in table.rules]
    steps = [rule.tile[name] for rule in table.rules]
    assert (
        len({step for step, is_float32 in zip(steps, of_float32, strict=True) if is_float32}) == 1
    )
    assert all(128 % step == 0 for step in steps)


@pytest.mark.parametrize("table", [tables.SHRINK, tables.EXPAND], ids=lambda table: table.name)
def test_tiles_of_64_rows_stay_where_their_bits_were_compared(table: TileTable) -> None:
    """From 64 rows on another instruction multiplies: on Hopper it gave the bits of the other."""
    assert all(rule.tile["BM"] < 64 or rule.family == "sm90" for rule in table.rules)


def test_no_step_of_shrink_is_longer_than_a_chain():
    """A longer one would be summed in one go: other bits, and those of a long chain."""
    assert all(rule.tile["BK"] <= shrink_kernel.CHAIN for rule in tables.SHRINK.rules)
