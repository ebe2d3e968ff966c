"""`dot(a, b, acc)`: the one matrix product that kernels of this project use.

Formula: `acc + a @ b`, summed in float32 in the order of the inner dimension.
"""

# Triton reads the parameters of kernels itself, annotations would be noise:
# mypy: allow-untyped-defs
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc):
    """`acc + a @ b` with float32 accumulation.

    float32 operands are multiplied as IEEE float32, never as tf32. 16-bit operands go to the tensor
    cores. In the interpreter float32 and float16 are exact products summed in float32; bfloat16 is
    wrong there (raw bits are multiplied), so bfloat16 runs on GPUs only.

    Args:
        a: [M, K].
        b: [K, N], dtype of `a`; K at least 16.
        acc: [M, N] float32.
    """
    return tl.dot(a, b, acc, input_precision="ieee", out_dtype=tl.float32)
