"""The driver that Triton launches kernels with: loads shared objects, packs arguments, calls."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.cache import get_cache_manager

from cbtriton.kernels.cpu_backend import toolchain
from cbtriton.kernels.cpu_backend.checking import Checked
from cbtriton.kernels.cpu_backend.compiler import BACKEND
from cbtriton.kernels.cpu_backend.errors import CPUBackendError
from cbtriton.kernels.cpu_backend.ir import FLOATS

_LIMIT = 2**31 - 1
_loading = threading.local()


class CPUUtils:
    """What Triton asks of a device."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Limits that Triton checks kernels against, and the number of processors."""
        return {
            "max_shared_mem": _LIMIT,
            "multiprocessor_count": os.cpu_count() or 1,
            "warpSize": 1,
            "max_num_regs": _LIMIT,
        }

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, Any, int, int, int]:
        """Loads a compiled kernel. One that is damaged is compiled again from the C++ text beside it in the cache."""
        toolchain.share_openmp()
        metadata = getattr(_loading, "metadata", None)
        library = toolchain.unsealed(binary)
        if library is None:
            library = _rebuilt(name, metadata)
        with tempfile.NamedTemporaryFile(prefix=f"cbtriton-{name[:40]}-", suffix=".so") as file:
            file.write(library)
            file.flush()
            module = ctypes.CDLL(file.name)
        function = module.launch
        function.restype = None
        function.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_void_p)
        return module, function, 0, 0, _LIMIT

    def unload_module(self, module: Any) -> None:
        """Code stays loaded: threads may still be in it."""


def _rebuilt(name: str, metadata: Any) -> bytes:
    cache = get_cache_manager(metadata.hash) if metadata is not None else None
    path = cache.get_file(f"{metadata.name}.cpp") if cache is not None else None
    text = Path(path).read_text() if path else ""
    if path is None or hashlib.sha256(text.encode()).hexdigest() != metadata.cpp_sha256:
        described = cache.get_file(f"{metadata.name}.json") if cache is not None else None
        if described:
            # Without it Triton takes nothing of this kernel from the cache.
            Path(described).unlink(missing_ok=True)
        raise CPUBackendError(
            f"the cached binary of kernel {name!r} in {knobs.cache.dir} is damaged, and so is its source; "
            "it is compiled anew by the next process that launches it"
        )
    library = toolchain.build(text, metadata.enable_fp_fusion)
    cache.put(toolchain.sealed(library), f"{metadata.name}.so")
    return library


class CPULauncher:
    """Calls one compiled kernel.

    Args:
        src: What it was compiled from.
        metadata: What the compiler noted.
    """

    def __init__(self, src: Any, metadata: Any) -> None:
        _loading.metadata = metadata
        self._name = metadata.name
        self._path = _argument_paths(src.signature.values())
        kinds = metadata.arguments
        types = _argument_types(src.signature.values())
        self._has_descriptors = any(str(type_).startswith("tensordesc") for type_ in types)
        if len(types) != len(kinds) and not self._has_descriptors:
            raise CPUBackendError(f"kernel {self._name!r}: {len(types)} arguments, compiled for {len(kinds)}")
        self._pointers = [i for i, kind in enumerate(kinds) if kind == "ptr"]
        self._unsigned = [i for i, type_ in enumerate(types) if type_ == "u64"] if not self._has_descriptors else []
        # Of most kernels every argument is one word: a number that needs no change, or where a tensor is.
        is_plain = not (self._has_descriptors or self._unsigned) and all(len(path) == 1 for path in self._path)
        self._plain = (
            [(path[0], kind == "ptr") for path, kind in zip(self._path, kinds, strict=True)] if is_plain else []
        )
        self._pack = struct.Struct("".join("d" if kind in FLOATS else "q" for kind in kinds)).pack
        # A descriptor is several arguments, which have no names of their own.
        numbers = [f"argument {i}" for i in range(len(kinds))]
        names = numbers if self._has_descriptors else _argument_names(src.signature)
        pointers = tuple(names[i] for i in self._pointers)
        self._checked = Checked(self._name, pointers, metadata.accesses) if metadata.check else None
        self._pack_grid = struct.Struct("3i").pack
        self._threads = _thread_count()

    def __call__(
        self,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        stream: int,
        function: Any,
        packed_metadata: Any,
        launch_metadata: Any,
        enter_hook: Callable | None,
        exit_hook: Callable | None,
        *args: Any,
    ) -> None:
        """Runs the kernel between its hooks, as Triton asks for; an empty grid runs nothing."""
        if grid_x * grid_y * grid_z <= 0:
            return
        if enter_hook is not None:
            enter_hook(launch_metadata)
        self.run(function, (grid_x, grid_y, grid_z), args)
        if exit_hook is not None:
            exit_hook(launch_metadata)

    def run(self, function: Any, grid: tuple[int, int, int], args: Sequence[Any]) -> None:
        """Runs the kernel on a grid of programs, and waits for it.

        Args:
            function: The compiled code.
            grid: Number of programs per axis.
            args: The kernel's parameters, constants included.
        """
        try:
            values = [args[i].data_ptr() if is_pointer else args[i] for i, is_pointer in self._plain]
        except AttributeError:
            values = []
        packed = self._pack(*(values or self._words(args)))
        if self._checked:
            parts = self._parts(args)
            self._checked.run(function, packed, grid, [parts[i] for i in self._pointers])
        else:
            function(packed, self._pack_grid(*grid), self._threads(), None)

    def _parts(self, args: Sequence[Any]) -> list[Any]:
        """The arguments of the compiled function."""
        parts = [_at(args, path) for path in self._path]
        return [piece for part in parts for piece in _decomposed(part)] if self._has_descriptors else parts

    def _words(self, args: Sequence[Any]) -> list[Any]:
        """What is packed for arguments of any kind: addresses may be numbers or None."""
        values = self._parts(args)
        for i in self._pointers:
            value = values[i]
            values[i] = value.data_ptr() if hasattr(value, "data_ptr") else int(value or 0)
        for i in self._unsigned:
            values[i] = (values[i] + 2**63) % 2**64 - 2**63
        return values


