"""LoRAManager: adapters by name, on a model whose layers are wrapped.

Three places hold an adapter: its files, read once; the host tier, packed for this model; a slot on the
device. `prepare` maps the names of one forward to slots, moving in from the host tier what is missing,
and `reset` gives them free again. Names are keys and nothing else: they are never split, and no path
is made of one unless an adapter root is configured.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from lora_core.adapters.checkpoint import read_checkpoint
from lora_core.adapters.packing import PackedAdapter, pack
from lora_core.adapters.sharding import shard_adapter
from lora_core.backend import LoRABackend
from lora_core.batch import NO_LORA, BatchInfo, LoRABatch
from lora_core.capabilities import GraphKind, Mode, Op
from lora_core.errors import (
    AdapterExistsError,
    AdapterFormatError,
    AdapterInUseError,
    AdapterNotFoundError,
    InsufficientMemoryError,
    InvalidBatchError,
    NoFreeSlotError,
    UnsupportedAdapterError,
    UnsupportedOpError,
)
from lora_core.layers.base import ForwardGate, LoRALayer
from lora_core.layers.moe import ExpertsProjection
from lora_core.pool import SlotPool

_log = logging.getLogger("lora_core.manager")

RESERVED_NAMES = frozenset({"__base__"})
"""What PEFT calls the base model; no adapter may have it."""


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """One sequence of a forward.

    Args:
        adapter: name of a loaded adapter, None for the base model.
        length: its tokens in this forward.
        scale: a factor on the adapter's delta, for backends that claim it.

    Raises:
        UnsupportedAdapterError: several adapters, or one per token.
        InvalidBatchError: a length that is not a number of tokens.
    """

    adapter: str | None
    length: int = 1
    scale: float | None = None

    def __post_init__(self) -> None:
        _check_request(self.adapter, self.length)


@dataclass(frozen=True)
class AdapterInfo:
    """What is known of a loaded adapter.

    Attributes:
        name: it was loaded under.
        version: of its content; changes with `refresh` to other bytes, so that caches of prefixes
            (keys and values computed with it) may be keyed on it.
        source: folder, or None when it was loaded from memory.
        max_rank: largest rank of any module.
        modules: sites that it changes.
        nbytes: on the host.
        resident: whether the host tier holds it now.
        slot: on the device, or None.
        pinned: never evicted.
        holds: `acquire`s that are not released.
        notes: oddities of its files.
    """

    name: str
    version: str
    source: str | None
    max_rank: int
    modules: tuple[str, ...]
    nbytes: int
    resident: bool
    slot: int | None
    pinned: bool
    holds: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ManagerStats:
    """Counters since the manager was built, and what is taken now.

    Attributes:
        adapters: loaded.
        resident: of these, in the host tier.
        slots_used: slots that hold an adapter, of `max_loras`.
        max_loras: slots.
        host_bytes: of the host tier.
        device_bytes: of all stacked weights.
        reads: times that files were read.
        slot_writes: adapters moved into a slot.
        slot_hits: adapters that a batch found in theirs.
        slot_evictions: adapters that lost their slot to another.
        host_evictions: adapters dropped from the host tier.
        batches: prepared.
        generation: changes when weights are allocated; see `SlotPool.generation`.
    """

    adapters: int
    resident: int
    slots_used: int
    max_loras: int
    host_bytes: int
    device_bytes: int
    reads: int
    slot_writes: int
    slot_hits: int
    slot_evictions: int
    host_evictions: int
    batches: int
    generation: int


class Plan(NamedTuple):
    """The split of `LoRAManager.plan`; both parts in the order given."""

    admitted: list[LoRARequest]
    deferred: list[LoRARequest]


@dataclass(eq=False)
class _Adapter:
    """The record of one loaded adapter."""

    name: str
    source: Path | None
    packed: PackedAdapter | None  # None: dropped from the host tier, to be read again from `source`
    info: AdapterInfo
    pinned: bool = False
    holds: int = 0

    @property
    def droppable(self) -> bool:
        """Whether the host tier may ever give it up."""
        return self.source is not None and not self.pinned


@dataclass(eq=False)
class _Lane:
    """A backend instance and its live batch."""

    backend: LoRABackend[Any]
    slots: tuple[int, ...] = ()  # of the live batch, each once
    names: frozenset[str] = frozenset()
    waiting: dict[str, int] = field(default_factory=dict)  # adapter -> plans that left it out


class Hold:
    """Keeps one adapter from being unloaded until released; only the first release counts.

    Attributes:
        name: of the adapter.
    """

    def __init__(self, name: str, release: Callable[[], None]) -> None:
        self.name, self._release = name, release

    def release(self) -> None:
        """Let go; a request that ends and is aborted at once may well do so twice."""
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


@dataclass(frozen=True, eq=False)
class PreparedBatch:
    """A live batch, as `LoRAManager.batch` hands it out.

    Attributes:
        info: the backend's state of it.
        backend: of its lane.
        gate: of the manager.
    """

    info: BatchInfo
    backend: LoRABackend[Any]
    gate: ForwardGate

    def active(self) -> AbstractContextManager[None]:
        """Direct the layers to this batch, for forwards of several lanes in turn."""
        return _directed(self.gate, self.backend)


class LoRAManager:
    """Loads adapters, keeps them in slots, and prepares forwards that name them.

    Loading, unloading and refreshing may run in other threads than the one that prepares and runs
    forwards; forwards themselves, of all lanes, belong to one thread.

    Args:
        backend: computes; its device is the manager's.
        max_loras: slots on the device, so adapters in one batch.
        max_rank: highest rank of any adapter.
        max_cpu_loras: adapters that the host tier keeps; the least recently used one beyond is dropped
            and read again when it is prefetched. None: all that are loaded.
        target_modules: see `SlotPool`; give it where graphs are captured.
        adapter_root: when given, adapters are loaded from below this folder only, and by their name
            when no source is given.
        patience: plans that may leave out a waiting adapter before it goes first.

    Attributes:
        gate: what the layers look at.
        pool: the slots.
    """

    def __init__(
        self,
        backend: LoRABackend[Any],
        *,
        max_loras: int = 8,
        max_rank: int = 64,
        max_cpu_loras: int | None = None,
        target_modules: Iterable[str] | str | None = None,
        adapter_root: str | Path | None = None,
        patience: int = 8,
    ) -> None:
        if max_loras < 1 or max_rank < 1 or patience < 1:
            raise ValueError(
                f"max_loras {max_loras}, max_rank {max_rank} and patience {patience} must be at least 1"
            )
        if max_cpu_loras is not None and max_cpu_loras < max_loras:
            raise ValueError(
                f"max_cpu_loras is {max_cpu_loras}, but the host tier must hold what {max_loras} slots hold"
            )
        self.max_loras, self.max_rank, self.max_cpu_loras = max_loras, max_rank, max_cpu_loras
        self.patience = patience
        self.gate = ForwardGate(backend)
        self.pool = SlotPool(
            backend, max_loras=max_loras, max_rank=max_rank, target_modules=target_modules
        )
        self._root = Path(adapter_root) if adapter_root is not None else None
        self._changed = threading.Condition(threading.RLock())
        self._adapters: OrderedDict[str, _Adapter] = OrderedDict()  # least recently used first
        self._busy: set[str] = set()  # names that a thread is loading or refreshing
        self._lanes = [_Lane(backend)]
        self._slot_of: dict[str, int] = {}
        self._owner: list[str | None] = [None] * max_loras
        self._last_used = [0] * max_loras
        self._clock = 0
        self._homeless: list[_Adapter] = []  # pinned, refreshed while every slot was in use
        self._counts = dict.fromkeys(
            ("reads", "slot_writes", "slot_hits", "slot_evictions", "host_evictions", "batches"), 0
        )
        self._nvtx = os.environ.get("LORA_CORE_NVTX") == "1" and torch.cuda.is_available()

    # -- layers ------------------------------------------------------------------------------------

    @property
    def backend(self) -> LoRABackend[Any]:
        """The backend of lane 0, which also allocates."""
        return self._lanes[0].backend

    @property
    def layers(self) -> Mapping[str, LoRALayer | ExpertsProjection]:
        """The wrapped modules by site name."""
        return self.pool.layers

    def add_layers(self, layers: Mapping[str, LoRALayer | ExpertsProjection]) -> None:
        """Register wrapped modules, all before the first adapter is loaded.

        Raises:
            AdapterExistsError: an adapter is loaded, which these layers would not have.
        """
        with self._changed:
            if self._adapters or self._busy:
                raise AdapterExistsError(
                    f"layers were added while {len(self._adapters)} adapters are loaded, whose tensors would "
                    "not reach them: add layers first, or unload"
                )
            self.pool.add_layers(layers)

    def close(self) -> None:
        """Forget all adapters and take the weights from the layers; a live batch is reset.

        Raises:
            AdapterInUseError: an adapter is held by `acquire`, or being loaded.
        """
        with self._changed:
            if self._busy:
                raise AdapterInUseError(f"close: other threads are loading {_names(self._busy)}")
            held = [adapter.name for adapter in self._adapters.values() if adapter.holds]
            if held:
                raise AdapterInUseError(
                    f"close: adapters are held by acquire: {_names(held)}. Release them first."
                )
            for lane in range(len(self._lanes)):
                self.reset(lane=lane)
            for name in list(self._adapters):
                self._forget(name)
            self.pool.remove_layers()

    # -- loading -----------------------------------------------------------------------------------

    def load_adapter(self, name: str, source: object = None) -> AdapterInfo:
        """Read an adapter into the host tier, once and completely, and make it usable by name.

        Args:
            name: any text that is not taken; used exactly as it is.
            source: path of a PEFT folder, or (config, tensors by key); None: the folder of that name
                below `adapter_root`.

        Raises:
            AdapterExistsError: the name is taken, or being loaded by another thread.
            AdapterFormatError: unreadable or forbidden files, or a name that cannot be one.
            UnsupportedAdapterError: a feature that cannot be applied exactly here.
            AdapterMismatchError: an adapter for another model.
            InsufficientMemoryError: it would not fit; nothing was taken.
        """
        _check_name(name)
        with self._changed:
            if name in self._adapters or name in self._busy:
                state = "loaded" if name in self._adapters else "being loaded by another thread"
                raise AdapterExistsError(
                    f"adapter {name!r} is {state} already: use refresh({name!r}, ...) for new weights, or "
                    "unload_adapter first"
                )
            self._busy.add(name)
        try:
            origin = self._origin(name, source)
            packed = self._read(name, origin if origin is not None else source)
            with self._changed:
                victim = self._host_victim(name)
                self._reserve(packed, name)
                self._drop(victim)
                adapter = _Adapter(name, origin, packed, _info(name, origin, packed))
                self._adapters[name] = adapter
                self.gate.adapters_loaded = len(self._adapters)
                _log.info(
                    "loaded adapter %r: %d sites, rank %d", name, len(packed.sites), packed.max_rank
                )
                return self._describe(adapter)
        finally:
            with self._changed:
                self._busy.discard(name)
                self._changed.notify_all()

    def refresh(self, name: str, source: object = None) -> AdapterInfo:
        """Replace an adapter's weights; the next batch that names it uses the new ones.

        A live batch goes on with the old ones. If anything is wrong with the new ones, the adapter
        stays as it was.

        Args:
            name: of a loaded adapter.
            source: as for `load_adapter`; None: its folder, read again.

        Raises:
            AdapterNotFoundError: it is not loaded.
            AdapterExistsError: another thread is at it.
            AdapterError: as `load_adapter`.
        """
        with self._changed:
            adapter = self._get(name)
            if name in self._busy:
                raise AdapterExistsError(
                    f"adapter {name!r} is being loaded or refreshed by another thread"
                )
            origin = self._origin(name, source) if source is not None else adapter.source
            if origin is None and source is None:
                raise AdapterFormatError(
                    f"refresh: adapter {name!r} was loaded from memory, so there are no files to read again: "
                    "give its new (config, tensors)"
                )
            self._busy.add(name)
        try:
            packed = self._read(name, origin if origin is not None else source)
            with self._changed:
                self._reserve(packed, name)
                adapter.source, adapter.packed, adapter.info = (
                    origin,
                    packed,
                    _info(name, origin, packed),
                )
                slot = self._slot_of.pop(name, None)
                if slot is not None:
                    self._owner[slot] = None  # not cleared: a live batch may still use it
                    if not self._in_use(slot):
                        self._place(adapter, prefer=slot)
                    elif adapter.pinned and not self._place(adapter):
                        self._homeless.append(adapter)
                _log.info("refreshed adapter %r: version %s", name, packed.version)
                return self._describe(adapter)
        finally:
            with self._changed:
                self._busy.discard(name)
                self._changed.notify_all()

    def unload_adapter(
        self, name: str, *, wait: bool = False, timeout: float | None = None
    ) -> None:
        """Forget an adapter and silence its slot.

        Args:
            name: of a loaded adapter.
            wait: wait until nothing uses it, instead of refusing.
            timeout: seconds to wait at most.

        Raises:
            AdapterNotFoundError: it is not loaded.
            AdapterInUseError: it is pinned, or still held or part of a live batch.
        """
        with self._changed:
            self._await_release(name, wait=wait, timeout=timeout)
            self._forget(name)
            _log.info("unloaded adapter %r", name)

    def _await_release(self, name: str, *, wait: bool, timeout: float | None) -> None:
        """Return when nothing uses an adapter; for the arguments see `unload_adapter`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            adapter = self._get(name)
            if adapter.pinned:
                raise AdapterInUseError(
                    f"adapter {name!r} is pinned: unpin({name!r}) before unloading it"
                )
            reason = self._why_busy(adapter)
            if reason is None:
                return
            left = None if deadline is None else deadline - time.monotonic()
            if not wait or (left is not None and left <= 0):
                raise AdapterInUseError(
                    f"adapter {name!r} cannot be unloaded: it is {reason}. Try again after that, or use "
                    "unload_adapter(..., wait=True)."
                )
            self._changed.wait(left)

    def prefetch(self, name: str) -> bool:
        """Bring an adapter to the device before a batch needs it; reads its files if they were dropped.

        Returns:
            Whether it has a slot now; False when every slot is in use or pinned, and then it is in the
            host tier at least.

        Raises:
            AdapterNotFoundError: it is not loaded.
            AdapterError: its files have to be read again, and cannot be.
        """
        self._return_to_host(name)
        with self._changed:
            adapter = self._get(name)
            self._adapters.move_to_end(name)
            return name in self._slot_of or self._place(adapter, aside=True)

    def _return_to_host(self, name: str, protect: Iterable[str] = ()) -> None:
        """Read an adapter's files again if it was dropped from the host tier."""
        with self._changed:
            adapter = self._get(name)
            if adapter.packed is not None:
                return
        packed = self._read(name, adapter.source)
        with self._changed:
            if self._adapters.get(name) is not adapter or adapter.packed is not None:
                return
            if packed.version != adapter.info.version:
                raise AdapterFormatError(
                    f"adapter {name!r}: the files in {adapter.source} are no longer those it was loaded from. "
                    f"Use refresh({name!r}) to take the new ones."
                )
            self._drop(self._host_victim(name, protect))
            adapter.packed = packed

    def pin(self, name: str) -> None:
        """Keep an adapter in a slot from now on, whatever else is used.

        Raises:
            AdapterNotFoundError: it is not loaded.
            NoFreeSlotError: no slot can be had.
        """
        self._return_to_host(name)
        with self._changed:
            adapter = self._get(name)
            if name not in self._slot_of and not self._place(adapter):
                raise NoFreeSlotError(
                    f"pin: no slot is free for {name!r}: all are pinned or in use"
                )
            adapter.pinned = True

    def unpin(self, name: str) -> None:
        """Let an adapter be evicted again.

        Raises:
            AdapterNotFoundError: it is not loaded.
        """
        with self._changed:
            self._get(name).pinned = False

    def acquire(self, name: str) -> Hold:
        """Keep an adapter loaded, for a request that lives over many forwards.

        Returns:
            A hold: release it, or use it in a `with`.

        Raises:
            AdapterNotFoundError: it is not loaded.
        """
        with self._changed:
            adapter = self._get(name)
            adapter.holds += 1
        held = True

        def release() -> None:
            nonlocal held
            with self._changed:
                adapter.holds -= held
                held = False
                self._changed.notify_all()

        return Hold(name, release)

    # -- what is there -----------------------------------------------------------------------------

    def adapters(self) -> dict[str, AdapterInfo]:
        """All loaded adapters by name, the least recently used first."""
        with self._changed:
            return {name: self._describe(adapter) for name, adapter in self._adapters.items()}

    def version(self, name: str) -> str:
        """The content version of an adapter, for keys of prefix caches.

        Raises:
            AdapterNotFoundError: it is not loaded.
        """
        with self._changed:
            return self._get(name).info.version

    def stats(self) -> ManagerStats:
        """Counters, and what is taken now."""
        with self._changed:
            resident = [a.packed for a in self._adapters.values() if a.packed is not None]
            return ManagerStats(
                adapters=len(self._adapters),
                resident=len(resident),
                slots_used=len(self._slot_of),
                max_loras=self.max_loras,
                host_bytes=sum(packed.nbytes for packed in resident),
                device_bytes=self.pool.nbytes,
                generation=self.pool.generation,
                **self._counts,
            )

    # -- forwards ----------------------------------------------------------------------------------

    def plan(self, requests: Sequence[LoRARequest], *, lane: int = 0) -> Plan:
        """Choose requests whose adapters fit into one forward together; call it once per step.

        Base requests always fit. Adapters that other lanes' live batches use, and pinned ones, take
        their slots first. Adapters that have a slot go before those that would have to be moved in,
        unless one of these has been left out `patience` times: it then goes first, oldest first, so
        that nobody waits for ever.

        Files of adapters that were dropped from the host tier are read again here, when their turn comes.

        Raises:
            AdapterNotFoundError: a request names an adapter that is not loaded.
            NoFreeSlotError: every slot is pinned to other adapters.
            AdapterError: files that have to be read again, and cannot be.
        """
        with self._changed:
            wanted = self._distinct(r.adapter for r in requests)
            waiting = self._lane(lane).waiting
            for name in waiting.keys() - wanted.keys():
                del waiting[name]
            order = sorted(
                wanted,  # keeps the order of requests among equals
                key=lambda name: (
                    -waiting.get(name, 0) if waiting.get(name, 0) >= self.patience else 0,
                    name not in self._slot_of,
                    -waiting.get(name, 0),
                ),
            )
            pinned = {
                self._slot_of[a.name]
                for a in self._adapters.values()
                if a.pinned and a.name in self._slot_of
            }
            taken = pinned | {
                s for other in self._lanes if other is not self._lanes[lane] for s in other.slots
            }
            free = self.max_loras - len(taken)
            admitted: set[str] = set()
            for name in order:
                if self._slot_of.get(name) in taken:
                    admitted.add(name)
                elif len(pinned) == self.max_loras:
                    raise NoFreeSlotError(
                        f"plan: a request names adapter {name!r}, but all {self.max_loras} slots are pinned to "
                        "others: it could never run. Unpin one, or refuse the request."
                    )
                elif free and not self._must_wait(name, admitted):
                    self._return_to_host(name, protect=admitted)
                    free -= 1
                    admitted.add(name)
            for name in wanted:
                if name in admitted:
                    waiting.pop(name, None)
                else:
                    waiting[name] = waiting.get(name, 0) + 1
            parts: Plan = Plan([], [])
            for request in requests:
                parts[request.adapter is not None and request.adapter not in admitted].append(
                    request
                )
            return parts

    def prepare(
        self,
        requests: Sequence[LoRARequest],
        *,
        mode: Mode = "prefill",
        graph: GraphKind | None = None,
        logits: Sequence[Sequence[int]] = (),
        lane: int = 0,
        beside: Sequence[str] = (),
    ) -> BatchInfo:
        """Make these requests the live batch of a lane, and direct the layers to it.

        The lane's previous batch ends first, also when this one is refused. No file is read.

        Args:
            requests: in row order.
            mode: of the forward.
            graph: prepare for the replay of a captured graph of that kind.
            logits: per lm_head pass, the rows kept of each request.
            lane: another lane overlaps its batch with that of lane 0.
            beside: adapters that get a slot first, for rows that come from other ranks; see `seat`.

        Raises:
            AdapterNotFoundError: an adapter that is not loaded, or was dropped from the host tier.
            NoFreeSlotError: more adapters than slots.
            InvalidBatchError: lengths, scales or logits that cannot be.
        """
        with self._range("prepare"), self._changed:
            state = self._lane(lane)
            self._end(state, lane)
            batch, wanted = self._resolve(
                requests, mode=mode, graph=graph, logits=logits, beside=beside
            )
            self._occupy(state, wanted)
            try:
                self.pool.before_forward(state.slots)
                info = state.backend.prepare_batch(batch, graph=graph)
            except BaseException:
                self._end(state, lane)
                raise
            self.gate.backend = state.backend
            self._counts["batches"] += 1
            return info  # type: ignore[no-any-return]

    def _resolve(
        self,
        requests: Sequence[LoRARequest],
        *,
        mode: Mode,
        graph: GraphKind | None,
        logits: Sequence[Sequence[int]],
        beside: Sequence[str],
    ) -> tuple[LoRABatch, dict[str, _Adapter]]:
        """The batch in slots, after moving in what has none; refuses before it changes anything."""
        names = [r.adapter for r in requests]
        wanted = self._distinct([*beside, *names])
        scales = self._check_claims(requests, wanted, graph)
        lengths = [r.length for r in requests]
        if not wanted.keys() <= self._slot_of.keys():  # what is wrong must be seen before evicting
            LoRABatch(lengths, [NO_LORA] * len(lengths), mode, logits, scales)
        self._seat(wanted)
        slots: dict[str | None, int] = {None: NO_LORA}
        slots.update((name, self._slot_of[name]) for name in wanted)
        return LoRABatch(lengths, [slots[name] for name in names], mode, logits, scales), wanted

    def _check_claims(
        self,
        requests: Sequence[LoRARequest],
        wanted: Mapping[str, _Adapter],
        graph: GraphKind | None,
    ) -> list[float] | None:
        """The scales of a batch, after looking whether what it asks for can be done at all."""
        scales = None
        factors = [r.scale for r in requests]
        if factors.count(None) != len(factors):
            scales = [1.0 if factor is None else float(factor) for factor in factors]
            if not all(map(math.isfinite, scales)):
                raise InvalidBatchError(f"prepare: scales must be finite, got {scales}")
            if not self.backend.capabilities.supports(Op.SCALES):
                raise UnsupportedOpError(
                    backend=self.backend.name,
                    op="scales",
                    limit=f"ops {sorted(self.backend.capabilities.ops)}",
                    value=scales,
                )
            self._refuse_scaled_experts(requests, wanted)
        if graph is not None:
            whole = [a.name for a in wanted.values() if a.packed and a.packed.whole]
            if whole:
                raise UnsupportedAdapterError(
                    f"prepare: adapter {whole[0]!r} brings whole weights (modules_to_save), which a captured "
                    "graph cannot follow: run it in eager mode"
                )
        return scales

    def _refuse_scaled_experts(
        self, requests: Sequence[LoRARequest], wanted: Mapping[str, _Adapter]
    ) -> None:
        """Scales reach linear sites alone: an adapter would be scaled in one part and not in another."""
        for request in requests:
            if request.adapter is None or request.scale in (None, 1.0):
                continue
            for module in wanted[request.adapter].info.modules:
                if isinstance(self.layers.get(module), ExpertsProjection):
                    raise UnsupportedOpError(
                        backend="experts",
                        op="scales",
                        limit=f"adapters that leave experts alone; {request.adapter!r} changes {module}",
                        value=request.scale,
                    )

    def _seat(self, wanted: Mapping[str, _Adapter]) -> None:
        """Give every adapter a slot, or change nothing.

        Raises:
            NoFreeSlotError: they do not all fit.
            AdapterNotFoundError: one was dropped from the host tier.
        """
        slot_of = self._slot_of
        new = [adapter for name, adapter in wanted.items() if name not in slot_of]
        keep = {slot_of[name] for name in wanted if name in slot_of}
        if new:
            room = sum(self._evictable(slot) and slot not in keep for slot in range(self.max_loras))
            if len(new) > room:
                raise NoFreeSlotError(
                    f"prepare: the batch names {len(wanted)} adapters, {len(new)} of them without a slot, but "
                    f"only {room} of {self.max_loras} slots can be had for those: the others are named here too, "
                    "pinned, or in another lane's batch. Split the batch with plan(), or build the manager with "
                    "more max_loras."
                )
            for adapter in new:
                if adapter.packed is None:
                    raise AdapterNotFoundError(
                        f"prepare: adapter {adapter.name!r} was dropped from the host tier (max_cpu_loras is "
                        f"{self.max_cpu_loras}), and files are not read here: prefetch({adapter.name!r}) first, or "
                        "use plan(), which does"
                    )
        self._clock += 1
        self._counts["slot_hits"] += len(keep)
        for slot in keep:
            self._last_used[slot] = self._clock
        for name in wanted:
            self._adapters.move_to_end(name)
        for adapter in new:
            self._place(adapter, keep=keep)
            keep.add(slot_of[adapter.name])

    def seat(self, names: Sequence[str], *, lane: int = 0) -> None:
        """Give adapters their slots until `reset`, without a batch: other ranks' rows will use them.

        The lane's batch ends first.

        Raises:
            AdapterNotFoundError: one is not loaded, or was dropped from the host tier.
            NoFreeSlotError: they do not all fit.
        """
        with self._changed:
            state = self._lane(lane)
            self._end(state, lane)
            wanted = self._distinct(names)
            self._seat(wanted)
            self._occupy(state, wanted)
            self.pool.before_forward(state.slots)

    def _occupy(self, state: _Lane, wanted: Mapping[str, _Adapter]) -> None:
        state.slots = tuple(self._slot_of[name] for name in wanted)
        state.names = frozenset(wanted)

    def reset(self, *, lane: int = 0) -> None:
        """End the live batch of a lane, if there is one; layers directed to it return to lane 0."""
        with self._changed:
            state = self._lane(lane)
            self._end(state, lane)
            if self.gate.backend is state.backend:
                self.gate.backend = self.backend

    def active(self, lane: int) -> AbstractContextManager[None]:
        """Direct the layers to a lane, for those who prepare and reset several by hand."""
        return _directed(self.gate, self.lane_backend(lane))

    @contextmanager
    def batch(
        self,
        requests: Sequence[LoRARequest],
        *,
        mode: Mode = "prefill",
        graph: GraphKind | None = None,
        logits: Sequence[Sequence[int]] = (),
        lane: int = 0,
    ) -> Iterator[PreparedBatch]:
        """`prepare`, and `reset` in the end, whatever happens in between.

        Batches of different lanes may be alive together; `with batch.active():` directs the layers to
        one of them.
        """
        before = self.gate.backend
        info = self.prepare(requests, mode=mode, graph=graph, logits=logits, lane=lane)
        try:
            with self._range("forward"):
                yield PreparedBatch(info, self._lanes[lane].backend, self.gate)
        finally:
            self.reset(lane=lane)
            self.gate.backend = before

    @contextmanager
    def idle(self, *, lane: int = 0) -> Iterator[None]:
        """A forward without requests of its own, such as of an idle rank: ends the lane's batch first."""
        self.reset(lane=lane)
        with self.active(lane), self._base_allowed():
            yield

    @contextmanager
    def base_only(self) -> Iterator[None]:
        """Forwards of the base model alone are meant, not forgotten.

        Raises:
            InvalidBatchError: a batch is live, whose adapters would apply.
        """
        if self.gate.backend.batch_info is not None:
            raise InvalidBatchError(
                "base_only: a batch is prepared, and its adapters would apply: reset() it first"
            )
        with self._base_allowed():
            yield

    def lane_backend(self, lane: int) -> LoRABackend[Any]:
        """The backend instance of a lane, made when first asked for; for `init_graph`."""
        with self._changed:
            return self._lane(lane).backend

    # -- the parts of it ---------------------------------------------------------------------------

    @contextmanager
    def _base_allowed(self) -> Iterator[None]:
        before, self.gate.base_allowed = self.gate.base_allowed, True
        try:
            yield
        finally:
            self.gate.base_allowed = before

    def _range(self, what: str) -> AbstractContextManager[Any]:
        return torch.cuda.nvtx.range(f"lora_core.{what}") if self._nvtx else nullcontext()

    def _lane(self, lane: int) -> _Lane:
        if not 0 <= lane <= len(self._lanes):
            raise InvalidBatchError(
                f"lane {lane}: lanes are counted from 0, and the next new one is {len(self._lanes)}"
            )
        if lane == len(self._lanes):
            first = self._lanes[0].backend
            self._lanes.append(_Lane(type(first)(device=first.device, config=first.config)))
        return self._lanes[lane]

    def _end(self, state: _Lane, lane: int) -> None:
        state.backend.reset_batch_state()
        if state.slots:
            self.pool.after_forward(state.slots, lane)
            state.slots, state.names = (), frozenset()
            if self._homeless:
                self._homeless = [
                    adapter for adapter in self._homeless if not self._rehouse(adapter)
                ]
            self._changed.notify_all()

    def _distinct(self, names: Iterable[str | None]) -> dict[str, _Adapter]:
        """The adapters named, each once, in their order."""
        return {name: self._get(name) for name in dict.fromkeys(names) if name is not None}

    def _get(self, name: str) -> _Adapter:
        adapter = self._adapters.get(name)
        if adapter is None:
            raise AdapterNotFoundError(
                f"adapter {name!r} is not loaded; loaded are {_names(self._adapters) or 'none'}. "
                f"Use load_adapter({name!r}, path) first."
            )
        return adapter

    def _origin(self, name: str, source: object) -> Path | None:
        """The folder to read, or None for tensors in memory."""
        if source is None:
            if self._root is None:
                raise AdapterFormatError(
                    f"adapter {name!r}: no source was given, and the manager has no adapter_root to look in"
                )
            return Path(name)
        return Path(source) if isinstance(source, (str, os.PathLike)) else None

    def _read(self, name: str, source: object) -> PackedAdapter:
        checkpoint = read_checkpoint(source, root=self._root)
        layers = self.pool.layers
        packed = pack(checkpoint, layers)
        self.pool.check(packed, name)
        packed = shard_adapter(packed, {site: layers[site].site for site in packed.sites})
        for note in packed.notes:
            _log.warning("adapter %r: %s", name, note)
        with self._changed:
            self._counts["reads"] += 1
        return packed.pinned() if self.backend.device.type == "cuda" else packed

    def _reserve(self, packed: PackedAdapter, name: str) -> None:
        """Room on the device for what an adapter's sites lack."""
        self.pool.reserve(packed, name)

    def _host_victim(self, name: str, protect: Iterable[str] = ()) -> _Adapter | None:
        """Whom to drop from the host tier so that `name` fits, None when there is room.

        Raises:
            InsufficientMemoryError: nobody can be dropped.
        """
        resident = [a for a in self._adapters.values() if a.packed is not None and a.name != name]
        if self.max_cpu_loras is None or len(resident) < self.max_cpu_loras:
            return None
        for adapter in resident:  # least recently used first
            slot = self._slot_of.get(adapter.name)
            in_use = adapter.holds or (slot is not None and self._in_use(slot))
            if adapter.droppable and not in_use and adapter.name not in protect:
                return adapter
        raise InsufficientMemoryError(
            f"adapter {name!r} has no place in the host tier: its {self.max_cpu_loras} adapters "
            "(max_cpu_loras) are in use, held, pinned, or were loaded from memory"
        )

    def _must_wait(self, name: str, protect: Iterable[str]) -> bool:
        """Whether a dropped adapter finds no room in the host tier now, but will."""
        adapters = self._adapters.values()
        if self._adapters[name].packed is not None or not any(
            a.droppable for a in adapters if a.packed
        ):
            return False
        try:
            self._host_victim(name, protect)
        except InsufficientMemoryError:
            return True
        return False

    def _drop(self, adapter: _Adapter | None) -> None:
        """Take an adapter out of the host tier, and out of its slot."""
        if adapter is None:
            return
        slot = self._slot_of.get(adapter.name)
        if slot is not None:
            self._vacate(slot)
        adapter.packed = None
        self._counts["host_evictions"] += 1
        _log.info("dropped adapter %r from the host tier", adapter.name)

    def _place(
        self,
        adapter: _Adapter,
        *,
        keep: Iterable[int] = (),
        prefer: int | None = None,
        aside: bool = False,
    ) -> bool:
        """Move an adapter into a slot: an empty one, or that of the least recently used adapter."""
        free = [
            slot for slot in range(self.max_loras) if self._evictable(slot) and slot not in keep
        ]
        if not free or adapter.packed is None:
            return False
        slot = min(
            free, key=lambda s: (s != prefer, self._owner[s] is not None, self._last_used[s])
        )
        old = self._owner[slot]
        if old is not None:
            del self._slot_of[old]
            self._counts["slot_evictions"] += 1
            _log.debug("slot %d: %r makes room for %r", slot, old, adapter.name)
        self._owner[slot] = None
        self.pool.write(slot, adapter.packed, aside=aside)
        self._owner[slot], self._slot_of[adapter.name] = adapter.name, slot
        self._last_used[slot] = self._clock
        self._counts["slot_writes"] += 1
        return True

    def _rehouse(self, adapter: _Adapter) -> bool:
        """Give a pinned adapter its slot again; whether nothing is left to do."""
        wants = adapter.pinned and self._adapters.get(adapter.name) is adapter
        return not wants or adapter.name in self._slot_of or self._place(adapter)

    def _evictable(self, slot: int) -> bool:
        owner = self._owner[slot]
        return not self._in_use(slot) and (owner is None or not self._adapters[owner].pinned)

    def _in_use(self, slot: int) -> bool:
        return any(slot in lane.slots for lane in self._lanes)

    def _vacate(self, slot: int) -> None:
        owner = self._owner[slot]
        if owner is not None:
            del self._slot_of[owner]
        self._owner[slot] = None
        self.pool.clear(slot)

    def _forget(self, name: str) -> None:
        slot = self._slot_of.get(name)
        if slot is not None:
            self._vacate(slot)
        del self._adapters[name]
        self.gate.adapters_loaded = len(self._adapters)

    def _why_busy(self, adapter: _Adapter) -> str | None:
        if adapter.name in self._busy:
            return "being refreshed by another thread"
        if adapter.holds:
            return f"held by {adapter.holds} acquire(s)"
        if any(adapter.name in lane.names for lane in self._lanes):
            return "named by the prepared batch"
        return None

    def _describe(self, adapter: _Adapter) -> AdapterInfo:
        return dataclasses.replace(
            adapter.info,
            resident=adapter.packed is not None,
            slot=self._slot_of.get(adapter.name),
            pinned=adapter.pinned,
            holds=adapter.holds,
        )


