"""Compiles every Triton kernel for GPUs that need not be here, and shows what the compiler made of it.

    python experiments/compile_report.py --quick
    python experiments/compile_report.py --targets sm_90 --slots decode_attention --dtypes bf16 --head-sizes 128
    python experiments/compile_report.py --slots decode_attention --override TILE=32 num_stages=4

Launchers are called with tensors on the meta device, and what they would launch on the target is compiled, with the
JIT's own specialisation. New implementations are found in their folders. Do not set TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import importlib
import inspect
import itertools
import json
import multiprocessing
import operator
import os
import pkgutil
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from cbtriton.kernels._launch import RecordedLaunch, record_launches, uses_triton

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out.
from compiled_kernels import GPU_TARGETS, Facts, Source, compile_source, specialise

SLOTS = ("prepare_inputs", "kv_write", "varlen_attention", "decode_attention", "sample", "block_copy")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEAD_SIZES = (64, 80, 96, 128, 256)
QUICK = {"targets": ["sm_90", "gfx942"], "dtypes": ["bf16"], "head_sizes": [128], "cases": ["base"]}
# `base` is compiled for each head size, the others for one each. `sample` has its filters on in `options`.
CASES: dict[str, dict[str, Any]] = {
    "base": {},
    "page_256": {"page_size": 256, "head_size": 128, "cache_tokens": 2**19},
    "options": {"head_size": 128, "window": 1024, "softcap": 30.0, "sinks": True},
    "chunk": {"head_size": 128, "chunk": 1024},
    "slopes": {"head_size": 128, "slopes": True},
    "odd": {"page_size": 24, "head_size": 80, "group": 3},
    # Other vocabularies, for `sample` alone and with its filters on.
    **{f"v{size}": {"vocab_size": size, "window": 1} for size in (32000, 49152, 152064, 262144)},
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes and options of a representative step.

    Attributes:
        dtype: Of keys, values, queries and logits.
        head_size: Of keys and values.
        page_size: Tokens per page.
        group: Query heads per KV head.
        cache_tokens: Tokens in the cache. AMD kernels address tensors below 2 GiB in another way.
        window: Keys that a query sees, 0 for all.
        softcap: Bound of the scores, 0 for none.
        sinks: Whether heads have sinks.
        chunk: Size of the chunks that queries see, 0 for none.
        slopes: Whether heads have slopes.
        vocab_size: Logits per row.
    """

    dtype: torch.dtype
    head_size: int
    page_size: int = 16
    group: int = 4
    cache_tokens: int = 2**21
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    chunk: int = 0
    slopes: bool = False
    vocab_size: int = 128_256


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel as one launcher would launch it for one target.

    Attributes:
        slot: Folder of the implementation.
        implementation: File of the launcher.
        kernel: Name of the Triton function.
        target: What it was compiled for.
        dtype: Of the launcher's tensors.
        head_size: Of keys and values.
        case: Key of `CASES`.
        grid: Programs per axis.
        constants: Numbers among the kernel's compile-time constants.
        num_warps: Warps per program.
        num_stages: Buffers of pipelined loops.
        facts: What the binary tells; None if there is none.
        error: Why there is none.
    """

    slot: str
    implementation: str
    kernel: str
    target: str
    dtype: str
    head_size: int
    case: str
    grid: tuple[int, ...] = ()
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_warps: int = 0
    num_stages: int = 0
    facts: Facts | None = None
    error: str = ""


def main() -> None:
    """Compiles what the arguments ask for, prints a table, checks bounds and writes a result file."""
    arguments = parse_arguments()
    if knobs.runtime.interpret:
        sys.exit("kernels were decorated for the interpreter; unset TRITON_INTERPRET")
    knobs.compilation.always_compile = arguments.fresh
    print(table_header())
    rows = []
    for row in report(arguments):
        print(table_row(row), flush=True)
        rows.append(row)
    records = [dataclasses.asdict(row) for row in rows]
    if arguments.output:
        write_results(Path(arguments.output), arguments, records)
    if arguments.bounds:
        found = violations(load_bounds(Path(arguments.bounds)), records)
        print("\n".join(["", *found, f"{len(found)} bounds violated"]))
        sys.exit(bool(found))
    sys.exit(any(row.error for row in rows))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=list(GPU_TARGETS))
    parser.add_argument("--slots", nargs="+", default=list(SLOTS), choices=SLOTS)
    parser.add_argument("--implementations", nargs="+", default=["*"], help="patterns of file names (default: all)")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES))
    parser.add_argument("--head-sizes", nargs="+", type=int)
    parser.add_argument("--cases", nargs="+", choices=list(CASES))
    parser.add_argument("--quick", action="store_true", help="two targets, bf16, head size 128, no further cases")
    parser.add_argument("--override", nargs="+", default=[], metavar="NAME=VALUE", help="constants, warps, stages")
    parser.add_argument("--jobs", type=int, default=1, help="compilers side by side (default: 1)")
    parser.add_argument("--fresh", action="store_true", help="ignore Triton's cache, so that all are timed")
    parser.add_argument("--bounds", help="file of bounds to check; exits with 1 if one does not hold")
    parser.add_argument("--output", help="result file")
    arguments = parser.parse_args()
    everything = {"targets": GPU_TARGETS, "dtypes": DTYPES, "head_sizes": HEAD_SIZES, "cases": CASES}
    for name, choices in everything.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, QUICK[name] if arguments.quick else list(choices))
    return arguments


def report(arguments: argparse.Namespace) -> Iterator[Row]:
    """Rows as they come; launches that give the same binary are compiled once."""
    planned = list(plan_rows(arguments))
    sources = {source.key: source for _, source in planned if source is not None}
    with _Compilers(sources, arguments.jobs) as compilers:
        for row, source in planned:
            if source is None:
                yield row
                continue
            found = compilers.result(source.key)
            yield (
                dataclasses.replace(row, error=found)
                if isinstance(found, str)
                else dataclasses.replace(row, facts=found)
            )


class _Compilers:
    """Compiles in processes forked from this one: launches cannot be sent to others."""

    def __init__(self, sources: Mapping[str, Source], jobs: int) -> None:
        self._sources = sources
        self._jobs = jobs
        self._results: dict[str, Facts | str] = {}
        self._pool: Any = None

    def __enter__(self) -> _Compilers:
        if self._jobs > 1:
            self._pool = multiprocessing.get_context("fork").Pool(self._jobs, _adopt, (self._sources,))
            self._pending = {key: self._pool.apply_async(_compile_adopted, (key,)) for key in self._sources}
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.terminate()

    def result(self, key: str) -> Facts | str:
        if key not in self._results:
            self._results[key] = self._pending[key].get() if self._pool is not None else _try(self._sources[key])
        return self._results[key]


_adopted: dict[str, Source] = {}


def _adopt(sources: Mapping[str, Source]) -> None:
    _adopted.update(sources)


def _compile_adopted(key: str) -> Facts | str:
    return _try(_adopted[key])


def _try(source: Source) -> Facts | str:
    try:
        return compile_source(source)
    except Exception as error:  # Whatever the compiler fails with is a result.
        return _summary(error)


def _summary(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300]


def plan_rows(arguments: argparse.Namespace) -> Iterator[tuple[Row, Source | None]]:
    """Every distinct launch of every implementation, or a row with an error where a launcher failed."""
    seen: set[tuple[Any, ...]] = set()
    overrides = dict(parse_override(text) for text in arguments.override)
    for slot, module in implementations(arguments.slots, arguments.implementations):
        name = module.__name__.rpartition(".")[2]
        for target, (dtype, head_size, case) in itertools.product(arguments.targets, shapes(slot, arguments)):
            row = Row(slot, name, "?", target, dtype, head_size, case)
            shape = Shape(**{"dtype": DTYPES[dtype], "head_size": head_size, **CASES[case]})
            step = STEPS[slot](shape)
            try:
                launches = recorded(module, slot, target, step)
            except Exception as error:  # A launcher that refuses is a result.
                yield dataclasses.replace(row, error=_summary(error)), None
                continue
            for launch in launches:
                changed = overridden(launch, overrides)
                source = specialise(changed, target, [step[0][bulk] for bulk in BULK[slot]])
                if (label := (slot, name, dtype, head_size, case, source.key)) not in seen:
                    seen.add(label)
                    yield described(row, changed), source


def described(row: Row, launch: RecordedLaunch) -> Row:
    """The row with what its launch tells."""
    constants = {
        name: value
        for name, value in launch.arguments.items()
        if name.isupper() and isinstance(value, bool | int | float)
    }
    return dataclasses.replace(
        row,
        kernel=getattr(launch.kernel, "__name__", "?"),
        grid=launch.grid,
        constants=constants,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def implementations(slots: Iterable[str], patterns: Sequence[str]) -> Iterator[tuple[str, ModuleType]]:
    """Modules of the slots that launch Triton kernels, their own or those of others."""
    for slot in slots:
        package = importlib.import_module(f"cbtriton.kernels.{slot}")
        for name in sorted(module.name for module in pkgutil.iter_modules(package.__path__)):
            if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
                module = importlib.import_module(f"{package.__name__}.{name}")
                if launches_kernels(module):
                    yield slot, module


def launches_kernels(module: ModuleType) -> bool:
    """Whether a module has kernels, or uses something of a module that has."""
    homes = {
        value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        for value in vars(module).values()
    }
    kernels = [sys.modules[home] for home in homes if isinstance(home, str) and home.startswith("cbtriton.kernels.")]
    return any(uses_triton(home) for home in (module, *kernels)) or any(
        isinstance(value, JITFunction) for value in vars(module).values()
    )


def shapes(slot: str, arguments: argparse.Namespace) -> Iterator[tuple[str, int, str]]:
    """Dtype, head size and case of each step that a slot's launchers are called with."""
    if slot == "prepare_inputs":
        yield arguments.dtypes[0], 0, "base"
    if slot == "sample":
        # Its options launch other kernels than it does without.
        cases = dict.fromkeys(("base", "options", *(case for case in arguments.cases if "vocab_size" in CASES[case])))
        yield from ((dtype, 0, case) for dtype in arguments.dtypes for case in cases)
    for dtype, case in itertools.product(arguments.dtypes, arguments.cases):
        if slot in ("sample", "prepare_inputs") or "vocab_size" in CASES[case]:
            continue  # Heads are nothing to them.
        if case == "base":
            yield from ((dtype, head_size, case) for head_size in arguments.head_sizes)
        elif slot.endswith("attention") or case != "options":
            yield dtype, CASES[case]["head_size"], case


