"""Models whose attention cannot be paged: each request has a cache of its own, and otherwise lives as all do."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import cbtriton
from cbtriton.config import KernelConfig
from cbtriton.model_adapter import UnsupportedModelError
from cbtriton.own_cache import OwnCaches, try_own_cache

REFERENCE = KernelConfig(default="reference")
PROMPTS = [[5, 9, 13, 17, 11, 12, 14] * n for n in (1, 3, 2, 4)] + [[14], [18, 18, 11]]
LENGTH = 10


class Family:
    """A model that cannot be paged, and what it answers alone."""

    def __init__(self, tools: Any, families: Any, name: str) -> None:
        self.name = name
        self.model = families.build(name)
        self.answers = [tools.plain_greedy(self.model, prompt, LENGTH) for prompt in PROMPTS]


# Keys that are chosen, keys that are merged, a state without keys, short convolutions beside biases.
@pytest.fixture(scope="module", params=["deepseek_v32", "deepseek_v4", "rwkv", "inkling_text"])
def family(request, tools, families) -> Family:
    return Family(tools, families, request.param)


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
def test_requests_answer_as_alone_in_chunks_and_when_they_are_preempted(tools, family: Family, is_async: bool) -> None:
    options = {"page_size": 4, "num_blocks": 13, "max_batch_tokens": 16, "use_async_batching": is_async}
    with tools.running(family.model, kernels=REFERENCE, safety_margin=0.0, **options) as manager:
        ids = manager.add_requests(PROMPTS, max_new_tokens=LENGTH)
        assert [manager.get_result(each).generated_tokens for each in ids] == family.answers
        stats = manager.stats()
        assert not manager.model_facts.is_paged
    assert stats.preemptions > 0
    assert stats.prefix_cached_tokens == stats.prefix_queried_tokens == 0
    assert "forward" not in vars(family.model)


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
def test_several_sequences_of_one_prompt_begin_with_copies_of_its_cache(tools, family: Family, is_async: bool) -> None:
    options = tools.options(num_return_sequences=3, do_sample=True, temperature=1e-6)
    settings = {"page_size": 4, "max_batch_tokens": 16, "use_async_batching": is_async}
    with tools.running(family.model, options, kernels=REFERENCE, **settings) as manager:
        answers, expected = tools.sequences_of_one_prompt(manager, PROMPTS[:3], family.answers[:3], LENGTH)
        assert answers == expected
        assert manager.stats().forks == 6


@pytest.fixture(scope="module")
def indexed(tools, families) -> Family:
    return Family(tools, families, "glm_moe_dsa")


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_come_and_are_cancelled_disturb_nobody(tools, indexed: Family, seed: int) -> None:
    chance = random.Random(seed)
    with tools.running(indexed.model, kernels=REFERENCE, **tools.random_setting(chance, seed)) as manager:
        tools.assert_cancels_disturb_nobody(manager, PROMPTS, indexed.answers, chance, 16)


def test_one_warning_says_why_and_the_budget_has_the_caches(tools, indexed: Family, caplog) -> None:
    config = tools.small()
    manager = cbtriton.ContinuousBatchingManager(indexed.model, tools.options(), config, None, REFERENCE)
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert "layers of type indexed_attention" in warning
    facts, resolved = manager.model_facts, manager.engine_config
    (states,) = (share for share in resolved.memory_budget if share.purpose == "states")
    grown = resolved.num_blocks * resolved.page_size * facts.state_bytes_per_token
    assert facts.state_bytes_per_token > 0
    assert states.num_bytes == resolved.max_requests * facts.state_bytes_per_request + grown
    manager.start()
    # Four layers keep keys and values of four heads, and keys of the indexer.
    name = manager.add_request(PROMPTS[1], max_new_tokens=4)
    manager.get_result(name)
    with manager.pause():
        held = manager.stats().bytes_by_purpose["states"]
    num_tokens = len(PROMPTS[1]) + 3
    assert held >= num_tokens * facts.state_bytes_per_token
    manager.destroy()


def test_caches_go_with_their_requests(tools, indexed: Family) -> None:
    with tools.running(indexed.model, kernels=REFERENCE, page_size=4) as manager:
        for _ in range(2):
            ids = manager.add_requests(PROMPTS, max_new_tokens=LENGTH)
            for each in ids:
                manager.get_result(each)
        (name,) = manager.add_requests(PROMPTS[4:5], max_new_tokens=1)
        manager.get_result(name)
        with manager.pause():
            assert manager.stats().bytes_by_purpose["states"] == manager.model_facts.state_bytes_per_token


def test_what_such_a_model_cannot_have_is_refused_or_explained(tools, indexed: Family) -> None:
    def made(**settings: Any) -> cbtriton.ContinuousBatchingManager:
        config = tools.small(**settings)
        return cbtriton.ContinuousBatchingManager(indexed.model, tools.options(), config, None, REFERENCE)

    with pytest.raises(ValueError, match="default_compile_level must be left out for a model with transformers' own"):
        made(default_compile_level=1)
    config = made(cpu_offload_space=1.0).engine_config
    assert not config.share_blocks
    assert config.num_host_blocks == 0
    with (
        tools.running(indexed.model, kernels=REFERENCE) as manager,
        pytest.raises(ValueError, match="nothing can be pinned for a model with transformers' own cache"),
    ):
        manager.pin_prefix(PROMPTS[1])


def test_a_model_whose_attention_turns_out_wrong_is_run_on_its_own_cache(tools, families, caplog) -> None:
    """Nothing in its calls says so: that shows when logits are compared."""
    family = Family(tools, families, "doge")
    manager = cbtriton.ContinuousBatchingManager(family.model, tools.options(), tools.small(), None, REFERENCE)
    assert manager.model_facts.is_paged
    manager.start()
    assert not manager.model_facts.is_paged
    assert "gives other logits when its sequences are packed and paged" in caplog.text
    ids = manager.add_requests(PROMPTS, max_new_tokens=LENGTH)
    assert [manager.get_result(each).generated_tokens for each in ids] == family.answers
    manager.stop()
    manager.start()
    (name,) = manager.add_requests(PROMPTS[:1], max_new_tokens=LENGTH)
    assert manager.get_result(name).generated_tokens == family.answers[0]
    manager.destroy()


def test_a_model_whose_cache_gives_something_else_is_refused_for_both_reasons(tools, families) -> None:
    model = families.build("xlnet")
    reason = "does not call transformers' attention interface.*nor does its own cache give what it gives without"
    with pytest.raises(UnsupportedModelError, match=reason):
        cbtriton.ContinuousBatchingManager(model, tools.options(), tools.small(), None, REFERENCE)


def test_a_model_that_trains_is_tried_out_without_dropout_and_trains_on(tools, families) -> None:
    model = families.build("rwkv").train()
    manager = cbtriton.ContinuousBatchingManager(model, tools.options(), tools.small(), None, REFERENCE)
    assert model.training
    manager.destroy()


@torch.no_grad()
def test_a_cache_that_takes_one_token_at_a_time_is_found_out(families) -> None:
    model = families.build("rwkv")
    forward = model.forward

    def forgetful(input_ids: torch.Tensor, state: Any = None, use_cache: bool = False, **more: Any) -> Any:
        return forward(input_ids, state=state if input_ids.shape[1] == 1 else None, use_cache=use_cache, **more)

    model.forward = forgetful
    layout = try_own_cache(model, lambda ids: forward(torch.tensor([ids])).logits[0], rounding=1e-3)
    assert layout is not None
    assert not layout.continues_in_chunks


def test_a_model_outside_a_step_says_so(tools, families) -> None:
    model = families.build("rwkv")
    manager = cbtriton.ContinuousBatchingManager(model, tools.options(), tools.small(), None, REFERENCE)
    assert manager._layout.own_cache is not None
    caches = OwnCaches(model, manager._layout.own_cache)
    caches.attach()
    try:
        with pytest.raises(RuntimeError, match="outside an engine step"):
            model(torch.zeros(1, 2, dtype=torch.int64))
    finally:
        caches.detach()
        manager.destroy()
