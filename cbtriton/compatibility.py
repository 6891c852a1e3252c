"""What programs expect beyond documented methods, and what they do not tell.

`generate(cache_implementation="paged")` passes on to `generate_batch` all that it was given. `transformers serve`
makes a manager with the sampling options of whoever asks first, and adds requests with a limit and EOS ids only; here
each request gets the options that the server has read for it, stop strings included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from cbtriton.config import ContinuousBatchingConfig
from cbtriton.processors import PROCESSOR_OPTIONS

# What a `GenerationConfig` says of one request, by the names that `add_request` has for it.
_OPTIONS = ("do_sample", "temperature", "top_k", "top_p", "min_p", "stop_strings", *PROCESSOR_OPTIONS)
# Those that mean nothing to a request that takes the most likely token; some would make it draw.
_DRAWING = frozenset({"temperature", "top_k", "top_p", "min_p"})

# Of the request that the current task serves.
_options: ContextVar[dict[str, Any] | None] = ContextVar("options", default=None)


@dataclass(frozen=True, slots=True)
class ThreadStatus:
    """The background thread, as the server asks after it.

    Attributes:
        fatal_error: What ended it; None while nothing has.
    """

    fatal_error: BaseException | None


@dataclass(frozen=True, slots=True)
class SchedulerCounts:
    """The scheduler, as monitors ask after it.

    Attributes:
        num_active: Requests that run.
        num_waiting: Requests that wait.
    """

    num_active: int
    num_waiting: int

    def has_pending_requests(self) -> bool:
        """Whether any request has not ended."""
        return self.num_active + self.num_waiting > 0


@dataclass(frozen=True, slots=True)
class BatchProcessor:
    """What stands where transformers has its engine.

    Attributes:
        scheduler: Its scheduler.
    """

    scheduler: SchedulerCounts


class ServedManager:
    """A manager as the server uses it.

    Args:
        manager: The manager; whatever is not here is its own.
    """

    def __init__(self, manager: Any) -> None:
        self.manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    def add_request(self, *args: Any, **kwargs: Any) -> str | None:
        """Queues a request with the options that the server has read for it."""
        return self.manager.add_request(*args, **(_options.get() or {}) | kwargs)

    @property
    def background_thread_status(self) -> ThreadStatus:
        """Whether the engine lives."""
        return ThreadStatus(self.manager.fatal_error)

    @property
    def batch_processor(self) -> BatchProcessor:
        """What runs and waits."""
        stats = self.manager.stats()
        return BatchProcessor(SchedulerCounts(stats.num_running, stats.num_waiting))

    def stop(self, block: bool = True, timeout: float | None = None, **options: Any) -> None:
        """Finishes what runs, and ends at once what has not finished after `timeout` seconds: the server goes."""
        self.manager.stop(block=block, timeout=timeout, **options)
        if block and self.manager.is_running():
            self.manager.stop(block=True, timeout=timeout, hard_stop=True)


class ServePatch:
    """Makes transformers' server, where it is installed, use `ServedManager`, until `undo`."""

    def __init__(self) -> None:
        from transformers.utils.import_utils import is_serve_available

        self._own: dict[str, Callable[..., Any]] = {}
        if not is_serve_available():
            return
        from transformers.cli.serving.utils import CBGenerateManager

        self._target: Any = CBGenerateManager
        self._own = {
            name: vars(self._target)[name] for name in ("init_cb", "generate_streaming", "generate_non_streaming")
        }
        self._target.init_cb = _init_cb
        self._target.generate_streaming = _with_options(self._own["generate_streaming"])
        self._target.generate_non_streaming = _with_options_async(self._own["generate_non_streaming"])

    def undo(self) -> None:
        """Puts the server's own methods back; harmless when repeated."""
        for name, method in self._own.items():
            setattr(self._target, name, method)
        self._own = {}


def without_generate_arguments(arguments: Mapping[str, Any], generation_config: Any) -> dict[str, Any]:
    """What `generate(cache_implementation="paged")` passes to `generate_batch` beyond what its options say already.

    Raises:
        ValueError: An attention mask hides tokens.
    """
    if arguments.get("cache_implementation") != "paged":
        return dict(arguments)
    mask = arguments.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise ValueError(
            "attention_mask must be all ones with cache_implementation='paged', got zeros: padding would be part of "
            "the prompts; give generate_batch each prompt without padding"
        )
    fields = () if generation_config is None else vars(generation_config)
    given = {"attention_mask", "input_ids", "cache_implementation", *fields} - {"max_new_tokens"}
    return {name: value for name, value in arguments.items() if name not in given}


def request_options(generation_config: Any) -> dict[str, Any]:
    """Arguments of `add_request` for what a `GenerationConfig` says of one request."""
    options = {name: value for name in _OPTIONS if (value := getattr(generation_config, name, None)) is not None}
    options["do_sample"] = bool(options.get("do_sample"))
    if options["do_sample"]:
        return options
    return {name: value for name, value in options.items() if name not in _DRAWING}


def _init_cb(server: Any, model: Any, gen_config: Any) -> None:
    """Starts the manager with the first request. Its own options are the model's, not those of that request."""
    if server._cb is not None:
        return
    config = replace(ContinuousBatchingConfig.from_any(server._cb_config), per_request_processors=True)
    manager = model.init_continuous_batching(
        generation_config=model.generation_config, continuous_batching_config=config
    )
    manager.start()
    server._cb = ServedManager(manager)


@contextmanager
def _serving(server: Any, processor: Any, gen_config: Any) -> Iterator[None]:
    if isinstance(server._cb, ServedManager) and server._cb.manager.tokenizer is None:
        server._cb.manager.tokenizer = getattr(processor, "tokenizer", processor)
    token = _options.set(request_options(gen_config))
    try:
        yield
    finally:
        _options.reset(token)


def _with_options(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def generate(self: Any, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any) -> Any:
        with _serving(self, processor, gen_config):
            return method(self, model, processor, inputs, gen_config, *args, **kwargs)

    return generate


def _with_options_async(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def generate(
        self: Any, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        with _serving(self, processor, gen_config):
            return await method(self, model, processor, inputs, gen_config, *args, **kwargs)

    return generate
