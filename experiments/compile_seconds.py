"""How long does a start take at each compile level, with nothing compiled before and with everything?

    python experiments/compile_seconds.py --levels 0 1 2 3

Each start is a process of its own. The first one of a level finds the compilers' caches empty, the second one what the
first left. A start is what comes before the first request: building the engine, warming up. Then a short workload shows
whether anything had to be compiled late.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cbtriton
from cbtriton.model_zoo import ModelSpec, demo_checkpoint, load_model
from cbtriton.workloads import Lengths, Synthetic

# Requests of the workload, which is also what the warm-up is told to expect.
_NUM_REQUESTS, _PROMPTS, _NEW_TOKENS = 16, Lengths(10, 100), Lengths(28, 28)
_MAX_BATCH_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Start:
    """One start.

    Attributes:
        seconds: Building the engine and warming up.
        compile_seconds: The compiler's part of that, kernels not included.
        graphs: Graphs compiled in the warm-up.
        late_graphs: Graphs that a step of the workload had to wait for.
    """

    seconds: float
    compile_seconds: float
    graphs: int
    late_graphs: int


def main() -> None:
    """Prints one Markdown row for each level."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=int, nargs="+", default=[0, 1], choices=range(4))
    parser.add_argument("--model", default="smollm2_135m", choices=["smollm2_135m", "tiny_random"])
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        found = measure(ModelSpec(arguments.model, dtype=arguments.dtype), arguments.levels[0])
        Path(arguments.worker).write_text(json.dumps(asdict(found)))
        return
    if arguments.model == "smollm2_135m":
        demo_checkpoint()
    print("| level | cold start (s) | of it compiling | warm start (s) | of it compiling | graphs | late |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for level in arguments.levels:
        with tempfile.TemporaryDirectory() as folder:
            cold, warm = (in_own_process(arguments, level, Path(folder)) for _ in range(2))
        starts = f"{cold.seconds:.1f} | {cold.compile_seconds:.1f} | {warm.seconds:.1f} | {warm.compile_seconds:.1f}"
        print(f"| {level} | {starts} | {cold.graphs} | {cold.late_graphs + warm.late_graphs} |", flush=True)


def in_own_process(arguments: argparse.Namespace, level: int, caches: Path) -> Start:
    """Measures one start in a new interpreter.

    Raises:
        RuntimeError: It failed; its last words are in the message.
    """
    output = caches / "start.json"
    command = [sys.executable, __file__, "--worker", str(output), "--levels", str(level)]
    command += ["--model", arguments.model, "--dtype", arguments.dtype]
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **folders})
    if done.returncode:
        raise RuntimeError(f"level {level} failed:\n{done.stderr[-3000:]}")
    return Start(**json.loads(output.read_text()))


def measure(spec: ModelSpec, level: int) -> Start:
    """One start in this process, and the workload after it."""
    model: Any = cbtriton.enable(load_model(spec).model)
    workload = Synthetic("start", _NUM_REQUESTS, _PROMPTS, _NEW_TOKENS).build(None, model.config.vocab_size)
    config = cbtriton.ContinuousBatchingConfig(
        max_requests_per_batch=_NUM_REQUESTS,
        max_batch_tokens=_MAX_BATCH_TOKENS,
        default_compile_level=level,
        # Fixed sizes are a graph for each: one query length, powers of two of rows.
        q_padding_interval_size=_MAX_BATCH_TOKENS if level == 3 else 0,
    )
    hints = cbtriton.WorkloadHints(_PROMPTS.high, _NEW_TOKENS.high, _NUM_REQUESTS)
    started = time.perf_counter()
    manager = model.init_continuous_batching(continuous_batching_config=config, workload_hints=hints)
    manager.warmup()
    seconds = time.perf_counter() - started
    after_warm_up = manager.stats()
    manager.start()
    manager.add_requests([list(prompt) for prompt in workload.prompts], max_new_tokens=_NEW_TOKENS.high)
    manager.stop()
    late = manager.stats().late_compilations
    manager.destroy()
    return Start(seconds, after_warm_up.compile_time, after_warm_up.compilations, late)


if __name__ == "__main__":
    main()
