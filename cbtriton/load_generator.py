"""Drives a running manager with a workload, and says how it kept up.

Prompts without arrival times are added all at once. With them the load is an open loop: each request is added when its
time has come, however busy the engine is, so that what exceeds its capacity queues up. Latencies then count from the
planned arrival: a generator that is late itself must not make the engine look faster. Used by the command.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

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
        arrival_times = workload.arrival_times or (0.0,) * len(workload.prompts)
        max_seconds = math.inf if self.max_seconds is None else self.max_seconds
        num_to_send = bisect_right(arrival_times, max_seconds)
        if not num_to_send:
            raise ValueError(f"max_seconds must reach the first arrival at {arrival_times[0]} s, got {max_seconds}")
        eos = {"eos_token_id": -1} if workload.ignore_eos else {}
        ids: list[str] = []
        unfinished: set[str] = set()
        finished: dict[str, GenerationOutput] = {}
        num_tokens = 0
        started = clock()
        deadline = started + max_seconds
        with tqdm(total=num_to_send * manager.num_return_sequences, unit="request", disable=not progress_bar) as bar:
            while len(ids) < num_to_send or unfinished:
                while len(ids) < num_to_send and started + arrival_times[len(ids)] <= clock():
                    prompt, limit = workload.prompts[len(ids)], workload.max_new_tokens[len(ids)]
                    ids.append(manager.add_request(list(prompt), max_new_tokens=limit, record_timestamps=True, **eos))
                    unfinished.update(_sequence_ids(ids[-1], manager.num_return_sequences))
                if len(ids) == num_to_send and deadline <= clock():
                    deadline = math.inf
                    for request_id in unfinished:
                        manager.cancel_request(request_id)
                next_event = started + arrival_times[len(ids)] if len(ids) < num_to_send else deadline
                timeout = None if next_event == math.inf else max(0.0, next_event - clock())
                output = manager.get_result(timeout=timeout)
                if output is None and (timeout is None or not manager.is_running()):
                    raise RuntimeError(f"the engine ended with {len(unfinished)} requests unfinished")
                if output is not None and output.is_finished():
                    unfinished.discard(output.request_id)
                    finished[output.request_id] = output
                    num_tokens += len(output.generated_tokens)
                    bar.set_postfix_str(f"{num_tokens} tokens, cache {manager.stats().cache_use:.0%}", refresh=False)
                    bar.update()
        seconds = clock() - started
        outputs = [
            replace(finished[sequence], created_time=started + arrival) if is_open else finished[sequence]
            for request_id, arrival in zip(ids, arrival_times, strict=False)
            for sequence in _sequence_ids(request_id, manager.num_return_sequences)
        ]
        num_unsent = len(arrival_times) - num_to_send
        offered_seconds = (max_seconds if num_unsent else arrival_times[-1]) if is_open else None
        return LoadResult(tuple(outputs), seconds, num_unsent, offered_seconds)

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


def _sequence_ids(request_id: str, num_sequences: int) -> Iterator[str]:
    """The ids of the sequences of one request, as the manager names them."""
    yield request_id
    yield from (f"{request_id}__child#{child}" for child in range(num_sequences - 1))


def _time_to_first_token(output: GenerationOutput) -> float:
    first = output.timestamps[0] if output.timestamps else output.lifespan[1]
    return first - output.created_time


def _queue_time(output: GenerationOutput) -> float:
    started, ended = output.lifespan
    return (ended if started < 0 else started) - output.created_time
