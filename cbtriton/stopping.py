"""When a request ends, and how much of it may be shown before that is certain.

Functions of token ids and, for stop strings, of a tokenizer; asked by the scheduler after each token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from cbtriton.request import Request, StopRules


def finish_reason(generated: Sequence[int], rules: StopRules) -> Literal["eos", "length"] | None:
    """Why a request is done after its latest token, or None if it is not; stop strings and criteria are not asked.

    Args:
        generated: The request's generated tokens. Earlier ones were judged when they came: only the end is
            compared.
        rules: The request's rules. A stop sequence must lie wholly in the generated tokens.
    """
    if generated and generated[-1] in rules.eos_token_ids:
        return "eos"
    for sequence in rules.stop_sequences:
        if len(generated) >= len(sequence) and tuple(generated[-len(sequence) :]) == sequence:
            return "eos"
    return "length" if len(generated) >= rules.max_new_tokens else None


class TextDecoder(Protocol):
    """The part of a tokenizer that turns token ids into text."""

    def decode(self, token_ids: list[int], /) -> str:
        """The text of `token_ids`."""
        ...


class StopStringMatcher:
    """Finds stop strings in the text of generated tokens, and what may be shown before one is certain.

    It keeps no state between tokens. Each question decodes a short tail only: a token has at least one byte
    of text, so a stop string of n bytes that the latest token completes lies in the last n tokens.

    Args:
        tokenizer: Decodes token ids.
        stop_strings: Texts to look for, at least one, none empty.
    """

    def __init__(self, tokenizer: TextDecoder, stop_strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = tuple(stop_strings)
        longest = max(len(text.encode()) for text in self._stop_strings)
        # A character has at most 4 bytes: 3 more tokens make the first one of the stop string whole.
        self._tail_tokens = longest + 3

    def is_complete(self, generated: Sequence[int]) -> bool:
        """Whether the latest token completed a stop string. Ask after each token."""
        text = self._decode(generated[-self._tail_tokens :])
        return any(stop_string in text for stop_string in self._stop_strings)

    def num_releasable(self, generated: Sequence[int]) -> int:
        """How many of the tokens so far hold nothing that may begin a stop string, nor part of a character.

        Never falls as tokens are added. A beginning that turns out to be something else is released whole.
        """
        tail = generated[-self._tail_tokens :]
        # A character whose last bytes are still to come decodes to replacement characters.
        text = self._decode(tail).rstrip("\ufffd")
        certain = text[: len(text) - self._num_held(text)]
        kept = len(tail)
        while not certain.startswith(self._decode(tail[:kept])):
            kept -= 1
        return len(generated) - len(tail) + kept

    def _num_held(self, text: str) -> int:
        """Characters at the end of `text` that begin a stop string."""
        return max(_overlap(text, stop_string) for stop_string in self._stop_strings)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids)) if token_ids else ""


@dataclass(frozen=True, slots=True)
class StopDecision:
    """What a request's latest token means.

    Attributes:
        finish_reason: Why the request ends with it; None if it goes on.
        num_releasable: How many of its generated tokens may be shown to a streaming caller now.
    """

    finish_reason: Literal["eos", "length"] | None
    num_releasable: int


class StopChecker:
    """Applies each request's stop rules after each of its tokens.

    Args:
        get_tokenizer: The tokenizer for stop strings; asked for only when a request has some.
        is_met: Says whether a request's criterion is met by its tokens.
    """

    def __init__(
        self,
        get_tokenizer: Callable[[], TextDecoder],
        is_met: Callable[[Callable[[Any, Any], Any], list[int]], bool],
    ) -> None:
        self._get_tokenizer = get_tokenizer
        self._is_met = is_met

    def check(self, request: Request) -> StopDecision:
        """The decision for a request whose latest token was just appended.

        Raises:
            Exception: Whatever the tokenizer or a criterion raises.
        """
        num_generated = len(request.generated)
        reason = finish_reason(request.generated, request.stop)
        if reason is None and any(self._is_met(criterion, request.token_ids) for criterion in request.stop.criteria):
            reason = "eos"
        if reason is not None or not request.stop.stop_strings:
            return StopDecision(reason, num_generated)
        matcher = StopStringMatcher(self._get_tokenizer(), request.stop.stop_strings)
        if matcher.is_complete(request.generated):
            return StopDecision("eos", num_generated)
        releasable = matcher.num_releasable(request.generated) if request.streaming else num_generated
        return StopDecision(None, releasable)


def _overlap(text: str, stop_string: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop_string`."""
    lengths = range(min(len(text), len(stop_string) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop_string[:length])), 0)
