"""Element-wise operations against torch and numpy: integers bit for bit, floats within bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

SIZE = 1000
BLOCK = 256
INTS = [torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def launch(kernel, out, *tensors, **constants):
    kernel[(triton.cdiv(SIZE, BLOCK),)](out, *tensors, SIZE, BLOCK=BLOCK, **constants)
    return out


def random_ints(dtype, seed):
    info = torch.iinfo(dtype)
    numbers = np.random.default_rng(seed).integers(info.min, info.max, SIZE, dtype=np.int64, endpoint=True)
    numbers[:4] = [0, 1, info.min, info.max]
    return torch.from_numpy(numbers).to(dtype)


def random_floats(dtype, seed, scale=4.0):
    return (torch.randn(SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


@triton.jit
def binary(out, x, y, n, BLOCK: tl.constexpr, OP: tl.constexpr):  # noqa: C901
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < n, other=1)
    b = tl.load(y + i, mask=i < n, other=1)
    if OP == "add":
        r = a + b
    elif OP == "sub":
        r = a - b
    elif OP == "mul":
        r = a * b
    elif OP == "div":
        r = a / b
    elif OP == "floordiv":
        r = a // b
    elif OP == "mod":
        r = a % b
    elif OP == "and":
        r = a & b
    elif OP == "or":
        r = a | b
    elif OP == "xor":
        r = a ^ b
    elif OP == "shl":
        r = a << (b & 7)
    elif OP == "shr":
        r = a >> (b & 7)
    elif OP == "max":
        r = tl.maximum(a, b)
    elif OP == "min":
        r = tl.minimum(a, b)
    elif OP == "lt":
        r = tl.where(a < b, a, b)
    elif OP == "eq":
        r = tl.where(a == b, a, b)
    tl.store(out + i, r.to(out.dtype.element_ty), mask=i < n)


def expected_binary(op, a, b):
    functions = {
        "add": lambda: a + b,
        "sub": lambda: a - b,
        "mul": lambda: a * b,
        "div": lambda: a / b,
        "floordiv": lambda: torch.div(a, b, rounding_mode="trunc"),
        "mod": lambda: torch.fmod(a, b),
        "and": lambda: a & b,
        "or": lambda: a | b,
        "xor": lambda: a ^ b,
        "shl": lambda: a << (b & 7),
        "shr": lambda: a >> (b & 7),
        "max": lambda: torch.fmax(a, b) if a.is_floating_point() else torch.maximum(a, b),
        "min": lambda: torch.fmin(a, b) if a.is_floating_point() else torch.minimum(a, b),
        "lt": lambda: torch.where(a < b, a, b),
        "eq": lambda: torch.where(a == b, a, b),
    }
    return functions[op]()


@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize(
    "op", ["add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "shl", "shr", "max", "min", "lt", "eq"]
)
def test_integers_are_exact(op, dtype):
    a, b = random_ints(dtype, 1), random_ints(dtype, 2)
    if op in ("floordiv", "mod"):
        b[b == 0] = 3
        b[b == -1] = 7
    torch.testing.assert_close(launch(binary, torch.zeros_like(a), a, b, OP=op), expected_binary(op, a, b))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "max", "min", "lt"])
def test_floats_are_rounded_as_by_torch(op, dtype):
    a, b = random_floats(dtype, 1), random_floats(dtype, 2)
    a[5], b[6], a[7] = torch.nan, torch.nan, torch.inf
    got = launch(binary, torch.zeros_like(a), a, b, OP=op)
    torch.testing.assert_close(got, expected_binary(op, a, b), rtol=0, atol=0, equal_nan=True)


@triton.jit
def unary(out, x, n, BLOCK: tl.constexpr, OP: tl.constexpr):  # noqa: C901
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < n)
    if OP == "exp":
        r = tl.exp(a)
    elif OP == "exp2":
        r = tl.exp2(a)
    elif OP == "log":
        r = tl.log(a)
    elif OP == "log2":
        r = tl.log2(a)
    elif OP == "sqrt":
        r = tl.sqrt(a)
    elif OP == "rsqrt":
        r = tl.rsqrt(a)
    elif OP == "sin":
        r = tl.sin(a)
    elif OP == "cos":
        r = tl.cos(a)
    elif OP == "erf":
        r = tl.erf(a)
    elif OP == "abs":
        r = tl.abs(a)
    elif OP == "floor":
        r = tl.floor(a)
    elif OP == "ceil":
        r = tl.ceil(a)
    elif OP == "sigmoid":
        r = tl.sigmoid(a)
    elif OP == "neg":
        r = -a
    tl.store(out + i, r, mask=i < n)


SPECIAL = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, 1e-40, 88.7, -87.4, -103.0, 3e38]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "op",
    ["exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "abs", "floor", "ceil", "sigmoid", "neg"],
)
def test_functions_are_precise(op, dtype):
    x = random_floats(dtype, 3, 20.0)
    if op in ("log", "log2", "sqrt", "rsqrt"):
        x = x.abs()
    x[: len(SPECIAL)] = torch.tensor(SPECIAL, dtype=dtype)
    expected = getattr(torch, op)(x.double())
    got = launch(unary, torch.zeros_like(x), x, OP=op)
    tolerance = {"rtol": 3e-7, "atol": 1e-44} if dtype == torch.float32 else {"rtol": 1e-14, "atol": 1e-300}
    if op in ("sin", "cos", "sigmoid"):
        tolerance["atol"] = 1e-7
    torch.testing.assert_close(got, expected.to(dtype), **tolerance, equal_nan=True)


@pytest.mark.parametrize("op", ["exp", "exp2", "log", "log2"])
def test_relative_error_of_elementary_functions(op):
    ranges = {"exp": (-87.0, 88.0), "exp2": (-126.0, 127.9), "log": (1e-30, 1e30), "log2": (1e-30, 1e30)}
    low, high = ranges[op]
    for part in range(40):
        generator = torch.Generator().manual_seed(part)
        x = torch.rand(SIZE, generator=generator, dtype=torch.float64)
        x = (low * (high / low) ** x if op.startswith("log") else low + (high - low) * x).float()
        if op.startswith("log"):
            x[::2] = 0.5 + x[::2].double().log().abs().float() % 1.0
        expected = getattr(torch, op)(x.double())
        got = launch(unary, torch.zeros_like(x), x, OP=op).double()
        error = ((got - expected) / expected.abs().clamp(min=1e-30)).abs().max()
        # A float's own rounding is up to 6e-8.
        assert error < 1.6e-7, (part, error)


@triton.jit
def cast(out, x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n).to(out.dtype.element_ty), mask=i < n)


@pytest.mark.parametrize("source", [*INTS, *FLOATS, torch.bool])
@pytest.mark.parametrize("target", [*INTS, *FLOATS])
def test_casts(source, target):
    if source == torch.bool:
        x = random_ints(torch.int8, 1) > 0
    elif source in FLOATS:
        x = random_floats(source, 4, 30.0)
    else:
        x = random_ints(source, 4)
    expected = x.to(target)
    if source in (torch.int32, torch.int64) and target in (torch.float16, torch.bfloat16):
        expected = x.float().to(target)
    got = launch(cast, torch.zeros(SIZE, dtype=target), x)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16])
def test_all_narrow_floats_survive_and_all_roundings_are_to_nearest_even(target):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for start in range(0, 2**16, SIZE):
        x = torch.zeros(SIZE, dtype=torch.int16)
        part = bits[start : start + SIZE]
        x[: len(part)] = part
        wide = launch(cast, torch.zeros(SIZE), x.view(target))
        torch.testing.assert_close(wide, x.view(target).float(), rtol=0, atol=0, equal_nan=True)
        got = launch(cast, torch.zeros(SIZE, dtype=target), x.view(target))
        assert torch.equal(got.view(torch.int16), x)
    for seed, scale in enumerate([1.0, 1e-5, 1e-7, 1e4, 6e4, 1e38]):
        x = random_floats(torch.float32, seed, scale)
        # Halves between two neighbours, and just beside them.
        x[::3] = ((x[::3].view(torch.int32) & -8192) | 4096).view(torch.float32)
        x[1::3] = ((x[1::3].view(torch.int32) & -65536) | 32768).view(torch.float32)
        got = launch(cast, torch.zeros(SIZE, dtype=target), x)
        torch.testing.assert_close(got, x.to(target), rtol=0, atol=0, equal_nan=True)


@triton.jit
def bits(out, x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n).to(out.dtype.element_ty, bitcast=True), mask=i < n)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.int32),
        (torch.int32, torch.float32),
        (torch.float16, torch.int16),
        (torch.int16, torch.bfloat16),
        (torch.float64, torch.int64),
    ],
)
def test_bitcasts(source, target):
    x = random_floats(source, 5) if source in FLOATS else random_ints(source, 5)
    got = launch(bits, torch.zeros(SIZE, dtype=target), x)
    assert torch.equal(got.view(torch.uint8), x.view(torch.uint8))


@triton.jit
def unsigned(out, x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < n).to(tl.uint32, bitcast=True)
    b = tl.load(y + i, mask=i < n, other=1).to(tl.uint32, bitcast=True) | 1
    r = tl.umulhi(a, b) + a // b + a % b + tl.where(a > b, a >> 3, b)
    tl.store(out + i, r.to(tl.int32, bitcast=True), mask=i < n)


def test_unsigned_numbers():
    x, y = random_ints(torch.int32, 6), random_ints(torch.int32, 7)
    a, b = (t.numpy().view(np.uint32).astype(np.uint64) for t in (x, y))
    b = b | 1
    expected = (a * b >> 32) + a // b + a % b + np.where(a > b, a >> 3, b)
    got = launch(unsigned, torch.zeros_like(x), x, y)
    assert np.array_equal(got.numpy().view(np.uint32), expected.astype(np.uint32))


@triton.jit
def random_words(out, seed, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w0, w1, w2, w3 = tl.philox(seed, i, i * 0, i * 0, i * 0)
    r = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(4 * BLOCK)
    j = tl.program_id(0) * (4 * BLOCK) + tl.arange(0, 4 * BLOCK)
    tl.store(out + j, r.to(tl.int32, bitcast=True), mask=j < 4 * n)


def test_philox_draws_the_words_of_the_reference():
    from cbtriton.kernels.sample.reference import philox

    out = torch.zeros(4 * SIZE, dtype=torch.int32)
    random_words[(triton.cdiv(SIZE, BLOCK),)](out, 1234567890123, SIZE, BLOCK=BLOCK)
    zero = torch.zeros(SIZE, dtype=torch.int64)
    expected = philox((torch.arange(SIZE), zero, zero, zero), torch.tensor(1234567890123))
    assert torch.equal(out.long() & 0xFFFFFFFF, expected.flatten())


@triton.jit
def fused(out, x, y, z, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b, c = tl.load(x + i, mask=i < n), tl.load(y + i, mask=i < n), tl.load(z + i, mask=i < n)
    tl.store(out + i, a * b + c, mask=i < n)


def test_products_and_sums_are_fused_only_if_asked_for():
    x, y = random_floats(torch.float32, 1), random_floats(torch.float32, 2)
    z = -(x * y)
    grid = (triton.cdiv(SIZE, BLOCK),)
    apart, together = torch.zeros(SIZE), torch.zeros(SIZE)
    fused[grid](apart, x, y, z, SIZE, BLOCK=BLOCK, enable_fp_fusion=False)
    fused[grid](together, x, y, z, SIZE, BLOCK=BLOCK, enable_fp_fusion=True)
    assert (apart == 0).all()
    exact = x.double() * y.double() + z.double()
    assert torch.equal(together, exact.float()) or torch.equal(together, apart)
