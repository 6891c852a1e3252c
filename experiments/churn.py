"""Many requests of random sizes through one pool of blocks, with cancels: speed and memory of each quarter of the run.

A model with five layers that see 32 tokens and one that sees everything. The engine is stepped directly, and its blocks
are counted after every step.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GenerationConfig

import cbtriton
from cbtriton.manager import ContinuousBatchingManager
from cbtriton.request import Request, SamplingParams, StopRules

QUARTERS = 4


def build() -> torch.nn.Module:
    """A tiny model with layers of two kinds."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=128,
        intermediate_size=128,
        max_position_embeddings=2048,
        num_hidden_layers=6,
        sliding_window=32,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    )
    return AutoModelForCausalLM.from_config(config).eval()


def main() -> None:
    """Prints a line for each quarter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", type=int, default=2000)
    arguments = parser.parse_args()
    rng = random.Random(0)
    config = cbtriton.ContinuousBatchingConfig(page_size=4, num_blocks=400, max_batch_tokens=64, seed=0)
    options = GenerationConfig(do_sample=False, eos_token_id=-1)
    manager = ContinuousBatchingManager(build(), options, config)
    manager.warmup()
    engine = manager._engine
    assert engine is not None

    def step() -> None:
        engine.step()
        stats = engine.stats()
        assert stats.blocks_free + stats.blocks_cached + stats.blocks_in_use == stats.blocks_total

    print("| quarter | tokens/s | preemptions | resident, MiB |\n|---|---:|---:|---:|")
    for quarter in range(QUARTERS):
        before, start = engine.stats(), time.perf_counter()
        for index in range(arguments.num_requests // QUARTERS):
            prompt = [rng.randrange(1, 128) for _ in range(rng.randint(1, 60))]
            engine.add(Request(f"{quarter}:{index}", prompt, SamplingParams(), StopRules(rng.randint(1, 20))))
            if rng.random() < 0.1:
                engine.cancel(f"{quarter}:{rng.randint(0, index)}")
            while engine.num_waiting > 8:
                step()
        while engine.has_requests:
            step()
        seconds, after = time.perf_counter() - start, engine.stats()
        run = after.prefill_tokens + after.decode_tokens - before.prefill_tokens - before.decode_tokens
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        preempted = after.preemptions - before.preemptions
        print(f"| {quarter + 1} | {run / seconds:,.0f} | {preempted} | {pages * 4096 / 2**20:.1f} |", flush=True)
    manager.destroy()


if __name__ == "__main__":
    main()
