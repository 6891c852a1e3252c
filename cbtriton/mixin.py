"""The methods that a transformers model gets: `generate_batch` and what it is made of."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import Any, TypeVar

import torch
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from cbtriton.compatibility import ServePatch, without_generate_arguments
from cbtriton.config import KernelConfig, WorkloadHints
from cbtriton.manager import ContinuousBatchingManager, check_prompt
from cbtriton.request import GenerationOutput
from cbtriton.stats import EngineStats
from cbtriton.streaming import AnswerPieces, StreamedTokens

logger = logging.getLogger(__name__)

_Model = TypeVar("_Model")
# Seconds between two looks at the counters while a batch runs.
_PROGRESS_INTERVAL = 0.25
_GENERATE_BATCH_EXTRAS = ("max_new_tokens", "workload_hints", "kernel_config", "stream")


class ContinuousMixin:
    """Continuous batching for a transformers causal language model; see `enable`."""

    def init_continuous_batching(
        self,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: WorkloadHints | None = None,
        kernel_config: KernelConfig | None = None,
    ) -> ContinuousBatchingManager:
        """A manager for this model: the persistent one if there is one, else a new one.

        The persistent one keeps the options that it was made with, and warns where others are asked for.

        Args:
            generation_config: Defaults of the requests; the model's own when None.
            continuous_batching_config: This package's or transformers' `ContinuousBatchingConfig`.
            workload_hints: What is known of the workload; helps sizing.
            kernel_config: Which kernels run.

        Raises:
            ValueError: The model, the configuration or a generation option is not supported.
        """
        cached = getattr(self, "_cached_continuous_batching_manager", None)
        if isinstance(cached, ContinuousBatchingManager):
            if not cached.was_made_for(generation_config, continuous_batching_config, kernel_config):
                logger.warning(
                    "the persistent manager keeps the options that it was made with; to change them, call "
                    "destroy_cached_continuous_batching_manager() first"
                )
            return cached
        if generation_config is None:
            generation_config = self.generation_config  # pyright: ignore[reportAttributeAccessIssue]
        return ContinuousBatchingManager(
            self, generation_config, continuous_batching_config, workload_hints, kernel_config
        )

    @contextmanager
    def continuous_batching_context_manager(
        self,
        generation_config: Any = None,
        block: bool = True,
        timeout: float | None = None,
        continuous_batching_config: Any = None,
        persistent_manager: bool = False,
        warmup: bool = True,
        workload_hints: WorkloadHints | None = None,
        kernel_config: KernelConfig | None = None,
    ) -> Iterator[ContinuousBatchingManager]:
        """A started manager for the `with` block, stopped at its end.

        An exception in the block stops at once what is still running; otherwise everything submitted is finished.

        Args:
            generation_config: As in `init_continuous_batching`.
            block: Waits for the manager to stop.
            timeout: Seconds to wait at most; None waits for as long as it takes.
            continuous_batching_config: As in `init_continuous_batching`.
            persistent_manager: Keeps the manager, with its cached prefixes, on the model.
            warmup: Prepares everything before the first request rather than with it.
            workload_hints: As in `init_continuous_batching`.
            kernel_config: As in `init_continuous_batching`.
        """
        manager = ContinuousMixin.init_continuous_batching(
            self, generation_config, continuous_batching_config, workload_hints, kernel_config
        )
        if warmup:
            manager.warmup()
        with _running(manager, block, timeout, persistent_manager):
            yield manager

    def destroy_cached_continuous_batching_manager(self) -> None:
        """Ends the persistent manager and releases its memory; harmless when there is none."""
        cached = getattr(self, "_cached_continuous_batching_manager", None)
        if isinstance(cached, ContinuousBatchingManager):
            cached.destroy()

    def generate_batch(
        self,
        inputs: Sequence[Sequence[int]],
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        **kwargs: Any,
    ) -> dict[str, GenerationOutput] | Iterator[StreamedTokens]:
        """Generates for many prompts with continuous batching.

        Args:
            inputs: Token ids of each prompt.
            generation_config: Generation options; the model's own when None. Never changed.
            continuous_batching_config: This package's or transformers' `ContinuousBatchingConfig`.
            record_timestamps: Notes the time of each token.
            progress_bar: Shows requests done, tokens per second and cache use, and before that the warm-up.
            persistent_manager: Keeps the manager, with its cached prefixes, for the next call.
            warmup: Prepares everything before the first request rather than with it.
            kwargs: `max_new_tokens`, `workload_hints`, `kernel_config`, and `stream`: True gives out tokens as they
                come.

        Returns:
            Request id to output, in the order of `inputs`, each request's extra sequences beside it. A request that
            fails on its own has status FAILED and says why in `error`. With `stream=True` an iterator instead, of
            pieces of all answers as they come; the engine starts with the first and ends with the last, or when the
            iterator is closed, which cancels what is left.

        Raises:
            TypeError: A prompt is no list of integers, or a keyword argument is unknown.
            ValueError: A prompt is empty or has ids outside the vocabulary, or an option is not supported.
            EngineDiedError: The engine died; the cause is chained.
        """
        kwargs = without_generate_arguments(kwargs, generation_config)
        unknown = sorted(set(kwargs) - set(_GENERATE_BATCH_EXTRAS))
        if unknown:
            raise TypeError(
                f"generate_batch got unknown arguments {', '.join(unknown)}; besides its named ones it takes "
                f"{', '.join(_GENERATE_BATCH_EXTRAS)} (prompts are packed, so no attention_mask is needed)"
            )
        prompts = _check_prompts(inputs, self)
        stream = kwargs.get("stream", False)
        if not isinstance(stream, bool):
            raise TypeError(f"stream must be True or False, got {stream!r}")
        if not prompts:
            return iter(()) if stream else {}
        max_new_tokens = kwargs.get("max_new_tokens")
        options = self.generation_config if generation_config is None else generation_config  # pyright: ignore[reportAttributeAccessIssue]
        hints = kwargs.get("workload_hints")
        if hints is None and not persistent_manager:
            # A manager that stays must also suit what comes later.
            hints = _hints(prompts, max_new_tokens, options)
        manager = ContinuousMixin.init_continuous_batching(
            self, options, continuous_batching_config, hints, kwargs.get("kernel_config")
        )
        batch = _Batch(manager, prompts, max_new_tokens, record_timestamps, progress_bar)
        if stream:
            return batch.stream(warmup, persistent_manager)
        with logging_redirect_tqdm():
            if warmup:
                manager.warmup(progress_bar)
            with _running(manager, True, None, persistent_manager):
                return batch.run()


@contextmanager
def _running(
    manager: ContinuousBatchingManager, block: bool, timeout: float | None, is_persistent: bool
) -> Iterator[None]:
    """The manager runs within the context. An exception stops at once what is still running."""
    manager.start()
    failed = True
    try:
        yield
        failed = False
    finally:
        manager.stop(block=block, timeout=timeout, keep_for_next_session=is_persistent, hard_stop=failed)
        if not is_persistent and not manager.is_running():
            manager.destroy()


def enable(model: _Model, tokenizer: Any = None) -> _Model:
    """Gives a loaded transformers causal language model the methods of `ContinuousMixin`.

    Args:
        model: The model; changed in place. A second call is harmless.
        tokenizer: Decodes tokens for `stop_strings`.

    Returns:
        The same object.
    """
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise TypeError(f"enable needs a loaded transformers model, got {type(model).__name__}")
    cls = type(model)
    if not issubclass(cls, ContinuousMixin):
        # Checkpoints and error messages go by the class's name: it stays the model's own.
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        model.__class__ = type(cls.__name__, (ContinuousMixin, cls), names)
    if tokenizer is not None:
        object.__setattr__(model, "_cbtriton_tokenizer", tokenizer)
    return model


class patch_transformers:
    """Gives every `PreTrainedModel` the methods of `ContinuousMixin`, so that other programs use this engine.

    Takes effect at once; as a context manager, until the end of the `with` block, otherwise until `undo`.
    """

    _METHODS = (
        "init_continuous_batching",
        "continuous_batching_context_manager",
        "destroy_cached_continuous_batching_manager",
        "generate_batch",
    )

    def __init__(self) -> None:
        from transformers import PreTrainedModel

        self._target: Any = PreTrainedModel
        # Models get the originals from a class that comes after PreTrainedModel: these only hide them.
        self._own = {name: vars(self._target)[name] for name in self._METHODS if name in vars(self._target)}
        for name in self._METHODS:
            setattr(self._target, name, vars(ContinuousMixin)[name])
        self._serve = ServePatch()

    def undo(self) -> None:
        """Puts the original methods back; harmless when repeated."""
        self._serve.undo()
        for name in self._METHODS:
            if name in self._own:
                setattr(self._target, name, self._own[name])
            elif vars(self._target).get(name) is vars(ContinuousMixin)[name]:
                delattr(self._target, name)

    def __enter__(self) -> patch_transformers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def serve() -> None:
    """The command `cbtriton-serve`: `transformers serve --continuous-batching` on this engine, with its arguments."""
    from transformers.cli.transformers import main

    patch_transformers()
    sys.argv = ["transformers", "serve", *sys.argv[1:], "--continuous-batching"]
    main()


def _check_prompts(inputs: Any, model: Any) -> list[list[int]]:
    if isinstance(inputs, (str, bytes, dict)) or not hasattr(inputs, "__iter__"):
        raise TypeError(f"inputs must be a list of prompts, each a list of token ids, got {type(inputs).__name__}")
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    prompts = []
    for position, input_ids in enumerate(inputs):
        try:
            prompts.append(check_prompt(input_ids, num_embeddings))
        except (TypeError, ValueError) as error:
            raise type(error)(f"inputs[{position}]: {error}") from None
    return prompts


def _hints(prompts: list[list[int]], max_new_tokens: int | None, options: Any) -> WorkloadHints:
    wanted = max_new_tokens if max_new_tokens is not None else getattr(options, "max_new_tokens", None)
    return WorkloadHints(
        max_prompt_length=max(map(len, prompts)),
        max_generated_length=wanted or 0,
        num_requests=len(prompts) * (getattr(options, "num_return_sequences", None) or 1),
    )


@dataclass(frozen=True, slots=True)
class _Batch:
    """The prompts of one call.

    Attributes:
        manager: Answers them.
        prompts: Their token ids.
        max_new_tokens: Of each answer; None: what the generation options say.
        record_timestamps: Whether the time of each token is noted.
        progress_bar: Whether one is shown.
    """

    manager: ContinuousBatchingManager
    prompts: list[list[int]]
    max_new_tokens: int | None
    record_timestamps: bool
    progress_bar: bool

    def run(self) -> dict[str, GenerationOutput]:
        """All outputs, by request id, once they are there. The manager must run."""
        manager, before = self.manager, self.manager.stats()
        families = manager.submit_batch(self.prompts, self.max_new_tokens, self.record_timestamps)
        results: dict[str, GenerationOutput] = {}
        with tqdm(total=sum(map(len, families)), unit="request", disable=not self.progress_bar) as bar:
            for request_id in chain.from_iterable(families):
                while request_id not in results:
                    output = manager.get_result(request_id, timeout=_PROGRESS_INTERVAL)
                    if output is not None:
                        results[request_id] = output
                    elif not manager.is_in_flight(request_id):
                        results[request_id] = _late_result(manager, request_id)
                    _show_progress(bar, manager.stats(), before)
        return results

    def stream(self, warmup: bool, is_persistent: bool) -> Iterator[StreamedTokens]:
        """Pieces of all answers as they come; the manager runs until the last one, or until the iterator is closed."""
        manager = self.manager
        with logging_redirect_tqdm():
            if warmup:
                manager.warmup(self.progress_bar)
        with _running(manager, True, None, is_persistent):
            before = manager.stats()
            families = manager.submit_batch(self.prompts, self.max_new_tokens, self.record_timestamps, streaming=True)
            left = set(chain.from_iterable(families))
            pieces = AnswerPieces(None if manager.tokenizer is None else manager.tokenizer.decode)
            with tqdm(total=len(left), unit="request", disable=not self.progress_bar) as bar:
                while left:
                    output = manager.get_result(left)
                    if output is None:
                        raise RuntimeError("results went to somebody else, or the manager was stopped")
                    if output.is_finished():
                        left.remove(output.request_id)
                    _show_progress(bar, manager.stats(), before)
                    yield pieces.next_of(output)


def _late_result(manager: ContinuousBatchingManager, request_id: str) -> GenerationOutput:
    """The output of a request that ended just after a wait for it did."""
    output = manager.get_result(request_id, timeout=0)
    if output is None:
        raise RuntimeError(f"the result of {request_id!r} went to somebody else, or the manager was stopped")
    return output


def _show_progress(bar: Any, now: EngineStats, before: EngineStats) -> None:
    if bar.disable:
        return
    done = now.requests_finished + now.requests_failed - before.requests_finished - before.requests_failed
    seconds = bar.format_dict["elapsed"]
    tokens = now.generated_tokens - before.generated_tokens
    if seconds > 0:
        bar.set_postfix_str(f"{tokens / seconds:.0f} tokens/s, cache {now.cache_use:.0%}", refresh=False)
    bar.update(done - bar.n)
