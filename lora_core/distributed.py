"""Several processes that serve the same adapters: managers that agree, forwards that nobody misses.

Every rank has a manager of its own and calls it in the same order as the others. What changes
adapters or slots then happens on all ranks or fails on all, and an adapter has the same slot
everywhere, so that slots can travel with rows from rank to rank. The ranks talk through
torch.distributed alone: rows over the group they are given, NCCL's between GPUs, and what the hosts
have to agree on over gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lora_core.adapters.packing import PackedAdapter
from lora_core.backend import LoRABackend
from lora_core.batch import NO_LORA, BatchInfo, LoRABatch
from lora_core.capabilities import GraphKind, Mode
from lora_core.errors import InvalidBatchError, RanksDisagreeError
from lora_core.layers.base import ForwardGate
from lora_core.layers.parallel import Group
from lora_core.manager import AdapterInfo, LoRAManager, LoRARequest, Plan, _directed
from lora_core.workspace import StagingRing

T = TypeVar("T")

_hosts_of: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""The groups made by `_hosts`, one for each group that cannot carry what hosts say."""


@dataclass(frozen=True)
class Forward:
    """One forward of this rank, its idle one included: without requests the rank is idle.

    Args:
        requests: of this rank, in row order; none: it takes part for the sake of the others.
        mode: of its requests.
        graph: capture or replay of a graph of that kind.
        logits: per lm_head pass, the rows kept of each request.
        rows: of every rank in that graph, padding included, where the ranks exchange rows; idle ranks
            give `graph` and `rows` as the others do.
    """

    requests: Sequence[LoRARequest] = ()
    mode: Mode = "prefill"
    graph: GraphKind | None = None
    logits: Sequence[Sequence[int]] = ()
    rows: int | None = None

    @property
    def is_idle(self) -> bool:
        """Whether this rank has no rows of its own."""
        return not self.requests


class _Rows(NamedTuple):
    """What the other ranks have to know of a rank's forward."""

    requests: tuple[tuple[str | None, int, float | None], ...]
    mode: Mode
    graph: GraphKind | None
    rows: int | None


