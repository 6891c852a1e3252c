"""A step in flight while the next one is planned changes no token, whatever happens between launch and commit.

The tests step the engine themselves, so that a cancellation or a preemption comes at the same moment in each run: in an
asynchronous engine every moment between two steps lies between the launch of a step and its commit.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from cbtriton import GenerationOutput, RequestStatus
from cbtriton.engine import Engine
from cbtriton.manager import ContinuousBatchingManager
from cbtriton.plan import BatchPlan
from cbtriton.request import ProcessorParams, Request, SamplingParams, StopRules
from cbtriton.scheduler import _Draft

VOCAB_SIZE = 61
MAX_NEW = 12
SEEDS_PER_TEST = 10
NUM_SEEDS, NUM_QUICK_SEEDS = 300, 60

GREEDY = SamplingParams()
DRAWN = (
    SamplingParams(temperature=1.3),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(processors=ProcessorParams(repetition_penalty=1.8, frequency_penalty=0.5, no_repeat_ngram_size=2)),
    SamplingParams(temperature=1.2, typical_p=0.8, top_h=0.9, processors=ProcessorParams(presence_penalty=1.0)),
)


@dataclass(frozen=True, slots=True)
class Planned:
    """A request of a case.

    Attributes:
        request_id: Its id.
        prompt: Its prompt.
        sampling: How it draws.
        stop: When it ends.
        arrival: The step before which it is added.
        cancel: The step before which it is cancelled, if it still runs.
        streaming: Whether it shows every token.
        parent_id: Whose prompt it forks.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stop: StopRules
    arrival: int = 0
    cancel: int | None = None
    streaming: bool = False
    parent_id: str | None = None

    def request(self) -> Request:
        return Request(
            self.request_id,
            list(self.prompt),
            self.sampling,
            self.stop,
            streaming=self.streaming,
            parent_id=self.parent_id,
        )


@dataclass(frozen=True, slots=True)
class Course:
    """What happens to the requests of a case, beside their own arrivals and cancellations."""

    preempt_every: int
    pauses: tuple[int, ...]
    victims_seed: int


