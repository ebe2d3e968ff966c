"""Loads, refreshes and unloads in other threads than the one that runs forwards."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lora_core import manager as module
from lora_core.errors import AdapterExistsError, AdapterInUseError
from lora_core.manager import LoRARequest
from tests.manager.helpers import adapter, assert_runs, make, rows, run


@pytest.fixture
def slow_reads(monkeypatch):
    """Every read waits until the test lets it go on."""
    started, go_on = threading.Event(), threading.Event()
    read = module.read_checkpoint

    def slow(*args, **kwargs):
        started.set()
        assert go_on.wait(10)
        return read(*args, **kwargs)

    monkeypatch.setattr(module, "read_checkpoint", slow)
    return started, go_on


def test_k12_of_two_loads_of_one_name_exactly_one_wins():
    manager, model = make()
    barrier = threading.Barrier(8)

    def load(seed: int) -> str | None:
        barrier.wait()
        try:
            return manager.load_adapter("a", adapter(seed)).version
        except AdapterExistsError:
            return None

    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(load, range(8)))
    (winner,) = (seed for seed, version in enumerate(versions) if version is not None)
    assert versions[winner] == manager.version("a")
    assert_runs(manager, model, {"a": adapter(winner)})


def test_k12_the_second_load_does_not_wait_for_the_first(slow_reads):
    started, go_on = slow_reads
    manager, model = make()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(manager.load_adapter, "a", adapter(0))
        assert started.wait(10)
        with pytest.raises(AdapterExistsError, match="being loaded by another thread"):
            manager.load_adapter("a", adapter(1))
        go_on.set()
        first.result(10)
    assert_runs(manager, model, {"a": adapter(0)})


def test_a_failed_load_leaves_its_name_free():
    manager, model = make()
    with pytest.raises(Exception, match="no such folder"):
        manager.load_adapter("a", "/nowhere/at/all")
    manager.load_adapter("a", adapter(0))
    assert_runs(manager, model, {"a": adapter(0)})


def test_forwards_go_on_while_another_adapter_is_read(slow_reads):
    started, go_on = slow_reads
    go_on.set()
    manager, model = make()
    manager.load_adapter("a", adapter(0))
    go_on.clear()
    started.clear()
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(manager.load_adapter, "b", adapter(1))
        assert started.wait(10)
        assert_runs(manager, model, {"a": adapter(0)})
        go_on.set()
        loading.result(10)
    assert_runs(manager, model, {"a": adapter(0), "b": adapter(1)})


def test_unload_during_a_refresh_is_refused_or_waits(slow_reads):
    started, go_on = slow_reads
    go_on.set()
    manager, _ = make()
    manager.load_adapter("a", adapter(0))
    go_on.clear()
    started.clear()
    with ThreadPoolExecutor(2) as pool:
        refreshing = pool.submit(manager.refresh, "a", adapter(1))
        assert started.wait(10)
        with pytest.raises(AdapterInUseError, match="being refreshed by another thread"):
            manager.unload_adapter("a")
        with pytest.raises(AdapterExistsError, match="refreshed by another thread"):
            manager.refresh("a", adapter(2))
        unloading = pool.submit(manager.unload_adapter, "a", wait=True)
        go_on.set()
        refreshing.result(10)
        unloading.result(10)
    assert manager.adapters() == {}


def test_forwards_beside_loads_unloads_and_refreshes_stay_right():
    """One thread runs two adapters; others load, refresh, prefetch and unload more all the time."""
    manager, model = make(max_loras=4)
    mine = {"a": adapter(0), "b": adapter(1)}
    for name, source in mine.items():
        manager.load_adapter(name, source)
    x = rows(3)
    expected = run(manager, model, x, "a", "b", None)
    stop = threading.Event()

    def churn(name: str) -> int:
        rounds = 0
        while not stop.is_set():
            manager.load_adapter(name, adapter(rounds, ("q_proj", "k_proj"), rank=1 + rounds % 16))
            manager.prefetch(name)
            manager.refresh(name, adapter(rounds + 1))
            manager.unload_adapter(name)
            rounds += 1
        return rounds

    with ThreadPoolExecutor(2) as pool:
        churning = [pool.submit(churn, name) for name in ("x", "y")]
        try:
            for _ in range(60):
                assert torch.equal(expected, run(manager, model, x, "a", "b", None))
        finally:
            stop.set()
        assert all(work.result(10) > 0 for work in churning)
    assert_runs(manager, model, mine)


def test_one_release_per_acquire_from_many_threads():
    manager, _ = make()
    manager.load_adapter("a", adapter(0))
    holds = [manager.acquire("a") for _ in range(50)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda hold: hold.release(), holds * 4))
    assert manager.adapters()["a"].holds == 0
    with manager.batch([LoRARequest("a")]), pytest.raises(AdapterInUseError):
        manager.unload_adapter("a")
    manager.unload_adapter("a")
