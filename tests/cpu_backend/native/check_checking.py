"""Checking mode: planted accesses out of bounds, races and reads of poison, each beside what must not be reported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime.jit import reinterpret

from cbtriton.kernels.cpu_backend.checking import poison_
from cbtriton.kernels.cpu_backend.errors import CheckError, OutOfBoundsError, PoisonedReadError, RaceError

DTYPES = [torch.float32, torch.bfloat16, torch.int64]
LINES = Path(__file__).read_text().splitlines()


@pytest.fixture(autouse=True)
def checking_mode(tmp_path, monkeypatch):
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    monkeypatch.setenv("CBTRITON_CPU_CHECK", "1")


def line(mark: str) -> str:
    """`file:line` of the line that ends in a comment with the mark."""
    (number,) = [i for i, text in enumerate(LINES, 1) if text.endswith(f"# {mark}")]
    return rf"check_checking\.py:{number}\b"


# ---- Bounds


@triton.jit
def scale(out, x, n, shift, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) + shift
    v = tl.load(x + i, mask=i < n)  # scale loads
    tl.store(out + i, v, mask=i < n)  # scale stores


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_store_after_the_end(dtype):
    x, out = torch.ones(300, dtype=dtype), torch.zeros(200, dtype=dtype)
    size = x.element_size()
    message = (
        rf"kernel 'scale', program \(1, 0, 0\): the store at .*{line('scale stores')} goes to out\[200\] and ends "
        rf"{size} bytes after the end of the storage of argument 'out', which has {200 * size} bytes"
    )
    with pytest.raises(OutOfBoundsError, match=message):
        scale[(3,)](out, x, 300, 0, BLOCK=128)
    assert (out == 1).all()
    # The next launch works.
    out = torch.zeros(300, dtype=dtype)
    scale[(3,)](out, x, 300, 0, BLOCK=128)
    assert torch.equal(out, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_load_before_the_beginning(dtype):
    x, out = torch.ones(301, dtype=dtype)[1:], torch.zeros(300, dtype=dtype)
    scale[(3,)](out[1:], x, 299, -1, BLOCK=128)
    size = x.element_size()
    message = (
        rf"the load at .*{line('scale loads')} goes to x\[-2\] and begins {size} bytes before the storage of .*'x'"
    )
    with pytest.raises(OutOfBoundsError, match=message):
        scale[(3,)](out[2:], x, 298, -2, BLOCK=128)


def test_masked_lanes_are_not_accessed():
    x, out = torch.ones(5), torch.zeros(5)
    scale[(3,)](out, x, 5, 0, BLOCK=128)
    assert torch.equal(out, x)


@triton.jit
def one_by_one(out, x, n):
    for i in range(n):
        tl.store(out + i, tl.load(x + i))  # copies one


def test_scalars():
    x, out = torch.arange(8.0), torch.zeros(8)
    one_by_one[(1,)](out, x, 8)
    assert torch.equal(out, x)
    with pytest.raises(
        OutOfBoundsError, match=rf"the load at .*{line('copies one')} goes to x\[8\] and ends 4 bytes after the end of"
    ):
        one_by_one[(1,)](torch.zeros(9), x, 9)
    with pytest.raises(
        OutOfBoundsError,
        match=rf"the store at .*{line('copies one')} goes to out\[8\] and ends 4 bytes after the end of",
    ):
        one_by_one[(1,)](out, torch.arange(9.0), 9)


@triton.jit
def carried(out, x, n, steps, BLOCK: tl.constexpr, IN_WHILE: tl.constexpr):
    i = tl.arange(0, BLOCK)
    source = x + i
    one = x
    total = tl.zeros((BLOCK,), tl.float32)
    if IN_WHILE:
        while n > 0:
            total += tl.load(source)  # carried by while
            # Not the same for all elements, so the loop carries the block of pointers.
            source += i * 0 + BLOCK
            n -= 1
    else:
        for _ in range(n):
            total += tl.load(source)  # carried by for
            source += i * 0 + BLOCK
    for _ in range(steps):
        total += tl.load(one)  # a carried scalar
        one += 1
    tl.store(out + i, total)


@pytest.mark.parametrize("in_while", [False, True])
def test_pointers_that_loops_carry(in_while):
    x, out = torch.ones(64), torch.zeros(32)
    carried[(1,)](out, x, 2, 64, BLOCK=32, IN_WHILE=in_while)
    assert (out == 66).all()
    mark = "carried by while" if in_while else "carried by for"
    with pytest.raises(OutOfBoundsError, match=rf"{line(mark)} goes to x\[64\] and ends 4 bytes after the end of"):
        carried[(1,)](out, x, 3, 0, BLOCK=32, IN_WHILE=in_while)
    with pytest.raises(
        OutOfBoundsError, match=rf"{line('a carried scalar')} goes to x\[64\] and ends 4 bytes after the end of"
    ):
        carried[(1,)](out, x, 2, 65, BLOCK=32, IN_WHILE=in_while)


@triton.jit
def chosen(out, a, b, n, which, BLOCK: tl.constexpr, HOW: tl.constexpr):
    i = tl.arange(0, BLOCK)
    if HOW == "where":
        source = tl.where(i % 2 == 0, a + i, b + i)
    elif HOW == "scalar where":
        source = tl.where(which == 0, a, b) + i
    else:
        source = a + i
        if which != 0:
            source = b + i
    tl.store(out + i, tl.load(source, mask=i < n))  # chosen


@pytest.mark.parametrize("how", ["where", "scalar where", "if"])
def test_pointers_chosen_among_arguments(how):
    a, b, out = torch.zeros(32), torch.ones(64), torch.zeros(64)
    chosen[(1,)](out, a, b, 32, 1, BLOCK=64, HOW=how)
    assert out[1] == 1
    with pytest.raises(
        OutOfBoundsError, match=rf"{line('chosen')} goes to a\[32\] and ends 4 bytes after the end of .*'a'.*128 bytes"
    ):
        chosen[(1,)](out, a, b, 64, 0, BLOCK=64, HOW=how)
    # Of both only every other element is loaded.
    first, size = (17, 8) if how == "where" else (16, 4)
    with pytest.raises(
        OutOfBoundsError,
        match=rf"{line('chosen')} goes to b\[{first}\] and ends {size} bytes after the end of .*'b'.*64 bytes",
    ):
        chosen[(1,)](out, torch.zeros(64), b[:16].clone(), 64, 1, BLOCK=64, HOW=how)


@triton.jit
def atomically(out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(out + i, 1, mask=i < n)  # adds
    tl.atomic_cas(out + n, 0, 1)  # swaps


def test_atomic_operations():
    out = torch.zeros(32, dtype=torch.int32)
    with pytest.raises(OutOfBoundsError, match=rf"the atomic operation at .*{line('swaps')} goes to out\[32\]"):
        atomically[(1,)](out, 32, BLOCK=64)
    assert (out == 1).all()
    with pytest.raises(OutOfBoundsError, match=rf"the atomic operation at .*{line('adds')} goes to out\[32\]"):
        atomically[(1,)](out, 33, BLOCK=64)


@triton.jit
def through_memory(out, addresses):
    p = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    tl.store(out + tl.program_id(0), tl.load(p))  # through memory


def test_pointers_from_memory_are_only_checked_for_null():
    x, out = torch.full((1,), 7.0), torch.zeros(2)
    through_memory[(1,)](out, torch.tensor([x.data_ptr()]))
    assert out[0] == 7
    with pytest.raises(OutOfBoundsError, match=rf"program \(1, 0, 0\).*{line('through memory')} goes to address 0x0"):
        through_memory[(2,)](out, torch.tensor([x.data_ptr(), 0]))


def test_other_arguments_than_tensors():
    x, out = torch.ones(32), torch.zeros(32)
    compiled = scale.warmup(out, x, 32, 0, BLOCK=32, grid=(1,))
    compiled[(1, 1, 1)](out.data_ptr(), x, 32, 0, 32)
    assert torch.equal(out, x)
    with pytest.raises(OutOfBoundsError, match=r"the store .* goes to out\[0\], but argument 'out' is None"):
        compiled[(1, 1, 1)](None, x, 32, 0, 32)
    with pytest.raises(OutOfBoundsError, match=r"the load .* goes to x\[0\], but argument 'x' is an empty tensor"):
        compiled[(1, 1, 1)](out, torch.zeros(0), 32, 0, 32)
    with pytest.raises(OutOfBoundsError, match=r"goes to out\[32\] and ends 4 bytes after the end of"):
        scale[(1,)](reinterpret(out.view(torch.int32), tl.float32), torch.ones(64), 64, 0, BLOCK=64)


@triton.jit
def of_a_tuple(outs, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(outs[1] + i, 1.0, mask=i < n)


def test_arguments_in_tuples_have_names():
    with pytest.raises(OutOfBoundsError, match=r"argument 'outs\[1\]'"):
        of_a_tuple[(1,)]((torch.zeros(99), torch.zeros(20)), 33, BLOCK=64)


# ---- Races


@triton.jit
def write_one(out, values, at):
    program = tl.program_id(0)
    tl.store(out + tl.load(at + program), tl.load(values + program))  # writes one


@pytest.mark.parametrize("dtype", DTYPES)
def test_programs_that_store_different_values(dtype):
    out, at = torch.zeros(8, dtype=dtype), torch.tensor([5, 1, 5])
    same = torch.tensor([3, 4, 3]).to(dtype)
    write_one[(3,)](out, same, at)
    assert out[5] == 3
    number = "2" if dtype == torch.int64 else r"2\.0"
    place = line("writes one")
    message = (
        rf"program \(2, 0, 0\): the store at .*{place} writes {number} to out\[5\], where program \(0, 0, 0\), store "
    )
    with pytest.raises(RaceError, match=message + rf"at .*{place}, wrote"):
        write_one[(3,)](out, torch.tensor([3, 4, 2]).to(dtype), at)
    write_one[(3,)](out, torch.tensor([3, 4, 2]).to(dtype), torch.tensor([5, 1, 6]))


@triton.jit
def write_block(out, x, stride, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    program = tl.program_id(0) + tl.num_programs(0) * tl.program_id(1)
    tl.store(out + program * stride + i, tl.load(x + program * BLOCK + i))  # writes a block


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_that_overlap(dtype):
    x, out = torch.arange(6 * 32).to(dtype), torch.zeros(6 * 32, dtype=dtype)
    write_block[(3, 2)](out, x, 32, BLOCK=32)
    assert torch.equal(out, x)
    place = line("writes a block")
    with pytest.raises(
        RaceError, match=rf"\(1, 0, 0\): .*{place} writes 32\S* to out\[31\].*\(0, 0, 0\).*{place}, wrote"
    ):
        write_block[(3, 2)](out, x, 31, BLOCK=32)
    with pytest.raises(RaceError, match=rf"\(0, 1, 0\): .*{place} writes .* to out\[0\].*\(2, 0, 0\).*{place}, wrote"):
        write_block[(3, 2)](
            torch.zeros_like(out), torch.cat([x[:32] * 0, x[:32] * 0, x[:32] * 0, x[32:128]]), 0, BLOCK=32
        )


@triton.jit
def write_two_widths(wide, narrow, first):
    if tl.program_id(0) == first:
        tl.store(wide + 1, 0x01020304)  # writes four bytes
    else:
        tl.store(narrow + 6, 2)  # writes the same byte
        tl.store(narrow + 5, 7)  # writes another byte


@pytest.mark.parametrize("first", [0, 1])
def test_widths_may_differ(first):
    out = torch.zeros(2, dtype=torch.int32)
    marks = ["writes four bytes", "writes another byte"]
    late, early = marks if first else marks[::-1]
    with pytest.raises(RaceError, match=rf"\(1, 0, 0\): the store at .*{line(late)} writes .*{line(early)}, wrote"):
        write_two_widths[(2,)](out, out.view(torch.int8), first)


@triton.jit
def neighbours(x, n, reads_first, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i)
    if reads_first:
        v += tl.load(x + i + 1, mask=i + 1 < n, other=0.0)  # reads the next
    else:
        v += tl.load(x + i - 1, mask=i > 0, other=0.0)  # reads the one before
    tl.store(x + i, v)  # writes its own


def test_loads_of_what_others_store():
    x = torch.ones(64)
    neighbours[(1,)](x, 64, 0, BLOCK=64)
    message = (
        rf"\(1, 0, 0\): the load at .*{line('reads the one before')} reads from x\[31\] what program \(0, 0, 0\), "
    )
    with pytest.raises(RaceError, match=message + rf"store at .*{line('writes its own')}, wrote"):
        neighbours[(2,)](x, 64, 0, BLOCK=32)


def test_stores_over_what_others_load():
    message = (
        rf"\(1, 0, 0\): the store at .*{line('writes its own')} writes 2.0 to x\[32\], where program \(0, 0, 0\), "
    )
    with pytest.raises(RaceError, match=message + rf"load at .*{line('reads the next')}, read 1.0"):
        neighbours[(2,)](torch.ones(64), 64, 1, BLOCK=32)
    # Nothing changes.
    neighbours[(2,)](torch.zeros(64), 64, 1, BLOCK=32)
    neighbours[(2,)](torch.zeros(64), 64, 0, BLOCK=32)


@triton.jit
def add_to(out, plain, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(out + i, tl.program_id(0) + 1)
    if tl.program_id(0) == plain:
        tl.store(out + i, 0)  # resets


def test_atomic_operations_do_not_race_with_each_other():
    out = torch.zeros(32, dtype=torch.int32)
    add_to[(4,)](out, -1, BLOCK=32)
    assert (out == 10).all()
    with pytest.raises(
        RaceError, match=rf"\(2, 0, 0\): the atomic .*which program \(1, 0, 0\), store at .*{line('resets')}"
    ):
        add_to[(4,)](out, 1, BLOCK=32)


@triton.jit
def sum_of_parts(out, parts, counter, x, BLOCK: tl.constexpr, SEM: tl.constexpr):
    program, number = tl.program_id(0), tl.num_programs(0)
    i = tl.arange(0, BLOCK)
    tl.store(parts + program, tl.sum(tl.load(x + program * BLOCK + i)))  # stores a part
    if tl.atomic_add(counter, 1, sem=SEM) == number - 1:
        total = 0.0
        for other in range(number):
            total += tl.load(parts + other)  # loads a part
        tl.store(out, total)
        tl.store(counter, 0)


@pytest.mark.parametrize("sem", ["acq_rel", "acquire", "release", "relaxed"])
def test_counters_put_programs_in_order(sem):
    x, out, parts, counter = torch.ones(96), torch.zeros(1), torch.zeros(3), torch.zeros(1, dtype=torch.int32)
    launch = lambda: sum_of_parts[(3,)](out, parts, counter, x, BLOCK=32, SEM=sem)  # noqa: E731
    if sem == "acq_rel":
        launch()
        assert out == 96
        assert counter == 0
    else:
        message = (
            rf"\(2, 0, 0\): the load at .*{line('loads a part')} reads from parts\[0\] what .*{line('stores a part')}"
        )
        with pytest.raises(RaceError, match=message):
            launch()


@triton.jit
def locked(total, lock, WAITS: tl.constexpr, LATE: tl.constexpr):
    if WAITS:
        while tl.atomic_cas(lock, 0, 1) == 1:
            pass
    v = tl.load(total)
    if not LATE:
        tl.store(total, v + 1)  # adds under the lock
    tl.atomic_xchg(lock, 0)
    if LATE:
        tl.store(total, v + 1)  # adds after the lock


def test_locks_put_programs_in_order():
    total, lock = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    locked[(5,)](total, lock, WAITS=True, LATE=False)
    assert total == 5
    with pytest.raises(
        RaceError, match=rf"reads from total\[0\] what program \(0, 0, 0\).*{line('adds after the lock')}"
    ):
        locked[(5,)](total, lock, WAITS=True, LATE=True)


@triton.jit
def many_reads(out, x, shared, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = tl.program_id(0) * BLOCK + i
    v = tl.load(x + at) + tl.load(shared + i)
    tl.store(out + at, v)
    tl.store(out + at, tl.load(out + at) + 1)


def test_shared_inputs_and_own_outputs():
    x, shared, out = torch.randn(40 * 64), torch.randn(64), torch.zeros(40 * 64)
    many_reads[(40,)](out, x, shared, BLOCK=64)
    torch.testing.assert_close(out, x + shared.repeat(40) + 1)


# ---- Poison


@triton.jit
def copy_or_use(out, x, n, BLOCK: tl.constexpr, HOW: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0)  # loads poison
    if HOW == "copy":
        v = tl.where(i % 2 == 0, tl.trans(tl.reshape(v, (4, BLOCK // 4))).reshape(BLOCK), v)
    elif HOW == "carry":
        for _ in range(n):
            v = tl.trans(tl.reshape(v, (2, BLOCK // 2))).reshape(BLOCK)
    elif HOW == "add":
        v = v + 1
    elif HOW == "compare":
        v = (v > 0).to(v.dtype)
    else:
        v = tl.max(v, 0)
    tl.store(out + i, v)


POISONABLE = [*DTYPES, torch.float16, torch.float64, torch.int32]


@pytest.mark.parametrize("dtype", POISONABLE)
@pytest.mark.parametrize("how", ["add", "compare", "max"])
def test_poison_that_is_used(dtype, how):
    x, out = torch.zeros(32, dtype=dtype), torch.zeros(32, dtype=dtype)
    poison_(x[7:])
    copy_or_use[(1,)](out, x, 7, BLOCK=32, HOW=how)
    message = rf"program \(0, 0, 0\): the load at .*{line('loads poison')} uses x\[7\], which is poisoned"
    with pytest.raises(PoisonedReadError, match=message):
        copy_or_use[(1,)](out, x, 8, BLOCK=32, HOW=how)
    x[7:] = float("nan") if dtype.is_floating_point else -1
    copy_or_use[(1,)](out, x, 32, BLOCK=32, HOW=how)


@pytest.mark.parametrize("dtype", POISONABLE)
@pytest.mark.parametrize("how", ["copy", "carry"])
def test_poison_that_is_copied(dtype, how):
    x, out = poison_(torch.zeros(32, dtype=dtype)), torch.zeros(32, dtype=dtype)
    copy_or_use[(1,)](out, x, 32, BLOCK=32, HOW=how)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(out.view(bits), x.view(bits))
    with pytest.raises(PoisonedReadError):
        copy_or_use[(1,)](x, out, 32, BLOCK=32, HOW="add")


@triton.jit
def scalar_poison(out, x, USES: tl.constexpr):
    v = tl.load(x)  # loads a scalar
    tl.store(out, v * 2 if USES else v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_poisoned_scalars(dtype):
    x, out = poison_(torch.zeros(1, dtype=dtype)), torch.zeros(1, dtype=dtype)
    scalar_poison[(1,)](out, x, USES=False)
    with pytest.raises(PoisonedReadError, match=rf"{line('loads a scalar')} uses x\[0\]"):
        scalar_poison[(1,)](out, x, USES=True)
    with pytest.raises(PoisonedReadError, match=rf"{line('loads a scalar')} uses x\[0\]"):
        scalar_poison[(1,)](x, out, USES=True)


@triton.jit
def write_then_read(x, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, 1.0)
    tl.store(x + i, tl.load(x + i) + 1)
    tl.atomic_add(x + BLOCK, 1.0)  # adds to poison


def test_written_memory_is_no_poison_and_atomic_updates_read():
    x = poison_(torch.zeros(64))
    with pytest.raises(PoisonedReadError, match=rf"the atomic operation at .*{line('adds to poison')} uses x\[32\]"):
        write_then_read[(1,)](x, BLOCK=32)
    assert (x[:32] == 2).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_poison_is_nan_and_fills_views_only(dtype):
    x = torch.zeros(4, 6, dtype=dtype)
    assert poison_(x.t()[1:3]).isnan().all()
    assert x.isnan().sum() == 8
    assert x[:, 0].eq(0).all()
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    computed = torch.full((1,), torch.inf, dtype=dtype) - torch.inf
    assert not (x.view(bits)[:, 1] == computed.view(bits)).any()
    assert not (x.view(bits)[:, 1] == torch.full((1,), torch.nan, dtype=dtype).view(bits)).any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.bool])
def test_types_without_bits_to_spare_cannot_be_poisoned(dtype):
    with pytest.raises(TypeError, match=rf"{re.escape(str(dtype))} cannot be poisoned.*float16, .*int64"):
        poison_(torch.zeros(3, dtype=dtype))


def test_all_errors_have_a_common_parent():
    assert all(issubclass(error, CheckError) for error in (OutOfBoundsError, RaceError, PoisonedReadError))


def test_without_checking_mode_nothing_is_reported(monkeypatch):
    monkeypatch.setenv("CBTRITON_CPU_CHECK", "0")
    x, out = poison_(torch.zeros(1)), torch.zeros(1)
    kernel = triton.jit(scalar_poison.fn)
    kernel[(1,)](out, x, USES=True)
    assert out.isnan().all()
