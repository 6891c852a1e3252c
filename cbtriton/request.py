"""A request: what the caller asked for, how far it got, and what it returns.

Owns the records that describe one generation request on the host. The scheduler is the only module that
changes a `Request`; everybody else reads it. This module knows nothing of blocks, tensors or threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

FinishReason = Literal["eos", "length", "cancelled", "error"]
LogprobKind = Literal["processed", "raw"]


class RequestStatus(IntEnum):
    """Where a request stands; every value from `FINISHED` on is terminal."""

    PENDING = 0
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3
    FAILED = 4
    CANCELLED = 5


class RuleKind(IntEnum):
    """What a rule does to a token's score, in the order in which rules apply; see the `sample` kernels."""

    BIAS = 0
    BAN = 1
    FORCE = 2
    SUPPRESS = 3


@dataclass(frozen=True, slots=True)
class TokenRule:
    """Something that happens to one token's score, always, behind some tokens, or at one position.

    Attributes:
        kind: What happens. A bias is added; banned and suppressed tokens cannot be chosen; where tokens are forced, no
            others can.
        token: Which token.
        prefix: The request's latest tokens must be these.
        position: Where the token would go; None: anywhere.
        bias: What is added.
    """

    kind: RuleKind
    token: int
    prefix: tuple[int, ...] = ()
    position: int | None = None
    bias: float = 0.0


