"""The backend in Triton: cache, errors, hooks, autotuning, threads."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

from cbtriton.kernels.cpu_backend.driver import CPUDriver
from cbtriton.kernels.cpu_backend.errors import UnsupportedError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    return tmp_path


def make_scale():
    @triton.jit
    def scale(out, x, n, factor, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i, mask=i < n) * factor, mask=i < n)

    return scale


def run_scale(kernel, size=300):
    x, out = torch.arange(float(size)), torch.zeros(size)
    kernel[(triton.cdiv(size, 128),)](out, x, size, 3.0, BLOCK=128)
    assert torch.equal(out, x * 3)


def test_a_damaged_binary_is_compiled_again(own_cache):
    run_scale(make_scale())
    (binary,) = own_cache.glob("*/scale.so")
    whole = binary.read_bytes()
    for damage in (b"", whole[: len(whole) // 2], whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]):
        binary.write_bytes(damage)
        run_scale(make_scale())
        assert binary.read_bytes()[-32:] == whole[-32:] or len(binary.read_bytes()) > 32


def test_the_second_compilation_comes_from_the_cache(own_cache):
    run_scale(make_scale())
    (binary,) = own_cache.glob("*/scale.so")
    before = binary.stat().st_mtime_ns
    run_scale(make_scale())
    assert binary.stat().st_mtime_ns == before


def test_many_threads_may_compile_and_launch():
    kernel = make_scale()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: run_scale(kernel, 100 + i % 3 * 200), range(12)))


@triton.jit
def _assembly(out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [i], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(out + i, v)


def test_unknown_operations_are_named():
    with pytest.raises(UnsupportedError, match=r"tt.elementwise_inline_asm.*_assembly.*check_plugin.py:\d+.*INTERPRET"):
        _assembly[(1,)](torch.zeros(32, dtype=torch.int32), BLOCK=32)


def test_hooks_and_autotuning():
    calls = []
    configs = [triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 256})]

    @triton.autotune(configs, key=["n"])
    @triton.heuristics({"EVEN": lambda args: args["n"] % 256 == 0})
    @triton.jit
    def tuned(out, x, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i, mask=i < n) + (1.0 if EVEN else 2.0), mask=i < n)

    x, out = torch.arange(1000.0), torch.zeros(1000)
    hook = calls.append
    knobs.runtime.launch_enter_hook.add(hook)
    tuned[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](out, x, 1000)
    knobs.runtime.launch_enter_hook.remove(hook)
    assert torch.equal(out, x + 2)
    assert calls


def test_the_driver_is_inactive_in_the_interpreter(monkeypatch):
    assert CPUDriver.is_active()
    monkeypatch.setattr(knobs.runtime, "interpret", True)
    assert not CPUDriver.is_active()


def test_the_compiler_can_be_chosen():
    assert os.environ.get("CXX") is None or Path(os.environ["CXX"]).name
