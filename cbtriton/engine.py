"""The engine: scheduler, memory, model and sampler, stepped by one thread.

Knows no threads, queues or callers: `ContinuousBatchingManager` drives it from its background thread, tests drive it
directly.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cbtriton.attention import PagedAttention
from cbtriton.block_manager import BlockManager
from cbtriton.config import EngineConfig, WorkloadHints
from cbtriton.distributed import Decisions, Ranks
from cbtriton.graphs import Capturer, GraphStore
from cbtriton.kernel_set import KernelSet
from cbtriton.kv_cache import HostCache, KVCache
from cbtriton.model_adapter import Belongings, ModelAdapter, ModelLayout, UnsupportedModelError
from cbtriton.model_runner import InFlightStep, ModelRunner
from cbtriton.own_cache import OwnCaches
from cbtriton.padding import Bucket, PaddingPolicy
from cbtriton.plan import BatchPlan, BlockTableUpdate, Path, RowStart, ScheduledRow, StepResult
from cbtriton.ranges import ranges_for
from cbtriton.recurrent import RecurrentStates
from cbtriton.request import GenerationOutput, Request, SamplingParams
from cbtriton.request_table import RequestTable
from cbtriton.row_states import RequestStates
from cbtriton.scheduler import SCHEDULERS, Scheduler, SchedulerLimits
from cbtriton.stats import EngineStats, StepRecord
from cbtriton.stopping import StopDecision
from cbtriton.swap import HostBlocks

_logger = logging.getLogger(__name__)

# Enough for hours of decoding; older records are dropped so that an engine may run for weeks.
MAX_STEP_RECORDS = 100_000
# Captures of one path that a warm-up waits for at most.
MAX_PREPARED_CAPTURES = 256


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step in flight with what was noted about it so far."""

    step: InFlightStep
    record: StepRecord
    launch_time: float


