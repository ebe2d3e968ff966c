"""Graphs with collectives inside, captured on every rank, replayed while ranks go idle and busy."""

from __future__ import annotations

import random
from time import monotonic

import pytest
import torch

from lora_core import LoRARequest, SliceLayout
from lora_core.distributed import Forward, RankedManager
from lora_core.errors import GraphNotInitializedError, InvalidBatchError, RanksDisagreeError
from lora_core.layers.parallel import LoRAColumnParallelLinear, LoRARowParallelLinear
from lora_core.sites import Shard, Site
from tests.distributed.engine import (
    Column,
    H,
    Row,
    adapter,
    delta,
    dense_backend,
    full_adapter,
    make,
    numbers,
)
from tests.distributed.graphs import RankGraph
from tests.distributed.test_forwards import (
    SOURCES,
    assert_right,
    change_adapters,
    load_all,
    requests_of,
    rows,
)

ROOM = 5
"""Rows of every rank in a graph, and requests."""
KINDS = ("decode", "prefill")
FIRST = [[("a", 2), (None, 1)], [("b", 1), ("a", 1)]]
"""What every rank captures with."""


def fitted(pairs, kind):
    """In decode, as many requests as there were tokens."""
    if kind != "decode":
        return list(pairs)
    return [(name, 1) for name, length in pairs for _ in range(length)]


class Replays:
    """A model captured on all ranks, and its forwards, each of which every rank calls."""

    def __init__(self, manager, model, kind, pairs, lane=0):
        self.manager, self.model, self.kind, self.lane = manager, model, kind, lane
        manager.init_graph(kind, max_requests=ROOM, max_tokens=ROOM, lane=lane)
        self.x = numbers(0, ROOM, H)
        with self.forward(pairs) as live:
            self.graph = RankGraph(lambda: model(self.x, live))

    def forward(self, pairs):
        requests = requests_of(fitted(pairs, self.kind))
        return self.manager.forward(
            Forward(requests, self.kind, graph=self.kind, rows=ROOM), lane=self.lane
        )

    def replay(self, x):
        """What a replay leaves in the rows of `x`; padding is full of NaN."""
        self.x.fill_(torch.nan)
        self.x[: len(x)] = x
        self.graph.replay()
        return self.graph.result[: len(x)].clone()

    def step(self, pairs, x, *, eager=False):
        """A forward of this rank, by a replay or, for an idle rank, by the model itself."""
        with self.forward(pairs) as live:
            assert live.is_idle == (not pairs)
            assert live.counts == (ROOM,) * len(live.counts)
            return self.model(x, live) if eager else self.replay(x)


def tokens_of(pairs):
    return sum(length for _, length in pairs)


def idle_and_busy(rank, size, kind):
    """Replays of every mixture of busy and idle ranks, with adapters that change in between."""
    manager, model = make(rank, size)
    load_all(manager)
    graph = Replays(manager, model, kind, FIRST[rank % 2])
    everybody = [
        FIRST,
        [[], [("c", 2), (None, 1), ("a", 2)]],
        [[("b", 3)], []],
        [[], []],
        [[("c", 1), ("b", 1)], [(None, 2)]],
        FIRST,
    ]
    outs = []
    for step, pairs in enumerate(everybody):
        own, x = pairs[rank], rows(rank, 0, tokens_of(pairs[rank]))
        out = graph.step(own, x)
        assert_right(model, out, x, own)
        assert manager.backend.batch_info is None
        again = graph.step(own, x, eager=not own)  # idle ranks need not replay
        assert torch.equal(again, out), step
        outs.append(out)
    assert torch.equal(outs[0], outs[-1])

    # the graph applies what moves into the slots later
    manager.load_adapter("d", full_adapter(4, rank=5))
    manager.refresh("b", full_adapter(5, rank=2))
    named = {**SOURCES, "d": full_adapter(4, rank=5), "b": full_adapter(5, rank=2)}
    pairs = [[], [("d", 2), ("b", 1), (None, 1)]][rank]
    x = rows(rank, 1, tokens_of(pairs))
    out = graph.step(pairs, x)
    assert_right(model, out, x, pairs, named)

    # newly built, captured with another batch, the bits are the same
    fresh, other = make(rank, size)
    for name in ("b", "d"):
        fresh.load_adapter(name, named[name])
    again = Replays(fresh, other, kind, [(None, 1), ("d", 2)])
    assert torch.equal(again.step(pairs, x), out)


