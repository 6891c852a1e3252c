"""Triton's interpreter in a process of its own: it must be chosen before Triton is imported.

As a script it serves: for every request on standard input, a kernel of the given file is run, and the arguments as
they are afterwards are written to standard output.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch


class InterpreterError(RuntimeError):
    """A kernel failed in the interpreter."""


class Interpreter:
    """Runs the kernels of a file in the interpreter.

    Args:
        file: A Python file that defines the kernels.
    """

    def __init__(self, file: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        )

    def start(self, kernel: str, grid: Sequence[int], args: Sequence[Any], constants: dict[str, Any]) -> None:
        """Begins to run a kernel on copies of the arguments."""
        # Written by a thread: the process may not yet read, and a pipe holds little.
        message = pickle.dumps((kernel, tuple(grid), *_packed(args), constants))
        self._writer = threading.Thread(target=_send, args=(self._process.stdin, message))
        self._writer.start()

    def finish(self) -> tuple[tuple, str]:
        """The arguments after the run, and what the kernel printed.

        Raises:
            InterpreterError: The kernel failed.
        """
        self._writer.join()
        try:
            args, storages, printed, error = pickle.load(self._process.stdout)
        except EOFError:
            raise InterpreterError(f"the interpreter's process ended with code {self._process.wait()}") from None
        if error:
            raise InterpreterError(error)
        return _unpacked(args, storages), printed

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait(10)


@dataclass(frozen=True)
class _View:
    """A tensor, as a view of a storage: pickle neither knows all types, nor keeps overlapping tensors together."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def _packed(args: Sequence[Any]) -> tuple[tuple, dict[int, bytes]]:
    storages: dict[int, bytes] = {}

    def pack(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(pack(v) for v in value)
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        storages[storage.data_ptr()] = bytes(storage)
        return _View(storage.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.storage_offset())

    return tuple(pack(value) for value in args), storages


def _unpacked(args: tuple, storages: dict[int, bytes]) -> tuple:
    memory = {key: torch.frombuffer(bytearray(data), dtype=torch.uint8) for key, data in storages.items() if data}

    def unpack(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(unpack(v) for v in value)
        if not isinstance(value, _View):
            return value
        tensor = torch.empty(0, dtype=value.dtype)
        if value.storage in memory:
            tensor.set_(memory[value.storage].untyped_storage(), value.offset, value.shape, value.strides)
        return tensor

    return unpack(args)


def _send(stream: BinaryIO, message: bytes) -> None:
    stream.write(message)
    stream.flush()


def _serve(file: str) -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    spec = importlib.util.spec_from_file_location("kernels_to_interpret", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    while True:
        try:
            kernel, grid, args, storages, constants = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        error, printed, args = "", io.StringIO(), _unpacked(args, storages)
        try:
            # Integers wrap around, and lanes that are masked off divide by anything.
            with np.errstate(all="ignore"), contextlib.redirect_stdout(printed):
                getattr(module, kernel)[grid](*args, **constants)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        _send(answers, pickle.dumps((*_packed(args), printed.getvalue(), error)))


if __name__ == "__main__":
    # What it pickles names this module as the other process knows it.
    sys.modules["interpreter_process"] = sys.modules["__main__"]
    _View.__module__ = "interpreter_process"
    _serve(sys.argv[1])
