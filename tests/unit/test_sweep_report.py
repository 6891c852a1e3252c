"""Reports of sweeps, on folders that were made up: every figure against one worked out by hand."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cbtriton import sweep_report
from cbtriton.results import SCHEMA_VERSION
from cbtriton.stats import StepRecord
from cbtriton.sweep import LATENCY, RATE, Sweep, load_runs
from cbtriton.sweep_report import compare, markdown, pictures_of, write_report

Q, KV = "continuous_batching.q_padding_interval_size", "continuous_batching.kv_padding_interval_size"
STEP = StepRecord(0, 5.0, "varlen", 3, 100, 2, "varlen:107x4x64", 5, 60, 4, 0, 4, 1, 2, 0.1, 0.1, 0.2, 0.1)


def summary(rate: float, latency: float, **more: Any) -> dict[str, Any]:
    shares = {"padding_waste": 0.0, "kv_padding_waste": 0.0, "prefix_hit_rate": 0.0, "preemptions": 0, "num_failed": 0}
    times = {"inter_token_latency": {"p95_ms": latency}, "time_to_first_token": None}
    return {"output_tokens_per_s": rate, **times, **shares, **more}


def add(
    folder: Path,
    settings: dict[str, Any],
    rates: Sequence[float] = (),
    latency: float = 10.0,
    *,
    choices: dict[str, str] | None = None,
    preparations: Sequence[dict[str, Any]] = (),
    **more: Any,
) -> None:
    """A run's folder; one without rates failed."""
    folder.mkdir(parents=True)
    asked: dict[str, Any] = {"continuous_batching": {"page_size": 256}}
    for key, value in settings.items():
        group, _, name = key.partition(".")
        asked.setdefault(group, {})[name] = value
    repeats = [summary(rate, latency, **more) for rate in rates]
    figures = (
        {
            "summary": sorted(repeats, key=lambda repeat: repeat["output_tokens_per_s"])[len(repeats) // 2],
            "repeats": repeats,
            "stats": {"preparations": list(preparations)},
        }
        if rates
        else {}
    )
    result = {
        "schema_version": SCHEMA_VERSION,
        "status": "finished" if rates else "failed",
        "error": None if rates else {"type": "ValueError", "message": "too\nsmall | here", "traceback": ""},
        **figures,
        "asked": asked,
        "overrides": ["sweep=mine", *(f"{key}={value}" for key, value in settings.items())]
        + [f"{key}={value}" for key, value in (choices or {}).items()],
        "choices": {"model": "tiny_random", "workload": "W1", **(choices or {})},
        "environment": {"machine": {"gpu": None, "cpu": "a processor", "cores": 2}, "git": {"commit": "abc"}},
    }
    (folder / "result.json").write_text(json.dumps(result))
    steps = [{"repeat": repeat, **dataclasses.asdict(STEP)} for repeat in (0, 0, 1)]
    (folder / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    """Two query intervals by two KV intervals; the last run failed. The folder 10 comes after the folder 2."""
    add(tmp_path / "0", {Q: 8, KV: 32}, (90.0, 100.0, 110.0), 5.0, padding_waste=0.1)
    add(tmp_path / "1", {Q: 8, KV: 64}, (190.0, 200.0, 210.0), 9.0, padding_waste=0.2)
    add(tmp_path / "2", {Q: 16, KV: 32}, (80.0, 90.0, 85.0), 6.0, padding_waste=0.3)
    add(tmp_path / "10", {Q: 16, KV: 64})
    return tmp_path


def sweep_of(*folders: Path) -> Sweep:
    return Sweep.of(load_runs(folders))


def test_runs_come_in_the_order_of_their_numbers_and_differ_in_what_was_varied(grid: Path) -> None:
    sweep = sweep_of(grid)
    assert [run.name for run in sweep.runs] == ["0", "1", "2", "10"]
    assert sweep.parameters == (Q, KV)
    assert [run.figure(RATE) for run in sweep.runs] == [100.0, 200.0, 85.0, None]
    assert {value: [run.name for run in runs] for value, runs in sweep.by_setting(Q).items()} == {
        "8": ["0", "1"],
        "16": ["2"],
    }


def test_a_setting_that_one_run_left_at_its_default_is_a_parameter_too(tmp_path: Path) -> None:
    add(tmp_path / "a" / "0", {}, (1.0,))
    add(tmp_path / "b" / "0", {"continuous_batching.page_size": 16}, (2.0,), choices={"workload": "W2"})
    sweep = sweep_of(tmp_path / "a", tmp_path / "b")
    assert [run.name for run in sweep.runs] == ["a/0", "b/0"]
    settings = [[run.setting(key) for key in sweep.parameters] for run in sweep.runs]
    assert settings == [["256", "W1"], ["16", "W2"]]


def test_the_front_holds_what_no_other_run_beats_in_both(tmp_path: Path) -> None:
    figures = {"a": (100, 5), "b": (200, 9), "c": (150, 9), "d": (90, 5), "e": (50, 2), "f": (200, 9)}
    for name, (rate, latency) in figures.items():
        add(tmp_path / name, {Q: ord(name)}, (float(rate),), float(latency))
    assert [run.name for run in sweep_of(tmp_path).front] == ["e", "a", "b", "f"]


def cells(text: str, first: str) -> list[str]:
    """The cells of the first table row that begins so."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")]


def test_the_table_has_every_run_and_leaves_out_figures_that_are_all_the_same(grid: Path) -> None:
    text = markdown(sweep_of(grid))
    header = [
        "run",
        "q_padding_interval_size",
        "kv_padding_interval_size",
        RATE,
        LATENCY,
        "padding waste",
        "repeats",
        "",
    ]
    assert cells(text, "run") == header
    assert cells(text, "1") == ["1", "8", "64", "200.0", "9.0", "20.0%", "3", "fastest, Pareto"]
    assert cells(text, "10") == ["10", "16", "64", "–", "–", "–", "0", "ValueError: too small / here"]
    assert "4 runs, 1 failed; model tiny_random, workload W1; a processor, 2 cores." in text


def test_long_numbers_are_shortened_in_the_table_only(tmp_path: Path) -> None:
    for number, margin in enumerate((0.123456789, 0.2)):
        add(tmp_path / f"{number}", {"continuous_batching.safety_margin": margin}, (1.0,))
    sweep = sweep_of(tmp_path)
    assert cells(markdown(sweep), "0")[1] == "0.1235"
    assert cells(markdown(sweep), "1")[1] == "0.2"
    assert sweep.runs[0].setting("continuous_batching.safety_margin") == "0.123456789"


def test_the_effect_of_a_parameter_is_the_mean_over_the_others(grid: Path) -> None:
    text = markdown(sweep_of(grid))
    rows = [cells(line, "q_padding_interval_size") for line in text.splitlines() if line.startswith("| q_padding")]
    assert rows == [
        ["q_padding_interval_size", "8", "2", "150.0", "7.0"],
        ["q_padding_interval_size", "16", "1", "85.0", "6.0"],
    ]


def test_the_fastest_run_is_only_called_so_where_noise_allows(grid: Path, tmp_path: Path) -> None:
    assert "Fastest: run 1 (q_padding_interval_size=8, kv_padding_interval_size=64)" in markdown(sweep_of(grid))
    assert "All others are slower beyond noise." in markdown(sweep_of(grid))
    add(grid / "3", {Q: 4, KV: 64}, (180.0, 199.0, 220.0))
    assert "No difference seen to: 3." in markdown(sweep_of(grid))
    add(tmp_path / "single" / "0", {Q: 4}, (180.0,))
    assert "One repeat is no evidence" in markdown(sweep_of(tmp_path / "single"))


def test_a_run_that_generated_nothing_is_a_row_like_others(grid: Path) -> None:
    add(grid / "3", {Q: 4, KV: 64}, (0.0, 0.0), num_failed=7)
    text = markdown(sweep_of(grid))
    assert cells(text, "3")[3:] == ["0.0", "10.0", "0.0%", "7", "0", ""]
    assert "All others are slower beyond noise." in text


def test_sweeps_of_whole_set_ups_are_told_apart_by_their_names(tmp_path: Path) -> None:
    for name in ("quick", "tight_memory"):
        add(tmp_path / name, {}, (1.0,), choices={"experiment": name})
    sweep = sweep_of(tmp_path)
    assert sweep.parameters == ("experiment",)
    assert [run.setting("experiment") for run in sweep.runs] == ["quick", "tight_memory"]


def test_the_csv_can_be_read_back(grid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_report([grid], grid / "report")
    with (grid / "report" / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["status"], row[Q], row[RATE]) for row in rows] == [
        ("0", "finished", "8", "100.0"),
        ("1", "finished", "8", "200.0"),
        ("2", "finished", "16", "85.0"),
        ("10", "failed", "16", ""),
    ]
    assert rows[3]["error"] == "ValueError: too\nsmall | here"
    assert rows[1]["repeats"] == "190.00 200.00 210.00"
    assert (grid / "report" / "report.md").read_text() in capsys.readouterr().out


def test_only_pictures_that_the_runs_have_data_for_are_drawn(grid: Path, tmp_path: Path) -> None:
    assert [name for name, _ in pictures_of(sweep_of(grid))] == ["padding_waste", "step_sizes", "throughput_latency"]
    add(tmp_path / "one" / "0", {}, (1.0,))
    assert list(pictures_of(sweep_of(tmp_path / "one"))) == []
    add(tmp_path / "failed" / "0", {Q: 1, KV: 1})
    add(tmp_path / "failed" / "1", {Q: 2, KV: 2})
    assert list(pictures_of(sweep_of(tmp_path / "failed"))) == []


def test_the_heat_map_shows_the_waste_of_each_pair_and_the_gap_of_a_failed_run(grid: Path) -> None:
    figure = dict(pictures_of(sweep_of(grid)))["padding_waste"]
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.texts] == ["10", "20", "30", "–"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["32", "64"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["8", "16"]


def test_a_trace_of_step_sizes_is_that_of_one_repeat(grid: Path) -> None:
    axes = dict(pictures_of(sweep_of(grid)))["step_sizes"].axes
    assert [a.get_title(loc="left") for a in axes] == ["query interval 8", "query interval 16"]
    assert [len(patch.get_data().values) for patch in axes[0].patches] == [2, 2]


def test_a_kernel_is_set_beside_its_reference_with_everything_else_equal(tmp_path: Path) -> None:
    slot = "kernels/decode_attention"
    rates = {("reference", 1): 10.0, ("reference", 2): 20.0, ("mine", 1): 15.0, ("mine", 2): 50.0, ("lone", 3): 9.0}
    for number, ((kernel, q), rate) in enumerate(rates.items()):
        add(tmp_path / f"{number}", {Q: q}, (rate,), choices={slot: kernel})
    figure = dict(pictures_of(sweep_of(tmp_path)))["kernel_speed_ups"]
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["decode_attention: mine"]
    assert sorted(axes.lines[0].get_xdata()) == pytest.approx([1.5, 2.5])
    assert [text.get_text() for text in axes.texts] == ["mean ×2.00"]


def test_seconds_of_preparation_are_means_over_the_runs_that_prepared_a_bucket(tmp_path: Path) -> None:
    def entry(kind: str, bucket: str, seconds: float) -> dict[str, Any]:
        return {"kind": kind, "bucket": bucket, "graphs": 1, "seconds": seconds}

    first = [
        entry("compile", "a", 1.0),
        entry("compile", "a", 1.0),
        entry("capture", "a", 0.5),
        entry("compile", "b", 9.0),
    ]
    add(tmp_path / "0", {Q: 1}, (1.0,), preparations=first)
    add(tmp_path / "1", {Q: 2}, (1.0,), preparations=[entry("compile", "a", 4.0)])
    (axes,) = dict(pictures_of(sweep_of(tmp_path)))["preparation"].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["b", "a"]
    assert [[bar.get_width() for bar in kind] for kind in axes.containers] == [[9.0, 3.0], [0.0, 0.5]]


def test_runs_that_were_killed_are_named(grid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (grid / "11").mkdir()
    for name in ("2", "11"):
        (grid / name / "cli.log").touch()
    write_report([grid], grid / "report")
    assert f"Without a result (killed, or still running): {grid / '11'}\n" in capsys.readouterr().out


def test_two_runs_are_compared_with_the_noise_of_their_repeats(tmp_path: Path) -> None:
    add(tmp_path / "a", {Q: 1}, (100.0, 101.0, 102.0), 10.0)
    add(tmp_path / "b", {Q: 2}, (120.0, 121.0, 122.0), 10.0)
    add(tmp_path / "c", {Q: 3}, (90.0, 100.0, 115.0), 20.0)
    add(tmp_path / "d", {Q: 4}, (300.0,), 20.0)
    lines = compare([tmp_path / "a", tmp_path / "b"]).splitlines()
    assert lines[1].startswith("throughput: faster (×1.198, 95 % interval 1.17")
    assert lines[2].startswith("p95 inter-token latency: no difference seen (×1.000")
    lines = compare([tmp_path / "a", tmp_path / "c"]).splitlines()
    assert lines[1].startswith("throughput: no difference seen (×1.00")
    assert lines[2].startswith("p95 inter-token latency: longer (×2.000")
    assert "one repeat is no evidence" in compare([tmp_path / "a", tmp_path / "d"])


def test_sweeps_are_compared_pair_by_pair_and_over_all_settings(tmp_path: Path) -> None:
    for q, rate in ((1, 10.0), (2, 20.0), (3, 30.0)):
        add(tmp_path / "a" / f"{q}", {Q: q}, (rate,), choices={"kernels": "reference"})
    for q, rate in ((3, 60.6), (2, 40.0), (1, 19.8), (4, 1.0)):
        add(tmp_path / "b" / f"{q}", {Q: q}, (rate,), choices={"kernels": "triton"})
    lines = compare([tmp_path / "a", tmp_path / "b"]).splitlines()
    assert lines[0].endswith("3 pairs of 3 and 4 runs")
    assert lines[1].startswith("q_padding_interval_size=1, throughput: ×1.980")
    assert lines[-1].startswith("throughput over 3 settings: faster (×2.000")


def test_a_mistake_is_one_line_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add(tmp_path / "a", {}, (1.0,))
    add(tmp_path / "bad", {})
    for arguments, message in (
        (["nowhere"], "there is no result.json in or below nowhere"),
        (["--compare", "a"], "--compare takes two folders, got 1"),
        (["--compare", "a", "bad"], "nothing to compare"),
    ):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["cbtriton-report", *arguments])
        with pytest.raises(SystemExit) as end:
            sweep_report.command()
        assert end.value.code == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
