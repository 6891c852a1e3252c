"""Who runs when, who gives way, and what becomes of the results.

Every test runs in a simulated engine, which compares each step's cache reads and each request's tokens with what the
request gets alone (see `simulated_engine.py`); the assertions here are about the rest.
"""

from __future__ import annotations

import random

import pytest

from cbtriton import block_manager
from cbtriton.plan import Idle, SampledToken, StepResult
from cbtriton.request import RequestStatus
from cbtriton.scheduler import FIFO, PREFILL_FIRST, PolicyRegistry, SchedulingPolicy, _Draft, _Share

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def prompt(length: int, kind: int = 1) -> list[int]:
    """A prompt that shares no block with those of another kind."""
    generator = random.Random(kind)
    return [generator.randrange(1, 1000) for _ in range(length)]


def counts(plan) -> dict[str, int]:
    """Tokens of each request in a step."""
    return {row.request_id: row.count for row in plan.rows}


def step_until(engine, condition):
    """Steps until the condition holds, at most 100 times; returns the last step's plan."""
    for _ in range(100):
        plan = engine.step()
        if condition():
            return plan
    pytest.fail("it never came to that")


def preempts(engine):
    """The condition that a request lost its blocks."""
    return lambda: engine.scheduler.counters.preemptions > 0


# ------------------------------------------------------------------------------------- budgets and order


@pytest.mark.parametrize("max_batch_tokens", [1, 7, 8, 64])
def test_prompts_longer_than_a_step_are_split_and_change_nothing(simulation, max_batch_tokens):
    engine = simulation.SimulatedEngine(num_blocks=70, page_size=16, max_batch_tokens=max_batch_tokens)
    for length in (1, 2, 6, 7, 8, 13, 14, 40, 100):
        engine.add(f"r{length}", prompt(length, kind=length))
    engine.run()
    assert max(plan.num_tokens for plan in engine.plans) <= max_batch_tokens


def test_only_the_last_chunk_of_a_prompt_samples(simulation):
    engine = simulation.SimulatedEngine(max_batch_tokens=8)
    engine.add("a", prompt(20), max_new_tokens=1)
    engine.run()
    assert [(row.start, row.count, row.samples) for plan in engine.plans for row in plan.rows] == [
        (0, 8, False),
        (8, 8, False),
        (16, 4, True),
    ]


def test_a_request_is_admitted_into_whatever_budget_a_last_chunk_leaves(simulation):
    engine = simulation.SimulatedEngine(max_batch_tokens=8)
    engine.add("long", prompt(17))
    engine.add("short", prompt(3, kind=2))
    assert [counts(engine.step()) for _ in range(3)] == [{"long": 8}, {"long": 8}, {"long": 1, "short": 3}]
    engine.run()


def test_fifo_runs_decodes_then_started_prompts_then_new_ones(simulation):
    engine = simulation.SimulatedEngine(num_blocks=32, max_batch_tokens=8)
    engine.add("decoding", prompt(3), max_new_tokens=9)
    engine.step()
    engine.add("started", prompt(12, kind=2))
    engine.step()
    engine.add("new", prompt(5, kind=3))
    assert list(counts(engine.step()).items()) == [("decoding", 1), ("started", 5), ("new", 2)]
    engine.run()


def test_prefill_first_runs_started_prompts_before_decodes(simulation):
    engine = simulation.SimulatedEngine(num_blocks=32, max_batch_tokens=8, policy=PREFILL_FIRST)
    engine.add("decoding", prompt(3), max_new_tokens=9)
    engine.step()
    engine.add("started", prompt(22, kind=2))
    assert counts(engine.step()) == {"decoding": 1, "started": 7}
    assert counts(engine.step()) == {"started": 8}
    assert list(counts(engine.step()).items()) == [("started", 7), ("decoding", 1)]
    engine.run()


@pytest.mark.parametrize("policy", [FIFO, PREFILL_FIRST], ids=lambda policy: policy.name)
def test_waiting_requests_start_in_the_order_in_which_they_came(simulation, policy):
    engine = simulation.SimulatedEngine(max_requests=2, max_batch_tokens=5, policy=policy)
    for index in range(6):
        engine.add(f"r{index}", prompt(4, kind=index), max_new_tokens=2)
    engine.run()
    started = [row.request_id for plan in engine.plans for row in plan.rows if row.start == 0]
    assert started == [f"r{index}" for index in range(6)]


