"""Adapters of experts: from the three forms that files have to the two projections of a module.

- PEFT's `target_parameters`: one A `[E * r, in]` and one B `[out, r * E]` per parameter, named after
  the module (`...experts.lora_A.weight`, and `...experts.base_layer.lora_A.weight` where a second
  parameter of it is adapted). A has the expert outside and the rank inside, B the other way round.
  PEFT before 0.19 took the axes of `[E, out, in]` parameters in the wrong order and trained the
  transpose of the pair; both are told apart by shape, and by the version where shapes agree.
- one pair per expert and projection: `...experts.3.gate_proj.lora_A.weight`, or Mixtral's w1, w2, w3.
- stacked: A `[E or 1, r, in]`, B `[E or 1, out, r]` at `...experts.gate_up_proj`; 1, or a plain
  matrix, where all experts share it (shared-outer).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lora_core.adapters.config import AdapterConfig
from lora_core.adapters.packing import ModuleTensors, SiteUpdate
from lora_core.errors import AdapterFormatError, AdapterMismatchError, UnsupportedAdapterError
from lora_core.sites import Site

_SLICES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}
"""Projections that are one slice of gate_up."""
_WHOLE = {"gate_up_proj", "up_proj", "down_proj", "w2"}
_DOWN = {"down_proj", "w2"}
_SWAP_FIXED = (0, 19)  # the PEFT release that took the axes of experts in their true order


class ExpertsTarget(Protocol):
    """What packing reads of one projection of a wrapped experts module."""

    site: Site
    dtype: torch.dtype

    @property
    def expert_ids(self) -> range:
        """The model's experts that this rank holds."""
        ...

    @property
    def total_experts(self) -> int:
        """Experts of the model."""
        ...

    @property
    def transposed(self) -> bool:
        """Whether the base stores this projection as `[E, in, out]`."""
        ...


def is_expert(path: str) -> bool:
    """Whether a module path of a file lies in an experts module."""
    return "experts" in path.split(".")


def pack_experts(
    modules: Mapping[str, ModuleTensors],
    targets: Iterable[ExpertsTarget],
    config: AdapterConfig,
    where: str,
    *,
    peft_version: str | None = None,
) -> dict[str, SiteUpdate]:
    """Bring the parts of an adapter that lie in experts into the form that their sites take.

    Args:
        modules: only paths for which `is_expert` holds.
        targets: the projections of the model.
        config: of the adapter.
        where: what to call the adapter in errors.
        peft_version: which PEFT saved it, for shapes that fit either order of axes.

    Returns:
        An update per site name, whose `a` are `[E or 1, r, K]` and whose `b` are `[E or 1, width, r]`,
        over the experts that this rank holds.

    Raises:
        AdapterMismatchError: experts, projections or shapes that this model does not have.
        AdapterFormatError: tensors that contradict each other or the configuration.
        UnsupportedAdapterError: parts that cannot be applied.
    """
    experts: dict[str, dict[bool, ExpertsTarget]] = {}
    for target in targets:
        module, _, leaf = target.site.name.rpartition(".")
        experts.setdefault(module, {})[leaf in _DOWN] = target
    builders: dict[str, _Builder] = {}
    for path, parts in modules.items():
        home, tail = _split(path)
        projections = experts[_locate(home, experts, where)]
        if parts.a is None or parts.b is None or set(parts.keys) - {"a", "b", "alpha"}:
            raise UnsupportedAdapterError(
                f"{where}: {path} has {', '.join(parts.keys.values())}: of experts only A, B and alpha "
                "can be applied, and both A and B are needed"
            )
        piece = _Reader(path, parts, parts.a, parts.b, config, where).read(
            home, tail, projections, peft_version
        )
        name = piece.target.site.name
        builders.setdefault(name, _Builder(piece.target, where)).add(path, piece)
    return {name: builder.build() for name, builder in builders.items()}


def _split(path: str) -> tuple[str, tuple[str, ...]]:
    """The experts module of a path, and what follows."""
    pieces = path.split(".")
    end = len(pieces) - pieces[::-1].index("experts")
    return ".".join(pieces[:end]), tuple(pieces[end:])


def _locate(home: str, experts: Mapping[str, object], where: str) -> str:
    """The model's experts module: of that name, or the only one of the same layer."""
    if home in experts:
        return home
    numbers = [piece for piece in home.split(".") if piece.isdigit()]
    same = [name for name in experts if [p for p in name.split(".") if p.isdigit()] == numbers]
    if len(same) != 1:
        known = ", ".join(sorted(experts)[:3]) or "none"
        raise AdapterMismatchError(
            f"{where}: the file adapts {home}, but this model's wrapped experts are {known}"
        )
    return same[0]


@dataclass(frozen=True, eq=False)
class _Piece:
    """One pair of the file in the model's terms.

    `a` is `[e, r, K]` and `b` `[e, width, r]`, e being the experts, 1 if shared.
    """

    target: ExpertsTarget
    slice: int | None  # None: the whole projection
    expert: int | None  # None: all of them
    a: Tensor
    b: Tensor
    scaling: float