@contextmanager
def _directed(gate: ForwardGate, backend: LoRABackend[Any]) -> Iterator[None]:
    before, gate.backend = gate.backend, backend
    try:
        yield
    finally:
        gate.backend = before


def _info(name: str, origin: Path | None, packed: PackedAdapter) -> AdapterInfo:
    return AdapterInfo(
        name=name,
        version=packed.version,
        source=None if origin is None else str(origin),
        max_rank=packed.max_rank,
        modules=tuple(packed.sites),
        nbytes=packed.nbytes,
        resident=True,
        slot=None,
        pinned=False,
        holds=0,
        notes=packed.notes,
    )


def _check_request(adapter: object, length: object) -> None:
    if adapter is not None and not isinstance(adapter, str):
        raise UnsupportedAdapterError(
            f"a request names {adapter!r}: one request has one adapter, by name, or None. Several adapters "
            "for one request, and adapters per token, are not supported."
        )
    if not isinstance(length, int) or length < 0:
        raise InvalidBatchError(f"a request of length {length!r}: lengths are integers from 0")


def _check_name(name: object) -> None:
    """Names are taken exactly as they are; only what cannot be told apart is refused."""
    if not isinstance(name, str) or not name:
        raise AdapterFormatError(f"an adapter's name must be a non-empty text, got {name!r}")
    if name in RESERVED_NAMES:
        raise AdapterFormatError(
            f"the name {name!r} means the base model: give the adapter another one"
        )


def _names(names: Iterable[str], limit: int = 10) -> str:
    some = [repr(name) for name in names]
    return ", ".join(some[:limit]) + (f" and {len(some) - limit} more" if len(some) > limit else "")
