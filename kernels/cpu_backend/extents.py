"""Which elements of blocks anybody needs: sides have powers of two, and masks often switch their ends off.

Found from the end of the kernel backwards. A store needs what its mask lets through, an operation of its operands what
its result is needed of, and whatever is not listed here needs everything.
"""

from __future__ import annotations

from collections.abc import Mapping

from cbtriton.kernels.cpu_backend.ir import Function, Op, Value
from cbtriton.kernels.cpu_backend.ops import ELEMENT_WISE

# Longer sides are computed whole: in strips of fixed length, parts of them would cost more than they save.
_SHORT = 8
# Predicates of `arith.cmpi`.
_LESS, _LESS_OR_EQUAL = 2, 3

Extent = tuple[int, ...]


def needed_extents(function: Function) -> Mapping[Value, Extent]:
    """How many elements of each side, from the first on, are needed of block values; others are needed whole."""
    finder = _Finder(list(function.walk()))
    while finder.step():
        pass
    return finder.extents


def stored_extent(store: Op) -> Extent:
    """How much of a block a store may write."""
    shape = store.operands[0].type.shape
    return tuple(map(_computed, _true_extent(store.operands[2]), shape)) if len(store.operands) > 2 else shape


def _computed(needed: int, side: int) -> int:
    """How many elements are computed of a side: of more than four an even number, which products like better."""
    return side if side > _SHORT else needed + needed % 2 if needed > 4 else needed


class _Finder:
    def __init__(self, ops: list[Op]) -> None:
        self._ops = ops
        self._loop_ends = {op.regions[0].entry.terminator for op in ops if op.name == "scf.for"}
        self.extents: dict[Value, Extent] = {}
        self._has_grown = False

    def step(self) -> bool:
        """Goes through the kernel once; says whether any extent has grown."""
        self._has_grown = False
        for op in reversed(self._ops):
            if op not in self._loop_ends:
                self._visit(op)
        return self._has_grown

    def _visit(self, op: Op) -> None:
        if op.name == "scf.for":
            body = op.regions[0].entry
            carried = zip(op.results, body.args[1:], body.terminator.operands, op.operands[3:], strict=True)
            for values in carried:
                self._need_together(values)
            return
        if op.name == "tt.reduce":
            self._need_together(op.results)
        extent = self._of(op.results[0]) if op.results and op.results[0].type.is_block else None
        for position, operand in enumerate(op.operands):
            if operand.type.is_block:
                self._need(operand, self._operand_extent(op, position, extent))

    def _of(self, value: Value) -> Extent:
        return self.extents.get(value, (1,) * len(value.type.shape))

    def _need(self, value: Value, extent: Extent) -> None:
        sides = zip(extent, self._of(value), value.type.shape, strict=True)
        new = tuple(_computed(max(need, known), side) for need, known, side in sides)
        if self.extents.get(value) != new:
            self.extents[value] = new
            self._has_grown = True

    def _need_together(self, values: tuple[Value, ...] | list[Value]) -> None:
        if not values[0].type.is_block:
            return
        extent = tuple(map(max, *map(self._of, values))) if len(values) > 1 else self._of(values[0])
        for value in values:
            self._need(value, extent)

    def _operand_extent(self, op: Op, position: int, extent: Extent | None) -> Extent:
        """What is needed of an operand if `extent` is needed of the result."""
        shape = op.operands[position].type.shape
        if op.name == "tt.store":
            return stored_extent(op)
        if extent is None:
            return shape
        if op.name in ELEMENT_WISE or op.name == "tt.load":
            return extent
        if op.name == "tt.broadcast":
            return tuple(map(min, extent, shape))
        axis = op.attrs.get("axis")
        if op.name == "tt.expand_dims":
            return extent[:axis] + extent[axis + 1 :]
        if op.name == "tt.reduce" and axis == len(shape) - 1:
            return (*extent, shape[axis])
        if op.name == "tt.dot" and len(shape) == 2 and position != 1:
            return (extent[0], shape[1])
        return shape


def _true_extent(mask: Value) -> Extent:
    """The least extent beyond which a mask is false everywhere, as far as that is seen."""
    op, shape = mask.op, mask.type.shape
    if op is None:
        return shape
    if op.name == "arith.andi":
        return tuple(map(min, *map(_true_extent, op.operands)))
    if op.name == "tt.broadcast":
        source = op.operands[0]
        sides = zip(_true_extent(source), source.type.shape, shape, strict=True)
        return tuple(extent if before == after else after for extent, before, after in sides)
    if op.name == "tt.expand_dims":
        axis, extent = op.attrs["axis"], _true_extent(op.operands[0])
        return (*extent[:axis], 1, *extent[axis:])
    if op.name == "arith.cmpi" and op.attrs["predicate"] in (_LESS, _LESS_OR_EQUAL) and len(shape) == 1:
        index, limit = (operand.op for operand in op.operands)
        is_known = limit is not None and limit.name == "arith.constant" and isinstance(limit.attrs["value"], int)
        if is_known and index is not None and index.name == "tt.make_range":
            end = limit.attrs["value"] - index.attrs["start"] + (op.attrs["predicate"] == _LESS_OR_EQUAL)
            return (min(max(end, 1), shape[0]),)
    return shape