@dataclass(frozen=True, slots=True)
class ProcessorParams:
    """What happens to one request's scores before the temperature. The defaults change nothing.

    Attributes:
        repetition_penalty: Divides positive and multiplies negative scores of tokens that the request holds.
        presence_penalty: Subtracted from the scores of generated tokens.
        frequency_penalty: The same, for each time.
        no_repeat_ngram_size: No n-gram of this size comes twice; 0: off.
        rules: Biases, behind them forbidden and forced tokens.
        decay_start: Position beyond which EOS ids grow; None: off.
        decay_factor: By how much per token.
        remove_invalid_values: Whether NaN and infinities are replaced.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    rules: tuple[TokenRule, ...] = ()
    decay_start: int | None = None
    decay_factor: float = 1.0
    remove_invalid_values: bool = False


_NO_PROCESSORS = ProcessorParams()


@dataclass(frozen=True, slots=True)
class HostProcessing:
    """The caller's own functions that have a say in one request's tokens. They run on the host, for this request alone.

    Attributes:
        processors: Each maps `(token_ids [1, n] int64, scores [1, vocab_size] float32)` to new scores, after all other
            processors and before the temperature.
        token_mask: Maps the generated tokens to those that are allowed next: `[vocab_size]` bool, or int32 words with a
            bit for each token; None: all are.
        prefix_allowed_tokens_fn: Maps `(0, token_ids [n] int64)` to a list of those that are allowed next; None: all
            are.
    """

    processors: tuple[Callable[[Any, Any], Any], ...] = ()
    token_mask: Callable[[list[int]], Any] | None = None
    prefix_allowed_tokens_fn: Callable[[int, Any], Any] | None = None

    @property
    def has_mask(self) -> bool:
        """Whether tokens are ruled out before the scores are known."""
        return self.token_mask is not None or self.prefix_allowed_tokens_fn is not None


@dataclass(frozen=True, slots=True)
class LogprobParams:
    """Log-probabilities that one request wants in place of the engine's.

    Attributes:
        kind: Of the distribution that its tokens are drawn from, or of the model's own.
        num_top: How many of the likeliest tokens come with theirs.
    """

    kind: LogprobKind
    num_top: int = 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request turns logits into a token. Immutable, resolved once when the request is added.

    Attributes:
        temperature: Divides the logits; 0.0 means greedy decoding (the other filters then do not matter).
        top_k: Keeps the `top_k` most likely tokens and whatever ties with the last of them; 0 means off.
        top_p: Keeps the smallest set of most likely tokens with at least this much probability; 1.0 means off.
        min_p: Drops tokens less likely than `min_p` times the most likely one; 0.0 means off.
        seed: 64-bit seed of the request's own random stream. A draw depends on (seed, position, token id) only.
        min_new_tokens: EOS ids are suppressed until this many tokens were generated.
        top_h: Keeps the most likely tokens up to this share of the entropy; 0.0 means off.
        typical_p: Keeps the most typical tokens up to this probability; 1.0 means off.
        epsilon_cutoff: Drops tokens less likely than this; 0.0 means off.
        eta_cutoff: The same, with a bound that falls with the entropy; 0.0 means off.
        processors: What happens to the scores before all of this.
        host: The caller's own functions that change scores; None: there are none.
        logprobs: Which log-probabilities come with each token; None: those that the engine gives everybody.
        prompt_logprobs: Whether those of the prompt's tokens are wanted.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    min_new_tokens: int = 0
    top_h: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    processors: ProcessorParams = _NO_PROCESSORS
    host: HostProcessing | None = None
    logprobs: LogprobParams | None = None
    prompt_logprobs: bool = False

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def has_processors(self) -> bool:
        """Whether anything but EOS ids that come too early changes the scores before the temperature."""
        return self.processors != _NO_PROCESSORS or self.host is not None

    @property
    def is_truncated(self) -> bool:
        """Whether filters are applied to the scores themselves: those beyond top-k, top-p and min-p, or all.

        Who wants to see the distribution that is left needs them all.
        """
        filters = self.top_h > 0.0 or self.typical_p < 1.0 or self.epsilon_cutoff > 0.0 or self.eta_cutoff > 0.0
        if self.logprobs is not None and self.logprobs.kind == "processed":
            filters |= self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0
        return filters and not self.is_greedy


@dataclass(frozen=True, slots=True)
class StopRules:
    """When one request ends.

    Attributes:
        max_new_tokens: Number of generated tokens at which the request ends with `finish_reason="length"`.
        eos_token_ids: Any of these ends the request; empty means that no token does.
        stop_sequences: Token id sequences; generating one of them ends the request.
        stop_strings: Texts; producing one of them (as decoded by the manager's tokenizer) ends the request.
        criteria: The caller's own functions of `(token_ids [1, n] int64, None)`, asked after each token; anything true
            ends the request.
    """

    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    stop_strings: tuple[str, ...] = ()
    criteria: tuple[Callable[[Any, Any], Any], ...] = ()


@dataclass(slots=True)
class GenerationOutput:
    """What a caller receives for a request: one object per update when streaming, one at the end otherwise.

    Attributes:
        request_id: Id of the request.
        prompt_ids: Token ids of the prompt.
        generated_tokens: All tokens generated so far, a final EOS included.
        logprobs: Log-probability of each generated token, of the kind that `ContinuousBatchingConfig.return_logprobs`
            or the request asked for; empty if neither did.
        error: Why the request failed or ended early; None when nothing went wrong.
        status: State of the request when this output was made.
        created_time: `time.perf_counter()` when the request was added.
        lifespan: `time.perf_counter()` when the request was first scheduled and when it ended; -1 before that.
        timestamps: `time.perf_counter()` of each generated token when asked for, else None.
        finish_reason: Why the request ended; None while it runs.
        top_logprobs: For each generated token the likeliest ones of that step, likeliest first, with their
            log-probabilities; empty unless the request asked for them.
        prompt_logprobs: Log-probability of each token of the prompt but the first, under the model's own distribution;
            None unless the request asked for them.
    """

    request_id: str
    prompt_ids: list[int] = field(default_factory=list)
    generated_tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: str | None = None
    status: RequestStatus = RequestStatus.PENDING
    created_time: float = field(default_factory=time.perf_counter)
    lifespan: tuple[float, float] = (-1.0, -1.0)
    timestamps: list[float] | None = None
    finish_reason: FinishReason | None = None
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[float] | None = None

    def is_finished(self) -> bool:
        """Whether this is the request's last output (finished, failed or cancelled)."""
        return self.status >= RequestStatus.FINISHED


@dataclass(frozen=True, slots=True, eq=False)
class PromptEmbeds:
    """A prompt as the vectors that its tokens stand for.

    Attributes:
        values: `[num_tokens, embedding_size]` on the model's device; nobody changes it. A tensor, which nothing on the
            host side looks into.
        digest: Of its contents: prompts with other ones share no cached prefix, whatever their tokens.
    """

    values: Any
    digest: str


@dataclass(slots=True, eq=False)
class Request:
    """The scheduler's view of one request. Only `Scheduler` changes it.

    Attributes:
        request_id: Unique among the requests in flight.
        prompt_ids: Token ids of the prompt, never empty.
        sampling: How tokens are drawn.
        stop: When the request ends.
        streaming: Whether each token is delivered as it comes.
        record_timestamps: Whether the time of each token is kept.
        cache_salt: Requests with different salts never share cached blocks.
        embeds: What the model gets in place of the prompt's tokens; None for an ordinary request.
        parent_id: Id of the request whose prompt cache this one may fork; None for an ordinary request.
        is_pin: Whether its prompt stays in the cache after its end, until `Scheduler.unpin`.
        generated: Tokens generated so far.
        logprobs: Their log-probabilities, when asked for.
        top_logprobs: The likeliest tokens beside each of them, when asked for.
        prompt_logprobs: Log-probabilities of the prompt's tokens from the second on, as far as they are known.
        timestamps: Their times, when asked for.
        status: Current state.
        epoch: Raised whenever the request leaves its row, so that results of older steps are recognised as stale.
        row: Its place in the request table while it runs, else None.
        num_computed: Tokens whose keys and values are in the cache or will be once the steps in flight are done.
        num_in_flight: Sampled tokens that were launched but not committed yet.
        num_cached: Prompt tokens that the prefix cache provided at the last admission.
        num_preemptions: How often the request lost its blocks.
        has_long_rope: Whether what it has in the cache was computed with the rotary frequencies of long sequences.
        is_restoring: Whether a step in flight copies its blocks back from host memory: until they are known to have
            arrived, nobody else may use them.
        error: Why it failed.
        finish_reason: Why it ended.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    stop: StopRules
    streaming: bool = False
    record_timestamps: bool = False
    cache_salt: str | None = None
    embeds: PromptEmbeds | None = None
    parent_id: str | None = None
    is_pin: bool = False
    generated: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    timestamps: list[float] = field(default_factory=list)
    status: RequestStatus = RequestStatus.PENDING
    epoch: int = 0
    row: int | None = None
    num_computed: int = 0
    num_in_flight: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    has_long_rope: bool = False
    is_restoring: bool = False
    created_time: float = field(default_factory=time.perf_counter)
    started_time: float = -1.0
    finished_time: float = -1.0
    error: str | None = None
    finish_reason: FinishReason | None = None

    @property
    def cache_keys(self) -> tuple[tuple[str, str], ...]:
        """What cached prefixes must have been computed under, beside their tokens: kinds and values."""
        salt = () if self.cache_salt is None else (("cache_salt", self.cache_salt),)
        return salt if self.embeds is None else (*salt, ("embeds", self.embeds.digest))

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and generated."""
        return len(self.prompt_ids) + len(self.generated)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and generated tokens, as a new list."""
        return self.prompt_ids + self.generated

    @property
    def num_remaining(self) -> int:
        """Tokens still to run before the next token can be sampled (tokens in flight included)."""
        return len(self.prompt_ids) + len(self.generated) + self.num_in_flight - self.num_computed

    @property
    def is_prompt_scored(self) -> bool:
        """Whether nobody waits for the log-probability of a token of the prompt any more."""
        return not self.sampling.prompt_logprobs or len(self.prompt_logprobs) == len(self.prompt_ids) - 1

    @property
    def is_terminal(self) -> bool:
        """Whether the request has ended, however."""
        return self.status >= RequestStatus.FINISHED

    def to_output(self, num_tokens: int | None = None) -> GenerationOutput:
        """A snapshot for the caller; later changes of the request do not show in it.

        Args:
            num_tokens: Shows only the first `num_tokens` generated tokens; None shows all.
        """
        return GenerationOutput(
            request_id=self.request_id,
            prompt_ids=list(self.prompt_ids),
            generated_tokens=self.generated[:num_tokens],
            logprobs=self.logprobs[:num_tokens],
            error=self.error,
            status=self.status,
            created_time=self.created_time,
            lifespan=(self.started_time, self.finished_time),
            timestamps=self.timestamps[:num_tokens] if self.record_timestamps else None,
            finish_reason=self.finish_reason,
            top_logprobs=self.top_logprobs[:num_tokens],
            prompt_logprobs=list(self.prompt_logprobs) if self.sampling.prompt_logprobs else None,
        )
