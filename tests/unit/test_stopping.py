"""A request ends where it must, and nothing that may begin a stop string is shown before."""

from __future__ import annotations

import pytest
import torch
import transformers

from cbtriton.request import Request, SamplingParams, StopRules
from cbtriton.stopping import StopChecker, StopDecision, StopStringMatcher, finish_reason


@pytest.mark.parametrize(
    ("generated", "reason"),
    [
        ([], None),
        ([1], None),
        ([9], "eos"),
        ([1, 8], "eos"),
        ([9, 1], None),  # judged when it came
        ([1, 4, 5], "eos"),
        ([4, 5, 1], None),
        ([5], None),
        ([6], "eos"),
        ([1, 2, 3, 1, 2], "length"),
        ([1, 2, 3, 1, 9], "eos"),
        ([1, 2, 3, 4, 5], "eos"),
    ],
)
def test_a_request_ends_at_eos_stop_sequence_or_length(generated, reason):
    rules = StopRules(
        max_new_tokens=5, eos_token_ids=frozenset({8, 9}), stop_sequences=((4, 5), (6,), (1, 1, 1, 1, 1, 1))
    )
    assert finish_reason(generated, rules) == reason


def test_without_rules_only_the_length_ends_a_request():
    assert finish_reason([2] * 5, StopRules(max_new_tokens=6)) is None
    assert finish_reason([2] * 6, StopRules(max_new_tokens=6)) == "length"


class PieceTokenizer:
    """Token i is the i-th piece of text or of bytes; bytes that are no character yet show as U+FFFD."""

    def __init__(self, pieces):
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    def decode(self, token_ids):
        return b"".join(self.pieces[token] for token in token_ids).decode(errors="replace")


def walk(pieces, stop_strings):
    """Feeds the pieces one by one: what may be shown until a stop string is complete, and if one was."""
    matcher = StopStringMatcher(PieceTokenizer(pieces), stop_strings)
    counts = []
    for length in range(1, len(pieces) + 1):
        generated = list(range(length))
        if matcher.is_complete(generated):
            return counts, True
        counts.append(matcher.num_releasable(generated))
    return counts, False


@pytest.mark.parametrize(
    ("pieces", "stop_strings", "counts", "found"),
    [
        (["ABC", "DEF", "G", "HI", "J"], ["DEFGHIJ"], [1, 1, 1, 1], True),
        (["ABC", "DEF", "G", "HI", "K"], ["DEFGHIJ"], [1, 1, 1, 1, 5], False),  # released whole
        (["xD", "EF", "y"], ["DEFG"], [0, 0, 3], False),
        (["xDEFGy"], ["DEFG"], [], True),
        (["D", "D", "E", "!"], ["DEF"], [0, 1, 1, 4], False),  # the first D can no longer begin it
        (["AB", "AB", "AC"], ["ABABAC"], [0, 0], True),
        (["AB", "AB", "AB", "AC"], ["ABABAC"], [0, 0, 1], True),
        (["a", "b", "c"], ["x", "bcd", "c!"], [1, 1, 1], False),
        (["one", " two"], ["tw"], [1], True),
        ([b"\xe4", b"\xbd", b"\xa0", "!"], ["?"], [0, 0, 3, 4], False),  # whole characters only
        ([b"a\xe4", b"\xbd\xa0", "b"], ["?"], [0, 2, 3], False),
        (
            ["a", "é".encode()[:1], "é".encode()[1:]],
            ["aé"],
            [0, 0],
            True,
        ),  # stop string across a split character
        (["a", "é".encode()[:1], "è".encode()[1:], "b"], ["aé"], [0, 0, 3, 4], False),
        (
            [b"\xff", "a", b"\xff", "b"],
            ["?"],
            [0, 2, 2, 4],
            False,
        ),  # bytes that are no text are released later
    ],
)
def test_stop_strings_are_found_and_never_shown_in_part(pieces, stop_strings, counts, found):
    assert walk(pieces, stop_strings) == (counts, found)


def brute_force(tokenizer, generated, stop_strings):
    """Tokens that may be shown, by definition: whole characters that begin no stop string at the end."""
    text = tokenizer.decode(generated).rstrip("\ufffd")
    held = max(
        (n for stop in stop_strings for n in range(1, len(stop)) if text.endswith(stop[:n])),
        default=0,
    )
    certain = text[: len(text) - held]
    return max(n for n in range(len(generated) + 1) if certain.startswith(tokenizer.decode(generated[:n])))