def test_no_more_requests_run_than_there_are_rows(simulation):
    engine = simulation.SimulatedEngine(max_requests=3)
    for index in range(7):
        engine.add(f"r{index}", prompt(2, kind=index))
    engine.run()
    assert max(len(plan.rows) for plan in engine.plans) == 3
    assert {row.row for plan in engine.plans for row in plan.rows} == {0, 1, 2}


def test_the_decode_path_is_taken_for_single_tokens_of_contexts_that_fit_its_tables(simulation):
    engine = simulation.SimulatedEngine(max_decode_blocks=2)
    engine.add("a", prompt(6), max_new_tokens=6)
    engine.run()
    assert [(plan.path, plan.max_seq_len) for plan in engine.plans] == [
        ("varlen", 6),
        ("decode", 7),
        ("decode", 8),
        ("varlen", 9),
        ("varlen", 10),
        ("varlen", 11),
    ]
    engine = simulation.SimulatedEngine(max_decode_blocks=0)
    engine.add("a", prompt(6))
    engine.run()
    assert {plan.path for plan in engine.plans} == {"varlen"}


# ------------------------------------------------------------------------------------------------ memory


@DEPTHS
@pytest.mark.parametrize("length", range(1, 13))
def test_a_block_is_taken_exactly_when_a_token_needs_it(simulation, length, depth):
    engine = simulation.SimulatedEngine(page_size=4, depth=depth)
    engine.add("a", prompt(length), max_new_tokens=9)
    while engine.scheduler.has_requests:
        plan = engine.step()
        if plan is not None and engine.scheduler.has_requests:
            assert len(engine.blocks.block_ids("a")) == -(-plan.max_seq_len // 4)
    assert engine.plans[-1].max_seq_len == length + 8  # the last token never enters the cache


@DEPTHS
@pytest.mark.parametrize(("length", "max_new_tokens"), [(128, 1), (120, 9), (1, 128), (127, 2)])
def test_a_request_may_fill_the_cache_to_its_last_place(simulation, length, max_new_tokens, depth):
    engine = simulation.SimulatedEngine(num_blocks=8, page_size=16, max_batch_tokens=50, depth=depth)
    engine.add("a", prompt(length), max_new_tokens)
    engine.add("next", prompt(20, kind=2))
    tokens = engine.run()
    assert len(tokens["a"]) == max_new_tokens
    assert {output.finish_reason for output in engine.finals} == {"length"}


@DEPTHS
@pytest.mark.parametrize("policy", [FIFO, PREFILL_FIRST], ids=lambda policy: policy.name)
def test_preempted_requests_find_their_prefix_again_and_get_the_same_tokens(simulation, policy, depth):
    engine = simulation.SimulatedEngine(num_blocks=12, page_size=16, max_batch_tokens=256, policy=policy, depth=depth)
    for index in range(8):
        engine.add(f"r{index}", prompt(20, kind=index), max_new_tokens=60)
    engine.run()
    counters = engine.scheduler.counters
    assert counters.preemptions > 0
    assert counters.prefix_cached_tokens > 0


def test_a_preempted_request_runs_its_generated_tokens_as_a_prompt(simulation):
    engine = simulation.SimulatedEngine(num_blocks=4, page_size=4, share_blocks=False, max_batch_tokens=6)
    engine.add("old", prompt(4), max_new_tokens=12)
    engine.add("new", prompt(2, kind=2), max_new_tokens=8)
    engine.run()
    restarts = [row for plan in engine.plans for row in plan.rows if row.request_id == "new" and row.start == 0]
    assert len(restarts) == 2
    assert restarts[1].count == 6  # 2 of the prompt and the first of those generated, as far as the budget goes
    assert not restarts[1].samples
    assert sum(row.samples for plan in engine.plans for row in plan.rows if row.request_id == "new") == 8


@DEPTHS
def test_the_newest_gives_way_and_no_more_than_needed(simulation, depth):
    engine = simulation.SimulatedEngine(num_blocks=4, page_size=4, share_blocks=False, depth=depth)
    for name in ("first", "second", "third", "fourth"):
        engine.add(name, prompt(2, kind=len(name)), max_new_tokens=7)
    plan = step_until(engine, preempts(engine))
    # All four need a second block at once: the two oldest take those of the two newest.
    assert counts(plan) == {"first": 1, "second": 1}
    assert engine.scheduler.counters.preemptions == 2
    tokens = engine.run()
    assert [len(answer) for answer in tokens.values()] == [7] * 4
    assert engine.scheduler.counters.preemptions == 2


@DEPTHS
def test_a_request_that_needs_one_block_takes_it_from_one_request(simulation, depth):
    engine = simulation.SimulatedEngine(num_blocks=3, page_size=4, share_blocks=False, depth=depth)
    for name in ("first", "second", "third"):
        engine.add(name, prompt(2, kind=len(name)), max_new_tokens=7)
    plan = step_until(engine, preempts(engine))
    # All three need a second block at once: the oldest takes that of the newest, and the other one keeps its own.
    assert counts(plan) == {"first": 1}
    assert len(engine.blocks.block_ids("second")) == 1
    engine.run()
    assert engine.scheduler.counters.preemptions == 1


@DEPTHS
@pytest.mark.parametrize("share_blocks", [True, False])
def test_many_requests_in_a_small_cache_get_on_with_every_step(simulation, share_blocks, depth):
    engine = simulation.SimulatedEngine(num_blocks=12, page_size=4, share_blocks=share_blocks, depth=depth)
    for index in range(8):
        engine.add(f"r{index}", prompt(6, kind=index), max_new_tokens=30)
    # Even one after the other they take 30 steps each.
    engine.run(max_steps=8 * 30)


def test_the_share_of_a_victim_goes_to_requests_planned_after_it(simulation):
    engine = simulation.SimulatedEngine(num_blocks=4, page_size=4, max_batch_tokens=4, policy=PREFILL_FIRST)
    engine.add("old", prompt(3), max_new_tokens=9)
    engine.add("middle", prompt(1, kind=2), max_new_tokens=3)
    engine.add("new", prompt(5, kind=3), max_new_tokens=1)
    plan = step_until(engine, preempts(engine))
    # Of four tokens, "new" had three when "old" took its blocks: without them there is nothing left for "middle".
    assert counts(plan) == {"old": 1, "middle": 1}
    engine.run()


def test_the_last_running_request_is_never_preempted(simulation):
    engine = simulation.SimulatedEngine(num_blocks=3, page_size=4)
    engine.add("a", prompt(5), max_new_tokens=8)
    engine.add("b", prompt(5, kind=2), max_new_tokens=8)
    engine.run()
    assert engine.requests[0].num_preemptions == 0


def test_a_victim_chosen_while_a_step_is_planned_leaves_the_step(simulation):
    """Prompts run first here, so that the newer request is planned before the older one needs its blocks."""
    engine = simulation.SimulatedEngine(num_blocks=6, page_size=4, max_batch_tokens=7, policy=PREFILL_FIRST)
    engine.add("old", prompt(7), max_new_tokens=8)
    engine.step()
    engine.add("new", prompt(15, kind=2), max_new_tokens=4)
    plan = step_until(engine, preempts(engine))
    assert counts(engine.plans[-2]) == {"new": 7}
    assert counts(plan) == {"old": 1}
    engine.run()


def test_safety_margin_holds_blocks_back_from_new_prompts_but_not_from_the_only_one(simulation):
    engine = simulation.SimulatedEngine(num_blocks=10, page_size=4, safety_margin=0.5)
    engine.add("a", prompt(24), max_new_tokens=2)
    engine.add("b", prompt(4, kind=2), max_new_tokens=2)
    assert counts(engine.step()) == {"a": 24}  # 4 blocks are left, 5 are held back
    engine.run()
    engine = simulation.SimulatedEngine(num_blocks=10, page_size=4, safety_margin=0.4)
    engine.add("a", prompt(24), max_new_tokens=2)
    engine.add("b", prompt(4, kind=2), max_new_tokens=2)
    assert counts(engine.step()) == {"a": 24, "b": 4}
    engine.run()


def test_a_prompt_that_does_not_fit_yet_waits_without_taking_anything(simulation):
    engine = simulation.SimulatedEngine(num_blocks=6, page_size=4)
    engine.add("a", prompt(12), max_new_tokens=5)
    engine.add("b", prompt(16, kind=2), max_new_tokens=1)
    engine.step()
    assert engine.blocks.num_in_use == 3
    assert engine.scheduler.num_waiting == 1
    engine.run()
    assert engine.scheduler.counters.preemptions == 0


def test_nothing_to_run_is_told_apart_from_something_that_waits(simulation):
    engine = simulation.SimulatedEngine(depth=1)
    assert engine.scheduler.schedule() == Idle(has_waiting=False)
    engine.add("a", prompt(4), max_new_tokens=1)
    engine.step()
    assert engine.scheduler.schedule() == Idle(has_waiting=True)  # its only token is in flight
    engine.run()


# ---------------------------------------------------------------------------------------- shared prefixes


@DEPTHS
def test_a_fully_cached_prompt_still_runs_a_token_and_can_be_built_upon(simulation, depth):
    engine = simulation.SimulatedEngine(num_blocks=32, page_size=16, depth=depth)
    tokens = prompt(33)
    for index, length in enumerate((32, 32, 32, 32, 16, 33)):
        engine.add(f"r{index}", tokens[:length], max_new_tokens=3)
        engine.run()
    assert [request.num_cached for request in engine.requests] == [0, 16, 16, 16, 0, 32]


@DEPTHS
def test_a_partly_shared_prompt_sees_nothing_past_the_shared_blocks(simulation, depth):
    engine = simulation.SimulatedEngine(num_blocks=40, page_size=16, max_batch_tokens=64, depth=depth)
    for index in range(12):
        engine.add(f"r{index}", prompt(33) + prompt(7, kind=index), max_new_tokens=5)
    engine.run()
    assert {request.num_cached for request in engine.requests} == {0, 32}


@DEPTHS
def test_equal_prompts_admitted_in_one_step_share_their_blocks(simulation, depth):
    engine = simulation.SimulatedEngine(num_blocks=8, page_size=16, max_batch_tokens=128, depth=depth)
    engine.add("a", prompt(40))
    engine.add("b", prompt(40))
    engine.step()
    assert len(engine.blocks.block_ids("a") & engine.blocks.block_ids("b")) == 2
    assert engine.blocks.num_in_use == 4
    engine.add("c", prompt(100, kind=2), max_new_tokens=1)  # needs what the others give back
    engine.run()


def test_requests_that_complete_the_same_block_in_one_step_keep_one_of_them(simulation):
    engine = simulation.SimulatedEngine(page_size=4)
    engine.add("a", prompt(3), max_new_tokens=3)
    engine.add("b", prompt(3), max_new_tokens=3)
    engine.run()
    assert engine.blocks.num_cached == 1


@DEPTHS
def test_generated_tokens_are_a_prefix_for_the_next_turn(simulation, depth):
    engine = simulation.SimulatedEngine(page_size=4, depth=depth)
    first = engine.add("first", prompt(5), max_new_tokens=8)
    engine.run()
    # 5 + 8 tokens, the last of them not in the cache: three whole blocks.
    engine.add("second", [*first.token_ids, 7, 7])
    engine.run()
    assert engine.requests[1].num_cached == 12


@DEPTHS
def test_blocks_completed_by_decoding_are_shared_while_their_request_runs(simulation, depth):
    engine = simulation.SimulatedEngine(page_size=4, depth=depth)
    running = engine.add("running", prompt(4), max_new_tokens=20)
    step_until(engine, lambda: len(running.generated) == 6)
    engine.add("other", running.token_ids)
    engine.run()
    assert engine.requests[1].num_cached == 8


@DEPTHS
def test_digests_that_all_collide_cost_hits_but_never_a_token(simulation, monkeypatch, depth):
    monkeypatch.setattr(block_manager, "content_digest", lambda parent, token_ids: b"same")
    engine = simulation.SimulatedEngine(num_blocks=12, page_size=4, max_batch_tokens=16, depth=depth)
    for index in range(12):
        engine.add(f"r{index}", prompt(9, kind=index % 3), max_new_tokens=10)
    engine.run()
    assert engine.scheduler.counters.preemptions > 0


def test_tenants_with_different_salts_share_nothing(simulation):
    engine = simulation.SimulatedEngine(num_blocks=32)
    for index, salt in enumerate([None, "x", "y", "x"]):
        engine.add(f"r{index}", prompt(9), salt=salt)
        engine.run()
    assert [request.num_cached for request in engine.requests] == [0, 0, 0, 8]


@DEPTHS
def test_requests_admitted_after_a_reset_see_nothing_of_the_old_weights(simulation, depth):
    engine = simulation.SimulatedEngine(num_blocks=32, max_requests=3, depth=depth)
    engine.add("done", prompt(9))
    engine.run()
    engine.add_family("running", prompt(9), max_new_tokens=6, size=3)
    engine.add("queued", prompt(9))
    engine.step()
    assert engine.requests[1].num_cached == 8
    engine.change_weights()  # the family's children and `queued` still wait
    engine.run()
    engine.add("later", prompt(9))
    engine.run()
    assert engine.requests[-1].num_cached == 8
    assert engine.scheduler.counters.forks == 0


# ------------------------------------------------------------------------------------------ more sequences


@DEPTHS
@pytest.mark.parametrize("max_requests", [1, 2, 8])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8])
def test_every_sequence_of_a_prompt_is_delivered_with_a_stream_of_its_own(simulation, length, max_requests, depth):
    engine = simulation.SimulatedEngine(max_requests=max_requests, max_batch_tokens=7, depth=depth)
    engine.add_family("a", prompt(length), max_new_tokens=6, size=3)
    tokens = engine.run()
    assert set(tokens) == {"a", "a__child#0", "a__child#1"}
    assert len({tuple(answer) for answer in tokens.values()}) == 3


