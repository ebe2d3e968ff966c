"""`dot(a, b, acc)` and `add_product(a, b, acc)`: the matrix products that kernels of this project use.

Formula of both: `acc + a @ b`, summed in float32 in the order of the inner dimension. They differ in
rounding: `dot` goes on from acc, `add_product` sums the block on its own first. A long chain of `dot`
loses bits: tensor cores cut their sums off instead of rounding them, which over 512 inputs costs 2.5
times the error of a float32 product, and plain units round once per product. So chain at most 128
inputs, none of float32, and add the chains up.
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


@triton.jit
def add_product(a, b, acc):
    """`acc + a @ b` with the product summed on its own, and then one addition.

    The fma by 1 is an addition that the compiler does not fold back into the product.

    Args:
        a: [M, K].
        b: [K, N], dtype of `a`; K at least 16.
        acc: [M, N] float32.
    """
    product = dot(a, b, tl.zeros_like(acc))
    return tl.fma(product, tl.full(acc.shape, 1.0, tl.float32), acc)
