"""Reads MLIR printed in its generic form.

Generic form has one syntax for all operations:
`%r:2 = "dialect.op"(%a, %b#1)[^bb1] <{properties}> ({ regions }) {attributes} : (types) -> types loc(...)`.
"""

from __future__ import annotations

import re
import struct
from typing import Any

from cbtriton.kernels.cpu_backend.errors import UnsupportedError
from cbtriton.kernels.cpu_backend.ir import FLOATS, INT_BITS, Block, Function, Op, Region, Type, Value

_SPACE = re.compile(r"(?:\s+|//[^\n]*)*")
_SSA = re.compile(r"%([A-Za-z0-9_$.-]+)")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_$.]*")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_NUMBER = re.compile(r"-?(?:0x[0-9A-Fa-f]+|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)")
_BLOCK = re.compile(r"\^([A-Za-z0-9_]+)")
_LOC_ALIAS = re.compile(r"^(#loc\d*) = loc\((.*)\)\s*$", re.M)


class MLIRSyntaxError(ValueError):
    """The text is not MLIR in generic form as this module knows it."""


def parse_module(text: str) -> list[Function]:
    """The functions of a module printed in generic form.

    Raises:
        MLIRSyntaxError: The text has another form.
        UnsupportedError: A type is not supported.
    """
    locations = _Locations(text)
    body = re.sub(_LOC_ALIAS, "", text).strip()
    if not body.startswith('"builtin.module"'):
        raise MLIRSyntaxError(
            "expected a module in MLIR's generic form, which Triton prints for modules with an invalid attribute; "
            f"got: {body[:80]!r}. This version of Triton is not supported by the CPU backend"
        )
    parser = _Parser(body, locations)
    try:
        module = parser.op({}, {})
    except UnsupportedError as error:
        raise error if error.loc else UnsupportedError(error.what, *parser.place()) from None
    functions = []
    for op in module.regions[0].entry.ops:
        if op.name != "tt.func":
            raise UnsupportedError(f"operation {op.name} outside of functions", op.loc)
        attrs = op.attrs.get("arg_attrs") or [{}] * len(op.regions[0].entry.args)
        functions.append(Function(op.attrs["sym_name"], op.regions[0], attrs))
    return functions


class _Locations:
    """Source positions, most of which are printed as aliases."""

    def __init__(self, text: str) -> None:
        self._texts = dict(_LOC_ALIAS.findall(text))

    def find(self, text: str) -> str:
        """`file:line` of a location: of calls, the one in the kernel rather than in the called function."""
        for _ in range(100):
            position = re.match(r'"([^"]+)":(\d+):\d+', text)
            if position:
                return f"{position[1]}:{position[2]}"
            call = re.match(r"callsite\(.* at (.*)\)$", text)
            if call:
                text = call[1]
                continue
            alias = re.search(r"#loc\d*", text)
            if alias is None:
                return ""
            text = self._texts.get(alias[0], "")
        return ""


