"""Compares this engine with transformers' own `generate_batch`, alternately, on the workloads W1 to W4.

    python experiments/benchmark.py --dtypes bf16 fp32 --repeats 3
    python experiments/benchmark.py --quick
    python experiments/benchmark.py --engines cbtriton-reference cbtriton
    python experiments/benchmark.py --engines transformers cbtriton --levels 0 1 --asynchronous off on

Every measurement runs in a process of its own, so that its resident memory is its own and no engine warms up another.
Engines take turns within a repeat, so that a slow minute of the machine hits both. Greedy, and no request ends early.
`cbtriton-reference` is this engine on the torch references of all kernels; this engine runs at every compile level and
with every setting of asynchronous steps that are asked for. `transformers-generate` is the plain `generate` of
left-padded batches. Ratios are to the first of all.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from cbtriton.model_zoo import ModelSpec, demo_checkpoint, load_model
from cbtriton.report import Percentiles, environment, first_token_times, inter_token_times
from cbtriton.workloads import Lengths, Synthetic, Workload, benchmark_workload

Engine = Literal["transformers", "transformers-generate", "cbtriton", "cbtriton-reference"]

_PAGES: dict[str, Any] = {"page_size": 32, "num_blocks": 1024}
BEST: dict[str, dict[str, dict[str, Any]]] = {
    # Found by trying page sizes, token budgets and request limits on the machine of the README's table.
    "transformers": {
        "W1": {**_PAGES, "max_batch_tokens": 1024},
        "W2": {**_PAGES, "max_batch_tokens": 256, "max_requests_per_batch": 16},
        "W3": {**_PAGES, "max_batch_tokens": 256, "max_requests_per_batch": 8},
        "W4": {**_PAGES, "max_batch_tokens": 256, "max_requests_per_batch": 4},
    },
    # A page of 256 tokens would share only the first 256 of W3's common 384.
    "cbtriton": {"W1": {}, "W2": {}, "W3": {"page_size": 32}, "W4": {}},
}


# Rows of a batch of plain `generate`.
_STATIC_BATCH = 16


@dataclass(frozen=True, slots=True)
class Variant:
    """An engine and how it runs.

    Attributes:
        engine: Which one.
        level: Compile level.
        is_async: Whether steps are asynchronous.
    """

    engine: Engine
    level: int
    is_async: bool

    def settings(self) -> dict[str, Any]:
        """Fields of the configuration; transformers' engine runs as it does by default."""
        if self.engine.startswith("transformers"):
            return {}
        return {"default_compile_level": self.level, "use_async_batching": self.is_async}


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of one engine.

    Attributes:
        variant: Which one.
        workload: Name of the workload.
        dtype: Type of the weights.
        config: `best` or `default`.
        output_tokens: Tokens generated.
        setup_seconds: From the call to the first request: building the engine, warm-up, checks.
        seconds: From the first request to the last token.
        output_tokens_per_s: `output_tokens` over `seconds`.
        time_to_first_token: Over the requests.
        inter_token_latency: Over all tokens of all requests.
        resident_mib: Highest resident memory of the process, in MiB.
    """

    variant: Variant
    workload: str
    dtype: str
    config: str
    output_tokens: int
    setup_seconds: float
    seconds: float
    output_tokens_per_s: float
    time_to_first_token: Percentiles
    inter_token_latency: Percentiles
    resident_mib: float


def main() -> None:
    """Measures what the arguments ask for, prints tables and writes a result file."""
    arguments = parse_arguments()
    if arguments.worker:
        write_measurement(json.loads(arguments.worker), Path(arguments.output))
        return
    if arguments.model == "smollm2_135m":
        demo_checkpoint()
    measurements = list(measure_all(arguments))
    print("\n" + markdown(measurements, variants(arguments)[0]))
    write_results(Path(arguments.output), arguments, measurements)
    print(f"wrote {arguments.output}")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--workloads", nargs="+", default=["W1", "W2", "W3", "W4"])
    parser.add_argument("--configs", nargs="+", default=["best"], choices=["best", "default"])
    parser.add_argument("--engines", nargs="+", default=["transformers", "cbtriton"], choices=ENGINE_RUNS)
    parser.add_argument(
        "--levels", nargs="+", type=int, default=[0], choices=range(4), help="compile levels (default: 0)"
    )
    parser.add_argument("--asynchronous", nargs="+", default=["off"], choices=["off", "on"])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each engine (default: 3)")
    parser.add_argument("--model", default="smollm2_135m", choices=["smollm2_135m", "tiny_random"])
    parser.add_argument("--quick", action="store_true", help="an eighth of each workload, for a look")
    parser.add_argument("--output", default="experiments/results/benchmark.json", help="result file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def variants(arguments: argparse.Namespace) -> list[Variant]:
    """The engines that take turns. Levels and asynchronous steps are this engine's only."""
    found = []
    for engine, level, asynchronous in itertools.product(arguments.engines, arguments.levels, arguments.asynchronous):
        variant = Variant(engine, level, asynchronous == "on")
        if engine.startswith("transformers"):
            variant = Variant(engine, 0, is_async=False)
        if variant not in found:
            found.append(variant)
    return found