@DEPTHS
@pytest.mark.parametrize("share_blocks", [True, False])
@pytest.mark.parametrize("length", [1, 4, 5, 8, 11])
def test_children_fork_the_prompt_and_compute_its_last_token_only(simulation, length, share_blocks, depth):
    engine = simulation.SimulatedEngine(num_blocks=32, share_blocks=share_blocks, depth=depth)
    engine.add_family("a", prompt(length), max_new_tokens=5, size=4)
    engine.run()
    assert engine.scheduler.counters.forks == 3
    assert [request.num_cached for request in engine.requests] == [0] + [length - 1] * 3
    num_copies = sum(len(plan.block_copies) for plan in engine.plans)
    assert num_copies == (3 if (length - 1) % 4 else 0)


@DEPTHS
def test_a_family_too_large_for_the_cache_gets_through(simulation, depth):
    engine = simulation.SimulatedEngine(num_blocks=5, page_size=4, depth=depth)
    engine.add_family("a", prompt(9), max_new_tokens=8, size=5)
    assert len(engine.run()) == 5


def test_children_start_with_their_own_parameters_and_the_stop_rules_of_the_family(simulation):
    engine = simulation.SimulatedEngine()
    engine.add_family("a", prompt(5), max_new_tokens=3, size=3, eos=True)
    engine.run()
    starts = [start for plan in engine.plans for start in plan.row_starts]
    assert [start.sampling.seed for start in starts] == [0, 1, 2]
    assert {(start.prompt_length, start.eos_token_ids) for start in starts} == {(5, frozenset({simulation.EOS}))}


