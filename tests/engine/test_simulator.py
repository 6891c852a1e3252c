"""The simulator foresees what an engine with a model does: the same steps in the same buckets."""

from __future__ import annotations

import json

import pytest

from cbtriton.config import WorkloadHints
from cbtriton.manager import ContinuousBatchingManager
from cbtriton.resolve import resolve
from cbtriton.scheduler import SCHEDULERS
from cbtriton.simulator import TraceRequest, simulate, trace_of
from cbtriton.workloads import Lengths, Synthetic

PADDED = {"q_padding_interval_size": 16, "kv_padding_interval_size": 32}
WORKLOADS = {
    "mixed lengths in chunks": (
        Synthetic("mixed", 12, Lengths(3, 90, "loguniform"), Lengths(2, 24)),
        {"max_batch_tokens": 40},
    ),
    "shared prefix": (
        Synthetic("shared", 10, Lengths(4, 30), Lengths(4, 12), shared_prefix=48),
        {"max_requests_per_batch": 4},
    ),
    "small cache": (
        Synthetic("preempted", 8, Lengths(20, 40), Lengths(30, 60)),
        {"num_blocks": 14, "safety_margin": 0.0},
    ),
    "small cache and host memory": (
        Synthetic("preempted", 8, Lengths(20, 40), Lengths(30, 60)),
        {"num_blocks": 14, "safety_margin": 0.0, "cpu_offload_space": 1e-4},
    ),
}


def run(tools, model, requests, settings):
    """The manager after it has answered all requests, which were there before its first step, and its outputs."""
    manager = ContinuousBatchingManager(model, tools.options(), tools.small(**settings))
    manager.warmup()
    ids = [manager.add_request(list(prompt), max_new_tokens=number) for prompt, number in requests]
    manager.start()
    manager.stop()
    outputs = [manager.get_result(request_id) for request_id in ids]
    return manager, outputs


def seen(steps) -> list[tuple[int, ...]]:
    """What records of an engine and steps of a simulation have in common, beside the bucket."""
    fields = ("num_rows", "padding_tokens", "kv_tokens", "padding_kv_tokens", "num_preempted", "blocks_in_use")
    return [tuple(getattr(step, name) for name in (*fields, "num_waiting")) for step in steps]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_buckets_waste_and_preemptions_are_the_engines(tools, model, oracle, name, is_async):
    source, settings = WORKLOADS[name]
    workload = source.build(None, vocab_size=128)
    requests = list(zip(workload.prompts, workload.max_new_tokens, strict=True))
    manager, outputs = run(tools, model, requests, {**PADDED, **settings, "use_async_batching": is_async})
    records, stats = manager.step_records(), manager.stats()
    result = simulate(manager.engine_config, trace_of(workload.prompts, workload.max_new_tokens))
    assert [step.bucket.name for step in result.steps] == [record.bucket for record in records]
    assert seen(result.steps) == seen(records)
    assert {bucket.name: count for bucket, count in result.buckets.items()} == stats.buckets
    assert (result.padding_waste, result.kv_padding_waste) == (stats.padding_waste, stats.kv_padding_waste)
    assert (result.preemptions, result.prefix_cached_tokens) == (stats.preemptions, stats.prefix_cached_tokens)
    assert (result.offloads, result.restored_tokens) == (stats.offloads, stats.restored_tokens)
    assert sum(result.buckets.values()) == stats.steps == len(records)
    # Each workload does what it is there for, and padding changes no token.
    assert stats.padding_waste > 0
    assert (stats.preemptions > 0) == name.startswith("small cache")
    assert (stats.offloads > 0, stats.restored_tokens > 0) == (("host memory" in name),) * 2
    assert (stats.prefix_cached_tokens > 0) == (name != "mixed lengths in chunks")
    assert [output.generated_tokens for output in outputs] == [oracle.greedy(list(p), n) for p, n in requests]


def test_equal_prompts_need_the_answers_tokens(tools, model):
    """Two requests that answer the same share blocks of the answer, which only the tokens tell."""
    # Waits until the first has ended, and then goes on from its answer.
    prompt = tools.prompt(40)
    [answer] = [output.generated_tokens for output in run(tools, model, [(prompt, 30)], PADDED)[1]]
    requests = [(prompt, 30), (prompt + answer, 4)]
    settings = {**PADDED, "max_requests_per_batch": 1}
    manager, outputs = run(tools, model, requests, settings)
    trace = [TraceRequest(tuple(o.prompt_ids), len(o.generated_tokens), tuple(o.generated_tokens)) for o in outputs]
    known = simulate(manager.engine_config, trace)
    unknown = simulate(manager.engine_config, trace_of(*zip(*requests, strict=True)))
    assert seen(known.steps) == seen(manager.step_records())
    assert known.prefix_cached_tokens == manager.stats().prefix_cached_tokens == 64
    assert unknown.prefix_cached_tokens == 32


def test_steps_at_exact_sizes_are_foreseen_too(tools, model, prompts):
    requests = [(prompt, 5) for prompt in prompts]
    manager, _ = run(tools, model, requests, {})
    result = simulate(manager.engine_config, trace_of(prompts, [5] * len(prompts)))
    assert seen(result.steps) == seen(manager.step_records())
    assert json.loads(json.dumps(result.to_dict()))["buckets"] == manager.stats().buckets == {}


def test_a_managers_facts_resolve_to_its_configuration(tools, model):
    """So other settings can be resolved and simulated for the same model without an engine."""
    hints = WorkloadHints(40, 8, 3)
    manager = ContinuousBatchingManager(model, tools.options(), {**PADDED, "page_size": 16, "seed": 0}, hints)
    facts, margins = manager.model_facts, SCHEDULERS.default_margins()
    again = resolve(manager.config, hints, facts, has_logits_processing=False, scheduler_types=margins)
    assert again == manager.engine_config
    assert (facts.vocab_size, len(facts.cached_layers)) == (model.config.vocab_size, model.config.num_hidden_layers)
