"""Drives a running manager with a workload, and says how it kept up.

Prompts without arrival times are added all at once. With them the load is an open loop: each request is added when its
time has come, however busy the engine is, so that what exceeds its capacity queues up. Latencies then count from the
planned arrival: a generator that is late itself must not make the engine look faster. Used by the command.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NoReturn

from tqdm import tqdm

from cbtriton.report import Percentiles, Summary, inter_token_times, summarise
from cbtriton.request import GenerationOutput, RequestStatus
from cbtriton.stats import EngineStats
from cbtriton.workloads import Workload


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What became of a workload.

    Attributes:
        outputs: Final outputs of the requests that were added, in the order of the workload's prompts, sequences of one
            prompt side by side. In an open loop `created_time` is the planned arrival.
        seconds: From the start to the last result.
        num_unsent: Requests that were planned after `max_seconds`, and never added.
        offered_seconds: In an open loop, the time over which the requests were planned to arrive; else None.
    """

    outputs: tuple[GenerationOutput, ...]
    seconds: float
    num_unsent: int
    offered_seconds: float | None


@dataclass(frozen=True, slots=True)
class LoadGenerator:
    """How a workload is run, and what counts as good service.

    Attributes:
        max_seconds: Ends the run then: requests that are planned later are never added, and those that have not ended
            are cancelled. None runs everything.
        time_to_first_token_target_ms: A request is served well if its first token comes within this time …
        inter_token_latency_target_ms: … and its others follow within this time of one another, on average.

    Raises:
        ValueError: If a number is not positive.
    """

    max_seconds: float | None = None
    time_to_first_token_target_ms: float = 1000.0
    inter_token_latency_target_ms: float = 100.0

    def __post_init__(self) -> None:
        for name in ("max_seconds", "time_to_first_token_target_ms", "inter_token_latency_target_ms"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, got {value}")

    def run(
        self,
        manager: Any,
        workload: Workload,
        *,
        progress_bar: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> LoadResult:
        """Adds the requests in their time and waits until all have ended, all in the caller's thread.

        Args:
            manager: A `ContinuousBatchingManager` that has been started and does nothing else.
            workload: What to run.
            progress_bar: Whether to show how many requests have ended.
            clock: The clock of the manager's outputs, in seconds.

        Raises:
            ValueError: If an open loop could block on a full queue, or ends before its first request.
            RuntimeError: If the manager ends before the requests do.
        """
        is_open = bool(workload.arrival_times)
        if is_open and manager.engine_config.max_queue_size:
            raise ValueError(
                f"max_queue_size must be 0 where requests arrive at given times, got "
                f"{manager.engine_config.max_queue_size}: a full queue would hold up those that come later"
            )
        max_seconds = math.inf if self.max_seconds is None else self.max_seconds
        if is_open and max_seconds < workload.arrival_times[0]:
            raise ValueError(
                f"max_seconds must reach the first arrival at {workload.arrival_times[0]:.3f} s, got {max_seconds}"
            )
        arrival_times = workload.arrival_times or (0.0,) * len(workload.prompts)
        started = clock()
        due = [started + arrival for arrival in arrival_times if arrival <= max_seconds]
        num_sequences = manager.num_return_sequences
        with tqdm(total=len(due) * num_sequences, unit="request", disable=not progress_bar) as bar:
            outputs = _drive(manager, workload, due, started + max_seconds, clock, bar)
        seconds = clock() - started
        num_unsent = len(arrival_times) - len(due)
        if not is_open:
            return LoadResult(tuple(outputs), seconds, num_unsent, offered_seconds=None)
        return LoadResult(
            tuple(replace(output, created_time=due[i // num_sequences]) for i, output in enumerate(outputs)),
            seconds,
            num_unsent,
            offered_seconds=max_seconds if num_unsent else arrival_times[-1],
        )

    def summarise(self, result: LoadResult, stats: EngineStats) -> Summary:
        """The figures of a run, with those of an open loop where it was one.

        In an open loop a request that was cancelled before it ran, or before its first token, waited for at least as
        long as it was there: that time is among those of the queue and of first tokens, which would look better the
        more requests are cancelled.
        """
        outputs = result.outputs
        summary = replace(
            summarise(outputs, stats, result.seconds),
            num_cancelled=sum(output.status == RequestStatus.CANCELLED for output in outputs),
            num_unsent=result.num_unsent,
        )
        if result.offered_seconds is None:
            return summary
        served = [output for output in outputs if output.status != RequestStatus.FAILED]
        return replace(
            summary,
            time_to_first_token=Percentiles.of([_time_to_first_token(output) for output in served]),
            queue_time=Percentiles.of([_queue_time(output) for output in served]),
            offered_requests_per_s=len(outputs) / result.offered_seconds if result.offered_seconds else None,
            goodput_requests_per_s=sum(map(self._is_good, outputs)) / result.seconds,
        )

    def _is_good(self, output: GenerationOutput) -> bool:
        """Whether a request ended by itself and met both targets."""
        gaps = inter_token_times([output])
        return (
            output.status == RequestStatus.FINISHED
            and 1000 * _time_to_first_token(output) <= self.time_to_first_token_target_ms
            and (not gaps or 1000 * fmean(gaps) <= self.inter_token_latency_target_ms)
        )


def _drive(
    manager: Any,
    workload: Workload,
    due: Sequence[float],
    deadline: float,
    clock: Callable[[], float],
    bar: tqdm[NoReturn],
) -> list[GenerationOutput]:
    """Adds each request when it is due, cancels at the deadline; returns all final outputs in the order of prompts."""
    eos = {"eos_token_id": -1} if workload.ignore_eos else {}
    num_sequences = manager.num_return_sequences
    sequence_ids: list[str] = []
    finished: dict[str, GenerationOutput] = {}
    num_sent = num_tokens = 0
    while num_sent < len(due) or len(finished) < len(sequence_ids):
        while num_sent < len(due) and due[num_sent] <= clock():
            prompt, limit = list(workload.prompts[num_sent]), workload.max_new_tokens[num_sent]
            request_id = manager.add_request(prompt, max_new_tokens=limit, record_timestamps=True, **eos)
            sequence_ids += [request_id, *(f"{request_id}__child#{child}" for child in range(num_sequences - 1))]
            num_sent += 1
        # No request is due after the deadline.
        if num_sent == len(due) and deadline <= clock():
            deadline = math.inf
            for sequence_id in sequence_ids:
                manager.cancel_request(sequence_id)
        next_event = due[num_sent] if num_sent < len(due) else deadline
        timeout = None if next_event == math.inf else max(0.0, next_event - clock())
        output = manager.get_result(timeout=timeout)
        if output is None and (timeout is None or not manager.is_running()):
            raise RuntimeError(f"the engine ended with {len(sequence_ids) - len(finished)} requests unfinished")
        if output is not None and output.is_finished():
            finished[output.request_id] = output
            num_tokens += len(output.generated_tokens)
            bar.set_postfix_str(f"{num_tokens} tokens, cache {manager.stats().cache_use:.0%}", refresh=False)
            bar.update()
    return [finished[sequence_id] for sequence_id in sequence_ids]


def _time_to_first_token(output: GenerationOutput) -> float:
    first = output.timestamps[0] if output.timestamps else output.lifespan[1]
    return first - output.created_time


def _queue_time(output: GenerationOutput) -> float:
    started, ended = output.lifespan
    return (ended if started < 0 else started) - output.created_time
