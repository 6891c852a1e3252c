"""What a decode step costs on the host, beside the model: schedule, prepare and update, in ms.

    python experiments/host_time.py --running 64 128 256 512

Uses the tiny random model, which costs next to nothing itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import mean, median

import cbtriton
from cbtriton.model_zoo import ModelSpec, load_model
from cbtriton.stats import StepRecord
from cbtriton.workloads import Lengths, Synthetic


def main() -> None:
    """Prints one row for each number of running requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    print(f"{'running':>7} {'steps':>6} {'schedule':>9} {'prepare':>9} {'update':>9} {'host':>9} {'median':>9}")
    for num_running in arguments.running:
        print(table_row(num_running, decode_steps(num_running, arguments.new_tokens)), flush=True)


def decode_steps(num_running: int, new_tokens: int) -> list[StepRecord]:
    """Records of the steps in which all requests decoded."""
    model = cbtriton.enable(load_model(ModelSpec("tiny_random", device="cpu")).model)
    workload = Synthetic("decode", num_running, Lengths(8, 24), Lengths(new_tokens, new_tokens)).build(None, 128)
    config = cbtriton.ContinuousBatchingConfig(page_size=16, num_blocks=num_running * (2 + new_tokens // 16 + 1))
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        for prompt in workload.prompts:
            manager.add_request(list(prompt), max_new_tokens=new_tokens, eos_token_id=-1)
        manager.stop()
        steps = manager.step_records()
    return [step for step in steps if step.path == "decode" and step.num_rows == num_running]


def table_row(num_running: int, steps: Sequence[StepRecord]) -> str:
    """Means of each stage, and mean and median of their sum, over the steps."""
    if not steps:
        raise RuntimeError(f"no step decoded {num_running} requests at once; ask for more new tokens")
    host = [1000 * (step.schedule_time + step.prepare_time + step.update_time) for step in steps]
    stages = [
        1000 * mean(getattr(step, f"{stage}_time") for step in steps) for stage in ("schedule", "prepare", "update")
    ]
    figures = [*stages, mean(host), median(host)]
    return f"{num_running:7} {len(steps):6} " + " ".join(f"{figure:9.3f}" for figure in figures)


if __name__ == "__main__":
    main()
