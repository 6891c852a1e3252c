"""What cannot work is refused in the caller's thread, by name, and disturbs nobody else."""

from __future__ import annotations

import logging
import queue
import re

import numpy as np
import pytest
import torch

from cbtriton import RequestStatus
from cbtriton import manager as manager_module
from cbtriton.manager import ContinuousBatchingManager

BAD_PROMPTS = [
    ([], ValueError, "a prompt must have at least one token, got an empty one"),
    ([5, 99_999], ValueError, "token ids must be from 0 to 127 (the model's embedding), got 99999"),
    ([128], ValueError, "token ids must be from 0 to 127 (the model's embedding), got 128"),
    ([5, -1], ValueError, "token ids must be from 0 to 127 (the model's embedding), got -1"),
    ([1.5], TypeError, "a prompt must hold integers, got float"),
    ([True], TypeError, "a prompt must hold integers, got bool"),
    ([[1, 2]], TypeError, "a prompt must hold integers, got list"),
    ("text", TypeError, "a prompt must be a list of token ids, got str"),
    ({"input_ids": [1]}, TypeError, "a prompt must be a list of token ids, got dict"),
    (7, TypeError, "a prompt must be a list of token ids, got int"),
    (None, TypeError, "a prompt must be a list of token ids, got NoneType"),
]
BAD_ARGUMENTS = [
    ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1, got 0"),
    ({"max_new_tokens": -3}, ValueError, "max_new_tokens"),
    ({"max_new_tokens": "8"}, TypeError, "max_new_tokens"),
    ({"max_new_tokens": 2000}, ValueError, "set max_new_tokens=510 or less"),
    ({"request_id": 7}, TypeError, "request_id must be a string, got int"),
    ({"cache_salt": 7}, TypeError, "cache_salt must be a string, got int"),
    ({"eos_token_id": 128}, ValueError, "eos_token_id"),
    ({"eos_token_id": list(range(17))}, ValueError, "eos_token_id can have at most 16 ids, got 17"),
    ({"seed": -1}, ValueError, "seed"),
    ({"min_new_tokens": -1}, ValueError, "min_new_tokens"),
    ({"stop_sequences": [[]]}, ValueError, "stop_sequences must not contain an empty one"),
    ({"stop_sequences": [[500]]}, ValueError, "a token of stop_sequences"),
    ({"stop_sequences": "ab"}, TypeError, "stop_sequences must be a list of lists of token ids"),
    ({"stop_strings": "x"}, ValueError, "stop_strings need a tokenizer; set manager.tokenizer"),
    ({"temperature": 0.5}, ValueError, "set ContinuousBatchingConfig.per_request_processors=True"),
    ({"encoder_repetition_penalty": 2.0}, TypeError, "encoder_repetition_penalty needs a logits processor that is not"),
    ({"tempreature": 0.5}, TypeError, "a request has no argument 'tempreature'; accepted are seed"),
]


@pytest.fixture
def manager(model, tools):
    with tools.running(model) as manager:
        yield manager


