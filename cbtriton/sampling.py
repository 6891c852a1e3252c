"""Generation options on the host: how a request draws its tokens, and when it ends.

`SamplingDefaults` reads a transformers `GenerationConfig` once; `request_parameters` merges one request's
arguments into it. Everything is checked in the caller's thread, before anything runs. The module sees token
ids and texts, never tensors, schedulers or models.

Random streams: a request's draws depend on its seed and the position alone. The seed is the request's own
`seed` argument, or is derived from the engine's seed and the request's ordinal; children of one prompt derive
theirs from the request's seed and their index. So neighbours, batch sizes, preemption and order of execution
change nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from cbtriton.cache_layout import CacheLayout
from cbtriton.callbacks import FUNCTION_OPTIONS, read_criteria, read_processing
from cbtriton.config import MAX_SEED, check_integer, check_number
from cbtriton.processors import PROCESSOR_OPTIONS, ProcessorOptions
from cbtriton.request import LogprobKind, LogprobParams, SamplingParams, StopRules

Warn = Callable[[str], None]

_SUPPORTED = frozenset(
    {
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "eos_token_id",
        "stop_strings",
        "num_return_sequences",
        *PROCESSOR_OPTIONS,
    }
)
"""Options that are honoured."""

_HARMLESS = frozenset(
    {
        # They belong to modes that other options, refused below, switch on: beams, assistants, encoders.
        "early_stopping",
        "length_penalty",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "target_lookbehind",
        "assistant_ensemble_weight",
        "max_matching_ngram_size",
        "decoder_start_token_id",
        # Nothing is padded or started with a token, or compiled from here; results have a type of their own.
        "pad_token_id",
        "bos_token_id",
        "disable_compile",
        "return_dict_in_generate",
        # Log-probabilities are normalised anyway.
        "renormalize_logits",
        "transformers_version",
    }
)
"""Options that cannot change an answer here, whatever their value."""

_UNSUPPORTED_PROCESSORS: dict[str, tuple[Any, ...]] = {
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
}
"""Logits processors that are not supported, with the values (besides None) that switch them off."""

_REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "constraints": (),
    "force_words_ids": (),
    "penalty_alpha": (0.0,),
    "low_memory": (False,),
    "dola_layers": (),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "token_healing": (False,),
    "is_assistant": (False,),
    "prompt_lookup_num_tokens": (),
    "assistant_early_exit": (),
    "speculation_type": (),
    "use_mtp": (False,),
    "max_time": (),
    "use_cache": (True,),
    "cache_implementation": ("paged", "dynamic", "hybrid"),
    "cache_config": (),
    "max_cache_len": (),
    "prefill_chunk_size": (),
    "compile_config": (),
    "continuous_batching_config": (),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_scores": (False,),
    "output_logits": (False,),
}
"""Options that ask for something else than this engine does, with the values (besides None) that do not."""

_INSTEAD = {
    "compile_config": "compile through ContinuousBatchingConfig instead",
    "continuous_batching_config": "pass it as the argument of the same name instead",
    "prefill_chunk_size": "set ContinuousBatchingConfig.max_batch_tokens instead",
    "output_scores": "set ContinuousBatchingConfig.return_logprobs for log-probabilities",
    "output_logits": "set ContinuousBatchingConfig.return_logprobs for log-probabilities",
}
"""What to do instead of setting a refused option, where there is more to say than to leave it out."""

_DEFAULT_MAX_LENGTH = 20
"""What transformers assumes for `max_length` when nobody sets it: no wish of the caller's."""

_TUNING = ("do_sample", "temperature", "top_k", "top_p", "min_p", *PROCESSOR_OPTIONS, *FUNCTION_OPTIONS)
_ALWAYS = (
    "seed",
    "min_new_tokens",
    "min_length",
    "stop_sequences",
    "stop_strings",
    "stopping_criteria",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
)
MAX_TOP_LOGPROBS = 20

_GREEDY_TEMPERATURE = 1e-5
"""Up to this temperature the most likely token is taken: the others have no chance."""


