"""From the tensors of one adapter to what each site of one model needs, in the model's own terms.

Every tensor of the file is either used or the adapter is refused: half an adapter is never applied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from lora_core.adapters.checkpoint import Checkpoint
from lora_core.adapters.sharding import cut_weight
from lora_core.backend import BaseModule
from lora_core.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    UnsupportedAdapterError,
)
from lora_core.sites import Site

if TYPE_CHECKING:
    from lora_core.adapters.experts import ExpertsTarget

_PEFT_PREFIX = "base_model.model."

_NORM_ROWS = 4096
"""Rows of a base weight that are turned to float32 at a time."""


class Target(Protocol):
    """What packing reads of a wrapped module; every `LoRALayer` is one."""

    site: Site
    base: BaseModule
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class SiteUpdate:
    """What one adapter brings to one site, on the host, in the dtype of the site.

    Attributes:
        a: per slice `[r, K]` (embedding: `[V, r]`), None where the adapter leaves the slice alone.
        b: per slice `[width, r]`, None likewise.
        ranks: int32 `[n_slices]`, 0 for such slices.
        scalings: float32 `[n_slices]`.
        output_scale: DoRA, float32 `[N]`.
        bias: float32 `[N]`, what to add to the base's own bias.
        full: `[N, K]` (embedding: `[V, N]`), a whole weight instead of the base's.
    """

    a: tuple[Tensor | None, ...]
    b: tuple[Tensor | None, ...]
    ranks: Tensor
    scalings: Tensor
    output_scale: Tensor | None = None
    bias: Tensor | None = None
    full: Tensor | None = None

    @cached_property
    def factors(self) -> tuple[list[int], list[float]]:
        """Ranks and scalings as host numbers."""
        return self.ranks.tolist(), self.scalings.tolist()

    def tensors(self) -> list[Tensor]:
        """All of them."""
        optional = (*self.a, *self.b, self.output_scale, self.bias, self.full)
        return [self.ranks, self.scalings, *(t for t in optional if t is not None)]

    def map(self, change: Callable[[Tensor], Tensor]) -> SiteUpdate:
        """The same with every tensor changed."""

        def each(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        return SiteUpdate(
            a=tuple(map(each, self.a)),
            b=tuple(map(each, self.b)),
            ranks=change(self.ranks),
            scalings=change(self.scalings),
            output_scale=each(self.output_scale),
            bias=each(self.bias),
            full=each(self.full),
        )


@dataclass(frozen=True, eq=False)
class PackedAdapter:
    """One adapter, ready for any slot of one model.

    Attributes:
        sites: by site name, only those that it changes.
        version: of its content, see `Checkpoint.version`.
        max_rank: the largest rank of any slice.
        notes: what its configuration names and its tensors do not have; harmless, but worth reading.
    """

    sites: Mapping[str, SiteUpdate]
    version: str
    max_rank: int
    notes: tuple[str, ...] = ()

    @cached_property
    def whole(self) -> tuple[str, ...]:
        """Sites for which it brings a whole weight."""
        return tuple(name for name, update in self.sites.items() if update.full is not None)

    @property
    def nbytes(self) -> int:
        """Bytes on the host; one A shared by several slices counts once."""
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for update in self.sites.values()
            for t in update.tensors()
        }
        return sum(storages.values())

    def pinned(self) -> PackedAdapter:
        """The same in page-locked memory, from which copies to a CUDA device need no waiting.

        One block for all of it: locking pages takes far longer than copying into them.
        """
        sizes = [t.numel() * t.element_size() for u in self.sites.values() for t in u.tensors()]
        block = torch.empty(sum(map(_aligned, sizes)), dtype=torch.uint8, pin_memory=True)
        used = 0

        def move(tensor: Tensor) -> Tensor:
            nonlocal used
            size = tensor.numel() * tensor.element_size()
            place = block[used : used + size].view(tensor.dtype).view(tensor.shape)
            used += _aligned(size)
            return place.copy_(tensor)

        return dataclasses.replace(
            self, sites={name: update.map(move) for name, update in self.sites.items()}
        )


@dataclass(eq=False)
class ModuleTensors:
    """The tensors of one module, as the file has them.

    Attributes:
        keys: part -> key, the parts being the fields of the same name.
    """

    keys: dict[str, str] = field(default_factory=dict)
    a: Tensor | None = None  # [r, K], of an embedding [r, V]
    b: Tensor | None = None  # [N, r]
    b_bias: Tensor | None = None  # [N], PEFT's lora_bias
    magnitude: Tensor | None = None  # [N], DoRA
    alpha: Tensor | None = None  # one number, instead of the configuration's
    weight: Tensor | None = None  # modules_to_save
    bias: Tensor | None = None  # modules_to_save, or trained biases
    base_weight: Tensor | None = (
        None  # a copy of the base's own, which PEFT saves beside embeddings
    )
    embedding: bool = False


class _Place(NamedTuple):
    """A slice of a site (or all of it, `slice` None) that a module of the file belongs to."""

    target: Target
    slice: int | None


def pack(
    checkpoint: Checkpoint, targets: Mapping[str, Target] | Mapping[str, Target | ExpertsTarget]
) -> PackedAdapter:
    """Bring an adapter into the form that the sites of one model take.

    Args:
        checkpoint: the adapter as saved.
        targets: the wrapped modules by site name.

    Raises:
        AdapterMismatchError: names or shapes that do not fit this model.
        AdapterFormatError: tensors that contradict each other or the configuration.
        UnsupportedAdapterError: tensors that would have to be dropped.
    """
    config, where = checkpoint.config, checkpoint.where
    modules, unknown = group_by_module(checkpoint.tensors, where)
    refuse_unknown(unknown, len(checkpoint.tensors), where)
    dense = {name: cast("Target", t) for name, t in targets.items() if t.site.kind != "experts"}
    experts = _pack_experts(checkpoint, modules, targets)
    places = locate([name for name in modules if name not in experts.modules], dense, where)
    _require_saved_modules(checkpoint, modules, dense)
    by_site: dict[str, list[tuple[str, ModuleTensors, int | None]]] = {}
    for name, (target, index) in places.items():
        by_site.setdefault(target.site.name, []).append((name, modules[name], index))
    sites: dict[str, SiteUpdate] = {}
    for site in targets:  # in the order of the model, not of the file
        members = by_site.get(site)
        update = experts.sites.get(site)
        if members:
            update = _SitePacker(checkpoint, dense[site]).pack(members)
        if update is not None:
            sites[site] = update
    if not sites:
        raise AdapterMismatchError(f"{where}: nothing in the file changes this model")
    return PackedAdapter(
        sites=sites,
        version=checkpoint.version,
        max_rank=max(int(update.ranks.max()) for update in sites.values()),
        notes=tuple(
            config.idle_patterns(name for name, parts in modules.items() if parts.a is not None)
        ),
    )


class _Experts(NamedTuple):
    """What an adapter brings to experts, and which modules of the file that is."""

    sites: Mapping[str, SiteUpdate]
    modules: frozenset[str]


def _pack_experts(
    checkpoint: Checkpoint,
    modules: Mapping[str, ModuleTensors],
    targets: Mapping[str, Target] | Mapping[str, Target | ExpertsTarget],
) -> _Experts:
    """The parts that lie in wrapped experts; without such, they are left to `locate` to refuse."""
    from lora_core.adapters.experts import is_expert, pack_experts

    projections = [cast("ExpertsTarget", t) for t in targets.values() if t.site.kind == "experts"]
    plain = {name for name, target in targets.items() if target.site.kind != "experts"}
    mine = {n: parts for n, parts in modules.items() if is_expert(n) and n not in plain}
    if not projections or not mine:
        return _Experts({}, frozenset())
    config = checkpoint.config
    packed = pack_experts(
        mine, projections, config, checkpoint.where, peft_version=config.peft_version
    )
    return _Experts(packed, frozenset(mine))


def _require_saved_modules(
    checkpoint: Checkpoint, modules: Mapping[str, ModuleTensors], targets: Mapping[str, Target]
) -> None:
    """Refuse a file without the weight of a module that it is said to replace and that the model has.

    PEFT lists both "classifier" and "score" for classifiers, so a name the model lacks is no mistake.
    """
    saved = [f".{name}." for name, parts in modules.items() if parts.weight is not None]
    for wanted in checkpoint.config.modules_to_save:
        has = [site for site in targets if f".{wanted}." in f".{site}."]
        if has and not any(f".{wanted}." in name for name in saved):
            raise AdapterFormatError(
                f"{checkpoint.where}: modules_to_save names {wanted!r} ({_examples(has)} in this model), but the "
                "file has no weight for it"
            )


# -- names ---------------------------------------------------------------------------------------


def group_by_module(
    tensors: Mapping[str, Tensor], where: str
) -> tuple[dict[str, ModuleTensors], list[str]]:
    """Tensors by module path, PEFT's own prefix taken off; and the keys of kinds nobody applies.

    Raises:
        AdapterFormatError: two tensors for one part of a module.
    """
    modules: dict[str, ModuleTensors] = {}
    unknown = []
    for key, tensor in tensors.items():
        found = _parse_key(key)
        if found is None:
            unknown.append(key)
            continue
        path, part = found
        parts = modules.setdefault(path, ModuleTensors())
        name = part.removeprefix("embedding_")
        parts.embedding |= name != part
        if name in parts.keys:
            raise AdapterFormatError(
                f"{where}: {key} and {parts.keys[name]} are the same part of {path}"
            )
        parts.keys[name] = key
        setattr(parts, name, tensor)
    return modules, unknown


def refuse_unknown(unknown: list[str], of: int, where: str) -> None:
    """Refuse a file with tensors that would have to be dropped.

    Raises:
        UnsupportedAdapterError: there are some.
    """
    if unknown:
        raise UnsupportedAdapterError(
            f"{where}: {len(unknown)} of {of} tensors are of a kind that is not applied and must not be "
            f"dropped: {_examples(unknown)}"
        )


_LORA_PARTS = {
    "lora_A": {"weight": "a"},
    "lora_B": {"weight": "b", "bias": "b_bias"},
    "lora_embedding_A": {"": "embedding_a"},
    "lora_embedding_B": {"": "embedding_b"},
    "lora_magnitude_vector": {"": "magnitude", "weight": "magnitude"},
}
"""Component that marks a part of an adapter -> what may follow it -> the part."""


def _parse_key(key: str) -> tuple[str, str] | None:
    """`"base_model.model.lm_head.lora_A.weight"` -> `("lm_head", "a")`; None for unknown kinds.

    An adapter name that was left inside (`lora_A.default.weight`) is accepted.
    """
    pieces = [p for p in key.removeprefix(_PEFT_PREFIX).split(".") if p != "_orig_mod"]
    for marker in range(len(pieces) - 1, 0, -1):
        endings = _LORA_PARTS.get(pieces[marker])
        if endings is None:
            continue
        path, rest = ".".join(pieces[:marker]), pieces[marker + 1 :]
        for tail in (rest, rest[1:]):  # as it is, or behind an adapter name
            part = endings.get(".".join(tail))
            if part is not None and len(rest) - len(tail) <= 1:
                return path, part
        return None
    if len(pieces) < 2 or any(p.startswith("lora_") for p in pieces):
        return None
    *head, leaf = pieces
    if leaf == "alpha":
        return ".".join(head), "alpha"
    if leaf not in {"weight", "bias"}:
        return None
    if head[-1] == "base_layer":
        return ".".join(head[:-1]), "base_weight" if leaf == "weight" else "bias"
    if "modules_to_save" in head[-2:]:
        head = head[: len(head) - 1 - head[::-1].index("modules_to_save")]
    return (".".join(head), leaf) if head else None


def locate(modules: Iterable[str], targets: Mapping[str, Target], where: str) -> dict[str, _Place]:
    """Where each module of the file lies in the model.

    Names are taken as they are where the model has them. The others must all be reached by one and the
    same change of prefix (`model.layers...` for `language_model.model.layers...`), in which no layer
    number takes part.

    Raises:
        AdapterMismatchError: names without a place, with examples of both sides.
        UnsupportedAdapterError: parts of experts.
    """
    known: dict[str, _Place] = {}
    for target in targets.values():
        site = target.site
        plain = len(site.slice_names) == 1
        known |= {
            name: _Place(target, None if plain else i) for i, name in enumerate(site.slice_names)
        }
        known[site.name] = _Place(target, None)
    names = list(modules)
    found = {name: known[name] for name in names if name in known}
    missing = [name for name in names if name not in known]
    experts = [name for name in missing if "experts" in name.split(".")]
    if experts:
        raise UnsupportedAdapterError(
            f"{where}: adapters of experts that are not wrapped in this model: {_examples(experts)}"
        )
    if missing:
        renames = _renames(missing, known)
        taken = set(found)
        usable = [
            (old, new)
            for old, new in renames
            if all(name.startswith(old) and new + name[len(old) :] in known for name in missing)
            and not any(new + name[len(old) :] in taken for name in missing)
        ]
        if len(usable) != 1:
            ambiguous = f" Several changes of prefix would fit: {usable}." if usable else ""
            raise AdapterMismatchError(
                f"{where}: {len(missing)} of {len(names)} modules have no place in this model. The file has "
                f"{_examples(missing)}; the model has {_examples(known)}.{ambiguous} The adapter was made "
                "for another model, or these modules are not wrapped."
            )
        ((old, new),) = usable
        found |= {name: known[new + name[len(old) :]] for name in missing}
    return found


def _renames(missing: list[str], known: Iterable[str]) -> list[tuple[str, str]]:
    """Changes of prefix that bring the first missing name to a known one, layer numbers kept."""
    first = missing[0].split(".")
    renames = set()
    for name in known:
        pieces = name.split(".")
        common = 0
        while common < min(len(first), len(pieces)) and first[-1 - common] == pieces[-1 - common]:
            common += 1
        old, new = first[: len(first) - common], pieces[: len(pieces) - common]
        if common and not any(p.isdigit() for p in (*old, *new)):
            renames.add(("".join(f"{p}." for p in old), "".join(f"{p}." for p in new)))
    return sorted(renames)


# -- values --------------------------------------------------------------------------------------


class _SitePacker:
    """Packs the modules of one adapter that lie in one site."""

    def __init__(self, checkpoint: Checkpoint, target: Target) -> None:
        self.config, self.where = checkpoint.config, checkpoint.where
        self.target, self.site = target, target.site

    def pack(self, members: list[tuple[str, ModuleTensors, int | None]]) -> SiteUpdate | None:
        """The update, or None when the file only repeats what the base has."""
        site, layout = self.site, self.site.layout
        n = layout.num_slices
        a: list[Tensor | None] = [None] * n
        b: list[Tensor | None] = [None] * n
        scalings = [0.0] * n
        scale, bias, full = _Rows(layout.out_features), _Rows(layout.out_features), None
        filled: set[tuple[str, int]] = set()
        for name, parts, index in members:
            covered = range(n) if index is None else (index,)
            for part in parts.keys:
                for i in covered:
                    if (part, i) in filled:
                        raise AdapterFormatError(
                            f"{self.where}: {name} and another module of the file both have {part} for "
                            f"{site.slice_names[i] if n > 1 else site.name}"
                        )
                    filled.add((part, i))
            rows = slice(layout.offsets[covered[0]], layout.offsets[covered[-1] + 1])
            if parts.weight is not None and parts.a is not None:
                raise AdapterFormatError(
                    f"{self.where}: {name} has both a whole weight and A and B, which PEFT never has"
                )
            if parts.weight is not None:
                full = self._full(name, parts.weight, rows, full)
            if parts.base_weight is not None:
                self._check_repeated(name, parts.base_weight, rows)
            delta = self._delta(name, parts, rows)
            if delta is not None:
                a_module, b_module, scaling = delta
                cast_a = self._cast(a_module, parts.keys["a"])
                cast_a = cast_a.mT.contiguous() if site.kind == "embedding" else cast_a
                cast_b = self._cast(b_module, parts.keys["b"])
                start = rows.start
                for i in covered:
                    a[i], scalings[i] = cast_a, scaling
                    b[i] = cast_b[layout.offsets[i] - start : layout.offsets[i + 1] - start]
                if parts.magnitude is not None:
                    scale.set(
                        rows,
                        self._output_scale(name, parts, a_module, b_module, scaling, rows),
                        fill=1.0,
                    )
                if parts.b_bias is not None:
                    self._expect(name, "lora_B.bias", parts.b_bias, (rows.stop - rows.start,))
                    bias.add(rows, scaling * parts.b_bias.float())
            if parts.bias is not None:
                added = self._bias(name, parts.bias, rows)
                if added is not None:
                    bias.add(rows, added)
        if not any(t is not None for t in (*a, scale.values, bias.values, full)):
            return None
        return SiteUpdate(
            a=tuple(a),
            b=tuple(b),
            ranks=torch.tensor([0 if t is None else t.shape[1] for t in b], dtype=torch.int32),
            scalings=torch.tensor(scalings, dtype=torch.float32),
            output_scale=scale.values,
            bias=bias.values,
            full=full,
        )

    def _delta(
        self, name: str, parts: ModuleTensors, rows: slice
    ) -> tuple[Tensor, Tensor, float] | None:
        """A, B and scaling of one module, or None when it has no adapter."""
        have = [part for part in ("a", "b") if part in parts.keys]
        lone = [key for part, key in parts.keys.items() if part in {"magnitude", "alpha", "b_bias"}]
        if not have and not lone:
            return None
        if parts.a is None or parts.b is None:
            raise AdapterFormatError(
                f"{self.where}: {name} has {_examples(parts.keys.values())} but not both of A and B"
            )
        kind, width = self.site.kind, rows.stop - rows.start
        if parts.embedding != (kind == "embedding"):
            raise AdapterMismatchError(
                f"{self.where}: {name} has tensors of {'an embedding' if parts.embedding else 'a linear'}, but "
                f"in this model it is {'an embedding' if kind == 'embedding' else 'a linear'}"
            )
        if parts.a.dim() != 2 or parts.b.dim() != 2 or parts.a.shape[0] != parts.b.shape[1]:
            raise AdapterFormatError(
                f"{self.where}: {name} has A {tuple(parts.a.shape)} and B {tuple(parts.b.shape)}, expected "
                "[rank, inputs] and [outputs, rank] of one rank"
            )
        if self._is_transposed() and self._is_parameter(name):
            raise UnsupportedAdapterError(
                f"{self.where}: target_parameters names the weight of {name}, which this model stores as "
                "[inputs, outputs]: A and B would change places. Name the module in target_modules."
            )
        rank = parts.a.shape[0]
        if rank != self.config.rank_of(name):
            raise AdapterFormatError(
                f"{self.where}: {name} has tensors of rank {rank}, but the configuration says "
                f"{self.config.rank_of(name)}"
            )
        axis_in = "vocabulary" if kind == "embedding" else "inputs"
        axis_out = "vocabulary" if kind == "lm_head" else "outputs"
        for tensor, axis, what, expected in (
            (parts.a, 1, axis_in, self.site.in_features),
            (parts.b, 0, axis_out, width),
        ):
            if tensor.shape[axis] != expected:
                raise AdapterMismatchError(
                    f"{self.where}: {name} is for {what} of {tensor.shape[axis]}, in this model {what} "
                    f"{'has' if what == 'vocabulary' else 'are'} {expected} (rank {rank} is not the matter)"
                )
        if self.config.use_dora and parts.magnitude is None:
            raise AdapterFormatError(
                f"{self.where}: use_dora is set, but {name} has no lora_magnitude_vector"
            )
        if parts.magnitude is not None and not self.config.use_dora:
            raise AdapterFormatError(
                f"{self.where}: {parts.keys['magnitude']} belongs to DoRA, but use_dora is not set"
            )
        return parts.a, parts.b, self.config.scaling(rank=rank, alpha=self._alpha(name, parts))

    def _alpha(self, name: str, parts: ModuleTensors) -> float:
        if parts.alpha is not None:
            if parts.alpha.numel() != 1 or not bool(torch.isfinite(parts.alpha)):
                raise AdapterFormatError(
                    f"{self.where}: {parts.keys['alpha']} must be one finite number"
                )
            return float(parts.alpha)
        alpha = self.config.alpha_of(name)
        if alpha is None:
            raise AdapterFormatError(
                f"{self.where}: lora_alpha is null and {name} has no alpha tensor: its scale is unknown"
            )
        return alpha

    def _output_scale(
        self, name: str, parts: ModuleTensors, a: Tensor, b: Tensor, scaling: float, rows: slice
    ) -> Tensor:
        """`m / ||W + scaling * B @ A||`, the norm over the inputs of each output (arXiv:2402.09353)."""
        if self.site.kind == "embedding":
            raise UnsupportedAdapterError(
                f"{self.where}: DoRA of an embedding ({name}) is not supported"
            )
        base = self._base_weight(name, "DoRA needs its norms")
        magnitude = parts.magnitude
        assert magnitude is not None
        self._expect(name, "lora_magnitude_vector", magnitude, (rows.stop - rows.start,))
        norms = []
        for start in range(0, len(b), _NORM_ROWS):
            part = slice(start, start + _NORM_ROWS)
            weight = base[rows][part].to(torch.float32, copy=True)
            weight.addmm_(b[part].to(weight), a.to(weight), alpha=scaling)
            norms.append(torch.linalg.vector_norm(weight, dim=1).cpu())
        return magnitude.float() / torch.cat(norms)

    def _bias(self, name: str, own: Tensor, rows: slice) -> Tensor | None:
        """The adapter's bias minus the base's, or None where it is the base's own, saved again."""
        self._refuse_shard(name, "its bias is given as a whole, and the base's has to be taken off")
        base = self.target.base.bias
        self._expect(name, "bias", own, (rows.stop - rows.start,))
        if base is None:
            raise AdapterMismatchError(
                f"{self.where}: {name} has a bias, but {self.site.name} has none in this model"
            )
        mine = base[rows].detach()
        return None if _same(mine, own) else own.float() - mine.float().cpu()

    def _full(self, name: str, weight: Tensor, rows: slice, before: Tensor | None) -> Tensor:
        """The site's whole weight, where this module brings the rows `rows`."""
        layout, in_features = self.site.layout, self.site.in_features
        cast = self._cast(weight, f"{name}.weight")
        if self.site.kind == "embedding":
            self._expect(name, "weight", weight, (in_features, layout.out_features))
            return cast
        width = rows.stop - rows.start
        if self._is_transposed():
            self._expect(name, "weight", weight, (in_features, width))
            cast = cast.mT.contiguous()
        else:
            self._expect(name, "weight", weight, (width, in_features))
        if width == layout.out_features:
            return cast
        if before is None:
            base = self._base_weight(name, "only some of its slices are replaced")
            before = base.detach().to("cpu", copy=True)
        before[rows] = cast
        return before

    def _is_parameter(self, name: str) -> bool:
        """Whether the adapter was made for the module's bare weight."""
        wanted = (parameter.rpartition(".")[0] for parameter in self.config.target_parameters)
        return any(f".{name}".endswith(f".{module}") for module in wanted)

    def _is_transposed(self) -> bool:
        """Whether the module stores its weight as `[K, N]` (GPT-2), and so does a file with its weight."""
        weight = self.target.base.weight
        return (
            weight is not None
            and not weight.is_contiguous()
            and weight.stride() == (1, weight.shape[0])
        )

    def _check_repeated(self, name: str, saved: Tensor, rows: slice) -> None:
        """A saved copy of the base weight must be this model's, to the precision of the coarser one."""
        base = self._base_weight(name, "the file repeats it", whole=False)
        saved = saved.mT if self._is_transposed() else saved
        if self.site.shard is not None:
            live = cut_weight(torch.ones(()).expand_as(saved), self.site).bool()
            saved, mine = (
                cut_weight(saved, self.site),
                base.cpu().where(live, 0),
            )  # padding: anything
        else:
            mine = base if self.site.kind == "embedding" else base[rows]
        if not _same(mine, saved):
            raise AdapterMismatchError(
                f"{self.where}: the file holds the base weight of {name}, {tuple(saved.shape)}, and it is not "
                f"this model's, {tuple(mine.shape)}: the adapter was made on another base model, or on one with "
                "another vocabulary"
            )

    def _refuse_shard(self, name: str, why: str) -> None:
        if self.site.shard is not None:
            raise UnsupportedAdapterError(
                f"{self.where}: this process holds only a part of {name}, and {why}: load it where the module is "
                "whole"
            )

    def _base_weight(self, name: str, why: str, *, whole: bool = True) -> Tensor:
        if whole:
            self._refuse_shard(name, why)
        weight = self.target.base.weight
        if weight is None or not weight.is_floating_point():
            raise UnsupportedAdapterError(
                f"{self.where}: the base weight of {name} is not a plain tensor, and {why}"
            )
        return weight.detach()

    def _expect(self, name: str, what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            vocabulary = (
                " (the first is the vocabulary)"
                if self.site.kind in {"embedding", "lm_head"}
                else ""
            )
            raise AdapterMismatchError(
                f"{self.where}: {name}.{what} has shape {tuple(tensor.shape)}, this model needs {shape}{vocabulary}"
            )

    def _cast(self, tensor: Tensor, key: str) -> Tensor:
        """In the dtype of the site, once; a value that it cannot hold is an error, not an infinity."""
        cast = tensor.to(self.target.dtype)
        if torch.finfo(cast.dtype).max < torch.finfo(tensor.dtype).max:
            lost = torch.isinf(cast) & torch.isfinite(tensor)
            if bool(lost.any()):
                raise UnsupportedAdapterError(
                    f"{self.where}: {key} holds values up to {float(tensor.abs().max()):.3g}, more than this "
                    f"model's {str(cast.dtype).removeprefix('torch.')} can"
                )
        return cast.contiguous()


def _aligned(size: int) -> int:
    """Bytes up to the next multiple of 64, where any dtype may begin."""
    return -size % 64 + size


def _same(mine: Tensor, saved: Tensor) -> bool:
    """Whether a saved tensor is the model's, to the precision of the coarser of the two."""
    if mine.shape != saved.shape:
        return False
    dtype = min(mine.dtype, saved.dtype, key=lambda d: d.itemsize)
    return torch.equal(mine.to(dtype), saved.to(mine.device, dtype))


class _Rows:
    """A float32 vector over the outputs, made when the first slice needs it."""

    def __init__(self, size: int) -> None:
        self.size, self.values = size, None  # type: int, Tensor | None

    def set(self, rows: slice, values: Tensor, *, fill: float) -> None:
        if self.values is None:
            self.values = torch.full((self.size,), fill)
        self.values[rows] = values

    def add(self, rows: slice, values: Tensor) -> None:
        if self.values is None:
            self.values = torch.zeros(self.size)
        self.values[rows] += values


def _examples(names: Iterable[str], limit: int = 3) -> str:
    some = list(names)
    rest = f" and {len(some) - limit} more" if len(some) > limit else ""
    return ", ".join(some[:limit]) + rest
