"""C++ for a whole kernel: scalars, control flow, and one loop nest per value that is kept or written.

| operation | what it becomes |
|---|---|
| scalar operation | a constant of the C++ function |
| scf.for, scf.while, scf.if | `for`, `while`, `if`; carried scalars are variables, carried blocks arrays |
| cf.br, cf.cond_br | `goto` |
| block that several loops need | an array, filled by a loop nest |
| tt.store, tt.atomic_* | a loop nest that writes memory |
| tt.dot | `dot_f32` of `runtime.h` on fp32 arrays, `dot_rows` for few rows by a transpose; other types `dot_any` |
| tt.dot of bf16 | `dot_bf16` and `dot_rows_bf16`, which take pairs where the processor multiplies them |
| tt.dot of few rows by a load | the same, with the right operand read where it is |
| tt.reduce, last axis | up to 32 accumulators over the axis, then a tree |
| tt.reduce, other axis | one accumulator per element of the result, the axis as an outer loop |
| tt.scan | an array, combined in place along the axis |
| tt.histogram, tt.cat | a loop that counts, that copies |
| tt.assert | with `debug` a message and the end of the process |
| tt.print | a loop nest that prints |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cbtriton.kernels.cpu_backend.errors import UnsupportedError
from cbtriton.kernels.cpu_backend.extents import stored_extent
from cbtriton.kernels.cpu_backend.instrument import Access, Instrument
from cbtriton.kernels.cpu_backend.ir import FLOATS, INT_BITS, Block, Function, Op, Type, Value, index_uses
from cbtriton.kernels.cpu_backend.nest import (
    STRIP,
    ZERO,
    Context,
    Expr,
    Names,
    Nest,
    constant_index,
    linear_index,
    read_memory,
    written,
)
from cbtriton.kernels.cpu_backend.ops import ELEMENT_WISE, MEMORY, literal, register_type, unsigned
from cbtriton.kernels.cpu_backend.passes import (
    FEW_ROWS,
    IGNORED,
    VIEWS,
    has_effects,
    is_matrix_transpose,
    make_plan,
    simplify,
    streamed_load,
)

# Arrays of a program that are more than this in all live in memory of the thread instead of on its stack.
_STACK_BYTES = 1 << 20
# Elements of a histogram whose places are computed at a time, before they are counted.
_COUNTED = 512
_BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "f16": 4, "bf16": 4, "f32": 4}

# What an accumulator begins with so that combining changes nothing.
_IDENTITIES = {
    "arith.addf": lambda t: literal(-0.0, t),
    "arith.mulf": lambda t: literal(1.0, t),
    "arith.maxnumf": lambda t: literal(float("nan"), t),
    "arith.minnumf": lambda t: literal(float("nan"), t),
    "arith.maximumf": lambda t: literal(float("-inf"), t),
    "arith.minimumf": lambda t: literal(float("inf"), t),
    "arith.addi": lambda t: literal(0, t),
    "arith.muli": lambda t: literal(1, t),
    "arith.ori": lambda t: literal(0, t),
    "arith.xori": lambda t: literal(0, t),
    "arith.andi": lambda t: literal(-1 if t.elem != "i1" else 1, t),
    "arith.maxsi": lambda t: literal(-(1 << INT_BITS[t.elem] - 1), t),
    "arith.minsi": lambda t: literal((1 << INT_BITS[t.elem] - 1) - 1, t),
    "arith.maxui": lambda t: literal(0, t),
    "arith.minui": lambda t: literal(-1, t),
}

# Numbers in the attribute `atomic_rmw_op`.
_ATOMICS = {
    1: "and",
    2: "or",
    3: "xor",
    4: "add",
    5: "fadd",
    6: "max",
    7: "min",
    8: "umax",
    9: "umin",
    10: "xchg",
}


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel in C++.

    Attributes:
        text: The whole file.
        arguments: Types of the kernel's arguments, as `launch` takes them.
        accesses: In checking mode, the accesses by the numbers, from 1, that failures are reported with.
    """

    text: str
    arguments: tuple[str, ...]
    accesses: tuple[Access, ...]


def emit(function: Function, check: bool = False) -> Source:
    """C++ for a kernel.

    Args:
        function: The kernel as parsed; it is rewritten.
        check: Whether every access is checked; see `checking`.

    Raises:
        UnsupportedError: The kernel uses an operation that is not known.
    """
    simplify(function)
    index_uses(function)
    return _Emitter(function, check).emit()


