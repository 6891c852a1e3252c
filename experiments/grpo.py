"""Trains with TRL's GRPO, rolling out on this engine and on transformers' own continuous batching.

    python experiments/grpo.py --steps 20

A tiny random model learns to answer with words of a quarter of its vocabulary. Engines take turns, each run in a
process of its own, with the same seeds; tokens are sampled, so rewards differ. Needs the extra `trl`. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_WORDS, LENGTH, PER_GROUP = 64, 32, 8
ENGINES = ("transformers", "cbtriton")


def main() -> None:
    """Prints one row for each engine and type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each engine (default: 3)")
    parser.add_argument("--run", nargs=2, metavar=("ENGINE", "DTYPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        engine, dtype = arguments.run
        print(json.dumps(train(engine, dtype, arguments.steps)))
        return
    print("| type | engine | reward, first and last three | step, s | roll-out, s | resident, GiB | growth, MiB |")
    print("|---|---|---|---|---|---|---|")
    for dtype in arguments.dtypes:
        runs = [(engine, run(engine, dtype, arguments.steps)) for _ in range(arguments.repeats) for engine in ENGINES]
        for engine in ENGINES:
            print(row(dtype, engine, [result for name, result in runs if name == engine]), flush=True)


def row(dtype: str, engine: str, results: list[dict[str, Any]]) -> str:
    """Medians over the runs of an engine, or what ended it."""
    if "error" in results[0]:
        return f"| {dtype} | {engine} | {results[0]['error']} | | | | |"
    middle = {name: statistics.median(result[name] for result in results) for name in results[0]}
    return (
        f"| {dtype} | {engine} | {middle['first']:.2f}, {middle['last']:.2f} | {middle['step']:.3f} | "
        f"{middle['rollout']:.3f} | {middle['resident'] / 2**20:.2f} | {middle['growth'] / 1024:.1f} |"
    )


def run(engine: str, dtype: str, steps: int) -> dict[str, Any]:
    """What a process of its own found."""
    command = [sys.executable, __file__, "--steps", str(steps), "--run", engine, dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {"error": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def share_of_low_words(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """The reward."""
    return [sum(token < NUM_WORDS // 4 for token in tokens) / len(tokens) for tokens in completion_ids]


def train(engine: str, dtype: str, steps: int) -> dict[str, float]:
    """Seconds, rewards and memory (KiB) of one training."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    import cbtriton

    if engine == "cbtriton":
        cbtriton.patch_transformers()
    seconds: list[float] = []
    memory: list[int] = []
    LlamaForCausalLM.generate_batch = timed(LlamaForCausalLM.generate_batch, seconds, memory)
    names = ["<pad>", "<eos>", *(f"w{number}" for number in range(2, NUM_WORDS))]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=NUM_WORDS, intermediate_size=128, max_position_embeddings=256, **sizes, **ends)
    )
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=str(Path(folder) / "out"),
            per_device_train_batch_size=4 * PER_GROUP,
            num_generations=PER_GROUP,
            max_completion_length=LENGTH,
            max_steps=steps,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=dtype == "bf16",
            save_strategy="no",
            beta=0.0,
            disable_tqdm=True,
            use_transformers_continuous_batching=True,
            transformers_continuous_batching_config={"num_blocks": 128, "page_size": 32, "max_batch_tokens": 512},
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=share_of_low_words,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [f"w{n} w{n + 1} w{n + 2}" for n in range(2, 42)]}),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"),
        )
        start = time.perf_counter()
        trainer.train()
        total = time.perf_counter() - start
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    # The first roll-out loads what later ones have.
    return {
        "first": statistics.mean(rewards[:3]),
        "last": statistics.mean(rewards[-3:]),
        "step": (total - seconds[0]) / (steps - 1),
        "rollout": statistics.median(seconds[1:]),
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "growth": memory[-1] - memory[len(memory) // 2],
    }


def timed(generate_batch: Callable[..., Any], seconds: list[float], memory: list[int]) -> Callable[..., Any]:
    """The same method, which notes how long it took, and what the process holds behind it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return generate_batch(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            memory.append(pages * resource.getpagesize() // 1024)

    return run


if __name__ == "__main__":
    main()
