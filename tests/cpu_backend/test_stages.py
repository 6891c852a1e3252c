"""Each stage by itself, on small texts; nothing here starts Triton."""

from __future__ import annotations

import ctypes
import math
import shutil
import struct

import numpy as np
import pytest

from cbtriton.kernels.cpu_backend import toolchain
from cbtriton.kernels.cpu_backend.analysis import AFFINE, divides, is_positive, stride
from cbtriton.kernels.cpu_backend.emit import emit
from cbtriton.kernels.cpu_backend.errors import UnsupportedError
from cbtriton.kernels.cpu_backend.instrument import Access, is_only_copied, possible_bases
from cbtriton.kernels.cpu_backend.ir import Type, index_uses
from cbtriton.kernels.cpu_backend.mlir import MLIRSyntaxError, parse_module
from cbtriton.kernels.cpu_backend.passes import make_plan, simplify


def module(body: str, args: str = "%x: !tt.ptr<f32>, %n: i32") -> str:
    return f"""#loc1 = loc("kernel.py":7:3)
#loc2 = loc(callsite(#loc3 at #loc1))
"builtin.module"() ({{
  "tt.func"() <{{function_type = () -> (), sym_name = "kernel"}}> ({{
  ^bb0({args}):
{body}
    "tt.return"() : () -> ()
  }}) {{noinline = false}} : () -> ()
}}) {{generic = true}} : () -> ()
#loc3 = loc("library.py":1:1)
"""


def parse(body: str, args: str = "%x: !tt.ptr<f32>, %n: i32"):
    (function,) = parse_module(module(body, args))
    return function


def by_name(function, name):
    return next(op for op in function.walk() if op.name == name)


RANGE = '%r = "tt.make_range"() <{end = 64 : i32, start = 0 : i32}> : () -> tensor<64xi32>\n'


def test_types_attributes_and_locations_are_read():
    function = parse("""
    %0 = "arith.constant"() <{value = dense<[1, -2]> : tensor<2xi32>}> : () -> tensor<2xi32> loc(#loc2)
    %1:2 = "some.op"(%0, %n) <{flags = #arith.fastmath<none>, sizes = array<i32: 1, 0>, text = "a \\"b\\" {"}> : (tensor<2xi32>, i32) -> (f32, tensor<4x8x!tt.ptr<bf16>>)
    "other.op"(%1#1) : (tensor<4x8x!tt.ptr<bf16>>) -> ()
    """)  # fmt: skip # noqa: E501
    constant, some, other, _ = function.walk()
    assert constant.attrs["value"] == [1, -2]
    assert constant.loc == "kernel.py:7"
    assert some.attrs["sizes"] == [1, 0]
    assert some.attrs["text"].endswith("{")
    assert [str(value.type) for value in some.results] == ["f32", "ptr<bf16>[4,8]"]
    assert other.operands == [some.results[1]]
    assert some.operands[1] is function.args[1]


@pytest.mark.parametrize(
    ("text", "type_", "value"),
    [
        ("1.500000e+00", "f32", 1.5),
        ("0xFF800000", "f32", -math.inf),
        ("0x7E00", "f16", math.nan),
        ("0x3FC0", "bf16", 1.5),
        ("-7", "i64", -7),
        ("true", "i1", True),
    ],
)
def test_numbers(text, type_, value):
    suffix = "" if text == "true" else f" : {type_}"
    function = parse(f'%0 = "arith.constant"() <{{value = {text}{suffix}}}> : () -> {type_}')
    got = next(function.walk()).attrs["value"]
    assert got == value or (math.isnan(value) and math.isnan(got))


def test_other_forms_are_refused():
    with pytest.raises(MLIRSyntaxError, match="generic form"):
        parse_module("module { tt.func public @kernel() { tt.return } }")
    with pytest.raises(MLIRSyntaxError, match="before its definition"):
        parse('"a.b"(%y) : (i32) -> ()')
    with pytest.raises(UnsupportedError, match="f8E5M2"):
        parse('%0 = "a.b"() : () -> f8E5M2')


