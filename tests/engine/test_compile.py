"""Compiled steps give the plain tokens, and nothing is compiled while requests wait for it."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import re
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache
from torch.fx.experimental import _config as shapes_config

from cbtriton import WorkloadHints
from cbtriton.compile import CompileError
from cbtriton.manager import ContinuousBatchingManager
from cbtriton.model_adapter import ModelAdapter
from cbtriton.processors import PROCESSOR_OPTIONS

NUM_NEW = 8
LENGTHS = (1, 5, 16, 33, 9)
# So few sizes that the graphs of all of them compile in a test.
FEW_SIZES = {"max_batch_tokens": 16, "q_padding_interval_size": 16, "max_requests_per_batch": 2}
HINTS = WorkloadHints(max_prompt_length=33, max_generated_length=NUM_NEW, num_requests=4)


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Graphs of other tests' models are of the same code."""
    torch._dynamo.reset()


@pytest.fixture
def whole_step(monkeypatch):
    """The model is treated as one that is no list of layers."""
    monkeypatch.setattr(ModelAdapter, "repeated_layers", lambda self, layout: ())


def backend(dynamic: bool, **settings: Any) -> dict[str, Any]:
    """Both paths through the compiler, but without its slow code generator."""
    how = {"backend": "aot_eager", "fullgraph": True, "dynamic": dynamic}
    return {"varlen_compile_config": how, "decode_compile_config": how, **settings}


def run(model, tools, oracle, kernels: str = "reference", **config: Any):
    """Warm-up, two rounds of requests, equal tokens; returns the manager's last counters."""
    manager = ContinuousBatchingManager(model, tools.options(), tools.small(**config), HINTS, {"default": kernels})
    try:
        manager.warmup()
        assert manager.warmed_up
        manager.start()
        for _ in range(2):
            prompts = [tools.prompt(length) for length in LENGTHS]
            ids = [manager.add_request(prompt, max_new_tokens=NUM_NEW) for prompt in prompts]
            answers = [manager.get_result(request_id, timeout=tools.patience).generated_tokens for request_id in ids]
            assert answers == [oracle.greedy(prompt, NUM_NEW) for prompt in prompts]
        return manager.stats()
    finally:
        manager.destroy()


@pytest.mark.parametrize(("kernels", "use_async_batching"), [("reference", False), ("auto", True)])
def test_layers_compiled_for_any_size_give_the_plain_tokens(model, oracle, tools, kernels, use_async_batching):
    stats = run(model, tools, oracle, kernels, use_async_batching=use_async_batching, **backend(dynamic=True))
    # One graph for each path: the layers of the model share it.
    assert (stats.compilations, stats.late_compilations) == (2, 0)


def test_layers_compiled_for_padded_sizes_give_the_plain_tokens(model, oracle, tools):
    stats = run(model, tools, oracle, use_async_batching=True, **backend(dynamic=False), **FEW_SIZES)
    assert stats.late_compilations == 0
    assert stats.compilations == len(stats.buckets) == 4


