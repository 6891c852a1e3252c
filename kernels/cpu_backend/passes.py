"""Rewrites of the IR, and the plan of which values are computed where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from cbtriton.kernels.cpu_backend.analysis import stride
from cbtriton.kernels.cpu_backend.extents import needed_extents
from cbtriton.kernels.cpu_backend.ir import Block, Function, Op, Type, Value, index_uses, new_op, walk
from cbtriton.kernels.cpu_backend.ops import ELEMENT_WISE

# What only renames the indices of a block.
VIEWS = {"tt.splat", "tt.broadcast", "tt.expand_dims", "tt.trans", "tt.reshape", "tt.join", "tt.split", "tt.unsplat"}
# Operations whose results are known from their operands, also where an array holds them.
TRANSPARENT = {*VIEWS, *ELEMENT_WISE, "tt.make_range"}
# Operations without effect whose block result is written to an array by code of their own.
COMPUTED = {"tt.dot", "tt.reduce", "tt.scan", "tt.histogram", "tt.cat"}
# Operations on memory that happen at their place in the program; their results have arrays.
ATOMICS = {"tt.atomic_rmw", "tt.atomic_cas", "tt.atomic_load", "tt.atomic_store"}
WRITES = {"tt.store", "tt.assert", "tt.print", *ATOMICS}
CONTROL = {"scf.for", "scf.while", "scf.if"}
IGNORED = {"llvm.intr.assume", "gpu.barrier", "ttg.barrier", "ttg.local_barrier", "tt.debug_barrier"}
# What may be removed if nobody needs it. Operations that are not known stay, to be refused.
_REMOVABLE = {
    *ELEMENT_WISE,
    *VIEWS,
    *COMPUTED,
    *IGNORED,
    *("tt.make_range", "tt.load", "tt.gather", "tt.get_program_id", "tt.get_num_programs", "ub.poison"),
}
_ENDS = (".return", ".yield", ".condition")
# Above it, a value with several consumers is kept in an array rather than computed by each of them.
_CHEAP = 12
# Up to so many rows of the left matrix, a product reads the right one where it is instead of putting it in order first.
FEW_ROWS = 8
_LOAD_COST = 1000


@dataclass(slots=True)
class Plan:
    """What the emitter needs to know beyond the IR.

    Attributes:
        arrays: Block values that get an array; others are computed where they are used.
        raw: Arrays of 16-bit floats that hold the bits as in memory, because they are only copied.
        in_place: Results that are written over an array that already exists, that of a loop's carried value.
        streamed: Products whose right operand, or its transpose, is read from memory row by row, and never kept.
        extents: How much of blocks is needed; others are needed whole.
    """

    arrays: set[Value] = field(default_factory=set)
    raw: set[Value] = field(default_factory=set)
    in_place: dict[Value, Value] = field(default_factory=dict)
    streamed: set[Op] = field(default_factory=set)
    extents: Mapping[Value, tuple[int, ...]] = field(default_factory=dict)

    def extent(self, value: Value) -> tuple[int, ...]:
        """The sides of the part of a block that is computed."""
        return self.extents.get(value, value.type.shape)


def is_unit_reshape(op: Op) -> bool:
    """Whether a reshape only adds or removes sides of length 1."""
    source, target = op.operands[0].type.shape, op.result.type.shape
    return [n for n in source if n != 1] == [n for n in target if n != 1]


def has_effects(op: Op) -> bool:
    """Whether the operation, or one inside, writes memory, can be waited for, or is not known."""
    is_pure = op.name in _REMOVABLE or op.name in CONTROL or op.name.endswith(_ENDS)
    return not is_pure or any(has_effects(inner) for region in op.regions for inner in walk(region))


def simplify(function: Function) -> None:
    """All rewrites, in order."""
    carry_offsets(function)
    remove_dead(function)
    index_uses(function)


def remove_dead(function: Function) -> None:
    """Removes operations without effect whose results nobody uses."""
    changed = True
    while changed:
        index_uses(function)
        changed = False
        for op in list(function.walk()):
            if op.parent is None or op.name.endswith(_ENDS) or has_effects(op):
                continue
            if any(value.uses for value in op.results):
                continue
            if op in op.parent.ops:
                op.parent.ops.remove(op)
                changed = True


# ---- Carried pointers


def carry_offsets(function: Function) -> None:
    """Rewrites loops that carry a block of pointers, or of integers, moved on by the same amount for all elements.

    `for … iter(p = p0): …; yield p + splat(s)` becomes a loop that carries one integer, `p0 + splat(offset)` where p
    was used. Addresses are then affine again in the elements' indices.
    """
    index_uses(function)
    for op in list(function.walk()):
        if op.name == "scf.for":
            for position in range(len(op.results)):
                _carry_offset(function, op, position)


def _uniform_step(value: Value, carried: Value) -> tuple[Value, Op] | None:
    """The scalar that `value` adds to `carried`, and the operation that adds it."""
    op = value.op
    if op is None or op.name not in ("tt.addptr", "arith.addi") or carried not in op.operands:
        return None
    other = op.operands[1] if op.operands[0] is carried else op.operands[0]
    if other is carried or other.op is None:
        return None
    if other.op.name == "tt.splat":
        return other.op.operands[0], op
    if other.op.name == "arith.constant" and not isinstance(other.op.attrs["value"], list):
        scalar = new_op("arith.constant", [], [other.type.scalar], op, value=other.op.attrs["value"])
        scalar.parent = op.parent
        op.parent.ops.insert(op.parent.ops.index(op), scalar)
        return scalar.result, op
    return None


def _carry_offset(function: Function, loop: Op, position: int) -> None:
    body = loop.regions[0].entry
    carried, start, result = body.args[1 + position], loop.operands[3 + position], loop.results[position]
    if not carried.type.is_block or carried.type.elem not in ("ptr", "i32", "i64"):
        return
    found = _uniform_step(body.terminator.operands[position], carried)
    if found is None:
        return
    step, add = found
    if not (step.op is None or step.op.parent is not None):
        return
    wide = Type("i64" if carried.type.elem == "ptr" else carried.type.elem)
    name = "tt.addptr" if carried.type.elem == "ptr" else "arith.addi"
    zero = new_op("arith.constant", [], [wide], loop, value=0)
    _insert_before(loop, zero)
    offset = Value(wide, block=body, index=1 + position, name=carried.name)
    body.args[1 + position] = offset
    loop.operands[3 + position] = zero.result

    splat = new_op("tt.splat", [offset], [wide.with_shape(carried.type.shape)], add)
    moved = new_op(name, [start, splat.result], [carried.type], add)
    for new in (moved, splat):
        new.parent = body
        body.ops.insert(0, new)
    for user in function.walk():
        if user is not moved:
            user.operands = [moved.result if v is carried else v for v in user.operands]
    if step.type.elem != wide.elem:
        widened = new_op("arith.extsi", [step], [wide], add)
        _insert_before(add, widened)
        step = widened.result
    total = new_op("arith.addi", [offset, step], [wide], add)
    _insert_before(add, total)
    body.terminator.operands[position] = total.result

    end = Value(wide, loop, index=position)
    loop.results[position] = end
    last_splat = new_op("tt.splat", [end], [wide.with_shape(carried.type.shape)], loop)
    last = new_op(name, [start, last_splat.result], [carried.type], loop)
    where = loop.parent.ops.index(loop) + 1
    for new in (last, last_splat):
        new.parent = loop.parent
        loop.parent.ops.insert(where, new)
    for user in function.walk():
        if user is not last:
            user.operands = [last.result if v is result else v for v in user.operands]
    index_uses(function)


def _insert_before(op: Op, new: Op) -> None:
    new.parent = op.parent
    op.parent.ops.insert(op.parent.ops.index(op), new)


# ---- Where values are computed


def make_plan(function: Function, is_checked: bool = False) -> Plan:
    """Decides which block values get arrays.

    A value is computed inside the loop of its consumer, unless several loops need it and it is not cheap, a deeper
    loop or every turn of an outer one needs it, it crosses a branch or a loop's end, or moving it would move a load
    across a write.

    Args:
        function: The kernel, after all rewrites.
        is_checked: Whether every access is checked, for which all of them must be made one by one.
    """
    # What operands cost depends on whether they have arrays, which is decided later: hence a second turn.
    likely = _Planner(function, set(), not is_checked).run().arrays
    plan = _Planner(function, likely, not is_checked).run()
    if not is_checked:
        plan.extents = needed_extents(function)
    return plan


class _Planner:
    def __init__(self, function: Function, likely_arrays: set[Value], may_stream: bool) -> None:
        self._function = function
        self._likely_arrays = likely_arrays
        self._plan = Plan()
        if may_stream:
            self._plan.streamed.update(op for op in function.walk() if op.name == "tt.dot" and _may_stream(op))
        self._roots: dict[Value, set[Op]] = {}
        self._costs: dict[Value, int] = {}

    def run(self) -> Plan:
        ops = list(self._function.walk())
        for op in ops:
            for region in op.regions:
                for block in region.blocks:
                    if op.name in CONTROL:
                        self._plan.arrays.update(v for v in block.args if v.type.is_block)
        for block in self._function.body.blocks[1:]:
            self._plan.arrays.update(v for v in block.args if v.type.is_block)
        for op in reversed(ops):
            for value in op.results:
                if value.type.is_block:
                    self._decide(op, value)
        self._find_raw()
        self._find_in_place(ops)
        return self._plan

    def _decide(self, op: Op, value: Value) -> None:
        arrays = self._plan.arrays
        roots = set()
        forced = False
        for user in value.uses:
            forced |= _needs_array(user, value) and not self._is_streamed(value)
            roots |= self._roots_through(user)
        self._roots[value] = roots
        if op.name in COMPUTED or op.name in CONTROL or op.name in ATOMICS or op.name == "tt.gather":
            if value.uses or op.name in COMPUTED:
                arrays.add(value)
            return
        if forced:
            arrays.add(value)
            return
        if op.name in ("tt.make_range", "tt.split") or _is_splat_constant(op):
            return
        if op.name == "arith.constant":
            arrays.add(value)
            return
        if op.name == "tt.reshape" and not is_unit_reshape(op) and not self._is_cheap(value):
            # Its operand has an array, of which it is another view.
            return
        deeper = any(root.parent is not op.parent for root in roots)
        is_repeated = any(_repeats(user) for user in value.uses)
        is_needed_again = (len(roots) > 1 or deeper or is_repeated) and not self._is_cheap(value)
        if is_needed_again or (op.name == "tt.load" and not all(_may_delay(op, root) for root in roots)):
            arrays.add(value)

    def _is_streamed(self, value: Value) -> bool:
        return any(streamed_load(dot).result is value for dot in self._plan.streamed)

    def _roots_through(self, user: Op) -> set[Op]:
        """The operations in whose loops a user is computed: itself, or where its results are inlined."""
        if len(user.results) >= 1 and user.results[0].type.is_block and user.name not in COMPUTED | CONTROL | WRITES:
            if user.name == "tt.gather":
                return {user}
            return set().union(*({user} if r in self._plan.arrays else self._roots.get(r, set()) for r in user.results))
        return {user}

    def _is_cheap(self, value: Value) -> bool:
        return value.op is not None and self._cost_inline(value.op) <= _CHEAP

    def _cost(self, value: Value) -> int:
        if value not in self._costs:
            self._costs[value] = self._find_cost(value)
        return self._costs[value]

    def _find_cost(self, value: Value) -> int:
        op = value.op
        if not value.type.is_block or op is None:
            return 0
        if op.name in COMPUTED or op.name in CONTROL or op.name.startswith("tt.atomic"):
            return 1
        return 1 if value in self._likely_arrays else self._cost_inline(op)

    def _cost_inline(self, op: Op) -> int:
        if op.name == "tt.load":
            return _LOAD_COST
        known = ELEMENT_WISE.get(op.name)
        own = 0 if op.name in VIEWS or op.name == "tt.make_range" else known.cost if known else _LOAD_COST
        return own + sum(self._cost(operand) for operand in op.operands)

    def _find_raw(self) -> None:
        for value in self._plan.arrays:
            is_load = value.op is not None and value.op.name == "tt.load" and value.type.elem in ("f16", "bf16")
            if is_load and all(user.name == "tt.store" and user.operands[1] is value for user in value.uses):
                self._plan.raw.add(value)

    def _find_in_place(self, ops: list[Op]) -> None:
        for op in ops:
            if op.name != "scf.for":
                continue
            body = op.regions[0].entry
            for carried, new in zip(body.args[1:], body.terminator.operands, strict=True):
                if new.type.is_block and self._may_overwrite(carried, new, body):
                    self._plan.in_place[new] = carried

    def _may_overwrite(self, carried: Value, new: Value, body: Block) -> bool:
        """Whether `new` can be computed over the array of `carried`, element by element."""
        op = new.op
        if new not in self._plan.arrays or op is None or op.parent is not body or len(new.uses) != 1:
            return False
        if op.name not in ELEMENT_WISE and op.name != "tt.dot":
            return False
        if op.name == "tt.dot" and any(self._reads(operand, carried) for operand in op.operands[:2]):
            return False
        return bool(carried.uses) and all(self._leads_to(user, op) for user in carried.uses)

    def _reads(self, value: Value, carried: Value) -> bool:
        if value is carried:
            return True
        if value.op is None or value in self._plan.arrays:
            return False
        return any(self._reads(operand, carried) for operand in value.op.operands)

    def _leads_to(self, user: Op, root: Op) -> bool:
        if user is root:
            return True
        if user.name not in ELEMENT_WISE or user.parent is not root.parent or user.result in self._plan.arrays:
            return False
        return all(self._leads_to(next_user, root) for next_user in user.result.uses)


def _is_splat_constant(op: Op) -> bool:
    return op.name == "arith.constant" and not isinstance(op.attrs["value"], list)


def _needs_array(user: Op, value: Value) -> bool:
    """Whether an operation reads the whole operand at once, or at computed places."""
    if user.name == "tt.dot":
        # Of a transposed operand, what is transposed has the array.
        return value in user.operands[:2] and not is_matrix_transpose(value)
    if user.name == "tt.trans":
        return (
            any(u.name == "tt.dot" and user.result in u.operands[:2] for u in user.result.uses)
            and len(value.type.shape) == 2
        )
    if user.name == "tt.reshape":
        return not is_unit_reshape(user) and not _is_uniform(value)
    if user.name == "tt.gather":
        return value is user.operands[0]
    return user.name in ("scf.yield", "scf.condition", "cf.br", "cf.cond_br", "tt.cat")


def _repeats(user: Op) -> bool:
    """Whether an operation makes an outer loop of a side of length 1, and so needs all inner elements every time."""
    if user.name != "tt.broadcast":
        return False
    source = user.operands[0].type.shape
    longer = [before < after for before, after in zip(source, user.result.type.shape, strict=True)]
    return any(is_longer and prod(source[i + 1 :]) > 1 for i, is_longer in enumerate(longer))


def _is_uniform(value: Value) -> bool:
    op = value.op
    return op is not None and (op.name == "tt.splat" or _is_splat_constant(op))


def is_matrix_transpose(value: Value) -> bool:
    """Whether a value is the transpose of a matrix."""
    op = value.op
    return op is not None and op.name == "tt.trans" and len(value.type.shape) == 2 and op.attrs["order"] == [1, 0]


def streamed_load(dot: Op) -> Op | None:
    """The load that a product's right operand, or what that is the transpose of, comes from."""
    right = dot.operands[1]
    source = right.op.operands[0] if is_matrix_transpose(right) else right
    return source.op if source.op is not None and source.op.name == "tt.load" else None


