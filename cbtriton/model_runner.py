"""Runs plans on the device. Streams, events and (later) graphs live here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cbtriton.attention import PagedAttention
from cbtriton.forward_context import ForwardContext
from cbtriton.kernel_set import KernelSet
from cbtriton.kv_cache import KVCache
from cbtriton.model_adapter import ModelAdapter
from cbtriton.padding import Bucket
from cbtriton.plan import BatchPlan, BlockCopy, SampledToken, StepResult
from cbtriton.request_table import RequestTable
from cbtriton.step_inputs import StepInputs, StepInputsWriter


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that was launched. Its results may still be on their way.

    Attributes:
        plan: What it runs.
        token_ids: `[num_samples]` int64 on the host.
        logprobs: `[num_samples]` float32 on the host; None when not asked for.
        is_valid: `[num_samples]` bool on the host.
        ready: Event after which the three can be read; None where work is done when it returns.
    """

    plan: BatchPlan
    token_ids: Tensor
    logprobs: Tensor | None
    is_valid: Tensor
    ready: torch.cuda.Event | None

    def wait(self) -> StepResult:
        """Blocks until the step is done and returns what it sampled."""
        if self.ready is not None:
            self.ready.synchronize()
        token_ids = self.token_ids.tolist()
        logprobs = [None] * len(token_ids) if self.logprobs is None else self.logprobs.tolist()
        return StepResult(tuple(map(SampledToken, token_ids, logprobs, self.is_valid.tolist())))


class ModelRunner:
    """Turns a plan into sampled tokens: inputs, forward pass, sampling.

    Args:
        adapter: The model; must be attached to `attention` while steps run.
        attention: The engine's attention function.
        kernels: The chosen kernels.
        cache: The KV cache.
        table: The request table.
        return_logprobs: Whether log-probabilities of sampled tokens are computed.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        attention: PagedAttention,
        kernels: KernelSet,
        cache: KVCache,
        table: RequestTable,
        return_logprobs: bool,
    ) -> None:
        self._adapter = adapter
        self._attention = attention
        self._kernels = kernels
        self._cache = cache
        self._table = table
        self._return_logprobs = return_logprobs
        self._writer = StepInputsWriter(table, adapter.vocab_size, adapter.device)

    def prepare(self, plan: BatchPlan, bucket: Bucket) -> StepInputs:
        """Sends a plan to the device. Must be followed by `launch` of the same plan before the next `prepare`."""
        return self._writer.fill(plan, bucket)

    @torch.no_grad()
    def launch(self, plan: BatchPlan, bucket: Bucket, inputs: StepInputs) -> InFlightStep:
        """Enqueues a prepared step."""
        logits = self._logits(plan, bucket, inputs)
        table, features = self._table, inputs.features
        token_ids, logprobs, is_valid = self._kernels.sample(
            logits,
            inputs.sample_rows,
            inputs.sample_positions,
            table.token_table,
            table.temperature,
            table.top_k,
            table.top_p,
            table.min_p,
            table.seeds,
            table.min_positions,
            table.eos_ids,
            features.all_greedy,
            features.use_top_k,
            features.use_top_p,
            features.use_min_p,
            features.use_min_length,
            self._return_logprobs,
        )
        return self._send_back(plan, token_ids, logprobs if self._return_logprobs else None, is_valid)

    @torch.no_grad()
    def logits(self, plan: BatchPlan, bucket: Bucket) -> Tensor:
        """Runs a plan without sampling; `[num_samples, vocab_size]` in the model's dtype."""
        return self._logits(plan, bucket, self.prepare(plan, bucket))

    def _logits(self, plan: BatchPlan, bucket: Bucket, inputs: StepInputs) -> Tensor:
        if plan.block_copies:
            self._copy_blocks(plan.block_copies)
        table, page_size = self._table, self._cache.page_size
        input_ids, positions, slots, cu_seqlens_q, seq_lens = self._kernels.prepare_inputs(
            table.token_table,
            table.block_tables,
            inputs.rows,
            inputs.starts,
            inputs.counts,
            page_size,
            bucket.num_tokens,
        )
        plan_attention = self._kernels.decode_plan if bucket.path == "decode" else self._kernels.varlen_plan
        self._attention.begin(
            ForwardContext(
                path=bucket.path,
                block_tables=table.block_tables,
                rows=inputs.rows,
                cu_seqlens_q=cu_seqlens_q,
                seq_lens=seq_lens,
                slots=slots,
                attention_plan=plan_attention(
                    table.block_tables, inputs.rows, cu_seqlens_q, seq_lens, page_size, bucket.max_kv
                ),
                max_kv=bucket.max_kv,
            )
        )
        return self._adapter.forward(input_ids, positions, inputs.logit_indices)

    def _copy_blocks(self, copies: tuple[BlockCopy, ...]) -> None:
        device = self._adapter.device
        sources = torch.tensor([copy.source for copy in copies], device=device)
        targets = torch.tensor([copy.target for copy in copies], device=device)
        for layer in self._cache.layers:
            self._kernels.block_copy(layer.key, layer.value, sources, targets)

    def _send_back(self, plan: BatchPlan, token_ids: Tensor, logprobs: Tensor | None, is_valid: Tensor) -> InFlightStep:
        if self._adapter.device.type != "cuda":
            return InFlightStep(plan, token_ids, logprobs, is_valid, ready=None)
        ready = torch.cuda.Event()
        step = InFlightStep(
            plan,
            token_ids.to("cpu", non_blocking=True),
            None if logprobs is None else logprobs.to("cpu", non_blocking=True),
            is_valid.to("cpu", non_blocking=True),
            ready,
        )
        ready.record()
        return step