@pytest.mark.parametrize(("prompt", "error", "message"), BAD_PROMPTS)
def test_a_bad_prompt_is_refused_at_the_call_with_what_is_allowed(model, manager, tools, prompt, error, message):
    with pytest.raises(error, match=re.escape(message)):
        manager.add_request(prompt)
    with pytest.raises(error, match=re.escape(f"inputs[1]: {message}")):
        manager.add_requests([[1], prompt])
    assert manager.stats().requests_added == 0
    manager.destroy()
    with pytest.raises(error, match=re.escape(f"inputs[1]: {message}")):
        model.generate_batch([[1], prompt], tools.options(), tools.small(), max_new_tokens=1)
    assert not hasattr(model, "_cached_continuous_batching_manager")


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_ARGUMENTS)
def test_a_bad_argument_is_refused_by_name(manager, arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        manager.add_request([1, 2, 3], **arguments)


@pytest.mark.parametrize(
    "prompt",
    [(1, 2, 3), torch.tensor([1, 2, 3]), torch.tensor([1, 2, 3], dtype=torch.int32), np.array([1, 2, 3]), range(1, 4)],
    ids=["tuple", "tensor", "int32", "array", "range"],
)
def test_any_sequence_of_integers_is_a_prompt(model, oracle, tools, prompt):
    outputs = model.generate_batch([prompt], tools.options(), tools.small(), max_new_tokens=3)
    assert outputs["req_0"].prompt_ids == [1, 2, 3]
    assert tools.tokens(outputs) == [oracle.greedy([1, 2, 3], 3)]


def test_a_hundred_bad_requests_each_get_their_own_error_and_the_engine_goes_on(manager, oracle, tools):
    good = tools.prompt(5)
    for index in range(100):
        prompt, error, message = BAD_PROMPTS[index % len(BAD_PROMPTS)]
        with pytest.raises(error, match=re.escape(message)):
            manager.add_request(prompt, request_id="same")
    manager.add_request(good, request_id="same", max_new_tokens=3)
    assert manager.get_result("same").generated_tokens == oracle.greedy(good, 3)


def test_an_id_that_is_in_flight_is_refused_and_free_again_once_its_result_was_seen(model, oracle, tools):
    first, second = tools.prompt(20), tools.prompt(30)
    with tools.gated(model) as (manager, gate):
        manager.add_request(first, request_id="x", max_new_tokens=12)
        for num_steps in (0, 3):
            gate.step(num_steps)
            with pytest.raises(ValueError, match="request id 'x' is in flight; use another id or wait"):
                manager.add_request(second, request_id="x", max_new_tokens=12)
        gate.open()
        assert manager.get_result("x", timeout=tools.patience).generated_tokens == oracle.greedy(first, 12)
        manager.add_request(second, request_id="x", max_new_tokens=12)
        assert manager.get_result("x", timeout=tools.patience).generated_tokens == oracle.greedy(second, 12)


def test_automatic_ids_avoid_those_of_the_caller(manager, oracle, tools):
    manager.add_request(tools.prompt(5), request_id="req_0", max_new_tokens=200)
    assert manager.add_request(tools.prompt(6), max_new_tokens=3) == "req_1"
    assert manager.get_result("req_1").generated_tokens == oracle.greedy(tools.prompt(6), 3)


def test_an_id_that_an_extra_sequence_would_need_counts_as_taken(model, tools):
    with tools.running(model, tools.options(do_sample=True, num_return_sequences=2)) as manager:
        manager.add_request([1, 2], request_id="x__child#0", max_new_tokens=200)
        with pytest.raises(ValueError, match="request id 'x' is in flight"):
            manager.add_request([1, 2], request_id="x", max_new_tokens=2)
        manager.add_request([1, 2], request_id="y", max_new_tokens=2)
        assert manager.get_result("y").error is None


def test_a_request_that_can_never_fit_fails_alone_with_the_sizes(model, oracle, tools):
    prompts = [tools.prompt(10), tools.prompt(200), tools.prompt(11)]
    outputs = model.generate_batch(prompts, tools.options(), tools.small(num_blocks=8), max_new_tokens=5)
    assert [output.status for output in outputs.values()] == [
        RequestStatus.FINISHED,
        RequestStatus.FAILED,
        RequestStatus.FINISHED,
    ]
    failed = outputs["req_1"]
    assert failed.error == (
        "inputs[1]: a prompt of 200 tokens needs 13 blocks of 16 tokens, and the cache has 8; "
        "shorten it, or raise num_blocks"
    )
    assert (failed.prompt_ids, failed.generated_tokens, failed.finish_reason) == (prompts[1], [], "error")
    assert outputs["req_2"].generated_tokens == oracle.greedy(prompts[2], 5)
    with tools.running(model, num_blocks=8) as manager:
        with pytest.raises(ValueError, match="needs 13 blocks of 16 tokens, and the cache has 8"):
            manager.add_request(prompts[1], max_new_tokens=5)
        # 121 + 9 tokens: the last one needs no place, the 129th does.
        with pytest.raises(ValueError, match=re.escape("set max_new_tokens=8 or less")):
            manager.add_request(tools.prompt(121), max_new_tokens=9)


def test_a_prompt_longer_than_the_positions_of_the_model_is_refused(model, tools):
    message = "needs 513 places in the cache, and a sequence has at most 512"
    with tools.running(model, num_blocks=100) as manager, pytest.raises(ValueError, match=message):
        manager.add_request(tools.prompt(513))


def test_several_requests_are_taken_all_or_none(manager, tools):
    with pytest.raises(ValueError, match=re.escape("inputs[2]:")):
        manager.add_requests([[1], [2], []], max_new_tokens=2)
    assert manager.get_result(timeout=0.05) is None
    assert manager.add_request([1], max_new_tokens=1) == "req_0"


# ----------------------------------------------------------------------------------------------------- full queues


def test_a_full_queue_refuses_after_its_patience_and_keeps_nothing(model, tools, monkeypatch):
    monkeypatch.setattr(manager_module, "FULL_QUEUE_TIMEOUT", 0.1)
    with tools.gated(model, max_queue_size=2, max_requests_per_batch=1) as (manager, gate):
        accepted = [manager.add_request([1, 2], max_new_tokens=9)]
        # From its first result on it does not count as waiting.
        gate.step(1)
        accepted += [manager.add_request([1, 2], max_new_tokens=2) for _ in range(2)]
        with pytest.raises(queue.Full, match=r"2 requests \(max_queue_size\) have been waiting for 0.1 s"):
            manager.add_request([1, 2], request_id="late", max_new_tokens=2)
        assert not manager.is_in_flight("late")
        gate.open()
        for request_id in accepted:
            assert manager.get_result(request_id, timeout=tools.patience).status == RequestStatus.FINISHED
        manager.add_request([1, 2], request_id="late", max_new_tokens=2)
        assert manager.get_result("late", timeout=tools.patience) is not None


def test_where_the_queue_fills_up_in_the_middle_those_before_are_cancelled(model, tools, monkeypatch):
    monkeypatch.setattr(manager_module, "FULL_QUEUE_TIMEOUT", 0.1)
    with tools.gated(model, max_queue_size=2, max_requests_per_batch=1) as (manager, gate):
        with pytest.raises(queue.Full):
            manager.add_requests([[1, 2]] * 9, max_new_tokens=50)
        gate.open()
        tools.wait_until(lambda: manager.stats().requests_cancelled == manager.stats().requests_added)
        assert manager.stats().num_running == manager.stats().num_waiting == 0


def test_room_in_the_queue_is_noticed_as_soon_as_a_request_runs(model, tools, monkeypatch):
    monkeypatch.setattr(manager_module, "FULL_QUEUE_TIMEOUT", 10 * tools.patience)
    with tools.gated(model, max_queue_size=1) as (manager, gate):
        with manager.pause():
            manager.add_request([1, 2], max_new_tokens=200)
            second = tools.in_thread(lambda: manager.add_request([1, 2], max_new_tokens=2))
            tools.wait_until(lambda: manager.is_in_flight("req_1"))
        # The first one is nowhere near its end: nothing is delivered that could wake the waiting caller.
        gate.let(2)
        assert second() == "req_1"


def test_a_batch_larger_than_the_queue_waits_for_room(model, oracle, tools, monkeypatch):
    monkeypatch.setattr(manager_module, "FULL_QUEUE_TIMEOUT", 0.0)
    prompts = [tools.prompt(5, seed) for seed in range(6)]
    config = tools.small(max_queue_size=1, max_requests_per_batch=1)
    outputs = model.generate_batch(prompts, tools.options(), config, max_new_tokens=4)
    assert tools.tokens(outputs) == [oracle.greedy(prompt, 4) for prompt in prompts]


@pytest.mark.parametrize("hard_stop", [False, True])
def test_whoever_waits_for_room_learns_that_the_manager_stops(model, tools, hard_stop):
    with tools.gated(model, max_queue_size=1, max_requests_per_batch=1) as (manager, gate):
        manager.add_request([1, 2], max_new_tokens=9)
        # From its first result on the first one does not count as waiting.
        gate.step(1)
        manager.add_request([1, 2], max_new_tokens=2)
        late = tools.in_thread(lambda: manager.add_request([1, 2], request_id="late"))
        tools.wait_until(lambda: manager.is_in_flight("late"))
        manager.stop(block=False, hard_stop=hard_stop)
        with pytest.raises(RuntimeError, match="cannot add a request: the manager is stopping"):
            late()
        gate.open()


# ------------------------------------------------------------------------------------------------ generation options


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_beams", 3),
        ("penalty_alpha", 0.6),
        ("guidance_scale", 2.0),
        ("prompt_lookup_num_tokens", 3),
        ("assistant_early_exit", 1),
        ("dola_layers", "high"),
        ("max_time", 1.0),
        ("use_cache", False),
        ("output_scores", True),
        ("output_hidden_states", True),
        ("token_healing", True),
        ("cache_implementation", "static"),
        ("some_future_option", 1),
    ],
)
def test_an_option_that_is_not_supported_raises_and_is_named(model, tools, option, value):
    options = tools.options()
    setattr(options, option, value)
    with pytest.raises(ValueError, match=f"{option}="):
        model.generate_batch([[1, 2]], options, tools.small(), max_new_tokens=2)
    with pytest.raises(ValueError, match=f"{option}="):
        ContinuousBatchingManager(model, options, tools.small())


