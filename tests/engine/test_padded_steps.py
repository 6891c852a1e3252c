"""Padding a step to the size of its bucket changes no token."""

from __future__ import annotations

import pytest

PADDED = {"q_padding_interval_size": 16, "kv_padding_interval_size": 32}
NUM_NEW = 8


@pytest.mark.parametrize("use_async_batching", [False, True])
def test_any_number_of_rows_gives_the_plain_tokens_whatever_the_steps_before_held(
    model, oracle, tools, use_async_batching
):
    prompts = [tools.prompt(3 + index) for index in range(17)]
    with tools.running(
        model, max_requests_per_batch=16, num_blocks=80, use_async_batching=use_async_batching, **PADDED
    ) as manager:
        # Large and small in turns: what a large step left in a padded tail would show in the next one.
        for pair in zip(range(17, 8, -1), range(1, 10), strict=True):
            for num_requests in pair:
                ids = manager.add_requests(prompts[:num_requests], max_new_tokens=NUM_NEW)
                outputs = [manager.get_result(request_id, timeout=tools.patience) for request_id in ids]
                answers = [output.generated_tokens for output in outputs]
                assert answers == [oracle.greedy(prompt, NUM_NEW) for prompt in prompts[:num_requests]]
        rows = {(record.path, record.bucket.split(":")[1].split("x")[1]) for record in manager.step_records()}
    assert rows >= {(path, str(size)) for path in ("varlen", "decode") for size in (1, 2, 4, 8, 16)}


@pytest.mark.parametrize("use_async_batching", [False, True])
@pytest.mark.parametrize("max_batch_tokens", [8, 16, 64, 256])
def test_no_token_budget_changes_a_token(model, oracle, prompts, tools, max_batch_tokens, use_async_batching):
    config = tools.small(max_batch_tokens=max_batch_tokens, use_async_batching=use_async_batching, **PADDED)
    outputs = model.generate_batch(prompts, tools.options(), config, max_new_tokens=NUM_NEW)
    assert tools.tokens(outputs) == [oracle.greedy(prompt, NUM_NEW) for prompt in prompts]
