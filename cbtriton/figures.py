"""Pictures of runs, all in one style: what a step held, what was wasted, what was gained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cbtriton.stats import StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any kind of colour vision tell apart.
_BLUE, _ORANGE, _GREEN, _SKY, _RED, _GREY = "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#D55E00", "#999999"


def write_timeline(path: Path, steps: Sequence[StepRecord]) -> None:
    """Draws what each step held over time: tokens by kind, requests, and blocks of the cache.

    Args:
        path: Picture to write; its ending chooses the format.
        steps: Records of consecutive steps.

    Raises:
        ValueError: If there is no step.
    """
    if not steps:
        raise ValueError("a timeline needs at least one step, got none")
    timeline_figure(steps).savefig(path, dpi=120)


def timeline_figure(steps: Sequence[StepRecord]) -> Figure:
    """The figure that `write_timeline` saves."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    tokens, requests, cache = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
    edges = _step_edges(steps)
    _stack(
        tokens,
        edges,
        {
            "decode": ([s.decode_tokens for s in steps], _ORANGE),
            "prefill": ([s.prefill_tokens for s in steps], _BLUE),
            "padding": ([s.padding_tokens for s in steps], _GREY),
        },
    )
    # A prefill step holds a hundred times the tokens of a decode step: on a linear axis the latter would vanish.
    tokens.set_yscale("function", functions=(np.sqrt, np.square))
    tokens.set(ylabel="tokens in the step\n(square-root scale)")
    _stack(
        requests,
        edges,
        {
            "in the step": ([s.num_rows for s in steps], _ORANGE),
            "waiting": ([s.num_waiting for s in steps], _SKY),
        },
    )
    requests.set(ylabel="requests")
    _mark_preemptions(requests, edges, steps)
    _stack(
        cache,
        edges,
        {
            "in use": ([s.blocks_in_use for s in steps], _GREEN),
            "cached prefixes": ([s.blocks_cached for s in steps], _SKY),
        },
    )
    cache.set(ylabel="cache blocks", xlabel="time since the first step (s)", xlim=(0, edges[-1]))
    figure.suptitle(f"{len(steps)} {'step' if len(steps) == 1 else 'steps'} in {edges[-1]:.2f} s")
    for axes in (tokens, requests, cache):
        _finish(axes)
    return figure


def _step_edges(steps: Sequence[StepRecord]) -> list[float]:
    """Where steps begin, in seconds since the first one, and where the last one ends."""
    last = steps[-1]
    duration = last.schedule_time + last.prepare_time + last.run_time + last.update_time
    starts = [step.start_time - steps[0].start_time for step in steps]
    return [*starts, starts[-1] + max(duration, 1e-6)]


def _stack(axes: Axes, edges: Sequence[float], layers: Mapping[str, tuple[Sequence[int], str]]) -> None:
    """Draws layers of steps on top of one another; a layer without any content only shows in the legend."""
    baseline: list[int] = [0] * (len(edges) - 1)
    for label, (values, colour) in layers.items():
        top = [low + value for low, value in zip(baseline, values, strict=True)]
        axes.stairs(top, edges, baseline=baseline, fill=True, color=colour, label=label, linewidth=0)
        baseline = top
    axes.set_ylim(0, 1.08 * max(1, *baseline))


def _mark_preemptions(axes: Axes, edges: Sequence[float], steps: Sequence[StepRecord]) -> None:
    hits = [edge for edge, step in zip(edges, steps, strict=False) if step.num_preempted]
    if hits:
        tops = [step.num_rows + step.num_waiting for step in steps if step.num_preempted]
        axes.plot(hits, tops, linestyle="none", marker="v", color=_RED, label="preemption", clip_on=False)


def _finish(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, borderaxespad=0)
