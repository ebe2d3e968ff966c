"""Load, slots, eviction, refresh, unload: at every moment the weights that were asked for, only those."""

from __future__ import annotations

import gc
import shutil
import threading

import pytest
import torch

from lora_core.errors import (
    AdapterExistsError,
    AdapterFormatError,
    AdapterInUseError,
    AdapterMismatchError,
    AdapterNotFoundError,
    InsufficientMemoryError,
    NoBatchPreparedError,
    NoFreeSlotError,
    UnsupportedAdapterError,
)
from lora_core.manager import LoRARequest
from tests.adapters.helpers import write_adapter
from tests.manager.helpers import Model, adapter, assert_runs, make, rows, run

ALL = ("q_proj", "k_proj", "v_proj", "o_proj")


def loaded(*names: str, **options):
    """A manager with one adapter of its own values for each name."""
    manager, model = make(**options)
    sources = {name: adapter(seed) for seed, name in enumerate(names)}
    for name, source in sources.items():
        manager.load_adapter(name, source)
    return manager, model, sources


def test_each_row_has_its_own_adapter():
    manager, model, sources = loaded("a", "b")
    assert_runs(manager, model, sources)


def test_nothing_is_taken_before_the_first_adapter():
    manager, model = make()
    assert all(layer.weights is None for layer in model.layers.values())
    manager.load_adapter("a", adapter(0))
    assert [n for n, layer in model.layers.items() if layer.weights is not None] == [
        "q_proj",
        "v_proj",
    ]


def test_target_modules_take_their_room_at_once():
    manager, model = make(target_modules=["q_proj", "v_proj"])
    assert [n for n, layer in model.layers.items() if layer.weights is not None] == [
        "q_proj",
        "v_proj",
    ]
    before = {name: layer.weights for name, layer in model.layers.items()}
    generation = manager.stats().generation
    manager.load_adapter("a", adapter(0))
    assert before == {name: layer.weights for name, layer in model.layers.items()}
    assert generation == manager.stats().generation
    with pytest.raises(UnsupportedAdapterError, match=r"'b': o_proj is outside of target_modules"):
        manager.load_adapter("b", adapter(0, ("q_proj", "o_proj")))


@pytest.mark.parametrize("target", ["all-linear", ".*", ["proj", "q_proj"], "o_proj"])
def test_target_modules_forms(target):
    _, model = make(target_modules=target)
    expected = {"all-linear": list(ALL), ".*": [], "o_proj": ["o_proj"]}.get(
        str(target), ["q_proj"]
    )
    assert expected == [n for n, layer in model.layers.items() if layer.weights is not None]


# -- K13, K26, K39: what an evicted adapter leaves behind ------------------------------------------------


def test_k39_one_slot_holds_nothing_of_its_predecessor():
    big, small = adapter(1, ALL, rank=16), adapter(2, ("q_proj",), rank=4)
    manager, model = make(max_loras=1)
    manager.load_adapter("big", big)
    manager.load_adapter("small", small)
    assert_runs(manager, model, {"big": big})
    out = run(manager, model, rows(1), "small")

    fresh, fresh_model = make(max_loras=1)
    fresh.load_adapter("small", small)
    assert torch.equal(out, run(fresh, fresh_model, rows(1), "small"))
    assert_runs(manager, model, {"small": small})
    assert_runs(manager, model, {"big": big})


