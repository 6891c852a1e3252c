"""Each operation of the language, compiled and in Triton's interpreter, on the same random inputs.

Integers, and bits that are only moved, must be equal. Floats may differ by a number of units in the last place (ulp) of
their type that each test states. Where the interpreter is known to be wrong the same kernel is interpreted with all
floats in fp64, and its results are rounded: the interpreter's bf16 numbers are bit patterns that it adds and multiplies
as integers, and its casts to bf16 cut bits off. Of elementary functions, numpy's fp32 versions are off by up to 4 ulp,
so they too are interpreted in fp64.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

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
        different = nan | ((torch.from_numpy(distance) > ulps) & ~(got.isnan() & expected.isnan())) | signs
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
            parts = zip(names, got, other, strict=True) if number == 0 and names else [(f"argument {number}", got, other)]
            for what, mine, its in parts:
                bound = ulps.get(what, ulps.get("", 0.0)) if isinstance(ulps, dict) else ulps
                check_same(mine, its, bound, f"{kernel.__name__}, {what}:")

    return run


# ---- Element-wise operations. Row k of `out` is the result of the operation with the k-th name.

SIZE = 300
BLOCK = 128
GRID = (triton.cdiv(SIZE, BLOCK),)
INTEGER_NAMES = "add sub mul floordiv mod and or xor shl shr maximum minimum neg not abs where".split()
COMPARISON_NAMES = "lt le gt ge eq ne".split()


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
    compare(
        integer_operations, GRID, out, x, y, BITS=8 * x.element_size(), SIZE=SIZE, BLOCK=BLOCK, names=INTEGER_NAMES
    )


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


BIT_NAMES = "and or xor not add mul where logical_and logical_or".split()


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


FLOAT_NAMES = (
    "add sub mul div mod neg abs where maximum minimum maximum_nan minimum_nan clamp clamp_nan fma fma_of_three".split()
)


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
    zeros = {name: 0.5 for name in ("maximum", "minimum", "maximum_nan", "minimum_nan", "clamp", "clamp_nan")}
    wide = dtype == torch.bfloat16
    options = {"SIZE": SIZE, "BLOCK": BLOCK, "enable_fp_fusion": False}
    compare(float_operations, GRID, out, x, y, z, names=FLOAT_NAMES, ulps=zeros, wide=wide, **options)
