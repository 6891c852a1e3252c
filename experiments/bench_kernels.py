"""Times every implementation of every kernel slot over a grid of shapes, beside torch and what the machine allows.

    python experiments/bench_kernels.py --threads 1 2 --dtypes bf16 fp32
    python experiments/bench_kernels.py --slots decode_attention --decode 1x4096 16x1024 64x256 --page-sizes 16 256
    python experiments/bench_kernels.py --slots kv_write --kernels mine reference
    python experiments/bench_kernels.py --interpreter
    python experiments/bench_kernels.py --compile

Shapes are those of SmolLM2-135M unless others are given; new files in `kernels/<slot>/` take part by themselves. Every
result is compared with what torch computes, and a wrong one is a row that says so. Contestants take turns in one
process, each call after something else went through the caches; times are medians. The floor is the time that the bytes
which must move, or the operations which must be done, take at the speed of a large copy and of a large matrix product,
measured in the same run. `--interpreter` runs everything in Triton's interpreter, at tiny sizes.

Prints Markdown; writes `bench_kernels.json`, and a roofline and the share of it that was reached as pictures.

`--compile` instead measures what first calls of Triton kernels cost, with an empty cache and with a full one.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out.
from _kernel_cases import TINY, Bench, Case, Sizes, Spec, TooLargeError
from _kernel_timing import SMALLEST_FLOOR_US, Ceilings, CpuTimer, CudaTimer, Timer, Timing

from cbtriton.figures import KernelTiming, roofline_figure, roofline_shares_figure, save
from cbtriton.kernel_set import REFERENCE, TRITON, implementations
from cbtriton.report import environment

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Row:
    """How an implementation did on a case.

    Attributes:
        slot: Whose kernel it is.
        case: What is computed, with its sizes.
        dtype: Of queries, keys, values and logits.
        threads: Torch's threads.
        who: The implementation, or what of torch computes the same.
        is_kernel: Whether it is an implementation of the slot.
        time_us: Median time of a call.
        floor_us: The least that the machine allows.
        gb_per_s: Bytes that must move over the time.
        gflop_per_s: Operations that must be done over the time.
        flop_per_byte: These operations over these bytes.
        first_call_s: Seconds of the first call: compilation.
        error: Distance from the right result; None for torch's.
        note: What went wrong, if anything did.
    """

    slot: str
    case: str
    dtype: str
    threads: int
    who: str
    is_kernel: bool
    time_us: float | None = None
    floor_us: float | None = None
    gb_per_s: float | None = None
    gflop_per_s: float | None = None
    flop_per_byte: float | None = None
    first_call_s: float | None = None
    error: float | None = None
    note: str = ""


def main() -> None:
    """Prints a table for each number format and number of threads."""
    arguments = parse_arguments()
    if arguments.interpreter and os.environ.get("TRITON_INTERPRET") != "1":
        # It is on or off for a whole process, from its beginning.
        done = subprocess.run([sys.executable, *sys.argv], env={**os.environ, "TRITON_INTERPRET": "1"}, check=False)
        sys.exit(done.returncode)
    if arguments.compile:
        print_compile_seconds()
        return
    if arguments.compile_once:
        print(json.dumps(first_calls(arguments)))
        return
    device = torch.device(arguments.device)
    rows, measured = [], {}
    for dtype in arguments.dtypes:
        for threads in arguments.threads if device.type == "cpu" else [torch.get_num_threads()]:
            torch.set_num_threads(threads)
            timer: Timer = CudaTimer(device) if device.type == "cuda" else CpuTimer(arguments.seconds)
            ceilings = timer.ceilings()
            own = list(print_table(arguments, device, dtype, threads, timer, ceilings))
            measured[title_of(dtype, threads)] = (ceilings, own)
            rows += own
    write(arguments.output, device, measured)
    if any(row.note and row.is_kernel for row in rows):
        sys.exit(1)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_argument_group("what runs")
    where.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    where.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of a CPU")
    where.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16", "fp32"])
    where.add_argument("--slots", nargs="+", choices=TRITON, default=list(TRITON))
    where.add_argument("--kernels", nargs="+", default=[], help="names of implementations; default: all there are")
    where.add_argument("--only", default="", help="part of the names of the cases to run")
    where.add_argument("--interpreter", action="store_true", help="Triton's interpreter, at tiny sizes")
    shape = parser.add_argument_group("shapes")
    shape.add_argument("--heads", type=int, default=9, help="query heads")
    shape.add_argument("--kv-heads", type=int, default=3)
    shape.add_argument("--head-dim", type=int, default=64)
    shape.add_argument("--vocab", type=int, default=49_152)
    shape.add_argument("--page-sizes", type=int, nargs="+", default=[256])
    shape.add_argument(
        "--decode", type=spans, nargs="+", default=[(8, 256), (16, 1024), (1, 4096)], metavar="ROWSxLENGTH"
    )
    shape.add_argument(
        "--prefill",
        type=spans,
        nargs="+",
        default=[(4, 512), (1, 256, 1024)],
        metavar="ROWSxTOKENS[+BEFORE]",
        help="query tokens of each row, and tokens that are in the cache before them",
    )
    shape.add_argument("--sampled", type=int, nargs="+", default=[8], help="rows that sample")
    shape.add_argument("--written", type=int, nargs="+", default=[8, 2048], help="tokens written to the cache")
    shape.add_argument("--prepared", type=spans, nargs="+", default=[(8, 1), (4, 512)], metavar="ROWSxTOKENS")
    shape.add_argument("--copied", type=int, default=8, help="blocks")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each row, on a CPU")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--compile", action="store_true", help="measure compilation instead of speed")
    parser.add_argument("--compile-once", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.kernels) - {name for slot in arguments.slots for name in implementations(slot)}:
        parser.error(f"no implementation of {', '.join(arguments.slots)} is called {', '.join(sorted(unknown))}")
    return arguments


def title_of(dtype: str, threads: int) -> str:
    """What sets a table apart from others."""
    return f"{dtype}, {threads} thread{'s' if threads > 1 else ''}"


def spans(text: str) -> tuple[int, ...]:
    """`8x256` or `1x256+1024`.

    Raises:
        ValueError: It is neither; argparse says so.
    """
    rows, _, rest = text.partition("x")
    return (int(rows), *map(int, rest.split("+")))


def sizes_of(arguments: argparse.Namespace, dtype: torch.dtype) -> Sizes:
    """The grid that was asked for."""
    if arguments.interpreter:
        return dataclasses.replace(TINY, flex=(), processed=(1,), dtype=dtype)
    longest = max(length for _, length in arguments.decode)
    return Sizes(
        num_heads=arguments.heads,
        num_kv_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        pages=tuple(arguments.page_sizes),
        decode=tuple(arguments.decode),
        prefill=tuple((span[0], span[1], sum(span[2:])) for span in arguments.prefill),
        flex=(),
        vocab=arguments.vocab,
        sampled=tuple(arguments.sampled),
        written=tuple(arguments.written),
        prepared=tuple(arguments.prepared),
        copied=arguments.copied,
        table_shape=(64, max(2048, longest)),
        processed=tuple(arguments.sampled),
        dtype=dtype,
    )


def specs(arguments: argparse.Namespace, device: torch.device, dtype: str) -> Iterator[Spec]:
    """The cases of the slots that were asked for."""
    torch.manual_seed(0)
    for spec in Bench(sizes_of(arguments, DTYPES[dtype]), device).specs():
        if spec.slot in arguments.slots and arguments.only in spec.name:
            yield spec


def names_of(arguments: argparse.Namespace, slot: str, device: torch.device) -> list[str]:
    """The implementations that can run here, the reference last: others are told apart by their ratio to it."""
    launching = importlib.import_module("cbtriton.kernels._launch")
    can_launch = arguments.interpreter or launching.why_not_native(device) is None
    asked = [name for name in implementations(slot) if not arguments.kernels or name in arguments.kernels]
    own = [name for name in asked if name != REFERENCE and can_launch]
    return [*own, REFERENCE] if REFERENCE in asked else own


def print_table(
    arguments: argparse.Namespace, device: torch.device, dtype: str, threads: int, timer: Timer, ceilings: Ceilings
) -> Iterator[Row]:
    """Prints each case's rows as soon as they are measured."""
    print(
        f"\n**{title_of(dtype, threads)}**: copy {ceilings.copy_gb_per_s:.1f} GB/s, "
        f"matrix product {1e3 * ceilings.matmul_tflop_per_s:.1f} GFLOP/s\n"
    )
    print("| case | who | ms | floor, ms | of the roofline | GB/s | GFLOP/s | times faster than the reference |")
    print("|---|---|---|---|---|---|---|---|")
    for spec in specs(arguments, device, dtype):
        rows = list(measure(spec, names_of(arguments, spec.slot, device), timer, ceilings, dtype, threads))
        by_name = {row.who: row.time_us for row in rows if row.is_kernel}
        for row in rows:
            print(markdown(row, by_name.get(REFERENCE)), flush=True)
        yield from rows