def test_k39_dora_bias_and_whole_weights_leave_with_their_adapter():
    manager, model = make(Model(bias=True), max_loras=1)
    x = rows(1)
    config, tensors = adapter(1, ("q_proj", "o_proj"))
    generator = torch.Generator().manual_seed(3)
    tensors = tensors | {
        "q_proj.lora_magnitude_vector": torch.rand(12, generator=generator) + 3,
        "o_proj.lora_magnitude_vector": torch.rand(16, generator=generator) + 3,
        "q_proj.bias": torch.randn(12, generator=generator),
        "o_proj.bias": torch.randn(16, generator=generator),
        "k_proj.weight": torch.randn(8, 16, generator=generator),
    }
    manager.load_adapter("rich", ({**config, "use_dora": True}, tensors))
    manager.load_adapter("plain", adapter(2))
    rich = run(manager, model, x, "rich")
    assert (rich - model.base(x)).abs().max() > 1
    plain = run(manager, model, x, "plain")
    q = model.layers["q_proj"].weights
    assert q.output_scale.eq(1).all()
    assert q.bias.eq(0).all()
    assert model.layers["k_proj"].weights.full == {}
    bias = torch.cat([linear.bias.detach() for linear in model.linears.values()])
    expected = model.expected(x, adapter(2)) + bias.double()
    torch.testing.assert_close(plain.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(rich, run(manager, model, x, "rich"))


def test_k26_a_third_adapter_over_an_evicted_slot_changes_nobody_else():
    manager, model, sources = loaded("a", "b", "c")
    x = rows(2)
    first = run(manager, model, x, "a", "b")
    run(manager, model, x[:1], "b")  # so a is the least recently used
    run(manager, model, x[:1], "c")
    assert manager.adapters()["a"].slot is None
    mixed = run(manager, model, x, "c", "b")
    assert torch.equal(first[1], mixed[1])
    torch.testing.assert_close(
        mixed[:1].double(), model.expected(x[:1], sources["c"]), rtol=1e-5, atol=1e-5
    )


def test_a_write_that_fails_half_way_leaves_nothing_for_the_next(monkeypatch):
    """Both have the same ranks and scales, which are not written again where they are known."""
    manager, model = make(max_loras=1)
    sources = {name: adapter(seed, ALL) for seed, name in enumerate("abc")}
    for name, source in sources.items():
        manager.load_adapter(name, source)
    run(manager, model, rows(1), "a")
    write = manager.pool._write_site

    def failing(layer, *args):
        if layer.site.name == "v_proj":
            raise RuntimeError("out of something")
        write(layer, *args)

    manager.pool._silence(model.layers["k_proj"], 0)  # the content is not what it was
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of something"):
        patch.setattr(manager.pool, "_write_site", failing)
        manager.prepare([LoRARequest("b")])
    assert manager.backend.batch_info is None
    assert [info.slot for info in manager.adapters().values()] == [None] * 3
    for name in "cb":
        assert_runs(manager, model, {name: sources[name]})


def test_k13_a_wider_adapter_after_a_narrow_one():
    narrow, wide = adapter(1, ("q_proj", "v_proj"), rank=8), adapter(2, ALL, rank=16)
    manager, model = make()
    manager.load_adapter("narrow", narrow)
    assert_runs(manager, model, {"narrow": narrow})
    manager.load_adapter("wide", wide)
    assert_runs(manager, model, {"wide": wide, "narrow": narrow})


def test_k40_load_and_unload_in_turn_uses_no_more_memory():
    manager, model = make()
    names = ("a", "b")
    for _ in range(3):
        for seed, name in enumerate(names):
            manager.load_adapter(name, adapter(seed, ALL))
        assert_runs(manager, model, {name: adapter(seed, ALL) for seed, name in enumerate(names)})
        for name in names:
            manager.unload_adapter(name)
    stats = manager.stats()
    assert (stats.adapters, stats.slots_used, stats.host_bytes) == (0, 0, 0)


def live_tensor_bytes() -> int:
    gc.collect()
    return sum(o.untyped_storage().nbytes() for o in gc.get_objects() if type(o) is torch.Tensor)


def test_k40_a_hundred_loads_leave_memory_flat():
    manager, model = make()
    for _ in range(4):  # each slot once, for what the backend remembers of shapes
        manager.load_adapter("a", adapter(0, ALL))
        run(manager, model, rows(1), "a")
        manager.unload_adapter("a")
    before, generation = live_tensor_bytes(), manager.stats().generation
    for seed in range(100):
        manager.load_adapter("a", adapter(seed, ALL))
        run(manager, model, rows(1), "a")
        manager.unload_adapter("a")
    assert before == live_tensor_bytes()
    assert generation == manager.stats().generation


# -- slots ---------------------------------------------------------------------------------------------


def test_least_recently_used_goes_first():
    manager, model, _ = loaded("a", "b", "c")
    run(manager, model, rows(2), "a", "b")
    run(manager, model, rows(1), "a")
    run(manager, model, rows(1), "c")
    assert [name for name, info in manager.adapters().items() if info.slot is not None] == [
        "a",
        "c",
    ]
    assert manager.stats().slot_evictions == 1


def test_more_adapters_than_slots_in_a_batch_change_nothing():
    manager, model, sources = loaded("a", "b", "c")
    assert_runs(manager, model, {"a": sources["a"], "b": sources["b"]})
    before = manager.stats()
    requests = [LoRARequest(name) for name in "cab"]
    with pytest.raises(
        NoFreeSlotError, match=r"names 3 adapters, 1 of them without a slot, but only 0 of 2"
    ):
        manager.prepare(requests)
    assert before == manager.stats()
    assert manager.backend.batch_info is None
    assert_runs(manager, model, {"b": sources["b"], "a": sources["a"]})


def test_pinned_adapters_keep_their_slot():
    manager, model, sources = loaded("a", "b", "c")
    manager.pin("a")
    slot = manager.adapters()["a"].slot
    for name in "bcbc":
        assert_runs(manager, model, {name: sources[name]})
    assert slot == manager.adapters()["a"].slot
    with pytest.raises(NoFreeSlotError, match="1 of them without a slot, but only 0 of 2"):
        manager.prepare([LoRARequest("b"), LoRARequest("c")])
    manager.pin("b")
    with pytest.raises(NoFreeSlotError, match="no slot is free for 'c'"):
        manager.pin("c")
    with pytest.raises(AdapterInUseError, match="'a' is pinned"):
        manager.unload_adapter("a")
    manager.unpin("a")
    assert_runs(manager, model, {"c": sources["c"], "b": sources["b"]})
    manager.unload_adapter("a")


def test_prefetch_moves_in_before_the_batch():
    manager, model, sources = loaded("a")
    assert manager.prefetch("a")
    writes = manager.stats().slot_writes
    assert_runs(manager, model, sources)
    assert writes == manager.stats().slot_writes == 1


def test_prefetch_never_takes_a_slot_in_use():
    manager, model, _ = loaded("a", "b", "c")
    x = rows(2)
    expected = run(manager, model, x, "a", "b")
    with manager.batch([LoRARequest("a"), LoRARequest("b")]):
        assert not manager.prefetch("c")
        assert torch.equal(expected, model(x))
    assert manager.prefetch("c")


# -- host tier -----------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path):
    return {
        name: write_adapter(tmp_path / name, *adapter(seed)) for seed, name in enumerate("abcd")
    }


def test_files_are_read_once_and_not_in_prepare(folders):
    """K11: the folders are gone when the adapters are first used, and evicted, and used again."""
    manager, model = make()
    for name, folder in folders.items():
        manager.load_adapter(name, folder)
        shutil.rmtree(folder)
    for _ in range(2):
        for seed, name in enumerate(folders):
            assert_runs(manager, model, {name: adapter(seed)})
    assert manager.stats().reads == 4


def test_host_tier_drops_the_least_recently_used_and_prefetch_reads_it_again(folders):
    manager, model = make(max_cpu_loras=2)
    for name in "abc":
        manager.load_adapter(name, folders[name])
    assert [info.resident for info in manager.adapters().values()] == [False, True, True]
    with pytest.raises(
        AdapterNotFoundError, match=r"'a' was dropped from the host tier \(max_cpu_loras is 2\)"
    ):
        manager.prepare([LoRARequest("a")])
    assert manager.prefetch("a")
    assert [name for name, info in manager.adapters().items() if info.resident] == ["c", "a"]
    assert_runs(manager, model, {"a": adapter(0), "c": adapter(2)})
    stats = manager.stats()
    assert (stats.adapters, stats.resident, stats.reads, stats.host_evictions) == (3, 2, 4, 2)


def test_files_that_changed_behind_an_adapters_back_are_not_taken_for_it(folders):
    manager, _ = make(max_cpu_loras=2)
    for name in "abc":
        manager.load_adapter(name, folders[name])
    write_adapter(folders["a"], *adapter(9))
    with pytest.raises(AdapterFormatError, match="no longer those it was loaded from"):
        manager.prefetch("a")
    manager.refresh("a")


def test_adapters_from_memory_are_never_dropped(folders):
    manager, _ = make(max_cpu_loras=2)
    manager.load_adapter("a", adapter(0))
    manager.load_adapter("b", adapter(1))
    before = manager.stats()
    with pytest.raises(
        InsufficientMemoryError, match=r"'c' has no place in the host tier: its 2 adapters"
    ):
        manager.load_adapter("c", folders["c"])
    assert (before.adapters, before.host_bytes) == (
        manager.stats().adapters,
        manager.stats().host_bytes,
    )


def test_dropped_from_the_host_tier_means_out_of_its_slot_and_never_while_in_use(folders):
    manager, model = make(max_cpu_loras=2)
    for name in "ab":
        manager.load_adapter(name, folders[name])
    run(manager, model, rows(2), "b", "a")
    with manager.batch([LoRARequest("b")]):
        manager.load_adapter("c", folders["c"])  # b is older than a, but in use
        assert [name for name, info in manager.adapters().items() if info.resident] == ["b", "c"]
    assert manager.adapters()["a"].slot is None
    manager.unload_adapter("a")


def test_held_adapters_are_not_dropped(folders):
    manager, _ = make(max_cpu_loras=2)
    manager.load_adapter("a", folders["a"])
    manager.load_adapter("b", folders["b"])
    with manager.acquire("a"):
        manager.load_adapter("c", folders["c"])
        assert [name for name, info in manager.adapters().items() if info.resident] == ["a", "c"]
        with manager.acquire("c"), pytest.raises(InsufficientMemoryError, match="held"):
            manager.prefetch("b")


def test_sizes_that_cannot_be():
    with pytest.raises(ValueError, match="max_cpu_loras is 1"):
        make(max_loras=2, max_cpu_loras=1)
    with pytest.raises(ValueError, match="max_loras 0"):
        make(max_loras=0)


# -- refresh and versions ------------------------------------------------------------------------------


def test_k42_refresh_gives_new_weights_and_a_new_version(folders):
    manager, model = make()
    first = manager.load_adapter("a", folders["a"]).version
    assert_runs(manager, model, {"a": adapter(0)})
    slot, generation = manager.adapters()["a"].slot, manager.stats().generation
    write_adapter(folders["a"], *adapter(7))
    second = manager.refresh("a").version
    assert first != second == manager.version("a")
    assert_runs(manager, model, {"a": adapter(7)})
    assert (slot, generation) == (manager.adapters()["a"].slot, manager.stats().generation)
    assert first == manager.refresh("a", adapter(0)).version
    assert_runs(manager, model, {"a": adapter(0)})


def test_k42_a_live_batch_finishes_with_the_weights_it_began_with():
    manager, model, _ = loaded("a", max_loras=1)
    x = rows(1)
    before = run(manager, model, x, "a")
    with manager.batch([LoRARequest("a")]):
        manager.refresh("a", adapter(7))
        assert torch.equal(before, model(x))
    assert_runs(manager, model, {"a": adapter(7)})


def test_k42_refresh_to_other_modules_and_ranks():
    manager, model, _ = loaded("a")
    assert_runs(manager, model, {"a": adapter(0)})
    other = adapter(3, ("k_proj",), rank=9)
    manager.refresh("a", other)
    assert_runs(manager, model, {"a": other})


def test_k42_refresh_of_a_pinned_and_held_adapter():
    manager, model, _ = loaded("a")
    manager.pin("a")
    with manager.acquire("a"):
        manager.refresh("a", adapter(7))
    assert manager.adapters()["a"].slot is not None
    assert_runs(manager, model, {"a": adapter(7)})


def test_k42_a_pinned_adapter_refreshed_while_every_slot_is_in_use_gets_one_afterwards():
    manager, model, sources = loaded("a", "b")
    manager.pin("a")
    with manager.batch([LoRARequest("a"), LoRARequest("b")]):
        manager.refresh("a", adapter(7))
        assert manager.adapters()["a"].slot is None
    assert manager.adapters()["a"].slot is not None
    assert_runs(manager, model, {"a": adapter(7), "b": sources["b"]})


def test_a_bad_refresh_leaves_the_adapter_as_it_was(folders):
    manager, model = make()
    manager.load_adapter("a", folders["a"])
    before = manager.adapters()
    (folders["a"] / "adapter_model.safetensors").write_bytes(b"nonsense")
    for bad, error in [
        (None, AdapterFormatError),
        (adapter(1, rank=17), UnsupportedAdapterError),
        (({"peft_type": "LORA"}, {"x.lora_A.weight": torch.ones(8, 16)}), AdapterMismatchError),
    ]:
        with pytest.raises(error):
            manager.refresh("a", bad)
    assert before == manager.adapters()
    assert_runs(manager, model, {"a": adapter(0)})


def test_refresh_from_nothing():
    manager, _, _ = loaded("a")
    with pytest.raises(AdapterFormatError, match="loaded from memory"):
        manager.refresh("a")
    with pytest.raises(AdapterNotFoundError, match=r"'z' is not loaded; loaded are 'a'"):
        manager.refresh("z", adapter(0))


# -- unload, holds -------------------------------------------------------------------------------------


def test_k41_unload_in_flight_is_refused_by_name():
    manager, model, sources = loaded("a", "b")
    with manager.batch([LoRARequest("a")]):
        with pytest.raises(
            AdapterInUseError, match="'a' cannot be unloaded: it is named by the prepared batch"
        ):
            manager.unload_adapter("a")
        manager.unload_adapter("b")
        x = rows(1)
        torch.testing.assert_close(
            model(x).double(), model.expected(x, sources["a"]), rtol=1e-5, atol=1e-5
        )
    manager.unload_adapter("a")
    assert manager.adapters() == {}


def test_k41_each_acquire_is_released_once_even_when_aborts_release_again():
    manager, _, _ = loaded("a")
    first, second = manager.acquire("a"), manager.acquire("a")
    with first:
        first.release()  # the request was aborted, and then it ended
    first.release()
    assert manager.adapters()["a"].holds == 1
    with pytest.raises(AdapterInUseError, match="held by 1 acquire"):
        manager.unload_adapter("a")
    with pytest.raises(RuntimeError, match="mine"), second:
        raise RuntimeError("mine")
    assert manager.adapters()["a"].holds == 0
    manager.unload_adapter("a")


def test_k41_unload_may_wait_for_those_in_flight():
    manager, _, _ = loaded("a")
    hold = manager.acquire("a")
    manager.prepare([LoRARequest("a")])
    thread = threading.Thread(target=manager.unload_adapter, args=("a",), kwargs={"wait": True})
    thread.start()
    hold.release()
    thread.join(0.05)
    assert thread.is_alive()
    manager.reset()
    thread.join(5)
    assert not thread.is_alive()
    assert manager.adapters() == {}


def test_k41_waiting_has_an_end():
    manager, _, _ = loaded("a")
    manager.acquire("a")
    with pytest.raises(AdapterInUseError):
        manager.unload_adapter("a", wait=True, timeout=0.01)


def test_a_forward_after_unload_says_so():
    manager, model, _ = loaded("a", "b")
    run(manager, model, rows(1), "a")
    manager.unload_adapter("a")
    with pytest.raises(AdapterNotFoundError, match=r"'a' is not loaded; loaded are 'b'"):
        manager.prepare([LoRARequest("a")])
    with pytest.raises(AdapterNotFoundError):
        manager.unload_adapter("a")
    with pytest.raises(NoBatchPreparedError):
        model(rows(1))
    manager.unload_adapter("b")
    assert torch.equal(model(rows(1)), model.base(rows(1)))


def test_a_stray_replay_of_an_unloaded_slot_adds_nothing():
    """The backend is told of the slot behind the manager's back."""
    from lora_core.batch import LoRABatch

    manager, model, _ = loaded("a", "b")
    run(manager, model, rows(2), "a", "b")
    slot = manager.adapters()["a"].slot
    manager.unload_adapter("a")
    manager.backend.prepare_batch(LoRABatch([1], [slot]))
    assert torch.equal(model(rows(1)), model.base(rows(1)))


def test_pin_brings_back_what_was_dropped(folders):
    manager, model = make(max_cpu_loras=2)
    for name in "abc":
        manager.load_adapter(name, folders[name])
    manager.pin("a")
    assert manager.adapters()["a"].slot is not None
    assert_runs(manager, model, {"a": adapter(0), "c": adapter(2)})


def test_close_gives_everything_back():
    manager, model, _ = loaded("a", "b")
    manager.pin("a")
    manager.prepare([LoRARequest("a")])
    hold = manager.acquire("b")
    with pytest.raises(AdapterInUseError, match="held by acquire: 'b'"):
        manager.close()
    hold.release()
    manager.close()
    assert all(layer.weights is None for layer in model.layers.values())
    assert torch.equal(model(rows(1)), model.base(rows(1)))


# -- names, and refusals that change nothing --------------------------------------------------------------


NAMES = [
    "/x",
    "../x",
    "org/a@v1",
    "a:b",
    "a'b\"c",
    "a,b",
    "a b",
    " a",
    "a\nb",
    "é",
    "x" * 5000,
    "None",
    "0",
    "A",
    "a",
]


def test_k10_names_are_exact_unique_and_never_split():
    manager, model = make(max_loras=4)
    sources = {name: adapter(seed) for seed, name in enumerate(NAMES)}
    for name, source in sources.items():
        manager.load_adapter(name, source)
    assert list(sources) == list(manager.adapters())
    for start in range(0, len(NAMES), 4):
        assert_runs(manager, model, {name: sources[name] for name in NAMES[start : start + 4]})


def test_k10_three_hundred_names():
    manager, model = make(max_loras=3)
    sources = {f"tenant/{i}": adapter(i, ("q_proj",), rank=1 + i % 16) for i in range(300)}
    for name, source in sources.items():
        manager.load_adapter(name, source)
    for name in ("tenant/1", "tenant/10", "tenant/100", "tenant/299"):
        assert_runs(manager, model, {name: sources[name]})


@pytest.mark.parametrize("name", ["", "__base__", None, 3, ("a",)])
def test_k10_names_that_cannot_be(name):
    manager, _ = make()
    with pytest.raises(AdapterFormatError, match="name"):
        manager.load_adapter(name, adapter(0))
    assert manager.adapters() == {}


def test_k10_names_are_folders_only_below_a_root(tmp_path):
    write_adapter(tmp_path / "root" / "org" / "a@v1", *adapter(0))
    write_adapter(tmp_path / "x", *adapter(1))
    manager, model = make(adapter_root=tmp_path / "root")
    manager.load_adapter("org/a@v1")
    assert_runs(manager, model, {"org/a@v1": adapter(0)})
    for name in ("../x", str(tmp_path / "x")):
        with pytest.raises(AdapterFormatError, match="outside of the adapter root"):
            manager.load_adapter(name)
    with pytest.raises(AdapterFormatError, match="outside of the adapter root"):
        manager.load_adapter("harmless", tmp_path / "x")
    assert list(manager.adapters()) == ["org/a@v1"]
    rootless, _ = make()
    with pytest.raises(AdapterFormatError, match="no adapter_root"):
        rootless.load_adapter("org/a@v1")


def test_a_name_that_is_taken():
    manager, model, sources = loaded("a")
    with pytest.raises(AdapterExistsError, match=r"'a' is loaded already: use refresh\('a', ...\)"):
        manager.load_adapter("a", adapter(5))
    assert_runs(manager, model, sources)


def test_k2_k8_rank_over_the_limit_tells_rank_module_and_limit():
    manager, _ = make(max_rank=8)
    config, tensors = adapter(0, rank=8)
    more = adapter(1, ("o_proj",), rank=9)[1]
    with pytest.raises(
        UnsupportedAdapterError,
        match=r"adapter 'a': o_proj has rank 9, but this pool has room for rank 8.*max_rank=9",
    ):
        manager.load_adapter("a", ({**config, "rank_pattern": {"o_proj": 9}}, tensors | more))
    assert manager.stats().device_bytes == 0


def test_memory_that_would_not_suffice_is_refused_before_it_is_taken(monkeypatch):
    from lora_core import memory

    manager, model = make()
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 1000)
    with pytest.raises(InsufficientMemoryError, match=r"adapter 'a' needs 0.0 MiB on cpu"):
        manager.load_adapter("a", adapter(0))
    assert all(layer.weights is None for layer in model.layers.values())
    assert manager.adapters() == {}


