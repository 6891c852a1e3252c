"""The frozen records that travel between the stages of a step.

`BatchPlan` goes from the scheduler (host) to the device side, `StepResult` comes back. Neither side sees more of the
other than these records.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from cbtriton.request import HostProcessing, LogprobParams, PromptEmbeds, SamplingParams

Path = Literal["varlen", "decode"]


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One request's share of a step.

    Attributes:
        request_id: Whose tokens they are.
        epoch: The request's epoch when it was scheduled; a different one at commit means that the result is stale.
        row: Its row in the request table.
        start: Position of the first token to run, which is also the number of its tokens already in the cache.
        count: Number of tokens to run, at least 1.
        samples: Whether the row's last token produces a new one.
        keeps_state: Whether what is kept beside the pages is kept once more as it is before the row's last token, for
            requests that begin with it.
    """

    request_id: str
    epoch: int
    row: int
    start: int
    count: int
    samples: bool
    keeps_state: bool = False


@dataclass(frozen=True, slots=True)
class RowStart:
    """A request enters a row of the table: its tokens and parameters are written there before the step runs.

    Attributes:
        row: The row.
        token_ids: All tokens that are known.
        prompt_length: How many of them are the prompt.
        sampling: How tokens are drawn.
        eos_token_ids: Tokens that end it.
        forked_row: The row with whose kept state it begins; None where it begins with none.
        has_long_rope: Whether its rotary frequencies are those of long sequences.
    """

    row: int
    token_ids: list[int]
    prompt_length: int
    sampling: SamplingParams
    eos_token_ids: frozenset[int]
    forked_row: int | None = None
    has_long_rope: bool = False


@dataclass(frozen=True, slots=True)
class HostRow:
    """A sampling row whose scores pass through functions of its caller.

    Attributes:
        sample_index: Which of the step's sampling rows it is.
        row: Its row in the request table.
        token_ids: All tokens before the new one.
        prompt_length: How many of them are the prompt.
        processing: The functions.
    """

    sample_index: int
    row: int
    token_ids: list[int]
    prompt_length: int
    processing: HostProcessing


@dataclass(frozen=True, slots=True)
class LogprobRow:
    """A sampling row that wants other log-probabilities than the engine gives everybody.

    Attributes:
        sample_index: Which of the step's sampling rows it is.
        params: What it wants.
        temperature: At which its tokens are drawn, 0 for greedy ones.
    """

    sample_index: int
    params: LogprobParams
    temperature: float


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """A piece of a prompt whose log-probabilities are wanted.

    Attributes:
        row_index: Which of the step's rows it is.
        start: Position of the first token that runs; its successor is the first that gets a log-probability.
        target_ids: The tokens that get one.
    """

    row_index: int
    start: int
    target_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EmbeddedPrompt:
    """A piece of a prompt that the model gets as vectors.

    Attributes:
        row_index: Which of the step's rows it is.
        start: Position of the first token that runs.
        count: How many of the row's tokens are vectors.
        embeds: Those of the whole prompt.
    """

    row_index: int
    start: int
    count: int
    embeds: PromptEmbeds


@dataclass(frozen=True, slots=True)
class TableEntries:
    """Blocks `block_ids` are entries `first_index`, `first_index + 1`, … of a group's block table."""

    group: int
    first_index: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockTableUpdate:
    """Entries of a row's block tables change. Those in front of a group's window may stay what they were."""

    row: int
    entries: tuple[TableEntries, ...]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The contents of block `source` are copied to block `target` before the step runs."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BlockSwap:
    """A request's blocks move between device and host memory.

    Attributes:
        request_id: Whose blocks they are.
        device_blocks: Blocks of the cache.
        host_blocks: Their counterparts in host memory, each once.
    """

    request_id: str
    device_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """All that the device side needs to know to run one step.

    Attributes:
        path: `decode` when every row runs exactly one token, else `varlen`.
        rows: The scheduled rows, at least one.
        row_starts: Rows that get a new occupant in this step.
        table_updates: New entries of block tables.
        block_copies: Copies to make before the step; sources and targets are disjoint.
        num_tokens: Sum of the rows' counts.
        max_seq_len: Longest context of any row after this step, in tokens.
        swaps_out: Copies from the device to host memory, to make before all other copies: whatever they read may be
            overwritten by this plan.
        swaps_in: Copies from host memory to the device, to make after all other copies and before the step. What they
            read may be overwritten by the next plan.
        host_rows: Sampling rows that need functions of their callers.
        logprob_rows: Sampling rows that want other log-probabilities than the engine's.
        scored_prompts: Pieces of prompts whose tokens' log-probabilities are wanted.
        embedded_prompts: Pieces of prompts that the model gets as vectors.
        rows_left: Rows whose requests left them since the plan before; others may enter them in this one.
        forked_rows: Rows whose kept state nobody needs once the rows of this plan have begun.
    """

    path: Path
    rows: tuple[ScheduledRow, ...]
    row_starts: tuple[RowStart, ...]
    table_updates: tuple[BlockTableUpdate, ...]
    block_copies: tuple[BlockCopy, ...]
    num_tokens: int
    max_seq_len: int
    swaps_out: tuple[BlockSwap, ...] = ()
    swaps_in: tuple[BlockSwap, ...] = ()
    host_rows: tuple[HostRow, ...] = ()
    logprob_rows: tuple[LogprobRow, ...] = ()
    scored_prompts: tuple[ScoredPrompt, ...] = ()
    embedded_prompts: tuple[EmbeddedPrompt, ...] = ()
    rows_left: tuple[int, ...] = ()
    forked_rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Idle:
    """There is nothing to run now.

    Attributes:
        has_waiting: Whether requests are waiting for something (steps in flight, a parent's prompt, free blocks).
    """

    has_waiting: bool


class SampleOutcome(IntEnum):
    """What the `sample` kernels report of a row."""

    TOKEN = 0
    NOTHING_LEFT = 1
    UNUSABLE = 2


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What one sampling row of a step produced.

    Attributes:
        token_id: The new token.
        logprob: Its log-probability; None when not asked for.
        error: Why the row got no token; `token_id` and `logprob` then mean nothing.
        top_logprobs: The likeliest tokens with their log-probabilities; None when not asked for.
    """

    token_id: int
    logprob: float | None
    error: str | None = None
    top_logprobs: dict[int, float] | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step.

    Attributes:
        sampled: The tokens, in the order of its sampling rows.
        failed_swaps: Requests with a copy from or to host memory that failed. What was copied is lost, and a row that
            should have read it sampled nonsense.
        prompt_logprobs: Those of the plan's scored prompts, in their order.
    """

    sampled: tuple[SampledToken, ...]
    failed_swaps: tuple[str, ...] = ()
    prompt_logprobs: tuple[tuple[float, ...], ...] = ()
