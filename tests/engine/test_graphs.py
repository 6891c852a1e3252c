"""Captured steps give the plain tokens, whatever a step holds, and nothing is captured twice or used after its time."""

from __future__ import annotations

import gc
import logging
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cbtriton
from cbtriton import WorkloadHints
from cbtriton import manager as manager_module
from cbtriton.config import ModelFacts
from cbtriton.graphs import CapturedStep, GraphKey, GraphStore
from cbtriton.manager import ContinuousBatchingManager
from cbtriton.padding import Bucket, PaddingPolicy
from cbtriton.simulator import graph_bytes, simulate, trace_of
from cbtriton.step_inputs import SampleFeatures, StepInputsWriter

NUM_NEW = 6
SIZES = {"max_batch_tokens": 32, "q_padding_interval_size": 16, "kv_padding_interval_size": 64}
HINTS = WorkloadHints(max_prompt_length=33, max_generated_length=8, num_requests=4)
SAMPLED = {"do_sample": True, "temperature": 1.2, "top_k": 20, "top_p": 0.9}


@pytest.fixture
def capturer(recorded_graphs, monkeypatch):
    """What every manager of a test captures with."""
    capturer = recorded_graphs.RecordingCapturer()
    choose = manager_module.choose_kernels
    monkeypatch.setattr(manager_module, "capturer_for", lambda device: capturer)
    monkeypatch.setattr(
        manager_module, "choose_kernels", lambda config, device: capturer.record(choose(config, device))
    )
    return capturer


@pytest.fixture
def run(model, tools, capturer):
    """Answers of a manager to prompts, all there from the beginning; with its last counters."""

    def run(
        prompts: list[list[int]],
        options: Any = None,
        hints: WorkloadHints | None = None,
        num_new: int = NUM_NEW,
        kernels: str = "reference",
        **config: Any,
    ) -> SimpleNamespace:
        config = SIZES | {"use_async_batching": False} | config
        manager = ContinuousBatchingManager(
            model, options or tools.options(), tools.small(**config), hints, {"default": kernels}
        )
        try:
            if hints is not None:
                manager.warmup()
            prepared = manager.stats()
            ids = manager.add_requests(prompts, max_new_tokens=num_new)
            manager.start()
            outputs = [manager.get_result(request_id, timeout=tools.patience) for request_id in ids]
            stats, records = manager.stats(), manager.step_records()
        finally:
            manager.destroy()
        answers = [output.generated_tokens for output in outputs]
        return SimpleNamespace(
            answers=answers, stats=stats, prepared=prepared, records=records, config=manager.engine_config
        )

    return run


def eager(run, *args: Any, **kwargs: Any) -> list[list[int]]:
    found = run(*args, **kwargs, use_cuda_graph=False)
    assert found.stats.captures == found.stats.replays == 0
    return found.answers


# -------------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("use_async_batching", [False, True])
@pytest.mark.parametrize("num_requests", range(1, 18))
def test_any_number_of_requests_gives_the_plain_tokens(run, oracle, tools, num_requests, use_async_batching):
    prompts = [tools.prompt(3 + 2 * index) for index in range(num_requests)]
    found = run(prompts, use_async_batching=use_async_batching, max_requests_per_batch=16)
    assert found.answers == [oracle.greedy(prompt, NUM_NEW) for prompt in prompts]
    # Every step is a replay, the first of its kind too.
    assert found.stats.replays == found.stats.steps
    assert found.stats.captures == len(found.stats.buckets)


@pytest.mark.parametrize("use_async_batching", [False, True])
@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_sampled_and_greedy_requests_draw_what_they_draw_without_graphs(model, run, tools, kernels, use_async_batching):
    prompts = [tools.prompt(4 + index) for index in range(7)]
    arguments = (prompts, tools.options(**SAMPLED))
    settings = {"kernels": kernels, "use_async_batching": use_async_batching, "return_logprobs": True}
    found = run(*arguments, **settings)
    assert found.answers == eager(run, *arguments, **settings)
    assert found.stats.replays == found.stats.steps