class _Reader:
    """Reads one module path of the file."""

    def __init__(
        self,
        path: str,
        parts: ModuleTensors,
        a: Tensor,
        b: Tensor,
        config: AdapterConfig,
        where: str,
    ) -> None:
        self.path, self.parts, self.a, self.b = path, parts, a, b
        self.config, self.where = config, where

    def read(
        self,
        home: str,
        tail: tuple[str, ...],
        projections: Mapping[bool, ExpertsTarget],
        peft_version: str | None,
    ) -> _Piece:
        if all(piece == "base_layer" for piece in tail):
            return self._parameter(home, projections, peft_version)
        expert = int(tail[0]) if tail[0].isdigit() else None
        leaf = tail[-1]
        if len(tail) != (1 if expert is None else 2) or leaf not in _WHOLE | _SLICES.keys():
            raise UnsupportedAdapterError(
                f"{self.where}: {self.path} is no part of experts that is known: expected "
                "experts.N.PROJECTION or experts.PROJECTION, of gate_proj, up_proj, gate_up_proj, down_proj"
            )
        target = projections.get(leaf in _DOWN)
        if target is None:
            raise AdapterMismatchError(f"{self.where}: {self.path} is not wrapped in this model")
        only = target.site.layout.num_slices == 1 and target.site.name.endswith(f".{leaf}")
        index = None if only else _SLICES.get(leaf)
        if expert is None:
            a, b = (t.unsqueeze(0) if t.dim() == 2 else t for t in (self.a, self.b))
        else:
            if expert >= target.total_experts:
                raise AdapterMismatchError(
                    f"{self.where}: {self.path} is of expert {expert}, but {target.site.name} has "
                    f"{target.total_experts} experts"
                )
            a, b = self.a.unsqueeze(0), self.b.unsqueeze(0)
        return self._piece(target, index, expert, a, b, self.path)

    def _parameter(
        self,
        home: str,
        projections: Mapping[bool, ExpertsTarget],
        peft_version: str | None,
    ) -> _Piece:
        """PEFT's form: which parameter it is follows from the shapes."""
        a, b = self.a, self.b
        fits = []
        for target in projections.values():
            total = target.total_experts
            inputs, outputs = target.site.in_features, target.site.layout.out_features
            if a.dim() != 2 or b.dim() != 2 or a.shape[0] % total or a.shape[0] != b.shape[1]:
                continue
            if (a.shape[1], b.shape[0]) == (inputs, outputs):
                fits.append((target, False))
            if (a.shape[1], b.shape[0]) == (outputs, inputs) and not target.transposed:
                fits.append((target, True))
        if len(fits) > 1 and peft_version is not None:
            before = _version(peft_version) < _SWAP_FIXED
            fits = [
                (target, swapped)
                for target, swapped in fits
                if swapped == (before and not target.transposed)
            ]
        if len(fits) != 1:
            wanted = "; ".join(
                f"{t.site.name}: {t.total_experts} experts, {t.site.in_features} to "
                f"{t.site.layout.out_features}"
                for t in projections.values()
            )
            raise AdapterMismatchError(
                f"{self.where}: {self.path} has A {tuple(a.shape)} and B {tuple(b.shape)}, expected "
                f"[experts * rank, in] and [out, rank * experts] of {'one' if fits else 'any'} of: {wanted}."
                + (" Without peft_version it fits several." if fits else "")
            )
        ((target, swapped),) = fits
        total = target.total_experts
        per_expert_a = a.view(total, -1, a.shape[1])  # [E, r, in]
        per_expert_b = b.view(b.shape[0], -1, total).permute(2, 0, 1)  # [E, out, r]
        if swapped:
            per_expert_a, per_expert_b = per_expert_b.mT, per_expert_a.mT
        leaf = target.site.name.rpartition(".")[2]
        return self._piece(target, None, None, per_expert_a, per_expert_b, f"{home}.{leaf}")

    def _piece(
        self,
        target: ExpertsTarget,
        index: int | None,
        expert: int | None,
        a: Tensor,
        b: Tensor,
        name: str,
    ) -> _Piece:
        layout, total = target.site.layout, 1 if expert is not None else target.total_experts
        one = layout.num_slices == 1
        width = (
            layout.out_features
            if index is None
            else layout.out_features // 2
            if one
            else layout.widths[index]
        )
        rank = a.shape[1] if a.dim() == 3 else -1
        expected = ((rank, target.site.in_features), (width, rank))
        for tensor, shape, part in ((a, expected[0], "a"), (b, expected[1], "b")):
            experts = tensor.shape[0] if tensor.dim() == 3 else 0
            if tuple(tensor.shape[1:]) != shape or experts not in {1, total}:
                raise AdapterMismatchError(
                    f"{self.where}: {self.parts.keys[part]} has shape {tuple(tensor.shape)}, {target.site.name} "
                    f"needs [{total} or 1 experts, {shape[0]}, {shape[1]}]"
                )
        if rank != self.config.rank_of(name):
            raise AdapterFormatError(
                f"{self.where}: {name} has tensors of rank {rank}, but the configuration says "
                f"{self.config.rank_of(name)}"
            )
        alpha = self.config.alpha_of(name) if self.parts.alpha is None else float(self.parts.alpha)
        if alpha is None:
            raise AdapterFormatError(
                f"{self.where}: lora_alpha is null and {name} has no alpha tensor: its scale is unknown"
            )
        return _Piece(target, index, expert, a, b, self.config.scaling(rank=rank, alpha=alpha))