def parse_override(text: str) -> tuple[str, Any]:
    """`TILE=32` as a name and a value."""
    name, _, value = text.partition("=")
    return name, json.loads(value)


def overridden(launch: RecordedLaunch, overrides: Mapping[str, Any]) -> RecordedLaunch:
    """The launch with other warps, stages or constants, where its kernel has them."""
    fields = {name: overrides[name] for name in ("num_warps", "num_stages", "enable_fp_fusion") if name in overrides}
    constants = {name: value for name, value in overrides.items() if name in launch.arguments}
    return dataclasses.replace(launch, **fields, arguments={**launch.arguments, **constants})


# --- Representative steps: named arguments of each slot's launcher and of its plan. ---

# Arguments of the launcher, and of the plan where the slot has one.
Step = tuple[dict[str, Any], dict[str, Any]]
_HEADS, _ROWS, _TOKENS, _MAX_LEN, _TABLE_ROWS = 8, 32, 8192, 8192, 64


def _meta(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def _caches(shape: Shape) -> dict[str, Any]:
    size = (shape.cache_tokens // shape.page_size, shape.page_size, _HEADS, shape.head_size)
    return {"key_cache": _meta(*size, dtype=shape.dtype), "value_cache": _meta(*size, dtype=shape.dtype)}


def _block_tables(shape: Shape) -> Tensor:
    return _meta(_TABLE_ROWS, -(-_MAX_LEN // shape.page_size))


def _prepare_inputs(shape: Shape) -> Step:
    step = {
        "token_table": _meta(_TABLE_ROWS, _MAX_LEN),
        "block_tables": _block_tables(shape)[None],
        **{name: _meta(_ROWS) for name in ("rows", "starts", "counts")},
        "page_sizes": _meta(1),
        "num_tokens": _TOKENS,
    }
    return step, {}


def _kv_write(shape: Shape) -> Step:
    new = {name: _meta(_TOKENS, _HEADS, shape.head_size, dtype=shape.dtype) for name in ("key", "value")}
    return {**new, **_caches(shape), "slots": _meta(_TOKENS, dtype=torch.int64)}, {}


def _attention(shape: Shape, num_tokens: int) -> Step:
    heads = _HEADS * shape.group
    of_step = {
        "block_tables": _block_tables(shape),
        "rows": _meta(_ROWS),
        "cu_seqlens_q": _meta(_ROWS + 1),
        "seq_lens": _meta(_ROWS),
        "max_kv": _MAX_LEN,
    }
    of_layer = {
        "query": _meta(num_tokens, heads, shape.head_size, dtype=shape.dtype),
        **_caches(shape),
        "scale": shape.head_size**-0.5,
        "window": shape.window,
        "chunk": shape.chunk,
        "softcap": shape.softcap,
        "sinks": _meta(heads, dtype=shape.dtype) if shape.sinks else None,
        "alibi_slopes": _meta(heads, dtype=torch.float32) if shape.slopes else None,
    }
    return {**of_step, **of_layer}, {**of_step, "page_size": shape.page_size}


def _sample(shape: Shape) -> Step:
    filters = shape.window > 0
    numbers = ("temperature", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "decay_rates")
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    integers = ("top_k", "min_positions", "prompt_lengths", "no_repeat_ngram_size", "decay_starts")
    flags = ("use_top_k", "use_top_p", "use_min_p", "use_min_length", "return_logprobs")
    step = {
        "logits": _meta(_ROWS, shape.vocab_size, dtype=shape.dtype),
        "scores": _meta(_ROWS, shape.vocab_size, dtype=torch.float32),
        "rows": _meta(_ROWS),
        "positions": _meta(_ROWS),
        "token_ids": _meta(_ROWS, dtype=torch.int64),
        "num_top": 20,
        "token_table": _meta(_TABLE_ROWS, _MAX_LEN),
        **{name: _meta(_TABLE_ROWS, dtype=torch.float32) for name in (*numbers, *penalties)},
        **{
            name: _meta(_TABLE_ROWS)
            for name in (*integers, "num_biases", "num_rules", "has_token_mask", "remove_invalid", "is_truncated")
        },
        "seeds": _meta(_TABLE_ROWS, dtype=torch.int64),
        "rules": _meta(_TABLE_ROWS, 512, 4),
        "rule_prefixes": _meta(_TABLE_ROWS, 1024),
        "token_masks": _meta(_TABLE_ROWS, -(-shape.vocab_size // 32)),
        "eos_ids": _meta(_TABLE_ROWS, 4),
        "all_greedy": False,
        **dict.fromkeys(flags, filters),
    }
    return step, {}


def _block_copy(shape: Shape) -> Step:
    return {**_caches(shape), **{name: _meta(_ROWS, dtype=torch.int64) for name in ("sources", "targets")}}, {}


STEPS: dict[str, Callable[[Shape], Step]] = {
    "prepare_inputs": _prepare_inputs,
    "kv_write": _kv_write,
    "varlen_attention": lambda shape: _attention(shape, _TOKENS),
    "decode_attention": lambda shape: _attention(shape, _ROWS),
    "sample": _sample,
    "block_copy": _block_copy,
}
# Arguments whose loads and stores are counted apart.
BULK: dict[str, tuple[str, ...]] = {
    "prepare_inputs": (),
    "kv_write": ("key", "value", "key_cache", "value_cache"),
    "varlen_attention": ("key_cache", "value_cache"),
    "decode_attention": ("key_cache", "value_cache"),
    "sample": ("logits",),
    "block_copy": ("key_cache", "value_cache"),
}


def recorded(module: ModuleType, slot: str, target: str, step: Step) -> list[RecordedLaunch]:
    """What the module's plan and launcher launch for a step."""
    of_launcher, of_plan = step
    names = ("process", "truncate", "sample", "token_logprobs") if slot == "sample" else (slot,)
    with record_launches(target) as launches:
        if of_plan:
            of_launcher = {**of_launcher, "plan": call_by_name(module.plan, of_plan)}
        for launcher in (getattr(module, name) for name in names):
            call_by_name(getattr(launcher, "launcher", launcher), of_launcher)
    return launches


def call_by_name(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Calls with those of the arguments that the function has parameters for."""
    names = inspect.signature(function).parameters
    return function(**{name: arguments[name] for name in names if name in arguments})


# --- Bounds ---


def load_bounds(path: Path) -> list[dict[str, Any]]:
    """The rules of a bounds file."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.load(path))  # pyright: ignore[reportReturnType]


def violations(rules: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences on rows that break a rule, on rows without facts, and on rules that no row falls under.

    Args:
        rules: `where` names fields of rows and their values, patterns or lists of these; `limits` names facts and
            bounds such as `"<= 128"`. A rule for slots, targets, dtypes or head sizes that were not compiled is
            passed over.
        rows: Rows as dictionaries.
    """
    found = [f"{label(row)}: {row['error']}" for row in rows if row["error"]]
    compiled = [row for row in rows if not row["error"]]
    for rule in rules:
        matching = [row for row in compiled if matches(row, rule["where"])]
        asked = {field: rule["where"][field] for field in ASKED if field in rule["where"]}
        if not matching and all(any(_agrees(row[field], asked[field]) for row in rows) for field in asked):
            found.append(f"no kernel falls under the rule for {rule['where']}")
        for row, (fact, bound) in itertools.product(matching, rule["limits"].items()):
            value = fact_of(row, fact)
            if not holds(value, bound):
                found.append(f"{label(row)}: {fact} is {value}, must be {bound}")
    return found


def matches(row: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    """Whether a row falls under a rule. `reads_bulk` stands for having any load of keys, values or logits."""
    reads_bulk = row["facts"]["bulk_loads"] + row["facts"]["narrow_bulk_loads"] > 0
    return all(_agrees({**row, "reads_bulk": reads_bulk}[field], wanted) for field, wanted in where.items())


def _agrees(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return any(_agrees(value, one) for one in wanted)
    return fnmatch.fnmatch(str(value), str(wanted))


def fact_of(row: Mapping[str, Any], name: str) -> Any:
    """A fact by its name; `matrix.HGMMA` is an entry of a table, 0 where missing."""
    table, _, entry = name.partition(".")
    return row["facts"][table].get(entry, 0) if entry else row["facts"][table]


# Fields of rows that the command line selects.
ASKED = ("slot", "implementation", "target", "dtype", "head_size", "case")
_COMPARISONS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq, "<": operator.lt, ">": operator.gt}


def holds(value: Any, bound: str) -> bool:
    """Whether a fact keeps a bound; unknown facts keep none.

    Raises:
        ValueError: The bound is no comparison with an integer.
    """
    found = re.fullmatch(r"(<=|>=|==|<|>) *(\d+)", str(bound))
    if found is None:
        raise ValueError(f"expected a bound such as '<= 128', got {bound!r}")
    return value is not None and _COMPARISONS[found[1]](int(value), int(found[2]))


def label(row: Mapping[str, Any]) -> str:
    """Names a row in a sentence."""
    head_size = f" D={row['head_size']}" if row["head_size"] else ""
    return (
        f"{row['slot']}/{row['implementation']} {row['kernel']} {row['target']} {row['dtype']}{head_size} {row['case']}"
    )


# --- Output ---


def table_header() -> str:
    """The line above the rows."""
    names = f"{'implementation':29}{'kernel':22}{'target':7}{'dtype':6}{'D':>3} {'case':9}{'warps':>5}{'stages':>7}"
    counts = f"{'regs':>5}{'spills':>7}{'stack':>6}{'shared':>8}{'occ':>4} {'matrix':13}{'loads':20}{'bulk ld':>8}"
    return f"{names}{counts}{'bulk st':>8}{'buffers':>8}{'wait':>5}{'s':>6}  constants"


def table_row(row: Row) -> str:
    """One aligned line.

    Loads are shown as `width:count`, bulk accesses as `128 bits wide/narrower`, the programs that fit on a processor
    as `occ`. What Triton had in its cache shows no seconds; a `!` marks more shared memory than there is.
    """
    implementation = f"{row.slot.removesuffix('_attention')}/{row.implementation}"
    start = f"{implementation:29}{row.kernel[:21]:22}{row.target:7}{row.dtype:6}{row.head_size or '-':>3} {row.case:9}"
    if (f := row.facts) is None:
        return start + row.error
    matrix = " ".join(f"{kind}:{count}" for kind, count in f.matrix.items()) or "-"
    loads = " ".join(f"{bits}:{f.loads[bits]}" for bits in sorted(f.loads, key=int, reverse=True))
    constants = " ".join(f"{name}={value}" for name, value in row.constants.items())
    return (
        f"{start}{row.num_warps:5}{row.num_stages:7}{f.registers:5}{f.spills:7}{f.stack_bytes:6}{f.shared_bytes:7}"
        f"{' ' if f.fits else '!'}{f.programs_per_processor:4} {matrix:13}{loads:20}"
        f"{f'{f.bulk_loads}/{f.narrow_bulk_loads}':>8}{f'{f.bulk_stores}/{f.narrow_bulk_stores}':>8}{f.buffers:8}"
        f"{'-' if f.wait is None else f.wait:>5}{'-' if f.seconds is None else f'{f.seconds:.1f}':>6}  {constants}"
    )


def write_results(path: Path, arguments: argparse.Namespace, records: Sequence[Mapping[str, Any]]) -> None:
    """Writes every row, what was asked for and what compiled it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    environment = {"triton": triton.__version__, "torch": torch.__version__, "machine": platform.machine()}
    result = {
        "asked": vars(arguments),
        "environment": {**environment, "cpus": os.cpu_count()},
        "rows": records,
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