def test_a_child_whose_parent_has_ended_computes_its_prompt_itself(simulation):
    engine = simulation.SimulatedEngine(max_requests=1, share_blocks=False)
    engine.add_family("a", prompt(5), max_new_tokens=1, size=2)
    engine.run()
    assert [plan.num_tokens for plan in engine.plans] == [5, 5]


def test_children_of_a_request_that_ended_have_nothing_to_do_with_the_next_one_of_its_name(simulation):
    engine = simulation.SimulatedEngine(max_requests=2, share_blocks=False)
    engine.add_family("a", prompt(5), max_new_tokens=1, size=2)
    engine.step()  # the parent ends before its child has started
    engine.add("a", prompt(5, kind=2), max_new_tokens=8)
    assert [output.request_id for output in engine.cancel("a")] == ["a"]
    engine.add("a", prompt(5, kind=3), max_new_tokens=8)
    engine.run()
    assert engine.requests[1].status == RequestStatus.FINISHED


def test_a_parent_that_resumes_is_not_forked_before_its_blocks_are_written(simulation):
    """Twins lose everything to an older request. Once it has ended, one step admits all: the first twin computes the
    prompt anew, the second one shares its blocks, and the second one's child must not copy them before that step."""
    engine = simulation.SimulatedEngine(num_blocks=5, page_size=4, max_requests=3)
    engine.add("old", prompt(6, kind=2), max_new_tokens=15)
    engine.add("twin", prompt(3), max_new_tokens=9)
    engine.add("parent", prompt(3), max_new_tokens=9)
    engine.add("child", prompt(3), max_new_tokens=9, seed=1, parent_id="parent")
    engine.run()
    assert [start.row for plan in engine.plans if len(plan.row_starts) == 3 for start in plan.row_starts] == [
        0,
        1,
        2,
    ] * 2


