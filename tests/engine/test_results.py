"""Every output reaches whoever asks for it, in order, once, and nobody waits for what cannot come."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from cbtriton import GenerationOutput, RequestStatus
from cbtriton.router import OutputRouter


def test_a_result_is_found_by_its_id_behind_others_that_keep_their_order(model, oracle, tools):
    prompts = {name: tools.prompt(5, seed) for seed, name in enumerate("abcd")}
    with tools.running(model) as manager:
        for name, prompt in prompts.items():
            manager.add_request(prompt, request_id=name, max_new_tokens=3)
        tools.wait_until(lambda: manager.stats().requests_finished == 4)
        assert manager.get_result("c", timeout=3).generated_tokens == oracle.greedy(prompts["c"], 3)
        assert [manager.get_result(timeout=3).request_id for _ in range(3)] == ["a", "b", "d"]
        assert manager.get_result("c", timeout=0) is None


def test_a_wait_for_one_id_lasts_until_it_arrives(model, oracle, tools):
    prompt = tools.prompt(5)
    with tools.gated(model) as (manager, gate):
        manager.add_request(tools.prompt(6), request_id="early", max_new_tokens=1)
        manager.add_request(prompt, request_id="late", max_new_tokens=3)
        result = tools.in_thread(lambda: manager.get_result("late", timeout=tools.patience))
        gate.let(1)
        tools.wait_until(lambda: manager.stats().requests_finished == 1)
        gate.open()
        assert result().generated_tokens == oracle.greedy(prompt, 3)
        assert manager.get_result(timeout=tools.patience).request_id == "early"


def test_a_timeout_is_honoured_while_the_request_runs(model, tools):
    with tools.gated(model) as (manager, _):
        request_id = manager.add_request(tools.prompt(5), max_new_tokens=3)
        assert manager.get_result(request_id, timeout=0.05) is None
        assert manager.get_result(timeout=0.05) is None
        assert manager.is_in_flight(request_id)


def test_a_result_that_can_never_come_is_not_waited_for(model, tools):
    with tools.running(model) as manager:
        assert manager.get_result("nobody") is None
        request_id = manager.add_request(tools.prompt(5), max_new_tokens=1)
        assert manager.get_result(request_id) is not None
        assert manager.get_result(request_id) is None
        manager.stop()
        assert manager.get_result() is None


def test_a_streaming_request_delivers_each_token_once_and_its_iterator_ends(model, oracle, tools):
    prompt = tools.prompt(20)
    answer = oracle.greedy(prompt, 6)
    with tools.running(model) as manager:
        manager.add_request(prompt, request_id="s", max_new_tokens=6, streaming=True)
        outputs = list(manager.request_id_iter("s"))
    assert [output.generated_tokens for output in outputs] == [answer[:count] for count in range(1, 7)]
    assert [output.is_finished() for output in outputs] == [False] * 5 + [True]
    assert {output.status for output in outputs[:-1]} == {RequestStatus.DECODING}
    assert outputs[-1].finish_reason == "length"
    assert outputs[0].finish_reason is None


def test_streams_of_several_requests_do_not_mix(model, oracle, tools):
    prompts = [tools.prompt(4 + seed, seed) for seed in range(5)]
    with tools.running(model, max_batch_tokens=8) as manager:
        ids = manager.add_requests(prompts, max_new_tokens=5, streaming=True)
        streams = [tools.in_thread(lambda id=id: list(manager.request_id_iter(id))) for id in ids]
        for prompt, stream in zip(prompts, streams, strict=True):
            assert [output.generated_tokens for output in stream()] == [
                oracle.greedy(prompt, count) for count in range(1, 6)
            ]


def test_outputs_are_snapshots_that_the_engine_does_not_touch_again(model, oracle, tools):
    prompt = tools.prompt(5)
    with tools.running(model) as manager:
        manager.add_request(prompt, request_id="s", max_new_tokens=4, streaming=True)
        first, *_ = list(manager.request_id_iter("s"))
    assert first.generated_tokens == oracle.greedy(prompt, 1)
    first.prompt_ids.append(1)
    assert prompt == tools.prompt(5)


def test_iterating_over_the_manager_yields_everything_and_ends_with_it(model, oracle, tools):
    prompts = {f"p{seed}": tools.prompt(5 + seed, seed) for seed in range(6)}
    with tools.running(model) as manager:
        for name, prompt in prompts.items():
            manager.add_request(prompt, request_id=name, max_new_tokens=4)
        everything = tools.in_thread(lambda: list(manager))
        manager.stop()
        outputs = {output.request_id: output.generated_tokens for output in everything()}
    assert outputs == {name: oracle.greedy(prompt, 4) for name, prompt in prompts.items()}


def test_many_readers_share_the_queue_without_loss_or_repetition(model, tools):
    with tools.running(model) as manager:
        ids = manager.add_requests([tools.prompt(3, seed) for seed in range(40)], max_new_tokens=2)
        readers = [tools.in_thread(lambda: [output.request_id for output in manager]) for _ in range(4)]
        manager.stop()
        received = [request_id for reader in readers for request_id in reader()]
    assert sorted(received) == sorted(ids)


def test_an_output_is_never_missed_between_its_end_and_its_delivery(model, tools):
    with tools.running(model) as manager:
        deliver, is_ending = manager._router.deliver, threading.Event()

        def deliver_slowly(outputs):
            is_ending.set()
            time.sleep(0.1)
            deliver(outputs)

        manager._router.deliver = deliver_slowly
        request_id = manager.add_request([1], max_new_tokens=1)
        assert is_ending.wait(tools.patience)
        # Without a timeout None would mean that nothing can come any more.
        assert manager.get_result(request_id) is not None


def test_timestamps_and_lifespan_are_recorded_in_order(model, tools):
    with tools.running(model) as manager:
        timed = manager.get_result(manager.add_request([1, 2], max_new_tokens=4, record_timestamps=True))
        untimed = manager.get_result(manager.add_request([1, 2], max_new_tokens=4))
    start, end = timed.lifespan
    assert timed.created_time <= start <= timed.timestamps[0]
    assert timed.timestamps == sorted(timed.timestamps)
    assert len(timed.timestamps) == 4
    assert timed.timestamps[-1] <= end
    assert untimed.timestamps is None


# ------------------------------------------------------------------------------------------------------ handlers


def collect_on_a_loop(manager, request_ids, before, after=lambda: None, patience=30.0):
    """Registers a handler for each id on a new event loop, around `before` and `after`, until all have ended."""

    async def main():
        received: dict[str, list[GenerationOutput]] = {request_id: [] for request_id in request_ids}
        threads = set()
        all_ended = asyncio.Event()

        def receive(output):
            threads.add(threading.get_ident())
            received[output.request_id].append(output)
            if all(outputs and outputs[-1].is_finished() for outputs in received.values()):
                all_ended.set()

        before()
        for request_id in request_ids:
            manager.register_result_handler(request_id, receive)
        after()
        await asyncio.wait_for(all_ended.wait(), patience)
        assert threads == {threading.get_ident()}, "a handler ran outside its event loop"
        return received

    return asyncio.run(main())


@pytest.mark.parametrize("registered_first", [True, False])
def test_a_handler_gets_every_token_on_its_event_loop(model, oracle, tools, registered_first):
    prompt = tools.prompt(9)
    with tools.running(model) as manager:

        def add():
            manager.add_request(prompt, request_id="h", max_new_tokens=5, streaming=True)
            manager.add_request(prompt, request_id="once", max_new_tokens=5)
            if not registered_first:
                tools.wait_until(lambda: manager.stats().requests_finished == 2)

        order = {"before": lambda: None, "after": add} if registered_first else {"before": add}
        received = collect_on_a_loop(manager, ["h", "once"], **order)
        assert [output.generated_tokens for output in received["h"]] == [
            oracle.greedy(prompt, count) for count in range(1, 6)
        ]
        assert [output.generated_tokens for output in received["once"]] == [oracle.greedy(prompt, 5)]
        assert manager.get_result(timeout=0.05) is None


def test_a_handler_is_removed_with_the_final_output(model, tools):
    with tools.running(model) as manager:
        collect_on_a_loop(manager, ["x"], before=lambda: manager.add_request([1, 2], request_id="x", max_new_tokens=2))
        manager.add_request([3, 4], request_id="x", max_new_tokens=2)
        assert manager.get_result("x", timeout=tools.patience).prompt_ids == [3, 4]


def test_a_client_that_closed_its_loop_disturbs_nobody(model, oracle, tools):
    prompt = tools.prompt(7)

    async def register(manager):
        manager.register_result_handler("gone", lambda output: None)

    with tools.gated(model) as (manager, gate):
        asyncio.run(register(manager))
        manager.add_request(prompt, request_id="gone", max_new_tokens=3, streaming=True)
        other = manager.add_request(prompt, max_new_tokens=3)
        gate.open()
        assert manager.get_result(other, timeout=tools.patience).generated_tokens == oracle.greedy(prompt, 3)


def test_a_callback_that_can_never_be_called_is_refused_at_once(model, tools):
    async def coroutine(output):
        pass

    async def register(manager, callback):
        manager.register_result_handler("x", callback)

    with tools.running(model) as manager:
        for callback in (None, coroutine):
            with pytest.raises(TypeError, match="callback must be a plain function"):
                asyncio.run(register(manager, callback))
        with pytest.raises(RuntimeError, match="running event loop"):
            manager.register_result_handler("x", print)


def test_a_late_handler_takes_one_request_of_a_reused_id():
    router = OutputRouter(threading.RLock())
    first = GenerationOutput("x", status=RequestStatus.FINISHED)
    second = GenerationOutput("x", status=RequestStatus.FINISHED)
    router.deliver([first, GenerationOutput("y"), second])

    async def register():
        received = []
        router.register("x", asyncio.get_running_loop(), received.append)
        await asyncio.sleep(0)
        return received

    assert [output is first for output in asyncio.run(register())] == [True]
    assert router.get("x", 0, lambda: True) is second
    assert router.get(None, 0, lambda: True).request_id == "y"


def test_reading_by_id_only_does_not_pile_up_what_was_taken():
    router = OutputRouter(threading.RLock())
    for index in range(1000):
        router.deliver([GenerationOutput(f"r{index}")])
        assert router.get(f"r{index}", 0, lambda: True) is not None
    assert len(router._arrivals) < 200
    assert router.get(None, 0, lambda: True) is None
