"""Replays of recorded traffic: files in the formats of public traces of language model services.

Such traces have times and lengths but no text: tokens are random, and equal where a trace says that they are. Used by
the command's configuration.

| format | columns or keys | time |
|---|---|---|
| Azure LLM inference trace, `.csv` | `TIMESTAMP`, `ContextTokens`, `GeneratedTokens` | date and time |
| BurstGPT, `.csv` | `Timestamp`, `Request tokens`, `Response tokens`, and others | seconds |
| Mooncake, `.jsonl` | `timestamp`, `input_length`, `output_length`, `hash_ids` | milliseconds |
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

from cbtriton.model_zoo import Tokenizer
from cbtriton.workloads import Workload, draw_tokens

HASH_BLOCK_TOKENS = 512
"""Tokens that one of Mooncake's `hash_ids` stands for; the last one of a prompt may stand for less."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace.

    Attributes:
        time: When it arrived, in seconds from any origin.
        num_prompt: Tokens of its prompt.
        num_generated: Tokens that were generated.
        hash_ids: For each block of `HASH_BLOCK_TOKENS` of the prompt a number, equal where the tokens are; None where
            the trace does not say what is equal.
    """

    time: float
    num_prompt: int
    num_generated: int
    hash_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class TraceReplay:
    """The requests of a trace, at the distances in time that they had.

    Attributes:
        path: The file; its ending and its first line tell the format, see the module.
        speed: How often the trace's time fits into ours: 2 is twice as fast.
        num_requests: Take only the first so many rows; None for all.
        seed: Of the tokens.

    Raises:
        ValueError: If `speed` is not positive or `num_requests` is below 1.
    """

    path: str
    speed: float = 1.0
    num_requests: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.speed <= 0:
            raise ValueError(f"speed must be above 0, got {self.speed}")
        if self.num_requests is not None and self.num_requests < 1:
            raise ValueError(f"num_requests must be at least 1 or None, got {self.num_requests}")

    def build(self, tokenizer: Tokenizer | None, vocab_size: int) -> Workload:
        """Reads the rows and draws tokens for them.

        Raises:
            ValueError: If the file cannot be read, is in another format, has no rows, or has a bad row, whose line is
                in the message.
        """
        path = Path(self.path)
        rows = sorted(islice(read_trace(path), self.num_requests), key=attrgetter("time"))
        if not rows:
            raise ValueError(f"the trace {self.path!r} has no request; give at least one row")
        rng = random.Random(self.seed)

        @cache
        def block(hash_id: int) -> tuple[int, ...]:
            return draw_tokens(random.Random(f"{self.seed} {hash_id}"), HASH_BLOCK_TOKENS, vocab_size)

        def prompt(row: TraceRow) -> tuple[int, ...]:
            if row.hash_ids is None:
                return draw_tokens(rng, row.num_prompt, vocab_size)
            return tuple(token for hash_id in row.hash_ids for token in block(hash_id))[: row.num_prompt]

        return Workload(
            name=path.name,
            prompts=tuple(map(prompt, rows)),
            max_new_tokens=tuple(row.num_generated for row in rows),
            ignore_eos=True,
            arrival_times=tuple((row.time - rows[0].time) / self.speed for row in rows),
        )


def example_trace(name: str, speed: float = 1.0, num_requests: int | None = None, seed: int = 0) -> TraceReplay:
    """A small synthetic trace that ships with this project, in the format `azure`, `burstgpt` or `mooncake`.

    Raises:
        ValueError: If there is none of that name, or a number is out of range.
    """
    files = {"azure": "trace_azure.csv", "burstgpt": "trace_burstgpt.csv", "mooncake": "trace_mooncake.jsonl"}
    if name not in files:
        raise ValueError(f"an example trace must be one of {', '.join(files)}, got {name!r}")
    return TraceReplay(str(Path(__file__).with_name("data") / files[name]), speed, num_requests, seed)


def read_trace(path: Path) -> Iterator[TraceRow]:
    """The rows of a trace, as they are read.

    Raises:
        ValueError: If the file cannot be read, is in another format, or has a bad row, whose line is in the message.
    """
    readers = {".csv": _read_csv, ".jsonl": _read_jsonl}
    if path.suffix not in readers:
        raise ValueError(f"a trace must end in .csv or .jsonl, got {str(path)!r}")
    try:
        yield from readers[path.suffix](path)
    except OSError as error:
        raise ValueError(f"cannot read the trace {str(path)!r}: {error.strerror}") from error


def _read_csv(path: Path) -> Iterator[TraceRow]:
    formats = {
        ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _azure_row,
        ("Timestamp", "Request tokens", "Response tokens"): _burstgpt_row,
    }
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        reader = csv.DictReader(file)
        header = reader.fieldnames or ()
        parse = next((parse for columns, parse in formats.items() if set(columns) <= set(header)), None)
        if parse is None:
            raise ValueError(
                f"{path}, line 1: the columns must be those of {' or of '.join(map(', '.join, formats))}, "
                f"got {', '.join(header)}"
            )
        for row in reader:
            yield _parsed(parse, row, path, reader.line_num)


def _read_jsonl(path: Path) -> Iterator[TraceRow]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parsed(_mooncake_row, line, path, number)


def _parsed(parse: Callable[[Any], TraceRow], text: Any, path: Path, line: int) -> TraceRow:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{path}, line {line}: {error}") from error


def _azure_row(row: Mapping[str, str | None]) -> TraceRow:
    try:
        time = datetime.fromisoformat(row["TIMESTAMP"] or "")
    except ValueError as error:
        raise ValueError(f"TIMESTAMP must be a date and a time, got {row['TIMESTAMP']!r}") from error
    # A time without a zone must not be taken for one of this machine's zone, where an hour may be missing.
    time = time if time.tzinfo else time.replace(tzinfo=UTC)
    return TraceRow(time.timestamp(), _count(row, "ContextTokens"), _count(row, "GeneratedTokens"))


def _burstgpt_row(row: Mapping[str, str | None]) -> TraceRow:
    return TraceRow(_time(row, "Timestamp"), _count(row, "Request tokens"), _count(row, "Response tokens"))


def _mooncake_row(line: str) -> TraceRow:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    if not isinstance(row, dict) or not row.keys() >= set(keys):
        raise ValueError(f"must be an object with {', '.join(keys)}")
    num_prompt, hash_ids = _count(row, "input_length"), row["hash_ids"]
    num_blocks = math.ceil(num_prompt / HASH_BLOCK_TOKENS)
    if not isinstance(hash_ids, list) or len(hash_ids) != num_blocks or not all(type(x) is int for x in hash_ids):
        raise ValueError(
            f"hash_ids must be {num_blocks} integers, one for each {HASH_BLOCK_TOKENS} tokens of the prompt"
        )
    return TraceRow(_time(row, "timestamp") / 1000, num_prompt, _count(row, "output_length"), tuple(hash_ids))


def _time(row: Mapping[str, Any], name: str) -> float:
    try:
        time = float(row[name])
    except (TypeError, ValueError):
        time = math.nan
    if not math.isfinite(time):
        raise ValueError(f"{name} must be a number, got {row[name]!r}")
    return time


def _count(row: Mapping[str, Any], name: str) -> int:
    """A number of tokens, from JSON or from the text of a column."""
    value = row[name]
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {row[name]!r}; leave failed requests out")
    return value
