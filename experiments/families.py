"""Which of transformers' causal language models run: in this engine, and in transformers' own `generate_batch`.

    python experiments/families.py
    python experiments/families.py --only llama qwen3_next --kernels reference triton
    python experiments/families.py --processes 2 --output experiments/results
    python experiments/families.py --level 1 --without-transformers --processes 2

Every type in transformers' mapping is built tiny, with random weights (`tests/families.py`). What an engine does with
it happens in a process of its own with a time limit, so a crash or a hang is a row like others.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import multiprocessing
import os
import re
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from transformers import GenerationConfig

TRANSFORMERS = "transformers"
# Kinds of outcomes of a type that runs, the better one first.
_RUNS = ("works", "own cache")
_MEMORY_LIMIT_BYTES = 24 * 2**30


def _load_families() -> ModuleType:
    """The module that the tests share; they are no package."""
    path = Path(__file__).resolve().parents[1] / "tests" / "families.py"
    spec = importlib.util.spec_from_file_location("families_of_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


families: Any = _load_families()


@dataclass(frozen=True, slots=True)
class Row:
    """What one engine made of one type.

    Attributes:
        model_type: The type, as transformers' mapping names it.
        engine: `transformers`, or the kernels that this engine ran with.
        kind: See `Outcome.kind` in `tests/families.py`.
        detail: The message, or what else there is to know.
        error: Largest difference of a log-probability; None where it was not compared.
        seconds: How long it took, building included.
    """

    model_type: str
    engine: str
    kind: str
    detail: str
    error: float | None
    seconds: float


@dataclass(frozen=True, slots=True)
class _Running:
    process: ForkProcess
    connection: Connection
    task: tuple[str, str]
    started: float


class _Errors(logging.Handler):
    """Keeps what is logged as an error: transformers' engine raises in a thread of its own, and logs it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        raised = record.exc_info[1] if record.exc_info else None
        self.messages.append(record.getMessage() if raised is None else f"{type(raised).__name__}: {raised}")


def theirs(model_type: str) -> Any:
    """The same prompts through transformers' own `generate_batch`."""
    if model_type in families.NOT_BUILT:
        return families.Outcome("not built", families.NOT_BUILT[model_type])
    model = families.build(model_type)
    errors = _Errors()
    logging.getLogger("transformers").addHandler(errors)
    try:
        outputs = model.generate_batch(
            families.prompts(),
            GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=families.NUM_NEW),
            transformers.ContinuousBatchingConfig(page_size=4, num_blocks=96, max_batch_tokens=24),
        )
    except Exception as error:
        return families.Outcome("failed", f"{type(error).__name__}: {error}")
    answers = [output.generated_tokens for output in outputs.values() if output.error is None]
    if len(answers) < len(families.PROMPT_LENGTHS):
        reasons = [output.error for output in outputs.values() if output.error] + errors.messages
        return families.Outcome("failed", reasons[0] if reasons else "not every request was answered")
    model = families.build(model_type)
    if all(_is_likeliest(model, *pair) for pair in zip(families.prompts(), answers, strict=True)):
        return families.Outcome("works")
    return families.Outcome("differs", "tokens are not the likeliest ones of the plain model")


@torch.no_grad()
def _is_likeliest(model: Any, prompt: list[int], answer: list[int]) -> bool:
    logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


def run_all(
    tasks: Iterable[tuple[str, str]], num_processes: int, limit_s: float, level: int = 0, backend: str = "inductor"
) -> Iterator[Row]:
    """A row for each pair of a type and an engine, as they come; so many at a time."""
    pending, running = list(tasks)[::-1], list[_Running]()
    while pending or running:
        while pending and len(running) < num_processes:
            running.append(_started(pending.pop(), level, backend))
        # Timed in short turns: a process that hangs sends nothing.
        ready = wait([each.connection for each in running], timeout=0.5)
        for each in list(running):
            seconds = time.perf_counter() - each.started
            if each.connection in ready or seconds > limit_s:
                running.remove(each)
                yield _finished(each, seconds)


def _started(task: tuple[str, str], level: int, backend: str) -> _Running:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    # Forked: importing everything anew would take most of the time.
    process = multiprocessing.get_context("fork").Process(target=_child, args=(task, sender, level, backend))
    process.start()
    sender.close()
    return _Running(process, receiver, task, time.perf_counter())


def _child(task: tuple[str, str], sender: Connection, level: int, backend: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT_BYTES, _MEMORY_LIMIT_BYTES))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    model_type, engine = task
    try:
        is_theirs = engine == TRANSFORMERS
        outcome = theirs(model_type) if is_theirs else families.ours(model_type, engine, level, backend)
    except Exception as error:
        outcome = families.Outcome("failed", f"{type(error).__name__}: {error}")
    sender.send((outcome.kind, outcome.detail, outcome.error))
    sender.close()
    # Threads of an engine that failed may not end by themselves.
    os._exit(0)


def _finished(each: _Running, seconds: float) -> Row:
    kind, detail, error = "failed", f"no result after {seconds:.0f} s", None
    if each.connection.poll():
        try:
            kind, detail, error = each.connection.recv()
        except EOFError:
            each.process.join(5)
            detail = f"the process ended with exit code {each.process.exitcode}"
    each.process.kill()
    each.process.join()
    each.connection.close()
    return Row(*each.task, kind, detail, error, seconds)


