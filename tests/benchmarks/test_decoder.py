"""The whole decoder: what is compared is the same computation, and every row is there."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from benchmarks import decoder
from benchmarks.decoder import BASE, Base, Decoder, Ours, Point, Shape
from benchmarks.dense import Failures
from benchmarks.timing import Replay
from lora_core.layers.moe import ExpertsCore

kernels = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
    reason="runs the decoder's kernels: needs CUDA, or TRITON_INTERPRET=1",
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DENSE = Shape("small", 2, 64, 4, 2, 16, 48, 50)
EXPERTS = Shape("small-experts", 2, 64, 4, 2, 16, 32, 64, experts=8, top_k=2)
DEEP = Shape("deep", 32, 64, 2, 1, 32, 64, 50)
DEEP_EXPERTS = Shape("deep-experts", 48, 64, 2, 1, 32, 16, 64, experts=8, top_k=2)
PEERS = ("right", "missing", "one_request_wrong", "nan")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(decoder, "CONTEXT", 16)
    monkeypatch.setattr(decoder, "PREFILL_TOKENS", 16)


@kernels
def test_router_is_softmax_over_the_largest():
    model = Decoder(EXPERTS, device=DEVICE, dtype=torch.float32)
    x = torch.randn(5, 64, device=DEVICE)
    ids, factors = model._route(0, x)
    largest, where = (x @ model.routers[0].T).topk(2, 1)
    order = where.argsort(1)
    assert torch.equal(ids.long(), where.gather(1, order))
    torch.testing.assert_close(factors, largest.softmax(1).gather(1, order))


@kernels
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


@kernels
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


@pytest.fixture
def captured(monkeypatch):
    """Capture as on CUDA: it computes nothing, outputs are fresh memory until the first replay."""

    def capture(step, _):
        outputs = [torch.zeros_like(out) for out in step()]

        def run():
            for out, new in zip(outputs, step(), strict=True):
                out.copy_(new)

        return Replay(run, outputs, step)

    if DEVICE.type != "cuda":
        monkeypatch.setattr(decoder, "capture", capture)


class Launched:
    """Plain torch in the place of a Triton kernel: called with its grid and its arguments."""

    def __init__(self, call):
        self.call = call

    def __getitem__(self, grid):
        return lambda *arguments: self.call(grid, *arguments)


def rotate(grid, qkv, cos, sin, positions, _row, half):
    """As `decoder._rotate`."""
    tokens, heads = grid
    own = qkv[:, : heads * 2 * half].unflatten(1, (heads, 2 * half))
    c, s = cos[positions.long(), None], sin[positions.long(), None]
    a, b = own.float().chunk(2, -1)
    own.copy_(torch.cat([a * c - b * s, b * c + a * s], -1))
    assert len(own) == tokens


def choose(_grid, logits, ids, factors, _experts, top_k):
    """As `decoder._choose`."""
    largest, where = logits.float().topk(top_k, 1)
    ids.copy_(where)
    factors.copy_(largest.softmax(1))


def silu_mul(both):
    """As `decoder.silu_mul`."""
    gate, up = both.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(both.dtype)


class PlainCore(ExpertsCore):
    """Experts in plain torch."""

    def __init__(self, gate_up, down):
        self.gate_up, self.down, self.num_experts = gate_up, down, len(down)

    def with_config(self, config):
        return self

    def run(self, hidden_states, topk_ids, topk_weights, *, deltas=None):
        x, ids = hidden_states, topk_ids.long()
        inner = torch.einsum("tkni,ti->tkn", self.gate_up[ids].float(), x.float()).to(x.dtype)
        if deltas is not None:
            deltas.gate_up(inner)
        gate, up = inner.float().chunk(2, -1)
        activated = (torch.nn.functional.silu(gate) * up).to(x.dtype)
        pairs = torch.einsum("tkni,tki->tkn", self.down[ids].float(), activated.float())
        pairs = pairs.to(x.dtype)
        if deltas is not None:
            deltas.down(activated, pairs)
        return (pairs.float() * topk_weights.unsqueeze(-1)).sum(1).to(x.dtype)


def use_plain(monkeypatch):
    """Plain torch in the place of every kernel of the decoder."""

    def core(self):
        s = self.shape
        return PlainCore(
            self._normal(s.experts, 2 * s.intermediate, s.hidden),
            self._normal(s.experts, s.hidden, s.intermediate),
        )

    monkeypatch.setattr(decoder, "_rotate", Launched(rotate))
    monkeypatch.setattr(decoder, "_choose", Launched(choose))
    monkeypatch.setattr(decoder, "silu_mul", silu_mul)
    monkeypatch.setattr(Decoder, "_core", core)


@pytest.fixture
def plain(monkeypatch):
    """Without Triton's interpreter, which is slow and does not multiply bfloat16 rightly."""
    if DEVICE.type != "cuda":
        use_plain(monkeypatch)


