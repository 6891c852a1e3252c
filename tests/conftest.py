"""What tests of several folders share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def simulation() -> ModuleType:
    """The module `simulated_engine.py`; the tests are no package, so it is loaded by its path."""
    spec = importlib.util.spec_from_file_location("simulated_engine", Path(__file__).with_name("simulated_engine.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
