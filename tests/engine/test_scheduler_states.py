"""Random sequences of whatever can happen to scheduler and block manager, in an engine that checks each step."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cbtriton.scheduler import FIFO, PREFILL_FIRST, _Draft

# Few different beginnings, so that prefixes meet often.
BEGINNINGS = ([1] * 64, [1] * 9 + [2] * 55, [3, 4] * 32)
SALTS = st.sampled_from([None, None, None, "tenant"])


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, cancels, steps and resets in any order, in caches of a few blocks."""

    def __init__(self, simulation: ModuleType) -> None:
        super().__init__()
        self.simulation = simulation
        self.num_added = 0

    @initialize(
        num_blocks=st.integers(1, 14),
        page_size=st.sampled_from([1, 2, 3, 4, 4, 5]),
        max_batch_tokens=st.integers(1, 32),
        max_requests=st.sampled_from([1, 2, 4, 6, 8]),
        safety_margin=st.sampled_from([0.0, 0.0, 0.15, 1.0]),
        max_decode_blocks=st.sampled_from([0, 2, 100]),
        share_blocks=st.sampled_from([True, True, True, False]),
        policy=st.sampled_from([FIFO, PREFILL_FIRST]),
        depth=st.integers(0, 1),
        num_host_blocks=st.sampled_from([0, 2, 5, 100]),
        share_of_failures=st.sampled_from([0.0, 0.0, 0.3]),
        seed=st.integers(0, 100),
    )
    def build(self, share_of_failures, seed, **sizes) -> None:
        failures = random.Random(seed)
        self.engine = self.simulation.SimulatedEngine(
            **sizes, copy_fails=lambda _: failures.random() < share_of_failures
        )

    def _open_ids(self) -> list[str]:
        return [request.request_id for request in self.engine.requests if not request.is_terminal]

    @rule(
        beginning=st.sampled_from(BEGINNINGS),
        length=st.one_of(st.integers(1, 8), st.integers(1, 40)),
        ending=st.lists(st.integers(1, 4), max_size=3),
        max_new_tokens=st.integers(1, 30),
        number=st.integers(1, 4),
        size=st.sampled_from([1, 1, 1, 2, 4]),
        seed=st.sampled_from([0, 0, 1, 2]),
        eos=st.booleans(),
        salt=SALTS,
        has_functions=st.sampled_from([False, False, True]),
        is_scored=st.sampled_from([False, False, True]),
    )
    def add(self, beginning, length, ending, max_new_tokens, number, size, **options) -> None:
        capacity = self.engine.capacity
        prompt = (beginning[:length] + ending)[:capacity]
        max_new_tokens = min(max_new_tokens, capacity - len(prompt) + 1)
        for _ in range(number):
            self.engine.add_family(f"r{self.num_added}", prompt, max_new_tokens, size, **options)
            self.num_added += 1

    @rule(length=st.integers(1, 12))
    def add_one_that_breaks(self, length) -> None:
        prompt = BEGINNINGS[0][: min(length, self.engine.capacity)]
        self.engine.add(f"r{self.num_added}", prompt, 1, seed=self.simulation.BROKEN_SEED)
        self.num_added += 1

    @precondition(lambda self: self._open_ids())
    @rule(data=st.data())
    def cancel(self, data) -> None:
        request_id = data.draw(st.sampled_from(self._open_ids()))
        ended = [output.request_id for output in self.engine.cancel(request_id)]
        assert ended.count(request_id) == 1
        assert self.engine.cancel(request_id) == []

    @precondition(lambda self: self.engine.finals)
    @rule(data=st.data())
    def use_an_id_again(self, data) -> None:
        """A new request under the name of one that has ended, whose children may still wait."""
        request_id = data.draw(st.sampled_from([output.request_id for output in self.engine.finals]))
        if request_id not in self._open_ids():
            self.engine.add(request_id, BEGINNINGS[2][: min(7, self.engine.capacity)], 1)

    @rule(num_steps=st.integers(1, 12))
    def step(self, num_steps) -> None:
        for _ in range(num_steps):
            self.engine.step()

    @precondition(lambda self: self.engine.scheduler.num_running > 1)
    @rule(data=st.data())
    def preempt(self, data) -> None:
        """Any request but the oldest one, which always gets on."""
        newer = list(self.engine.scheduler._running.values())[1:]
        self.engine.scheduler._preempt(data.draw(st.sampled_from(newer)), _Draft(budget=0))

    @rule()
    def change_weights(self) -> None:
        self.engine.change_weights()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run()
        blocks = self.engine.blocks
        blocks.reset_prefix_cache()
        assert blocks.num_cached == 0
        assert blocks.num_available == blocks.num_blocks
        self.engine.check()


def run_machines(simulation: ModuleType, num_machines: int, num_rules: int, *, is_random: bool) -> None:
    run_state_machine_as_test(
        lambda: SchedulerMachine(simulation),
        settings=settings(
            max_examples=num_machines,
            stateful_step_count=num_rules,
            derandomize=not is_random,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_sequence_of_events_gives_each_request_the_tokens_it_gets_alone(simulation: ModuleType) -> None:
    run_machines(simulation, 300, 30, is_random=False)


@pytest.mark.slow
def test_other_sequences_in_each_run_do_so_too(simulation: ModuleType) -> None:
    run_machines(simulation, 3000, 60, is_random=True)
