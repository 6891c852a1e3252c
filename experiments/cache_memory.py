"""Bytes of cache that requests hold in models whose layers are not all alike, beside pages of one size for all layers.

No model runs: the scheduler and the block manager themselves replay the requests (`cbtriton.simulator`), and stop right
before the first one ends. Pages of one size hold every token of every layer at the size of the largest layer.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from cbtriton.cache_layout import CachedLayer
from cbtriton.config import ContinuousBatchingConfig, ModelFacts, WorkloadHints
from cbtriton.resolve import resolve
from cbtriton.scheduler import SCHEDULERS
from cbtriton.simulator import invented_prompts, simulate, trace_of

BF16 = 2


def layer(window: int, num_kv_heads: int, head_dim: int) -> CachedLayer:
    """A layer of a bf16 model."""
    return CachedLayer(window, num_kv_heads * head_dim * BF16, num_kv_heads * head_dim * BF16)


def hybrid(num_rounds: int, num_sliding: int, sliding: CachedLayer, full: CachedLayer) -> tuple[CachedLayer, ...]:
    """So many sliding layers and a full one, again and again."""
    return (*[sliding] * num_sliding, full) * num_rounds


MODELS = {
    "Gemma-3-like, 5:1, window 256": hybrid(4, 5, layer(256, 1, 256), layer(0, 1, 256)),
    "Gemma-3-like, 5:1, window 512": hybrid(4, 5, layer(512, 1, 256), layer(0, 1, 256)),
    "Gemma-4-like, 5:1, window 1024, two shapes": hybrid(5, 5, layer(1024, 16, 256), layer(0, 4, 512)),
    "GPT-OSS-like, 1:1, window 128": hybrid(12, 1, layer(128, 8, 64), layer(0, 8, 64)),
    "Mistral-like, window 1024": hybrid(32, 1, layer(1024, 8, 128), layer(1024, 8, 128))[:32],
}


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of cache that requests hold at most, with ours and with pages of one size."""

    ours: int
    one_size: int


def held_bytes(layers: tuple[CachedLayer, ...], num_requests: int, length: int, page_size: int) -> Held:
    """What requests of `length` tokens hold that run all at once."""
    largest = max(each.key_bytes + each.value_bytes for each in layers)
    one_size = num_requests * -(-length // page_size) * page_size * len(layers) * largest
    facts = ModelFacts(
        vocab_size=1000,
        num_embeddings=1000,
        max_position_embeddings=length + 2,
        cached_layers=layers,
        activation_bytes_per_token=1,
        device_type="cuda",
        available_memory_bytes=4 * one_size,
    )
    config = resolve(
        # Steps of one window's size at most: what a step adds to the window is held as well.
        ContinuousBatchingConfig(
            page_size=page_size,
            max_batch_tokens=256,
            safety_margin=0.0,
            max_requests_per_batch=num_requests,
            allow_block_sharing=False,
        ),
        WorkloadHints(),
        facts,
        has_logits_processing=False,
        scheduler_types=SCHEDULERS.default_margins(),
    )
    # Each one ends with its last token: from the last prompt on, all run until the first has all of its own.
    prompts = invented_prompts([length // 2] * num_requests)
    steps = simulate(config, trace_of(prompts, [length - length // 2 + 1] * num_requests)).steps
    assert max(step.num_rows for step in steps) == num_requests
    ours = max(step.blocks_in_use for step in steps) * config.cache_layout.block_bytes
    return Held(ours, one_size)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--length", type=int, default=2000, help="tokens of each request")
    parser.add_argument("--page-size", type=int, default=16)
    arguments = parser.parse_args()
    print("| model (bf16) | ours, MiB | one size, MiB | share |\n|---|---:|---:|---:|")
    for name, layers in MODELS.items():
        held = held_bytes(layers, arguments.num_requests, arguments.length, arguments.page_size)
        print(f"| {name} | {held.ours / 2**20:,.0f} | {held.one_size / 2**20:,.0f} | {held.ours / held.one_size:.2f} |")


if __name__ == "__main__":
    main()