def test_requests_with_parameters_of_their_own_share_a_graph(model, capturer, tools):
    prompt = tools.prompt(9)
    wishes = [{"temperature": 1.5}, {"top_k": 3}, {"top_p": 0.5, "min_new_tokens": 3}, {"do_sample": False}] * 2
    wishes += [
        {"repetition_penalty": 1.9},
        {"typical_p": 0.4, "no_repeat_ngram_size": 2},
        {"suppress_tokens": [60, 78]},
    ]
    answers = {}
    for use_cuda_graph in (True, False):
        config = {**SIZES, "per_request_processors": True, "use_cuda_graph": use_cuda_graph}
        with tools.running(model, tools.options(**SAMPLED), **config) as manager:
            ids = [manager.add_request(prompt, max_new_tokens=NUM_NEW, seed=5, **wish) for wish in wishes]
            outputs = [manager.get_result(request_id, timeout=tools.patience) for request_id in ids]
            answers[use_cuda_graph] = [output.generated_tokens for output in outputs]
            if use_cuda_graph:
                assert manager.stats().captures <= 2 * len(manager.stats().buckets)
    assert answers[True] == answers[False]
    assert len(set(map(tuple, answers[True]))) == 7


def test_greedy_and_sampled_steps_of_the_same_sizes_take_turns(model, oracle, capturer, tools):
    prompt, answers = tools.prompt(9), []
    with tools.running(model, tools.options(**SAMPLED), **SIZES, per_request_processors=True) as manager:
        for do_sample in (False, True) * 2:
            request_id = manager.add_request(prompt, max_new_tokens=NUM_NEW, do_sample=do_sample, seed=3)
            answers.append(manager.get_result(request_id, timeout=tools.patience).generated_tokens)
        stats = manager.stats()
    assert answers[0] == answers[2] == oracle.greedy(prompt, NUM_NEW)
    assert answers[1] == answers[3] != answers[0]
    assert (stats.captures, stats.replays) == (2 * len(stats.buckets), stats.steps)


