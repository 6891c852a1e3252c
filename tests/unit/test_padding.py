"""Buckets: each step falls into an enumerated one, the smallest that holds it, and padded sizes stay as they are."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbtriton.config import WorkloadHints
from cbtriton.padding import Bucket, PaddingPolicy
from cbtriton.plan import BatchPlan, ScheduledRow

PATHS = ("varlen", "decode")
POLICY = PaddingPolicy(
    q_interval=64,
    kv_interval=1024,
    max_batch_tokens=200,
    max_requests=12,
    max_kv=2500,
    max_decode_kv=2048,
    padded_paths=PATHS,
)


def plan(path: str, num_tokens: int, num_rows: int, longest: int, num_samples: int | None = None) -> BatchPlan:
    """A plan of these sizes, as far as padding looks at it."""
    num_samples = num_rows if num_samples is None else num_samples
    rows = tuple(ScheduledRow(f"r{i}", 1, i, 0, 1, samples=i < num_samples) for i in range(num_rows))
    return BatchPlan(path, rows, (), (), (), num_tokens, longest)


def sizes(bucket: Bucket) -> tuple[int, int, int]:
    return bucket.num_tokens, bucket.num_requests, bucket.max_kv


def holds(bucket: Bucket, step: BatchPlan) -> bool:
    real = (step.num_tokens, len(step.rows), step.max_seq_len)
    return bucket.path == step.path and all(a >= b for a, b in zip(sizes(bucket), real, strict=True))


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (plan("varlen", 1, 1, 1), (64, 1, 1024)),
        (plan("varlen", 64, 3, 1024), (64, 4, 1024)),
        (plan("varlen", 65, 5, 1025), (128, 8, 2048)),
        (plan("varlen", 193, 9, 2049), (200, 12, 2500)),
        (plan("decode", 1, 1, 1), (1, 1, 1024)),
        (plan("decode", 3, 3, 1025), (4, 4, 2048)),
        (plan("decode", 9, 9, 2048), (12, 12, 2048)),
        # Larger than any step: the engine's check of the model.
        (plan("varlen", 201, 13, 2501), (201, 13, 2501)),
    ],
)
def test_sizes_go_up_to_the_next_step_of_their_grid_and_stop_at_the_largest(step, expected):
    bucket = POLICY.bucket(step)
    assert sizes(bucket) == expected
    assert bucket.num_samples == bucket.num_requests
    assert bucket.name == "{}:{}x{}x{}".format(step.path, *expected)


def test_a_path_that_is_not_padded_runs_at_exact_sizes_and_has_no_buckets():
    policy = replace(POLICY, padded_paths=("decode",))
    step = plan("varlen", 65, 5, 1025, num_samples=2)
    assert policy.bucket(step) == Bucket("varlen", 65, 5, 2, 1025)
    assert policy.buckets("varlen") == ()
    assert policy.bucket(plan("decode", 5, 5, 1025)).num_requests == 8
    assert policy.buckets("decode") == POLICY.buckets("decode")


def test_decode_buckets_are_the_powers_of_two_and_the_most_rows_largest_first():
    assert [sizes(bucket) for bucket in POLICY.buckets("decode")] == [
        (rows, rows, kv) for rows in (12, 8, 4, 2, 1) for kv in (2048, 1024)
    ]
    assert replace(POLICY, max_decode_kv=0).buckets("decode") == ()


def test_hints_bound_the_buckets():
    hints = WorkloadHints(max_prompt_length=1000, max_generated_length=25, num_requests=3)
    assert [sizes(bucket) for bucket in POLICY.buckets("decode", hints)] == [(4, 4, 1024), (2, 2, 1024), (1, 1, 1024)]
    assert {bucket.max_kv for bucket in POLICY.buckets("varlen", hints)} == {1024}
    longer = replace(hints, max_generated_length=26)
    assert {bucket.max_kv for bucket in POLICY.buckets("varlen", longer)} == {1024, 2048}
    few_tokens = WorkloadHints(max_prompt_length=30, max_generated_length=3, num_requests=3)
    assert {bucket.num_tokens for bucket in POLICY.buckets("varlen", few_tokens)} == {64, 128}


POLICIES = st.builds(
    PaddingPolicy,
    q_interval=st.integers(1, 9),
    kv_interval=st.integers(1, 12),
    max_batch_tokens=st.integers(1, 20),
    max_requests=st.integers(1, 9),
    max_kv=st.integers(1, 24),
    max_decode_kv=st.sampled_from([0, 3, 8, 24]),
    padded_paths=st.just(PATHS),
).map(lambda policy: replace(policy, max_requests=min(policy.max_requests, policy.max_batch_tokens)))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(policy=POLICIES, path=st.sampled_from(PATHS), data=st.data())
def test_buckets_are_the_smallest_that_hold_a_step_and_padding_again_changes_nothing(policy, path, data):
    num_rows = data.draw(st.integers(1, policy.max_requests))
    num_tokens = num_rows if path == "decode" else data.draw(st.integers(num_rows, policy.max_batch_tokens))
    longest_possible = min(policy.max_kv, policy.max_decode_kv or 1) if path == "decode" else policy.max_kv
    longest = data.draw(st.integers(1, longest_possible))
    step = plan(path, num_tokens, num_rows, longest)
    bucket = policy.bucket(step)
    assert holds(bucket, step)
    for other in policy.buckets(path):
        if holds(other, step):
            assert all(a <= b for a, b in zip(sizes(bucket), sizes(other), strict=True))
    padded = plan(path, bucket.num_tokens, bucket.num_requests, bucket.max_kv)
    assert policy.bucket(padded) == bucket


@settings(max_examples=150, deadline=None, derandomize=True)
@given(policy=POLICIES, path=st.sampled_from(PATHS))
def test_buckets_are_listed_once_largest_first(policy, path):
    found = [sizes(bucket) for bucket in policy.buckets(path)]
    assert found == sorted(set(found), reverse=True)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(policy=POLICIES)
def test_every_listed_bucket_is_one_that_some_step_reaches(policy):
    def reached(path: str) -> set[Bucket]:
        return {
            policy.bucket(plan(path, tokens, rows, longest))
            for rows in range(1, policy.max_requests + 1)
            for longest in range(1, policy.max_kv + 1)
            for tokens in range(rows, min(policy.max_batch_tokens, rows * longest) + 1)
            if (path == "decode") == (tokens == rows and longest <= policy.max_decode_kv)
        }

    for path in PATHS:
        assert set(policy.buckets(path)) == reached(path)


SIZES = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(2, 20),
        "page_size": st.integers(1, 5),
        "max_batch_tokens": st.integers(1, 24),
        "max_requests": st.integers(1, 9),
        "max_decode_blocks": st.sampled_from([0, 2, 100]),
        "share_blocks": st.booleans(),
        "depth": st.integers(0, 1),
    }
)


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(sizes=SIZES, q_interval=st.integers(1, 9), kv_interval=st.integers(1, 30), seed=st.integers(0, 1000))
def test_every_plan_of_a_scheduler_falls_into_a_listed_bucket(simulation, sizes, q_interval, kv_interval, seed):
    engine = simulation.SimulatedEngine(**sizes)
    rng = random.Random(seed)
    lengths = []
    for index in range(rng.randint(1, 10)):
        prompt_length = rng.randint(1, engine.capacity)
        new_tokens = rng.randint(1, min(6, engine.capacity - prompt_length + 1))
        lengths.append((prompt_length, new_tokens))
        engine.add(f"r{index}", [rng.randint(1, 3) for _ in range(prompt_length)], new_tokens)
    engine.run()
    longest_prompt, longest_answer = (max(column) for column in zip(*lengths, strict=True))
    policy = PaddingPolicy(
        q_interval,
        kv_interval,
        sizes["max_batch_tokens"],
        min(sizes["max_requests"], sizes["max_batch_tokens"]),
        max_kv=engine.capacity,
        max_decode_kv=min(sizes["max_decode_blocks"] * sizes["page_size"], engine.capacity),
        padded_paths=PATHS,
    )
    hints = WorkloadHints(longest_prompt, longest_answer, len(lengths))
    for given_hints in (WorkloadHints(), hints):
        listed = {path: policy.buckets(path, given_hints) for path in PATHS}
        for step in engine.plans:
            bucket = policy.bucket(step)
            assert bucket in listed[step.path]
            assert holds(bucket, step)


FLEXIBLE = replace(POLICY, padded_paths=(), flexible_paths=PATHS)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        # A size of 1 would be a constant of the graph, so everything has at least 2.
        (plan("decode", 1, 1, 5), Bucket("decode", 2, 2, 2, 1024)),
        (plan("varlen", 1, 1, 1025, num_samples=0), Bucket("varlen", 2, 2, 2, 2048)),
        (plan("varlen", 65, 5, 1025, num_samples=3), Bucket("varlen", 65, 5, 3, 2048)),
        (plan("decode", 9, 9, 2048), Bucket("decode", 9, 9, 9, 2048)),
    ],
)
def test_a_flexible_path_keeps_sizes_but_those_that_graphs_make_constants_of(step, expected):
    assert FLEXIBLE.bucket(step) == expected


def test_a_flexible_path_prepares_one_bucket_for_each_longest_context():
    decode, varlen = FLEXIBLE.prepared_buckets("decode"), FLEXIBLE.prepared_buckets("varlen")
    assert decode == (Bucket("decode", 12, 12, 12, 2048), Bucket("decode", 12, 12, 12, 1024))
    assert [bucket.max_kv for bucket in varlen] == [2500, 2048, 1024]
    assert {(bucket.num_tokens, bucket.num_requests) for bucket in varlen} == {(200, 12)}
    assert [b.max_kv for b in FLEXIBLE.prepared_buckets("varlen", WorkloadHints(1000, 100, 3))] == [2048, 1024]


def test_a_padded_path_prepares_all_its_buckets_and_others_none():
    assert POLICY.prepared_buckets("decode") == POLICY.buckets("decode")
    assert replace(POLICY, padded_paths=()).prepared_buckets("decode") == ()
