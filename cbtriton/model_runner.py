"""Runs plans on the device. Events and the worker thread live here, graphs in `graphs`: nowhere else."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor, nn

from cbtriton.attention import PagedAttention
from cbtriton.compile import CompiledLayers, CompileError, CompileMonitor
from cbtriton.config import CompileSettings, EngineConfig
from cbtriton.forward_context import ForwardContext
from cbtriton.graphs import GraphKey, GraphStore, Outputs
from cbtriton.host_processing import HostProcessor
from cbtriton.kernel_set import KernelSet
from cbtriton.kv_cache import HostCache, KVCache
from cbtriton.logprobs import RowLogprobs, by_prompt, prompt_logprobs, row_logprobs
from cbtriton.model_adapter import ModelAdapter
from cbtriton.padding import Bucket
from cbtriton.plan import (
    BatchPlan,
    BlockCopy,
    BlockSwap,
    Path,
    SampledToken,
    SampleOutcome,
    StepResult,
)
from cbtriton.ranges import ranges_for
from cbtriton.request_table import RequestTable
from cbtriton.row_states import RequestStates
from cbtriton.step_inputs import SampleFeatures, StepInputs, StepInputsWriter

_logger = logging.getLogger(__name__)

# What a whole step that is compiled or captured samples with: exact features would be a graph for each combination.
_GREEDY = SampleFeatures(all_greedy=True, use_top_k=False, use_top_p=False, use_min_p=False, use_min_length=True)
_ANY = SampleFeatures(all_greedy=False, use_top_k=True, use_top_p=True, use_min_p=True, use_min_length=True)
_PROCESSED = replace(_ANY, use_processors=True, use_truncation=True)

_ERRORS = {
    SampleOutcome.NOTHING_LEFT: "no token is left to choose from: what the request suppresses, forbids, forces or "
    "masks rules out all of them; allow more tokens",
    SampleOutcome.UNUSABLE: "the model produced no usable logits (NaN or infinity)",
}

_Result = TypeVar("_Result")

# `omp_pause_soft`: what threads have stored survives.
_SOFT = 1


@dataclass(frozen=True, slots=True)
class _Extras:
    """What single requests asked of a step beyond their tokens.

    Attributes:
        errors: Why functions of callers failed, by sampling row.
        row_logprobs: Log-probabilities in place of the engine's.
        prompt_logprobs: `[num_targets]` float32, of all scored prompts; None where there are none.
    """

    errors: Mapping[int, str] = field(default_factory=dict)
    row_logprobs: tuple[RowLogprobs, ...] = ()
    prompt_logprobs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Sampled:
    """What a launched step gives. It may still be on its way.

    Attributes:
        token_ids: `[num_samples]` int64 on the host.
        logprobs: `[num_samples]` float32 on the host; None when not asked for.
        outcomes: `[num_samples]` int32 on the host.
        extras: What single requests asked for, on the host.
        ready: Event after which tensors can be read; None where work is done when it returns.
        prepare_time: Seconds to fill the step's inputs.
        failed_swaps: Requests with a copy from or to host memory that failed.
    """

    token_ids: Tensor
    logprobs: Tensor | None
    outcomes: Tensor
    extras: _Extras
    ready: torch.cuda.Event | None
    prepare_time: float
    failed_swaps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that was launched, or that a worker thread is about to launch.

    Attributes:
        plan: What it runs.
    """

    plan: BatchPlan
    _launched: Future[_Sampled]

    def wait(self) -> StepResult:
        """Blocks until the step is done and returns what it sampled.

        Raises:
            Exception: Whatever ended the worker's launch.
        """
        sampled = self._launched.result()
        if sampled.ready is not None:
            sampled.ready.synchronize()
        token_ids = sampled.token_ids.tolist()
        logprobs = [None] * len(token_ids) if sampled.logprobs is None else sampled.logprobs.tolist()
        extras = sampled.extras
        errors = [extras.errors.get(i) or _ERRORS.get(code) for i, code in enumerate(sampled.outcomes.tolist())]
        tokens = list(map(SampledToken, token_ids, logprobs, errors))
        for rows in extras.row_logprobs:
            tokens = rows.add_to(tokens)
        prompts = () if extras.prompt_logprobs is None else by_prompt(extras.prompt_logprobs, self.plan.scored_prompts)
        return StepResult(tuple(tokens), sampled.failed_swaps, prompts)

    @property
    def prepare_time(self) -> float:
        """Seconds to fill the step's inputs, once it is done."""
        return self._launched.result().prepare_time


