"""Pictures: they show every figure, and nothing in them overlaps or is cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib import rc_context, rcParams
from matplotlib.backends.backend_agg import FigureCanvasAgg

from cbtriton.figures import (
    KernelTiming,
    MemorySample,
    Point,
    memory_figure,
    operators_figure,
    padding_waste_figure,
    preparation_figure,
    roofline_figure,
    roofline_shares_figure,
    save,
    speed_ups_figure,
    step_sizes_figure,
    throughput_latency_figure,
    timeline_figure,
    write_timeline,
)
from cbtriton.stats import StepRecord


def step(index: int, start: float, **changes: int) -> StepRecord:
    base = StepRecord(index, start, "varlen", 3, 100, 2, "varlen:107x4x64", 5, 60, 4, 0, 4, 1, 2, 0.1, 0.1, 0.2, 0.1)
    return replace(base, **changes)  # type: ignore[arg-type]


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


STEPS = [step(i, 5.0 + i, num_preempted=i % 2) for i in range(300)]
TIMINGS = [
    KernelTiming(f"decode B={n} L=4096 page=256", who, 100.0 + n, 10.0, 20.0 + n, 2.0 + n % 3)
    for n in range(12)
    for who in ("decode_attention/split_kv", "decode_attention/reference", "sdpa, in one piece")
]
PICTURES = {
    "roofline": roofline_figure("bf16, 2 threads", TIMINGS, 22.8, 48.7),
    "roofline_shares": roofline_shares_figure("bf16, 2 threads", TIMINGS),
    "memory": memory_figure([MemorySample(0.01 * n, n, 2**30 + 2**20 * n, 2**20 * n % 7, 2**24) for n in range(50)]),
    "operators": operators_figure({f"aten::{'long_name_' * (n % 7)}{n} (cpu)": 100.0 - n for n in range(30)}),
    "timeline": timeline_figure(STEPS),
    "padding_waste": padding_waste_figure(
        ["16", "64", "1024"],
        ["256", "1024", "16384"],
        {"query tokens": [[0.1, 0.5, 0.99]] * 3, "contexts": [[None] * 3] * 3},
    ),
    "step_sizes": step_sizes_figure({f"query interval {4**n}": STEPS for n in range(2, 6)}),
    "throughput_latency": throughput_latency_figure(
        [Point(f"multirun/{i}", 100.0 + i, 5 + i % 7, i % 7 == 0) for i in range(40)]
    ),
    "preparation": preparation_figure(
        {f"varlen:{16384 - i}x1024x131072": {"compile": 1.0 + i, "capture": 0.5} for i in range(50)}
    ),
    "speed_ups": speed_ups_figure({"decode_attention: single_pass": [1.5, 12.5], "sample: fused": [0.5]}),
}


@pytest.mark.parametrize("name", PICTURES)
def test_nothing_in_a_picture_overlaps_or_is_cut(name: str) -> None:
    figure = PICTURES[name]
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    titles = [text for text in (figure._suptitle, figure._supylabel) if text is not None]  # type: ignore[attr-defined]
    boxes = [axes.get_tightbbox(renderer) for axes in figure.axes] + [t.get_window_extent(renderer) for t in titles]
    for i, one in enumerate(boxes):
        assert figure.bbox.padded(1).containsx(one.x0)
        assert figure.bbox.padded(1).containsx(one.x1)
        assert figure.bbox.padded(1).containsy(one.y0)
        assert figure.bbox.padded(1).containsy(one.y1)
        assert not any(one.padded(-1).overlaps(other.padded(-1)) for other in boxes[i + 1 :])
    for axes in figure.axes:
        if (legend := axes.get_legend()) is not None:
            assert not legend.get_window_extent(renderer).overlaps(axes.get_window_extent(renderer))
        ticks = [axes.get_xticklabels(), axes.get_yticklabels(), axes.texts]
        for labels in ([label for label in group if label.get_text()] for group in ticks):
            spans = [label.get_window_extent(renderer) for label in labels]
            assert not any(one.overlaps(other) for i, one in enumerate(spans) for other in spans[i + 1 :])


def test_a_roofline_bends_where_both_limits_meet_and_leaves_out_what_computes_nothing() -> None:
    idle = KernelTiming("kv_write T=8", "kv_write/vectorized", 10.0, 1.0, 0.0, 0.0)
    (axes,) = roofline_figure("fp32, 1 thread", [TIMINGS[0], idle], gb_per_s=20.0, gflop_per_s=50.0).axes
    roof, points = axes.lines
    assert list(roof.get_xdata())[1] == 2.5
    assert list(roof.get_ydata())[1:] == [50.0, 50.0]
    assert (list(points.get_xdata()), list(points.get_ydata())) == ([2.0], [20.0])
    (shares,) = roofline_shares_figure("fp32, 1 thread", [TIMINGS[0], idle]).axes
    assert [list(line.get_xdata()) for line in shares.lines[:2]] == [[10.0], [10.0]]


def test_every_axis_has_a_name_with_its_unit() -> None:
    named = ("tokens", "requests", "cache blocks", "step", "operations per byte", "1: the same")
    units = (*named, "(s)", "(ms", "tokens/s", "seconds", "(%", "MiB", "GFLOP/s")
    for figure in PICTURES.values():
        shared = [figure._supylabel.get_text()] if figure._supylabel else []  # type: ignore[attr-defined]
        labels = [label for axes in figure.axes for label in (axes.get_xlabel(), axes.get_ylabel()) if label] + shared
        assert labels
        assert all(any(unit in label for unit in units) for label in labels)


def test_the_style_of_others_is_left_alone() -> None:
    with rc_context({"font.size": 33}):
        timeline_figure(STEPS[:3])
        assert rcParams["font.size"] == 33


def test_pictures_are_saved_for_screens_and_for_print(tmp_path: Path) -> None:
    png, svg = save(PICTURES["speed_ups"], tmp_path / "a.b")
    assert (png.name, svg.name) == ("a.b.png", "a.b.svg")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in svg.read_text()


def test_a_step_shows_its_tokens_and_what_was_added() -> None:
    (axes,) = step_sizes_figure({"one": [step(0, 5.0), step(1, 6.0, prefill_tokens=0)]}).axes
    tops = {patch.get_label(): list(patch.get_data().values) for patch in axes.patches}  # type: ignore[attr-defined]
    assert tops == {"tokens": [102, 2], "padding": [107, 7]}


def test_a_timeline_without_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one step"):
        write_timeline(tmp_path / "t.png", [])