class RequestTooLongError(ValueError):
    """A request that can never fit the cache or the model's positions, whatever else runs."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What holds for every request of an engine, whatever it asks for.

    Attributes:
        vocab_size: Number of token ids that the model can produce.
        max_model_len: Tokens of the longest sequence that can be in the cache.
        cache_layout: How many blocks a sequence takes.
        num_blocks: Blocks in the cache that are not pinned.
        logprobs: Which log-probabilities every token comes with; None: none.
        per_request_processors: Whether requests may bring sampling arguments.
        drop_unsupported: Whether unsupported logits processors are dropped with a warning rather than refused.
    """

    vocab_size: int
    max_model_len: int
    cache_layout: CacheLayout
    num_blocks: int
    logprobs: LogprobKind | None
    per_request_processors: bool
    drop_unsupported: bool

    def most_new_tokens(self, prompt_length: int) -> int:
        """Tokens that can follow a prompt of `prompt_length` tokens; the last one never enters the cache."""
        return self.max_model_len - prompt_length + 1


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request gets where it says nothing: a `GenerationConfig`, read once and never changed.

    Attributes:
        do_sample: Whether tokens are drawn; False: the most likely one is taken.
        temperature: Divides the logits of drawn tokens.
        top_k: Keeps this many tokens; 0: off.
        top_p: Keeps tokens up to this probability mass; 1.0: off.
        min_p: Drops tokens less likely than `min_p` times the most likely one; 0.0: off.
        max_new_tokens: Longest answer in tokens; None: not given.
        max_length: Longest prompt and answer in tokens; None: not given. Without effect beside
            `max_new_tokens`.
        min_new_tokens: EOS ids are suppressed for this many tokens.
        min_length: EOS ids are suppressed until prompt and answer have this many tokens.
        eos_token_ids: Any of these ends a request.
        stop_strings: Any of these texts ends a request.
        num_return_sequences: Answers per prompt.
        processors: What else changes scores.
    """

    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_new_tokens: int | None
    max_length: int | None
    min_new_tokens: int
    min_length: int
    eos_token_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    num_return_sequences: int
    processors: ProcessorOptions

    @classmethod
    def from_generation_config(
        cls, generation_config: Any, *, model_eos: object, vocab_size: int, drop_unsupported: bool, warn: Warn
    ) -> SamplingDefaults:
        """Reads `generation_config`, which is not changed.

        Args:
            generation_config: A transformers `GenerationConfig`.
            model_eos: The EOS id or ids of the model, used where the config has none (None, not -1 or an
                empty list).
            vocab_size: Number of token ids that the model can produce.
            drop_unsupported: Whether unsupported logits processors are dropped with a warning rather than
                refused.
            warn: Called with each warning.

        Raises:
            ValueError: An option is out of range, or asks for something that this engine does not do.
            TypeError: An option has the wrong type.
        """
        options = _public_attributes(generation_config)
        _check_options(options, drop_unsupported, warn)
        get = options.get
        do_sample = _boolean("do_sample", get("do_sample", False))
        temperature = _temperature(_or(get("temperature"), 1.0))
        if do_sample and temperature == 0.0:
            raise ValueError("temperature must be greater than 0 to sample, got 0.0; set do_sample=False for greedy")
        max_length = get("max_length")
        max_new_tokens = get("max_new_tokens")
        return cls(
            do_sample=do_sample,
            temperature=temperature,
            top_k=_top_k(get("top_k"), vocab_size),
            top_p=_top_p(_or(get("top_p"), 1.0)),
            min_p=_min_p(_or(get("min_p"), 0.0)),
            max_new_tokens=None if max_new_tokens is None else check_integer("max_new_tokens", max_new_tokens, 1),
            max_length=None
            if max_length in (None, _DEFAULT_MAX_LENGTH)
            else check_integer("max_length", max_length, 1),
            min_new_tokens=check_integer("min_new_tokens", _or(get("min_new_tokens"), 0), 0),
            min_length=check_integer("min_length", _or(get("min_length"), 0), 0),
            eos_token_ids=_eos_token_ids(_or(get("eos_token_id"), model_eos), vocab_size, warn),
            stop_strings=_stop_strings(_or(get("stop_strings"), ())),
            num_return_sequences=check_integer("num_return_sequences", _or(get("num_return_sequences"), 1), 1),
            processors=ProcessorOptions().merged(options, vocab_size),
        )

    @property
    def has_logits_processing(self) -> bool:
        """Whether logits are changed before a token is chosen, for a request without arguments of its own."""
        filters = self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 or self.temperature != 1.0
        return (self.do_sample and filters) or self.min_new_tokens > 0 or self.min_length > 0 or self.has_processors

    @property
    def has_processors(self) -> bool:
        """Whether such a request has more than temperature, top-k, top-p, min-p and a minimum length."""
        return not self.processors.is_neutral or (self.do_sample and self.processors.has_filters)


def request_parameters(
    defaults: SamplingDefaults,
    *,
    prompt_length: int,
    max_new_tokens: int | None,
    eos_token_id: object,
    kwargs: Mapping[str, Any],
    ordinal: int,
    engine_seed: int,
    limits: RequestLimits,
    warn: Warn,
) -> tuple[SamplingParams, StopRules]:
    """How one request draws its tokens and when it ends.

    A temperature up to 1e-5 means greedy. A request that gives `temperature` without `do_sample` samples; one that
    gives only filters (`top_k`, `top_p`, `min_p`, …) samples if the defaults do. An argument that is None counts
    as not given.

    Args:
        defaults: What holds where the request says nothing.
        prompt_length: Tokens of the prompt.
        max_new_tokens: The request's own limit; None: the defaults', else what fits.
        eos_token_id: The request's own EOS id or ids; None: the defaults', -1 or an empty list: none.
        kwargs: `seed`, `min_new_tokens`, `min_length`, `stop_sequences` (lists of token ids), `stop_strings` (a text
            or several), `stopping_criteria` (a function or several), `logprobs` ("processed" or "raw"),
            `top_logprobs` (a number), `prompt_logprobs` (a bool), and, with `per_request_processors`, `do_sample`,
            `temperature`, `top_k`, `top_p`, `min_p`, the fields of `ProcessorOptions`, `logits_processor` (a function
            or several), `token_mask` and `prefix_allowed_tokens_fn` (see `HostProcessing`).
        ordinal: Number of the request since the engine was made.
        engine_seed: Source of the seeds of requests without one.
        limits: What every request must fit.
        warn: Called with each warning.

    Raises:
        ValueError: A value is out of range, the request cannot fit, or it may not bring a sampling argument.
        TypeError: An argument is unknown or has the wrong type.
    """
    given = {name: value for name, value in kwargs.items() if value is not None}
    _check_argument_names(kwargs, given, limits.per_request_processors)
    options = defaults.processors.merged(given, limits.vocab_size)
    min_new_tokens = _min_new_tokens(defaults, given, prompt_length)
    processing = read_processing(given, may_translate=options.is_neutral and min_new_tokens <= 0)
    options = options.merged(processing.options, limits.vocab_size)
    if processing.dropped:
        _drop_processors(", ".join(processing.dropped), limits.drop_unsupported, warn)
    stop = StopRules(
        max_new_tokens=_max_new_tokens(defaults, max_new_tokens, prompt_length, limits),
        eos_token_ids=_request_eos(defaults, eos_token_id, limits.vocab_size),
        stop_sequences=_stop_sequences(given.get("stop_sequences", ()), limits.vocab_size),
        stop_strings=_stop_strings(given.get("stop_strings", defaults.stop_strings)),
        criteria=read_criteria(given.get("stopping_criteria", ())),
    )
    sampling = SamplingParams(
        **_filters(defaults, options, given, limits.vocab_size),
        seed=_request_seed(given.get("seed"), engine_seed, ordinal),
        min_new_tokens=min_new_tokens,
        processors=options.resolve(prompt_length, stop.max_new_tokens, stop.eos_token_ids),
        host=processing.host,
        logprobs=_logprobs(given, limits),
        prompt_logprobs=_boolean("prompt_logprobs", given.get("prompt_logprobs", False)),
    )
    return sampling, stop


def child_seed(request_seed: int, child_index: int) -> int:
    """Seed of a request's extra answer number `child_index`."""
    return _derived_seed(b"child", request_seed, child_index)


