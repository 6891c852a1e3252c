"""Answers that are given out as they come, to loops and to event loops."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import cbtriton
from cbtriton.request import GenerationOutput, RequestStatus
from cbtriton.streaming import AnswerPieces, TextStream

LENGTHS = (3, 17, 30, 9)
TOKENS = 14


class Letters:
    """A tokenizer whose tokens are bytes."""

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token % 256 for token in token_ids).decode("utf-8", errors="replace")


def no_thread_is_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("cbtriton")]


@pytest.fixture
def asked(model, tools) -> dict[str, Any]:
    """Arguments of `generate_batch`."""
    return {
        "inputs": [tools.prompt(length) for length in LENGTHS],
        "generation_config": tools.options(),
        "continuous_batching_config": tools.small(),
        "max_new_tokens": TOKENS,
    }


# --------------------------------------------------------------------------------------------------- generate_batch


def test_pieces_of_all_answers_come_in_turns_and_are_the_answers(model, oracle, asked):
    pieces = list(model.generate_batch(**asked, stream=True))
    names = [piece.request_id for piece in pieces]
    answers = {
        name: [token for piece in pieces if piece.request_id == name for token in piece.token_ids] for name in names
    }
    assert list(answers.values()) == [oracle.greedy(prompt, TOKENS) for prompt in asked["inputs"]]
    # One token of each in every step, in order, however late they are asked for.
    assert names[-2 * len(LENGTHS) :] == names[: len(LENGTHS)] * 2
    ends = {piece.request_id: piece.output for piece in pieces if piece.output is not None}
    assert {name: output.generated_tokens for name, output in ends.items()} == answers
    assert all(output.status is RequestStatus.FINISHED for output in ends.values())
    assert not any(piece.text for piece in pieces)
    assert no_thread_is_left()


def test_nothing_starts_before_the_first_piece_is_asked_for(model, asked):
    stream = model.generate_batch(**asked, stream=True)
    assert no_thread_is_left()
    assert not [module for module in model.modules() if "forward" in vars(module)]
    stream.close()


@pytest.mark.parametrize("is_persistent", [False, True])
def test_who_closes_early_leaves_nothing_behind(model, oracle, asked, is_persistent):
    stream = model.generate_batch(**asked | {"max_new_tokens": 200}, stream=True, persistent_manager=is_persistent)
    for _ in range(5):
        next(stream)
    stream.close()
    assert no_thread_is_left()
    again = model.generate_batch(**asked, persistent_manager=is_persistent)
    assert [output.generated_tokens for output in again.values()] == [
        oracle.greedy(prompt, TOKENS) for prompt in asked["inputs"]
    ]
    model.destroy_cached_continuous_batching_manager()


def test_extra_sequences_and_requests_that_cannot_fit_are_part_of_the_stream(model, asked, tools):
    options = asked | {"generation_config": tools.options(num_return_sequences=2, do_sample=True)}
    options["inputs"] = [*options["inputs"][:2], tools.prompt(1100)]
    ends = {piece.request_id: piece.output for piece in model.generate_batch(**options, stream=True) if piece.output}
    assert sorted(ends) == sorted(name for place in range(3) for name in (f"req_{place}", f"req_{place}__child#0"))
    assert ends["req_2"].status is RequestStatus.FAILED
    assert len(ends["req_0__child#0"].generated_tokens) == TOKENS


def test_wrong_arguments_are_told_at_once(model, asked):
    with pytest.raises(TypeError, match="stream must be True or False, got 1"):
        model.generate_batch(**asked, stream=1)
    with pytest.raises(ValueError, match=r"inputs\[1\]"):
        model.generate_batch([[1], []], stream=True)
    assert list(model.generate_batch([], stream=True)) == []


def test_the_text_of_all_pieces_is_the_text_of_the_answer(model, asked, monkeypatch):
    monkeypatch.setattr(model, "_cbtriton_tokenizer", Letters(), raising=False)
    pieces = list(model.generate_batch(**asked, stream=True))
    for end in (piece.output for piece in pieces if piece.output is not None):
        text = "".join(piece.text for piece in pieces if piece.request_id == end.request_id)
        assert text == Letters().decode(end.generated_tokens)


def test_an_engine_that_dies_ends_the_loop(model, asked, tools, monkeypatch):
    stream = model.generate_batch(**asked | {"max_new_tokens": 500}, stream=True)
    next(stream)
    monkeypatch.setattr(cbtriton.scheduler.Scheduler, "schedule", lambda self: 1 / 0)
    with pytest.raises(cbtriton.EngineDiedError, match="ZeroDivisionError"):
        list(stream)
    assert no_thread_is_left()


def test_text_waits_for_whole_characters():
    text = "a\u00e9\N{GRINNING FACE}\u4f60z"
    stream = TextStream(Letters().decode)
    parts = [stream.add([byte], is_last=False) for byte in text.encode()]
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)
    assert parts[-1] == "z"


def test_what_is_no_character_comes_with_the_end():
    stream = TextStream(Letters().decode)
    assert [stream.add([97], False), stream.add([0xF0], False), stream.add([0x9F], True)] == ["a", "", "\ufffd"]


def test_pieces_of_an_answer_without_tokens():
    pieces = AnswerPieces(Letters().decode)
    output = GenerationOutput("a", status=RequestStatus.FAILED, error="no")
    piece = pieces.next_of(output)
    assert (piece.token_ids, piece.text, piece.output) == ((), "", output)


# ---------------------------------------------------------------------------------------------------------- astream


def test_event_loops_get_several_streams_at_once(model, oracle, tools):
    async def answer(manager: Any, length: int) -> list[list[int]]:
        return [
            list(output.generated_tokens)
            async for output in manager.astream(tools.prompt(length), max_new_tokens=TOKENS)
        ]

    async def all_answers(manager: Any) -> list[list[list[int]]]:
        return await asyncio.gather(*(answer(manager, length) for length in LENGTHS))

    with tools.running(model) as manager:
        for length, outputs in zip(LENGTHS, asyncio.run(all_answers(manager)), strict=True):
            expected = oracle.greedy(tools.prompt(length), TOKENS)
            assert outputs == [expected[: number + 1] for number in range(TOKENS)]


@pytest.mark.parametrize("leave", ["break", "cancel"])
def test_leaving_a_stream_cancels_its_request(model, tools, leave):
    async def some(manager: Any) -> None:
        stream = manager.astream(tools.prompt(5), max_new_tokens=480)
        async for output in stream:
            if len(output.generated_tokens) == 3 and leave == "break":
                break
            if len(output.generated_tokens) == 3:
                asyncio.current_task().cancel()
        await stream.aclose()

    with tools.running(model) as manager:
        if leave == "break":
            asyncio.run(some(manager))
        else:
            with pytest.raises(asyncio.CancelledError):
                asyncio.run(some(manager))
        tools.wait_until(lambda: manager.stats().requests_cancelled == 1)
        assert manager.stats().blocks_in_use == 0


def test_a_stream_ends_with_its_engine(model, tools, monkeypatch):
    async def run(manager: Any) -> None:
        async for output in manager.astream(tools.prompt(5), max_new_tokens=480):
            if len(output.generated_tokens) == 2:
                monkeypatch.setattr(cbtriton.scheduler.Scheduler, "schedule", lambda self: 1 / 0)

    with tools.running(model) as manager, pytest.raises(cbtriton.EngineDiedError, match="ZeroDivisionError"):
        asyncio.run(asyncio.wait_for(run(manager), tools.patience))


def test_wrong_requests_are_told_with_the_first_output(model, tools):
    async def run(manager: Any, prompt: list[int], **options: Any) -> None:
        await anext(manager.astream(prompt, **options))

    with tools.running(model) as manager:
        with pytest.raises(ValueError, match="at least one token"):
            asyncio.run(run(manager, []))
        with pytest.raises(TypeError, match="temperatur"):
            asyncio.run(run(manager, [1], temperatur=3))
