"""SlotPool: the adapters' places on the device.

Every site has its stacked weights over all slots; a slot is one adapter's row in each of them. Moving
an adapter in writes the sites it changes and silences, by rank 0, those that only its predecessor
changed, so an evicted adapter cannot be seen by the next one.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lora_core.adapters.packing import PackedAdapter, SiteUpdate
from lora_core.backend import LoRABackend
from lora_core.capabilities import Capabilities, Op
from lora_core.errors import UnsupportedAdapterError, UnsupportedOpError
from lora_core.layers.base import LoRALayer
from lora_core.layers.moe import ExpertsProjection
from lora_core.memory import require_bytes
from lora_core.moe import MoECapabilities
from lora_core.sites import Site
from lora_core.weights import LoRAWeights

_log = logging.getLogger("lora_core.pool")


@dataclass(frozen=True)
class _Needs:
    """What an adapter asks of a site's weights: optional tensors; of experts, what may be shared."""

    output_scale: bool = False
    bias: bool = False
    shared_a: bool = False
    shared_b: bool = False

    @classmethod
    def of(cls, update: SiteUpdate) -> _Needs:
        """Those of one site of an adapter."""
        return cls(
            output_scale=update.output_scale is not None,
            bias=update.bias is not None,
            shared_a=all(a is None or (a.dim() == 3 and a.shape[0] == 1) for a in update.a),
            shared_b=all(b is None or (b.dim() == 3 and b.shape[0] == 1) for b in update.b),
        )


