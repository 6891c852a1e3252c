"""Loop nests: C++ for everything that happens element by element.

A nest has levels: 0 is the code around the loops, each loop adds one. An expression is written at the outermost level
that knows all it depends on, so that what is the same for a row is computed once per row. The innermost loop is left
to the C++ compiler to vectorise; where elements are masked it is cut into strips, and strips whose masks are all true
run without them.

| operation | what it becomes at index `i` |
|---|---|
| splat, make_range, constant | the scalar, `start + i`, the literal |
| broadcast, expand_dims, trans | the operand at fewer, or reordered, indices |
| reshape | the operand's array at the same linear index |
| join, split | one of the operands by the last index; the operand with one more index |
| load | `pointer[i]`, with `mask ? … : other` |
| gather | the operand's array at a computed index |
| element-wise | the expression in `ops.ELEMENT_WISE` |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from cbtriton.kernels.cpu_backend.analysis import AFFINE, stride
from cbtriton.kernels.cpu_backend.errors import UnsupportedError
from cbtriton.kernels.cpu_backend.instrument import Instrument
from cbtriton.kernels.cpu_backend.ir import Op, Region, Type, Value
from cbtriton.kernels.cpu_backend.ops import ELEMENT_WISE, MEMORY, SIGNED_ORDERS, literal, register_type
from cbtriton.kernels.cpu_backend.passes import TRANSPARENT, Plan, is_unit_reshape

# Elements per strip, and accumulators of a reduction.
STRIP = 32
# Trailing sides up to this product are unrolled, so that values joined along them are selected at compile time.
_UNROLLED = 4


@dataclass(frozen=True, slots=True)
class Expr:
    """C++ for a number.

    Attributes:
        code: An expression without effects.
        level: From which level on it is known.
        const: Its value, if known at compile time.
        origin: Of an index, where its strip begins, if addresses are affine within strips only.
    """

    code: str
    level: int = 0
    const: int | None = None
    origin: Expr | None = None


ZERO = Expr("0", 0, 0)


def constant_index(value: int) -> Expr:
    """An index known at compile time."""
    return Expr(str(value), 0, value)


def linear_index(index: tuple[Expr, ...], shape: tuple[int, ...]) -> Expr:
    """The position in an array of an element."""
    total, level, terms = 0, 0, []
    for i, (part, _) in enumerate(zip(index, shape, strict=True)):
        stride = prod(shape[i + 1 :])
        level = max(level, part.level)
        if part.const is not None:
            total += part.const * stride
        else:
            terms.append(part.code if stride == 1 else f"{part.code} * {stride}")
    if not terms:
        return constant_index(total)
    return Expr(f"({' + '.join(terms + ([str(total)] if total else []))})", level)


class Names:
    """Fresh C++ names."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, prefix: str) -> str:
        """A name that was not used before."""
        self._next += 1
        return f"{prefix}{self._next}"


@dataclass(slots=True)
class Context:
    """What nests of a kernel share.

    Attributes:
        plan: Which values have arrays.
        scalars: C++ names of the scalar values so far.
        arrays: C++ names of the arrays so far.
        names: Source of new names.
        kernel: The kernel's name, for messages.
        instrument: Checks accesses, in checking mode.
    """

    plan: Plan
    scalars: dict[Value, str]
    arrays: dict[Value, str]
    names: Names
    kernel: str
    instrument: Instrument | None = None

    def guard(self, op: Op, place: str, value: str = "") -> str:
        """In checking mode, what is evaluated before an access, and is true; see `Instrument.condition`."""
        return self.instrument.condition(op, place, value) if self.instrument else ""


def read_memory(place: str, type_: Type, raw: bool = False) -> str:
    """A register's value from memory."""
    if type_.elem in ("f16", "bf16") and not raw:
        return f"from_{type_.elem}({place})"
    return f"({place} != 0)" if type_.elem == "i1" else place


def written(value: str, type_: Type) -> str:
    """What goes to memory for a register's value."""
    return f"to_{type_.elem}({value})" if type_.elem in ("f16", "bf16") else value


