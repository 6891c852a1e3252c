"""Times every kernel on this machine beside what torch does for the same inputs, at the shape of SmolLM2-135M.

    python experiments/bench_kernels.py --threads 1 2 --dtypes bf16 fp32
    python experiments/bench_kernels.py --only decode --interpreter
    python experiments/bench_kernels.py --compile

Contestants take turns, call by call, in one process; times are medians. Decode attention is compared with gathering the
pages into one piece and calling SDPA on that, prefill with SDPA on each sequence's contiguous keys, the other slots
with their torch reference. Every result is first compared with that of its baseline. `--interpreter` also times each
kernel in Triton's interpreter, in a process of its own. Prints Markdown and writes `bench_kernels.json`.

`--compile` instead measures what the first calls of all kernels cost, with an empty cache and with a full one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cbtriton.config import KernelConfig
from cbtriton.kernel_set import KernelSet, choose_kernels
from cbtriton.report import environment

# SmolLM2-135M.
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCAB = 9, 3, 64, 49_152
SCALE = HEAD_DIM**-0.5
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ALLOWED = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table.

    Attributes:
        slot: Whose kernel it is.
        name: What is computed.
        ours: The kernel's call.
        baseline: What it is compared with.
        check: Raises if the two do not agree.
    """

    slot: str
    name: str
    ours: Call
    baseline: Call
    check: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians of one case, in ms.

    Attributes:
        case: Its name.
        dtype: Of keys, values and logits.
        threads: Torch's threads.
        kernel: Which implementation.
        ours: The kernel's time.
        baseline: That of what it is compared with.
        interpreter: The kernel's in Triton's interpreter, if asked for.
    """

    case: str
    dtype: str
    threads: int
    kernel: str
    ours: float
    baseline: float
    interpreter: float | None = None


def main() -> None:
    """Prints one row per case, number format and number of threads."""
    arguments = parse_arguments()
    if arguments.interpret_one:
        print(json.dumps(interpreted_ms(arguments)))
        return
    if arguments.compile_once:
        print(json.dumps(first_calls(arguments)))
        return
    if arguments.compile:
        print_compile_seconds()
        return
    kernels = choose_kernels(KernelConfig(default="triton"), torch.device("cpu"))
    names = dict(kernels.names)
    timings = []
    print("| case | dtype | threads | kernel | ours, ms | torch, ms | faster | interpreter |")
    print("|---|---|---|---|---|---|---|---|")
    for dtype in arguments.dtypes:
        for case in cases(kernels, DTYPES[dtype], arguments.page_size, arguments.only):
            torch.set_num_threads(1)
            case.check()
            interpreter = interpreter_ms(arguments, case.name, dtype) if arguments.interpreter else None
            for threads in arguments.threads:
                torch.set_num_threads(threads)
                ours, baseline = side_by_side((case.ours, case.baseline), arguments.seconds)
                timing = Timing(case.name, dtype, threads, names[case.slot], ours, baseline, interpreter)
                timings.append(timing)
                slower = f"{interpreter / ours:,.0f}×" if interpreter else ""
                print(
                    f"| {case.name} | {dtype} | {threads} | {case.slot}/{timing.kernel} | {ours:.3f} | {baseline:.3f} "
                    f"| {baseline / ours:.2f}× | {slower} |",
                    flush=True,
                )
    record = {"environment": environment(), "timings": [asdict(timing) for timing in timings]}
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "bench_kernels.json").write_text(json.dumps(record, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16", "fp32"])
    parser.add_argument("--page-size", type=int, default=256)
    parser.add_argument("--only", default="", help="part of the names of the cases to run")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each row")
    parser.add_argument("--interpreter", action="store_true", help="also time Triton's interpreter (slow)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--compile", action="store_true", help="measure compilation instead of speed")
    parser.add_argument("--compile-once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--interpret-one", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


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
    """Seconds of each case's first call beyond a second one. Importing Triton is not part of it."""
    kernels = choose_kernels(KernelConfig(default="triton"), torch.device("cpu"))
    seconds: dict[str, float] = {}
    for case in cases(kernels, DTYPES[arguments.dtypes[0]], arguments.page_size, arguments.only):
        times = []
        for _ in range(2):
            begin = time.perf_counter()
            case.ours()
            times.append(time.perf_counter() - begin)
        seconds[case.name] = max(0.0, times[0] - times[1])
    return seconds


def side_by_side(calls: Sequence[Call], seconds: float) -> list[float]:
    """Median ms of each call; they take turns, so that whatever else the machine does meets all of them."""
    for call in calls:
        call()
        call()
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while len(times[0]) < 7 or time.perf_counter() < end:
        for call, own in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            own.append(1e3 * (time.perf_counter() - begin))
    return [median(own) for own in times]


