"""Preempted requests whose cache waits in host memory: what is copied when, and what becomes of it.

The simulated engine compares every cache read and every request's tokens (see `simulated_engine.py`); the assertions
here are about the rest.
"""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import pytest

from cbtriton.cache_layout import GroupKind
from cbtriton.plan import BlockSwap
from cbtriton.scheduler import FIFO, PREFILL_FIRST, _Draft
from cbtriton.swap import HostBlocks

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def prompt(length: int, kind: int = 1) -> list[int]:
    """A prompt that shares no block with those of another kind."""
    generator = random.Random(kind)
    return [generator.randrange(1, 1000) for _ in range(length)]


def preempt(engine, request) -> None:
    engine.scheduler._preempt(request, _Draft(budget=0))


def swaps_in(engine) -> list[BlockSwap]:
    return [swap for plan in engine.plans for swap in plan.swaps_in]


def swaps_out(engine) -> list[BlockSwap]:
    return [swap for plan in engine.plans for swap in plan.swaps_out]


# ------------------------------------------------------------------------------------------- the pool alone


def test_a_pool_hands_out_its_lowest_blocks_and_takes_nothing_that_does_not_fit():
    pool = HostBlocks(5)
    assert pool.offload("a", [7, 3, 9], num_tokens=10)
    assert not pool.offload("b", [1, 2, 4], num_tokens=12)
    assert pool.offload("c", [5], num_tokens=1)
    assert (pool.num_tokens("a"), pool.num_tokens("b"), pool.num_tokens("c"), pool.num_in_use) == (10, 0, 1, 4)
    assert pool.take_swaps_out() == (BlockSwap("a", (7, 3, 9), (0, 1, 2)), BlockSwap("c", (5,), (3,)))
    assert pool.take_swaps_out() == ()
    pool.check_invariants()


def test_blocks_on_their_way_back_are_not_handed_out_before_the_plan_that_reads_them_is_made():
    pool = HostBlocks(3)
    pool.offload("a", [7, 3, 9], num_tokens=10)
    pool.take_swaps_out()
    pool.restore("a", [4, 5, 6], written={4})
    assert (pool.num_tokens("a"), pool.num_in_use) == (0, 2)
    assert not pool.offload("b", [1, 2], num_tokens=8)
    assert pool.take_swaps_in() == (BlockSwap("a", (5, 6), (1, 2)),)
    assert pool.num_in_use == 0
    assert pool.offload("b", [1, 2], num_tokens=8)
    pool.check_invariants()


def test_what_is_forgotten_is_not_copied_any_more():
    pool = HostBlocks(3)
    pool.offload("a", [7, 3], num_tokens=8)
    pool.free("a")
    pool.free("nobody")
    pool.offload("b", [1, 2, 4], num_tokens=12)
    assert pool.take_swaps_out() == (BlockSwap("b", (1, 2, 4), (0, 1, 2)),)
    pool.clear()
    assert (pool.num_in_use, pool.num_tokens("b")) == (0, 0)
    pool.check_invariants()


def test_a_request_is_taken_in_once():
    pool = HostBlocks(4)
    pool.offload("a", [7], num_tokens=4)
    with pytest.raises(RuntimeError, match="'a' is off-loaded already"):
        pool.offload("a", [8], num_tokens=4)


# ---------------------------------------------------------------------------------------------- scheduling


@DEPTHS
@pytest.mark.parametrize("share_blocks", [True, False])
def test_a_restored_request_goes_on_where_it_was(simulation, depth, share_blocks):
    engine = simulation.SimulatedEngine(num_blocks=8, depth=depth, num_host_blocks=8, share_blocks=share_blocks)
    old = engine.add("old", prompt(10), max_new_tokens=14)
    new = engine.add("new", prompt(11, kind=2), max_new_tokens=9)
    engine.run()
    counters = engine.scheduler.counters
    assert counters.preemptions == counters.offloads == counters.restores == new.num_preemptions == 1
    rows = [row for plan in engine.plans for row in plan.rows if row.request_id == "new"]
    resumed = next(row for row, before in zip(rows[1:], rows, strict=False) if row.epoch != before.epoch)
    # Only its last known token runs again.
    assert (resumed.count, resumed.samples) == (1, True)
    assert {row.start for row in rows} == {0, *range(11, 19)}
    [out] = swaps_out(engine)
    assert len(out.device_blocks) == engine.layout.peak_blocks(resumed.start, 1)
    assert old.num_preemptions == 0


