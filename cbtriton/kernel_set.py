"""Chooses one implementation per kernel slot, once, and holds the callables.

An implementation is a module `cbtriton.kernels.<slot>.<name>` with a function of the slot's name; attention modules
also have a `plan` function, modules of `sample` also `process`, `truncate` and
`token_logprobs`. A new file in the folder is found
without an edit here.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from cbtriton.config import KernelConfig

REFERENCE = "reference"
_logger = logging.getLogger(__name__)

# What "triton", and "auto" where it runs natively, mean for each slot.
TRITON = {
    "prepare_inputs": "per_row",
    "kv_write": "vectorized",
    "varlen_attention": "flash",
    "decode_attention": "split_kv",
    "sample": "fused",
    "block_copy": "vectorized",
}
# A CPU has fewer threads than a step has rows and heads: nothing is gained by splitting rows, and merging costs.
ON_CPU = {"decode_attention": "single_pass"}


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
    process: Callable[..., Any]
    truncate: Callable[..., Any]
    token_logprobs: Callable[..., Any]
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
        config: What was asked for. `auto` takes Triton kernels where they can run natively; else the reference, after
            saying in the log what is missing.
        device: Where the kernels will run.

    Raises:
        ValueError: A named implementation does not exist.
        RuntimeError: A Triton kernel was asked for by name, or all of them by `triton`, where none can run.
    """
    default = _default(config.default, device)
    names = {slot: _choose(slot, asked, default) for slot, asked in config.slots().items()}
    modules = {slot: _module(slot, name) for slot, name in names.items()}
    launching = _launching()
    if launching is not None and any(map(launching.uses_triton, modules.values())):
        launching.target_of(device)
    kernels = {slot: _function(module, slot) for slot, module in modules.items()}
    return KernelSet(
        names=tuple(names.items()),
        varlen_plan=_function(modules["varlen_attention"], "plan"),
        decode_plan=_function(modules["decode_attention"], "plan"),
        process=_function(modules["sample"], "process"),
        truncate=_function(modules["sample"], "truncate"),
        token_logprobs=_function(modules["sample"], "token_logprobs"),
        **kernels,
    )


def _default(asked: str, device: torch.device) -> Mapping[str, str]:
    """The implementation of each slot that is not named."""
    launching = _launching()
    if asked == "auto":
        why_not = launching.why_not_native(device) if launching else "the package triton is not installed"
        if why_not is not None:
            _logger.warning("kernels=auto runs the torch references on %s: %s", device, why_not)
            asked = REFERENCE
    if asked == REFERENCE:
        return dict.fromkeys(TRITON, REFERENCE)
    is_cpu = launching is not None and launching.native_target(device) == launching.CPU
    return TRITON | ON_CPU if is_cpu else TRITON


def _choose(slot: str, asked: str | None, default: Mapping[str, str]) -> str:
    if asked is None:
        return default[slot]
    available = implementations(slot)
    if asked not in available:
        raise ValueError(f"kernel slot {slot} has no implementation {asked!r}; available: {', '.join(available)}")
    return asked


def _launching() -> ModuleType | None:
    """What launches Triton kernels. Triton has no wheels for some systems, and the references do without it."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("cbtriton.kernels._launch")


def _module(slot: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(f"cbtriton.kernels.{slot}.{name}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise RuntimeError(
            f"kernel {slot}/{name} needs the package triton, which is not installed; choose kernels=reference"
        ) from error


def _function(module: ModuleType, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if function is None:
        raise ValueError(f"{module.__name__} must define a function {name!r}; see kernels/README.md")
    return function