def measure_all(arguments: argparse.Namespace) -> Iterator[Measurement]:
    """Runs every combination in processes of their own, engines alternating, and shows each result as it comes."""
    print(table_header())
    combinations = itertools.product(
        arguments.dtypes, arguments.configs, arguments.workloads, range(arguments.repeats), variants(arguments)
    )
    for dtype, config, workload, _, variant in combinations:
        task = {"variant": dataclasses.asdict(variant), "workload": workload, "dtype": dtype, "config": config}
        found = in_own_process({**task, "model": arguments.model, "quick": arguments.quick})
        print(table_row(found), flush=True)
        yield found


def in_own_process(task: dict[str, Any]) -> Measurement:
    """Runs one measurement in a new interpreter.

    Raises:
        RuntimeError: If it failed; its last words are in the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "measurement.json"
        command = [sys.executable, __file__, "--worker", json.dumps(task), "--output", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not output.exists():
            raise RuntimeError(f"{task} failed:\n{done.stderr[-3000:]}")
        fields = json.loads(output.read_text())
    for name in ("time_to_first_token", "inter_token_latency"):
        fields[name] = Percentiles(**fields[name])
    return Measurement(**{**fields, "variant": Variant(**fields["variant"])})


def write_measurement(task: dict[str, Any], output: Path) -> None:
    """Runs one measurement in this process and writes it to a file."""
    loaded = load_model(ModelSpec(task["model"], dtype=task["dtype"]))
    workload = shortened(benchmark_workload(task["workload"]), task["quick"]).build(
        None, loaded.model.config.vocab_size
    )
    variant = Variant(**task["variant"])
    settings = BEST[variant.engine.partition("-")[0]][task["workload"]] if task["config"] == "best" else {}
    started = time.perf_counter()
    outputs = ENGINE_RUNS[variant.engine](loaded.model, workload, settings | variant.settings())
    num_tokens = sum(len(output.generated_tokens) for output in outputs)
    if num_tokens != sum(workload.max_new_tokens):
        raise RuntimeError(f"expected {sum(workload.max_new_tokens)} tokens, got {num_tokens}")
    first, between = Percentiles.of(first_token_times(outputs)), Percentiles.of(inter_token_times(outputs))
    if first is None or between is None:
        raise RuntimeError("the engine recorded no timestamps")
    # Both engines stamp requests and tokens with the same clock.
    first_request = min(output.created_time for output in outputs)
    seconds = max(output.timestamps[-1] for output in outputs) - first_request
    measurement = Measurement(
        variant=variant,
        workload=task["workload"],
        dtype=task["dtype"],
        config=task["config"],
        output_tokens=num_tokens,
        setup_seconds=first_request - started,
        seconds=seconds,
        output_tokens_per_s=num_tokens / seconds,
        time_to_first_token=first,
        inter_token_latency=between,
        resident_mib=peak_resident_mib(),
    )
    output.write_text(json.dumps(dataclasses.asdict(measurement)))


def run_transformers(model: Any, workload: Workload, settings: dict[str, Any]) -> list[Any]:
    """The workload through transformers' own engine."""
    from transformers import ContinuousBatchingConfig

    return run_batch(model, workload, ContinuousBatchingConfig(**settings))


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """What one request got from plain `generate`, in the words of the engines.

    Attributes:
        generated_tokens: Its new tokens.
        created_time: When the whole workload was handed in.
        timestamps: When each of its new tokens was there.
    """

    generated_tokens: list[int]
    created_time: float
    timestamps: list[float]