@DEPTHS
def test_blocks_that_are_still_cached_on_the_device_are_not_copied_back(simulation, depth):
    engine = simulation.SimulatedEngine(num_blocks=9, depth=depth, num_host_blocks=8)
    engine.add("old", prompt(10), max_new_tokens=18)
    engine.add("new", prompt(11, kind=2), max_new_tokens=9)
    engine.run()
    [out], [back] = swaps_out(engine), swaps_in(engine)
    assert 0 < len(back.host_blocks) < len(out.host_blocks)
    assert back.host_blocks == out.host_blocks[-len(back.host_blocks) :]


def test_a_prefix_on_the_device_that_holds_as_much_is_taken_instead(simulation):
    engine = simulation.SimulatedEngine(num_blocks=20, num_host_blocks=8)
    engine.add("old", prompt(4), max_new_tokens=9)
    new = engine.add("new", prompt(9, kind=2), max_new_tokens=5)
    engine.step()
    preempt(engine, new)
    assert engine.host_blocks.num_in_use > 0
    engine.step()
    # The host holds 9 tokens, the prefix cache two whole blocks of them.
    assert [len(swap.host_blocks) for swap in swaps_in(engine)] == [1]
    engine.run()
    engine.add("again", prompt(9, kind=2), max_new_tokens=1)
    engine.step()
    assert len(swaps_in(engine)) == 1


@DEPTHS
def test_part_of_a_prompt_is_kept_too(simulation, depth):
    engine = simulation.SimulatedEngine(
        num_blocks=16, depth=depth, num_host_blocks=8, max_batch_tokens=6, share_blocks=False
    )
    engine.add("old", prompt(2), max_new_tokens=9)
    new = engine.add("new", prompt(20, kind=2), max_new_tokens=2)
    engine.step()
    engine.step()
    computed = new.num_computed
    assert 0 < computed < 19
    preempt(engine, new)
    plan = engine.step()
    assert [row.start for row in plan.rows if row.request_id == "new"] == [computed]
    engine.run()


@DEPTHS
def test_a_full_pool_falls_back_to_computing_again_and_keeps_what_it_has(simulation, depth):
    engine = simulation.SimulatedEngine(num_blocks=16, depth=depth, num_host_blocks=3, share_blocks=False)
    engine.add("old", prompt(4), max_new_tokens=30)
    second = engine.add("second", prompt(9, kind=2), max_new_tokens=6)
    third = engine.add("third", prompt(9, kind=3), max_new_tokens=6)
    engine.step()
    preempt(engine, third)
    preempt(engine, second)
    assert (engine.host_blocks.num_tokens("third"), engine.host_blocks.num_tokens("second")) == (9 - depth, 0)
    plan = engine.step()
    assert {row.request_id: row.start for row in plan.rows} == {"old": 4, "second": 0, "third": 9 - depth}
    engine.run()
    assert (engine.scheduler.counters.offloads, engine.scheduler.counters.restores) == (1, 1)


@DEPTHS
def test_requests_that_share_a_prefix_get_it_back_without_each_other(simulation, depth):
    engine = simulation.SimulatedEngine(num_blocks=10, depth=depth, num_host_blocks=30)
    for index in range(4):
        engine.add(f"r{index}", [*prompt(9), index + 1], max_new_tokens=20)
    engine.run()
    assert engine.scheduler.counters.restores > 3


@DEPTHS
def test_a_cancelled_request_frees_its_host_blocks_and_its_copy(simulation, depth):
    engine = simulation.SimulatedEngine(num_blocks=16, depth=depth, num_host_blocks=3, share_blocks=False)
    engine.add("old", prompt(4), max_new_tokens=9)
    second = engine.add("second", prompt(9, kind=2), max_new_tokens=6)
    third = engine.add("third", prompt(9, kind=3), max_new_tokens=6)
    engine.step()
    preempt(engine, third)
    engine.cancel("third")
    assert engine.host_blocks.num_in_use == 0
    preempt(engine, second)
    plan = engine.step()
    assert [swap.request_id for swap in plan.swaps_out] == ["second"]
    engine.run()