def _may_stream(dot: Op) -> bool:
    load = streamed_load(dot)
    if load is None or len(load.operands) > 1:
        return False
    left, right, result = dot.operands[0].type, dot.operands[1], dot.result.type
    if (
        len(result.shape) != 2
        or left.shape[0] > FEW_ROWS
        or result.elem != "f32"
        or right.type.elem not in ("f16", "bf16", "f32")
    ):
        return False
    if len(load.result.uses) != 1 or len(right.uses) != 1:
        return False
    return stride(load.operands[0], 1, set()) == 1 and _may_delay(load, dot)


def _may_delay(load: Op, root: Op) -> bool:
    """Whether a load may happen in the loop of `root` instead of at its own place."""
    if root.parent is not load.parent:
        return False
    ops = load.parent.ops
    between = ops[ops.index(load) + 1 : ops.index(root)]
    if any(has_effects(op) for op in between):
        return False
    if root.name == "tt.store":
        return _go_along(load.operands[0], root.operands[0])
    return not has_effects(root)


def _go_along(source: Value, target: Value) -> bool:
    """Whether reading `source` element by element between writes to `target` reads what was there before all of them.

    It does where both are the same places, and where they are the same offsets from two arguments. Arguments are equal
    or do not overlap.
    """
    if source is target:
        return True
    if not all(p.op is not None and p.op.name == "tt.addptr" for p in (source, target)):
        return False
    bases = [pointers.op.operands[0] for pointers in (source, target)]
    if source.op.operands[1] is not target.op.operands[1]:
        return False
    if all(base.op is not None and base.op.name == "tt.splat" for base in bases):
        bases = [base.op.operands[0] for base in bases]
    if bases[0] is bases[1]:
        return True
    return all(base.op is None for base in bases)