@pytest.mark.parametrize(
    ("option", "value"), [("encoder_repetition_penalty", 1.8), ("encoder_no_repeat_ngram_size", 2)]
)
def test_a_dropped_processor_warns_and_can_be_made_to_raise(model, oracle, tools, caplog, option, value):
    options = tools.options(**{option: value})
    outputs = model.generate_batch([tools.prompt(5)], options, tools.small(), max_new_tokens=3)
    assert tools.tokens(outputs) == [oracle.greedy(tools.prompt(5), 3)]
    assert len([record for record in caplog.records if f"{option}=" in record.message]) == 1
    with pytest.raises(ValueError, match=f"{option}="):
        model.generate_batch([[1]], options, tools.small(drop_unsupported_processors=False), max_new_tokens=1)


def test_supported_options_do_not_warn(model, tools, caplog, recwarn):
    options = tools.options(
        do_sample=True,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.01,
        min_new_tokens=2,
        num_return_sequences=2,
        repetition_penalty=1.2,
        no_repeat_ngram_size=2,
        typical_p=0.9,
    )
    model.generate_batch([[1, 2]], options, tools.small(), max_new_tokens=3)
    records = [record for record in caplog.records if record.name.startswith("cbtriton")]
    assert not [record for record in records if record.levelno >= logging.WARNING]
    assert not recwarn.list


def test_no_limit_means_as_far_as_the_cache_or_the_model_allows(model, oracle, tools):
    model.config.max_position_embeddings = 80
    for num_blocks, num_tokens in ((4, 4 * 16 - 5 + 1), (100, 80 - 5 + 1)):
        with tools.running(model, num_blocks=num_blocks) as manager:
            output = manager.get_result(manager.add_request(tools.prompt(5)), timeout=120)
            assert (output.status, output.finish_reason) == (RequestStatus.FINISHED, "length")
            assert len(output.generated_tokens) == num_tokens
            assert output.generated_tokens[:50] == oracle.greedy(tools.prompt(5), 50)
            following = manager.get_result(manager.add_request(tools.prompt(6), max_new_tokens=2))
            assert following.generated_tokens == oracle.greedy(tools.prompt(6), 2)