@pytest.mark.parametrize("max_batch_tokens", [8, 16, 64, 256])
@pytest.mark.parametrize("page_size", [16, 5])
def test_tokens_depend_on_no_budget_and_no_page_size(run, oracle, tools, max_batch_tokens, page_size):
    prompts = [tools.prompt(length) for length in (1, 5, 15, 16, 17, 32, 70)]
    sizes = {"max_batch_tokens": max_batch_tokens, "page_size": page_size, "num_blocks": 1024 // page_size}
    found = run(prompts, **sizes, kv_padding_interval_size=32, q_padding_interval_size=8)
    assert found.answers == [oracle.greedy(prompt, NUM_NEW) for prompt in prompts]
    assert found.stats.replays == found.stats.steps
    assert found.stats.captures == len(found.stats.buckets)


@pytest.mark.parametrize("cpu_offload_space", [0.0, 1e-3])
@pytest.mark.parametrize("use_async_batching", [False, True])
def test_prefix_hits_preemptions_and_forks_change_no_token(
    model, oracle, capturer, tools, use_async_batching, cpu_offload_space
):
    prefix = tools.prompt(33)
    prompts = [prefix + tools.prompt(3, seed) for seed in range(4)] + [tools.prompt(20, seed) for seed in range(4)]
    config = {**SIZES, "num_blocks": 8, "safety_margin": 0.0, "use_async_batching": use_async_batching}
    config["cpu_offload_space"] = cpu_offload_space
    # The most likely token is the only one left: the answer is known.
    options = tools.options(do_sample=True, top_k=1, num_return_sequences=2)
    with tools.running(model, options, **config) as manager:
        ids = manager.add_requests(prompts, max_new_tokens=20)
        families = [[request_id, f"{request_id}__child#0"] for request_id in ids]
        outputs = [[manager.get_result(name, timeout=tools.patience) for name in family] for family in families]
        stats = manager.stats()
    assert [[output.generated_tokens for output in family] for family in outputs] == [
        [oracle.greedy(prompt, 20)] * 2 for prompt in prompts
    ]
    assert stats.replays == stats.steps
    assert min(stats.preemptions, stats.forks, stats.prefix_cached_tokens) > 0
    assert (stats.restores > 0) == (cpu_offload_space > 0)


def test_requests_that_come_and_go_change_no_token(model, oracle, capturer, tools):
    chooser = random.Random(0)
    prompts = [tools.prompt(chooser.randint(1, 40), seed) for seed in range(24)]
    with tools.running(model, **SIZES, use_async_batching=True, max_requests_per_batch=8) as manager:
        ids, cancelled = [], []
        for number, prompt in enumerate(prompts):
            ids.append(manager.add_request(prompt, max_new_tokens=chooser.randint(1, 12)))
            steps = manager.stats().steps
            if number % 5 == 4:
                manager.cancel_request(ids[-3])
                cancelled.append(ids[-3])
            tools.wait_until(lambda steps=steps: manager.stats().steps > steps or not manager._in_flight)
        outputs = [manager.get_result(request_id, timeout=tools.patience) for request_id in ids]
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = oracle.greedy(prompt, 12)[: len(output.generated_tokens)]
        assert output.generated_tokens == expected
        assert output.finish_reason == "length" or output.request_id in cancelled


@pytest.mark.parametrize("use_async_batching", [False, True])
def test_nothing_is_read_that_the_step_did_not_write(run, oracle, tools, monkeypatch, use_async_batching):
    write = StepInputsWriter._write

    def write_over_garbage(self, *args):
        self._columns.fill_(3)
        return write(self, *args)

    monkeypatch.setattr(StepInputsWriter, "_write", write_over_garbage)
    prompts = [tools.prompt(3 + index) for index in range(11)]
    found = run(prompts, use_async_batching=use_async_batching, max_requests_per_batch=8)
    assert found.answers == [oracle.greedy(prompt, NUM_NEW) for prompt in prompts]


def test_compiled_layers_are_captured_compiled(model, run, oracle, tools):
    torch._dynamo.reset()
    how = {"backend": "aot_eager", "fullgraph": True, "dynamic": False}
    sizes = {"max_batch_tokens": 16, "max_requests_per_batch": 2}
    prompts = [tools.prompt(length) for length in (5, 9, 20)]
    found = run(prompts, None, HINTS, varlen_compile_config=how, decode_compile_config=how, **sizes)
    assert found.answers == [oracle.greedy(prompt, NUM_NEW) for prompt in prompts]
    assert found.stats.compilations == found.prepared.compilations > 0
    assert found.stats.captures == found.prepared.captures == 2 * found.stats.compilations
    assert found.stats.replays == found.stats.steps


def test_packed_layers_are_captured_packed(capturer, tools):
    """The tiny model's layers are too small to be packed; these are not."""
    model = cbtriton.enable(tools.build(tools.llama_config(hidden_size=320, intermediate_size=640)))
    prompts = [tools.prompt(length) for length in (3, 20)]
    with tools.running(model, **SIZES) as manager:
        ids = manager.add_requests(prompts, max_new_tokens=NUM_NEW)
        outputs = [manager.get_result(request_id, timeout=tools.patience) for request_id in ids]
        stats = manager.stats()
    assert [output.generated_tokens for output in outputs] == [tools.plain_greedy(model, p, NUM_NEW) for p in prompts]
    assert stats.packed_weight_bytes > 0
    assert stats.replays == stats.steps


# ------------------------------------------------------------------------------------------- what is captured, when


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_warm_up_captures_all_that_hinted_requests_need(run, tools, options):
    prompts = [tools.prompt(length) for length in (1, 33, 20, 5)]
    found = run(prompts, tools.options(**options), HINTS, num_new=8)
    padding = PaddingPolicy.of(found.config)
    listed = [bucket for path in ("varlen", "decode") for bucket in padding.buckets(path, HINTS)]
    assert found.prepared.captures == found.stats.captures == 2 * len(listed)
    assert found.prepared.replays == 0
    assert found.stats.replays == found.stats.steps
    assert found.stats.capture_time == found.prepared.capture_time > 0
    entries = found.stats.preparations
    assert Counter(entry.bucket for entry in entries) == {bucket.name: 2 for bucket in listed}
    assert {(entry.kind, entry.graphs) for entry in entries} == {("capture", 1)}
    assert sum(entry.seconds for entry in entries) == pytest.approx(found.stats.capture_time)


def test_the_largest_steps_are_captured_first(model, capturer, tools, monkeypatch):
    keys = []
    capture = GraphStore._capture
    monkeypatch.setattr(GraphStore, "_capture", lambda self, key, step: (keys.append(key), capture(self, key, step)))
    with tools.running(model, **SIZES, max_requests_per_batch=4) as manager:
        manager.stop()
        manager.warmup()
    for path in ("varlen", "decode"):
        sizes = [key.bucket.num_tokens for key in keys if key.bucket.path == path]
        assert sizes == sorted(sizes, reverse=True)
        assert len(set(sizes)) > 1
    assert len(set(keys)) == len(keys)


def test_where_a_path_has_too_many_buckets_they_are_captured_when_they_come(run, oracle, tools, monkeypatch):
    monkeypatch.setattr("cbtriton.engine.MAX_PREPARED_CAPTURES", 5)
    prompts = [tools.prompt(length) for length in (5, 9, 20)]
    found = run(prompts, None, HINTS)
    assert found.answers == [oracle.greedy(prompt, NUM_NEW) for prompt in prompts]
    # Three numbers of rows on the decode path.
    assert found.prepared.captures == 2 * 3
    assert found.stats.captures > found.prepared.captures
    assert found.stats.replays == found.stats.steps


@pytest.mark.parametrize("path", ["varlen", "decode"])
def test_only_the_path_that_was_asked_for_is_captured(run, oracle, tools, path):
    prompts = [tools.prompt(length) for length in (5, 9, 20)]
    found = run(prompts, None, HINTS, use_cuda_graph=(path == "varlen", path == "decode"))
    assert found.answers == [oracle.greedy(prompt, NUM_NEW) for prompt in prompts]
    assert found.config.captured_paths == (path,)
    assert found.stats.replays == sum(record.path == path for record in found.records) < found.stats.steps


def test_a_step_that_fails_before_it_is_captured_fails_as_it_would_have(model, capturer, tools):
    with tools.running(model, **SIZES) as manager:
        hook = model.lm_head.register_forward_pre_hook(lambda module, args: 1 / 0)
        request_id = manager.add_request(tools.prompt(5), max_new_tokens=2)
        with pytest.raises(cbtriton.manager.EngineDiedError, match="ZeroDivisionError"):
            manager.get_result(request_id, timeout=tools.patience)
        hook.remove()
    assert capturer.num_captures == 0


# ------------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("use_async_batching", [False, True])
@pytest.mark.parametrize("hints", [HINTS, None], ids=["prepared", "when it comes"])
def test_steps_that_cannot_be_captured_run_as_they_are(run, capturer, oracle, tools, caplog, hints, use_async_batching):
    capturer.refuse = lambda number: None if number % 3 else f"reason {number}"
    prompts = [tools.prompt(length) for length in (5, 9, 20, 33)]
    with caplog.at_level(logging.WARNING, "cbtriton"):
        found = run(prompts, None, hints, use_async_batching=use_async_batching)
    assert found.answers == [oracle.greedy(prompt, NUM_NEW) for prompt in prompts]
    warnings = [record.message for record in caplog.records if "captured" in record.message]
    assert len(warnings) == 1
    assert warnings[0].endswith("reason 0")
    assert found.stats.capture_failures > 1
    # None is tried again.
    num_tried = len(found.stats.buckets) if hints is None else found.prepared.captures + found.prepared.capture_failures
    assert found.stats.captures + found.stats.capture_failures == capturer.num_captures == num_tried
    assert 0 < found.stats.replays < found.stats.steps


def test_a_model_that_waits_for_the_device_runs_without_graphs(model, run, oracle, tools, caplog):
    hook = model.model.layers[0].register_forward_pre_hook(lambda module, args: (args[0].sum().item(), None)[1])
    prompts = [tools.prompt(length) for length in (5, 9)]
    found = run(prompts)
    hook.remove()
    assert found.answers == [oracle.greedy(prompt, NUM_NEW) for prompt in prompts]
    assert found.stats.captures == found.stats.replays == 0
    assert found.stats.capture_failures == len(found.stats.buckets)
    assert {entry.graphs for entry in found.stats.preparations} == {0}
    assert "operation not permitted" in caplog.text


# ------------------------------------------------------------------------------------------------------- life cycle


def answer(manager, tools, prompt: list[int]) -> list[int]:
    return manager.get_result(
        manager.add_request(prompt, max_new_tokens=NUM_NEW), timeout=tools.patience
    ).generated_tokens


def test_a_pause_keeps_graphs_and_new_values_in_old_places_reach_them(model, oracle, capturer, tools):
    other, prompt = tools.build(tools.llama_config(), seed=1), tools.prompt(20)
    with tools.running(model, **SIZES) as manager:
        assert answer(manager, tools, prompt) == oracle.greedy(prompt, NUM_NEW)
        captures = manager.stats().captures
        with manager.pause():
            tools.plain_greedy(model, prompt, 2)
        with manager.pause():
            model.load_state_dict(other.state_dict())
        assert answer(manager, tools, prompt) == tools.plain_greedy(other, prompt, NUM_NEW)
        assert manager.stats().captures == captures
        assert manager.stats().replays == manager.stats().steps
    assert capturer.num_released == 1


def replace_weights(model, other):
    for module, wanted in zip(model.modules(), other.modules(), strict=True):
        for name, parameter in wanted.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(parameter.detach().clone()))


