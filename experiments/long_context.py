"""One very long request: peak memory of the process beside the budget that was printed for it.

A short request of the same shape runs first, so that libraries and compiled kernels are loaded before memory is read.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

import cbtriton
from cbtriton.config import EngineConfig, describe_memory


def build(num_layers: int, num_kv_heads: int, head_dim: int, positions: int) -> Any:
    """A random Llama whose cache is large beside its weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=num_kv_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=128,
        max_position_embeddings=positions,
        initializer_range=0.3,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return cbtriton.enable(model)


def resident_bytes(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (the peak since `forget_peak`) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def forget_peak() -> None:
    """Lets the peak begin at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def run(model: Any, length: int, new_tokens: int, max_batch_tokens: int) -> tuple[int, EngineConfig]:
    """Generates after a prompt of `length` tokens; returns the growth of memory at its peak, and the configuration."""
    config = cbtriton.ContinuousBatchingConfig(
        page_size=16,
        num_blocks=-(-(length + new_tokens) // 16),
        max_batch_tokens=max_batch_tokens,
        max_requests_per_batch=1,
    )
    options = GenerationConfig(do_sample=False, eos_token_id=-1)
    prompt = torch.randint(0, 128, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    gc.collect()
    forget_peak()
    before = resident_bytes("VmRSS")
    with model.continuous_batching_context_manager(
        generation_config=options, continuous_batching_config=config
    ) as manager:
        request_id = manager.add_request(prompt, max_new_tokens=new_tokens)
        output = manager.get_result(request_id)
        assert output is not None
        assert output.error is None, output.error
        assert len(output.generated_tokens) == new_tokens
        return resident_bytes("VmHWM") - before, manager.engine_config


def main() -> None:
    """Prints the budget and what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=30_000, help="tokens of the prompt")
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--max-batch-tokens", type=int, default=512)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--num-kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=16)
    arguments = parser.parse_args()
    model = build(
        arguments.num_layers, arguments.num_kv_heads, arguments.head_dim, arguments.length + arguments.new_tokens
    )
    run(model, 4 * arguments.max_batch_tokens, arguments.new_tokens, arguments.max_batch_tokens)
    start = time.perf_counter()
    growth, config = run(model, arguments.length, arguments.new_tokens, arguments.max_batch_tokens)
    print(describe_memory(config.memory_budget, config.available_memory_bytes))
    budget = sum(share.num_bytes for share in config.memory_budget)
    print(
        f"measured {growth / 2**20:.1f} MiB, {growth / budget:.3f} of the budget; "
        f"{arguments.length} + {arguments.new_tokens} tokens in {time.perf_counter() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