class Ranks:
    """The hosts of a process group, talking to each other.

    They never wait for a device: where the group is NCCL's alone, they talk over a gloo group of the
    same ranks, made here the first time, with the same timeout.

    Args:
        group: of this process and its peers; None: all.

    Attributes:
        rank: within the group.
        size: of it.
    """

    def __init__(self, group: Group = None) -> None:
        self.group, self.hosts = group, _hosts(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def exchange(self, what: str, mine: T, error: Exception | None = None) -> list[T]:
        """Everybody's value, in the order of ranks.

        Args:
            what: everybody is doing; has to be the same everywhere.
            mine: anything that pickles.
            error: why this rank cannot go on; nobody does then.

        Raises:
            Exception: `error`, on this rank.
            RanksDisagreeError: another rank cannot go on, or is at something else.
        """
        reason = None if error is None else f"{type(error).__name__}: {error}"
        heard: list[Any] = [None] * self.size
        dist.all_gather_object(heard, (what, reason, mine), group=self.hosts)
        if error is not None:
            raise error
        for rank, (other, _, _) in enumerate(heard):
            if other != what:
                raise RanksDisagreeError(
                    f"rank {self.rank} is at {what}, but rank {rank} is at {other}: call the managers of all ranks "
                    "in the same order. Nothing was changed."
                )
        for rank, (_, failure, _) in enumerate(heard):
            if failure is not None:
                raise RanksDisagreeError(
                    f"{what} failed on rank {rank}, and therefore on every rank: {failure}"
                )
        return [value for _, _, value in heard]

    def attempt(self, what: str, do: Callable[[], T]) -> T:
        """Do something that may fail on some ranks only, and fail on all of them then.

        Raises:
            Exception: as `do`, where it failed.
            RanksDisagreeError: where it did not.
        """
        result, error = None, None
        try:
            result = do()
        except Exception as caught:  # noqa: BLE001 - whatever it is, the others must hear of it
            error = caught
        self.exchange(what, None, error)
        return result  # type: ignore[return-value]


def _hosts(group: Group) -> Group:
    """The group over which the hosts of a group talk: itself, where it carries tensors of the CPU."""
    if "cpu:" in dist.get_backend_config(group):
        return group
    group = group or dist.group.WORLD
    assert group is not None
    if group not in _hosts_of:
        device_type: Any = group._device_types[0]  # noqa: SLF001 - timeouts have no public getter
        _hosts_of[group] = dist.new_group(
            dist.get_process_group_ranks(group),
            backend="gloo",
            timeout=group._get_backend(device_type).options._timeout,  # noqa: SLF001
            use_local_synchronization=True,  # the members alone
        )
    return _hosts_of[group]


class LiveForward:
    """A forward of all ranks while it runs, as `RankedManager.forward` hands it out.

    Attributes:
        info: state of this rank's batch; None while it is idle.
        counts: rows of every rank, in a graph with padding.
        slots: int32 `[sum(counts)]`, the slot of every rank's rows, rank by rank: for experts that
            compute gathered rows. In a graph at one address, whose contents the next forward replaces.
    """

    def __init__(
        self,
        info: BatchInfo | None,
        gate: ForwardGate,
        ranks: Ranks,
        batches: Sequence[LoRABatch],
        slots: Tensor,
        own: LoRABackend[Any],
        everyone: LoRABackend[Any],
    ) -> None:
        self.info, self.slots = info, slots
        self.counts = tuple(batch.num_tokens for batch in batches)
        self._gate, self._ranks, self._batches = gate, ranks, batches
        self._own, self._everyone = own, everyone
        self._rows = 0 if info is None else info.num_tokens  # of x, as last seen

    @property
    def is_idle(self) -> bool:
        """Whether this rank has no batch of its own."""
        return self.info is None

    @property
    def rows(self) -> slice:
        """This rank's rows among the gathered ones, with padding where it was gathered."""
        start = sum(self.counts[: self._ranks.rank])
        return slice(start, start + self._rows)

    @property
    def own_slots(self) -> Tensor:
        """int32 `[T]`, the slots of this rank's rows, to send with them."""
        return self.slots[self.rows]

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's rows, rank by rank; a collective that idle ranks join.

        Args:
            x: `[T, ...]`, this rank's rows, none of an idle one; in a graph with or without padding.

        Returns:
            `[sum(counts), ...]`.
        """
        rows, room = x.shape[0], self.counts[self._ranks.rank]
        own = 0 if self.info is None else self.info.num_tokens
        if rows not in {own, room}:
            raise InvalidBatchError(
                f"gather: {rows} rows, but this rank's forward has {own}"
                + (f", or {room} with padding" if room != own else "")
            )
        self._rows = rows
        most = max(self.counts)
        padded = x.contiguous()
        if rows < most:
            padded = x.new_zeros((most, *x.shape[1:]))
            padded[:rows] = x
        whole = x.new_empty((len(self.counts), most, *x.shape[1:]))
        dist.all_gather(list(whole), padded, group=self._ranks.group)
        if min(self.counts) == most:
            return whole.flatten(0, 1)
        return torch.cat([part[:count] for part, count in zip(whole, self.counts, strict=True)])

    def own(self, gathered: Tensor) -> Tensor:
        """This rank's rows of a tensor that holds everybody's, as many as it gave to `gather`."""
        return gathered[self.rows]

    def active(self) -> AbstractContextManager[None]:
        """Direct the layers to this rank's batch, for forwards of several lanes in turn."""
        return _directed(self._gate, self._own)

    @contextmanager
    def everyone(self) -> Iterator[None]:
        """Direct the layers to a batch of every rank's rows, for modules that run on gathered rows."""
        backend = self._everyone
        if backend.batch_info is None:
            backend.prepare_batch(_joined(self._batches))
        with _directed(self._gate, backend):
            yield


class RankedManager(LoRAManager):
    """A manager for one of several ranks, which all have the same adapters in the same slots.

    `load_adapter`, `refresh`, `unload_adapter`, `prefetch`, `pin`, `unpin`, `plan`, `prepare`, `batch`,
    `idle` and `forward` are collective: every rank calls them, in the same order, from one thread.
    `acquire`, `reset`, and what only reads, are not. The host tier keeps all adapters.

    Args:
        backend: computes; its device is the manager's.
        group: the ranks that agree and exchange rows; None: all.
        max_loras: see `LoRAManager`.
        max_rank: see `LoRAManager`.
        target_modules: see `LoRAManager`.
        adapter_root: see `LoRAManager`; may differ between ranks.
        patience: see `LoRAManager`.

    Attributes:
        ranks: the group.
    """

    def __init__(
        self,
        backend: LoRABackend[Any],
        *,
        group: Group = None,
        max_loras: int = 8,
        max_rank: int = 64,
        target_modules: Iterable[str] | str | None = None,
        adapter_root: str | Path | None = None,
        patience: int = 8,
    ) -> None:
        super().__init__(
            backend,
            max_loras=max_loras,
            max_rank=max_rank,
            target_modules=target_modules,
            adapter_root=adapter_root,
            patience=patience,
        )
        self.ranks = Ranks(group)
        self._everyone_backends: dict[int, LoRABackend[Any]] = {}
        self._staging = StagingRing(backend.device)
        self._graph_slots: dict[tuple[int, GraphKind], Tensor] = {}  # by lane and kind

    # -- adapters ----------------------------------------------------------------------------------

    def load_adapter(self, name: str, source: object = None) -> AdapterInfo:
        """`LoRAManager.load_adapter` on every rank, or on none.

        Args:
            name: the same on every rank.
            source: this rank's copy of the files, or tensors; the content must be the same everywhere.

        Raises:
            RanksDisagreeError: another rank cannot load it, or has other content, or is at something
                else.
            AdapterError: this rank cannot load it.
            InsufficientMemoryError: it would not fit here.
        """
        self.ranks.exchange(f"load_adapter({name!r}, {_kind(source)})", None)
        return super().load_adapter(name, source)

    def refresh(self, name: str, source: object = None) -> AdapterInfo:
        """`LoRAManager.refresh` on every rank, or on none; raises as `load_adapter` does."""
        self.ranks.exchange(f"refresh({name!r}, {_kind(source)})", None)
        return super().refresh(name, source)

    def unload_adapter(
        self, name: str, *, wait: bool = False, timeout: float | None = None
    ) -> None:
        """`LoRAManager.unload_adapter` on every rank, or on none: held on one, it stays on all."""
        with self._changed:
            self.ranks.attempt(
                f"unload_adapter({name!r})",
                lambda: self._await_release(name, wait=wait, timeout=timeout),
            )
            self._forget(name)

    def prefetch(self, name: str) -> bool:
        """`LoRAManager.prefetch` on every rank."""
        self.ranks.exchange(f"prefetch({name!r})", None)
        return super().prefetch(name)

    def pin(self, name: str) -> None:
        """`LoRAManager.pin` on every rank."""
        self.ranks.exchange(f"pin({name!r})", None)
        super().pin(name)

    def unpin(self, name: str) -> None:
        """`LoRAManager.unpin` on every rank."""
        self.ranks.exchange(f"unpin({name!r})", None)
        super().unpin(name)

    def _read(self, name: str, source: object) -> PackedAdapter:
        packed, error = None, None
        try:
            packed = super()._read(name, source)
        except Exception as caught:  # noqa: BLE001 - whatever it is, the others must hear of it
            error = caught
        version = packed.version if packed is not None else ""
        versions = self.ranks.exchange(f"reading adapter {name!r}", version, error)
        if len(set(versions)) > 1:
            raise RanksDisagreeError(
                f"adapter {name!r} has not the same content on every rank: versions {versions}. Give all ranks "
                "the same files."
            )
        assert packed is not None
        return packed

    def _reserve(self, packed: PackedAdapter, name: str) -> None:
        self.ranks.attempt(f"room for adapter {name!r}", lambda: self.pool.reserve(packed, name))

    # -- forwards ----------------------------------------------------------------------------------

    def plan(self, requests: Sequence[LoRARequest], *, lane: int = 0) -> Plan:
        """`LoRAManager.plan` over the requests of all ranks; returns this rank's part.

        The adapters that all ranks name together have to fit into the slots, for each is in the same
        slot everywhere.
        """
        with self._changed:
            names = [request.adapter for request in requests]
            asked = self.ranks.attempt("plan", lambda: list(self._distinct(names)))
            everyone = dict.fromkeys(
                name for theirs in self.ranks.exchange("plan, names", asked) for name in theirs
            )
            whole = super().plan([LoRARequest(name) for name in everyone], lane=lane)
            admitted = {request.adapter for request in whole.admitted} | {None}
            parts = Plan([], [])
            for request in requests:
                parts[request.adapter not in admitted].append(request)
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
        """`LoRAManager.prepare` on every rank that has requests; the others call `idle` meanwhile.

        The adapters of all ranks get their slots here, those of `beside` first.

        Raises:
            RanksDisagreeError: another rank cannot prepare, or is at something else.
            LoRACoreError: this one cannot.
        """
        forward = Forward(requests, mode, graph, logits)
        with self._changed:
            everybody = self._exchange_rows(forward, lane)
            return self._begin(
                lane, lambda: self._prepare(forward, [*beside, *_adapters(everybody)], lane)
            )

    @contextmanager
    def idle(self, *, lane: int = 0) -> Iterator[None]:
        """A forward without requests of this rank: it holds the slots of the others' adapters.

        Collective with the `prepare` of the ranks that have requests.
        """
        with self.forward(Forward(), lane=lane):
            yield

    @contextmanager
    def forward(self, forward: Forward, *, lane: int = 0) -> Iterator[LiveForward]:
        """Run one forward of all ranks: with a batch here, or idle, by its description.

        Idle, the lane's last batch is ended and base modules run as they are; that and the end of the
        batch, also after an exception, are not to be forgotten.

        Args:
            forward: this rank's.
            lane: one per micro-batch.

        Raises:
            RanksDisagreeError: another rank cannot go on, or is at something else.
            LoRACoreError: this one cannot.
        """
        before = self.gate.backend
        with self._changed:
            everybody = self._exchange_rows(forward, lane)
            everyone = self._everyone(lane)

            def begin() -> tuple[BatchInfo | None, list[LoRABatch], Tensor]:
                names, info = _adapters(everybody), None
                if forward.is_idle:
                    self.seat(names, lane=lane)
                else:
                    info = self._prepare(forward, names, lane)
                batches = [self._batch_of(rows) for rows in everybody]
                if forward.rows is not None:  # a replay calls nothing: all has to be there before
                    everyone.prepare_batch(_joined(batches, forward.graph), graph=forward.graph)
                return info, batches, self._row_slots(batches, forward, lane)

            info, batches, slots = self._begin(lane, begin)
        try:
            directed: AbstractContextManager[None] = self.active(lane)
            with directed, self._base_allowed() if forward.is_idle else self._range("forward"):
                own = self.lane_backend(lane)
                yield LiveForward(info, self.gate, self.ranks, batches, slots, own, everyone)
        finally:
            self._reset_all(lane)
            self.gate.backend = before

    def init_graph(
        self, kind: GraphKind, *, max_requests: int, max_tokens: int, lane: int = 0
    ) -> None:
        """Make room for graphs of forwards in which the ranks exchange rows (`Forward.rows`).

        Args:
            kind: of graph.
            max_requests: of one rank.
            max_tokens: rows of one rank, padding included.
            lane: in which they are captured and replayed.
        """
        size, everyone = self.ranks.size, self._everyone(lane)
        self.lane_backend(lane).init_graph(kind, max_requests=max_requests, max_tokens=max_tokens)
        padding = max_tokens if kind == "decode" else 1  # requests that stand for a rank's padding
        everyone.init_graph(
            kind, max_requests=size * (max_requests + padding), max_tokens=size * max_tokens
        )
        self._graph_slots[lane, kind] = torch.full(
            (size * max_tokens,), NO_LORA, dtype=torch.int32, device=everyone.device
        )

    def _exchange_rows(self, forward: Forward, lane: int) -> list[_Rows]:
        """Everybody's requests, after each rank has looked at its own."""
        self.reset(lane=lane)
        rows = _Rows(
            tuple((r.adapter, r.length, r.scale) for r in forward.requests),
            forward.mode,
            forward.graph,
            forward.rows,
        )
        error = None
        try:
            wanted = self._distinct(r.adapter for r in forward.requests)
            self._check_claims(forward.requests, wanted, forward.graph)
            lengths = [r.length for r in forward.requests]
            LoRABatch(lengths, [NO_LORA] * len(lengths), forward.mode, forward.logits)
            if forward.rows is not None and (forward.graph is None or forward.rows < sum(lengths)):
                raise InvalidBatchError(
                    f"Forward(graph={forward.graph!r}, rows={forward.rows}) of {sum(lengths)} tokens: `rows` says "
                    "how many rows each rank has in a captured graph, padding included"
                )
        except Exception as caught:  # noqa: BLE001 - whatever it is, the others must hear of it
            error = caught
        everybody = self.ranks.exchange(f"a forward in lane {lane}", rows, error)
        shapes = [(theirs.graph, theirs.rows) for theirs in everybody]
        if len(set(shapes)) > 1 and any(count is not None for _, count in shapes):
            raise RanksDisagreeError(
                f"a forward in lane {lane} that exchanges rows in a graph is not the same on every rank: graph "
                f"and rows are {shapes}. Idle ranks give both, too. Nothing was changed."
            )
        return everybody

    def _begin(self, lane: int, begin: Callable[[], T]) -> T:
        """Prepare a lane on all ranks, or on none."""
        try:
            return self.ranks.attempt("giving the adapters their slots", begin)
        except Exception:
            self._reset_all(lane)  # begun here, but not everywhere
            raise

    def _prepare(self, forward: Forward, names: Sequence[str], lane: int) -> BatchInfo:
        return super().prepare(
            forward.requests,
            mode=forward.mode,
            graph=forward.graph,
            logits=forward.logits,
            lane=lane,
            beside=names,
        )

    def _reset_all(self, lane: int) -> None:
        """End this rank's batch of a lane, and everybody's."""
        everyone = self._everyone(lane)
        info = everyone.batch_info
        everyone.reset_batch_state()
        if info is not None and info.graph is not None:
            self._graph_slots[lane, info.graph].fill_(NO_LORA)
        self.reset(lane=lane)

    def _row_slots(self, batches: Sequence[LoRABatch], forward: Forward, lane: int) -> Tensor:
        """int32 on the device, the slot of every rank's rows."""
        slots = np.concatenate(
            [np.repeat(np.asarray(b.slots, np.int32), np.asarray(b.lengths, int)) for b in batches]
        )
        entry = self._staging.acquire(len(slots))
        entry.host[: len(slots)] = slots
        if forward.rows is None or forward.graph is None:
            target = torch.empty(len(slots), dtype=torch.int32, device=self._staging.device)
        else:
            target = self._graph_slots[lane, forward.graph][: len(slots)]
        entry.send(target)
        return target

    def _batch_of(self, rows: _Rows) -> LoRABatch:
        slots: dict[str | None, int] = {None: NO_LORA}
        slots.update(self._slot_of)
        scales = None
        requests = rows.requests
        if rows.rows is not None:
            padding = rows.rows - sum(length for _, length, _ in requests)
            each = 1 if rows.graph == "decode" else padding
            requests += ((None, each, None),) * (padding // each if padding else 0)
        if any(scale is not None for _, _, scale in requests):
            scales = [1.0 if scale is None else scale for _, _, scale in requests]
        return LoRABatch(
            [length for _, length, _ in requests],
            [slots[name] for name, _, _ in requests],
            rows.mode if rows.rows is None or rows.graph is None else rows.graph,
            (),
            scales,
        )

    def _everyone(self, lane: int) -> LoRABackend[Any]:
        """The instance that computes gathered rows of a lane; its batch lives beside the lane's own."""
        if lane not in self._everyone_backends:
            first = self.backend
            self._everyone_backends[lane] = type(first)(device=first.device, config=first.config)
        return self._everyone_backends[lane]


def _adapters(everybody: Sequence[_Rows]) -> list[str]:
    """What all ranks name, each once, in the order of ranks: the same list everywhere."""
    names = (name for rows in everybody for name, _, _ in rows.requests)
    return list(dict.fromkeys(name for name in names if name is not None))


def _joined(batches: Sequence[LoRABatch], mode: Mode | None = None) -> LoRABatch:
    """One batch of the rows of several."""
    modes = {batch.mode for batch in batches if batch.lengths} if mode is None else {mode}
    scales = None
    if any(batch.scales is not None for batch in batches):
        scales = [
            scale for batch in batches for scale in (batch.scales or [1.0] * len(batch.lengths))
        ]
    return LoRABatch(
        [length for batch in batches for length in batch.lengths],
        [slot for batch in batches for slot in batch.slots],
        modes.pop() if len(modes) == 1 else "prefill",
        (),
        scales,
    )


def _kind(source: object) -> str:
    if source is None:
        return "its own folder"
    return "a path" if isinstance(source, (str, Path)) else "tensors"