def replace_storages(model, other):
    for parameter, wanted in zip(model.parameters(), other.parameters(), strict=True):
        parameter.data = wanted.detach().clone()


def replace_module(model, other):
    model.lm_head = other.lm_head


def add_hook(model, other):
    for each in (model, other):
        each.model.layers[0].mlp.register_forward_hook(lambda module, args, output: 3 * output)


def replace_forward(model, other):
    for each in (model, other):
        mlp = each.model.layers[0].mlp
        mlp.forward = lambda x, mlp=mlp: 3 * type(mlp).forward(mlp, x)


@pytest.mark.parametrize("change", [replace_weights, replace_storages, replace_module, add_hook, replace_forward])
def test_what_was_replaced_in_a_pause_is_captured_anew(model, oracle, capturer, tools, change):
    is_other = change in (replace_weights, replace_storages, replace_module)
    other, prompt = tools.build(tools.llama_config(), seed=int(is_other)), tools.prompt(20)
    with tools.running(model, **SIZES) as manager:
        before = answer(manager, tools, prompt)
        captures = manager.stats().captures
        with manager.pause():
            change(model, other)
        gc.collect()
        after = answer(manager, tools, prompt)
        assert manager.stats().captures == 2 * captures
    wanted = model if change is replace_module else other
    assert before == oracle.greedy(prompt, NUM_NEW) != after == tools.plain_greedy(wanted, prompt, NUM_NEW)


