"""Prepare, reset, lanes, idle forwards, and the plan of who runs together."""

from __future__ import annotations

import math
import time
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_core.batch import NO_LORA, LoRABatch
from lora_core.capabilities import Capabilities, Op
from lora_core.errors import (
    AdapterNotFoundError,
    GraphNotInitializedError,
    InvalidBatchError,
    NoBatchPreparedError,
    NoFreeSlotError,
    UnsupportedAdapterError,
    UnsupportedOpError,
)
from lora_core.layers.base import LoRALayer
from lora_core.manager import LoRAManager, LoRARequest
from lora_core.sites import Site
from lora_core.torch_backend import TorchBackend
from lora_core.weights import SliceLayout
from tests.adapters.helpers import write_adapter
from tests.manager.helpers import K, Model, adapter, assert_runs, make, rows, run


def loaded(*names: str, **options):
    manager, model = make(**options)
    sources = {name: adapter(seed) for seed, name in enumerate(names)}
    for name, source in sources.items():
        manager.load_adapter(name, source)
    return manager, model, sources


def requests(*names: str | None) -> list[LoRARequest]:
    return [LoRARequest(name) for name in names]


# -- prepare and reset -----------------------------------------------------------------------------------


def test_requests_become_lengths_and_slots():
    manager, _, _ = loaded("a", "b")
    info = manager.prepare(
        [LoRARequest("b", 3), LoRARequest(None, 2), LoRARequest("a", 0), LoRARequest("b", 1)],
        logits=[[1, 1, 0, 1]],
    )
    slots = {name: known.slot for name, known in manager.adapters().items()}
    assert [slots["b"], NO_LORA, slots["a"], slots["b"]] == info.req_slots.tolist()
    assert info.req_seg_indptr.tolist() == [0, 3, 5, 5, 6]
    assert info is manager.backend.batch_info
    assert info.passes[0].num_rows == 3
    manager.reset()
    manager.reset()
    assert manager.backend.batch_info is None