class Stepper:
    """An engine that is stepped by the test.

    Attributes:
        engine: The engine.
        plans: What it launched.
        outputs: What callers of its requests would see, in order.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.plans: list[BatchPlan] = []
        self.outputs: list[GenerationOutput] = []
        launch = engine._runner.launch

        def launch_and_note(plan: BatchPlan, bucket: Any, name: str) -> Any:
            self.plans.append(plan)
            return launch(plan, bucket, name)

        engine._runner.launch = launch_and_note

    def run(self, requests: list[Planned], course: Course | None = None) -> dict[str, GenerationOutput]:
        """Steps until all requests have ended; their final outputs."""
        self.plans.clear()
        self.outputs.clear()
        victims = random.Random(course.victims_seed) if course else None
        arrivals = sorted(requests, key=lambda request: request.arrival)
        step = 0
        while arrivals or self.engine.has_requests:
            while arrivals and arrivals[0].arrival <= step:
                self.engine.add(arrivals.pop(0).request())
            for request in requests:
                if request.cancel == step:
                    self.outputs += self.engine.cancel(request.request_id)
            if course and step in course.pauses:
                self._pause()
            if course and step % course.preempt_every == 0:
                self._preempt_one(victims)
            self.outputs += self.engine.step()
            self.engine._blocks.check_invariants()
            self.engine._host_blocks.check_invariants()
            step += 1
            assert step < 3000, "the requests do not get on"
        self.outputs += self.engine.drain()
        finals = [output for output in self.outputs if output.is_finished()]
        assert Counter(output.request_id for output in finals) == Counter(r.request_id for r in requests)
        assert (self.engine.stats().blocks_in_use, self.engine.stats().host_blocks_in_use) == (0, 0)
        return {output.request_id: output for output in finals}

    def _pause(self) -> None:
        """As the manager does it."""
        self.outputs += self.engine.drain()
        self.engine.close()
        self.engine.attach()

    def _preempt_one(self, victims: random.Random) -> None:
        """Takes the blocks of any request but the oldest, which always gets on, with its token in flight."""
        newer = list(self.engine._scheduler._running.values())[1:]
        if newer:
            self.engine._scheduler._preempt(victims.choice(newer), _Draft(budget=0))


@contextmanager
def stepped(tools: Any, model: Any, **config: Any) -> Iterator[Stepper]:
    """An engine as a manager makes it, whose memory answers NaN and an impossible id where nobody wrote."""
    manager = ContinuousBatchingManager(model, tools.options(), tools.small(**config), None, {"default": "reference"})
    try:
        manager.warmup()
        for layer in (*manager._engine._cache.pools, *manager._engine._runner._host_cache._pools):
            layer.key.fill_(float("nan"))
            layer.value.fill_(float("nan"))
        manager._engine._runner._table.token_table.fill_(VOCAB_SIZE)
        yield Stepper(manager._engine)
    finally:
        manager.destroy()


@pytest.fixture(scope="module")
def tiny(tools) -> Any:
    return tools.build(tools.llama_config(hidden_size=32, num_hidden_layers=1, vocab_size=VOCAB_SIZE))


@pytest.fixture(scope="module")
def calm(tools) -> Iterator[Stepper]:
    """A synchronous engine with room for everybody, on the same weights."""
    twin = tools.build(tools.llama_config(hidden_size=32, num_hidden_layers=1, vocab_size=VOCAB_SIZE))
    with stepped(tools, twin, num_blocks=300, use_async_batching=False) as stepper:
        yield stepper


def test_the_next_step_is_planned_while_one_runs(tools, tiny):
    may_run = threading.Event()

    def hold(*_: object) -> None:
        assert may_run.wait(tools.patience), "nothing else happens while the model waits"

    with stepped(tools, tiny, use_async_batching=True) as stepper:
        hook = tiny.register_forward_pre_hook(hold)
        stepper.engine.add(Planned("a", (1, 2, 3), GREEDY, StopRules(3)).request())
        assert stepper.engine.step() == []
        second = tools.in_thread(stepper.engine.step)
        tools.wait_until(lambda: len(stepper.plans) == 2)
        # The second step runs the token that the first one has yet to sample.
        assert [(row.start, row.count) for plan in stepper.plans for row in plan.rows] == [(0, 3), (3, 1)]
        assert stepper.engine.stats().generated_tokens == 0
        may_run.set()
        second()
        hook.remove()
        assert stepper.engine.stats().generated_tokens == 1


# ---------------------------------------------------------------------------------------------- random courses


def random_requests(rng: random.Random) -> list[Planned]:
    """Families of one to three, some with a common beginning, that go on to their limit."""
    beginning = rng.choices(range(VOCAB_SIZE), k=20)
    requests = []
    for index in range(rng.randint(2, 5)):
        own = rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 20))
        prompt = tuple(beginning[: rng.choice((0, 0, 9, 20))] + own)
        sampling, stop = rng.choice((GREEDY, *DRAWN)), StopRules(rng.randint(1, MAX_NEW))
        arrival, streaming = rng.choice((0, 0, rng.randint(1, 12))), rng.random() < 0.5
        for member in range(rng.choice((1, 1, 2, 3))):
            request_id, parent_id = (f"r{index}__child#{member - 1}", f"r{index}") if member else (f"r{index}", None)
            seeded = replace(sampling, seed=rng.getrandbits(60))
            requests.append(Planned(request_id, prompt, seeded, stop, arrival, None, streaming, parent_id))
    return requests


def random_ends(rng: random.Random, requests: list[Planned], answers: dict[str, list[int]]) -> list[Planned]:
    """Stop rules that the parents' answers meet, some with their first token, and cancellations of one in five."""
    stops: dict[str, StopRules] = {}
    ending = []
    for request in requests:
        if request.parent_id is None:
            answer = answers[request.request_id]
            first = rng.randrange(len(answer))
            eos, sequence = frozenset({rng.choice((answer[0], answer[first]))}), tuple(answer[first : first + 2])
            stops[request.request_id] = rng.choice(
                (
                    request.stop,
                    replace(request.stop, eos_token_ids=eos),
                    replace(request.stop, stop_sequences=(sequence,)),
                )
            )
        cancel = rng.randint(1, 25) if rng.random() < 0.2 else None
        ending.append(replace(request, stop=stops[request.parent_id or request.request_id], cancel=cancel))
    return ending


