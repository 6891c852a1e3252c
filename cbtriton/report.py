"""The figures of a run, and what somebody else needs to know to repeat them.

Works on finished outputs, counters and step records only; knows nothing of the engine that produced them.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from cbtriton.request import GenerationOutput, RequestStatus
from cbtriton.stats import EngineStats, StepRecord


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
        padding_waste: (padded - real) / padded of the query tokens over all steps, 0 to 1.
        kv_padding_waste: The same of each step's longest context, 0 to 1.
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
    kv_padding_waste: float
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
            "padding waste": f"{self.padding_waste:.1%} of tokens run · {self.kv_padding_waste:.1%} of contexts",
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


@dataclass(frozen=True, slots=True)
class Repeat:
    """A workload that was run once.

    Attributes:
        summary: Its figures.
        outputs: Its finished requests, in the order of the prompts.
        steps: Its steps, in order.
    """

    summary: Summary
    outputs: tuple[GenerationOutput, ...]
    steps: tuple[StepRecord, ...]


def typical(repeats: Sequence[Repeat]) -> Repeat:
    """The repeat with the median throughput; of two in the middle the slower one.

    Raises:
        ValueError: If there is none.
    """
    if not repeats:
        raise ValueError("there must be at least one repeat, got none")
    ordered = sorted(repeats, key=lambda repeat: repeat.summary.output_tokens_per_s)
    return ordered[(len(ordered) - 1) // 2]


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
        kv_padding_waste=stats.kv_padding_waste,
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
