"""Launches by kernel and constants, bound once per process; and whether they may overlap."""

from __future__ import annotations

from typing import Any

from lora_core.triton_kit import Launch

_launches: dict[tuple[object, ...], Launch] = {}


def bound(kernel: Any, **constants: Any) -> Launch:
    """The launch of `kernel` with these constants and options, made at the first call.

    Args:
        kernel: a `@triton.jit` function.
        constants: as for `Launch`.
    """
    key = (kernel, *constants.values())
    launch = _launches.get(key)
    if launch is None:
        launch = _launches[key] = Launch(kernel, **constants)
    return launch


DEPENDENT_LAUNCH = frozenset({"sm90", "sm100"})
"""GPU families on which a kernel may be put in place while the one before it still runs.

Such a kernel (`launch_pdl`) waits by `gdc_wait` before it reads what the other writes.
"""