def after_the_forward(rank, size, kind):
    """A replay that nobody prepared adds nothing."""
    manager, model = make(rank, size)
    load_all(manager)
    graph = Replays(manager, model, kind, FIRST[rank % 2])
    x = rows(rank, 2, 3)
    base = graph.step([(None, 3)], x)
    assert_right(model, base, x, [(None, 3)])
    with_adapter = graph.step([("a", 3)], x)
    assert not torch.equal(with_adapter, base)
    assert torch.equal(graph.replay(x), base)


def to_the_idle_ranks_experts(rank, size, kind):
    """Rank 0 has no rows and all experts that are asked; it applies the adapters of rank 1."""
    manager, model = make(rank, size, route_to=0)
    load_all(manager)
    graph = Replays(manager, model, kind, FIRST[rank % 2])
    for step, pairs in enumerate(([("a", 2), ("c", 1), (None, 1)], [("b", 1), ("c", 3)])):
        own = pairs if rank else []
        x = rows(rank, 3 + step, tokens_of(own))
        for eager in (False, not own):
            assert_right(model, graph.step(own, x, eager=eager), x, own)
    return {name: info.slot for name, info in manager.adapters().items()}


def lanes(rank, size, kind):
    """Two micro-batches alive at once, a graph each, replayed in turns; each rank idles in one."""
    manager, model = make(rank, size)
    load_all(manager)
    graphs = [Replays(manager, model, kind, FIRST[rank % 2], lane) for lane in (0, 1)]
    pairs = [[("a", 2), (None, 1)] if rank == 0 else [], [("b", 1), ("c", 2)] if rank else []]
    xs = [rows(rank, 5 + lane, tokens_of(pairs[lane])) for lane in (0, 1)]
    with graphs[0].forward(pairs[0]) as one, graphs[1].forward(pairs[1]) as two:
        for _ in range(2):
            for graph, live, x, own in zip(graphs, (one, two), xs, pairs, strict=True):
                with live.active():
                    out = graph.replay(x)
                assert_right(model, out, x, own)


def tensor_parallel(rank, size, kind):
    """The same requests on every rank, no rows exchanged: outputs put side by side, inputs summed."""
    manager = RankedManager(dense_backend(), max_loras=2, max_rank=8)
    shapes = {"up": (12, 16), "down": (16, 10)}
    up = Site(
        "up",
        "linear",
        12,
        SliceLayout((16,)),
        ("up",),
        Shard.columns(SliceLayout((16,)), rank, size),
    )
    down = Site("down", "linear", 16, SliceLayout((10,)), ("down",), Shard.rows(16, rank, size))
    weights = {name: numbers(i, n, k) for i, (name, (k, n)) in enumerate(shapes.items())}
    flags = {"gather_output": True}, {"input_is_parallel": False}
    column = LoRAColumnParallelLinear(
        Column(up, weights["up"], None, None, **flags[0]), up, manager.gate
    )
    row = LoRARowParallelLinear(
        Row(down, weights["down"], numbers(3, 10), None, **flags[1]), down, manager.gate
    )
    manager.add_layers({"up": column, "down": row})
    sources = {name: adapter(seed, shapes, 4, 8) for seed, name in enumerate("ab")}
    for name, source in sources.items():
        manager.load_adapter(name, source)
    manager.backend.init_graph(kind, max_requests=ROOM, max_tokens=ROOM)
    x = numbers(4, ROOM, 12)
    graph = None
    for drawn in (FIRST[0], [("b", 2), ("a", 3)], [(None, 1), ("b", 1)]):
        pairs = fitted(drawn, kind)
        with manager.batch(requests_of(pairs), mode=kind, graph=kind):
            graph = graph or RankGraph(lambda: row(column(x)))
            graph.replay()
            out = graph.result.clone()
        start = 0
        for name, length in pairs:
            part = x[start : start + length].double()
            for site in ("up", "down"):
                change = 0 if name is None else delta(sources[name], site)
                part = part @ (weights[site].double() + change).T
            part = part + numbers(3, 10).double()
            torch.testing.assert_close(
                out[start : start + length].double(), part, rtol=1e-5, atol=1e-5
            )
            start += length


