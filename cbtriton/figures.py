"""Pictures of runs, all in one style: what a step held, what was wasted, what was gained.

Every function takes plain numbers and returns a picture; `save` writes it for screens and for print.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from cbtriton.stats import StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any kind of colour vision tell apart.
BLUE, ORANGE, GREEN, SKY, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#D55E00", "#999999"
# For `matplotlib.style.use` and `rc_context`, so that drawings of a notebook look like those of this module.
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "cbtriton",
}
_MOST_BARS = 40
_MOST_OPERATORS = 20

_P = ParamSpec("_P")


def styled(draw: Callable[_P, Figure]) -> Callable[_P, Figure]:
    """Draws in the style of this module, and leaves the caller's as it is."""

    @wraps(draw)
    def styled(*args: _P.args, **kwargs: _P.kwargs) -> Figure:
        from matplotlib import rc_context

        with rc_context(STYLE):
            return draw(*args, **kwargs)

    return styled


def save(figure: Figure, stem: Path) -> list[Path]:
    """Writes `stem.png` for screens and `stem.svg` for print, and returns both paths."""
    paths = [stem.with_name(f"{stem.name}.{ending}") for ending in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=160)
    return paths


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


@styled
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
            "decode": ([s.decode_tokens for s in steps], ORANGE),
            "prefill": ([s.prefill_tokens for s in steps], BLUE),
            "padding": ([s.padding_tokens for s in steps], GREY),
        },
    )
    # A prefill step holds a hundred times the tokens of a decode step: on a linear axis the latter would vanish.
    tokens.set_yscale("function", functions=(np.sqrt, np.square))
    tokens.set(ylabel="tokens in the step\n(square-root scale)")
    _stack(
        requests,
        edges,
        {
            "in the step": ([s.num_rows for s in steps], ORANGE),
            "waiting": ([s.num_waiting for s in steps], SKY),
        },
    )
    requests.set(ylabel="requests")
    _mark_preemptions(requests, edges, steps)
    _stack(
        cache,
        edges,
        {
            "in use": ([s.blocks_in_use for s in steps], GREEN),
            "cached prefixes": ([s.blocks_cached for s in steps], SKY),
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
        axes.plot(hits, tops, linestyle="none", marker="v", color=RED, label="preemption", clip_on=False)


def _finish(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.grid(axis="y", alpha=0.3)
    _legend_beside(axes)


def _legend_beside(axes: Axes) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)


@styled
def padding_waste_figure(
    q_intervals: Sequence[str],
    kv_intervals: Sequence[str],
    waste: Mapping[str, Sequence[Sequence[float | None]]],
) -> Figure:
    """A heat map for each kind of waste.

    Args:
        q_intervals: Query intervals, one for each row.
        kv_intervals: KV intervals, one for each column.
        waste: For each kind (its title) rows of shares, 0 to 1; None where no run has that pair.
    """
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(2.2 + len(waste) * (1.2 + 0.9 * len(kv_intervals)), 1.6 + 0.6 * len(q_intervals)), layout="constrained"
    )
    panels = figure.subplots(1, len(waste), sharey=True, squeeze=False)[0]
    image = None
    for axes, (title, rows) in zip(panels, waste.items(), strict=True):
        shares = np.array([[np.nan if cell is None else 100 * cell for cell in row] for row in rows])
        image = axes.imshow(shares, cmap="cividis_r", vmin=0, vmax=100, aspect="auto")
        for (row, column), share in np.ndenumerate(shares):
            text = "–" if np.isnan(share) else f"{share:.0f}"
            axes.text(column, row, text, ha="center", va="center", color="white" if share > 55 else "black")
        axes.set(title=title, xlabel="KV interval (tokens)")
        axes.set_xticks(range(len(kv_intervals)), kv_intervals)
        axes.set_yticks(range(len(q_intervals)), q_intervals)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    panels[0].set_ylabel("query interval (tokens)")
    if image is not None:
        figure.colorbar(image, ax=list(panels), label="padding in what was run (%)")
    return figure


@styled
def step_sizes_figure(traces: Mapping[str, Sequence[StepRecord]]) -> Figure:
    """Tokens of each step with what was added to them, one panel for each run on a common scale.

    Args:
        traces: The steps of each run, by the panel's title.
    """
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 1.5 * len(traces)), layout="constrained")
    panels = figure.subplots(len(traces), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    top = 1
    for axes, (title, steps) in zip(panels, traces.items(), strict=True):
        edges = [float(number) for number in range(len(steps) + 1)]
        real = [step.prefill_tokens + step.decode_tokens for step in steps]
        _stack(axes, edges, {"tokens": (real, BLUE), "padding": ([s.padding_tokens for s in steps], GREY)})
        top = max([top, *(step.padding_tokens + tokens for step, tokens in zip(steps, real, strict=True))])
        axes.set_title(title, loc="left")
        axes.grid(axis="y", alpha=0.3)
    # As in the timeline: on a linear axis decode steps would vanish beside prefill steps.
    panels[0].set_yscale("function", functions=(np.sqrt, np.square))
    panels[0].set_ylim(0, 1.08 * top)
    panels[0].set_yticks(_square_ticks(top))
    _legend_beside(panels[0])
    panels[-1].set_xlabel("step")
    panels[-1].set_xlim(0, max(map(len, traces.values())))
    figure.supylabel("tokens in the step (square-root scale)", fontsize=10)
    return figure


def _square_ticks(top: int) -> list[int]:
    """Round numbers that stand about evenly on a square-root scale, 0 and at most 3 more."""
    ticks = [0]
    for share in (0.1, 0.4, 0.95):
        unit = 10 ** max(len(str(int(share * top))) - 1, 0)
        ticks.append(int(share * top) // unit * unit)
    return sorted(set(ticks))


@dataclass(frozen=True, slots=True)
class Point:
    """A run among others.

    Attributes:
        label: Its name.
        rate: Output tokens per second.
        latency_ms: 95th percentile of the inter-token latency, in milliseconds.
        is_front: Whether no other run beats it in both.
    """

    label: str
    rate: float
    latency_ms: float
    is_front: bool


@styled
def throughput_latency_figure(points: Sequence[Point]) -> Figure:
    """All runs, with those that no other beats in both joined and named."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    front = sorted((point for point in points if point.is_front), key=lambda point: point.rate)
    others = [point for point in points if not point.is_front]
    axes.plot([p.rate for p in others], [p.latency_ms for p in others], "o", color=GREY, label="other runs")
    axes.plot(
        [p.rate for p in front],
        [p.latency_ms for p in front],
        "o-",
        color=RED,
        label="Pareto front",
        drawstyle="steps-pre",
    )
    axes.set(xlabel="output tokens/s (more is better)", ylabel="p95 inter-token latency (ms; less is better)")
    axes.margins(0.12)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    _legend_beside(axes)
    _name_points(axes, front)
    return figure


def _name_points(axes: Axes, points: Sequence[Point]) -> None:
    """Names points beside their marks. Where two are too near, the second goes without: tables have them all."""
    taken: list[tuple[float, float]] = []
    for point in points:
        x, y = axes.transData.transform((point.rate, point.latency_ms))
        width = 7 * len(point.label) + 12
        if all(abs(x - other_x) > width or abs(y - other_y) > 16 for other_x, other_y in taken):
            taken.append((x, y))
            axes.annotate(point.label, (point.rate, point.latency_ms), (5, -3), textcoords="offset points", va="top")


@styled
def preparation_figure(seconds: Mapping[str, Mapping[str, float]]) -> Figure:
    """Seconds of compiling and capturing for each bucket, the longest first and at most 40 of them.

    Args:
        seconds: By bucket, then by kind (`compile`, `capture`).
    """
    shown = sorted(seconds.items(), key=lambda item: -sum(item[1].values()))[:_MOST_BARS]
    figure, axes = _bars([bucket for bucket, _ in shown])
    left = [0.0] * len(shown)
    for kind, colour in (("compile", BLUE), ("capture", ORANGE)):
        widths = [kinds.get(kind, 0.0) for _, kinds in shown]
        if any(widths):
            axes.barh(range(len(shown)), widths, left=left, color=colour, label=kind)
            left = [low + width for low, width in zip(left, widths, strict=True)]
    total = sum(sum(kinds.values()) for kinds in seconds.values())
    rest = f", the {len(shown)} longest" if len(seconds) > len(shown) else ""
    axes.set(xlabel="seconds", title=f"{len(seconds)} buckets{rest}; {total:.1f} s in all")
    _legend_beside(axes)
    return figure


@styled
def speed_ups_figure(speed_ups: Mapping[str, Sequence[float]]) -> Figure:
    """Throughput with each kernel beside its slot's reference: the mean as a bar, each pair of runs as a dot.

    Args:
        speed_ups: Ratios by kernel, above 1 where it is faster.
    """
    figure, axes = _bars(list(speed_ups))
    for place, ratios in enumerate(speed_ups.values()):
        mean = sum(ratios) / len(ratios)
        axes.barh(place, mean, color=SKY)
        axes.plot(ratios, [place] * len(ratios), "o", color=BLUE, markersize=4)
        axes.text(1.01, place, f"mean ×{mean:.2f}", va="center", transform=axes.get_yaxis_transform())
    axes.axvline(1, color=GREY, linewidth=1)
    axes.set(xlabel="throughput beside the reference (1: the same)")
    return figure


def _bars(labels: Sequence[str]) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 0.3 * len(labels)), layout="constrained")
    axes = figure.subplots()
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.3)
    return figure, axes


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Memory at one moment of a run.

    Attributes:
        seconds: Since the first sample.
        steps: Steps that the engine has run.
        resident_bytes: Memory of the process that is in RAM.
        device_bytes: The most that tensors took on the GPU since the sample before; 0 without one.
        cache_bytes: Blocks of the KV cache that requests hold.
    """

    seconds: float
    steps: int
    resident_bytes: int
    device_bytes: int
    cache_bytes: int


@styled
def memory_figure(samples: Sequence[MemorySample]) -> Figure:
    """Memory over time: all of it, and below how it changed since the first sample."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    whole, change = figure.subplots(2, 1, sharex=True)
    seconds = [sample.seconds for sample in samples]
    lines = {
        "process, resident": ([s.resident_bytes for s in samples], BLUE),
        "GPU, tensors at most": ([s.device_bytes for s in samples], RED),
        "cache that requests hold": ([s.cache_bytes for s in samples], GREEN),
    }
    for label, (values, colour) in lines.items():
        if any(values):
            whole.plot(seconds, [value / 2**20 for value in values], color=colour, label=label)
            change.plot(seconds, [(value - values[0]) / 2**20 for value in values], color=colour)
    whole.set(ylabel="MiB", ylim=(0, None), title=f"{samples[-1].steps - samples[0].steps} steps")
    change.set(ylabel="change (MiB)", xlabel="time since the trace began (s)")
    for axes in (whole, change):
        axes.grid(axis="y", alpha=0.3)
    _legend_beside(whole)
    return figure


@styled
def operators_figure(self_ms: Mapping[str, float]) -> Figure:
    """Time in each operator and kernel, the longest first and at most 20 of them.

    Args:
        self_ms: Milliseconds by name, the longest first.
    """
    total = sum(self_ms.values()) or 1.0
    shown = list(self_ms.items())[:_MOST_OPERATORS]
    figure, axes = _bars([name if len(name) <= 48 else f"{name[:47]}…" for name, _ in shown])
    axes.barh(range(len(shown)), [value for _, value in shown], color=BLUE)
    for place, (_, value) in enumerate(shown):
        axes.text(1.01, place, f"{value / total:.0%}", va="center", transform=axes.get_yaxis_transform())
    rest = f", the {len(shown)} longest" if len(self_ms) > len(shown) else ""
    axes.set(xlabel="self time (ms)", title=f"{len(self_ms)} operators and kernels{rest}; {total:.1f} ms in all")
    return figure


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """How one implementation did on one case.

    Attributes:
        case: What was computed.
        who: What computed it.
        time_us: Time of a call, in microseconds.
        floor_us: The least that moving its bytes, or doing its operations, takes.
        gflop_per_s: Operations that must be done over the time; 0 where there are none.
        flop_per_byte: These operations over the bytes that must move.
    """

    case: str
    who: str
    time_us: float
    floor_us: float
    gflop_per_s: float
    flop_per_byte: float


@styled
def roofline_figure(title: str, timings: Sequence[KernelTiming], gb_per_s: float, gflop_per_s: float) -> Figure:
    """Operations per second over operations per byte, under what memory and arithmetic allow.

    Args:
        title: What was measured.
        timings: Those without operations are left out.
        gb_per_s: Of a large copy.
        gflop_per_s: Of a large matrix product.
    """
    from matplotlib.figure import Figure

    shown = [timing for timing in timings if timing.gflop_per_s > 0]
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    ridge = gflop_per_s / gb_per_s
    low = min(0.5 * ridge, *(timing.flop_per_byte for timing in shown)) / 2
    high = max(2 * ridge, *(timing.flop_per_byte for timing in shown)) * 2
    roof = f"copy {gb_per_s:.3g} GB/s, matrix product {gflop_per_s:.3g} GFLOP/s"
    axes.plot([low, ridge, high], [low * gb_per_s, gflop_per_s, gflop_per_s], color=GREY, label=roof)
    for who, (colour, marker) in _marks(shown).items():
        own = [timing for timing in shown if timing.who == who]
        x, y = [t.flop_per_byte for t in own], [t.gflop_per_s for t in own]
        axes.plot(x, y, marker, color=colour, label=who, linestyle="none")
    axes.set(xscale="log", yscale="log", xlabel="operations per byte that must move", ylabel="GFLOP/s", title=title)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    axes.grid(alpha=0.3)
    _legend_beside(axes)
    return figure


@styled
def roofline_shares_figure(title: str, timings: Sequence[KernelTiming]) -> Figure:
    """For each case which share of the speed that the machine allows was reached, and by whom.

    Args:
        title: What was measured.
        timings: In the order of the rows.
    """
    cases = list(dict.fromkeys(timing.case for timing in timings))
    figure, axes = _bars(cases)
    for who, (colour, marker) in _marks(timings).items():
        own = [timing for timing in timings if timing.who == who]
        shares = [100 * timing.floor_us / timing.time_us for timing in own]
        places = [cases.index(timing.case) for timing in own]
        axes.plot(shares, places, marker, color=colour, label=who, linestyle="none")
    axes.axvline(100, color=GREY, linewidth=1)
    axes.set(xscale="log", xlabel="share of the roofline (%; log scale)", title=title)
    axes.xaxis.set_major_formatter("{x:g}")
    figure.set_figwidth(11)
    _legend_beside(axes)
    return figure


def _marks(timings: Sequence[KernelTiming]) -> dict[str, tuple[str, str]]:
    """A colour and a marker for each implementation, in the order of their names."""
    names = sorted({timing.who for timing in timings})
    colours, markers = (BLUE, ORANGE, GREEN, RED, SKY, GREY), "osD^vPX"
    # Six colours and seven markers: pairs come again after 42 names.
    return {name: (colours[i % len(colours)], markers[i % len(markers)]) for i, name in enumerate(names)}
