"""Replays a workload without a model: which steps, buckets and preemptions an engine would come to.

The scheduler, the block manager and the padding policy are the engine's own, so the steps are the engine's own too.
Two things are taken from the trace that an engine only finds out: how many tokens each request generates, and which.
A trace may leave out which; then every request generates tokens that nobody else has. That is exact unless generated
text would be found in the prefix cache by another request: one with the same prompt that answers the same, or one
whose prompt goes on from an answer. Forks (`num_return_sequences`) and cancellations are not replayed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from cbtriton.block_manager import BlockManager
from cbtriton.config import EngineConfig, ModelFacts
from cbtriton.padding import Bucket, PaddingPolicy
from cbtriton.plan import BatchPlan, Idle, Path, SampledToken, ScheduledRow, StepResult
from cbtriton.request import Request, SamplingParams, StopRules
from cbtriton.scheduler import SCHEDULERS, Scheduler, SchedulerLimits
from cbtriton.stats import waste
from cbtriton.stopping import StopDecision
from cbtriton.swap import HostBlocks

# The allocator of CUDA devices gives out multiples of this.
_ALLOCATION_BYTES = 512
_ENDS, _GOES_ON = StopDecision("length", 0), StopDecision(None, 0)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        prompt_ids: Its prompt, not empty.
        num_generated: Tokens that it generates, at least 1.
        generated_ids: These tokens; empty where nobody knows them.
        arrival: It is there before the engine plans this step, counted from 0. Nothing happens while an engine has no
            requests: the next one then arrives at once, and those after it keep their distance.

    Raises:
        ValueError: The prompt is empty, or a number is out of range.
    """

    prompt_ids: tuple[int, ...]
    num_generated: int
    generated_ids: tuple[int, ...] = ()
    arrival: int = 0

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("a prompt must have at least one token, got none; give its ids or use invented_prompts")
        if self.num_generated < 1:
            raise ValueError(f"num_generated must be at least 1, got {self.num_generated}")
        if self.generated_ids and len(self.generated_ids) != self.num_generated:
            raise ValueError(
                f"generated_ids must be empty or have num_generated={self.num_generated} tokens, "
                f"got {len(self.generated_ids)}"
            )
        if self.arrival < 0:
            raise ValueError(f"arrival must be at least 0, got {self.arrival}")


def trace_of(
    prompts: Iterable[Sequence[int]], num_generated: Iterable[int], arrivals: Iterable[int] = ()
) -> tuple[TraceRequest, ...]:
    """The trace of a workload.

    Args:
        prompts: Token ids of each prompt, such as `Workload.prompts` or `invented_prompts(…)`.
        num_generated: Tokens that each one generates, such as `Workload.max_new_tokens`.
        arrivals: When each one arrives, see `TraceRequest`; empty: all before the first step.

    Raises:
        ValueError: The lengths differ, or a value is out of range.
    """
    prompts, num_generated = tuple(prompts), tuple(num_generated)
    arrivals = tuple(arrivals) or (0,) * len(prompts)
    if not len(prompts) == len(num_generated) == len(arrivals):
        raise ValueError(
            f"num_generated and arrivals must have one entry for each prompt, got {len(num_generated)} and "
            f"{len(arrivals)} for {len(prompts)} prompts"
        )
    rows = zip(prompts, num_generated, arrivals, strict=True)
    return tuple(TraceRequest(tuple(prompt), number, arrival=arrival) for prompt, number, arrival in rows)


def invented_prompts(lengths: Iterable[int], shared_prefix: int = 0) -> tuple[tuple[int, ...], ...]:
    """Prompts of which only the lengths are known.

    Args:
        lengths: Tokens of each prompt, the shared prefix included.
        shared_prefix: All prompts begin with the same tokens, so many of them; behind these no two are alike.

    Returns:
        Token ids of each prompt. They are negative where they belong to one prompt alone.
    """
    prefix = tuple(range(shared_prefix))
    return tuple(
        prefix[:length] + (-ordinal,) * (length - shared_prefix) for ordinal, length in enumerate(lengths, start=1)
    )


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """What one step held; the counterpart of `StepRecord`, without times.

    Attributes:
        bucket: The sizes that it runs at.
        num_rows: Requests in it.
        num_tokens: Query tokens in it.
        kv_tokens: Tokens of the longest context.
        num_preempted: Requests that lost their blocks while it was planned.
        blocks_in_use: Blocks referenced by requests.
        num_waiting: Requests not running.
    """

    bucket: Bucket
    num_rows: int
    num_tokens: int
    kv_tokens: int
    num_preempted: int
    blocks_in_use: int
    num_waiting: int

    @property
    def padding_tokens(self) -> int:
        """Query tokens added to reach the bucket's size."""
        return self.bucket.num_tokens - self.num_tokens

    @property
    def padding_kv_tokens(self) -> int:
        """Tokens that the bucket's longest context may have beyond the real one."""
        return self.bucket.max_kv - self.kv_tokens


