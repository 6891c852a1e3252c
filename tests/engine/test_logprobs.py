"""Log-probabilities: raw and processed ones, of the likeliest tokens, of prompts; against one dense forward pass."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from cbtriton import scheduler

NUM_NEW = 9
VOCAB = 128
EOS = [5, 17, 40]


def dense(oracle, tokens):
    """`[len(tokens), VOCAB]`: the model's logits behind each token."""
    with torch.no_grad():
        return oracle.model(torch.tensor([tokens])).logits[0]


def processed(oracle, prompt, output, wish):
    """`[len(output), VOCAB]`: what transformers' processors make of the scores of each step."""
    config = GenerationConfig(**wish)
    oracle.model._prepare_special_tokens(config, device="cpu")
    processors = oracle.model._get_logits_processor(config, input_ids_seq_length=len(prompt), device="cpu")
    scores = dense(oracle, prompt + output)[len(prompt) - 1 : -1]
    rows = [processors(torch.tensor([prompt + output[:i]]), scores[i : i + 1]) for i in range(len(output))]
    return torch.cat(rows).log_softmax(-1)


def assert_logprobs(output, expected, num_top):
    """Compares an output with `[n, VOCAB]` log-probabilities."""
    tokens = output.generated_tokens
    wanted = expected[range(len(tokens)), tokens]
    torch.testing.assert_close(torch.tensor(output.logprobs), wanted, rtol=0, atol=1e-4)
    if num_top == 0:
        assert output.top_logprobs == []
        return
    assert len(output.top_logprobs) == len(tokens)
    for likeliest, row in zip(output.top_logprobs, expected, strict=True):
        order = row.sort(descending=True, stable=True).indices[:num_top].tolist()
        assert list(likeliest) == [token for token in order if row[token] > -torch.inf]
        torch.testing.assert_close(torch.tensor(list(likeliest.values())), row[list(likeliest)], rtol=0, atol=1e-4)


# Few tokens are left: fewer than some ask for.
SAMPLED = {"do_sample": True, "temperature": 2.5, "top_k": 30, "top_p": 0.7, "seed": 3}
FILTERED = SAMPLED | {"min_p": 0.02, "typical_p": 0.8, "repetition_penalty": 1.3}
SUPPRESSED = {"eos_token_id": EOS, "min_new_tokens": 20, "suppress_tokens": [1, 2]}
COURSES = [
    {},
    {"use_async_batching": True, "return_logprobs": True},
    {"max_batch_tokens": 5, "return_logprobs": "raw"},
    {"num_blocks": 11, "page_size": 5, "safety_margin": 0.0, "use_async_batching": True},
    {"varlen_compile_config": {"backend": "eager"}, "return_logprobs": "raw"},
]


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("course", COURSES, ids=str)
def test_every_request_gets_the_kind_that_it_asks_for(model, oracle, tools, course, kernels):
    prompt = [7, 8, 7, 8, 9, 7]
    asked = [
        ({}, {}),
        ({}, {"logprobs": "raw"}),
        (SAMPLED, {"logprobs": "raw", "top_logprobs": 5}),
        (SAMPLED, {"logprobs": "processed", "top_logprobs": 20}),
        (FILTERED, {"logprobs": "processed", "top_logprobs": 4}),
        (SUPPRESSED, {"logprobs": "processed", "top_logprobs": 3}),
        (FILTERED, {"logprobs": "processed"}),
        ({"repetition_penalty": 1.5}, {"top_logprobs": 2}),
    ]
    engines_own = {True: "processed", "raw": "raw"}.get(course.get("return_logprobs"))
    with tools.running(model, None, {"default": kernels}, per_request_processors=True, **course) as manager:
        ids = [manager.add_request(prompt, max_new_tokens=NUM_NEW, **wish, **extra) for wish, extra in asked]
        outputs = [manager.get_result(request_id, timeout=tools.patience) for request_id in ids]
        assert (manager.stats().preemptions > 0) == ("num_blocks" in course)
    for (wish, extra), output in zip(asked, outputs, strict=True):
        assert output.error is None
        assert len(output.generated_tokens) == NUM_NEW
        kind = extra.get("logprobs", "processed" if extra and engines_own is None else engines_own)
        if kind is None:
            assert output.logprobs == output.top_logprobs == []
            continue
        generation = {name: value for name, value in wish.items() if name != "seed"}
        if kind == "raw":
            expected = dense(oracle, prompt + output.generated_tokens)[len(prompt) - 1 : -1].log_softmax(-1)
        else:
            expected = processed(oracle, prompt, output.generated_tokens, generation)
        assert_logprobs(output, expected, extra.get("top_logprobs", 0))


