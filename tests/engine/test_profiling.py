"""What a profiler sees: every stage of every step that it was asked for, every kernel, and no step that is cut."""

from __future__ import annotations

import csv
import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cbtriton import ContinuousBatchingConfig
from cbtriton.config import KernelConfig
from cbtriton.profiling import StepProfiler
from cbtriton.ranges import ranges_for

STAGES = ("schedule", "launch", "wait", "commit", "step")
NUM_LAYERS = 2


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def manager(request, tools):
    model = tools.build(tools.llama_config())
    config = ContinuousBatchingConfig(page_size=8, num_blocks=32, use_async_batching=request.param)
    with model_manager(model, config) as running:
        yield running


def model_manager(model: Any, config: ContinuousBatchingConfig) -> Any:
    import cbtriton

    return cbtriton.enable(model).continuous_batching_context_manager(
        continuous_batching_config=config, kernel_config=KernelConfig(default="reference")
    )


def answer(manager: Any, max_new_tokens: int = 12) -> None:
    """One request, so that each new token is a step."""
    for _ in manager.request_id_iter(manager.add_request([1, 2, 3], max_new_tokens=max_new_tokens)):
        pass


def traced_ranges(folder: Path) -> list[str]:
    trace = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
    return [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_trace_has_every_stage_of_every_step_and_counts_every_kernel(manager: Any, tmp_path: Path) -> None:
    answer(manager, 3)
    files = StepProfiler().record(manager, lambda: answer(manager), tmp_path)
    records = manager.step_records()[3:]
    ranges = traced_ranges(tmp_path)
    for stage in STAGES:
        # A step is planned in vain where nothing is left to run, and that is seen too.
        numbers = {int(name.split()[1].rstrip(":")) for name in ranges if name.split()[0] == stage}
        expected = {record.index for record in records}
        assert numbers - {max(expected) + 1} == expected, stage
    for record in records:
        assert ranges.count(f"step {record.index}: {record.bucket}") == 1
    calls = {row["name"]: int(row["calls"]) for row in read_csv(tmp_path / "operators.csv")}
    assert calls["cbtriton::kv_write_reference"] == NUM_LAYERS * len(records)
    assert calls["cbtriton::sample_reference"] == len(records)
    assert not set(calls) & set(ranges)
    assert all(path.stat().st_size > 0 for path in files)
    names = {
        "trace.json.gz",
        "operators.csv",
        "operators.png",
        "operators.svg",
        "memory.csv",
        "memory.png",
        "memory.svg",
    }
    assert {path.name for path in files} == names


class WatchedPauses:
    """Counts how often a manager was paused, which ran a number of steps before that, as on a busy machine."""

    def __init__(self, manager: Any, steps: int = 0) -> None:
        self.count = 0
        self._manager, self._steps = manager, steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def pause(self) -> Any:
        while self.stats().steps < self._steps:
            time.sleep(0.001)
        self.count += 1
        return self._manager.pause()


@pytest.mark.parametrize("late", [0, 60])
def test_a_trace_of_some_steps_cuts_none(manager: Any, tmp_path: Path, late: int) -> None:
    """At least those that were asked for: the engine does not wait for whoever watches it."""
    watched = WatchedPauses(manager, late)

    def run() -> None:
        while watched.count < 2:
            answer(manager, 50)
        answer(manager, 50)

    StepProfiler(first_step=4, num_steps=3).record(watched, run, tmp_path)
    ranges = traced_ranges(tmp_path)
    steps = {
        stage: {int(name.split()[1].rstrip(":")) for name in ranges if name.split()[0] == stage} for stage in STAGES
    }
    assert all(numbers == steps["step"] for numbers in steps.values())
    assert len(steps["step"]) >= 3
    assert min(steps["step"]) >= max(4, late)
    assert max(steps["step"]) < manager.stats().steps - 1


def test_a_run_that_ends_while_its_trace_waits_to_begin_says_so(manager: Any, tmp_path: Path) -> None:
    late = WatchedPauses(manager, 150)
    with pytest.raises(ValueError, match="first_step must be below the 150 steps of the run, got 1"):
        StepProfiler(first_step=1).record(late, lambda: answer(manager, 150), tmp_path)
    assert list(tmp_path.iterdir()) == []
    answer(manager, 2)


def test_memory_is_sampled_over_the_trace(manager: Any, tmp_path: Path) -> None:
    StepProfiler().record(manager, lambda: answer(manager, 40), tmp_path)
    samples = read_csv(tmp_path / "memory.csv")
    block_bytes = manager.stats().cache_bytes // 32
    assert {float(sample["cache_bytes"]) / block_bytes for sample in samples} & {2.0, 3.0, 4.0, 5.0}
    assert all(int(sample["resident_bytes"]) > 2**26 for sample in samples)
    steps = [int(sample["steps"]) for sample in samples]
    assert steps == sorted(steps)
    assert steps[-1] >= 39


def test_a_run_that_ends_before_its_trace_says_how_long_it_was(manager: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="first_step must be below the 5 steps of the run, got 50"):
        StepProfiler(first_step=50).record(manager, lambda: answer(manager, 5), tmp_path)
    assert list(tmp_path.iterdir()) == []
    answer(manager, 2)


def test_what_a_profiled_run_raises_arrives_and_ends_the_profiler(manager: Any, tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        StepProfiler().record(manager, fail, tmp_path)
    assert not torch.autograd.profiler._is_profiler_enabled
    answer(manager, 2)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [({"first_step": -1}, "first_step must be at least 0, got -1"), ({"num_steps": 0}, "at least 1 or null, got 0")],
)
def test_a_trace_that_cannot_be_is_refused(numbers: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepProfiler(**numbers)


def test_ranges_of_a_gpu_are_marked_for_its_tools_too(monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", marks.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: marks.append("pop"))
    mark = ranges_for(torch.device("cuda"))
    with pytest.raises(KeyError), mark("outer"), mark("inner"):
        raise KeyError
    assert marks == ["outer", "inner", "pop", "pop"]
    with ranges_for(torch.device("cpu"))("nobody looks"):
        pass
    assert len(marks) == 4
