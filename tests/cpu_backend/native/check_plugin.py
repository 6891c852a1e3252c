"""The backend in Triton: cache, errors, hooks, autotuning, threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

from cbtriton.kernels.cpu_backend.driver import CPUDriver
from cbtriton.kernels.cpu_backend.errors import CPUBackendError, UnsupportedError


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


def test_what_cannot_be_repaired_is_compiled_by_the_next_process(own_cache):
    run_scale(make_scale())
    for kind in ("so", "cpp"):
        next(own_cache.glob(f"*/scale.{kind}")).write_bytes(b"damaged")
    with pytest.raises(CPUBackendError, match=r"'scale'.*damaged, and so is its source"):
        run_scale(make_scale())
    run_scale(make_scale())


PROCESS = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("kernels_of_processes", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print("ready", flush=True)
sys.stdin.readline()
for size in (100, 300, 1, 128):
    module.run_scale(module.make_scale(), size)
"""


def test_processes_may_compile_the_same_kernel_into_an_empty_cache(own_cache):
    environment = os.environ | {"TRITON_CACHE_DIR": str(own_cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROCESS, __file__]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=environment, **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert len(list(own_cache.glob("*/scale.so"))) >= 2  # several specialisations, each of them once
    assert not list(own_cache.glob("*/*tmp*"))


def test_the_second_compilation_comes_from_the_cache(own_cache):
    run_scale(make_scale())
    (binary,) = own_cache.glob("*/scale.so")
    before = binary.stat().st_mtime_ns
    run_scale(make_scale())
    assert binary.stat().st_mtime_ns == before


@triton.jit
def _row_sums(out, x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + tl.program_id(0) * n + i, mask=i < n, other=0.0)
    tl.store(out + tl.program_id(0), tl.sum(v, 0))


def run_row_sums(seed):
    x, out = torch.arange(60.0).reshape(4, 15) + seed, torch.zeros(4)
    _row_sums[(4,)](out, x, 15, BLOCK=16)
    assert torch.equal(out, x.sum(1))


def test_many_threads_may_compile_and_launch():
    kernel = make_scale()
    barrier = threading.Barrier(8)

    def run(number):
        barrier.wait()
        for turn in range(20):
            if (number + turn) % 2:
                run_scale(kernel, 100 + number % 3 * 200)
            else:
                run_row_sums(100 * number + turn)

    before = torch.get_num_threads()
    torch.set_num_threads(2)  # programs may run in parallel within a launch, too
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(8)))
    torch.set_num_threads(before)


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


@triton.autotune([triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 128})], key=["n"], reset_to_zero=["out"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def _added_in_place(out, x, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(out + i, tl.load(out + i) + tl.load(x + i))
    else:
        tl.store(out + i, tl.load(out + i, mask=i < n) + tl.load(x + i, mask=i < n), mask=i < n)


@pytest.mark.parametrize("size", [256, 200])
def test_tuned_kernels_may_change_their_arguments(size):
    x, out = torch.arange(float(size)), torch.zeros(size)
    _added_in_place[lambda meta: (triton.cdiv(size, meta["BLOCK"]),)](out, x, size)
    assert torch.equal(out, x)
    assert _added_in_place.best_config.kwargs["BLOCK"] in (32, 128)


@triton.autotune([triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def _negated(out, x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, -tl.load(x + i, mask=i < n), mask=i < n)


@torch.library.triton_op("cpu_backend_tests::negate", mutates_args={"out"})
def _negate(out: torch.Tensor, x: torch.Tensor) -> None:
    n = x.numel()
    torch.library.wrap_triton(_negated)[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](out, x, n)


@pytest.mark.parametrize("dynamic", [False, True])
def test_operations_made_of_kernels_in_compiled_graphs(dynamic):
    torch.compiler.reset()

    @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    def twice(out, x):
        _negate(out, x * 2)
        return out + 1

    for size in (300, 200):
        x, out = torch.arange(float(size)), torch.zeros(size)
        _negate(out, x)
        assert torch.equal(out, -x)
        assert torch.equal(twice(out, x), 1 - 2 * x)
        assert torch.equal(out, -2 * x)


def test_the_driver_is_inactive_in_the_interpreter(monkeypatch):
    assert CPUDriver.is_active()
    monkeypatch.setattr(knobs.runtime, "interpret", True)
    assert not CPUDriver.is_active()


def test_the_compiler_can_be_chosen():
    assert os.environ.get("CXX") is None or Path(os.environ["CXX"]).name
