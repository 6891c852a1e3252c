"""Where answers end: EOS ids of every kind, stop sequences and stop strings, and what keeps them from ending."""

from __future__ import annotations

import pytest

from cbtriton import RequestStatus, enable

NUM_NEW = 12


class LetterTokenizer:
    """Every token is two letters."""

    def decode(self, token_ids):
        return "".join(chr(ord("a") + token // 26) + chr(ord("a") + token % 26) for token in token_ids)


@pytest.fixture
def prompt(tools):
    return tools.prompt(16)


@pytest.fixture
def answer(oracle, prompt):
    answer = oracle.greedy(prompt, NUM_NEW)
    assert len(set(answer[:8])) == 8, "these tests need an answer without early repetitions"
    return answer


def one(model, prompt, options, config, **kwargs):
    return model.generate_batch([prompt], options, config, **({"max_new_tokens": NUM_NEW} | kwargs))["req_0"]


@pytest.mark.parametrize("kind", ["int", "list", "tuple", "set_with_off", "later_first"])
def test_every_kind_of_eos_ends_the_answer_and_belongs_to_it(model, tools, prompt, answer, kind):
    eos = {
        "int": answer[4],
        "list": [answer[6], answer[4]],
        "tuple": (answer[4], 127 if answer[4] != 127 else 126),
        "set_with_off": [-1, answer[4]],
        "later_first": [answer[7], answer[6], answer[4]],
    }[kind]
    options = tools.options()
    options.eos_token_id = eos
    output = one(model, prompt, options, tools.small())
    assert output.generated_tokens == answer[:5]
    assert (output.status, output.finish_reason) == (RequestStatus.FINISHED, "eos")


def test_the_models_own_eos_ids_are_used_where_the_options_have_none(model, tools, prompt, answer):
    model.config.eos_token_id = [answer[6], answer[3]]
    assert one(model, prompt, tools.options(eos_token_id=None), tools.small()).generated_tokens == answer[:4]
    model.generation_config.eos_token_id = answer[2]
    assert one(model, prompt, None, tools.small()).generated_tokens == answer[:3]


@pytest.mark.parametrize("off", [-1, [], [-1]])
def test_eos_can_be_switched_off(model, tools, prompt, answer, off):
    model.config.eos_token_id = answer[3]
    options = tools.options()
    options.eos_token_id = off
    output = one(model, prompt, options, tools.small())
    assert (output.generated_tokens, output.finish_reason) == (answer, "length")


def test_each_request_may_have_its_own_eos(model, tools, prompt, answer):
    with tools.running(model, tools.options(eos_token_id=answer[4])) as manager:
        lengths = []
        for eos in (None, -1, [], answer[2], [answer[5], answer[1]], (answer[3],)):
            request_id = manager.add_request(prompt, max_new_tokens=NUM_NEW, eos_token_id=eos)
            output = manager.get_result(request_id, timeout=tools.patience)
            lengths.append(len(output.generated_tokens))
            assert output.generated_tokens == answer[: lengths[-1]]
    assert lengths == [5, NUM_NEW, NUM_NEW, 3, 2, 4]


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_a_first_token_that_is_eos_is_the_whole_answer_also_when_the_prompt_is_cached(
    model, tools, prompt, answer, num_sequences
):
    options = tools.options(
        eos_token_id=answer[0], do_sample=num_sequences > 1, top_k=1, num_return_sequences=num_sequences
    )
    with tools.running(model, options, return_logprobs=True) as manager:
        for _ in range(3):
            request_id = manager.add_request(prompt, max_new_tokens=NUM_NEW, streaming=True)
            for name in [request_id, *(f"{request_id}__child#{i}" for i in range(num_sequences - 1))]:
                outputs = list(manager.request_id_iter(name))
                assert [output.generated_tokens for output in outputs] == [[answer[0]]]
                assert outputs[0].finish_reason == "eos"
                assert len(outputs[0].logprobs) == 1
            assert manager.stats().blocks_in_use == 0


def test_tokens_computed_ahead_of_an_eos_are_dropped(model, oracle, tools, prompt, answer):
    options = tools.options(eos_token_id=answer[4])
    with tools.running(model, options, use_async_batching=True, max_requests_per_batch=2) as manager:
        ids = [manager.add_request(prompt, max_new_tokens=NUM_NEW) for _ in range(6)]
        outputs = [manager.get_result(request_id, timeout=tools.patience) for request_id in ids]
        assert manager.stats().dropped_tokens > 0
    assert [output.generated_tokens for output in outputs] == [answer[:5]] * 6


@pytest.mark.parametrize("from_request", [False, True])
def test_a_least_number_of_new_tokens_suppresses_every_eos(model, oracle, tools, prompt, answer, from_request):
    eos = [answer[1], answer[3]]
    expected = tools.plain_greedy(oracle.model, prompt, NUM_NEW, eos_token_id=eos, min_new_tokens=6)
    assert len(expected) >= 6
    options = tools.options(eos_token_id=eos, min_new_tokens=0 if from_request else 6)
    with tools.running(model, options) as manager:
        request_id = manager.add_request(prompt, max_new_tokens=NUM_NEW, min_new_tokens=6 if from_request else None)
        other = manager.add_request(prompt, max_new_tokens=NUM_NEW, min_new_tokens=0)
        assert manager.get_result(request_id, timeout=tools.patience).generated_tokens == expected
        assert manager.get_result(other, timeout=tools.patience).generated_tokens == answer[:2]


@pytest.mark.parametrize(("max_length", "num_tokens"), [(20, NUM_NEW), (21, 5), (1000, 4 * 16 - 16 + 1)])
def test_the_limit_on_the_whole_length_holds_unless_it_is_the_unset_default(
    model, tools, prompt, max_length, num_tokens
):
    # 20 is what an untouched configuration carries; the request's own limit goes first in any case.
    own_limit = {"max_new_tokens": NUM_NEW} if max_length == 20 else {}
    config = tools.small(num_blocks=4)
    output = model.generate_batch([prompt], tools.options(max_length=max_length), config, **own_limit)["req_0"]
    assert len(output.generated_tokens) == num_tokens


def test_stop_sequences_end_only_their_own_request(model, tools, prompt, answer):
    with tools.running(model) as manager:
        ids = [
            manager.add_request(prompt, max_new_tokens=NUM_NEW, stop_sequences=sequences)
            for sequences in ([answer[3:6]], [[answer[3], answer[5]], answer[6:7]], [prompt[-1:] + answer[:1]], None)
        ]
        outputs = [manager.get_result(request_id, timeout=tools.patience) for request_id in ids]
    # The third one begins in the prompt: only generated tokens count.
    assert [len(output.generated_tokens) for output in outputs] == [6, 7, NUM_NEW, NUM_NEW]
    assert [output.finish_reason for output in outputs] == ["eos", "eos", "length", "length"]
    assert all(output.generated_tokens == answer[: len(output.generated_tokens)] for output in outputs)


def test_stop_strings_end_the_answer_and_nothing_that_may_begin_one_is_streamed(model, tools, prompt, answer):
    text = LetterTokenizer().decode
    # From the second letter of token 4 to the first one of token 6; and one that only seems to come, at token 2.
    stop_strings = [text(answer[4:7])[1:-1], text(answer[2:3]) + "~"]
    with tools.running(model) as manager:
        manager.tokenizer = LetterTokenizer()
        manager.add_request(prompt, request_id="s", max_new_tokens=NUM_NEW, streaming=True, stop_strings=stop_strings)
        lengths = [len(output.generated_tokens) for output in manager.request_id_iter("s")]
        final = manager.get_result(
            manager.add_request(prompt, max_new_tokens=NUM_NEW, stop_strings=stop_strings[0]), timeout=tools.patience
        )
    # Token 2 waits for token 3; tokens 4 and 5 come with the end only.
    assert lengths[-1] == 7
    assert 3 not in lengths
    assert max(lengths[:-1]) == 4
    assert final.generated_tokens == answer[:7]
    assert final.finish_reason == "eos"


def test_stop_strings_of_the_options_use_the_tokenizer_that_the_model_was_enabled_with(model, tools, prompt, answer):
    options = tools.options(stop_strings=[LetterTokenizer().decode(answer[3:5])])
    with pytest.raises(ValueError, match=r"stop_strings need a tokenizer; .* use enable\(model, tokenizer\)"):
        one(model, prompt, options, tools.small())
    enable(model, LetterTokenizer())
    assert one(model, prompt, options, tools.small()).generated_tokens == answer[:5]


class BrokenTokenizer:
    def decode(self, token_ids):
        raise LookupError("no such token")


def test_a_tokenizer_that_fails_ends_only_the_request_that_needs_it(model, oracle, tools, prompt, answer):
    with tools.running(model, tools.options()) as manager:
        manager.tokenizer = BrokenTokenizer()
        needy = manager.add_request(prompt, max_new_tokens=NUM_NEW, stop_strings=["x"])
        other = manager.add_request(prompt, max_new_tokens=NUM_NEW)
        failed = manager.get_result(needy, timeout=tools.patience)
        assert failed.finish_reason == "error"
        assert "LookupError: no such token" in failed.error
        assert manager.get_result(other, timeout=tools.patience).generated_tokens == answer
