"""Requests with functions of their own get the tokens that `generate` gives each of them alone."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList, generation

NUM_NEW = 12
VOCAB = 128


class Neighbours:
    """A logits processor: what follows the latest token and the oldest one gets less likely, with its every use."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids, scores):
        assert (input_ids.dtype, scores.dtype, scores.shape) == (torch.int64, torch.float32, (1, VOCAB))
        history = input_ids[0].tolist()
        self.seen.append(history)
        for token in history:
            scores[0, (token + 1) % VOCAB] -= 6.0 * history.count(token)
        return scores


def only_even_then_odd(batch_id, sent):
    assert (batch_id, sent.ndim) == (0, 1)
    return list(range(len(sent) % 2, VOCAB, 2))


def even_then_odd_mask(generated):
    return torch.arange(VOCAB) % 2 == len(generated) % 2


def generated(model, prompt, **functions):
    """What `generate` answers with functions of the caller."""
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **functions)[
            0, len(prompt) :
        ].tolist()


def answer(manager, request_id, patience):
    return manager.get_result(request_id, timeout=patience)


COURSES = [
    ("reference", {}),
    ("auto", {"use_async_batching": True}),
    ("reference", {"use_async_batching": True}),
    ("reference", {"max_batch_tokens": 5, "use_async_batching": True}),
    ("auto", {"num_blocks": 9, "page_size": 5, "safety_margin": 0.0}),
    ("reference", {"num_blocks": 9, "page_size": 5, "safety_margin": 0.0, "use_async_batching": True}),
    ("auto", {"varlen_compile_config": {"backend": "eager"}}),
]


@pytest.mark.parametrize(("kernels", "course"), COURSES, ids=str)
def test_functions_of_single_requests_give_the_tokens_of_generate(model, oracle, tools, course, kernels):
    prompt, other = tools.prompt(9), tools.prompt(6)
    penalty = {"repetition_penalty": 1.4}
    plain = oracle.model
    with tools.running(model, None, {"default": kernels}, per_request_processors=True, **course) as manager:
        neighbours = [Neighbours() for _ in range(2)]
        wishes = [
            (prompt, {"logits_processor": neighbours[0]}),
            (other, {}),
            (prompt, {"logits_processor": [neighbours[1]], **penalty}),
            (prompt, {"prefix_allowed_tokens_fn": only_even_then_odd}),
            (other, {"token_mask": even_then_odd_mask, **penalty}),
            (prompt, penalty),
        ]
        ids = [manager.add_request(ids, max_new_tokens=NUM_NEW, **wish) for ids, wish in wishes]
        answers = [answer(manager, request_id, tools.patience) for request_id in ids]
        stats = manager.stats()
    assert [output.error for output in answers] == [None] * 6
    even_first = {"prefix_allowed_tokens_fn": lambda batch_id, sent: only_even_then_odd(0, sent[len(other) :])}
    expected = [
        generated(plain, prompt, logits_processor=LogitsProcessorList([Neighbours()])),
        oracle.greedy(other, NUM_NEW),
        generated(plain, prompt, logits_processor=LogitsProcessorList([Neighbours()]), **penalty),
        generated(plain, prompt, prefix_allowed_tokens_fn=only_even_then_odd),
        generated(plain, other, **even_first, **penalty),
        generated(plain, prompt, **penalty),
    ]
    assert [output.generated_tokens for output in answers] == expected
    assert len({tuple(tokens) for tokens in expected}) == 6
    for neighbour, output in zip(neighbours, (answers[0], answers[2]), strict=True):
        # Each token once, with everything before it; again where the request was preempted before it was known.
        seen = list(dict.fromkeys(map(tuple, neighbour.seen)))
        assert seen == [tuple(prompt + output.generated_tokens[:i]) for i in range(NUM_NEW)]
    assert stats.host_processed_tokens >= 4 * NUM_NEW
    if "num_blocks" in course:
        assert stats.preemptions > 0
    else:
        assert stats.host_processed_tokens == 4 * NUM_NEW


