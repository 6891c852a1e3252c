"""What the workers of `gpu_check.py` report, and how."""

from __future__ import annotations

import dataclasses
import json
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "failed", "skipped", "unavailable"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        part: `tests`, `kernels`, `graphs` or `engines`.
        case: What was run, with its sizes.
        who: Which implementation, peer or engine ran it.
        status: `failed` counts against this project; `unavailable` is a peer that could not run.
        time_us: Median time on the device.
        floor_us: What the bytes or operations take at the measured ceilings, whichever takes longer.
        roofline: `floor_us` over `time_us`; None where the floor is next to nothing.
        gb_per_s: Bytes that must move over time.
        tflop_per_s: Operations that must be done over time.
        launch_us: Median time that a call takes on the host.
        plan_us: Time on the device of the attention plan, which a step computes once.
        first_call_s: The first call: compilation.
        error: Distance from the expected result; relative for attention, a share of wrong elements elsewhere.
        tokens_per_s: Output tokens per second of an engine.
        note: Everything else, and what went wrong.
    """

    part: str
    case: str
    who: str
    status: Status
    time_us: float | None = None
    floor_us: float | None = None
    roofline: float | None = None
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    launch_us: float | None = None
    plan_us: float | None = None
    first_call_s: float | None = None
    error: float | None = None
    tokens_per_s: float | None = None
    note: str = ""


class Report:
    """A worker's way to tell what it does and found; each entry is on disk before the next thing happens."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, **entry: Any) -> None:
        """Appends one entry."""
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def row(self, row: Row) -> None:
        """Appends a finished row."""
        self.write(row=dataclasses.asdict(row))


def last_words(error: BaseException) -> str:
    """The end of an exception's traceback."""
    return "\n".join("".join(traceback.format_exception(error)).splitlines()[-12:])[-2000:]
