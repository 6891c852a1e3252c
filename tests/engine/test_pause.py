"""A pause holds the engine between two steps; weights that change meanwhile leave no trace of the old ones."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from cbtriton import enable
from cbtriton.engine import Engine
from cbtriton.model_runner import end_idle_threads


@pytest.fixture
def other_weights(tools):
    return tools.build(tools.llama_config(), seed=1)


def test_requests_survive_a_pause_and_nothing_runs_meanwhile(model, oracle, tools):
    prompts = [tools.prompt(9, seed) for seed in range(4)]
    with tools.running(model, use_async_batching=True) as manager:
        ids = manager.add_requests(prompts, max_new_tokens=30)
        with manager.pause():
            steps = manager.stats().steps
            ids.append(manager.add_request(tools.prompt(8), max_new_tokens=3))
            assert manager.get_result(ids[-1], timeout=0.1) is None
            assert manager.stats().steps == steps
        outputs = [manager.get_result(request_id, timeout=tools.patience) for request_id in ids]
    assert [output.generated_tokens for output in outputs[:4]] == [oracle.greedy(prompt, 30) for prompt in prompts]
    assert outputs[4].generated_tokens == oracle.greedy(tools.prompt(8), 3)


def test_the_last_of_several_threads_to_leave_resumes(model, oracle, tools):
    with tools.running(model) as manager:
        release = threading.Event()
        inside = threading.Barrier(4, timeout=tools.patience)

        def hold():
            with manager.pause():
                inside.wait()
                release.wait(tools.patience)

        holders = [tools.in_thread(hold) for _ in range(3)]
        inside.wait()
        with manager.pause(), manager.pause():
            pass
        request_id = manager.add_request(tools.prompt(5), max_new_tokens=3)
        assert manager.get_result(request_id, timeout=0.1) is None
        release.set()
        assert manager.get_result(request_id).generated_tokens == oracle.greedy(tools.prompt(5), 3)
        for holder in holders:
            holder()


def test_an_exception_inside_a_pause_resumes(model, oracle, tools):
    with tools.running(model) as manager:
        with pytest.raises(KeyError), manager.pause():
            raise KeyError("mine")
        request_id = manager.add_request(tools.prompt(5), max_new_tokens=3)
        assert manager.get_result(request_id).generated_tokens == oracle.greedy(tools.prompt(5), 3)


@pytest.mark.parametrize("call", ["stop", "destroy"])
def test_stopping_inside_a_pause_raises_instead_of_waiting_for_itself(model, tools, call):
    with tools.running(model) as manager:
        with manager.pause(), pytest.raises(RuntimeError, match=r"cannot stop inside pause\(\)"):
            getattr(manager, call)()
        assert manager.is_running()


def test_starting_inside_a_pause_of_a_stopping_manager_raises(model, tools):
    with tools.running(model) as manager:
        with manager.pause():
            tools.in_thread(lambda: manager.stop(block=False))()
            with pytest.raises(RuntimeError, match=r"cannot start inside pause\(\)"):
                manager.start()
        manager.start()
        assert manager.is_running()


def test_another_thread_may_stop_while_one_is_paused(model, tools):
    with tools.running(model) as manager:
        with manager.pause():
            stopped = tools.in_thread(lambda: manager.stop(hard_stop=True))
            tools.wait_until(lambda: manager._state.name == "HARD_STOPPING")
            assert manager.is_running()
        stopped()
        assert not manager.is_running()


@pytest.mark.parametrize("hard_stop", [False, True])
def test_a_pause_that_a_stop_overtakes_raises_instead_of_waiting_for_ever(model, tools, hard_stop):
    threads_may_end = threading.Event()

    def linger(manager):
        run = manager._run
        manager._run = lambda: (run(), threads_may_end.wait(tools.patience))

    # What has ended must count as ended while its thread still winds up.
    with tools.gated(model, before_start=linger) as (manager, gate):
        manager.add_request([1, 2], max_new_tokens=1)
        gate.wait()
        manager.stop(block=False, hard_stop=hard_stop)

        def pause():
            with manager.pause():
                return "paused"

        paused = tools.in_thread(pause)
        tools.wait_until(lambda: manager._pausing_threads)
        gate.open()
        if hard_stop:
            with pytest.raises(RuntimeError, match="cannot pause: the manager is stopped"):
                paused()
        else:
            assert paused() == "paused"
        threads_may_end.set()


def test_pausing_what_does_not_run_raises(model, tools):
    with tools.running(model) as manager:
        manager.stop()
        with pytest.raises(RuntimeError, match="cannot pause: the manager is stopped"), manager.pause():
            pass


def test_a_paused_model_is_the_callers_own(model, oracle, tools):
    prompt = tools.prompt(20)
    with tools.running(model) as manager:
        ids = [manager.add_request(prompt, max_new_tokens=40)]
        with manager.pause():
            assert tools.plain_greedy(model, prompt, 5) == oracle.greedy(prompt, 5)
            manager.warmup()
            inner = model.generate_batch([prompt], tools.options(), tools.small(), max_new_tokens=5)
            assert tools.tokens(inner) == [oracle.greedy(prompt, 5)]
        ids.append(manager.add_request(prompt, max_new_tokens=5))
        outputs = [manager.get_result(request_id, timeout=tools.patience) for request_id in ids]
    assert [output.generated_tokens for output in outputs] == [oracle.greedy(prompt, 40), oracle.greedy(prompt, 5)]


# --------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("update", ["load_state_dict", "optimizer", "replaced_parameters"])
def test_weights_changed_in_a_pause_drop_the_prefixes_of_the_old_ones(model, other_weights, oracle, tools, update):
    prompt = tools.prompt(50)
    with tools.running(model) as manager:
        request_id = manager.add_request(prompt, max_new_tokens=5)
        assert manager.get_result(request_id).generated_tokens == oracle.greedy(prompt, 5)
        with manager.pause():
            if update == "load_state_dict":
                model.load_state_dict(other_weights.state_dict())
            elif update == "optimizer":
                for parameter, wanted in zip(model.parameters(), other_weights.parameters(), strict=True):
                    parameter.grad = parameter.detach() - wanted.detach()
                torch.optim.SGD(model.parameters(), lr=1.0).step()
                other_weights.load_state_dict(model.state_dict())
            else:
                for module, wanted in zip(model.modules(), other_weights.modules(), strict=True):
                    for name, parameter in wanted.named_parameters(recurse=False):
                        setattr(module, name, torch.nn.Parameter(parameter.detach().clone()))
        request_id = manager.add_request(prompt, max_new_tokens=5)
        answer = manager.get_result(request_id).generated_tokens
    assert answer == tools.plain_greedy(other_weights, prompt, 5)
    assert answer != oracle.greedy(prompt, 5)


def test_an_untouched_model_keeps_its_prefixes_over_a_pause(model, tools):
    prompt = tools.prompt(50)
    with tools.running(model) as manager:
        manager.get_result(manager.add_request(prompt, max_new_tokens=2))
        with manager.pause():
            pass
        manager.get_result(manager.add_request(prompt, max_new_tokens=2))
        assert manager.stats().prefix_cached_tokens == 48
        with manager.pause(reset_prefix_cache=True):
            pass
        manager.get_result(manager.add_request(prompt, max_new_tokens=2))
        assert manager.stats().prefix_cached_tokens == 48


def test_changes_that_leave_no_trace_need_and_get_the_explicit_reset(model, other_weights, tools):
    prompt = tools.prompt(50)
    with tools.running(model) as manager:
        manager.get_result(manager.add_request(prompt, max_new_tokens=5))
        with manager.pause(reset_prefix_cache=True):
            for parameter, new in zip(model.parameters(), other_weights.parameters(), strict=True):
                parameter.data.copy_(new.data)
        answer = manager.get_result(manager.add_request(prompt, max_new_tokens=5)).generated_tokens
    assert answer == tools.plain_greedy(other_weights, prompt, 5)


def test_a_reset_with_requests_queued_and_running_lets_them_finish(model, oracle, tools):
    prompts = [tools.prompt(33, seed) for seed in range(6)]
    with tools.gated(model, max_requests_per_batch=2) as (manager, gate):
        ids = manager.add_requests(prompts + prompts, max_new_tokens=8)
        gate.step(3)

        def reset():
            with manager.pause(reset_prefix_cache=True):
                return manager.stats().num_waiting

        num_waiting = tools.in_thread(reset)
        tools.wait_until(lambda: manager._pausing_threads)
        gate.open()
        assert num_waiting() == 10
        outputs = [manager.get_result(request_id, timeout=tools.patience) for request_id in ids]
    assert [output.generated_tokens for output in outputs] == [oracle.greedy(prompt, 8) for prompt in prompts * 2]


def test_weights_changed_between_calls_of_a_persistent_manager_are_seen(model, other_weights, tools):
    prompts = [tools.prompt(50, seed) for seed in range(4)]
    arguments = {"persistent_manager": True, "max_new_tokens": 5}
    model.generate_batch(prompts, tools.options(), tools.small(), **arguments)
    model.load_state_dict(other_weights.state_dict())
    outputs = model.generate_batch(prompts, tools.options(), tools.small(), **arguments)
    model.destroy_cached_continuous_batching_manager()
    assert tools.tokens(outputs) == [tools.plain_greedy(other_weights, prompt, 5) for prompt in prompts]


def test_large_layers_are_packed_again_after_every_kind_of_change(tools):
    """The tiny model's layers are too small to be packed; these are not."""
    config = tools.llama_config(hidden_size=320, intermediate_size=640, num_hidden_layers=1)
    model, other = enable(tools.build(config)), tools.build(config, seed=1)
    prompt = tools.prompt(20)
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with tools.running(model) as manager:
        answers = [manager.get_result(manager.add_request(prompt, max_new_tokens=5)).generated_tokens]
        with manager.pause():
            model.load_state_dict(other.state_dict())
        answers.append(manager.get_result(manager.add_request(prompt, max_new_tokens=5)).generated_tokens)
        with manager.pause(reset_prefix_cache=True):
            for name, parameter in model.named_parameters():
                parameter.data.copy_(original[name])
        answers.append(manager.get_result(manager.add_request(prompt, max_new_tokens=5)).generated_tokens)
    assert answers[0] == answers[2] == tools.plain_greedy(model, prompt, 5)
    assert answers[1] == tools.plain_greedy(other, prompt, 5)
    assert answers[0] != answers[1]


