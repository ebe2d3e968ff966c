"""What both kernels read of a block of segments; see `lora_core_csgmv.segments` for its layout."""

# Triton reads the parameters of kernels itself, annotations would be noise:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def segment_at(segments, index, room):
    """Of one segment: first and end in the permutation, and the slot, int64.

    `index` may lie past the last segment: a program asks for its next segment before it knows
    whether there is one.
    """
    index = tl.minimum(index, room - 1)
    first = tl.load(segments + 4 + index)
    end = tl.load(segments + 5 + index)
    slot = tl.load(segments + 8 + room + index).to(tl.int64)
    return first, end, slot


@triton.jit
def scale_at(segments, index, room):
    """The factor of one segment, float32."""
    return tl.load(segments + 8 + 2 * room + index).to(tl.float32, bitcast=True)


@triton.jit
def rows_at(segments, position, end, num_rows, room):
    """Rows of x at `position` of the permutation, int64, and which of them are live.

    Rows past `num_rows` are dropped: a graph captured for fewer rows than the batch that is prepared
    must not write outside its tensors.
    """
    live = position < end
    row = tl.load(segments + 8 + 3 * room + position, mask=live, other=0)
    return row.to(tl.int64), live & (row < num_rows)