def interpreter_ms(arguments: argparse.Namespace, name: str, dtype: str) -> float:
    """The interpreter's time for a case: it is on or off for a whole process."""
    command = [sys.executable, __file__, "--interpret-one", name, "--dtypes", dtype]
    command += ["--page-size", str(arguments.page_size)]
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    return json.loads(subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout)


def interpreted_ms(arguments: argparse.Namespace) -> float:
    """The time of one call; there is nothing to warm up, and it may take a minute."""
    kernels = choose_kernels(KernelConfig(default="triton"), torch.device("cpu"))
    chosen = cases(kernels, DTYPES[arguments.dtypes[0]], arguments.page_size, arguments.interpret_one)
    case = next(case for case in chosen if case.name == arguments.interpret_one)
    begin = time.perf_counter()
    case.ours()
    return 1e3 * (time.perf_counter() - begin)


def cases(kernels: KernelSet, dtype: torch.dtype, page_size: int, only: str) -> Iterator[Case]:
    """All cases whose names contain `only`; each is built when its turn comes."""
    builders: Mapping[str, Callable[[str], Case]] = {
        **{
            f"decode {rows} × {length}": partial(decode, kernels, dtype, page_size, rows, length)
            for rows, length in ((8, 256), (16, 1024), (1, 4096))
        },
        "prefill 4 × 512": partial(prefill, kernels, dtype, page_size, 4, 512),
        **{f"kv_write {tokens} tokens": partial(kv_write, kernels, dtype, page_size, tokens) for tokens in (8, 2048)},
        **{
            f"prepare_inputs {rows} × {count}": partial(prepare_inputs, kernels, page_size, rows, count)
            for rows, count in ((8, 1), (4, 512))
        },
        **{
            f"sample {name}": partial(sample, kernels, dtype, 8, *parameters)
            for name, parameters in {
                "greedy": (0.0, 0, 1.0),
                "temperature": (1.0, 0, 1.0),
                "top-k 50": (1.0, 50, 1.0),
                "top-p 0.9": (1.0, 0, 0.9),
                "top-k 50, top-p 0.9": (1.0, 50, 0.9),
            }.items()
        },
        "process": partial(process, kernels, dtype, 8, 500),
        **{
            f"truncate {name}": partial(truncate, kernels, 8, filters)
            for name, filters in {
                "typical-p": (0.0, 0, 1.0, 0.0, 0.95, 0.0, 0.0),
                "eta": (0.0, 0, 1.0, 0.0, 1.0, 0.0, 2e-3),
                "with all filters": (0.9, 50, 0.95, 0.02, 0.95, 1e-3, 2e-3),
            }.items()
        },
        "block_copy 8 blocks": partial(block_copy, kernels, dtype, page_size, 8),
    }
    for name, build in builders.items():
        if only in name:
            torch.manual_seed(0)
            yield build(name)


def reference(slot: str) -> Any:
    """The torch implementation of a slot."""
    return importlib.import_module(f"cbtriton.kernels.{slot}.reference")