class SlotPool:
    """The device side of a manager; knows slots and tensors, not names of adapters.

    Args:
        backend: allocates the weights; its device and claims count.
        max_loras: S, slots of every site.
        max_rank: R, room of every slot.
        target_modules: sites that get their weights at once and outside of which no adapter may lie:
            names or their ends, or "all-linear". None: every site, when its first adapter comes.

    Attributes:
        layers: the wrapped modules by site name.
        generation: changes whenever weights were allocated or replaced. A graph captured at another
            generation does not see the newer ones.
    """

    def __init__(
        self,
        backend: LoRABackend[Any],
        *,
        max_loras: int,
        max_rank: int,
        target_modules: Iterable[str] | str | None = None,
    ) -> None:
        limit = backend.capabilities.max_rank
        if limit is not None and max_rank > limit:
            raise UnsupportedOpError(
                backend=backend.name,
                op="max_rank",
                limit=f"rank {limit}",
                value=f"max_rank {max_rank}",
            )
        self.backend, self.max_loras, self.max_rank = backend, max_loras, max_rank
        self.target_modules = (
            target_modules
            if isinstance(target_modules, str) or target_modules is None
            else tuple(target_modules)
        )
        self.layers: dict[str, LoRALayer | ExpertsProjection] = {}
        self.generation = 0
        self._live: list[dict[str, SiteUpdate]] = [{} for _ in range(max_loras)]
        self._whole: list[tuple[str, ...]] = [
            ()
        ] * max_loras  # sites where a slot has a whole weight
        self._torn: set[int] = set()  # slots whose last write failed half-way
        self._cuda = backend.device.type == "cuda"
        self._written: dict[int, torch.cuda.Event] = {}
        self._used: list[dict[int, torch.cuda.Event]] = [{} for _ in range(max_loras)]
        self._copy_stream: torch.cuda.Stream | None = None

    # -- sites -----------------------------------------------------------------------------------

    def add_layers(self, layers: Mapping[str, LoRALayer | ExpertsProjection]) -> None:
        """Register wrapped modules; those named by `target_modules` get their weights now.

        Raises:
            ValueError: a site twice.
            UnsupportedOpError: a targeted site that the backend cannot serve.
            InsufficientMemoryError: their weights would not fit; nothing is registered then.
        """
        for name, layer in layers.items():
            if layer.site.name != name or name in self.layers:
                raise ValueError(
                    f"layer {name!r} is registered already or is the layer of {layer.site.name!r}"
                )
        targeted = []
        if self.target_modules is not None:
            targeted = [layer for layer in layers.values() if self._is_targeted(layer.site)]
        for layer in targeted:
            self._require_op(layer, f"target_modules names {layer.site.name}")
        self._require_memory(
            {layer.site.name: _Needs() for layer in targeted}, layers, "target_modules"
        )
        self.layers.update(layers)
        for layer in targeted:
            self._allocate(layer, _Needs())

    def remove_layers(self) -> None:
        """Take the weights away from every layer and forget them all."""
        for layer in self.layers.values():
            layer.weights = None
        self.layers.clear()
        self._live = [{} for _ in range(self.max_loras)]
        self._whole = [()] * self.max_loras
        self.generation += 1

    def _is_targeted(self, site: Site) -> bool:
        wanted = self.target_modules
        if wanted is None:
            return True
        if wanted == "all-linear":
            return site.kind == "linear"
        patterns = (wanted,) if isinstance(wanted, str) else wanted
        names = (site.name, *site.slice_names)
        return any(name == p or name.endswith(f".{p}") for name in names for p in patterns)

    # -- what an adapter needs ---------------------------------------------------------------------

    def check(self, packed: PackedAdapter, name: str) -> None:
        """Refuse, before anything is taken, an adapter that cannot be applied exactly here.

        Raises:
            UnsupportedAdapterError: rank over the limit, outside of `target_modules`, or something
                that the backend does not claim.
        """
        claims = self.backend.capabilities
        for site_name, update in packed.sites.items():
            layer = self.layers[site_name]
            who = f"adapter {name!r}: {site_name}"
            rank = int(update.ranks.max())
            if rank > self.max_rank:
                raise UnsupportedAdapterError(
                    f"{who} has rank {rank}, but this pool has room for rank {self.max_rank}. "
                    f"Build the manager with max_rank={rank} or more."
                )
            if not self._is_targeted(layer.site):
                raise UnsupportedAdapterError(
                    f"{who} is outside of target_modules {self.target_modules!r}, for which alone there is room"
                )
            self._require_op(layer, who)
            for op, tensor, meaning in (
                (Op.DORA, update.output_scale, "DoRA"),
                (Op.BIAS, update.bias, "a bias of its own"),
                (Op.FULL_WEIGHT, update.full, "a whole weight from modules_to_save"),
            ):
                if tensor is not None and not claims.supports(op):
                    raise UnsupportedAdapterError(
                        f"{who} needs {meaning}, and backend {self.backend.name!r} does not claim {op.value!r} "
                        f"(it claims {', '.join(sorted(claims.ops))}). Choose another backend."
                    )

    def _require_op(self, layer: LoRALayer | ExpertsProjection, who: str) -> None:
        site = layer.site
        if isinstance(layer, ExpertsProjection):
            self._require_claims(layer, who, layer.experts.name, layer.experts.capabilities)
            return
        claims, op = self.backend.capabilities, Op(site.kind)
        if not claims.supports(op):
            raise UnsupportedAdapterError(
                f"{who} is of kind {site.kind!r}, and backend {self.backend.name!r} does not claim "
                f"{op.value!r} (it claims {', '.join(sorted(claims.ops))}). Choose another backend."
            )
        self._require_claims(layer, who, self.backend.name, claims)

    @staticmethod
    def _require_claims(
        layer: LoRALayer | ExpertsProjection,
        who: str,
        backend: str,
        claims: Capabilities | MoECapabilities,
    ) -> None:
        dtype = str(layer.dtype).removeprefix("torch.")
        if dtype not in claims.dtypes:
            raise UnsupportedAdapterError(
                f"{who} computes in {dtype}, and backend {backend!r} claims "
                f"{', '.join(sorted(claims.dtypes))}"
            )
        slices = layer.site.layout.num_slices
        if claims.max_slices is not None and slices > claims.max_slices:
            raise UnsupportedAdapterError(
                f"{who} packs {slices} slices, and backend {backend!r} takes {claims.max_slices}"
            )

    def reserve(self, packed: PackedAdapter, name: str) -> None:
        """Allocate what the adapter's sites lack, after asking whether it fits.

        Raises:
            InsufficientMemoryError: nothing was taken.
        """
        needs = {site: _Needs.of(update) for site, update in packed.sites.items()}
        self._require_memory(needs, self.layers, f"adapter {name!r}", extra=_full_bytes(packed))
        for site, need in needs.items():
            layer = self.layers[site]
            if layer.weights is None:
                self._allocate(layer, need)
            self._widen(layer, need)

    def _require_memory(
        self,
        needs: Mapping[str, _Needs],
        layers: Mapping[str, LoRALayer | ExpertsProjection],
        what: str,
        *,
        extra: int = 0,
    ) -> None:
        total = extra
        for name, need in needs.items():
            layer = layers[name]
            if isinstance(layer, ExpertsProjection):
                total += self._experts_bytes(layer, need)
                continue
            site, weights = layer.site, layer.weights
            row = self.max_loras * site.local.layout.out_features * 4
            if weights is None:
                total += weights_nbytes(site, self.max_loras, self.max_rank, layer.dtype)
            total += row * (need.output_scale and (weights is None or weights.output_scale is None))
            total += row * (need.bias and (weights is None or weights.bias is None))
        if total:
            require_bytes(total, self.backend.device, what)

    def _experts_bytes(self, layer: ExpertsProjection, need: _Needs) -> int:
        """What a projection must grow by: all of it, or own copies of what experts shared."""
        weights = layer.weights
        if weights is None:
            return layer.nbytes(
                self.max_loras, self.max_rank, shared_a=need.shared_a, shared_b=need.shared_b
            )
        grown = layer.nbytes(
            self.max_loras,
            self.max_rank,
            shared_a=weights.shared_a and need.shared_a,
            shared_b=weights.shared_b and need.shared_b,
        )
        return grown - layer.nbytes(
            self.max_loras, self.max_rank, shared_a=weights.shared_a, shared_b=weights.shared_b
        )

    def _allocate(self, layer: LoRALayer | ExpertsProjection, need: _Needs) -> None:
        site = layer.site
        if isinstance(layer, ExpertsProjection):
            layer.allocate(
                self.max_loras, self.max_rank, shared_a=need.shared_a, shared_b=need.shared_b
            )
            self._changed(site)
            return
        with torch.inference_mode(False):  # else nobody could write into them outside of that mode
            layer.weights = self.backend.allocate_weights(
                num_slots=self.max_loras,
                max_rank=self.max_rank,
                in_features=site.local.in_features,
                layout=site.local.layout,
                dtype=layer.dtype,
                embedding=site.kind == "embedding",
            )
        self._changed(site)

    def _widen(self, layer: LoRALayer | ExpertsProjection, need: _Needs) -> None:
        """Add the optional tensors; a and b stay where they are, except where experts shared them."""
        if isinstance(layer, ExpertsProjection):
            if layer.unshare(a=not need.shared_a, b=not need.shared_b):
                self._changed(layer.site)
            return
        weights = layer.weights
        assert weights is not None
        scale, bias, device = weights.output_scale, weights.bias, self.backend.device
        shape = (self.max_loras, layer.site.local.layout.out_features)
        with torch.inference_mode(False):
            if need.output_scale and scale is None:
                scale = torch.ones(shape, dtype=torch.float32, device=device)
            if need.bias and bias is None:
                bias = torch.zeros(shape, dtype=torch.float32, device=device)
        if scale is not weights.output_scale or bias is not weights.bias:
            layer.weights = dataclasses.replace(weights, output_scale=scale, bias=bias)
            self._changed(layer.site)

    def _changed(self, site: Site) -> None:
        self.generation += 1
        if self.backend.workspace.graph_room:
            _log.warning(
                "%s got new weights after init_graph: graphs captured before now do not apply them. Capture "
                "again, or name the site in target_modules so that it has its weights from the start.",
                site.name,
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all stacked weights on the device."""
        total = 0
        for layer in self.layers.values():
            w = layer.weights
            if w is not None:
                tensors: list[Tensor | None] = [w.a, w.b, w.ranks, w.scalings]
                if isinstance(w, LoRAWeights):
                    tensors += [w.output_scale, w.bias, *w.full.values()]
                total += sum(t.numel() * t.element_size() for t in tensors if t is not None)
        return total

    # -- slots -------------------------------------------------------------------------------------

    def write(self, slot: int, packed: PackedAdapter, *, aside: bool = False) -> None:
        """Move an adapter into a slot, on the device and without waiting for it.

        Ordered after the last forward that used the slot and before the next that does, whatever
        streams these run on.

        Args:
            slot: where to; not used by a live batch.
            packed: the adapter.
            aside: copy on a stream of the pool's own (CUDA only), so that it overlaps a forward.
        """
        before, known = self._live[slot], slot not in self._torn
        self._live[slot] = {**before, **packed.sites}
        # whole weights take memory, which belongs to the stream that takes it
        with self._writing(slot, aside=aside and not packed.whole):
            for name in before.keys() - packed.sites.keys():
                self._silence(self.layers[name], slot)
            for name, update in packed.sites.items():
                self._write_site(
                    self.layers[name], slot, update, before.get(name) if known else None
                )
        self._live[slot], self._whole[slot] = dict(packed.sites), packed.whole

    def clear(self, slot: int) -> None:
        """Silence a slot everywhere, so that not even a stray forward can see its adapter."""
        before = self._live[slot]
        if before:
            with self._writing(slot, aside=False):
                for name in before:
                    self._silence(self.layers[name], slot)
            self._live[slot], self._whole[slot] = {}, ()

    def _write_site(
        self,
        layer: LoRALayer | ExpertsProjection,
        slot: int,
        update: SiteUpdate,
        before: SiteUpdate | None,
    ) -> None:
        """Write one site; what `before`, the slot's last content there, had alike is not written again.

        Each copy costs the host several microseconds, whatever its size, and there are hundreds.
        """
        if isinstance(layer, ExpertsProjection):
            layer.write(slot, update.a, update.b, update.ranks, update.scalings)
            return
        weights = layer.weights
        assert weights is not None
        offsets = weights.layout.offsets
        for i, (a, b) in enumerate(zip(update.a, update.b, strict=True)):
            if a is None or b is None:
                continue
            rank = b.shape[1]
            embedding = weights.is_embedding
            a_slot = weights.a[slot, :, :rank] if embedding else weights.a[slot, i, :rank]
            a_slot.copy_(a, non_blocking=True)
            weights.b[slot, offsets[i] : offsets[i + 1], :rank].copy_(b, non_blocking=True)
        if before is None or before.factors != update.factors:
            weights.ranks[slot].copy_(update.ranks, non_blocking=True)
            weights.scalings[slot].copy_(update.scalings, non_blocking=True)
        if weights.output_scale is not None:
            _set(weights.output_scale[slot], update.output_scale, 1.0)
        if weights.bias is not None:
            _set(weights.bias[slot], update.bias, 0.0)
        weights.full.pop(slot, None)
        if update.full is not None:
            weights.full[slot] = update.full.to(self.backend.device, non_blocking=True)

    def _silence(self, layer: LoRALayer | ExpertsProjection, slot: int) -> None:
        weights = layer.weights
        assert weights is not None
        weights.ranks[slot].zero_()
        if not isinstance(weights, LoRAWeights):
            return
        if weights.output_scale is not None:
            weights.output_scale[slot].fill_(1.0)
        if weights.bias is not None:
            weights.bias[slot].zero_()
        weights.full.pop(slot, None)

    # -- order between writes and forwards, on CUDA ------------------------------------------------

    @contextmanager
    def _writing(self, slot: int, *, aside: bool) -> Iterator[None]:
        """Order what is written inside after the slot's last forward, and before its next."""
        self._torn.add(slot)
        if not self._cuda:
            yield
            self._torn.discard(slot)
            return
        device = self.backend.device
        stream = torch.cuda.current_stream(device)
        if aside:
            self._copy_stream = self._copy_stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream = self._copy_stream
        with torch.cuda.stream(stream):
            for event in (*self._used[slot].values(), self._written.get(slot)):
                if event is not None:
                    stream.wait_event(event)
            self._used[slot].clear()
            yield
            written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            written.record(stream)
            self._written[slot] = written
        self._torn.discard(slot)

    def before_forward(self, slots: Iterable[int]) -> None:
        """Make the current stream wait for writes into `slots` that may be under way elsewhere."""
        if not self._written:
            return
        for slot in slots:
            event = self._written.get(slot)
            if event is not None:
                if event.query():  # type: ignore[no-untyped-call]
                    del self._written[slot]
                else:
                    torch.cuda.current_stream(self.backend.device).wait_event(event)

    def after_forward(self, slots: Iterable[int], lane: int) -> None:
        """Remember where the current stream stands, for the next write into `slots`."""
        if self._cuda and slots:
            stream = torch.cuda.current_stream(self.backend.device)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
            for slot in slots:
                self._used[slot][lane] = event
                for name in self._whole[slot]:
                    weights = self.layers[name].weights
                    if isinstance(weights, LoRAWeights):
                        weights.full[slot].record_stream(stream)


def weights_nbytes(site: Site, num_slots: int, max_rank: int, dtype: torch.dtype) -> int:
    """Bytes of the stacked weights of one site, of what this rank holds of it."""
    site = site.local
    n, out = site.layout.num_slices, site.layout.out_features
    rows = site.in_features + out if site.kind == "embedding" else n * site.in_features + out
    return num_slots * (max_rank * rows * dtype.itemsize + n * 8)


def _full_bytes(packed: PackedAdapter) -> int:
    return sum(
        u.full.numel() * u.full.element_size() for u in packed.sites.values() if u.full is not None
    )


def _set(target: Tensor, values: Tensor | None, otherwise: float) -> None:
    if values is None:
        target.fill_(otherwise)
    else:
        target.copy_(values, non_blocking=True)