@dataclass(frozen=True, slots=True)
class Simulation:
    """What `simulate` found.

    Attributes:
        steps: The steps in order.
        padded_paths: The paths whose steps are padded, and so have buckets worth counting.
        prefix_cached_tokens: Tokens that the prefix cache provided.
        offloads: How often a preempted request's blocks went to host memory.
        restored_tokens: Tokens that came back from there.
        num_blocks: Blocks of the cache.
    """

    steps: tuple[SimulatedStep, ...]
    padded_paths: tuple[Path, ...]
    prefix_cached_tokens: int
    offloads: int
    restored_tokens: int
    num_blocks: int

    @property
    def buckets(self) -> dict[Bucket, int]:
        """Number of steps in each bucket of the padded paths, in order of first use."""
        return dict(Counter(step.bucket for step in self.steps if step.bucket.path in self.padded_paths))

    @property
    def padding_waste(self) -> float:
        """(padded - real) / padded of the query tokens over all steps, 0…1."""
        return _padding_waste(self.steps)

    @property
    def kv_padding_waste(self) -> float:
        """(padded - real) / padded of the longest contexts over all steps, 0…1."""
        return _kv_padding_waste(self.steps)

    @property
    def preemptions(self) -> int:
        """How often a request lost its blocks."""
        return sum(step.num_preempted for step in self.steps)

    @property
    def peak_blocks(self) -> int:
        """Most blocks that requests held in any step."""
        return max((step.blocks_in_use for step in self.steps), default=0)

    def num_variants(self, path: Path) -> int:
        """Variants that compiling the path for fixed sizes makes, and graphs that capturing its greedy steps makes.

        Steps with a row that is not greedy have a graph of their own in each bucket.
        """
        return sum(bucket.path == path for bucket in self.buckets)

    def graph_bytes(self, facts: ModelFacts, has_processors: bool = False) -> int:
        """Device memory that graphs of all buckets take; see the function of this name."""
        return graph_bytes(self.buckets, facts, has_processors)

    def to_dict(self) -> dict[str, Any]:
        """The totals as plain values that `json.dumps` accepts."""
        return {
            "steps": len(self.steps),
            "buckets": {bucket.name: count for bucket, count in self.buckets.items()},
            "variants": {path: self.num_variants(path) for path in self.padded_paths},
            "padding_waste": self.padding_waste,
            "kv_padding_waste": self.kv_padding_waste,
            "preemptions": self.preemptions,
            "offloads": self.offloads,
            "restored_tokens": self.restored_tokens,
            "peak_blocks": self.peak_blocks,
            "num_blocks": self.num_blocks,
            "prefix_cached_tokens": self.prefix_cached_tokens,
        }

    def table(self) -> str:
        """One line for each bucket, most used first, and one for all steps, with aligned columns."""
        by_bucket: dict[str, list[SimulatedStep]] = {}
        for step in self.steps:
            name = step.bucket.name if step.bucket.path in self.padded_paths else f"{step.bucket.path}: exact"
            by_bucket.setdefault(name, []).append(step)
        most_used = sorted(by_bucket.items(), key=lambda item: -len(item[1]))
        lines = [("bucket", "steps", "tokens", "waste", "kv waste")]
        for name, steps in [*most_used, ("all", list(self.steps))]:
            tokens = sum(step.num_tokens for step in steps)
            wastes = f"{_padding_waste(steps):.1%}", f"{_kv_padding_waste(steps):.1%}"
            lines.append((name, f"{len(steps):,}", f"{tokens:,}", *wastes))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines)


