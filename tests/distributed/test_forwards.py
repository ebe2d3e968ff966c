"""Forwards of several ranks, some of them idle: attention on own rows, MLP and experts on everybody's."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import signal
import time
from datetime import timedelta

import pytest
import torch

from lora_core import LoRARequest
from lora_core.distributed import Forward
from lora_core.errors import NoBatchPreparedError
from tests.distributed.engine import H, Model, full_adapter, make, numbers
from tests.distributed.world import DUMP_WAIT_MS, GONE, GROUP_TIMEOUT, Place, World

SOURCES = {
    "a": full_adapter(1),
    "b": full_adapter(2, rank=8, alpha=4),
    "c": full_adapter(3, rank=1, alpha=1, shared_outer=True),
}


def rows(rank, step, count):
    return numbers(1000 + 10 * step + rank, count, H)


def requests_of(pairs):
    return [LoRARequest(name, length) for name, length in pairs]


def step_of(manager, model, pairs, x, *, lane=0, mode="prefill"):
    with manager.forward(Forward(requests_of(pairs), mode), lane=lane) as live:
        assert live.is_idle == (not pairs)
        assert live.own_slots.shape[0] == x.shape[0]
        return model(x, live)


def assert_right(model, out, x, pairs, sources=SOURCES):
    assert out.shape == x.shape
    start = 0
    for name, length in pairs:
        part = slice(start, start + length)
        expected = model.expected(x[part], None if name is None else sources[name])
        error = (out[part] - expected).abs().sum(1)
        assert (error <= 1e-5 * (1 + expected.abs().sum(1))).all(), error
        start += length


def load_all(manager, names=tuple(SOURCES)):
    for name in names:
        manager.load_adapter(name, SOURCES[name])


def every_rank_its_own(rank, size):
    """Different adapters on every rank, then one idle, then all idle, then as before: the same bits."""
    manager, model = make(rank, size)
    load_all(manager)
    busy = [[("a", 2), (None, 1)], [("b", 3), ("a", 1)], [("c", 1)], [(None, 2)]]
    first = None
    for step, idle in enumerate([set(), {0}, {size - 1}, set(range(size)), set()]):
        pairs = [] if rank in idle else busy[rank]
        x = rows(rank, 0, sum(length for _, length in pairs))
        out = step_of(manager, model, pairs, x)
        assert_right(model, out, x, pairs)
        if step == 0:
            first = out
    assert torch.equal(out, first)


def idle_rank_applies_others_adapters(rank, size):
    """All rows are of rank 1, and all go to the experts of rank 0, which is idle."""
    manager, model = make(rank, size, route_to=0)
    load_all(manager)
    pairs = [("a", 2), ("b", 1), (None, 1), ("c", 2)] if rank else []
    x = rows(rank, 1, sum(length for _, length in pairs))
    with manager.forward(Forward(requests_of(pairs))) as live:
        out = model(x, live)
        seated = {name: info.slot for name, info in manager.adapters().items()}
    assert_right(model, out, x, pairs)
    held = {name for name in seated if seated[name] is not None}
    assert held == {"a", "b", "c"}
    weights = model.experts.gate_up.weights
    assert weights.num_experts == 4 // size  # sized locally
    return seated


def base_bits(rank, size):
    """Rows without an adapter, in everybody's batch, have the bits of a model that was never wrapped."""
    manager, model = make(rank, size)
    load_all(manager)
    bare = Model(None, rank, size)
    pairs = [[(None, 2)], [("a", 1), (None, 2)]][rank % 2]
    x = rows(rank, 2, sum(length for _, length in pairs))
    with manager.forward(Forward(requests_of(pairs))) as live:
        out = model(x, live)
        plain = bare(x, live)
    none = torch.tensor([name is None for name, length in pairs for _ in range(length)])
    assert torch.equal(out[none], plain[none])
    assert none.all() or not torch.equal(out[~none], plain[~none])