@pytest.mark.parametrize("difference", [{"kind": 2}, {"length": 6}, {"salt": "x"}])
def test_a_child_forks_only_a_cache_that_holds_its_own_prompt(simulation, difference):
    engine = simulation.SimulatedEngine(share_blocks=False)
    engine.add("a", prompt(5), max_new_tokens=8)
    tokens = prompt(difference.get("length", 5), kind=difference.get("kind", 1))
    engine.add("child", tokens, salt=difference.get("salt"), parent_id="a")
    engine.run()
    assert engine.scheduler.counters.forks == 0


# ------------------------------------------------------------------------------------------------- cancel


def in_each_state(simulation, depth: int):
    """An engine for each state that the request `x` can be in."""

    def engine(**sizes):
        return simulation.SimulatedEngine(page_size=4, depth=depth, **sizes)

    queued = engine()
    queued.add("x", prompt(4))
    yield "queued", queued
    without_a_row = engine(max_requests=1)
    without_a_row.add("other", prompt(4, kind=2))
    without_a_row.add("x", prompt(4))
    without_a_row.step()
    yield "waiting", without_a_row
    child = engine(max_batch_tokens=3)
    child.add("other", prompt(8))
    child.add("x", prompt(8), parent_id="other")
    child.step()
    yield "waiting for its parent", child
    prefilling = engine(max_batch_tokens=3)
    prefilling.add("x", prompt(8))
    prefilling.step()
    yield "prefilling", prefilling
    decoding = engine()
    decoding.add("x", prompt(4), max_new_tokens=9)
    for _ in range(3):
        decoding.step()
    yield "decoding", decoding
    preempted = engine(num_blocks=3)
    preempted.add("other", prompt(4, kind=2), max_new_tokens=8)
    preempted.add("x", prompt(3), max_new_tokens=8)
    step_until(preempted, preempts(preempted))
    yield "preempted", preempted
    forked = engine()
    forked.add("other", prompt(6), max_new_tokens=9)
    forked.add("x", prompt(6), max_new_tokens=9, parent_id="other", seed=1)
    for _ in range(3):
        forked.step()
    yield "forked", forked


