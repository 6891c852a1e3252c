"""The files here run in a process of their own, see `test_native.py`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import triton


@pytest.fixture(scope="module")
def interpreter(request: pytest.FixtureRequest) -> Iterator:
    """Triton's interpreter, for the kernels of the test's own file; loaded by path, since this is no package."""
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9):
        pytest.skip("older interpreters round products twice and fail on unsigned numbers, bits, loops and histograms")
    spec = importlib.util.spec_from_file_location(
        "interpreter_process", Path(__file__).with_name("interpreter_process.py")
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    process = module.Interpreter(Path(request.node.path))
    yield process
    process.close()
