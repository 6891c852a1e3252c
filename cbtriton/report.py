"""What a run was like: a summary for people, `result.json` for programs, `timeline.png` for a first look.

Works on finished outputs, counters and step records only; knows nothing of the engine that produced them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbtriton.request import GenerationOutput, RequestStatus
from cbtriton.stats import EngineStats, StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any kind of colour vision tell apart.
_BLUE, _ORANGE, _GREEN, _SKY, _RED, _GREY = "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#D55E00", "#999999"


@dataclass(frozen=True, slots=True)
class Percentiles:
    """The median and the 95th percentile of a set of times, in milliseconds."""

    p50_ms: float
    p95_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles | None:
        """Of times in seconds, interpolated between neighbours; None when there are none."""
        if not seconds:
            return None
        ordered = sorted(seconds)
        return cls(1000 * _quantile(ordered, 0.5), 1000 * _quantile(ordered, 0.95))


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run.

    Attributes:
        num_requests: Requests that ended, children of `num_return_sequences` included.
        num_failed: Those that ended with an error.
        prompt_tokens: Tokens of their prompts.
        output_tokens: Tokens that they generated.
        seconds: From the first request added to the last result.
        output_tokens_per_s: Generated tokens over `seconds`.
        total_tokens_per_s: Prompt and generated tokens over `seconds`.
        time_to_first_token: From a request's creation to its first token; None without timestamps.
        inter_token_latency: Between neighbouring tokens of a request, over all requests; None without timestamps.
        prefix_hit_rate: Share of the looked-up prompt tokens that the prefix cache provided, 0 to 1.
        preemptions: How often a running request lost its blocks.
        padding_waste: (padded - real) / padded over all steps, 0 to 1.
        steps: Steps that ran.
        time_split: Seconds of each stage of all steps: schedule, prepare, run, update.
        num_cancelled: Requests that were cancelled.
        num_unsent: Requests that the run ended too early for; they are not among `num_requests`.
        queue_time: From a request's planned arrival to its first step; None unless requests arrived at given times, as
            in the next two.
        offered_requests_per_s: Requests over the time in which they were planned to arrive.
        goodput_requests_per_s: Requests that met the latency targets over `seconds`.
    """

    num_requests: int
    num_failed: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    time_to_first_token: Percentiles | None
    inter_token_latency: Percentiles | None
    prefix_hit_rate: float
    preemptions: int
    padding_waste: float
    steps: int
    time_split: dict[str, float]
    num_cancelled: int = 0
    num_unsent: int = 0
    queue_time: Percentiles | None = None
    offered_requests_per_s: float | None = None
    goodput_requests_per_s: float | None = None

    def table(self) -> str:
        """The figures as aligned lines, with units."""
        times = " · ".join(f"{stage} {seconds:.2f}" for stage, seconds in self.time_split.items())
        rows = {
            "requests": f"{self.num_requests} ({self.num_failed} failed)",
            "tokens": f"{self.prompt_tokens} prompt · {self.output_tokens} output",
            "time": f"{self.seconds:.2f} s in {self.steps} steps",
            "throughput": f"{self.output_tokens_per_s:.1f} output tokens/s · {self.total_tokens_per_s:.1f} in total",
            "time to first token": _describe(self.time_to_first_token),
            "inter-token latency": _describe(self.inter_token_latency),
            "prefix-cache hits": f"{self.prefix_hit_rate:.1%} of prompt tokens",
            "preemptions": f"{self.preemptions}",
            "padding waste": f"{self.padding_waste:.1%} of tokens run",
            "stages (s)": times,
        }
        if self.num_cancelled or self.num_unsent:
            rows["ended early"] = f"{self.num_cancelled} requests cancelled · {self.num_unsent} never sent"
        if self.offered_requests_per_s is not None:
            rows["offered load"] = f"{self.offered_requests_per_s:.2f} requests/s"
        if self.goodput_requests_per_s is not None:
            rows["goodput"] = f"{self.goodput_requests_per_s:.2f} requests/s met the latency targets"
            rows["queue time"] = _describe(self.queue_time)
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def summarise(outputs: Sequence[GenerationOutput], stats: EngineStats, seconds: float) -> Summary:
    """The figures of a run that took `seconds` and ended with `outputs`.

    Raises:
        ValueError: If `seconds` is not positive.
    """
    if seconds <= 0:
        raise ValueError(f"seconds must be positive, got {seconds}")
    prompt_tokens = sum(len(output.prompt_ids) for output in outputs)
    output_tokens = sum(len(output.generated_tokens) for output in outputs)
    return Summary(
        num_requests=len(outputs),
        num_failed=sum(output.status == RequestStatus.FAILED for output in outputs),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        seconds=seconds,
        output_tokens_per_s=output_tokens / seconds,
        total_tokens_per_s=(prompt_tokens + output_tokens) / seconds,
        time_to_first_token=Percentiles.of(first_token_times(outputs)),
        inter_token_latency=Percentiles.of(inter_token_times(outputs)),
        prefix_hit_rate=stats.prefix_hit_rate,
        preemptions=stats.preemptions,
        padding_waste=stats.padding_waste,
        steps=stats.steps,
        time_split={
            "schedule": stats.schedule_time,
            "prepare": stats.prepare_time,
            "run": stats.run_time,
            "update": stats.update_time,
        },
    )


def first_token_times(outputs: Sequence[Any]) -> list[float]:
    """Seconds from creation to first token of each output that has timestamps."""
    return [output.timestamps[0] - output.created_time for output in outputs if output.timestamps]


def inter_token_times(outputs: Sequence[Any]) -> list[float]:
    """Seconds between neighbouring tokens of one request, for all outputs that have timestamps."""
    return [
        later - earlier
        for output in outputs
        for earlier, later in zip(output.timestamps or (), (output.timestamps or ())[1:], strict=False)
    ]


def environment() -> dict[str, Any]:
    """Versions, state of the source and machine: what somebody else needs to repeat a figure."""
    import torch

    packages = ("cbtriton", "torch", "triton", "transformers")
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "git": _git_state(),
        "machine": {
            "system": platform.platform(),
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def write_result_json(
    path: Path,
    *,
    summary: Summary,
    stats: EngineStats,
    outputs: Sequence[GenerationOutput],
    engine_config: Mapping[str, Any],
    asked: Mapping[str, Any],
) -> None:
    """Writes everything that is known about a run.

    Args:
        path: File to write.
        summary: The run's figures.
        stats: The engine's counters.
        outputs: The finished requests; all of their fields are written.
        engine_config: The resolved configuration with its decisions.
        asked: The configuration as the caller gave it.
    """
    result = {
        "summary": dataclasses.asdict(summary),
        "stats": dataclasses.asdict(stats),
        "engine_config": dict(engine_config),
        "asked": dict(asked),
        "environment": environment(),
        "requests": [{**dataclasses.asdict(output), "status": output.status.name} for output in outputs],
    }
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


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


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def _describe(times: Percentiles | None) -> str:
    return "not recorded" if times is None else f"p50 {times.p50_ms:.1f} ms · p95 {times.p95_ms:.1f} ms"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Commit of the source and whether files differ from it; None for an installed copy."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
