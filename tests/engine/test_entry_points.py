"""How callers reach the engine: `enable`, `generate_batch`, `patch_transformers`, transformers' configurations."""

from __future__ import annotations

import inspect
import threading
import warnings

import pytest
import torch
import transformers
from transformers import LlamaForCausalLM
from transformers.generation.continuous_batching.utils import WorkloadHints as TransformersHints

import cbtriton
from cbtriton import ContinuousBatchingConfig, ContinuousBatchingManager, KernelConfig, RequestStatus, WorkloadHints
from cbtriton.mixin import ContinuousMixin

METHODS = (
    "generate_batch",
    "init_continuous_batching",
    "continuous_batching_context_manager",
    "destroy_cached_continuous_batching_manager",
)


def test_enabling_twice_is_harmless_and_hides_nothing_of_the_model(oracle, tools):
    model = tools.build(tools.llama_config())
    original = type(model)
    assert cbtriton.enable(model) is model
    enabled = type(model)
    assert cbtriton.enable(cbtriton.enable(model)) is model
    assert type(model) is enabled
    assert enabled.__mro__[1] is ContinuousMixin
    assert (enabled.__name__, enabled.__module__) == (original.__name__, original.__module__)
    assert isinstance(model, original)
    assert tools.plain_greedy(model, [1, 2], 4) == oracle.greedy([1, 2], 4)
    assert not isinstance(tools.build(tools.llama_config()), ContinuousMixin)


@pytest.mark.parametrize("thing", [None, "gpt2", torch.nn.Linear(2, 2)])
def test_only_models_can_be_enabled(thing):
    with pytest.raises(TypeError, match="enable needs a loaded transformers model"):
        cbtriton.enable(thing)


def test_no_prompts_give_no_answers_and_start_nothing(model, monkeypatch):
    monkeypatch.setattr(ContinuousBatchingManager, "__init__", None)
    assert model.generate_batch([]) == {}
    assert model.generate_batch(()) == {}


@pytest.mark.parametrize("name", ["attention_mask", "max_new_token", "num_beams", "use_cuda_graph"])
def test_unknown_arguments_are_refused_with_those_that_exist(model, name):
    with pytest.raises(TypeError, match=f"unknown arguments {name}; .*max_new_tokens, workload_hints, kernel_config"):
        model.generate_batch([[1, 2]], **{name: 1})


@pytest.mark.parametrize("inputs", [{"input_ids": [[1]]}, "text", 7])
def test_what_is_no_list_of_prompts_is_refused(model, inputs):
    num_threads = threading.active_count()
    with pytest.raises(TypeError, match="inputs must be a list of prompts"):
        model.generate_batch(inputs)
    assert threading.active_count() == num_threads


def test_every_documented_argument_of_generate_batch_works(model, oracle, tools, capsys):
    outputs = model.generate_batch(
        inputs=torch.tensor([[1, 2], [3, 4]]),
        generation_config=tools.options(),
        continuous_batching_config=tools.small(),
        record_timestamps=True,
        progress_bar=True,
        persistent_manager=False,
        warmup=False,
        max_new_tokens=4,
        workload_hints=WorkloadHints(max_prompt_length=2, max_generated_length=4, num_requests=2),
        kernel_config=KernelConfig(default="reference"),
    )
    assert tools.tokens(outputs) == [oracle.greedy([1, 2], 4), oracle.greedy([3, 4], 4)]
    assert all(len(output.timestamps) == 4 for output in outputs.values())
    assert "2/2" in capsys.readouterr().err


def test_the_limit_of_the_options_holds_unless_the_call_has_its_own(model, oracle, tools):
    options = tools.options(max_new_tokens=5)
    for kwargs, num_tokens in (({}, 5), ({"max_new_tokens": 3}, 3), ({"max_new_tokens": None}, 5)):
        outputs = model.generate_batch([[1, 2]], options, tools.small(), **kwargs)
        assert tools.tokens(outputs) == [oracle.greedy([1, 2], num_tokens)]


def test_the_models_own_options_are_the_default(model, oracle, tools):
    model.generation_config.max_new_tokens = 4
    outputs = model.generate_batch([[1, 2]], continuous_batching_config=tools.small())
    assert tools.tokens(outputs) == [oracle.greedy([1, 2], 4)]


def test_nothing_needs_to_be_set(model, oracle, tools):
    prompts = [tools.prompt(5), tools.prompt(40)]
    outputs = model.generate_batch(prompts, max_new_tokens=5)
    assert tools.tokens(outputs) == [oracle.greedy(prompt, 5) for prompt in prompts]


def test_a_wrong_hint_costs_speed_at_most(model, oracle, tools):
    prompts = [tools.prompt(60 + seed, seed) for seed in range(4)]
    hints = WorkloadHints(max_prompt_length=1, max_generated_length=1, num_requests=1)
    config = ContinuousBatchingConfig(page_size=16)
    outputs = model.generate_batch(prompts, tools.options(), config, max_new_tokens=5, workload_hints=hints)
    assert tools.tokens(outputs) == [oracle.greedy(prompt, 5) for prompt in prompts]


