"""Generation options become parameters and stop rules as transformers means them, or are refused by name."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import GenerationConfig

from cbtriton import sampling
from cbtriton.cache_layout import CachedLayer, CacheLayout
from cbtriton.processors import PROCESSOR_OPTIONS, ProcessorOptions
from cbtriton.request import SamplingParams
from cbtriton.sampling import (
    RequestLimits,
    RequestTooLongError,
    SamplingDefaults,
    child_seed,
    request_parameters,
)

VOCAB = 128
LAYOUT = CacheLayout.of([CachedLayer(window=0, key_bytes=32, value_bytes=32)], 16)
LIMITS = RequestLimits(
    vocab_size=VOCAB,
    max_model_len=100,
    cache_layout=LAYOUT,
    num_blocks=7,
    logprobs=None,
    per_request_processors=True,
    drop_unsupported=False,
)


@pytest.fixture(scope="module")
def model():
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(autouse=True)
def quiet_reference():
    transformers.logging.set_verbosity(logging.ERROR)


def read(generation_config=None, drop_unsupported=False, model_eos=None, warnings=None, **options):
    config = generation_config if generation_config is not None else GenerationConfig(**options)
    return SamplingDefaults.from_generation_config(
        config,
        model_eos=model_eos,
        vocab_size=VOCAB,
        drop_unsupported=drop_unsupported,
        warn=warnings.append if warnings is not None else pytest.fail,
    )


def parameters(defaults=None, prompt_length=10, max_new_tokens=None, eos_token_id=None, **changes):
    kwargs = changes.pop("kwargs", {})
    settings = {"ordinal": 0, "engine_seed": 7, "limits": LIMITS, "warn": pytest.fail} | changes
    return request_parameters(
        defaults or read(),
        prompt_length=prompt_length,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos_token_id,
        kwargs=kwargs,
        **settings,
    )


def sampled(defaults=None, **kwargs):
    return parameters(defaults, kwargs=kwargs)[0]


# Options that are not supported, and a value that switches each one on.
UNSUPPORTED_PROCESSORS = [
    ("encoder_repetition_penalty", 1.5),
    ("encoder_no_repeat_ngram_size", 2),
]
NO_OPS = [
    ("repetition_penalty", 1.0),
    ("encoder_repetition_penalty", 1.0),
    ("no_repeat_ngram_size", 0),
    ("encoder_no_repeat_ngram_size", 0),
    ("suppress_tokens", []),
    ("begin_suppress_tokens", []),
    ("remove_invalid_values", False),
    ("typical_p", 1.0),
    ("epsilon_cutoff", 0.0),
    ("epsilon_cutoff", 1.0),
    ("eta_cutoff", 0.0),
    ("renormalize_logits", True),
]
# What cbtriton applies itself.
OWN = {"TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper"}
# These leave every draw as it is.
INERT = {"LogitNormalization", "SuppressTokensLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor"}


def reference_processors(model, config):
    config = copy.deepcopy(config)
    config._eos_token_tensor = torch.tensor([2])
    config.max_length = 30
    prompt = torch.tensor([[1, 5, 6]])
    built = model._get_logits_processor(config, input_ids_seq_length=3, encoder_input_ids=prompt, device="cpu")
    return {type(processor).__name__ for processor in built} - OWN


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(("name", "value"), UNSUPPORTED_PROCESSORS)
def test_an_unsupported_processor_is_dropped_or_refused(model, name, value, do_sample):
    config = GenerationConfig(do_sample=do_sample, **{name: value})
    assert reference_processors(model, config)
    warnings: list[str] = []
    read(config, drop_unsupported=True, warnings=warnings)
    assert len(warnings) == 1
    assert name in warnings[0]
    with pytest.raises(ValueError, match=rf"{name}="):
        read(config, drop_unsupported=False)


@pytest.mark.parametrize(("name", "value"), NO_OPS)
def test_a_processor_at_its_neutral_value_neither_warns_nor_raises(model, name, value):
    config = GenerationConfig(do_sample=True, **{name: value})
    assert reference_processors(model, config) <= INERT
    assert read(config) == read(do_sample=True)


def test_all_dropped_processors_are_named_in_one_warning():
    warnings: list[str] = []
    read(drop_unsupported=True, warnings=warnings, encoder_repetition_penalty=1.5, encoder_no_repeat_ngram_size=2)
    assert len(warnings) == 1
    assert "encoder_repetition_penalty=1.5" in warnings[0]
    assert "encoder_no_repeat_ngram_size=2" in warnings[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 3),
        ("num_beam_groups", 2),
        ("diversity_penalty", 0.5),
        ("constraints", [object()]),
        ("force_words_ids", [[3]]),
        ("penalty_alpha", 0.6),
        ("low_memory", True),
        ("dola_layers", "low"),
        ("guidance_scale", 1.5),
        ("watermarking_config", transformers.WatermarkingConfig()),
        ("token_healing", True),
        ("is_assistant", True),
        ("prompt_lookup_num_tokens", 3),
        ("assistant_early_exit", 2),
        ("speculation_type", "dflash"),
        ("use_mtp", True),
        ("max_time", 1.0),
        ("use_cache", False),
        ("cache_implementation", "static"),
        ("cache_config", {"backend": "quanto"}),
        ("max_cache_len", 64),
        ("prefill_chunk_size", 16),
        ("compile_config", transformers.CompileConfig()),
        ("output_attentions", True),
        ("output_hidden_states", True),
        ("output_scores", True),
        ("output_logits", True),
        ("my_own_option", 1),
    ],
)
@pytest.mark.parametrize("drop_unsupported", [False, True])
def test_an_option_that_the_engine_does_not_do_raises_with_its_name(name, value, drop_unsupported):
    with pytest.raises(ValueError, match=rf"^{name}="):
        read(drop_unsupported=drop_unsupported, **{name: value})


def test_a_nested_batching_config_is_refused():
    config = GenerationConfig()
    config.continuous_batching_config = object()
    with pytest.raises(ValueError, match="continuous_batching_config"):
        read(config)


def test_every_option_of_transformers_is_classified_exactly_once():
    tables = [
        sampling._SUPPORTED,
        sampling._HARMLESS,
        set(sampling._UNSUPPORTED_PROCESSORS),
        set(sampling._REFUSED),
    ]
    options = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert options <= set().union(*tables)
    assert sum(map(len, tables)) == len(set().union(*tables))


def test_the_global_defaults_of_transformers_are_accepted_silently():
    config = GenerationConfig()
    config.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    assert read(config) == SamplingDefaults(
        do_sample=False,
        temperature=1.0,
        top_k=50,
        top_p=1.0,
        min_p=0.0,
        max_new_tokens=None,
        max_length=None,
        min_new_tokens=0,
        min_length=0,
        eos_token_ids=frozenset(),
        stop_strings=(),
        num_return_sequences=1,
        processors=ProcessorOptions(),
    )


@pytest.mark.parametrize("value", ["paged", "dynamic", "hybrid", None])
def test_cache_implementations_that_mean_an_ordinary_cache_are_accepted(value):
    read(cache_implementation=value)


def test_the_generation_config_is_not_changed():
    config = GenerationConfig(do_sample=True, temperature=0.5, top_k=3, eos_token_id=None, stop_strings="x")
    before = copy.deepcopy(vars(config))
    read(config, model_eos=[1, 2])
    assert vars(config) == before


def test_something_else_than_a_generation_config_is_a_type_error():
    with pytest.raises(TypeError, match="dict"):
        read({"do_sample": True})


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"do_sample": True, "temperature": 0.0}, ValueError, "temperature"),
        ({"do_sample": True, "temperature": -1.0}, ValueError, "temperature"),
        ({"do_sample": True, "temperature": float("nan")}, ValueError, "temperature"),
        ({"do_sample": True, "top_p": 1.5}, ValueError, "top_p"),
        ({"do_sample": True, "top_p": -0.1}, ValueError, "top_p"),
        ({"do_sample": True, "min_p": 1.5}, ValueError, "min_p"),
        ({"do_sample": True, "top_k": -2}, ValueError, "top_k"),
        ({"do_sample": True, "top_k": 2.5}, TypeError, "top_k"),
        ({"do_sample": 1}, TypeError, "do_sample"),
        ({"max_new_tokens": 2.5}, TypeError, "max_new_tokens"),
        ({"min_new_tokens": -1}, ValueError, "min_new_tokens"),
        ({"num_return_sequences": 0}, ValueError, "num_return_sequences"),
        ({"eos_token_id": "</s>"}, TypeError, "eos_token_id"),
        ({"stop_strings": [""]}, ValueError, "stop_strings"),
        ({"stop_strings": 3}, TypeError, "stop_strings"),
    ],
)
def test_a_bad_option_is_refused_by_name(options, error, name):
    with pytest.raises(error, match=name):
        read(**options)


@pytest.mark.parametrize("off", [None, 0, -1, VOCAB, VOCAB + 1, 5000])
def test_every_off_value_of_top_k_means_off(off):
    assert read(do_sample=True, top_k=off).top_k == 0
    assert sampled(read(do_sample=True, top_k=5), top_k=off).top_k == (5 if off is None else 0)


@pytest.mark.parametrize(("asked", "top_p"), [(None, 1.0), (1.0, 1.0), (1, 1.0), (0.0, 0.0), (0.3, 0.3)])
def test_top_p_is_off_at_one_and_keeps_one_token_at_zero(asked, top_p):
    assert sampled(read(do_sample=True, top_p=asked)).top_p == top_p


@pytest.mark.parametrize(
    ("config_eos", "model_eos", "expected"),
    [
        (5, None, {5}),
        ([5, 6], 7, {5, 6}),
        ((5, 6), None, {5, 6}),
        ({5, 6}, None, {5, 6}),
        (torch.tensor([5, 6]), None, {5, 6}),
        (torch.tensor(5), None, {5}),
        ([5, -1], None, {5}),
        (-1, 7, set()),
        ([], 7, set()),
        (None, 7, {7}),
        (None, [7, 8], {7, 8}),
        (None, None, set()),
        (0, 7, {0}),
    ],
)
def test_eos_ids_come_in_any_form_and_fall_back_to_the_models_list(config_eos, model_eos, expected):
    config = GenerationConfig()
    config.eos_token_id = config_eos
    assert read(config, model_eos=model_eos).eos_token_ids == expected


def test_eos_ids_outside_the_vocabulary_are_ignored_with_a_warning():
    warnings: list[str] = []
    defaults = read(eos_token_id=[5, VOCAB, 9999], warnings=warnings)
    assert defaults.eos_token_ids == {5}
    assert len(warnings) == 1
    assert "9999" in warnings[0]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(None, {3, 4}), (-1, set()), ([], set()), (9, {9}), ([9, 10], {9, 10}), ((9, -1), {9})],
)
def test_a_request_overrides_or_disables_the_eos_ids(asked, expected):
    _, stop = parameters(read(eos_token_id=[3, 4]), eos_token_id=asked)
    assert stop.eos_token_ids == expected


def test_an_eos_id_of_a_request_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"eos_token_id must be from 0 to 127, got 128"):
        parameters(eos_token_id=[5, VOCAB])


@pytest.mark.parametrize(
    ("options", "has_processing"),
    [
        ({}, False),
        ({"temperature": 0.5}, False),
        ({"do_sample": True}, False),
        ({"do_sample": True, "temperature": 0.5}, True),
        ({"do_sample": True, "top_k": 5}, True),
        ({"do_sample": True, "top_p": 0.5}, True),
        ({"do_sample": True, "min_p": 0.1}, True),
        ({"min_new_tokens": 3}, True),
        ({"min_length": 3}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"suppress_tokens": [1]}, True),
        ({"typical_p": 0.5}, False),
        ({"do_sample": True, "typical_p": 0.5}, True),
        ({"do_sample": True, "top_h": 0.5}, True),
    ],
)
def test_logits_processing_is_what_transformers_builds_processors_for(model, options, has_processing):
    config = GenerationConfig(**options)
    config._eos_token_tensor = torch.tensor([2])
    built = model._get_logits_processor(config, input_ids_seq_length=3, device="cpu")
    assert (len(built) > 0) is has_processing
    assert read(config).has_logits_processing is has_processing


def test_greedy_defaults_ignore_the_filters():
    assert sampled(read(temperature=0.5, top_k=3, top_p=0.4)) == SamplingParams(seed=sampled().seed)


DRAWN = {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.1}


@pytest.mark.parametrize(
    ("options", "kwargs", "expected"),
    [
        (DRAWN, {}, (0.7, 9, 0.8, 0.1)),
        (DRAWN, {"temperature": 2}, (2.0, 9, 0.8, 0.1)),
        (DRAWN, {"temperature": 0.0}, (0.0, 0, 1.0, 0.0)),
        (DRAWN, {"do_sample": False}, (0.0, 0, 1.0, 0.0)),
        (DRAWN, {"top_p": 0.0, "min_p": 0.0}, (0.7, 9, 0.0, 0.0)),
        (DRAWN, {"temperature": None, "top_k": None}, (0.7, 9, 0.8, 0.1)),
        ({}, {"temperature": 0.5}, (0.5, 0, 1.0, 0.0)),
        ({}, {"top_k": 5}, (0.0, 0, 1.0, 0.0)),
        ({}, {"do_sample": True, "top_k": 5}, (1.0, 5, 1.0, 0.0)),
        ({"top_k": 4}, {"do_sample": True}, (1.0, 4, 1.0, 0.0)),
    ],
)
def test_request_arguments_merge_into_the_defaults(options, kwargs, expected):
    params = sampled(read(**options), **kwargs)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == expected


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"temperature": -0.1}, ValueError, "temperature"),
        ({"temperature": float("nan")}, ValueError, "temperature"),
        ({"temperature": float("inf")}, ValueError, "temperature"),
        ({"temperature": True}, TypeError, "temperature"),
        ({"temperature": "hot"}, TypeError, "temperature"),
        ({"top_k": 1.5}, TypeError, "top_k"),
        ({"top_k": True}, TypeError, "top_k"),
        ({"top_k": -2}, ValueError, "top_k"),
        ({"top_p": 1.01}, ValueError, "top_p"),
        ({"top_p": float("nan")}, ValueError, "top_p"),
        ({"min_p": -0.1}, ValueError, "min_p"),
        ({"do_sample": 1}, TypeError, "do_sample"),
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": 2**63}, ValueError, "seed"),
        ({"seed": 1.0}, TypeError, "seed"),
        ({"min_new_tokens": -1}, ValueError, "min_new_tokens"),
        ({"stop_sequences": [1, 2]}, TypeError, "stop_sequences"),
        ({"stop_sequences": "end"}, TypeError, "stop_sequences"),
        ({"stop_sequences": [[]]}, ValueError, "stop_sequences"),
        ({"stop_sequences": [[1, VOCAB]]}, ValueError, "stop_sequences"),
        ({"stop_strings": [""]}, ValueError, "stop_strings"),
        ({"stop_strings": [1]}, TypeError, "stop_strings"),
        ({"min_length": 1.5}, TypeError, "min_length"),
        ({"encoder_repetition_penalty": 1.1}, TypeError, "encoder_repetition_penalty needs a logits processor"),
        ({"temprature": 1.1}, TypeError, "no argument 'temprature'.*temperature.*repetition_penalty.*eta_cutoff"),
        ({"repetition_penalty": 0.0}, ValueError, "repetition_penalty must be a finite number greater than 0"),
        ({"repetition_penalty": "much"}, TypeError, "repetition_penalty"),
        ({"presence_penalty": float("nan")}, ValueError, "presence_penalty"),
        ({"frequency_penalty": [1]}, TypeError, "frequency_penalty"),
        ({"no_repeat_ngram_size": -1}, ValueError, "no_repeat_ngram_size"),
        ({"no_repeat_ngram_size": 2.0}, TypeError, "no_repeat_ngram_size"),
        ({"sequence_bias": [[3, 1.0]]}, TypeError, "sequence_bias must hold lists"),
        ({"sequence_bias": [[[3], float("nan")]]}, ValueError, "bias of sequence_bias"),
        ({"sequence_bias": [[[3], float("inf")]]}, ValueError, "bias of sequence_bias"),
        ({"sequence_bias": [[3]]}, TypeError, "sequence_bias must be a list of pairs"),
        ({"sequence_bias": {(): 1.0}}, ValueError, "sequence_bias must not hold an empty"),
        ({"logit_bias": [[3, 1.0]]}, TypeError, "logit_bias must be a dict"),
        ({"logit_bias": {VOCAB: 1.0}}, ValueError, "token of logit_bias"),
        ({"bad_words_ids": [3]}, TypeError, "bad_words_ids must hold lists"),
        ({"bad_words_ids": "no"}, TypeError, "bad_words_ids must be a list of lists"),
        ({"bad_words_ids": [[]]}, ValueError, "bad_words_ids must not hold an empty"),
        ({"bad_words_ids": [[-1]]}, ValueError, "token of bad_words_ids"),
        ({"suppress_tokens": 3}, TypeError, "suppress_tokens must be a list of token ids"),
        ({"suppress_tokens": [3.0]}, TypeError, "token of suppress_tokens"),
        ({"begin_suppress_tokens": [VOCAB]}, ValueError, "token of begin_suppress_tokens"),
        ({"forced_bos_token_id": VOCAB}, ValueError, "token of forced_bos_token_id"),
        ({"forced_eos_token_id": [1, -2]}, ValueError, "token of forced_eos_token_id"),
        ({"exponential_decay_length_penalty": 3}, TypeError, "exponential_decay_length_penalty must be a pair"),
        ({"exponential_decay_length_penalty": (1.5, 1.1)}, TypeError, "start of exponential_decay_length_penalty"),
        ({"exponential_decay_length_penalty": (1, 0)}, ValueError, "factor of exponential_decay_length_penalty"),
        ({"remove_invalid_values": 1}, TypeError, "remove_invalid_values must be True or False"),
        ({"top_h": 0.0}, ValueError, "top_h must be a finite number greater than 0 and at most 1"),
        ({"typical_p": 1.5}, ValueError, "typical_p"),
        ({"epsilon_cutoff": -0.1}, ValueError, "epsilon_cutoff"),
        ({"eta_cutoff": True}, TypeError, "eta_cutoff"),
        ({"temprature": None}, TypeError, "temprature"),
    ],
)
def test_a_bad_request_argument_is_refused_by_name(kwargs, error, message):
    with pytest.raises(error, match=message):
        parameters(kwargs=kwargs)


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "do_sample", *PROCESSOR_OPTIONS])
def test_sampling_arguments_need_per_request_processors(name):
    value = name == "do_sample" or 1
    with pytest.raises(ValueError, match=rf"{name}.*per_request_processors=True"):
        parameters(kwargs={name: value}, limits=replace(LIMITS, per_request_processors=False))
    parameters(kwargs={name: None}, limits=replace(LIMITS, per_request_processors=False))


def test_the_other_arguments_are_always_allowed():
    kwargs = {"seed": 3, "min_new_tokens": 2, "stop_sequences": [[1, 2], (3,)], "stop_strings": "end"}
    params, stop = parameters(kwargs=kwargs, limits=replace(LIMITS, per_request_processors=False))
    assert (params.seed, params.min_new_tokens) == (3, 2)
    assert stop.stop_sequences == ((1, 2), (3,))
    assert stop.stop_strings == ("end",)


def test_stop_strings_of_a_request_replace_those_of_the_config():
    defaults = read(stop_strings=["a", "b"])
    assert parameters(defaults)[1].stop_strings == ("a", "b")
    assert parameters(defaults, kwargs={"stop_strings": ["c"]})[1].stop_strings == ("c",)
    assert parameters(defaults, kwargs={"stop_strings": []})[1].stop_strings == ()


@pytest.mark.parametrize(
    ("options", "asked", "prompt_length", "expected"),
    [
        ({}, None, 10, 91),  # what fits: the last token never enters the cache
        ({}, None, 100, 1),
        ({"max_length": 20}, None, 10, 91),  # the value that transformers assumes itself is no wish
        ({"max_length": 30}, None, 10, 20),
        ({"max_length": 4096}, None, 10, 91),
        ({"max_new_tokens": 5}, None, 10, 5),
        ({"max_new_tokens": 5, "max_length": 30}, None, 10, 5),
        ({"max_new_tokens": 5}, 7, 10, 7),
        ({"max_length": 30}, 91, 10, 91),
    ],
)
def test_max_new_tokens_comes_from_request_config_or_room(options, asked, prompt_length, expected):
    _, stop = parameters(read(**options), prompt_length=prompt_length, max_new_tokens=asked)
    assert stop.max_new_tokens == expected


@pytest.mark.parametrize(
    ("options", "asked", "prompt_length", "message"),
    [
        (
            {},
            92,
            10,
            r"10 tokens with max_new_tokens=92 needs 101 places.*at most 100; set max_new_tokens=91",
        ),
        ({"max_new_tokens": 92}, None, 10, r"needs 101 places in the cache.*at most 100"),
        ({}, None, 101, r"a prompt of 101 tokens needs 101 places in the cache.*at most 100"),
        ({}, 104, 10, r"needs 8 blocks of 16 tokens, and the cache has 7"),
        ({}, None, 113, r"a prompt of 113 tokens needs 8 blocks of 16 tokens, and the cache has 7"),
    ],
)
def test_a_request_that_can_never_fit_is_refused_with_the_sizes(options, asked, prompt_length, message):
    with pytest.raises(RequestTooLongError, match=message):
        parameters(read(**options), prompt_length=prompt_length, max_new_tokens=asked)


@pytest.mark.parametrize(
    ("options", "asked", "message"),
    [
        ({}, 0, r"max_new_tokens must be at least 1, got 0"),
        ({"max_length": 30}, None, r"max_length must exceed the prompt's 30 tokens, got 30"),
    ],
)
def test_an_answer_without_a_token_is_refused(options, asked, message):
    with pytest.raises(ValueError, match=message):
        parameters(read(**options), prompt_length=30, max_new_tokens=asked)


def test_max_new_tokens_must_be_an_integer():
    for value in (True, 2.5, "3"):
        with pytest.raises(TypeError, match="max_new_tokens"):
            parameters(max_new_tokens=value)


@pytest.mark.parametrize(
    ("options", "prompt_length", "expected"),
    [
        ({"min_new_tokens": 4}, 10, 4),
        ({"min_length": 14}, 10, 4),
        ({"min_length": 14}, 20, 0),
        ({"min_length": 14, "min_new_tokens": 6}, 10, 6),
        ({"min_length": 18, "min_new_tokens": 6}, 10, 8),
    ],
)
def test_min_length_counts_the_prompt_and_min_new_tokens_does_not(model, options, prompt_length, expected):
    config = GenerationConfig(**options)
    params, _ = parameters(read(config), prompt_length=prompt_length)
    assert params.min_new_tokens == expected
    # transformers masks the EOS id for exactly as many generated tokens.
    config._eos_token_tensor = torch.tensor([2])
    processors = model._get_logits_processor(config, input_ids_seq_length=prompt_length, device="cpu")
    masked = [
        bool(torch.isinf(processors(torch.ones(1, prompt_length + new, dtype=torch.long), torch.zeros(1, VOCAB))[0, 2]))
        for new in range(12)
    ]
    assert masked == [new < expected for new in range(12)]


def test_a_requests_seed_depends_on_engine_seed_and_ordinal_only():
    seeds = [parameters(ordinal=ordinal)[0].seed for ordinal in range(200)]
    assert len(set(seeds)) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert parameters(ordinal=3)[0].seed == seeds[3]
    assert parameters(ordinal=3, prompt_length=50, max_new_tokens=1)[0].seed == seeds[3]
    assert parameters(ordinal=3, engine_seed=8)[0].seed != seeds[3]
    assert parameters(ordinal=3, kwargs={"seed": 42})[0].seed == 42
    assert parameters(ordinal=9, engine_seed=1, kwargs={"seed": 42})[0].seed == 42


def test_seeds_are_the_same_in_every_process_and_version():
    assert parameters(ordinal=0, engine_seed=7)[0].seed == 1356420810170067226
    assert child_seed(42, 1) == 8251875610371342248


def test_children_have_streams_of_their_own():
    seeds = {child_seed(request, child) for request in range(20) for child in range(20)}
    requests = {parameters(ordinal=child, engine_seed=request)[0].seed for request in range(20) for child in range(20)}
    assert len(seeds | requests) == 800
