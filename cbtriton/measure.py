"""How a workload is measured: run through a manager that has been started, so many times.

Used by the command. Knows of a manager what callers may do with it, and nothing of the engine behind it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbtriton.load_generator import LoadGenerator
from cbtriton.profiling import StepProfiler
from cbtriton.report import Repeat
from cbtriton.workloads import Workload


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of it.

    Attributes:
        repeats: The runs that were measured, in order.
        files: What a profiler has written.
    """

    repeats: tuple[Repeat, ...]
    files: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Measure:
    """Runs a workload several times in one process; none finds a prefix in the cache that another has left.

    Attributes:
        repeats: Runs that are measured, at least 1.
        warmup_runs: Runs before these, whose figures are dropped.
        profiler: Profiles one more run after them; None does not.

    Raises:
        ValueError: If a number is too small.
    """

    repeats: int = 1
    warmup_runs: int = 0
    profiler: StepProfiler | None = None

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"measure.repeats must be at least 1, got {self.repeats}")
        if self.warmup_runs < 0:
            raise ValueError(f"measure.warmup_runs must be at least 0, got {self.warmup_runs}")

    def run(
        self, manager: Any, workload: Workload, load: LoadGenerator, folder: Path, *, progress_bar: bool
    ) -> Measured:
        """Runs the workload.

        Args:
            manager: A `ContinuousBatchingManager` that runs and has no requests.
            workload: What to run.
            load: When its requests are added.
            folder: Where a profiler's files go.
            progress_bar: Shows one for each run.

        Raises:
            RuntimeError: If the engine ended before all requests had.
            ValueError: If a profiled run ended before its trace began.
        """
        repeats, files = [], ()
        for number in range(self.warmup_runs + self.repeats):
            if number:
                _forget_prefixes(manager)
            repeats.append(run_once(manager, workload, load, progress_bar=progress_bar))
        if self.profiler is not None:
            _forget_prefixes(manager)
            files = self.profiler.record(
                manager, lambda: load.run(manager, workload, progress_bar=progress_bar), folder
            )
        return Measured(tuple(repeats[self.warmup_runs :]), files)


def _forget_prefixes(manager: Any) -> None:
    with manager.pause(reset_prefix_cache=True):
        pass


def run_once(manager: Any, workload: Workload, load: LoadGenerator, *, progress_bar: bool = False) -> Repeat:
    """Runs a workload once.

    Args:
        manager: A `ContinuousBatchingManager` that runs and has no requests.
        workload: What to run.
        load: When its requests are added.
        progress_bar: Shows one.

    Raises:
        RuntimeError: If the engine ended before all requests had.
    """
    before = manager.stats()
    started = time.perf_counter()
    result = load.run(manager, workload, progress_bar=progress_bar)
    summary = load.summarise(result, manager.stats().since(before))
    steps = tuple(step for step in manager.step_records() if step.start_time >= started)
    return Repeat(summary, result.outputs, steps)
