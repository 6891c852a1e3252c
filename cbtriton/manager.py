"""The continuous batching manager: the thread-safe face of the engine.

Owns the background thread that steps the engine, the inbox of requests and cancellations, and what happens when
either side stops, pauses or dies. Any thread may call any method; while it runs, only the background thread touches
the engine.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from tqdm.auto import tqdm

from cbtriton.config import ContinuousBatchingConfig, EngineConfig, KernelConfig, ModelFacts, WorkloadHints
from cbtriton.distributed import (
    IDLE_INTERVAL,
    Action,
    Arrivals,
    Ending,
    RankError,
    Wishes,
    ranks_of,
    ranks_on_this_host,
)
from cbtriton.engine import Engine
from cbtriton.graphs import capturer_for
from cbtriton.host_processing import is_met
from cbtriton.kernel_set import choose_kernels
from cbtriton.model_adapter import ModelAdapter, UnsupportedModelError
from cbtriton.model_runner import end_idle_threads
from cbtriton.request import (
    GenerationOutput,
    PromptEmbeds,
    Request,
    RequestStatus,
    SamplingParams,
    StopRules,
    TokenRule,
)
from cbtriton.request_table import MAX_EOS_IDS, MAX_RULE_PREFIXES, MAX_RULES
from cbtriton.resolve import available_memory_bytes, resolve
from cbtriton.router import OutputRouter
from cbtriton.sampling import (
    RequestLimits,
    RequestTooLongError,
    SamplingDefaults,
    child_seed,
    request_parameters,
)
from cbtriton.scheduler import SCHEDULERS
from cbtriton.stats import EngineStats, StepRecord
from cbtriton.stopping import StopChecker

logger = logging.getLogger(__name__)

# How long `add_request` waits for room in a full queue before it raises `queue.Full`, in seconds.
FULL_QUEUE_TIMEOUT = 10.0
# Share of the memory that is available before the cache is sized which packed copies of weights may take.
PACKED_WEIGHTS_SHARE = 0.25
_PIN_PREFIX = "pinned prefix "
# Outputs that a rank keeps which is not the driver, of requests that none of its callers has asked for yet.
_MAX_EARLY = 10_000


class EngineDiedError(RuntimeError):
    """The engine stopped on an error; `__cause__` is that error."""


class _State(Enum):
    NEW = auto()
    RUNNING = auto()
    STOPPING = auto()
    HARD_STOPPING = auto()
    STOPPED = auto()
    DESTROYED = auto()


class ContinuousBatchingManager:
    """Accepts generation requests from any thread and answers them from one background thread.

    Args:
        model: A transformers causal language model. It is changed only between `start` (or `warmup`) and `stop`.
        generation_config: Defaults of all requests; copied, never changed.
        continuous_batching_config: This package's or transformers' `ContinuousBatchingConfig`.
        workload_hints: What is known of the workload; helps sizing.
        kernel_config: Which kernels run.

    Attributes:
        config: The configuration as asked for.
        kernel_config: The kernels as asked for.
        engine_config: The configuration as resolved, with every decision.
        model_facts: What is known of the model and its device, for `cbtriton.resolve` and `cbtriton.simulator`.
        kernel_names: (slot, implementation) of every kernel.
        tokenizer: Decodes tokens for `stop_strings`; anything with `decode(list[int]) -> str`.

    Raises:
        ValueError: The configuration, a generation option or the model is not supported; the message says which.
    """

    def __init__(
        self,
        model: Any,
        generation_config: Any,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
        kernel_config: KernelConfig | None = None,
    ) -> None:
        self.config = config = ContinuousBatchingConfig.from_any(continuous_batching_config)
        self.model = model
        self.generation_config = copy.deepcopy(generation_config)
        self.tokenizer: Any = getattr(model, "_cbtriton_tokenizer", None)
        self._stop_checker = StopChecker(lambda: self.tokenizer, is_met)
        self._ranks = ranks_of(model, config.cpu_group_timeout)
        memory = self._ranks.least(_available_memory(model.device))
        self._adapter = ModelAdapter(model, int(memory * PACKED_WEIGHTS_SHARE))
        self._defaults = SamplingDefaults.from_generation_config(
            self.generation_config,
            model_eos=getattr(self._adapter.text_config, "eos_token_id", None),
            vocab_size=self._adapter.vocab_size,
            drop_unsupported=config.drop_unsupported_processors,
            warn=logger.warning,
        )
        self.kernel_config = kernel_config = KernelConfig.from_any(kernel_config)
        if not config.auto_switch_to_flash and kernel_config.default == "auto":
            kernel_config = replace(kernel_config, default="reference")
        self._kernels = choose_kernels(kernel_config, self._adapter.device)
        self.kernel_names = self._kernels.names
        with self._no_caller_modes():
            self._layout = self._adapter.inspect_layout()
        self._hints = WorkloadHints.from_any(workload_hints)
        self._capturer = capturer_for(self._adapter.device)
        self.model_facts = self._find_model_facts(memory)
        self.engine_config = self._resolve(config)
        # One lock for everything below and the router: a request ends and its last output arrives in one moment.
        lock = threading.RLock()
        self._router = OutputRouter(lock)
        self._changed = threading.Condition(lock)
        self._state = _State.NEW
        self._thread: threading.Thread | None = None
        self._engine: Engine | None = None
        self._keep_engine = False
        self._fatal_error: BaseException | None = None
        self._last_stats = EngineStats()
        self._last_records: list[StepRecord] = []
        self._inbox: list[Request] = []
        self._cancelled: set[str] = set()
        # Of a rank that is not the driver: what its callers submitted, by id, and final outputs of requests that they
        # may still submit.
        self._expected: dict[str, Request] = {}
        self._early: dict[str, GenerationOutput] = {}
        # By prefix and salt.
        self._pins: dict[tuple[tuple[int, ...], str | None], _Pin] = {}
        self._unpinned: list[str] = []
        self._next_pin = 0
        self._in_flight: set[str] = set()
        self._num_waiting_in_engine = 0
        self._next_ordinal = 0
        self._next_auto_id = 0
        self._pausing_threads: list[int] = []
        self._is_parked = False
        self._must_reset_prefix_cache = False
        self._warnings: set[str] = set()

    def _resolve(self, config: ContinuousBatchingConfig) -> EngineConfig:
        resolved = resolve(
            config,
            self._hints,
            self.model_facts,
            has_logits_processing=self._defaults.has_logits_processing or config.per_request_processors,
            scheduler_types=SCHEDULERS.default_margins(),
            has_processors=self._defaults.has_processors,
        )
        logger.info("kernels: %s\n%s", self._kernels.describe(), resolved.describe())
        return replace(resolved, seed=self._ranks.of_driver(resolved.seed))

    def _find_model_facts(self, memory: int) -> ModelFacts:
        return ModelFacts(
            vocab_size=self._adapter.vocab_size,
            num_embeddings=self._adapter.num_embeddings,
            max_position_embeddings=self._adapter.max_positions,
            cached_layers=self._layout.cached_layers,
            activation_bytes_per_token=self._layout.activation_bytes_per_token,
            device_type=self._adapter.device.type,
            available_memory_bytes=memory,
            available_host_memory_bytes=self._ranks.least(available_memory_bytes() // ranks_on_this_host()),
            has_repeated_layers=bool(self._adapter.repeated_layers(self._layout)),
            has_graphs=self._capturer is not None,
            state_bytes_per_request=self._layout.state_bytes_per_request,
            state_bytes_per_token=self._layout.state_bytes_per_token,
            least_prompt_piece=2 if self._layout.recurrent.has_other_singles else 1,
            is_paged=self._layout.own_cache is None,
            rope_switch_length=self._adapter.rope_switch_length,
        )

    # ------------------------------------------------------------------------------------------- life cycle

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Puts the model on this package's paged attention; `stop` puts the old one back. `start` does so itself.

        Args:
            model: The manager's own model.
            auto_switch_to_flash: True takes the kernels that the configuration chose, False the torch reference.

        Raises:
            ValueError: It is another model.
        """
        if model is not self.model:
            raise ValueError("model must be the one that this manager was made for")
        if not auto_switch_to_flash and self._engine is None:
            self._kernels = choose_kernels(KernelConfig(default="reference"), self._adapter.device)
            self.kernel_names = self._kernels.names
        self._prepare_engine()

    def warmup(self, progress_bar: bool = False) -> None:
        """Prepares all that steps of this configuration can need, where not yet done; harmless while it runs.

        Allocates the cache, checks the model against its plain self, attaches to it, compiles and captures. If that
        fails, the model is as it was.

        Args:
            progress_bar: Shows one while compiling and capturing.

        Raises:
            RuntimeError: The manager was destroyed, or the compiler refused.
            UnsupportedModelError: The model gives other logits when its sequences are packed and paged.
        """
        with self._changed:
            if self.is_running():
                return
            self._prepare_engine()
            assert self._engine is not None
            progress = partial(tqdm, desc="warm-up", unit="bucket", disable=not progress_bar)
            try:
                with self._no_caller_modes():
                    self._engine.warm_up(self._hints, progress)
            except BaseException:
                self._release_engine()
                raise

    def _prepare_engine(self) -> None:
        with self._changed:
            if self._state is _State.DESTROYED:
                raise RuntimeError("this manager was destroyed; make a new one")
            if self.is_running():
                return
            with self._no_caller_modes():
                if self._engine is None:
                    self._engine = self._make_engine()
                elif not self._adapter.is_attached:
                    self._engine.attach()

    def _make_engine(self) -> Engine:
        try:
            return self._engine_of_layout()
        except UnsupportedModelError as reason:
            if not self.model_facts.is_paged:
                raise
            # Its attention can be paged and gives something else: the other way is left.
            self._layout = self._adapter.own_cache_layout(reason)
            self.model_facts = self._find_model_facts(self.model_facts.available_memory_bytes)
            self.engine_config = self._resolve(self.config)
            return self._engine_of_layout()

    def _engine_of_layout(self) -> Engine:
        return Engine(
            self._adapter,
            self._layout,
            self.engine_config,
            self._kernels,
            self._stop_checker.check,
            self._capturer,
            self._ranks,
        )

    @contextmanager
    def _no_caller_modes(self) -> Iterator[None]:
        """What is made or measured here must suit the engine's thread, which knows no mode of the caller's."""
        with torch.inference_mode(False), torch.autocast(self._adapter.device.type, enabled=False):
            yield

    def was_made_for(self, generation_config: Any, continuous_batching_config: Any, kernel_config: Any) -> bool:
        """Whether the manager was made with equal options; None stands for any."""
        return (
            (generation_config is None or generation_config == self.generation_config)
            and (
                continuous_batching_config is None
                or ContinuousBatchingConfig.from_any(continuous_batching_config) == self.config
            )
            and (kernel_config is None or KernelConfig.from_any(kernel_config) == self.kernel_config)
        )

    @property
    def num_return_sequences(self) -> int:
        """Answers per request."""
        return self._defaults.num_return_sequences

    @property
    def fatal_error(self) -> BaseException | None:
        """What the engine died of; None while it has not."""
        return self._fatal_error

    @property
    def warmed_up(self) -> bool:
        """Whether `warmup` has nothing left to do."""
        return self._engine is not None and self._engine.is_warm

    def start(self) -> None:
        """Starts the background thread; harmless while it runs. After `stop` it starts anew, once all has ended.

        Raises:
            RuntimeError: The manager was destroyed, or is stopping while the calling thread holds it in `pause`.
        """
        with self._changed:
            if self._state in (_State.STOPPING, _State.HARD_STOPPING):
                self._refuse_inside_pause("start")
                self._changed.wait_for(lambda: self._state not in (_State.STOPPING, _State.HARD_STOPPING))
            if self.is_running():
                return
            self._prepare_engine()
            end_idle_threads()
            self._state = _State.RUNNING
            self._fatal_error = None
            self._thread = threading.Thread(target=self._run, name="cbtriton-engine", daemon=True)
            self._thread.start()

    def is_running(self) -> bool:
        """Whether the background thread is at work: from `start` until everything has ended after `stop`."""
        return self._state in (_State.RUNNING, _State.STOPPING, _State.HARD_STOPPING)

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Accepts nothing new, finishes what is in flight, ends the background thread and gives the model back.

        Args:
            block: Waits until the thread has ended.
            timeout: Seconds to wait at most; None waits for as long as it takes.
            keep_for_next_session: Keeps the cache with its prefixes, and the manager on the model for next time.
            hard_stop: Ends everything in flight at once, with status FAILED.

        Raises:
            RuntimeError: The calling thread is inside `pause`, where this would wait for ever.
        """
        requested = time.perf_counter()
        with self._changed:
            self._refuse_inside_pause("stop")
            self._keep_engine = keep_for_next_session
            if keep_for_next_session and self._state is not _State.DESTROYED:
                self.model._cached_continuous_batching_manager = self
            if self.is_running() and self._state is not _State.HARD_STOPPING:
                self._state = _State.HARD_STOPPING if hard_stop else _State.STOPPING
                self._changed.notify_all()
            elif self._state in (_State.NEW, _State.STOPPED):
                self._end_session("the manager was stopped before it ran this request")
        if block:
            self.join(requested, timeout)

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Waits for the background thread to end after `stop`.

        Args:
            stop_trigger_time: `time.perf_counter()` when the stop was requested; for the log.
            timeout: Seconds to wait at most; None waits for as long as it takes.
        """
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout)
        if thread.is_alive():
            logger.warning("the engine is still finishing requests after %s s", timeout)
        else:
            logger.info("the engine ended %.2f s after stop", time.perf_counter() - stop_trigger_time)

    def destroy(self) -> None:
        """Stops at once and releases all memory. Final; harmless when repeated."""
        requested = time.perf_counter()
        with self._changed:
            self.stop(block=False, hard_stop=True)
            while self.is_running():
                self._changed.wait()
                # Somebody may have started it again in between.
                self.stop(block=False, hard_stop=True)
            self._state = _State.DESTROYED
            if getattr(self.model, "_cached_continuous_batching_manager", None) is self:
                del self.model._cached_continuous_batching_manager
        self.join(requested)
        self._ranks.close()

    @contextmanager
    def pause(self, reset_prefix_cache: bool = False) -> Iterator[None]:
        """Holds the engine between two steps, so that the caller can use or update the model.

        Meanwhile the model is as it was before `start`. Requests, cache and order survive. Several threads may hold
        the pause; the last one to leave resumes. Weights that changed in place are picked up on resuming; cached
        prefixes of the old ones are dropped, and so is what preempted requests have in host memory. Requests that run
        keep the keys and values that the old weights computed: wait for them first, or cancel them, where that matters.

        Args:
            reset_prefix_cache: Drop both in any case. Needed when weights were changed through
                `Tensor.data`, which leaves no trace.

        Raises:
            RuntimeError: The manager does not run.
        """
        me = threading.get_ident()
        with self._changed:
            if not self.is_running():
                raise self._refusal("cannot pause")
            self._pausing_threads.append(me)
            self._changed.notify_all()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._is_parked or not self.is_running())
                if not self._is_parked:
                    raise self._refusal("cannot pause")
            yield
        finally:
            end_idle_threads()
            with self._changed:
                self._pausing_threads.remove(me)
                self._must_reset_prefix_cache |= reset_prefix_cache
                self._changed.notify_all()

    def _refuse_inside_pause(self, what: str) -> None:
        if threading.get_ident() in self._pausing_threads:
            raise RuntimeError(f"cannot {what} inside pause(): the loop cannot end while it is paused; leave it first")

    # --------------------------------------------------------------------------------------------- requests

    def add_request(
        self,
        input_ids: Sequence[int] | None,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **logit_processor_kwargs: Any,
    ) -> str | None:
        """Queues a request.

        Args:
            input_ids: Token ids of the prompt; None where it is given as `inputs_embeds` alone.
            request_id: The caller's own id; `req_0`, `req_1`, … when None.
            max_new_tokens: Tokens to generate at most; None takes the generation configuration's, and if that has
                none, goes on to the limit of the model or the cache.
            streaming: Delivers an output per token instead of one at the end.
            record_timestamps: Notes the time of each token.
            eos_token_id: Ends the request, an id or several; -1 or an empty list disables; None takes the defaults.
            logit_processor_kwargs: `temperature`, `top_k`, `top_p`, `min_p`, `do_sample`, the fields of
                `ProcessorOptions` and the functions `logits_processor`, `token_mask` and `prefix_allowed_tokens_fn`
                (with `per_request_processors`), and always `seed`, `min_new_tokens`, `min_length`, `stop_sequences`,
                `stop_strings`, `stopping_criteria`, `logprobs`, `top_logprobs`, `prompt_logprobs`, `cache_salt`
                (requests with different salts share no cached prefix) and `inputs_embeds`: `[num_tokens,
                embedding_size]`, what the model gets in place of the prompt's tokens. It is copied. Logits processors
                and outputs see `input_ids`, or the token for padding. See "Sampling" in the package's README.

        Returns:
            The request's id.

        Raises:
            TypeError: An argument is unknown or of the wrong type.
            ValueError: The prompt is empty, has ids outside the vocabulary or cannot fit the cache, the id is in
                flight, or a parameter is out of range.
            RuntimeError: The manager is stopping, stopped or dead; a dead engine's error is chained.
            queue.Full: `max_queue_size` requests were waiting for 10 s.
        """
        if request_id is not None and not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {type(request_id).__name__}")
        if request_id is not None and request_id.startswith(_PIN_PREFIX):
            raise ValueError(f"request ids that begin with {_PIN_PREFIX!r} are those of pinned prefixes; use another")
        with self._changed:
            request = self._make_request(
                input_ids, 0, max_new_tokens, streaming, record_timestamps, eos_token_id, logit_processor_kwargs
            )
            return self._submit([request], request_id, FULL_QUEUE_TIMEOUT)[0]

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **logit_processor_kwargs: Any,
    ) -> list[str]:
        """Queues many requests with the same parameters; see `add_request`. Nothing is queued if any is refused.

        Where the queue stays full, those that were queued before are cancelled.

        Returns:
            Their ids, in the order of `inputs`.
        """
        with self._changed:
            return self._submit(
                [
                    self._make_nth_request(
                        position, input_ids, max_new_tokens, streaming, record_timestamps, logit_processor_kwargs
                    )
                    for position, input_ids in enumerate(inputs)
                ],
                None,
                FULL_QUEUE_TIMEOUT,
            )

    def submit_batch(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None,
        record_timestamps: bool,
        streaming: bool = False,
    ) -> list[tuple[str, ...]]:
        """Queues many requests like `add_requests`, but lets one that can never fit fail alone.

        Such a request gets a final output with status FAILED at once; the others run. Where the queue is full it waits
        for as long as the manager runs.

        Returns:
            For each input, its request's id and those of its extra sequences.
        """
        with self._changed:
            requests = []
            for position, input_ids in enumerate(inputs):
                try:
                    request = self._make_nth_request(
                        position, input_ids, max_new_tokens, streaming, record_timestamps, {}
                    )
                except RequestTooLongError as error:
                    request = Request(
                        request_id="",
                        prompt_ids=list(input_ids),
                        sampling=SamplingParams(),
                        stop=StopRules(max_new_tokens=1),
                        status=RequestStatus.FAILED,
                        error=str(error),
                        finish_reason="error",
                    )
                requests.append(request)
            ids = self._submit(requests, None, timeout=None)
        return [(request_id, *self._extra_ids(request_id)) for request_id in ids]

    def is_in_flight(self, request_id: str) -> bool:
        """Whether the request was accepted and its final output has not been delivered yet."""
        return request_id in self._in_flight

    def cancel_request(self, request_id: str) -> None:
        """Ends a request at the next step and delivers its final output, with the tokens so far.

        Unknown and finished ids have no effect. Extra sequences of the request that still wait for its prompt end
        with it; those that run already are requests of their own.
        """
        with self._changed:
            if request_id in self._in_flight and self._ranks.is_driver:
                self._cancelled.add(request_id)
                self._changed.notify_all()

    def pin_prefix(self, token_ids: Sequence[int], cache_salt: str | None = None) -> int:
        """Computes a prefix, such as a system prompt, and keeps it in the cache until `unpin`.

        Returns when it is there. When cached prefixes are dropped, since weights changed for example, it is computed
        again. A prefix that is pinned already stays so. Pins end with the engine: `stop` keeps them only with
        `keep_for_next_session`.

        Args:
            token_ids: The prefix. Of its last page, what does not fill it is not kept.
            cache_salt: Only requests with this salt share it.

        Returns:
            Number of tokens that are kept.

        Raises:
            TypeError: `token_ids` or `cache_salt` has the wrong type.
            ValueError: The prefix is shorter than a page, has ids outside the vocabulary, or leaves too few blocks for
                a request that is in flight; or prefixes are not shared at all.
            RuntimeError: The manager does not run, the calling thread is inside `pause`, or another one unpinned the
                prefix meanwhile.
        """
        prompt_ids = check_prompt(token_ids, self._adapter.num_embeddings)
        _check_salt(cache_salt)
        with self._changed:
            self._refuse_inside_pause("pin a prefix")
            if self._state is not _State.RUNNING:
                raise self._refusal("cannot pin a prefix")
            key = (tuple(prompt_ids), cache_salt)
            pin = self._pins.get(key) or self._submit_pin(prompt_ids, cache_salt)
            self._pins[key] = pin
            self._changed.wait_for(
                lambda: pin.output is not None or self._pins.get(key) is not pin or not self.is_running()
            )
            if pin.output is not None and pin.output.error is None:
                return pin.num_tokens
            if self._pins.get(key) is pin:
                del self._pins[key]
            elif pin.output is None and self.is_running():
                raise RuntimeError("the prefix was unpinned before it was computed")
            if pin.output is None or not self.is_running():
                raise self._refusal("cannot pin a prefix")
            raise ValueError(pin.output.error)

    def unpin(self, token_ids: Sequence[int], cache_salt: str | None = None) -> None:
        """Lets a pinned prefix be evicted like others.

        Args:
            token_ids: What was given to `pin_prefix`.
            cache_salt: Likewise.

        Raises:
            ValueError: That prefix is not pinned under that salt.
        """
        prompt_ids = check_prompt(token_ids, self._adapter.num_embeddings)
        with self._changed:
            pin = self._pins.pop((tuple(prompt_ids), cache_salt), None)
            if pin is None:
                raise ValueError(
                    f"no prefix of these {len(prompt_ids)} tokens is pinned with cache_salt={cache_salt!r}; give the "
                    "tokens and the salt that pin_prefix was given"
                )
            if self.is_running():
                if self._ranks.is_driver:
                    self._unpinned.append(pin.request_id)
                self._changed.notify_all()
            elif self._engine is not None:
                self._engine.unpin(pin.request_id)

    def _submit_pin(self, prompt_ids: list[int], cache_salt: str | None) -> _Pin:
        config = self.engine_config
        if config.keeps_states:
            raise ValueError(
                f"nothing can be pinned for a model with {self.model_facts.kept_states}: each request computes its own"
            )
        if not config.share_blocks:
            raise ValueError("nothing can be pinned with allow_block_sharing=False; set it to True")
        alignment = config.cache_layout.alignment
        num_tokens = len(prompt_ids) - len(prompt_ids) % alignment
        if num_tokens == 0:
            raise ValueError(
                f"a pinned prefix must have at least {alignment} tokens (whole pages of all layers), got "
                f"{len(prompt_ids)}; lower page_size, or pin more"
            )
        layout, num_blocks = config.cache_layout, config.cache_layout.pinned_blocks(num_tokens)
        num_left = config.num_blocks - sum(pin.num_blocks for pin in self._pins.values())
        # It has to be computed first, and then at least a token of somebody else's must fit beside it.
        needed = max(layout.peak_blocks(num_tokens, 1), num_blocks + layout.peak_blocks(1, 1))
        if needed > num_left:
            raise ValueError(
                f"pinning these {num_tokens} tokens needs {needed} blocks, and {num_left} of {config.num_blocks} are "
                "not pinned; unpin another prefix, or raise num_blocks"
            )
        pin = _Pin(f"{_PIN_PREFIX}{self._next_pin}", num_tokens, num_blocks)
        self._next_pin += 1
        # Behind all requests that were accepted so far: the engine knows them when it decides whether they still fit.
        request = Request(
            pin.request_id,
            prompt_ids[:num_tokens],
            SamplingParams(),
            StopRules(max_new_tokens=1),
            cache_salt=cache_salt,
            is_pin=True,
        )
        if self._ranks.is_driver:
            self._inbox.append(request)
        self._changed.notify_all()
        return pin

    def _limits(self, num_pinned: int) -> RequestLimits:
        """What bounds a request while so many blocks are pinned."""
        config = self.engine_config
        num_blocks = config.num_blocks - num_pinned
        return RequestLimits(
            vocab_size=self._adapter.vocab_size,
            max_model_len=config.cache_layout.num_fitting_tokens(num_blocks, config.max_model_len),
            cache_layout=config.cache_layout,
            num_blocks=num_blocks,
            logprobs=config.logprobs,
            per_request_processors=config.per_request_processors,
            drop_unsupported=config.drop_unsupported_processors,
        )

    def _make_nth_request(
        self,
        position: int,
        input_ids: Sequence[int],
        max_new_tokens: int | None,
        streaming: bool,
        record_timestamps: bool,
        kwargs: Mapping[str, Any],
    ) -> Request:
        """One of several requests; its errors say which."""
        try:
            return self._make_request(input_ids, position, max_new_tokens, streaming, record_timestamps, None, kwargs)
        except (TypeError, ValueError) as error:
            raise type(error)(f"inputs[{position}]: {error}") from None

    def _make_request(
        self,
        input_ids: Sequence[int] | None,
        offset: int,
        max_new_tokens: int | None,
        streaming: bool,
        record_timestamps: bool,
        eos_token_id: int | list[int] | None,
        kwargs: Mapping[str, Any],
    ) -> Request:
        """A validated request without an id, the `offset`-th of those about to be submitted."""
        kwargs = dict(kwargs)
        embeds = self._prompt_embeds(kwargs.pop("inputs_embeds", None))
        if embeds is not None and input_ids is None:
            if kwargs.get("prompt_logprobs"):
                raise ValueError("prompt_logprobs are those of tokens; give input_ids beside inputs_embeds")
            input_ids = [self._adapter.pad_token_id or 0] * len(embeds.values)
        prompt_ids = check_prompt(input_ids, self._adapter.num_embeddings)
        if embeds is not None and len(embeds.values) != len(prompt_ids):
            raise ValueError(
                f"inputs_embeds must have a vector for each token, got {len(embeds.values)} for {len(prompt_ids)} "
                "tokens; leave input_ids at None where there are none"
            )
        cache_salt = kwargs.pop("cache_salt", None)
        _check_salt(cache_salt)
        sampling, stop = request_parameters(
            self._defaults,
            prompt_length=len(prompt_ids),
            max_new_tokens=max_new_tokens,
            eos_token_id=eos_token_id,
            kwargs=kwargs,
            ordinal=self._next_ordinal + offset,
            engine_seed=self.engine_config.seed,
            limits=self._limits(sum(pin.num_blocks for pin in self._pins.values())),
            warn=self._warn_once,
        )
        if len(stop.eos_token_ids) > MAX_EOS_IDS:
            raise ValueError(f"eos_token_id can have at most {MAX_EOS_IDS} ids, got {len(stop.eos_token_ids)}")
        _check_rules(sampling.processors.rules)
        if stop.stop_strings and self.tokenizer is None:
            raise ValueError("stop_strings need a tokenizer; set manager.tokenizer or use enable(model, tokenizer)")
        return Request(
            request_id="",
            prompt_ids=prompt_ids,
            sampling=sampling,
            stop=stop,
            streaming=streaming,
            record_timestamps=record_timestamps,
            cache_salt=cache_salt,
            embeds=embeds,
        )

    def _prompt_embeds(self, values: Any) -> PromptEmbeds | None:
        """A copy of a caller's vectors, checked."""
        if values is None:
            return None
        size, name = self._layout.embedding_size, type(self.model).__name__
        if size is None:
            raise ValueError(f"{name} cannot be given inputs_embeds here: it looks at tokens; give input_ids")
        if not isinstance(values, torch.Tensor) or not values.is_floating_point():
            raise TypeError(f"inputs_embeds must be a tensor of floating-point numbers, got {_described(values)}")
        if values.dim() == 3 and values.shape[0] == 1:
            values = values[0]
        if values.dim() != 2 or values.shape[1] != size or values.shape[0] == 0:
            raise ValueError(
                f"inputs_embeds must be [num_tokens, {size}] with one token at least, got {list(values.shape)}"
            )
        copied = values.detach().to(device=self.model.device, dtype=self._adapter.dtype, copy=True).contiguous()
        contents = copied.to("cpu").view(torch.uint8).numpy().tobytes()
        return PromptEmbeds(copied, blake2b(contents, digest_size=16).hexdigest())

    def _warn_once(self, message: str) -> None:
        if message not in self._warnings:
            self._warnings.add(message)
            logger.warning(message)

    def _submit(self, requests: list[Request], request_id: str | None, timeout: float | None) -> list[str]:
        """Names the requests and puts them, with their extra sequences, into the inbox. Called with the lock held."""
        self._check_accepting()
        if request_id is not None and self._is_taken(request_id):
            raise ValueError(f"request id {request_id!r} is in flight; use another id or wait for its result")
        self._next_ordinal += len(requests)
        queued: list[str] = []
        for request in requests:
            request.request_id = self._new_request_id() if request_id is None else request_id
            family = [request, *self._extra_sequences(request)]
            if request.is_terminal:
                self._router.deliver(member.to_output() for member in family)
                continue
            if not self._ranks.is_driver:
                self._expect(family)
                continue
            ids = [member.request_id for member in family]
            self._in_flight.update(ids)
            try:
                self._wait_for_room(timeout)
            except BaseException:
                self._in_flight.difference_update(ids)
                # The caller never learns the ids of those that were queued before.
                self._cancelled.update(self._in_flight.intersection(queued))
                raise
            queued += ids
            self._inbox += family
            self._changed.notify_all()
        return [request.request_id for request in requests]

    def _expect(self, family: Iterable[Request]) -> None:
        """Notes what the driver has sent already, or is about to. Called with the lock held."""
        for member in family:
            if member.request_id in self._early:
                self._router.deliver([self._early.pop(member.request_id)])
            else:
                self._in_flight.add(member.request_id)
                self._expected[member.request_id] = member
        self._changed.notify_all()

    def _local_request(self, request_id: str) -> Request:
        """What a caller of this rank submits under an id, which may not have happened yet."""
        with self._changed:
            timeout = self.config.cpu_group_timeout
            self._changed.wait_for(lambda: request_id in self._expected or not self.is_running(), timeout)
            if request_id not in self._expected:
                raise RankError(
                    f"request {request_id!r} has functions of its caller or inputs_embeds, which are not sent to other "
                    f"ranks, and rank {self._ranks.rank} was given no request with this id; submit it on every rank"
                )
            return self._expected[request_id]

    @property
    def _is_accepting(self) -> bool:
        return self._fatal_error is None and self._state in (_State.NEW, _State.RUNNING)

    def _check_accepting(self) -> None:
        if not self._is_accepting:
            raise self._refusal("cannot add a request")

    def _is_taken(self, request_id: str) -> bool:
        """Whether the id, or one that its extra sequences would get, is in flight."""
        return not self._in_flight.isdisjoint((request_id, *self._extra_ids(request_id)))

    def _new_request_id(self) -> str:
        while True:
            request_id = f"req_{self._next_auto_id}"
            self._next_auto_id += 1
            if not self._is_taken(request_id):
                return request_id

    def _extra_ids(self, request_id: str) -> tuple[str, ...]:
        return tuple(f"{request_id}__child#{child}" for child in range(self.num_return_sequences - 1))

    def _extra_sequences(self, request: Request) -> list[Request]:
        return [
            replace(
                request,
                request_id=child_id,
                parent_id=request.request_id,
                # The prompt is the same: its log-probabilities come with the first of them.
                sampling=replace(
                    request.sampling, seed=child_seed(request.sampling.seed, child), prompt_logprobs=False
                ),
                generated=[],
                logprobs=[],
                top_logprobs=[],
                prompt_logprobs=[],
                timestamps=[],
            )
            for child, child_id in enumerate(self._extra_ids(request.request_id))
        ]

    def _wait_for_room(self, timeout: float | None) -> None:
        limit = self.engine_config.max_queue_size
        if limit == 0:
            return
        has_room = self._changed.wait_for(
            lambda: len(self._inbox) + self._num_waiting_in_engine < limit or not self._is_accepting, timeout
        )
        self._check_accepting()
        if not has_room:
            raise queue.Full(f"{limit} requests (max_queue_size) have been waiting for {timeout} s; try again later")

    # ---------------------------------------------------------------------------------------------- results

    def get_result(
        self, request_id: str | Collection[str] | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """The next output.

        Args:
            request_id: Takes the next output of that request, or of any of several, whatever else is queued; the others
                keep their order.
            timeout: Seconds to wait at most; None waits for as long as something can come.

        Returns:
            None after `timeout`, or at once when nothing can come any more: the request is not in flight, or the
            manager has stopped.

        Raises:
            EngineDiedError: The engine died; outputs that were finished before can still be read first.
        """
        return self._router.get(request_id, timeout, lambda: self._may_come(request_id))

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Yields outputs as they arrive until the manager has stopped and all were yielded."""
        while (output := self.get_result()) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Yields a request's outputs until its final one."""
        while (output := self.get_result(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    async def astream(self, input_ids: Sequence[int] | None, **options: Any) -> AsyncIterator[GenerationOutput]:
        """Adds a request and yields its outputs on the running event loop, one for each new token, until the final one.

        Leaving the loop early, by `break`, `aclose` or because the task is cancelled, cancels the request.

        Args:
            input_ids: As in `add_request`.
            options: All other arguments of `add_request` but `streaming`.

        Raises:
            EngineDiedError: The engine died; the cause is chained.
            Exception: What `add_request` raises, when the first output is asked for.
        """
        # It may wait for room in the queue.
        adding = asyncio.ensure_future(
            asyncio.to_thread(partial(self.add_request, input_ids, streaming=True, **options))
        )
        try:
            request_id = await asyncio.shield(adding)
        except asyncio.CancelledError:
            adding.add_done_callback(self._cancel_added)
            raise
        assert request_id is not None
        arrived: asyncio.Queue[GenerationOutput] = asyncio.Queue()
        self.register_result_handler(request_id, arrived.put_nowait)
        is_over = False
        try:
            while not is_over:
                output = await arrived.get()
                is_over = output.is_finished()
                if is_over and output.error is not None and self._fatal_error is not None:
                    raise self._refusal("no result can come")
                yield output
        finally:
            if not is_over:
                self.cancel_request(request_id)

    def _cancel_added(self, adding: asyncio.Future[str | None]) -> None:
        if not adding.cancelled() and adding.exception() is None:
            self.cancel_request(str(adding.result()))

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """Calls `callback` on the running event loop with each output of a request, instead of queueing it.

        To be called from a coroutine, before or after the request is added; outputs that arrived before are
        delivered first. The handler is removed with the final output.

        Raises:
            TypeError: `callback` is no plain function; a coroutine function would never be awaited.
        """
        if not callable(callback) or inspect.iscoroutinefunction(callback):
            raise TypeError(f"callback must be a plain function of one output, got {callback!r}")
        self._router.register(request_id, asyncio.get_running_loop(), callback)

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters; after the manager has stopped, the last one."""
        engine = self._engine
        return self._last_stats if engine is None else engine.stats()

    def step_records(self) -> list[StepRecord]:
        """One record per step, oldest first; after the manager has stopped, those of its last run."""
        engine = self._engine
        return list(self._last_records) if engine is None else engine.step_records()

    def _may_come(self, request_id: str | Collection[str] | None) -> bool:
        if self._fatal_error is not None:
            raise self._refusal("no result can come")
        if isinstance(request_id, str):
            return request_id in self._in_flight
        if request_id is not None:
            return not self._in_flight.isdisjoint(request_id)
        return bool(self._in_flight) or self._state in (_State.RUNNING, _State.STOPPING)

    def _refusal(self, what: str) -> RuntimeError:
        """The error for a caller who asks for something that this manager cannot do in its state."""
        if self._fatal_error is not None:
            cause = self._fatal_error
            error = EngineDiedError(f"{what}: the engine died of {type(cause).__name__}: {cause}")
            error.__cause__ = cause
            return error
        state = {
            _State.NEW: "not started; call start()",
            _State.RUNNING: "running",
            _State.STOPPING: "stopping",
            _State.HARD_STOPPING: "stopping",
            _State.STOPPED: "stopped; call start() to run it again",
            _State.DESTROYED: "destroyed; make a new one",
        }[self._state]
        return RuntimeError(f"{what}: the manager is {state}")

    # ------------------------------------------------------------------------------------ background thread

    def _run(self) -> None:
        assert self._engine is not None
        error: BaseException | None = None
        try:
            with torch.no_grad():
                self._step_until_stopped(self._engine)
        # Whatever it is, it must reach every caller: they cannot see this thread.
        except BaseException as caught:
            logger.exception("the engine died")
            error = self._ranks.explained(caught)
            # Other ranks wait for this one.
            self._ranks.close()
        with self._changed:
            self._fatal_error = error
            self._end_session("the manager was stopped before this request finished" if error is None else str(error))

    def _step_until_stopped(self, engine: Engine) -> None:
        with self._ranks.session():
            while True:
                wishes = self._next_wishes(engine)
                turn = self._ranks.agree(wishes, self._local_request)
                if turn.action is Action.END:
                    # Another rank ended it: what was about to enter here ends with the rest.
                    self._enter(engine, Arrivals(wishes.arrived.requests))
                    return
                outputs = self._enter(engine, turn.arrived)
                if turn.action is Action.PARK:
                    self._publish(outputs, engine.num_waiting)
                    self._park(engine)
                else:
                    self._publish(outputs + engine.step(), engine.num_waiting)

    def _enter(self, engine: Engine, arrived: Arrivals) -> list[GenerationOutput]:
        """Tells the engine what was asked for; returns the outputs of what was cancelled."""
        for request in arrived.requests:
            engine.add(request)
        for request_id in arrived.unpinned:
            engine.unpin(request_id)
        return [output for request_id in arrived.cancelled for output in engine.cancel(request_id)]

    def _next_wishes(self, engine: Engine) -> Wishes:
        """What this rank's callers asked for since the last step, once that is anything or requests run."""
        with self._changed:
            if self._ranks.is_alone:
                self._changed.wait_for(lambda: self._has_something_to_do(engine))
            elif self._ranks.is_driver:
                # The others wait for this one, and may have wishes.
                self._changed.wait_for(lambda: self._has_something_to_do(engine), IDLE_INTERVAL)
            ending = {_State.STOPPING: Ending.SOFT, _State.HARD_STOPPING: Ending.HARD}.get(self._state, Ending.NONE)
            wishes = Wishes(ending, bool(self._pausing_threads), is_idle=not engine.has_requests)
            if wishes.pauses or ending is Ending.HARD:
                return wishes
            arrived = Arrivals(tuple(self._inbox), tuple(sorted(self._cancelled)), tuple(self._unpinned))
            self._inbox.clear()
            self._cancelled.clear()
            self._unpinned.clear()
            # They wait in the engine now, until it has counted for itself.
            self._num_waiting_in_engine += len(arrived.requests)
            return replace(wishes, arrived=arrived)

    def _has_something_to_do(self, engine: Engine) -> bool:
        return bool(
            engine.has_requests
            or self._inbox
            or self._cancelled
            or self._unpinned
            or self._pausing_threads
            or self._state is _State.HARD_STOPPING
            # Several ranks end when all of them have been asked to.
            or (self._state is not _State.RUNNING and self._ranks.is_alone)
        )

    def _park(self, engine: Engine) -> None:
        """Gives the model back between two steps until the last pausing thread, of any rank, has left."""
        self._publish(engine.drain(), engine.num_waiting)
        engine.detach()
        end_idle_threads()
        is_held, must_reset = True, False
        while is_held:
            with self._changed:
                self._is_parked = True
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: not self._pausing_threads, None if self._ranks.is_alone else IDLE_INTERVAL
                )
                # In one moment: who comes now waits for the next time.
                is_held = self._is_parked = bool(self._pausing_threads)
                must_reset = self._must_reset_prefix_cache
            is_held = self._ranks.any(is_held)
        with self._changed:
            self._must_reset_prefix_cache = False
        engine.attach()
        if self._ranks.any(must_reset):
            engine.reset_prefix_cache()

    def _publish(self, outputs: list[GenerationOutput], num_waiting: int) -> None:
        if not outputs and num_waiting == self._num_waiting_in_engine:
            return
        with self._changed:
            self._num_waiting_in_engine = num_waiting
            outputs = self._awaited(outputs)
            ended = {output.request_id for output in outputs if output.is_finished()}
            self._in_flight -= ended
            # A cancellation that came too late must not hit the next request with the same id.
            self._cancelled -= ended
            self._router.deliver(self._keep_pins(outputs))
            self._changed.notify_all()

    def _awaited(self, outputs: list[GenerationOutput]) -> list[GenerationOutput]:
        """Those that callers of this rank wait for. Final ones that they have not asked for yet are kept for a while.

        Called with the lock held.
        """
        if self._ranks.is_driver:
            return outputs
        awaited = []
        for output in outputs:
            if output.request_id in self._in_flight or output.request_id.startswith(_PIN_PREFIX):
                awaited.append(output)
            elif output.is_finished():
                self._early[output.request_id] = output
            if output.is_finished():
                self._expected.pop(output.request_id, None)
        while len(self._early) > _MAX_EARLY:
            del self._early[next(iter(self._early))]
        return awaited

    def _keep_pins(self, outputs: list[GenerationOutput]) -> list[GenerationOutput]:
        """Notes what became of pins; returns the outputs of requests. Called with the lock held."""
        pins = {pin.request_id: (key, pin) for key, pin in self._pins.items()}
        for output in outputs:
            if output.request_id not in pins:
                continue
            key, pin = pins[output.request_id]
            if pin.output is not None and output.error is not None:
                logger.warning("a pinned prefix of %d tokens was lost: %s", pin.num_tokens, output.error)
                del self._pins[key]
            pin.output = output
        return [output for output in outputs if not output.request_id.startswith(_PIN_PREFIX)]

    def _end_session(self, reason: str) -> None:
        """Ends what is still in flight, gives the model back and wakes everybody. Called with the lock held."""
        outputs = [_failed_before_start(request, reason) for request in self._inbox if not request.is_pin]
        unpinned, awaited = tuple(self._unpinned), set(self._in_flight)
        self._inbox.clear()
        self._cancelled.clear()
        self._unpinned.clear()
        self._in_flight.clear()
        self._num_waiting_in_engine = 0
        if self._state is not _State.DESTROYED:
            self._state = _State.STOPPED
        try:
            if self._engine is not None:
                for request_id in unpinned:
                    self._engine.unpin(request_id)
                ended = self._keep_pins(self._engine.fail_all(reason))
                if not self._ranks.is_driver:
                    ended = [output for output in ended if output.request_id in awaited]
                    # What the driver never sent.
                    never = awaited - {output.request_id for output in ended}
                    ended += [_failed_before_start(self._expected[each], reason) for each in sorted(never)]
                outputs = ended + outputs
                if self._keep_engine and self._fatal_error is None:
                    self._engine.detach()
                else:
                    self._release_engine()
        finally:
            self._expected.clear()
            self._early.clear()
            # Also where the engine is too broken to end: nobody may wait for it any longer.
            if self._fatal_error is None:
                self._router.deliver(outputs)
            else:
                # Who waits for a result is told by an exception; who registered a handler can only be told this way,
                # also of requests that an engine which is too broken says nothing of.
                told = {output.request_id for output in outputs}
                failed = partial(GenerationOutput, status=RequestStatus.FAILED, error=reason, finish_reason="error")
                self._router.deliver_to_handlers([*outputs, *(failed(name) for name in sorted(awaited - told))])
            self._changed.notify_all()
            self._router.wake()

    def _release_engine(self) -> None:
        engine = self._engine
        if engine is not None:
            self._last_stats, self._last_records = engine.stats(), engine.step_records()
            self._engine = None
            self._pins.clear()
            engine.close()


@dataclass(slots=True)
class _Pin:
    """A pinned prefix, or one that is about to be.

    Attributes:
        request_id: Of the request that computes it.
        num_tokens: Its tokens, whole pages.
        num_blocks: Blocks that it takes where it shares none with other pins.
        output: What became of the request, once it has ended.
    """

    request_id: str
    num_tokens: int
    num_blocks: int
    output: GenerationOutput | None = None


def _described(value: Any) -> str:
    return f"{value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__


def _check_salt(cache_salt: Any) -> None:
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise TypeError(f"cache_salt must be a string, got {type(cache_salt).__name__}")


def _failed_before_start(request: Request, error: str) -> GenerationOutput:
    """The final output of a request that never reached the engine."""
    return replace(request.to_output(), status=RequestStatus.FAILED, finish_reason="error", error=error)


def _check_rules(rules: Sequence[TokenRule]) -> None:
    """Holds a request to the places that the request table has for it."""
    if len(rules) > MAX_RULES:
        raise ValueError(
            f"a request can have at most {MAX_RULES} biased, forbidden and forced sequences (sequence_bias, "
            "logit_bias, bad_words_ids, suppress_tokens, begin_suppress_tokens, forced tokens), got "
            f"{len(rules)}; leave some out"
        )
    num_prefixes = sum(len(rule.prefix) for rule in rules)
    if num_prefixes > MAX_RULE_PREFIXES:
        raise ValueError(
            f"the sequences of sequence_bias and bad_words_ids can have at most {MAX_RULE_PREFIXES} tokens before "
            f"their last ones, got {num_prefixes}; leave some out"
        )


def check_prompt(input_ids: Any, num_embeddings: int) -> list[int]:
    """A prompt as a list of token ids.

    Args:
        input_ids: A list, tuple, 1-D tensor or array of token ids.
        num_embeddings: Every id must be below this.

    Raises:
        TypeError: It is something else, or holds anything but integers.
        ValueError: It is empty, or holds ids outside the vocabulary.
    """
    if isinstance(input_ids, (str, bytes, Mapping)):
        raise TypeError(
            f"a prompt must be a list of token ids, got {type(input_ids).__name__}; "
            "pass tokenizer(...)['input_ids'] of one text"
        )
    if hasattr(input_ids, "tolist"):
        input_ids = input_ids.tolist()
    if not isinstance(input_ids, Sequence):
        raise TypeError(f"a prompt must be a list of token ids, got {type(input_ids).__name__}")
    for token in input_ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise TypeError(f"a prompt must hold integers, got {type(token).__name__}; pass one prompt's token ids")
    if not input_ids:
        raise ValueError("a prompt must have at least one token, got an empty one")
    lowest, highest = min(input_ids), max(input_ids)
    if lowest < 0 or highest >= num_embeddings:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"token ids must be from 0 to {num_embeddings - 1} (the model's embedding), got {wrong}")
    return list(input_ids)


def _available_memory(device: torch.device) -> int:
    """Bytes that this process may still take on `device`."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What the allocator holds but does not use is ours to take as well.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available_memory_bytes() // ranks_on_this_host()