def test_the_estimate_is_what_is_then_taken(monkeypatch):
    from lora_core import pool

    asked = []
    monkeypatch.setattr(pool, "require_bytes", lambda needed, *_: asked.append(needed))
    manager, _ = make()
    manager.load_adapter("a", adapter(0, ALL))
    assert [manager.stats().device_bytes] == asked
    config, tensors = adapter(0)
    dora = {
        **tensors,
        "q_proj.lora_magnitude_vector": torch.ones(12),
        "v_proj.lora_magnitude_vector": torch.ones(8),
    }
    manager.load_adapter("b", ({**config, "use_dora": True}, dora))
    assert manager.stats().device_bytes == sum(asked)


def test_layers_come_before_adapters():
    manager, model, _ = loaded("a")
    with pytest.raises(AdapterExistsError, match="add layers first"):
        manager.add_layers({})
    manager.unload_adapter("a")
    with pytest.raises(ValueError, match="'q_proj' is registered already"):
        manager.add_layers({"q_proj": model.layers["q_proj"]})


def test_weights_may_be_written_in_and_out_of_inference_mode():
    manager, model = make()
    with torch.inference_mode():
        manager.load_adapter("a", adapter(0))
        assert_runs(manager, model, {"a": adapter(0)})
    manager.refresh("a", adapter(1))
    assert_runs(manager, model, {"a": adapter(1)})


def test_sizes_are_told(folders):
    manager, _ = make()
    info = manager.load_adapter("a", folders["a"])
    assert (info.name, info.max_rank, info.modules) == ("a", 4, ("q_proj", "v_proj"))
    assert info.source == str(folders["a"])
    assert info.nbytes == 4 * (4 * 16 + 12 * 4 + 4 * 16 + 8 * 4) + 2 * 8
    assert info.notes == ()


def test_oddities_are_logged_and_kept(caplog):
    manager, _ = make()
    config, tensors = adapter(0)
    info = manager.load_adapter("a", ({**config, "rank_pattern": {"nobody": 3}}, tensors))
    assert info.notes == ("rank_pattern 'nobody' matches no module",)
    assert "adapter 'a': rank_pattern 'nobody' matches no module" in caplog.text
