"""Puts the backend into a running process, without the entry point that an installed package registers."""

from __future__ import annotations

from triton import knobs
from triton.backends import Backend, backends
from triton.runtime.driver import driver

from cbtriton.kernels.cpu_backend.compiler import BACKEND, CPUBackend
from cbtriton.kernels.cpu_backend.driver import CPUDriver
from cbtriton.kernels.cpu_backend.errors import CPUBackendError


def install() -> None:
    """Makes kernels launched from now on run on the CPU.

    Raises:
        CPUBackendError: `TRITON_INTERPRET` is set: kernels decorated in this process are interpreted.
    """
    if knobs.runtime.interpret:
        raise CPUBackendError("kernels were decorated for the interpreter; unset TRITON_INTERPRET and start again")
    backends[BACKEND] = Backend(CPUBackend, CPUDriver)
    driver.set_active(CPUDriver())
