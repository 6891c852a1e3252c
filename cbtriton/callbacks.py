"""Options of a request that are functions of its caller: logits processors, token masks, stopping criteria.

They are checked here and called elsewhere, on the host, for their request alone. Some of transformers' own logits
processors are no more than a few numbers: these are told apart, so that they run inside the step like options of the
same meaning. The module sees functions and their attributes, never tensors or models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cbtriton.request import HostProcessing

FUNCTION_OPTIONS = ("logits_processor", "token_mask", "prefix_allowed_tokens_fn")

_Function = Callable[..., Any]
_TRANSFORMERS_MODULE = "transformers.generation.logits_process"

_IN_THE_STEP: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "SequenceBiasLogitsProcessor": ("sequence_bias", lambda processor: list(processor.sequence_bias.items())),
    "RepetitionPenaltyLogitsProcessor": ("repetition_penalty", lambda processor: processor.penalty),
    "NoRepeatNGramLogitsProcessor": ("no_repeat_ngram_size", lambda processor: processor.ngram_size),
    "InfNanRemoveLogitsProcessor": ("remove_invalid_values", lambda processor: True),
    "SuppressTokensLogitsProcessor": ("suppress_tokens", lambda processor: processor.suppress_tokens),
}
"""Processors and the options that do the same, in the order in which these apply."""

_NEED_MORE_THAN_A_REQUEST = frozenset(
    {
        "EncoderRepetitionPenaltyLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
        "HammingDiversityLogitsProcessor",
        "ClassifierFreeGuidanceLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    }
)
"""Processors that look at an encoder's input, at other beams, or at a second forward pass."""


@dataclass(frozen=True, slots=True)
class Processing:
    """What a request's functions come down to.

    Attributes:
        options: Options that do the same as some of them, under the names of `ProcessorOptions`.
        host: The others; None where there are none.
        dropped: Names of those that cannot run for one request.
    """

    options: Mapping[str, Any]
    host: HostProcessing | None
    dropped: tuple[str, ...]


def read_processing(given: Mapping[str, Any], may_translate: bool) -> Processing:
    """Checks a request's `FUNCTION_OPTIONS`.

    Args:
        given: Arguments of the request.
        may_translate: Whether processors may become options. They may not where the request has options of its own:
            processors of a list come behind them all, while options have an order.

    Raises:
        TypeError: Something is no function.
    """
    listed = _functions("logits_processor", given.get("logits_processor", ()))
    for name in ("token_mask", "prefix_allowed_tokens_fn"):
        if name in given:
            _check_function(name, given[name])
    processors = [processor for processor in listed if type(processor).__name__ not in _NEED_MORE_THAN_A_REQUEST]
    dropped = tuple(
        name for name in (type(processor).__name__ for processor in listed) if name in _NEED_MORE_THAN_A_REQUEST
    )
    options = _translated(processors) if may_translate else {}
    host = HostProcessing(
        processors=tuple(processors[len(options) :]),
        token_mask=given.get("token_mask"),
        prefix_allowed_tokens_fn=given.get("prefix_allowed_tokens_fn"),
    )
    return Processing(options, None if host == HostProcessing() else host, dropped)


def read_criteria(value: Any) -> tuple[_Function, ...]:
    """Checks a request's `stopping_criteria`.

    Raises:
        TypeError: Something is no function.
    """
    return _functions("stopping_criteria", value)


def _translated(processors: Sequence[Any]) -> dict[str, Any]:
    """The options of the first processors, as far as they have some and stand in the order of these."""
    order = list(_IN_THE_STEP)
    options: dict[str, Any] = {}
    last = -1
    for processor in processors:
        kind = type(processor)
        place = order.index(kind.__name__) if kind.__name__ in _IN_THE_STEP else -1
        # A prompt that the penalty ignores is more than a number.
        if kind.__module__ != _TRANSFORMERS_MODULE or place <= last or getattr(processor, "prompt_ignore_length", None):
            return options
        name, value_of = _IN_THE_STEP[kind.__name__]
        options[name] = value_of(processor)
        last = place
    return options


def _functions(name: str, value: Any) -> tuple[_Function, ...]:
    functions = (value,) if callable(value) and not isinstance(value, (list, tuple)) else value
    if not isinstance(functions, (list, tuple)):
        raise TypeError(f"{name} must be a function or a list of functions, got {value!r}")
    for function in functions:
        _check_function(f"an entry of {name}", function)
    return tuple(functions)


def _check_function(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {value!r}")
