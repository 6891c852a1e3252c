"""`pin_prefix` and `unpin` of a manager: what callers get, and what they are told."""

from __future__ import annotations

import pytest
import torch

TENANT = {"cache_salt": "tenant"}


@pytest.fixture
def prefix(tools) -> list[int]:
    return tools.prompt(40, seed=5)


def answer(manager, prompt: list[int], **options):
    request_id = manager.add_request(prompt, max_new_tokens=6, **options)
    return manager.get_result(request_id).generated_tokens


def test_a_pinned_prefix_is_found_whatever_ran_in_between(model, oracle, tools, prefix):
    with tools.running(model, num_blocks=12) as manager:
        assert manager.pin_prefix(prefix) == 32  # whole pages of 16
        assert manager.stats().blocks_pinned == 2
        for seed in range(8):
            answer(manager, tools.prompt(140, seed=seed))
        before = manager.stats().prefix_cached_tokens
        assert answer(manager, prefix) == oracle.greedy(prefix, 6)
        assert manager.stats().prefix_cached_tokens == before + 32
        manager.unpin(prefix)
        for seed in range(8):
            answer(manager, tools.prompt(140, seed=seed))
        before = manager.stats().prefix_cached_tokens
        assert answer(manager, prefix) == oracle.greedy(prefix, 6)
        assert manager.stats().prefix_cached_tokens == before
        assert manager.stats().blocks_pinned == 0


def test_nobody_gets_the_outputs_of_pins(model, tools, prefix):
    with tools.running(model) as manager:
        manager.pin_prefix(prefix)
        assert manager.get_result(timeout=0.05) is None
        request_id = manager.add_request([1, 2, 3], max_new_tokens=2)
        manager.pin_prefix(prefix, **TENANT)
        manager.stop()
        assert [output.request_id for output in manager] == [request_id]


def test_a_prefix_that_is_pinned_twice_is_pinned_once(model, tools, prefix):
    with tools.running(model) as manager:
        assert [manager.pin_prefix(prefix), manager.pin_prefix(torch.tensor(prefix))] == [32, 32]
        assert manager.stats().blocks_pinned == 2
        manager.unpin(prefix)
        with pytest.raises(ValueError, match="no prefix of these 40 tokens is pinned with cache_salt=None; give"):
            manager.unpin(prefix)


def test_salts_keep_tenants_apart(model, oracle, tools, prefix):
    with tools.running(model) as manager:
        manager.pin_prefix(prefix, **TENANT)
        assert answer(manager, prefix) == answer(manager, prefix, **TENANT) == oracle.greedy(prefix, 6)
        assert manager.stats().prefix_cached_tokens == 32
        with pytest.raises(ValueError, match="no prefix"):
            manager.unpin(prefix)
        manager.unpin(prefix, **TENANT)


def test_new_weights_compute_it_again(tools, prefix):
    model = tools.build(tools.llama_config())
    with tools.running(model) as manager:
        manager.pin_prefix(prefix)
        with manager.pause(), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        expected = tools.plain_greedy
        got = answer(manager, prefix)
        assert manager.stats().blocks_pinned == 2
        # The pin was computed before the request, which found it.
        assert manager.stats().prefix_cached_tokens == 32
    assert got == expected(model, prefix, 6)


def test_a_session_that_is_kept_keeps_its_pins_and_another_starts_without(tools, prefix):
    model = tools.build(tools.llama_config())
    with tools.running(model) as manager:
        manager.pin_prefix(prefix)
        manager.stop(keep_for_next_session=True)
        manager.start()
        assert manager.stats().blocks_pinned == 2
        manager.stop()
        manager.start()
        assert manager.stats().blocks_pinned == 0
        with pytest.raises(ValueError, match="no prefix"):
            manager.unpin(prefix)


