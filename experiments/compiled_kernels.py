"""Compiles recorded kernel launches for GPUs that need not be here, and reads what the compiler made of them.

Static evidence only: registers, spills, shared memory, occupancy, the kinds of instructions, the widths of memory
accesses and the buffers of pipelined loops. It says nothing of bandwidth, bank conflicts or clocks.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from cbtriton.kernels._launch import RecordedLaunch

GPU_TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_KIB = 1024
# Shared memory of a processor, and the most that one program may have of it.
_SHARED = {"sm_80": (164, 163), "sm_90": (228, 227), "sm_100": (228, 227), "gfx942": (64, 64)}


@dataclass(frozen=True, slots=True)
class Source:
    """A launch as Triton's JIT would specialise it for one target.

    Attributes:
        launch: What was recorded.
        target: Name of the target.
        source: What Triton compiles.
        options: Its options.
        key: Equal for launches that give the same binary.
        bulk: Names of the parameters that point to keys, values or logits.
    """

    launch: RecordedLaunch
    target: str
    source: ASTSource
    options: dict[str, Any]
    key: str
    bulk: frozenset[str]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a binary tells without being run.

    Loads and stores are counted as they stand in the code, not as often as they run. "Bulk" are those of keys, values
    and logits; they move `128` bits per thread, or are narrow.

    Attributes:
        registers: Per thread, of the unified file on AMD.
        spills: Instructions that move registers to or from memory (NVIDIA), registers spilled (AMD).
        stack_bytes: Per thread.
        shared_bytes: Per program.
        fits: Whether a processor has that much shared memory for one program.
        programs_per_processor: Programs that registers, shared memory and warps let run on a processor at once.
        matrix: Matrix instructions by kind, such as `HGMMA` or `v_mfma`.
        loads: All loads from global memory by width in bits.
        bulk_loads: Loads of bulk data, 128 bits wide.
        narrow_bulk_loads: Those that are narrower.
        bulk_stores: Stores of bulk data, 128 bits wide.
        narrow_bulk_stores: Those that are narrower.
        buffers: Tiles of bulk data that pipelined loops hold in shared memory, the smallest number of any tensor;
            0 without such a loop.
        wait: Copies that loops leave outstanding when they wait for one, the smallest number; None without a loop
            that copies asynchronously.
        seconds: What compiling took; None if the binary came from Triton's cache.
    """

    registers: int
    spills: int
    stack_bytes: int
    shared_bytes: int
    fits: bool
    programs_per_processor: int
    matrix: dict[str, int]
    loads: dict[str, int]
    bulk_loads: int
    narrow_bulk_loads: int
    bulk_stores: int
    narrow_bulk_stores: int
    buffers: int
    wait: int | None
    seconds: float | None


def specialise(launch: RecordedLaunch, target: str, bulk: Collection[torch.Tensor]) -> Source:
    """Derives signature, constants and attributes from the arguments by the JIT's own code.

    Args:
        launch: A recorded launch. Tensors on the meta device count as aligned.
        target: One of `GPU_TARGETS`.
        bulk: Tensors whose accesses are counted apart.
    """
    kernel: Any = launch.kernel
    backend = make_backend(GPU_TARGETS[target])
    options = {
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "enable_fp_fusion": launch.enable_fp_fusion,
    }
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(**launch.arguments)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, options)
    source = ASTSource(kernel, signature, constants, attributes)
    storages = {tensor.untyped_storage()._cdata for tensor in bulk}
    bulk_names = frozenset(
        name
        for name, value in bound.items()
        if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in storages
    )
    return Source(launch, target, source, parsed.__dict__, f"{target} {source.hash()} {parsed.hash()}", bulk_names)


def compile_source(source: Source) -> Facts:
    """Compiles without a GPU, and reads the result.

    Raises:
        Exception: Whatever the compiler raises.
    """
    cached: list[bool] = []
    knobs.compilation.listener = lambda **event: cached.append(event["cache_hit"])
    started = time.perf_counter()
    try:
        compiled = triton.compile(source.source, target=GPU_TARGETS[source.target], options=source.options)
    finally:
        knobs.compilation.listener = None
    seconds = None if any(cached) else time.perf_counter() - started
    return read_facts(source, compiled.asm, compiled.metadata, seconds)