PROCESSORS = {
    "repetition_penalty": 1.8,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "no_repeat_ngram_size": 2,
    "sequence_bias": [[[7], 3.0], [[7, 8], -5.0]],
    "logit_bias": {9: 4.0},
    "bad_words_ids": [[3], [44, 9]],
    "suppress_tokens": [1, 2],
    "begin_suppress_tokens": [5],
    "forced_bos_token_id": 11,
    "forced_eos_token_id": 40,
    "exponential_decay_length_penalty": (2, 1.1),
    "remove_invalid_values": True,
}
FILTERS = {"top_h": 0.95, "typical_p": 0.9, "epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3}
DRAWING = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
SAMPLINGS = {
    "greedy": {},
    "drawn": DRAWING,
    "processed": PROCESSORS | {"eos_token_id": [17], "min_length": 4},
    "processed and drawn": PROCESSORS | FILTERS | DRAWING | {"eos_token_id": [17], "min_new_tokens": 3},
}


def answers(model, tools, kernels: str, **config: Any):
    """The tokens of one round of requests for each of `SAMPLINGS`, and the last counters."""
    config = tools.small(per_request_processors=True, **config)
    manager = ContinuousBatchingManager(model, tools.options(), config, HINTS, {"default": kernels})
    prompts = [tools.prompt(length) for length in LENGTHS]
    try:
        manager.warmup()
        manager.start()
        rounds = {}
        for kind, sampling in SAMPLINGS.items():
            ids = [manager.add_request(prompt, max_new_tokens=NUM_NEW, **sampling) for prompt in prompts]
            outputs = [manager.get_result(name, timeout=tools.patience) for name in ids]
            rounds[kind] = [(output.error, output.generated_tokens) for output in outputs]
        return rounds, manager.stats()
    finally:
        manager.destroy()


def test_samplings_have_every_processor():
    assert set(PROCESSORS | FILTERS) == set(PROCESSOR_OPTIONS)


@pytest.mark.parametrize(
    ("kernels", "use_async_batching"),
    [
        ("auto", True),
        pytest.param("auto", False, marks=pytest.mark.slow),
        pytest.param("reference", True, marks=pytest.mark.slow),
        pytest.param("reference", False, marks=pytest.mark.slow),
    ],
)
def test_the_whole_step_is_one_graph_with_the_plain_tokens(tools, whole_step, kernels, use_async_batching):
    model = tools.build(tools.llama_config(num_hidden_layers=1))
    compiled, stats = answers(model, tools, kernels, use_async_batching=use_async_batching, **backend(dynamic=True))
    # Each path: greedy, drawn, processed.
    assert (stats.compilations, stats.late_compilations) == (6, 0)
    greedy = [tools.plain_greedy(model, tools.prompt(length), NUM_NEW) for length in LENGTHS]
    assert compiled["greedy"] == [(None, tokens) for tokens in greedy]
    plain, _ = answers(model, tools, kernels)
    assert compiled == plain
    assert len({str(tokens) for tokens in plain.values()}) == len(SAMPLINGS)


@pytest.mark.parametrize("use_async_batching", [False, True])
@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.slow
def test_levels_change_nothing_for_requests_with_processors(model, tools, level, use_async_batching):
    sizes = {"max_requests_per_batch": 2, "max_batch_tokens": 64} if level == 3 else {}
    settings = {"default_compile_level": level, "use_async_batching": use_async_batching}
    compiled, stats = answers(model, tools, "auto", **settings, **sizes)
    assert stats.late_compilations == 0
    assert stats.compilations >= 2
    assert compiled == answers(model, tools, "auto")[0]


def test_level_1_gives_the_plain_tokens_and_its_code_copies_no_cache_and_is_found_again(model, oracle, tools):
    sources: list[str] = []
    with fresh_cache(), mock.patch.object(GraphLowering, "save_output_code", sources.append):
        for found in (0, 2):
            torch._dynamo.reset()
            # Names of attention functions, which are part of a graph, are free again once their engines are gone.
            gc.collect()
            counters.clear()
            stats = run(model, tools, oracle, "auto", default_compile_level=1)
            assert (stats.compilations, stats.late_compilations) == (2, 0)
            assert stats.compile_time > 0
            paths = [(entry.kind, entry.bucket.partition(":")[0], entry.graphs) for entry in stats.preparations]
            assert paths == [("compile", "varlen", 1), ("compile", "decode", 1)]
            assert sum(entry.seconds for entry in stats.preparations) == stats.compile_time
            # Nothing is traced twice, and the second engine is to the compiler what one of another process is.
            assert (counters["aot_autograd"]["total"], counters["aot_autograd"]["autograd_cache_hit"]) == (2, found)
    pages = tools.small().num_blocks + 1
    for source in sources:
        assert "kv_write" in source
        allocated = re.findall(r"empty_strided\w*\(\(([^)]*)\)", source)
        assert allocated
        assert not [shape for shape in allocated if str(pages) in re.split(r"\W+", shape)]


@pytest.mark.slow
@pytest.mark.parametrize("use_async_batching", [False, True])
@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_levels_give_the_plain_tokens(model, oracle, tools, level, kernels, use_async_batching):
    sizes = {"max_requests_per_batch": 2, "max_batch_tokens": 64} if level == 3 else {}
    settings = {"default_compile_level": level, "use_async_batching": use_async_batching}
    stats = run(model, tools, oracle, kernels, **settings, **sizes)
    assert stats.late_compilations == 0
    assert stats.compilations >= 2


def test_a_step_that_nobody_hinted_at_is_compiled_late_and_said_so(model, oracle, tools, caplog):
    manager = ContinuousBatchingManager(
        model,
        tools.options(),
        tools.small(**backend(dynamic=False), **FEW_SIZES),
        WorkloadHints(max_prompt_length=4, max_generated_length=4, num_requests=1),
    )
    try:
        manager.warmup()
        prepared = manager.stats().compilations
        manager.start()
        with caplog.at_level(logging.WARNING, "cbtriton"):
            ids = [manager.add_request(tools.prompt(12, seed), max_new_tokens=4) for seed in range(3)]
            for seed, request_id in enumerate(ids):
                output = manager.get_result(request_id, timeout=tools.patience)
                assert output.generated_tokens == oracle.greedy(tools.prompt(12, seed), 4)
        stats = manager.stats()
    finally:
        manager.destroy()
    assert stats.late_compilations == stats.compilations - prepared > 0
    assert re.search(r"compiled 1 graphs late, .* for a step (varlen|decode):\d+x\d+x\d+: .*size mismatch", caplog.text)


def test_without_a_warm_up_graphs_are_compiled_when_needed(model, oracle, tools):
    prompts = [tools.prompt(5), tools.prompt(9)]
    config = tools.small(**backend(dynamic=True))
    outputs = model.generate_batch(prompts, tools.options(), config, max_new_tokens=NUM_NEW, warmup=False)
    assert tools.tokens(outputs) == [oracle.greedy(prompt, NUM_NEW) for prompt in prompts]


def test_a_path_without_a_config_stays_as_it_is(model, oracle, tools):
    how = backend(dynamic=True)["decode_compile_config"]
    stats = run(model, tools, oracle, decode_compile_config=how)
    assert (stats.compilations, stats.late_compilations) == (1, 0)


def test_a_layer_that_is_no_single_graph_is_refused_with_the_reason_and_given_back(model, oracle, tools):
    before = [set(module.__dict__) for module in model.modules()]
    # Hooks of a layer run outside of its graph, those of its parts inside.
    model.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: torch._dynamo.graph_break())
    prompt = tools.prompt(9)
    with pytest.raises(CompileError, match=r"(?s)varlen:.* cannot be compiled.*default_compile_level=0"):
        model.generate_batch([prompt], tools.options(), tools.small(**backend(dynamic=True)), max_new_tokens=NUM_NEW)
    assert [set(module.__dict__) for module in model.modules()] == before
    outputs = model.generate_batch([prompt], tools.options(), tools.small(), max_new_tokens=NUM_NEW)
    assert tools.tokens(outputs) == [oracle.greedy(prompt, NUM_NEW)]


