"""Replays without a model: the steps of a checked engine, step for step, and the figures made of them."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbtriton.cache_layout import CachedLayer, GroupKind
from cbtriton.config import ContinuousBatchingConfig, EngineConfig, ModelFacts, WorkloadHints
from cbtriton.padding import Bucket, PaddingPolicy
from cbtriton.resolve import resolve
from cbtriton.scheduler import SCHEDULERS
from cbtriton.simulator import TraceRequest, graph_bytes, invented_prompts, simulate, trace_of

FACTS = ModelFacts(
    vocab_size=1000,
    num_embeddings=1000,
    max_position_embeddings=None,
    cached_layers=(CachedLayer(window=0, key_bytes=32, value_bytes=32),),
    activation_bytes_per_token=1024,
    device_type="cuda",
    available_memory_bytes=2**30,
)


def configuration(**changes) -> EngineConfig:
    """A padded engine with a cache of 64 tokens; a change is of a field of `EngineConfig`."""
    asked = ContinuousBatchingConfig(
        page_size=4,
        num_blocks=16,
        max_batch_tokens=32,
        max_requests_per_batch=8,
        safety_margin=0.0,
        q_padding_interval_size=8,
        kv_padding_interval_size=16,
        seed=0,
    )
    config = resolve(
        asked, WorkloadHints(), FACTS, has_logits_processing=False, scheduler_types=SCHEDULERS.default_margins()
    )
    return replace(config, **changes)


def bucket_names(result) -> list[str]:
    return [step.bucket.name for step in result.steps]


def test_one_request_by_hand():
    result = simulate(configuration(), trace_of([[5] * 40], [3]))
    assert bucket_names(result) == ["varlen:32x1x32", "varlen:8x1x48", "decode:1x1x48", "decode:1x1x48"]
    assert [step.num_tokens for step in result.steps] == [32, 8, 1, 1]
    assert [step.kv_tokens for step in result.steps] == [32, 40, 41, 42]
    assert (result.preemptions, result.peak_blocks, result.prefix_cached_tokens) == (0, 11, 0)
    assert result.padding_waste == 0.0
    assert result.kv_padding_waste == pytest.approx(1 - (32 + 40 + 41 + 42) / (32 + 3 * 48))
    assert (result.num_variants("varlen"), result.num_variants("decode")) == (2, 1)


SIZES = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(2, 14),
        "page_size": st.integers(1, 5),
        "max_batch_tokens": st.integers(1, 24),
        "max_requests": st.integers(1, 6),
        "max_decode_blocks": st.sampled_from([0, 2, 100]),
        "safety_margin": st.sampled_from([0.0, 0.15]),
        "share_blocks": st.booleans(),
        "num_host_blocks": st.sampled_from([0, 3, 20]),
    }
)


# One kind of layers with the page size of above; windows only; and two kinds with different pages.
KINDS = st.sampled_from([(), (GroupKind(3, 2, 2),), (GroupKind(5, 2, 2), GroupKind(0, 4, 1))])


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(sizes=SIZES, kinds=KINDS, depth=st.integers(0, 1), seed=st.integers(0, 10_000))
def test_the_steps_are_those_of_an_engine_that_generates_the_same_tokens(simulation, sizes, kinds, depth, seed):
    """Prompts of few different tokens: beginnings are shared, and answers of one request go on in others' prompts."""
    sizes = {**sizes, "num_blocks": sizes["num_blocks"] * max(1, sum(kind.num_groups for kind in kinds))}
    engine = simulation.SimulatedEngine(**sizes, kinds=kinds, depth=depth)
    config = configuration(
        **sizes,
        cache_layout=engine.layout,
        async_depth=depth,
        max_model_len=engine.capacity,
        max_blocks_per_request=sizes["num_blocks"],
    )
    rng = random.Random(seed)
    trace = []
    for index in range(rng.randint(1, 8)):
        length = rng.randint(1, engine.capacity)
        number = rng.randint(1, min(8, engine.capacity - length + 1))
        request = engine.add(f"r{index}", [rng.choice([1, 1, 1, 2]) for _ in range(length)], number)
        trace.append(TraceRequest(tuple(request.prompt_ids), number, tuple(simulation.answer(request))))
    engine.run()
    result = simulate(config, trace)
    padding = PaddingPolicy.of(config)
    assert [step.bucket for step in result.steps] == [padding.bucket(plan) for plan in engine.plans]
    assert [step.num_tokens for step in result.steps] == [plan.num_tokens for plan in engine.plans]
    assert [step.kv_tokens for step in result.steps] == [plan.max_seq_len for plan in engine.plans]
    counters = engine.scheduler.counters
    assert result.preemptions == counters.preemptions
    assert result.prefix_cached_tokens == counters.prefix_cached_tokens
    assert (result.offloads, result.restored_tokens) == (counters.offloads, counters.restored_tokens)


def test_unknown_answers_match_nobody_and_known_ones_are_found_again():
    first = TraceRequest((7,) * 8, 9)
    follow_up = TraceRequest((7,) * 8 + (9,) * 8 + (5,), 1, arrival=20)
    unknown = simulate(configuration(), [first, follow_up])
    known = simulate(configuration(), [replace(first, generated_ids=(9,) * 9), follow_up])
    assert unknown.prefix_cached_tokens == 8
    assert known.prefix_cached_tokens == 16


