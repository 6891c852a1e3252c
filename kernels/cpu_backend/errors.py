"""Errors of the CPU backend."""

from __future__ import annotations


class CPUBackendError(RuntimeError):
    """A kernel cannot be compiled for, or run on, the CPU."""


class UnsupportedError(CPUBackendError):
    """The kernel uses something that the CPU backend does not know.

    Args:
        what: The operation or type.
        loc: Where in the kernel's source.
        kernel: The kernel's name.
    """

    def __init__(self, what: str, loc: str = "", kernel: str = "") -> None:
        self.what = what
        self.loc = loc
        place = f" at {loc}" if loc else ""
        owner = f" in kernel {kernel!r}" if kernel else ""
        super().__init__(
            f"{what}{owner}{place} is not supported by Triton's CPU backend of cbtriton; "
            "run the kernel with TRITON_INTERPRET=1 (slow) or on a GPU"
        )


class CheckError(CPUBackendError):
    """A kernel in checking mode did what it must not; see `checking`."""


class OutOfBoundsError(CheckError):
    """A kernel in checking mode accessed memory outside of the storage of its pointer argument."""


class RaceError(CheckError):
    """Two programs of a launch in checking mode accessed the same memory in no given order."""


class PoisonedReadError(CheckError):
    """A kernel in checking mode used memory that was poisoned and not written since."""
