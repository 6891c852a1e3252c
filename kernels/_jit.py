"""Functions for use inside kernels that differ between targets, or that the interpreter gets wrong."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

# Read when kernels are decorated, as Triton itself does.
INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def dot(a, b):
    """`a [M, K] @ b [K, N]` in fp32. Products of fp32 numbers are exact fp32 products, not tf32.

    The interpreter multiplies the bits of bf16 numbers as integers, so there they are widened first, which is exact.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def dot_add(a, b, acc):
    """`acc + a @ b`, see `dot`."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp32 `x` rounded to `dtype`, to the nearest. The interpreter's own cast to bf16 cuts bits off instead.

    Finite numbers and infinities only.
    """
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)