@pytest.mark.parametrize("seed", range(30))
def test_the_short_tail_gives_the_same_answers_as_the_whole_text(seed):
    generator = torch.Generator().manual_seed(seed)
    pieces = [
        "a",
        "b",
        "ab",
        "ba",
        "é",
        "aé",
        "é".encode()[:1],
        "é".encode()[1:],
        "你".encode()[:2],
        "你".encode()[2:],
    ]
    stop_strings = ["abab" + "é", "ba" * 3, "a你b"]
    tokenizer = PieceTokenizer(pieces)
    matcher = StopStringMatcher(tokenizer, stop_strings)
    generated: list[int] = []
    shown = 0
    for _ in range(200):
        generated.append(int(torch.randint(len(pieces), (), generator=generator)))
        text = tokenizer.decode(generated)
        complete = any(stop in text for stop in stop_strings)
        assert matcher.is_complete(generated) is complete
        if complete:
            break
        releasable = matcher.num_releasable(generated)
        assert releasable == brute_force(tokenizer, generated, stop_strings)
        assert releasable >= shown
        shown = releasable


def test_stop_strings_work_on_a_byte_level_tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    matcher = StopStringMatcher(tokenizer, ["。\n\n"])
    tokens = tokenizer.encode("你好。\nHi 😀。\n\nmore")
    shown = []
    for length in range(1, len(tokens) + 1):
        if matcher.is_complete(tokens[:length]):
            break
        shown.append(matcher.num_releasable(tokens[:length]))
    assert tokenizer.decode(tokens[:length]) == "你好。\nHi 😀。\n\n"
    texts = [tokenizer.decode(tokens[:count]) for count in shown]
    assert not any("\ufffd" in text for text in texts)
    assert texts[-1] == "你好。\nHi 😀"
    assert shown == sorted(shown)


def make_request(generated, *, streaming=False, **rules):
    stop = StopRules(max_new_tokens=rules.pop("max_new_tokens", 9), **rules)
    return Request("a", [1], SamplingParams(), stop, streaming=streaming, generated=generated)


def no_tokenizer():
    pytest.fail("asked for a tokenizer that nobody needs")


def no_criterion(criterion, token_ids):
    pytest.fail("asked a criterion that nobody has")


@pytest.mark.parametrize(
    ("generated", "rules", "expected"),
    [
        ([1, 2], {}, StopDecision(None, 2)),
        ([1, 2], {"eos_token_ids": frozenset({2})}, StopDecision("eos", 2)),
        ([1, 2], {"max_new_tokens": 2}, StopDecision("length", 2)),
        ([1, 2], {"stop_sequences": ((1, 2),)}, StopDecision("eos", 2)),
        # Rules on token ids come first: a request that has ended anyway needs no text.
        ([1, 2], {"max_new_tokens": 2, "stop_strings": ("x",)}, StopDecision("length", 2)),
    ],
)
def test_a_tokenizer_is_asked_for_only_where_stop_strings_decide(generated, rules, expected):
    assert StopChecker(no_tokenizer, no_criterion).check(make_request(generated, **rules)) == expected


def test_stop_strings_end_a_request_and_hold_back_what_may_begin_one():
    checker = StopChecker(lambda: PieceTokenizer(["ab", "c", "d"]), no_criterion)

    def check(generated, *, streaming):
        return checker.check(make_request(generated, streaming=streaming, stop_strings=("cd",)))

    assert check([0, 1], streaming=True) == StopDecision(None, 1)
    assert check([0, 1, 0], streaming=True) == StopDecision(None, 3)
    assert check([0, 1, 2], streaming=True) == StopDecision("eos", 3)
    # Nobody sees the tokens of a request that does not stream before its end.
    assert check([0, 1], streaming=False) == StopDecision(None, 2)
    assert check([0, 1, 2], streaming=False) == StopDecision("eos", 3)


def test_one_requests_stop_strings_do_not_stop_another():
    checker = StopChecker(lambda: PieceTokenizer(["ab", "cd"]), no_criterion)
    assert checker.check(make_request([0, 1], stop_strings=("cd",))).finish_reason == "eos"
    assert checker.check(make_request([0, 1], stop_strings=("ce",))).finish_reason is None
    assert checker.check(make_request([0, 1])).finish_reason is None


def test_criteria_see_prompt_and_output_and_are_asked_only_where_nothing_else_ends_the_request():
    asked = []

    def is_met(criterion, token_ids):
        asked.append(token_ids)
        return criterion(token_ids, None)

    checker = StopChecker(no_tokenizer, is_met)
    ends_with_three = (lambda ids, _: False, lambda ids, _: ids[-1] == 3)
    assert checker.check(make_request([5, 2], criteria=ends_with_three)) == StopDecision(None, 2)
    assert checker.check(make_request([5, 3], criteria=ends_with_three)) == StopDecision("eos", 2)
    assert asked == [[1, 5, 2]] * 2 + [[1, 5, 3]] * 2
    assert checker.check(make_request([5, 3], criteria=ends_with_three, max_new_tokens=2)) == StopDecision("length", 2)
    assert len(asked) == 4
