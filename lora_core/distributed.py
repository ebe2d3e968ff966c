"""Several processes that serve the same adapters: managers that agree, forwards that nobody misses.

Every rank has a manager of its own and calls it in the same order as the others. What changes
adapters or slots then happens on all ranks or fails on all, and an adapter has the same slot
everywhere, so that slots can travel with rows from rank to rank. The ranks talk through
torch.distributed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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

T = TypeVar("T")


@dataclass(frozen=True)
class Forward:
    """One forward of this rank, its idle one included: without requests the rank is idle.

    Args:
        requests: of this rank, in row order; none: it takes part for the sake of the others.
        mode: of its requests.
        graph: replay of a captured graph of that kind.
        logits: per lm_head pass, the rows kept of each request.
    """

    requests: Sequence[LoRARequest] = ()
    mode: Mode = "prefill"
    graph: GraphKind | None = None
    logits: Sequence[Sequence[int]] = ()

    @property
    def is_idle(self) -> bool:
        """Whether this rank has no rows of its own."""
        return not self.requests


class _Rows(NamedTuple):
    """What the other ranks have to know of a rank's forward."""

    requests: tuple[tuple[str | None, int, float | None], ...]
    mode: Mode


class Ranks:
    """The hosts of a process group, talking to each other.

    Args:
        group: of this process and its peers; None: all.

    Attributes:
        rank: within the group.
        size: of it.
    """

    def __init__(self, group: Group = None) -> None:
        self.group = group
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
        dist.all_gather_object(heard, (what, reason, mine), group=self.group)
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


class LiveForward:
    """A forward of all ranks while it runs, as `RankedManager.forward` hands it out.

    Attributes:
        info: state of this rank's batch; None while it is idle.
        counts: rows of every rank.
        slots: int32 `[sum(counts)]`, the slot of every rank's rows, rank by rank: for experts that
            compute gathered rows.
    """

    def __init__(
        self,
        info: BatchInfo | None,
        gate: ForwardGate,
        ranks: Ranks,
        batches: Sequence[LoRABatch],
        own: LoRABackend[Any],
        everyone: LoRABackend[Any],
    ) -> None:
        self.info = info
        self.counts = tuple(batch.num_tokens for batch in batches)
        self._gate, self._ranks, self._batches = gate, ranks, batches
        self._own, self._everyone = own, everyone
        slots = [
            slot
            for batch in batches
            for slot, length in zip(batch.slots, batch.lengths, strict=True)
            for _ in range(length)
        ]
        self.slots = torch.tensor(slots, dtype=torch.int32).to(everyone.device, non_blocking=True)

    @property
    def is_idle(self) -> bool:
        """Whether this rank has no batch of its own."""
        return self.info is None

    @property
    def rows(self) -> slice:
        """This rank's rows among the gathered ones."""
        start = sum(self.counts[: self._ranks.rank])
        return slice(start, start + self.counts[self._ranks.rank])

    @property
    def own_slots(self) -> Tensor:
        """int32 `[T]`, the slots of this rank's rows, to send with them."""
        return self.slots[self.rows]

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's rows, rank by rank; a collective that idle ranks join.

        Args:
            x: `[T, ...]`, this rank's rows, none of an idle one.

        Returns:
            `[sum(counts), ...]`.
        """
        if x.shape[0] != self.counts[self._ranks.rank]:
            raise InvalidBatchError(
                f"gather: {x.shape[0]} rows, but this rank's forward has {self.counts[self._ranks.rank]}"
            )
        padded = x.new_zeros((max(self.counts), *x.shape[1:]))
        padded[: x.shape[0]] = x
        parts = [torch.empty_like(padded) for _ in self.counts]
        dist.all_gather(parts, padded, group=self._ranks.group)
        return torch.cat([part[:count] for part, count in zip(parts, self.counts, strict=True)])

    def own(self, gathered: Tensor) -> Tensor:
        """This rank's rows of a tensor that holds everybody's."""
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
            return self._prepare(forward, everybody, lane, beside)

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
            info: BatchInfo | None = None
            if forward.is_idle:
                self.ranks.attempt(_SEATED, lambda: self.seat(_adapters(everybody), lane=lane))
            else:
                info = self._prepare(forward, everybody, lane, ())
            batches = [self._batch_of(rows) for rows in everybody]
        everyone = self._everyone(lane)
        try:
            directed: AbstractContextManager[None] = self.active(lane)
            with directed, self._base_allowed() if forward.is_idle else self._range("forward"):
                own = self.lane_backend(lane)
                yield LiveForward(info, self.gate, self.ranks, batches, own, everyone)
        finally:
            everyone.reset_batch_state()
            self.reset(lane=lane)
            self.gate.backend = before

    def _exchange_rows(self, forward: Forward, lane: int) -> list[_Rows]:
        """Everybody's requests, after each rank has looked at its own."""
        self.reset(lane=lane)
        rows = _Rows(tuple((r.adapter, r.length, r.scale) for r in forward.requests), forward.mode)
        error = None
        try:
            wanted = self._distinct(r.adapter for r in forward.requests)
            self._check_claims(forward.requests, wanted, forward.graph)
            lengths = [r.length for r in forward.requests]
            LoRABatch(lengths, [NO_LORA] * len(lengths), forward.mode, forward.logits)
        except Exception as caught:  # noqa: BLE001 - whatever it is, the others must hear of it
            error = caught
        return self.ranks.exchange(f"a forward in lane {lane}", rows, error)

    def _prepare(
        self, forward: Forward, everybody: Sequence[_Rows], lane: int, beside: Sequence[str]
    ) -> BatchInfo:
        names = [*beside, *_adapters(everybody)]
        try:
            return self.ranks.attempt(
                _SEATED,
                lambda: LoRAManager.prepare(
                    self,
                    forward.requests,
                    mode=forward.mode,
                    graph=forward.graph,
                    logits=forward.logits,
                    lane=lane,
                    beside=names,
                ),
            )
        except Exception:
            self.reset(lane=lane)  # prepared here, but not everywhere
            raise

    def _batch_of(self, rows: _Rows) -> LoRABatch:
        slots: dict[str | None, int] = {None: NO_LORA}
        slots.update(self._slot_of)
        scales = None
        if any(scale is not None for _, _, scale in rows.requests):
            scales = [1.0 if scale is None else scale for _, _, scale in rows.requests]
        return LoRABatch(
            [length for _, length, _ in rows.requests],
            [slots[name] for name, _, _ in rows.requests],
            rows.mode,
            (),
            scales,
        )

    def _everyone(self, lane: int) -> LoRABackend[Any]:
        """The instance that computes gathered rows of a lane; its batch lives beside the lane's own."""
        if lane not in self._everyone_backends:
            first = self.backend
            self._everyone_backends[lane] = type(first)(device=first.device, config=first.config)
        return self._everyone_backends[lane]


_SEATED = "giving the adapters their slots"


def _adapters(everybody: Sequence[_Rows]) -> list[str]:
    """What all ranks name, each once, in the order of ranks: the same list everywhere."""
    names = (name for rows in everybody for name, _, _ in rows.requests)
    return list(dict.fromkeys(name for name in names if name is not None))


def _joined(batches: Sequence[LoRABatch]) -> LoRABatch:
    """One batch of the rows of several."""
    modes = {batch.mode for batch in batches if batch.lengths}
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