def test_what_cannot_be_pinned_is_refused_with_the_numbers(model, tools, prefix):
    with tools.running(model, num_blocks=6) as manager:
        for wrong, error, message in [
            ([], ValueError, "at least one token"),
            ([1, 1000], ValueError, "token ids must be from 0 to 127"),
            ("text", TypeError, "a prompt must be a list of token ids"),
            (
                [1] * 15,
                ValueError,
                r"a pinned prefix must have at least 16 tokens \(whole pages of all layers\), got 15",
            ),
            ([1] * 96, ValueError, "pinning these 96 tokens needs 7 blocks, and 6 of 6 are not pinned; unpin another"),
        ]:
            with pytest.raises(error, match=message):
                manager.pin_prefix(wrong)
        with pytest.raises(TypeError, match="cache_salt must be a string, got int"):
            manager.pin_prefix(prefix, cache_salt=3)
        with pytest.raises(ValueError, match="are those of pinned prefixes; use another"):
            manager.add_request([1], request_id="pinned prefix 0")
        manager.pin_prefix(prefix)
        with pytest.raises(ValueError, match="needs 5 blocks of 16 tokens, and the cache has 4"):
            manager.add_request([1] * 60, max_new_tokens=10)
        with manager.pause(), pytest.raises(RuntimeError, match=r"cannot pin a prefix inside pause\(\)"):
            manager.pin_prefix([2] * 16)
    with pytest.raises(RuntimeError, match="cannot pin a prefix: the manager is destroyed"):
        manager.pin_prefix(prefix)
    with (
        tools.running(model, allow_block_sharing=False) as manager,
        pytest.raises(ValueError, match="nothing can be pinned with allow_block_sharing=False"),
    ):
        manager.pin_prefix(prefix)


def test_a_pin_that_would_starve_a_request_is_refused_and_the_request_ends_right(model, oracle, tools, prefix):
    with tools.gated(model, num_blocks=6) as (manager, gate):
        request_id = manager.add_request(tools.prompt(50), max_new_tokens=40)
        gate.wait()
        pinning = tools.in_thread(lambda: manager.pin_prefix(prefix))
        tools.wait_until(lambda: manager._pins)
        gate.open()
        with pytest.raises(ValueError, match=f"leave 4 of 6 blocks, and request '{request_id}' needs 6; pin it when"):
            pinning()
        assert manager.get_result(request_id).generated_tokens == oracle.greedy(tools.prompt(50), 40)
        assert manager.stats().blocks_pinned == 0
        assert manager.pin_prefix(prefix) == 32


def test_a_manager_that_stops_does_not_leave_who_pins_waiting(model, tools, prefix):
    with tools.gated(model) as (manager, gate):
        manager.add_request([1, 2, 3], max_new_tokens=3)
        gate.wait()
        pinning = tools.in_thread(lambda: manager.pin_prefix(prefix))
        tools.wait_until(lambda: manager._pins)
        manager.stop(block=False, hard_stop=True)
        gate.open()
        with pytest.raises(RuntimeError, match="cannot pin a prefix: the manager is"):
            pinning()


def test_a_prefix_that_is_unpinned_while_somebody_waits_for_it_keeps_nobody_waiting(model, tools, prefix):
    with tools.gated(model) as (manager, gate):
        request_id = manager.add_request([1, 2, 3], max_new_tokens=3)
        gate.wait()
        pinning = tools.in_thread(lambda: manager.pin_prefix(prefix))
        tools.wait_until(lambda: manager._pins)
        manager.unpin(prefix)
        with pytest.raises(RuntimeError, match="the prefix was unpinned before it was computed"):
            pinning()
        gate.open()
        manager.get_result(request_id)
        # Its computation, which nobody can stop any more, leaves no pin behind.
        assert manager.pin_prefix(prefix, **TENANT) == 32
        assert manager.stats().blocks_pinned == 2


def test_what_is_unpinned_while_the_manager_stops_is_not_pinned_in_the_next_session(model, tools, prefix):
    with tools.gated(model) as (manager, gate):
        pinning = tools.in_thread(lambda: manager.pin_prefix(prefix))
        gate.wait()
        gate.open()
        assert pinning() == 32
        manager.stop(block=False, keep_for_next_session=True)
        manager.unpin(prefix)
        manager.stop(keep_for_next_session=True)
        manager.start()
        assert manager.stats().blocks_pinned == 0
