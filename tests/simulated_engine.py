"""An engine without tensors: the real scheduler and block manager, a simulated cache and a model that is a formula.

The cache holds, for each token, a fingerprint of the whole prefix up to it, as keys and values of a real model do. A
step reads the fingerprints of all positions that its rows attend to, in every group of layers: a block that is stale,
forked wrongly, shared with the wrong request or group, written twice or freed too early shows at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cbtriton.block_manager import NULL_BLOCK, BlockManager, Bundle
from cbtriton.cache_layout import CacheLayout, GroupKind
from cbtriton.plan import BatchPlan, SampledToken, ScheduledRow, ScoredPrompt, StepResult
from cbtriton.request import GenerationOutput, HostProcessing, Request, RequestStatus, SamplingParams, StopRules
from cbtriton.scheduler import FIFO, Scheduler, SchedulerLimits, SchedulingPolicy
from cbtriton.stopping import StopChecker
from cbtriton.swap import HostBlocks

VOCAB_SIZE = 11
EOS = 0
BROKEN_SEED = -1  # a request with this seed gets unusable logits


def fingerprints(token_ids: Sequence[int]) -> list[int]:
    """One number per position that stands for all tokens up to it."""
    values, value = [], 0
    for token in token_ids:
        value = (value * 1_000_003 + token + 1) % (2**61 - 1)
        values.append(value)
    return values


def next_token(fingerprint: int, seed: int) -> int:
    """The model and its sampler."""
    return ((fingerprint + 7919 * seed) * 2_654_435_761 >> 16) % VOCAB_SIZE


def score(fingerprint: int, target: int) -> float:
    """Stands for a log-probability of a token of a prompt."""
    return -float((fingerprint + target) % 1009)


def prompt_scores(request: Request) -> list[float]:
    """What a request that asks for them gets."""
    return list(map(score, fingerprints(request.prompt_ids), request.prompt_ids[1:]))


def answer(request: Request) -> list[int]:
    """What the request generates when it runs alone on a machine without limits."""
    tokens, generated = list(request.prompt_ids), []
    while len(generated) < request.stop.max_new_tokens:
        generated.append(next_token(fingerprints(tokens)[-1], request.sampling.seed))
        tokens.append(generated[-1])
        if generated[-1] in request.stop.eos_token_ids:
            break
    return generated


@dataclass(frozen=True, slots=True)
class Entry:
    """What one position of the cache holds.

    Attributes:
        fingerprint: The prefix up to it.
        weights: The oldest weights that anything in that prefix was computed with.
        group: The group whose keys and values these are.
    """

    fingerprint: int
    weights: int
    group: int


# What a copy that failed leaves behind.
NONSENSE = Entry(-1, 0, -1)


class SimulatedCache(BlockManager):
    """Block manager and blocks in one: a block that becomes nobody's forgets what it holds before the next step.

    Attributes:
        released: Blocks that became nobody's since the last step.
        contents: What each position of each block holds; None where nothing was written.
        sealed: Blocks that an index or several tables referred to at the last `seal`, and that are still alive: what
            is written in them must not be written again.
    """

    def __init__(self, num_blocks: int, kinds: tuple[GroupKind, ...], share_blocks: bool) -> None:
        super().__init__(num_blocks, kinds, share_blocks)
        self.largest_page = max(kind.page_size for kind in kinds)
        self.contents: list[list[Entry | None]] = [[None] * self.largest_page for _ in range(num_blocks + 1)]
        self.sealed: set[int] = set()
        self.released: set[int] = set()

    def seal(self) -> None:
        held = [bundle for table in self._tables.values() for mine in table.kinds for bundle in mine.bundles if bundle]
        shared = {block_id for bundle in held if self._ref_counts[bundle[0]] > 1 for block_id in bundle}
        self.sealed = shared | {block_id for indexed in self._indexed.values() for block_id in indexed.bundle}

    def _give_back(self, bundle: Bundle) -> None:
        super()._give_back(bundle)
        self.released.update(bundle)
        self.sealed.difference_update(bundle)

    def wipe_released(self) -> None:
        for block_id in self.released:
            self.contents[block_id] = [None] * self.largest_page
        self.released.clear()


@dataclass(slots=True)
class DeviceRow:
    """A row of the request table."""

    tokens: list[int]
    prompt_length: int
    seed: int
    weights: int
    fingerprints: list[int]


class SimulatedEngine:
    """Steps the scheduler as the engine does, and checks each plan while it runs it.

    Args:
        page_size: Tokens per page of the only kind of groups, where `kinds` names none.
        kinds: The kinds of groups.
        depth: Steps that may be in flight when the next one is planned.
        copy_fails: Asked for each copy to host memory (`out`) or back (`in`): whether it fails, and leaves nonsense.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 16,
        page_size: int = 4,
        max_batch_tokens: int = 32,
        max_requests: int = 8,
        safety_margin: float = 0.0,
        max_decode_blocks: int = 1000,
        share_blocks: bool = True,
        policy: SchedulingPolicy = FIFO,
        kinds: tuple[GroupKind, ...] = (),
        depth: int = 0,
        num_host_blocks: int = 0,
        copy_fails: Callable[[str], bool] = lambda direction: False,
    ) -> None:
        kinds = kinds or (GroupKind(window=0, page_size=page_size, num_groups=1),)
        # Who belongs to which group, and bytes, are nobody's business here.
        self.layout = CacheLayout(kinds, (), 1, 1, 1)
        self.blocks = SimulatedCache(num_blocks, kinds, share_blocks)
        self.limits = SchedulerLimits(max_batch_tokens, max_requests, safety_margin, max_decode_blocks * page_size)
        self.host_blocks = HostBlocks(num_host_blocks)
        self.scheduler = Scheduler(
            policy,
            self.blocks,
            self.host_blocks,
            self.limits,
            StopChecker(lambda: None, lambda criterion, tokens: criterion(tokens, None)).check,
        )
        self.depth = depth
        self.copy_fails = copy_fails
        self.plans: list[BatchPlan] = []
        self.updates: list[GenerationOutput] = []
        self.finals: list[GenerationOutput] = []
        self.requests: list[Request] = []
        # Blocks of each pinned prompt.
        self.pins: dict[str, int] = {}
        self._in_flight: deque[tuple[BatchPlan, StepResult]] = deque()
        self._rows: dict[int, DeviceRow] = {}
        # By row and group.
        self._tables: dict[tuple[int, int], dict[int, int]] = {}
        self._kind_of_group = [kind for kind in kinds for _ in range(kind.num_groups)]
        self._weights = 0
        self._host_contents: dict[int, list[Entry | None]] = {}

    # ----------------------------------------------------------------------------------------- requests

    @property
    def capacity(self) -> int:
        """Tokens that fit the cache beside what is pinned, or about to be."""
        num_blocks = self.blocks.num_blocks - sum(self.pins.values())
        return self.layout.num_fitting_tokens(num_blocks, self.blocks.num_blocks * self.blocks.largest_page)

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_new_tokens: int = 4,
        *,
        seed: int = 0,
        eos: bool = False,
        streaming: bool = False,
        salt: str | None = None,
        parent_id: str | None = None,
        has_functions: bool = False,
        is_scored: bool = False,
    ) -> Request:
        """Adds a request that fits, as the manager makes sure."""
        assert len(prompt) + max_new_tokens - 1 <= self.capacity
        host = HostProcessing(processors=(lambda token_ids, scores: scores,)) if has_functions else None
        request = Request(
            request_id,
            list(prompt),
            SamplingParams(seed=seed, host=host, prompt_logprobs=is_scored and parent_id is None),
            StopRules(max_new_tokens, frozenset({EOS}) if eos else frozenset()),
            streaming=streaming,
            cache_salt=salt,
            parent_id=parent_id,
        )
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def pin(self, request_id: str, prompt: Sequence[int], salt: str | None = None) -> bool:
        """Pins a prompt of whole pages, if there is room for it beside what any request needs. Ids begin with `pin`."""
        num_blocks = self.layout.pinned_blocks(len(prompt))
        open_requests = [request for request in self.requests if not request.is_terminal]
        longest = max([1, *(len(r.prompt_ids) + r.stop.max_new_tokens - 1 for r in open_requests)])
        needed = max(self.layout.peak_blocks(len(prompt), 1), num_blocks + self.layout.peak_blocks(longest, 1))
        if needed > self.blocks.num_blocks - sum(self.pins.values()):
            return False
        self.pins[request_id] = num_blocks
        stop, sampling = StopRules(1, frozenset()), SamplingParams()
        self.scheduler.add(Request(request_id, list(prompt), sampling, stop, cache_salt=salt, is_pin=True))
        return True

    def unpin(self, request_id: str) -> None:
        """Gives a pinned prompt up."""
        del self.pins[request_id]
        self.scheduler.unpin(request_id)

    def add_family(self, request_id: str, prompt: Sequence[int], max_new_tokens: int, size: int, **kwargs) -> None:
        """Adds a request with `size - 1` children, each with a seed of its own."""
        self.add(request_id, prompt, max_new_tokens, **kwargs)
        for child in range(1, size):
            child_id = f"{request_id}__child#{child - 1}"
            self.add(child_id, prompt, max_new_tokens, parent_id=request_id, **kwargs | {"seed": child})

    def cancel(self, request_id: str) -> list[GenerationOutput]:
        """Cancels a request."""
        outputs = self.scheduler.cancel(request_id)
        self._deliver(outputs)
        return outputs

    def change_weights(self) -> None:
        """Updates the model between steps, as a pause does."""
        while self._in_flight:
            self._commit_oldest()
        self._weights += 1
        self.scheduler.reset_prefix_cache()

    # -------------------------------------------------------------------------------------------- steps

    def step(self) -> BatchPlan | None:
        """Launches a step if there is one, and commits the oldest one in flight when it is its turn."""
        self.blocks.seal()
        plan = self.scheduler.schedule()
        is_launched = isinstance(plan, BatchPlan)
        if is_launched:
            self._check_shape(plan)
            self._in_flight.append((plan, self._run(plan)))
            self.plans.append(plan)
        elif not self._in_flight:
            assert not self.scheduler.has_requests, "requests wait for nothing"
        if self._in_flight and (not is_launched or len(self._in_flight) > self.depth):
            self._commit_oldest()
        self.check()
        return plan if is_launched else None

    def run(self, max_steps: int | None = None) -> dict[str, list[int]]:
        """Steps until all requests have ended; returns the tokens of each."""
        work = sum(len(request.prompt_ids) + request.stop.max_new_tokens for request in self.requests)
        limit = len(self.plans) + (2 * work + 10 if max_steps is None else max_steps)
        while self.scheduler.has_requests or self._in_flight:
            self.step()
            assert len(self.plans) <= limit, "the requests do not get on"
        self.check_end()
        return {output.request_id: output.generated_tokens for output in self.finals}

    def _commit_oldest(self) -> None:
        self._deliver(self.scheduler.commit(*self._in_flight.popleft()))

    def _deliver(self, outputs: list[GenerationOutput]) -> None:
        outputs = [output for output in outputs if not output.request_id.startswith("pin")]
        self.updates += outputs
        self.finals += [output for output in outputs if output.is_finished()]

    # ------------------------------------------------------------------------------------------- device

    def _run(self, plan: BatchPlan) -> StepResult:
        for start in plan.row_starts:
            self._rows[start.row] = DeviceRow(
                list(start.token_ids), start.prompt_length, start.sampling.seed, self._weights, []
            )
        for update in plan.table_updates:
            for entries in update.entries:
                table = self._tables.setdefault((update.row, entries.group), {})
                table.update(enumerate(entries.block_ids, entries.first_index))
        failed_swaps = self._swap_out(plan)
        self.blocks.wipe_released()
        self._copy_blocks(plan)
        failed_swaps += self._swap_in(plan)
        owners: dict[int, int] = {}
        for row in plan.rows:
            self._write(row, owners)
        for row in plan.rows:
            self._read(row)
        self._check_host_rows(plan)
        scores = tuple(self._score(plan, scored) for scored in plan.scored_prompts)
        sampled = tuple(self._sample(row) for row in plan.rows if row.samples)
        return StepResult(sampled, tuple(failed_swaps), scores)

    def _swap_out(self, plan: BatchPlan) -> list[str]:
        failed = []
        targets = [block_id for swap in plan.swaps_out for block_id in swap.host_blocks]
        assert len(set(targets)) == len(targets), "a host block is written twice"
        for swap in plan.swaps_out:
            if self.copy_fails("out"):
                failed.append(swap.request_id)
                self._host_contents |= {target: [NONSENSE] * self.blocks.largest_page for target in swap.host_blocks}
                continue
            for source, target in zip(swap.device_blocks, swap.host_blocks, strict=True):
                self._host_contents[target] = list(self.blocks.contents[source])
        return failed

    def _swap_in(self, plan: BatchPlan) -> list[str]:
        failed = []
        for swap in plan.swaps_in:
            assert self.blocks.sealed.isdisjoint(swap.device_blocks), "what others may read is written again"
            if self.copy_fails("in"):
                failed.append(swap.request_id)
            for source, target in zip(swap.host_blocks, swap.device_blocks, strict=True):
                # What was copied back must not be used again.
                contents = self._host_contents.pop(source)
                self.blocks.contents[target] = (
                    [NONSENSE] * self.blocks.largest_page if swap.request_id in failed else contents
                )
        return failed

    def _copy_blocks(self, plan: BatchPlan) -> None:
        sources = {copy.source for copy in plan.block_copies}
        targets = [copy.target for copy in plan.block_copies]
        assert len(set(targets)) == len(targets)
        assert sources.isdisjoint(targets), "a copy reads what another one writes"
        for copy in plan.block_copies:
            assert copy.target not in self.blocks.sealed
            self.blocks.contents[copy.target] = list(self.blocks.contents[copy.source])

    def _write(self, row: ScheduledRow, owners: dict[int, int]) -> None:
        """Writes the row's new keys and values; `owners` says which row wrote each block in this step."""
        state = self._rows[row.row]
        end = row.start + row.count
        assert len(state.tokens) >= end, "a token runs before it was sampled"
        state.fingerprints = fingerprints(state.tokens[:end])
        sees_nonsense = any(
            self._entry(row.row, group, position) is NONSENSE
            for group in range(len(self._kind_of_group))
            for position in range(self._first_seen(group, row.start), row.start)
        )
        for position in range(row.start, end):
            for group in range(len(self._kind_of_group)):
                block_id, offset = self._place(row.row, group, position)
                assert block_id != NULL_BLOCK
                assert owners.setdefault(block_id, row.row) == row.row, "two rows write one block in one step"
                is_written = self.blocks.contents[block_id][offset] is not None
                assert not (is_written and block_id in self.blocks.sealed), "what others may read is written again"
                weights = self._weights
                if position and self._first_seen(group, position) < position:
                    weights = min(weights, self._entry(row.row, group, position - 1).weights)
                entry = NONSENSE if sees_nonsense else Entry(state.fingerprints[position], weights, group)
                self.blocks.contents[block_id][offset] = entry

    def _read(self, row: ScheduledRow) -> None:
        """Attends to everything that the row's tokens see, through the row's own block tables on the device."""
        state = self._rows[row.row]
        for entries in self.blocks.entries(row.request_id):
            table = self._tables[row.row, entries.group]
            mine = tuple(table[entries.first_index + offset] for offset in range(len(entries.block_ids)))
            assert mine == entries.block_ids, "device and host tables differ"
        for group in range(len(self._kind_of_group)):
            for position in range(self._first_seen(group, row.start), row.start + row.count):
                entry = self._entry(row.row, group, position)
                if entry is NONSENSE:
                    # Nobody may ever get the token that comes of this, and no index may lead to it.
                    state.fingerprints = []
                    return
                where = f"{row.request_id} reads position {position} of group {group}"
                assert entry.fingerprint == state.fingerprints[position], f"{where}: another prefix"
                assert entry.group == group, f"{where}: another group's"
                assert entry.weights >= state.weights, f"{where}: of old weights"

    def _first_seen(self, group: int, position: int) -> int:
        window = self._kind_of_group[group].window
        return max(0, position - window + 1) if window else 0

    def _place(self, row: int, group: int, position: int) -> tuple[int, int]:
        page, offset = divmod(position, self._kind_of_group[group].page_size)
        return self._tables[row, group][page], offset

    def _entry(self, row: int, group: int, position: int) -> Entry:
        block_id, offset = self._place(row, group, position)
        entry = self.blocks.contents[block_id][offset]
        assert entry is not None, f"position {position} of row {row} is read in group {group}, and nobody wrote it"
        return entry

    def _check_host_rows(self, plan: BatchPlan) -> None:
        sampling = [row for row in plan.rows if row.samples]
        by_index = {host_row.sample_index: host_row for host_row in plan.host_rows}
        for index, row in enumerate(sampling):
            request = self.scheduler._requests[row.request_id]
            assert (index in by_index) == (request.sampling.host is not None)
            if index in by_index:
                host_row, state = by_index[index], self._rows[row.row]
                assert (host_row.row, host_row.token_ids) == (row.row, state.tokens), "a function sees another history"
                assert host_row.prompt_length == state.prompt_length

    def _score(self, plan: BatchPlan, scored: ScoredPrompt) -> tuple[float, ...]:
        row = plan.rows[scored.row_index]
        values = self._rows[row.row].fingerprints
        assert scored.start == row.start
        assert 0 < len(scored.target_ids) <= row.count
        # Nothing where the row read nonsense: the row is about to be dropped.
        return tuple(
            score(values[scored.start + i], target) if values else 0.0 for i, target in enumerate(scored.target_ids)
        )

    def _sample(self, row: ScheduledRow) -> SampledToken:
        state = self._rows[row.row]
        token = next_token(state.fingerprints[-1], state.seed) if state.fingerprints else VOCAB_SIZE
        state.tokens.append(token)
        return SampledToken(token, None, "broken" if state.seed == BROKEN_SEED else None)

    # ------------------------------------------------------------------------------------------- checks

    def _check_shape(self, plan: BatchPlan) -> None:
        rows = plan.rows
        ends = [row.start + row.count for row in rows]
        assert 0 < sum(row.count for row in rows) == plan.num_tokens <= self.limits.max_batch_tokens
        assert min(row.count for row in rows) >= 1
        assert len({row.row for row in rows}) == len({row.request_id for row in rows}) == len(rows)
        assert self.scheduler.num_running <= self.limits.max_requests
        assert plan.max_seq_len == max(ends)
        fits_decode = plan.max_seq_len <= self.limits.max_decode_tokens
        assert (plan.path == "decode") == (plan.num_tokens == len(rows) and fits_decode)
        started = {start.row: len(start.token_ids) for start in plan.row_starts}
        for row, end in zip(rows, ends, strict=True):
            num_known = started.get(row.row) or len(self._rows[row.row].tokens)
            assert row.samples == (end == num_known), "a row samples exactly when all its tokens have run"

    def check(self) -> None:
        """What holds between any two calls."""
        self.blocks.check_invariants()
        self.host_blocks.check_invariants()
        waiting = {request.request_id for request in self.requests if request.row is None and not request.is_terminal}
        waiting |= {request.request_id for request in self.scheduler._waiting}
        assert set(self.host_blocks._offloaded) <= waiting, "a request that does not wait holds host blocks"
        assert self.blocks.num_available + self.blocks.num_in_use == self.blocks.num_blocks
        assert self.blocks.num_cached <= self.blocks.num_available
        for request in self.requests:
            if request.row is None and not request.is_terminal:
                assert request.num_computed == request.num_in_flight == 0, (
                    "a request without blocks has computed tokens"
                )
        ended = [output.request_id for output in self.finals]
        num_pinning = sum(request.is_pin for request in self.scheduler._requests.values())
        num_open = self.scheduler.num_running + self.scheduler.num_waiting - num_pinning
        assert len(ended) + num_open == len(self.requests), "a request was lost or ended twice"

    def check_end(self) -> None:
        """What holds once nothing is left to do."""
        assert not self.scheduler.has_requests
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.blocks.num_in_use == self.blocks.num_pinned <= sum(self.pins.values())
        assert self.host_blocks.num_in_use == 0
        # Ids may be used again, but only one after the other.
        assert sorted(output.request_id for output in self.finals) == sorted(r.request_id for r in self.requests)
        for request in self.requests:
            expected = answer(request)
            if request.sampling.seed == BROKEN_SEED:
                assert request.status in (RequestStatus.FAILED, RequestStatus.CANCELLED)
                assert request.generated == []
            elif request.status == RequestStatus.CANCELLED:
                assert request.generated == expected[: len(request.generated)]
            else:
                assert request.status == RequestStatus.FINISHED, request.error
                assert request.generated == expected, f"{request.request_id} got other tokens than alone"
                if request.sampling.prompt_logprobs:
                    assert request.prompt_logprobs == prompt_scores(request)
                assert request.finish_reason == ("eos" if EOS in expected and request.stop.eos_token_ids else "length")