def test_scales_reach_the_delta():
    manager, model, sources = loaded("a")
    x = rows(2)
    with manager.batch([LoRARequest("a", scale=0.5), LoRARequest("a")], mode="decode"):
        out = model(x)
    base, full = model.base(x).double(), model.expected(x, sources["a"])
    torch.testing.assert_close(
        out[0].double(), (base + 0.5 * (full - base))[0], rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(out[1].double(), full[1], rtol=1e-5, atol=1e-5)


def test_k30_an_exception_in_the_forward_ends_the_batch():
    manager, model, _ = loaded("a")
    with pytest.raises(RuntimeError, match="mine"), manager.batch(requests("a")):
        raise RuntimeError("mine")
    assert manager.backend.batch_info is None
    with manager.base_only():
        assert torch.equal(model(rows(1)), model.base(rows(1)))
    manager.unload_adapter("a")


@pytest.mark.parametrize(
    ("batch", "options", "error"),
    [
        (["z"], {}, AdapterNotFoundError),
        (["a", "b", "c"], {}, NoFreeSlotError),
        (["a", "c"], {"logits": [[1]]}, InvalidBatchError),
        (["c"], {"mode": "sideways"}, InvalidBatchError),
        (["c"], {"lane": -1}, InvalidBatchError),
        (["c"], {"lane": 7}, InvalidBatchError),
        (["c"], {"graph": "decode"}, GraphNotInitializedError),
    ],
)
def test_a_refused_batch_leaves_none_and_evicts_nobody(batch, options, error):
    manager, model, sources = loaded("a", "b", "c")
    assert_runs(manager, model, {"a": sources["a"], "b": sources["b"]})
    before = manager.adapters()
    manager.prepare(requests("a"))
    with pytest.raises(error):
        manager.prepare(requests(*batch), **options)
    if "lane" not in options:
        assert manager.backend.batch_info is None
    if "graph" not in options:  # only the backend knows that one, after the adapters have moved in
        assert before == manager.adapters()
    manager.reset()
    manager.unload_adapter("a")


@pytest.mark.parametrize("several", [["a", "b"], ("a",), {"a"}, torch.zeros(3), 1])
def test_several_adapters_per_request_and_per_token_are_refused(several):
    with pytest.raises(UnsupportedAdapterError, match="one request has one adapter"):
        LoRARequest(several)


@pytest.mark.parametrize("length", [-1, 1.5, "3", None])
def test_lengths_that_cannot_be(length):
    with pytest.raises(InvalidBatchError, match="a request of length"):
        LoRARequest("a", length)


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_scales_that_cannot_be(scale):
    manager, _, _ = loaded("a")
    with pytest.raises(InvalidBatchError, match="scales must be finite"):
        manager.prepare([LoRARequest("a", scale=scale)])


def test_a_forgotten_prepare_is_heard_of():
    manager, model = make()
    assert torch.equal(model(rows(1)), model.base(rows(1)))  # without adapters nobody can forget
    manager.load_adapter("a", adapter(0))
    with pytest.raises(NoBatchPreparedError, match="q_proj"):
        model(rows(1))
    assert model(rows(0)).shape == (0, 44)


def test_k24_an_idle_rank_after_a_batch_of_eight():
    manager, model, _ = loaded("a")
    manager.prepare([LoRARequest("a", 8)])
    model(rows(8))
    with manager.idle():
        assert manager.backend.batch_info is None
        assert model(rows(0)).shape == (0, 44)
        assert torch.equal(model(rows(4)), model.base(rows(4)))
    assert not manager.gate.base_allowed


def test_k25_a_base_step_after_an_adapter_step_is_the_base():
    manager, model, _ = loaded("a")
    x = rows(3)
    run(manager, model, x, "a", "a", "a")
    assert torch.equal(run(manager, model, x, None, None, None), model.base(x))
    with manager.base_only(), manager.base_only():
        assert torch.equal(model(x), model.base(x))
    assert not manager.gate.base_allowed


def test_base_only_beside_a_live_batch_is_refused():
    manager, _, _ = loaded("a")
    with (
        manager.batch(requests("a")),
        pytest.raises(InvalidBatchError, match="base_only: a batch is prepared"),
        manager.base_only(),
    ):
        pass


def test_inactive_switches_return_when_an_exception_flies():
    manager, _, _ = loaded("a")
    for context in (manager.idle, manager.base_only):
        with pytest.raises(RuntimeError, match="mine"), context():
            raise RuntimeError("mine")
        assert not manager.gate.base_allowed


def test_ranges_for_profilers_when_asked(monkeypatch):
    from contextlib import contextmanager

    ranges = []

    @contextmanager
    def note(name):
        ranges.append(f"+{name}")
        yield
        ranges.append(f"-{name}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range", note)
    silent, model, _ = loaded("a")
    run(silent, model, rows(1), "a")
    assert ranges == []
    monkeypatch.setenv("LORA_CORE_NVTX", "1")
    manager, model, _ = loaded("a")
    run(manager, model, rows(1), "a")
    prepare, forward = "lora_core.prepare", "lora_core.forward"
    assert ranges == [f"+{prepare}", f"-{prepare}", f"+{forward}", f"-{forward}"]


def test_prepare_is_cheap():
    """256 requests: names to slots in far less time than the backend takes for its tables."""
    manager, _, _ = loaded("a", "b", max_loras=8)
    batch = requests(*["a", "b", None, "a"] * 64)
    prepared = manager.prepare(batch, mode="decode")
    raw = LoRABatch([1] * 256, prepared.req_slots.tolist(), "decode")

    def fastest(work) -> float:
        times = []
        for _ in range(60):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return min(times)

    ours = fastest(lambda: manager.prepare(batch, mode="decode"))
    backend = fastest(lambda: manager.backend.prepare_batch(raw))
    assert ours - backend < 500e-6


# -- graphs ----------------------------------------------------------------------------------------------


def test_graph_batches_go_to_the_backends_static_buffers():
    manager, _, _ = loaded("a")
    manager.lane_backend(0).init_graph("decode", max_requests=4, max_tokens=4)
    first = manager.prepare(requests("a", None), mode="decode", graph="decode")
    address = first.request_table().slots.data_ptr()
    second = manager.prepare(requests(None, "a", "a"), mode="decode", graph="decode")
    assert address == second.request_table().slots.data_ptr()
    slot = manager.adapters()["a"].slot
    assert second.request_table().slots.tolist() == [NO_LORA, slot, slot, NO_LORA]


def test_weights_that_a_captured_graph_cannot_know_are_told_of(caplog):
    manager, _ = make(target_modules=["q_proj", "v_proj"])
    manager.backend.init_graph("decode", max_requests=4, max_tokens=4)
    config, tensors = adapter(0)
    manager.load_adapter("a", (config, tensors))
    assert caplog.text == ""
    generation = manager.stats().generation
    bias = {
        "q_proj.lora_magnitude_vector": torch.ones(12),
        "v_proj.lora_magnitude_vector": torch.ones(8),
    }
    manager.load_adapter("dora", ({**config, "use_dora": True}, tensors | bias))
    assert "q_proj got new weights after init_graph" in caplog.text
    assert manager.stats().generation > generation


def test_whole_weights_are_refused_in_graphs():
    manager, _ = make()
    manager.backend.init_graph("decode", max_requests=4, max_tokens=4)
    config, tensors = adapter(0)
    manager.load_adapter("a", (config, tensors | {"k_proj.weight": torch.ones(8, K)}))
    with pytest.raises(UnsupportedAdapterError, match="'a' brings whole weights"):
        manager.prepare(requests("a"), mode="decode", graph="decode")
    manager.prepare(requests("a"), mode="decode")


# -- claims of the backend -------------------------------------------------------------------------------


class PlainBackend(TorchBackend):
    """Claims plain linears of rank 8 in float32 and no more."""

    name = "plain"
    capabilities: ClassVar = Capabilities(
        dtypes=frozenset({"float32"}), device_types=frozenset({"cpu"}), max_rank=8, max_slices=2
    )


RICH = {
    "dora": ({"use_dora": True}, {"q_proj.lora_magnitude_vector": torch.ones(12), "v_proj.lora_magnitude_vector": torch.ones(8)}),
    "bias": ({}, {"q_proj.bias": torch.ones(12)}),
    "full_weight": ({}, {"o_proj.weight": torch.ones(K, K)}),
}  # fmt: skip


@pytest.mark.parametrize("op", RICH)
def test_features_that_the_backend_does_not_claim_are_refused_at_load(op):
    fields, extra = RICH[op]
    config, tensors = adapter(0)
    source = ({**config, **fields}, tensors | extra)
    model = Model(bias=True)
    manager = model.attach(LoRAManager(PlainBackend(device="cpu"), max_loras=2, max_rank=8))
    with pytest.raises(
        UnsupportedAdapterError, match=rf"'a': \w+ .*backend 'plain' does not claim '{op}'"
    ):
        manager.load_adapter("a", source)
    assert all(layer.weights is None for layer in model.layers.values())
    other, _ = make(Model(bias=True))
    assert other.load_adapter("a", source).max_rank == 4


class StubLayer(LoRALayer):
    """A site without a forward."""

    def __init__(self, site: Site, gate, dtype=torch.float32) -> None:
        super().__init__(torch.nn.Linear(site.in_features, site.layout.out_features), site, gate)
        self.base, self.dtype = self.base_layer, dtype


@pytest.mark.parametrize(
    ("kind", "widths", "dtype", "match"),
    [
        (
            "embedding",
            (8,),
            torch.float32,
            "of kind 'embedding', and backend 'plain' does not claim 'embedding'",
        ),
        ("lm_head", (8,), torch.float32, "does not claim 'lm_head'"),
        (
            "linear",
            (8,),
            torch.bfloat16,
            "computes in bfloat16, and backend 'plain' claims float32",
        ),
        ("linear", (4, 2, 2), torch.float32, "packs 3 slices, and backend 'plain' takes 2"),
    ],
)
def test_sites_that_the_backend_cannot_serve_are_refused(kind, widths, dtype, match):
    site = Site("site", kind, K, SliceLayout(widths), tuple(f"part{i}" for i in range(len(widths))))
    prefix = "site.lora_embedding_" if kind == "embedding" else "site.lora_"
    suffix = "" if kind == "embedding" else ".weight"
    tensors = {f"{prefix}A{suffix}": torch.ones(4, K), f"{prefix}B{suffix}": torch.ones(8, 4)}
    source = ({"peft_type": "LORA", "r": 4}, tensors)

    manager = LoRAManager(PlainBackend(device="cpu"), max_rank=8)
    manager.add_layers({"site": StubLayer(site, manager.gate, dtype)})
    with pytest.raises(UnsupportedAdapterError, match=match):
        manager.load_adapter("a", source)

    targeted = LoRAManager(PlainBackend(device="cpu"), max_rank=8, target_modules=["site"])
    with pytest.raises(UnsupportedAdapterError, match=match):
        targeted.add_layers({"site": StubLayer(site, targeted.gate, dtype)})
    assert dict(targeted.layers) == {}


def test_limits_of_the_backend_hold_for_the_manager():
    with pytest.raises(
        UnsupportedOpError, match=r"'plain' does not support max_rank: its limit is rank 8"
    ):
        LoRAManager(PlainBackend(device="cpu"), max_rank=16)
    manager = Model().attach(LoRAManager(PlainBackend(device="cpu"), max_rank=8))
    manager.load_adapter("a", adapter(0))
    with pytest.raises(UnsupportedOpError, match="'plain' does not support scales"):
        manager.prepare([LoRARequest("a", scale=2.0)])
    assert not PlainBackend.capabilities.supports(Op.SCALES)


# -- lanes -----------------------------------------------------------------------------------------------


def test_two_lanes_overlap_and_each_sees_its_own_batch():
    manager, model, _ = loaded("a", "b")
    x, y = rows(2, seed=1), rows(3, seed=2)
    of_x, of_y = run(manager, model, x, "a", None), run(manager, model, y, "b", "b", "a")
    before = manager.gate.backend
    with (
        manager.batch(requests("a", None), mode="decode", lane=0) as one,
        manager.batch(requests("b", "b", "a"), mode="decode", lane=1) as two,
    ):
        for _ in range(2):
            with one.active():
                assert torch.equal(of_x, model(x))
            with two.active():
                assert torch.equal(of_y, model(y))
        with two.active(), one.active():
            assert torch.equal(of_x, model(x))
        assert torch.equal(of_y, model(y))  # the one prepared last is directed to
        assert one.info is not two.info
    assert before is manager.gate.backend
    assert before.batch_info is manager.lane_backend(1).batch_info is None


def test_lanes_share_weights_and_nothing_else():
    manager, model, _ = loaded("a")
    first, second = manager.lane_backend(0), manager.lane_backend(1)
    assert type(first) is type(second)
    assert first is not second
    assert first.workspace is not second.workspace
    weights = model.layers["q_proj"].weights
    run(manager, model, rows(1), "a", lane=1)
    assert weights is model.layers["q_proj"].weights


def test_a_slot_in_another_lanes_batch_is_in_use():
    manager, model, sources = loaded("a", "b", "c")
    with manager.batch(requests("a"), lane=0):
        with manager.batch(requests("b"), lane=1):
            with pytest.raises(NoFreeSlotError, match=r"only 0 of 2 slots"):
                manager.prepare(requests("c"), lane=2)
            assert manager.plan(requests("c"), lane=2).deferred == requests("c")
        assert_lane_runs(manager, model, "c", sources["c"], lane=2)
        assert manager.adapters()["a"].slot is not None


def assert_lane_runs(manager, model, name, source, lane):
    x = rows(1)
    out = run(manager, model, x, name, lane=lane)
    torch.testing.assert_close(out.double(), model.expected(x, source), rtol=1e-5, atol=1e-5)


def test_k42_refresh_while_one_lane_is_live_gives_the_other_the_new_weights():
    manager, model, sources = loaded("a")
    x = rows(1)
    with manager.batch(requests("a"), lane=0) as old:
        manager.refresh("a", adapter(7))
        assert_lane_runs(manager, model, "a", adapter(7), lane=1)
        with old.active():
            torch.testing.assert_close(
                model(x).double(), model.expected(x, sources["a"]), rtol=1e-5, atol=1e-5
            )
    assert_runs(manager, model, {"a": adapter(7)})
    assert manager.stats().slots_used == 1


def test_resetting_one_lane_leaves_the_other():
    manager, _, _ = loaded("a")
    manager.prepare(requests("a"), lane=0)
    manager.prepare(requests("a"), lane=1)
    manager.reset(lane=0)
    assert manager.lane_backend(0).batch_info is None
    assert manager.lane_backend(1).batch_info is not None
    with manager.idle(lane=0):
        assert manager.gate.backend is manager.lane_backend(0)
    assert manager.lane_backend(1).batch_info is not None
    manager.prepare(requests("a"), lane=0)
    with manager.active(1):
        assert manager.gate.backend is manager.lane_backend(1)
    assert manager.gate.backend is manager.lane_backend(0)
    with manager.active(1):
        manager.reset(lane=1)
        assert manager.gate.backend is manager.lane_backend(0)
    manager.reset()
    manager.unload_adapter("a")


# -- plan ------------------------------------------------------------------------------------------------


def names(part) -> list[str | None]:
    return [request.adapter for request in part]


def test_k43_as_many_adapters_as_slots_and_the_base():
    manager, _, _ = loaded("a", "b")
    batch = requests("a", None, "b", None, "a")
    assert manager.plan(batch) == (batch, [])


def test_k43_everything_admitted_counts_not_only_what_runs():
    manager, _, _ = loaded(*"abcd")
    admitted, deferred = manager.plan(requests("a", "b", None, "c", "a", "d"))
    assert (names(admitted), names(deferred)) == (["a", "b", None, "a"], ["c", "d"])
    manager.prepare(admitted)


def test_k43_one_slot_and_a_steady_stream():
    """A, B, A, A, A, ...: B runs within `patience` steps, and so does A afterwards."""
    manager, _, _ = loaded("a", "b", max_loras=1, patience=4)
    ran = []
    for _ in range(20):
        admitted, _ = manager.plan(requests("a", "a", "b", "a", None))
        manager.prepare(admitted)
        ran.append({name for name in names(admitted) if name})
    assert ran == ([{"a"}] * 4 + [{"b"}] * 4) * 2 + [{"a"}] * 4
    assert manager.stats().slot_writes == 5  # not one per step


def test_plan_prefers_adapters_that_have_a_slot():
    manager, model, _ = loaded("a", "b", "c")
    run(manager, model, rows(2), "c", "b")
    admitted, deferred = manager.plan(requests("a", "b", "c"))
    assert (names(admitted), names(deferred)) == (["b", "c"], ["a"])


def test_plan_counts_other_lanes_and_pins():
    manager, _, _ = loaded(*"abcd", max_loras=3)
    manager.pin("d")
    with manager.batch(requests("c"), lane=1):
        admitted, deferred = manager.plan(requests("a", "b", "c", "d"))
        assert (names(admitted), names(deferred)) == (["a", "c", "d"], ["b"])
        manager.prepare(admitted)
    assert names(manager.plan(requests("a", "b", "c")).admitted) == ["a", "c"]


def test_plan_says_when_nothing_can_ever_run():
    manager, _, _ = loaded("a", "b", max_loras=1)
    manager.pin("a")
    with pytest.raises(NoFreeSlotError, match="'b', but all 1 slots are pinned"):
        manager.plan(requests("a", "b"))
    assert manager.plan(requests("a", None)).deferred == []


def test_plan_forgets_those_who_went_away():
    manager, _, _ = loaded("a", "b", max_loras=1, patience=2)
    for _ in range(5):
        manager.prepare(manager.plan(requests("a")).admitted)
        assert names(manager.plan(requests("a", "b")).deferred) == ["b"]


def test_plan_reads_what_was_dropped_from_the_host_tier(tmp_path):
    manager, model = make(max_cpu_loras=2, patience=2)
    for seed, name in enumerate("abc"):
        manager.load_adapter(name, write_adapter(tmp_path / name, *adapter(seed)))
    seen = set()
    for _ in range(12):
        admitted, _ = manager.plan(requests("a", "b", "c"))
        assert_runs(manager, model, {name: adapter("abc".index(name)) for name in names(admitted)})
        seen |= set(names(admitted))
    assert seen == set("abc")


def test_plan_lets_a_dropped_adapter_wait_for_room_in_the_host_tier(tmp_path):
    manager, _ = make(max_cpu_loras=2)
    for seed, name in enumerate("abc"):
        manager.load_adapter(name, write_adapter(tmp_path / name, *adapter(seed)))
    holds = [manager.acquire(name) for name in "bc"]
    assert names(manager.plan(requests("a", None)).deferred) == ["a"]
    holds[0].release()
    assert manager.plan(requests("a", None)).deferred == []


def test_plan_of_an_unknown_adapter():
    manager, _, _ = loaded("a")
    with pytest.raises(AdapterNotFoundError, match="'z' is not loaded"):
        manager.plan(requests("a", "z"))


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_k43_nobody_waits_for_ever(data):
    """Requests come, run for some steps and go; each one's wait is bounded, each plan can be prepared."""
    count, slots = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    patience = data.draw(st.integers(1, 4))
    everyone = [f"adapter-{i}" for i in range(count)]
    manager, _, _ = loaded(*everyone, max_loras=slots, patience=patience)
    bound = patience + math.ceil(count / slots)
    waited = dict.fromkeys(everyone, 0)
    for _ in range(40):
        present = data.draw(st.sets(st.sampled_from(everyone))) | {everyone[0]}
        batch = requests(*sorted(present), None)
        admitted, deferred = manager.plan(batch)
        assert sorted(map(repr, batch)) == sorted(map(repr, admitted + deferred))
        assert None in names(admitted)
        manager.prepare(admitted)
        for name in everyone:
            waited[name] = waited[name] + 1 if name in names(deferred) else 0
        assert max(waited.values()) <= bound