@kernels
@pytest.mark.parametrize("shape", [DENSE, EXPERTS], ids=lambda shape: shape.name)
def test_plain_torch_computes_the_same(shape, monkeypatch):
    """So that the tests at full depth stand for the kernels too."""

    def hidden():
        model = Decoder(shape, device=DEVICE, dtype=torch.float32)
        return model.step(Point("prefill", 2, 1))(Base(model))[1]

    with_kernels = hidden()
    use_plain(monkeypatch)
    torch.testing.assert_close(with_kernels, hidden(), rtol=1e-3, atol=1e-3)


def peers(*, seq_lens, slots, widths, A, B, **_):
    """Deltas in float32, right and wrong in ways that a benchmark must not time."""

    def call(row_slots, factor):
        rows = torch.tensor(row_slots, device=DEVICE).repeat_interleave(
            torch.tensor(seq_lens, device=DEVICE)
        )

        def site(layer, x, base):
            out, begin = base().float(), 0
            for s, width in enumerate(widths):
                span = slice(begin, begin + width)
                h = torch.einsum("trk,tk->tr", A[layer][rows, s].float(), x.float())
                delta = torch.einsum("tnr,tr->tn", B[layer][rows, span].float(), h)
                out[:, span] += delta * factor
                begin += width
            return out.to(x.dtype)

        return site

    return {
        "right": call(slots, 1.0),
        "missing": call(slots, 0.0),
        "one_request_wrong": call([*slots[:-1], 1 - slots[-1]], 1.0),
        "nan": call(slots, float("nan")),
    }


def expert_peers(*, seq_lens, slots, gate_up, down, **_):
    """The deltas of experts in float32, and none at all."""

    def call(factor):
        rows = torch.tensor(slots, device=DEVICE).repeat_interleave(
            torch.tensor(seq_lens, device=DEVICE)
        )[:, None]

        def deltas(layer, x, ids):
            def add(values, pools, out):
                a, b = (pool[rows, ids.long()].float() for pool in pools)
                slices = a.shape[2] // b.shape[3]
                h = torch.einsum("tkri,tki->tkr", a, values.float())
                parts = zip(h.chunk(slices, 2), b.chunk(slices, 2), strict=True)
                delta = torch.cat(
                    [torch.einsum("tknr,tkr->tkn", own, part) for part, own in parts], 2
                )
                out.copy_(out.float() + factor * delta)

            return SimpleNamespace(
                gate_up=lambda out: add(
                    x[:, None].expand(-1, ids.shape[1], -1), gate_up[layer], out
                ),
                down=lambda activated, out: add(activated, down[layer], out),
            )

        return deltas

    return {"right": call(1.0), "missing": call(0.0)}


@pytest.mark.usefixtures("captured", "plain")
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_full_depth_in_bfloat16(phase, capsys):
    """The right ones are timed, each wrong one is named with what was found."""
    point = Point(phase, 4, 2)
    kit = SimpleNamespace(dense=peers)
    (rows,) = decoder.rows(
        DEEP, ["torch"], kit, device=DEVICE, peers=PEERS, points=[point], seconds=0.01
    )
    assert [row["backend"] for row in rows] == ["torch", "right"]
    said = dict(
        line.split(") ", 1)[1].split(": ", 1) for line in capsys.readouterr().out.splitlines()
    )
    assert said.keys() == {"missing", "one_request_wrong", "nan"}
    assert said["missing"].startswith("an adapter changes a request by 0 of the base")
    assert said["one_request_wrong"].startswith("a request differs from reference by")
    assert said["nan"].startswith(f"{4 * DEEP.hidden} NaN")


@pytest.mark.usefixtures("captured", "plain")
def test_full_depth_with_experts_in_bfloat16(capsys):
    """Rounding that changes a router's choice now and then is not taken for a wrong adapter."""
    (rows,) = decoder.rows(
        DEEP_EXPERTS,
        ["torch+torch"],
        SimpleNamespace(dense=peers, experts=expert_peers),
        device=DEVICE,
        peers=("right", "missing"),
        points=[Point("decode", 2, 2)],
        seconds=0.01,
    )
    assert [row["backend"] for row in rows] == ["torch+torch", "right", decoder.OUT_OF_PLACE]
    assert "missing: an adapter changes a request by 0 of the base" in capsys.readouterr().out


