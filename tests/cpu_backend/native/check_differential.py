"""Each operation of the language, compiled and in Triton's interpreter, on the same random inputs.

Integers, and bits that are only moved, must be equal. Floats may differ by a number of units in the last place (ulp) of
their type that each test states. Where the interpreter is known to be wrong the same kernel is interpreted with all
floats in fp64, and its results are rounded: the interpreter's bf16 numbers are bit patterns that it adds and multiplies
as integers, and its casts to bf16 cut bits off. Of elementary functions, numpy's fp32 versions are off by up to 4 ulp,
so they too are interpreted in fp64.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from cbtriton.kernels.cpu_backend.errors import UnsupportedError

SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
INTS = [*SIGNED, *UNSIGNED]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 1e-40, -3e-39, 5e-324, 6e-8, 3.4e38, -6.5e4, 1.5, 2.5]


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def random_ints(shape, dtype, seed):
    """Whole numbers of the type's range, half of them small; the extremes come first."""
    generator = np.random.default_rng(seed)
    kind = np.dtype(name_of(dtype))
    info = np.iinfo(kind)
    numbers = generator.integers(info.min, info.max, shape, dtype=kind, endpoint=True)
    small = generator.integers(max(info.min, -9), 10, shape).astype(kind)
    numbers = np.where(generator.random(shape) < 0.5, numbers, small)
    first = np.array([0, 1, info.min, info.max, info.max - 1, 2], dtype=kind)[: numbers.size]
    numbers.reshape(-1)[: first.size] = first
    return torch.from_numpy(numbers)


def random_floats(shape, dtype, seed, scale=4.0, special=True):
    """Normal numbers; special values come first, in an order that depends on the seed."""
    generator = np.random.default_rng(seed)
    numbers = generator.standard_normal(shape) * scale
    if special:
        first = generator.permutation(SPECIAL)[: numbers.size]
        numbers.reshape(-1)[: first.size] = first
    return torch.from_numpy(numbers).to(dtype)


def random_like(shape, dtype, seed, **options):
    if dtype == torch.bool:
        return torch.from_numpy(np.random.default_rng(seed).random(shape) < 0.5)
    return random_floats(shape, dtype, seed, **options) if dtype.is_floating_point else random_ints(shape, dtype, seed)


def widened(value):
    if isinstance(value, tuple):
        return tuple(widened(v) for v in value)
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def rounded(values, dtype):
    """Numbers of fp64 rounded once. Torch rounds them to fp32 first."""
    if dtype == torch.float16:
        with np.errstate(over="ignore"):
            return torch.from_numpy(values.numpy().astype(np.float16))
    if dtype != torch.bfloat16:
        return values.to(dtype)
    single = values.float()
    back, bits = single.double(), single.view(torch.int32).clone()
    bits -= (back.abs() > values.abs()).int()
    bits |= ((back != values) & ~values.isnan()).int()
    return bits.view(torch.float32).to(dtype)


def ordered(values):
    """Whole numbers that grow by one from each float to the next."""
    bits = values.contiguous().view(BITS[values.element_size()]).numpy()
    return np.where(bits < 0, np.iinfo(bits.dtype).min - bits, bits).astype(np.float64 if bits.itemsize < 8 else object)


def check_same(got, expected, ulps=0.0, what=""):
    """Whether two tensors are equal; floats up to so many units in the last place, and NaN where the other has NaN."""
    assert got.dtype == expected.dtype
    if not got.is_floating_point():
        different = torch.from_numpy(np.asarray(got.numpy() != expected.numpy()))
    else:
        nan = got.isnan() != expected.isnan()
        distance = np.abs(ordered(got) - ordered(expected)).astype(np.float64)
        signs = (got == 0) & (expected == 0) & (got.signbit() != expected.signbit()) & (ulps == 0)
        different = nan | ((torch.as_tensor(distance) > ulps) & ~(got.isnan() & expected.isnan())) | signs
    if different.any():
        places = different.nonzero()
        shown = [(tuple(p.tolist()), got[tuple(p)].item(), expected[tuple(p)].item()) for p in places[:4]]
        raise AssertionError(f"{what} {len(places)} of {got.numel()} differ, (place, compiled, interpreted): {shown}")


@pytest.fixture
def compare(interpreter):
    """Runs a kernel of this file compiled and interpreted, and compares all tensors afterwards."""

    def run(kernel, grid, *args, ulps=0.0, wide=False, names=(), **constants):
        interpreter.start(kernel.__name__, grid, widened(args) if wide else args, constants)
        try:
            kernel[grid](*args, **constants)
        finally:
            expected, _ = interpreter.finish()
        for number, (got, other) in enumerate(zip(args, expected, strict=True)):
            if not isinstance(got, torch.Tensor):
                continue
            other = rounded(other, got.dtype) if wide and got.is_floating_point() else other
            parts = (
                zip(names, got, other, strict=True) if number == 0 and names else [(f"argument {number}", got, other)]
            )
            for what, mine, its in parts:
                bound = ulps.get(what, ulps.get("", 0.0)) if isinstance(ulps, dict) else ulps
                check_same(mine, its, bound, f"{kernel.__name__}, {what}:")

    return run


# ---- Element-wise operations. Row k of `out` is the result of the operation with the k-th name.