def measure(spec: Spec, names: list[str], timer: Timer, ceilings: Ceilings, dtype: str, threads: int) -> Iterator[Row]:
    """Compares each implementation's result with the right one, then times them and torch in turns."""
    try:
        case = spec.build()
    except TooLargeError as error:
        yield Row(spec.slot, spec.name, dtype, threads, "all", False, note=str(error))
        return
    calls, errors = dict(case.peers), {}
    for name in names:
        call = case.bind(importlib.import_module(f"cbtriton.kernels.{spec.slot}.{name}"))
        try:
            errors[name] = case.check(call())
        except Exception as error:
            yield Row(spec.slot, spec.name, dtype, threads, name, True, note=f"{type(error).__name__}: {error}")
            continue
        calls[name] = call
    for who, timing in timer.in_turns(calls).items():
        yield row_of(spec, case, dtype, threads, who, timing, ceilings, errors.get(who))


def row_of(
    spec: Spec,
    case: Case,
    dtype: str,
    threads: int,
    who: str,
    timing: Timing,
    ceilings: Ceilings,
    error: float | None,
) -> Row:
    """What a time means. Written this way round, an error that is no number is not allowed either."""
    is_wrong = error is not None and not error <= case.allowed
    return Row(
        slot=spec.slot,
        case=spec.name,
        dtype=dtype,
        threads=threads,
        who=who,
        is_kernel=error is not None,
        time_us=timing.time_us,
        floor_us=ceilings.floor_us(case.num_bytes, case.num_flops),
        gb_per_s=case.num_bytes / (1e3 * timing.time_us),
        gflop_per_s=case.num_flops / (1e3 * timing.time_us),
        flop_per_byte=case.num_flops / case.num_bytes,
        first_call_s=timing.first_call_s,
        error=error,
        note=f"error {error:.3g}, allowed {case.allowed:.3g}" if is_wrong else "",
    )


