"""Requests whose cache went to host memory and came back get the same tokens, from the same keys and values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from cbtriton.cache_layout import CacheLayout
from cbtriton.engine import Engine
from cbtriton.kv_cache import HostCache, KVCache, LayerGeometry, _runs
from cbtriton.manager import ContinuousBatchingManager
from cbtriton.plan import BlockSwap
from cbtriton.request import Request, SamplingParams, StopRules

# Of the tiny model: 2 layers, each with keys and values of 2 heads of 16 numbers of 4 bytes for 16 tokens.
BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 16
ROOMY = 64 * BLOCK_BYTES / 2**30
MODES = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


@contextmanager
def cramped(tools, model, is_async: bool, **config: Any) -> Iterator[Engine]:
    """An engine that the test steps, with a cache for one and a half of its requests, full of NaN."""
    settings = {"num_blocks": 7, "safety_margin": 0.0, "cpu_offload_space": ROOMY, "use_async_batching": is_async}
    kernels = {"default": "reference"}
    manager = ContinuousBatchingManager(model, tools.options(), tools.small(**settings | config), None, kernels)
    try:
        manager.warmup()
        for layer in (*manager._engine._cache.pools, *manager._engine._runner._host_cache._pools):
            layer.key.fill_(float("nan"))
            layer.value.fill_(float("nan"))
        yield manager._engine
    finally:
        manager.destroy()


def add(engine: Engine, prompts: list[list[int]], number: int = 40, **sampling: Any) -> None:
    for index, prompt in enumerate(prompts):
        params = SamplingParams(**sampling, seed=index) if sampling else SamplingParams()
        engine.add(Request(f"r{index}", prompt, params, StopRules(number)))


def run(engine: Engine, *, until_offloaded: bool = False) -> dict[str, list[int]]:
    """Steps until nothing is left, or something is off-loaded; the answers that came."""
    answers = {}
    while engine.has_requests:
        answers |= {output.request_id: output.generated_tokens for output in engine.step() if output.is_finished()}
        engine._blocks.check_invariants()
        engine._host_blocks.check_invariants()
        if until_offloaded and engine.stats().host_blocks_in_use:
            return answers
    engine.drain()
    assert (engine.stats().blocks_in_use, engine.stats().host_blocks_in_use) == (0, 0)
    return answers


def expected(oracle, prompts: list[list[int]], number: int = 40) -> dict[str, list[int]]:
    return {f"r{index}": oracle.greedy(prompt, number) for index, prompt in enumerate(prompts)}


def pages(cache: Any, block_id: int) -> list[torch.Tensor]:
    """The bits of a block."""
    return [tensor[block_id].clone().view(torch.int32) for layer in cache.pools for tensor in (layer.key, layer.value)]


@MODES
@pytest.mark.parametrize("scheduler_type", ["fifo", "prefill_first"])
@pytest.mark.parametrize("allow_block_sharing", [True, False])
def test_what_comes_back_is_what_went_out_bit_for_bit(
    model, oracle, tools, is_async, scheduler_type, allow_block_sharing
):
    prompts = [tools.prompt(20)[:16] + tools.prompt(15 + 3 * index, seed=index) for index in range(3)]
    settings = {"scheduler_type": scheduler_type, "allow_block_sharing": allow_block_sharing}
    with cramped(tools, model, is_async, **settings) as engine:
        host, cache = engine._runner._host_cache, engine._cache
        store, load = host.store, host.load
        stored: dict[tuple[str, int], list[torch.Tensor]] = {}
        num_compared = 0

        def note(swap: BlockSwap) -> None:
            for device_block, host_block in zip(swap.device_blocks, swap.host_blocks, strict=True):
                stored[swap.request_id, host_block] = pages(cache, device_block)
            store(swap)

        def compare(swap: BlockSwap) -> None:
            nonlocal num_compared
            load(swap)
            for device_block, host_block in zip(swap.device_blocks, swap.host_blocks, strict=True):
                before = stored[swap.request_id, host_block]
                assert all(map(torch.equal, pages(cache, device_block), before))
                num_compared += 1

        host.store, host.load = note, compare
        add(engine, prompts)
        assert run(engine) == expected(oracle, prompts)
        stats = engine.stats()
    assert stats.offloads == stats.preemptions > 0
    assert stats.failed_swaps == 0
    assert num_compared >= 3
    assert stats.restored_tokens > 16


@MODES
def test_drawn_tokens_and_requests_that_come_back_are_those_of_an_engine_with_room(model, tools, is_async):
    prompts = [tools.prompt(30, seed=index) for index in range(3)]
    sampling = {"temperature": 1.2, "top_p": 0.95}
    with cramped(tools, model, is_async=False, num_blocks=64) as engine:
        add(engine, prompts, **sampling)
        calm = run(engine)
        assert engine.stats().preemptions == 0
    with cramped(tools, model, is_async) as engine:
        add(engine, prompts, **sampling)
        assert run(engine) == calm
        assert engine.stats().restores > 0


def test_less_is_computed_than_without_host_memory(model, tools):
    prompts = [tools.prompt(30, seed=index) for index in range(3)]
    computed = []
    for space in (0.0, ROOMY):
        with cramped(tools, model, False, cpu_offload_space=space, allow_block_sharing=False) as engine:
            add(engine, prompts)
            run(engine)
            stats = engine.stats()
            computed.append(stats.prefill_tokens + stats.decode_tokens)
            assert (stats.host_blocks_total, stats.host_cache_bytes) == ((64, 64 * BLOCK_BYTES) if space else (0, 0))
    # The last token of an answer never runs, and each restored request runs one token again at most.
    assert computed[1] <= 3 * (30 + 39) + stats.restores < computed[0]
    assert stats.prefill_tokens == 3 * 30


@MODES
def test_a_full_pool_lets_requests_compute_again(model, oracle, tools, is_async):
    prompts = [tools.prompt(30, seed=index) for index in range(4)]
    with cramped(tools, model, is_async, cpu_offload_space=3 * BLOCK_BYTES / 2**30) as engine:
        add(engine, prompts)
        assert run(engine) == expected(oracle, prompts)
        stats = engine.stats()
    assert 0 < stats.offloads < stats.preemptions
    assert stats.host_blocks_total == 3


@MODES
@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_copy_that_fails_midway_costs_nobody_a_token(model, oracle, tools, is_async, direction, caplog):
    prompts = [tools.prompt(30, seed=index) for index in range(4)]
    with cramped(tools, model, is_async) as engine:
        host = engine._runner._host_cache
        copy, num_copies = getattr(host, direction), 0

        def fail_at_times(swap: BlockSwap) -> None:
            nonlocal num_copies
            num_copies += 1
            if num_copies % 2:
                half = len(swap.host_blocks) // 2
                copy(BlockSwap(swap.request_id, swap.device_blocks[:half], swap.host_blocks[:half]))
                raise RuntimeError("the bus is gone")
            copy(swap)

        setattr(host, direction, fail_at_times)
        add(engine, prompts)
        assert run(engine) == expected(oracle, prompts)
        stats = engine.stats()
    assert stats.failed_swaps == (num_copies + 1) // 2 > 0
    assert stats.requests_failed == 0
    assert "the bus is gone" in caplog.text


@MODES
def test_a_request_can_be_cancelled_while_it_is_off_loaded(model, oracle, tools, is_async):
    prompts = [tools.prompt(30, seed=index) for index in range(3)]
    with cramped(tools, model, is_async) as engine:
        add(engine, prompts)
        answers = run(engine, until_offloaded=True)
        [gone] = [i for i in ("r0", "r1", "r2") if engine._host_blocks.num_tokens(i)]
        [output] = engine.cancel(gone)
        assert output.generated_tokens == oracle.greedy(prompts[int(gone[1])], 40)[: len(output.generated_tokens)]
        assert engine.stats().host_blocks_in_use == 0
        answers |= run(engine)
        assert answers | {gone: None} == expected(oracle, prompts) | {gone: None}


@MODES
@pytest.mark.parametrize("is_reset", [False, True])
def test_what_is_off_loaded_survives_a_pause_but_not_a_reset(model, oracle, tools, is_async, is_reset):
    prompts = [tools.prompt(30, seed=index) for index in range(3)]
    with cramped(tools, model, is_async) as engine:
        add(engine, prompts)
        answers = run(engine, until_offloaded=True)
        outputs = engine.drain()
        engine.detach()
        engine.attach()
        held = engine.stats().host_blocks_in_use
        if is_reset:
            engine.reset_prefix_cache()
            assert engine.stats().host_blocks_in_use == 0
        answers |= {output.request_id: output.generated_tokens for output in outputs if output.is_finished()}
        answers |= run(engine)
        assert held > 0
        assert answers == expected(oracle, prompts)


def test_weights_that_changed_drop_what_older_ones_computed(model, tools):
    prompts = [tools.prompt(30, seed=index) for index in range(3)]
    with cramped(tools, model, is_async=False) as engine:
        add(engine, prompts)
        run(engine, until_offloaded=True)
        engine.detach()
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)
        engine.attach()
        assert engine.stats().host_blocks_in_use == 0
        run(engine)


# ---------------------------------------------------------------------------------------------------- memory


def test_blocks_that_follow_one_another_are_copied_together():
    assert list(_runs([3, 4, 5, 9, 10, 2], [0, 1, 2, 3, 5, 6])) == [(3, 0, 3), (9, 3, 1), (10, 5, 1), (2, 6, 1)]
    assert list(_runs([], [])) == []


def test_memory_that_the_host_does_not_have_is_refused_with_size_and_setting():
    geometry = LayerGeometry(num_kv_heads=2, key_dim=16, value_dim=16, dtype=torch.float32)
    layout = CacheLayout.of([geometry.cached_layer(window=0)], 16)
    cache = KVCache(layout, (geometry,), 1, torch.device("cpu"))
    with pytest.raises(RuntimeError, match=rf"{2**46} blocks take {2**46 * 16 * 256} bytes .*lower cpu_offload_space"):
        HostCache(cache, 2**46)


def test_the_space_is_given_in_gib(model, tools):
    with cramped(tools, model, False, cpu_offload_space=5.5 * BLOCK_BYTES / 2**30) as engine:
        assert engine.stats().host_blocks_total == math.floor(5.5)
        assert engine.stats().host_cache_bytes == 5 * BLOCK_BYTES
