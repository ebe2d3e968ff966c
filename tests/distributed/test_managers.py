"""Managers of several ranks: the same adapters in the same slots everywhere, or an error everywhere."""

from __future__ import annotations

import json
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from lora_core import LoRARequest
from lora_core.distributed import Forward, Ranks
from lora_core.errors import (
    AdapterFormatError,
    AdapterInUseError,
    AdapterNotFoundError,
    InsufficientMemoryError,
    InvalidBatchError,
    NoFreeSlotError,
    RanksDisagreeError,
)
from tests.distributed.engine import full_adapter, make
from tests.distributed.test_forwards import SOURCES, assert_right, load_all, rows, step_of


def write(folder: Path, source, *, cut: int = 0) -> Path:
    config, tensors = source
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    path = folder / "adapter_model.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
    path.write_bytes(path.read_bytes()[: len(path.read_bytes()) - cut])
    return folder


def assert_works(manager, model, rank, names):
    """A forward in which every rank uses all of them."""
    pairs = [(name, 1) for name in names] + [(None, 1)]
    x = rows(rank, 7, len(pairs))
    assert_right(model, step_of(manager, model, pairs, x), x, pairs)


def unreadable(rank, size):
    """The file is cut on the last rank: nothing is loaded anywhere, and the next load works."""
    manager, model = make(rank, size)
    last = rank == size - 1
    with tempfile.TemporaryDirectory() as folder:
        source = write(Path(folder) / "a", SOURCES["a"], cut=64 * last)
        error = AdapterFormatError if last else RanksDisagreeError
        with pytest.raises(error, match="" if last else f"rank {size - 1}.*AdapterFormatError"):
            manager.load_adapter("a", source)
        assert manager.adapters() == {}
        assert manager.gate.adapters_loaded == 0
        manager.load_adapter("a", write(Path(folder) / "good", SOURCES["a"]))
    assert_works(manager, model, rank, ["a"])


def other_content(rank, size):
    manager, model = make(rank, size)
    with pytest.raises(RanksDisagreeError, match="not the same content on every rank"):
        manager.load_adapter("a", full_adapter(rank))
    assert manager.adapters() == {}
    manager.load_adapter("a", SOURCES["a"])
    with pytest.raises(RanksDisagreeError, match="not the same content"):
        manager.refresh("a", full_adapter(20 + rank))
    assert_works(manager, model, rank, ["a"])  # as it was


def out_of_memory(rank, size):
    """On rank 0 alone."""
    manager, model = make(rank, size)
    reserve = manager.pool.reserve

    def refuse(packed, name):
        raise InsufficientMemoryError("no room")

    if rank == 0:
        manager.pool.reserve = refuse
    with pytest.raises(RanksDisagreeError if rank else InsufficientMemoryError, match="no room"):
        manager.load_adapter("a", SOURCES["a"])
    assert manager.adapters() == {}
    manager.pool.reserve = reserve
    manager.load_adapter("a", SOURCES["a"])
    assert_works(manager, model, rank, ["a"])


def out_of_step(rank, size):
    """Ranks that call different things hear of it, and can go on."""
    manager, model = make(rank, size)
    load_all(manager, ["a", "b"])
    with pytest.raises(RanksDisagreeError, match=r"rank 0 is at|rank 1 is at"):
        manager.load_adapter(f"only-{rank}", SOURCES["c"])
    with pytest.raises(RanksDisagreeError, match="same order"):
        manager.pin("a") if rank else manager.unload_adapter("a")
    with pytest.raises(RanksDisagreeError, match="same order"):
        if rank:
            manager.prefetch("b")
        else:
            manager.prepare([LoRARequest("a")])
    assert manager.backend.batch_info is None
    assert set(manager.adapters()) == {"a", "b"}
    assert not any(info.pinned for info in manager.adapters().values())
    assert_works(manager, model, rank, ["a", "b"])


def held(rank, size):
    """Held on rank 1, it stays everywhere; released, it goes everywhere."""
    manager, model = make(rank, size)
    load_all(manager, ["a", "b"])
    hold = manager.acquire("a") if rank == 1 else None
    error = AdapterInUseError if rank == 1 else RanksDisagreeError
    with pytest.raises(error, match="held by 1 acquire"):
        manager.unload_adapter("a")
    assert_works(manager, model, rank, ["a", "b"])
    if hold:
        hold.release()
    manager.unload_adapter("a")
    assert set(manager.adapters()) == {"b"}
    with pytest.raises(AdapterNotFoundError):
        manager.unload_adapter("a")
    assert_works(manager, model, rank, ["b"])