_THREADS = Path("/proc/self/task")


@pytest.mark.skipif(not _THREADS.exists(), reason="threads are counted in Linux's files")
@pytest.mark.parametrize("use_async_batching", [False, True])
def test_who_gives_way_leaves_no_threads_waiting_for_work(model, tools, monkeypatch, use_async_batching):
    """They would slow down those of the other side."""

    def work() -> set[str]:
        """Some that takes several threads, and which those are."""
        before = set(os.listdir(_THREADS))
        torch.ones(1 << 20).sin()
        return set(os.listdir(_THREADS)) - before

    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    # Whatever this thread has already would be used.
    end_idle_threads()
    engines: list[set[str]] = []
    attached: list[set[str]] = []
    attach = Engine.attach
    monkeypatch.setattr(Engine, "attach", lambda engine: (attach(engine), attached.append(work())))
    hook = model.register_forward_pre_hook(lambda *_: engines.append(work()))
    try:
        mine = work()
        assert len(mine) == 2
        with tools.running(model, use_async_batching=use_async_batching) as manager:
            tools.wait_until(lambda: mine.isdisjoint(os.listdir(_THREADS)))
            engines.clear()
            manager.get_result(manager.add_request(tools.prompt(9), max_new_tokens=2), timeout=tools.patience)
            assert len(engines[0]) == 2
            with manager.pause():
                tools.wait_until(lambda: engines[0].isdisjoint(os.listdir(_THREADS)))
                mine = work()
                assert len(mine) == 2
            tools.wait_until(lambda: mine.isdisjoint(os.listdir(_THREADS)))
            if use_async_batching:
                # Steps run on another thread than the one that took the model back.
                manager.get_result(manager.add_request(tools.prompt(9), max_new_tokens=2), timeout=tools.patience)
                assert len(attached[-1]) == 2
                tools.wait_until(lambda: attached[-1].isdisjoint(os.listdir(_THREADS)))
    finally:
        hook.remove()
        torch.set_num_threads(num_threads)