class Engine:
    """Continuous batching of one model.

    The model is attached on construction; `detach` gives it back, and `close` ends the engine.

    Args:
        adapter: The model.
        layout: What `adapter.inspect_layout` found.
        config: Resolved configuration.
        kernels: The chosen kernels.
        stop_check: Says after each new token whether its request ends.
        capturer: Captures steps; None where the device has no graphs.
        ranks: The processes that run the model together.

    Raises:
        UnsupportedModelError: The model's paged logits differ from its plain ones.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        layout: ModelLayout,
        config: EngineConfig,
        kernels: KernelSet,
        stop_check: Callable[[Request], StopDecision],
        capturer: Capturer | None,
        ranks: Ranks,
    ) -> None:
        self.config = config
        self._adapter = adapter
        self._ranks = ranks
        self._decisions = _Decisions(stop_check)
        self._blocks = BlockManager(config.num_blocks, config.cache_layout.kinds, config.share_blocks)
        self._host_blocks = HostBlocks(config.num_host_blocks)
        self._scheduler = Scheduler(
            SCHEDULERS.get(config.scheduler_type),
            self._blocks,
            self._host_blocks,
            SchedulerLimits.of(config),
            self._decisions,
        )
        self._padding = PaddingPolicy.of(config)
        self._cache = KVCache(config.cache_layout, layout.geometries, config.num_blocks, adapter.device)
        host_cache = HostCache(self._cache, config.num_host_blocks)
        table = RequestTable(
            config.max_requests,
            config.max_model_len + 1,
            len(config.cache_layout.page_sizes),
            config.max_blocks_per_request,
            adapter.vocab_size,
            adapter.device,
        )
        self._states = _states_of(adapter, layout)
        self._attention = PagedAttention(
            kernels, self._cache.layers, config.cache_layout.places, layout.calls, layout.modules
        )
        layers = adapter.repeated_layers(layout)
        self._graphs = GraphStore(capturer, config.captured_paths)
        self._runner = ModelRunner(
            adapter,
            self._attention,
            self._states,
            kernels,
            self._cache,
            host_cache,
            table,
            config,
            layers,
            self._graphs,
            None if ranks.is_alone else ranks.share_tokens,
        )
        self._range = ranges_for(adapter.device)
        self._is_warm = False
        self._left_behind: Belongings | None = None
        self._in_flight: deque[_Launched] = deque()
        self._stats = EngineStats(
            blocks_total=config.num_blocks,
            cache_bytes=self._cache.num_bytes,
            weight_bytes=adapter.weight_bytes,
            table_bytes=table.num_bytes,
            host_blocks_total=config.num_host_blocks,
            host_cache_bytes=host_cache.num_bytes,
        )
        self._records: deque[StepRecord] = deque(maxlen=MAX_STEP_RECORDS)
        self._probes = self._make_probes(layout)
        self.attach()
        try:
            self._self_check()
        except BaseException:
            self.close()
            raise

    def attach(self) -> None:
        """Puts the model on this engine's attention.

        Weights that changed meanwhile invalidate cached prefixes and what is in host memory. So does anything else that
        was replaced where steps are captured; these are captured anew, since they would go on using what was there.
        """
        self._adapter.attach(self._attention.forward)
        self._attention.attach()
        self._states.attach()
        if self._ranks.any(self._adapter.weights_changed()):
            self.reset_prefix_cache()
        if self._left_behind is not None and self._left_behind != self._adapter.belongings():
            self.reset_prefix_cache()
            self._graphs.clear()
            self._is_warm = False
        self._left_behind = None

    def detach(self) -> None:
        """Gives the model back as it was. The engine can be attached again."""
        self._runner.stop()
        if self.config.captured_paths and self._adapter.is_attached:
            self._left_behind = self._adapter.belongings()
        self._states.detach()
        self._attention.detach()
        self._adapter.detach()

    def close(self) -> None:
        """Gives the model back as it was, and frees all graphs."""
        self.detach()
        self._graphs.clear()

    @property
    def is_warm(self) -> bool:
        """Whether `warm_up` has nothing left to do."""
        return self._is_warm or not (self._runner.is_compiled or self.config.captured_paths)

    def warm_up(self, hints: WorkloadHints, progress: Callable[[Sequence[Bucket]], Iterable[Bucket]]) -> None:
        """Compiles and captures whatever steps of hinted requests will need; harmless when repeated.

        No request may be running. Cached prefixes are forgotten where something is compiled.

        A path that is captured but not compiled is left out where it has more than `MAX_PREPARED_CAPTURES` buckets: its
        steps are captured when they come.

        Args:
            hints: Bounds the sizes that are prepared. Others are prepared when a step needs them, which waits for it.
            progress: Hands out what is prepared, one after the other, and may show how far it is.

        Raises:
            CompileError: The compiler refused.
            UnsupportedModelError: The compiled model gives other logits than the plain one.
        """
        if self.is_warm:
            return
        monitor = self._runner.monitor
        paths: tuple[Path, ...] = ("varlen", "decode") if self.config.use_decode_path else ("varlen",)
        buckets = [bucket for path in paths for bucket in self._prepared_buckets(path, hints)]
        for bucket in progress(buckets):
            before = monitor.compilations
            start = time.perf_counter()
            self._runner.warm_up(bucket)
            seconds = time.perf_counter() - start
            _logger.info("warm-up of %s: %.1f s, compiled %d", bucket.name, seconds, monitor.compilations - before)
        if self._runner.is_compiled:
            # The check writes to blocks that an earlier session may have filled.
            self.reset_prefix_cache()
            self._self_check(lambda bucket: bucket in buckets or bucket.path in self._padding.flexible_paths)
        self._is_warm = monitor.is_warm = True

    def _prepared_buckets(self, path: Path, hints: WorkloadHints) -> tuple[Bucket, ...]:
        buckets = self._padding.prepared_buckets(path, hints)
        if len(buckets) > MAX_PREPARED_CAPTURES and not self._runner.is_path_compiled(path):
            _logger.info("steps of the %s path have %d buckets: captured when they come", path, len(buckets))
            return ()
        return buckets

    # --------------------------------------------------------------------------------------------- requests

    @property
    def has_requests(self) -> bool:
        """Whether any request has not ended."""
        return self._scheduler.has_requests

    @property
    def num_waiting(self) -> int:
        """Requests that hold no row of the request table."""
        return self._scheduler.num_waiting

    def add(self, request: Request) -> None:
        """Takes a validated request in."""
        self._scheduler.add(request)
        self._stats.requests_added += 1

    def unpin(self, request_id: str) -> None:
        """Lets the prompt of a request that pinned it be evicted like others; unknown ids have no effect."""
        self._scheduler.unpin(request_id)

    def cancel(self, request_id: str) -> list[GenerationOutput]:
        """Ends a request now; returns its final output, or nothing if it is unknown."""
        return self._scheduler.cancel(request_id)

    def fail_all(self, error: str) -> list[GenerationOutput]:
        """Ends all requests with `error` and forgets the steps in flight."""
        self._in_flight.clear()
        return self._scheduler.fail_all(error)

    def reset_prefix_cache(self) -> None:
        """Forgets cached prefixes and what is in host memory, for example since other weights computed them."""
        self._scheduler.reset_prefix_cache()

    # ------------------------------------------------------------------------------------------------ steps

    def step(self) -> list[GenerationOutput]:
        """Plans and launches a step, and commits the oldest one when the queue is full or nothing can be launched.

        Returns:
            What callers should see: updates of streaming requests and final outputs.
        """
        is_launched = self._launch_next()
        if self._in_flight and (not is_launched or len(self._in_flight) > self.config.async_depth):
            return self._commit_oldest()
        return []

    def drain(self) -> list[GenerationOutput]:
        """Commits all steps in flight, so that nothing runs on the device any more."""
        outputs: list[GenerationOutput] = []
        while self._in_flight:
            outputs += self._commit_oldest()
        return outputs

    def _launch_next(self) -> bool:
        start = time.perf_counter()
        index = self._stats.steps + len(self._in_flight)
        num_preempted = self._scheduler.counters.preemptions
        with self._range(f"schedule {index}"):
            plan = self._scheduler.schedule()
        if not isinstance(plan, BatchPlan):
            return False
        scheduled = time.perf_counter()
        self._count_host_rows(len(plan.host_rows))
        bucket = self._padding.bucket(plan)
        with self._range(f"launch {index}"):
            step = self._runner.launch(plan, bucket, f"step {index}: {bucket.name}")
        record = self._record(index, plan, bucket, start)
        record = replace(
            record,
            num_preempted=self._scheduler.counters.preemptions - num_preempted,
            schedule_time=scheduled - start,
        )
        self._in_flight.append(_Launched(step, record, scheduled))
        return True

    def _count_host_rows(self, number: int) -> None:
        if number > 0 and self._stats.host_processed_tokens == 0:
            _logger.warning(
                "logits processors and token masks that requests bring along run on the host, one after the other; "
                "stats().host_processed_tokens counts their tokens"
            )
        self._stats.host_processed_tokens += number

    def _commit_oldest(self) -> list[GenerationOutput]:
        launched = self._in_flight.popleft()
        index = launched.record.index
        with self._range(f"wait {index}"):
            result = launched.step.wait()
        done = time.perf_counter()
        with self._range(f"commit {index}"):
            outputs = self._commit(launched.step.plan, result)
        prepare_time = launched.step.prepare_time
        record = replace(
            launched.record,
            prepare_time=prepare_time,
            run_time=done - launched.launch_time - prepare_time,
            update_time=time.perf_counter() - done,
        )
        self._records.append(record)
        self._count(record)
        return outputs

    def _commit(self, plan: BatchPlan, result: StepResult) -> list[GenerationOutput]:
        """Applies what the driver got and decided, on whichever rank."""
        ranks = self._ranks
        if plan.swaps_in or plan.swaps_out:
            result = replace(result, failed_swaps=ranks.union(result.failed_swaps))
        if not ranks.is_driver:
            result, decisions = ranks.share_results(result, {})
            with self._decisions.given(decisions):
                return self._scheduler.commit(plan, result)
        with self._decisions.noted() as decisions:
            outputs = self._scheduler.commit(plan, result)
        ranks.share_results(result, decisions)
        return outputs

    def _record(self, index: int, plan: BatchPlan, bucket: Bucket, start_time: float) -> StepRecord:
        decode_tokens = sum(row.count == 1 and row.samples for row in plan.rows)
        return StepRecord(
            index=index,
            start_time=start_time,
            path=bucket.path,
            num_rows=len(plan.rows),
            prefill_tokens=plan.num_tokens - decode_tokens,
            decode_tokens=decode_tokens,
            bucket=bucket.name,
            padding_tokens=bucket.num_tokens - plan.num_tokens,
            kv_tokens=plan.max_seq_len,
            padding_kv_tokens=bucket.max_kv - plan.max_seq_len,
            num_preempted=0,
            blocks_in_use=self._blocks.num_in_use,
            blocks_cached=self._blocks.num_cached,
            num_waiting=self._scheduler.num_waiting,
            schedule_time=0.0,
            prepare_time=0.0,
            run_time=0.0,
            update_time=0.0,
        )

    def _count(self, record: StepRecord) -> None:
        stats = self._stats
        stats.steps += 1
        stats.decode_steps += record.path == "decode"
        stats.prefill_tokens += record.prefill_tokens
        stats.decode_tokens += record.decode_tokens
        stats.padding_tokens += record.padding_tokens
        stats.kv_tokens += record.kv_tokens
        stats.padding_kv_tokens += record.padding_kv_tokens
        stats.schedule_time += record.schedule_time
        stats.prepare_time += record.prepare_time
        stats.run_time += record.run_time
        stats.update_time += record.update_time
        if record.path in self._padding.padded_paths:
            stats.buckets[record.bucket] = stats.buckets.get(record.bucket, 0) + 1

    # ------------------------------------------------------------------------------------------------- facts

    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        counters = self._scheduler.counters
        return replace(
            self._stats,
            buckets=dict(self._stats.buckets),
            requests_finished=counters.requests_finished,
            requests_failed=counters.requests_failed,
            requests_cancelled=counters.requests_cancelled,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            dropped_tokens=counters.dropped_tokens,
            preemptions=counters.preemptions,
            offloads=counters.offloads,
            restores=counters.restores,
            restored_tokens=counters.restored_tokens,
            failed_swaps=counters.failed_swaps,
            host_blocks_in_use=self._host_blocks.num_in_use,
            forks=counters.forks,
            prefix_cached_tokens=counters.prefix_cached_tokens,
            prefix_queried_tokens=counters.prefix_queried_tokens,
            blocks_in_use=self._blocks.num_in_use,
            blocks_cached=self._blocks.num_cached,
            blocks_pinned=self._blocks.num_pinned,
            blocks_free=self._blocks.num_available - self._blocks.num_cached,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            packed_weight_bytes=self._adapter.packed_bytes,
            state_bytes=self._states.num_bytes,
            compilations=self._runner.monitor.compilations,
            late_compilations=self._runner.monitor.late_compilations,
            compile_time=self._runner.monitor.compile_time,
            captures=self._graphs.captures,
            capture_failures=self._graphs.failures,
            capture_time=self._graphs.capture_time,
            replays=self._graphs.replays,
            graph_bytes=self._graphs.num_bytes,
            preparations=(*self._runner.monitor.preparations, *self._graphs.preparations),
        )

    def step_records(self) -> list[StepRecord]:
        """One record per committed step, oldest first; at most the last `MAX_STEP_RECORDS`."""
        return list(self._records)

    # -------------------------------------------------------------------------------------------- self-check

    def _make_probes(self, layout: ModelLayout) -> list[_Probe]:
        """Two short prompts, or one where the cache is too small, with the logits of the unattached model."""
        config, num_embeddings = self.config, self._adapter.num_embeddings
        # The token for padding has no position in some models.
        usable = [token for token in range(1, 9) if token != self._adapter.pad_token_id]
        prompts = [[usable[place] % num_embeddings for place in places] for places in ((0, 4, 2, 1), (3, 1, 5, 0, 2))]
        num_blocks = sum(config.cache_layout.peak_blocks(len(prompt), len(prompt)) for prompt in prompts)
        if num_blocks > config.num_blocks or config.max_requests < 2:
            prompts = [prompts[0][: config.max_model_len]]
        pieces = [_self_check_ends(row, len(prompt)) for row, prompt in enumerate(prompts)]
        return [
            _Probe(prompt, self._adapter.expected_logits(prompt, ends, layout.recurrent))
            for prompt, ends in zip(prompts, pieces, strict=True)
        ]

    def _self_check(self, is_compiled: Callable[[Bucket], bool] | None = None) -> None:
        """Compares paged logits with plain ones: prefill, chunked prefill beside a decode, and the decode path.

        It costs a few short forward passes and is what tells a model that runs right from one that only runs.

        Args:
            is_compiled: Which buckets have been compiled: checks those as such. None checks the model as it is.
        """
        probes = self._probes
        # Nobody else has a block yet: these are handed out for the check alone.
        blocks = BlockManager(self.config.num_blocks, self.config.cache_layout.kinds, share_blocks=False)
        for plan in _self_check_plans([probe.prompt for probe in probes], blocks):
            bucket = self._padding.bucket(plan)
            if is_compiled is not None and not is_compiled(bucket):
                continue
            actual = self._runner.logits(plan, bucket, compiled=is_compiled is not None).float()
            ends = [row.start + row.count for row in plan.rows]
            expected = [probe.logits[end - 1] for probe, end in zip(probes, ends, strict=True)]
            self._compare(actual, torch.stack(expected))

    def _compare(self, actual: Tensor, expected: Tensor) -> None:
        difference = (actual - expected).abs().max().item()
        allowed = self._adapter.rounding * expected.abs().max().item()
        # A model that already answers NaN on its own answers NaN here: that is the requests' error, not the model's.
        if difference > allowed:
            raise UnsupportedModelError(
                f"{type(self._adapter.model).__name__} gives other logits when its sequences are packed and paged "
                f"(difference {difference:.3g}, allowed {allowed:.3g}), so its tokens would be wrong"
            )


class _Decisions:
    """Says after each new token whether a request ends, and notes it, or repeats what was decided elsewhere.

    Args:
        check: Decides.
    """

    def __init__(self, check: Callable[[Request], StopDecision]) -> None:
        self._check = check
        self._noted: dict[str, StopDecision | str] = {}
        self._given: Decisions | None = None

    def __call__(self, request: Request) -> StopDecision:
        """The decision.

        Raises:
            Exception: The caller's functions failed, here or elsewhere.
        """
        if self._given is not None:
            decision = self._given[request.request_id]
            if isinstance(decision, str):
                raise RuntimeError(decision)
            return decision
        try:
            decision = self._noted[request.request_id] = self._check(request)
        except Exception as error:
            self._noted[request.request_id] = f"{type(error).__name__}: {error}"
            raise
        return decision

    @contextmanager
    def noted(self) -> Iterator[Decisions]:
        """What is decided within the context."""
        self._noted = {}
        yield self._noted

    @contextmanager
    def given(self, decisions: Decisions) -> Iterator[None]:
        """Repeats these within the context."""
        self._given = decisions
        yield
        self._given = None


def _states_of(adapter: ModelAdapter, layout: ModelLayout) -> RequestStates:
    if layout.own_cache is not None:
        return OwnCaches(adapter.model, layout.own_cache)
    return RecurrentStates(layout.recurrent)


@dataclass(frozen=True, slots=True)
class _Probe:
    """A prompt and the unattached model's logits `[num_tokens, vocab_size]` for it."""

    prompt: list[int]
    logits: Tensor