def bad_requests(rank, size):
    """Wrong on one rank: no rank has a batch, and slots are the same as before."""
    manager, model = make(rank, size)
    load_all(manager)
    assert_works(manager, model, rank, ["a", "b"])
    before = {name: info.slot for name, info in manager.adapters().items()}
    for wrong, mine in (
        (Forward([LoRARequest("nobody")]), AdapterNotFoundError),
        (Forward([LoRARequest("c", 2)], mode="decode"), InvalidBatchError),
        (Forward([LoRARequest("c", 2)], logits=[[3]]), InvalidBatchError),
        (Forward([LoRARequest("c", 2, float("nan"))]), InvalidBatchError),
    ):
        forward = Forward([LoRARequest("c")]) if rank else wrong
        with pytest.raises(RanksDisagreeError if rank else mine), manager.forward(forward):
            pytest.fail("it began")
        assert manager.backend.batch_info is None
        assert {name: info.slot for name, info in manager.adapters().items()} == before
    assert_works(manager, model, rank, ["a", "c"])


def failing_backend(rank, size):
    """A backend that cannot prepare on one rank leaves no batch on the others."""
    manager, model = make(rank, size)
    load_all(manager)
    backend = manager.backend
    if rank == 0:
        real, backend.prepare_batch = backend.prepare_batch, lambda *_, **__: 1 / 0
    error = RanksDisagreeError if rank else ZeroDivisionError
    with pytest.raises(error), manager.batch([LoRARequest("a", 2)]):
        pytest.fail("it began")
    assert backend.batch_info is None
    assert not manager._lanes[0].slots
    with (
        pytest.raises(error),
        manager.forward(Forward() if rank else Forward([LoRARequest("b")])),
    ):
        pytest.fail("it began")
    assert not manager._lanes[0].slots  # those of the idle rank neither
    if rank == 0:
        backend.prepare_batch = real
    assert_works(manager, model, rank, ["a"])


def too_many(rank, size):
    """Together the ranks name more adapters than there are slots; planned together, they fit."""
    manager, model = make(rank, size, max_loras=2)
    load_all(manager)
    names = [["a", "b"], ["b", "c", None]][rank % 2]
    requests = [LoRARequest(name) for name in names]
    with pytest.raises(NoFreeSlotError), manager.forward(Forward(requests)):
        pytest.fail("it began")
    served: list = []
    waiting = requests
    for _ in range(3):
        admitted, waiting = manager.plan(waiting)
        pairs = [(request.adapter, request.length) for request in admitted]
        x = rows(rank, 8, len(pairs))
        assert_right(model, step_of(manager, model, pairs, x), x, pairs)
        served += [name for name, _ in pairs]
    assert sorted(served, key=str) == sorted(names, key=str)
    return {name: info.slot for name, info in manager.adapters().items()}


def pins_and_prefetch(rank, size):
    manager, model = make(rank, size, max_loras=2)
    load_all(manager)
    manager.pin("a")
    assert manager.prefetch("b")
    for names in (["b"], ["c"], ["b"]):
        assert_works(manager, model, rank, names)
        assert manager.adapters()["a"].slot is not None
    manager.unpin("a")
    assert_works(manager, model, rank, ["b", "c"])
    return {name: info.slot for name, info in manager.adapters().items()}


def with_idle(rank, size):
    """The context managers of a plain manager: `batch` here, `idle` there."""
    manager, model = make(rank, size)
    load_all(manager)
    if rank == 0:
        with manager.idle():
            assert manager.backend.batch_info is None
            assert model.attn(rows(0, 0, 0)).shape == (0, 12)
            taken = manager._lanes[0].slots
    else:
        with manager.batch([LoRARequest("b")]):
            taken = manager._lanes[0].slots
    assert not manager._lanes[0].slots
    return taken, {name: info.slot for name, info in manager.adapters().items()}


def beside_devices(rank, size):
    """A group that carries tensors of devices alone: hosts talk over one of their own, with its timeout."""
    limit = timedelta(seconds=7)
    devices = dist.new_group(list(range(size)), backend="cuda:gloo", timeout=limit)
    assert Ranks(None).hosts is None  # which carries both
    ranks = Ranks(devices)
    assert ranks.hosts not in {None, devices}
    assert Ranks(devices).hosts is ranks.hosts
    assert ranks.exchange("counting", rank) == list(range(size))
    assert ranks.hosts._get_backend(torch.device("cpu")).options._timeout == limit
    with pytest.raises(RanksDisagreeError, match="rank 1 is at stop"):
        ranks.exchange("stop" if rank else "go", None)


FAILURES = (
    unreadable,
    other_content,
    out_of_memory,
    out_of_step,
    held,
    bad_requests,
    failing_backend,
)


@pytest.mark.parametrize("case", FAILURES, ids=lambda case: case.__name__)
def test_all_ranks_or_none(world2, case):
    world2.run(case)


@pytest.mark.parametrize("case", [too_many, pins_and_prefetch, with_idle], ids=lambda c: c.__name__)
def test_slots_are_the_same_everywhere(world2, case):
    first, second = world2.run(case)
    assert first == second


def test_hosts_talk_beside_a_group_of_devices(gloo2):
    gloo2.run(beside_devices)


@pytest.mark.slow
def test_four_ranks(world4):
    for case in FAILURES:
        world4.run(case)
    for case in (pins_and_prefetch, with_idle):
        assert len({str(result) for result in world4.run(case)}) == 1
