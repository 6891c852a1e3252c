"""The load generator against a queue with one server and a clock of its own, whose times can be calculated by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cbtriton.load_generator import LoadGenerator, LoadResult
from cbtriton.report import Percentiles
from cbtriton.request import GenerationOutput, RequestStatus
from cbtriton.stats import EngineStats
from cbtriton.workloads import Workload


class OneServer:
    """A manager that runs one sequence after another, a second for each token, on a clock that only waiting moves."""

    def __init__(self, num_return_sequences: int = 1, max_queue_size: int = 0, seconds_to_add: float = 0.0) -> None:
        self.now = 100.0
        self.free_at = self.now
        self.num_return_sequences = num_return_sequences
        self.engine_config = SimpleNamespace(max_queue_size=max_queue_size)
        self.seconds_to_add = seconds_to_add
        self.running = True
        self.added: list[dict] = []
        self.outputs: list[GenerationOutput] = []

    def clock(self) -> float:
        return self.now

    def add_request(self, prompt: list[int], **options: object) -> str:
        self.now += self.seconds_to_add
        request_id = f"req_{len(self.added)}"
        self.added.append({"time": self.now - 100, "prompt": prompt, **options})
        for child in range(self.num_return_sequences):
            start = max(self.now, self.free_at)
            timestamps = [start + 1 + token for token in range(options["max_new_tokens"])]  # type: ignore[call-overload]
            self.free_at = timestamps[-1]
            self.outputs.append(
                GenerationOutput(
                    f"{request_id}__child#{child - 1}" if child else request_id,
                    prompt_ids=prompt,
                    generated_tokens=[7] * len(timestamps),
                    status=RequestStatus.FINISHED,
                    created_time=self.now,
                    lifespan=(start, timestamps[-1]),
                    timestamps=timestamps,
                )
            )
        return request_id

    def cancel_request(self, request_id: str) -> None:
        for output in self.outputs:
            if output.request_id == request_id and output.lifespan[1] > self.now:
                output.status = RequestStatus.CANCELLED
                output.lifespan = (output.lifespan[0] if output.lifespan[0] < self.now else -1.0, self.now)
                output.timestamps = [time for time in output.timestamps or [] if time <= self.now]

    def get_result(self, timeout: float | None) -> GenerationOutput | None:
        until = float("inf") if timeout is None else self.now + timeout
        self.outputs.sort(key=lambda output: output.lifespan[1])
        if self.running and self.outputs and self.outputs[0].lifespan[1] <= until:
            self.now = max(self.now, self.outputs[0].lifespan[1])
            return self.outputs.pop(0)
        assert until < float("inf") or not self.running, "waits for something that never comes"
        self.now = until if timeout is not None else self.now
        return None

    def is_running(self) -> bool:
        return self.running

    def stats(self) -> EngineStats:
        return EngineStats()


def every_second(count: int, num_new: int = 3) -> Workload:
    """Requests at 0, 1, … s that take `num_new` seconds each."""
    return Workload(
        "w",
        tuple((index + 1,) for index in range(count)),
        (num_new,) * count,
        ignore_eos=True,
        arrival_times=tuple(map(float, range(count))),
    )


def test_requests_arrive_in_their_time_however_busy_the_engine_is_and_the_queue_shows() -> None:
    manager = OneServer()
    load = LoadGenerator(time_to_first_token_target_ms=3000, inter_token_latency_target_ms=1000)
    result = load.run(manager, every_second(4), clock=manager.clock)
    assert [request["time"] for request in manager.added] == [0, 1, 2, 3]
    assert manager.added[2] == {
        "time": 2,
        "prompt": [3],
        "max_new_tokens": 3,
        "record_timestamps": True,
        "eos_token_id": -1,
    }
    summary = load.summarise(result, EngineStats())
    # Request i arrives at i and starts at 3 i.
    assert summary.queue_time == Percentiles.of([0, 2, 4, 6])
    assert summary.time_to_first_token == Percentiles.of([1, 3, 5, 7])
    assert summary.seconds == 12
    assert summary.offered_requests_per_s == 4 / 3
    assert summary.goodput_requests_per_s == 2 / 12
    assert (summary.num_cancelled, summary.num_unsent) == (0, 0)
    strict = LoadGenerator(time_to_first_token_target_ms=3000, inter_token_latency_target_ms=999)
    assert strict.summarise(result, EngineStats()).goodput_requests_per_s == 0


def test_times_count_from_the_planned_arrival_where_adding_takes_long() -> None:
    manager = OneServer(seconds_to_add=10.0)
    load = LoadGenerator()
    result = load.run(manager, every_second(2), clock=manager.clock)
    assert [request["time"] for request in manager.added] == [10, 20]
    assert [output.created_time for output in result.outputs] == [100, 101]
    assert load.summarise(result, EngineStats()).time_to_first_token == Percentiles.of([11, 20])


def test_a_run_ends_when_told_and_counts_who_waited() -> None:
    manager = OneServer()
    load = LoadGenerator(max_seconds=5, time_to_first_token_target_ms=3000, inter_token_latency_target_ms=1000)
    result = load.run(manager, every_second(10), clock=manager.clock)
    summary = load.summarise(result, EngineStats())
    assert [output.status.name for output in result.outputs] == ["FINISHED"] + ["CANCELLED"] * 5
    assert (summary.num_requests, summary.num_cancelled, summary.num_unsent) == (6, 5, 4)
    assert summary.seconds == 5
    # The second started at 3; the others never did, and were there for 3, 2, 1 and 0 s.
    assert summary.queue_time == Percentiles.of([0, 2, 3, 2, 1, 0])
    assert summary.time_to_first_token == Percentiles.of([1, 3, 3, 2, 1, 0])
    assert summary.offered_requests_per_s == 6 / 5
    assert summary.goodput_requests_per_s == 1 / 5
    table = summary.table()
    assert "5 requests cancelled · 4 never sent" in table
    assert "1.20 requests/s\n" in table
    assert "0.20 requests/s met the latency targets" in table


@pytest.mark.parametrize(
    ("status", "timestamps", "is_good"),
    [
        (RequestStatus.FINISHED, [101.0, 102.0, 105.0], True),
        (RequestStatus.FINISHED, [101.0, 102.0, 105.1], False),
        (RequestStatus.FINISHED, [101.1, 102.0], False),
        (RequestStatus.FINISHED, [101.0], True),
        (RequestStatus.FAILED, [101.0], False),
    ],
)
def test_a_request_is_served_well_within_its_first_token_and_the_mean_of_the_others(
    status: RequestStatus, timestamps: list[float], is_good: bool
) -> None:
    load = LoadGenerator(time_to_first_token_target_ms=1000, inter_token_latency_target_ms=2000)
    output = GenerationOutput("r", status=status, created_time=100, lifespan=(100, 106), timestamps=timestamps)
    result = LoadResult((output,), seconds=1, num_unsent=0, offered_seconds=1)
    assert load.summarise(result, EngineStats()).goodput_requests_per_s == is_good


def test_without_arrival_times_all_come_at_once_and_there_is_no_queue_to_report() -> None:
    manager = OneServer()
    workload = Workload("w", ((1,), (2,), (3,)), (2, 2, 2))
    load = LoadGenerator(max_seconds=5)
    result = load.run(manager, workload, clock=manager.clock)
    assert [request["time"] for request in manager.added] == [0, 0, 0]
    assert all("eos_token_id" not in request for request in manager.added)
    summary = load.summarise(result, EngineStats())
    assert (summary.num_requests, summary.num_cancelled) == (3, 1)
    assert (summary.queue_time, summary.offered_requests_per_s, summary.goodput_requests_per_s) == (None, None, None)
    assert "offered load" not in summary.table()


def test_sequences_of_one_prompt_share_its_arrival_and_are_cancelled_one_by_one() -> None:
    manager = OneServer(num_return_sequences=2)
    load = LoadGenerator(max_seconds=4)
    result = load.run(manager, every_second(2), clock=manager.clock)
    assert [output.request_id for output in result.outputs] == ["req_0", "req_0__child#0", "req_1", "req_1__child#0"]
    assert [output.created_time for output in result.outputs] == [100, 100, 101, 101]
    assert [output.status.name for output in result.outputs] == ["FINISHED"] + ["CANCELLED"] * 3


def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_queue_size must be 0 .* got 3"):
        LoadGenerator().run(OneServer(max_queue_size=3), every_second(2))
    late = Workload("w", ((1,),), (1,), arrival_times=(2.0,))
    with pytest.raises(ValueError, match=r"reach the first arrival at 2\.000 s, got 1"):
        LoadGenerator(max_seconds=1).run(OneServer(), late)
    with pytest.raises(ValueError, match="inter_token_latency_target_ms must be above 0, got 0"):
        LoadGenerator(inter_token_latency_target_ms=0)


@pytest.mark.parametrize("count", [1, 3])
def test_an_engine_that_ends_is_noticed_while_waiting_for_results_or_for_arrivals(count: int) -> None:
    manager = OneServer()
    manager.running = False
    with pytest.raises(RuntimeError, match="ended with 1 requests unfinished"):
        LoadGenerator().run(manager, every_second(count), clock=manager.clock)