class ModelRunner:
    """Turns a plan into sampled tokens: inputs, forward pass, sampling.

    Args:
        adapter: The model; must be attached to `attention` while steps run.
        attention: The engine's attention function.
        states: What requests keep beside the pages.
        kernels: The chosen kernels.
        cache: The KV cache.
        host_cache: Where blocks of preempted requests go.
        table: The request table.
        config: The engine's configuration.
        layers: What is compiled where the region is `layer`.
        graphs: Captures and replays steps.
        share_tokens: Makes tokens that were sampled on the device those of the driver; None where this process is
            alone.

    Attributes:
        monitor: What was compiled.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        attention: PagedAttention,
        states: RequestStates,
        kernels: KernelSet,
        cache: KVCache,
        host_cache: HostCache,
        table: RequestTable,
        config: EngineConfig,
        layers: Sequence[nn.Module],
        graphs: GraphStore,
        share_tokens: Callable[[Tensor], None] | None = None,
    ) -> None:
        self._adapter = adapter
        self._attention = attention
        self._states = states
        self._kernels = kernels
        self._cache = cache
        self._host_cache = host_cache
        self._table = table
        self._share_tokens = share_tokens
        self._logprobs = config.logprobs
        self._host = HostProcessor(table, adapter.vocab_size, adapter.device)
        self._kinds = (_GREEDY, _ANY, _PROCESSED) if config.has_processors else (_GREEDY, _ANY)
        self._writer = StepInputsWriter(table, adapter.vocab_size, adapter.device)
        self._settings: dict[Path, CompileSettings | None] = {
            "varlen": config.varlen_compile,
            "decode": config.decode_compile,
        }
        self._region = config.compile_region
        self._graphs = graphs
        self._layers = CompiledLayers(layers if self._region == "layer" else (), self._settings)
        self._steps = {
            path: self._run if how is None or self._region == "layer" else torch.compile(self._run, **how.arguments())
            for path, how in self._settings.items()
        }
        # A device runs beside the host by itself; on a CPU a thread does.
        # Of each group; once as numbers and once where kernels read them.
        self._page_sizes = config.cache_layout.page_sizes
        self._page_size_column = torch.tensor(self._page_sizes, dtype=torch.int32, device=adapter.device)
        self._has_worker = config.async_depth > 0 and adapter.device.type == "cpu"
        self._worker: ThreadPoolExecutor | None = None
        self._has_switched_rope = config.rope_switch_length is not None
        self._range = ranges_for(adapter.device)
        self.monitor = CompileMonitor()

    @property
    def is_compiled(self) -> bool:
        """Whether any path is compiled."""
        return any(self._settings.values())

    def is_path_compiled(self, path: Path) -> bool:
        """Whether steps of this path are compiled."""
        return self._settings[path] is not None

    def launch(self, plan: BatchPlan, bucket: Bucket, name: str) -> InFlightStep:
        """Enqueues a step: behind those in flight, on the device or on the worker thread that stands in for one.

        Args:
            plan: What it runs.
            bucket: At which sizes.
            name: What profilers show.
        """
        if self._has_worker:
            if self._worker is None:
                end_idle_threads()
                self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cbtriton-step")
            return InFlightStep(plan, self._worker.submit(self._enqueue, plan, bucket, name))
        launched: Future[_Sampled] = Future()
        launched.set_result(self._enqueue(plan, bucket, name))
        return InFlightStep(plan, launched)

    def warm_up(self, bucket: Bucket) -> None:
        """Runs a step of padding at the sizes of `bucket`, so that all it needs has been compiled and captured."""
        for features in self._kinds if self._is_one_graph(bucket.path) else (_GREEDY,):
            key, step = self._step(bucket, self._writer.padding(bucket, features))
            with torch.no_grad():
                self._run_compiled(bucket, partial(self._graphs.prepare, key, step))

    @torch.no_grad()
    def logits(self, plan: BatchPlan, bucket: Bucket, compiled: bool) -> Tensor:
        """Runs a plan without sampling; `[num_samples, vocab_size]` in the model's dtype.

        Args:
            plan: What runs.
            bucket: At which sizes.
            compiled: Whether compiled layers run as such. What is compiled as part of a whole step never does.
        """
        inputs = self._writer.fill(plan, bucket)
        run = partial(self._logits, inputs, bucket.path, bucket.num_tokens, bucket.max_kv)
        with self._states.step(plan):
            logits = self._run_compiled(bucket, run) if compiled else run()
        return logits[: _num_samples(plan)]

    def stop(self) -> None:
        """Waits for a step that is running, forgets those behind it, and gives the layers back as they were."""
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
            self._worker = None
        self._layers.uninstall()

    def _enqueue(self, plan: BatchPlan, bucket: Bucket, name: str) -> _Sampled:
        with self._range(name):
            return self._run_plan(plan, bucket)

    def _run_plan(self, plan: BatchPlan, bucket: Bucket) -> _Sampled:
        start = time.perf_counter()
        with self._range("fill inputs"):
            inputs = self._writer.fill(plan, bucket)
        prepare_time = time.perf_counter() - start
        failed_swaps = self._swap(plan.swaps_out, self._host_cache.store)
        if plan.block_copies:
            self._copy_blocks(plan.block_copies)
        failed_swaps += self._swap(plan.swaps_in, self._host_cache.load)
        mask_errors = self._host.write_masks(plan.host_rows)
        with self._range("model and sampling"), self._states.step(plan):
            if _needs_parts(plan):
                outputs, extras = self._launch_in_parts(plan, bucket, inputs, mask_errors)
            else:
                outputs, extras = self._launch(bucket, inputs), _Extras(mask_errors)
        if self._share_tokens is not None:
            # The same numbers give the same tokens; this is for what is not the same on all ranks, such as functions of
            # callers that draw.
            self._share_tokens(outputs[0])
            places = inputs.sample_rows.long(), inputs.sample_positions.long()
            self._table.token_table[places] = outputs[0].to(self._table.token_table.dtype)
        count = _num_samples(plan)
        token_ids, logprobs, outcomes = (_to_host(column[:count]) for column in outputs)
        ready = None
        if self._adapter.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        logprobs = None if self._logprobs is None else logprobs
        return _Sampled(token_ids, logprobs, outcomes, extras, ready, prepare_time, failed_swaps)

    @torch.no_grad()
    def _launch(self, bucket: Bucket, inputs: StepInputs) -> Outputs:
        key, step = self._step(bucket, inputs)
        return self._run_compiled(bucket, partial(self._graphs.run, key, step))

    @torch.no_grad()
    def _launch_in_parts(
        self, plan: BatchPlan, bucket: Bucket, inputs: StepInputs, mask_errors: Mapping[int, str]
    ) -> tuple[Outputs, _Extras]:
        """Runs a step that is not like others: as it is, whether or not whole steps are compiled or captured."""
        inputs = replace(inputs, features=replace(inputs.features, use_processors=True))
        indices = torch.cat([inputs.logit_indices, _scored_indices(plan).to(self._adapter.device)])
        scored = replace(inputs, logit_indices=indices)
        sizes = (bucket.path, bucket.num_tokens, bucket.max_kv)
        logits = self._run_compiled(bucket, partial(self._logits, scored, *sizes, _prompt_embeds(plan)))
        logits, prompt_logits = logits[: bucket.num_samples], logits[bucket.num_samples :]
        scores = self._process(logits, inputs)
        errors = self._host.process(scores, plan.host_rows)
        outputs = self._sample(logits, scores, inputs)
        kernel = self._kernels.token_logprobs
        found = [rows.to_host(_to_host) for rows in row_logprobs(kernel, plan.logprob_rows, logits, scores, outputs[0])]
        prompts = None
        if plan.scored_prompts:
            prompts = _to_host(prompt_logprobs(kernel, plan.scored_prompts, prompt_logits))
        return outputs, _Extras({**errors, **mask_errors}, tuple(found), prompts)

    def _step(self, bucket: Bucket, inputs: StepInputs) -> tuple[GraphKey, Callable[[], Outputs]]:
        """The step, and what sets it apart from others that may be captured."""
        if self._is_one_graph(bucket.path):
            inputs = replace(inputs, features=_coarse(inputs.features))
        # Plain numbers, because a compiler takes those for variables, and fields of a record for constants.
        step = partial(self._steps[bucket.path], inputs, bucket.path, bucket.num_tokens, bucket.max_kv)
        return GraphKey(bucket, inputs.features), step

    def _is_one_graph(self, path: Path) -> bool:
        return (self._region == "step" and self.is_path_compiled(path)) or self._graphs.takes(path)

    def _run_compiled(self, bucket: Bucket, run: Callable[[], _Result]) -> _Result:
        """Runs what may compile; a step that begins again writes the same once more."""
        try:
            with self._compiled(bucket):
                return run()
        except CompileError:
            if not self.monitor.fall_back():
                raise
        with self._compiled(bucket):
            return run()

    def _compiled(self, bucket: Bucket) -> AbstractContextManager[None]:
        self._layers.begin_step(bucket.path)
        return nullcontext() if self._settings[bucket.path] is None else self.monitor.watch(bucket.name)

    def _run(self, inputs: StepInputs, path: Path, num_tokens: int, max_kv: int) -> Outputs:
        """The whole step. Nothing in here depends on anything but its arguments and what lives on the device."""
        logits = self._logits(inputs, path, num_tokens, max_kv)
        scores = self._process(logits, inputs) if inputs.features.use_processors else logits
        return self._sample(logits, scores, inputs)

    def _sample(self, logits: Tensor, scores: Tensor, inputs: StepInputs) -> Outputs:
        """Filters scores in place where that is not left to the draw, and draws.

        Args:
            logits: `[num_samples, vocab_size]`, the model's own.
            scores: `[num_samples, vocab_size]`, what processors made of them.
            inputs: The step's inputs.
        """
        table, features = self._table, inputs.features
        filters = (table.top_k, table.top_p, table.min_p)
        if features.use_truncation:
            self._truncate(scores, inputs)
            is_done = table.is_truncated != 0
            filters = (table.top_k.where(~is_done, 0), table.top_p.where(~is_done, 1), table.min_p.where(~is_done, 0))
        token_ids, logprobs, outcomes = self._kernels.sample(
            scores,
            inputs.sample_rows,
            inputs.sample_positions,
            table.token_table,
            table.temperature,
            *filters,
            table.seeds,
            table.min_positions,
            table.eos_ids,
            features.all_greedy,
            features.use_top_k,
            features.use_top_p,
            features.use_min_p,
            features.use_min_length and not features.use_processors,
            self._logprobs == "processed",
        )
        if self._logprobs == "raw":
            logprobs = self._kernels.token_logprobs(logits, token_ids, torch.zeros_like(logprobs), 0)[0]
        return token_ids, logprobs, outcomes

    def _process(self, logits: Tensor, inputs: StepInputs) -> Tensor:
        table = self._table
        return self._kernels.process(
            logits,
            inputs.sample_rows,
            inputs.sample_positions,
            table.token_table,
            table.prompt_lengths,
            table.repetition_penalty,
            table.presence_penalty,
            table.frequency_penalty,
            table.no_repeat_ngram_size,
            table.num_biases,
            table.num_rules,
            table.rules,
            table.rule_prefixes,
            table.has_token_mask,
            table.token_masks,
            table.min_positions,
            table.eos_ids,
            table.decay_starts,
            table.decay_rates,
            table.remove_invalid,
        )

    def _truncate(self, scores: Tensor, inputs: StepInputs) -> None:
        table = self._table
        self._kernels.truncate(
            scores,
            inputs.sample_rows,
            table.temperature,
            table.is_truncated,
            table.top_h,
            table.top_k,
            table.top_p,
            table.min_p,
            table.typical_p,
            table.epsilon_cutoff,
            table.eta_cutoff,
        )

    def _logits(
        self,
        inputs: StepInputs,
        path: Path,
        num_tokens: int,
        max_kv: int,
        embeds: Sequence[tuple[int, Tensor]] = (),
    ) -> Tensor:
        table = self._table
        input_ids, positions, slots, cu_seqlens_q, seq_lens = self._kernels.prepare_inputs(
            table.token_table,
            table.block_tables,
            inputs.rows,
            inputs.starts,
            inputs.counts,
            self._page_size_column,
            num_tokens,
        )
        plan_attention = self._kernels.decode_plan if path == "decode" else self._kernels.varlen_plan
        self._attention.begin(
            [
                ForwardContext(
                    path=path,
                    block_tables=block_tables,
                    rows=inputs.rows,
                    cu_seqlens_q=cu_seqlens_q,
                    seq_lens=seq_lens,
                    slots=group_slots,
                    attention_plan=plan_attention(block_tables, inputs.rows, cu_seqlens_q, seq_lens, page_size, max_kv),
                    max_kv=max_kv,
                )
                for block_tables, group_slots, page_size in zip(
                    table.block_tables, slots, self._page_sizes, strict=True
                )
            ]
        )
        is_long = None
        if self._has_switched_rope:
            # The row of each token, padding included.
            entries = torch.searchsorted(
                cu_seqlens_q[1:], torch.arange(num_tokens, device=positions.device), right=True
            )
            rows = inputs.rows[entries.clamp(max=len(inputs.rows) - 1)]
            is_long = table.has_long_rope[rows] != 0
        logits = self._adapter.forward(input_ids, positions, inputs.logit_indices.long(), embeds, is_long)
        self._attention.end()
        return logits

    def _swap(self, swaps: tuple[BlockSwap, ...], copy: Callable[[BlockSwap], None]) -> tuple[str, ...]:
        """Copies between device and host memory; returns the requests for which that failed."""
        failed = []
        for swap in swaps:
            try:
                copy(swap)
            except Exception:  # Whatever it is: one request computes its cache again, and the others get on.
                _logger.exception("copying %d blocks from or to host memory failed", len(swap.host_blocks))
                failed.append(swap.request_id)
        return tuple(failed)

    def _copy_blocks(self, copies: tuple[BlockCopy, ...]) -> None:
        device = self._adapter.device
        sources = torch.tensor([copy.source for copy in copies], device=device)
        targets = torch.tensor([copy.target for copy in copies], device=device)
        for pool in self._cache.pools:
            self._kernels.block_copy(pool.key, pool.value, sources, targets)


def end_idle_threads() -> None:
    """Ends the OpenMP threads that wait for work of the calling thread. Its next parallel loop starts new ones.

    For a thread that gives way to another one. Each has its own, and once there are more than cores, GNU's OpenMP puts
    them to sleep between two loops: 900 times in a decode step of 30 layers.
    """
    # The library that torch uses, which need not be the one that this name finds elsewhere.
    openmp = ctypes.CDLL(torch._C.__file__)
    # OpenMP 5.0; older libraries keep their threads.
    if hasattr(openmp, "omp_pause_resource_all"):
        openmp.omp_pause_resource_all(_SOFT)


def _to_host(column: Tensor) -> Tensor:
    # Always a copy: a graph's outputs are overwritten by the next replay.
    return column.to("cpu", non_blocking=True, copy=True)


def _coarse(features: SampleFeatures) -> SampleFeatures:
    if features.use_processors:
        return _PROCESSED
    return _GREEDY if features.all_greedy else _ANY


def _needs_parts(plan: BatchPlan) -> bool:
    """Whether anybody must see scores between the parts of a step, or the model gets something else than tokens."""
    has_host_processors = any(row.processing.processors for row in plan.host_rows)
    return has_host_processors or bool(plan.logprob_rows or plan.scored_prompts or plan.embedded_prompts)


def _prompt_embeds(plan: BatchPlan) -> list[tuple[int, Tensor]]:
    """The first of the step's tokens that are vectors, and these, for each piece of a prompt that is."""
    begins = [0, *accumulate(row.count for row in plan.rows)]
    return [
        (begins[piece.row_index], piece.embeds.values[piece.start : piece.start + piece.count])
        for piece in plan.embedded_prompts
    ]


def _scored_indices(plan: BatchPlan) -> Tensor:
    """`[num_targets]` int32, the query tokens from whose logits scored prompts' targets would have been drawn."""
    ends = list(accumulate(row.count for row in plan.rows))
    firsts = [ends[prompt.row_index] - plan.rows[prompt.row_index].count for prompt in plan.scored_prompts]
    pieces = zip(firsts, plan.scored_prompts, strict=True)
    return torch.tensor(
        [first + i for first, prompt in pieces for i in range(len(prompt.target_ids))], dtype=torch.int32
    )


def _num_samples(plan: BatchPlan) -> int:
    return sum(row.samples for row in plan.rows)