def _public_attributes(generation_config: Any) -> dict[str, Any]:
    if isinstance(generation_config, Mapping) or not hasattr(generation_config, "__dict__"):
        raise TypeError(f"expected a transformers GenerationConfig, got {type(generation_config).__name__}")
    return {name: value for name, value in vars(generation_config).items() if not name.startswith("_")}


def _check_options(options: Mapping[str, Any], drop_unsupported: bool, warn: Warn) -> None:
    """Refuses what the engine does not do, and drops or refuses unsupported processors."""
    unsupported = []
    for name, value in options.items():
        if value is None or name in _SUPPORTED or name in _HARMLESS:
            continue
        if name in _UNSUPPORTED_PROCESSORS:
            if value not in _UNSUPPORTED_PROCESSORS[name]:
                unsupported.append(f"{name}={value!r}")
        elif name not in _REFUSED:
            raise ValueError(f"{name}={value!r} is not a known generation option; {_leave_out(name)}")
        elif value not in _REFUSED[name]:
            instead = _INSTEAD.get(name, _leave_out(name))
            raise ValueError(f"{name}={value!r} is not supported by continuous batching; {instead}")
    if unsupported:
        _drop_processors(", ".join(unsupported), drop_unsupported, warn)


def _leave_out(name: str) -> str:
    return f"leave {name} out of the generation config"