def markdown(row: Row, reference_us: float | None) -> str:
    """The row as a line of the table."""
    if row.time_us is None or row.floor_us is None:
        return f"| {row.case} | {row.who} | {row.note} | | | | | |"
    cells = [
        f"{row.time_us / 1e3:.3f}",
        f"{row.floor_us / 1e3:.3f}",
        f"{row.floor_us / row.time_us:.1%}" if row.floor_us >= SMALLEST_FLOOR_US else "",
        f"{row.gb_per_s:.2f}",
        f"{row.gflop_per_s:.1f}" if row.gflop_per_s else "",
        f"{reference_us / row.time_us:.2f}" if reference_us else "",
    ]
    who = f"{row.slot}/{row.who}" if row.is_kernel else row.who
    return f"| {row.case} | {who} | {' | '.join(cells)} |{f' **{row.note}**' if row.note else ''}"


def write(folder: Path, device: torch.device, measured: dict[str, tuple[Ceilings, list[Row]]]) -> None:
    """Writes all rows, and pictures of each number format and number of threads."""
    folder.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"environment": environment(), "device": str(device), "runs": []}
    for title, (ceilings, rows) in measured.items():
        record["runs"].append(
            {
                "title": title,
                "ceilings": dataclasses.asdict(ceilings),
                "rows": [dataclasses.asdict(row) for row in rows],
            }
        )
        timings = [
            KernelTiming(
                case=row.case,
                who=f"{row.slot}/{row.who}" if row.is_kernel else row.who,
                time_us=row.time_us,
                floor_us=row.floor_us,
                gflop_per_s=row.gflop_per_s or 0.0,
                flop_per_byte=row.flop_per_byte or 0.0,
            )
            for row in rows
            if row.time_us is not None and row.floor_us is not None and row.floor_us >= SMALLEST_FLOOR_US
        ]
        stem = f"bench_kernels_{title.replace(', ', '_').replace(' ', '_')}"
        if any(timing.gflop_per_s for timing in timings):
            roof = (ceilings.copy_gb_per_s, 1e3 * ceilings.matmul_tflop_per_s)
            save(roofline_figure(title, timings, *roof), folder / f"{stem}_roofline")
        if timings:
            save(roofline_shares_figure(title, timings), folder / f"{stem}_shares")
    (folder / "bench_kernels.json").write_text(json.dumps(record, indent=1) + "\n")


def print_compile_seconds() -> None:
    """Prints a row per kernel: seconds of its first call in a process, without and with a cache on disk."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "TRITON_CACHE_DIR": folder}
        command = [sys.executable, __file__, "--compile-once", "--dtypes", "bf16"]
        cold, warm = (
            json.loads(subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout)
            for _ in range(2)
        )
    print("| first call of | cold, s | warm, s |")
    print("|---|---|---|")
    for name in cold:
        print(f"| {name} | {cold[name]:.2f} | {warm[name]:.2f} |")
    print(f"| **all** | {sum(cold.values()):.2f} | {sum(warm.values()):.2f} |")


def first_calls(arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds of first calls beyond later ones, by case and Triton kernel. Importing Triton is not part of it."""
    device, timer = torch.device(arguments.device), CpuTimer(0.0)
    seconds: dict[str, float] = {}
    for spec in specs(arguments, device, arguments.dtypes[0]):
        for name in names_of(arguments, spec.slot, device):
            if name != REFERENCE:
                call = spec.build().bind(importlib.import_module(f"cbtriton.kernels.{spec.slot}.{name}"))
                timing = timer.measure(call)
                seconds[f"{spec.name} ({name})"] = max(0.0, timing.first_call_s - timing.time_us / 1e6)
    return seconds


if __name__ == "__main__":
    main()
