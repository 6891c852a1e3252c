"""Options of logits processors become scores like those that transformers' `generate` computes from them."""

from __future__ import annotations

import random

import pytest
import torch
import transformers
from transformers import GenerationConfig

from cbtriton.cache_layout import CachedLayer, CacheLayout
from cbtriton.kernels.sample import reference
from cbtriton.padding import Bucket
from cbtriton.plan import BatchPlan, RowStart, ScheduledRow
from cbtriton.processors import PROCESSOR_OPTIONS, ProcessorOptions
from cbtriton.request import SamplingParams
from cbtriton.request_table import RequestTable
from cbtriton.sampling import RequestLimits, SamplingDefaults, request_parameters
from cbtriton.step_inputs import SampleFeatures, StepInputsWriter

VOCAB, MAX_LEN, MAX_NEW = 64, 48, 12
EOS = [5, 9]
LAYOUT = CacheLayout.of([CachedLayer(window=0, key_bytes=32, value_bytes=32)], 16)
LIMITS = RequestLimits(
    vocab_size=VOCAB,
    max_model_len=MAX_LEN,
    cache_layout=LAYOUT,
    num_blocks=16,
    logprobs=None,
    per_request_processors=True,
    drop_unsupported=False,
)


@pytest.fixture(scope="module")
def model():
    settings = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, **settings))


def parameters(options, kwargs, prompt_length, max_new_tokens=MAX_NEW):
    config = GenerationConfig(**({"eos_token_id": EOS} | options))
    defaults = SamplingDefaults.from_generation_config(
        config, model_eos=None, vocab_size=VOCAB, drop_unsupported=False, warn=pytest.fail
    )
    return request_parameters(
        defaults,
        prompt_length=prompt_length,
        max_new_tokens=max_new_tokens,
        eos_token_id=None,
        kwargs=kwargs,
        ordinal=0,
        engine_seed=7,
        limits=LIMITS,
        warn=pytest.fail,
    )


def expected_scores(model, options, history, prompt_length, logits):
    """What `generate` hands to softmax."""
    config = GenerationConfig(**({"eos_token_id": EOS, "max_length": prompt_length + MAX_NEW} | options))
    model._prepare_special_tokens(config, device="cpu")
    ids = torch.tensor([history])
    processors = model._get_logits_processor(
        config, input_ids_seq_length=prompt_length, encoder_input_ids=ids[:, :prompt_length], device="cpu"
    )
    # EOS ids that grow become infinite there.
    return processors(ids, logits[None])[0].clamp(max=torch.finfo(torch.float32).max)


class Device:
    """A request table, and the reference kernels on it."""

    def __init__(self, num_rows=3):
        self.table = RequestTable(num_rows, MAX_LEN, 1, 2, VOCAB, torch.device("cpu"))
        self.writer = StepInputsWriter(self.table, VOCAB, torch.device("cpu"))

    def start(self, row, history, prompt_length, sampling, eos):
        """Puts a request into a row; the inputs of a step that samples its next token."""
        start = RowStart(row, history, prompt_length, sampling, eos)
        scheduled = ScheduledRow("a", 1, row, len(history) - 1, 1, samples=True)
        plan = BatchPlan("decode", (scheduled,), (start,), (), (), num_tokens=1, max_seq_len=len(history))
        return self.writer.fill(plan, Bucket("decode", 1, 1, 1, MAX_LEN))

    def scores(self, inputs, logits):
        table = self.table
        scores = reference.process(
            logits[None],
            inputs.sample_rows,
            inputs.sample_positions,
            table.token_table,
            table.prompt_lengths,
            table.repetition_penalty,
            table.presence_penalty,
            table.frequency_penalty,
            table.no_repeat_ngram_size,
            table.num_biases,
            table.num_rules,
            table.rules,
            table.rule_prefixes,
            table.has_token_mask,
            table.token_masks,
            table.min_positions,
            table.eos_ids,
            table.decay_starts,
            table.decay_rates,
            table.remove_invalid,
        )
        filters = (table.top_h, table.top_k, table.top_p, table.min_p)
        cutoffs = (table.typical_p, table.epsilon_cutoff, table.eta_cutoff)
        if inputs.features.use_truncation:
            reference.truncate(scores, inputs.sample_rows, table.temperature, table.is_truncated, *filters, *cutoffs)
        return scores[0]


# Each option with a value that switches it on.
OPTIONS = {
    "repetition_penalty": 1.4,
    "no_repeat_ngram_size": 2,
    "sequence_bias": [[[3], -2.0], [[1, 2], 5.0]],
    "bad_words_ids": [[5], [7], [1, 2]],
    "suppress_tokens": [3, 4],
    "begin_suppress_tokens": [6],
    "forced_bos_token_id": 8,
    "forced_eos_token_id": [9, 11],
    "exponential_decay_length_penalty": (2, 1.3),
    "remove_invalid_values": True,
    "min_length": 9,
    "min_new_tokens": 4,
}
FILTERS = {"top_h": 0.6, "typical_p": 0.7, "epsilon_cutoff": 0.03, "eta_cutoff": 0.05}


def histories(chance):
    """(history, prompt length): first tokens, last ones that fit, and some between."""
    for prompt_length in (1, 2, 7):
        for num_new in (0, 1, 3, 5, MAX_NEW - 1):
            yield [chance.choice((1, 2, 3, 7)) for _ in range(prompt_length + num_new)], prompt_length


