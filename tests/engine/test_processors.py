"""Requests with processors of their own get the tokens that `generate` gives each of them alone."""

from __future__ import annotations

import copy
import math
import random
from collections import Counter

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor

import cbtriton
from cbtriton import ContinuousBatchingConfig
from cbtriton.request_table import MAX_RULE_PREFIXES, MAX_RULES

NUM_NEW = 14
EOS = [5, 17, 40]
# What each request asks for, under the names that `generate` has for it, too.
WISHES = [
    {},
    {"repetition_penalty": 1.8},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 1, "repetition_penalty": 0.7},
    {"bad_words_ids": [[3], [44, 9], [17]]},
    {"sequence_bias": [[[7], 30.0], [[7, 7], -60.0], [[7, 8], 3.0]]},
    {"suppress_tokens": list(range(0, 128, 3))},
    {"begin_suppress_tokens": list(range(1, 128, 2)), "repetition_penalty": 1.2},
    {"forced_bos_token_id": 11},
    {"forced_eos_token_id": 9, "suppress_tokens": [1, 2]},
    {"forced_eos_token_id": 40, "eos_token_id": EOS, "min_new_tokens": NUM_NEW},
    {"eos_token_id": EOS, "exponential_decay_length_penalty": (3, 1.4)},
    {"eos_token_id": EOS, "min_new_tokens": 6, "no_repeat_ngram_size": 3},
    {"eos_token_id": EOS, "min_length": 25, "remove_invalid_values": True, "repetition_penalty": 1.5},
]


def generates(model, tools):
    """Answers of `generate`, each computed once."""
    known: dict[str, list[int]] = {}

    def expected(prompt, wish):
        key = repr((prompt, wish))
        if key not in known:
            options, processors = as_transformers_has_it(wish, len(prompt))
            known[key] = tools.plain_greedy(model, prompt, NUM_NEW, processors, **options)
        return known[key]

    return expected


def as_transformers_has_it(wish, prompt_length):
    """Options for `generate`, and processors for what it has no options for."""
    options = dict(wish)
    penalties = [options.pop(name, 0.0) for name in ("presence_penalty", "frequency_penalty")]
    biases = {tuple(tokens): bias for tokens, bias in options.get("sequence_bias", [])}
    for token, bias in options.pop("logit_bias", {}).items():
        biases[token,] = biases.get((token,), 0.0) + bias
    if biases:
        options["sequence_bias"] = [[list(tokens), bias] for tokens, bias in biases.items()]
    return options, [PenaltiesOnOutput(*penalties, prompt_length)] if any(penalties) else []


class PenaltiesOnOutput(LogitsProcessor):
    def __init__(self, presence, frequency, prompt_length):
        self._presence, self._frequency, self._prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids, scores):
        counts = torch.bincount(input_ids[0, self._prompt_length :], minlength=scores.shape[1])
        return scores - (counts > 0) * self._presence - counts * self._frequency


@pytest.fixture(scope="module")
def expected(oracle, tools):
    return generates(oracle.model, tools)


def requests():
    """Prompts of different lengths, that of one token for the forced BOS; few different tokens, so that they repeat."""
    chance = random.Random(4)
    lengths = [1 if "forced_bos_token_id" in wish else 3 + 5 * i % 37 for i, wish in enumerate(WISHES)]
    return [([chance.choice((7, 8, 9, 44, 90)) for _ in range(n)], w) for n, w in zip(lengths, WISHES, strict=True)]


def answers(manager, wanted, patience, num_new=NUM_NEW):
    ids = [manager.add_request(prompt, max_new_tokens=num_new, **wish) for prompt, wish in wanted]
    return [manager.get_result(request_id, timeout=patience).generated_tokens for request_id in ids]


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_requests_side_by_side_get_the_tokens_of_generate(model, oracle, tools, expected, kernels):
    wanted = requests()
    settings = {"per_request_processors": True, "use_async_batching": kernels == "auto"}
    with tools.running(model, None, kernels={"default": kernels}, **settings) as manager:
        first = answers(manager, wanted, tools.patience)
        # In another order, so in other rows, beside others.
        second = answers(manager, wanted[::-1], tools.patience)[::-1]
    assert first == second == [expected(prompt, wish) for prompt, wish in wanted]
    changed = [a != oracle.greedy(p, NUM_NEW)[: len(a)] for a, (p, wish) in zip(first, wanted, strict=True) if wish]
    assert sum(changed) >= len(changed) - 3