def _drop_processors(options: str, drop_unsupported: bool, warn: Warn) -> None:
    if not drop_unsupported:
        raise ValueError(
            f"logits processors that are not supported: {options}; leave them out, or set "
            "drop_unsupported_processors=True to generate without them"
        )
    warn(f"logits processors that are not supported are dropped: {options}")


def _check_argument_names(kwargs: Mapping[str, Any], given: Mapping[str, Any], per_request_processors: bool) -> None:
    accepted = ", ".join(_ALWAYS + _TUNING)
    for name in kwargs:
        if name in _UNSUPPORTED_PROCESSORS:
            raise TypeError(f"{name} needs a logits processor that is not supported; accepted are {accepted}")
        if name not in _ALWAYS and name not in _TUNING:
            raise TypeError(f"a request has no argument {name!r}; accepted are {accepted}")
    tuning = [name for name in _TUNING if name in given]
    if tuning and not per_request_processors:
        raise ValueError(
            f"{', '.join(tuning)} cannot be set per request; set ContinuousBatchingConfig.per_request_processors=True"
        )


def _filters(
    defaults: SamplingDefaults, options: ProcessorOptions, given: Mapping[str, Any], vocab_size: int
) -> dict[str, Any]:
    """Temperature and filters as arguments of `SamplingParams`; none of them for a greedy request."""
    temperature = _temperature(given.get("temperature", defaults.temperature))
    filters = {
        "top_k": _top_k(given.get("top_k", defaults.top_k), vocab_size),
        "top_p": _top_p(given.get("top_p", defaults.top_p)),
        "min_p": _min_p(given.get("min_p", defaults.min_p)),
        **options.filters,
    }
    do_sample = _boolean("do_sample", given.get("do_sample", defaults.do_sample or "temperature" in given))
    if do_sample and temperature == 0.0 and "temperature" not in given:
        raise ValueError("do_sample=True needs a temperature greater than 0, and the defaults have 0.0; give one")
    return {"temperature": temperature, **filters} if do_sample and temperature > _GREEDY_TEMPERATURE else {}


def _max_new_tokens(defaults: SamplingDefaults, asked: object, prompt_length: int, limits: RequestLimits) -> int:
    most = limits.most_new_tokens(prompt_length)
    if most < 1:
        raise _too_long(limits, f"a prompt of {prompt_length} tokens", prompt_length, "shorten it")
    wanted = _or(asked, defaults.max_new_tokens)
    if wanted is not None:
        new_tokens = check_integer("max_new_tokens", wanted, 1)
        if new_tokens > most:
            what = f"a prompt of {prompt_length} tokens with max_new_tokens={new_tokens}"
            raise _too_long(limits, what, prompt_length + new_tokens - 1, f"set max_new_tokens={most} or less")
        return new_tokens
    if defaults.max_length is None:
        return most
    if defaults.max_length <= prompt_length:
        raise ValueError(
            f"max_length must exceed the prompt's {prompt_length} tokens, got {defaults.max_length}; set "
            "max_new_tokens instead"
        )
    # The option is an upper bound that checkpoints bring along, not a wish for that many tokens.
    return min(most, defaults.max_length - prompt_length)


