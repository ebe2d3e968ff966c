"""Slots of rows: `slot[t] = slots[number of requests that end at or before t]`, in one launch."""

# Triton reads the parameters of kernels itself, annotations would be noise:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_slots(
    p_indptr,  # [requests + 1] int32
    p_slots,  # [requests] int32
    p_out,  # [rows] int32, out
    REQUESTS,
    ROWS,
    BT: tl.constexpr,
    BQ: tl.constexpr,
):
    """BT rows against all requests, BQ at a time."""
    rows = tl.program_id(0) * BT + tl.arange(0, BT)
    ended = tl.zeros([BT], tl.int32)
    for start in range(0, REQUESTS, BQ):
        requests = start + tl.arange(0, BQ)
        ends = tl.load(p_indptr + 1 + requests, mask=requests < REQUESTS, other=2147483647)
        ended += tl.sum((ends[None, :] <= rows[:, None]).to(tl.int32), 1)
    slots = tl.load(p_slots + ended, mask=ended < REQUESTS, other=-1)
    tl.store(p_out + rows, slots, mask=rows < ROWS)