def simulate(config: EngineConfig, trace: Sequence[TraceRequest]) -> Simulation:
    """The steps of an engine of this configuration that is given the trace's requests, in their order.

    Requests that arrive at the same time are added in the order of the trace.

    Args:
        config: What `cbtriton.resolve.resolve` made, or `ContinuousBatchingManager.engine_config`.
        trace: The requests.

    Raises:
        ValueError: A request does not fit the cache or the model.
    """
    answers = {str(index): _Answer.of(index, entry) for index, entry in enumerate(trace)}
    blocks = BlockManager(config.num_blocks, config.cache_layout.kinds, config.share_blocks)
    scheduler = Scheduler(
        SCHEDULERS.get(config.scheduler_type),
        blocks,
        HostBlocks(config.num_host_blocks),
        SchedulerLimits.of(config),
        _stop_at_the_length,
    )
    padding = PaddingPolicy.of(config)
    requests = [(entry.arrival, _request(config, index, entry)) for index, entry in enumerate(trace)]
    arrivals = deque(sorted(requests, key=itemgetter(0)))
    in_flight: deque[BatchPlan] = deque()
    steps: list[SimulatedStep] = []
    num_skipped = 0
    while arrivals or scheduler.has_requests:
        if not scheduler.has_requests:
            num_skipped = arrivals[0][0] - len(steps)
        while arrivals and arrivals[0][0] <= len(steps) + num_skipped:
            scheduler.add(arrivals.popleft()[1])
        num_preempted = scheduler.counters.preemptions
        plan = scheduler.schedule()
        if isinstance(plan, BatchPlan):
            in_flight.append(plan)
            steps.append(
                SimulatedStep(
                    bucket=padding.bucket(plan),
                    num_rows=len(plan.rows),
                    num_tokens=plan.num_tokens,
                    kv_tokens=plan.max_seq_len,
                    num_preempted=scheduler.counters.preemptions - num_preempted,
                    blocks_in_use=blocks.num_in_use,
                    num_waiting=scheduler.num_waiting,
                )
            )
        if in_flight and (isinstance(plan, Idle) or len(in_flight) > config.async_depth):
            oldest = in_flight.popleft()
            sampled = (answers[row.request_id].token(row) for row in oldest.rows if row.samples)
            scheduler.commit(oldest, StepResult(tuple(sampled)))
    counters = scheduler.counters
    return Simulation(
        tuple(steps),
        padding.padded_paths,
        prefix_cached_tokens=counters.prefix_cached_tokens,
        offloads=counters.offloads,
        restored_tokens=counters.restored_tokens,
        num_blocks=config.num_blocks,
    )


def graph_bytes(buckets: Iterable[Bucket], facts: ModelFacts, has_processors: bool = False) -> int:
    """Device memory, in bytes, that captured graphs of these buckets take.

    Each bucket has one for greedy steps, one for others, and one for steps with logits processors where there may be
    some. A graph keeps its results to itself: for each sampling row a token id, a log-probability and an outcome, each
    column an allocation of its own. Ids, positions and slots (24 bytes a token), logits (of
    `facts.logits_dtype_bytes`), what processors make of them (8 bytes for each) and activations live in memory that all
    graphs share, since one runs at a time: it is as large as the largest needs. What the driver needs to launch a graph
    is not counted.

    Args:
        buckets: The buckets.
        facts: The model's sizes.
        has_processors: Whether requests may have logits processors (`EngineConfig.has_processors`).
    """
    results, shared = 0, 0
    for bucket in buckets:
        results += (2 + has_processors) * sum(_allocated(size * bucket.num_samples) for size in (8, 4, 4))
        logits = bucket.num_samples * facts.vocab_size * (facts.logits_dtype_bytes + 8 * has_processors)
        shared = max(shared, logits + bucket.num_tokens * (24 + facts.activation_bytes_per_token))
    return results + shared


def _allocated(num_bytes: int) -> int:
    return -(-num_bytes // _ALLOCATION_BYTES) * _ALLOCATION_BYTES


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the model answers to one prompt."""

    prompt_length: int
    tokens: tuple[SampledToken, ...]

    @classmethod
    def of(cls, index: int, entry: TraceRequest) -> _Answer:
        # The same id at each position is enough to be nobody else's.
        ids = entry.generated_ids or (-index - 1,)
        tokens = tuple(SampledToken(token_id, None) for token_id in ids)
        return cls(len(entry.prompt_ids), tokens * (entry.num_generated // len(tokens)))

    def token(self, row: ScheduledRow) -> SampledToken:
        """What the row samples; by position, since a preempted request samples its latest token again."""
        return self.tokens[row.start + row.count - self.prompt_length]


def _request(config: EngineConfig, index: int, entry: TraceRequest) -> Request:
    # The last token of an answer never runs.
    longest = len(entry.prompt_ids) + entry.num_generated - 1
    if longest > config.max_model_len:
        raise ValueError(
            f"request {index} of the trace needs {longest} tokens in the cache, max_model_len={config.max_model_len} "
            "allows fewer; shorten it or raise num_blocks"
        )
    return Request(str(index), list(entry.prompt_ids), SamplingParams(), StopRules(entry.num_generated, frozenset()))


def _stop_at_the_length(request: Request) -> StopDecision:
    return _ENDS if len(request.generated) >= request.stop.max_new_tokens else _GOES_ON


def _padding_waste(steps: Sequence[SimulatedStep]) -> float:
    return waste(sum(step.padding_tokens for step in steps), sum(step.num_tokens for step in steps))


def _kv_padding_waste(steps: Sequence[SimulatedStep]) -> float:
    return waste(sum(step.padding_kv_tokens for step in steps), sum(step.kv_tokens for step in steps))