def random_logits(seed):
    return 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("source", ["config", "arguments"])
@pytest.mark.parametrize("names", [[name] for name in OPTIONS] + [list(OPTIONS)] + [["combinations"]] * 6)
def test_scores_are_those_of_generate(model, names, source, request):
    chance = random.Random(request.node.name)
    if names == ["combinations"]:
        names = [name for name in OPTIONS if chance.random() < 0.5]
    options = {name: OPTIONS[name] for name in names}
    for seed, (history, prompt_length) in enumerate(histories(chance)):
        given = (options, {}) if source == "config" else ({}, options)
        sampling, stop = parameters(*given, prompt_length)
        logits = random_logits(seed)
        device = Device()
        inputs = device.start(1, history, prompt_length, sampling, stop.eos_token_ids)
        got = device.scores(inputs, logits)
        expected = expected_scores(model, options, history, prompt_length, logits)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, msg=f"{options} {history} {prompt_length}")


@pytest.mark.parametrize("name", FILTERS)
def test_filters_are_those_of_generate(model, name):
    options = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95, name: FILTERS[name]}
    for seed in range(5):
        sampling, stop = parameters(options, {}, 3)
        device, logits = Device(), random_logits(seed)
        got = device.scores(device.start(0, [1, 2, 3], 3, sampling, stop.eos_token_ids), logits)
        expected = expected_scores(model, options, [1, 2, 3], 3, logits)
        torch.testing.assert_close(got / 0.8, expected)


def test_penalties_on_the_output_leave_the_prompt_alone():
    kwargs = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {1: 2.0, 6: -1.0}}
    sampling, stop = parameters({}, kwargs, 3)
    device, logits = Device(), random_logits(0)
    inputs = device.start(0, [1, 2, 3, 3, 4, 3, 7], 3, sampling, stop.eos_token_ids)
    expected = logits.clone()
    for token, change in ((1, 2.0), (6, -1.0), (3, -1.0), (4, -0.75), (7, -0.75)):
        expected[token] += change
    torch.testing.assert_close(device.scores(inputs, logits), expected)


def test_a_row_forgets_the_request_before(model):
    device, logits = Device(), random_logits(1)
    sampling, stop = parameters(OPTIONS | FILTERS | {"do_sample": True, "temperature": 0.5}, {}, 4)
    device.start(2, [1, 2, 1, 2], 4, sampling, stop.eos_token_ids)
    inputs = device.start(2, [1, 2, 1], 3, SamplingParams(), frozenset())
    assert inputs.features == SampleFeatures(True, False, False, False, False)
    torch.testing.assert_close(device.scores(inputs, logits), logits, rtol=0, atol=0)


@pytest.mark.parametrize(("max_new_tokens", "forced"), [(1, [9, 11]), (2, [8])])
def test_an_eos_is_forced_rather_than_a_bos_where_both_are_due(max_new_tokens, forced):
    options = {"forced_bos_token_id": 8, "forced_eos_token_id": [9, 11], "min_new_tokens": 5}
    sampling, stop = parameters(options, {}, 1, max_new_tokens)
    device = Device()
    scores = device.scores(device.start(0, [1], 1, sampling, stop.eos_token_ids), random_logits(0))
    assert (scores > -torch.inf).nonzero().flatten().tolist() == forced


def test_features_say_what_a_step_needs():
    def features(kwargs):
        sampling, stop = parameters({}, kwargs, 3)
        found = Device().start(0, [1, 2, 3], 3, sampling, stop.eos_token_ids).features
        return found.use_processors, found.use_truncation

    assert features({}) == features({"temperature": 0.5, "top_k": 3}) == (False, False)
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size"):
        assert features({name: 2}) == (True, False)
    assert features({"suppress_tokens": [1]}) == (True, False)
    for name, value in FILTERS.items():
        assert features({name: value}) == (False, False)
        assert features({name: value, "do_sample": True}) == (True, True)


def test_an_argument_replaces_the_default_of_its_name_and_can_switch_it_off():
    defaults = {"repetition_penalty": 2.0, "suppress_tokens": [1], "forced_bos_token_id": 3, "forced_eos_token_id": 4}
    off = {"repetition_penalty": 1.0, "suppress_tokens": [], "forced_bos_token_id": -1, "forced_eos_token_id": -1}
    assert parameters(defaults, off, 3)[0].processors == SamplingParams().processors
    kept = parameters(defaults, {"repetition_penalty": None, "suppress_tokens": [2]}, 3)[0].processors
    assert kept.repetition_penalty == 2.0
    assert [rule.token for rule in kept.rules] == [3, 4, 2]


def test_temperatures_that_leave_no_chance_are_greedy():
    for temperature, is_greedy in ((0.0, True), (1e-5, True), (1.1e-5, False)):
        assert parameters({}, {"temperature": temperature, "top_h": 0.5}, 3)[0].is_greedy is is_greedy


def test_every_option_has_its_check_and_every_processor_of_transformers_its_option():
    assert set(OPTIONS) | set(FILTERS) | {"presence_penalty", "frequency_penalty", "logit_bias"} == (
        set(PROCESSOR_OPTIONS) | {"min_length", "min_new_tokens"}
    )
    for name, value in (OPTIONS | FILTERS).items():
        if name in PROCESSOR_OPTIONS:
            assert ProcessorOptions().merged({name: value}, VOCAB) != ProcessorOptions()