def after_an_exception(rank, size):
    """The batch ends on every rank; the next forward, idle here, sees nothing of it."""
    manager, model = make(rank, size)
    load_all(manager)
    with pytest.raises(ZeroDivisionError), manager.forward(Forward([LoRARequest("a", 2)])):
        raise ZeroDivisionError
    assert manager.backend.batch_info is None
    assert not manager.gate.base_allowed
    pairs = [("b", 2)] if rank else []
    x = rows(rank, 3, 2 * bool(rank))
    assert_right(model, step_of(manager, model, pairs, x), x, pairs)
    with pytest.raises(NoBatchPreparedError):
        model.attn(rows(rank, 3, 2))


def two_lanes(rank, size):
    """Two micro-batches alive at once, each with a rank that is idle in it, run in turns."""
    manager, model = make(rank, size)
    load_all(manager)
    pairs = [[("a", 2)], [("b", 1), (None, 1)]]
    mine = [pairs[0] if rank == 0 else [], pairs[1] if rank else []]
    xs = [rows(rank, 4 + lane, sum(n for _, n in mine[lane])) for lane in (0, 1)]
    first, second = (Forward(requests_of(p)) for p in mine)
    with manager.forward(first, lane=0) as one, manager.forward(second, lane=1) as two:
        for _ in range(2):
            for lane, live in enumerate((one, two)):
                with live.active():
                    out = model(xs[lane], live)
                assert_right(model, out, xs[lane], mine[lane])


def test_every_rank_its_own_adapters(world2):
    world2.run(every_rank_its_own)


def test_an_idle_rank_applies_the_others_adapters(everywhere2):
    slots = everywhere2.run(idle_rank_applies_others_adapters)
    assert slots[0] == slots[1]


def test_rows_without_an_adapter_have_the_bases_bits(world2):
    world2.run(base_bits)


def test_nothing_is_left_after_an_exception(world2):
    world2.run(after_an_exception)


def test_two_micro_batches_in_two_lanes(world2):
    world2.run(two_lanes)


@pytest.mark.slow
def test_four_ranks(world4):
    world4.run(every_rank_its_own)
    world4.run(idle_rank_applies_others_adapters)
    world4.run(base_bits)
    world4.run(after_an_exception)


# -- soak ------------------------------------------------------------------------------------------


def change_adapters(choose, manager, loaded):
    """Perhaps load, unload or refresh an adapter; `loaded` (name -> source) is kept."""
    event = choose.random()
    name, content = choose.choice(["x", "y", "z", "w", "v"]), choose.choice(list(SOURCES))
    if event < 0.3 and name not in loaded:
        manager.load_adapter(name, SOURCES[content])
        loaded[name] = content
    elif event < 0.4 and name in loaded:
        manager.unload_adapter(name)
        del loaded[name]
    elif event < 0.5 and name in loaded:
        manager.refresh(name, SOURCES[content])
        loaded[name] = content


def soak(rank, size, steps, seconds=math.inf):
    """Ranks go idle and busy, adapters come, go and change; every step against newly built state.

    Ends after `steps` or, by rank 0's clock, `seconds`; returns the steps made, and the manager's counters.
    """
    choose = random.Random(0)  # the same on every rank
    manager, model = make(rank, size)
    loaded: dict[str, str] = {}  # name -> source
    begin, step = time.monotonic(), 0
    while step < steps and manager.ranks.exchange("clock", time.monotonic() - begin)[0] < seconds:
        change_adapters(choose, manager, loaded)
        usable = choose.sample(sorted(loaded), min(3, len(loaded)))  # as many as slots
        everybody = [
            []
            if choose.random() < 0.3
            else [
                (choose.choice([*usable, None]), choose.randint(0, 3))
                for _ in range(choose.randint(1, 3))
            ]
            for _ in range(size)
        ]
        pairs = everybody[rank]
        x = rows(rank, step, sum(length for _, length in pairs))
        out = step_of(manager, model, pairs, x)
        named = [(None if n is None else loaded[n], length) for n, length in pairs]
        assert_right(model, out, x, named)

        fresh, again = make(rank, size, max_loras=8)
        for n in sorted(loaded):
            fresh.load_adapter(n, SOURCES[loaded[n]])
        assert torch.equal(out, step_of(fresh, again, pairs, x)), step
        step += 1
    return step, dataclasses.replace(manager.stats(), batches=0)  # of an idle rank fewer


