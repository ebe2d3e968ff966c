"""DenseCase: one batch over one site, as data. Problem: its tensors, guarded on every side.

A case prints as code that can be pasted. Its tensors depend on the case alone, not on the backend.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from lora_core.backend import LoRABackend
from lora_core.batch import NO_LORA, LoRABatch
from lora_core.capabilities import DTypeName, Mode
from lora_core.testing import oracle
from lora_core.testing.compare import Where, assert_close
from lora_core.testing.engine import Violation
from lora_core.testing.guards import (
    Banded,
    PoisonedAllocations,
    Unchanged,
    assert_sync_zero,
    poison_scratch,
)
from lora_core.testing.subject import Subject
from lora_core.weights import LoRAWeights, SliceLayout

_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_ORDERS = 4
_HOST_LIMIT = 2**33
"""Products larger than this are left to GPUs."""
_SAMPLES = 1024
"""Plain torch's own error is measured over a few orders of summation; results of few entries, whose
error is mostly chance, over as many as it takes to see this many."""

Rank = int | tuple[int, ...]


@dataclass(frozen=True, repr=False)
class DenseCase:
    """One batch over one site.

    Attributes:
        lengths: tokens of each request.
        slots: slot of each request.
        ranks: of each slot: one number for all slices, or one per slice; 0 is an absent module.
        K: inputs; of an embedding the vocabulary.
        widths: of the slices, sum N.
        R: max_rank of the pool.
        dtype: of x, A and B, and of the base.
        mode: of the batch.
        padding: rows of x past the batch.
        layout: "plain": contiguous weights between canaries; "own": what `allocate_weights` gives.
        strided: x and out are rows of wider buffers, and everything begins at an odd element.
        bias: whether the base has one.
        logits: rows kept of each request, per lm_head pass.
        scales: a factor per request.
        ones: every value of x, A, B and W is one, every scaling too.
        seed: of the values.
    """

    lengths: tuple[int, ...] = (3, 2)
    slots: tuple[int, ...] = (0, 1)
    ranks: tuple[Rank, ...] = (4, 4)
    K: int = 40
    widths: tuple[int, ...] = (48,)
    R: int = 8
    dtype: DTypeName = "float32"
    mode: Mode = "prefill"
    padding: int = 0
    layout: Literal["plain", "own"] = "plain"
    strided: bool = False
    bias: bool = False
    logits: tuple[tuple[int, ...], ...] = ()
    scales: tuple[float, ...] | None = None
    ones: bool = False
    seed: int = 0

    def __repr__(self) -> str:
        """Code that builds it, with the fields that are not the default."""
        fields = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self)]
        told = ", ".join(f"{name}={value!r}" for name, value, default in fields if value != default)
        return f"DenseCase({told})"

    @property
    def id(self) -> str:
        """`bf16-r8-K100-N64-seg(4,0,7)-slot(0,.,1)`."""
        parts = [
            _SHORT[self.dtype],
            "r" + ",".join(_rank_id(rank) for rank in dict.fromkeys(self.ranks)),
            f"K{self.K}",
            "N" + "+".join(map(str, self.widths)),
            f"seg({_runs(self.lengths)})",
            f"slot({_runs('.' if slot == NO_LORA else slot for slot in self.slots)})",
        ]
        if self.R != 8:
            parts.insert(2, f"R{self.R}")
        parts += [f"pass({';'.join(_runs(kept) for kept in self.logits)})"] if self.logits else []
        parts += [self.mode] if self.mode != "prefill" else []
        parts += [f"pad{self.padding}"] if self.padding else []
        parts += ["own"] if self.layout == "own" else []
        parts += [name for name in ("strided", "bias", "ones") if getattr(self, name)]
        parts += ["scales"] if self.scales is not None else []
        parts += [f"seed{self.seed}"] if self.seed else []
        return "-".join(parts)

    @property
    def tokens(self) -> int:
        """T."""
        return sum(self.lengths)

    @property
    def rows(self) -> int:
        """T', padding included."""
        return self.tokens + self.padding

    @property
    def slice_ranks(self) -> list[list[int]]:
        """Rank of every slot and slice."""
        n = len(self.widths)
        return [[rank] * n if isinstance(rank, int) else list(rank) for rank in self.ranks]

    @property
    def batch(self) -> LoRABatch:
        """What the engine would hand in."""
        return LoRABatch(self.lengths, self.slots, self.mode, self.logits, self.scales)

    def but(self, **changes: Any) -> DenseCase:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


