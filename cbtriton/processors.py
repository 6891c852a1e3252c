"""Options of logits processors on the host: checked, merged, and resolved to the parameters of one request.

The names and meanings are those of transformers' `GenerationConfig`. Beyond these there are `presence_penalty` and
`frequency_penalty`, which count a request's output only, and `logit_bias`, a map from token ids to biases. The module
sees token ids, never tensors or models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from cbtriton.config import check_integer, check_number
from cbtriton.request import ProcessorParams, RuleKind, TokenRule

_LARGEST = 3.4028234663852886e38
_Bias = tuple[tuple[int, ...], float]


@dataclass(frozen=True, slots=True)
class ProcessorOptions:
    """Checked options of all processors; the defaults change no score.

    Attributes:
        repetition_penalty: Divides positive and multiplies negative scores of tokens of prompt and output.
        presence_penalty: Subtracted from the scores of tokens of the output.
        frequency_penalty: The same, once for each time that the token was generated.
        no_repeat_ngram_size: No n-gram of this size comes twice; 0: off.
        sequence_bias: Sequences, and what is added to the score of the last token behind the others.
        logit_bias: The same for single tokens.
        bad_words_ids: Sequences that are never completed.
        suppress_tokens: Tokens that never come.
        begin_suppress_tokens: Tokens that do not come first.
        forced_bos_token_id: What follows a prompt of one token; None: off.
        forced_eos_token_id: One of these is the last token that fits `max_new_tokens`; empty: off.
        exponential_decay_length_penalty: Generated tokens after which EOS ids grow, and the factor; None: off.
        remove_invalid_values: Whether NaN and infinities of the model are replaced.
        top_h: Share of the entropy that is kept; 0.0: off.
        typical_p: Mass of the most typical tokens that is kept; 1.0: off.
        epsilon_cutoff: Drops less likely tokens; 0.0: off.
        eta_cutoff: The same, with a bound that falls with the entropy; 0.0: off.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    sequence_bias: tuple[_Bias, ...] = ()
    logit_bias: tuple[_Bias, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()
    exponential_decay_length_penalty: tuple[int, float] | None = None
    remove_invalid_values: bool = False
    top_h: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0

    def merged(self, given: Mapping[str, Any], vocab_size: int) -> ProcessorOptions:
        """These options with others laid over them; values that are None, and other names, are passed over.

        Raises:
            ValueError: A value is out of range.
            TypeError: A value has the wrong type.
        """
        return replace(
            self,
            **{
                name: _CHECKS[name](name, given[name], vocab_size)
                for name in PROCESSOR_OPTIONS
                if given.get(name) is not None
            },
        )

    @property
    def filters(self) -> dict[str, float]:
        """The options that only act on drawn tokens, as arguments of `SamplingParams`."""
        return {name: getattr(self, name) for name in ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")}

    @property
    def is_neutral(self) -> bool:
        """Whether nothing is changed before the temperature."""
        return self == replace(ProcessorOptions(), **self.filters)

    @property
    def has_filters(self) -> bool:
        """Whether drawn tokens are filtered."""
        return self.filters != ProcessorOptions().filters

    def resolve(self, prompt_length: int, max_new_tokens: int, eos_token_ids: frozenset[int]) -> ProcessorParams:
        """The parameters of one request.

        Args:
            prompt_length: Tokens of its prompt.
            max_new_tokens: Its longest answer.
            eos_token_ids: What ends it. None of these alone is a bad word, as in transformers.
        """
        last = prompt_length + max_new_tokens - 1
        begin = prompt_length + (prompt_length == 1 and self.forced_bos_token_id is not None)
        eos = {(token,) for token in eos_token_ids}
        bad_words = (word for word in self.bad_words_ids if word not in eos)
        # Where both are due, EOS is forced.
        forced_bos = () if self.forced_eos_token_id and last == 1 else (self.forced_bos_token_id,)
        rules = [TokenRule(RuleKind.BIAS, *_split(tokens), bias=bias) for tokens, bias in self.sequence_bias]
        rules += [TokenRule(RuleKind.BIAS, *_split(tokens), bias=bias) for tokens, bias in self.logit_bias]
        rules += [TokenRule(RuleKind.BAN, *_split(word)) for word in bad_words]
        rules += [TokenRule(RuleKind.FORCE, token, position=1) for token in forced_bos if token is not None]
        rules += [TokenRule(RuleKind.FORCE, token, position=last) for token in self.forced_eos_token_id]
        rules += [TokenRule(RuleKind.SUPPRESS, token) for token in self.suppress_tokens]
        rules += [TokenRule(RuleKind.SUPPRESS, token, position=begin) for token in self.begin_suppress_tokens]
        decay = self.exponential_decay_length_penalty
        return ProcessorParams(
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            rules=tuple(rules),
            decay_start=None if decay is None else prompt_length + decay[0],
            decay_factor=1.0 if decay is None else decay[1],
            remove_invalid_values=self.remove_invalid_values,
        )


PROCESSOR_OPTIONS = tuple(field.name for field in fields(ProcessorOptions))


def _split(tokens: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    return tokens[-1], tokens[:-1]


def _number(name: str, value: Any, _: int) -> float:
    return check_number(name, value, minimum=-_LARGEST, maximum=_LARGEST)


def _positive(name: str, value: Any, _: int) -> float:
    return check_number(name, value, above=0.0, maximum=_LARGEST)


def _share(name: str, value: Any, _: int) -> float:
    return check_number(name, value, above=0.0, maximum=1.0)


def _cutoff(name: str, value: Any, _: int) -> float:
    # 1.0 means off, as in transformers.
    return check_number(name, value, minimum=0.0, maximum=1.0) % 1.0


def _size(name: str, value: Any, _: int) -> int:
    return check_integer(name, value, 0)


def _flag(name: str, value: Any, _: int) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def _token(name: str, value: Any, vocab_size: int) -> int:
    return check_integer(f"a token of {name}", value, 0, vocab_size - 1)


def _sequence(name: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name} must hold lists of token ids, got {value!r}")
    if not value:
        raise ValueError(f"{name} must not hold an empty list; remove it")
    return tuple(_token(name, token, vocab_size) for token in value)


def _sequences(name: str, value: Any, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name} must be a list of lists of token ids, got {value!r}; write [[1, 2], [3]]")
    return tuple(dict.fromkeys(_sequence(name, sequence, vocab_size) for sequence in value))


def _tokens(name: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of token ids, got {value!r}")
    return tuple(dict.fromkeys(_token(name, token, vocab_size) for token in value))


def _optional_tokens(name: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    """One id or several; -1 stands for none."""
    listed = [value] if isinstance(value, int) else value
    return _tokens(name, [] if listed == [-1] else listed, vocab_size)


def _optional_token(name: str, value: Any, vocab_size: int) -> int | None:
    return None if value == -1 else _token(name, value, vocab_size)


def _bias(name: str, value: Any) -> float:
    return (
        value if value == -math.inf else check_number(f"a bias of {name}", value, minimum=-_LARGEST, maximum=_LARGEST)
    )


def _sequence_bias(name: str, value: Any, vocab_size: int) -> tuple[_Bias, ...]:
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, (list, tuple)) or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in pairs):
        raise TypeError(
            f"{name} must be a list of pairs of token ids and a bias, got {value!r}; write [[[1, 2], -5.0]]"
        )
    biases = {_sequence(name, tokens, vocab_size): _bias(name, bias) for tokens, bias in pairs}
    return tuple(biases.items())


def _logit_bias(name: str, value: Any, vocab_size: int) -> tuple[_Bias, ...]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict from token ids to biases, got {value!r}; write {{1: -5.0}}")
    return tuple(((_token(name, token, vocab_size),), _bias(name, bias)) for token, bias in value.items())


def _decay(name: str, value: Any, _: int) -> tuple[int, float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise TypeError(f"{name} must be a pair (number of tokens, factor), got {value!r}; write (50, 1.05)")
    return check_integer(f"the start of {name}", value[0], 0), _positive(f"the factor of {name}", value[1], 0)


_CHECKS: dict[str, Callable[[str, Any, int], Any]] = {
    "repetition_penalty": _positive,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "no_repeat_ngram_size": _size,
    "sequence_bias": _sequence_bias,
    "logit_bias": _logit_bias,
    "bad_words_ids": _sequences,
    "suppress_tokens": _tokens,
    "begin_suppress_tokens": _tokens,
    "forced_bos_token_id": _optional_token,
    "forced_eos_token_id": _optional_tokens,
    "exponential_decay_length_penalty": _decay,
    "remove_invalid_values": _flag,
    "top_h": _share,
    "typical_p": _share,
    "epsilon_cutoff": _cutoff,
    "eta_cutoff": _cutoff,
}