def test_ranks_going_idle_and_busy(world2):
    first, second = world2.run(soak, 25)
    assert first == second


@pytest.mark.slow
def test_five_hundred_steps(world2, request):
    seconds = 20 if world2.place.device_type == "cuda" else math.inf  # time there is rare
    first, second = world2.run(soak, 500, seconds, timeout=400)
    steps, counters = first
    request.node.user_properties.append(("steps", steps))
    assert first == second  # every counter
    assert steps == 500 or seconds < math.inf
    assert counters.slot_evictions >= steps // 50


# -- the end of a rank -----------------------------------------------------------------------------


def dies(rank, size, among_rows):
    """The last rank dies in a forward; the others meet it in a collective of rows, or at the next forward."""
    manager, model = make(rank, size)
    load_all(manager)
    with manager.forward(Forward([LoRARequest("a", 1)])) as live:
        if rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if among_rows:
            model(rows(rank, 0, 1), live).cpu()  # waits for the device
    with manager.forward(Forward([LoRARequest("a", 1)])):
        pytest.fail("it began")


def end_of(size, place, among_rows, *, group_timeout):
    """(outcomes, seconds until all were known, exit codes) of a world whose last rank dies."""
    world = World(size, place, group_timeout=group_timeout)
    try:
        world.run(every_rank_its_own)
        begin = time.monotonic()
        outcomes = world.outcomes(dies, among_rows)
        took = time.monotonic() - begin
        for process, (_, text) in zip(world.processes, outcomes, strict=True):
            if text == GONE:
                process.join(10)
        return outcomes, took, [process.exitcode for process in world.processes]
    finally:
        world.close()


def assert_the_last_is_gone(outcomes, codes):
    assert [ok for ok, _ in outcomes] == [False] * len(outcomes)
    assert (outcomes[-1][1], codes[-1]) == (GONE, -signal.SIGKILL)


AMONG_ROWS = pytest.mark.parametrize(
    "among_rows", [True, False], ids=["among-rows", "at-the-next-forward"]
)


@AMONG_ROWS
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_others_with_an_error(size, among_rows):
    outcomes, took, codes = end_of(size, Place(), among_rows, group_timeout=GROUP_TIMEOUT)
    # neighbours at once; those who wait for a rank that waits, at the end of the group's timeout
    assert took < GROUP_TIMEOUT.total_seconds() + 15
    assert_the_last_is_gone(outcomes, codes)
    for _, text in outcomes[:-1]:
        assert "Error" in text.splitlines()[-1]  # of the collective, with what it says


@pytest.mark.cuda
@AMONG_ROWS
def test_a_killed_rank_ends_the_others_on_devices(nccl2, among_rows):
    """Hosts hear of it at once. A device waits for its peer until NCCL's watchdog ends the process."""
    limit = timedelta(seconds=30)  # the first collective, on a busy machine, has taken over ten
    outcomes, took, codes = end_of(2, nccl2, among_rows, group_timeout=limit)
    assert_the_last_is_gone(outcomes, codes)
    text = outcomes[0][1]
    if among_rows:
        assert took < limit.total_seconds() + 4 * DUMP_WAIT_MS / 1000 + 15
        assert (text == GONE and codes[0] not in {0, None}) or "Error" in text.splitlines()[-1]
    else:
        assert took < limit.total_seconds()
        assert "Error" in text.splitlines()[-1]
