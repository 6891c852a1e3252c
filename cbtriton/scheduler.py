"""Decides what runs in the next step, and what its results mean for the requests.

Owns every `Request` from the moment it is added until it ends, and is the only module that changes one. It asks the
block manager for memory, and returns frozen plans; it never sees a tensor, a thread or a clock of the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from cbtriton.block_manager import BlockManager
from cbtriton.config import EngineConfig
from cbtriton.plan import (
    BatchPlan,
    BlockCopy,
    BlockTableUpdate,
    EmbeddedPrompt,
    HostRow,
    Idle,
    LogprobRow,
    RowStart,
    SampledToken,
    ScheduledRow,
    ScoredPrompt,
    StepResult,
)
from cbtriton.request import FinishReason, GenerationOutput, Request, RequestStatus
from cbtriton.stopping import StopDecision
from cbtriton.swap import HostBlocks

# Tokens of prompts whose log-probabilities one step computes at most: each has the logits of a whole vocabulary.
MAX_SCORED_TOKENS = 256


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """In which order running requests get their share of a step.

    Attributes:
        name: What `ContinuousBatchingConfig.scheduler_type` calls it.
        order: Sorts the running requests (given in order of admission); must be a permutation of its input.
        default_safety_margin: Share of blocks held back from new prefills when the configuration names none.
    """

    name: str
    order: Callable[[Sequence[Request]], Sequence[Request]]
    default_safety_margin: float


def _is_decoding(request: Request) -> bool:
    return request.num_remaining <= 1


def _has_computed_prompt(request: Request) -> bool:
    return request.num_computed >= len(request.prompt_ids)


def _decodes_first(running: Sequence[Request]) -> Sequence[Request]:
    return sorted(running, key=lambda request: not _is_decoding(request))


def _prefills_first(running: Sequence[Request]) -> Sequence[Request]:
    return sorted(running, key=_is_decoding)


FIFO = SchedulingPolicy("fifo", _decodes_first, default_safety_margin=0.15)
PREFILL_FIRST = SchedulingPolicy("prefill_first", _prefills_first, default_safety_margin=0.0)


class PolicyRegistry:
    """Scheduling policies by name. A researcher adds one with `register` before making a manager."""

    def __init__(self, policies: Iterable[SchedulingPolicy]) -> None:
        self._policies = {policy.name: policy for policy in policies}

    def register(self, policy: SchedulingPolicy) -> None:
        """Adds a policy.

        Raises:
            ValueError: The name is taken.
        """
        if policy.name in self._policies:
            raise ValueError(f"scheduler {policy.name!r} is already registered; choose another name")
        self._policies[policy.name] = policy

    def get(self, name: str) -> SchedulingPolicy:
        """The policy of that name.

        Raises:
            ValueError: There is none; the message lists those that exist.
        """
        if name not in self._policies:
            raise ValueError(f"scheduler_type must be one of {sorted(self._policies)}, got {name!r}")
        return self._policies[name]

    def default_margins(self) -> dict[str, float]:
        """Each policy's default safety margin."""
        return {name: policy.default_safety_margin for name, policy in self._policies.items()}


