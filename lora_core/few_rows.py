"""TorchBackend's form for few rows on a CPU: one product with every slot, then a sum of B's columns.

At eight rows the arithmetic of an adapter is nothing and the calls are everything, so this form
makes few of them, whatever adapters the rows have:

    p = x @ [A_0; A_1; ...]^T       every row with a band of ranks of every slot
    g = p[live] * factor            the row's own slot, its own rank, scaled
    y -= bag(-g, B's columns)       each row the sum of its own columns

The last line has its signs turned because a row without a delta is an empty bag, which is 0.0:
subtracting that leaves every number as it is, while adding it would turn -0.0 into 0.0.

Bands are the ranks 0 to 7, 8 to 15, 16 to 31 and so on; those that a rank of the batch reaches are
computed. The shape of a product depends on the rows, the pool and the band, never on a neighbour, so
neither do its bits. What lies past a rank or in another slot is computed and never picked up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from lora_core.batch import NO_LORA
from lora_core.weights import LoRAWeights, SliceLayout

MAX_ROWS = 32
"""Up to here this form beats a pair of products per request (measured on 2 cores)."""

_MAX_PRODUCT = 512
"""Columns of the largest product, slots * slices * ranks; beyond, most of it would be for others."""

_FIRST_BAND = 8
"""Ranks of the first band: a narrower product costs the same."""


@dataclass(frozen=True, eq=False)
class StackedWeights(LoRAWeights):
    """Weights whose memory lets the first ranks of all slots be one matrix.

    A lies as `[R, n_slices, S, K]` and B as `[S, R, N]`; `a` and `b` are views of the contract's
    shapes.
    """

    @classmethod
    def allocate(
        cls,
        *,
        num_slots: int,
        max_rank: int,
        in_features: int,
        layout: SliceLayout,
        embedding: bool,
    ) -> StackedWeights | None:
        """Room on the CPU in float32, every rank 0; None where this form would not pay."""
        n, out = layout.num_slices, layout.out_features
        if num_slots * n * max_rank > _MAX_PRODUCT:
            return None
        if embedding:
            a = torch.zeros(num_slots, in_features, max_rank)
        else:
            a = torch.zeros(max_rank, n, num_slots, in_features).permute(2, 1, 0, 3)
        return cls(
            a=a,
            b=torch.zeros(num_slots, max_rank, out).mT,
            ranks=torch.zeros(num_slots, n, dtype=torch.int32),
            scalings=torch.zeros(num_slots, n),
            layout=layout,
        )

    @cached_property
    def columns(self) -> Tensor:
        """`[S * R, N]`: B's columns, as rows."""
        return self.b.mT.view(-1, self.layout.out_features)

    @cached_property
    def products(self) -> tuple[Tensor, ...]:
        """Per band `[K, ranks * n_slices * S]`: those ranks of every slice and slot."""
        memory = self.a.permute(2, 1, 0, 3)  # [R, n, S, K]
        return tuple(
            memory[begin:end].view(-1, self.in_features).T for begin, end in _bands(self.max_rank)
        )

    @cached_property
    def _numbers(self) -> tuple[np.ndarray, np.ndarray]:
        """Views of ranks and scalings that cost no call of torch to read."""
        return self.ranks.numpy(), self.scalings.numpy()

    def plan(
        self, row_slots: tuple[int, ...], scales: tuple[float, ...] | None, num_rows: int
    ) -> Plan:
        """Which numbers of which product belong to which row.

        Args:
            row_slots: slot of every row of a request.
            scales: factor of every such row, None for 1.
            num_rows: T', rows of x, padding included.
        """
        ranks, scalings = self._numbers
        return _plan(
            row_slots,
            scales,
            num_rows,
            ranks.shape,
            self.max_rank,
            ranks.tobytes(),
            scalings.tobytes(),
        )


@dataclass(frozen=True, eq=False)
class SlicePlan:
    """Indices of one slice; one entry per (row, rank of its slot) unless said otherwise."""

    p: Tensor  # into the products, flat, one after the other
    h: Tensor  # into h `[T', n_slices, R]`, flat
    column: Tensor  # into `StackedWeights.columns`
    factor: Tensor  # scaling of the slot, times scale of the row, negated
    bags: Tensor  # where each row's entries begin
    rows: Tensor | None  # the rows that have a bag; None: all T'


@dataclass(frozen=True, eq=False)
class Plan:
    """Indices of one site and batch."""

    bands: int  # how many of the first bands are needed
    slices: tuple[SlicePlan | None, ...]  # None: no row has a delta there


