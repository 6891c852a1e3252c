"""The C++ compiler: which one, with which options, and how it is run."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from cbtriton.kernels.cpu_backend.errors import CPUBackendError

_CHECKSUM_BYTES = 32
_HEADER = Path(__file__).with_name("runtime.h")
# Values are those of IEEE arithmetic; integers wrap. Kernels have no use for errno and floating-point traps.
# Partial redundancy elimination turns selects into branches that GCC then cannot vectorise.
_OPTIONS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-march=native",
    "-fopenmp",
    "-fwrapv",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-fno-tree-pre",
    "-w",
]


@functools.cache
def compiler() -> tuple[str, ...]:
    """The command of the C++ compiler: `CXX`, else g++, else clang++.

    Raises:
        CPUBackendError: There is none.
    """
    chosen = os.environ.get("CXX")
    candidates = [shlex.split(chosen)] if chosen else [["g++"], ["clang++"]]
    for command in candidates:
        if path := shutil.which(command[0]):
            return (path, *command[1:])
    raise CPUBackendError(
        f"Triton's CPU backend of cbtriton needs a C++ compiler, and {chosen or 'g++ or clang++'} is not on PATH; "
        "install g++ (Debian: apt-get install g++) or set CXX"
    )


@functools.cache
def version() -> str:
    """What the compiler says of itself."""
    command = [*compiler(), "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def options() -> list[str]:
    """The compiler's options. With clang kernels run on one thread: its OpenMP is not the one that torch brings."""
    return [option for option in _OPTIONS if option != "-fopenmp" or "clang" not in version()]


@functools.cache
def fingerprint() -> str:
    """Changes with everything, apart from the kernel, that the binary depends on."""
    parts = [" ".join(compiler()), version(), " ".join(options()), _processor(), platform.machine(), *_sources()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _sources() -> list[str]:
    folder = Path(__file__).parent
    return [file.read_text() for file in sorted(folder.iterdir()) if file.suffix in (".py", ".h")]


def _processor() -> str:
    """The instruction sets of this machine: a cache may be shared with another one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def build(source: str, fusion: bool) -> bytes:
    """Compiles C++ to a shared object.

    Symbols of OpenMP stay undefined: they bind to the library that torch has loaded, whose threads are then shared.

    Args:
        source: The text.
        fusion: Whether products and sums may be contracted to fused multiply-adds.

    Raises:
        CPUBackendError: The compiler rejects it.
    """
    with tempfile.TemporaryDirectory(prefix="cbtriton-cpu-") as folder:
        directory = Path(folder)
        (directory / "kernel.cpp").write_text(source)
        contract = "-ffp-contract=fast" if fusion else "-ffp-contract=off"
        _run(
            [*compiler(), *options(), contract, f"-I{_HEADER.parent}", "-c", "kernel.cpp", "-o", "kernel.o"], directory
        )
        _run([*compiler(), "-shared", "kernel.o", "-o", "kernel.so"], directory)
        return (directory / "kernel.so").read_bytes()


def _run(command: list[str], directory: Path) -> None:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CPUBackendError(f"{shlex.join(command)} failed:\n{done.stderr[-4000:]}")


def sealed(binary: bytes) -> bytes:
    """A shared object followed by its checksum."""
    return binary + hashlib.sha256(binary).digest()


def unsealed(data: bytes) -> bytes | None:
    """The shared object; None where it is damaged."""
    binary, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    return binary if hashlib.sha256(binary).digest() == checksum else None


@functools.cache
def share_openmp() -> None:
    """Makes the symbols of the OpenMP library that torch has loaded visible to kernels."""
    import torch  # noqa: F401 (loads it)

    maps = Path("/proc/self/maps")
    paths = {line.split()[-1] for line in maps.read_text().splitlines() if ".so" in line} if maps.exists() else set()
    for library in ("libgomp", "libiomp", "libomp"):
        for path in sorted(paths):
            if Path(path).name.startswith(library):
                ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
                return
    ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
