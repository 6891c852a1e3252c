"""Finds every implementation of a slot, so that a new file in `kernels/<slot>/` is tested without an edit here."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs each test that asks for `implementation` with every module of the slot named in its file's `SLOT`.

    Tests that ask for `shape` run with every shape of `attention_cases.py`.
    """
    if "implementation" in metafunc.fixturenames:
        package = importlib.import_module(f"cbtriton.kernels.{metafunc.module.SLOT}")
        names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
        modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
        metafunc.parametrize("implementation", modules, ids=names)
    if "shape" in metafunc.fixturenames:
        shapes = load_beside("attention_cases").SHAPES
        metafunc.parametrize("shape", shapes.values(), ids=shapes.keys())


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
