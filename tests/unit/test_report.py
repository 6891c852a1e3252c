"""The report: figures against a calculation by hand."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from cbtriton.report import Percentiles, Repeat, first_token_times, inter_token_times, summarise, typical
from cbtriton.request import GenerationOutput, RequestStatus
from cbtriton.stats import EngineStats, Preparation

OUTPUTS = [
    GenerationOutput(
        "req_0",
        prompt_ids=[1, 2, 3],
        generated_tokens=[4, 5, 6],
        status=RequestStatus.FINISHED,
        created_time=10.0,
        timestamps=[10.5, 10.6, 10.8],
        finish_reason="length",
    ),
    GenerationOutput("req_1", prompt_ids=[7], status=RequestStatus.FAILED, created_time=10.0, error="no room"),
    GenerationOutput(
        "req_2",
        prompt_ids=[8],
        generated_tokens=[9],
        status=RequestStatus.FINISHED,
        created_time=10.0,
        timestamps=[11.5],
    ),
]
STATS = EngineStats(
    steps=3,
    prefill_tokens=60,
    decode_tokens=20,
    padding_tokens=20,
    kv_tokens=300,
    padding_kv_tokens=100,
    prefix_cached_tokens=3,
    prefix_queried_tokens=12,
    preemptions=2,
    run_time=0.5,
)


def test_throughput_and_shares_are_those_calculated_by_hand() -> None:
    summary = summarise(OUTPUTS, STATS, seconds=2.0)
    assert (summary.num_requests, summary.num_failed) == (3, 1)
    assert summary.output_tokens_per_s == 4 / 2.0
    assert summary.total_tokens_per_s == (5 + 4) / 2.0
    assert summary.prefix_hit_rate == 0.25
    assert summary.padding_waste == 0.2
    assert summary.kv_padding_waste == 0.25
    assert summary.time_split == {"schedule": 0.0, "prepare": 0.0, "run": 0.5, "update": 0.0}


def test_latencies_come_from_the_timestamps_of_each_request() -> None:
    assert first_token_times(OUTPUTS) == [0.5, 1.5]
    assert inter_token_times(OUTPUTS) == pytest.approx([0.1, 0.2])
    summary = summarise(OUTPUTS, STATS, seconds=2.0)
    assert summary.time_to_first_token is not None
    assert summary.inter_token_latency is not None
    assert summary.time_to_first_token.p50_ms == pytest.approx(1000.0)
    assert summary.inter_token_latency.p95_ms == pytest.approx(195.0)


def test_percentiles_agree_with_the_standard_library() -> None:
    times = [(7 * i) % 101 / 100 for i in range(101)]
    cuts = statistics.quantiles(times, n=20, method="inclusive")
    found = Percentiles.of(times)
    assert found is not None
    assert (found.p50_ms, found.p95_ms) == pytest.approx((1000 * cuts[9], 1000 * cuts[18]))
    assert Percentiles.of([0.25]) == Percentiles(250.0, 250.0)
    assert Percentiles.of([]) is None


def test_a_run_without_timestamps_says_so_instead_of_showing_zero() -> None:
    bare = [replace(output, timestamps=None) for output in OUTPUTS]
    table = summarise(bare, STATS, seconds=2.0).table()
    assert table.count("not recorded") == 2


def test_the_table_shows_each_figure_with_its_unit_in_one_column() -> None:
    lines = summarise(OUTPUTS, STATS, seconds=2.0).table().splitlines()
    assert any("2.0 output tokens/s · 4.5 in total" in line for line in lines)
    assert any("p50 1000.0 ms" in line for line in lines)
    assert any("25.0% of prompt tokens" in line for line in lines)
    starts = {len(line) - len(line[21:].lstrip()) for line in lines if line[19:21] == "  "}
    assert starts == {21}


def test_seconds_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive, got 0"):
        summarise(OUTPUTS, STATS, seconds=0)


@pytest.mark.parametrize(("rates", "chosen"), [([3.0], 3.0), ([1.0, 9.0, 4.0], 4.0), ([9.0, 2.0, 7.0, 4.0], 4.0)])
def test_the_typical_repeat_has_the_median_throughput(rates: list[float], chosen: float) -> None:
    summary = summarise(OUTPUTS, STATS, seconds=2.0)
    repeats = [Repeat(replace(summary, output_tokens_per_s=rate), (), ()) for rate in rates]
    assert typical(repeats).summary.output_tokens_per_s == chosen
    with pytest.raises(ValueError, match="at least one repeat"):
        typical([])


def test_stats_since_a_snapshot_count_what_came_after_it_and_keep_states() -> None:
    old, new = Preparation("compile", "a", 1, 2.0), Preparation("capture", "a", 1, 0.5)
    earlier = EngineStats(steps=3, run_time=1.0, blocks_in_use=7, buckets={"a": 2, "b": 1}, preparations=(old, new))
    later = EngineStats(
        steps=8, run_time=1.5, blocks_in_use=4, buckets={"a": 2, "b": 4, "c": 1}, preparations=(old, old, new)
    )
    expected = EngineStats(steps=5, run_time=0.5, blocks_in_use=4, buckets={"b": 3, "c": 1}, preparations=(old,))
    assert later.since(earlier) == expected
