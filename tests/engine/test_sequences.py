"""Several answers per prompt: always all of them, in order, with the parent's options and a stream of their own."""

from __future__ import annotations

import pytest

from cbtriton import RequestStatus


def family_ids(request_id, num_sequences):
    return [request_id, *(f"{request_id}__child#{child}" for child in range(num_sequences - 1))]


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_async_batching": True},
        {"max_batch_tokens": 7},
        {"max_requests_per_batch": 1},
        {"allow_block_sharing": False},
        {"num_blocks": 4},
    ],
    ids=["roomy", "async", "chunks", "one_slot", "unshared", "tiny_pool"],
)
def test_every_prompt_length_gives_all_answers_in_order(model, oracle, tools, length, config):
    prompts = [tools.prompt(length), tools.prompt(5)]
    # The most likely token is the only one left: the answer is known.
    options = tools.options(do_sample=True, top_k=1, num_return_sequences=3)
    outputs = model.generate_batch(prompts, options, tools.small(**config), max_new_tokens=6)
    assert list(outputs) == family_ids("req_0", 3) + family_ids("req_1", 3)
    assert tools.tokens(outputs) == [oracle.greedy(prompt, 6) for prompt in prompts for _ in range(3)]
    assert [output.prompt_ids for output in outputs.values()] == [prompt for prompt in prompts for _ in range(3)]


def test_a_pool_that_cannot_hold_all_copies_gives_the_same_draws(model, tools):
    options = tools.options(do_sample=True, temperature=1.5, num_return_sequences=4)
    prompt = tools.prompt(30)
    answers = [
        tools.tokens(model.generate_batch([prompt], options, tools.small(num_blocks=num_blocks), max_new_tokens=30))
        for num_blocks in (64, 5)
    ]
    assert answers[0] == answers[1]
    assert len(set(map(tuple, answers[0]))) == 4


def test_the_prompt_is_computed_once_and_forked(model, tools):
    options = tools.options(do_sample=True, num_return_sequences=4)
    with tools.running(model, options) as manager:
        request_id = manager.add_request(tools.prompt(40), max_new_tokens=3)
        for name in family_ids(request_id, 4):
            assert manager.get_result(name, timeout=tools.patience).status == RequestStatus.FINISHED
        stats = manager.stats()
        assert stats.forks == 3
        # The forks compute the last prompt token again, to draw their own first token.
        assert sum(record.prefill_tokens + record.decode_tokens for record in manager.step_records()) == 40 + 3 + 4 * 2
        assert stats.blocks_in_use == 0


def test_extra_sequences_have_the_resolved_parameters_of_their_parent(model, oracle, tools):
    prompt = tools.prompt(9)
    answer = oracle.greedy(prompt, 12)
    # Everything comes from the defaults; the end also tells whether children know the EOS id and the limit.
    eos = answer[5]
    options = tools.options(do_sample=True, top_k=1, num_return_sequences=3, eos_token_id=eos, max_new_tokens=12)
    outputs = model.generate_batch([prompt], options, tools.small())
    assert tools.tokens(outputs) == [answer[: answer.index(eos) + 1]] * 3
    assert {output.finish_reason for output in outputs.values()} == {"eos"}


def test_each_sequence_draws_from_a_stream_of_its_own_that_the_seed_repeats(model, tools):
    options = tools.options(do_sample=True, temperature=1.0, num_return_sequences=4)
    runs = []
    for seed in (3, 3, 4):
        config = tools.small(seed=seed)
        runs.append(tools.tokens(model.generate_batch([tools.prompt(9)], options, config, max_new_tokens=8)))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert len(set(map(tuple, runs[0]))) == 4


def test_the_first_sequence_is_what_a_single_one_would_be(model, tools):
    answers = []
    for num_sequences in (1, 3):
        options = tools.options(do_sample=True, temperature=1.0, num_return_sequences=num_sequences)
        answers.append(model.generate_batch([tools.prompt(9)], options, tools.small(), max_new_tokens=8)["req_0"])
    assert answers[0].generated_tokens == answers[1].generated_tokens


def test_a_parent_that_ended_at_once_still_gets_all_its_answers(model, oracle, tools):
    prompt = tools.prompt(16)
    options = tools.options(do_sample=True, top_k=1, num_return_sequences=4)
    outputs = model.generate_batch([prompt], options, tools.small(), max_new_tokens=1)
    assert tools.tokens(outputs) == [oracle.greedy(prompt, 1)] * 4


def test_a_prompt_that_cannot_fit_fails_for_all_its_sequences(model, tools):
    options = tools.options(do_sample=True, num_return_sequences=2)
    outputs = model.generate_batch([tools.prompt(200)], options, tools.small(num_blocks=8), max_new_tokens=2)
    assert list(outputs) == family_ids("req_0", 2)
    assert {output.status for output in outputs.values()} == {RequestStatus.FAILED}