def test_branches_between_blocks_are_read():
    function = parse("""
    %c = "arith.cmpi"(%n, %n) <{predicate = 0 : i64}> : (i32, i32) -> i1
    "cf.cond_br"(%c, %n)[^bb1, ^bb2] <{operandSegmentSizes = array<i32: 1, 0, 1>}> : (i1, i32) -> ()
  ^bb1:
    "tt.return"() : () -> ()
  ^bb2(%y: i32):
    "a.b"(%y) : (i32) -> ()
    """)
    first, second, third = function.body.blocks
    assert first.terminator.successors == [second, third]
    assert by_name(function, "a.b").operands == third.args


def test_strides():
    function = parse(
        RANGE
        + """
    %c = "arith.constant"() <{value = dense<12> : tensor<64xi32>}> : () -> tensor<64xi32>
    %d = "arith.constant"() <{value = dense<64> : tensor<64xi32>}> : () -> tensor<64xi32>
    %s = "tt.splat"(%n) : (i32) -> tensor<64xi32>
    %1 = "arith.muli"(%r, %c) : (tensor<64xi32>, tensor<64xi32>) -> tensor<64xi32>
    %2 = "arith.muli"(%r, %s) : (tensor<64xi32>, tensor<64xi32>) -> tensor<64xi32>
    %3 = "arith.addi"(%1, %r) : (tensor<64xi32>, tensor<64xi32>) -> tensor<64xi32>
    %4 = "arith.remsi"(%r, %d) : (tensor<64xi32>, tensor<64xi32>) -> tensor<64xi32>
    %5 = "tt.expand_dims"(%3) <{axis = 0 : i32}> : (tensor<64xi32>) -> tensor<1x64xi32>
    %6 = "tt.broadcast"(%5) : (tensor<1x64xi32>) -> tensor<8x64xi32>
    """
    )
    index_uses(function)
    values = {op.name + str(i): op.results[0] for i, op in enumerate(function.walk()) if op.results}
    named = list(values.values())
    scaled, affine, total, rest, _, wide = named[4:]
    assert stride(scaled, 0, set()) == 12
    assert stride(affine, 0, set()) == AFFINE
    assert stride(total, 0, set()) == 13
    assert stride(total, 0, {scaled}) is None
    assert stride(rest, 0, set()) is None
    assert stride(rest, 0, set(), span=32) == 1
    assert stride(rest, 0, set(), span=48) is None
    assert [stride(wide, dim, set()) for dim in (0, 1)] == [0, 13]
    assert divides(32, named[0])
    assert is_positive(total)
    assert not is_positive(affine)


def test_loops_that_move_pointers_carry_a_number_instead():
    pointers = "tensor<64x!tt.ptr<f32>>"
    function = parse(
        RANGE
        + f"""
    %zero = "arith.constant"() <{{value = 0 : i32}}> : () -> i32
    %one = "arith.constant"() <{{value = 1 : i32}}> : () -> i32
    %s = "tt.splat"(%x) : (!tt.ptr<f32>) -> {pointers}
    %p = "tt.addptr"(%s, %r) : ({pointers}, tensor<64xi32>) -> {pointers}
    %step = "tt.splat"(%n) : (i32) -> tensor<64xi32>
    %end = "scf.for"(%zero, %n, %one, %p) ({{
    ^bb0(%i: i32, %q: {pointers}):
      %v = "tt.load"(%q) <{{operandSegmentSizes = array<i32: 1, 0, 0>}}> : ({pointers}) -> tensor<64xf32>
      "tt.store"(%q, %v) : ({pointers}, tensor<64xf32>) -> ()
      %next = "tt.addptr"(%q, %step) : ({pointers}, tensor<64xi32>) -> {pointers}
      "scf.yield"(%next) : ({pointers}) -> ()
    }}) : (i32, i32, i32, {pointers}) -> {pointers}
    """
    )
    simplify(function)
    loop = by_name(function, "scf.for")
    assert [str(arg.type) for arg in loop.regions[0].entry.args] == ["i32", "i64"]
    assert stride(by_name(function, "tt.load").operands[0], 0, make_plan(function).arrays) == 1


def test_a_load_is_kept_where_a_write_comes_before_its_use():
    function = parse(
        RANGE
        + """
    %s = "tt.splat"(%x) : (!tt.ptr<f32>) -> tensor<64x!tt.ptr<f32>>
    %p = "tt.addptr"(%s, %r) : (tensor<64x!tt.ptr<f32>>, tensor<64xi32>) -> tensor<64x!tt.ptr<f32>>
    %zero = "arith.constant"() <{value = dense<0.0> : tensor<64xf32>}> : () -> tensor<64xf32>
    %v = "tt.load"(%p) : (tensor<64x!tt.ptr<f32>>) -> tensor<64xf32>
    "tt.store"(%p, %zero) : (tensor<64x!tt.ptr<f32>>, tensor<64xf32>) -> ()
    "tt.store"(%p, %v) : (tensor<64x!tt.ptr<f32>>, tensor<64xf32>) -> ()
    """
    )
    simplify(function)
    assert by_name(function, "tt.load").result in make_plan(function).arrays