@DEPTHS
def test_a_request_ends_while_its_cache_is_in_host_memory(simulation, depth):
    engine = simulation.SimulatedEngine(num_blocks=6, depth=depth, num_host_blocks=8)
    engine.add("old", prompt(10), max_new_tokens=14)
    engine.add("new", prompt(9, kind=2), max_new_tokens=9)
    while not engine.host_blocks.num_tokens("new"):
        engine.step()
    engine.step()
    assert [output.request_id for output in engine.cancel("new")] == ["new"]
    assert engine.host_blocks.num_in_use == 0
    engine.run()


@DEPTHS
@pytest.mark.parametrize("share_blocks", [True, False])
@pytest.mark.parametrize("is_offloaded_first", [True, False])
def test_nothing_that_other_weights_computed_comes_back(simulation, depth, share_blocks, is_offloaded_first):
    engine = simulation.SimulatedEngine(num_blocks=16, depth=depth, num_host_blocks=8, share_blocks=share_blocks)
    engine.add("old", prompt(4), max_new_tokens=12)
    new = engine.add("new", prompt(9, kind=2), max_new_tokens=6)
    engine.step()
    if is_offloaded_first:
        preempt(engine, new)
        assert engine.host_blocks.num_in_use > 0
        engine.change_weights()
    else:
        engine.change_weights()
        preempt(engine, new)
    assert engine.host_blocks.num_in_use == 0
    plan = engine.step()
    assert [row.start for row in plan.rows if row.request_id == "new"] == [0]
    engine.run()


@pytest.mark.parametrize("policy", [FIFO, PREFILL_FIRST], ids=lambda policy: policy.name)
@pytest.mark.parametrize("num_host_blocks", [0, 7, 200])
@DEPTHS
def test_each_request_is_preempted_at_most_once_for_each_block_that_older_ones_take(
    simulation, policy, num_host_blocks, depth
):
    most = 0
    for seed in range(12):
        rng = random.Random(seed)
        engine = simulation.SimulatedEngine(
            num_blocks=10, depth=depth, num_host_blocks=num_host_blocks, policy=policy, max_batch_tokens=12
        )
        for index in range(7):
            engine.add(f"r{index}", prompt(rng.randint(1, 20), kind=index), max_new_tokens=rng.randint(1, 20))
        engine.run()
        allowed = 0
        for request in engine.requests:
            assert request.num_preemptions <= allowed
            most = max(most, request.num_preemptions)
            num_tokens = len(request.prompt_ids) + request.stop.max_new_tokens - 1
            # Each time it is admitted, it takes so many blocks at most.
            allowed += (request.num_preemptions + 1) * engine.layout.peak_blocks(num_tokens, num_tokens)
    assert most > 1


# ------------------------------------------------------------------------------------------------- failures


@pytest.fixture
def failing() -> SimpleNamespace:
    """Copies fail while `now` is set."""
    return SimpleNamespace(now=False)


@DEPTHS
@pytest.mark.parametrize("direction", ["out", "in"])
def test_a_copy_that_fails_costs_its_request_a_computation_and_the_others_nothing(
    simulation, failing, depth, direction
):
    engine = simulation.SimulatedEngine(
        num_blocks=30,
        depth=depth,
        num_host_blocks=30,
        copy_fails=lambda way: failing.now and way == direction,
        share_blocks=False,
    )
    engine.add("old", prompt(4), max_new_tokens=20)
    second = engine.add("second", prompt(9, kind=2), max_new_tokens=9)
    engine.add("third", prompt(9, kind=3), max_new_tokens=9)
    engine.step()
    engine.step()
    preempt(engine, second)
    failing.now = True
    engine.step()
    failing.now = False
    engine.run()
    counters = engine.scheduler.counters
    assert (counters.failed_swaps, counters.restores, second.num_preemptions) == (1, 1, 2)


