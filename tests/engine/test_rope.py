"""Rotary frequencies that change with the length of a sequence: each one has its own, whoever runs beside it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import cbtriton
from cbtriton.config import KernelConfig

SWITCH, LENGTH = 32, 24
# Sequences that stay short, that get long after any number of tokens, and that are long from the start. Some are
# continuations of others, on both sides of the length.
LENGTHS = (3, 29, 30, 31, 32, 33, 40, 70)
REFERENCE = KernelConfig(default="reference")


class Family:
    """A model with longrope, and what it answers alone. transformers computes its cache again as well."""

    def __init__(self, families: Any, tools: Any, name: str) -> None:
        self.model = families.build(f"{name}, longrope")
        self.prompts = [tools.prompt(LENGTHS[-1])[:length] for length in LENGTHS] + [tools.prompt(20, seed=1)]
        self.answers = [tools.plain_greedy(self.model, prompt, LENGTH) for prompt in self.prompts]


@pytest.fixture(scope="module", params=["phi3", "phimoe"])
def family(request, families, tools) -> Family:
    return Family(families, tools, request.param)


def answers_of(manager: Any, family: Family) -> list[list[int]]:
    ids = manager.add_requests(family.prompts, max_new_tokens=LENGTH)
    return [manager.get_result(each).generated_tokens for each in ids]


def test_frequencies_matter(family: Family, tools) -> None:
    """Or nothing below would show anything: scores of a short sequence change if a long one stands beside it."""
    prompt = family.prompts[1]
    positions = torch.arange(len(prompt))[None]
    with torch.no_grad():
        alone = family.model(torch.tensor([prompt]), position_ids=positions).logits
        moved = family.model(torch.tensor([prompt]), position_ids=positions + SWITCH).logits
    assert (alone - moved).abs().max() > 0.05


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("max_batch_tokens", [16, 256])
def test_sequences_of_all_lengths_answer_as_alone(family: Family, tools, max_batch_tokens: int, is_async: bool) -> None:
    options = {"page_size": 8, "max_batch_tokens": max_batch_tokens, "use_async_batching": is_async}
    with tools.running(family.model, kernels=REFERENCE, **options) as manager:
        assert manager.engine_config.rope_switch_length == SWITCH
        assert answers_of(manager, family) == family.answers
        # Short ones stay, long ones are long from the start, and the others begin again once.
        gets_long = [length <= SWITCH < length + LENGTH - 1 for length in map(len, family.prompts)]
        assert manager.stats().preemptions == sum(gets_long)


@pytest.mark.parametrize("level", [0, 1])
def test_on_triton_and_compiled(family: Family, tools, level: int) -> None:
    with tools.running(family.model, page_size=8, default_compile_level=level) as manager:
        assert answers_of(manager, family) == family.answers
        assert manager.stats().late_compilations == 0


@pytest.mark.parametrize("cpu_offload_space", [0.0, 0.01])
def test_preempted_requests_get_long(family: Family, tools, cpu_offload_space: float) -> None:
    options = {"page_size": 4, "num_blocks": 48, "max_batch_tokens": 64, "cpu_offload_space": cpu_offload_space}
    with tools.running(family.model, kernels=REFERENCE, safety_margin=0.0, **options) as manager:
        assert answers_of(manager, family) == family.answers
        assert manager.stats().preemptions > 5
        assert (manager.stats().restores > 0) == (cpu_offload_space > 0)


def test_prefixes_are_shared_among_sequences_of_the_same_kind(family: Family, tools) -> None:
    short, long = family.prompts[3], family.prompts[-2]
    with tools.running(family.model, kernels=REFERENCE, page_size=4) as manager:
        cached = []
        for prompt, answer in ((short, 3), (long, -2), (long, -2), (short, 3)):
            before = manager.stats().prefix_cached_tokens
            output = manager.get_result(manager.add_request(prompt, max_new_tokens=1))
            assert output.generated_tokens == family.answers[answer][:1]
            cached.append(manager.stats().prefix_cached_tokens - before)
    # Whole pages in front of the last token.
    assert cached == [0, 0, 68, 28]


def test_pinned_prefixes_are_those_of_their_own_kind(family: Family, tools) -> None:
    with tools.running(family.model, kernels=REFERENCE, page_size=4) as manager:
        manager.pin_prefix(family.prompts[-2])
        assert answers_of(manager, family) == family.answers


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
def test_sequences_of_one_prompt_get_long(family: Family, tools, is_async: bool) -> None:
    options = tools.options(num_return_sequences=3, do_sample=True, temperature=1e-6)
    settings = {"page_size": 4, "num_blocks": 128, "max_requests_per_batch": 8, "use_async_batching": is_async}
    with tools.running(family.model, options, kernels=REFERENCE, **settings) as manager:
        answers, expected = tools.sequences_of_one_prompt(manager, family.prompts[3:7], family.answers[3:7], LENGTH)
        assert answers == expected
        assert manager.stats().forks > 0


@pytest.mark.parametrize("seed", range(6))
def test_cancels_and_few_blocks_disturb_nobody(family: Family, tools, seed: int) -> None:
    chance = random.Random(seed)
    setting = tools.random_setting(chance, seed)
    with tools.running(family.model, kernels=REFERENCE, **setting | {"num_blocks": 40}) as manager:
        tools.assert_cancels_disturb_nobody(manager, family.prompts, family.answers, chance, num_requests=12)


def test_the_model_is_given_back(family: Family, tools) -> None:
    with tools.running(family.model, kernels=REFERENCE):
        pass
    assert not [module for module in family.model.modules() if "forward" in vars(module)]


def test_a_model_that_never_gets_there_changes_nothing(families, tools) -> None:
    model = families.build("phi3, longrope")
    model.config.max_position_embeddings = SWITCH
    manager = cbtriton.ContinuousBatchingManager(model, tools.options(), tools.small(), None, REFERENCE)
    assert manager.engine_config.rope_switch_length is None
    manager.destroy()