@pytest.mark.parametrize(("axis", "shapes", "is_kept"), [(0, ("1x64", "64x64"), True), (1, ("64x1", "64x64"), False)])
def test_what_every_outer_index_needs_again_is_kept(axis, shapes, is_kept):
    narrow, wide = shapes
    function = parse(
        RANGE
        + f"""
    %f = "arith.sitofp"(%r) : (tensor<64xi32>) -> tensor<64xf32>
    %e = "math.exp"(%f) : (tensor<64xf32>) -> tensor<64xf32>
    %n1 = "tt.expand_dims"(%e) <{{axis = {axis} : i32}}> : (tensor<64xf32>) -> tensor<{narrow}xf32>
    %w = "tt.broadcast"(%n1) : (tensor<{narrow}xf32>) -> tensor<{wide}xf32>
    %s = "tt.splat"(%x) : (!tt.ptr<f32>) -> tensor<{wide}x!tt.ptr<f32>>
    "tt.store"(%s, %w) : (tensor<{wide}x!tt.ptr<f32>>, tensor<{wide}xf32>) -> ()
    """
    )
    simplify(function)
    assert (by_name(function, "tt.expand_dims").result in make_plan(function).arrays) == is_kept


@pytest.mark.parametrize(("limit", "sides"), [(3, (3, 8)), (5, (6, 8)), (8, (8, 8))])
def test_rows_that_no_store_lets_through_are_not_computed_unless_they_are_checked(limit, sides):
    text = f"""
    %r = "tt.make_range"() <{{end = 8 : i32, start = 0 : i32}}> : () -> tensor<8xi32>
    %c = "arith.constant"() <{{value = dense<{limit}> : tensor<8xi32>}}> : () -> tensor<8xi32>
    %m = "arith.cmpi"(%r, %c) <{{predicate = 2 : i64}}> : (tensor<8xi32>, tensor<8xi32>) -> tensor<8xi1>
    %p0 = "tt.splat"(%x) : (!tt.ptr<f32>) -> tensor<8x!tt.ptr<f32>>
    %p = "tt.addptr"(%p0, %r) : (tensor<8x!tt.ptr<f32>>, tensor<8xi32>) -> tensor<8x!tt.ptr<f32>>
    %v = "tt.load"(%p) : (tensor<8x!tt.ptr<f32>>) -> tensor<8xf32>
    %y = "math.exp"(%v) : (tensor<8xf32>) -> tensor<8xf32>
    "tt.store"(%p, %y, %m) : (tensor<8x!tt.ptr<f32>>, tensor<8xf32>, tensor<8xi1>) -> ()
    """
    for side, check in zip(sides, (False, True), strict=True):
        assert f" < {side};" in emit(parse(text), check).text


def test_unknown_operations_are_named_with_their_place():
    function = parse(
        RANGE
        + """
    %y = "tt.magic"(%r) : (tensor<64xi32>) -> tensor<64xi32> loc(#loc2)
    "tt.store"(%y, %y) : (tensor<64xi32>, tensor<64xi32>) -> ()
    """
    )
    with pytest.raises(UnsupportedError, match=r"tt.magic in kernel 'kernel' at kernel.py:7.*TRITON_INTERPRET=1"):
        emit(function)


POINTER = "!tt.ptr<f32>"
POINTERS = f"%x: {POINTER}, %y: {POINTER}, %z: {POINTER}, %n: i32, %c: i1"


def bases_of_loads(body):
    function = parse(body, POINTERS)
    index_uses(function)
    bases = possible_bases(function)
    return [bases.get(op.operands[0], frozenset()) for op in function.walk() if op.name == "tt.load"]