def test_a_generation_config_gives_all_requests_its_processors(model, tools, expected):
    wish = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "suppress_tokens": [4], "eos_token_id": EOS}
    prompts = [prompt for prompt, _ in requests()[:5]]
    outputs = model.generate_batch(prompts, tools.options(**wish), tools.small(), max_new_tokens=NUM_NEW)
    assert tools.tokens(outputs) == [expected(prompt, wish) for prompt in prompts]


@pytest.mark.parametrize("config", [{"max_batch_tokens": 7}, {"num_blocks": 11, "page_size": 5, "safety_margin": 0.0}])
@pytest.mark.parametrize("use_async_batching", [False, True])
def test_chunks_and_preemption_change_nothing(model, tools, expected, config, use_async_batching):
    wanted = requests()
    settings = {"per_request_processors": True, "use_async_batching": use_async_batching, "max_requests_per_batch": 5}
    with tools.running(model, None, **settings, **config) as manager:
        assert answers(manager, wanted, tools.patience) == [expected(prompt, wish) for prompt, wish in wanted]
        assert (manager.stats().preemptions > 0) == ("num_blocks" in config)


def test_rows_that_cancelled_requests_leave_keep_nothing_of_theirs(model, tools, expected):
    wanted = requests()
    with tools.running(model, None, per_request_processors=True, max_requests_per_batch=4) as manager:
        for round_ in range(3):
            ids = [
                manager.add_request(prompt, request_id=f"{round_}-{i}", max_new_tokens=60, **wish)
                for i, (prompt, wish) in enumerate(wanted[3 * round_ :])
            ]
            for request_id in ids[::2]:
                manager.cancel_request(request_id)
            for request_id in ids:
                assert manager.get_result(request_id, timeout=tools.patience) is not None
            assert answers(manager, wanted[:4], tools.patience) == [expected(p, wish) for p, wish in wanted[:4]]


def test_extra_sequences_have_the_processors_of_their_request(model, tools, expected):
    options = tools.options(do_sample=True, num_return_sequences=3)
    prompt, wish = requests()[1]
    with tools.running(model, options, per_request_processors=True) as manager:
        # Among the tokens that a filter keeps, which is one, all sequences draw the same.
        name = manager.add_request(prompt, max_new_tokens=NUM_NEW, top_h=1e-6, **wish)
        names = [name, f"{name}__child#0", f"{name}__child#1"]
        found = [manager.get_result(request_id, timeout=tools.patience).generated_tokens for request_id in names]
    assert found == [expected(prompt, wish)] * 3


