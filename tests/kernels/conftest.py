"""Finds every implementation of a slot, so that a new file in `kernels/<slot>/` is tested without an edit here.

Triton kernels run under Triton's interpreter, which must be chosen before they are imported. With a GPU there is no
interpreter: the same tests, marked `gpu`, run everything on the device, and the references also on the CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Each worker has a core of its own.
    torch.set_num_threads(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs each test that asks for `implementation` with every module of the slot named in its file's `SLOT`.

    Tests that ask for `shape` and `dtype` run with every shape of `attention_cases.py`.
    """
    if "implementation" in metafunc.fixturenames:
        metafunc.parametrize("implementation", implementations(metafunc.module.SLOT))
    if "shape" in metafunc.fixturenames:
        cases = load_beside("attention_cases")
        metafunc.parametrize(
            ("shape", "dtype"),
            [
                pytest.param(shape, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
                for name, shape in cases.SHAPES.items()
                for dtype in cases.dtypes_of(name)
            ],
        )


def implementations(slot: str) -> list:
    """Parameters for each implementation on each device that it can run on here."""
    package = importlib.import_module(f"cbtriton.kernels.{slot}")
    uses_triton = importlib.import_module("cbtriton.kernels._launch").uses_triton
    parameters = []
    for name in sorted(module.name for module in pkgutil.iter_modules(package.__path__)):
        module = importlib.import_module(f"{package.__name__}.{name}")
        if not (HAS_GPU and uses_triton(module)):
            parameters.append(pytest.param(module, id=name))
        if HAS_GPU:
            parameters.append(pytest.param(OnDevice(module), id=f"{name}-cuda", marks=pytest.mark.gpu))
    return parameters


class OnDevice:
    """An implementation that takes and gives CPU tensors and computes on the GPU."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> object:
        attribute = getattr(self._module, name)
        return FunctionOnDevice(attribute) if callable(attribute) else attribute


class FunctionOnDevice:
    """Moves arguments to the GPU, and back what was written and returned."""

    def __init__(self, function: object) -> None:
        self._function = function

    def __call__(self, *args: object) -> object:
        moved = [on_gpu(arg) if isinstance(arg, Tensor) else arg for arg in args]
        result = self._function(*moved)
        if hasattr(self._function, "op"):
            for argument, host, device in zip(self._function.op._schema.arguments, args, moved, strict=True):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    host.copy_(device)
        if isinstance(result, tuple):
            return tuple(part.cpu() for part in result)
        return result.cpu() if isinstance(result, Tensor) else result

    def check(self, args: tuple) -> None:
        """`torch.library.opcheck` on the GPU."""
        torch.library.opcheck(self._function.op, tuple(on_gpu(a) if isinstance(a, Tensor) else a for a in args))


def on_gpu(tensor: Tensor) -> Tensor:
    """A copy with the same strides: views of larger tensors stay views."""
    if not tensor.numel():
        return tensor.cuda()
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).cuda()
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.fixture
def interpreted() -> None:
    """For tests that run Triton kernels on CPU tensors; on a GPU other tests show the same."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's interpreter is off")


@pytest.fixture
def opcheck() -> object:
    """Holds an operator to what it declares, on its device."""

    def check(function: object, args: tuple) -> None:
        if isinstance(function, FunctionOnDevice):
            function.check(args)
        else:
            torch.library.opcheck(function.op, args)

    return check


_ran: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Counts the cases that passed, by slot and by implementation where a test runs them all."""
    file, _, test = report.nodeid.partition("::")
    if report.when == "call" and report.passed and "tests/kernels/" in f"/{file}":
        slot = Path(file).stem.removeprefix("test_")
        parts = test.partition("[")[2].rstrip("]").split("-")
        folder = Path(__file__).parents[2] / "kernels" / slot
        names = [part for part in parts if (folder / f"{part}.py").exists()]
        _ran[" ".join([slot, *names])] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the counts."""
    if _ran:
        terminalreporter.write_line("kernel cases passed: " + ", ".join(f"{k} {n}" for k, n in sorted(_ran.items())))


def load_beside(name: str) -> ModuleType:
    """Imports a helper of this folder, which is no package."""
    spec = importlib.util.spec_from_file_location(f"kernels_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def oracles() -> ModuleType:
    """The naive fp64 definitions in `oracles.py`."""
    return load_beside("oracles")


@pytest.fixture(scope="session")
def attention_cases() -> ModuleType:
    """The steps in `attention_cases.py`."""
    return load_beside("attention_cases")