@pytest.mark.usefixtures("captured", "plain")
def test_a_base_that_is_not_finite_gives_no_rows(monkeypatch, capsys):
    monkeypatch.setattr(Decoder, "_normed", lambda _self, x: torch.full_like(x, float("nan")))
    (rows,) = decoder.rows(
        DENSE, ["torch"], None, device=DEVICE, points=[Point("decode", 2, 2)], seconds=0.01
    )
    assert rows == []
    said = capsys.readouterr().out
    assert "base: 128 NaN and 0 infinite of 128 hidden values" in said
    assert "torch: 128 NaN and 0 infinite of 128 hidden values" in said


def replay(hidden):
    """Outputs that hold something else until the replay."""
    outputs = [torch.zeros(len(hidden), dtype=torch.long), torch.zeros_like(hidden)]
    return Replay(lambda: outputs[1].copy_(hidden), outputs, list)


def states(requests=32):
    """Hidden states of the base, and what adapters make of them."""
    generator = torch.Generator().manual_seed(0)
    base, change, noise = torch.randn(3, requests, 64, generator=generator).bfloat16()
    return base, base + change, base + change + 0.1 * noise


def faults(expected=None, **contenders):
    base, right, near = states()
    replays = {BASE: replay(base), "a": replay(right), "b": replay(near)}
    replays |= {name: replay(hidden) for name, hidden in contenders.items()}
    failures = Failures()
    decoder._check(replays, failures, expected)
    assert replays.keys() == {BASE, "a", "b", *contenders} - failures.found.keys()
    return failures.found


def last_request(value):
    """The right states, but for one of 32 requests."""
    base, right, _ = states()
    changed = right.clone()
    changed[-1] = base[-1] if value is None else value
    return changed


@pytest.mark.parametrize("with_reference", [False, True], ids=["", "reference"])
def test_check_keeps_what_differs_by_rounding(with_reference):
    assert faults(states()[1] if with_reference else None) == {}


@pytest.mark.parametrize("with_reference", [False, True], ids=["", "reference"])
@pytest.mark.parametrize(
    ("hidden", "said"),
    [
        (states()[0], "an adapter changes a request by 0 of the base"),
        (last_request(None), "an adapter changes a request by 0 of the base"),
        (last_request(states()[1][0]), "a request differs from "),
        (last_request(float("nan")), "64 NaN and 0 infinite of 2048 hidden values"),
        (last_request(float("inf")), "0 NaN and 64 infinite of 2048 hidden values"),
        (last_request(0.0), "hidden values of 1 of 32 requests are all zero"),
    ],
    ids=["no-delta", "no-delta-once", "another-adapter-once", "nan", "infinite", "zero"],
)
def test_check_drops_what_is_wrong_for_one_request(hidden, said, with_reference):
    found = faults(states()[1] if with_reference else None, wrong=hidden)
    assert found.keys() == {"wrong"}
    assert found["wrong"].startswith(said)


def test_contenders_that_are_wrong_alike_do_not_vouch_for_each_other():
    alike = last_request(states()[1][0])
    assert faults(states()[1], c=alike, d=alike).keys() == {"c", "d"}


def test_a_replay_that_leaves_its_outputs_is_dropped():
    base, right, _ = states()
    stale = Replay(lambda: None, [torch.zeros(32, dtype=torch.long), right.clone()], list)
    replays, failures = {BASE: replay(base), "stale": stale, "a": replay(right)}, Failures()
    decoder._check(replays, failures)
    assert list(replays) == [BASE, "a"]
    assert failures.found == {"stale": "2048 NaN and 0 infinite of 2048 hidden values"}


def test_a_reference_that_is_not_finite_is_named_and_not_used():
    assert faults(torch.full((32, 64), float("nan"))) == {
        "reference": "2048 NaN and 0 infinite of 2048 hidden values"
    }


def test_an_experts_core_in_place_must_compute_the_base():
    base, right, _ = states()
    replays = {BASE: replay(base), decoder._IN_PLACE: replay(right), "a": replay(right)}
    failures = Failures()
    decoder._check(replays, failures)
    assert failures.found.keys() == {decoder._IN_PLACE}
    assert failures.found[decoder._IN_PLACE].startswith("a request differs from the base by")
