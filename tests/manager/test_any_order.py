"""Any order of loads, refreshes, evictions and forwards: each row has the weights last given to its name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from lora_core.errors import AdapterInUseError, NoFreeSlotError
from lora_core.manager import LoRARequest
from tests.manager.helpers import SHAPES, Model, adapter, make, rows

MODULES = st.sets(st.sampled_from(sorted(SHAPES)), min_size=1)
NAMES = st.sampled_from(["a", "b", "c"])
SLOTS = 2


class Lifecycle(RuleBasedStateMachine):
    """The manager beside a dictionary that says what each name means."""

    holds = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.manager, self.model = make(Model(), max_loras=SLOTS)
        self.meant: dict[str, tuple] = {}
        self.pinned: set[str] = set()
        self.held: list[str] = []
        self.seed = 0

    def source(self, modules: set[str], rank: int) -> tuple:
        self.seed += 1
        return adapter(self.seed, tuple(sorted(modules)), rank=rank)

    @rule(name=NAMES, modules=MODULES, rank=st.integers(1, 16))
    def load_or_refresh(self, name, modules, rank):
        source = self.source(modules, rank)
        (self.manager.refresh if name in self.meant else self.manager.load_adapter)(name, source)
        self.meant[name] = source

    @rule(name=NAMES)
    def unload(self, name):
        if name not in self.meant:
            return
        if name in self.pinned or name in self.held:
            with pytest.raises(AdapterInUseError):
                self.manager.unload_adapter(name)
        else:
            self.manager.unload_adapter(name)
            del self.meant[name]

    @rule(name=NAMES)
    def pin_or_unpin(self, name):
        if name in self.pinned:
            self.manager.unpin(name)
            self.pinned.remove(name)
        elif name in self.meant:
            if len(self.pinned) < SLOTS:
                self.manager.pin(name)
                self.pinned.add(name)
            else:
                with pytest.raises(NoFreeSlotError):
                    self.manager.pin(name)

    @rule(name=NAMES)
    def prefetch(self, name):
        if name in self.meant:
            assert self.manager.prefetch(name) == (name in self.pinned or len(self.pinned) < SLOTS)

    @rule(target=holds, name=NAMES)
    def acquire(self, name):
        if name not in self.meant:
            return None
        self.held.append(name)
        return self.manager.acquire(name)

    @rule(hold=holds)
    def release(self, hold):
        if hold is not None and hold not in self.released:
            self.released.append(hold)
            self.held.remove(hold.name)
        if hold is not None:
            hold.release()

    @property
    def released(self) -> list:
        return self.__dict__.setdefault("_released", [])

    @rule(
        names=st.lists(st.none() | NAMES, min_size=1, max_size=5),
        refresh=st.booleans(),
        lane=st.integers(0, 1),
    )
    def forward(self, names, refresh, lane):
        names = [name if name in self.meant else None for name in names]
        wanted = set(names) - {None}
        batch = [LoRARequest(name) for name in names]
        x = rows(len(names), seed=self.seed)
        if len(wanted | self.pinned) > SLOTS:
            with pytest.raises(NoFreeSlotError):
                self.manager.prepare(batch, lane=lane)
            return
        before = dict(self.meant)
        with self.manager.batch(batch, mode="decode", lane=lane):
            if refresh and wanted:
                self.load_or_refresh(min(wanted), {"k_proj"}, 5)
            out = self.model(x)
        for i, name in enumerate(names):
            row = x[i : i + 1]
            expected = (
                self.model.base(row).double()
                if name is None
                else self.model.expected(row, before[name])
            )
            torch.testing.assert_close(out[i : i + 1].double(), expected, rtol=1e-4, atol=1e-4)

    @invariant()
    def accounts_agree(self):
        known = self.manager.adapters()
        assert known.keys() == self.meant.keys()
        assert self.manager.gate.adapters_loaded == len(self.meant)
        slots = [info.slot for info in known.values() if info.slot is not None]
        assert len(set(slots)) == len(slots) <= SLOTS
        assert {name for name, info in known.items() if info.pinned} == self.pinned
        assert all(known[name].slot is not None for name in self.pinned)
        assert {name: self.held.count(name) for name in known} == {
            n: i.holds for n, i in known.items()
        }
        assert self.manager.backend.batch_info is None
        live = {slot: set(sites) for slot, sites in enumerate(self.manager.pool._live)}
        for name, layer in self.model.layers.items():
            if layer.weights is not None:
                silent = [slot for slot, sites in live.items() if name not in sites]
                assert not layer.weights.ranks[silent].any()


def examples(count: int) -> settings:
    return settings(
        max_examples=count,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


def test_any_order():
    run_state_machine_as_test(Lifecycle, settings=examples(15))


@pytest.mark.slow
def test_any_order_for_long():
    run_state_machine_as_test(Lifecycle, settings=examples(400))
