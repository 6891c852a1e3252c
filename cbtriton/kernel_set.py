"""Chooses one implementation per kernel slot, once, and holds the callables.

An implementation is a module `cbtriton.kernels.<slot>.<name>` with a function of the slot's name; attention modules
also have a `plan` function. A new file in the folder is found without an edit here.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from cbtriton.config import KernelConfig

REFERENCE = "reference"
# What "triton", and "auto" where it runs natively, mean for each slot.
TRITON = {
    "prepare_inputs": "per_row",
    "kv_write": "vectorized",
    "varlen_attention": "flash",
    "decode_attention": "split_kv",
    "sample": "fused",
    "block_copy": "vectorized",
}


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


def choose_kernels(config: KernelConfig, device: torch.device) -> KernelSet:
    """Resolves a `KernelConfig` to callables.

    Args:
        config: What was asked for. `auto` takes Triton kernels where they can run natively, else the reference.
        device: Where the kernels will run.

    Raises:
        ValueError: A named implementation does not exist.
        RuntimeError: A Triton kernel was asked for by name, or all of them by `triton`, where none can run.
    """
    names = {slot: _choose(slot, asked, config.default, device) for slot, asked in config.slots().items()}
    modules = {slot: importlib.import_module(f"cbtriton.kernels.{slot}.{name}") for slot, name in names.items()}
    if _needs_triton(modules.values()):
        _triton_target(device, required=True)
    kernels = {slot: _function(module, slot) for slot, module in modules.items()}
    return KernelSet(
        names=tuple(names.items()),
        varlen_plan=_function(modules["varlen_attention"], "plan"),
        decode_plan=_function(modules["decode_attention"], "plan"),
        **kernels,
    )


def _choose(slot: str, asked: str | None, default: str, device: torch.device) -> str:
    if asked is not None:
        available = implementations(slot)
        if asked not in available:
            raise ValueError(f"kernel slot {slot} has no implementation {asked!r}; available: {', '.join(available)}")
        return asked
    if default == "triton" or (default == "auto" and _triton_target(device, required=False) is not None):
        return TRITON[slot]
    return REFERENCE


def _triton_target(device: torch.device, required: bool) -> str | None:
    """What runs Triton kernels on `device`: natively, or if they are `required` by the interpreter where that is on."""
    # Triton has no wheels for some systems, and the references do without it.
    if importlib.util.find_spec("triton") is None:
        if required:
            raise RuntimeError(
                "these kernels need the package triton, which is not installed; choose kernels=reference"
            )
        return None
    launching = importlib.import_module("cbtriton.kernels._launch")
    return launching.target_of(device) if required else launching.native_target(device)


def _needs_triton(modules: Iterable[ModuleType]) -> bool:
    return importlib.util.find_spec("triton") is not None and any(
        map(importlib.import_module("cbtriton.kernels._launch").uses_triton, modules)
    )


def _function(module: ModuleType, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if function is None:
        raise ValueError(f"{module.__name__} must define a function {name!r}; see kernels/README.md")
    return function
