"""The two kernels bound to one site: looked up by what may change, launched with what does change."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lora_core.triton_kit import Launch
from lora_core.weights import LoRAWeights
from lora_core_csgmv.batch import Segments
from lora_core_csgmv.kernels.expand import expand
from lora_core_csgmv.kernels.shrink import ROWS_OF_A, shrink
from lora_core_csgmv.tiles import EXPAND, SHRINK, parameters, split_length

ARRIVALS = 1 << 15
"""Counters of the shrink that splits K over programs, as many as rows times blocks of rows of A.
Larger calls have segments enough to fill the chip, and sum K in one program each, to the same bits."""


class ShrinkCall(NamedTuple):
    """The shrink of one site for one band of rows.

    Attributes:
        launch: takes the grid, x, h, partials, arrivals, the block of segments, its room, rows, and
            the stride of x.
        units: units of work of one segment.
        partials: float32 words of scratch that it needs for each row, 0 when one program sums all of K.
    """

    launch: Callable[..., None]
    units: int
    partials: int


class ExpandCall(NamedTuple):
    """The expand of one site for one band of rows.

    Attributes:
        launch: takes the grid, out, h, ids, the block of segments, its room, rows, and the stride of
            out.
        units: units of work of one segment.
    """

    launch: Callable[..., None]
    units: int


class Site:
    """What is known of one site, made once: its weights are frozen, their addresses stay.

    Attributes:
        h_row: n slices, R.
        h_name: of scratch for h in the dtype of the weights.
        shrinks: calls, by all that may change from one to the next.
        expands: likewise.
    """

    __slots__ = ("expands", "h_name", "h_row", "shrinks")

    def __init__(self, weights: LoRAWeights) -> None:
        self.h_row = slices, ranks = weights.layout.num_slices, weights.max_rank
        self.h_name = f"h of {slices} times {ranks} {weights.b.dtype}"
        self.shrinks: dict[tuple[object, ...], ShrinkCall] = {}
        self.expands: dict[tuple[object, ...], ExpandCall] = {}


_sites: WeakKeyDictionary[LoRAWeights, Site] = WeakKeyDictionary()


def site_of(weights: LoRAWeights) -> Site:
    """A pure cache that is forgotten with the weights."""
    site = _sites.get(weights)
    if site is None:
        site = _sites[weights] = Site(weights)
    return site


def band(rows: int) -> int:
    """`rows` rounded up to a power of two: calls are kept by it, not by every number of rows."""
    return 1 << max(rows - 1, 0).bit_length()


def shrink_call(
    chip: str, x: Tensor, weights: LoRAWeights, h: Tensor, arrivals: Tensor, segments: Segments
) -> ShrinkCall:
    """How to launch the shrink of `x`, of shape `[T', K]`, and any other of its band of rows."""
    rows = band(x.shape[0])
    in_features = x.shape[1]
    width = weights.layout.num_slices * weights.max_rank
    tile = parameters(SHRINK.pick(chip, rows=rows, width=width, bytes=x.element_size()))
    split = split_length(in_features)
    parts, blocks = -(-in_features // split), -(-width // ROWS_OF_A.value)
    parallel = bool(tile["PARALLEL"]) and parts > 1 and rows * blocks <= ARRIVALS
    tile["PARALLEL"] = parallel
    tile["BLOCK_K"] = min(tile["BLOCK_K"], split // 2)
    launch = _launch(
        shrink,
        MAX_RANK=weights.max_rank,
        NUM_SLICES=weights.layout.num_slices,
        SPLIT=split,
        EVEN=in_features % split == 0,
        **tile,
    )
    partials = h.new_empty(0, dtype=torch.float32) if parallel else arrivals
    fixed = launch.fix(
        (
            *(x, weights.a, weights.ranks, h, partials, arrivals, segments.block),
            *(segments.room.segments, rows, in_features, x.stride(0), *weights.a.stride()),
        ),
        varying=(0, 3, 4, 5, 6, 7, 8, 10),
    )
    words = parts * width if parallel else 0
    return ShrinkCall(fixed.call, blocks * (parts if parallel else 1), words)


def expand_call(
    chip: str,
    h: Tensor,
    weights: LoRAWeights,
    out: Tensor,
    ids: Tensor | None,
    segments: Segments,
    *,
    overtakes: bool,
) -> ExpandCall:
    """How to launch the expand into `out`, of shape `[T', N]`, and any other of its band of rows.

    With `ids`, h is the embedding's A.
    """
    rows = band(out.shape[0])
    b, widths = weights.b, weights.layout.widths
    width = len(widths) * weights.max_rank
    tile = EXPAND.pick(chip, rows=rows, width=width, bytes=b.element_size())
    ranks = max(16, 1 << (weights.max_rank - 1).bit_length())
    launch = _launch(
        expand,
        MAX_RANK=weights.max_rank,
        WIDTHS=widths,
        GATHER=ids is not None,
        OVERTAKES=overtakes,
        **{**parameters(tile), "BLOCK_R": min(tile["BLOCK_R"], ranks)},
        **({"launch_pdl": True} if overtakes else {}),
    )
    strides = (0, h.stride(0), h.stride(2)) if ids is None else h.stride()
    fixed = launch.fix(
        (
            *(out, h, segments.block if ids is None else ids, b, weights.ranks),
            *(weights.scalings, segments.block, segments.room.segments, rows),
            *(out.stride(0), *strides, *b.stride()),
        ),
        varying=(0, 1, 2, 6, 7, 8, 9),
    )
    step = tile["BLOCK_N"] * tile["GROUP"]
    return ExpandCall(fixed.call, sum(-(-columns // step) for columns in widths))


@cache
def _launch(kernel: object, **bound: object) -> Launch:
    """One bound launch for all shapes that agree on the constexprs."""
    return Launch(kernel, **bound)