def test_masks_come_as_bools_or_words_of_any_kind(model, oracle, tools):
    prompt, allowed = tools.prompt(7), [0, 31, 32, 63, 64, 100, 127]
    bools = torch.zeros(VOCAB, dtype=torch.bool)
    bools[allowed] = True
    numbers = [sum(1 << (token - 32 * i) for token in allowed if token // 32 == i) for i in range(4)]
    words = np.array(numbers, dtype=np.uint32).view(np.int32)
    kinds = [bools, bools.numpy(), bools.tolist(), torch.from_numpy(words), words[None]]
    with tools.running(model, None, per_request_processors=True) as manager:
        ids = [manager.add_request(prompt, max_new_tokens=NUM_NEW, token_mask=lambda _, m=mask: m) for mask in kinds]
        answers = [answer(manager, request_id, tools.patience).generated_tokens for request_id in ids]
    expected = generated(oracle.model, prompt, prefix_allowed_tokens_fn=lambda *_: allowed)
    assert answers == [expected] * len(kinds)
    assert len(set(expected)) > 1


def raises(*_):
    raise KeyError("of the caller")


@pytest.mark.parametrize(
    ("wish", "error"),
    [
        ({"token_mask": raises}, "its token mask failed: KeyError: 'of the caller'"),
        ({"prefix_allowed_tokens_fn": raises}, "its token mask failed: KeyError: 'of the caller'"),
        ({"logits_processor": raises}, "its logits processors failed: KeyError: 'of the caller'"),
        ({"stopping_criteria": raises}, "could not be asked: KeyError: 'of the caller'"),
        ({"token_mask": lambda _: [True] * 5}, r"must return 128 bools or 4 int32 words .* got \(5,\) bool"),
        ({"token_mask": lambda _: [True] * VOCAB, "prefix_allowed_tokens_fn": lambda *_: [VOCAB]}, "IndexError"),
        ({"logits_processor": lambda ids, x: x[0]}, r"<lambda> must return scores of shape \(1, 128\), got \(128,\)"),
        ({"logits_processor": lambda ids, x: None}, r"must return scores of shape \(1, 128\), got NoneType"),
        ({"logits_processor": lambda ids, x: x * torch.nan}, "the model produced no usable logits"),
        ({"token_mask": lambda _: [False] * VOCAB}, "no token is left to choose from"),
    ],
)
@pytest.mark.parametrize("use_async_batching", [False, True])
def test_a_function_that_fails_ends_its_own_request_and_no_other(model, oracle, tools, wish, error, use_async_batching):
    prompt = tools.prompt(8)
    settings = {"per_request_processors": True, "use_async_batching": use_async_batching}
    with tools.running(model, None, **settings) as manager:
        bad = manager.add_request([1, 2, 3], max_new_tokens=4, **wish)
        good = manager.add_request(prompt, max_new_tokens=NUM_NEW)
        assert answer(manager, good, tools.patience).generated_tokens == oracle.greedy(prompt, NUM_NEW)
        output = answer(manager, bad, tools.patience)
    assert (output.status.name, output.finish_reason) == ("FAILED", "error")
    assert re.search(error, output.error), output.error


class AfterThrice:
    """A stopping criterion: the same residue of 8 for the third time in the output."""

    def __init__(self, prompt_length):
        self._prompt_length = prompt_length

    def __call__(self, input_ids, scores, **kwargs):
        residues = (input_ids[:, self._prompt_length :] % 8).tolist()
        return torch.tensor([any(row.count(residue) >= 3 for residue in row) for row in residues])


@pytest.mark.parametrize("use_async_batching", [False, True])
def test_criteria_end_their_own_request_where_generate_ends_it(model, oracle, tools, use_async_batching):
    prompts = [tools.prompt(length) for length in (4, 7, 9, 11)]
    plain = oracle.model
    with tools.running(model, None, use_async_batching=use_async_batching) as manager:
        ids = [
            manager.add_request(prompt, max_new_tokens=40, stopping_criteria=[AfterThrice(len(prompt))])
            for prompt in prompts
        ]
        longest = manager.add_request(prompts[0], max_new_tokens=40, stopping_criteria=MaxLengthCriteria(9))
        beside = manager.add_request(prompts[0], max_new_tokens=40)
        answers = [answer(manager, request_id, tools.patience) for request_id in (*ids, longest, beside)]
    for prompt, output in zip(prompts, answers, strict=False):
        criteria = StoppingCriteriaList([AfterThrice(len(prompt))])
        ids = torch.tensor([prompt])
        with torch.no_grad():
            whole = plain.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, stopping_criteria=criteria, pad_token_id=0
            )
        assert output.generated_tokens == whole[0, len(prompt) :].tolist()
        assert output.finish_reason == "eos"
    assert len({len(output.generated_tokens) for output in answers[:4]}) > 1
    assert [len(output.generated_tokens) for output in answers[4:]] == [5, 40]


def test_extra_sequences_have_the_functions_of_their_request(model, tools):
    options = tools.options(do_sample=True, temperature=3.0, num_return_sequences=3)
    with tools.running(model, options, per_request_processors=True) as manager:
        name = manager.add_request(
            tools.prompt(9), max_new_tokens=30, token_mask=even_then_odd_mask, stopping_criteria=AfterThrice(9)
        )
        names = [name, f"{name}__child#0", f"{name}__child#1"]
        found = [answer(manager, request_id, tools.patience).generated_tokens for request_id in names]
    assert len({tuple(tokens) for tokens in found}) == 3
    for tokens in found:
        assert [token % 2 for token in tokens] == [i % 2 for i in range(len(tokens))]
        residues = [token % 8 for token in tokens]
        assert max(map(residues.count, residues)) == 3
        assert residues.count(residues[-1]) == 3


def test_processors_of_transformers_that_have_an_option_run_inside_the_step(model, oracle, tools):
    prompt = [7, 8, 7, 8, 9, 7]
    listed = [
        generation.SequenceBiasLogitsProcessor([[[7], 9.0], [[9, 8], -4.0]]),
        generation.RepetitionPenaltyLogitsProcessor(1.3),
        generation.NoRepeatNGramLogitsProcessor(3),
        generation.SuppressTokensLogitsProcessor([1, 2, 3]),
    ]
    expected = generated(oracle.model, prompt, logits_processor=LogitsProcessorList(listed))
    backwards = generated(oracle.model, prompt, logits_processor=LogitsProcessorList(listed[::-1]))
    behind = {"no_repeat_ngram_size": 2}
    mixed = generated(oracle.model, prompt, logits_processor=LogitsProcessorList(listed[:2]), **behind)
    with tools.running(model, None, per_request_processors=True) as manager:

        def ask(**wish):
            request_id = manager.add_request(prompt, max_new_tokens=NUM_NEW, **wish)
            return answer(manager, request_id, tools.patience).generated_tokens, manager.stats().host_processed_tokens

        assert ask(logits_processor=LogitsProcessorList(listed)) == (expected, 0)
        # In another order, or behind options, they are what they say, on the host.
        assert ask(logits_processor=listed[::-1]) == (backwards, NUM_NEW)
        assert ask(logits_processor=listed[:2], **behind) == (mixed, 2 * NUM_NEW)
    assert expected != oracle.greedy(prompt, NUM_NEW)


def test_processors_that_need_more_than_a_request_are_dropped_with_one_warning_or_refused(model, oracle, tools, caplog):
    prompt = tools.prompt(5)
    processor = generation.EncoderRepetitionPenaltyLogitsProcessor(1.5, torch.tensor([[1, 2]]))
    with tools.running(model, None, per_request_processors=True) as manager, caplog.at_level(logging.WARNING):
        ids = [manager.add_request(prompt, max_new_tokens=4, logits_processor=[processor]) for _ in range(2)]
        assert [answer(manager, i, tools.patience).generated_tokens for i in ids] == [oracle.greedy(prompt, 4)] * 2
    warnings = [record.message for record in caplog.records if "EncoderRepetitionPenaltyLogits" in record.message]
    assert len(warnings) == 1
    settings = {"per_request_processors": True, "drop_unsupported_processors": False}
    with (
        tools.running(model, None, **settings) as manager,
        pytest.raises(ValueError, match="not supported: EncoderRepetitionPenaltyLogitsProcessor"),
    ):
        manager.add_request(prompt, max_new_tokens=4, logits_processor=[processor])


def test_functions_are_checked_in_the_callers_thread(model, tools):
    with tools.running(model, None) as manager:
        with pytest.raises(
            ValueError, match=r"token_mask cannot be set per request; set .*per_request_processors=True"
        ):
            manager.add_request([1], max_new_tokens=2, token_mask=even_then_odd_mask)
        with pytest.raises(TypeError, match="stopping_criteria must be a function or a list of functions, got 7"):
            manager.add_request([1], max_new_tokens=2, stopping_criteria=7)
    with tools.running(model, None, per_request_processors=True) as manager:
        for name, value in (("token_mask", [True]), ("prefix_allowed_tokens_fn", 3)):
            with pytest.raises(TypeError, match=rf"{name} must be a function, got"):
                manager.add_request([1], max_new_tokens=2, **{name: value})
        with pytest.raises(TypeError, match="an entry of logits_processor must be a function, got 'x'"):
            manager.add_request([1], max_new_tokens=2, logits_processor=["x"])