@DEPTHS
def test_a_request_can_be_cancelled_in_every_state_and_only_once(simulation, depth):
    states = []
    for state, engine in in_each_state(simulation, depth):
        states.append(state)
        (final,) = engine.cancel("x")
        assert (final.request_id, final.status, final.finish_reason) == ("x", RequestStatus.CANCELLED, "cancelled")
        assert engine.cancel("x") == []
        engine.check()
        with pytest.raises(KeyError):
            engine.blocks.block_ids("x")
        engine.run()
        assert engine.cancel("x") == []
        assert engine.cancel("never seen") == []
        assert [output.request_id for output in engine.finals].count("x") == 1
    assert len(states) == 7


@DEPTHS
def test_cancelled_requests_return_their_blocks_at_once_and_keep_their_tokens(simulation, depth):
    engine = simulation.SimulatedEngine(num_blocks=32, max_batch_tokens=64, depth=depth)
    for index in range(6):
        engine.add(f"r{index}", prompt(6, kind=index), max_new_tokens=9)
    for _ in range(4):
        engine.step()
    for index in range(6):
        (final,) = engine.cancel(f"r{index}")
        assert len(final.generated_tokens) == 4 - depth
    assert engine.blocks.num_in_use == 0
    engine.run()
    assert engine.scheduler.counters.dropped_tokens == 6 * depth
    assert engine.scheduler.counters.requests_cancelled == 6


