"""Operations on whole blocks: reductions, scans, products, shapes, atomics, control flow, aliasing."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@triton.jit
def reduce_matrix(out, index, x, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, OP: tl.constexpr):
    i = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    v = tl.load(x + i)
    o = tl.arange(0, N if AXIS == 0 else M)
    if OP == "sum":
        r = tl.sum(v, AXIS)
    elif OP == "max":
        r = tl.max(v, AXIS)
    elif OP == "min":
        r = tl.min(v, AXIS)
    elif OP == "xor":
        r = tl.xor_sum(v, AXIS)
    else:
        r, at = tl.max(v, AXIS, return_indices=True)
        tl.store(index + o, at)
    tl.store(out + o, r)


@pytest.mark.parametrize(("m", "n"), [(1, 64), (8, 4), (16, 256), (64, 1), (2, 2)])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int32, torch.float16])
@pytest.mark.parametrize("op", ["sum", "max", "min", "argmax", "xor"])
def test_reductions(m, n, axis, dtype, op):
    if op == "xor" and dtype.is_floating_point:
        pytest.skip("integers only")
    x = normal(m, n, seed=m * n)
    x = (
        (x * 3).round().to(dtype)
        if op == "argmax"
        else (x * 1e5).to(dtype)
        if not dtype.is_floating_point
        else x.to(dtype)
    )
    size = n if axis == 0 else m
    accumulated = torch.int32 if dtype == torch.int32 else dtype
    out, index = torch.zeros(size, dtype=accumulated), torch.zeros(size, dtype=torch.int32)
    reduce_matrix[(1,)](out, index, x, M=m, N=n, AXIS=axis, OP=op)
    if op == "sum":
        expected = x.double().sum(axis) if dtype.is_floating_point else x.sum(axis).to(accumulated)
        tolerance = {torch.float32: 1e-4, torch.float16: 5e-2}.get(dtype, 0)
        torch.testing.assert_close(out.double(), expected.double(), rtol=tolerance, atol=tolerance)
    elif op == "xor":
        expected = x.select(axis, 0).clone()
        for k in range(1, x.shape[axis]):
            expected ^= x.select(axis, k)
        assert torch.equal(out, expected)
    else:
        values, places = (x.min if op == "min" else x.max)(axis)
        torch.testing.assert_close(out, values, rtol=0, atol=0)
        if op == "argmax":
            first = (x == values.unsqueeze(axis)).int().argmax(axis)
            assert torch.equal(index.long(), first)
        del places


@triton.jit
def masked_sum(out, x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=float("-inf"))
    m = tl.max(v, 0)
    tl.store(out, m)
    tl.store(out + 1, tl.sum(tl.exp(v - m), 0))


@pytest.mark.parametrize("n", [1, 31, 32, 33, 500, 1024])
def test_masked_reductions(n):
    x, out = normal(n), torch.zeros(2)
    masked_sum[(1,)](out, x, n, BLOCK=1024)
    torch.testing.assert_close(out[0], x.max())
    torch.testing.assert_close(out[1], (x - x.max()).exp().sum(), rtol=1e-5, atol=0)


@triton.jit
def _first_order(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def scans(out, linear, x, g, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, REVERSE: tl.constexpr):
    i = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + i, tl.cumsum(tl.load(x + i), AXIS, reverse=REVERSE))
    _, y = tl.associative_scan((tl.load(g + i), tl.load(g + i) + 1.0), AXIS, _first_order, reverse=REVERSE)
    tl.store(linear + i, y)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("m", "n"), [(1, 128), (16, 8), (4, 1)])
def test_scans(axis, reverse, m, n):
    x = (normal(m, n) * 100).to(torch.int32)
    g = torch.sigmoid(normal(m, n, seed=1))
    out, linear = torch.zeros_like(x), torch.zeros_like(g)
    scans[(1,)](out, linear, x, g, M=m, N=n, AXIS=axis, REVERSE=reverse)
    turn = (lambda t: t.flip(axis)) if reverse else (lambda t: t)
    assert torch.equal(out, turn(turn(x).cumsum(axis)).to(torch.int32))
    state = torch.zeros_like(g).select(axis, 0)
    expected = torch.zeros_like(g)
    for k in range(g.shape[axis]):
        gate = turn(g).select(axis, k)
        state = state * gate + gate + 1 if k else gate + 1
        expected.select(axis, k).copy_(state)
    torch.testing.assert_close(linear, turn(expected), rtol=1e-5, atol=1e-5)


@triton.jit
def product(out, a, b, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TA: tl.constexpr, TB: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.trans(tl.load(a + k[:, None] * M + m[None, :])) if TA else tl.load(a + m[:, None] * K + k[None, :])
    y = tl.trans(tl.load(b + n[:, None] * K + k[None, :])) if TB else tl.load(b + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(x, y, input_precision="ieee").to(out.dtype.element_ty))


@pytest.mark.parametrize(
    ("m", "n", "k"), [(16, 16, 16), (4, 64, 32), (1, 32, 64), (2, 8, 16), (64, 128, 16), (8, 1, 4)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize(("ta", "tb"), [(False, False), (False, True), (True, True)])
def test_products(m, n, k, dtype, ta, tb):
    a, b = normal(m, k) * 3, normal(k, n, seed=1) * 3
    a, b = a.to(dtype), b.to(dtype)
    out = torch.zeros(m, n, dtype=torch.int32 if dtype == torch.int8 else torch.float32)
    product[(1,)](out, (a.T if ta else a).contiguous(), (b.T if tb else b).contiguous(), M=m, N=n, K=k, TA=ta, TB=tb)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


def ones(*shape):
    """`1` and `-1`, and many zeros."""
    return (normal(*shape, seed=len(shape)).clamp(-2, 2) / 1.5).trunc().bfloat16()


@pytest.mark.parametrize(("m", "n", "k"), [(32, 128, 64), (64, 512, 512)])
@pytest.mark.parametrize("tb", [False, True])
def test_large_products_of_bf16(m, n, k, tb):
    a, b, out = ones(m, k), ones(1, k, n)[0], torch.zeros(m, n)
    product[(1,)](out, a, (b.T if tb else b).contiguous(), M=m, N=n, K=k, TA=False, TB=tb)
    assert torch.equal(out.double(), a.double() @ b.double())


@pytest.mark.parametrize("m", [2, 16])
@pytest.mark.parametrize("tb", [False, True])
def test_products_of_bf16_keep_what_is_not_finite(m, tb):
    a, b = normal(m, 64).bfloat16(), normal(64, 64, seed=1).bfloat16()
    a[0, 5], a[1, 7] = float("inf"), float("nan")
    b[6, 3], b[8, 4] = float("-inf"), float("nan")
    out = torch.zeros(m, 64)
    product[(1,)](out, a, (b.T if tb else b).contiguous(), M=m, N=64, K=64, TA=False, TB=tb)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4, equal_nan=True)


@triton.jit
def first_rows(out, sums, x, y, steps, ROWS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SUMMED: tl.constexpr):
    row, column = tl.arange(0, M), tl.arange(0, N)
    is_row = row[:, None] < ROWS
    left = tl.load(x + row[:, None] * N + column[None, :], mask=is_row, other=0.5)
    highest, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M, N], tl.float32)
    for step in range(steps):
        right = y + step * N * N + column[:, None] * N + column[None, :]
        scores = tl.dot(left, tl.trans(tl.load(right)), input_precision="ieee")
        highest = tl.maximum(highest, tl.max(scores, 1))
        weights = scores.to(y.dtype.element_ty)
        total = tl.dot(weights, tl.load(right), total * 0.5, input_precision="ieee")
    total += highest[:, None]
    tl.store(out + row[:, None] * N + column[None, :], total, mask=is_row)
    if SUMMED:
        tl.store(sums + column, tl.sum(total, 0))


@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize(("n", "dtype"), [(16, torch.float32), (4, torch.float32), (64, torch.bfloat16)])
@pytest.mark.parametrize("summed", [False, True])
def test_rows_that_are_needed_do_not_depend_on_others(rows, n, dtype, summed):
    # Sums of 64 products that bf16 numbers hold exactly: their roundings are not what is tested.
    x, y = (normal(8, n).to(dtype), normal(3, n, n, seed=1).to(dtype)) if n < 64 else (ones(8, n), ones(3, n, n))
    out, sums = torch.full((8, n), -7.0), torch.empty(n)
    first_rows[(1,)](out, sums, x, y, 3, ROWS=rows, M=8, N=n, SUMMED=summed)
    left = x.double().clone()
    left[rows:] = 0.5
    scores = left @ y.double().mT
    expected = sum(scores[i] @ y[i].double() * 0.5 ** (2 - i) for i in range(3)) + scores.amax((0, 2))[:, None]
    torch.testing.assert_close(out[:rows].double(), expected[:rows], rtol=1e-4, atol=1e-4)
    assert (out[rows:] == -7).all()
    if summed:
        torch.testing.assert_close(sums.double(), expected.sum(0), rtol=1e-4, atol=1e-4)


@triton.jit
def batched(out, a, b, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    z = tl.arange(0, B)[:, None, None]
    m, n = tl.arange(0, M), tl.arange(0, N)
    k = tl.arange(0, K)
    x = tl.load(a + z * (M * K) + m[None, :, None] * K + k[None, None, :])
    y = tl.load(b + z * (K * N) + k[None, :, None] * N + n[None, None, :])
    tl.store(out + z * (M * N) + m[None, :, None] * N + n[None, None, :], tl.dot(x, y, input_precision="ieee"))


def test_batched_products():
    a, b, out = normal(4, 16, 32), normal(4, 32, 16, seed=1), torch.zeros(4, 16, 16)
    batched[(1,)](out, a, b, B=4, M=16, N=16, K=32)
    torch.testing.assert_close(out, a @ b, rtol=1e-5, atol=1e-5)


@triton.jit
def shapes(out, x, y, table, index):
    i = tl.arange(0, 64)
    v, w = tl.load(x + i), tl.load(y + i)
    both = tl.join(v, w)
    first, second = tl.split(tl.reshape(v, (32, 2)))
    tl.store(out + tl.arange(0, 128), tl.reshape(both, (128,)))
    tl.store(out + 128 + tl.arange(0, 32), first - second)
    turned = tl.trans(tl.reshape(tl.exp(v), (4, 16)))
    tl.store(out + 160 + tl.arange(0, 16)[:, None] * 4 + tl.arange(0, 4)[None, :], turned)
    cube = tl.permute(tl.reshape(v, (4, 2, 8)), (2, 0, 1))
    tl.store(out + 224 + i, tl.reshape(cube, (64,)))
    tl.store(out + 288 + tl.arange(0, 128), tl.cat(v, w, can_reorder=True))
    tl.store(out + 416 + i, tl.gather(w, tl.load(index + i), 0))
    tl.store(table + tl.arange(0, 16), tl.histogram(tl.load(index + i) // 4, 16))


def test_shapes():
    x, y = normal(64), normal(64, seed=1)
    index = torch.randint(0, 64, (64,), dtype=torch.int32)
    out, table = torch.zeros(480), torch.zeros(16, dtype=torch.int32)
    shapes[(1,)](out, x, y, table, index)
    assert torch.equal(out[:128], torch.stack([x, y], 1).flatten())
    assert torch.equal(out[128:160], x[::2] - x[1::2])
    torch.testing.assert_close(out[160:224], x.exp().view(4, 16).T.flatten())
    assert torch.equal(out[224:288], x.view(4, 2, 8).permute(2, 0, 1).flatten())
    assert torch.equal(out[288:416].sort().values, torch.cat([x, y]).sort().values)
    assert torch.equal(out[416:480], y[index.long()])
    assert torch.equal(table.long(), torch.bincount(index // 4, minlength=16))


@triton.jit
def count_bins(table, x, n, BLOCK: tl.constexpr, BINS: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i)
    tl.store(table + tl.arange(0, BINS), tl.histogram(v, BINS))
    tl.store(table + BINS + tl.arange(0, BINS), tl.histogram(v, BINS, mask=(i < n) & (v != 3)))


@pytest.mark.parametrize("size", [2, 64, 512, 4096])
@pytest.mark.parametrize("spread", [1, 16])
def test_histograms(size, spread):
    x = torch.randint(0, spread, (size,), dtype=torch.int32)
    table = torch.full((64,), -1, dtype=torch.int32)
    count_bins[(1,)](table, x, size // 2 + 1, BLOCK=size, BINS=32)
    part = x[: size // 2 + 1]
    assert torch.equal(table[:32].long(), torch.bincount(x, minlength=32))
    assert torch.equal(table[32:].long(), torch.bincount(part[part != 3], minlength=32))


@triton.jit
def masked(out, x, y, low, high, BLOCK: tl.constexpr, KIND: tl.constexpr):
    i = tl.arange(0, BLOCK)
    if KIND == "below":
        m = i < high
    elif KIND == "above":
        m = low <= i
    elif KIND == "between":
        m = (i >= low) & (i < high)
    elif KIND == "outside":
        m = (i < low) | (i >= high)
    elif KIND == "reversed":
        m = high > BLOCK - 1 - i
    else:
        m = tl.load(y + i) > 0
    v = tl.load(x + i, mask=m, other=7.0)
    tl.store(out + i, v)
    tl.store(out + BLOCK + i, v * 2, mask=m)
    n = tl.cumsum(m.to(tl.int32), 0)
    tl.store(out + 2 * BLOCK + n, v, mask=m)


@pytest.mark.parametrize("kind", ["below", "above", "between", "outside", "reversed", "any"])
@pytest.mark.parametrize(("low", "high"), [(0, 256), (0, 0), (40, 41), (31, 97), (64, 128), (256, 256), (200, 100)])
def test_masks(kind, low, high):
    i, x, y = torch.arange(256), normal(256), normal(256, seed=low + 1)
    m = {
        "below": i < high,
        "above": i >= low,
        "between": (i >= low) & (i < high),
        "outside": (i < low) | (i >= high),
        "reversed": 255 - i < high,
        "any": y > 0,
    }[kind]
    out = torch.full((3 * 256 + 1,), -1.0)
    masked[(1,)](out, x, y, low, high, BLOCK=256, KIND=kind)
    assert torch.equal(out[:256], x.where(m, 7.0))
    assert torch.equal(out[256:512], torch.where(m, x * 2, -1.0))
    assert torch.equal(out[513 : 513 + int(m.sum())], x[m])
    assert (out[513 + int(m.sum()) :] == -1).all()


@triton.jit
def to_integers(out, x, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i).to(tl.int64))


def test_floats_become_wide_integers():
    x = normal(4096) * 2.0 ** torch.randint(-4, 60, (4096,))
    x[:6] = torch.tensor([0.0, -0.0, -(2.0**63), 2.0**63 - 2.0**39, 2.0**31, -0.99])
    x = x.clamp(-(2.0**63), 2.0**63 - 2.0**39)
    out = torch.zeros(4096, dtype=torch.int64)
    to_integers[(2,)](out, x, BLOCK=2048)
    assert torch.equal(out, x.to(torch.int64))


@triton.jit
def atomics(added, highest, lowest, wide, floats, old, x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    v = tl.load(x + i, mask=m, other=0)
    cell = i % 7
    tl.store(old + i, tl.atomic_add(added + cell, v, mask=m), mask=m)
    tl.atomic_max(highest + cell, v, mask=m)
    tl.atomic_min(lowest + cell, v, mask=m)
    tl.atomic_max(wide, tl.max(v.to(tl.int64) << 32))
    tl.atomic_add(floats + cell, v.to(tl.float32), mask=m)


def test_atomics():
    x = torch.randint(-1000, 1000, (3000,), dtype=torch.int32)
    added, highest, lowest = (torch.zeros(7, dtype=torch.int32) for _ in range(3))
    wide, floats, old = torch.zeros(1, dtype=torch.int64), torch.zeros(7), torch.zeros_like(x)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    atomics[(12,)](added, highest, lowest, wide, floats, old, x, 3000, BLOCK=256)
    torch.set_num_threads(threads)
    cells = [x[k::7] for k in range(7)]
    assert added.tolist() == [int(c.sum()) for c in cells]
    assert highest.tolist() == [int(c.max()) for c in cells]
    assert lowest.tolist() == [int(c.min()) for c in cells]
    assert int(wide) == int(x.max()) << 32
    assert floats.tolist() == added.tolist()


@triton.jit
def lock(out, flag):
    while tl.atomic_cas(flag, 0, 1) == 1:
        pass
    tl.store(out, tl.load(out) + 1)
    tl.atomic_xchg(flag, 0)


def test_a_lock():
    out, flag = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    lock[(500,)](out, flag)
    assert int(out) == 500


@triton.jit
def control(out, x, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    if pid >= n:
        return
    i = tl.arange(0, BLOCK)
    v = tl.load(x + pid * BLOCK + i)
    total = tl.zeros([BLOCK], tl.float32)
    steps = 0
    while tl.sum(total) < 100.0 * (pid + 1):
        for k in range(steps, steps + 3):
            if k % 2 == 0:
                total += tl.abs(v) * k
            else:
                total, v = v + total, tl.where(v > 0, v, -v)
        steps += 1
    tl.store(out + pid * BLOCK + i, total)


def test_loops_and_branches():
    x, out = normal(6, 32), torch.zeros(6, 32)
    control[(6,)](out, x, 4, BLOCK=32)
    for pid in range(4):
        v, total, steps = x[pid].clone(), torch.zeros(32), 0
        while total.sum() < 100.0 * (pid + 1):
            for k in range(steps, steps + 3):
                if k % 2 == 0:
                    total = total + v.abs() * k
                else:
                    total, v = v + total, v.abs()
            steps += 1
        torch.testing.assert_close(out[pid], total, rtol=1e-5, atol=1e-5)
    assert (out[4:] == 0).all()


@triton.jit
def swap(out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a, b = i * 1.0, i * 2.0
    for _ in range(n):
        a, b = b, a + b
    tl.store(out + i, a)
    tl.store(out + BLOCK + i, b)


def test_carried_blocks_are_all_replaced_at_once():
    out = torch.zeros(2, 64)
    swap[(1,)](out, 5, BLOCK=64)
    a, b = torch.arange(64.0), torch.arange(64.0) * 2
    for _ in range(5):
        a, b = b, a + b
    assert torch.equal(out, torch.stack([a, b]))


@triton.jit
def shift(x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + 1 + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def exchange(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(x + i, b)
    tl.store(y + i, a)


@triton.jit
def reverse(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + BLOCK - 1 - i))


def test_loads_come_before_stores_of_the_same_memory():
    x = torch.arange(101.0)
    shift[(1,)](x, 100, BLOCK=128)
    assert x.tolist() == [0.0, *range(100)]
    a, b = torch.arange(128.0), torch.arange(128.0) + 500
    exchange[(1,)](a, b, BLOCK=128)
    assert a[3] == 503
    assert b[3] == 3
    exchange[(1,)](a, a, BLOCK=128)
    assert a[3] == 503
    reverse[(1,)](b, b, BLOCK=128)
    assert b[3] == 124


@triton.jit
def strided(out, x, stride_m, stride_n, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    tl.store(out + m * N + n, tl.load(x + m * stride_m + n * stride_n))
    tl.store(out + M * N + m * N + n, tl.load(x + m * stride_m + (n // 8 * 8 + n % 8) * stride_n))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_strides(dtype):
    x = (normal(64, 64) * 50).to(dtype)
    for view in (x[:16, :32], x[:32, :16].T, x[::4, ::2]):
        out = torch.zeros(2, 16, 32, dtype=dtype)
        strided[(1,)](out, view, view.stride(0), view.stride(1), M=16, N=32)
        assert torch.equal(out[0], view)
        assert torch.equal(out[1], view)


@triton.jit
def pieces(out, x, first, n, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    e = first + tl.arange(0, BLOCK)
    m = (e < n) & (e >= 0)
    tl.store(out + tl.arange(0, BLOCK), tl.load(x + e // DIM * 1000 + e % DIM, mask=m, other=-1.0))


@pytest.mark.parametrize("dim", [64, 40, 24, 7])
@pytest.mark.parametrize("first", [0, -64, 8])
def test_addresses_with_quotients_and_remainders(dim, first):
    x, out = normal(4, 1000), torch.zeros(256)
    n = 4 * dim - 3
    pieces[(1,)](out, x, first, n, HEADS=4, DIM=dim, BLOCK=256)
    expected = [float(x[e // dim, e % dim]) if 0 <= e < n else -1.0 for e in range(first, first + 256)]
    assert out.tolist() == expected


@triton.jit
def programs(out):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = (x * tl.num_programs(1) + y) * tl.num_programs(2) + z
    tl.store(out + at, x * 100 + y * 10 + z)


@pytest.mark.parametrize("threads", [1, 2])
def test_grids(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    out = torch.zeros(2, 3, 4, dtype=torch.int32)
    for _ in range(3):
        programs[(2, 3, 4)](out)
    torch.set_num_threads(before)
    assert out.flatten().tolist() == [x * 100 + y * 10 + z for x in range(2) for y in range(3) for z in range(4)]


@triton.jit
def large(out, x, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.exp(tl.load(x + i))
    tl.store(out + i, v / tl.sum(v, 0))


def test_blocks_larger_than_the_stack():
    x = normal(1 << 19)
    out = torch.zeros_like(x)
    large[(1,)](out, x, BLOCK=1 << 19)
    torch.testing.assert_close(out, x.softmax(0), rtol=1e-4, atol=0)


@triton.jit
def nested(args, scale, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(args[1] + i, tl.load(args[0] + i, mask=i < n) * scale[0] + scale[1], mask=i < n)


def test_tuples_as_arguments():
    x, out = normal(50), torch.zeros(50)
    nested[(1,)]((x, out), (2.0, 3), 50, BLOCK=64)
    torch.testing.assert_close(out, x * 2 + 3)