def test_bases_of_pointers_through_sums_views_and_selects():
    block = "tensor<64x!tt.ptr<f32>>"
    loads = bases_of_loads(
        RANGE
        + f"""
    %xs = "tt.splat"(%x) : ({POINTER}) -> {block}
    %p = "tt.addptr"(%xs, %r) : ({block}, tensor<64xi32>) -> {block}
    %v0 = "tt.load"(%p) : ({block}) -> tensor<64xf32>
    %yz = "arith.select"(%c, %y, %z) : (i1, {POINTER}, {POINTER}) -> {POINTER}
    %v1 = "tt.load"(%yz) : ({POINTER}) -> f32
    %address = "arith.extsi"(%n) : (i32) -> i64
    %made = "tt.int_to_ptr"(%address) : (i64) -> {POINTER}
    %v2 = "tt.load"(%made) : ({POINTER}) -> f32
    %mixed = "arith.select"(%c, %x, %made) : (i1, {POINTER}, {POINTER}) -> {POINTER}
    %v3 = "tt.load"(%mixed) : ({POINTER}) -> f32
    """
    )
    assert loads == [{0}, {1, 2}, {None}, {0, None}]


def test_bases_of_pointers_that_loops_and_branches_carry():
    loads = bases_of_loads(
        f"""
    %zero = "arith.constant"() <{{value = 0 : i32}}> : () -> i32
    %one = "arith.constant"() <{{value = 1 : i32}}> : () -> i32
    %ends:2 = "scf.for"(%zero, %n, %one, %x, %y) ({{
    ^bb0(%i: i32, %p: {POINTER}, %q: {POINTER}):
      %v0 = "tt.load"(%p) : ({POINTER}) -> f32
      %next = "tt.addptr"(%q, %one) : ({POINTER}, i32) -> {POINTER}
      "scf.yield"(%next, %next) : ({POINTER}, {POINTER}) -> ()
    }}) : (i32, i32, i32, {POINTER}, {POINTER}) -> ({POINTER}, {POINTER})
    %v1 = "tt.load"(%ends#1) : ({POINTER}) -> f32
    %last = "scf.while"(%x) ({{
    ^bb0(%w: {POINTER}):
      %v2 = "tt.load"(%w) : ({POINTER}) -> f32
      "scf.condition"(%c, %w) : (i1, {POINTER}) -> ()
    }}, {{
    ^bb0(%u: {POINTER}):
      %v3 = "tt.load"(%u) : ({POINTER}) -> f32
      "scf.yield"(%z) : ({POINTER}) -> ()
    }}) : ({POINTER}) -> {POINTER}
    %v4 = "tt.load"(%last) : ({POINTER}) -> f32
    %either = "scf.if"(%c) ({{
      "scf.yield"(%z) : ({POINTER}) -> ()
    }}, {{
      "scf.yield"(%y) : ({POINTER}) -> ()
    }}) : (i1) -> {POINTER}
    %v5 = "tt.load"(%either) : ({POINTER}) -> f32
    """
    )
    assert loads == [{0, 1}, {1}, {0, 2}, {0, 2}, {0, 2}, {1, 2}]


def test_bases_of_pointers_across_blocks():
    loads = bases_of_loads(
        f"""
    "cf.cond_br"(%c, %n, %x, %y)[^bb1, ^bb2] <{{operandSegmentSizes = array<i32: 1, 2, 1>}}> : (i1, i32, {POINTER}, {POINTER}) -> ()
  ^bb1(%m: i32, %p: {POINTER}):
    %v0 = "tt.load"(%p) : ({POINTER}) -> f32
    "cf.br"(%z)[^bb2] : ({POINTER}) -> ()
  ^bb2(%q: {POINTER}):
    %v1 = "tt.load"(%q) : ({POINTER}) -> f32
    """  # noqa: E501
    )
    assert loads == [{0}, {1, 2}]


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        ('"tt.store"(%p, %v) : (BLOCK, tensor<64xf32>) -> ()', True),
        ('"tt.store"(%p, %v) : (BLOCK, tensor<64xf32>) -> ()\n%w = "math.exp"(%v) : (F) -> F', False),
        ('%m = "tt.reshape"(%v) : (F) -> tensor<8x8xf32>\n"tt.store"(%p, %m) : (BLOCK, tensor<8x8xf32>) -> ()', True),
        ('%m = "tt.reshape"(%v) : (F) -> tensor<8x8xf32>\n%w = "math.exp"(%m) : (M) -> tensor<8x8xf32>', False),
        ('%s = "arith.select"(%c, %v, %v) : (i1, F, F) -> F\n"tt.store"(%p, %s) : (BLOCK, F) -> ()', True),
        ('%s = "arith.select"(%c, %v, %v) : (i1, F, F) -> F\n%t = "arith.addf"(%s, %s) : (F, F) -> F', False),
    ],
)
def test_values_that_are_only_copied(uses, expected):
    body = """
    %s0 = "tt.splat"(%x) : (!tt.ptr<f32>) -> BLOCK
    %p = "tt.addptr"(%s0, %r) : (BLOCK, tensor<64xi32>) -> BLOCK
    %v = "tt.load"(%p) : (BLOCK) -> F
    """
    text = (RANGE + body + uses).replace("BLOCK", "tensor<64x!tt.ptr<f32>>")
    function = parse(text.replace("M)", "tensor<8x8xf32>)").replace("F", "tensor<64xf32>"), POINTERS)
    index_uses(function)
    assert is_only_copied(by_name(function, "tt.load").result) is expected


