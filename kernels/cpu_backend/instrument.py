"""What checking mode adds to a kernel: which arguments each access may reach, and the C++ that checks it."""

from __future__ import annotations

from dataclasses import dataclass

from cbtriton.kernels.cpu_backend.ir import Function, Op, Value
from cbtriton.kernels.cpu_backend.passes import VIEWS

# Bytes of an element in memory, where they are not 8.
_BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "f16": 2, "bf16": 2, "f32": 4}
# What `checking.poison_` fills tensors with: quiet NaNs with a payload of their own. Bits of narrower integers are
# all in use.
POISON = {
    "f16": 0x7FA5,
    "bf16": 0x7FE9,
    "f32": 0x7FE9A5A5,
    "f64": 0x7FFD5AA5A5A5A5A5,
    "i32": 0xA5A5A5A5,
    "i64": 0xA5A5A5A5A5A5A5A5,
}
# Numbers of memory orders in the attribute `sem`.
RELAXED, ACQUIRE, RELEASE, ACQUIRE_RELEASE = 1, 2, 3, 4
_EXCHANGE = 10


@dataclass(frozen=True, slots=True)
class Access:
    """A load, store or atomic operation of a kernel.

    Attributes:
        kind: "load", "store" or "atomic".
        loc: Its source position.
        arguments: Numbers, among the pointer arguments, of those that its address may come from; None where it may
            also come from memory or from an integer.
        elem: The type of an element.
        order: The memory order of an atomic operation.
        is_volatile: Whether it is a load that expects what others write meanwhile.
        poison: The bits that must not be read; None where they may.
    """

    kind: str
    loc: str
    arguments: tuple[int, ...] | None
    elem: str
    order: int = 0
    is_volatile: bool = False
    poison: int | None = None


class Instrument:
    """Numbers the accesses of a kernel and writes the code that checks them.

    Args:
        function: The kernel, after all rewrites.
    """

    def __init__(self, function: Function) -> None:
        self._bases = possible_bases(function)
        self._numbers: dict[Op, int] = {}
        self._accesses: list[Access] = []

    @property
    def accesses(self) -> tuple[Access, ...]:
        """The accesses so far."""
        return tuple(self._accesses)

    def condition(self, op: Op, place: str, value: str = "") -> str:
        """C++ that notes an access, and ends the launch if it is wrong; else it is true.

        Args:
            op: The operation.
            place: The element in memory.
            value: What is stored.
        """
        if op not in self._numbers:
            self._accesses.append(_access(op, self._bases))
            self._numbers[op] = len(self._accesses)
        kind = self._accesses[self._numbers[op] - 1].kind
        return f"check.{kind}(&{place}, {f'{value}, ' if value else ''}{self._numbers[op]})"

    def definitions(self) -> str:
        """C++ for the tables of accesses and of the arguments that they may reach."""
        rows, bases = [], []
        for access in self._accesses:
            arguments = access.arguments or ()
            poison = access.poison or 0
            rows.append(
                f"{{{len(bases)}, {len(arguments)}, {access.order}, {int(access.is_volatile)}, {poison:#x}ull}}"
            )
            bases += arguments
        grain = min((_BYTES.get(access.elem, 8) for access in self._accesses), default=1)
        return _DEFINITIONS.format(
            accesses=", ".join([*rows, "{0, 0, 0, 0, 0}"]),
            bases=", ".join(map(str, [*bases, 0])),
            grain=grain.bit_length() - 1,
        )


_DEFINITIONS = """#include "checks.h"
static const Access accesses[] = {{{accesses}}};
static const int32_t bases[] = {{{bases}}};
constexpr int kGrain = {grain};"""


