"""Pinned prefixes: they stay, whatever comes, until somebody gives them up."""

from __future__ import annotations

import pytest

from cbtriton.cache_layout import GroupKind
from cbtriton.request import Request, RequestStatus, SamplingParams, StopRules

P = 4
PREFIX = [1, 2, 3, 4, 5, 6, 7, 8]
DEPTHS = pytest.mark.parametrize("depth", [0, 1])
# All layers alike; layers with windows; and both.
KINDS = pytest.mark.parametrize(
    "kinds",
    [(GroupKind(0, P, 1),), (GroupKind(5, P, 1),), (GroupKind(5, P, 2), GroupKind(0, P, 1))],
    ids=["full", "window", "both"],
)


def flood(engine, name: str, number: int = 6) -> None:
    """Runs requests that want all of the cache, one after the other."""
    for index in range(number):
        length = engine.capacity - 4
        engine.add(f"{name}{index}", [(index + position) % 9 + 1 for position in range(length)], max_new_tokens=4)
    engine.run()


@KINDS
@DEPTHS
def test_a_pinned_prefix_stays_while_everything_else_is_evicted(simulation, kinds, depth):
    engine = simulation.SimulatedEngine(num_blocks=24, kinds=kinds, depth=depth)
    assert engine.pin("pin", PREFIX)
    engine.run()
    assert engine.blocks.num_pinned == engine.layout.pinned_blocks(len(PREFIX)) == engine.pins["pin"]
    flood(engine, "other")
    late = engine.add("late", [*PREFIX, 9])
    engine.run()
    assert late.num_cached == len(PREFIX)


@KINDS
def test_what_is_not_pinned_any_more_is_evicted_when_memory_is_needed(simulation, kinds):
    engine = simulation.SimulatedEngine(num_blocks=24, kinds=kinds)
    assert engine.pin("pin", PREFIX)
    engine.run()
    engine.unpin("pin")
    assert (engine.blocks.num_pinned, engine.blocks.num_in_use) == (0, 0)
    soon = engine.add("soon", [*PREFIX, 9])
    engine.run()
    flood(engine, "other")
    late = engine.add("late", [*PREFIX, 9])
    engine.run()
    assert (soon.num_cached, late.num_cached) == (len(PREFIX), 0)


@DEPTHS
def test_a_prefix_that_is_given_up_before_it_was_computed_is_not_kept(simulation, depth):
    engine = simulation.SimulatedEngine(depth=depth)
    assert engine.pin("pin", PREFIX)
    engine.step()
    engine.unpin("pin")
    engine.run()
    assert engine.blocks.num_pinned == engine.blocks.num_in_use == 0


@DEPTHS
@KINDS
def test_other_weights_compute_it_again_before_anything_that_waits(simulation, kinds, depth):
    engine = simulation.SimulatedEngine(num_blocks=30, kinds=kinds, depth=depth)
    assert engine.pin("pin", PREFIX)
    engine.run()
    engine.change_weights()
    assert engine.blocks.num_pinned == 0
    late = engine.add("late", [*PREFIX, 9])
    engine.run()
    # Both were admitted in one step, the pin first.
    assert late.num_cached == len(PREFIX)
    assert engine.blocks.num_pinned == engine.pins["pin"]


@DEPTHS
def test_a_pin_that_runs_when_weights_change_runs_again(simulation, depth):
    engine = simulation.SimulatedEngine(max_batch_tokens=3, depth=depth)
    assert engine.pin("pin", PREFIX)
    engine.step()
    engine.change_weights()
    engine.run()
    late = engine.add("late", [*PREFIX, 9])
    engine.run()
    assert late.num_cached == len(PREFIX)


@DEPTHS
def test_a_pin_that_leaves_too_little_for_a_request_fails_alone_and_says_so(simulation, depth):
    engine = simulation.SimulatedEngine(num_blocks=8, depth=depth)
    outputs = []
    deliver = engine._deliver
    engine._deliver = lambda news: (outputs.extend(news), deliver(news))
    large = engine.add("large", [9] * 20, max_new_tokens=10)
    engine.pins["pin"] = 0  # past the check that a manager makes
    engine.scheduler.add(Request("pin", PREFIX, SamplingParams(), StopRules(1), is_pin=True))
    engine.run()
    (pin,) = [output for output in outputs if output.request_id == "pin"]
    assert (pin.status, pin.finish_reason) == (RequestStatus.FAILED, "error")
    assert pin.error.startswith(
        "pinning this prefix would leave 6 of 8 blocks, and request 'large' needs 8; pin it when"
    )
    assert large.status == RequestStatus.FINISHED
    assert engine.blocks.num_pinned == 0


def test_prefixes_that_begin_alike_share_what_they_share(simulation):
    engine = simulation.SimulatedEngine()
    assert engine.pin("pin one", PREFIX)
    assert engine.pin("pin more", [*PREFIX, 1, 1, 1, 1])
    engine.run()
    assert engine.blocks.num_pinned == 3
    engine.unpin("pin one")
    assert engine.blocks.num_pinned == 3
    engine.unpin("pin more")
    assert engine.blocks.num_pinned == 0


def test_a_pin_of_one_tenant_is_none_of_the_others(simulation):
    engine = simulation.SimulatedEngine()
    assert engine.pin("pin", PREFIX, salt="tenant")
    engine.run()
    requests = [engine.add(f"of {salt}", [*PREFIX, 9], salt=salt) for salt in ("tenant", "other", None)]
    engine.run()
    assert [request.num_cached for request in requests] == [len(PREFIX), 0, 0]


def test_the_safety_margin_counts_what_is_not_pinned(simulation):
    """Three of four blocks are pinned: half of all is never free, and half of the others must be."""
    engine = simulation.SimulatedEngine(num_blocks=40, safety_margin=0.5)
    assert engine.pin("pin", [1] * (30 * P))
    engine.run()
    engine.add("small", [2, 3], max_new_tokens=2)
    engine.run()
