"""Chooses one implementation per kernel slot, once, and holds the callables.

An implementation is a module `cbtriton.kernels.<slot>.<name>` with a function of the slot's name; attention modules
also have a `plan` function. A new file in the folder is found without an edit here.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from cbtriton.config import KernelConfig

REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class KernelSet:
    """The chosen kernels. Their signatures are documented in `kernels/README.md`.

    Attributes:
        names: (slot, implementation) pairs, for printing and result files.
    """

    names: tuple[tuple[str, str], ...]
    prepare_inputs: Callable[..., Any]
    kv_write: Callable[..., Any]
    varlen_attention: Callable[..., Any]
    varlen_plan: Callable[..., Any]
    decode_attention: Callable[..., Any]
    decode_plan: Callable[..., Any]
    sample: Callable[..., Any]
    block_copy: Callable[..., Any]

    def describe(self) -> str:
        """One line for the log."""
        return ", ".join(f"{slot}={name}" for slot, name in self.names)


def implementations(slot: str) -> tuple[str, ...]:
    """Names of the implementations of a slot: the modules in its folder."""
    package = importlib.import_module(f"cbtriton.kernels.{slot}")
    return tuple(sorted(module.name for module in pkgutil.iter_modules(package.__path__)))


def choose_kernels(config: KernelConfig) -> KernelSet:
    """Resolves a `KernelConfig` to callables.

    Args:
        config: What was asked for. `auto` takes Triton kernels where they can run natively, else the reference.

    Raises:
        ValueError: A named implementation does not exist, or Triton was asked for where a slot has none.
    """
    names = {slot: _choose(slot, asked, config.default) for slot, asked in config.slots().items()}
    modules = {slot: importlib.import_module(f"cbtriton.kernels.{slot}.{name}") for slot, name in names.items()}
    kernels = {slot: _function(module, slot) for slot, module in modules.items()}
    return KernelSet(
        names=tuple(names.items()),
        varlen_plan=_function(modules["varlen_attention"], "plan"),
        decode_plan=_function(modules["decode_attention"], "plan"),
        **kernels,
    )


def _choose(slot: str, asked: str | None, default: str) -> str:
    available = implementations(slot)
    if asked is not None:
        if asked not in available:
            raise ValueError(f"kernel slot {slot} has no implementation {asked!r}; available: {', '.join(available)}")
        return asked
    if default == "triton":
        raise ValueError(
            f"kernels.default is 'triton', but slot {slot} has no Triton implementation in this version "
            f"(available: {', '.join(available)}); use 'auto' or 'reference'"
        )
    return REFERENCE


def _function(module: ModuleType, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if function is None:
        raise ValueError(f"{module.__name__} must define a function {name!r}; see kernels/README.md")
    return function