def test_copies_of_a_model_at_work_take_no_pages_with_them(model, tools):
    manager = ContinuousBatchingManager(model, tools.options(), tools.small())
    try:
        manager.warmup()
        attention = model.model.layers[0].self_attn
        copies = copy.deepcopy(model).model.layers[0].self_attn, pickle.loads(pickle.dumps(attention))
        assert attention._cbtriton_pages.key.numel() > 0
        assert [twin._cbtriton_pages for twin in copies] == [None, None]
    finally:
        manager.destroy()


def test_a_hook_on_a_part_of_one_layer_holds_for_that_layer_only(model, tools):
    prompts = [tools.prompt(length) for length in LENGTHS]
    plain = tools.tokens(model.generate_batch(prompts, tools.options(), tools.small(), max_new_tokens=NUM_NEW))
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: 3 * output)
    hooked = tools.tokens(model.generate_batch(prompts, tools.options(), tools.small(), max_new_tokens=NUM_NEW))
    config = tools.small(**backend(dynamic=True))
    compiled = tools.tokens(model.generate_batch(prompts, tools.options(), config, max_new_tokens=NUM_NEW))
    assert compiled == hooked != plain


def test_new_weights_in_a_pause_need_no_new_graph_and_the_model_is_left_as_it_was(model, oracle, tools):
    layers, before = model.model.layers, [set(module.__dict__) for module in model.modules()]
    layers[0].forward = original = layers[0].forward
    other = tools.build(tools.llama_config(), seed=1)
    manager = ContinuousBatchingManager(model, tools.options(), tools.small(**backend(dynamic=True)), HINTS)
    prompt = tools.prompt(9)
    try:
        manager.warmup()
        manager.start()
        first = manager.get_result(manager.add_request(prompt, max_new_tokens=NUM_NEW), timeout=tools.patience)
        with manager.pause():
            model.load_state_dict(other.state_dict())
        second = manager.get_result(manager.add_request(prompt, max_new_tokens=NUM_NEW), timeout=tools.patience)
        stats = manager.stats()
    finally:
        manager.destroy()
    assert first.generated_tokens == oracle.greedy(prompt, NUM_NEW)
    assert second.generated_tokens == tools.plain_greedy(other, prompt, NUM_NEW)
    assert stats.late_compilations == 0
    assert layers[0].__dict__.pop("forward") is original
    assert [set(module.__dict__) for module in model.modules()] == before