SIZE = 300
BLOCK = 128
GRID = (triton.cdiv(SIZE, BLOCK),)
INTEGER_NAMES = ["add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "shl", "shr", "maximum", "minimum"]
INTEGER_NAMES += ["neg", "not", "abs", "where"]
COMPARISON_NAMES = ["lt", "le", "gt", "ge", "eq", "ne"]


@triton.jit
def integer_operations(out, x, y, BITS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < SIZE
    a = tl.load(x + i, mask=m, other=1)
    b = tl.load(y + i, mask=m, other=1)
    places = b & (BITS - 1)
    tl.store(out + 0 * SIZE + i, a + b, mask=m)
    tl.store(out + 1 * SIZE + i, a - b, mask=m)
    tl.store(out + 2 * SIZE + i, a * b, mask=m)
    tl.store(out + 3 * SIZE + i, a // b, mask=m)
    tl.store(out + 4 * SIZE + i, a % b, mask=m)
    tl.store(out + 5 * SIZE + i, a & b, mask=m)
    tl.store(out + 6 * SIZE + i, a | b, mask=m)
    tl.store(out + 7 * SIZE + i, a ^ b, mask=m)
    tl.store(out + 8 * SIZE + i, a << places, mask=m)
    tl.store(out + 9 * SIZE + i, a >> places, mask=m)
    tl.store(out + 10 * SIZE + i, tl.maximum(a, b), mask=m)
    tl.store(out + 11 * SIZE + i, tl.minimum(a, b), mask=m)
    tl.store(out + 12 * SIZE + i, -a, mask=m)
    tl.store(out + 13 * SIZE + i, ~a, mask=m)
    tl.store(out + 14 * SIZE + i, tl.abs(a), mask=m)
    tl.store(out + 15 * SIZE + i, tl.where(a > b, a, b), mask=m)


@pytest.mark.parametrize("dtype", INTS, ids=name_of)
def test_integers(compare, dtype):
    # Division by zero is not defined; both give 0, and must not end the process.
    x, y = random_ints(SIZE, dtype, 1), random_ints(SIZE, dtype, 2)
    out = torch.zeros(len(INTEGER_NAMES), SIZE, dtype=dtype)
    compare(integer_operations, GRID, out, x, y, BITS=8 * x.element_size(), SIZE=SIZE, BLOCK=BLOCK, names=INTEGER_NAMES)


@triton.jit
def comparisons(out, x, y, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < SIZE
    a = tl.load(x + i, mask=m)
    b = tl.load(y + i, mask=m)
    tl.store(out + 0 * SIZE + i, a < b, mask=m)
    tl.store(out + 1 * SIZE + i, a <= b, mask=m)
    tl.store(out + 2 * SIZE + i, a > b, mask=m)
    tl.store(out + 3 * SIZE + i, a >= b, mask=m)
    tl.store(out + 4 * SIZE + i, a == b, mask=m)
    tl.store(out + 5 * SIZE + i, a != b, mask=m)


@pytest.mark.parametrize("dtype", [*INTS, *FLOATS, torch.bool], ids=name_of)
def test_comparisons(compare, dtype):
    x, y = random_like(SIZE, dtype, 3), random_like(SIZE, dtype, 4)
    y[::3] = x[::3]
    out = torch.zeros(len(COMPARISON_NAMES), SIZE, dtype=torch.bool)
    wide = dtype == torch.bfloat16
    compare(comparisons, GRID, out, x, y, SIZE=SIZE, BLOCK=BLOCK, names=COMPARISON_NAMES, wide=wide)


BIT_NAMES = ["and", "or", "xor", "not", "add", "mul", "where", "logical_and", "logical_or"]


@triton.jit
def bit_operations(out, x, y, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < SIZE
    a = tl.load(x + i, mask=m)
    b = tl.load(y + i, mask=m, other=True)
    tl.store(out + 0 * SIZE + i, a & b, mask=m)
    tl.store(out + 1 * SIZE + i, a | b, mask=m)
    tl.store(out + 2 * SIZE + i, a ^ b, mask=m)
    tl.store(out + 3 * SIZE + i, ~a, mask=m)
    tl.store(out + 4 * SIZE + i, a + b, mask=m)
    tl.store(out + 5 * SIZE + i, a * b, mask=m)
    tl.store(out + 6 * SIZE + i, tl.where(a, b, ~b), mask=m)
    tl.store(out + 7 * SIZE + i, a.logical_and(b), mask=m)
    tl.store(out + 8 * SIZE + i, a.logical_or(b), mask=m)


def test_bits(compare):
    x, y = random_like(SIZE, torch.bool, 5), random_like(SIZE, torch.bool, 6)
    out = torch.zeros(len(BIT_NAMES), SIZE, dtype=torch.bool)
    compare(bit_operations, GRID, out, x, y, SIZE=SIZE, BLOCK=BLOCK, names=BIT_NAMES)


FLOAT_NAMES = ["add", "sub", "mul", "div", "mod", "neg", "abs", "where", "maximum", "minimum", "maximum_nan"]
FLOAT_NAMES += ["minimum_nan", "clamp", "clamp_nan", "fma", "fma_of_three"]


@triton.jit
def float_operations(out, x, y, z, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < SIZE
    a = tl.load(x + i, mask=m)
    b = tl.load(y + i, mask=m)
    c = tl.load(z + i, mask=m)
    low = tl.where(b < c, b, c)
    high = tl.where(b < c, c, b)
    t = out.dtype.element_ty
    tl.store(out + 0 * SIZE + i, a + b, mask=m)
    tl.store(out + 1 * SIZE + i, a - b, mask=m)
    tl.store(out + 2 * SIZE + i, a * b, mask=m)
    tl.store(out + 3 * SIZE + i, (a / b).to(t), mask=m)
    tl.store(out + 4 * SIZE + i, a % b, mask=m)
    tl.store(out + 5 * SIZE + i, -a, mask=m)
    tl.store(out + 6 * SIZE + i, tl.abs(a), mask=m)
    tl.store(out + 7 * SIZE + i, tl.where(a < b, a, b), mask=m)
    tl.store(out + 8 * SIZE + i, tl.maximum(a, b), mask=m)
    tl.store(out + 9 * SIZE + i, tl.minimum(a, b), mask=m)
    tl.store(out + 10 * SIZE + i, tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL), mask=m)
    tl.store(out + 11 * SIZE + i, tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL), mask=m)
    tl.store(out + 12 * SIZE + i, tl.clamp(a, low, high), mask=m)
    tl.store(out + 13 * SIZE + i, tl.clamp(a, low, high, propagate_nan=tl.PropagateNan.ALL), mask=m)
    tl.store(out + 14 * SIZE + i, tl.fma(a, b, c), mask=m)
    tl.store(out + 15 * SIZE + i, tl.fma(a, a, -c), mask=m)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_floats(compare, dtype):
    x, y, z = (random_floats(SIZE, dtype, seed) for seed in (7, 8, 9))
    z[:20] = z[:20].nan_to_num(1.0)  # the bounds of a range
    y[:20] = y[:20].nan_to_num(2.0)
    # A product whose rounding is taken back, so that a second rounding would show.
    z[100:200] = (x * x)[100:200]
    out = torch.zeros(len(FLOAT_NAMES), SIZE, dtype=dtype)
    # All of these are rounded correctly. Which of two zeros is larger is not defined.
    zeros = dict.fromkeys(("maximum", "minimum", "maximum_nan", "minimum_nan", "clamp", "clamp_nan"), 0.5)
    wide = dtype == torch.bfloat16
    options = {"SIZE": SIZE, "BLOCK": BLOCK, "enable_fp_fusion": False}
    compare(float_operations, GRID, out, x, y, z, names=FLOAT_NAMES, ulps=zeros, wide=wide, **options)


@triton.jit
def fused(out, x, y, z, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.fma(tl.load(x + i), tl.load(y + i), tl.load(z + i)))


def test_fused_products_of_fp16_are_rounded_once(compare):
    # 3 * 683 / 2048 lies halfway between two numbers of fp16, and fp32 has no room for 2^-24 beside it.
    x, y, z = torch.full((2,), 3.0), torch.full((2,), 683 / 2048), torch.tensor([2.0**-24, -(2.0**-24)])
    compare(fused, (1,), torch.zeros(2).half(), x.half(), y.half(), z.half(), BLOCK=2)


# ---- Casts


CAST_TARGETS = [*INTS, torch.bool, *FLOATS]


@triton.jit
def casts(x, i1, i2, i4, i8, u1, u2, u4, u8, b1, f2, h2, f4, f8, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < SIZE
    a = tl.load(x + i, mask=m)
    tl.store(i1 + i, a.to(tl.int8), mask=m)
    tl.store(i2 + i, a.to(tl.int16), mask=m)
    tl.store(i4 + i, a.to(tl.int32), mask=m)
    tl.store(i8 + i, a.to(tl.int64), mask=m)
    tl.store(u1 + i, a.to(tl.uint8), mask=m)
    tl.store(u2 + i, a.to(tl.uint16), mask=m)
    tl.store(u4 + i, a.to(tl.uint32), mask=m)
    tl.store(u8 + i, a.to(tl.uint64), mask=m)
    tl.store(b1 + i, a.to(tl.int1), mask=m)
    tl.store(f2 + i, a.to(tl.float16), mask=m)
    tl.store(h2 + i, a.to(tl.bfloat16), mask=m)
    tl.store(f4 + i, a.to(tl.float32), mask=m)
    tl.store(f8 + i, a.to(tl.float64), mask=m)


def to_bfloat16(x):
    """Whole numbers go to bf16 through fp32, as on GPUs."""
    return rounded(x.double(), torch.bfloat16) if x.is_floating_point() else x.float().bfloat16()


@pytest.mark.parametrize("source", CAST_TARGETS, ids=name_of)
def test_casts(interpreter, source):
    x = random_like(SIZE, source, 10)
    if source.is_floating_point:
        # Out of the range of whole numbers nothing is defined.
        x = torch.where(x.double().abs() < 100, x.abs(), x.new_tensor(7.5))
    outs = [torch.zeros(SIZE, dtype=dtype) for dtype in CAST_TARGETS]
    interpreter.start(
        "casts", GRID, (widened(x) if source == torch.bfloat16 else x, *outs), {"SIZE": SIZE, "BLOCK": BLOCK}
    )
    casts[GRID](x, *outs, SIZE=SIZE, BLOCK=BLOCK)
    (_, *expected), _ = interpreter.finish()
    for dtype, got, other in zip(CAST_TARGETS, outs, expected, strict=True):
        other = to_bfloat16(x) if dtype == torch.bfloat16 else other
        check_same(got, other, what=f"{source} to {dtype}:")


@triton.jit
def narrow_casts(f4, h2, f2, x, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < SIZE
    a = tl.load(x + i, mask=m)
    tl.store(f4 + i, a.to(tl.float32), mask=m)
    tl.store(h2 + i, a.to(tl.bfloat16), mask=m)
    tl.store(f2 + i, a.to(tl.float16) * 1.0, mask=m)


@pytest.mark.parametrize("source", FLOATS, ids=name_of)
def test_casts_between_floats_round_once(source):
    size = 4000
    x = random_floats(size, torch.float64, 11) * 2.0 ** torch.from_numpy(
        np.random.default_rng(1).integers(-30, 17, size)
    )
    # Beside the middle between two numbers of fp16, and of bf16, by less than fp32 can say.
    for part, bits in ((x[100:1000], 11), (x[1000:2000], 8)):
        exponents = torch.frexp(part).exponent
        halves = torch.ldexp(torch.round(torch.ldexp(part, bits - exponents)) + 0.5, exponents - bits)
        part.copy_(halves * (1 + torch.tensor([1e-12, -1e-12, 0.0]).double().repeat(len(part))[: len(part)]))
    x = x.to(source)
    outs = [torch.zeros(size, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    narrow_casts[(triton.cdiv(size, BLOCK),)](*outs, x, SIZE=size, BLOCK=BLOCK)
    for out in outs:
        check_same(out, rounded(x.double(), out.dtype), what=f"{source} to {out.dtype}:")


@triton.jit
def casts_toward_zero(f2, h2, x, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < SIZE)
    tl.store(f2 + i, a.to(tl.float16, fp_downcast_rounding="rtz"), mask=i < SIZE)
    tl.store(h2 + i, a.to(tl.bfloat16, fp_downcast_rounding="rtz"), mask=i < SIZE)


@pytest.mark.parametrize("source", [torch.float32, torch.float64], ids=name_of)
def test_casts_toward_zero(source):
    x = random_floats(SIZE, source, 18, 1e4)
    outs = [torch.zeros(SIZE, dtype=dtype) for dtype in (torch.float16, torch.bfloat16)]
    casts_toward_zero[GRID](*outs, x, SIZE=SIZE, BLOCK=BLOCK)
    for out in outs:
        # The number that is nearest, or if that is larger the one before.
        near = rounded(x.double(), out.dtype)
        bits = near.view(torch.int16) - (near.double().abs() > x.double().abs()).short()
        check_same(out, bits.view(out.dtype), what=str(out.dtype))


@triton.jit
def bitcasts(out, back, x, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < SIZE).to(out.dtype.element_ty, bitcast=True)
    tl.store(out + i, a, mask=i < SIZE)
    tl.store(back + i, a.to(x.dtype.element_ty, bitcast=True), mask=i < SIZE)


@pytest.mark.parametrize("source", [*SIGNED, torch.uint8, *FLOATS], ids=name_of)
def test_bitcasts(compare, source):
    x = random_like(SIZE, source, 12)
    same_size = [dtype for dtype in CAST_TARGETS if dtype.itemsize == source.itemsize and dtype != torch.bool]
    target = same_size[same_size.index(source) - 1]
    compare(bitcasts, GRID, torch.zeros(SIZE, dtype=target), torch.zeros_like(x), x, SIZE=SIZE, BLOCK=BLOCK)


# ---- Functions

FUNCTION_NAMES = ["exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "floor", "ceil"]


@triton.jit
def functions(out, x, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < SIZE
    a = tl.load(x + i, mask=m)
    tl.store(out + 0 * SIZE + i, tl.exp(a), mask=m)
    tl.store(out + 1 * SIZE + i, tl.exp2(a), mask=m)
    tl.store(out + 2 * SIZE + i, tl.log(a), mask=m)
    tl.store(out + 3 * SIZE + i, tl.log2(a), mask=m)
    tl.store(out + 4 * SIZE + i, tl.sqrt(a), mask=m)
    tl.store(out + 5 * SIZE + i, tl.rsqrt(a), mask=m)
    tl.store(out + 6 * SIZE + i, tl.sin(a), mask=m)
    tl.store(out + 7 * SIZE + i, tl.cos(a), mask=m)
    tl.store(out + 8 * SIZE + i, tl.erf(a), mask=m)
    tl.store(out + 9 * SIZE + i, tl.floor(a), mask=m)
    tl.store(out + 10 * SIZE + i, tl.ceil(a), mask=m)


# Roots, floor and ceil are rounded correctly. The polynomials of fp32 and the C library are within 2 ulp, as is a
# reciprocal root, which is rounded twice.
FUNCTION_ULPS = {"": 2.0, "sqrt": 0.0, "floor": 0.0, "ceil": 0.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
@pytest.mark.parametrize("scale", [0.3, 4.0, 60.0])
def test_functions(compare, dtype, scale):
    x = random_floats(SIZE, dtype, 13, scale)
    if dtype == torch.float32:
        # A sine of a large number is only as good as the number.
        x[:20] = torch.where(x[:20].abs() > 1e30, torch.inf, x[:20])
    out = torch.zeros(len(FUNCTION_NAMES), SIZE, dtype=dtype)
    compare(functions, GRID, out, x, SIZE=SIZE, BLOCK=BLOCK, names=FUNCTION_NAMES, ulps=FUNCTION_ULPS, wide=True)


@triton.jit
def precise_functions(out, x, y, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < SIZE
    a = tl.load(x + i, mask=m)
    b = tl.load(y + i, mask=m)
    tl.store(out + 0 * SIZE + i, tl.sqrt_rn(a), mask=m)
    tl.store(out + 1 * SIZE + i, tl.div_rn(a, b), mask=m)
    tl.store(out + 2 * SIZE + i, tl.fdiv(a, b), mask=m)
    tl.store(out + 3 * SIZE + i, tl.fdiv(a, b, ieee_rounding=True), mask=m)


def test_precise_functions(compare):
    x, y = random_floats(SIZE, torch.float32, 14), random_floats(SIZE, torch.float32, 15)
    names = ["sqrt_rn", "div_rn", "fdiv", "fdiv_ieee"]
    compare(precise_functions, GRID, torch.zeros(4, SIZE), x, y, SIZE=SIZE, BLOCK=BLOCK, names=names)


@triton.jit
def high_products(out, x, y, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < SIZE)
    tl.store(out + i, tl.umulhi(a, tl.load(y + i, mask=i < SIZE)), mask=i < SIZE)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32, torch.uint64], ids=name_of)
def test_high_halves_of_products(compare, dtype):
    x, y = random_ints(SIZE, dtype, 16), random_ints(SIZE, dtype, 17)
    compare(high_products, GRID, torch.zeros(SIZE, dtype=dtype), x, y, SIZE=SIZE, BLOCK=BLOCK)


@triton.jit
def random_numbers(words, floats, seed, offset, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < SIZE
    at = offset + i
    tl.store(words + i, tl.randint(seed, at), mask=m)
    a, b, c, d = tl.randint4x(seed, at, n_rounds=7)
    tl.store(words + SIZE + i, a ^ b ^ c ^ d, mask=m)
    tl.store(floats + i, tl.rand(seed, at), mask=m)


@triton.jit
def normal_numbers(out, seed, offset, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.randn(seed, offset + i), mask=i < SIZE)


@pytest.mark.parametrize("seed", [1, 2**40 + 5])
def test_random_numbers(compare, interpreter, seed):
    words, floats = torch.zeros(2, SIZE, dtype=torch.int32), torch.zeros(SIZE)
    normal = torch.zeros(SIZE)
    compare(random_numbers, GRID, words, floats, seed, 1000, SIZE=SIZE, BLOCK=BLOCK)
    interpreter.start("normal_numbers", GRID, (normal, seed, 1000), {"SIZE": SIZE, "BLOCK": BLOCK})
    normal_numbers[GRID](normal, seed, 1000, SIZE=SIZE, BLOCK=BLOCK)
    (expected, *_), _ = interpreter.finish()
    # A cosine of up to 2 pi, whose relative error has no bound where it is near 0.
    torch.testing.assert_close(normal, expected, rtol=1e-6, atol=2e-6)


# ---- Memory


@triton.jit
def masked_copies(out, plain, x, keep, n, other, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.load(keep + i, mask=i < n, other=0) != 0
    tl.store(out + i, tl.load(x + i, mask=m, other=other), mask=i < n)
    tl.store(plain + i, tl.load(x + i, mask=i < n), mask=m)


@pytest.mark.parametrize("dtype", [*INTS, *FLOATS, torch.bool], ids=name_of)
def test_masks(compare, dtype):
    other, wide = 1 if dtype == torch.bool else 7, dtype == torch.bfloat16
    for size in (2, 100, 300):
        x = random_like(384, dtype, size)
        keep = random_like(384, torch.bool, size + 1).to(torch.int8)
        keep[64:160] = 1  # whole strips with and without masks
        keep[160:224] = 0
        outs = (torch.full_like(x, 3) for _ in range(2))
        compare(masked_copies, GRID, *outs, x, keep, size, other, SIZE=SIZE, BLOCK=BLOCK, wide=wide)


@triton.jit
def moved_blocks(
    out,
    x,
    index,
    s0,
    s1,
    s2,
    t0,
    t1,
    t2,
    n0,
    n1,
    n2,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    FILL: tl.constexpr,
):
    a = tl.program_id(0) * A + tl.arange(0, A)[:, None, None]
    b = tl.program_id(1) * B + tl.arange(0, B)[None, :, None]
    c = tl.program_id(2) * C + tl.arange(0, C)[None, None, :]
    m = (a < n0) & (b < n1) & (c < n2)
    rows = tl.load(index + a, mask=a < n0, other=0)
    if FILL is None:
        v = tl.load(x + rows * s0 + b * s1 + c * s2, mask=m)
    else:
        v = tl.load(x + rows * s0 + b * s1 + c * s2, mask=m, other=FILL)
    tl.store(out + a * t0 + b * t1 + c * t2, v, mask=m)


BLOCK_SHAPES = [(1, 1, 1), (1, 1, 64), (2, 8, 16), (16, 4, 1), (4, 1, 32), (1, 32, 2), (8, 4, 4)]


@pytest.mark.parametrize("blocks", BLOCK_SHAPES, ids=str)
@pytest.mark.parametrize("repeat", [0, 1])
def test_strided_and_gathered_blocks(compare, blocks, repeat):
    seed = sum(blocks) + repeat
    dtype = [torch.int8, torch.float16, torch.float64][seed % 3]
    generator = np.random.default_rng(seed)
    shape = tuple(int(generator.integers(1, 2 * side + 2)) for side in blocks)
    order = tuple(int(axis) for axis in generator.permutation(3))
    x = random_like(shape, dtype, seed, special=False).permute(order).contiguous().permute(tuple(np.argsort(order)))
    x = x.expand(shape) if seed % 2 else x[:, :1].expand(shape)  # the latter has a side with stride 0
    out = torch.zeros(shape, dtype=dtype)
    index = torch.from_numpy(generator.integers(0, shape[0], shape[0]).astype(np.int32))
    grid = tuple(triton.cdiv(n, side) for n, side in zip(shape, blocks, strict=True))
    sides = dict(zip("ABC", blocks, strict=True))
    fill = 5 if seed % 4 else None
    compare(moved_blocks, grid, out, x, index, *x.stride(), *out.stride(), *shape, **sides, FILL=fill)


@triton.jit
def far_addresses(out, x, distance, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK).to(tl.int64)
    far = x + i * distance
    near = far - i * (distance - 1)
    tl.store(out + i, tl.load(near))
    row = tl.program_id(0).to(tl.int64) * distance
    tl.store(out + BLOCK + i, tl.load((x + row) + (i - row)))
    # Offsets of 32 bits that wrap around.
    wrapped = (tl.arange(0, BLOCK) * 0x10000001) * 16 - tl.arange(0, BLOCK) * 15
    tl.store(out + 2 * BLOCK + tl.arange(0, BLOCK), tl.load(x + wrapped))


def test_offsets_beyond_32_bits(compare):
    x, out = random_ints(64, torch.int16, 20), torch.zeros(3 * 64, dtype=torch.int16)
    compare(far_addresses, (3,), out, x, 2**33 + 8, BLOCK=64)
    assert out.unique().numel() > 16


@triton.jit
def unsigned_offsets(out, x, first, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + (i.to(tl.uint32) + first) % BLOCK))
    tl.store(out + BLOCK + i, tl.load(x + (i.to(tl.uint8) + 200).to(tl.uint8)))
    tl.store(out + 2 * BLOCK + i, tl.load(x + (BLOCK - 1 - i)))
    tl.store(out + 3 * BLOCK + i, tl.load(x + i // 2 * 2 + (1 - i % 2)))


def test_other_offsets(compare):
    x = random_ints(256, torch.int32, 21)
    compare(unsigned_offsets, (1,), torch.zeros(4 * 64, dtype=torch.int32), x, 5, BLOCK=64)


@triton.jit
def pointers_to_pointers(out, table, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    for k in range(3):
        row = tl.load(table + k).to(tl.pointer_type(tl.float32))
        tl.store(out + k * BLOCK + i, tl.load(row + i))
    lanes = tl.load(table + i % 3).to(tl.pointer_type(tl.float32))
    tl.store(out + 3 * BLOCK + i, tl.load(lanes + i))


def test_pointers_in_memory():
    x = random_floats((3, 32), torch.float32, 22, special=False)
    table = torch.tensor([row.data_ptr() for row in x])
    out = torch.zeros(4, 32)
    pointers_to_pointers[(1,)](out, table, BLOCK=32)
    places = torch.arange(32)
    assert torch.equal(out, torch.cat([x, x[places % 3, places][None]]))


# ---- Reductions and scans


@triton.jit
def _last_nonzero(a, b):
    return tl.where(b != 0, b, a)


@triton.jit
def _sum_and_range(s1, lo1, hi1, s2, lo2, hi2):
    return s1 + s2, tl.minimum(lo1, lo2), tl.maximum(hi1, hi2)


@triton.jit
def block_of_three(x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    a, b, c = tl.arange(0, A)[:, None, None], tl.arange(0, B)[None, :, None], tl.arange(0, C)[None, None, :]
    return tl.load(x + (a * B + b) * C + c)


@triton.jit
def store_all(out, v, N: tl.constexpr):
    tl.store(out + tl.arange(0, N), tl.reshape(v, (N,)))


@triton.jit
def reductions(
    out, places, x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, AXIS: tl.constexpr, INTEGER: tl.constexpr
):
    v = block_of_three(x, A, B, C)
    N: tl.constexpr = A * B * C // (A if AXIS == 0 else B if AXIS == 1 else C)
    t = out.dtype.element_ty
    store_all(out, tl.sum(v, AXIS, dtype=t).to(t), N)
    store_all(out + N, tl.max(v, AXIS, keep_dims=True).to(t), N)
    low, low_at = tl.min(v, AXIS, return_indices=True)
    store_all(out + 2 * N, low.to(t), N)
    store_all(places, low_at, N)
    store_all(places + N, tl.argmax(v, AXIS, keep_dims=True), N)
    w = v.to(t)
    total, lowest, highest = tl.reduce((w, w, w), AXIS, _sum_and_range)
    store_all(out + 3 * N, total, N)
    store_all(out + 4 * N, highest - lowest, N)
    if INTEGER:
        store_all(out + 5 * N, tl.xor_sum(v, AXIS).to(t), N)


SHAPES = [(1, 1, 32), (2, 4, 64), (4, 2, 2), (16, 1, 8), (1, 64, 1), (2, 16, 4)]


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reductions(compare, shape, axis):
    dtypes = [torch.int8, torch.uint16, torch.float32, torch.int64, torch.float16]
    dtype = dtypes[(SHAPES.index(shape) * 3 + axis) % len(dtypes)]
    integer = not dtype.is_floating_point
    # Whole numbers, whose sums are exact in any order; with many ties.
    x = random_like(shape, dtype, 30) if integer else random_floats(shape, dtype, 30, special=False).round() + 0
    rest = x.numel() // shape[axis]
    wide = {torch.int8: torch.int32, torch.uint16: torch.uint32}.get(dtype, dtype)
    out, places = torch.zeros(6, rest, dtype=wide), torch.zeros(2, rest, dtype=torch.int32)
    compare(reductions, (1,), out, places, x, **dict(zip("ABC", shape, strict=True)), AXIS=axis, INTEGER=integer)


@triton.jit
def float_reductions(out, places, x, y, M: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    v = tl.load(x + i)
    r = tl.arange(0, M)
    tl.store(out + r, tl.max(v, 1))
    tl.store(out + M + r, tl.min(v, 1))
    # What NaN does to places depends on the order.
    tl.store(places + r, tl.argmax(tl.where(v == v, v, 0.0), 1))
    tl.store(out + 2 * M + r, tl.sum(tl.load(y + i), 1))
    tl.store(out + 3 * M + r, tl.full((M,), tl.sum(tl.load(y + i)), tl.float32))


@pytest.mark.parametrize("n", [2, 16, 256])
def test_reductions_of_special_values(compare, n):
    x = random_floats((16, n), torch.float32, n)
    x[3], x[4], x[5] = -torch.inf, torch.inf, 0.0
    x[6, 0] = torch.nan
    x[7, -1] = torch.nan
    x[8] = torch.nan
    x[8, n // 2] = 2.0
    y = random_floats((16, n), torch.float32, n + 1, special=False).round() + 0
    compare(float_reductions, (1,), torch.zeros(4, 16), torch.zeros(16, dtype=torch.int32), x, y, M=16, N=n)


@triton.jit
def tree_of_sums(out, x, M: tl.constexpr, N: tl.constexpr):
    v = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(out + tl.arange(0, M), tl.sum(v, 1))
    tl.store(out + M + tl.arange(0, M), tl.sum(v.to(tl.float32) * v, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=name_of)
def test_sums_of_floats(compare, dtype):
    # Orders differ: n - 1 roundings of partial sums no larger than the sum of all absolute values, which for numbers of
    # one sign is the result. Trees of 128 accumulate a few ulp; the last place of bf16 is worth 2^16 of fp32, that of
    # fp16 2^13.
    x = random_floats((8, 128), dtype, 31, special=False).abs()
    out = torch.zeros(16, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    compare(tree_of_sums, (1,), out, x, M=8, N=128, ulps=16 if dtype.itemsize > 2 else 2**16, wide=True)


@triton.jit
def _affine(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def scans(out, x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, AXIS: tl.constexpr, REVERSE: tl.constexpr):
    N: tl.constexpr = A * B * C
    v = block_of_three(x, A, B, C)
    t = out.dtype.element_ty
    store_all(out, tl.cumsum(v, AXIS, reverse=REVERSE).to(t), N)
    store_all(out + N, tl.cumprod(v, AXIS, reverse=REVERSE).to(t), N)
    store_all(out + 2 * N, tl.associative_scan(v, AXIS, _last_nonzero, reverse=REVERSE).to(t), N)
    a, b = tl.associative_scan((v, v + 1), AXIS, _affine, reverse=REVERSE)
    store_all(out + 3 * N, (a + b).to(t), N)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("shape", [(2, 4, 8), (8, 1, 4)], ids=str)
def test_scans(compare, shape, axis, reverse):
    dtype = [torch.int32, torch.int64, torch.float32, torch.uint32][(sum(shape) + axis + reverse) % 4]
    x = random_like(shape, dtype, 32) if dtype != torch.float32 else random_ints(shape, torch.int8, 32).sign().float()
    sides = dict(zip("ABC", shape, strict=True))
    compare(scans, (1,), torch.zeros(4, x.numel(), dtype=dtype), x, **sides, AXIS=axis, REVERSE=reverse)


# ---- Products


@triton.jit
def products(
    out,
    a,
    b,
    c,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TA: tl.constexpr,
    TB: tl.constexpr,
    ACC: tl.constexpr,
):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.trans(tl.load(a + k[:, None] * M + m[None, :])) if TA else tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + n[:, None] * K + k[None, :]).T if TB else tl.load(b + k[:, None] * N + n[None, :])
    o = m[:, None] * N + n[None, :]
    t = c.dtype.element_ty
    if ACC:
        r = tl.dot(x, y, acc=tl.load(c + o), input_precision="ieee", out_dtype=t)
    else:
        r = tl.dot(x, y, input_precision="ieee", out_dtype=t)
    tl.store(out + o, r)


PRODUCT_SHAPES = [
    (1, 1, 1),
    (1, 16, 32),
    (16, 16, 16),
    (2, 64, 8),
    (32, 4, 64),
    (128, 32, 2),
    (8, 128, 128),
    (64, 2, 4),
]


@pytest.mark.parametrize("shape", PRODUCT_SHAPES, ids=str)
@pytest.mark.parametrize("repeat", [0, 1])
def test_products(compare, shape, repeat):
    number = PRODUCT_SHAPES.index(shape) + 3 * repeat
    dtype = [torch.float32, torch.float16, torch.int8, torch.bfloat16, torch.float64][number % 5]
    flags = {"TA": number % 3 == 1, "TB": number % 2 == 1, "ACC": number % 4 > 0}
    m, n, k = shape
    # Small whole numbers: products and sums are exact in all types, whatever the order.
    a, b = (random_ints(side, torch.int8, number).clamp(-9, 9).to(dtype) for side in ((m, k), (k, n)))
    wide = {torch.int8: torch.int32, torch.float64: torch.float64}.get(dtype, torch.float32)
    c, out = random_ints((m, n), torch.int8, number).to(wide), torch.zeros(m, n, dtype=wide)
    a, b = a.T.contiguous() if flags["TA"] else a, b.T.contiguous() if flags["TB"] else b
    compare(products, (1,), out, a, b, c, **dict(zip("MNK", shape, strict=True)), **flags, wide=dtype == torch.bfloat16)


def test_products_accumulate_like_fp32(compare):
    # 64 products of one sign, each fused with the sum: no more than 64 roundings of half an ulp.
    a, b = (random_floats((16, 64), torch.float32, seed, special=False).abs() for seed in (40, 41))
    out = torch.zeros(16, 16)
    compare(products, (1,), out, a, b, out.clone(), M=16, N=16, K=64, TA=False, TB=True, ACC=True, ulps=32, wide=True)


@triton.jit
def narrow_products(out, a, b, M: tl.constexpr):
    i = tl.arange(0, M)[:, None] * M + tl.arange(0, M)[None, :]
    tl.store(out + i, tl.dot(tl.load(a + i), tl.load(b + i), out_dtype=tl.float16))


def test_products_with_narrow_results(compare):
    a, b = (random_ints((16, 16), torch.int8, seed).clamp(-9, 9).half() for seed in (42, 43))
    compare(narrow_products, (1,), torch.zeros(16, 16).half(), a, b, M=16)


@triton.jit
def batched_products(out, a, b, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, T: tl.constexpr):
    x = block_of_three(a, B, M, K)
    y = tl.permute(block_of_three(b, B, N, K), (0, 2, 1)) if T else block_of_three(b, B, K, N)
    store_all(out, tl.dot(x, y, input_precision="ieee"), B * M * N)


@pytest.mark.parametrize("shape", [(2, 16, 16, 16), (4, 2, 8, 16)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_batches_of_products(compare, shape, transposed):
    batch, m, n, k = shape
    a, b = (random_ints(side, torch.int8, 44).clamp(-9, 9).float() for side in ((batch, m, k), (batch, k, n)))
    sides = {**dict(zip("BMNK", shape, strict=True)), "T": transposed}
    compare(batched_products, (1,), torch.zeros(batch, m, n), a, b, **sides)


@triton.jit
def chained_products(out, a, b, n, M: tl.constexpr):
    i = tl.arange(0, M)[:, None] * M + tl.arange(0, M)[None, :]
    x, y = tl.load(a + i), tl.load(b + i)
    acc = tl.zeros((M, M), tl.float32)
    for k in range(n):
        acc = tl.dot(x * 0.5, y + k, acc)
        x = tl.trans(tl.dot(tl.trans(x), tl.where(i % (M + 1) == 0, 1.0, 0.0)))
        acc = acc * 0.25
    acc = tl.dot(acc, acc, acc)
    tl.store(out + i, acc)


def test_chained_products(compare):
    # So small that all products and sums are exact.
    a, b = (random_ints((16, 16), torch.int8, seed).clamp(-2, 2).float() for seed in (45, 46))
    compare(chained_products, (1,), torch.zeros(16, 16), a, b, 2, M=16)


# ---- Shapes


@triton.jit
def shapes(out, x, y, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    N: tl.constexpr = A * B * C
    v, w = block_of_three(x, A, B, C), block_of_three(y, A, B, C)
    store_all(out, tl.permute(v, (2, 0, 1)), N)
    store_all(out + N, tl.permute(v + w, (1, 0, 2)), N)
    store_all(out + 2 * N, tl.trans(tl.reshape(v, (A * B, C))), N)
    store_all(out + 3 * N, tl.reshape(tl.permute(tl.reshape(v, (C, B, A)), (1, 2, 0)), (A, B, C)), N)
    store_all(out + 4 * N, tl.join(v, w), 2 * N)
    store_all(out + 6 * N, tl.interleave(v, w), 2 * N)
    store_all(out + 8 * N, tl.cat(tl.reshape(v, (N,)), tl.reshape(w, (N,))), 2 * N)
    first, second = tl.split(tl.permute(tl.reshape(v, (A * B, C // 2, 2)), (1, 0, 2)))
    store_all(out + 10 * N, first, N // 2)
    store_all(out + 10 * N + N // 2, second, N // 2)
    store_all(out + 11 * N, tl.broadcast_to(tl.expand_dims(tl.sum(w, 1), 1), (A, B, C)) + v, N)
    store_all(out + 12 * N, tl.broadcast_to(tl.max(v, 2, keep_dims=True), (A, B, C)), N)
    store_all(out + 13 * N, tl.flip(v, 2), N)
    store_all(out + 14 * N, tl.flip(v, 0) - tl.ravel(w).reshape(A, B, C), N)
    square = tl.reshape(tl.arange(0, N), (A * B, C))
    store_all(out + 15 * N, tl.trans(square) + tl.gather(tl.trans(square), tl.trans(square * 0), 0), N)


@pytest.mark.parametrize("shape", [(2, 4, 8), (1, 8, 2), (4, 1, 16)], ids=str)
def test_shapes(compare, shape):
    dtype = {2: torch.int32, 1: torch.int64, 4: torch.float32}[shape[0]]
    x, y = (random_ints(shape, torch.int8, seed).to(dtype) for seed in (50, 51))
    sides = dict(zip("ABC", shape, strict=True))
    compare(shapes, (1,), torch.zeros(16, x.numel(), dtype=dtype), x, y, **sides)


@triton.jit
def sorts(out, x, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    i = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    v = tl.load(x + i)
    tl.store(out + i, tl.sort(v))
    tl.store(out + M * N + i, tl.sort(v, descending=True))
    tl.store(out + 2 * M * N + tl.arange(0, M)[:, None] * K + tl.arange(0, K)[None, :], tl.topk(v, K))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=name_of)
def test_sorts(compare, dtype):
    x = random_ints((2, 8), torch.uint8, 52).to(dtype)
    compare(sorts, (1,), torch.zeros(3, 2, 8, dtype=dtype), x, M=2, N=8, K=4)


@triton.jit
def tables(counts, out, x, index, bins, n, N: tl.constexpr, BINS: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(bins + i)
    tl.store(counts + tl.arange(0, BINS), tl.histogram(v, BINS))
    tl.store(counts + BINS + tl.arange(0, BINS), tl.histogram(v, BINS, mask=i < n))
    w = tl.reshape(tl.load(x + i), (N // 8, 8))
    at = tl.reshape(tl.load(index + i), (N // 8, 8))
    store_all(out, tl.gather(w, at % 8, 1), N)
    store_all(out + N, tl.gather(w * 2, at % (N // 8), 0), N)
    store_all(out + 2 * N, tl.gather(tl.load(x + i), tl.load(index + i), 0), N)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.int8], ids=name_of)
def test_histograms_and_gathers(compare, dtype):
    x = random_ints(64, torch.int8, 53).to(dtype)
    index = torch.from_numpy(np.random.default_rng(2).integers(0, 64, 64).astype(np.int32))
    bins = torch.from_numpy(np.random.default_rng(3).integers(0, 20, 64).astype(np.int32))
    counts = torch.zeros(2, 16, dtype=torch.int32)
    compare(tables, (1,), counts, torch.zeros(3, 64, dtype=dtype), x, index, bins, 40, N=64, BINS=16)


# ---- Atomic operations. One program: the interpreter's order is then that of the compiled loop.


@triton.jit
def integer_atomics(cells, old, x, keep, FIRST: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    m = tl.load(keep + i)
    c = cells + i % 8
    tl.store(old + i, tl.atomic_add(c, v, mask=m), mask=m)
    tl.store(old + N + i, tl.atomic_max(c + 8, v, mask=m), mask=m)
    tl.store(old + 2 * N + i, tl.atomic_min(c + 16, v, mask=m), mask=m)
    tl.store(old + 3 * N + i, tl.atomic_and(c + 24, v, mask=m), mask=m)
    tl.store(old + 4 * N + i, tl.atomic_or(c + 32, v, mask=m), mask=m)
    tl.store(old + 5 * N + i, tl.atomic_xor(c + 40, v, mask=m), mask=m)
    tl.store(old + 6 * N + i, tl.atomic_xchg(c + 48, v, mask=m), mask=m)
    tl.store(old + 7 * N + i, tl.atomic_cas(c + 56, v * 0 + FIRST, v))
    tl.store(old + 8 * N, tl.atomic_add(cells, tl.max(v)))
    tl.store(old + 8 * N + 1, tl.atomic_cas(cells + 1, tl.min(v), tl.max(v)))
    tl.atomic_xchg(cells + 2, tl.max(v))
    tl.atomic_add(c, v)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32, torch.uint64], ids=name_of)
def test_atomics_of_integers(compare, dtype):
    first = 5
    cells = random_ints(64, dtype, 60)
    cells[56:] = torch.tensor([5, 6, 5, 5, 7, 5, 8, 5]).to(dtype)
    old, keep = torch.zeros(9, 64, dtype=dtype), random_like(64, torch.bool, 61)
    compare(integer_atomics, (1,), cells, old, random_ints(64, dtype, 62), keep, FIRST=first, N=64)


@triton.jit
def float_atomics(cells, old, x, keep, WIDE: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    m = tl.load(keep + i)
    c = cells + i % 8
    tl.store(old + i, tl.atomic_add(c, v, mask=m), mask=m)
    tl.store(old + N + i, tl.atomic_add(c + 8, v, mask=m, sem="relaxed"), mask=m)
    if WIDE:
        tl.store(old + 2 * N + i, tl.atomic_max(c + 16, v, mask=m), mask=m)
        tl.store(old + 3 * N + i, tl.atomic_min(c + 24, v, mask=m), mask=m)
    tl.store(old + 4 * N + i, tl.atomic_cas(c + 32, v * 0 + 5.0, v))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_atomics_of_floats(compare, dtype):
    cells, x = random_ints(40, torch.int8, 63).to(dtype), random_ints(64, torch.int8, 64).to(dtype)
    cells[32:] = torch.tensor([5, 6, 5, 5, 7, 5, 8, 5]).to(dtype)
    old, keep = torch.zeros(5, 64, dtype=dtype), random_like(64, torch.bool, 65)
    narrow = dtype in (torch.float16, torch.bfloat16)
    compare(float_atomics, (1,), cells, old, x, keep, WIDE=not narrow, N=64, wide=dtype == torch.bfloat16)


@triton.jit
def float_exchanges(cells, old, x, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(old + i, tl.atomic_xchg(cells + i % 8, tl.load(x + i)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
def test_exchanges_of_floats(dtype):
    # The interpreter does not exchange floats.
    cells, x, old = torch.arange(8).to(dtype), random_floats(64, dtype, 66), torch.zeros(64, dtype=dtype)
    expected = torch.cat([cells, x[:-8]])
    float_exchanges[(1,)](cells, old, x, N=64)
    check_same(old, expected)
    check_same(cells, x[-8:])


@triton.jit
def ordered_accesses(out, x, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.atomic_store(out + i, tl.atomic_load(x + i, mask=i < n) + 1, mask=i < n)
    tl.atomic_store(out + N, tl.atomic_load(out) + 5, sem="relaxed")
    tl.store(x + i, tl.atomic_load(out + i), mask=i < n)


@pytest.mark.skipif(not hasattr(tl, "atomic_load"), reason="this version of Triton has none")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32], ids=name_of)
def test_atomic_loads_and_stores(compare, dtype):
    x = random_ints(32, torch.int8, 67).to(dtype)
    compare(ordered_accesses, (1,), torch.zeros(33, dtype=dtype), x, 20, N=32)


# ---- Programs


@triton.jit
def _twice(x):
    return x * 2


@triton.jit(noinline=True)
def _collatz(x):
    return tl.where(x % 2 == 0, x // 2, 3 * x + 1)


@triton.jit
def _sign(x):
    if x < 0:
        return -1
    if x > 0:
        return 1
    return 0


@triton.jit
def _first_of(pair):
    a, b = pair
    return a - b, (b, a)


@triton.jit
def control_flow(out, x, n, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    pid = tl.program_id(0)
    if pid == 3:
        return
    i = tl.arange(0, BLOCK)
    v = tl.load(x + pid * BLOCK + i)
    total = tl.zeros((BLOCK,), tl.int32)
    count = 0
    for a in range(0, n, 2):
        for b in range(n, a, -1):
            if (a + b) % 3 == 0:
                total += v * b
            elif a > 4:
                total, v = v, total + a
            else:
                count += a * b
        v = _twice(v) - total // 4
    while count < 100:
        count += tl.sum(tl.abs(v)) % 7 + 1
        if count % 2 == 1:
            v = tl.full((BLOCK,), 9, tl.int32)
            count = count + 5
        else:
            v = tl.arange(0, BLOCK) * 3
    for s in tl.static_range(STEPS):
        total ^= v >> s
    difference, (b, a) = _first_of((total, v))
    tl.store(out + pid * BLOCK + i, difference + a * 3 + b)
    if count > 110:
        tl.store(out + 4 * BLOCK + pid, count)
        return
    tl.store(out + 4 * BLOCK + pid, -count)


@pytest.mark.parametrize("n", [0, 1, 5, 9])
def test_control_flow(compare, n):
    x, out = random_ints((4, 16), torch.int32, 70), torch.zeros(5 * 16, dtype=torch.int32)
    compare(control_flow, (4,), out, x, n, BLOCK=16, STEPS=3)


@triton.jit
def functions_apart(out, x, n):
    steps = 0
    v = tl.load(x + tl.program_id(0))
    steps += _sign(v - 6) * 1000
    while (v != 1) and (steps < n):
        v = _collatz(v)
        steps += 1
    tl.store(out + tl.program_id(0), steps)


def test_functions_that_are_not_inlined(compare):
    x = torch.arange(1, 13, dtype=torch.int32)
    compare(functions_apart, (12,), torch.zeros(12, dtype=torch.int32), x, 1000)


@triton.jit
def grids(out, pair, scale):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = (x * tl.num_programs(1) + y) * tl.num_programs(2) + z
    tl.store(out + at, (pair[0] * x + pair[1][0] * y + z) * scale)


@pytest.mark.parametrize("grid", [(1, 1, 1), (3, 1, 2), (2, 5, 3)], ids=str)
def test_grids(compare, grid):
    compare(grids, grid, torch.zeros(grid, dtype=torch.int64), (100, (10, 2.5)), 2**33)


@triton.jit
def hints(out, x, n, BLOCK: tl.constexpr):
    tl.assume(n > 0)
    i = tl.max_contiguous(tl.multiple_of(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), BLOCK), BLOCK)
    n = tl.multiple_of(n, 4)
    tl.device_assert(i >= 0, "never")
    tl.static_assert(BLOCK > 1)
    tl.debug_barrier()
    v = tl.load(x + i, mask=i < n, cache_modifier=".cg", eviction_policy="evict_first")
    tl.store(out + i, v, mask=i < n, cache_modifier=".wb")


def test_hints(compare):
    compare(hints, (3,), torch.zeros(96), random_floats(96, torch.float32, 71), 84, BLOCK=32)


@triton.jit
def scalars(out, a, b, c, d, e, x):
    tl.store(out, a + b)
    tl.store(out + 1, c * d)
    tl.store(out + 2, tl.where(e, tl.load(x), -1.0))
    tl.store(out + 3, tl.exp(d) + a.to(tl.float64))


@pytest.mark.parametrize(
    "values", [(3, 2**40, -3, 2.5, True), (-7, 2**63 + 5, 2**31, 0.1, False)], ids=["small", "large"]
)
def test_scalars_as_arguments(compare, values):
    # The exponential is one of fp32, whose last place is worth 2^29 of those of fp64.
    ulps = {"exp": 2.0**30}
    names = ["add", "mul", "where", "exp"]
    compare(scalars, (1,), torch.zeros(4, dtype=torch.float64), *values, torch.tensor([5.0]), names=names, ulps=ulps)


@triton.jit
def strides_by_default(out, x, n, BLOCK: tl.constexpr, W: tl.constexpr = 2):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = i // n, i % n
    m = (row < W) & (column >= 1) | (i == 0)
    left = tl.load(x + i - 1, mask=m & (i > 0), other=0)
    tl.store(out + i, left + tl.load(x + row * n + (n - 1 - column), mask=m, other=-5), mask=i < n * W)


@pytest.mark.parametrize("n", [1, 7, 32, 50])
def test_rows_and_columns(compare, n):
    x, out = random_ints(100, torch.int32, 72), torch.zeros(100, dtype=torch.int32)
    compare(strides_by_default, (4,), out, x, n, BLOCK=32)


@triton.jit
def described(x, source, shape, A: tl.constexpr, B: tl.constexpr):
    made = tl.make_tensor_descriptor(x, shape, (shape[1], 1), (A, B))
    v = source.load([tl.program_id(0) * A, tl.program_id(1) * B])
    made.store([tl.program_id(0) * A, tl.program_id(1) * B], v * 2 + 1)


def test_descriptors_of_tensors():
    x, out = random_ints((10, 24), torch.int32, 73), torch.zeros(12, 20, dtype=torch.int32)
    described[(3, 2)](out, TensorDescriptor.from_tensor(x, [4, 16]), (12, 20), A=4, B=16)
    expected = torch.ones(12, 20, dtype=torch.int32)  # beyond the source there are zeros
    expected[:10] += 2 * x[:, :20]
    check_same(out, expected)


# ---- What is printed, and what ends the process


@triton.jit
def prints(x, y, n):
    i = tl.arange(0, 2)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.device_print("100% of", tl.load(x + i))
    tl.device_print("two", n, tl.load(y + tl.arange(0, 2)))
    tl.device_print("bits", n, hex=True)
    tl.device_print("done")


def test_prints_as_on_gpus(capfd):
    prints[(1, 2)](torch.arange(-3, 13, dtype=torch.int8), torch.tensor([0.5, -2.0]), 255)
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 2 * (16 + 3 + 1 + 1)
    for program in range(2):
        pid = f"pid (0, {program}, 0)"
        mine = [line for line in lines if line.startswith(pid)]
        assert mine[:16] == [f"{pid} idx ({a}, {b}) 100% of: {8 * a + b - 3}" for a in range(2) for b in range(8)]
        assert mine[16] == f"{pid} idx () two: (operand 0) 255"
        assert mine[17:19] == [f"{pid} idx ({i}) two: (operand 1) {v}" for i, v in enumerate(("0.500000", "-2.000000"))]
        assert mine[19:] == [f"{pid} idx () bits: 0x000000ff", f"{pid} done"]


@triton.jit
def asserts(x, n):
    i = tl.arange(0, 8)
    tl.device_assert(i < n, 'not "enough" %d')
    tl.store(x + i, i)


ASSERTING = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("kernels_that_assert", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
x = torch.zeros(8, dtype=torch.int32)
for n, debug in ((8, True), (7, False), (7, True)):
    module.asserts[(1,)](x, n, debug=debug)
    print("ran", n, debug, flush=True)
"""


def test_assertions_end_the_process_in_debug_mode():
    done = subprocess.run([sys.executable, "-c", ASSERTING, __file__], capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:-1] == ["ran 8 True", "ran 7 False"], done.stderr[-2000:]
    assert done.returncode == -signal.SIGABRT
    assert "check_differential.py" in done.stderr
    assert 'assertion failed: not "enough" %d' in done.stderr


# ---- What is refused


@triton.jit
def with_assembly(x):
    i = tl.arange(0, 8)
    v = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [i], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(x + i, v)


@triton.jit
def with_unused_assembly(x):
    i = tl.arange(0, 8)
    tl.inline_asm_elementwise("bar.sync 0; mov.b32 $0, $1;", "=r,r", [i], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(x + i, i)


@triton.jit
def with_fp8(x):
    i = tl.arange(0, 8)
    tl.store(x + i, (i * 0.5).to(tl.float8e5).to(tl.float32).to(tl.int32))


@triton.jit
def with_fp8_in_memory(x):
    tl.store(x, tl.load(x.to(tl.pointer_type(tl.float8e4nv))).to(tl.float32).to(tl.int32))


@triton.jit
def _added(a, b):
    return a + b


@triton.jit
def with_functions_of_elements(x):
    i = tl.arange(0, 8)
    tl.store(x + i, tl.map_elementwise(_added, i, i))


@triton.jit
def with_polling(x):
    tl.atomic_poll(x, 0)


@triton.jit
def with_scaled_products(x):
    i = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    v, scale = i.to(tl.uint8), tl.full((32, 1), 127, tl.uint8)
    product = tl.dot_scaled(v.to(tl.float16), None, "fp16", v.to(tl.float16), None, "fp16")
    tl.store(x + i, product.to(tl.int32) + scale)


@pytest.mark.parametrize(
    ("kernel", "operation"),
    [
        (with_assembly, "operation tt.elementwise_inline_asm"),
        (with_unused_assembly, "operation tt.elementwise_inline_asm"),
        (with_fp8, "type f8E5M2"),
        (with_fp8_in_memory, "type f8E4M3FN"),
        (with_functions_of_elements, "operation tt.map_elementwise"),
        (with_polling, "operation tt.atomic_poll"),
        (with_scaled_products, "operation tt.dot_scaled"),
    ],
    ids=lambda value: value.__name__ if hasattr(value, "__name__") else "",
)
def test_what_is_not_supported_is_named(kernel, operation):
    if kernel in (with_functions_of_elements, with_polling) and not hasattr(tl, "atomic_poll"):
        pytest.skip("this version of Triton has no such operation")
    with pytest.raises(UnsupportedError) as failure:
        kernel[(1,)](torch.zeros(1024, dtype=torch.int32))
    message = str(failure.value)
    name = kernel.__name__
    assert re.match(rf"{operation} in kernel '{name}' at \S*check_differential.py:\d+ is not supported", message), (
        message
    )
    assert "TRITON_INTERPRET=1" in message
