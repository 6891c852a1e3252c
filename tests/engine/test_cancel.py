"""A cancelled request ends once, with the tokens so far, gives its memory back, and hurts nobody."""

from __future__ import annotations

import pytest

from cbtriton import RequestStatus


def assert_all_blocks_are_free(manager, tools):
    tools.wait_until(lambda: manager.stats().blocks_in_use == 0)
    assert manager.stats().blocks_free + manager.stats().blocks_cached == manager.stats().blocks_total


def start_request_in(state, manager, gate, tools):
    """Brings request "x" into a state; every step from here on waits for the gate."""
    if state == "queued":
        manager.add_request(tools.prompt(9, 1), request_id="other", max_new_tokens=400)
        gate.wait()
    manager.add_request(tools.prompt(40), request_id="x", max_new_tokens=30)
    if state == "prefilling":
        gate.step(1)
    elif state == "decoding":
        gate.step(6)


@pytest.mark.parametrize("use_async_batching", [False, True])
@pytest.mark.parametrize(("state", "num_tokens"), [("queued", 0), ("prefilling", 0), ("decoding", None)])
def test_cancelling_in_any_state_gives_one_final_output_with_the_tokens_so_far(
    model, oracle, tools, state, num_tokens, use_async_batching
):
    prompt = tools.prompt(40)
    with tools.gated(model, max_batch_tokens=16, use_async_batching=use_async_batching) as (manager, gate):
        start_request_in(state, manager, gate, tools)
        manager.cancel_request("x")
        manager.cancel_request("x")
        gate.open()
        output = manager.get_result("x", timeout=tools.patience)
        assert (output.status, output.finish_reason) == (RequestStatus.CANCELLED, "cancelled")
        assert output.generated_tokens == oracle.greedy(prompt, 30)[: len(output.generated_tokens)]
        if num_tokens is None:
            assert 0 < len(output.generated_tokens) < 30
        else:
            assert len(output.generated_tokens) == num_tokens
        assert manager.get_result("x", timeout=0.05) is None
        manager.cancel_request("other")
        assert_all_blocks_are_free(manager, tools)
        assert manager.stats().requests_cancelled == 1 + (state == "queued")


def test_cancelling_finished_and_unknown_requests_has_no_effect(model, oracle, tools):
    prompt = tools.prompt(5)
    with tools.running(model) as manager:
        manager.cancel_request("nobody")
        request_id = manager.add_request(prompt, max_new_tokens=3)
        assert manager.get_result(request_id).generated_tokens == oracle.greedy(prompt, 3)
        manager.cancel_request(request_id)
        manager.cancel_request(request_id)
        again = manager.add_request(prompt, request_id=request_id, max_new_tokens=3)
        assert manager.get_result(again).generated_tokens == oracle.greedy(prompt, 3)
        assert manager.stats().requests_cancelled == 0


def test_a_cancellation_that_came_too_late_does_not_hit_the_next_owner_of_the_id(model, oracle, tools):
    prompt = tools.prompt(5)
    with tools.gated(model) as (manager, gate):
        deliver = manager._router.deliver

        def deliver_and_reuse_the_id(outputs):
            deliver(outputs)
            manager._router.deliver = deliver
            manager.add_request(prompt, request_id="x", max_new_tokens=3)

        manager._router.deliver = deliver_and_reuse_the_id
        manager.add_request(prompt, request_id="x", max_new_tokens=1)
        gate.wait()
        # The step that ends it has begun: the engine looks at cancellations only after it.
        manager.cancel_request("x")
        gate.open()
        outputs = [manager.get_result("x", timeout=tools.patience) for _ in range(2)]
        assert [output.status for output in outputs] == [RequestStatus.FINISHED] * 2
        assert [output.generated_tokens for output in outputs] == [oracle.greedy(prompt, 1), oracle.greedy(prompt, 3)]


def test_all_of_many_cancelled_requests_are_answered_and_the_pool_is_full_again(model, oracle, tools):
    prompts = [tools.prompt(10, seed) for seed in range(6)]
    with tools.running(model, num_blocks=200, max_requests_per_batch=4) as manager:
        ids = manager.add_requests(prompts, max_new_tokens=400, streaming=True)
        tools.wait_until(lambda: manager.stats().generated_tokens > 8)
        for request_id in ids:
            manager.cancel_request(request_id)
        finals = [list(manager.request_id_iter(request_id))[-1] for request_id in ids]
        assert {output.status for output in finals} == {RequestStatus.CANCELLED}
        assert_all_blocks_are_free(manager, tools)
        other = manager.add_request(prompts[0], max_new_tokens=5)
        assert manager.get_result(other).generated_tokens == oracle.greedy(prompts[0], 5)


def test_cancelling_a_preempted_request_is_safe(model, oracle, tools):
    prompts = [tools.prompt(30, seed) for seed in range(3)]
    with tools.running(model, num_blocks=5, safety_margin=0.0) as manager:
        ids = manager.add_requests(prompts, max_new_tokens=40)
        tools.wait_until(lambda: manager.stats().preemptions > 0)
        manager.cancel_request(ids[-1])
        outputs = [manager.get_result(request_id, timeout=tools.patience) for request_id in ids]
        assert_all_blocks_are_free(manager, tools)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.generated_tokens == oracle.greedy(prompt, 40)[: len(output.generated_tokens)]
    assert [output.status for output in outputs[:2]] == [RequestStatus.FINISHED] * 2


def test_cancelling_leaves_the_neighbours_tokens_alone(model, oracle, tools):
    prompts = [tools.prompt(12, seed) for seed in range(6)]
    with tools.gated(model, use_async_batching=True) as (manager, gate):
        ids = manager.add_requests(prompts, max_new_tokens=12)
        gate.step(4)
        for request_id in ids[::2]:
            manager.cancel_request(request_id)
        gate.open()
        for prompt, request_id in list(zip(prompts, ids, strict=True))[1::2]:
            output = manager.get_result(request_id, timeout=tools.patience)
            assert output.generated_tokens == oracle.greedy(prompt, 12)


def test_cancelling_a_prompt_before_it_is_computed_cancels_its_extra_sequences(model, tools):
    options = tools.options(do_sample=True, top_k=1, num_return_sequences=3)
    with tools.gated(model, options, max_batch_tokens=16) as (manager, gate):
        request_id = manager.add_request(tools.prompt(40), max_new_tokens=5)
        gate.step(1)
        manager.cancel_request(request_id)
        gate.open()
        ids = [request_id, f"{request_id}__child#0", f"{request_id}__child#1"]
        outputs = [manager.get_result(name, timeout=tools.patience) for name in ids]
        assert [output.status for output in outputs] == [RequestStatus.CANCELLED] * 3
        assert_all_blocks_are_free(manager, tools)
