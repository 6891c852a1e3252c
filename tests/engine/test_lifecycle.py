"""Starting, stopping, dying and starting again: in any order, with nobody left waiting and the model given back."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import time

import pytest
import torch
from transformers import AttentionInterface, GenerationConfig

import cbtriton
from cbtriton import EngineDiedError, RequestStatus
from cbtriton.manager import ContinuousBatchingManager

CHANGEABLE = ("_attn_implementation", "use_cache", "eos_token_id", "pad_token_id")


def visible_state(model):
    """What a caller could notice about the model."""
    return {
        "config": {name: getattr(model.config, name) for name in CHANGEABLE},
        "training": [module.training for module in model.modules()],
        "forwards": [name for name, module in model.named_modules() if "forward" in vars(module)],
        "generation_config": model.generation_config.to_dict(),
        "weights": {name: weight._version for name, weight in model.named_parameters()},
    }


def break_after(model, num_steps):
    """Makes the model raise in the forward pass after `num_steps` of them."""
    remaining = iter(range(num_steps))

    def fail(*_):
        if next(remaining, None) is None:
            raise ZeroDivisionError("the model broke")

    return model.register_forward_pre_hook(fail)


# ------------------------------------------------------------------------------------------------------- stopping


@pytest.mark.parametrize("use_async_batching", [False, True])
def test_a_manager_that_was_idle_for_long_serves_the_next_request(model, oracle, tools, use_async_batching):
    with tools.running(model, use_async_batching=use_async_batching) as manager:
        for length in (5, 9):
            time.sleep(0.5)
            request_id = manager.add_request(tools.prompt(length), max_new_tokens=5)
            output = manager.get_result(request_id, timeout=tools.patience)
            assert output.generated_tokens == oracle.greedy(tools.prompt(length), 5)


def test_stop_finishes_everything_and_refuses_more(model, oracle, tools):
    prompts = [tools.prompt(5, seed) for seed in range(5)]
    with tools.gated(model) as (manager, gate):
        ids = manager.add_requests(prompts, max_new_tokens=6)
        gate.step(2)
        manager.stop(block=False)
        with pytest.raises(RuntimeError, match="cannot add a request: the manager is stopping"):
            manager.add_request([1])
        gate.open()
        manager.stop()
        assert not manager.is_running()
        for prompt, request_id in zip(prompts, ids, strict=True):
            assert manager.get_result(request_id).generated_tokens == oracle.greedy(prompt, 6)
        with pytest.raises(RuntimeError, match=r"the manager is stopped; call start\(\)"):
            manager.add_request([1])


def test_a_hard_stop_fails_what_is_left_with_its_reason(model, oracle, tools):
    with tools.gated(model, max_requests_per_batch=1) as (manager, gate):
        ids = manager.add_requests([tools.prompt(5), tools.prompt(6)], max_new_tokens=6)
        gate.step(3)
        manager.stop(block=False, hard_stop=True)
        gate.let(1)
        manager.join(time.perf_counter(), timeout=tools.patience)
        outputs = [manager.get_result(request_id) for request_id in ids]
        assert [output.status for output in outputs] == [RequestStatus.FAILED] * 2
        assert {output.error for output in outputs} == {"the manager was stopped before this request finished"}
        assert outputs[0].generated_tokens == oracle.greedy(tools.prompt(5), 6)[:4]
        assert outputs[1].generated_tokens == []


def test_stop_with_a_timeout_returns_while_requests_run(model, tools):
    with tools.gated(model) as (manager, gate):
        manager.add_request([1, 2], max_new_tokens=3)
        gate.wait()
        manager.stop(timeout=0.05)
        assert manager.is_running()


def test_requests_added_before_start_are_served_and_failed_if_it_never_starts(model, oracle, tools):
    manager = ContinuousBatchingManager(model, tools.options(), tools.small())
    request_id = manager.add_request(tools.prompt(5), max_new_tokens=3)
    manager.start()
    assert manager.get_result(request_id).generated_tokens == oracle.greedy(tools.prompt(5), 3)
    manager.destroy()

    manager = ContinuousBatchingManager(model, tools.options(), tools.small())
    request_id = manager.add_request(tools.prompt(5), max_new_tokens=3)
    manager.stop()
    output = manager.get_result(request_id)
    assert (output.status, output.finish_reason) == (RequestStatus.FAILED, "error")
    assert "stopped before it ran" in output.error


def test_every_order_of_life_cycle_calls_is_harmless(model, oracle, tools):
    before = visible_state(model)
    manager = ContinuousBatchingManager(model, tools.options(), tools.small())
    calls = ("stop", "warmup", "warmup", "stop", "start", "start", "warmup", "stop", "stop", "warmup", "start")
    runs_after = (False, False, False, False, True, True, True, False, False, False, True)
    for call, runs in zip(calls, runs_after, strict=True):
        getattr(manager, call)()
        assert manager.is_running() == runs
    request_id = manager.add_request(tools.prompt(5), max_new_tokens=3)
    assert manager.get_result(request_id).generated_tokens == oracle.greedy(tools.prompt(5), 3)
    manager.destroy()
    manager.destroy()
    manager.stop()
    assert visible_state(model) == before
    for call in ("start", "warmup"):
        with pytest.raises(RuntimeError, match="destroyed; make a new one"):
            getattr(manager, call)()
    with pytest.raises(RuntimeError, match="destroyed; make a new one"):
        manager.add_request([1])


def test_start_right_after_a_stop_that_did_not_wait_serves_again(model, oracle, tools):
    with tools.running(model) as manager:
        for _ in range(20):
            manager.stop(block=False)
            manager.start()
            request_id = manager.add_request(tools.prompt(5), max_new_tokens=2)
            assert manager.get_result(request_id).generated_tokens == oracle.greedy(tools.prompt(5), 2)


def test_destroy_and_start_from_two_threads_end_destroyed(model, tools):
    for _ in range(10):
        manager = ContinuousBatchingManager(model, tools.options(), tools.small())
        manager.start()
        destroyed = tools.in_thread(manager.destroy)
        with contextlib.suppress(RuntimeError):
            manager.start()
        destroyed()
        assert not manager.is_running()


def test_a_stopped_manager_still_tells_its_counters(model, tools):
    with tools.running(model) as manager:
        manager.get_result(manager.add_request(tools.prompt(5), max_new_tokens=3))
        manager.stop()
        assert manager.stats().generated_tokens == 3
        assert [record.prefill_tokens + record.decode_tokens for record in manager.step_records()] == [5, 1, 1]


# --------------------------------------------------------------------------------------------------------- dying


def test_death_reaches_callers_that_wait_and_callers_that_come_later(model, tools):
    with tools.running(model) as manager:
        hook = break_after(model, 3)
        waiting_for_anything = tools.in_thread(lambda: manager.get_result(timeout=60))
        iterating = tools.in_thread(lambda: list(manager.request_id_iter("x")))
        request_id = manager.add_request(tools.prompt(5), request_id="x", max_new_tokens=10)
        waiting = tools.in_thread(lambda: manager.get_result(request_id, timeout=60))
        for caller in (
            waiting,
            waiting_for_anything,
            lambda: iterating() or manager.get_result("x"),
            lambda: manager.add_request([1]),
            lambda: manager.get_result("x"),
            lambda: manager.get_result(),
            lambda: manager.pause().__enter__(),
        ):
            with pytest.raises(
                EngineDiedError, match="the engine died of ZeroDivisionError: the model broke"
            ) as caught:
                caller()
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert not manager.is_running()
        hook.remove()


def test_results_from_before_the_death_can_still_be_read(model, oracle, tools):
    with tools.running(model) as manager:
        hook = break_after(model, 4)
        ids = manager.add_requests([tools.prompt(5), tools.prompt(6)], max_new_tokens=3)
        manager.add_request(tools.prompt(7), max_new_tokens=100)
        tools.wait_until(lambda: not manager.is_running())
        for request_id, length in zip(ids, (5, 6), strict=True):
            assert manager.get_result(request_id).generated_tokens == oracle.greedy(tools.prompt(length), 3)
        hook.remove()


def test_a_dead_manager_can_be_started_again(model, oracle, tools):
    with tools.running(model) as manager:
        hook = break_after(model, 0)
        request_id = manager.add_request([1, 2])
        with pytest.raises(EngineDiedError):
            manager.get_result(request_id)
        hook.remove()
        manager.start()
        request_id = manager.add_request(tools.prompt(5), max_new_tokens=3)
        assert manager.get_result(request_id).generated_tokens == oracle.greedy(tools.prompt(5), 3)


def test_an_engine_too_broken_to_end_its_requests_still_reaches_its_callers(model, tools, monkeypatch):
    # Its thread ends with an exception of its own then.
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    manager = ContinuousBatchingManager(model, tools.options(), tools.small())
    manager.start()
    hook = break_after(model, 0)
    monkeypatch.setattr(type(manager._engine), "fail_all", lambda self, error: 1 / 0)
    request_id = manager.add_request([1, 2])
    with pytest.raises(EngineDiedError, match="the model broke"):
        tools.in_thread(lambda: manager.get_result(request_id))()
    assert not manager.is_running()
    monkeypatch.undo()
    hook.remove()
    manager.destroy()


def test_generate_batch_raises_when_the_engine_dies_and_works_again_after(model, oracle, tools):
    before = visible_state(model)
    manager = model.init_continuous_batching(tools.options(), tools.small())
    manager.warmup()
    manager.stop(keep_for_next_session=True)
    hook = break_after(model, 2)
    with pytest.raises(EngineDiedError, match="the model broke"):
        model.generate_batch([tools.prompt(5)] * 3, tools.options(), tools.small(), max_new_tokens=5)
    hook.remove()
    assert visible_state(model) == before
    outputs = model.generate_batch([tools.prompt(5)], tools.options(), tools.small(), max_new_tokens=5)
    assert tools.tokens(outputs) == [oracle.greedy(tools.prompt(5), 5)]


def test_weights_of_nan_fail_requests_and_the_engine_survives(model, oracle, tools):
    with tools.running(model) as manager:
        weight = model.model.norm.weight
        good = weight.detach().clone()
        with manager.pause(), torch.no_grad():
            weight.fill_(float("nan"))
        for _ in range(3):
            output = manager.get_result(manager.add_request(tools.prompt(5), max_new_tokens=3))
            assert (output.status, output.generated_tokens) == (RequestStatus.FAILED, [])
            assert "NaN" in output.error
        with manager.pause(), torch.no_grad():
            weight.copy_(good)
        output = manager.get_result(manager.add_request(tools.prompt(5), max_new_tokens=3))
        assert output.generated_tokens == oracle.greedy(tools.prompt(5), 3)


# ------------------------------------------------------------------------------------- the model is given back


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("raises", [False, True])
def test_model_and_configurations_are_as_before_also_after_an_exception(model, tools, training, raises):
    model.train(training)
    # Not all modules need to be in the same mode.
    model.model.layers[0].eval()
    options = GenerationConfig(do_sample=False, eos_token_id=None, max_new_tokens=3)
    options_before, before = copy.deepcopy(options.to_dict()), visible_state(model)
    config = tools.small()
    threads = threading.active_count()
    try:
        with model.continuous_batching_context_manager(options, continuous_batching_config=config) as manager:
            manager.get_result(manager.add_request([1, 2]))
            manager.add_request([1, 2], max_new_tokens=60)
            if raises:
                raise KeyError("the caller's own mistake")
    except KeyError:
        assert raises
    assert visible_state(model) == before
    assert options.to_dict() == options_before
    assert config == tools.small()
    assert threading.active_count() == threads


def test_a_training_step_works_after_and_during_generation(model, tools):
    model.train()
    inputs = torch.tensor([tools.prompt(20)])
    model.generate_batch([tools.prompt(5)], tools.options(), tools.small(), max_new_tokens=2)
    model(inputs, labels=inputs).loss.backward()
    with tools.running(model) as manager:
        manager.get_result(manager.add_request([1, 2], max_new_tokens=2))
        with manager.pause():
            assert model.training
            model(inputs, labels=inputs).loss.backward()
        assert manager.get_result(manager.add_request([1, 2], max_new_tokens=2)).error is None
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_model_serves_one_manager_at_a_time(model, oracle, tools):
    with tools.running(model) as manager:
        with pytest.raises(RuntimeError, match="in use by another continuous batching manager"):
            ContinuousBatchingManager(model, tools.options(), tools.small())
        with pytest.raises(RuntimeError, match="in use by another continuous batching manager"):
            model.generate_batch([[1]], tools.options(), tools.small(), max_new_tokens=1)
        request_id = manager.add_request(tools.prompt(5), max_new_tokens=3)
        assert manager.get_result(request_id).generated_tokens == oracle.greedy(tools.prompt(5), 3)


def test_two_managers_of_one_model_may_take_turns(model, oracle, tools):
    first, second = (ContinuousBatchingManager(model, tools.options(), tools.small()) for _ in range(2))
    for manager in (first, second, first):
        manager.start()
        request_id = manager.add_request(tools.prompt(5), max_new_tokens=3)
        assert manager.get_result(request_id).generated_tokens == oracle.greedy(tools.prompt(5), 3)
        manager.stop(keep_for_next_session=True)
    first.destroy()
    second.destroy()


def test_two_models_may_run_at_the_same_time(oracle, tools):
    models = [cbtriton.enable(copy.deepcopy(oracle.model)) for _ in range(2)]
    with tools.running(models[0]) as first, tools.running(models[1]) as second:
        ids = [manager.add_request(tools.prompt(5), max_new_tokens=6) for manager in (first, second)]
        outputs = [manager.get_result(name) for manager, name in zip((first, second), ids, strict=True)]
    assert [output.generated_tokens for output in outputs] == [oracle.greedy(tools.prompt(5), 6)] * 2


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_callers_modes_do_not_reach_the_engine(model, oracle, tools, mode):
    with mode():
        outputs = model.generate_batch(
            [tools.prompt(20)], tools.options(), tools.small(), max_new_tokens=5, persistent_manager=True
        )
    again = model.generate_batch([tools.prompt(20)], max_new_tokens=5)
    assert tools.tokens(outputs) == tools.tokens(again) == [oracle.greedy(tools.prompt(20), 5)]


def test_a_model_loaded_in_inference_mode_runs(oracle, tools):
    with torch.inference_mode():
        model = cbtriton.enable(copy.deepcopy(oracle.model))
    outputs = model.generate_batch([tools.prompt(20)], tools.options(), tools.small(), max_new_tokens=5)
    assert tools.tokens(outputs) == [oracle.greedy(tools.prompt(20), 5)]


def test_switching_the_attention_is_undone_by_stop_and_for_the_own_model_only(model, oracle, tools):
    manager = ContinuousBatchingManager(model, tools.options(), tools.small())
    before = model.config._attn_implementation
    manager.switch_to_cb_friendly_attn(model, auto_switch_to_flash=False)
    assert model.config._attn_implementation != before
    assert {implementation for _, implementation in manager.kernel_names} == {"reference"}
    with pytest.raises(ValueError, match="the one that this manager was made for"):
        manager.switch_to_cb_friendly_attn(copy.deepcopy(oracle.model))
    manager.stop()
    assert model.config._attn_implementation == before


# -------------------------------------------------------------------------------------------- persistent managers


def test_a_persistent_manager_serves_every_call_in_order_and_keeps_its_prefixes(model, oracle, tools):
    before = visible_state(model)
    prompts = [tools.prompt(33, seed) for seed in range(3)]
    ids = []
    for _ in range(3):
        outputs = model.generate_batch(
            prompts, tools.options(), tools.small(), persistent_manager=True, max_new_tokens=4
        )
        assert tools.tokens(outputs) == [oracle.greedy(prompt, 4) for prompt in prompts]
        assert [output.prompt_ids for output in outputs.values()] == prompts
        assert visible_state(model) == before
        ids += outputs
    assert len(set(ids)) == 9
    manager = model.init_continuous_batching()
    assert manager.stats().prefix_cached_tokens == 2 * 3 * 32
    model.destroy_cached_continuous_batching_manager()
    model.destroy_cached_continuous_batching_manager()
    assert model.init_continuous_batching(tools.options(), tools.small()) is not manager


def test_a_call_that_is_not_persistent_ends_the_persistent_manager(model, tools):
    model.generate_batch([[1]], tools.options(), tools.small(), max_new_tokens=1, persistent_manager=True)
    manager = model.init_continuous_batching()
    model.generate_batch([[1]], max_new_tokens=1)
    with pytest.raises(RuntimeError, match="destroyed"):
        manager.start()


def test_other_options_for_a_persistent_manager_are_not_ignored_in_silence(model, tools, caplog):
    for options, config, num_warnings in (
        (tools.options(), tools.small(), 0),
        (tools.options(), tools.small(), 0),
        (tools.options(max_new_tokens=9), tools.small(), 1),
        (tools.options(), tools.small(page_size=32), 1),
        (None, None, 0),
    ):
        caplog.clear()
        manager = model.init_continuous_batching(options, config)
        manager.stop(keep_for_next_session=True)
        assert len([r for r in caplog.records if "keeps the options" in r.message]) == num_warnings
    model.destroy_cached_continuous_batching_manager()


@pytest.mark.parametrize("use_async_batching", [False, True])
def test_the_model_is_given_back_only_when_no_step_runs_on_it(model, tools, use_async_batching):
    attention = model.model.layers[0].self_attn
    with tools.gated(model, use_async_batching=use_async_batching) as (manager, gate):
        manager.add_request(tools.prompt(5), max_new_tokens=20)
        gate.wait()
        ended = tools.in_thread(manager.destroy)
        time.sleep(0.2)
        assert hasattr(attention, "_cbtriton_pages")
        gate.open()
        ended()
        assert not hasattr(attention, "_cbtriton_pages")


def test_the_name_of_an_attention_function_is_used_again_and_never_taken_out(tools):
    """A compiler that goes through all names would stumble over one that disappears, whoever is collected meanwhile."""
    names = AttentionInterface._global_mapping
    model = tools.build(tools.llama_config())
    first = ContinuousBatchingManager(model, tools.options(), tools.small())
    name = first._adapter._name
    second = ContinuousBatchingManager(model, tools.options(), tools.small())
    assert second._adapter._name != name
    number = len(names)
    del first
    gc.collect()
    assert len(names) == number
    with pytest.raises(RuntimeError, match="its manager is gone"):
        names[name]()
    third = ContinuousBatchingManager(model, tools.options(), tools.small())
    assert third._adapter._name != second._adapter._name
    assert len(names) == number
