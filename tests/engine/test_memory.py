"""What memory the engine takes is what it says it takes."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest
import torch

from cbtriton.manager import ContinuousBatchingManager
from cbtriton.model_adapter import ModelAdapter, _HeldBytes
from cbtriton.request import Request, SamplingParams, StopRules


@pytest.fixture
def mixed(tools):
    """Layers that see 32 tokens, and one that sees everything."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
    return tools.build(tools.hybrid_config(**sizes, max_position_embeddings=2048, sliding_window=32))


def test_the_meter_counts_what_is_held_at_a_time_and_no_view_twice():
    given = torch.ones(1000)
    with _HeldBytes() as held:
        view = given.view(10, 100)[2:]
        first = given + 1
        assert held.peak == 4000
        same = first.view(10, 100).t()
        second = first * 2
        assert held.peak == 8000
        del first
        third = second * 2  # the view still holds the first
        assert held.peak == 12000
        del same, second, third
        given.mul_(3)
        fourth = given + view[0, 0]
        assert held.peak == 12000
        del fourth
    assert held._now == 0


def test_activations_are_measured_on_the_model_itself(tools):
    """A wider feed-forward layer holds more per token; logits of rows that do not sample are no part of it."""
    measured = {}
    for width in (128, 4096):
        for vocab_size in (128, 20_000):
            model = tools.build(tools.llama_config(intermediate_size=width, vocab_size=vocab_size))
            layout = ModelAdapter(model, 0).inspect_layout()
            measured[width, vocab_size] = layout.activation_bytes_per_token
    assert measured[128, 128] == measured[128, 20_000]
    # gate, its activation, up and their product are held at a time, or three of them
    assert 2 * 4 * 4096 <= measured[4096, 128] <= 5 * 4 * 4096
    assert measured[128, 128] < 20 * 4 * 64


def test_the_stats_tell_the_bytes_of_each_purpose(model, tools):
    manager = ContinuousBatchingManager(model, tools.options(), tools.small(num_blocks=9, cpu_offload_space=0.001))
    manager.warmup()
    try:
        stats, config = manager.stats(), manager.engine_config
        purposes = stats.bytes_by_purpose
        block_bytes = 2 * 2 * 16 * 2 * 16 * 4
        assert purposes["cache"] == 10 * block_bytes  # one is the null block
        assert purposes["host cache"] == stats.host_blocks_total * block_bytes > 0
        assert purposes["weights"] == sum(parameter.nbytes for parameter in model.parameters()) + sum(
            buffer.nbytes for buffer in model.buffers()
        )
        assert purposes["graphs"] == 0
        shares = {share.purpose: share.num_bytes for share in config.memory_budget}
        assert shares["cache"] == 9 * block_bytes
        assert shares["tables"] == pytest.approx(purposes["tables"], rel=0.01)
    finally:
        manager.destroy()


def test_a_hybrid_model_holds_windows_where_others_hold_everything(mixed, tools):
    with tools.gated(mixed, page_size=16, num_blocks=1000, max_batch_tokens=512) as (manager, gate):
        manager.add_request(tools.prompt(400), max_new_tokens=20)
        gate.step(3)
        block_bytes = manager.engine_config.cache_layout.block_bytes
        held = manager.stats().blocks_in_use * block_bytes
        token_bytes = 6 * 16 * 2 * 4
        # 26 pages of the full layer, 4 at most of each sliding one; 26 of every layer would be six times as much.
        assert held <= (26 + 5 * 4) * 16 * token_bytes / 6
        gate.open()


def test_a_hybrid_model_finds_a_shared_prefix(mixed, tools):
    """400 of 410 tokens are shared: the second request computes fewer than one in twenty of its own."""
    prompts = [tools.prompt(400) + tools.prompt(10, seed=seed) for seed in (1, 2)]
    expected = [tools.plain_greedy(mixed, prompt, 8) for prompt in prompts]
    with tools.running(mixed, page_size=16, num_blocks=1000) as manager:
        for prompt, answer in zip(prompts, expected, strict=True):
            request_id = manager.add_request(prompt, max_new_tokens=8)
            assert manager.get_result(request_id).generated_tokens == answer
        stats = manager.stats()
    computed = 410 - stats.prefix_cached_tokens
    assert 0 < computed < 0.05 * 410


@pytest.mark.slow
def test_a_long_run_loses_no_block_and_takes_no_more_memory(mixed, tools):
    """2,000 requests of random sizes with cancels, on layers in groups: nothing is lost, and nothing grows."""
    rng = random.Random(0)
    manager = ContinuousBatchingManager(
        mixed,
        tools.options(),
        tools.small(page_size=4, num_blocks=400, max_batch_tokens=64),
        None,
        {"default": "reference"},
    )
    manager.warmup()
    engine = manager._engine
    resident = []
    try:
        for quarter in range(4):
            for index in range(500):
                prompt = tools.prompt(rng.randint(1, 60), seed=rng.randint(0, 40))
                engine.add(Request(f"{quarter}:{index}", prompt, SamplingParams(), StopRules(rng.randint(1, 20))))
                if rng.random() < 0.1:
                    engine.cancel(f"{quarter}:{rng.randint(0, index)}")
                while engine.num_waiting > 8:
                    engine.step()
                    stats = engine.stats()
                    assert stats.blocks_free + stats.blocks_cached + stats.blocks_in_use == stats.blocks_total
            while engine.has_requests:
                engine.step()
            engine._blocks.check_invariants()
            gc.collect()
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]))
        stats = engine.stats()
    finally:
        manager.destroy()
    assert stats.requests_added == stats.requests_finished + stats.requests_cancelled == 2000
    assert stats.blocks_in_use == 0
    assert resident[3] <= 1.05 * resident[0]


def test_a_request_without_a_limit_goes_on_to_that_of_the_cache_and_leaves_the_engine_alive(model, oracle, tools):
    """4 blocks of 16 tokens: a prompt of 5, and 60 tokens, of which the last never enters the cache."""
    with tools.running(model, num_blocks=4) as manager:
        for _ in range(2):
            request_id = manager.add_request(tools.prompt(5))
            output = manager.get_result(request_id)
            assert (output.finish_reason, output.error) == ("length", None)
            assert output.generated_tokens == oracle.greedy(tools.prompt(5), 60)


def test_one_that_can_never_fit_fails_alone_with_needed_and_available_blocks(mixed, tools):
    """On layers in groups, where blocks are not tokens over page size."""
    expected = tools.plain_greedy(mixed, tools.prompt(60), 4)
    # A window of 32 reaches into 3 pages of 16 a step: 15 blocks, and the other 5 for the layer that sees everything.
    with tools.running(mixed, page_size=16, num_blocks=20) as manager:
        assert manager.engine_config.max_model_len == 80
        assert manager.add_request(tools.prompt(80), max_new_tokens=1)
        with pytest.raises(
            ValueError, match="needs 21 blocks of 16 tokens, and the cache has 20; set max_new_tokens=1"
        ):
            manager.add_request(tools.prompt(80), max_new_tokens=2)
        request_id = manager.add_request(tools.prompt(60), max_new_tokens=4)
        assert manager.get_result(request_id).generated_tokens == expected