class _Parser:
    def __init__(self, text: str, locations: _Locations) -> None:
        self._text = text
        self._pos = 0
        self._locations = locations

    def place(self) -> tuple[str, str]:
        """The source position of what is being read, and the kernel's name."""
        kernel = re.search(r'sym_name = "([^"]+)"', self._text)
        self._pos = self._text.find("loc(", self._pos) if "loc(" in self._text[self._pos :] else self._pos
        return self._loc(), kernel[1] if kernel else ""

    # Characters and words

    def _skip(self) -> None:
        self._pos = _SPACE.match(self._text, self._pos).end()

    def _peek(self, token: str) -> bool:
        self._skip()
        return self._text.startswith(token, self._pos)

    def _take(self, token: str) -> bool:
        if self._peek(token):
            self._pos += len(token)
            return True
        return False

    def _expect(self, token: str) -> None:
        if not self._take(token):
            line = self._text.count("\n", 0, self._pos) + 1
            raise MLIRSyntaxError(f"expected {token!r} in line {line}, got {self._text[self._pos : self._pos + 60]!r}")

    def _match(self, pattern: re.Pattern) -> re.Match | None:
        self._skip()
        found = pattern.match(self._text, self._pos)
        if found:
            self._pos = found.end()
        return found

    def _need(self, pattern: re.Pattern, what: str) -> re.Match:
        found = self._match(pattern)
        if not found:
            raise MLIRSyntaxError(f"expected {what}, got {self._text[self._pos : self._pos + 60]!r}")
        return found

    def _balanced(self, opening: str, closing: str) -> str:
        """The text up to the bracket that closes the one just read; strings may hold brackets."""
        depth, start = 1, self._pos
        while depth:
            char = self._text[self._pos]
            if char == '"':
                self._pos = _STRING.match(self._text, self._pos).end()
                continue
            depth += (char == opening) - (char == closing)
            self._pos += 1
        return self._text[start : self._pos - 1]

    def _loc(self) -> str:
        if not self._take("loc("):
            return ""
        return self._locations.find(self._balanced("(", ")"))

    # Types

    def _type(self) -> Type:
        if self._take("tensor<"):
            shape = []
            while dim := self._match(re.compile(r"(\d+)x|(?=[^\d])")):
                if dim[1] is None:
                    break
                shape.append(int(dim[1]))
            elem = self._type()
            if self._take(","):
                self._balanced("<", ">")
            else:
                self._expect(">")
            return elem.with_shape(tuple(shape))
        if self._take("!tt.ptr<"):
            pointee = self._type()
            if self._take(","):
                self._need(_NUMBER, "an address space")
            self._expect(">")
            if pointee.is_block:
                raise UnsupportedError("a pointer to a block")
            return Type("ptr", None, pointee.elem)
        if self._take("!"):
            word = self._need(_WORD, "a type")[0]
            if self._take("<"):
                word += f"<{self._balanced('<', '>')}>"
            raise UnsupportedError(f"type !{word}")
        word = self._need(_WORD, "a type")[0]
        if word not in INT_BITS and word not in FLOATS:
            raise UnsupportedError(f"type {word}")
        return Type(word)

    def _types(self) -> list[Type]:
        if not self._take("("):
            return [self._type()]
        types = []
        while not self._take(")"):
            types.append(self._type())
            self._take(",")
        return types

    # Attributes

    def _attrs(self, closing: str) -> dict[str, Any]:
        attrs = {}
        while not self._take(closing):
            quoted = self._match(_STRING)
            name = quoted[1] if quoted else self._need(_WORD, "an attribute's name")[0]
            attrs[name] = self._attr() if self._take("=") else True
            self._take(",")
        return attrs

    def _attr(self) -> Any:
        if self._take("["):
            items = []
            while not self._take("]"):
                items.append(self._attr())
                self._take(",")
            return items
        if self._take("{"):
            return self._attrs("}")
        if text := self._match(_STRING):
            return _unescaped(text[1])
        if self._take("array<"):
            return [int(n) for n in re.findall(r"-?\d+", self._balanced("<", ">").partition(":")[2])]
        if self._take("dense<"):
            values = self._balanced("<", ">")
            self._expect(":")
            return _dense(values, self._type())
        for word, value in (("true", True), ("false", False), ("unit", True)):
            if self._take(word):
                return value
        if self._peek("("):
            return (self._types(), self._expect("->"), self._types())
        if number := self._match(_NUMBER):
            return _number(number[0], self._type() if self._take(":") else None)
        if self._take("#") or self._take("@"):
            word = self._need(_WORD, "an attribute")[0]
            return self._balanced("<", ">") if self._take("<") else word
        return self._type()

    # Operations

    def op(self, scope: dict[str, list[Value]], blocks: dict[str, Block]) -> Op:
        """Reads one operation."""
        names: list[tuple[str, int]] = []
        if self._peek("%"):
            while True:
                name = self._need(_SSA, "a name")[1]
                number = int(self._need(_NUMBER, "a number")[0]) if self._take(":") else 1
                names.append((name, number))
                if not self._take(","):
                    break
            self._expect("=")
        op = Op(self._need(_STRING, "an operation in generic form")[1], [])
        self._expect("(")
        while not self._take(")"):
            op.operands.append(self._use(scope))
            self._take(",")
        if self._take("["):
            while not self._take("]"):
                label = self._need(_BLOCK, "a block")[1]
                op.successors.append(blocks.setdefault(label, Block(label=label)))
                self._take(",")
        if self._take("<{"):
            op.attrs |= self._attrs("}")
            self._expect(">")
        if self._take("("):
            while not self._take(")"):
                op.regions.append(self._region(scope, op))
                self._take(",")
        if self._take("{"):
            op.attrs |= self._attrs("}")
        self._expect(":")
        self._types()
        self._expect("->")
        types = self._types()
        op.loc = self._loc()
        op.results = [Value(type_, op, index=i) for i, type_ in enumerate(types)]
        rest = list(op.results)
        for name, number in names:
            scope[name], rest = rest[:number], rest[number:]
        return op

    def _use(self, scope: dict[str, list[Value]]) -> Value:
        name = self._need(_SSA, "a value")[1]
        index = int(self._need(_NUMBER, "a number")[0]) if self._take("#") else 0
        if name not in scope:
            raise MLIRSyntaxError(f"%{name} is used before its definition")
        return scope[name][index]

    def _region(self, outer: dict[str, list[Value]], parent: Op) -> Region:
        self._expect("{")
        scope, blocks, region = dict(outer), {}, Region(parent=parent)
        while not self._take("}"):
            if label := self._match(_BLOCK):
                block = blocks.setdefault(label[1], Block(label=label[1]))
                if self._take("("):
                    while not self._take(")"):
                        name = self._need(_SSA, "a name")[1]
                        self._expect(":")
                        value = Value(self._type(), block=block, index=len(block.args), name=name)
                        self._loc()
                        block.args.append(value)
                        scope[name] = [value]
                        self._take(",")
                self._expect(":")
            else:
                block = Block()
            block.parent = region
            region.blocks.append(block)
            while not self._peek("}") and not self._peek("^"):
                op = self.op(scope, blocks)
                op.parent = block
                block.ops.append(op)
        return region


