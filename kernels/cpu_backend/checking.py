"""Checking mode: what kernels compiled with `CBTRITON_CPU_CHECK=1` report.

Set the variable before a kernel's first launch in a process: Triton keeps what it has compiled. Programs then run one
after the other, and the first failure ends the launch with an exception. Memory is left as it was at that moment;
later launches work.

| exception | reported is |
|---|---|
| `OutOfBoundsError` | an access that is not inside the storage of an argument that its pointer may come from |
| `RaceError` | two programs that access the same memory such that their order matters, and nothing orders them |
| `PoisonedReadError` | a load of what `poison_` left there, if the value is used for anything but being stored |

**Bounds.** Pointers are followed through sums, views, selects, branches and what loops carry. A pointer that may come
from several arguments must point into one of them, not necessarily the one that it came from. The storage is that of
the whole tensor of which an argument may be a view. Pointers that come from memory or from integers cannot be checked,
nor can arguments that are addresses instead of tensors; only the first page of memory, address 0 with it, is always
out of bounds. Accesses whose results nobody uses are removed before, as on a GPU. Lanes that a mask switches off are
not accessed.

**Races.** Reported are a store of other bits over what another program stored, a load of what another program changed,
a store of other bits over what another program loaded, and a load or store of what another program accesses
atomically. Not reported are atomic operations among themselves, stores of equal bits, and stores that leave memory as
it was where others load it. Two programs are in order where a chain of atomic operations leads from one to the other:
each on memory that the one before has updated, releasing before acquiring (`sem`), so locks and counters of finished
programs are understood, relaxed atomic operations are not. Volatile loads are expected to see what others write and
are never reported. Per unit of memory only the last write and the last reads of two programs are kept, so with several
offenders one is reported. What lanes of one program do to each other is not seen.

**Poison.** 16-bit, 32-bit and 64-bit floats, and integers of 32 and 64 bits. Whether a value is used is known from the
kernel's text: one that only goes through selects, views and loops into stores is copied, and may be poisoned; one that
is added to something is used, even if a select then discards the sum. Mask such loads.

Kernels whose programs wait for programs with larger numbers never end in this mode.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from cbtriton.kernels.cpu_backend.errors import CheckError, OutOfBoundsError, PoisonedReadError, RaceError
from cbtriton.kernels.cpu_backend.instrument import POISON

if TYPE_CHECKING:
    from torch import Tensor

    T = TypeVar("T", bound=Tensor)

_EVERYWHERE = (4096, 2**63 - 1)
_NOWHERE = (0, 0)
_OUTSIDE, _RACE, _POISON = 1, 2, 3


def poison_(tensor: T) -> T:
    """Fills a tensor, or a view of one, with bits that kernels in checking mode must not use.

    Floats become a NaN with a payload that no computation makes out of numbers, so that kernels in other modes give
    NaN. Integers of 32 and 64 bits become negative numbers of the bytes 0xA5.

    Args:
        tensor: What to fill, of any strides, on any device.

    Returns:
        The tensor.

    Raises:
        TypeError: The type has no bits to spare: every number of it may be data.
    """
    import torch

    names = {
        torch.float16: "f16",
        torch.bfloat16: "bf16",
        torch.float32: "f32",
        torch.float64: "f64",
        torch.int32: "i32",
        torch.int64: "i64",
    }
    if tensor.dtype not in names:
        raise TypeError(
            f"tensors of {tensor.dtype} cannot be poisoned: every number of the type may be data; "
            f"possible are {', '.join(str(dtype).removeprefix('torch.') for dtype in names)}"
        )
    size = tensor.element_size()
    bits = POISON[names[tensor.dtype]]
    signed = int.from_bytes(bits.to_bytes(size, "little"), "little", signed=True)
    tensor.detach().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).fill_(signed)
    return tensor


class Failure(ctypes.Structure):
    """The first failure of a launch; see `checks.h`."""

    _fields_ = [
        ("reason", ctypes.c_int32),
        ("access", ctypes.c_int32),
        ("other", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("program", ctypes.c_int64),
        ("other_program", ctypes.c_int64),
        ("address", ctypes.c_int64),
        ("before", ctypes.c_uint64),
        ("after", ctypes.c_uint64),
    ]


@dataclass(frozen=True, slots=True)
class Checked:
    """A kernel compiled in checking mode.

    Attributes:
        name: The kernel's name.
        pointers: Names of the pointer arguments.
        accesses: Kind, source position, possible arguments and type of each access.
    """

    name: str
    pointers: tuple[str, ...]
    accesses: Sequence[tuple[str, str, Sequence[int] | None, str]]

    def run(self, function: Callable, packed: bytes, grid: tuple[int, int, int], tensors: Sequence[Any]) -> None:
        """Runs all programs.

        Args:
            function: The compiled function.
            packed: Its arguments.
            grid: Number of programs per axis.
            tensors: What was passed for the pointer arguments.

        Raises:
            CheckError: The first failure.
        """
        failure = Failure()
        bounds = [bound for tensor in tensors for bound in _bounds(tensor)]
        function(packed + struct.pack(f"{len(bounds)}q", *bounds), struct.pack("3i", *grid), 1, ctypes.byref(failure))
        if failure.reason:
            raise self._error(failure, grid, tensors)

    def _error(self, failure: Failure, grid: tuple[int, int, int], tensors: Sequence[Any]) -> CheckError:
        kind, loc, arguments, elem = self.accesses[failure.access - 1]
        here = f"kernel {self.name!r}, program {_program(failure.program, grid)}: the {_NAMES[kind]} at {loc}"
        argument = _nearest(failure.address, failure.size, arguments, tensors)
        place = self._place(failure.address, failure.size, argument, tensors)
        if failure.reason == _OUTSIDE:
            return OutOfBoundsError(f"{here} {self._outside(failure, place, argument, tensors)}")
        if failure.reason == _POISON:
            return PoisonedReadError(
                f"{here} uses {place}, which is poisoned: nothing was written there since `poison_`. "
                "Mask the lanes that have no data, or write the memory before"
            )
        other_kind, other_loc, _, _ = self.accesses[failure.other - 1]
        other = f"program {_program(failure.other_program, grid)}, {_NAMES[other_kind]} at {other_loc},"
        before, after = (_number(bits, elem, failure.size) for bits in (failure.before, failure.after))
        what = {
            ("store", "store"): f"writes {after} to {place}, where {other} wrote {before}",
            ("store", "load"): f"reads from {place} what {other} wrote",
            ("load", "store"): f"writes {after} to {place}, where {other} read {before}",
        }.get((other_kind, kind), f"accesses {place}, which {other} accesses too, and only one of them is atomic")
        return RaceError(
            f"{here} {what}. Programs run in any order: let one program own each place, launch a second kernel, or "
            "order the programs by atomic operations that release and acquire"
        )

    def _place(self, address: int, size: int, argument: int | None, tensors: Sequence[Any]) -> str:
        if argument is None:
            return f"address {address:#x}"
        pointer = _address(tensors[argument])
        # Elements are as large as the access: the argument may be seen as another type than the tensor has.
        index, rest = divmod(address - pointer, size)
        return f"{self.pointers[argument]}[{index}]" + (f" + {rest} bytes" if rest else "")

    def _outside(self, failure: Failure, place: str, argument: int | None, tensors: Sequence[Any]) -> str:
        if argument is None:
            return f"goes to {place}, through a pointer that comes from memory or from an integer: no data is there"
        begin, end = _bounds(tensors[argument])
        name = self.pointers[argument]
        if begin == end:
            return f"goes to {place}, but argument {name!r} is {_empty(tensors[argument])}"
        if (begin, end) == _EVERYWHERE:
            return f"goes to {place}, address {failure.address:#x}: no data is there"
        before, after = begin - failure.address, failure.address + failure.size - end
        how = f"begins {before} bytes before" if before > 0 else f"ends {after} bytes after the end of"
        return (
            f"goes to {place} and {how} the storage of argument {name!r}, which has {end - begin} bytes. "
            "Mask the lanes that have no data, or pass a larger tensor"
        )


_NAMES = {"load": "load", "store": "store", "atomic": "atomic operation"}
_CODES = {"f16": "e", "f32": "f", "f64": "d"}


def _program(number: int, grid: tuple[int, int, int]) -> tuple[int, int, int]:
    x, y, _ = grid
    return number % x, number // x % y, number // (x * y)


def _number(bits: int, elem: str, size: int) -> str:
    data = bits.to_bytes(8, "little")[:size]
    if elem == "bf16":
        return repr(struct.unpack("<f", b"\0\0" + data)[0])
    if elem in _CODES:
        return repr(struct.unpack(f"<{_CODES[elem]}", data)[0])
    return repr(int.from_bytes(data, "little", signed=True))


def _address(tensor: Any) -> int:
    return tensor.data_ptr() if hasattr(tensor, "data_ptr") else int(tensor or 0)


def _bounds(tensor: Any) -> tuple[int, int]:
    """First and last address of a tensor's storage; of a mere address nothing is known but that it is not 0."""
    if not hasattr(tensor, "untyped_storage") and hasattr(tensor, "base"):
        # Triton wraps a tensor to have it seen as another type.
        tensor = tensor.base
    if hasattr(tensor, "untyped_storage"):
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    return _EVERYWHERE if _address(tensor) else _NOWHERE


def _empty(tensor: Any) -> str:
    return "an empty tensor" if hasattr(tensor, "data_ptr") else "None"


def _nearest(address: int, size: int, arguments: Sequence[int] | None, tensors: Sequence[Any]) -> int | None:
    """The argument, among those possible, whose storage an access is in or next to."""

    def distance(argument: int) -> int:
        begin, end = _bounds(tensors[argument])
        return max(begin - address, address + size - end, 0)

    return min(arguments, key=distance) if arguments else None