def test_an_unknown_answer_is_found_again_after_a_preemption_by_its_own_request_only():
    config = configuration(num_blocks=8, max_model_len=32, max_blocks_per_request=8)
    trace = trace_of([[1] * 8, [1] * 8], [20, 16])

    def with_answers(first: int, second: int):
        return [replace(trace[0], generated_ids=(first,) * 20), replace(trace[1], generated_ids=(second,) * 16)]

    result = simulate(config, trace)
    assert result.preemptions > 0
    assert result.prefix_cached_tokens > 8
    assert result == simulate(config, with_answers(3, 4))
    assert result != simulate(config, with_answers(3, 3))


def test_requests_arrive_before_their_step_and_at_once_where_nothing_else_is_left():
    trace = trace_of([[1], [2], [3], [4]], [3, 2, 2, 1], arrivals=[0, 2, 50, 51])
    result = simulate(configuration(), trace)
    assert [step.num_rows for step in result.steps] == [1, 1, 2, 1, 1, 2]


def test_invented_prompts_share_a_beginning_and_nothing_else():
    assert invented_prompts([3, 4, 2, 1], shared_prefix=2) == ((0, 1, -1), (0, 1, -2, -2), (0, 1), (0,))
    shared = simulate(configuration(), trace_of(invented_prompts([9, 9, 9], shared_prefix=8), [1, 1, 1]))
    apart = simulate(configuration(), trace_of(invented_prompts([9, 9, 9]), [1, 1, 1]))
    assert (shared.prefix_cached_tokens, apart.prefix_cached_tokens) == (16, 0)


def test_a_path_that_is_not_padded_has_no_buckets_and_no_waste():
    trace = trace_of([[1] * 5, [2] * 6], [4, 4])
    exact = simulate(configuration(padded_paths=()), trace)
    assert (exact.buckets, exact.padding_waste, exact.kv_padding_waste) == ({}, 0.0, 0.0)
    decode_only = simulate(configuration(padded_paths=("decode",)), trace)
    assert {bucket.path for bucket in decode_only.buckets} == {"decode"}
    assert "varlen: exact" in decode_only.table()


def test_the_table_has_a_line_for_each_bucket_and_the_dictionary_is_json():
    result = simulate(configuration(), trace_of([[1] * 5, [2] * 6, [3] * 2], [4, 4, 9]))
    lines = result.table().splitlines()
    assert lines[0].split() == ["bucket", "steps", "tokens", "waste", "kv", "waste"]
    assert [line.split()[:3] for line in lines[1:]] == [
        ["decode:1x1x16", "5", "5"],
        ["decode:4x4x16", "3", "9"],
        ["varlen:16x4x16", "1", "13"],
        ["all", "9", "27"],
    ]
    assert lines[2].split()[3] == "25.0%"
    loaded = json.loads(json.dumps(result.to_dict()))
    assert loaded["buckets"] == {"varlen:16x4x16": 1, "decode:4x4x16": 3, "decode:1x1x16": 5}
    assert loaded["variants"] == {"varlen": 1, "decode": 2}
    assert loaded["padding_waste"] == pytest.approx(6 / 33)


def test_graphs_keep_their_results_and_share_the_memory_of_logits_and_activations():
    small, large = Bucket("decode", 2, 2, 2, 16), Bucket("varlen", 300, 100, 100, 16)
    # Ids, log-probabilities and outcomes, of a greedy graph and of the other one.
    results = {small: 2 * (512 + 512 + 512), large: 2 * (1024 + 512 + 512)}
    only_results = replace(FACTS, vocab_size=0, activation_bytes_per_token=0)
    assert {bucket: graph_bytes([bucket], only_results) for bucket in results} == {
        bucket: size + 24 * bucket.num_tokens for bucket, size in results.items()
    }
    shared = 100 * 1000 * 4 + 300 * (24 + 1024)
    assert graph_bytes([small, large], FACTS) == sum(results.values()) + shared
    # A third graph of each, and float32 scores with a word of their history.
    assert graph_bytes([small, large], FACTS, has_processors=True) == sum(results.values()) * 3 // 2 + shared + 800_000
    assert graph_bytes([], FACTS) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TraceRequest((), 1), "at least one token"),
        (lambda: TraceRequest((1,), 0), "num_generated must be at least 1, got 0"),
        (lambda: TraceRequest((1,), 2, (5,)), "num_generated=2 tokens, got 1"),
        (lambda: TraceRequest((1,), 1, arrival=-1), "arrival must be at least 0, got -1"),
        (lambda: trace_of([[1], [2]], [1]), "got 1 and 2 for 2 prompts"),
        (lambda: trace_of([[1], [2]], [1, 1], [0]), "got 2 and 1 for 2 prompts"),
        (lambda: simulate(configuration(), trace_of([[1], [1] * 60], [1, 6])), "request 1 .* needs 65 .*=64"),
    ],
)
def test_a_wrong_trace_is_refused_with_the_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()