def shrink(x: Tensor, weights: StackedWeights, plan: Plan) -> Tensor:
    """`h [T', n_slices, R]`, float32; only live entries are set."""
    h = torch.empty(x.shape[0], weights.layout.num_slices, weights.max_rank)
    p = _products(x, weights, plan)
    for part in plan.slices:
        if part is not None:
            h.view(-1).index_copy_(0, part.h, p.index_select(0, part.p))
    return h


def expand(h: Tensor, weights: StackedWeights, plan: Plan, out: Tensor) -> None:
    """`out [T', N]` += the scaled delta of every live row."""
    flat = h.view(-1)
    for s, part in enumerate(plan.slices):
        if part is not None:
            _add(flat.index_select(0, part.h), weights, out, s, part)


def add_delta(x: Tensor, weights: StackedWeights, plan: Plan, out: Tensor) -> None:
    """Both at once, without h in between; the same bits."""
    p = _products(x, weights, plan)
    for s, part in enumerate(plan.slices):
        if part is not None:
            _add(p.index_select(0, part.p), weights, out, s, part)


def _products(x: Tensor, weights: StackedWeights, plan: Plan) -> Tensor:
    """The products of the bands needed, flat, one after the other."""
    if plan.bands == 1:
        return torch.mm(x, weights.products[0]).view(-1)
    found = [torch.mm(x, product).view(-1) for product in weights.products[: plan.bands]]
    return torch.cat(found or [x.new_empty(0)])


def _add(live: Tensor, weights: StackedWeights, out: Tensor, s: int, part: SlicePlan) -> None:
    columns = weights.columns
    if len(weights.layout.widths) > 1:
        span = slice(weights.layout.offsets[s], weights.layout.offsets[s + 1])
        columns, out = columns[:, span], out[:, span]
    negated = torch.embedding_bag(
        columns, part.column, part.bags, False, 0, False, live.mul_(part.factor)
    )[0]
    if part.rows is None:
        out.sub_(negated)
    else:
        out.index_add_(0, part.rows, negated, alpha=-1)


@lru_cache(maxsize=64)
def _bands(max_rank: int) -> tuple[tuple[int, int], ...]:
    """Where each band of ranks begins and ends; each as wide as all before it."""
    begins = [0]
    while (begin := max(_FIRST_BAND, 2 * begins[-1])) < max_rank:
        begins.append(begin)
    return tuple(zip(begins, [*begins[1:], max_rank], strict=True))


@lru_cache(maxsize=1024)
def _plan(
    row_slots: tuple[int, ...],
    scales: tuple[float, ...] | None,
    num_rows: int,
    shape: tuple[int, int],
    max_rank: int,
    rank_bytes: bytes,
    scaling_bytes: bytes,
) -> Plan:
    ranks = np.frombuffer(rank_bytes, np.int32).reshape(shape).tolist()
    scalings = np.frombuffer(scaling_bytes, np.float32).reshape(shape).tolist()
    num_slots, n = shape
    longest = max((max(ranks[slot]) for slot in row_slots if slot != NO_LORA), default=0)
    bands = [(begin, end) for begin, end in _bands(max_rank) if begin < longest]
    per_rank = n * num_slots  # columns of a product per rank

    def slice_plan(s: int) -> SlicePlan | None:
        rows = [row for row, slot in enumerate(row_slots) if slot != NO_LORA and ranks[slot][s]]
        if not rows:
            return None
        live = [(row, row_slots[row], r) for row in rows for r in range(ranks[row_slots[row]][s])]

        def index(row: int, slot: int, r: int) -> int:
            begin, end = next(band for band in bands if r < band[1])
            before = num_rows * begin * per_rank  # bands lie one after the other, rows within them
            return before + (row * (end - begin) + r - begin) * per_rank + s * num_slots + slot

        # passing over a row costs less than naming it, unless most are passed over
        named = rows if 2 * len(rows) < num_rows else range(num_rows)
        sizes = {row: ranks[row_slots[row]][s] for row in rows}
        bags = list(accumulate((sizes.get(row, 0) for row in named), initial=0))
        return SlicePlan(
            p=_ints(index(*entry) for entry in live),
            h=_ints((row * n + s) * max_rank + r for row, _, r in live),
            column=_ints(slot * max_rank + r for _, slot, r in live),
            factor=torch.tensor(
                [
                    -scalings[slot][s] * (1.0 if scales is None else scales[row])
                    for row, slot, _ in live
                ]
            ),
            bags=_ints(bags[:-1]),
            rows=_ints(rows) if named is rows else None,
        )

    return Plan(bands=len(bands), slices=tuple(slice_plan(s) for s in range(n)))


def _ints(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)
