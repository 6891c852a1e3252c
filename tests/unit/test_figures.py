"""Pictures: they show every figure, and nothing in them overlaps or is cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from cbtriton.figures import timeline_figure, write_timeline
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