def read_facts(source: Source, asm: Mapping[str, Any], metadata: Any, seconds: float | None) -> Facts:
    """Facts of a compiled kernel."""
    amd = source.target.startswith("gfx")
    device = _amd_code(asm["amdgcn"]) if amd else _nvidia_code(asm["cubin"])
    bulk = _bulk_positions(source)
    accesses = bulk_accesses(asm["ttir"], asm["amdgcn" if amd else "ptx"], bulk)
    warps, shared = metadata.num_warps, metadata.shared
    per_processor, per_program = _SHARED[source.target]
    return Facts(
        registers=device.registers,
        spills=device.spills,
        stack_bytes=device.stack_bytes,
        shared_bytes=shared,
        fits=shared <= per_program * _KIB,
        programs_per_processor=occupancy(source.target, device.registers, shared, warps, per_processor * _KIB),
        matrix=device.matrix,
        loads=device.loads,
        bulk_loads=accesses["load", True],
        narrow_bulk_loads=accesses["load", False],
        bulk_stores=accesses["store", True],
        narrow_bulk_stores=accesses["store", False],
        buffers=pipelined_buffers(asm["ttgir"], bulk),
        wait=outstanding_copies(asm["ttgir"], bulk),
        seconds=seconds,
    )


def occupancy(target: str, registers: int, shared: int, num_warps: int, shared_per_processor: int) -> int:
    """Programs that fit on a processor at once."""
    if target.startswith("gfx"):
        # Four SIMD units with 512 registers per lane and at most 8 waves each.
        waves = 4 * min(8, 512 // max(8, -(-registers // 8) * 8))
        by_shared = shared_per_processor // shared if shared else waves
        return min(waves // num_warps, by_shared)
    by_registers = 65536 // (max(1, -(-registers * 32 // 256)) * 256 * num_warps)
    return min(by_registers, shared_per_processor // (shared + _KIB), 64 // num_warps, 32)


@dataclass(frozen=True, slots=True)
class _Code:
    registers: int
    spills: int
    stack_bytes: int
    matrix: dict[str, int]
    loads: dict[str, int]


_SASS_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


def _nvidia_code(cubin: bytes) -> _Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output_of(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name)
        sass = _output_of(knobs.nvidia.nvdisasm.path, "-c", file.name)
    opcodes = Counter(_SASS_INSTRUCTION.findall(sass))
    spills, matrix, loads = 0, Counter[str](), Counter[str]()
    for opcode, count in opcodes.items():
        name, *modifiers = opcode.split(".")
        if name in ("STL", "LDL"):
            spills += count
        elif name.endswith("MMA"):
            matrix[name] += count
        elif name in ("LDG", "LDGSTS"):
            loads[next((bits for part in modifiers if (bits := _SASS_WIDTHS.get(part))), "32")] += count
    return _Code(
        registers=_number(r"REG:(\d+)", usage),
        spills=spills,
        stack_bytes=_number(r"STACK:(\d+)", usage),
        matrix=dict(matrix),
        loads=dict(loads),
    )


_SASS_WIDTHS = {"256": "256", "128": "128", "64": "64", "U16": "16", "S16": "16", "U8": "8", "S8": "8"}


def _output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def _number(pattern: str, text: str, default: int | None = None) -> int:
    found = re.search(pattern, text)
    if found is None:
        if default is None:
            raise ValueError(f"no {pattern!r} in the compiler's output; does its format differ?")
        return default
    return int(found[1])


_AMD_LOAD = re.compile(r"^\s+(?:global|buffer|flat)_load_(\w+)", re.MULTILINE)
_AMD_ACCESS = re.compile(r"^\s+(?:global|buffer|flat)_(load|store)_(\w+)")
_AMD_BITS = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32, "ushort": 16, "short": 16, "sshort": 16}


def _amd_bits(suffix: str) -> int:
    # Parts of registers: `short_d16_hi`, `ubyte_d16`.
    return _AMD_BITS.get(suffix.partition("_")[0], 8)


def _amd_code(text: str) -> _Code:
    loads = Counter(str(_amd_bits(suffix)) for suffix in _AMD_LOAD.findall(text))
    mfma = len(re.findall(r"^\s+v_s?mfma\w*", text, re.MULTILINE))
    vector = _number(r"; NumVgprs: (\d+)", text)
    return _Code(
        registers=_number(r"; TotalNumVgprs: (\d+)", text, vector),
        spills=_number(r"\.vgpr_spill_count: +(\d+)", text),
        stack_bytes=_number(r"; ScratchSize: (\d+)", text),
        matrix={"v_mfma": mfma} if mfma else {},
        loads=dict(loads),
    )


def _bulk_positions(source: Source) -> set[int]:
    """Positions of the bulk parameters among those that are not constants."""
    names = [name for name, kind in source.source.signature.items() if kind != "constexpr"]
    return {position for position, name in enumerate(names) if name in source.bulk}


# --- Which accesses belong to bulk data: pointers are followed through the IR, accesses matched by their location. ---

# Line and column, and the line and column of the call that they were inlined at.
Location = tuple[int, int, int, int]
_VALUE = re.compile(r"%[\w$.#-]+")
_LOADS = re.compile(r"(?:tt\.load|amd\w*\.buffer_load)")
_DATA = re.compile(rf"{_LOADS.pattern}|ttg\.async")
_CARRIED = re.compile(r"(%[\w$.-]+) = (%[\w$.#-]+)")


def _tainted_lines(ir: str, bulk: set[int]) -> Iterator[tuple[str, set[str]]]:
    """Lines of the IR with the values known at that point to be pointers into bulk data."""
    tainted: set[str] = set()
    for line in ir.splitlines():
        if "tt.func public" in line:
            arguments = re.findall(r"(%[\w$.-]+): ", line)
            tainted |= {name for position, name in enumerate(arguments) if position in bulk}
            continue
        yield line, tainted
        results, equals, operation = line.strip().partition(" = ")
        if not equals or not results.startswith("%"):
            continue
        if "scf.for" in operation or "scf.while" in operation:
            for position, (inside, outside) in enumerate(_CARRIED.findall(operation.partition("(")[2])):
                if outside in tainted:
                    tainted |= {inside, f"{results.partition(':')[0]}#{position}", results}
        elif "!tt.ptr" in operation and not _DATA.match(operation) and tainted & set(_VALUE.findall(operation)):
            tainted.add(results)


def bulk_accesses(ttir: str, assembly: str, bulk: set[int]) -> Counter[tuple[str, bool]]:
    """Loads and stores of bulk data in PTX or AMD assembly, by (kind, whether 128 bits wide)."""
    table = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", ttir, re.MULTILINE))
    locations: dict[str, set[Location]] = {"load": set(), "store": set()}
    for line, tainted in _tainted_lines(ttir, bulk):
        found = re.search(r"tt\.(load|store) (%[\w$.#-]+)", line)
        if found and found[2] in tainted and (where := re.search(r" loc\((.*)\)$", line)):
            locations[found[1]].add(_location(where[1], table))
    counts: Counter[tuple[str, bool]] = Counter()
    for kind, bits, location in _accesses(assembly):
        if location in locations[kind]:
            counts[kind, bits >= 128] += 1
    return counts


def _location(text: str, table: Mapping[str, str]) -> Location:
    chain = list(_chain(text, table))[:2]
    (line, column), (at_line, at_column) = (*chain, (0, 0), (0, 0))[:2]
    return line, column, at_line, at_column


def _chain(text: str, table: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    """Lines and columns from the innermost function outwards."""
    if text.startswith("#loc"):
        yield from _chain(table.get(text, ""), table)
    elif found := re.fullmatch(r"callsite\((.*) at (.*)\)", text):
        yield from _chain(found[1], table)
        yield from _chain(found[2], table)
    elif found := re.fullmatch(r'"[^"]*":(\d+):(\d+)(?: to .*)?', text):
        yield int(found[1]), int(found[2])
    elif found := re.fullmatch(r'(?:"[^"]*"|fused(?:<[^>]*>)?)[\[(](#loc\d*).*', text):
        yield from _chain(found[1], table)


_LOC = re.compile(r"^\s+\.loc\s+\d+ (\d+) (\d+)(?:.*?inlined_at \d+ (\d+) (\d+)|.*?@\[ [^:]*:(\d+):(\d+))?")
_PTX_ACCESS = re.compile(r"\b(ld|st)\.global((?:\.[\w:]+)*)\.([bfsu])(\d+)")
_PTX_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global(?:\.[\w:]+)* \[.*?\], \[.*?\], (0x[0-9a-fA-F]+|\d+)")


def _accesses(assembly: str) -> Iterator[tuple[str, int, Location]]:
    """Accesses to global memory: kind, width in bits and location."""
    location: Location = (0, 0, 0, 0)
    inline, fixed = False, False  # Within inline assembly LLVM counts on, line by line; only its first line is right.
    for line in assembly.splitlines():
        if " inline asm" in line:
            inline, fixed = "begin" in line, False
        elif found := _LOC.match(line):
            if not fixed:
                numbers = [int(number) for number in found.groups(default="0")]
                location = (numbers[0], numbers[1], numbers[2] or numbers[4], numbers[3] or numbers[5])
            fixed = inline
        elif found := _PTX_COPY.search(line):
            yield "load", int(found[1], 0) * 8, location
        elif found := _PTX_ACCESS.search(line):
            lanes = re.search(r"\.v(\d)", found[2])
            yield ("load" if found[1] == "ld" else "store"), int(found[4]) * int(lanes[1] if lanes else 1), location
        elif found := _AMD_ACCESS.match(line):
            yield found[1], _amd_bits(found[2]), location


_BUFFERS = re.compile(r"(%[\w$.-]+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x")
_VIEW = re.compile(r"(%[\w$.-]+) = ttg\.memdesc_\w+ (%[\w$.-]+)")
_LOAD = re.compile(rf"(%[\w$.-]+) = {_LOADS.pattern} (%[\w$.#-]+)")
_FILL = re.compile(r"(?:async_copy_global_to_local|ttg\.local_store) (%[\w$.#-]+), (%[\w$.#-]+)")


def pipelined_buffers(ttgir: str, bulk: set[int]) -> int:
    """Tiles that pipelined loops hold in shared memory of any bulk tensor, the smallest number; 0 without any."""
    allocated: dict[str, int] = {}
    views: dict[str, str] = {}
    loaded: set[str] = set()
    used: list[int] = []
    for line, tainted in _tainted_lines(ttgir, bulk):
        text = line.strip()
        if found := _BUFFERS.match(text):
            allocated[found[1]] = int(found[2])
        elif found := _VIEW.match(text):
            views[found[1]] = views.get(found[2], found[2])
        elif (found := _LOAD.match(text)) and found[2] in tainted:
            loaded.add(found[1])
        elif (found := _FILL.search(text)) and (found[1] in tainted or found[1] in loaded):
            used += [count for name, count in allocated.items() if views.get(found[2]) == name]
    return min(used, default=0)


def outstanding_copies(ttgir: str, bulk: set[int]) -> int | None:
    """Copies that innermost loops over bulk data leave outstanding when they wait, the smallest number.

    None if no such loop copies asynchronously.
    """
    blocks: list[int] = []  # For each open brace the line of the loop that it is in; 0 outside of loops.
    outer: set[int] = {0}
    copying: set[int] = set()
    waits: dict[int, int] = {}
    for number, (line, tainted) in enumerate(_tainted_lines(ttgir, bulk), start=1):
        text = line.strip()
        if text.startswith("}"):
            blocks = blocks[:-1]
        loop = blocks[-1] if blocks else 0
        if (found := _FILL.search(text)) and found[1] in tainted:
            copying.add(loop)
        elif found := re.search(r"ttg\.async_wait .*\{num = (\d+)", text):
            waits[loop] = min(int(found[1]), waits.get(loop, int(found[1])))
        if re.search(r"\{(?: loc\(.*\))?$", text):
            if opens_loop := bool(re.search(r"scf\.(?:for|while)", text)):
                outer.add(loop)
            blocks = [*blocks, number if opens_loop else loop]
    return min((count for loop, count in waits.items() if loop in copying - outer), default=None)
