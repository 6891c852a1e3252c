"""Greedy answers are those of plain `generate`, token for token, whatever is batched, chunked, shared or preempted."""

from __future__ import annotations

import random

import pytest
import torch

NUM_NEW = 10


# Every two of page size, token budget and mode meet once.
PAGE_SIZES, BUDGETS, MODES = (4, 24, 256), (7, 64, 512), ((True, False), (False, True), (True, True))
COMBINATIONS = [(PAGE_SIZES[i], BUDGETS[j], *MODES[(i + j) % 3]) for i in range(3) for j in range(3)]


@pytest.mark.parametrize(("page_size", "max_batch_tokens", "allow_block_sharing", "use_async_batching"), COMBINATIONS)
def test_any_page_size_and_budget_gives_the_plain_tokens(
    model, oracle, prompts, tools, page_size, max_batch_tokens, allow_block_sharing, use_async_batching
):
    config = tools.small(
        page_size=page_size,
        num_blocks=max(8, 1200 // page_size),
        max_batch_tokens=max_batch_tokens,
        allow_block_sharing=allow_block_sharing,
        use_async_batching=use_async_batching,
    )
    outputs = model.generate_batch(prompts, tools.options(), config, max_new_tokens=NUM_NEW)
    assert tools.tokens(outputs) == [oracle.greedy(prompt, NUM_NEW) for prompt in prompts]
    assert list(outputs) == [f"req_{index}" for index in range(len(prompts))]
    assert {output.finish_reason for output in outputs.values()} == {"length"}


@pytest.mark.parametrize("use_async_batching", [False, True])
@pytest.mark.parametrize(("scheduler_type", "allow_block_sharing"), [("fifo", True), ("prefill_first", False)])
def test_preemption_in_a_tiny_pool_changes_no_token(
    model, oracle, tools, allow_block_sharing, scheduler_type, use_async_batching
):
    prompts = [tools.prompt(20, seed) for seed in range(6)]
    with tools.running(
        model,
        num_blocks=6,
        allow_block_sharing=allow_block_sharing,
        scheduler_type=scheduler_type,
        use_async_batching=use_async_batching,
        safety_margin=0.0,
    ) as manager:
        ids = manager.add_requests(prompts, max_new_tokens=30)
        outputs = [manager.get_result(request_id, timeout=tools.patience) for request_id in ids]
        assert manager.stats().preemptions > 0
    assert [output.generated_tokens for output in outputs] == [oracle.greedy(prompt, 30) for prompt in prompts]


@pytest.mark.parametrize("length", [1, 6, 7, 8, 14, 15, 50, 100])
def test_a_prompt_longer_than_the_token_budget_is_run_in_chunks(model, oracle, tools, length):
    prompts = [tools.prompt(length), tools.prompt(3)]
    outputs = model.generate_batch(prompts, tools.options(), tools.small(max_batch_tokens=7), max_new_tokens=5)
    assert tools.tokens(outputs) == [oracle.greedy(prompt, 5) for prompt in prompts]


@pytest.mark.parametrize("max_requests_per_batch", [1, 4, 16])
def test_batch_size_changes_no_token(model, oracle, tools, max_requests_per_batch):
    prompts = [tools.prompt(3 + 2 * index) for index in range(16)]
    config = tools.small(max_requests_per_batch=max_requests_per_batch)
    outputs = model.generate_batch(prompts, tools.options(), config, max_new_tokens=NUM_NEW)
    assert tools.tokens(outputs) == [oracle.greedy(prompt, NUM_NEW) for prompt in prompts]


@pytest.mark.parametrize("order_seed", range(3))
def test_order_of_arrival_changes_no_token(model, oracle, tools, order_seed):
    prompts = [tools.prompt(3 + 2 * index) for index in range(16)]
    random.Random(order_seed).shuffle(prompts)
    with tools.gated(model) as (manager, gate):
        # The later ones come while the earlier ones already decode.
        ids = manager.add_requests(prompts[:5], max_new_tokens=NUM_NEW)
        for prompt in prompts[5:]:
            gate.let(1)
            ids.append(manager.add_request(prompt, max_new_tokens=NUM_NEW))
        gate.open()
        outputs = [manager.get_result(request_id, timeout=tools.patience) for request_id in ids]
    assert [output.generated_tokens for output in outputs] == [oracle.greedy(prompt, NUM_NEW) for prompt in prompts]


@pytest.mark.parametrize("copies", [2, 4])
def test_a_fully_cached_prompt_still_runs_its_last_token_and_extends_the_cache(model, oracle, tools, copies):
    long = tools.prompt(33)
    sent = [long[:32]] * copies + [long[:16], long, long]
    with tools.running(model) as manager:
        cached = []
        for prompt in sent:
            before = manager.stats().prefix_cached_tokens
            output = manager.get_result(manager.add_request(prompt, max_new_tokens=5), timeout=tools.patience)
            assert output.generated_tokens == oracle.greedy(prompt, 5)
            cached.append(manager.stats().prefix_cached_tokens - before)
    # Of 32 tokens the second block would be whole, but its last token must be computed.
    assert cached == [0] + [16] * (copies - 1) + [0, 32, 32]


def test_equal_prompts_in_one_step_share_nothing_that_is_still_written(model, oracle, tools):
    prompt, other = tools.prompt(40), tools.prompt(41)
    with tools.running(model, num_blocks=12) as manager:
        ids = manager.add_requests([prompt, prompt, prompt, other], max_new_tokens=20)
        outputs = [manager.get_result(request_id, timeout=tools.patience) for request_id in ids]
    wanted = [oracle.greedy(prompt, 20)] * 3 + [oracle.greedy(other, 20)]
    assert [output.generated_tokens for output in outputs] == wanted


def test_a_partly_shared_prefix_exposes_nothing_of_its_owner(model, oracle, tools):
    prefix = tools.prompt(33)
    prompts = [prefix + tools.prompt(7, seed) for seed in range(1, 5)]
    with tools.running(model, num_blocks=16) as manager:
        for layer in manager._engine._cache.layers:
            # Whoever reads what it did not write gets NaN.
            layer.key.fill_(float("nan"))
            layer.value.fill_(float("nan"))
        for _ in range(2):
            ids = manager.add_requests(prompts, max_new_tokens=20)
            outputs = [manager.get_result(request_id, timeout=tools.patience) for request_id in ids]
            assert [output.generated_tokens for output in outputs] == [oracle.greedy(p, 20) for p in prompts]
        assert manager.stats().prefix_cached_tokens >= 4 * 32


def test_cached_and_uncached_runs_agree_on_many_serial_requests(model, tools):
    prefix = tools.prompt(30)
    prompts = [prefix + tools.prompt(2 + seed % 9, seed) for seed in range(30)]
    answers = []
    for allow_block_sharing in (True, False):
        with tools.running(model, num_blocks=20, allow_block_sharing=allow_block_sharing) as manager:
            serial = [manager.add_request(prompt, max_new_tokens=4) for prompt in prompts]
            outputs = [manager.get_result(request_id, timeout=tools.patience) for request_id in serial]
            assert (manager.stats().prefix_cached_tokens > 0) == allow_block_sharing
        answers.append([output.generated_tokens for output in outputs])
    assert answers[0] == answers[1]


def test_requests_with_other_salts_share_no_prefix(model, oracle, tools):
    prompt = tools.prompt(33)
    with tools.running(model) as manager:
        for salt, expected_hits in (("a", 0), ("b", 0), ("a", 32), (None, 0)):
            before = manager.stats().prefix_cached_tokens
            request_id = manager.add_request(prompt, max_new_tokens=3, cache_salt=salt)
            output = manager.get_result(request_id, timeout=tools.patience)
            assert output.generated_tokens == oracle.greedy(prompt, 3)
            assert manager.stats().prefix_cached_tokens - before == expected_hits


@pytest.mark.parametrize("num_tokens", [(128, 1), (120, 9)])
def test_a_request_that_exactly_fills_the_cache_runs(model, oracle, tools, num_tokens):
    length, num_new = num_tokens
    prompt = tools.prompt(length)
    outputs = model.generate_batch([prompt], tools.options(), tools.small(num_blocks=8), max_new_tokens=num_new)
    assert tools.tokens(outputs) == [oracle.greedy(prompt, num_new)]


def test_only_rows_that_sample_reach_the_language_models_head(model, tools):
    num_rows = []
    with tools.running(model) as manager:
        hook = model.lm_head.register_forward_pre_hook(lambda module, args: num_rows.append(args[0].shape[-2]))
        ids = manager.add_requests([tools.prompt(90), tools.prompt(100)], max_new_tokens=4)
        for request_id in ids:
            manager.get_result(request_id, timeout=tools.patience)
        hook.remove()
    assert num_rows
    assert max(num_rows) <= 2


def test_the_model_is_not_asked_for_gradients(model, tools):
    model.requires_grad_(True)
    with torch.enable_grad():
        outputs = model.generate_batch([tools.prompt(5)], tools.options(), tools.small(), max_new_tokens=3)
    assert outputs["req_0"].error is None
    assert all(parameter.grad is None for parameter in model.parameters())
