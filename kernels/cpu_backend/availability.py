"""Whether kernels can run on the CPU in this process."""

from __future__ import annotations

from functools import cache

from triton.runtime.driver import driver

from cbtriton.kernels.cpu_backend import toolchain
from cbtriton.kernels.cpu_backend.compiler import BACKEND
from cbtriton.kernels.cpu_backend.errors import CPUBackendError


@cache
def why_unavailable() -> str | None:
    """What keeps kernels from running on CPU tensors; None where nothing does. Decided once per process."""
    try:
        backend = driver.active.get_current_target().backend
    except RuntimeError as error:
        return f"Triton finds no driver ({error}); install the package, so that its backend is registered"
    if backend != BACKEND:
        return f"Triton has one driver per process, and here it is that of {backend}"
    try:
        toolchain.compiler()
    except CPUBackendError as error:
        return str(error)
    return None