def _argument_paths(signature: Sequence[Any], prefix: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Where the arguments of the compiled function are among the kernel's, which may be nested and constant."""
    paths = []
    for i, type_ in enumerate(signature):
        if isinstance(type_, tuple):
            paths += _argument_paths(type_, (*prefix, i))
        elif type_ != "constexpr":
            paths.append((*prefix, i))
    return paths


def _decomposed(value: Any) -> list[Any]:
    """What a descriptor of a tensor becomes: several arguments."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if not isinstance(value, TensorDescriptor):
        return [value]
    flags = [value.padding == "nan"]
    if hasattr(value, "round_f32_to_tf32"):  # since Triton 3.9
        flags.append(value.round_f32_to_tf32)
    return [value.base, *value.shape, *value.strides, *flags, *value.shape, *value.strides]


def _argument_types(signature: Sequence[Any]) -> list[str]:
    return [_at(list(signature), path) for path in _argument_paths(list(signature))]


def _argument_names(signature: Mapping[Any, Any]) -> list[str]:
    """Names of the arguments of the compiled function; those inside of tuples have their positions in brackets."""
    names = list(signature)
    paths = _argument_paths(list(signature.values()))
    return [str(names[first]) + "".join(f"[{i}]" for i in rest) for first, *rest in paths]


def _at(args: Sequence[Any], path: tuple[int, ...]) -> Any:
    for i in path:
        args = args[i]
    return args


def _thread_count() -> Callable[[], int]:
    import torch

    return torch.get_num_threads


class CPUDriver(DriverBase):
    """Runs kernels on the tensors of torch's CPU device."""

    def __init__(self) -> None:
        super().__init__()
        self.utils = CPUUtils()
        self.launcher_cls = CPULauncher

    @classmethod
    def is_active(cls) -> bool:
        """Whether kernels run on the CPU: not where there is a GPU, and not in the interpreter."""
        if knobs.runtime.interpret:
            return False
        import torch

        return not torch.cuda.is_available()

    def map_python_to_cpp_type(self, ty: str) -> str:
        """The C++ type of a kernel argument."""
        names = {"i1": "int8_t", "fp16": "float", "bf16": "float", "fp32": "float", "f32": "float", "fp64": "double"}
        if ty.startswith("*"):
            return "void*"
        if ty in names:
            return names[ty]
        return f"{'u' if ty.startswith('u') else ''}int{ty[1:]}_t"

    def get_current_target(self) -> GPUTarget:
        """This machine."""
        return GPUTarget(BACKEND, platform.machine(), 1)

    def get_current_device(self) -> int:
        """There is one."""
        return 0

    def set_current_device(self, device: int) -> None:
        """There is one."""

    def get_current_stream(self, device: int) -> int:
        """Launches return when they are done."""
        return 0

    def get_active_torch_device(self) -> Any:
        """Where tensors must be."""
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """Torch's module for the device."""
        import torch

        return torch.cpu

    def get_empty_cache_for_benchmark(self) -> Any:
        """Memory that pushes everything else out of the caches."""
        import torch

        return torch.empty(64 << 20, dtype=torch.int8)

    def clear_cache(self, cache: Any) -> None:
        """Touches all of it."""
        cache.zero_()

    def get_benchmarker(self) -> Callable[..., Any]:
        """What the autotuner measures with."""
        return benchmark


def benchmark(kernel_call: Callable[[], Any], *, quantiles: Sequence[float] | None = None, **_: Any) -> Any:
    """Milliseconds of a call: the median of some, or quantiles of them."""
    kernel_call()
    times: list[float] = []
    end = time.perf_counter() + 0.1
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 200):
        begin = time.perf_counter()
        kernel_call()
        times.append((time.perf_counter() - begin) * 1e3)
    if quantiles is None:
        return median(times)
    times.sort()
    return [times[min(len(times) - 1, int(q * len(times)))] for q in quantiles]