def test_packed_layers_that_were_packed_again_are_captured_anew(capturer, tools):
    config = tools.llama_config(hidden_size=320, intermediate_size=640)
    model, other, prompt = cbtriton.enable(tools.build(config)), tools.build(config, seed=1), tools.prompt(20)
    with tools.running(model, **SIZES) as manager:
        before = answer(manager, tools, prompt)
        with manager.pause():
            model.load_state_dict(other.state_dict())
        after = answer(manager, tools, prompt)
    assert before != after == tools.plain_greedy(other, prompt, NUM_NEW)


def test_graphs_end_with_their_engine_and_a_session_that_is_kept_keeps_them(model, oracle, capturer, tools):
    prompt = tools.prompt(20)
    with tools.running(model, **SIZES) as manager:
        assert answer(manager, tools, prompt) == oracle.greedy(prompt, NUM_NEW)
        captures = manager.stats().captures
        assert manager.stats().graph_bytes == capturer.num_bytes > 0
        manager.stop(keep_for_next_session=True)
        manager.start()
        assert answer(manager, tools, prompt) == oracle.greedy(prompt, NUM_NEW)
        assert capturer.num_released == 0
        # The second time most of the prompt is cached: one more bucket at most.
        assert manager.stats().captures <= captures + 1
        manager.stop()
        assert (capturer.num_released, capturer.num_bytes) == (1, 0)
        manager.start()
        assert answer(manager, tools, prompt) == oracle.greedy(prompt, NUM_NEW)
        assert manager.stats().captures == captures
    assert (capturer.num_released, capturer.num_bytes) == (2, 0)