def _unescaped(text: str) -> str:
    """A string without MLIR's escapes, the most common of which are two hexadecimal digits."""
    named = {"n": b"\n", "t": b"\t", "\\": b"\\", '"': b'"'}
    parts = re.split(r'\\([nt\\"]|[0-9A-Fa-f]{2})', text)
    data = [named.get(p) or bytes.fromhex(p) if i % 2 else p.encode() for i, p in enumerate(parts)]
    return b"".join(data).decode(errors="replace")


def _number(text: str, type_: Type | None) -> int | float:
    if type_ is not None and type_.elem in FLOATS:
        if text.startswith("0x"):
            return _float_of_bits(int(text, 16), type_.elem)
        return float(text)
    if type_ is None and re.search(r"[.eE]", text) and not text.startswith("0x"):
        return float(text)
    return int(text, 0)


def _float_of_bits(bits: int, elem: str) -> float:
    if elem == "bf16":
        return struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    code, size = {"f16": ("<e", 2), "f32": ("<f", 4), "f64": ("<d", 8)}[elem]
    return struct.unpack(code, bits.to_bytes(size, "little"))[0]


def _dense(text: str, type_: Type) -> Any:
    """A number for a splat, else the flat list of all numbers."""
    text = text.strip()
    if text.startswith('"'):
        return _dense_of_bytes(bytes.fromhex(text.strip('"')[2:]), type_)
    words = re.findall(r"true|false|-?0x[0-9A-Fa-f]+|-?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?", text)
    values = [w == "true" if w in ("true", "false") else _number(w, type_.scalar) for w in words]
    return values if text.startswith("[") else values[0]


def _dense_of_bytes(data: bytes, type_: Type) -> list:
    if type_.elem == "i1":
        return [bool(data[i // 8] >> i % 8 & 1) for i in range(type_.size)]
    size = 8 if type_.elem in ("index", "f64") else int(re.search(r"\d+", type_.elem)[0]) // 8
    words = [
        int.from_bytes(data[i : i + size], "little", signed=type_.elem not in FLOATS) for i in range(0, len(data), size)
    ]
    return [_float_of_bits(w, type_.elem) for w in words] if type_.elem in FLOATS else words
