"""Sampled tokens depend on the seed and nothing around; log-probabilities are those of a dense forward pass."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

NUM_NEW = 10


@pytest.fixture
def options(tools):
    return tools.options(do_sample=True, temperature=1.2, top_k=0, top_p=0.95)


def answer_of(manager, request_id, patience=30.0):
    return manager.get_result(request_id, timeout=patience).generated_tokens


# ------------------------------------------------------------------------------------------------------------ seeds


def test_a_seeded_request_ignores_its_neighbours_order_chunking_and_preemption(model, tools, options):
    prompt, seed = tools.prompt(20), 42
    neighbours = [tools.prompt(8 + 3 * index, index) for index in range(7)]

    def run(num_before, num_after, num_new=NUM_NEW, **config):
        with tools.running(model, options, **config) as manager:
            manager.add_requests(neighbours[:num_before], max_new_tokens=num_new)
            request_id = manager.add_request(prompt, seed=seed, max_new_tokens=num_new)
            manager.add_requests(neighbours[num_before : num_before + num_after], max_new_tokens=num_new)
            answer = answer_of(manager, request_id)
            manager.stop()
            return answer, manager.stats().preemptions

    alone, _ = run(0, 0)
    assert run(1, 0)[0] == run(0, 1)[0] == alone
    assert run(7, 0)[0] == run(0, 7)[0] == run(3, 4)[0] == alone
    assert run(3, 4, max_batch_tokens=7)[0] == alone
    assert run(7, 0, page_size=4, num_blocks=200, use_async_batching=True, scheduler_type="prefill_first")[0] == alone
    # As the newest in a pool for two it is preempted again and again.
    long, num_preemptions = run(7, 0, num_new=30, num_blocks=8, safety_margin=0.0)
    assert num_preemptions > 0
    assert long == run(0, 0, num_new=30)[0]
    assert long[:NUM_NEW] == alone


def test_the_order_of_seeded_requests_changes_nothing(model, tools, options):
    prompts = [tools.prompt(6 + index, index) for index in range(6)]
    answers = []
    for order in (range(6), reversed(range(6))):
        with tools.running(model, options) as manager:
            ids = {i: manager.add_request(prompts[i], seed=100 + i, max_new_tokens=NUM_NEW) for i in order}
            answers.append([answer_of(manager, ids[index]) for index in range(6)])
    assert answers[0] == answers[1]


def test_another_seed_and_another_request_draw_other_tokens(model, tools, options):
    prompt = tools.prompt(9)
    with tools.running(model, options) as manager:
        ids = [manager.add_request(prompt, seed=seed, max_new_tokens=NUM_NEW) for seed in (1, 1, 2, 3)]
        ids += [manager.add_request(prompt, max_new_tokens=NUM_NEW) for _ in range(2)]
        one, same, *others = [tuple(answer_of(manager, request_id)) for request_id in ids]
    assert one == same
    assert len({one, *others}) == 5


def test_the_engines_seed_repeats_a_whole_run(model, tools, options):
    prompts = [tools.prompt(5 + index) for index in range(5)]
    runs = []
    for seed, sharing in ((1, True), (1, False), (2, True)):
        config = tools.small(seed=seed, allow_block_sharing=sharing)
        runs.append(tools.tokens(model.generate_batch(prompts, options, config, max_new_tokens=NUM_NEW)))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


# ----------------------------------------------------------------------------------------------------- distributions


def test_tokens_come_with_the_frequencies_of_the_processed_distribution(model, oracle, tools):
    prompt, num_draws = tools.prompt(12), 1500
    logits = oracle.logprobs(prompt, [0])[0][None]
    for warper in (TemperatureLogitsWarper(0.8), TopKLogitsWarper(12), TopPLogitsWarper(0.9)):
        logits = warper(torch.tensor([prompt]), logits)
    expected = logits.softmax(-1)[0]
    options = tools.options(do_sample=True, temperature=0.8, top_k=12, top_p=0.9)
    outputs = model.generate_batch([prompt] * num_draws, options, tools.small(num_blocks=300), max_new_tokens=1)
    counts = Counter(token for answer in tools.tokens(outputs) for token in answer)
    observed = torch.tensor([counts[token] / num_draws for token in range(len(expected))])
    assert set(counts) <= set(expected.nonzero().flatten().tolist())
    deviation = (observed - expected) / (expected * (1 - expected) / num_draws).sqrt().clamp(min=1e-9)
    # The seed is fixed: 5 standard deviations would be a fault and no bad luck.
    assert deviation[expected > 0].abs().max() < 5


@pytest.mark.parametrize("top_k", [0, None, -1, 128, 5000])
def test_a_filter_that_is_off_leaves_all_tokens(model, tools, top_k):
    options = tools.options(do_sample=True, temperature=3.0)
    with tools.running(model, options, per_request_processors=True, num_blocks=300) as manager:
        ids = [manager.add_request([1, 2, 3], max_new_tokens=1, top_k=top_k or 0) for _ in range(200)]
        assert len({answer_of(manager, request_id)[0] for request_id in ids}) >= 20
    options.top_k = top_k
    outputs = model.generate_batch([[1, 2, 3]] * 200, options, tools.small(num_blocks=300), max_new_tokens=1)
    assert len({answer[0] for answer in tools.tokens(outputs)}) >= 20


def test_each_request_may_bring_its_own_sampling_arguments(model, oracle, tools):
    prompt = tools.prompt(9)
    greedy = oracle.greedy(prompt, NUM_NEW)
    arguments = [
        {"temperature": 0.0},
        {"do_sample": False},
        {"top_k": 1},
        {"top_p": 0.0},
        {"min_p": 1.0},
        {"temperature": 1e-4},
        {"temperature": 2.0},
        {},
    ]
    options = tools.options(do_sample=True, temperature=1.5)
    with tools.running(model, options, per_request_processors=True) as manager:
        ids = [manager.add_request(prompt, max_new_tokens=NUM_NEW, **kwargs) for kwargs in arguments]
        answers = [answer_of(manager, request_id) for request_id in ids]
    assert answers[:6] == [greedy] * 6
    assert greedy not in answers[6:]


# ------------------------------------------------------------------------------------------------- log-probabilities


def assert_logprobs(output, expected, allowed=1e-4):
    chosen = expected[torch.arange(len(output.generated_tokens)), output.generated_tokens]
    assert len(output.logprobs) == len(output.generated_tokens)
    assert (torch.tensor(output.logprobs) - chosen).abs().max() < allowed


@pytest.mark.parametrize("config", [{}, {"max_batch_tokens": 7}, {"num_blocks": 6, "safety_margin": 0.0}])
def test_greedy_log_probabilities_are_those_of_a_dense_pass(model, oracle, tools, config):
    prompts = [tools.prompt(15 + 5 * index) for index in range(5)]
    with tools.running(model, return_logprobs=True, **config) as manager:
        ids = manager.add_requests(prompts, max_new_tokens=20)
        outputs = [manager.get_result(request_id, timeout=tools.patience) for request_id in ids]
        assert (manager.stats().preemptions > 0) == ("num_blocks" in config)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_logprobs(output, oracle.logprobs(prompt, output.generated_tokens))


def test_sampled_log_probabilities_are_those_of_the_processed_distribution(model, oracle, tools):
    prompts = [tools.prompt(15 + 5 * index) for index in range(5)]
    options = tools.options(do_sample=True, temperature=0.7, top_k=20)
    config = tools.small(return_logprobs=True)
    outputs = model.generate_batch(prompts, options, config, max_new_tokens=12)
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        scores = oracle.logprobs(prompt, output.generated_tokens)
        for warper in (TemperatureLogitsWarper(0.7), TopKLogitsWarper(20)):
            scores = warper(torch.tensor([prompt]), scores)
        assert_logprobs(output, scores.log_softmax(-1))


def test_a_final_eos_has_its_log_probability_too(model, oracle, tools):
    prompt = tools.prompt(9)
    eos = oracle.greedy(prompt, 8)[4]
    options = tools.options(eos_token_id=eos)
    outputs = model.generate_batch([prompt], options, tools.small(return_logprobs=True), max_new_tokens=8)
    output = outputs["req_0"]
    assert output.generated_tokens[-1] == eos
    assert_logprobs(output, oracle.logprobs(prompt, output.generated_tokens))


@pytest.mark.parametrize("length", [31, 32, 33])
def test_log_probabilities_are_the_same_where_the_prompt_is_cached(model, oracle, tools, length):
    prompt = tools.prompt(length)
    with tools.running(model, page_size=32, return_logprobs=True) as manager:
        outputs = [
            manager.get_result(manager.add_request(prompt, max_new_tokens=6), timeout=tools.patience) for _ in range(2)
        ]
        assert manager.stats().prefix_cached_tokens == (32 if length == 33 else 0)
    for output in outputs:
        assert_logprobs(output, oracle.logprobs(prompt, output.generated_tokens))


def test_streamed_log_probabilities_grow_with_the_tokens(model, tools):
    with tools.running(model, return_logprobs=True) as manager:
        manager.add_request([1, 2], request_id="s", max_new_tokens=5, streaming=True)
        outputs = list(manager.request_id_iter("s"))
    assert [len(output.logprobs) for output in outputs] == [1, 2, 3, 4, 5]
    assert outputs[0].logprobs == outputs[-1].logprobs[:1]


def test_no_log_probabilities_unless_asked_for(model, tools):
    outputs = model.generate_batch([[1, 2]], tools.options(), tools.small(), max_new_tokens=3)
    assert outputs["req_0"].logprobs == []