def test_a_seeded_request_with_every_filter_draws_the_same_in_any_company(model, tools):
    wish = {"do_sample": True, "temperature": 1.3, "top_k": 90, "top_p": 0.98, "min_p": 1e-3, "top_h": 0.95}
    wish |= {"typical_p": 0.9, "epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3, "repetition_penalty": 1.2, "seed": 3}
    prompt = tools.prompt(9)
    with tools.running(model, None, per_request_processors=True) as manager:
        alone = answers(manager, [(prompt, wish)], tools.patience)
        beside = answers(manager, [*requests()[:4], (prompt, wish), (prompt, {"temperature": 1.0})], tools.patience)
    assert alone[0] == beside[4]
    assert len(set(alone[0])) > 3


def test_tokens_come_with_the_frequencies_of_the_filtered_distribution(model, oracle, tools):
    """Typical tokens behind top-k: the likeliest one is not among them."""
    prompt, num_draws = tools.prompt(12), 400
    config = GenerationConfig(do_sample=True, temperature=0.8, top_k=30, typical_p=0.6, eta_cutoff=0.02)
    logits = oracle.logprobs(prompt, [0])[0][None] * 0.2
    bias = [[[token], float(value)] for token, value in enumerate(logits[0] - oracle.logprobs(prompt, [0])[0])]
    scores = oracle.model._get_logits_processor(config, input_ids_seq_length=12, device="cpu")(None, logits)
    probs = scores.softmax(-1)[0]
    wish = {"do_sample": True, "temperature": 0.8, "top_k": 30, "typical_p": 0.6, "eta_cutoff": 0.02}
    with tools.running(model, None, per_request_processors=True, num_blocks=300) as manager:
        # Biases for all tokens make the distribution flatter.
        drawn = answers(manager, [(prompt, wish | {"sequence_bias": bias})] * num_draws, 4 * tools.patience, num_new=1)
    counts = Counter(token for (token,) in drawn)
    assert set(counts) <= set(probs.nonzero().flatten().tolist())
    assert 5 < len(counts) < 30
    assert probs[logits.argmax()] == 0
    observed = torch.tensor([counts[token] / num_draws for token in range(len(probs))])
    deviation = (observed - probs) / (probs * (1 - probs) / num_draws).sqrt().clamp(min=1e-9)
    assert deviation[probs > 0].abs().max() < 5


def test_penalties_on_the_output_hold_repetitions_down(model, tools):
    loop = tools.options(sequence_bias=[[[7], 60.0]])
    prompt = [7] * 8
    with tools.running(model, loop, per_request_processors=True) as manager:
        plain, frequent, present = answers(
            manager,
            [(prompt, {}), (prompt, {"frequency_penalty": 12.0}), (prompt, {"presence_penalty": 80.0})],
            tools.patience,
        )
    assert plain == [7] * NUM_NEW
    # Tokens of the prompt do not count; every further one costs 12 more.
    assert 2 <= frequent.count(7) < NUM_NEW
    assert frequent[:2] == [7, 7]
    assert present[0] == 7
    assert 7 not in present[1:3]


@pytest.mark.parametrize(
    "filters",
    [{}, {"do_sample": True, "temperature": 3.0, "top_k": 60, "top_p": 0.9, "min_p": 0.2, "typical_p": 0.5}],
)
def test_log_probabilities_are_those_of_the_processed_distribution(model, oracle, tools, filters):
    prompt = [7, 8, 7, 8, 9, 7]
    wish = {"repetition_penalty": 1.6, "suppress_tokens": [1, 2, 3], "eos_token_id": EOS, "min_new_tokens": 20}
    wish |= filters
    with tools.running(model, None, per_request_processors=True, return_logprobs=True) as manager:
        request_id = manager.add_request(prompt, max_new_tokens=NUM_NEW, **wish)
        output = manager.get_result(request_id, timeout=tools.patience)
    # Processors see scores, which are no log-probabilities.
    with torch.no_grad():
        scores = oracle.model(torch.tensor([prompt + output.generated_tokens])).logits[0, len(prompt) - 1 : -1]
    config = GenerationConfig(**wish)
    oracle.model._prepare_special_tokens(config, device="cpu")
    processors = oracle.model._get_logits_processor(config, input_ids_seq_length=len(prompt), device="cpu")
    for i, token in enumerate(output.generated_tokens):
        history = torch.tensor([prompt + output.generated_tokens[:i]])
        expected = processors(history, scores[i : i + 1]).log_softmax(-1)[0, token]
        assert abs(output.logprobs[i] - float(expected)) < 1e-4


@pytest.mark.parametrize(
    "wish", [{"suppress_tokens": list(range(128))}, {"forced_eos_token_id": 9, "suppress_tokens": [9]}]
)
def test_a_request_that_forbids_every_token_fails_alone_and_says_so(model, tools, expected, wish):
    neighbour = requests()[1]
    with tools.running(model, None, per_request_processors=True) as manager:
        bad = manager.add_request([1, 2, 3], max_new_tokens=4, **wish)
        assert answers(manager, [neighbour], tools.patience) == [expected(*neighbour)]
        output = manager.get_result(bad, timeout=tools.patience)
    assert (output.status.name, output.finish_reason) == ("FAILED", "error")
    assert "no token is left to choose from" in output.error
    assert len(output.generated_tokens) == (0 if len(wish) == 1 else 3)


def test_more_rules_than_there_is_room_for_are_refused_in_the_callers_thread(model, tools):
    many = [[1, token] for token in range(128)]
    with tools.running(model, None, per_request_processors=True) as manager:
        ban = {"bad_words_ids": [[a, b] for a in range(4) for b in range(128)], "suppress_tokens": []}
        manager.cancel_request(manager.add_request([1], max_new_tokens=2, **ban))
        with pytest.raises(ValueError, match=rf"at most {MAX_RULES} .*got {MAX_RULES + 1}"):
            manager.add_request([1], max_new_tokens=2, **(ban | {"suppress_tokens": [1]}))
        long = {"bad_words_ids": [[token] * 9 for token in range(128)]}
        manager.cancel_request(manager.add_request([1], max_new_tokens=2, **long))
        with pytest.raises(ValueError, match=rf"at most {MAX_RULE_PREFIXES} tokens.*got {MAX_RULE_PREFIXES + 1}"):
            manager.add_request([1], max_new_tokens=2, **long, sequence_bias=[[many[0], 1.0]])
        with pytest.raises(TypeError, match=r"no argument 'repetition_penalti'; accepted are .*repetition_penalty"):
            manager.add_request([1], max_new_tokens=2, repetition_penalti=1.5)


def test_processors_of_requests_need_their_switch(model, tools):
    with (
        tools.running(model, None) as manager,
        pytest.raises(ValueError, match="repetition_penalty cannot be set per request"),
    ):
        manager.add_request([1], max_new_tokens=2, repetition_penalty=1.5)
    assert ContinuousBatchingConfig().per_request_processors is False


# Among these few tokens greedy answers move, so that each processor has something to do at every step.
HOT = (0, 11, 1_000, 20_000, 32_768, 40_000, 49_150, 49_151)
COLD = (5, 30_000, 49_000)


def random_wish(chance):
    """A random combination of processors with random values, and a prompt."""

    def some(most, tokens=HOT):
        return chance.sample(tokens, chance.randint(1, most))

    def sequences(most):
        return [[chance.choice(HOT) for _ in range(size)] for size in range(1, 1 + chance.randint(1, most))]

    choices = {
        "repetition_penalty": lambda: chance.uniform(0.6, 2.0),
        "presence_penalty": lambda: chance.uniform(-2.0, 8.0),
        "frequency_penalty": lambda: chance.uniform(-1.0, 4.0),
        "no_repeat_ngram_size": lambda: chance.randint(1, 4),
        "sequence_bias": lambda: [[words, chance.choice((-math.inf, -20.0, 4.0, 9.0))] for words in sequences(4)],
        "bad_words_ids": lambda: sequences(4),
        "suppress_tokens": lambda: some(4),
        "begin_suppress_tokens": lambda: some(6),
        "forced_eos_token_id": lambda: some(2, COLD),
        "exponential_decay_length_penalty": lambda: (chance.randint(0, 6), chance.uniform(1.0, 1.5)),
        "remove_invalid_values": lambda: True,
        "min_new_tokens": lambda: chance.randint(1, NUM_NEW),
        "min_length": lambda: chance.randint(1, 40),
        "eos_token_id": lambda: some(2),
        "forced_bos_token_id": lambda: chance.choice(COLD),
    }
    wish = {name: value() for name, value in choices.items() if chance.random() < 0.3}
    wish["logit_bias"] = {token: chance.uniform(45.0, 55.0) for token in HOT}
    if "min_new_tokens" in wish:
        # `generate` then forgets the other.
        wish.pop("min_length", None)
    if "exponential_decay_length_penalty" in wish:
        wish.setdefault("eos_token_id", some(2))
        # `generate` gets these two penalties behind this processor, to which the scores are more than an order.
        wish = {name: value for name, value in wish.items() if name not in ("presence_penalty", "frequency_penalty")}
    length = 1 if "forced_bos_token_id" in wish else chance.randint(1, 30)
    return [chance.choice(HOT) for _ in range(length)], wish


@pytest.fixture(scope="module")
def smol(tools):
    """SmolLM2-135M with two of its layers and random weights."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    return tools.build(tools.llama_config(**sizes, vocab_size=49_152, tie_word_embeddings=True))


@pytest.mark.parametrize(
    ("number", "kernels", "use_async_batching"),
    [
        (6, "auto", True),
        pytest.param(200, "reference", False, marks=pytest.mark.slow),
        pytest.param(200, "auto", True, marks=pytest.mark.slow),
    ],
)
def test_random_combinations_get_the_tokens_of_generate(smol, tools, number, kernels, use_async_batching):
    """In few rows and a small cache, in two orders, while other requests come and are cancelled."""
    chance, expected = random.Random(1), generates(smol, tools)
    wanted = [random_wish(chance) for _ in range(number)]
    settings = {"max_requests_per_batch": 5, "num_blocks": 12, "page_size": 8, "safety_margin": 0.0}
    settings |= {"per_request_processors": True, "use_async_batching": use_async_batching}
    with tools.running(cbtriton.enable(copy.deepcopy(smol)), None, {"default": kernels}, **settings) as manager:
        for order in (list(range(number)), chance.sample(range(number), number)):
            names, others, got = [], [], []

            def take(names=names, got=got):
                output = manager.get_result(names[len(got)], timeout=tools.patience)
                got.append((output.error, output.generated_tokens))

            for turn, i in enumerate(order):
                prompt, wish = wanted[i]
                names.append(manager.add_request(prompt, max_new_tokens=NUM_NEW, **wish))
                prompt, wish = random_wish(chance)
                others.append(manager.add_request(prompt, max_new_tokens=60, **wish))
                if turn >= 3:
                    take()
                    manager.cancel_request(others[turn - 3])
            while len(got) < number:
                take()
            assert got == [(None, expected(*wanted[i])) for i in order]
        assert manager.stats().preemptions > 0
