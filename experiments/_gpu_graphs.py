"""The part of `gpu_check.py` on whole steps: captured ones, asynchronous ones, and every compile level."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from _gpu_engines import random_llama, release_memory
from _gpu_report import Report, Row

import cbtriton
from cbtriton.config import ModelFacts, WorkloadHints
from cbtriton.graphs import CapturedStep, Capturer, CudaCapturer, Step
from cbtriton.manager import ContinuousBatchingManager
from cbtriton.padding import PaddingPolicy
from cbtriton.simulator import graph_bytes

# A step of so many requests may take this many times what the device needs for it.
OVERLAP_REQUESTS, OVERLAP_LIMIT = 64, 1.05
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95}


class TimedCapturer(CudaCapturer):
    """Notes how long the device takes for each replay."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def capture(self, step: Step) -> CapturedStep:
        captured = super().capture(step)

        def replay() -> None:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            captured.replay()
            end.record()
            self._events.append((start, end))

        return CapturedStep(replay, captured.outputs)

    def take_times(self) -> list[float]:
        """Microseconds of each replay since the last call."""
        torch.cuda.synchronize()
        events, self._events = self._events, []
        return [1000 * start.elapsed_time(end) for start, end in events]


class StandInCapturer:
    """Stands in for a device in a dry run: a replay runs the step again."""

    num_bytes = 0

    def __init__(self) -> None:
        self._num_replays = 0

    def capture(self, step: Step) -> CapturedStep:
        """See `Capturer.capture`."""
        outputs = step()

        def replay() -> None:
            self._num_replays += 1
            for held, new in zip(outputs, step(), strict=True):
                held.copy_(new)

        return CapturedStep(replay, outputs)

    def release(self) -> None:
        """See `Capturer.release`."""

    def take_times(self) -> list[float]:
        """As if each replay took a microsecond."""
        count, self._num_replays = self._num_replays, 0
        return [1.0] * count


def check_graphs(task: dict[str, Any], report: Report) -> None:
    """A worker's run of the checks that it was given."""
    for name in task["checks"]:
        report.write(doing=[name, "cbtriton"])
        for row in CHECKS[name](name, task["is_dry"]):
            report.row(row)
        release_memory()


@contextmanager
def running(
    model: Any, capturer: Capturer | None, hints: WorkloadHints, sampling: dict[str, Any], **config: Any
) -> Iterator[ContinuousBatchingManager]:
    """A warm manager at work."""
    from transformers import GenerationConfig

    options = GenerationConfig(eos_token_id=-1, pad_token_id=0, **({"do_sample": False} | sampling))
    config = {"page_size": 16, "num_blocks": 2048, "seed": 0, **config}
    with mock.patch("cbtriton.manager.capturer_for", return_value=capturer):
        manager = ContinuousBatchingManager(model, options, cbtriton.ContinuousBatchingConfig(**config), hints)
    try:
        manager.warmup()
        manager.start()
        yield manager
    finally:
        manager.destroy()
        gc.collect()


def answers(manager: ContinuousBatchingManager, prompts: Sequence[list[int]], num_new: int) -> list[list[int]]:
    """What the prompts are answered, all of them added at once."""
    found = []
    for request_id in manager.add_requests(prompts, max_new_tokens=num_new):
        output = manager.get_result(request_id, timeout=120)
        if output is None or output.error:
            raise RuntimeError(f"{request_id}: {'no result' if output is None else output.error}")
        found.append(output.generated_tokens)
    return found


def make_capturer(is_dry: bool) -> TimedCapturer | StandInCapturer:
    """What captures here."""
    return StandInCapturer() if is_dry else TimedCapturer(torch.device("cuda"))


def exact_llama(is_dry: bool) -> Any:
    """A Llama in fp32, where rounding decides next to nothing: of 60 million parameters, or a tiny one."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "num_hidden_layers": 6,
        "intermediate_size": 1536,
        "vocab_size": 32_000,
    }
    if is_dry:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 128}
    sizes |= {"num_attention_heads": 4 if is_dry else 8, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    torch.manual_seed(0)
    # Large enough that greedy answers do not end in loops.
    config = LlamaConfig(**sizes, initializer_range=0.1)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = model.to("cpu" if is_dry else "cuda").eval().requires_grad_(False)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def random_prompts(model: Any, lengths: Sequence[int]) -> list[list[int]]:
    """Prompts of these lengths."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, model.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]


# --------------------------------------------------------------------------------------------------------- checks


def check_tokens(case: str, is_dry: bool) -> Iterator[Row]:
    """Captured steps give the tokens of the same steps run as they are: prepared and not, in turn and asynchronous."""
    model = exact_llama(is_dry)
    prompts = random_prompts(model, range(1, 12) if is_dry else range(1, 200, 12))
    hints = WorkloadHints(200, 32, len(prompts))
    sizes = {"max_batch_tokens": 128, "q_padding_interval_size": 64}
    for name, sampling in (("greedy", {}), ("sampled", SAMPLED)):
        with running(model, None, hints, sampling, **sizes) as manager:
            expected = answers(manager, prompts, 4 if is_dry else 32)
        for is_async in (False, True):
            capturer = make_capturer(is_dry)
            with running(model, capturer, hints, sampling, **sizes, use_async_batching=is_async) as manager:
                prepared = manager.stats().captures
                found = answers(manager, prompts, 4 if is_dry else 32)
                stats = manager.stats()
            num_wrong = sum(a != b for a, b in zip(found, expected, strict=True))
            is_fine = num_wrong == stats.capture_failures == 0 and stats.replays == stats.steps
            note = (
                f"{num_wrong} of {len(prompts)} answers differ; {stats.replays} of {stats.steps} steps replayed; "
                f"{prepared} graphs prepared, {stats.captures - prepared} later, {stats.capture_failures} failed; "
                f"{1000 * stats.capture_time / max(1, stats.captures):.0f} ms a graph"
            )
            who = f"{name}, {'asynchronous' if is_async else 'in turn'}"
            yield Row("graphs", case, who, "ok" if is_fine else "failed", note=note)