def random_config(rng: random.Random, requests: list[Planned]) -> dict[str, Any]:
    """A small engine that just holds the largest request, or a little more."""
    page_size = rng.choice((4, 5, 7, 16))
    longest = max(len(request.prompt) + request.stop.max_new_tokens - 1 for request in requests)
    return {
        "page_size": page_size,
        "num_blocks": -(-longest // page_size) + rng.randint(0, 6),
        "max_batch_tokens": rng.randint(4, 40),
        "max_requests_per_batch": rng.choice((1, 2, 3, 8)),
        "scheduler_type": rng.choice(("fifo", "prefill_first")),
        "safety_margin": rng.choice((0.0, None)),
        "allow_block_sharing": rng.random() < 0.7,
        "max_blocks_per_request": rng.choice((None, None, 0)),
        "q_padding_interval_size": (padding := rng.choice((0, 0, 8))),
        "kv_padding_interval_size": 2 * padding,
        "cpu_offload_space": rng.choice((0.0, 5e-6, 1e-4)),
    }


def cut(answer: list[int], stop: StopRules) -> tuple[list[int], str]:
    """What is left of an answer under stop rules, and why it ends there."""
    for end in range(1, len(answer) + 1):
        is_stop_sequence = any(tuple(answer[:end][-len(words) :]) == words for words in stop.stop_sequences)
        if answer[end - 1] in stop.eos_token_ids or is_stop_sequence:
            return answer[:end], "eos"
    return answer, "length"


def check(
    stepper: Stepper, requests: list[Planned], finals: dict[str, GenerationOutput], answers: dict[str, list[int]]
):
    """Each request got its answer or, where it was cancelled, the beginning of it, and nobody anything else."""
    for request in requests:
        expected, reason = cut(answers[request.request_id], request.stop)
        final = finals[request.request_id]
        seen = [o.generated_tokens for o in stepper.outputs if o.request_id == request.request_id]
        if final.status == RequestStatus.CANCELLED:
            assert final.generated_tokens == expected[: len(final.generated_tokens)] != expected
            seen.pop()
        else:
            assert (final.generated_tokens, final.finish_reason) == (expected, reason)
        lengths = range(1, len(seen) + 1) if request.streaming else [len(expected)] * len(seen)
        assert seen == [expected[:length] for length in lengths]
    # The last token of an answer never runs.
    longest = {request.request_id: len(request.prompt) + request.stop.max_new_tokens - 1 for request in requests}
    assert all(row.start + row.count <= longest[row.request_id] for plan in stepper.plans for row in plan.rows)
    num_sampled = sum(row.samples for plan in stepper.plans for row in plan.rows)
    num_delivered = sum(len(final.generated_tokens) for final in finals.values())
    stats = stepper.engine.stats()
    assert (stats.generated_tokens, stats.dropped_tokens) == (num_delivered, num_sampled - num_delivered)


@pytest.mark.parametrize(
    "first_seed",
    [
        pytest.param(seed, marks=[pytest.mark.slow] * (seed >= NUM_QUICK_SEEDS))
        for seed in range(0, NUM_SEEDS, SEEDS_PER_TEST)
    ],
)
def test_any_course_of_events_gives_the_tokens_of_a_calm_synchronous_engine(tools, tiny, calm, first_seed):
    happened: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        rng = random.Random(seed)
        requests = random_requests(rng)
        answers = {i: o.generated_tokens for i, o in calm.run([replace(r, arrival=0) for r in requests]).items()}
        requests = random_ends(rng, requests, answers)
        config = random_config(rng, requests)
        pauses = tuple(rng.sample(range(30), k=rng.choice((0, 1, 2))))
        course = Course(preempt_every=1 + seed % 7, pauses=pauses, victims_seed=seed)
        for is_async in (False, True):
            with stepped(tools, tiny, use_async_batching=is_async, **config) as stepper:
                finals = stepper.run(requests, course)
                check(stepper, requests, finals, answers)
                stats = stepper.engine.stats()
            happened["preempted"] += stats.preemptions
            happened["forked"] += stats.forks
            happened["restored"] += stats.restores
            happened["computed again"] += stats.preemptions - stats.restores
            happened["cancelled"] += stats.requests_cancelled
            happened["dropped in an asynchronous engine"] += is_async and stats.dropped_tokens
            happened["dropped in a synchronous engine"] += not is_async and stats.dropped_tokens
            happened["ended at once"] += sum(
                (len(final.generated_tokens), final.finish_reason) == (1, "eos") for final in finals.values()
            )
    assert happened.pop("dropped in a synchronous engine") == 0
    assert min(happened.values()) > 0, happened