# ------------------------------------------------------------------------------------------------------------ tables


def table(rows: list[Row], engines: list[str]) -> str:
    """A line for each type."""
    cells = {(row.model_type, row.engine): row for row in rows}
    heads = [engine if engine == TRANSFORMERS else f"cbtriton, {engine}" for engine in engines]
    lines = [f"| type | {' | '.join(heads)} |", "|---" * (len(engines) + 1) + "|"]
    for model_type in sorted({row.model_type for row in rows}):
        texts = [_cell(cells[model_type, engine]) for engine in engines]
        lines.append(f"| {model_type} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    text = f"**{row.kind}**" if row.kind in _RUNS else row.kind
    detail = " ".join(row.detail.split()).replace("|", "\\|")
    return f"{text}: {detail[:140]}{'…' if len(detail) > 140 else ''}" if detail else text


def counts(rows: list[Row], engines: list[str]) -> str:
    """How many types ended in which way, for each engine; and which engines run the same ones."""
    kinds = sorted({row.kind for row in rows}, key=lambda kind: (kind not in _RUNS, kind != "works", kind))
    lines = [f"| engine | {' | '.join(kinds)} |", "|---|" + "---:|" * len(kinds)]
    for engine in engines:
        number = Counter(row.kind for row in rows if row.engine == engine)
        lines.append(f"| {engine} | {' | '.join(str(number[kind]) for kind in kinds)} |")
    if TRANSFORMERS in engines:
        runs = {row.model_type: set[bool]() for row in rows}
        for row in rows:
            if row.kind in _RUNS:
                runs[row.model_type].add(row.engine == TRANSFORMERS)
        both = sum(len(found) == 2 for found in runs.values())
        lines.append(f"\nRun in both: {both}.")
        for name, found in (("this engine", {False}), ("transformers", {True})):
            alone = [model_type for model_type in runs if runs[model_type] == found]
            lines.append(f"\nRun in {name} only: {len(alone)}{': ' if alone else ''}{', '.join(alone)}")
    return "\n".join(lines)


def causes(rows: list[Row], engine: str) -> str:
    """The types that an engine does not run, by what it says, most types first."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.engine == engine and row.kind not in (*_RUNS, "not built"):
            groups[_cause(row)].append(row)
    lines = [f"| {engine}: why not | types | |", "|---|---:|---|"]
    for cause, members in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        lines.append(f"| {cause} | {len(members)} | {', '.join(row.model_type for row in members)} |")
    return "\n".join(lines)


def _cause(row: Row) -> str:
    """The message without what is one model's own: its classes, numbers and shapes."""
    text = re.sub(r"^[A-Za-z]\w*(For|LM|Model|Attention)\w* ", "it ", " ".join(row.detail.split()))
    text = re.sub(r"\d[\d.e+-]*", "#", text)
    return f"{row.kind}: {text[:160]}".replace("|", "\\|")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=families.TYPES, metavar="TYPE", help="these types only")
    parser.add_argument("--kernels", nargs="+", default=["reference"], choices=["reference", "triton"])
    parser.add_argument("--without-transformers", action="store_true", help="leave transformers' own engine out")
    parser.add_argument("--level", type=int, default=0, choices=range(4), help="compile level (default: 0)")
    parser.add_argument("--backend", default="inductor", help="of the compiler (default: inductor)")
    parser.add_argument("--processes", type=int, default=1, help="so many at a time (default: 1)")
    parser.add_argument(
        "--limit-s", type=float, default=120.0, help="seconds for one type in one engine (default: 120)"
    )
    parser.add_argument("--output", type=Path, default=Path("experiments/results"), help="folder of the results")
    return parser.parse_args()


def main() -> None:
    """Runs everything and writes `families.md` and `families.json`."""
    arguments = parse_arguments()
    transformers.logging.set_verbosity_error()
    # Children are forked: no thread may be there yet.
    torch.set_num_threads(1)
    engines = [*arguments.kernels, *([] if arguments.without_transformers else [TRANSFORMERS])]
    tasks = [(model_type, engine) for model_type in arguments.only or families.TYPES for engine in engines]
    started, rows = time.perf_counter(), list[Row]()
    how = (arguments.processes, arguments.limit_s, arguments.level, arguments.backend)
    for row in run_all(tasks, *how):
        rows.append(row)
        print(f"{row.model_type:28} {row.engine:13} {row.seconds:5.1f} s  {row.kind}  {row.detail[:100]}", flush=True)
    rows.sort(key=lambda row: tasks.index((row.model_type, row.engine)))
    seconds = time.perf_counter() - started
    versions = {"transformers": transformers.__version__, "torch": str(torch.__version__)}
    parts = [counts(rows, engines), *(causes(rows, engine) for engine in engines), table(rows, engines)]
    head = f"transformers {versions['transformers']}, torch {versions['torch']}, {seconds:.0f} s"
    if arguments.level:
        head += f", compile level {arguments.level} ({arguments.backend})"
    text = "\n\n".join([head, *parts])
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "families.md").write_text(text + "\n")
    result = {
        "versions": versions,
        "level": arguments.level,
        "backend": arguments.backend,
        "seconds": seconds,
        "rows": [asdict(row) for row in rows],
    }
    (arguments.output / "families.json").write_text(json.dumps(result, indent=1))
    print("\n" + "\n\n".join([head, *parts[:-1]]))


if __name__ == "__main__":
    main()
