"""The folder of a run: `result.json`, `steps.jsonl`, and whether it is whole.

Every file is written beside its place and then moved there, `result.json` last: a folder that has one is whole,
wherever a run was killed. Keys and their meaning: `experiments/README.md`.
"""

from __future__ import annotations

import dataclasses
import json
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cbtriton.report import Repeat, environment, typical
from cbtriton.stats import EngineStats

SCHEMA_VERSION = 1
# How a run is shown, and whether it was begun before, change nothing about its figures.
_PRESENTATION = ("print_answers", "progress_bar", "resume")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a run was asked to do.

    Attributes:
        configuration: The composed configuration, as plain values.
        overrides: `key=value` as given on the command line or by a sweep.
        choices: The file that was chosen from each group.
    """

    configuration: Mapping[str, Any]
    overrides: tuple[str, ...] = ()
    choices: Mapping[str, str] = field(default_factory=dict)


def clear(folder: Path) -> None:
    """Removes what an earlier run has left in `folder`, `result.json` first."""
    of_profiler = ("trace.json.gz", "operators.*", "memory.*")
    for pattern in ("result.json", "steps.jsonl", "timeline.png", *of_profiler, ".*.draft"):
        for path in folder.glob(pattern):
            path.unlink()


def write_finished(
    folder: Path,
    asked: Asked,
    *,
    repeats: Sequence[Repeat],
    stats: EngineStats,
    engine_config: Mapping[str, Any],
) -> None:
    """Writes everything that is known about a run.

    Args:
        folder: The run's own.
        asked: What it was asked to do.
        repeats: What was measured, at least one.
        stats: The engine's counters at the end, warm-up runs included.
        engine_config: The resolved configuration with its decisions.
    """
    steps = [
        json.dumps({"repeat": number, **dataclasses.asdict(step)})
        for number, repeat in enumerate(repeats)
        for step in repeat.steps
    ]
    _write(folder / "steps.jsonl", "".join(f"{line}\n" for line in steps))
    middle = typical(repeats)
    figures = {
        "summary": dataclasses.asdict(middle.summary),
        "repeats": [dataclasses.asdict(repeat.summary) for repeat in repeats],
        "stats": dataclasses.asdict(stats),
        "engine_config": dict(engine_config),
        "requests": [{**dataclasses.asdict(output), "status": output.status.name} for output in middle.outputs],
    }
    _write_result(folder, asked, "finished", None, figures)


def write_failed(folder: Path, asked: Asked, error: Exception) -> None:
    """Writes why a run has no figures."""
    reason = {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    _write_result(folder, asked, "failed", reason, {})


def read_result(path: Path) -> dict[str, Any]:
    """The contents of a `result.json`.

    Raises:
        ValueError: If it cannot be read, or has another schema.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    version = result.get("schema_version") if isinstance(result, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(f"{path} must have schema_version {SCHEMA_VERSION}, got {version}; run it again")
    return result


def finished_before(folder: Path, asked: Asked) -> dict[str, Any] | None:
    """The finished result of the very same configuration in `folder`; None where there is no finished one.

    Raises:
        ValueError: If it has one of another configuration, which must not be lost, or one that cannot be read.
    """
    path = folder / "result.json"
    if not path.exists():
        return None
    result = read_result(path)
    if result["status"] != "finished":
        return None
    if _what_counts(result["asked"]) != _what_counts(json.loads(json.dumps(asked.configuration))):
        raise ValueError(
            f"{path} is a finished result of another configuration; resume=true goes on with the same sweep only: "
            "give the same overrides, or another folder"
        )
    return result


def _what_counts(configuration: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in configuration.items() if key not in _PRESENTATION}


def _write_result(
    folder: Path, asked: Asked, status: str, error: Mapping[str, str] | None, figures: Mapping[str, Any]
) -> None:
    result = {
        "schema_version": SCHEMA_VERSION,
        "status": status,
        "error": error,
        **figures,
        "asked": dict(asked.configuration),
        "overrides": list(asked.overrides),
        "choices": dict(asked.choices),
        "environment": environment(),
    }
    _write(folder / "result.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def _write(path: Path, text: str) -> None:
    """All or nothing: whoever looks finds the whole text, or what was there before."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