def test_accesses_are_listed_and_checked_in_checking_mode_only():
    body = (
        RANGE
        + """
    %s = "tt.splat"(%x) : (!tt.ptr<f32>) -> tensor<64x!tt.ptr<f32>>
    %p = "tt.addptr"(%s, %r) : (tensor<64x!tt.ptr<f32>>, tensor<64xi32>) -> tensor<64x!tt.ptr<f32>>
    %v = "tt.load"(%p) : (tensor<64x!tt.ptr<f32>>) -> tensor<64xf32> loc(#loc2)
    %w = "arith.addf"(%v, %v) : (tensor<64xf32>, tensor<64xf32>) -> tensor<64xf32>
    "tt.store"(%p, %w) : (tensor<64x!tt.ptr<f32>>, tensor<64xf32>) -> ()
    """
    )
    checked = emit(parse(body), check=True)
    assert checked.accesses == (
        Access("load", "kernel.py:7", (0,), "f32", poison=0x7FE9A5A5),
        Access("store", "", (0,), "f32"),
    )
    assert "check.load(" in checked.text
    assert "check.store(" in checked.text
    plain = emit(parse(body))
    assert plain.accesses == ()
    assert "check" not in plain.text


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_text_becomes_a_function_that_runs(tmp_path):
    function = parse(
        RANGE
        + """
    %s = "tt.splat"(%x) : (!tt.ptr<f32>) -> tensor<64x!tt.ptr<f32>>
    %p = "tt.addptr"(%s, %r) : (tensor<64x!tt.ptr<f32>>, tensor<64xi32>) -> tensor<64x!tt.ptr<f32>>
    %l = "tt.splat"(%n) : (i32) -> tensor<64xi32>
    %m = "arith.cmpi"(%r, %l) <{predicate = 2 : i64}> : (tensor<64xi32>, tensor<64xi32>) -> tensor<64xi1>
    %v = "tt.load"(%p, %m) : (tensor<64x!tt.ptr<f32>>, tensor<64xi1>) -> tensor<64xf32>
    %w = "arith.addf"(%v, %v) : (tensor<64xf32>, tensor<64xf32>) -> tensor<64xf32>
    "tt.store"(%p, %w, %m) : (tensor<64x!tt.ptr<f32>>, tensor<64xf32>, tensor<64xi1>) -> ()
    """
    )
    source = emit(function)
    assert source.arguments == ("ptr", "i32")
    library = tmp_path / "kernel.so"
    library.write_bytes(toolchain.build(source.text, fusion=False))
    numbers = np.arange(64, dtype=np.float32)
    arguments = struct.pack("qq", numbers.ctypes.data, 50)
    toolchain.share_openmp()
    ctypes.CDLL(str(library)).launch(arguments, struct.pack("3i", 1, 1, 1), 1, None)
    assert numbers.tolist() == [2.0 * i if i < 50 else float(i) for i in range(64)]


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    toolchain.compiler.cache_clear()
    with pytest.raises(RuntimeError, match=r"no-such-compiler is not on PATH.*CXX"):
        toolchain.compiler()
    toolchain.compiler.cache_clear()


def test_damage_to_a_binary_is_seen():
    whole = toolchain.sealed(b"binary")
    assert toolchain.unsealed(whole) == b"binary"
    assert toolchain.unsealed(whole[:-1]) is None
    assert toolchain.unsealed(b"") is None
    assert Type("i32", (4, 2)).size == 8
