"""Workloads: which prompts to run, and how many tokens to generate for each.

A source (`ChatPrompts`, `PromptFile`, `Synthetic`) describes where prompts come from; its `build` turns it into a
`Workload` of token ids for one tokenizer and vocabulary. Used by the command, the benchmark and the notebooks. Sources
that are shaped like the traffic of services are in `traffic`, replays of recorded traffic in `traces`.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from cbtriton.model_zoo import Tokenizer

Distribution = Literal["uniform", "loguniform", "lognormal"]

_LOWEST_SYNTHETIC_ID = 4  # the ids below are end-of-text and its like in most vocabularies


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts ready to run.

    Attributes:
        name: For reports.
        prompts: Token ids of each prompt, none empty.
        max_new_tokens: Most tokens to generate for each prompt.
        titles: One line to show for each prompt; empty where the prompts mean nothing to a reader.
        ignore_eos: Whether each request runs to its `max_new_tokens`, whatever it generates.
        arrival_times: Seconds from the start at which each prompt arrives, never decreasing; empty: all at once.

    Raises:
        ValueError: If there is not one entry for each prompt, or a time is out of order.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: tuple[int, ...]
    titles: tuple[str, ...] = ()
    ignore_eos: bool = False
    arrival_times: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.max_new_tokens):
            raise ValueError(
                f"max_new_tokens must have one entry for each prompt, got {len(self.max_new_tokens)} "
                f"for {len(self.prompts)} prompts"
            )
        if self.arrival_times and len(self.arrival_times) != len(self.prompts):
            raise ValueError(
                f"arrival_times must be empty or have one entry for each prompt, got {len(self.arrival_times)} "
                f"for {len(self.prompts)} prompts"
            )
        if not all(earlier <= later < math.inf for earlier, later in pairwise((0.0, *self.arrival_times))):
            raise ValueError(f"arrival_times must be finite, at least 0 and never decrease, got {self.arrival_times}")

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(len(prompt) for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class ChatPrompts:
    """The conversations that ship with this project; a third of them shares one system prompt.

    Attributes:
        max_new_tokens: Most tokens of each answer.
        num_prompts: Take only the first so many; None for all.
    """

    max_new_tokens: int = 64
    num_prompts: int | None = None

    def build(self, tokenizer: Tokenizer | None, vocab_size: int) -> Workload:
        """The conversations under the tokenizer's chat template.

        Raises:
            ValueError: If there is no tokenizer, or it has no chat template.
        """
        data = Path(__file__).with_name("data") / "chat_prompts.jsonl"
        entries = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
        return _texts_to_workload("chat", entries[: self.num_prompts], self.max_new_tokens, tokenizer)


@dataclass(frozen=True, slots=True)
class PromptFile:
    """Prompts from a file of the user.

    In a `.txt` file each line that is not blank is one prompt. In a `.jsonl` file each line is an object with either
    `prompt` (a text) or `messages` (a list of objects with `role` and `content`), and may have `max_new_tokens`.

    Attributes:
        path: The file.
        max_new_tokens: Most tokens to generate where a line does not say.
        chat: Whether a bare prompt is put through the tokenizer's chat template as a user's message.
    """

    path: str
    max_new_tokens: int = 64
    chat: bool = True

    def build(self, tokenizer: Tokenizer | None, vocab_size: int) -> Workload:
        """Reads the file.

        Raises:
            ValueError: If the file cannot be read, has another ending, has no prompt, or has a bad line, whose number
                is in the message.
        """
        path = Path(self.path)
        readers = {".txt": _read_text_line, ".jsonl": _read_json_line}
        if path.suffix not in readers:
            raise ValueError(f"a prompt file must end in .txt or .jsonl, got {self.path!r}")
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise ValueError(f"cannot read the prompt file {self.path!r}: {error.strerror}") from error
        entries = []
        for number, line in enumerate(lines, start=1):
            try:
                if text := line.decode("utf-8").strip():
                    entries.append(readers[path.suffix](text))
            except ValueError as error:
                raise ValueError(f"{self.path}, line {number}: {error}") from error
        if not entries:
            raise ValueError(f"the prompt file {self.path!r} has no prompt; give at least one line that is not blank")
        if not self.chat:
            entries = [{**entry, "raw": "prompt" in entry} for entry in entries]
        return _texts_to_workload(path.name, entries, self.max_new_tokens, tokenizer)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens, `low` and `high` included.

    Attributes:
        low: Shortest length, at least 1.
        high: Longest length.
        distribution: `uniform`; `loguniform` (each doubling is as likely as the next); or `lognormal` (a hump around
            the geometric mean, two standard deviations from it at `low` and `high`, clipped there).

    Raises:
        ValueError: If the bounds are not in order or the distribution is unknown.
    """

    low: int
    high: int
    distribution: Distribution = "uniform"

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"lengths must satisfy 1 <= low <= high, got low={self.low} and high={self.high}")
        if self.distribution not in ("uniform", "loguniform", "lognormal"):
            raise ValueError(f"the distribution must be uniform, loguniform or lognormal, got {self.distribution!r}")

    def draw(self, rng: random.Random) -> int:
        """One length."""
        if self.distribution == "uniform":
            return rng.randint(self.low, self.high)
        log_low, log_high = math.log(self.low), math.log(self.high)
        if self.distribution == "loguniform":
            drawn = math.exp(rng.uniform(log_low, log_high))
        else:
            drawn = rng.lognormvariate((log_low + log_high) / 2, (log_high - log_low) / 4)
        return min(max(round(drawn), self.low), self.high)


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Random token ids; the same description and vocabulary give the same workload everywhere.

    Attributes:
        name: For reports.
        num_requests: Number of prompts, at least 1.
        prompt_lengths: Length of each prompt's own part.
        new_tokens: Tokens to generate for each prompt.
        shared_prefix: Length of a part that all prompts begin with; 0 for none.
        seed: Of the generator.
    """

    name: str = "synthetic"
    num_requests: int = 32
    prompt_lengths: Lengths = field(default_factory=lambda: Lengths(16, 256))
    new_tokens: Lengths = field(default_factory=lambda: Lengths(32, 64))
    shared_prefix: int = 0
    seed: int = 0

    def build(self, tokenizer: Tokenizer | None, vocab_size: int) -> Workload:
        """Draws the prompts.

        Raises:
            ValueError: If `num_requests` or `shared_prefix` is out of range.
        """
        if self.num_requests < 1 or self.shared_prefix < 0:
            raise ValueError(
                f"num_requests must be at least 1 and shared_prefix at least 0, got {self.num_requests} "
                f"and {self.shared_prefix}"
            )
        rng = random.Random(self.seed)
        prefix = draw_tokens(rng, self.shared_prefix, vocab_size)
        prompts, new_tokens = [], []
        for _ in range(self.num_requests):
            prompts.append(prefix + draw_tokens(rng, self.prompt_lengths.draw(rng), vocab_size))
            new_tokens.append(self.new_tokens.draw(rng))
        return Workload(self.name, tuple(prompts), tuple(new_tokens), ignore_eos=True)


BENCHMARK_WORKLOADS = {
    "W1": Synthetic("W1", 16, Lengths(10, 140), Lengths(64, 64)),
    "W2": Synthetic("W2", 64, Lengths(8, 512, "loguniform"), Lengths(8, 128, "loguniform")),
    "W3": Synthetic("W3", 32, Lengths(16, 64), Lengths(32, 32), shared_prefix=384),
    "W4": Synthetic("W4", 4, Lengths(2048, 2048), Lengths(64, 64)),
}
"""Short prompts; mixed lengths; a shared prefix; long prompts."""


def benchmark_workload(name: str) -> Synthetic:
    """One of `BENCHMARK_WORKLOADS` by name.

    Raises:
        ValueError: If there is none of that name.
    """
    if name not in BENCHMARK_WORKLOADS:
        raise ValueError(f"a benchmark workload must be one of {', '.join(BENCHMARK_WORKLOADS)}, got {name!r}")
    return BENCHMARK_WORKLOADS[name]


def draw_tokens(rng: random.Random, length: int, vocab_size: int) -> tuple[int, ...]:
    """Random token ids, none of them special in most vocabularies."""
    return tuple(rng.randrange(_LOWEST_SYNTHETIC_ID, vocab_size) for _ in range(length))


def _texts_to_workload(
    name: str, entries: Sequence[dict[str, Any]], max_new_tokens: int, tokenizer: Tokenizer | None
) -> Workload:
    if tokenizer is None:
        raise ValueError(f"the workload {name} needs a tokenizer and this model has none; use workload=synthetic")
    prompts = tuple(tuple(_encode(entry, tokenizer)) for entry in entries)
    titles = tuple(entry.get("prompt") or entry["messages"][-1]["content"] for entry in entries)
    return Workload(
        name=name,
        prompts=prompts,
        max_new_tokens=tuple(entry.get("max_new_tokens", max_new_tokens) for entry in entries),
        titles=tuple(" ".join(title.split()) for title in titles),
    )


def _encode(entry: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    if entry.get("raw"):
        return tokenizer.encode(entry["prompt"], add_special_tokens=True)
    if not tokenizer.chat_template:
        raise ValueError(
            "this tokenizer has no chat template, so it cannot take conversations; use a file of bare prompts "
            "with workload=file workload.chat=false, or a model that was trained to chat"
        )
    messages = entry.get("messages") or [{"role": "user", "content": entry["prompt"]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def _read_text_line(line: str) -> dict[str, Any]:
    return {"prompt": line}


def _read_json_line(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise ValueError('must be an object with either "prompt" or "messages"')
    if unknown := entry.keys() - {"prompt", "messages", "max_new_tokens", "name"}:
        raise ValueError(f"unknown keys {sorted(unknown)}; known are prompt, messages, max_new_tokens, name")
    if "prompt" in entry and not (isinstance(entry["prompt"], str) and entry["prompt"].strip()):
        raise ValueError(f'"prompt" must be a text that is not blank, got {entry["prompt"]!r}')
    if "messages" in entry and not _are_messages(entry["messages"]):
        raise ValueError('"messages" must be a list of objects with the texts "role" and "content", at least one')
    limit = entry.get("max_new_tokens", 1)
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ValueError(f'"max_new_tokens" must be an integer of at least 1, got {limit!r}')
    return entry


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
        )
    )