class _Emitter:
    def __init__(self, function: Function, check: bool) -> None:
        self._function = function
        self._context = Context(
            plan=make_plan(function, is_checked=check),
            scalars={},
            arrays={},
            names=Names(),
            kernel=function.name,
            instrument=Instrument(function) if check else None,
        )
        self._plan = self._context.plan
        self._lines: list[str] = []
        # Functions with branches between blocks declare everything first: C++ jumps over no definition.
        self._declarations: list[str] | None = [] if len(function.body.blocks) > 1 else None
        self._depth = 0
        self._scratch = 0
        # Addresses of rows by the product that reads them next.
        self._row_arrays: dict[Op, str] = {}
        self._on_heap = self._array_bytes() > _STACK_BYTES

    # The file

    def emit(self) -> Source:
        """The whole file."""
        arguments = []
        for i, arg in enumerate(self._function.args):
            name = f"arg{i}"
            self._context.scalars[arg] = name
            kind = register_type(arg.type)
            arguments.append(arg.type.elem)
            if arg.type.elem in FLOATS:
                self._line(f"{kind} const {name} = ({kind})bits_as<double>(args[{i}]);")
            else:
                self._line(f"{kind} const {name} = ({kind})args[{i}];")
        if self._declarations is None:
            self._block(self._function.body.entry)
        else:
            self._branching()
        instrument = self._context.instrument
        text = _FILE.format(
            name=self._function.name,
            body="\n".join(self._lines),
            scratch=f"thread_local Scratch<{self._scratch}> scratch;" if self._on_heap else "",
            definitions=instrument.definitions() if instrument else "",
            begin=_BEGIN_CHECK.format(count=len(arguments)) if instrument else "",
            enter="check.enter(pid0, pid1, pid2);" if instrument else "",
            end="} catch (const Stop&) {}" if instrument else "",
        )
        return Source(text, tuple(arguments), instrument.accesses if instrument else ())

    def _branching(self) -> None:
        start = len(self._lines)
        labels = {id(block): f"block{i}" for i, block in enumerate(self._function.body.blocks)}
        self._labels = labels
        for block in self._function.body.blocks:
            if block is not self._function.body.entry:
                for arg in block.args:
                    self._declare(arg)
        for block in self._function.body.blocks:
            self._line(f"{labels[id(block)]}: {{")
            self._block(block)
            self._line("}")
        self._lines[start:start] = self._declarations or []

    def _array_bytes(self) -> int:
        return sum(value.type.size * _BYTES.get(value.type.elem, 8) for value in self._plan.arrays)

    def _line(self, text: str) -> None:
        self._lines.append(text)

    # Values

    @property
    def _declares_first(self) -> bool:
        return self._declarations is not None and self._depth == 1

    def _declare(self, value: Value, initial: str = "") -> str:
        """Declares a variable or an array for a value."""
        name = self._context.names("v")
        if value.type.is_block:
            kind = MEMORY[value.type.elem] if value in self._plan.raw else register_type(value.type)
            line = self._array(name, kind, value.type.size)
            self._context.arrays[value] = name
        else:
            line = f"{register_type(value.type)} {name};"
            self._context.scalars[value] = name
        (self._declarations if self._declarations is not None and self._depth <= 1 else self._lines).append(line)
        if initial:
            self._line(f"{name} = {initial};")
        return name

    def _array(self, name: str, kind: str, size: int) -> str:
        if not self._on_heap:
            return f"alignas(64) {kind} {name}[{size}];"
        offset = self._scratch
        self._scratch += -(-size * 8 // 64) * 64
        return f"auto& {name} = *({kind}(*)[{size}])(scratch.bytes + {offset});"

    def _define(self, value: Value, code: str) -> None:
        """A scalar that never changes."""
        if self._declares_first:
            self._declare(value, code)
            return
        name = self._context.names("s")
        self._context.scalars[value] = name
        self._line(f"{register_type(value.type)} const {name} = {code};")

    def _fill(self, name: str, value: Value) -> None:
        """Writes all elements of a block value into an array."""

        def body(index: tuple[Expr, ...]) -> None:
            at = linear_index(index, value.type.shape)
            element = nest.stored(value, index) if value in self._plan.raw else nest.value(value, index).code
            nest.line(f"{name}[{at.code}] = {element};")

        nest = Nest(self._context)
        self._scope(nest.loops(self._plan.extent(value), body))

    def _materialise(self, value: Value) -> None:
        """Gives a value its array and fills it."""
        name = self._context.arrays[value] = self._target(value)
        # While it is filled the value is not yet read from the array.
        self._plan.arrays.discard(value)
        raw = value in self._plan.raw
        self._plan.raw.discard(value)

        def body(index: tuple[Expr, ...]) -> None:
            element = nest.stored(value, index) if raw else nest.value(value, index).code
            nest.line(f"{name}[{linear_index(index, value.type.shape).code}] = {element};")

        nest = Nest(self._context)
        self._scope(nest.loops(self._plan.extent(value), body))
        self._plan.arrays.add(value)
        if raw:
            self._plan.raw.add(value)

    def _target(self, value: Value) -> str:
        """The array that a value is computed into."""
        if value in self._plan.in_place:
            name = self._context.arrays[value] = self._context.arrays[self._plan.in_place[value]]
            return name
        return self._declare(value)

    def _scope(self, lines: Iterable[str]) -> None:
        self._line("{")
        self._lines += lines
        self._line("}")

    # Operations

    def _block(self, block: Block) -> None:
        self._depth += 1
        for op in block.ops:
            self._op(op)
        self._depth -= 1

    def _op(self, op: Op) -> None:
        if op.name in IGNORED or op.name == "tt.return":
            if op.name == "tt.return":
                self._line("return;")
            return
        handler = getattr(self, f"_{op.name.replace('.', '_')}", None)
        if handler is not None:
            handler(op)
        elif op.results and op.results[0].type.is_block:
            self._check_known(op)
            for value in op.results:
                if value in self._plan.arrays:
                    self._materialise(value)
        elif op.name in ELEMENT_WISE:
            parts = [self._context.scalars[v] for v in op.operands]
            self._define(op.result, ELEMENT_WISE[op.name].lower(op, parts))
        elif op.name == "ub.poison":
            self._define(op.result, literal(0, op.result.type))
        else:
            raise UnsupportedError(f"operation {op.name}", op.loc, self._function.name)

    def _check_known(self, op: Op) -> None:
        known = op.name in ELEMENT_WISE or op.name in VIEWS
        if not known and op.name not in ("tt.make_range", "tt.load", "tt.gather", "ub.poison"):
            raise UnsupportedError(f"operation {op.name}", op.loc, self._function.name)

    def _arith_constant(self, op: Op) -> None:
        value = op.result
        if not value.type.is_block:
            self._context.scalars[value] = literal(op.attrs["value"], value.type)
        elif isinstance(op.attrs["value"], list):
            name = self._context.names("v")
            items = ", ".join(literal(item, value.type) for item in op.attrs["value"])
            line = f"static const {register_type(value.type)} {name}[] = {{{items}}};"
            (self._declarations if self._declarations is not None else self._lines).append(line)
            self._context.arrays[value] = name
        elif value in self._plan.arrays:
            self._materialise(value)

    def _tt_get_program_id(self, op: Op) -> None:
        self._define(op.result, f"pid{op.attrs['axis']}")

    def _tt_get_num_programs(self, op: Op) -> None:
        self._define(op.result, f"grid.n[{op.attrs['axis']}]")

    def _tt_unsplat(self, op: Op) -> None:
        nest = Nest(self._context)
        expr = nest.value(op.operands[0], tuple(ZERO for _ in op.operands[0].type.shape))
        self._declare(op.result)
        nest.line(f"{self._context.scalars[op.result]} = {expr.code};")
        self._scope(nest.code)

    def _tt_load(self, op: Op) -> None:
        if op.result.type.is_block:
            if op.result in self._plan.arrays:
                self._materialise(op.result)
            return
        nest = Nest(self._context)
        expr = nest.load(op, ())
        if self._declares_first:
            self._lines += nest.code
            self._declare(op.result, expr.code)
        else:
            self._lines += nest.code
            self._context.scalars[op.result] = expr.code

    def _tt_store(self, op: Op) -> None:
        nest = Nest(self._context)
        shape = op.operands[0].type.shape
        if shape is None:
            nest.store(op, ())
            self._scope(nest.code)
            return
        extent = shape if self._context.instrument else stored_extent(op)
        self._scope(nest.loops(extent, lambda index: nest.store(op, index), skips=True))

    def _tt_atomic_rmw(self, op: Op) -> None:
        kind = op.operands[1].type
        update = _ATOMICS.get(op.attrs["atomic_rmw_op"])
        if update is None or kind.elem not in MEMORY:
            raise UnsupportedError(f"atomic operation {op.attrs['atomic_rmw_op']}", op.loc, self._function.name)

        def access(nest: Nest, index: tuple[Expr, ...]) -> str:
            operand = nest.value(op.operands[1], index)
            return _atomic(update, f"&{nest.address(op.operands[0], index).code}", operand.code, kind)

        self._atomic(op, 2, access)

    def _tt_atomic_cas(self, op: Op) -> None:
        kind = op.operands[1].type

        def access(nest: Nest, index: tuple[Expr, ...]) -> str:
            expected, new = (written(nest.value(v, index).code, kind) for v in op.operands[1:3])
            memory, place = MEMORY[kind.elem], f"&{nest.address(op.operands[0], index).code}"
            # Bits are compared, as by the hardware.
            old = f"compare_and_swap<{memory}>({place}, {expected}, {new})"
            return f"from_{kind.elem}({old})" if kind.elem in ("f16", "bf16") else old

        self._atomic(op, 3, access)

    def _tt_atomic_load(self, op: Op) -> None:
        kind = self._atomic_type(op, op.results[0].type)

        def access(nest: Nest, index: tuple[Expr, ...]) -> str:
            return read_memory(f"atomic_load(&{nest.address(op.operands[0], index).code})", kind)

        self._atomic(op, 1, access)

    def _tt_atomic_store(self, op: Op) -> None:
        kind = self._atomic_type(op, op.operands[1].type)

        def access(nest: Nest, index: tuple[Expr, ...]) -> str:
            value = written(nest.value(op.operands[1], index).code, kind)
            return f"atomic_store(&{nest.address(op.operands[0], index).code}, ({MEMORY[kind.elem]}){value})"

        self._atomic(op, 2, access)

    def _atomic_type(self, op: Op, type_: Type) -> Type:
        if type_.elem not in MEMORY:
            raise UnsupportedError(f"{op.name} of type {type_}", op.loc, self._function.name)
        return type_

    def _atomic(self, op: Op, mask_position: int, access: Callable[[Nest, tuple[Expr, ...]], str]) -> None:
        result = op.results[0] if op.results else op.operands[1]
        nest = Nest(self._context)
        is_used = bool(op.results and result.uses)
        name = self._declare(result) if is_used else ""
        kind = register_type(result.type)

        def body(index: tuple[Expr, ...]) -> None:
            conditions = []
            if len(op.operands) > mask_position:
                conditions.append(nest.value(op.operands[mask_position], index).code)
            if guard := self._context.guard(op, nest.address(op.operands[0], index).code):
                conditions.append(guard)
            update = access(nest, index)
            target = f"{name}[{linear_index(index, result.type.shape).code}]" if result.type.is_block else name
            condition = " && ".join(conditions) or "true"
            if is_used:
                nest.line(f"{target} = {condition} ? ({kind}){update} : ({kind})0;")
            else:
                nest.line(f"if ({condition}) {update};")

        if result.type.is_block:
            self._scope(nest.loops(result.type.shape, body, vector=False))
        else:
            body(())
            self._scope(nest.code)

    def _tt_assert(self, op: Op) -> None:
        nest = Nest(self._context)
        text = _c_string(f"{op.loc}: assertion failed: {op.attrs.get('message', '')}\n")

        def body(index: tuple[Expr, ...]) -> None:
            condition = nest.value(op.operands[0], index).code
            nest.line(f"if (!{condition}) {{ fputs({text}, stderr); abort(); }}")

        shape = op.operands[0].type.shape
        if shape is None:
            body(())
            self._scope(nest.code)
        else:
            self._scope(nest.loops(shape, body, vector=False))

    def _tt_print(self, op: Op) -> None:
        """Lines as Triton prints them on GPUs: the program, the element's indices, the prefix, the value."""
        programs = [Expr(f"pid{axis}") for axis in range(3)]
        prefix, is_hex = op.attrs["prefix"], op.attrs.get("hex", False)
        if not op.operands:
            self._line(f"printf({_c_string(f'pid (%d, %d, %d){_percents(prefix)}' + chr(10))}, pid0, pid1, pid2);")
        for number, value in enumerate(op.operands):
            shape = value.type.shape or ()
            widths = ", ".join(f"%{len(str(n - 1))}d" for n in shape)
            which = f"(operand {number}) " if len(op.operands) > 1 else ""
            form, cast = _print_format(value.type, op.attrs["isSigned"][number], is_hex)
            text = _c_string(f"pid (%d, %d, %d) idx ({widths}){_percents(prefix)}{which}{form}\n")
            nest = Nest(self._context)

            def body(
                index: tuple[Expr, ...], nest: Nest = nest, value: Value = value, text: str = text, cast: str = cast
            ) -> None:
                parts = [f"(int){part.code}" for part in (*programs, *index)]
                nest.line(f"printf({text}, {', '.join(parts)}, {cast.format(nest.value(value, index).code)});")

            if shape:
                self._scope(nest.loops(shape, body, vector=False))
            else:
                body(())
                self._scope(nest.code)
        self._line("fflush(stdout);")

    # Matrix products

    def _tt_dot(self, op: Op) -> None:
        a, b, _ = op.operands
        result = op.result
        shape = result.type.shape
        if len(shape) not in (2, 3):
            raise UnsupportedError(f"a product of blocks with {len(shape)} dimensions", op.loc, self._function.name)
        k = a.type.shape[-1]
        m, n = self._plan.extent(result)[-2], shape[-1]
        is_fast = result.type.elem in ("f32", "f16", "bf16") and a.type.elem in ("f32", "f16", "bf16")
        if op in self._plan.streamed:
            self._streamed_dot(op)
            return
        few = is_fast and m <= FEW_ROWS and b not in self._plan.arrays and is_matrix_transpose(b)
        names = [self._matrix(a, is_fast), self._matrix(b.op.operands[0] if few else b, is_fast)]
        name = self._dot_target(op)
        function = "dot_rows" if few else _dot_function(a.type.elem, b.type.elem) if is_fast else "dot_any"
        for batch in range(shape[0] if len(shape) == 3 else 1):
            sides = (m * k, k * n, m * n)
            left, right, out = (f"{x} + {batch * size}" for x, size in zip((*names, name), sides, strict=True))
            if is_fast:
                right = f"Ordered<{k if few else n}>{{{right}}}"
            self._line(f"{function}<{m}, {n}, {k}>({left}, {right}, {out});")
        if result.type.elem in ("f16", "bf16"):
            self._line(f"for (auto& x : {name}) x = round_{result.type.elem}(x);")

    def _streamed_dot(self, op: Op) -> None:
        """A product whose right operand stays where it is: only the addresses of its rows are kept.

        Rows of the products that follow are asked for as soon as their addresses are known.
        """
        for dot in [op, *self._followers(op)]:
            if dot not in self._row_arrays:
                self._find_rows(dot)
        left = self._matrix(op.operands[0], True)
        (m, n), k = (self._plan.extent(op.result)[0], op.result.type.shape[1]), op.operands[0].type.shape[1]
        name = self._dot_target(op)
        kind = {"f16": "Half", "bf16": "Brain", "f32": "Single"}[streamed_load(op).result.type.elem]
        function = _dot_function(*(operand.type.elem for operand in op.operands[:2]))
        if is_matrix_transpose(op.operands[1]):
            function = "dot_rows_bf16" if function == "dot_bf16" else "dot_rows"
        self._line(f"{function}<{m}, {n}, {k}>({left}, Scattered<{kind}>{{{self._row_arrays.pop(op)}}}, {name});")

    def _followers(self, op: Op) -> list[Op]:
        """Streamed products behind `op` for which nothing but arithmetic is between here and their addresses."""
        followers = []
        for later in op.parent.ops[op.parent.ops.index(op) + 1 :]:
            if has_effects(later):
                break
            if later in self._plan.streamed and self._is_known(streamed_load(later).operands[0]):
                followers.append(later)
        return followers

    def _is_known(self, value: Value) -> bool:
        if not value.type.is_block or value in self._plan.arrays:
            return value in (self._context.arrays if value.type.is_block else self._context.scalars)
        return value.op is not None and all(self._is_known(operand) for operand in value.op.operands)

    def _find_rows(self, op: Op) -> None:
        """Writes the addresses of the right operand's rows to an array, and asks for the rows."""
        pointers = streamed_load(op).operands[0]
        rows, columns = pointers.type.shape
        name = self._row_arrays[op] = self._context.names("r")
        line = self._array(name, f"const {MEMORY[pointers.type.pointee]}*", rows)
        (self._declarations if self._declarations is not None and self._depth <= 1 else self._lines).append(line)
        nest = Nest(self._context)

        def address(index: tuple[Expr, ...]) -> None:
            nest.line(f"{name}[{index[0].code}] = &{nest.address(pointers, (*index, ZERO)).code};")

        self._scope(nest.loops((rows,), address))
        self._line(f"fetch_rows<{rows}, {columns}>({name});")

    def _dot_target(self, op: Op) -> str:
        """The array of a product, with what the product is added to."""
        name, added = self._target(op.result), op.operands[2]
        if self._context.arrays.get(added) != name or added not in self._plan.arrays:
            self._fill(name, added)
        return name

    def _matrix(self, value: Value, is_fast: bool) -> str:
        """The array of an operand of a product; transposed ones are put in order first."""
        if value in self._plan.arrays:
            return self._context.arrays[value]
        if not is_matrix_transpose(value):
            raise UnsupportedError("this operand of a product", value.op.loc if value.op else "", self._function.name)
        source = value.op.operands[0]
        rows, columns = source.type.shape
        name = self._context.names("v")
        kind = register_type(value.type)
        line = self._array(name, kind, value.type.size)
        (self._declarations if self._declarations is not None and self._depth <= 1 else self._lines).append(line)
        if is_fast:
            self._line(f"transpose<{rows}, {columns}>({self._context.arrays[source]}, {name});")
        else:
            self._line(f"for (int i = 0; i < {rows}; i++) for (int j = 0; j < {columns}; j++)")
            self._line(f"{name}[j * {rows} + i] = {self._context.arrays[source]}[i * {columns} + j];")
        return name

    # Reductions and scans

    def _tt_reduce(self, op: Op) -> None:
        shape, axis = op.operands[0].type.shape, op.attrs["axis"]
        for value in op.results:
            self._declare(value)
        if axis == len(shape) - 1:
            self._reduce_last(op, shape)
        else:
            self._reduce_other(op, shape, axis)

    def _place(self, value: Value, index: tuple[Expr, ...]) -> str:
        if not value.type.is_block:
            return self._context.scalars[value]
        return f"{self._context.arrays[value]}[{linear_index(index, value.type.shape).code}]"

    def _reduce_last(self, op: Op, shape: tuple[int, ...]) -> None:
        nest = Nest(self._context)
        size = shape[-1]
        lanes = min(STRIP, size)
        region = op.regions[0]
        identity = _identity(op)

        def row(index: tuple[Expr, ...]) -> None:
            totals = [self._context.names("acc") for _ in op.results]
            for total, value in zip(totals, op.results, strict=True):
                nest.line(f"alignas(64) {register_type(value.type)} {total}[{lanes}];")
            parts = [f"{total}[j]" for total in totals]

            def accumulate(i: Expr) -> None:
                lane = i.code if size == lanes else "l"
                values = [nest.value(v, (*index, i)).code for v in op.operands]
                mine = [f"{total}[{lane}]" for total in totals]
                if size > lanes:
                    values = nest.combine(region, mine + values)
                for part, value in zip(mine, values, strict=True):
                    nest.line(f"{part} = {value};")

            def first(i: Expr) -> None:
                for total, v in zip(totals, op.operands, strict=True):
                    nest.line(f"{total}[{i.code}] = {nest.value(v, (*index, i)).code};")

            if size == 1:
                first(ZERO)
            elif size == lanes:
                nest.vector_loop(size, accumulate)
            else:
                if identity is not None:
                    nest.line(f"for (int l = 0; l < {lanes}; l++) {totals[0]}[l] = {identity};")
                    nest.strips(size, lanes, 0, accumulate)
                else:
                    nest.vector_loop(lanes, first)
                    nest.strips(size, lanes, lanes, accumulate)
            half = lanes // 2
            while half:
                nest.line(f"for (int j = 0; j < {half}; j++) {{")
                for total, value in zip(
                    parts, nest.combine(region, parts + [f"{t}[j + {half}]" for t in totals]), strict=True
                ):
                    nest.line(f"{total} = {value};")
                nest.line("}")
                half //= 2
            for total, value in zip(totals, op.results, strict=True):
                nest.line(f"{self._place(value, index)} = {total}[0];")

        self._scope(self._rows(nest, self._plan.extent(op.operands[0])[:-1], row))

    def _rows(self, nest: Nest, shape: tuple[int, ...], body: Callable, index: tuple[Expr, ...] = ()) -> list[str]:
        """Outer loops over the first sides of a block."""

        def inner(rest: tuple[int, ...], index: tuple[Expr, ...]) -> None:
            if not rest:
                body(index)
            elif rest[0] == 1:
                inner(rest[1:], (*index, ZERO))
            else:
                nest.open_loop(rest[0], lambda i: inner(rest[1:], (*index, i)))

        inner(shape, index)
        return nest.code

    def _reduce_other(self, op: Op, shape: tuple[int, ...], axis: int) -> None:
        rest = shape[:axis] + shape[axis + 1 :]

        def initial(index: tuple[Expr, ...]) -> None:
            for operand, value in zip(op.operands, op.results, strict=True):
                element = nest.value(operand, (*index[:axis], ZERO, *index[axis:])).code
                nest.line(f"{self._place(value, index)} = {element};")

        nest = Nest(self._context)
        self._scope(nest.loops(rest, initial))
        if shape[axis] == 1:
            return

        def outer(index: tuple[Expr, ...]) -> None:
            def along(k: Expr) -> None:
                def body(inner: tuple[Expr, ...]) -> None:
                    places = [self._place(value, (*index, *inner)) for value in op.results]
                    values = [following.value(v, (*index, k, *inner)).code for v in op.operands]
                    results = following.combine(op.regions[0], places + values)
                    for place, value in zip(places, results, strict=True):
                        following.line(f"{place} = {value};")

                following._loop(shape[axis + 1 :], len(shape) - axis - 1, (), body, True)

            following.open_loop(shape[axis], along, start=1)

        following = Nest(self._context)
        self._scope(self._rows(following, shape[:axis], outer))

    def _tt_scan(self, op: Op) -> None:
        shape, axis = op.operands[0].type.shape, op.attrs["axis"]
        size, is_reverse = shape[axis], op.attrs.get("reverse", False)
        for operand, value in zip(op.operands, op.results, strict=True):
            self._fill(self._declare(value), operand)
        if size == 1:
            return
        is_last = all(n == 1 for n in shape[axis + 1 :])

        def outer(index: tuple[Expr, ...]) -> None:
            totals = [self._context.names("acc") for _ in op.results]
            zeros = tuple(ZERO for _ in shape[axis + 1 :])

            def carry(k: Expr) -> None:
                at = f"{size - 1} - {k.code}" if is_reverse else k.code
                places = [self._place(v, (*index, Expr(f"({at})", k.level), *zeros)) for v in op.results]
                for total, place, value in zip(
                    totals, places, nest.combine(op.regions[0], totals + places), strict=True
                ):
                    nest.line(f"{place} = {total} = {value};")

            def along(k: Expr) -> None:
                here, before = (
                    (f"{size - 1} - {k.code}", f"{size} - {k.code}")
                    if is_reverse
                    else (
                        k.code,
                        f"{k.code} - 1",
                    )
                )

                def body(inner: tuple[Expr, ...]) -> None:
                    places, previous = (
                        [self._place(v, (*index, Expr(f"({at})", k.level), *inner)) for v in op.results]
                        for at in (here, before)
                    )
                    for place, value in zip(places, nest.combine(op.regions[0], previous + places), strict=True):
                        nest.line(f"{place} = {value};")

                nest._loop(shape[axis + 1 :], len(shape) - axis - 1, (), body, True)

            if is_last:
                # In a variable: a loop that reads back what it wrote waits for memory.
                first = constant_index(size - 1) if is_reverse else ZERO
                for total, value in zip(totals, op.results, strict=True):
                    start = self._place(value, (*index, first, *zeros))
                    nest.line(f"{register_type(value.type)} {total} = {start};")
                nest.open_loop(size, carry, start=1)
            else:
                nest.open_loop(size, along, start=1)

        nest = Nest(self._context)
        self._scope(self._rows(nest, shape[:axis], outer))

    def _tt_histogram(self, op: Op) -> None:
        name, bins = self._declare(op.result), op.result.type.size
        self._line(f"for (auto& x : {name}) x = 0;")
        (size,) = op.operands[0].type.shape
        piece = min(size, _COUNTED)
        nest = Nest(self._context)
        places = self._context.names("places")
        tables = self._context.names("tables")

        def place(index: Expr) -> str:
            value = nest.value(op.operands[0], (index,))
            condition = f"({unsigned(op.operands[0].type)}){value.code} < {bins}"
            if len(op.operands) > 1:
                condition += f" & {nest.value(op.operands[1], (index,)).code}"
            return f"{condition} ? (int32_t){value.code} : {bins}"

        def count(start: Expr) -> None:
            nest.vector_loop(
                piece,
                lambda i: nest.line(f"{places}[{i.code}] = {place(Expr(f'({start.code} + {i.code})', i.level))};"),
            )
            nest.line(f"count<{bins}>({places}, {piece}, {tables});")

        nest.line(f"alignas(64) int32_t {places}[{piece}], {tables}[kTables][{bins + 1}] = {{}};")
        if piece == size:
            count(ZERO)
        else:
            nest.open_loop(size // piece, lambda i: count(Expr(f"({i.code} * {piece})", i.level)))
        nest.line(f"for (int i = 0; i < {bins}; i++)")
        nest.line(f"for (int t = 0; t < kTables; t++) {name}[i] += {tables}[t][i];")
        self._scope(nest.code)

    def _tt_cat(self, op: Op) -> None:
        name, half = self._declare(op.result), op.result.type.size // 2
        for i, operand in enumerate(op.operands):
            source = self._context.arrays[operand]
            self._line(f"for (int i = 0; i < {half}; i++) {name}[{i * half} + i] = {source}[i];")

    # Control flow

    def _assign(self, targets: list[Value], sources: list[Value]) -> None:
        """Sets variables and arrays to values, all at once."""
        pending = []
        for target, source in zip(targets, sources, strict=True):
            if target.type.is_block:
                to, source_name = self._context.arrays[target], self._context.arrays[source]
                if to == source_name:
                    continue
                is_target = any(source is other for other in targets)
                if is_target:
                    copy = self._context.names("v")
                    self._line(f"decltype({source_name}) {copy}_; auto& {copy} = {copy}_;")
                    self._line(f"memcpy({copy}, {source_name}, sizeof({to}));")
                    source_name = copy
                pending.append(f"memcpy({to}, {source_name}, sizeof({to}));")
            else:
                name = self._context.names("n")
                self._line(f"{register_type(target.type)} const {name} = {self._context.scalars[source]};")
                pending.append(f"{self._context.scalars[target]} = {name};")
        self._lines += pending

    def _start(self, targets: list[Value], sources: list[Value]) -> None:
        """Declares variables and arrays with their first values."""
        for target, source in zip(targets, sources, strict=True):
            if target.type.is_block:
                self._fill(self._declare(target), source)
            else:
                self._declare(target, self._context.scalars[source])

    def _alias(self, values: list[Value], to: list[Value]) -> None:
        for value, target in zip(values, to, strict=True):
            table = self._context.arrays if value.type.is_block else self._context.scalars
            table[value] = table[target]

    def _scf_for(self, op: Op) -> None:
        body = op.regions[0].entry
        low, high, step = (self._context.scalars[v] for v in op.operands[:3])
        carried = body.args[1:]
        self._start(carried, op.operands[3:])
        kind = register_type(body.args[0].type)
        counter, name = self._context.names("n"), self._context.names("s")
        self._context.scalars[body.args[0]] = name
        number = f"(int64_t)({unsigned(body.args[0].type)})" if op.attrs.get("unsignedCmp") else "(int64_t)"
        self._line(
            f"for (int64_t {counter} = {number}{low}; {counter} < {number}{high}; {counter} += {number}{step}) {{"
        )
        self._line(f"{kind} const {name} = ({kind}){counter};")
        self._block(body)
        self._assign(carried, body.terminator.operands)
        self._line("}")
        self._alias(op.results, carried)

    def _scf_while(self, op: Op) -> None:
        before, after = op.regions[0].entry, op.regions[1].entry
        self._start(before.args, op.operands)
        for value in op.results:
            self._declare(value)
        self._alias(after.args, op.results)
        self._line("while (true) {")
        self._block(before)
        condition, *values = before.terminator.operands
        self._assign(op.results, values)
        self._line(f"if (!{self._context.scalars[condition]}) break;")
        self._block(after)
        self._assign(before.args, after.terminator.operands)
        self._line("}")

    def _scf_if(self, op: Op) -> None:
        for value in op.results:
            self._declare(value)
        for i, region in enumerate(op.regions):
            if not region.blocks:
                continue
            self._line("else {" if i else f"if ({self._context.scalars[op.operands[0]]}) {{")
            self._block(region.entry)
            self._assign(op.results, region.entry.terminator.operands)
            self._line("}")

    def _scf_yield(self, op: Op) -> None:
        pass

    def _scf_condition(self, op: Op) -> None:
        pass

    def _jump(self, block: Block, values: list[Value]) -> None:
        self._line("{")
        self._assign(block.args, values)
        self._line(f"goto {self._labels[id(block)]}; }}")

    def _cf_br(self, op: Op) -> None:
        self._jump(op.successors[0], op.operands)

    def _cf_cond_br(self, op: Op) -> None:
        _, taken, _ = op.attrs["operandSegmentSizes"]
        condition, *values = op.operands
        self._line(f"if ({self._context.scalars[condition]})")
        self._jump(op.successors[0], values[:taken])
        self._jump(op.successors[1], values[taken:])


def _dot_function(left: str, right: str) -> str:
    """The product of `runtime.h` for operands of these types."""
    return "dot_bf16" if left == right == "bf16" else "dot_f32"


def _c_string(text: str) -> str:
    """A string literal of C++. What is not a letter or so is written in octal."""
    plain = bytes(range(32, 127)).translate(None, b'"\\?')
    return '"' + "".join(chr(b) if b in plain else f"\\{b:03o}" for b in text.encode()) + '"'


def _percents(text: str) -> str:
    return text.replace("%", "%%")


def _print_format(type_: Type, is_signed: bool, is_hex: bool) -> tuple[str, str]:
    """How `printf` writes a number: the directive, and the argument."""
    if type_.elem == "ptr":
        return "%p", "(void*){}"
    bits = INT_BITS.get(type_.elem) or int(type_.elem.lstrip("bf"))
    if is_hex:
        word = f"(uint{max(bits, 8)}_t)"
        value = f"{word}{{}}" if type_.elem in INT_BITS else f"bits_as<uint{bits}_t>({written('{}', type_)})"
        return f"0x%0{-(-bits // 4)}llx", f"(unsigned long long){value}"
    if type_.elem in FLOATS:
        return "%f", "(double){}"
    if is_signed and bits > 1:
        return "%lld", "(long long){}"
    return "%llu", f"(unsigned long long)({unsigned(type_)}){{}}"


def _identity(op: Op) -> str | None:
    """What the accumulators of a simple reduction begin with."""
    block = op.regions[0].entry
    if len(op.results) != 1 or len(block.ops) != 2 or set(block.ops[0].operands) != set(block.args):
        return None
    find = _IDENTITIES.get(block.ops[0].name)
    return find(op.results[0].type.scalar) if find and block.ops[0].result.type.elem != "bf16" else None


def _atomic(update: str, place: str, value: str, kind: Type) -> str:
    """An atomic read-modify-write."""
    memory = MEMORY[kind.elem]
    if update in ("add", "and", "or", "xor") and kind.elem != "i1":
        return f"__atomic_fetch_{update}({place}, {value}, __ATOMIC_SEQ_CST)"
    if update == "xchg" and kind.elem not in FLOATS:
        return f"__atomic_exchange_n({place}, {value}, __ATOMIC_SEQ_CST)"
    narrow = kind.elem in ("f16", "bf16")
    old = f"from_{kind.elem}(old)" if narrow else "old"
    new = {
        "fadd": f"{old} + {value}",
        "xchg": value,
        "max": f"max_<{register_type(kind)}>({old}, {value})",
        "min": f"min_<{register_type(kind)}>({old}, {value})",
        "umax": f"({memory})max_<{unsigned(kind)}>(old, {value})" if kind.elem not in FLOATS else "",
        "umin": f"({memory})min_<{unsigned(kind)}>(old, {value})" if kind.elem not in FLOATS else "",
    }[update]
    new = f"to_{kind.elem}({new})" if narrow else new
    call = f"atomic_update({place}, [&]({memory} old) {{ return {new}; }})"
    return f"from_{kind.elem}({call})" if narrow else call


_FILE = """#include "runtime.h"
{definitions}

static double cost = -1;

extern "C" __attribute__((visibility("default"))) void launch(const int64_t* args, const int32_t* n, int32_t threads,
                                                              Failure* failure) {{
  {begin}
  run_grid(n, threads, &cost, [&](const Grid& grid, int32_t pid0, int32_t pid1, int32_t pid2) {{
    (void)grid, (void)pid0, (void)pid1, (void)pid2, (void)failure;
    {enter}
    {scratch}
// {name}
{body}
  }});
  {end}
}}
"""
_BEGIN_CHECK = "Check check(accesses, bases, args + {count}, n, kGrain, failure); try {{"
