"""How a workload is measured: run through a manager that has been started, so many times.

Used by the command. Knows of a manager what callers may do with it, and nothing of the engine behind it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from cbtriton.report import Repeat, summarise
from cbtriton.request import GenerationOutput
from cbtriton.workloads import Workload


@dataclass(frozen=True, slots=True)
class Measure:
    """Runs a workload several times in one process; none finds a prefix in the cache that another has left.

    Attributes:
        repeats: Runs that are measured, at least 1.
        warmup_runs: Runs before these, whose figures are dropped.

    Raises:
        ValueError: If a number is too small.
    """

    repeats: int = 1
    warmup_runs: int = 0

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"measure.repeats must be at least 1, got {self.repeats}")
        if self.warmup_runs < 0:
            raise ValueError(f"measure.warmup_runs must be at least 0, got {self.warmup_runs}")

    def run(self, manager: Any, workload: Workload, *, progress_bar: bool) -> tuple[Repeat, ...]:
        """Runs the workload.

        Args:
            manager: A `ContinuousBatchingManager` that runs and has no requests.
            workload: What to run.
            progress_bar: Shows one for each run.

        Returns:
            The runs that are measured, in order.

        Raises:
            RuntimeError: If the engine ended before all requests had.
        """
        repeats = []
        for number in range(self.warmup_runs + self.repeats):
            if number:
                with manager.pause(reset_prefix_cache=True):
                    pass
            repeats.append(_run_once(manager, workload, progress_bar=progress_bar))
        return tuple(repeats[self.warmup_runs :])


def _run_once(manager: Any, workload: Workload, *, progress_bar: bool) -> Repeat:
    before = manager.stats()
    started = time.perf_counter()
    outputs = _generate(manager, workload, progress_bar=progress_bar)
    seconds = time.perf_counter() - started
    stats = manager.stats().since(before)
    steps = tuple(step for step in manager.step_records() if step.start_time >= started)
    return Repeat(summarise(outputs, stats, seconds), tuple(outputs), steps)


def _generate(manager: Any, workload: Workload, *, progress_bar: bool) -> list[GenerationOutput]:
    """Runs the workload and returns the finished outputs in the order of its prompts, sequences of one side by side."""
    eos = {"eos_token_id": -1} if workload.ignore_eos else {}
    request_ids = [
        manager.add_request(list(prompt), max_new_tokens=limit, record_timestamps=True, **eos)
        for prompt, limit in zip(workload.prompts, workload.max_new_tokens, strict=True)
    ]
    num_sequences = len(request_ids) * (manager.generation_config.num_return_sequences or 1)
    finished: dict[str, GenerationOutput] = {}
    num_tokens = 0
    with tqdm(total=num_sequences, unit="request", disable=not progress_bar) as bar:
        while len(finished) < num_sequences and (output := manager.get_result()) is not None:
            if output.is_finished():
                finished[output.request_id] = output
                num_tokens += len(output.generated_tokens)
                bar.set_postfix_str(f"{num_tokens} tokens, cache {manager.stats().cache_use:.0%}", refresh=False)
                bar.update()
    if len(finished) < num_sequences:
        raise RuntimeError(f"the engine ended with {num_sequences - len(finished)} requests unfinished")
    order = {request_id: place for place, request_id in enumerate(request_ids)}

    def place(output: GenerationOutput) -> tuple[int, int]:
        parent, _, child = output.request_id.partition("__child#")
        return order[parent], int(child) + 1 if child else 0

    return sorted(finished.values(), key=place)