class Base:
    """The wrapped module: a linear or an embedding whose results lie between canaries.

    Args:
        weight: `[N, K]`, or `[V, N]` for an embedding.
        bias: `[N]` or None.
        embedding: look rows up instead of multiplying.
        pad_columns: further elements per row of the result.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        embedding: bool = False,
        pad_columns: int = 0,
    ) -> None:
        self.weight: Tensor | None = weight
        self.bias = bias
        self._embedding, self._pad = embedding, pad_columns
        self.results: list[Banded] = []

    def __call__(self, x: Tensor, /) -> Tensor:
        """The module's result, each time in a buffer of its own."""
        value = self.value(x)
        result = Banded(tuple(value.shape), value.dtype, value.device, pad_columns=self._pad)
        result.tensor.copy_(value)
        result.arm()
        self.results.append(result)
        return result.tensor

    def value(self, x: Tensor) -> Tensor:
        """The result alone."""
        assert self.weight is not None
        if self._embedding:
            return functional.embedding(x.clamp(0, self.weight.shape[0] - 1), self.weight)
        # contiguous: a library's product may not reach rows that are 2^31 elements apart
        return functional.linear(x.contiguous(), self.weight, self.bias)


class Problem:
    """The tensors of one case on one device.

    Everything that no result may depend on is NaN: unused slots and ranks, padded rows, what lies
    around each tensor. Everything that may not be written is compared by `guarded`.

    Args:
        subject: says where, and allocates weights of layout "own".
        case: what to build.
        embedding: A is `[S, V, R]` and x holds ids.
        backend: allocates weights of layout "own"; None for a fresh one.
    """

    def __init__(
        self,
        subject: Subject,
        case: DenseCase,
        *,
        embedding: bool = False,
        backend: LoRABackend[Any] | None = None,
    ) -> None:
        subject.require_dtype(case.dtype)
        if case.rows * case.K * sum(case.widths) > _HOST_LIMIT:
            subject.require_cuda()
        self.case, self.device, self.dtype = case, subject.device, getattr(torch, case.dtype)
        self._values = torch.Generator().manual_seed(case.seed)
        self._bands: dict[str, Banded] = {}
        self.layout = SliceLayout(case.widths)
        n, out, slots = self.layout.num_slices, self.layout.out_features, len(case.ranks)
        self._pad = 16 if case.strided else 0

        a_shape = (slots, case.K, case.R) if embedding else (slots, n, case.R, case.K)
        if case.layout == "own":
            self.weights = (backend or subject.new()).allocate_weights(
                num_slots=slots, max_rank=case.R, in_features=case.K, layout=self.layout, dtype=self.dtype,
                embedding=embedding,
            )  # fmt: skip
            self.weights.a.fill_(torch.nan)
            self.weights.b.fill_(torch.nan)
        else:
            self.weights = LoRAWeights(
                a=self._banded("weights.a", a_shape),
                b=self._banded("weights.b", (slots, out, case.R)),
                ranks=self._banded("weights.ranks", (slots, n), torch.int32),
                scalings=self._banded("weights.scalings", (slots, n), torch.float32),
                layout=self.layout,
            )
        self.weights.scalings.fill_(torch.nan)
        self.weights.ranks.copy_(torch.tensor(case.slice_ranks, dtype=torch.int32))
        used = {slot for slot in case.slots if slot != NO_LORA}
        for slot in range(slots):
            if slot in used:
                self.fill_slot(slot)

        weight = self._random((case.K, out) if embedding else (out, case.K), case.K**-0.5)
        bias = self._random((out,)) if case.bias else None
        self.base = Base(weight, bias, embedding=embedding, pad_columns=self._pad)
        if embedding:
            ids = torch.randint(0, case.K, (case.rows,), generator=self._values)
            ids[case.tokens :] = case.K + 5  # padding: no row of the table
            self.x = ids.to(self.device)
        else:
            self.x = self._banded("x", (case.rows, case.K), pad_columns=self._pad)
            self.x[: case.tokens] = self._random((case.tokens, case.K))
        self.arm()

    # -- values ------------------------------------------------------------------------------------

    def _random(self, shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
        if self.case.ones:
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        values = torch.randn(shape, generator=self._values) * scale
        return values.to(self.dtype).to(self.device)

    def _banded(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        *,
        pad_columns: int = 0,
    ) -> Tensor:
        margin = 65 if self.case.strided else 64
        band = Banded(
            shape, dtype or self.dtype, self.device, margin=margin, pad_columns=pad_columns
        )
        self._bands[name] = band
        return band.tensor

    def fill_slot(self, slot: int) -> None:
        """Write an adapter into a slot, its live ranks only, as a pool does; then arm the bands."""
        weights, case = self.weights, self.case
        for s, rank in enumerate(case.slice_ranks[slot]):
            span = slice(self.layout.offsets[s], self.layout.offsets[s + 1])
            if weights.is_embedding:
                weights.a[slot, :, :rank] = self._random((case.K, rank))
            else:
                weights.a[slot, s, :rank] = self._random((rank, case.K), case.K**-0.5)
            weights.b[slot, span, :rank] = self._random((span.stop - span.start, rank))
            weights.scalings[slot, s] = 1.0 if case.ones else 0.5 + 0.375 * slot + 0.0625 * s
        self.arm()

    def arm(self) -> None:
        """Take the inputs as they are now; for checks that change them between runs."""
        for band in self._bands.values():
            band.arm()

    def hidden(self) -> Tensor:
        """An h for expand, float32 `[T', n_slices, R]`: NaN wherever it is unspecified."""
        case = self.case
        n = self.layout.num_slices
        h = self._banded("h", (case.rows, n, case.R), torch.float32)
        values = torch.randn(
            (case.rows, n, case.R), generator=torch.Generator().manual_seed(case.seed + 1)
        )
        ranks = case.slice_ranks
        begin = 0
        for length, slot in zip(case.lengths, case.slots, strict=True):
            if slot != NO_LORA:
                for s in range(n):
                    live = ranks[slot][s]
                    rows = slice(begin, begin + length)
                    h[rows, s, :live] = values[rows, s, :live].to(self.device)
            begin += length
        self._bands["h"].arm()
        return h

    def out(self, *, fill: float | None = None) -> Banded:
        """An out for expand, `[T', N]` between canaries."""
        case = self.case
        margin = 65 if case.strided else 64
        band = Banded(
            (case.rows, self.layout.out_features),
            self.dtype,
            self.device,
            margin=margin,
            pad_columns=self._pad,
        )
        if fill is not None:
            band.tensor.fill_(fill)
        else:
            values = torch.randn(
                band.tensor.shape, generator=torch.Generator().manual_seed(case.seed + 2)
            )
            band.tensor.copy_(values)
        band.arm()
        return band

    def with_batch(self, case: DenseCase) -> Problem:
        """The same weights and base under another batch, whose adapters must be among the filled ones."""
        other = copy.copy(self)
        other.case = case
        values = torch.randn(
            (case.rows, case.K), generator=torch.Generator().manual_seed(case.seed + 3)
        )
        other.x = values.to(self.dtype).to(self.device)
        other.x[case.tokens :] = torch.nan
        return other

    # -- running --------------------------------------------------------------------------------------

    def inputs(self) -> dict[str, Tensor]:
        """Everything that no op may write."""
        weights = self.weights
        named = {
            "x": self.x,
            "weights.a": weights.a,
            "weights.b": weights.b,
            "weights.ranks": weights.ranks,
        }
        named["weights.scalings"] = weights.scalings
        assert self.base.weight is not None
        named["base.weight"] = self.base.weight
        optional = {"base.bias": self.base.bias, "weights.output_scale": weights.output_scale}
        optional["weights.bias"] = weights.bias
        named |= {name: tensor for name, tensor in optional.items() if tensor is not None}
        return named | {f"weights.full[{slot}]": tensor for slot, tensor in weights.full.items()}

    @contextmanager
    def guarded(self, backend: LoRABackend[Any]) -> Iterator[None]:
        """Around ops: scratch and fresh memory poisoned, inputs and canaries compared, sync zero."""
        unchanged = Unchanged(self.inputs())
        poison_scratch(backend)
        with PoisonedAllocations():  # type: ignore[no-untyped-call]
            yield
        unchanged.check()
        for name, band in self._bands.items():
            band.check(name)
        for result in self.base.results:
            result.check("the base's output", written=True)
        self.base.results.clear()
        assert_sync_zero(backend)

    def prepared(self, subject: Subject) -> LoRABackend[Any]:
        """A fresh backend with the case's batch prepared."""
        backend = subject.new()
        with PoisonedAllocations():  # type: ignore[no-untyped-call]
            backend.prepare_batch(self.case.batch)
        return backend

    def linear(self, backend: LoRABackend[Any]) -> Tensor:
        """`backend.linear`, guarded; live rows are compared by the caller."""
        with self.guarded(backend):
            result = backend.linear(self.x, self.base, self.weights)
        self.assert_fresh(result, backend)
        return result

    def assert_fresh(self, result: object, backend: LoRABackend[Any]) -> None:
        """A result shares no storage with inputs or with the backend's own memory (clause S9).

        Raises:
            Violation: it does.
            AssertionError: it is no tensor.
        """
        if not isinstance(result, Tensor):
            raise AssertionError(f"the op returned {result!r}, not a tensor")  # noqa: TRY004
        if not result.numel():
            return
        homes = {f"scratch[{k!r}]": t for k, t in backend.workspace.scratch.items()}
        homes |= {f"static[{k!r}]": t for k, t in backend.workspace.static.items()}
        for name, tensor in (self.inputs() | homes).items():
            if (
                tensor.numel()
                and tensor.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
            ):
                raise Violation(
                    "S9", f"the result is a view of {name}: the next op would overwrite it"
                )

    # -- what it should be ------------------------------------------------------------------------------

    def where(self, lengths: Sequence[int] | None = None) -> Where:
        """Words about a place in a result: its request, slot and slice."""
        case, offsets = self.case, self.layout.offsets
        owners = [
            i for i, n in enumerate(case.lengths if lengths is None else lengths) for _ in range(n)
        ]

        def words(index: tuple[int, ...]) -> str:
            row = index[0]
            if row >= len(owners):
                return "a padded row"
            request = owners[row]
            slot = case.slots[request]
            text = f"request {request}, " + (
                "no adapter" if slot == NO_LORA else f"slot {slot}, rank {case.ranks[slot]}"
            )
            if len(index) == 2 and len(case.widths) > 1:
                text += f", slice {sum(column <= index[1] for column in offsets[1:])}"
            return text

        return words

    def expected_linear(
        self, lengths: Sequence[int] | None = None, x: Tensor | None = None
    ) -> Tensor:
        """float64 `[rows of the batch, N]`."""
        lengths = self.case.lengths if lengths is None else lengths
        x = self.x[: sum(lengths)] if x is None else x
        assert self.base.weight is not None
        return oracle.linear(
            x,
            self.base.weight,
            self.base.bias,
            self.weights,
            lengths,
            self.case.slots,
            self.case.scales,
        )

    def assert_linear(
        self,
        result: Tensor,
        what: str = "linear",
        lengths: Sequence[int] | None = None,
        x: Tensor | None = None,
    ) -> None:
        """The live rows of a result are within plain torch's error of the float64 ones."""
        lengths = self.case.lengths if lengths is None else lengths
        live = self.x[: sum(lengths)] if x is None else x
        if result.shape[0] < sum(lengths):
            raise AssertionError(
                f"{what} returned {result.shape[0]} rows for a batch of {sum(lengths)}"
            )
        expected = self.expected_linear(lengths, live)
        assert_close(
            result[: sum(lengths)],
            expected,
            self.plain_linear(live, lengths),
            what,
            self.where(lengths),
        )

    def assert_embedding(self, result: Tensor, what: str = "embedding") -> None:
        """The live rows of an embedding are within plain torch's error of the float64 ones."""
        case, weights, table = self.case, self.weights, self.base.weight
        assert table is not None
        ids = self.x[: case.tokens]
        expected = oracle.embedding(ids, table, weights, case.lengths, case.slots, case.scales)
        h = torch.full((case.tokens, 1, case.R), torch.nan, device=self.device)
        start = table[ids]
        begin = 0
        for length, slot in zip(case.lengths, case.slots, strict=True):
            rows, begin = slice(begin, begin + length), begin + length
            if slot != NO_LORA:
                h[rows, 0] = weights.a[slot][ids[rows]].float()
                if slot in weights.full:
                    start[rows] = weights.full[slot][ids[rows]]
        assert_close(
            result[: case.tokens], expected, self.plain_expand(h, start), what, self.where()
        )

    def plain_linear(self, x: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """What plain torch gives in the case's dtype, over a few orders of summation."""
        weights, case = self.weights, self.case
        assert self.base.weight is not None
        results = []
        base_bias = self.base.bias if weights.output_scale is None else None
        for seed, order in self._orders(case.K, sum(lengths) * self.layout.out_features):
            x_, w_ = x[:, order], self.base.weight[:, order]
            y = functional.linear(x_, w_, base_bias)
            begin = 0
            for request, (length, slot) in enumerate(zip(lengths, case.slots, strict=True)):
                rows, begin = slice(begin, begin + length), begin + length
                if slot == NO_LORA or not length:
                    continue
                if slot in weights.full:
                    y[rows] = functional.linear(x_[rows], weights.full[slot][:, order], base_bias)
                for s, rank in enumerate(case.slice_ranks[slot]):
                    span = slice(self.layout.offsets[s], self.layout.offsets[s + 1])
                    h = _product(x_[rows], weights.a[slot, s, :rank][:, order].T, seed)
                    product = _product(h, weights.b[slot, span, :rank].T, seed)
                    y[rows, span] += self._factor(slot, s, request) * product
                if weights.output_scale is not None:
                    y[rows] *= weights.output_scale[slot].to(self.dtype)
                if weights.bias is not None:
                    y[rows] += weights.bias[slot].to(self.dtype)
            if weights.output_scale is not None and self.base.bias is not None:
                y += self.base.bias
            results.append(y)
        return results

    def plain_shrink(self) -> list[Tensor]:
        """Plain torch's float32 h from the same inputs."""
        weights, case = self.weights, self.case
        results = []
        for seed, order in self._orders(case.K, case.tokens * self.layout.num_slices * case.R):
            h = torch.zeros(case.tokens, self.layout.num_slices, case.R, device=self.device)
            begin = 0
            for length, slot in zip(case.lengths, case.slots, strict=True):
                rows, begin = slice(begin, begin + length), begin + length
                if slot == NO_LORA or not length:
                    continue
                for s, rank in enumerate(case.slice_ranks[slot]):
                    if rank:
                        a = weights.a[slot, s, :rank][:, order].T
                        h[rows, s, :rank] = _product(
                            self.x[rows][:, order], a, seed, out_dtype=torch.float32
                        )
            results.append(h)
        return results

    def plain_expand(self, h: Tensor, out: Tensor) -> list[Tensor]:
        """Plain torch's `out + scaling * h @ B^T` in the case's dtype."""
        weights, case = self.weights, self.case
        results = []
        for seed in range(_count(out.numel())):
            y = out.clone()
            begin = 0
            for request, (length, slot) in enumerate(zip(case.lengths, case.slots, strict=True)):
                rows, begin = slice(begin, begin + length), begin + length
                if slot == NO_LORA or not length:
                    continue
                for s, rank in enumerate(case.slice_ranks[slot]):
                    span = slice(self.layout.offsets[s], self.layout.offsets[s + 1])
                    order = _order(rank, seed).to(self.device)
                    h_ = h[rows, s, :rank][:, order].to(self.dtype)
                    product = _product(h_, weights.b[slot, span, :rank][:, order].T, seed)
                    y[rows, span] += self._factor(slot, s, request) * product
            results.append(y)
        return results

    def _factor(self, slot: int, s: int, request: int) -> float:
        scale = 1.0 if self.case.scales is None else self.case.scales[request]
        return float(self.weights.scalings[slot, s]) * scale

    def _orders(self, size: int, entries: int) -> Iterator[tuple[int, Tensor]]:
        for seed in range(_count(entries)):
            yield seed, _order(size, seed).to(self.device)


def _count(entries: int) -> int:
    return max(_ORDERS, min(32, _SAMPLES // max(1, entries)))


def _order(size: int, seed: int) -> Tensor:
    """As it comes for seed 0, else shuffled."""
    return (
        torch.randperm(size, generator=torch.Generator().manual_seed(seed))
        if seed
        else torch.arange(size)
    )


def _product(
    left: Tensor, right: Tensor, seed: int, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`left @ right` as torch does it, every other time as part of a product of at least 16 x 16.

    A product with a vector sums in another way than one with a matrix, with another error; backends
    may do either.

    Args:
        left: `[rows, size]`.
        right: `[size, columns]`.
        seed: odd for the larger product.
        out_dtype: float32 for a float32 sum of half tensors, as the device itself sums.
    """
    rows, columns = left.shape[0], right.shape[1]
    if seed % 2 and rows and columns:
        left = left.repeat(-(-16 // rows), 1) if rows < 16 else left
        right = right.repeat(1, -(-16 // columns)) if columns < 16 else right
    if out_dtype is None or left.dtype == out_dtype:
        product = left @ right
    elif left.device.type == "cuda":
        product = torch.mm(left, right, out_dtype=out_dtype)
    else:
        product = left.to(out_dtype) @ right.to(out_dtype)
    return product[:rows, :columns]


def _rank_id(rank: Rank) -> str:
    return str(rank) if isinstance(rank, int) else f"({','.join(map(str, rank))})"


def _runs(values: Any) -> str:
    """`1,1,1,2` as `1x3,2`, so that ids stay short."""
    runs: list[tuple[Any, int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1] = (value, runs[-1][1] + 1)
        else:
            runs.append((value, 1))
    return ",".join(str(value) if count == 1 else f"{value}x{count}" for value, count in runs)
