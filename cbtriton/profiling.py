"""What a profiler sees of a run: a trace, the time of each operator and kernel, the memory over time.

PyTorch's profiler records all threads, and the engine marks its stages with the number of their step. A profiled run is
slower than others, so none of its figures are kept.
"""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from cbtriton.figures import MemorySample, memory_figure, operators_figure, save

# Often enough to see the steps of a small model, seldom enough not to be seen among them.
_SAMPLE_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Operator:
    """What one operator or device kernel cost in the steps that were traced.

    Attributes:
        name: Its name.
        where: `cpu` for an operator, otherwise the device that ran a kernel.
        calls: How often it ran.
        self_ms: Time in it and not in others that it called, over all calls, in milliseconds.
    """

    name: str
    where: str
    calls: int
    self_ms: float


@dataclass(frozen=True, slots=True)
class StepProfiler:
    """Profiles some steps of a run.

    Attributes:
        first_step: Steps of the run that go by before the trace begins.
        num_steps: Steps that are traced; None for all that are left.
        record_shapes: Whether the trace has the shapes of operators' arguments.

    Raises:
        ValueError: If a number is too small.
    """

    first_step: int = 0
    num_steps: int | None = None
    record_shapes: bool = False

    def __post_init__(self) -> None:
        if self.first_step < 0:
            raise ValueError(f"measure.profiler.first_step must be at least 0, got {self.first_step}")
        if self.num_steps is not None and self.num_steps < 1:
            raise ValueError(f"measure.profiler.num_steps must be at least 1 or null, got {self.num_steps}")

    def record(self, manager: Any, run: Callable[[], object], folder: Path) -> tuple[Path, ...]:
        """Profiles a run and writes what was seen.

        Where the trace begins or ends in the middle of the run, the engine is paused for that moment: no step is cut.

        Args:
            manager: A `ContinuousBatchingManager` that runs and has no requests.
            run: Adds requests to it and returns when all have ended. Called in another thread.
            folder: Where files go: `trace.json.gz` for Perfetto or chrome://tracing, `operators.csv` and `memory.csv`
                with a picture of each.

        Returns:
            The files.

        Raises:
            ValueError: If the run ended before its trace began.
            Exception: Whatever `run` raises.
        """
        before = manager.stats().steps
        profiler, pool = self._profiler(), ThreadPoolExecutor(1, thread_name_prefix="cbtriton-profiled")
        try:
            if self.first_step == 0:
                profiler.start()
                first = before
                running = pool.submit(run)
            else:
                running = pool.submit(run)
                _watch(manager, running, before + self.first_step)
                if running.done():
                    running.result()
                with manager.pause():
                    profiler.start()
                    # Steps go on while the pause is asked for: those wanted count from here.
                    first = manager.stats().steps
            samples = _watch(manager, running, None if self.num_steps is None else first + self.num_steps)
            with nullcontext() if running.done() else manager.pause():
                profiler.stop()
            running.result()
            if manager.stats().steps == first:
                raise ValueError(
                    f"measure.profiler.first_step must be below the {first - before} steps of the run, "
                    f"got {self.first_step}"
                )
        finally:
            # Whoever is left in there ends with the manager.
            pool.shutdown(wait=False)
        return _write(folder, profiler, samples)

    def _profiler(self) -> profile:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        return profile(
            activities=activities,
            record_shapes=self.record_shapes,
            # The engine and, on CPUs, asynchronous steps have threads of their own.
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )


def operators(profiler: profile) -> list[Operator]:
    """What everything cost in the steps that were traced, the longest first; ranges are not among it."""
    found = []
    for row in profiler.key_averages():
        if row.is_user_annotation:
            continue
        where = row.device_type.name.lower()
        microseconds = row.self_cpu_time_total if where == "cpu" else row.self_device_time_total
        found.append(Operator(name=row.key, where=where, calls=row.count, self_ms=microseconds / 1e3))
    return sorted(found, key=lambda operator: -operator.self_ms)


def _watch(manager: Any, running: Future[object], end: int | None) -> list[MemorySample]:
    """Samples the memory until the run has ended or the engine has run `end` steps."""
    samples = []
    start = time.perf_counter()
    while True:
        stats = manager.stats()
        samples.append(
            MemorySample(
                seconds=time.perf_counter() - start,
                steps=stats.steps,
                resident_bytes=_resident_bytes(),
                device_bytes=_device_bytes(),
                cache_bytes=round(stats.cache_use * stats.cache_bytes),
            )
        )
        if running.done() or (end is not None and stats.steps >= end):
            return samples
        time.sleep(_SAMPLE_SECONDS)


def _resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _device_bytes() -> int:
    """The most that tensors took on the GPU since the last call; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    most = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return most


def _write(folder: Path, profiler: profile, samples: Sequence[MemorySample]) -> tuple[Path, ...]:
    trace = folder / "trace.json.gz"
    profiler.export_chrome_trace(str(trace))
    costs = operators(profiler)
    return (
        trace,
        _write_csv(folder / "operators.csv", costs),
        *save(operators_figure({f"{cost.name} ({cost.where})": cost.self_ms for cost in costs}), folder / "operators"),
        _write_csv(folder / "memory.csv", samples),
        *save(memory_figure(samples), folder / "memory"),
    )


def _write_csv(path: Path, rows: Sequence[Any]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(rows[0])])
        writer.writeheader()
        writer.writerows(map(asdict, rows))
    return path