def _too_long(limits: RequestLimits, what: str, needed: int, remedy: str) -> RequestTooLongError:
    # The last generated token never enters the cache, so it needs no place.
    blocks = limits.cache_layout.peak_blocks(needed, 1)
    if blocks > limits.num_blocks:
        return RequestTooLongError(
            f"{what} needs {blocks} blocks of {limits.cache_layout.kinds[0].page_size} tokens, and the cache has "
            f"{limits.num_blocks}; {remedy}, or raise num_blocks"
        )
    return RequestTooLongError(
        f"{what} needs {needed} places in the cache, and a sequence has at most {limits.max_model_len}; {remedy}"
    )


def _min_new_tokens(defaults: SamplingDefaults, given: Mapping[str, Any], prompt_length: int) -> int:
    min_new_tokens, min_length = defaults.min_new_tokens, defaults.min_length
    if "min_new_tokens" in given or "min_length" in given:
        min_new_tokens = check_integer("min_new_tokens", given.get("min_new_tokens", 0), 0)
        min_length = check_integer("min_length", given.get("min_length", 0), 0)
    return max(min_new_tokens, min_length - prompt_length)


def _logprobs(given: Mapping[str, Any], limits: RequestLimits) -> LogprobParams | None:
    """What the request wants beyond the engine's own log-probabilities."""
    if "logprobs" not in given and "top_logprobs" not in given:
        return None
    kind = given.get("logprobs", limits.logprobs or "processed")
    if kind not in get_args(LogprobKind):
        raise ValueError(f"logprobs must be 'processed' or 'raw', got {kind!r}")
    num_top = check_integer("top_logprobs", given.get("top_logprobs", 0), 0, min(MAX_TOP_LOGPROBS, limits.vocab_size))
    return None if num_top == 0 and kind == limits.logprobs else LogprobParams(kind, num_top)


def _request_seed(asked: object, engine_seed: int, ordinal: int) -> int:
    if asked is not None:
        return check_integer("seed", asked, 0, MAX_SEED)
    return _derived_seed(b"request", engine_seed, ordinal)


def _derived_seed(purpose: bytes, seed: int, index: int) -> int:
    message = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    digest = hashlib.blake2b(message, digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


def _request_eos(defaults: SamplingDefaults, asked: object, vocab_size: int) -> frozenset[int]:
    if asked is None:
        return defaults.eos_token_ids
    return frozenset(check_integer("eos_token_id", token, 0, vocab_size - 1) for token in _ids(asked) if token != -1)


def _eos_token_ids(value: object, vocab_size: int, warn: Warn) -> frozenset[int]:
    """The usable ids: -1 stands for none, and what the model cannot produce is left out with a warning."""
    tokens = frozenset(check_integer("eos_token_id", token, -MAX_SEED) for token in _ids(value)) - {-1}
    usable = frozenset(token for token in tokens if 0 <= token < vocab_size)
    if usable != tokens:
        warn(f"eos_token_id {sorted(tokens - usable)} is ignored: the model has {vocab_size} tokens")
    return usable


def _ids(value: Any) -> list[Any]:
    """One id, several, or none, as a list."""
    if value is None:
        return []
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str) or not isinstance(value, Iterable):
        return [value]
    return list(value)


def _stop_sequences(value: Any, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(sequence, (list, tuple)) for sequence in value):
        raise TypeError(f"stop_sequences must be a list of lists of token ids, got {value!r}; write [[1, 2], [3]]")
    if not all(value):
        raise ValueError(f"stop_sequences must not contain an empty one, got {value!r}; remove it")
    return tuple(
        tuple(check_integer("a token of stop_sequences", token, 0, vocab_size - 1) for token in sequence)
        for sequence in value
    )


def _stop_strings(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple, set, frozenset)) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"stop_strings must be a text or a list of texts, got {value!r}")
    if not all(texts):
        raise ValueError(f"stop_strings must not contain an empty text, got {value!r}; remove it")
    return tuple(texts)


def _temperature(value: object) -> float:
    return check_number("temperature", value, minimum=0.0)


def _top_k(value: object, vocab_size: int) -> int:
    """The number of tokens kept, 0 where that is all of them."""
    top_k = check_integer("top_k", _or(value, 0), -1)
    return top_k if 0 < top_k < vocab_size else 0


def _top_p(value: object) -> float:
    return check_number("top_p", value, minimum=0.0, maximum=1.0)


def _min_p(value: object) -> float:
    return check_number("min_p", value, minimum=0.0, maximum=1.0)


def _boolean(name: str, value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def _or(value: object, fallback: object) -> Any:
    return fallback if value is None else value
