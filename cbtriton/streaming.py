"""Answers in pieces: what is new of each request, and its text as far as whole characters go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cbtriton.request import GenerationOutput

# What decoders give for bytes that are no character, or not yet.
_BROKEN = "\ufffd"


@dataclass(frozen=True, slots=True)
class StreamedTokens:
    """The next piece of one request's answer.

    Attributes:
        request_id: Whose.
        token_ids: New tokens since its last piece; empty where the request ended without one.
        text: Their text, where the model has a tokenizer, else empty. Text of half a character comes with the next
            piece, so all pieces together are the text of all tokens.
        output: The whole answer, with the last piece; None before.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    output: GenerationOutput | None


class TextStream:
    """Turns tokens into text as they come.

    Args:
        decode: The text of some tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        # What was given out last begins and ends at these tokens. It is decoded with what follows, since the text of a
        # token depends on the one in front of it.
        self._begin = self._end = 0

    def add(self, token_ids: list[int], is_last: bool) -> str:
        """The text that the next tokens add; the last ones also give what has been held back."""
        self._tokens += token_ids
        before = self._decode(self._tokens[self._begin : self._end])
        text = self._decode(self._tokens[self._begin :])
        if (text.endswith(_BROKEN) and not is_last) or len(text) <= len(before):
            return ""
        self._begin, self._end = self._end, len(self._tokens)
        return text[len(before) :]


class AnswerPieces:
    """Cuts the growing answers of several requests into pieces.

    Args:
        decode: The text of some tokens; None where there is no tokenizer.
    """

    def __init__(self, decode: Callable[[list[int]], str] | None) -> None:
        self._decode = decode
        self._num_seen: dict[str, int] = {}
        self._texts: dict[str, TextStream] = {}

    def next_of(self, output: GenerationOutput) -> StreamedTokens:
        """What an output has that the request's last one had not."""
        name, is_last = output.request_id, output.is_finished()
        new = output.generated_tokens[self._num_seen.get(name, 0) :]
        self._num_seen[name] = len(output.generated_tokens)
        text = ""
        if self._decode is not None:
            text = self._texts.setdefault(name, TextStream(self._decode)).add(new, is_last)
        if is_last:
            del self._num_seen[name]
            self._texts.pop(name, None)
        return StreamedTokens(name, tuple(new), text, output if is_last else None)
