"""Runs of `cbtriton` read back from their folders, and the settings in which they differ.

Used by the report. Knows the files of a run and nothing of how they came about.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbtriton.results import read_result
from cbtriton.stats import StepRecord

RATE, LATENCY, FIRST_TOKEN = "output tokens/s", "p95 inter-token ms", "p95 first token ms"
WASTE, KV_WASTE, PREFIX_HITS = "padding waste", "kv padding waste", "prefix hits"

FIGURES = {
    RATE: ("output_tokens_per_s",),
    LATENCY: ("inter_token_latency", "p95_ms"),
    FIRST_TOKEN: ("time_to_first_token", "p95_ms"),
    WASTE: ("padding_waste",),
    KV_WASTE: ("kv_padding_waste",),
    PREFIX_HITS: ("prefix_hit_rate",),
    "preemptions": ("preemptions",),
    "failed requests": ("num_failed",),
}
"""The name of each figure in tables, and where it stands in a summary."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run as its folder tells.

    Attributes:
        name: Its folder, as short as can be.
        folder: Where it lies.
        result: The contents of `result.json`.
    """

    name: str
    folder: Path
    result: Mapping[str, Any]

    @property
    def error(self) -> str | None:
        """Why it failed; None where it finished."""
        error = self.result["error"]
        return f"{error['type']}: {error['message']}" if error else None

    def figure(self, name: str) -> float | None:
        """One of the summary's figures; None where it failed or nothing was recorded."""
        return None if self.error else _look_up(self.result["summary"], FIGURES[name])

    def repeats(self, name: str) -> list[float]:
        """The same figure of each repeat; left out are those without it or with 0, of which there is no ratio."""
        found = (_look_up(summary, FIGURES[name]) for summary in self.result.get("repeats", ()))
        return [figure for figure in found if figure]

    def setting(self, key: str) -> str:
        """What the run was asked under an override's key: the chosen file of a group, or a value."""
        if key in self.result["choices"]:
            return self.result["choices"][key]
        value = _look_up(self.result["asked"], key.split("."))
        return str(value).lower() if value is None or isinstance(value, bool) else str(value)

    def steps(self) -> list[StepRecord]:
        """The steps of the first repeat."""
        lines = map(json.loads, (self.folder / "steps.jsonl").read_text(encoding="utf-8").splitlines())
        return [StepRecord(**line) for line in lines if line.pop("repeat") == 0]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Runs, and the settings in which they differ.

    Attributes:
        runs: In the order of their folders.
        parameters: Keys of overrides that do not have the same value in all of them.
    """

    runs: tuple[Run, ...]
    parameters: tuple[str, ...]

    @classmethod
    def of(cls, runs: Iterable[Run]) -> Sweep:
        """The sweep of these runs."""
        runs = tuple(runs)
        keys = dict.fromkeys(key for run in runs for key in _keys(run))
        return cls(runs, tuple(key for key in keys if len({run.setting(key) for run in runs}) > 1))

    @property
    def finished(self) -> list[Run]:
        """Runs that have figures."""
        return [run for run in self.runs if run.error is None]

    @property
    def front(self) -> list[Run]:
        """Runs that no other beats in throughput and p95 inter-token latency at once, slowest first."""
        points = [(run, run.figure(RATE), run.figure(LATENCY)) for run in self.finished]
        known = [(run, rate, latency) for run, rate, latency in points if rate is not None and latency is not None]
        best = [
            (rate, run)
            for run, rate, latency in known
            if not any(r >= rate and t <= latency and (r, t) != (rate, latency) for _, r, t in known)
        ]
        return [run for _, run in sorted(best, key=lambda item: item[0])]

    def by_setting(self, key: str) -> dict[str, list[Run]]:
        """Finished runs by their value of one setting, numbers in order."""
        groups: dict[str, list[Run]] = {}
        for run in self.finished:
            groups.setdefault(run.setting(key), []).append(run)
        return {value: groups[value] for value in sorted(groups, key=in_order)}

    def rest(self, run: Run, *but: str) -> tuple[str, ...]:
        """A run's settings without those of some keys: runs with the same rest differ in these alone."""
        return tuple(run.setting(key) for key in self.parameters if key not in but)


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """All runs in or below the folders, in the order of their numbers.

    Raises:
        ValueError: If a folder has none, or a result cannot be read.
    """
    runs = []
    for folder in folders:
        paths = sorted(folder.rglob("result.json"), key=lambda path: [in_order(part) for part in path.parts])
        if not paths:
            raise ValueError(f"there is no result.json in or below {folder}; give the folder of a run or a sweep")
        for path in paths:
            inside = path.parent.relative_to(folder)
            name = inside if len(folders) == 1 and inside.parts else Path(folder.resolve().name) / inside
            runs.append(Run(name.as_posix(), path.parent, read_result(path)))
    return runs


def unfinished_runs(folders: Iterable[Path]) -> list[Path]:
    """Folders of runs that were killed or still run: with a log of the command and no result."""
    logs = (path.parent for folder in folders for path in sorted(folder.rglob("cli.log")))
    return [folder for folder in logs if not (folder / "result.json").exists()]


def matching_runs(before: Sweep, after: Sweep) -> tuple[list[tuple[Run, Run]], list[str]]:
    """Finished runs with the same settings, and the keys of these.

    What has one value in all runs of either side may differ: it is what is compared.

    Raises:
        ValueError: If there is no such pair.
    """
    varied = {*before.parameters, *after.parameters}
    keys = [key for key in Sweep.of([*before.runs, *after.runs]).parameters if key in varied]
    partners = {tuple(map(run.setting, keys)): run for run in after.finished}
    found = [(run, partners.get(tuple(map(run.setting, keys)))) for run in before.finished]
    together = [(run, partner) for run, partner in found if partner is not None]
    if not together:
        raise ValueError("no two finished runs have the same settings, so there is nothing to compare")
    return together, keys


def _keys(run: Run) -> Iterator[str]:
    for override in run.result["overrides"]:
        key = override.partition("=")[0].lstrip("+~")
        if key != "resume":
            yield key


def _look_up(node: Any, path: Iterable[str]) -> Any:
    for key in path:
        if not isinstance(node, Mapping):
            return None
        node = node.get(key)
    return node


def in_order(value: str) -> tuple[int, float, str]:
    """A key for sorting: numbers by size, then words by letters."""
    try:
        return 0, float(value), value
    except ValueError:
        return 1, 0.0, value