def check_steps(case: str, is_dry: bool) -> Iterator[Row]:
    """Time of decode steps on the device and on the clock, for several numbers of requests; memory of the graphs."""
    model = random_llama(torch.device("cpu" if is_dry else "cuda"), is_dry)
    numbers = (1, 2) if is_dry else (1, 8, OVERLAP_REQUESTS)
    length, num_new = (4, 4) if is_dry else (128, 96)
    hints = WorkloadHints(length, num_new, max(numbers))
    capturer = make_capturer(is_dry)
    # Few buckets of prompts, which are not what this is about.
    sizes = {"max_batch_tokens": 2048, "q_padding_interval_size": 1024}
    with running(model, capturer, hints, {}, **sizes, use_async_batching=True) as manager:
        for number in numbers:
            capturer.take_times()
            first = manager.stats().steps
            answers(manager, random_prompts(model, [length] * number), num_new)
            times = capturer.take_times()
            yield step_row(case, number, manager, first, times, is_dry)
        yield memory_row(model, manager, hints)


def memory_row(model: Any, manager: ContinuousBatchingManager, hints: WorkloadHints) -> Row:
    """What the graphs of a warm-up hold, beside what the simulator says."""
    stats, config = manager.stats(), model.config
    padding = PaddingPolicy.of(manager.engine_config)
    listed = [bucket for path in padding.padded_paths for bucket in padding.buckets(path, hints)]
    facts = ModelFacts(
        vocab_size=config.vocab_size,
        num_embeddings=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        cached_layers=(),
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        device_type=model.device.type,
        available_memory_bytes=0,
        logits_dtype_bytes=model.dtype.itemsize,
    )
    note = (
        f"{stats.captures} graphs hold {stats.graph_bytes / 2**20:.0f} MiB, the simulator says "
        f"{graph_bytes(listed, facts) / 2**20:.0f} MiB for {2 * len(listed)}; {stats.capture_time:.1f} s to capture"
    )
    return Row("graphs", "memory", "cbtriton", "ok", note=note)


def step_row(
    case: str, number: int, manager: ContinuousBatchingManager, first: int, times: list[float], is_dry: bool
) -> Row:
    """The median decode step of all requests: on the device, and from one step's beginning to the next one's."""
    records = manager.step_records()[first:]
    steps = [(a, b) for a, b in pairwise(records) if a.path == b.path == "decode"]
    spans = [1e6 * (b.start_time - a.start_time) for a, b in steps if a.num_rows == b.num_rows == number]
    # One replay for each step; those of the prompts are among the first.
    device = statistics.median(times[-len(spans) :])
    ratio = statistics.median(spans) / device
    is_slow = number == OVERLAP_REQUESTS and ratio > OVERLAP_LIMIT and not is_dry
    note = f"a step begins every {statistics.median(spans):.0f} µs: {ratio:.3f} × the device's time"
    status = "failed" if is_slow else "ok"
    return Row("graphs", f"{case}, {number} requests", "cbtriton", status, time_us=device, note=note)


def check_level(case: str, is_dry: bool) -> Iterator[Row]:
    """A compile level gives the tokens of level 0, and compiles nothing while requests wait."""
    model = exact_llama(is_dry)
    level = int(case.removeprefix("level "))
    prompts = random_prompts(model, (1, 3, 9) if is_dry else (1, 5, 16, 33, 60))
    hints = WorkloadHints(60, 16, len(prompts))
    # So few sizes that all of them compile in time.
    sizes = {"max_batch_tokens": 64, "max_requests_per_batch": 2}
    how: dict[str, Any] = {"default_compile_level": level}
    if is_dry:
        settings = {"backend": "aot_eager", "fullgraph": True, "dynamic": level < 3}
        how = {"varlen_compile_config": settings, "decode_compile_config": settings}
    with running(model, None, hints, {}, **sizes) as manager:
        expected = answers(manager, prompts, 16)
    with running(model, make_capturer(is_dry), hints, {}, **sizes, **how) as manager:
        found = answers(manager, prompts, 16)
        stats = manager.stats()
    num_wrong = sum(a != b for a, b in zip(found, expected, strict=True))
    # Other kernels round otherwise: one answer may differ where two tokens are equally likely.
    is_fine = num_wrong <= 1 and stats.late_compilations == stats.capture_failures == 0
    note = (
        f"{num_wrong} of {len(prompts)} answers differ; {stats.compilations} graphs compiled in "
        f"{stats.compile_time:.0f} s, {stats.late_compilations} late; {stats.replays} of {stats.steps} steps replayed"
    )
    yield Row("graphs", case, "cbtriton", "ok" if is_fine else "failed", note=note)


# In the order in which they are run while there is time.
CHECKS = {
    "captured tokens": check_tokens,
    "decode steps": check_steps,
    "level 1": check_level,
    "level 3": check_level,
    "level 2": check_level,
}
DRY_CHECKS = ("captured tokens", "decode steps", "level 1")