class Nest:
    """Builds one loop nest.

    Args:
        context: What nests of a kernel share.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lines: list[list[str]] = [[]]
        self._memo: dict[tuple, Expr] = {}
        self._assumed: set[tuple] = set()
        self._denied: set[tuple] = set()
        self._masks: list[tuple] = []
        self._spans: set[int] = set()
        self._span = 0

    # Code

    @property
    def code(self) -> list[str]:
        """The lines so far."""
        return self._lines[0]

    @property
    def level(self) -> int:
        """The innermost level."""
        return len(self._lines) - 1

    def line(self, text: str, level: int | None = None) -> None:
        """Adds a line of code at the end of a level, the innermost one if none is given."""
        self._lines[self.level if level is None else level].append(text)

    def named(self, code: str, kind: str, level: int) -> Expr:
        """Gives a name to an expression, at the level where it is known."""
        name = self._context.names("t")
        self.line(f"{kind} const {name} = {code};", level)
        return Expr(name, level)

    def loops(
        self,
        shape: tuple[int, ...],
        body: Callable[[tuple[Expr, ...]], None],
        vector: bool = True,
        skips: bool = False,
    ) -> list[str]:
        """Loops over all elements of a block.

        Args:
            shape: The block's sides.
            body: Writes the code for one element.
            vector: Whether iterations of the innermost loop may run in any order.
            skips: Whether nothing is to be done where masks are false.

        Returns:
            The lines of code.
        """
        inner = len(shape)
        if any(n > 1 for n in shape):
            while prod(shape[inner - 1 :]) <= _UNROLLED and prod(shape[: inner - 1]) > 1:
                inner -= 1
        self._loop(shape, inner, (), body, vector, skips)
        return self._lines[0]

    def _loop(
        self,
        shape: tuple,
        inner: int,
        index: tuple[Expr, ...],
        body: Callable,
        vector: bool = True,
        skips: bool = False,
    ) -> None:
        dim = len(index)
        rest = shape[dim:inner]
        if all(n == 1 for n in rest):
            self._unrolled(shape, (*index, *(ZERO for _ in rest)), body)
        elif rest[0] == 1:
            self._loop(shape, inner, (*index, ZERO), body, vector, skips)
        elif all(n == 1 for n in rest[1:]):
            zeros = tuple(ZERO for _ in rest[1:])
            self.vector_loop(rest[0], lambda i: self._unrolled(shape, (*index, i, *zeros), body), vector, skips)
        else:
            self.open_loop(rest[0], lambda i: self._loop(shape, inner, (*index, i), body, vector, skips))

    def _unrolled(self, shape: tuple, index: tuple[Expr, ...], body: Callable) -> None:
        if len(index) == len(shape):
            body(index)
            return
        for i in range(shape[len(index)]):
            self._unrolled(shape, (*index, constant_index(i)), body)

    def open_loop(self, size: int, body: Callable[[Expr], None], start: int = 0) -> None:
        """An outer loop, one level deeper."""
        name = self._context.names("i")
        level = self.level + 1
        lines = self._captured(level, lambda: body(Expr(name, level)))
        self.line(f"for (int64_t {name} = {start}; {name} < {size}; {name}++) {{")
        self._lines[-1] += lines
        self.line("}")

    def vector_loop(self, size: int, body: Callable[[Expr], None], vector: bool = True, skips: bool = False) -> None:
        """An innermost loop.

        It is cut into strips where a mask varies in it, or where addresses are affine within strips only.

        Args:
            size: Iterations.
            body: Writes the code for one element.
            vector: Whether iterations may run in any order.
            skips: Whether nothing is to be done where masks are false.
        """
        name, level = self._context.names("j"), self.level + 1
        outer_spans, self._spans = self._spans, set()
        lines = self._captured(level, lambda: body(Expr(name, level)))
        spans, self._spans = self._spans, outer_spans
        masks = self._take_masks()
        if spans and size % min(spans) == 0:
            self.strips(size, min(spans), 0, body, vector, skips, has_origin=True)
        elif self._may_speed_up(masks, size):
            self.strips(size, min(size, STRIP), 0, body, vector, skips)
        else:
            hint = "CPU_VECTORIZE" if vector else ""
            self._lines[-1] += [hint, f"for (int64_t {name} = 0; {name} < {size}; {name}++) {{", *lines, "}"]

    def strips(
        self,
        size: int,
        strip: int,
        start: int,
        body: Callable[[Expr], None],
        vector: bool = True,
        skips: bool = False,
        has_origin: bool = False,
    ) -> None:
        """An innermost loop in strips of fixed length, with and without masks.

        Args:
            size: Where the loop ends.
            strip: Iterations of a strip, numbered by the variable `l`, which may run in any order if `vector`.
            start: Where the loop begins.
            body: Writes the code for one element.
            vector: See above.
            skips: See `vector_loop`.
            has_origin: Whether addresses are affine within strips only.
        """
        block, name = self._context.names("j"), self._context.names("j")
        level = self.level + 1
        self._span = strip if has_origin else 0
        lines = self._captured(
            level, lambda: self._strip(strip, Expr(block, level), name, body, vector, skips, has_origin)
        )
        self._lines[-1] += [f"for (int64_t {block} = {start}; {block} < {size}; {block} += {strip}) {{", *lines, "}"]

    def _strip(
        self, strip: int, block: Expr, name: str, body: Callable, vector: bool, skips: bool, has_origin: bool
    ) -> None:
        outer, level = self.level, self.level + 1
        index = Expr(name, level, origin=block if has_origin else None)
        lanes = f"for (int64_t l = 0; l < {strip}; l++) {{ const int64_t {name} = {block.code} + l;"
        hint = "CPU_VECTORIZE" if vector else ""
        self._take_masks()
        slow = self._captured(level, lambda: body(index))
        masks = self._take_masks()
        if not self._may_speed_up(masks, strip):
            self._lines[-1] += [hint, lanes, *slow, "}"]
            return
        before, self._assumed = self._assumed, self._assumed | set(masks)
        fast = self._captured(level, lambda: body(index))
        self._assumed = before
        self._take_masks()
        ends = block, Expr(f"({block.code} + {strip - 1})", outer)
        spans = [self._mask_span(value, at, index, ends, self._span if has_origin else 0) for value, at in masks]
        if None not in spans:
            every, some = " & ".join(span[0] for span in spans), " | ".join(span[1] for span in spans)
            self._lines[-1] += [f"if ({every}) {{", hint, lanes, *fast, "} }"]
            self._lines[-1] += [f"else if ({some}) {{", lanes, *slow, "} }"]
            if not skips:
                before, self._denied = self._denied, self._denied | set(masks)
                none = self._captured(level, lambda: body(index))
                self._denied = before
                self._take_masks()
                self._lines[-1] += ["else {", hint, lanes, *none, "} }"]
        elif skips and len(masks) == 1:
            # Branches on masks that follow no pattern would often be foreseen wrongly: only the places to go to are.
            value, at = masks[0]
            on, bits = self._context.names("on"), self._context.names("bits")
            check = self._captured(level, lambda: self.line(f"{on}[l] = {self.value(value, at).code};"))
            self._lines[-1] += [f"alignas(32) uint8_t {on}[{strip}];", hint, lanes, *check, "}"]
            self._lines[-1] += [f"uint32_t {bits} = bits_of<{strip}>({on});", f"if ({bits} == all_bits<{strip}>) {{"]
            self._lines[-1] += [hint, lanes, *fast, "} }", f"else for (; {bits}; {bits} &= {bits} - 1) {{"]
            self._lines[-1] += [f"const int64_t l = __builtin_ctz({bits}), {name} = {block.code} + l;", *fast, "}"]
        else:
            every, some = self._context.names("all"), self._context.names("any")

            def check() -> None:
                parts = [self.value(value, at).code for value, at in masks]
                self.line(f"{every} &= (uint8_t)({' & '.join(parts)}); {some} |= (uint8_t)({' | '.join(parts)});")

            checks = self._captured(level, check)
            self._lines[-1] += [f"uint8_t {every} = 1, {some} = 0;", lanes, *checks, "}"]
            self._lines[-1] += [f"if ({every}) {{", hint, lanes, *fast, "} }"]
            self._lines[-1] += [f"else if ({some}) {{" if skips else "else {", lanes, *slow, "} }"]

    def _mask_span(
        self, mask: Value, at: tuple[Expr, ...], moving: Expr, ends: tuple[Expr, Expr], span: int
    ) -> tuple[str, str] | None:
        """Whether a mask is true in all of a strip, and whether it may be in any of it.

        Judged by the strip's ends; None if these do not tell. Numbers that grow along the strip are compared with ones
        that do not, so what is true at both ends is true between them. As for addresses, none may wrap around.
        """
        dims = [dim for dim, i in enumerate(at) if i is moving]
        if len(dims) != 1 or any(i.level > moving.level - 1 for dim, i in enumerate(at) if dim != dims[0]):
            return None
        op = mask.op
        if op is not None and mask not in self._context.plan.arrays:
            if op.name in ("arith.andi", "arith.ori"):
                parts = [self._mask_span(operand, at, moving, ends, span) for operand in op.operands]
                sign = " & " if op.name == "arith.andi" else " | "
                return None if None in parts else tuple(f"({sign.join(x)})" for x in zip(*parts, strict=True))
            if op.name in ("tt.broadcast", "tt.expand_dims", "tt.splat"):
                source = self._operand_index(op, at)
                if all(i is not moving for i in source):
                    code = self.value(mask, tuple(ZERO if i is moving else i for i in at)).code
                    return code, code
                return self._mask_span(op.operands[0], source, moving, ends, span)
        if not self._is_monotone(mask, dims[0], span):
            return None
        first, last = (self.value(mask, tuple(end if i is moving else i for i in at)).code for end in ends)
        return f"({first} & {last})", f"({first} | {last})"

    @staticmethod
    def _operand_index(op: Op, index: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """The element of a view's operand."""
        source = op.operands[0].type.shape or ()
        if op.name == "tt.expand_dims":
            return index[: op.attrs["axis"]] + index[op.attrs["axis"] + 1 :]
        return tuple(ZERO if n == 1 or op.name == "tt.splat" else i for i, n in zip(index, source, strict=False))

    def _is_monotone(self, mask: Value, dim: int, span: int) -> bool:
        """Whether a mask changes at most once along a side."""
        if stride(mask, dim, self._opaque(), span) == 0:
            return True
        op = mask.op
        if op is None or op.name != "arith.cmpi" or op.attrs["predicate"] not in SIGNED_ORDERS:
            return False
        strides = [stride(operand, dim, self._opaque(), span) for operand in op.operands]
        return 0 in strides and all(isinstance(step, int) for step in strides)

    def _may_speed_up(self, masks: list[tuple], size: int) -> bool:
        return bool(masks) and size >= 8 and self._context.instrument is None

    def _take_masks(self) -> list[tuple]:
        masks, self._masks = self._masks, []
        return masks

    def _captured(self, level: int, write: Callable[[], None]) -> list[str]:
        """The lines that `write` adds at a new level; what it computed there is forgotten."""
        self._lines.append([])
        write()
        self._memo = {key: expr for key, expr in self._memo.items() if expr.level < level}
        return self._lines.pop()

    # Values

    def value(self, value: Value, index: tuple[Expr, ...]) -> Expr:
        """An element of a block, or a scalar."""
        if not value.type.is_block:
            return Expr(self._context.scalars[value])
        key = (value, index)
        if key not in self._memo:
            self._memo[key] = self._element(value, index)
        return self._memo[key]

    def _element(self, value: Value, index: tuple[Expr, ...]) -> Expr:
        if value in self._context.plan.arrays:
            at = linear_index(index, value.type.shape)
            place = f"{self._context.arrays[value]}[{at.code}]"
            if value in self._context.plan.raw:
                place = f"from_{value.type.elem}({place})"
            return self.named(place, register_type(value.type), at.level)
        op = value.op
        handler = getattr(self, f"_{op.name.replace('.', '_')}", None)
        if handler is not None:
            return handler(op, value, index)
        if op.name not in ELEMENT_WISE:
            raise UnsupportedError(f"operation {op.name}", op.loc, self._context.kernel)
        if op.name == "arith.constant":
            return Expr(literal(op.attrs["value"], value.type))
        parts = [self.value(operand, index) for operand in op.operands]
        code = ELEMENT_WISE[op.name].lower(op, [part.code for part in parts])
        return self.named(code, register_type(value.type), max((part.level for part in parts), default=0))

    def _tt_splat(self, op: Op, value: Value, index: tuple[Expr, ...]) -> Expr:
        source = op.operands[0]
        return self.value(source, tuple(ZERO for _ in source.type.shape or ()))

    def _tt_broadcast(self, op: Op, value: Value, index: tuple[Expr, ...]) -> Expr:
        source = op.operands[0]
        return self.value(source, tuple(ZERO if n == 1 else i for i, n in zip(index, source.type.shape, strict=True)))

    def _tt_expand_dims(self, op: Op, value: Value, index: tuple[Expr, ...]) -> Expr:
        axis = op.attrs["axis"]
        return self.value(op.operands[0], index[:axis] + index[axis + 1 :])

    def _tt_trans(self, op: Op, value: Value, index: tuple[Expr, ...]) -> Expr:
        source: list[Expr] = [ZERO] * len(index)
        for i, axis in zip(index, op.attrs["order"], strict=True):
            source[axis] = i
        return self.value(op.operands[0], tuple(source))

    def _tt_reshape(self, op: Op, value: Value, index: tuple[Expr, ...]) -> Expr:
        source = op.operands[0]
        if is_unit_reshape(op):
            parts = iter(i for i, n in zip(index, value.type.shape, strict=True) if n != 1)
            return self.value(source, tuple(ZERO if n == 1 else next(parts) for n in source.type.shape))
        at = linear_index(index, value.type.shape)
        if source not in self._context.plan.arrays:
            return self.value(source, tuple(ZERO for _ in source.type.shape))
        return self.named(f"{self._context.arrays[source]}[{at.code}]", register_type(value.type), at.level)

    def _tt_join(self, op: Op, value: Value, index: tuple[Expr, ...]) -> Expr:
        *rest, last = index
        if last.const is not None:
            return self.value(op.operands[last.const], tuple(rest))
        parts = [self.value(operand, tuple(rest)) for operand in op.operands]
        level = max(last.level, *(part.level for part in parts))
        return self.named(f"{last.code} ? {parts[1].code} : {parts[0].code}", register_type(value.type), level)

    def _tt_split(self, op: Op, value: Value, index: tuple[Expr, ...]) -> Expr:
        return self.value(op.operands[0], (*index, constant_index(value.index)))

    def _tt_make_range(self, op: Op, value: Value, index: tuple[Expr, ...]) -> Expr:
        start, at = op.attrs["start"], index[0]
        if at.const is not None:
            return Expr(f"(int32_t){start + at.const}")
        return Expr(f"(int32_t)({at.code} + {start})" if start else f"(int32_t){at.code}", at.level)

    def _ub_poison(self, op: Op, value: Value, index: tuple[Expr, ...]) -> Expr:
        return Expr(literal(0, value.type))

    def _tt_gather(self, op: Op, value: Value, index: tuple[Expr, ...]) -> Expr:
        source, axis = op.operands[0], op.attrs["axis"]
        chosen = self.value(op.operands[1], index)
        at = linear_index((*index[:axis], Expr(chosen.code, chosen.level), *index[axis + 1 :]), source.type.shape)
        return self.named(f"{self._context.arrays[source]}[{at.code}]", register_type(value.type), at.level)

    # Memory

    def address(self, pointers: Value, index: tuple[Expr, ...]) -> Expr:
        """The place that an element of a block of pointers points to, `base[stride * i]` where it is affine."""
        if not pointers.type.is_block:
            return Expr(f"{self._context.scalars[pointers]}[0]")
        inner = self.level
        dims = [d for d, i in enumerate(index) if i.const is None and i.level == inner]
        if len(dims) == 1 and inner > 0:
            moving = index[dims[0]]
            step, start = self._step(pointers, dims[0], moving)
            first = tuple(start if d == dims[0] else i for d, i in enumerate(index))
            if step == 0:
                return Expr(f"{self.value(pointers, first).code}[0]", self.value(pointers, first).level)
            if step is not None and self.value(pointers, first).level < inner:
                base = self.value(pointers, first)
                if step == AFFINE:
                    next_one = constant_index(1) if start is ZERO else Expr(f"({start.code} + 1)", start.level)
                    second = tuple(next_one if d == dims[0] else i for d, i in enumerate(index))
                    other = self.value(pointers, second)
                    step = self._named_once(f"{other.code} - {base.code}", "int64_t", max(base.level, other.level))
                at = moving.code if start is ZERO else "l"
                return Expr(f"{base.code}[{at if step == 1 else f'{at} * {step}'}]", inner)
        place = self.value(pointers, index)
        return Expr(f"{place.code}[0]", place.level)

    def _step(self, pointers: Value, dim: int, moving: Expr) -> tuple[int | str | None, Expr]:
        """The stride along the innermost loop, and the index that addresses are counted from."""
        size, arrays = pointers.type.shape[dim], self._opaque()
        step = stride(pointers, dim, arrays)
        if step is not None:
            return step, ZERO
        if moving.origin is not None:
            return stride(pointers, dim, arrays, self._span), moving.origin
        for span in (32, 16, 8):
            if span <= size and stride(pointers, dim, arrays, span) is not None:
                self._spans.add(span)
                break
        return None, ZERO

    def _opaque(self) -> set[Value]:
        """Arrays whose contents are not known from how they were computed."""
        return {v for v in self._context.plan.arrays if v.op is None or v.op.name not in TRANSPARENT}

    def _named_once(self, code: str, kind: str, level: int) -> str:
        key = (code, kind)
        if key not in self._memo:
            self._memo[key] = self.named(code, kind, level)
        return self._memo[key].code

    def _mask(self, op: Op, position: int, index: tuple[Expr, ...]) -> Expr | None:
        """An access's mask; None where there is none or it is known to be true."""
        mask = op.operands[position] if len(op.operands) > position else None
        if mask is None or (mask, index) in self._assumed:
            return None
        expr = self.value(mask, index)
        if expr.level == self.level and (mask, index) not in self._masks:
            self._masks.append((mask, index))
        return None if expr.code == "true" else expr

    def _is_assumed(self, op: Op, position: int, index: tuple[Expr, ...]) -> bool:
        return len(op.operands) > position and (op.operands[position], index) in self._assumed

    def _tt_load(self, op: Op, value: Value, index: tuple[Expr, ...]) -> Expr:
        return self.load(op, index)

    def load(self, op: Op, index: tuple[Expr, ...], raw: bool = False) -> Expr:
        """An element of a load; `raw` leaves 16-bit floats as they are in memory."""
        kind = op.result.type
        if len(op.operands) > 1 and (op.operands[1], index) in self._denied:
            other = self.value(op.operands[2], index) if len(op.operands) > 2 else Expr(literal(0, kind))
            return Expr(written(other.code, kind), other.level) if raw and kind.elem in ("f16", "bf16") else other
        raw = raw and kind.elem in ("f16", "bf16")
        place = self.address(op.operands[0], index)
        mask = self._mask(op, 1, index)
        code, level = read_memory(place.code, kind, raw), place.level
        if self._is_assumed(op, 1, index):
            # Nothing says that the address is good outside of the loop that the mask was checked in.
            level = self.level
        other = self.value(op.operands[2], index) if len(op.operands) > 2 else Expr(literal(0, kind))
        conditions = [mask.code] if mask else []
        if guard := self._context.guard(op, place.code):
            conditions.append(guard)
            level = self.level
        if conditions:
            rest = written(other.code, kind) if raw else other.code
            code = f"{' && '.join(conditions)} ? {code} : {rest}"
            level = max(level, other.level, mask.level if mask else 0)
        return self.named(code, MEMORY[kind.elem] if raw else register_type(kind), level)

    def stored(self, value: Value, index: tuple[Expr, ...]) -> str:
        """An element as it goes to memory. Bits that are only copied stay as they are."""
        op = value.op
        if value.type.elem in ("f16", "bf16") and value.type.is_block:
            if value in self._context.plan.raw:
                return f"{self._context.arrays[value]}[{linear_index(index, value.type.shape).code}]"
            if value not in self._context.plan.arrays and op is not None and op.name == "tt.load":
                return self.load(op, index, raw=True).code
            if value not in self._context.plan.arrays and op is not None and op.name == "arith.truncf":
                # Storing rounds, so there is no need to round before.
                return written(self.value(op.operands[0], index).code, value.type)
        return written(self.value(value, index).code, value.type)

    def store(self, op: Op, index: tuple[Expr, ...]) -> None:
        """Writes one element."""
        place = self.address(op.operands[0], index)
        mask = self._mask(op, 2, index)
        value = self.stored(op.operands[1], index)
        conditions = [mask.code] if mask else []
        if guard := self._context.guard(op, place.code, value):
            conditions.append(guard)
        condition = f"if ({' && '.join(conditions)}) " if conditions else ""
        self.line(f"{condition}{place.code} = {value};")

    # Combining regions

    def combine(self, region: Region, arguments: list[str]) -> list[str]:
        """Writes the body of a reduction or scan for given arguments; gives the results' names."""
        block = region.entry
        scope = dict(zip(block.args, arguments, strict=True))
        for op in block.ops[:-1]:
            if op.name not in ELEMENT_WISE or op.regions:
                raise UnsupportedError(f"operation {op.name} within a reduction", op.loc, self._context.kernel)
            parts = [scope[v] if v in scope else self._context.scalars[v] for v in op.operands]
            name = self._context.names("c")
            self.line(f"{register_type(op.result.type)} const {name} = {ELEMENT_WISE[op.name].lower(op, parts)};")
            scope[op.result] = name
        return [scope.get(v) or self._context.scalars[v] for v in block.terminator.operands]
