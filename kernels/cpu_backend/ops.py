"""The element-wise operations: what each becomes in C++, and what it costs.

In registers, fp16 and bf16 numbers are floats that the narrow type can represent: every operation that may leave the
type's range is followed by a rounding. In arrays too, unless plans say otherwise. `i1` is `bool`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from cbtriton.kernels.cpu_backend.ir import FLOATS, INT_BITS, Op, Type

REGISTER = {
    "i1": "bool",
    "i8": "int8_t",
    "i16": "int16_t",
    "i32": "int32_t",
    "i64": "int64_t",
    "index": "int64_t",
    "f16": "float",
    "bf16": "float",
    "f32": "float",
    "f64": "double",
}
MEMORY = REGISTER | {"i1": "int8_t", "f16": "uint16_t", "bf16": "uint16_t"}

_INT_COMPARE = {0: "==", 1: "!=", 2: "<", 3: "<=", 4: ">", 5: ">=", 6: "<", 7: "<=", 8: ">", 9: ">="}
# Of `arith.cmpi`: whether one is less or greater than the other, as signed numbers.
SIGNED_ORDERS = (2, 3, 4, 5)
_FLOAT_COMPARE = {
    0: "false",
    1: "({0} == {1})",
    2: "({0} > {1})",
    3: "({0} >= {1})",
    4: "({0} < {1})",
    5: "({0} <= {1})",
    6: "({0} < {1} || {0} > {1})",
    7: "({0} == {0} && {1} == {1})",
    8: "!({0} < {1} || {0} > {1})",
    9: "!({0} <= {1})",
    10: "!({0} < {1})",
    11: "!({0} >= {1})",
    12: "!({0} > {1})",
    13: "({0} != {1})",
    14: "({0} != {0} || {1} != {1})",
    15: "true",
}


@dataclass(frozen=True, slots=True)
class ElementWise:
    """An element-wise operation.

    Attributes:
        lower: Gives the C++ expression, from the operation and the expressions of its operands.
        cost: Rough number of instructions, by which plans decide between computing twice and keeping a result.
    """

    lower: Callable[[Op, list[str]], str]
    cost: int = 1


def register_type(type_: Type) -> str:
    """The C++ type of one element in a register."""
    if type_.elem == "ptr":
        return f"{MEMORY.get(type_.pointee, 'char')}*"
    return REGISTER[type_.elem]


def unsigned(type_: Type) -> str:
    """The C++ unsigned integer type of an element."""
    return "bool" if type_.elem == "i1" else f"u{REGISTER[type_.elem]}"


def literal(value: float | bool, type_: Type) -> str:
    """A constant in C++."""
    if type_.elem == "i1":
        return "true" if value else "false"
    if type_.elem in INT_BITS:
        bits = INT_BITS[type_.elem]
        value = (int(value) + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
        if bits == 64:
            return "INT64_MIN" if value == -(2**63) else f"INT64_C({value})"
        return "INT32_MIN" if value == -(2**31) else f"({REGISTER[type_.elem]}){value}"
    if type_.elem == "ptr":
        return f"({register_type(type_)})0"
    kind = REGISTER[type_.elem]
    if math.isnan(value):
        return f"({kind})NAN"
    if math.isinf(value):
        return f"({kind})({'-' if value < 0 else ''}INFINITY)"
    return f"({kind}){float(value).hex()}"


def rounded(expr: str, type_: Type) -> str:
    """`expr`, a float, rounded to the type if it is a 16-bit one."""
    return f"round_{type_.elem}({expr})" if type_.elem in ("f16", "bf16") else expr


# Numbers of one bit: sums and products modulo 2, and 1 is the number -1.
_BITS = {
    "arith.addi": "{0} ^ {1}",
    "arith.subi": "{0} ^ {1}",
    "arith.muli": "{0} & {1}",
    "arith.maxsi": "{0} & {1}",
    "arith.minsi": "{0} | {1}",
}


def _wrapped(template: str) -> Callable[[Op, list[str]], str]:
    def lower(op: Op, args: list[str]) -> str:
        if op.result.type.elem == "i1" and op.name in _BITS:
            return f"(bool)({_BITS[op.name].format(*args)})"
        return f"({REGISTER[op.result.type.elem]})({template.format(*args, U=unsigned(op.result.type))})"

    return lower


def _float(template: str) -> Callable[[Op, list[str]], str]:
    return lambda op, args: rounded(f"({template.format(*args)})", op.result.type)


def _shift(template: str) -> Callable[[Op, list[str]], str]:
    def lower(op: Op, args: list[str]) -> str:
        kind = op.result.type
        if kind.elem == "i1":
            return args[0]
        amount = f"({args[1]} & {INT_BITS[kind.elem] - 1})"
        return f"({REGISTER[kind.elem]})({template.format(args[0], amount, U=unsigned(kind))})"

    return lower


def _compare_ints(op: Op, args: list[str]) -> str:
    predicate = op.attrs["predicate"]
    if predicate >= 6:
        args = [f"({unsigned(op.operands[0].type)}){a}" for a in args]
    elif op.operands[0].type.elem == "i1":
        args = [f"-(int){a}" for a in args]
    return f"({args[0]} {_INT_COMPARE[predicate]} {args[1]})"


def _compare_floats(op: Op, args: list[str]) -> str:
    return _FLOAT_COMPARE[op.attrs["predicate"]].format(*args)


def _constant(op: Op, args: list[str]) -> str:
    return literal(op.attrs["value"], op.result.type)


def _extend_signed(op: Op, args: list[str]) -> str:
    kind = REGISTER[op.result.type.elem]
    # A bit that is 1 is the number -1.
    return f"({kind})(-({kind}){args[0]})" if op.operands[0].type.elem == "i1" else f"({kind}){args[0]}"


def _extend_unsigned(op: Op, args: list[str]) -> str:
    return f"({REGISTER[op.result.type.elem]})({unsigned(op.operands[0].type)}){args[0]}"


def _truncate(op: Op, args: list[str]) -> str:
    if op.result.type.elem == "i1":
        return f"(bool)({args[0]} & 1)"
    return f"({REGISTER[op.result.type.elem]}){args[0]}"


# In the attribute `rounding`; the other value is to nearest even.
_TOWARD_ZERO = 0


def _convert_float(op: Op, args: list[str]) -> str:
    source, target = op.operands[0].type, op.result.type
    if op.attrs.get("rounding") == _TOWARD_ZERO and FLOATS.index(target.elem) < FLOATS.index(source.elem):
        return f"toward_zero_{target.elem}({args[0]})"
    is_narrowed_once = source.elem == "f64" and target.elem in ("f16", "bf16")
    expr = args[0] if is_narrowed_once else f"({REGISTER[target.elem]}){args[0]}"
    return expr if source.elem in ("f16", "bf16") and target.elem in ("f32", "f64") else rounded(expr, target)


def _signed_to_float(op: Op, args: list[str]) -> str:
    value = f"-(int32_t){args[0]}" if op.operands[0].type.elem == "i1" else args[0]
    return rounded(f"({REGISTER[op.result.type.elem]})({value})", op.result.type)


def _unsigned_to_float(op: Op, args: list[str]) -> str:
    value = f"({unsigned(op.operands[0].type)}){args[0]}"
    return rounded(f"({REGISTER[op.result.type.elem]}){value}", op.result.type)


def _float_to_int(op: Op, args: list[str]) -> str:
    target = op.result.type
    if target.elem == "i64" and op.operands[0].type.elem != "f64" and op.name == "arith.fptosi":
        return f"to_i64({args[0]})"
    if op.name == "arith.fptoui" and target.elem != "i1":
        return f"({REGISTER[target.elem]})({unsigned(target)}){args[0]}"
    return f"({REGISTER[target.elem]}){args[0]}"


def _bitcast(op: Op, args: list[str]) -> str:
    source, target = op.operands[0].type, op.result.type
    if source.elem == target.elem and source.elem != "ptr":
        return args[0]
    if "ptr" in (source.elem, target.elem):
        return f"({register_type(target)})({args[0]})"
    value = f"to_{source.elem}({args[0]})" if source.elem in ("f16", "bf16") else args[0]
    if target.elem in ("f16", "bf16"):
        return f"from_{target.elem}(bits_as<uint16_t>({value}))"
    return f"bits_as<{REGISTER[target.elem]}>({value})"


def _fused(op: Op, args: list[str]) -> str:
    # fp32 has no room for products and sums of narrow numbers: the result would be rounded twice.
    parts = [f"(double){arg}" for arg in args] if op.result.type.elem in ("f16", "bf16") else args
    return rounded(f"fma_({', '.join(parts)})", op.result.type)


def _add_pointer(op: Op, args: list[str]) -> str:
    return f"({args[0]} + (int64_t){args[1]})"


def _clamp(op: Op, args: list[str]) -> str:
    # 0 lets a number win over NaN, all other values let NaN win.
    low, high = ("maxnum", "minnum") if op.attrs.get("propagateNan", 0) == 0 else ("maximum", "minimum")
    return f"{high}({low}({args[0]}, {args[1]}), {args[2]})"


ELEMENT_WISE = {
    "arith.constant": ElementWise(_constant, 0),
    "arith.addi": ElementWise(_wrapped("{0} + {1}")),
    "arith.subi": ElementWise(_wrapped("{0} - {1}")),
    "arith.muli": ElementWise(_wrapped("({U}){0} * ({U}){1}")),
    "arith.divsi": ElementWise(lambda op, a: f"div_s({a[0]}, {a[1]})", 4),
    "arith.divui": ElementWise(lambda op, a: f"div_u({a[0]}, {a[1]})", 4),
    "arith.remsi": ElementWise(lambda op, a: f"rem_s({a[0]}, {a[1]})", 4),
    "arith.remui": ElementWise(lambda op, a: f"rem_u({a[0]}, {a[1]})", 4),
    "arith.andi": ElementWise(_wrapped("{0} & {1}")),
    "arith.ori": ElementWise(_wrapped("{0} | {1}")),
    "arith.xori": ElementWise(_wrapped("{0} ^ {1}")),
    "arith.shli": ElementWise(_shift("({U}){0} << {1}")),
    "arith.shrsi": ElementWise(_shift("{0} >> {1}")),
    "arith.shrui": ElementWise(_shift("({U}){0} >> {1}")),
    "arith.maxsi": ElementWise(_wrapped("max_({0}, {1})")),
    "arith.minsi": ElementWise(_wrapped("min_({0}, {1})")),
    "arith.maxui": ElementWise(_wrapped("max_(({U}){0}, ({U}){1})")),
    "arith.minui": ElementWise(_wrapped("min_(({U}){0}, ({U}){1})")),
    "arith.cmpi": ElementWise(_compare_ints),
    "arith.cmpf": ElementWise(_compare_floats),
    "arith.select": ElementWise(lambda op, a: f"({a[0]} ? {a[1]} : {a[2]})"),
    "arith.addf": ElementWise(_float("{0} + {1}")),
    "arith.subf": ElementWise(_float("{0} - {1}")),
    "arith.mulf": ElementWise(_float("{0} * {1}")),
    "arith.divf": ElementWise(_float("{0} / {1}"), 4),
    "arith.remf": ElementWise(_float("fmod_({0}, {1})"), 20),
    "arith.negf": ElementWise(_float("-{0}")),
    "arith.maximumf": ElementWise(lambda op, a: f"maximum({a[0]}, {a[1]})"),
    "arith.minimumf": ElementWise(lambda op, a: f"minimum({a[0]}, {a[1]})"),
    "arith.maxnumf": ElementWise(lambda op, a: f"maxnum({a[0]}, {a[1]})"),
    "arith.minnumf": ElementWise(lambda op, a: f"minnum({a[0]}, {a[1]})"),
    "arith.extsi": ElementWise(_extend_signed),
    "arith.extui": ElementWise(_extend_unsigned),
    "arith.trunci": ElementWise(_truncate),
    "arith.index_cast": ElementWise(_truncate),
    "arith.extf": ElementWise(_convert_float),
    "arith.truncf": ElementWise(_convert_float, 4),
    "arith.sitofp": ElementWise(_signed_to_float),
    "arith.uitofp": ElementWise(_unsigned_to_float, 2),
    "arith.fptosi": ElementWise(_float_to_int, 2),
    "arith.fptoui": ElementWise(_float_to_int, 2),
    "arith.bitcast": ElementWise(_bitcast),
    "math.absf": ElementWise(lambda op, a: f"fabs_({a[0]})"),
    "math.absi": ElementWise(lambda op, a: f"abs_({a[0]})"),
    "math.ceil": ElementWise(_float("ceil_({0})")),
    "math.cos": ElementWise(_float("cos_({0})"), 40),
    "math.erf": ElementWise(_float("erf_({0})"), 40),
    "math.exp": ElementWise(_float("exp_({0})"), 16),
    "math.exp2": ElementWise(_float("exp2_({0})"), 15),
    "math.floor": ElementWise(_float("floor_({0})")),
    "math.fma": ElementWise(_fused),
    "math.log": ElementWise(_float("log_({0})"), 20),
    "math.log2": ElementWise(_float("log2_({0})"), 20),
    "math.rsqrt": ElementWise(_float("rsqrt_({0})"), 8),
    "math.sin": ElementWise(_float("sin_({0})"), 40),
    "math.sqrt": ElementWise(_float("sqrt_({0})"), 5),
    "math.tanh": ElementWise(_float("tanh_({0})"), 30),
    "tt.addptr": ElementWise(_add_pointer),
    "tt.bitcast": ElementWise(_bitcast),
    "tt.clampf": ElementWise(_clamp, 2),
    "tt.fp_to_fp": ElementWise(_convert_float, 4),
    "tt.int_to_ptr": ElementWise(_bitcast),
    "tt.mulhiui": ElementWise(lambda op, a: f"mulhi_u({a[0]}, {a[1]})", 2),
    "tt.precise_divf": ElementWise(_float("{0} / {1}"), 4),
    "tt.precise_sqrt": ElementWise(_float("sqrt_({0})"), 5),
    "tt.ptr_to_int": ElementWise(_bitcast),
}
