"""How Triton kernels are launched: on which target, with which options, and how a launch is recorded instead.

Launchers of all slots go through `launch`. It states every compile option that Triton would otherwise choose by its
version, and it is where tools that compile ahead of time see exactly what the engine would run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton import knobs
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from cbtriton.kernels.cpu_backend.availability import why_unavailable
from cbtriton.kernels.cpu_backend.launches import launch_compiled

Choice = TypeVar("Choice")

INTERPRETER = "interpreter"
CPU = "cpu"
# Read once, as Triton does when it decorates kernels: asking at every launch would cost more than small kernels do.
INTERPRETED = bool(knobs.runtime.interpret)
# Launch tables have an entry for each of these targets, for `CPU` and for the interpreter; a GPU in between takes that
# of the nearest older one of its vendor. The numbers are the processors of A100, H100 and H200, B200, MI300X.
_RECORDED_PROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "gfx942": 304}
# Few, so that programs of persistent kernels come around to a second and third work item in small tests.
_INTERPRETER_PROCESSORS = 7


@dataclass(frozen=True, slots=True)
class RecordedLaunch:
    """One launch that was recorded instead of run.

    Attributes:
        kernel: The `@triton.jit` function.
        grid: Number of programs per axis.
        arguments: All parameters by name, constants included.
        num_warps: Warps per program.
        num_stages: Buffers of pipelined loops.
        enable_fp_fusion: Whether the compiler may contract products and sums.
    """

    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    num_warps: int
    num_stages: int
    enable_fp_fusion: bool


@dataclass(frozen=True, slots=True)
class _Recording:
    target: str
    launches: list[RecordedLaunch]


_recording: ContextVar[_Recording | None] = ContextVar("recording", default=None)


@contextmanager
def record_launches(target: str) -> Iterator[list[RecordedLaunch]]:
    """Within the context, launchers choose their launches for `target`, and `launch` notes them and runs nothing.

    Raises:
        ValueError: `target` is none that can be compiled for.
        RuntimeError: Kernels were decorated for the interpreter in this process, and cannot be compiled.
    """
    if target not in _RECORDED_PROCESSORS:
        raise ValueError(f"target must be one of {', '.join(_RECORDED_PROCESSORS)}, got {target!r}")
    if INTERPRETED:
        raise RuntimeError("launches cannot be recorded with TRITON_INTERPRET set; unset it and start a new process")
    launches: list[RecordedLaunch] = []
    token = _recording.set(_Recording(target, launches))
    try:
        yield launches
    finally:
        _recording.reset(token)


def ceil_div(number: int, by: int) -> int:
    """`number / by` rounded up. Triton's own `cdiv` costs a launcher 15 µs a call."""
    return -(-number // by)


def power_of_two(number: int) -> int:
    """The least power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


def pick(entries: Mapping[int, Choice], size: int, what: str) -> Choice:
    """The entry of a launch table with the least key that is not below `size`.

    Raises:
        ValueError: `size` is above all of them; names `what` it is the size of.
    """
    for limit in sorted(entries):
        if size <= limit:
            return entries[limit]
    raise ValueError(f"{what} must be at most {max(entries)} for this kernel, got {size}; choose another kernel")


def uses_triton(module: ModuleType) -> bool:
    """Whether an implementation's module defines Triton kernels, and so needs a target to run on."""
    return any(
        isinstance(value, JITFunction | InterpretedFunction) and value.fn.__module__ == module.__name__
        for value in vars(module).values()
    )


def native_target(device: torch.device) -> str | None:
    """The target that runs kernels on `device` at full speed; None where there is none, see `why_not_native`."""
    return None if INTERPRETED else _native_target(device)


@cache
def _native_target(device: torch.device) -> str | None:
    if why_not_native(device) is not None:
        return None
    return CPU if device.type == "cpu" else _gpu_target(_index(device))


def why_not_native(device: torch.device) -> str | None:
    """What keeps kernels from running on `device` at full speed; None where nothing does."""
    if INTERPRETED:
        return "TRITON_INTERPRET is set"
    if device.type == "cuda":
        return None
    return why_unavailable() if device.type == "cpu" else f"Triton has no backend for {device.type} here"


def target_of(device: torch.device) -> str:
    """The target that runs kernels on tensors of `device`.

    Raises:
        RuntimeError: Nothing here can run Triton kernels on this device.
    """
    if (recording := _recording.get()) is not None:
        return recording.target
    if INTERPRETED:
        return INTERPRETER
    target = _native_target(device)
    if target is None:
        raise RuntimeError(
            f"no Triton target for tensors on {device}: {why_not_native(device)}. Mend that, or choose "
            "kernels=reference; TRITON_INTERPRET=1 set before Python starts also runs them (very slow, for tests)"
        )
    return target


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()


@cache
def _gpu_target(index: int) -> str:
    if torch.version.hip is not None:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(index)
    return "sm_100" if major >= 10 else "sm_90" if major == 9 else "sm_80"


def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors, compute units or threads of the target: what sizes a persistent kernel's grid."""
    if (recording := _recording.get()) is not None:
        return _RECORDED_PROCESSORS[recording.target]
    if INTERPRETED:
        return _INTERPRETER_PROCESSORS
    if device.type == "cpu":
        return torch.get_num_threads()
    return _gpu_processors(_index(device))


@cache
def _gpu_processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int,
    num_stages: int = 1,
    enable_fp_fusion: bool = True,
    **constants: Any,
) -> None:
    """Runs `kernel` on `grid` programs; an empty grid runs nothing.

    Args:
        kernel: A function decorated with `@triton.jit`.
        grid: Number of programs per axis. Axes 1 and 2 are limited to 65,535.
        args: The kernel's first parameters, in order.
        num_warps: Warps per program.
        num_stages: Buffers of pipelined loops.
        enable_fp_fusion: Whether products and sums may be contracted. Explicit, because Triton's default changes
            with its version, and the last bits of results with it.
        constants: The remaining parameters by name.
    """
    if 0 in grid:
        return
    recording = _recording.get()
    if recording is not None:
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | constants
        recording.launches.append(RecordedLaunch(kernel, grid, arguments, num_warps, num_stages, enable_fp_fusion))
        return
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": enable_fp_fusion}
    if isinstance(args[0], Tensor) and args[0].is_cpu and isinstance(kernel, JITFunction):
        launch_compiled(kernel, grid, args, options, constants)
    else:
        kernel[grid](*args, **options, **constants)