def test_children_that_wait_for_a_cancelled_parent_end_with_it(simulation):
    engine = simulation.SimulatedEngine(max_batch_tokens=3)
    engine.add_family("a", prompt(8), max_new_tokens=4, size=3)
    engine.step()
    assert [output.request_id for output in engine.cancel("a")] == ["a__child#0", "a__child#1", "a"]
    engine.run()


@DEPTHS
def test_a_result_of_an_earlier_life_is_dropped(simulation, depth):
    """Cancelled and added again under the same id while a step with the first one's token is in flight."""
    engine = simulation.SimulatedEngine(depth=1)
    engine.add("a", prompt(4), max_new_tokens=5)
    for _ in range(2 + depth):
        engine.step()
    engine.cancel("a")
    engine.add("a", prompt(4, kind=2), max_new_tokens=5)
    engine.run()
    assert engine.scheduler.counters.dropped_tokens == 1


def test_failing_everything_ends_each_request_once_and_frees_all(simulation):
    engine = simulation.SimulatedEngine(max_requests=2, max_batch_tokens=6)
    engine.add_family("a", prompt(8), max_new_tokens=4, size=3)
    engine.add("b", prompt(3, kind=2))
    engine.add("c", prompt(3, kind=3))
    engine.step()
    outputs = engine.scheduler.fail_all("the machine is on fire")
    assert sorted(output.request_id for output in outputs) == ["a", "a__child#0", "a__child#1", "b", "c"]
    assert {(output.status, output.error) for output in outputs} == {(RequestStatus.FAILED, "the machine is on fire")}
    assert not engine.scheduler.has_requests
    assert engine.blocks.num_in_use == 0
    assert engine.scheduler.counters.requests_failed == 5


# ------------------------------------------------------------------------------------------------ results


def test_an_id_in_flight_is_refused_and_free_again_afterwards(simulation):
    engine = simulation.SimulatedEngine()
    engine.add("a", prompt(4))
    with pytest.raises(ValueError, match="request id 'a' is in flight"):
        engine.add("a", prompt(5))
    engine.run()
    engine.add("a", prompt(5))
    engine.run()
    assert [output.request_id for output in engine.finals] == ["a", "a"]


@DEPTHS
@pytest.mark.parametrize("size", [1, 3])
def test_a_first_token_that_ends_the_request_is_its_whole_answer(simulation, size, depth):
    seed = next(s for s in range(99) if simulation.next_token(simulation.fingerprints(prompt(4))[-1], s) == 0)
    engine = simulation.SimulatedEngine(depth=depth)
    for name in ("new", "cached"):
        engine.add(name, prompt(4), max_new_tokens=9, eos=True, streaming=True, seed=seed)
        for child in range(1, size):
            engine.add(f"{name}{child}", prompt(4), 9, eos=True, streaming=True, seed=seed, parent_id=name)
        engine.run()
    assert {tuple(output.generated_tokens) for output in engine.updates} == {(simulation.EOS,)}
    assert len(engine.updates) == len(engine.finals) == 2 * size
    assert {output.finish_reason for output in engine.finals} == {"eos"}


@DEPTHS
def test_a_streaming_request_shows_every_token_once_more_and_ends_with_all(simulation, depth):
    engine = simulation.SimulatedEngine(depth=depth)
    engine.add("a", prompt(4), max_new_tokens=5, streaming=True)
    engine.add("b", prompt(4, kind=2), max_new_tokens=5)
    engine.run()
    shown = [output for output in engine.updates if output.request_id == "a"]
    assert [len(output.generated_tokens) for output in shown] == [1, 2, 3, 4, 5]
    assert [output.is_finished() for output in shown] == [False] * 4 + [True]
    assert sum(output.request_id == "b" for output in engine.updates) == 1


@DEPTHS
def test_unusable_logits_fail_their_request_alone(simulation, depth):
    engine = simulation.SimulatedEngine(depth=depth)
    engine.add("good", prompt(4))
    engine.add("bad", prompt(4, kind=2), seed=simulation.BROKEN_SEED)
    engine.run()
    by_id = {output.request_id: output for output in engine.finals}
    assert by_id["bad"].status == RequestStatus.FAILED
    assert by_id["bad"].error == "broken"
    assert by_id["bad"].finish_reason == "error"
    assert by_id["good"].status == RequestStatus.FINISHED