def run_generate(model: Any, workload: Workload, settings: dict[str, Any]) -> list[Any]:
    """The workload through `generate`, in left-padded batches; each runs until its longest answer is done."""
    import torch

    started = time.perf_counter()
    outputs = []
    requests = list(zip(map(list, workload.prompts), workload.max_new_tokens, strict=True))
    for first in range(0, len(requests), _STATIC_BATCH):
        batch = requests[first : first + _STATIC_BATCH]
        longest = max(len(prompt) for prompt, _ in batch)
        times: list[float] = []
        tokens = model.generate(
            torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in batch]),
            attention_mask=torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in batch]),
            generation_config=greedy(max(limit for _, limit in batch)),
            stopping_criteria=[_Clock(times)],
        )
        answers = zip(tokens[:, longest:].tolist(), batch, strict=True)
        outputs += [BatchOutput(answer[:limit], started, times[:limit]) for answer, (_, limit) in answers]
    return outputs


class _Clock:
    """A stopping criterion that never stops, and notes the time of each step."""

    def __init__(self, times: list[float]) -> None:
        self._times = times

    def __call__(self, *_: Any, **__: Any) -> bool:
        self._times.append(time.perf_counter())
        return False


def run_cbtriton(model: Any, workload: Workload, settings: dict[str, Any]) -> list[Any]:
    """The workload through this engine."""
    import cbtriton

    return run_batch(cbtriton.enable(model), workload, cbtriton.ContinuousBatchingConfig(**settings))


def run_reference(model: Any, workload: Workload, settings: dict[str, Any]) -> list[Any]:
    """The workload through this engine, without its Triton kernels."""
    import cbtriton

    config = cbtriton.ContinuousBatchingConfig(**settings)
    return run_batch(cbtriton.enable(model), workload, config, kernel_config=cbtriton.KernelConfig(default="reference"))


ENGINE_RUNS: dict[Engine, Callable[[Any, Workload, dict[str, Any]], list[Any]]] = {
    "transformers": run_transformers,
    "transformers-generate": run_generate,
    "cbtriton": run_cbtriton,
    "cbtriton-reference": run_reference,
}


def run_batch(model: Any, workload: Workload, config: Any, **extras: Any) -> list[Any]:
    """Finished outputs of the workload; both engines are driven by the same calls.

    `generate_batch` knows one limit for all requests. Where they differ, the calls that it consists of are made here.
    """
    generation_config = greedy(max(workload.max_new_tokens))
    prompts = [list(prompt) for prompt in workload.prompts]
    if len(set(workload.max_new_tokens)) == 1:
        finished = model.generate_batch(
            prompts,
            generation_config=generation_config,
            continuous_batching_config=config,
            record_timestamps=True,
            **extras,
        )
        return list(finished.values())
    with model.continuous_batching_context_manager(
        generation_config=generation_config, continuous_batching_config=config, **extras
    ) as manager:
        for prompt, limit in zip(prompts, workload.max_new_tokens, strict=True):
            manager.add_request(prompt, max_new_tokens=limit, record_timestamps=True)
        outputs = []
        while len(outputs) < len(prompts):
            if (output := manager.get_result(timeout=1)) is not None and output.is_finished():
                outputs.append(output)
            elif output is None and not manager.is_running():
                raise RuntimeError("the engine stopped before its requests were done")
    return outputs