def _access(op: Op, bases: dict[Value, frozenset[int | None]]) -> Access:
    kind = {"tt.load": "load", "tt.store": "store"}.get(op.name, "atomic")
    elem = (op.results[0] if kind == "load" else op.operands[1]).type.elem
    found = bases.get(op.operands[0], frozenset())
    is_exchange = op.name == "tt.atomic_rmw" and op.attrs.get("atomic_rmw_op") == _EXCHANGE
    is_read = kind == "load" or (kind == "atomic" and not is_exchange)
    uses_value = (is_read and kind == "atomic") or (bool(op.results) and not is_only_copied(op.results[0]))
    return Access(
        kind=kind,
        loc=op.loc,
        arguments=tuple(sorted(found)) if found and None not in found else None,
        elem=elem,
        order=int(op.attrs.get("sem", ACQUIRE_RELEASE)) if kind == "atomic" else 0,
        is_volatile=bool(op.attrs.get("isVolatile", False)),
        poison=POISON.get(elem) if uses_value else None,
    )


def copies(op: Op) -> list[tuple[int, Value]]:
    """Where the elements of an operand appear unchanged: the operand's position, and the other value."""
    match op.name:
        case name if name in VIEWS or name == "tt.cat":
            return [(i, result) for i in range(len(op.operands)) for result in op.results]
        case "tt.gather" | "tt.bitcast" | "arith.bitcast":
            return [(0, op.result)]
        case "arith.select":
            return [(1, op.result), (2, op.result)]
        case "scf.for":
            carried = op.regions[0].entry.args[1:]
            return _pairs(3, carried) + _pairs(3, op.results)
        case "scf.while":
            return _pairs(0, op.regions[0].entry.args)
        case "scf.condition":
            loop = _owner(op)
            return _pairs(1, loop.regions[1].entry.args) + _pairs(1, loop.results)
        case "scf.yield":
            return _yielded(_owner(op))
        case "cf.br":
            return _pairs(0, op.successors[0].args)
        case "cf.cond_br":
            taken = op.attrs["operandSegmentSizes"][1]
            return _pairs(1, op.successors[0].args) + _pairs(1 + taken, op.successors[1].args)
    return []


def _pairs(first: int, values: list[Value]) -> list[tuple[int, Value]]:
    return [(first + i, value) for i, value in enumerate(values)]


def _owner(op: Op) -> Op:
    """The operation that an operation is inside of."""
    assert op.parent is not None
    assert op.parent.parent is not None
    owner = op.parent.parent.parent
    assert owner is not None
    return owner


def _yielded(owner: Op) -> list[tuple[int, Value]]:
    match owner.name:
        case "scf.for":
            return _pairs(0, owner.regions[0].entry.args[1:]) + _pairs(0, owner.results)
        case "scf.while":
            return _pairs(0, owner.regions[0].entry.args)
        case "scf.if":
            return _pairs(0, owner.results)
    return []


def possible_bases(function: Function) -> dict[Value, frozenset[int | None]]:
    """Which pointer arguments, by number, each pointer may be made from; None stands for memory and integers.

    Pointers are followed through views, sums, selects, branches, and what loops carry.
    """
    bases: dict[Value, frozenset[int | None]] = {}
    edges: list[tuple[Value, Value]] = []
    for i, argument in enumerate(arg for arg in function.args if arg.type.elem == "ptr"):
        bases[argument] = frozenset((i,))
    for op in function.walk():
        pairs = [(0, op.result)] if op.name == "tt.addptr" else copies(op)
        pairs = [(op.operands[i], value) for i, value in pairs if value.type.elem == "ptr"]
        edges += pairs
        for result in op.results:
            is_made_here = result.type.elem == "ptr" and not op.regions and op.name != "ub.poison"
            if is_made_here and not any(value is result and source.type.elem == "ptr" for source, value in pairs):
                bases[result] = frozenset((None,))
    changed = True
    while changed:
        changed = False
        for source, value in edges:
            known = bases.get(value, frozenset())
            merged = known | bases.get(source, frozenset())
            if merged != known:
                bases[value], changed = merged, True
    return bases


def is_only_copied(value: Value) -> bool:
    """Whether all that ever happens to the elements of a value is that they are stored as they are."""
    seen, waiting = {value}, [value]
    while waiting:
        current = waiting.pop()
        for user in current.uses:
            targets = copies(user)
            for position, operand in enumerate(user.operands):
                if operand is not current or (user.name == "tt.store" and position == 1):
                    continue
                following = [target for i, target in targets if i == position]
                if not following:
                    return False
                waiting += [target for target in following if target not in seen]
                seen.update(following)
    return True