def test_log_probabilities_and_times_survive_a_preemption(simulation):
    engine = simulation.SimulatedEngine(num_blocks=3, page_size=4)
    engine.add("old", prompt(4), max_new_tokens=8)
    request = engine.add("new", prompt(3, kind=2), max_new_tokens=8)
    request.record_timestamps = True
    while engine.scheduler.has_requests:
        plan = engine.scheduler.schedule()
        sampled = [SampledToken(5, -0.5)] * sum(row.samples for row in plan.rows)
        for output in engine.scheduler.commit(plan, StepResult(tuple(sampled))):
            assert output.logprobs == [-0.5] * 8
    assert request.num_preemptions > 0
    final = request.to_output()
    assert len(final.timestamps) == 8
    assert final.timestamps == sorted(final.timestamps)
    assert final.created_time <= final.lifespan[0] <= final.timestamps[0] <= final.lifespan[1]


def test_results_must_match_their_plan(simulation):
    engine = simulation.SimulatedEngine()
    engine.add("a", prompt(4))
    plan = engine.scheduler.schedule()
    with pytest.raises(ValueError, match="zip"):
        engine.scheduler.commit(plan, StepResult(()))


@pytest.mark.parametrize("order", range(5))
def test_tokens_do_not_depend_on_the_order_of_arrival(simulation, order):
    engine = simulation.SimulatedEngine(num_blocks=20, max_requests=4, max_batch_tokens=9)
    names = [f"r{index}" for index in range(16)]
    random.Random(order).shuffle(names)
    for name in names:
        engine.add(name, prompt(3 + int(name[1:]), kind=int(name[1:]) % 5), max_new_tokens=6)
        engine.step()
    engine.run()


# ----------------------------------------------------------------------------------------------- policies


def test_policies_are_found_by_name_and_unknown_names_are_refused():
    registry = PolicyRegistry([FIFO, PREFILL_FIRST])
    assert registry.get("fifo") is FIFO
    with pytest.raises(ValueError, match=r"scheduler_type must be one of \['fifo', 'prefill_first'\], got 'lifo'"):
        registry.get("lifo")
    newest_first = SchedulingPolicy("lifo", lambda running: running[::-1], default_safety_margin=0.3)
    registry.register(newest_first)
    assert registry.get("lifo") is newest_first
    assert registry.default_margins() == {"fifo": 0.15, "prefill_first": 0.0, "lifo": 0.3}
    with pytest.raises(ValueError, match="'lifo' is already registered"):
        registry.register(newest_first)


@DEPTHS
def test_any_order_of_the_running_requests_is_safe(simulation, depth):
    generator = random.Random(0)
    shuffled = SchedulingPolicy("shuffled", lambda running: generator.sample(running, len(running)), 0.0)
    engine = simulation.SimulatedEngine(num_blocks=9, max_batch_tokens=10, policy=shuffled, depth=depth)
    for index in range(10):
        engine.add(f"r{index}", prompt(7, kind=index % 4), max_new_tokens=12)
    engine.run()
    assert engine.scheduler.counters.preemptions > 0


@DEPTHS
@pytest.mark.parametrize("num_host_blocks", [0, 100])
def test_a_prompt_that_is_preempted_while_it_is_scored_loses_and_repeats_no_score(simulation, depth, num_host_blocks):
    for num_steps in range(1, 8):
        engine = simulation.SimulatedEngine(
            depth=depth, max_batch_tokens=5, page_size=2, num_blocks=40, num_host_blocks=num_host_blocks
        )
        engine.add("old", prompt(3), max_new_tokens=20)
        request = engine.add("scored", prompt(17, kind=2), is_scored=True)
        for _ in range(num_steps):
            engine.step()
        if request.row is not None:
            engine.scheduler._preempt(request, _Draft(budget=0))
        engine.run()
        assert request.prompt_logprobs == simulation.prompt_scores(request)


def test_a_share_that_is_withdrawn_gives_back_what_it_took(simulation):
    engine = simulation.SimulatedEngine()
    request = engine.add("a", prompt(9), is_scored=True)
    draft = _Draft(budget=20, scored_budget=10)
    draft.grant(_Share(request, 0, 0, 9, 8, None))
    assert (draft.room(request), draft.budget) == (2, 11)
    draft.withdraw("a")
    assert (draft.room(request), draft.budget) == (10, 20)
