"""The physical limit of the added time: bytes over bandwidth, operations over rate, launches.

The three constants were measured on an NVIDIA H200: a large device copy, a large bf16 product on
random data, and an empty kernel inside a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

BYTES_PER_US = 4.3e6
FLOPS_PER_US = 790e6
LAUNCH_US = 2.5
_BF16 = 2


def _time_us(num_bytes: float, flops: float) -> float:
    return max(num_bytes / BYTES_PER_US, flops / FLOPS_PER_US)


def dense_limit_us(
    k: int, widths: Sequence[int], rank: int, tokens: int, adapters: int, *, decode: bool
) -> float:
    """Limit of one linear site.

    Decode: one kernel that reads x, A, B once and adds into y. Prefill: a shrink kernel, then the
    expand as further K steps of the base product, so that y is not touched again.
    """
    n, slices, live = sum(widths), len(widths), min(adapters, tokens)
    x, y, h = tokens * k * _BF16, tokens * n * _BF16, tokens * slices * rank * _BF16
    a, b = live * slices * rank * k * _BF16, live * n * rank * _BF16
    shrink, expand = 2 * tokens * k * slices * rank, 2 * tokens * n * rank
    if decode:
        return max(_time_us(x + a + b + 2 * y, shrink + expand), LAUNCH_US)
    base_bytes, base_flops = x + y + k * n * _BF16, 2 * tokens * k * n
    fused = _time_us(base_bytes + b + h, base_flops + expand) - _time_us(base_bytes, base_flops)
    return max(_time_us(x + a + h, shrink), LAUNCH_US) + fused


def moe_limit_us(
    hidden: int,
    inter: int,
    experts: int,
    top_k: int,
    rank: int,
    tokens: int,
    adapters: int,
    layout: str,
) -> float:
    """Limit of gate_up and down of one experts layer, one kernel each, routing uniform."""
    live, pairs, shared = min(adapters, tokens), tokens * top_k, layout == "shared_outer"
    groups = live * experts * (1 - (1 - top_k / experts) ** (tokens / live))
    outer, rows = (live if shared else groups), (tokens if shared else pairs)
    gate_up_bytes = (outer * 2 * rank * hidden + groups * 2 * inter * rank) * _BF16
    gate_up_bytes += (min(tokens, pairs) * hidden + 2 * pairs * 2 * inter) * _BF16
    down_bytes = (groups * rank * inter + outer * hidden * rank) * _BF16
    down_bytes += (pairs * inter + 2 * tokens * hidden) * _BF16
    gate_up_flops = 2 * rows * hidden * 2 * rank + 2 * pairs * 2 * inter * rank
    down_flops = 2 * pairs * inter * rank + 2 * rows * hidden * rank
    return max(_time_us(gate_up_bytes, gate_up_flops), LAUNCH_US) + max(
        _time_us(down_bytes, down_flops), LAUNCH_US
    )