def _self_check_ends(row: int, length: int) -> tuple[int, ...]:
    """Where the pieces of a prompt end: a first one, another one, the last token. Less than three tokens are one piece.

    The second piece of the first row has two tokens, so that it continues a cache beside rows that decode.
    """
    return (length,) if length < 3 else (max(1, length - (3 if row == 0 else 2)), length - 1, length)


def _self_check_plans(prompts: list[list[int]], blocks: BlockManager) -> Iterator[BatchPlan]:
    """Plans that run each prompt in its pieces, in row order; the last one on the decode path."""
    row_starts, table_updates = [], []
    for row, prompt in enumerate(prompts):
        name = f"self-check {row}"
        blocks.start(name, blocks.match_prefix(prompt))
        row_starts.append(RowStart(row, prompt, len(prompt), SamplingParams(), frozenset()))
        table_updates.append(BlockTableUpdate(row, blocks.extend(name, 0, len(prompt))))

    def plan(path: Path, starts: Sequence[int], ends: Sequence[int], is_first: bool = False) -> BatchPlan:
        rows = tuple(
            ScheduledRow("self-check", 0, row, start, end - start, samples=True)
            for row, (start, end) in enumerate(zip(starts, ends, strict=True))
        )
        return BatchPlan(
            path=path,
            rows=rows,
            row_starts=tuple(row_starts) if is_first else (),
            table_updates=tuple(table_updates) if is_first else (),
            block_copies=(),
            num_tokens=sum(row.count for row in rows),
            max_seq_len=max(ends),
        )

    starts: Sequence[int] = [0] * len(prompts)
    columns = zip(*(_self_check_ends(row, len(prompt)) for row, prompt in enumerate(prompts)), strict=True)
    for number, ends in enumerate(columns):
        yield plan("decode" if number == 2 else "varlen", starts, ends, is_first=number == 0)
        starts = ends