@pytest.mark.parametrize("settings", [{}, {"use_async_batching": True}, {"max_batch_tokens": 7}], ids=str)
def test_log_probabilities_of_prompts_are_those_of_a_dense_pass_whatever_is_cached(model, oracle, tools, settings):
    """Lengths around the page size, each twice, beside a request that asks for nothing."""
    prompts = [tools.prompt(70)[:length] for length in (1, 2, 15, 16, 17, 31, 32, 33)]
    with tools.running(model, **settings) as manager:
        for _ in range(2):
            ids = [manager.add_request(prompt, max_new_tokens=4, prompt_logprobs=True) for prompt in prompts]
            beside = manager.add_request(prompts[-1], max_new_tokens=4)
            for prompt, request_id in zip(prompts, ids, strict=True):
                output = manager.get_result(request_id, timeout=tools.patience)
                assert output.generated_tokens == oracle.greedy(prompt, 4)
                expected = dense(oracle, prompt).log_softmax(-1)[range(len(prompt) - 1), prompt[1:]]
                assert len(output.prompt_logprobs) == len(prompt) - 1
                torch.testing.assert_close(torch.tensor(output.prompt_logprobs), expected, rtol=0, atol=1e-4)
            assert manager.get_result(beside, timeout=tools.patience).prompt_logprobs is None
        assert manager.stats().prefix_cached_tokens > 0


@pytest.mark.parametrize("use_async_batching", [False, True])
def test_prompts_are_scored_in_pieces_and_again_after_a_preemption(
    model, oracle, tools, use_async_batching, monkeypatch
):
    monkeypatch.setattr(scheduler, "MAX_SCORED_TOKENS", 6)
    prompts = [tools.prompt(length) for length in (20, 23, 26, 21)]
    settings = {"num_blocks": 12, "page_size": 5, "safety_margin": 0.0, "use_async_batching": use_async_batching}
    with tools.running(model, max_batch_tokens=16, cpu_offload_space=0.01, **settings) as manager:
        ids = [manager.add_request(prompt, max_new_tokens=12, prompt_logprobs=True) for prompt in prompts]
        outputs = [manager.get_result(request_id, timeout=tools.patience) for request_id in ids]
        records = manager.step_records()
        assert manager.stats().preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.generated_tokens == oracle.greedy(prompt, 12)
        expected = dense(oracle, prompt).log_softmax(-1)[range(len(prompt) - 1), prompt[1:]]
        torch.testing.assert_close(torch.tensor(output.prompt_logprobs), expected, rtol=0, atol=1e-4)
    assert max(record.prefill_tokens for record in records) <= 6 + len(prompts)


def test_only_the_first_of_several_answers_has_those_of_the_prompt(model, tools):
    options = tools.options(do_sample=True, temperature=2.0, num_return_sequences=3)
    with tools.running(model, options) as manager:
        name = manager.add_request(tools.prompt(20), max_new_tokens=4, prompt_logprobs=True, top_logprobs=2)
        names = [name, f"{name}__child#0", f"{name}__child#1"]
        outputs = [manager.get_result(request_id, timeout=tools.patience) for request_id in names]
        assert manager.stats().forks == 2
    assert [output.prompt_logprobs is None for output in outputs] == [False, True, True]
    assert [len(output.top_logprobs) for output in outputs] == [4] * 3
    assert len({tuple(output.generated_tokens) for output in outputs}) > 1


def test_streamed_outputs_hold_what_belongs_to_their_tokens(model, tools):
    with tools.running(model, return_logprobs="raw") as manager:
        request_id = manager.add_request(
            tools.prompt(9), max_new_tokens=5, streaming=True, top_logprobs=3, prompt_logprobs=True
        )
        for output in manager.request_id_iter(request_id):
            number = len(output.generated_tokens)
            assert [len(output.logprobs), len(output.top_logprobs)] == [number] * 2
            assert [max(likeliest, key=likeliest.get) for likeliest in output.top_logprobs] == output.generated_tokens
            assert len(output.prompt_logprobs) == 8
    assert number == 5


@pytest.mark.parametrize(
    ("wish", "error"),
    [
        ({"logprobs": "some"}, "logprobs must be 'processed' or 'raw', got 'some'"),
        ({"top_logprobs": 21}, "top_logprobs must be from 0 to 20, got 21"),
        ({"top_logprobs": -1}, "top_logprobs must be from 0 to 20, got -1"),
    ],
)
def test_wishes_are_checked_in_the_callers_thread(model, tools, wish, error):
    with tools.running(model) as manager:
        with pytest.raises(ValueError, match=error):
            manager.add_request([1], max_new_tokens=2, **wish)
        with pytest.raises(TypeError, match="prompt_logprobs must be True or False, got 1"):
            manager.add_request([1], max_new_tokens=2, prompt_logprobs=1)