def greedy(max_new_tokens: int) -> Any:
    """Greedy decoding that no token ends early."""
    from transformers import GenerationConfig

    return GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max_new_tokens)


def shortened(source: Synthetic, quick: bool) -> Synthetic:
    """The workload itself, or a small relative of it with fewer requests and new tokens."""
    if not quick:
        return source
    low, high = max(2, source.new_tokens.low // 8), max(2, source.new_tokens.high // 8)
    return dataclasses.replace(
        source,
        num_requests=max(2, source.num_requests // 8),
        new_tokens=Lengths(low, high, source.new_tokens.distribution),
    )


def peak_resident_mib() -> float:
    """Highest resident memory of this process so far, in MiB."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="utf-8") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 * (1024 if sys.platform == "darwin" else 1))


def table_header() -> str:
    """The line above the rows."""
    times = f"{'first token p50/p95':>22}{'inter-token p50/p95':>22}"
    what = f"{'dtype':6}{'config':9}{'workload':10}{'engine':20}{'level':>6}{'async':>6}"
    return f"{what}{'tokens/s':>9}{times}{'set-up':>9}{'resident':>11}"


def table_row(m: Measurement) -> str:
    """One aligned line."""
    first, between = m.time_to_first_token, m.inter_token_latency
    return (
        f"{m.dtype:6}{m.config:9}{m.workload:10}{m.variant.engine:20}"
        f"{m.variant.level:6}{_on_off(m.variant.is_async):>6}{m.output_tokens_per_s:9.1f}"
        f"{f'{first.p50_ms / 1000:.2f} / {first.p95_ms / 1000:.2f} s':>22}"
        f"{f'{between.p50_ms:.0f} / {between.p95_ms:.0f} ms':>22}"
        f"{m.setup_seconds:7.1f} s{m.resident_mib / 1024:7.2f} GiB"
    )


def _on_off(is_on: bool) -> str:
    return "on" if is_on else "off"


def markdown(measurements: Sequence[Measurement], baseline_variant: Variant) -> str:
    """Medians over the repeats, one row per engine, with the ratio of throughputs to one engine's."""
    lines = [
        "| dtype | configuration | workload | engine | level | async | output tokens/s | ratio "
        "| first token p50 / p95 (s) | inter-token p50 / p95 (ms) | set-up (s) | resident (GiB) |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str, str, Variant], list[Measurement]] = {}
    for m in measurements:
        groups.setdefault((m.dtype, m.config, m.workload, m.variant), []).append(m)
    for (dtype, config, workload, variant), runs in sorted(groups.items(), key=lambda item: item[0][:3]):
        baseline = groups[dtype, config, workload, baseline_variant]
        rate = median(m.output_tokens_per_s for m in runs)
        ratio = rate / median(m.output_tokens_per_s for m in baseline)
        first = [median(getattr(m.time_to_first_token, p) for m in runs) / 1000 for p in ("p50_ms", "p95_ms")]
        between = [median(getattr(m.inter_token_latency, p) for m in runs) for p in ("p50_ms", "p95_ms")]
        setup = median(m.setup_seconds for m in runs)
        resident = max(m.resident_mib for m in runs) / 1024
        lines.append(
            f"| {dtype} | {config} | {workload} | {variant.engine} | {variant.level} "
            f"| {_on_off(variant.is_async)} | {rate:.1f} | {ratio:.2f} "
            f"| {first[0]:.2f} / {first[1]:.2f} | {between[0]:.0f} / {between[1]:.0f} | {setup:.1f} | {resident:.2f} |"
        )
    return "\n".join(lines)


def write_results(path: Path, arguments: argparse.Namespace, measurements: Sequence[Measurement]) -> None:
    """Writes every measurement, what was asked for and where it ran."""
    path.parent.mkdir(parents=True, exist_ok=True)
    asked = {name: value for name, value in vars(arguments).items() if name != "worker"}
    result = {
        "asked": asked,
        "environment": environment(),
        "best": BEST,
        "measurements": [dataclasses.asdict(measurement) for measurement in measurements],
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
