"""Launches with less ado than Triton's own: for small kernels, finding the compiled code takes longer than running it.

Triton binds arguments by name, asks knobs and computes a key from strings, 40 µs a launch. Here a key is made of what
the compiled code can depend on at most, and found in one dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

# By everything that code may depend on: how it is called, the code, and the constants in the order of the parameters.
# Grows as Triton's own table of kernels does.
_compiled: dict[tuple, tuple[Callable, Any, tuple]] = {}


def launch_compiled(
    kernel: JITFunction, grid: tuple[int, ...], args: tuple, options: Mapping[str, Any], constants: Mapping[str, Any]
) -> None:
    """Runs `kernel` on `grid` programs. The first launch of its kind, and launches that hooks watch, go through Triton.

    Args:
        kernel: What to run.
        grid: Number of programs per axis; none is 0.
        args: The kernel's first parameters, in order: tensors, numbers and None.
        options: Options of the compiler.
        constants: All other parameters by name.
    """
    # The function, because a kernel's own hash is that of its source. No calls for the frequent kinds of arguments.
    kinds = [x.dtype if isinstance(x, Tensor) else _kind(x) if type(x) is int else type(x) for x in args]
    key = (kernel.fn, *options, *options.values(), *kinds, *constants, *constants.values())
    found = _compiled.get(key)
    hooks = knobs.runtime
    if found is None or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        compiled = kernel[grid](*args, **options, **constants)
        rest = tuple(constants[name] for name in kernel.arg_names[len(args) :])
        _compiled[key] = compiled.run.run, compiled.function, rest
        return
    run, function, rest = found
    run(function, (*grid, 1, 1)[:3], args + rest)


def _kind(number: int) -> int:
    """What code may depend on of an integer: Triton makes a constant of 1, and chooses types by size."""
    if number == 1:
        return 1
    return 2 if -(2**31) <= number < 2**31 else 3 if number < 2**63 else 4