def test_a_warm_up_after_something_was_replaced_captures_again(model, capturer, tools):
    with tools.running(model, **SIZES, max_requests_per_batch=2) as manager:
        manager.stop(keep_for_next_session=True)
        manager.warmup()
        captures = manager.stats().captures
        manager.start()
        manager.stop(keep_for_next_session=True)
        assert manager.warmed_up
        replace_weights(model, tools.build(tools.llama_config(), seed=1))
        manager.warmup()
        assert manager.stats().captures == 2 * captures > 0


# --------------------------------------------------------------------------------------------------------- keys


GREEDY = SampleFeatures(all_greedy=True, use_top_k=False, use_top_p=False, use_min_p=False, use_min_length=True)
KEY = GraphKey(Bucket("decode", 4, 4, 4, 64), GREEDY)


class NamedCapturer:
    """Its graphs give what the step gave that was captured."""

    num_bytes = 0

    def capture(self, step):
        return CapturedStep(lambda: None, step())

    def release(self):
        pass


@pytest.mark.parametrize(
    "other",
    [
        GraphKey(KEY.bucket, replace(GREEDY, all_greedy=False)),
        GraphKey(KEY.bucket, replace(GREEDY, use_top_k=True)),
        *(
            GraphKey(replace(KEY.bucket, **{name: 8}), GREEDY)
            for name in ("num_tokens", "num_requests", "num_samples", "max_kv")
        ),
        GraphKey(replace(KEY.bucket, path="varlen"), GREEDY),
    ],
)
def test_steps_that_differ_in_anything_share_no_graph(other):
    store = GraphStore(NamedCapturer(), ("varlen", "decode"))
    assert store.run(KEY, lambda: "first") == "first"
    assert store.run(other, lambda: "second") == "second"
    assert store.run(KEY, lambda: "third") == "first"
    assert (store.captures, store.replays) == (2, 3)


def test_paths_cannot_be_captured_where_nothing_captures():
    with pytest.raises(ValueError, match="paths must be empty where nothing captures, got"):
        GraphStore(None, ("decode",))


# ------------------------------------------------------------------------------------------------------ simulator


@pytest.mark.parametrize("use_async_batching", [False, True])
def test_the_simulator_counts_the_graphs_of_greedy_steps(run, tools, use_async_batching):
    prompts = [tools.prompt(length) for length in (5, 9, 20, 33, 2, 17)]
    found = run(prompts, use_async_batching=use_async_batching, max_requests_per_batch=4)
    result = simulate(found.config, trace_of(prompts, [NUM_NEW] * len(prompts)))
    assert {bucket.name: count for bucket, count in result.buckets.items()} == found.stats.buckets
    assert sum(result.num_variants(path) for path in ("varlen", "decode")) == found.stats.captures


@pytest.mark.parametrize("has_processors", [False, True])
def test_the_simulator_knows_the_results_that_prepared_graphs_keep(run, tools, has_processors):
    found = run([tools.prompt(5)], None, HINTS, per_request_processors=has_processors)
    padding = PaddingPolicy.of(found.config)
    listed = [bucket for path in ("varlen", "decode") for bucket in padding.buckets(path, HINTS)]
    only_results = ModelFacts(0, 0, None, 0, 0, 0, 0, "cuda", 0)
    shared = 24 * max(bucket.num_tokens for bucket in listed)
    assert found.prepared.graph_bytes == graph_bytes(listed, only_results, has_processors) - shared
