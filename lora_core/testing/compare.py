"""Comparing results: against float64 within plain torch's error, or bit for bit.

Errors are measured in units in the last place of the dtype at the scale of their row (its largest
value), so that a large row cannot hide a small one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_ENOUGH = 64
"""A root mean square over fewer entries says little: those are judged by their largest error alone."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Where = Callable[[tuple[int, ...]], str]


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, so that NaN equals NaN and 0.0 differs from -0.0."""
    return tensor if tensor.dtype == torch.bool else tensor.view(_BITS[tensor.element_size()])


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, in shape and dtype too."""
    return (
        left.shape == right.shape
        and left.dtype == right.dtype
        and bool((bits(left) == bits(right)).all())
    )


def assert_same_bits(
    actual: Tensor, expected: Tensor, what: str, where: Where | None = None
) -> None:
    """Equal in shape, dtype and every bit.

    Args:
        actual: what was found.
        expected: what it must be.
        what: which tensors these are, for the message.
        where: index -> words about that place.

    Raises:
        AssertionError: with the first difference.
    """
    _assert_same_kind(actual, expected, what)
    different = bits(actual) != bits(expected)
    if bool(different.any()):
        index = tuple(different.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(different.sum())} of {different.numel()} entries differ in bits, first at "
            f"{_place(index, where)}: found {actual[index].item()!r}, expected {expected[index].item()!r}"
        )


def assert_close(
    actual: Tensor,
    expected: Tensor,
    plain: Sequence[Tensor],
    what: str,
    where: Where | None = None,
) -> None:
    """Within twice plain torch's error, and one unit in the last place.

    With errors in units in the last place at the row's scale: the root mean square error is at most
    twice that of plain torch (judged from 64 entries on), the largest at most twice plain torch's
    plus one.

    Args:
        actual: `[rows, ...]`, in the dtype whose rounding counts.
        expected: float64 of the same shape. NaN marks entries that are unspecified.
        plain: what plain torch gives in that dtype, over a few orders of summation.
        what: which op this is, for the message.
        where: index -> words about that place.

    Raises:
        AssertionError: with both errors and the place of the worst.
    """
    assert expected.dtype == torch.float64
    _assert_same_kind(actual, expected.to(actual.dtype), what)
    if not actual.numel():
        return
    live = ~expected.isnan()
    wrong = live & ~actual.isfinite()
    if bool(wrong.any()):
        index = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {int(live.sum())} entries are not finite, first at "
            f"{_place(index, where)}: found {actual[index].item()}, expected {expected[index].item():.6g}"
        )
    unit = unit_in_last_place(expected.nan_to_num(), actual.dtype)
    error = _errors(actual, expected, unit, live)
    reference = torch.stack([_errors(result, expected, unit, live) for result in plain])
    count = max(1, int(live.sum()))
    rms = (error.square().sum() / count).sqrt().item()
    rms_limit = 2 * (reference.square().sum() / (count * len(plain))).sqrt().item()
    worst, worst_limit = error.max().item(), 2 * reference.max().item() + 1
    if worst > worst_limit or (rms > rms_limit and count >= _ENOUGH):
        index = _unravel(int(error.argmax()), tuple(error.shape))
        raise AssertionError(
            f"{what}: error of {worst:.3g} units in the last place (allowed {worst_limit:.3g}), root mean "
            f"square {rms:.3g} (allowed {rms_limit:.3g}); {int((error > worst_limit).sum())} of {count} "
            f"entries are past the first limit, the worst is at {_place(index, where)}: found "
            f"{actual[index].item():.9g}, expected {expected[index].item():.9g}"
        )


def unit_in_last_place(expected: Tensor, dtype: torch.dtype) -> Tensor:
    """One unit in the last place of `dtype` at each row's largest value, broadcastable to `expected`."""
    limits = torch.finfo(dtype)
    scale = expected.abs().reshape(expected.shape[0], -1).amax(dim=1).clamp(min=limits.tiny)
    exponent = torch.floor(torch.log2(scale))
    return (torch.exp2(exponent) * limits.eps).view(-1, *[1] * (expected.dim() - 1))


def _errors(actual: Tensor, expected: Tensor, unit: Tensor, live: Tensor) -> Tensor:
    return torch.where(live, (actual.double() - expected).abs() / unit, 0.0)


def _assert_same_kind(actual: object, expected: Tensor, what: str) -> None:
    if not isinstance(actual, Tensor):
        raise AssertionError(  # noqa: TRY004 - the verdict of a check
            f"{what}: found {actual!r}, expected a tensor of shape {tuple(expected.shape)}"
        )
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{what}: found shape {tuple(actual.shape)} of {actual.dtype}, expected {tuple(expected.shape)} of "
            f"{expected.dtype}"
        )


def _place(index: tuple[int, ...], where: Where | None) -> str:
    return f"{list(index)}" + (f" ({where(index)})" if where is not None else "")


def _unravel(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        position, at = divmod(position, size)
        index.append(at)
    return tuple(reversed(index))