def test_configurations_of_transformers_are_taken(model, oracle, tools):
    config = transformers.ContinuousBatchingConfig(page_size=16, num_blocks=20, max_batch_tokens=9)
    hints = TransformersHints(max_prompt_length=20, max_generated_length=5, num_requests=1)
    prompt = tools.prompt(20)
    manager = model.init_continuous_batching(tools.options(), config, hints)
    resolved = manager.engine_config
    assert (resolved.page_size, resolved.num_blocks, resolved.max_batch_tokens) == (16, 20, 9)
    assert resolved.max_requests == 1
    outputs = model.generate_batch([prompt], tools.options(), config, max_new_tokens=5, workload_hints=hints)
    assert tools.tokens(outputs) == [oracle.greedy(prompt, 5)]


def test_the_context_manager_takes_what_it_documents_and_finishes_what_was_submitted(model, oracle, tools):
    with model.continuous_batching_context_manager(
        generation_config=tools.options(),
        block=True,
        timeout=tools.patience,
        continuous_batching_config=tools.small(),
        persistent_manager=False,
        warmup=True,
        workload_hints=None,
        kernel_config=None,
    ) as manager:
        assert manager.is_running()
        assert manager.warmed_up
        request_id = manager.add_request(tools.prompt(9), max_new_tokens=20)
    assert not manager.is_running()
    assert manager.get_result(request_id).generated_tokens == oracle.greedy(tools.prompt(9), 20)


def test_an_exception_in_the_block_ends_at_once_what_still_runs(model, tools):
    answers = []

    def fail_inside_the_block():
        block = model.continuous_batching_context_manager(tools.options(), continuous_batching_config=tools.small())
        with block as manager:
            answers.append((manager, manager.add_request(tools.prompt(9), max_new_tokens=490)))
            raise KeyError("mine")

    with pytest.raises(KeyError):
        fail_inside_the_block()
    ((manager, request_id),) = answers
    assert manager.get_result(request_id).status == RequestStatus.FAILED


def test_an_answer_that_somebody_else_took_is_an_error_and_no_hole(model, tools, monkeypatch):
    take = ContinuousBatchingManager.get_result

    def steal(self, request_id=None, timeout=None):
        take(self, request_id, timeout=None)
        return None

    monkeypatch.setattr(ContinuousBatchingManager, "get_result", steal)
    with pytest.raises(RuntimeError, match="the result of 'req_0' went to somebody else"):
        model.generate_batch([[1, 2]], tools.options(), tools.small(), max_new_tokens=2)


# ------------------------------------------------------------------------------------------------ patch_transformers


def engine_of(method):
    return inspect.unwrap(method).__module__.split(".")[0]


def test_patching_gives_every_model_this_engine_until_the_block_ends(oracle, tools):
    model = tools.build(tools.llama_config())
    originals = {name: getattr(LlamaForCausalLM, name) for name in METHODS}
    assert {engine_of(method) for method in originals.values()} == {"transformers"}
    with cbtriton.patch_transformers():
        assert {engine_of(getattr(LlamaForCausalLM, name)) for name in METHODS} == {"cbtriton"}
        outputs = model.generate_batch([[1, 2, 3]], tools.options(), tools.small(), max_new_tokens=4)
        assert tools.tokens(outputs) == [oracle.greedy([1, 2, 3], 4)]
        manager = model.init_continuous_batching(tools.options(), tools.small())
        assert isinstance(manager, ContinuousBatchingManager)
    assert {name: getattr(LlamaForCausalLM, name) for name in METHODS} == originals


def test_patching_as_a_switch_can_be_undone_twice_and_also_after_an_exception():
    originals = {name: getattr(LlamaForCausalLM, name) for name in METHODS}
    switch = cbtriton.patch_transformers()
    assert engine_of(LlamaForCausalLM.generate_batch) == "cbtriton"
    switch.undo()
    switch.undo()
    with pytest.raises(KeyError), cbtriton.patch_transformers():
        raise KeyError("mine")
    assert {name: getattr(LlamaForCausalLM, name) for name in METHODS} == originals


def test_generate_with_a_paged_cache_comes_here(oracle, tools, monkeypatch):
    model = tools.build(tools.llama_config())
    prompts, seen = [[1, 2, 3], [4, 5, 6]], []
    submit = ContinuousBatchingManager.submit_batch
    monkeypatch.setattr(
        ContinuousBatchingManager, "submit_batch", lambda self, *args: seen.append(self) or submit(self, *args)
    )
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with cbtriton.patch_transformers():
        mask = torch.ones((2, 3), dtype=torch.int64)
        answers = model.generate(torch.tensor(prompts), attention_mask=mask, cache_implementation="paged", **options)
        mask[0, 0] = 0
        with pytest.raises(ValueError, match="attention_mask must be all ones"):
            model.generate(torch.tensor(prompts), attention_mask=mask, cache_implementation="paged", **options)
        outputs = model.generate_batch(prompts, tools.options(), tools.small(), max_new_tokens=5)
    expected = [prompt + oracle.greedy(prompt, 5) for prompt in prompts]
    assert answers[0].tolist() == expected
    assert len(seen) == 2
    # As lighteval reads results.
    assert list(outputs) == ["req_0", "req_1"]
    assert [output.prompt_ids + output.generated_tokens for output in outputs.values()] == expected


def test_patches_may_be_nested():
    with cbtriton.patch_transformers():
        with cbtriton.patch_transformers():
            pass
        assert engine_of(LlamaForCausalLM.generate_batch) == "cbtriton"
    assert engine_of(LlamaForCausalLM.generate_batch) == "transformers"


def test_the_public_names_import_without_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in cbtriton.__all__:
            assert getattr(cbtriton, name) is not None
