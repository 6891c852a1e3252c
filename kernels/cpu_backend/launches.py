"""Launches with less ado than Triton's own: for small kernels, finding the compiled code takes longer than running it.

Triton binds arguments by name, asks knobs and computes a key from strings, 40 µs a launch. Here a key is made of what
the compiled code can depend on at most, and found in one dictionary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

# Compiled kernels by everything that their code may depend on. Grows as Triton's own table of them does.
_compiled: dict[tuple, Any] = {}


def launch_compiled(
    kernel: JITFunction, grid: tuple[int, ...], args: tuple, options: Mapping[str, Any], constants: Mapping[str, Any]
) -> None:
    """Runs `kernel` on `grid` programs. The first launch of its kind, and launches that hooks watch, go through Triton.

    Args:
        kernel: What to run.
        grid: Number of programs per axis.
        args: The kernel's first parameters, in order: tensors, numbers and None.
        options: Options of the compiler.
        constants: All other parameters by name.
    """
    # The function, because a kernel's own hash is that of its source.
    key = (kernel.fn, *options.items(), *map(_kind, args), *constants.items())
    compiled = _compiled.get(key)
    if compiled is None or knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
        _compiled[key] = kernel[grid](*args, **options, **constants)
        return
    rest = [constants[name] for name in kernel.arg_names[len(args) :]]
    sides = (*grid, 1, 1)[:3]
    compiled.run(*sides, 0, compiled.function, compiled.packed_metadata, None, None, None, *args, *rest)


def _kind(arg: Any) -> Any:
    """What the code may depend on of an argument: Triton makes a constant of 1, and chooses types by size."""
    if isinstance(arg, Tensor):
        return arg.dtype
    if isinstance(arg, int):
        return bool if isinstance(arg, bool) else (arg == 1, -(2**31) <= arg < 2**31, arg < 2**63)
    return type(arg)