@pytest.mark.parametrize("kind", KINDS)
def test_replays_while_ranks_go_idle_and_busy(world2, kind):
    world2.run(idle_and_busy, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_an_idle_rank_applies_the_others_adapters(world2, kind):
    first, second = world2.run(to_the_idle_ranks_experts, kind)
    assert first == second


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_parallel_layers(everywhere2, kind):
    everywhere2.run(tensor_parallel, kind)


def test_a_replay_after_the_forward_adds_nothing(everywhere2):
    everywhere2.run(after_the_forward, "decode")


def test_two_lanes(world2):
    world2.run(lanes, "decode")


# -- soak ------------------------------------------------------------------------------------------


def soak(rank, size, kind, steps, seconds):
    """Replays, ranks going idle and busy, adapters that come, go and change; bits of new graphs at times.

    Ends after `steps` steps or, by rank 0's clock, after `seconds`.
    """
    choose = random.Random(1)  # the same on every rank
    manager, model = make(rank, size)
    load_all(manager, ["a"])  # the sites that the graph has to know
    graph = Replays(manager, model, kind, [("a", 1), (None, 1)])
    manager.unload_adapter("a")
    loaded: dict[str, str] = {}  # name -> source
    begin, step = monotonic(), 0
    while step < steps and manager.ranks.exchange("clock", monotonic() - begin)[0] < seconds:
        change_adapters(choose, manager, loaded)
        usable = [*choose.sample(sorted(loaded), min(3, len(loaded))), None]
        drawn = [
            []
            if choose.random() < 0.3
            else [(choose.choice(usable), 1) for _ in range(choose.randint(1, ROOM))]
            for _ in range(size)
        ]
        eager = choose.random() < 0.5
        pairs = drawn[rank]
        x = rows(rank, step, tokens_of(pairs))
        out = graph.step(pairs, x, eager=eager and not pairs)
        sources = {n: SOURCES[source] for n, source in loaded.items()}
        assert_right(model, out, x, pairs, sources)
        if step % 25 == 0:
            fresh, other = make(rank, size, max_loras=8)
            for n in ["a", *sorted(loaded)]:
                fresh.load_adapter(n, SOURCES[n] if n == "a" else sources[n])
            again = Replays(fresh, other, kind, [("a", 1)])
            assert torch.equal(again.step(pairs, x), out), step
        step += 1
    return step


@pytest.mark.parametrize("kind", KINDS)
def test_replays_and_changes(world2, kind, request):
    on_a_gpu = world2.place.device_type == "cuda"
    steps, seconds = (500, 6) if on_a_gpu else (8, 60)
    first, second = world2.run(soak, kind, steps, seconds)
    request.node.user_properties.append(("steps", first))
    assert first == second
    assert first == steps or on_a_gpu  # by the clock there


# -- what is refused -------------------------------------------------------------------------------


def refusals(rank, size):
    manager, model = make(rank, size)
    load_all(manager)
    one = [LoRARequest("a")]
    wrong = Forward(one, "decode", graph="decode", rows=1)
    with (
        pytest.raises((GraphNotInitializedError, RanksDisagreeError), match="before init_graph"),
        manager.forward(wrong),
    ):
        pytest.fail("it began")
    graph = Replays(manager, model, "decode", FIRST[rank % 2])
    x = rows(rank, 9, 2)
    expected = graph.step([("a", 2)], x)
    before = {name: info.slot for name, info in manager.adapters().items()}
    for forward, match in (
        (Forward(one, "decode", rows=2), "in a captured graph"),
        (Forward(one * 3, "decode", graph="decode", rows=2), "of 3 tokens"),
        (Forward(one, "decode", graph="decode", rows=ROOM + 1), "exceeds init_graph"),
    ):
        with (
            pytest.raises((InvalidBatchError, GraphNotInitializedError), match=match),
            manager.forward(forward),
        ):
            pytest.fail("it began")
    for forward in (
        Forward(one, "decode", graph="decode", rows=3 + rank),
        Forward() if rank else Forward(one, "decode", graph="decode", rows=3),
    ):
        with (
            pytest.raises(RanksDisagreeError, match="Idle ranks give both"),
            manager.forward(forward),
        ):
            pytest.fail("it began")
    assert manager.backend.batch_info is None
    assert not manager._lanes[0].slots
    assert {name: info.slot for name, info in manager.adapters().items()} == before
    with (
        graph.forward([("a", 2)]) as live,
        pytest.raises(InvalidBatchError, match=r"3 rows.* 2, or 5"),
    ):
        live.gather(rows(rank, 9, 3))
    assert torch.equal(graph.step([("a", 2)], x), expected)


def test_refusals(world2):
    world2.run(refusals)