SCHEDULERS = PolicyRegistry([FIFO, PREFILL_FIRST])


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The budgets of a step and of a request.

    Attributes:
        max_batch_tokens: Query tokens per step.
        max_requests: Requests that run at once, which is also the number of rows of the request table.
        safety_margin: Share of all blocks below which no new prefill starts, 0…1.
        max_decode_tokens: Longest context that the decode path takes; 0 turns it off.
        keeps_states: Whether something of a request is kept beside the pages: a fork needs that, too.
        least_prompt_piece: Tokens of a prompt that run at once at least, where it has as many.
        rope_switch_length: A request with more tokens than this has other keys; None: that makes no difference.
    """

    max_batch_tokens: int
    max_requests: int
    safety_margin: float
    max_decode_tokens: int
    keeps_states: bool = False
    least_prompt_piece: int = 1
    rope_switch_length: int | None = None

    @classmethod
    def of(cls, config: EngineConfig) -> SchedulerLimits:
        """The budgets that an engine's configuration describes."""
        max_decode_tokens = config.max_decode_blocks * config.page_size
        return cls(
            config.max_batch_tokens,
            config.max_requests,
            config.safety_margin,
            max_decode_tokens,
            keeps_states=config.keeps_states,
            least_prompt_piece=config.least_prompt_piece,
            rope_switch_length=config.rope_switch_length,
        )


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the scheduler was made; see `EngineStats` for their meaning."""

    prompt_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_cached_tokens: int = 0
    generated_tokens: int = 0
    dropped_tokens: int = 0
    preemptions: int = 0
    offloads: int = 0
    restores: int = 0
    restored_tokens: int = 0
    failed_swaps: int = 0
    forks: int = 0
    requests_finished: int = 0
    requests_failed: int = 0
    requests_cancelled: int = 0


@dataclass(slots=True)
class _Share:
    """One request's share of the step being planned."""

    request: Request
    row: int
    start: int
    count: int
    num_scored: int
    table_update: BlockTableUpdate | None
    row_start: RowStart | None = None
    block_copies: tuple[BlockCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class _Prefix:
    """What a request has in the cache when it is admitted; `forked_row` is the one of the request it forks, if any."""

    num_tokens: int
    forked_row: int | None
    block_copies: tuple[BlockCopy, ...]


@dataclass(slots=True)
class _Draft:
    """The step being planned: shares in the order in which they were granted, and what is left of the budgets."""

    budget: int
    scored_budget: int = 0
    shares: dict[str, _Share] = field(default_factory=dict)

    def grant(self, share: _Share) -> None:
        self.shares[share.request.request_id] = share
        self.budget -= share.count
        self.scored_budget -= share.num_scored

    def withdraw(self, request_id: str) -> None:
        share = self.shares.pop(request_id, None)
        if share is not None:
            self.budget += share.count
            self.scored_budget += share.num_scored

    def room(self, request: Request) -> int:
        """Tokens that the request may run."""
        return self.budget if request.is_prompt_scored else min(self.budget, self.scored_budget)

    def admits(self, request_id: str) -> bool:
        """Whether the request enters its row with this step."""
        share = self.shares.get(request_id)
        return share is not None and share.row_start is not None


class Scheduler:
    """Plans steps over waiting and running requests.

    Args:
        policy: Order of the running requests.
        blocks: The block manager; this scheduler is its only user.
        host_blocks: Where the cache of preempted requests goes while there is room; likewise.
        limits: Budgets.
        stop_check: Says after each new token whether the request ends and how much of it may be streamed.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        blocks: BlockManager,
        host_blocks: HostBlocks,
        limits: SchedulerLimits,
        stop_check: Callable[[Request], StopDecision],
    ) -> None:
        self.counters = SchedulerCounters()
        self._policy = policy
        self._blocks = blocks
        self._host_blocks = host_blocks
        self._limits = limits
        self._stop_check = stop_check
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        # Requests that wait for the prompt of their parent, by its id.
        self._children: dict[str, list[Request]] = {}
        # Requests whose prompts stay in the cache, by id; those that have ended hold a pin there.
        self._pins: dict[str, Request] = {}
        # In order of admission: the last one is the newest and the first to be preempted.
        self._running: dict[str, Request] = {}
        self._free_rows = list(range(limits.max_requests - 1, -1, -1))
        # Since the last plan.
        self._rows_left: list[int] = []
        # Running requests whose state before the last token of the prompt is kept, and how many wait to fork it.
        self._kept_states: dict[str, int] = {}
        self._forked_rows: list[int] = []
        self._last_epoch = 0

    # ------------------------------------------------------------------------------------------ questions

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no row."""
        return len(self._requests) - len(self._running)

    @property
    def has_requests(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._requests)

    # --------------------------------------------------------------------------------------------- requests

    def add(self, request: Request) -> None:
        """Takes a request in. It must fit the cache on its own (the manager checks).

        A request with a `parent_id` waits until the parent's prompt is computed and forks its cache. One that pins its
        prompt ends with an error where another request that is here would not have enough blocks any more; when cached
        prefixes are forgotten, it runs again.

        Raises:
            ValueError: The id is in flight.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is in flight; use another id or wait for its result")
        self._requests[request.request_id] = request
        if request.is_pin:
            self._pins[request.request_id] = request
        if request.parent_id in self._requests:
            self._children.setdefault(request.parent_id, []).append(request)
        else:
            self._waiting.append(request)
        self.counters.prompt_tokens += len(request.prompt_ids)

    def unpin(self, request_id: str) -> None:
        """Lets a pinned prompt be evicted like others, even one that is yet to be computed; unknown ids do nothing."""
        if request_id in self._pins and self._pins.pop(request_id).is_terminal:
            self._blocks.unpin(request_id)

    def cancel(self, request_id: str) -> list[GenerationOutput]:
        """Ends a request and the children that still wait for its prompt. Unknown ids have no effect.

        Returns:
            One final output per request that ended, with the tokens so far.
        """
        outputs = []
        for child in self._children.get(request_id, []).copy():
            outputs += self.cancel(child.request_id)
        if request_id in self._requests:
            outputs.append(self._end(self._requests[request_id], RequestStatus.CANCELLED, "cancelled"))
        return outputs

    def fail_all(self, error: str) -> list[GenerationOutput]:
        """Ends every request with `error`.

        Returns:
            One final output per request.
        """
        return [self._end(request, RequestStatus.FAILED, "error", error) for request in list(self._requests.values())]

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes and what preempted requests computed; running ones keep what they have.

        Pinned prompts are computed again, before anything else that waits.
        """
        self._blocks.reset_prefix_cache()
        self._host_blocks.clear()
        for request_id, pinned in reversed(self._pins.items()):
            if pinned.row is not None:
                self._return_to_queue(pinned)
            elif pinned.is_terminal:
                self._blocks.unpin(request_id)
                again = Request(
                    request_id,
                    pinned.prompt_ids,
                    pinned.sampling,
                    pinned.stop,
                    cache_salt=pinned.cache_salt,
                    is_pin=True,
                )
                self._pins[request_id] = self._requests[request_id] = again
                self._waiting.appendleft(again)

    # --------------------------------------------------------------------------------------------- planning

    def schedule(self) -> BatchPlan | Idle:
        """Plans the next step, on the assumption that the steps in flight will succeed."""
        self._release_children()
        draft = _Draft(budget=self._limits.max_batch_tokens, scored_budget=MAX_SCORED_TOKENS)
        self._continue_running(draft)
        for share in draft.shares.values():
            self._index(share)
        self._admit_waiting(draft)
        if not draft.shares:
            return Idle(has_waiting=bool(self._requests))
        return self._freeze(draft)

    def _release_children(self) -> None:
        """Moves the children of parents whose prompt is computed to the front of the queue."""
        for parent_id in list(self._children):
            if _has_computed_prompt(self._requests[parent_id]):
                self._queue_children(parent_id)

    def _queue_children(self, parent_id: str) -> None:
        self._waiting.extendleft(reversed(self._children.pop(parent_id, [])))

    def _continue_running(self, draft: _Draft) -> None:
        for request in self._policy.order(list(self._running.values())):
            # One that was preempted for the sake of an earlier one has no row any more; one whose last token is in
            # flight has nothing left to run.
            row = request.row
            wanted = min(request.num_remaining, draft.room(request))
            if row is None or wanted <= 0 or self._must_wait(request):
                continue
            if self._needs_long_rope(request.num_tokens) and not request.has_long_rope:
                # All that it has was computed for a shorter sequence. What its blocks hold may serve others.
                self._return_to_queue(request)
                continue
            self._blocks.leave_window(request.request_id, request.num_computed)
            count = self._piece(request, self._make_room(request, wanted, draft))
            if count > 0:
                draft.grant(self._share(request, row, count))

    def _piece(self, request: Request, count: int) -> int:
        """How many of the next `count` tokens run, so that no piece of the prompt gets too small, this one or later."""
        least = self._limits.least_prompt_piece
        num_left = len(request.prompt_ids) - request.num_computed
        if least == 1 or num_left <= count:
            return count
        count = min(count, num_left - least)
        return count if count >= least else 0

    def _must_wait(self, request: Request) -> bool:
        """Whether tokens in flight keep the request from running: the last one, or any that its caller must see."""
        if len(request.generated) + request.num_in_flight >= request.stop.max_new_tokens:
            return True
        gets_long = self._needs_long_rope(request.num_tokens + request.num_in_flight) and not request.has_long_rope
        return request.num_in_flight > 0 and (gets_long or request.sampling.host is not None)

    def _needs_long_rope(self, num_tokens: int) -> bool:
        return self._limits.rope_switch_length is not None and num_tokens > self._limits.rope_switch_length

    def _cache_keys(self, request: Request, num_tokens: int) -> tuple[tuple[str, str], ...]:
        """What prefixes of the request must have been computed under while it has `num_tokens`."""
        return (*request.cache_keys, ("rope", "long")) if self._needs_long_rope(num_tokens) else request.cache_keys

    def _make_room(self, request: Request, wanted: int, draft: _Draft) -> int:
        """How many of `wanted` tokens the request can run, after preempting newer requests as far as needed."""
        while True:
            room = self._blocks.num_addable_tokens(request.request_id, request.num_computed, wanted)
            if room == wanted:
                return room
            victim = next(reversed(self._running.values()))
            if victim is request:
                # Nobody is newer. It waits with what it has: an older request takes its blocks if it needs them,
                # and the oldest one always gets on, so somebody does.
                return room
            self._preempt(victim, draft)

    def _preempt(self, victim: Request, draft: _Draft) -> None:
        draft.withdraw(victim.request_id)
        self._offload(victim)
        self._return_to_queue(victim)

    def _offload(self, victim: Request) -> None:
        """Keeps what the victim computed in host memory, if there is room."""
        request_id = victim.request_id
        # Steps in flight have written all that is computed before the copy reads it. The last known token runs again:
        # the one that follows it is not known, or will be dropped.
        num_tokens = min(victim.num_computed, victim.num_tokens - 1)
        # A prompt whose log-probabilities are not known yet runs again for them.
        if num_tokens == 0 or self._blocks.is_outdated(request_id) or not victim.is_prompt_scored:
            return
        if self._needs_long_rope(victim.num_tokens) and not victim.has_long_rope:
            return
        block_ids = self._blocks.seen_blocks(request_id, num_tokens)
        self.counters.offloads += self._host_blocks.offload(request_id, block_ids, num_tokens)

    def _return_to_queue(self, request: Request) -> None:
        self._leave_row(request)
        request.status = RequestStatus.PENDING
        request.num_computed = 0
        request.num_preemptions += 1
        self.counters.preemptions += 1
        self._waiting.appendleft(request)

    def _admit_waiting(self, draft: _Draft) -> None:
        while self._waiting and self._free_rows and self._has_room(draft, self._waiting[0]):
            if not self._admit(self._waiting[0], draft):
                return
            self._waiting.popleft()

    def _has_room(self, draft: _Draft, request: Request) -> bool:
        # What is cached of it only leaves less to run.
        return self._piece(request, min(draft.room(request), request.num_tokens)) > 0

    def _admit(self, request: Request, draft: _Draft) -> bool:
        """Starts a waiting request if memory allows; never preempts for it."""
        blocks = self._blocks
        # A request that would run alone always passes, here and below: all blocks are available, and it fits them.
        if blocks.num_available < max(int(self._limits.safety_margin * blocks.num_unpinned), blocks.num_groups):
            return False
        token_ids = request.token_ids
        prefix = self._attach_prefix(request, token_ids, draft)
        # All that is known must fit: a prompt that stops half-way only takes memory from others.
        num_missing = blocks.num_missing_blocks(request.request_id, len(token_ids), self._limits.max_batch_tokens)
        if num_missing > blocks.num_available:
            blocks.release(request.request_id)
            return False
        self._count_admission(request, len(token_ids), prefix)
        num_restored = self._restore(request, prefix)
        row = self._enter_row(request, prefix.num_tokens, num_restored)
        wanted = min(len(token_ids) - request.num_computed, draft.room(request))
        # Fewer only where the whole pool is too small for what layers with windows hold in such a step.
        count = self._piece(request, blocks.num_addable_tokens(request.request_id, request.num_computed, wanted))
        share = self._share(request, row, count)
        share.table_update = BlockTableUpdate(row, blocks.entries(request.request_id))
        share.row_start = RowStart(
            row,
            token_ids,
            len(request.prompt_ids),
            request.sampling,
            request.stop.eos_token_ids,
            forked_row=prefix.forked_row,
            has_long_rope=request.has_long_rope,
        )
        share.block_copies = prefix.block_copies
        draft.grant(share)
        self._index(share)
        return True

    def _attach_prefix(self, request: Request, token_ids: Sequence[int], draft: _Draft) -> _Prefix:
        """Gives the request a block table that holds as much of its tokens as others have computed already."""
        parent = self._parent_to_fork(request, draft)
        if parent is not None:
            # The prompt's last token is computed again: the child draws its own first token from it.
            num_tokens = len(request.prompt_ids) - 1
            block_copies = self._blocks.fork(parent.request_id, request.request_id, num_tokens)
            return _Prefix(num_tokens, forked_row=parent.row, block_copies=block_copies)
        # Log-probabilities of a prompt come with its tokens: what is cached is computed again for them.
        num_usable = len(token_ids) if request.is_prompt_scored else len(request.prompt_logprobs) + 1
        keys = self._cache_keys(request, len(token_ids))
        match = self._blocks.match_prefix(token_ids[:num_usable], keys)
        return _Prefix(self._blocks.start(request.request_id, match), forked_row=None, block_copies=())

    def _parent_to_fork(self, request: Request, draft: _Draft) -> Request | None:
        """The request's parent if its cache holds this request's prompt."""
        parent = self._running.get(request.parent_id) if request.parent_id is not None else None
        if parent is None or request.generated or not _has_computed_prompt(parent):
            return None
        # Copies come before the step: a parent that resumes in it may rest on blocks that the step has yet to write.
        if draft.admits(parent.request_id) or parent.is_restoring or self._blocks.is_outdated(parent.request_id):
            return None
        if not self._blocks.can_fork(parent.request_id, len(request.prompt_ids) - 1):
            return None
        if self._limits.keeps_states and parent.request_id not in self._kept_states:
            return None
        if parent.has_long_rope != self._needs_long_rope(request.num_tokens):
            return None
        # Once the parent has ended, its id may name a request that is no relation.
        is_related = parent.prompt_ids == request.prompt_ids and parent.cache_keys == request.cache_keys
        return parent if is_related else None

    def _restore(self, request: Request, prefix: _Prefix) -> int:
        """Adds what the request has in host memory to its prefix, where it has more there; returns these tokens."""
        request_id = request.request_id
        num_tokens = self._host_blocks.num_tokens(request_id)
        if num_tokens <= prefix.num_tokens:
            self._host_blocks.free(request_id)
            return 0
        # A request that forks holds its whole prompt, and one that was off-loaded before its first token less: here
        # the prefix is whole blocks.
        self._blocks.leave_window(request_id, num_tokens)
        cached = self._blocks.block_ids(request_id)
        self._blocks.extend(request_id, num_tokens, num_tokens)
        self._host_blocks.restore(request_id, self._blocks.seen_blocks(request_id, num_tokens), cached)
        num_restored = num_tokens - prefix.num_tokens
        self.counters.restores += 1
        self.counters.restored_tokens += num_restored
        return num_restored

    def _count_admission(self, request: Request, num_tokens: int, prefix: _Prefix) -> None:
        if prefix.forked_row is not None:
            self.counters.forks += 1
            if request.parent_id in self._kept_states:
                self._kept_states[request.parent_id] -= 1
                if self._kept_states[request.parent_id] == 0:
                    del self._kept_states[request.parent_id]
                    self._forked_rows.append(prefix.forked_row)
        elif self._blocks.share_blocks:
            self.counters.prefix_queried_tokens += num_tokens
            self.counters.prefix_cached_tokens += prefix.num_tokens

    def _enter_row(self, request: Request, num_cached: int, num_restored: int) -> int:
        self._last_epoch += 1
        request.epoch = self._last_epoch
        request.row = row = self._free_rows.pop()
        request.num_cached = num_cached
        request.num_computed = num_cached + num_restored
        request.has_long_rope = self._needs_long_rope(request.num_tokens)
        request.is_restoring = num_restored > 0
        request.status = RequestStatus.PREFILLING
        if request.started_time < 0:
            request.started_time = time.perf_counter()
        self._running[request.request_id] = request
        return row

    def _leave_row(self, request: Request) -> None:
        if request.row is None:
            return
        del self._running[request.request_id]
        if not request.is_restoring:
            self._blocks.index_blocks(request.request_id, request.token_ids, request.num_computed)
        self._blocks.release(request.request_id)
        self._free_rows.append(request.row)
        self._rows_left.append(request.row)
        self._kept_states.pop(request.request_id, None)
        request.row = None
        request.is_restoring = False
        request.num_in_flight = 0

    def _share(self, request: Request, row: int, count: int) -> _Share:
        """The request's next `count` tokens, with the blocks that they need."""
        start = request.num_computed
        added = self._blocks.extend(request.request_id, start, start + count)
        num_scored = 0 if request.is_prompt_scored else max(0, min(count, len(request.prompt_ids) - 1 - start))
        return _Share(request, row, start, count, num_scored, BlockTableUpdate(row, added) if added else None)

    def _index(self, share: _Share) -> None:
        request = share.request
        if request.is_restoring:
            return
        # The host learns a token in flight one step late, and so that the block it completes is whole.
        num_known = min(share.start + share.count, request.num_tokens)
        # Decodes complete a page once in `page_size` steps: skip the others before building the token list.
        if self._blocks.completes_page(num_known - share.count, num_known):
            self._blocks.index_blocks(request.request_id, request.token_ids, num_known)

    def _freeze(self, draft: _Draft) -> BatchPlan:
        """Turns the draft into a plan; from here on the step is certain to run."""
        rows: list[ScheduledRow] = []
        row_starts: list[RowStart] = []
        table_updates: list[BlockTableUpdate] = []
        block_copies: list[BlockCopy] = []
        host_rows: list[HostRow] = []
        logprob_rows: list[LogprobRow] = []
        scored_prompts: list[ScoredPrompt] = []
        embedded_prompts: list[EmbeddedPrompt] = []
        num_tokens = max_seq_len = num_samples = 0
        for share in draft.shares.values():
            request = share.request
            samples = share.count == request.num_remaining
            request.num_computed += share.count
            request.num_in_flight += samples
            sampling, start = request.sampling, share.start
            if samples and sampling.host is not None:
                prompt_length = len(request.prompt_ids)
                host_rows.append(HostRow(num_samples, share.row, request.token_ids, prompt_length, sampling.host))
            if samples and sampling.logprobs is not None:
                logprob_rows.append(LogprobRow(num_samples, sampling.logprobs, sampling.temperature))
            if share.num_scored > 0:
                targets = request.prompt_ids[start + 1 : start + 1 + share.num_scored]
                scored_prompts.append(ScoredPrompt(len(rows), start, tuple(targets)))
            if request.embeds is not None and start < len(request.prompt_ids):
                num_embedded = min(share.count, len(request.prompt_ids) - start)
                embedded_prompts.append(EmbeddedPrompt(len(rows), start, num_embedded, request.embeds))
            num_samples += samples
            keeps_state = self._limits.keeps_states and self._has_forks_at(request, start + share.count)
            if keeps_state:
                self._kept_states[request.request_id] = len(self._children[request.request_id])
            rows.append(
                ScheduledRow(request.request_id, request.epoch, share.row, start, share.count, samples, keeps_state)
            )
            num_tokens += share.count
            max_seq_len = max(max_seq_len, request.num_computed)
            if share.table_update is not None:
                table_updates.append(share.table_update)
            if share.row_start is not None:
                row_starts.append(share.row_start)
            block_copies += share.block_copies
        is_decode = num_tokens == len(rows) and max_seq_len <= self._limits.max_decode_tokens
        rows_left, self._rows_left = tuple(self._rows_left), []
        forked_rows, self._forked_rows = tuple(self._forked_rows), []
        return BatchPlan(
            path="decode" if is_decode else "varlen",
            rows=tuple(rows),
            row_starts=tuple(row_starts),
            table_updates=tuple(table_updates),
            block_copies=tuple(block_copies),
            num_tokens=num_tokens,
            max_seq_len=max_seq_len,
            swaps_out=self._host_blocks.take_swaps_out(),
            swaps_in=self._host_blocks.take_swaps_in(),
            host_rows=tuple(host_rows),
            logprob_rows=tuple(logprob_rows),
            scored_prompts=tuple(scored_prompts),
            embedded_prompts=tuple(embedded_prompts),
            rows_left=rows_left,
            forked_rows=forked_rows,
        )

    def _has_forks_at(self, request: Request, end: int) -> bool:
        """Whether others wait for the prompt of a request, and it ends with a step that computes `end` tokens."""
        # A prompt of one token leaves nothing to begin with, and no fork could run its last one as part of a piece.
        is_possible = 1 < end == len(request.prompt_ids) and self._limits.least_prompt_piece == 1
        return is_possible and request.request_id in self._children

    # ---------------------------------------------------------------------------------------------- results

    def commit(self, plan: BatchPlan, result: StepResult) -> list[GenerationOutput]:
        """Applies a step's tokens to its requests.

        Rows whose request left its row since the plan was made (cancelled, preempted, finished) are dropped.

        Returns:
            An output for each streaming request that may show more tokens, and a final one for each that ended.
        """
        now = time.perf_counter()
        outputs: list[GenerationOutput] = []
        for request_id in result.failed_swaps:
            self._lose_swap(request_id)
        if plan.swaps_in:
            self._confirm_restored(plan)
        for scored, logprobs in zip(plan.scored_prompts, result.prompt_logprobs, strict=True):
            request = self._current(plan.rows[scored.row_index])
            if request is not None:
                request.prompt_logprobs[scored.start : scored.start + len(logprobs)] = logprobs
        sampling_rows = (row for row in plan.rows if row.samples)
        for row, sampled in zip(sampling_rows, result.sampled, strict=True):
            request = self._current(row)
            if request is None:
                self.counters.dropped_tokens += 1
                continue
            output = self._commit_token(request, sampled, now)
            if output is not None:
                outputs.append(output)
        return outputs

    def _current(self, row: ScheduledRow) -> Request | None:
        """The request of a row of a plan, if it has not left its row since."""
        request = self._running.get(row.request_id)
        return request if request is not None and request.epoch == row.epoch else None

    def _lose_swap(self, request_id: str) -> None:
        """Lets the request compute its cache again, also where it runs on what it was to get back."""
        self.counters.failed_swaps += 1
        self._host_blocks.free(request_id)
        if request_id in self._running:
            self._return_to_queue(self._running[request_id])

    def _confirm_restored(self, plan: BatchPlan) -> None:
        for row in plan.rows:
            request = self._current(row)
            if request is not None:
                request.is_restoring = False

    def _commit_token(self, request: Request, sampled: SampledToken, now: float) -> GenerationOutput | None:
        request.num_in_flight -= 1
        if sampled.error is not None:
            return self._end(request, RequestStatus.FAILED, "error", sampled.error)
        request.status = RequestStatus.DECODING
        request.generated.append(sampled.token_id)
        if sampled.logprob is not None:
            request.logprobs.append(sampled.logprob)
        if sampled.top_logprobs is not None:
            request.top_logprobs.append(sampled.top_logprobs)
        if request.record_timestamps:
            request.timestamps.append(now)
        self.counters.generated_tokens += 1
        try:
            decision = self._stop_check(request)
        except Exception as error:  # The caller's functions run in there: their errors are that request's alone.
            reason = f"stop strings or criteria could not be asked: {type(error).__name__}: {error}"
            return self._end(request, RequestStatus.FAILED, "error", reason)
        if decision.finish_reason is not None:
            return self._end(request, RequestStatus.FINISHED, decision.finish_reason)
        if request.streaming and decision.num_releasable > 0:
            return request.to_output(decision.num_releasable)
        return None

    def _end(
        self, request: Request, status: RequestStatus, reason: FinishReason, error: str | None = None
    ) -> GenerationOutput:
        if request.row is None:
            queue = self._waiting if request in self._waiting else self._children[request.parent_id or ""]
            queue.remove(request)
        self._leave_row(request)
        self._host_blocks.free(request.request_id)
        self._queue_children(request.request_id)
        del self._requests[request.request_id]
        if request.request_id in self._pins and status == RequestStatus.FINISHED:
            error = self._hold_pin(request)
            status, reason = (RequestStatus.FAILED, "error") if error else (status, reason)
        if status != RequestStatus.FINISHED:
            self._pins.pop(request.request_id, None)
        request.status = status
        request.finish_reason = reason
        request.error = error
        request.finished_time = time.perf_counter()
        self.counters.requests_finished += status == RequestStatus.FINISHED
        self.counters.requests_failed += status == RequestStatus.FAILED
        self.counters.requests_cancelled += status == RequestStatus.CANCELLED
        return request.to_output()

    def _hold_pin(self, request: Request) -> str | None:
        """Pins the prompt of a request that has just ended; returns why that cannot be."""
        blocks = self._blocks
        # One more token than there is: all of the prompt may match.
        keys = self._cache_keys(request, len(request.prompt_ids))
        blocks.pin(request.request_id, blocks.match_prefix([*request.prompt_ids, 0], keys))
        for other in self._requests.values():
            needed = blocks.peak_blocks(len(other.prompt_ids) + other.stop.max_new_tokens - 1, 1)
            if needed > blocks.num_unpinned:
                num_left = blocks.num_unpinned
                blocks.unpin(request.request_id)
                return (
                    f"pinning this prefix would leave {num_left} of {blocks.num_blocks} blocks, and request "
                    f"{other.request_id!r} needs {needed}; pin it when that has ended, or raise num_blocks"
                )
        return None