def flipped(forward):
    return lambda hidden_states, **kwargs: forward(hidden_states.flip(-1), **kwargs)


def test_what_a_pause_changes_on_single_layers_holds(model, tools):
    prompts = [tools.prompt(length) for length in LENGTHS]

    def answers(**config):
        """Before the pause and after it, and the last counters."""
        twin = copy.deepcopy(model)
        first, second = twin.model.layers
        manager = ContinuousBatchingManager(twin, tools.options(), tools.small(**config), HINTS)
        try:
            manager.warmup()
            manager.start()
            rounds = []
            for _ in range(2):
                ids = manager.add_requests(prompts, max_new_tokens=NUM_NEW)
                rounds.append([manager.get_result(name, timeout=tools.patience).generated_tokens for name in ids])
                with manager.pause(reset_prefix_cache=True):
                    first.forward = flipped(first.forward)
                    second.mlp.register_forward_hook(lambda module, args, output: 3 * output)
            return *rounds, manager.stats()
        finally:
            manager.destroy()

    *plain, _ = answers()
    *compiled, stats = answers(decode_compile_config=backend(dynamic=True)["decode_compile_config"])
    assert compiled == plain
    assert plain[0] != plain[1]
    assert (stats.compilations, stats.late_compilations) == (3, 2)


def test_a_compiled_16_bit_model_rounds_as_the_plain_one_does(model, tools):
    """The check after a warm-up would not notice: it allows for what bf16 itself is off."""
    model.bfloat16()
    prompts = [tools.prompt(length) for length in LENGTHS]
    plain = tools.tokens(model.generate_batch(prompts, tools.options(), tools.small(), max_new_tokens=NUM_NEW))
    config = tools.small(default_compile_level=1)
    compiled = tools.tokens(model.generate_batch(prompts, tools.options(), config, max_new_tokens=NUM_NEW))
    assert compiled == plain


class Plain:
    """What a model says by itself, as the oracle's `greedy`."""

    def __init__(self, model, tools) -> None:
        self._answers = {length: tools.plain_greedy(model, tools.prompt(length), NUM_NEW) for length in LENGTHS}

    def greedy(self, prompt: list[int], _: int) -> list[int]:
        return self._answers[len(prompt)]


@pytest.fixture(scope="module")
def hybrid(tools):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    return tools.build(tools.hybrid_config(**sizes, max_position_embeddings=512, sliding_window=8))


def test_layers_of_a_kind_share_their_graphs_whatever_their_group(hybrid, tools):
    stats = run(hybrid, tools, Plain(hybrid, tools), page_size=4, num_blocks=400, **backend(dynamic=True))
    # Two kinds, two paths.
    assert (stats.compilations, stats.late_compilations) == (4, 0)


@pytest.mark.slow
def test_the_whole_step_of_a_model_with_groups_is_one_graph(hybrid, tools, whole_step):
    stats = run(hybrid, tools, Plain(hybrid, tools), page_size=4, num_blocks=400, **backend(dynamic=True))
    # Greedy steps and others, on two paths.
    assert (stats.compilations, stats.late_compilations) == (4, 0)


def test_a_warm_up_of_a_kept_session_leaves_no_prefix_that_its_check_wrote_over(model, oracle, tools):
    prompt = tools.prompt(40)
    manager = ContinuousBatchingManager(model, tools.options(), tools.small(**backend(dynamic=True)), HINTS)
    try:
        for _ in range(2):
            manager.start()
            request_id = manager.add_request(prompt, max_new_tokens=NUM_NEW)
            assert manager.get_result(request_id).generated_tokens == oracle.greedy(prompt, NUM_NEW)
            manager.stop(keep_for_next_session=True)
            manager.warmup()
    finally:
        manager.destroy()


def test_a_model_that_cannot_be_compiled_for_all_sizes_at_once_is_compiled_again(model, tools, oracle, caplog):
    @torch._dynamo.register_backend(name="particular")
    def particular(module, inputs):
        if shapes_config.backed_size_oblivious:
            raise RuntimeError("these sizes may be anything")
        return module.forward

    how = {"backend": "particular", "fullgraph": True, "dynamic": True}
    stats = run(model, tools, oracle, varlen_compile_config=how, decode_compile_config=how, **FEW_SIZES)
    assert [record.message for record in caplog.records if "compiling again" in record.message] == [
        "compiling again with graphs of their own for single sizes"
    ]
    assert stats.compilations > 0
    assert stats.late_compilations == 0
