"""What is known about values before they are computed: how they grow along a block's sides, what divides them."""

from __future__ import annotations

from collections.abc import Set
from math import gcd, prod

from cbtriton.kernels.cpu_backend.ir import INT_BITS, Value

AFFINE = "affine"
_BROADCASTS = ("tt.splat", "tt.broadcast", "tt.expand_dims")
_WIDENINGS = ("arith.extsi", "arith.extui", "arith.index_cast")


def stride(value: Value, dim: int, arrays: Set[Value], span: int = 0) -> int | str | None:
    """By how much a value grows from one element to the next along `dim`.

    Offsets are assumed not to wrap around, though what they are computed from may.

    Args:
        value: A block, or a scalar.
        dim: A side of the block.
        arrays: Values that are not looked into.
        span: Ask only within runs of so many elements, that begin at multiples of it; 0 for the whole side.

    Returns:
        A number; `AFFINE` if it is the same for all elements but not known; None if there is no such number.
    """
    step = _stride(value, dim, arrays, span)
    bits = INT_BITS.get(value.type.elem)
    return (step + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1) if bits and isinstance(step, int) else step


def _stride(value: Value, dim: int, arrays: Set[Value], span: int) -> int | str | None:
    if not value.type.is_block or value.type.shape[dim] == 1:
        return 0
    op = value.op
    if value in arrays or op is None:
        return None
    match op.name:
        case "tt.make_range":
            return 1
        case "tt.splat":
            return 0
        case "tt.broadcast":
            return stride(op.operands[0], dim, arrays, span)
        case "tt.expand_dims":
            axis = op.attrs["axis"]
            return 0 if dim == axis else stride(op.operands[0], dim - (dim > axis), arrays, span)
        case "tt.trans":
            return stride(op.operands[0], op.attrs["order"][dim], arrays, span)
        case "arith.constant":
            return None if isinstance(op.attrs["value"], list) else 0
        case "tt.reshape" | "tt.join" | "tt.split":
            return None
    strides = [stride(operand, dim, arrays, span) for operand in op.operands]
    if all(s == 0 for s in strides):
        return 0
    if None in strides:
        return None
    match op.name:
        case "arith.addi" | "tt.addptr":
            return AFFINE if AFFINE in strides else sum(strides)
        case "arith.subi":
            return AFFINE if AFFINE in strides else strides[0] - strides[1]
        case "arith.extsi" | "arith.index_cast":
            return strides[0]
        case "arith.muli":
            for i in (0, 1):
                if strides[i] == 0:
                    factor = constant_of(op.operands[i])
                    known = factor is not None and strides[1 - i] != AFFINE
                    return strides[1 - i] * factor if known else AFFINE
        case "arith.divsi" | "arith.remsi" | "arith.divui" | "arith.remui":
            source, by = op.operands[0], constant_of(op.operands[1])
            if span and by and strides[0] == 1 and by % span == 0 and divides(span, source) and is_positive(source):
                return 1 if op.name.startswith("arith.rem") else 0
    return None


def constant_of(value: Value) -> int | None:
    """The number that a value is, or that all elements of a block are."""
    while value.op is not None and value.op.name in (*_BROADCASTS, *_WIDENINGS):
        value = value.op.operands[0]
    if value.op is not None and value.op.name == "arith.constant" and not isinstance(value.op.attrs["value"], list):
        return int(value.op.attrs["value"])
    return None


def divides(span: int, value: Value) -> bool:
    """Whether `span` divides the elements at multiples of it along every side."""
    return _divisor(value, span) % span == 0


def _divisor(value: Value, span: int) -> int:
    op = value.op
    if op is None:
        return 1
    operands = op.operands
    match op.name:
        case "arith.constant":
            return 1 if isinstance(op.attrs["value"], list) else int(op.attrs["value"])
        case "tt.make_range":
            return gcd(op.attrs["start"], span)
        case "arith.addi" | "arith.subi":
            return gcd(*(_divisor(v, span) for v in operands))
        case "arith.muli":
            return prod(_divisor(v, span) for v in operands)
        case name if name in ("tt.splat", *_WIDENINGS):
            return _divisor(operands[0], span)
    return 1


def is_positive(value: Value) -> bool:
    """Whether a value is known to be 0 or more, if nothing wraps around."""
    op = value.op
    if op is None:
        return False
    match op.name:
        case "arith.constant":
            return not isinstance(op.attrs["value"], list) and op.attrs["value"] >= 0
        case "tt.make_range" | "tt.get_program_id" | "tt.get_num_programs":
            return True
        case "arith.addi" | "arith.muli":
            return all(is_positive(v) for v in op.operands)
        case name if name in (*_BROADCASTS, *_WIDENINGS):
            return is_positive(op.operands[0])
    return False
