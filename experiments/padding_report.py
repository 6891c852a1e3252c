"""How much do coarser padding intervals waste, and how many variants and graphs do they save?

    python experiments/padding_report.py --workload W2 --q-intervals 1 16 64 256 --kv-intervals 256 1024 16384

Replays a workload of `cbtriton.workloads` through the scheduler, without a model, at each pair of intervals. The sizes
of the model are those of a Llama of a billion parameters in bf16.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product

from cbtriton.cache_layout import CachedLayer
from cbtriton.config import ContinuousBatchingConfig, EngineConfig, ModelFacts, WorkloadHints
from cbtriton.padding import PaddingPolicy
from cbtriton.resolve import resolve
from cbtriton.scheduler import SCHEDULERS
from cbtriton.simulator import Simulation, graph_bytes, simulate, trace_of
from cbtriton.workloads import BENCHMARK_WORKLOADS, benchmark_workload

FACTS = ModelFacts(
    vocab_size=128256,
    num_embeddings=128256,
    max_position_embeddings=131072,
    cached_layers=(CachedLayer(window=0, key_bytes=1024, value_bytes=1024),) * 16,
    num_layers=16,
    hidden_size=2048,
    intermediate_size=8192,
    device_type="cuda",
    available_memory_bytes=64 * 2**30,
)
COLUMNS = (
    "q interval",
    "kv interval",
    "steps",
    "waste",
    "kv waste",
    "varlen used",
    "varlen listed",
    "decode used",
    "decode listed",
    "graphs used",
    "graphs listed",
)


def main() -> None:
    """Prints one row for each pair of intervals as Markdown, and the buckets of the last pair if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=BENCHMARK_WORKLOADS, default="W2")
    parser.add_argument("--num-requests", type=int, help="instead of the workload's own number")
    parser.add_argument("--q-intervals", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--kv-intervals", type=int, nargs="+", default=[256, 1024, 16384])
    parser.add_argument("--page-size", type=int, default=256)
    parser.add_argument("--num-blocks", type=int, default=1024)
    parser.add_argument("--max-batch-tokens", type=int, default=2048)
    parser.add_argument("--max-requests", type=int, default=256)
    parser.add_argument("--scheduler", default="fifo")
    parser.add_argument("--buckets", action="store_true", help="also the steps of each bucket, for the last pair")
    arguments = parser.parse_args()
    source = benchmark_workload(arguments.workload)
    workload = replace(source, num_requests=arguments.num_requests or source.num_requests).build(None, FACTS.vocab_size)
    trace = trace_of(workload.prompts, workload.max_new_tokens)
    hints = WorkloadHints(max(map(len, workload.prompts)), max(workload.max_new_tokens), len(trace))
    print(f"| {' | '.join(COLUMNS)} |\n|{'---:|' * len(COLUMNS)}")
    result = None
    for q_interval, kv_interval in product(arguments.q_intervals, arguments.kv_intervals):
        config = configuration(arguments, hints, q_interval, kv_interval)
        result = simulate(config, trace)
        print(table_row(config, hints, result), flush=True)
    if arguments.buckets and result is not None:
        print(f"\n{result.table()}")


def configuration(
    arguments: argparse.Namespace, hints: WorkloadHints, q_interval: int, kv_interval: int
) -> EngineConfig:
    """An engine whose steps are all padded to these intervals."""
    asked = ContinuousBatchingConfig(
        page_size=arguments.page_size,
        num_blocks=arguments.num_blocks,
        max_batch_tokens=arguments.max_batch_tokens,
        max_requests_per_batch=arguments.max_requests,
        scheduler_type=arguments.scheduler,
        seed=0,
    )
    margins = SCHEDULERS.default_margins()
    config = resolve(asked, hints, FACTS, has_logits_processing=False, scheduler_types=margins)
    # An interval of 1 would otherwise mean exact sizes.
    return replace(config, padded_paths=("varlen", "decode"), q_interval=q_interval, kv_interval=kv_interval)


def table_row(config: EngineConfig, hints: WorkloadHints, result: Simulation) -> str:
    """Intervals, waste, and how many variants there are: those in use, and those that a warm-up would prepare."""
    padding = PaddingPolicy.of(config)
    listed = {path: padding.buckets(path, hints) for path in padding.padded_paths}
    used_bytes = result.graph_bytes(FACTS)
    listed_bytes = graph_bytes([*listed["varlen"], *listed["decode"]], FACTS)
    cells = [
        f"{config.q_interval}",
        f"{config.kv_interval}",
        f"{len(result.steps)}",
        f"{result.padding_waste:.1%}",
        f"{result.kv_padding_waste:.1%}",
        *(f"{number}" for path in ("varlen", "decode") for number in (result.num_variants(path), len(listed[path]))),
        f"{used_bytes / 2**20:.0f} MiB",
        f"{listed_bytes / 2**20:.0f} MiB",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
