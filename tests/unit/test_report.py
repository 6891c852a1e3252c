"""The report: figures against a calculation by hand, files that can be read back, a picture that shows everything."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from cbtriton.report import (
    Percentiles,
    first_token_times,
    inter_token_times,
    summarise,
    timeline_figure,
    write_result_json,
    write_timeline,
)
from cbtriton.request import GenerationOutput, RequestStatus
from cbtriton.stats import EngineStats, StepRecord

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
    prefix_cached_tokens=3,
    prefix_queried_tokens=12,
    preemptions=2,
    run_time=0.5,
)


def step(index: int, start: float, **changes: int) -> StepRecord:
    base = StepRecord(index, start, "varlen", 3, 100, 2, "varlen:107x4x64", 5, 60, 4, 0, 4, 1, 2, 0.1, 0.1, 0.2, 0.1)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_throughput_and_shares_are_those_calculated_by_hand() -> None:
    summary = summarise(OUTPUTS, STATS, seconds=2.0)
    assert (summary.num_requests, summary.num_failed) == (3, 1)
    assert summary.output_tokens_per_s == 4 / 2.0
    assert summary.total_tokens_per_s == (5 + 4) / 2.0
    assert summary.prefix_hit_rate == 0.25
    assert summary.padding_waste == 0.2
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


def test_result_json_holds_every_field_of_stats_summary_and_requests(tmp_path: Path) -> None:
    summary = summarise(OUTPUTS, STATS, seconds=2.0)
    write_result_json(
        tmp_path / "result.json",
        summary=summary,
        stats=STATS,
        outputs=OUTPUTS,
        engine_config={"page_size": 16, "decisions": [{"field": "num_blocks", "why": "memory"}]},
        asked={"continuous_batching": {"page_size": 16}},
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["stats"] == {name: getattr(STATS, name) for name in EngineStats.__dataclass_fields__}
    assert result["summary"]["time_to_first_token"]["p50_ms"] == pytest.approx(1000.0)
    assert result["engine_config"]["decisions"][0]["why"] == "memory"
    assert result["asked"]["continuous_batching"]["page_size"] == 16
    assert set(result["requests"][0]) == set(GenerationOutput.__dataclass_fields__)
    assert [r["status"] for r in result["requests"]] == ["FINISHED", "FAILED", "FINISHED"]
    assert set(result["environment"]["versions"]) == {"python", "cbtriton", "torch", "triton", "transformers"}
    assert result["environment"]["versions"]["torch"]
    assert set(result["environment"]) == {"versions", "git", "machine"}
    assert result["environment"]["machine"]["cores"] >= 1


@pytest.mark.parametrize("count", [1, 3, 3000])
def test_a_timeline_of_any_length_is_a_picture(tmp_path: Path, count: int) -> None:
    write_timeline(tmp_path / "t.png", [step(i, 5.0 + i) for i in range(count)])
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_the_timeline_stacks_what_a_step_held_and_names_it() -> None:
    figure = timeline_figure([step(0, 5.0), step(1, 6.0, prefill_tokens=0, num_preempted=1)])
    tokens, requests, cache = figure.axes
    tops = {patch.get_label(): list(patch.get_data().values) for patch in tokens.patches}  # type: ignore[attr-defined]
    assert tops == {"decode": [2, 2], "prefill": [102, 2], "padding": [107, 7]}
    edges = list(tokens.patches[0].get_data().edges)  # type: ignore[attr-defined]
    assert edges == pytest.approx([0.0, 1.0, 1.5])
    assert [label.get_text() for label in requests.get_legend().get_texts()] == ["in the step", "waiting", "preemption"]  # type: ignore[union-attr]
    assert list(requests.lines[0].get_xdata()) == [1.0]
    assert [patch.get_label() for patch in cache.patches] == ["in use", "cached prefixes"]
    assert "(s)" in cache.get_xlabel()


def test_nothing_in_the_timeline_overlaps() -> None:
    figure = timeline_figure([step(i, 5.0 + i, num_preempted=i % 2) for i in range(300)])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    boxes = [axes.get_tightbbox(renderer) for axes in figure.axes] + [figure._suptitle.get_window_extent(renderer)]  # type: ignore[attr-defined]
    for i, one in enumerate(boxes):
        assert not any(one.padded(-1).overlaps(other.padded(-1)) for other in boxes[i + 1 :])
    for axes in figure.axes:
        legend = axes.get_legend().get_window_extent(renderer)  # type: ignore[union-attr]
        assert not legend.overlaps(axes.get_window_extent(renderer))
        assert legend.x1 <= figure.bbox.x1


def test_a_timeline_without_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one step"):
        write_timeline(tmp_path / "t.png", [])