@DEPTHS
def test_what_is_on_its_way_back_is_shared_with_nobody_before_it_has_arrived(simulation, failing, depth):
    engine = simulation.SimulatedEngine(
        num_blocks=30, depth=depth, num_host_blocks=30, copy_fails=lambda way: failing.now
    )
    engine.add("old", prompt(4), max_new_tokens=30)
    engine.add_family("parent", prompt(9, kind=2), 9, size=1)
    engine.step()
    engine.step()
    preempt(engine, engine.requests[1])
    engine.blocks.reset_prefix_cache()
    failing.now = True
    engine.add("alike", prompt(9, kind=2), max_new_tokens=9)
    engine.add("child", prompt(9, kind=2), max_new_tokens=9, parent_id="parent")
    engine.step()
    engine.step()
    failing.now = False
    engine.run()
    assert engine.scheduler.counters.failed_swaps > 0


# -------------------------------------------------------------------------------------------- random courses

BEGINNINGS = ([1] * 24, [1] * 9 + [2] * 15, [3, 4] * 12)


def random_kinds(rng: random.Random) -> tuple[GroupKind, ...]:
    """One kind that sees everything, or up to three of any kind."""
    page_size = rng.randint(1, 5)
    if rng.random() < 0.3:
        return (GroupKind(0, page_size, 1),)
    return tuple(
        GroupKind(rng.choice((0, 1, 2, 3, 5, 9)), page_size * rng.choice((1, 1, 2, 3)), rng.randint(1, 3))
        for _ in range(rng.randint(1, 3))
    )


def random_engine(simulation, rng: random.Random):
    share_of_failures = rng.choice((0.0, 0.0, 0.4))
    kinds = random_kinds(rng)
    return simulation.SimulatedEngine(
        num_blocks=rng.randint(6, 14) * sum(kind.num_groups for kind in kinds),
        kinds=kinds,
        max_batch_tokens=rng.randint(2, 24),
        max_requests=rng.choice((2, 3, 6)),
        share_blocks=rng.random() < 0.7,
        policy=rng.choice((FIFO, PREFILL_FIRST)),
        depth=rng.randint(0, 1),
        num_host_blocks=rng.choice((2, 6, 60)),
        copy_fails=lambda _: rng.random() < share_of_failures,
    )


def add_one(engine, rng: random.Random, index: int) -> None:
    own = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
    tokens = (rng.choice(BEGINNINGS)[: rng.randint(0, 20)] + own)[: engine.capacity]
    number = min(rng.randint(1, 16), engine.capacity - len(tokens) + 1)
    options = {"seed": rng.choice((0, 0, 1)), "eos": rng.random() < 0.3, "salt": rng.choice((None, None, "tenant"))}
    engine.add_family(f"r{index}", tokens, number, rng.choice((1, 1, 2, 3)), **options)


def test_any_course_of_events_gives_each_request_the_tokens_it_gets_alone(simulation):
    happened: Counter[str] = Counter()
    for seed in range(500):
        rng = random.Random(seed)
        engine = random_engine(simulation, rng)
        for index in range(40):
            if index < 4 or rng.random() < 0.1:
                add_one(engine, rng, index)
            is_open = [request for request in engine.requests if not request.is_terminal]
            newer = list(engine.scheduler._running.values())[1:]
            if newer and rng.random() < 0.3:
                preempt(engine, rng.choice(newer))
            if is_open and rng.random() < 0.08:
                victim = rng.choice(is_open)
                happened["cancelled while off-loaded"] += engine.host_blocks.num_tokens(victim.request_id) > 0
                engine.cancel(victim.request_id)
            if engine.blocks.share_blocks and rng.random() < 0.05:
                pages = rng.randint(1, 3) * engine.layout.alignment
                happened["pinned"] += engine.pin(f"pin{index}", (BEGINNINGS[0] * 3)[:pages])
            if engine.pins and rng.random() < 0.05:
                engine.unpin(rng.choice(list(engine.pins)))
            if rng.random() < 0.03:
                happened["reset while off-loaded"] += engine.host_blocks.num_in_use > 0
                engine.change_weights()
            engine.check()
            engine.step()
        engine.run()
        counters = engine.scheduler.counters
        for event in ("offloads", "restores", "failed_swaps", "forks"):
            happened[event] += getattr(counters, event)
        happened["computed again"] += counters.preemptions - counters.offloads
    assert min(happened.values()) > 20, happened