@dataclass(eq=False)
class _Builder:
    """Puts the pieces of one projection together."""

    target: ExpertsTarget
    where: str
    pieces: dict[tuple[int | None, int | None], _Piece] = field(default_factory=dict)

    def add(self, path: str, piece: _Piece) -> None:
        whole_or_part = any((s is None) != (piece.slice is None) for s, _ in self.pieces)
        all_or_one = any((e is None) != (piece.expert is None) for _, e in self.pieces)
        key = (piece.slice, piece.expert)
        if key in self.pieces or whole_or_part or all_or_one:
            raise AdapterFormatError(
                f"{self.where}: {path} and another module of the file both adapt {self.target.site.name}"
            )
        self.pieces[key] = piece

    def build(self) -> SiteUpdate:
        layout = self.target.site.layout
        by_slice = {s: self._stack(s) for s in {s for s, _ in self.pieces}}
        n = layout.num_slices
        a: list[Tensor | None] = [None] * n
        b: list[Tensor | None] = [None] * n
        scalings = [0.0] * n
        if None in by_slice:  # one A for all slices
            whole_a, whole_b, scaling = by_slice[None]
            for s in range(n):
                a[s], scalings[s] = whole_a, scaling
                b[s] = whole_b[:, layout.offsets[s] : layout.offsets[s + 1]]
        elif n == 1:
            a[0], b[0], scalings[0] = self._interleave(by_slice)
        else:
            for part, (slice_a, slice_b, scaling) in by_slice.items():
                assert part is not None
                a[part], b[part], scalings[part] = slice_a, slice_b, scaling
        return SiteUpdate(
            a=tuple(None if t is None else self._cast(t) for t in a),
            b=tuple(None if t is None else self._cast(t) for t in b),
            ranks=torch.tensor([0 if t is None else t.shape[-1] for t in b], dtype=torch.int32),
            scalings=torch.tensor(scalings, dtype=torch.float32),
        )

    def _stack(self, index: int | None) -> tuple[Tensor, Tensor, float]:
        """A, B and scaling of one slice, over the experts of this rank."""
        mine = {e: piece for (s, e), piece in self.pieces.items() if s == index}
        held = self.target.expert_ids
        if None in mine:
            piece = mine[None]
            a, b = (t if t.shape[0] == 1 else t[held.start : held.stop] for t in (piece.a, piece.b))
            return a, b, piece.scaling
        some = next(iter(mine.values()))
        rank = max(piece.a.shape[1] for piece in mine.values())
        a = torch.zeros(len(held), rank, some.a.shape[2])
        b = torch.zeros(len(held), some.b.shape[1], rank)
        for place, expert in enumerate(held):
            piece = mine.get(expert, some)
            if expert in mine:  # an expert that the file leaves alone keeps zeros
                own = piece.a.shape[1]
                a[place, :own] = piece.a[0]
                b[place, :, :own] = piece.b[0].float() * (piece.scaling / some.scaling)
        return a, b, some.scaling

    def _interleave(
        self, by_slice: Mapping[int | None, tuple[Tensor, Tensor, float]]
    ) -> tuple[Tensor, Tensor, float]:
        """Gate and up for a base that stores their outputs in turn: ranks side by side, rows in turn."""
        scaling = next(iter(by_slice.values()))[2]
        experts = max(t.shape[0] for a, b, _ in by_slice.values() for t in (a, b))
        rank = sum(a.shape[1] for a, _, _ in by_slice.values())
        width = self.target.site.layout.out_features
        inputs = self.target.site.in_features
        whole_a = torch.zeros(experts, rank, inputs)
        whole_b = torch.zeros(experts, width, rank)
        start = 0
        for part, (a, b, own) in by_slice.items():
            assert part is not None
            end = start + a.shape[1]
            whole_a[:, start:end] = a
            whole_b[:, part::2, start:end] = b.float() * (own / scaling)
            start = end
        return whole_a, whole_b, scaling

    def _cast(self, tensor: Tensor) -> Tensor:
        """In the dtype of the site; a value that it cannot hold is an error, not an infinity."""
        cast = tensor.to(self.target.dtype)
        if cast.dtype == torch.float16 != tensor.dtype:
            lost = torch.isinf(cast) & torch.isfinite(tensor)
            if bool(lost.any()):
                raise UnsupportedAdapterError(
                    f"{self.where}: {self.target.site.name} would hold values up to "
                    f"{float(tensor.abs().max()):.3g}, more than this model's float16 can"
                )
        return cast.contiguous()


def _version(text: str) -> tuple[int, ...]:
    """`"0.18.1.dev0"` -> `(0, 18)`."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