def caches(dtype: torch.dtype, page_size: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Random keys and values, `[blocks, page_size, NUM_KV_HEADS, HEAD_DIM]`."""
    shape = (blocks, page_size, NUM_KV_HEADS, HEAD_DIM)
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


def int32(values: Any) -> Tensor:
    """An int32 tensor."""
    return torch.as_tensor(values, dtype=torch.int32)


def block_tables(rows: int, length: int, page_size: int) -> Tensor:
    """`[rows, pages]` int32: distinct blocks in random order."""
    pages = -(-length // page_size)
    return (1 + torch.randperm(rows * pages)).view(rows, pages).to(torch.int32)


def same(ours: Call, baseline: Call, allowed: float) -> None:
    """Raises if two calls do not give the same numbers.

    Raises:
        AssertionError: They do not.
    """
    for got, expected in zip(tensors(ours()), tensors(baseline()), strict=True):
        difference = (got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
        if not difference <= allowed:
            raise AssertionError(f"results differ by {difference:.3g} of their norm, allowed {allowed:.3g}")


def tensors(result: Any) -> tuple[Tensor, ...]:
    """The tensors that a call returned."""
    return result if isinstance(result, tuple) else (result,)


def decode(kernels: KernelSet, dtype: torch.dtype, page_size: int, rows: int, length: int, name: str) -> Case:
    """One query token per row; planning is once per step and not part of it."""
    tables = block_tables(rows, length, page_size)
    keys, values = caches(dtype, page_size, tables.numel() + 1)
    query = torch.randn(rows, NUM_HEADS, HEAD_DIM).to(dtype)
    entries, cu_seqlens = int32(range(rows)), int32(range(rows + 1))
    seq_lens = torch.full((rows,), length, dtype=torch.int32)
    plan = kernels.decode_plan(tables, entries, cu_seqlens, seq_lens, page_size, length)
    ours = partial(
        kernels.decode_attention, query, keys, values, tables, entries, seq_lens, plan, SCALE, 0, 0.0, None, length
    )

    def gather_and_sdpa() -> Tensor:
        blocks = tables.flatten()
        key, value = (x.index_select(0, blocks).view(rows, -1, NUM_KV_HEADS, HEAD_DIM) for x in (keys, values))
        key, value = (x[:, :length].transpose(1, 2) for x in (key, value))
        # A group's query heads as queries of one head: several times faster here than SDPA with enable_gqa.
        grouped = query.view(rows, NUM_KV_HEADS, -1, HEAD_DIM)
        return F.scaled_dot_product_attention(grouped, key, value, scale=SCALE).flatten(1, 2)

    return Case("decode_attention", name, ours, gather_and_sdpa, partial(same, ours, gather_and_sdpa, ALLOWED[dtype]))


def prefill(kernels: KernelSet, dtype: torch.dtype, page_size: int, rows: int, count: int, name: str) -> Case:
    """Whole prompts, packed."""
    tables = block_tables(rows, count, page_size)
    keys, values = caches(dtype, page_size, tables.numel() + 1)
    query = torch.randn(rows * count, NUM_HEADS, HEAD_DIM).to(dtype)
    entries, cu_seqlens = int32(range(rows)), int32(range(rows + 1)) * count
    seq_lens = torch.full((rows,), count, dtype=torch.int32)
    plan = kernels.varlen_plan(tables, entries, cu_seqlens, seq_lens, page_size, count)
    parts = (entries, cu_seqlens, seq_lens, plan)
    ours = partial(kernels.varlen_attention, query, keys, values, tables, *parts, SCALE, 0, 0.0, None, count)
    group = NUM_HEADS // NUM_KV_HEADS
    sequences = []
    for row, own in enumerate(query.split(count)):
        key, value = (
            x[tables[row].long()].view(-1, NUM_KV_HEADS, HEAD_DIM)[:count].transpose(0, 1)[None] for x in (keys, values)
        )
        key, value = (x.repeat_interleave(group, dim=1).contiguous() for x in (key, value))
        sequences.append((own.transpose(0, 1)[None].contiguous(), key, value))

    def sdpa() -> Tensor:
        outs = [F.scaled_dot_product_attention(*parts, scale=SCALE, is_causal=True) for parts in sequences]
        return torch.cat([out[0].transpose(0, 1) for out in outs])

    return Case("varlen_attention", name, ours, sdpa, partial(same, ours, sdpa, ALLOWED[dtype]))


def kv_write(kernels: KernelSet, dtype: torch.dtype, page_size: int, tokens: int, name: str) -> Case:
    """Keys and values of a step, cut out of the fused projection, to random slots."""
    keys, values = caches(dtype, page_size, 2 + 2 * tokens // page_size)
    fused = torch.randn(tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM).to(dtype)
    key, value = fused[:, NUM_HEADS:-NUM_KV_HEADS], fused[:, -NUM_KV_HEADS:]
    slots = torch.randperm(len(keys) * page_size)[:tokens]

    def bind(write: Callable[..., Any]) -> Call:
        return partial(write, key, value, keys, values, slots)

    def check() -> None:
        for cache, source in ((keys, key), (values, value)):
            cache.zero_()
            bind(kernels.kv_write)()
            same(lambda cache=cache: cache.flatten(0, 1)[slots], lambda source=source: source, 0.0)

    return Case("kv_write", name, bind(kernels.kv_write), bind(reference("kv_write").kv_write), check)


def prepare_inputs(kernels: KernelSet, page_size: int, rows: int, count: int, name: str) -> Case:
    """Ids, positions and slots of a step from a table of 64 requests."""
    max_len = 2048
    token_table = torch.randint(0, VOCAB, (64, max_len), dtype=torch.int32)
    tables = block_tables(64, max_len, page_size)
    entries = torch.randperm(64)[:rows].to(torch.int32)
    starts = torch.randint(0, max_len - count, (rows,), dtype=torch.int32)
    counts = torch.full((rows,), count, dtype=torch.int32)
    page_sizes = torch.tensor([page_size], dtype=torch.int32)
    arguments = (token_table, tables[None], entries, starts, counts, page_sizes, rows * count)
    ours = partial(kernels.prepare_inputs, *arguments)
    baseline = partial(reference("prepare_inputs").prepare_inputs, *arguments)
    return Case("prepare_inputs", name, ours, baseline, partial(same, ours, baseline, 0.0))


def sample(
    kernels: KernelSet,
    dtype: torch.dtype,
    rows: int,
    temperature: float,
    top_k: int,
    top_p: float,
    name: str,
) -> Case:
    """Logits as of a language model: a few likely tokens and a long tail."""
    logits = (2.5 * torch.randn(rows, VOCAB)).to(dtype)

    def column(value: float, kind: torch.dtype) -> Tensor:
        return torch.full((rows,), value, dtype=kind)

    arguments = (
        logits,
        int32(range(rows)),
        column(100, torch.int32),
        torch.zeros(rows, 2048, dtype=torch.int32),
        column(temperature, torch.float32),
        column(top_k, torch.int32),
        column(top_p, torch.float32),
        column(0.0, torch.float32),
        torch.arange(rows),
        column(0, torch.int32),
        torch.full((rows, 1), 2, dtype=torch.int32),
    )
    flags = (temperature == 0, top_k > 0, top_p < 1, False, False, False)
    ours = partial(kernels.sample, *arguments, *flags)
    baseline = partial(reference("sample").sample, *arguments, *flags)

    def check() -> None:
        # The same tokens: both draw the same random numbers.
        same(lambda: ours()[0], lambda: baseline()[0], 0.0)

    return Case("sample", name, ours, baseline, check)


def process(kernels: KernelSet, dtype: torch.dtype, rows: int, length: int, name: str) -> Case:
    """Penalties, n-grams, a ban, a mask and a growing EOS on histories of which half repeats."""
    logits = (2.5 * torch.randn(rows, VOCAB)).to(dtype)
    rules = torch.zeros(rows, 512, 4, dtype=torch.int32)
    rules[:, 0] = int32([7, 1, -1, 0])
    integers = {"prompt": 100, "ngram": 3, "biases": 0, "rules": 1, "masked": 1, "min": 0, "start": 300, "invalid": 1}
    column = {key: torch.full((rows,), value, dtype=torch.int32) for key, value in integers.items()}
    penalties = [torch.full((rows,), value) for value in (1.2, 0.1, 0.1)]
    arguments = (
        logits,
        int32(range(rows)),
        torch.full((rows,), length, dtype=torch.int32),
        torch.randint(0, VOCAB, (rows, length // 2), dtype=torch.int32).repeat(1, 2),
        column["prompt"],
        *penalties,
        column["ngram"],
        column["biases"],
        column["rules"],
        rules,
        torch.zeros(rows, 1024, dtype=torch.int32),
        column["masked"],
        torch.full((rows, -(-VOCAB // 32)), -2, dtype=torch.int32),
        column["min"],
        torch.full((rows, 1), 2, dtype=torch.int32),
        column["start"],
        torch.full((rows,), 1e-3),
        column["invalid"],
    )
    ours = partial(kernels.process, *arguments)
    baseline = partial(reference("sample").process, *arguments)

    def check() -> None:
        same(lambda: ours().softmax(-1), lambda: baseline().softmax(-1), 1e-5)

    return Case("sample", name, ours, baseline, check)


def truncate(kernels: KernelSet, rows: int, filters: tuple[float, ...], name: str) -> Case:
    """Filters on a copy of the scores, as of a language model: a few likely tokens and a long tail."""
    scores = 2.5 * torch.randn(rows, VOCAB)
    dtypes = (torch.float32, torch.int32, *[torch.float32] * 5)
    columns = [torch.full((rows,), value, dtype=kind) for value, kind in zip(filters, dtypes, strict=True)]
    entries, heat, on = int32(range(rows)), torch.full((rows,), 0.8), torch.ones(rows, dtype=torch.int32)

    def bind(function: Callable[..., Any]) -> Call:
        def call() -> Tensor:
            kept = scores.clone()
            function(kept, entries, heat, on, *columns)
            return kept

        return call

    ours, baseline = bind(kernels.truncate), bind(reference("sample").truncate)

    def check() -> None:
        # Sums round differently, so a token on the border may stay or go.
        same(lambda: ours().softmax(-1), lambda: baseline().softmax(-1), 1e-3)

    return Case("sample", name, ours, baseline, check)


def block_copy(kernels: KernelSet, dtype: torch.dtype, page_size: int, blocks: int, name: str) -> Case:
    """Keys and values of some blocks, to other blocks."""
    keys, values = caches(dtype, page_size, 2 * blocks)
    sources, targets = torch.randperm(2 * blocks).chunk(2)

    def bind(copy: Callable[..., Any]) -> Call:
        return partial(copy, keys, values, sources, targets)

    def check() -> None:
        bind(kernels.block_copy)()
        for cache in (keys, values):
            same(lambda cache=cache: cache[targets], lambda cache=cache: cache[sources], 0.0)

    return Case("block_copy", name, bind(kernels.block_copy), bind(reference("block_copy").block_copy), check)


if __name__ == "__main__":
    main()
