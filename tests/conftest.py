"""What tests of several folders share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def load(name: str) -> ModuleType:
    """A module of this folder; the tests are no package, so it is loaded by its path."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def simulation() -> ModuleType:
    """The module `simulated_engine.py`."""
    return load("simulated_engine")


@pytest.fixture(scope="session")
def recorded_graphs() -> ModuleType:
    """The module `recorded_graphs.py`."""
    return load("recorded_graphs")


@pytest.fixture(scope="session")
def families() -> ModuleType:
    """The module `families.py`."""
    return load("families")
