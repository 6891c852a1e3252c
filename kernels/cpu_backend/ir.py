"""The IR between the MLIR parser and the emitter: typed values, operations, blocks, regions.

It has TTIR's operations and MLIR's structure, and nothing that the backend does not need.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import Any

_ids = count()

INT_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "index": 64}
FLOATS = ("f16", "bf16", "f32", "f64")


@dataclass(frozen=True, slots=True)
class Type:
    """A scalar (`shape` None) or a block of them.

    Attributes:
        elem: One of `INT_BITS`, `FLOATS`, or "ptr".
        shape: Sides of the block; powers of two.
        pointee: What a pointer points to.
    """

    elem: str
    shape: tuple[int, ...] | None = None
    pointee: str | None = None

    @property
    def is_block(self) -> bool:
        """Whether values are blocks."""
        return self.shape is not None

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape or ())

    @property
    def scalar(self) -> Type:
        """The type of one element."""
        return Type(self.elem, None, self.pointee)

    def with_shape(self, shape: tuple[int, ...] | None) -> Type:
        """A block of the same elements."""
        return Type(self.elem, shape, self.pointee)

    def __str__(self) -> str:
        elem = f"ptr<{self.pointee}>" if self.elem == "ptr" else self.elem
        return elem if self.shape is None else f"{elem}[{','.join(map(str, self.shape))}]"


@dataclass(eq=False, slots=True)
class Value:
    """A result of an operation, or an argument of a block."""

    type: Type
    op: Op | None = None
    block: Block | None = None
    index: int = 0
    name: str = ""
    id: int = field(default_factory=lambda: next(_ids))
    uses: list[Op] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"%{self.id}: {self.type}"


@dataclass(eq=False, slots=True)
class Op:
    """An operation, named as in MLIR."""

    name: str
    operands: list[Value]
    results: list[Value] = field(default_factory=list)
    attrs: dict[str, Any] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)
    successors: list[Block] = field(default_factory=list)
    loc: str = ""
    parent: Block | None = None
    order: int = 0

    @property
    def result(self) -> Value:
        """The only result."""
        return self.results[0]

    def __repr__(self) -> str:
        return f"{self.results} = {self.name}({self.operands}) {self.attrs}"


@dataclass(eq=False, slots=True)
class Block:
    """Operations in order."""

    args: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    parent: Region | None = None
    label: str = ""

    @property
    def terminator(self) -> Op:
        """The last operation."""
        return self.ops[-1]


@dataclass(eq=False, slots=True)
class Region:
    """Blocks, the first of which is the entry."""

    blocks: list[Block] = field(default_factory=list)
    parent: Op | None = None

    @property
    def entry(self) -> Block:
        """The first block."""
        return self.blocks[0]


@dataclass(eq=False, slots=True)
class Function:
    """A kernel: its name, its body, and the attributes of its arguments."""

    name: str
    body: Region
    arg_attrs: list[dict[str, Any]]

    @property
    def args(self) -> list[Value]:
        """The kernel's arguments."""
        return self.body.entry.args

    def walk(self) -> Iterator[Op]:
        """All operations, outer before inner, in the order of the program."""
        yield from walk(self.body)


def walk(region: Region) -> Iterator[Op]:
    """All operations of a region, outer before inner, in the order of the program."""
    for block in region.blocks:
        for op in block.ops:
            yield op
            for inner in op.regions:
                yield from walk(inner)


def index_uses(function: Function) -> None:
    """Numbers the operations in program order and fills in who uses what, which rewrites do not keep up to date."""
    ops = list(function.walk())
    for order, op in enumerate(ops):
        op.order = order
        for value in op.results:
            value.uses = []
        for region in op.regions:
            for block in region.blocks:
                for value in block.args:
                    value.uses = []
    for value in function.args:
        value.uses = []
    for op in ops:
        for value in op.operands:
            value.uses.append(op)


def new_op(name: str, operands: list[Value], types: list[Type], like: Op, **attrs: Any) -> Op:
    """An operation made by a rewrite, at the source position of `like`."""
    op = Op(name, operands, attrs=attrs, loc=like.loc)
    op.results = [Value(type_, op, index=i) for i, type_ in enumerate(types)]
    return op
