"""Models whose attention cannot be paged, run on transformers' own cache: one sequence of a step after the other.

What such a model keeps of its tokens is its own affair: the cache that it makes is kept for each running request, and
the model is called as `generate` calls it. Scheduling, sampling, streaming and cancelling are those of all models.
Whether a model's cache does what its plain pass does is tried out when it is loaded.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from cbtriton.plan import BatchPlan
from cbtriton.replaced_forward import ReplacedForwards
from cbtriton.row_states import RowStates, Span, tensors_of

_logger = logging.getLogger(__name__)

# What models call the cache that they take and hand back, by model and version of transformers.
_CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values", "state")
# A prompt in two pieces, and then single tokens. Windows and pages of tiny models end within it.
_TRIAL_TOKENS = 24
_TRIAL_PIECES = (9, 19, 20, 21, 22, 23, 24)


@dataclass(frozen=True, slots=True)
class OwnCacheLayout:
    """What a model's own cache can do, and takes.

    Attributes:
        argument: Name of the argument and of the result.
        continues_in_chunks: Whether several tokens at once go on from a cache.
        bytes_per_request: Bytes that do not grow.
        bytes_per_token: Bytes that each token adds.
    """

    argument: str
    continues_in_chunks: bool
    bytes_per_request: int
    bytes_per_token: int


class _Held:
    """A cache, once the model has made one."""

    def __init__(self) -> None:
        self.cache: Any = None


class OwnCaches:
    """The caches of all running requests, and the model's calls with them.

    Args:
        model: The model.
        layout: What `try_own_cache` found.
    """

    def __init__(self, model: nn.Module, layout: OwnCacheLayout) -> None:
        self._model = model
        self._layout = layout
        self._rows = RowStates(_Held)
        self._spans: tuple[Span, ...] | None = None
        self._replaced = ReplacedForwards()

    @property
    def num_bytes(self) -> int:
        """Bytes of the caches that are held."""
        return sum(_num_bytes(held.cache) for held in self._rows)

    def attach(self) -> None:
        """Makes the model run the sequences of a step one after the other."""
        self._replaced.replace(self._model, partial(self._forward, self._model.forward))

    def detach(self) -> None:
        """Gives the model back as it was; harmless when it is. Caches stay."""
        self._replaced.put_back()

    @contextmanager
    def step(self, plan: BatchPlan) -> Iterator[None]:
        """The model works on the caches of a plan's rows, whose tokens lie one after the other."""
        self._spans = self._rows.begin_step(plan)
        try:
            yield
        finally:
            self._spans = None

    def _forward(
        self, forward: Callable[..., Any], input_ids: Tensor, logits_to_keep: Tensor | None = None, **_: Any
    ) -> Any:
        """The model's results for a packed step, `[1, num_tokens, vocab_size]` or those of the tokens to keep."""
        if self._spans is None:
            raise RuntimeError("the model was called outside an engine step; detach the engine first")
        num_tokens = input_ids.shape[1]
        wanted = torch.arange(num_tokens, device=input_ids.device) if logits_to_keep is None else logits_to_keep
        logits: Tensor | None = None
        for span in self._spans:
            for begin, end in self._pieces(span):
                places = ((wanted >= begin) & (wanted < end)).nonzero()[:, 0]
                some = self._run(forward, input_ids[:, begin:end], span.cache, wanted[places] - begin, logits_to_keep)
                if logits is None:
                    logits = some.new_zeros(1, len(wanted), some.shape[-1])
                logits[0, places] = some
        return SimpleNamespace(logits=logits)

    def _pieces(self, span: Span) -> Iterator[tuple[int, int]]:
        """The span as the model can take it, cut before its last token where the cache is to be kept as it is there."""
        ends = [span.end]
        if span.is_continued and not self._layout.continues_in_chunks:
            ends = list(range(span.begin + 1, span.end + 1))
        elif span.kept is not None and span.end - span.begin > 1:
            ends = [span.end - 1, span.end]
        begin = span.begin
        for end in ends:
            if span.kept is not None and end == span.end:
                span.kept.cache = copy.deepcopy(span.cache.cache)
            yield begin, end
            begin = end

    def _run(
        self, forward: Callable[..., Any], input_ids: Tensor, held: _Held, wanted: Tensor, logits_to_keep: Tensor | None
    ) -> Tensor:
        """`[num_wanted, vocab_size]` of one sequence, whose cache grows."""
        keep: dict[str, Any] = {}
        if logits_to_keep is not None:
            # At least one, which some models ask for.
            keep["logits_to_keep"] = wanted if len(wanted) else wanted.new_zeros(1)
        logits, held.cache = _call(forward, self._layout.argument, input_ids, held.cache, keep)
        if logits_to_keep is None:
            return logits.index_select(0, wanted)
        return logits[: len(wanted)]


@torch.no_grad()
def try_own_cache(model: Any, plain_logits: Callable[[list[int]], Tensor], rounding: float) -> OwnCacheLayout | None:
    """Tries out whether a model's cache gives what its plain pass gives, in pieces and token by token.

    Args:
        model: The model, in eval mode and on its own attention.
        plain_logits: Its plain pass.
        rounding: How far logits may be apart that are the same but for rounding, relative to the largest.

    Returns:
        What was found; None where the model has no cache or gives other logits with it.
    """
    argument = _cache_argument(model)
    if argument is None:
        return None
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    usable = [token for token in range(model.get_input_embeddings().weight.shape[0]) if token != padding]
    draws = torch.randint(len(usable), (_TRIAL_TOKENS,), generator=torch.Generator().manual_seed(0))
    prompt = [usable[draw] for draw in draws.tolist()]
    try:
        expected = plain_logits(prompt)
        for continues_in_chunks in (True, False):
            difference, layout = _tried(model, argument, prompt, continues_in_chunks, expected)
            if difference <= rounding * expected.abs().max().item():
                return layout
    except Exception:  # Whatever it is: the model's cache does not work, or not alone.
        _logger.debug("%s does not run on a cache of its own", type(model).__name__, exc_info=True)
    return None


@torch.no_grad()
def cached_logits(model: Any, token_ids: list[int], ends: Sequence[int]) -> Tensor:
    """Logits `[num_tokens, vocab_size]` float32 of one sequence from the model's own cache, in pieces that end there.

    Raises:
        ValueError: The model has no cache.
    """
    argument = _cache_argument(model)
    if argument is None:
        raise ValueError(f"{type(model).__name__} takes no cache")
    input_ids = torch.tensor([token_ids], device=model.device)
    return torch.cat([logits for logits, _ in _pieces_of(model, argument, input_ids, ends)]).float()


def _cache_argument(model: Any) -> str | None:
    names = inspect.signature(model.forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in names and "use_cache" in names), None)


def _pieces_of(model: Any, argument: str, input_ids: Tensor, ends: Sequence[int]) -> Iterator[tuple[Tensor, Any]]:
    """Logits of each piece, and the cache behind it."""
    cache, begin = None, 0
    for end in ends:
        logits, cache = _call(model, argument, input_ids[:, begin:end], cache, {})
        yield logits, cache
        begin = end


def _tried(
    model: Any, argument: str, prompt: list[int], continues_in_chunks: bool, expected: Tensor
) -> tuple[float, OwnCacheLayout]:
    """The largest difference to the expected logits, and what the cache takes."""
    input_ids = torch.tensor([prompt], device=model.device)
    ends = _TRIAL_PIECES if continues_in_chunks else (_TRIAL_PIECES[0], *range(_TRIAL_PIECES[0] + 1, _TRIAL_TOKENS + 1))
    actual, sizes = [], []
    for logits, cache in _pieces_of(model, argument, input_ids, ends):
        actual.append(logits.float())
        sizes.append(_num_bytes(cache))
    difference = (torch.cat(actual) - expected).abs().max().item()
    per_token = -(-(sizes[-1] - sizes[0]) // (ends[-1] - ends[0]))
    fixed = max(0, sizes[0] - per_token * ends[0])
    return difference, OwnCacheLayout(argument, continues_in_chunks, fixed, per_token)


def _call(
    forward: Callable[..., Any], argument: str, input_ids: Tensor, cache: Any, more: dict[str, Any]
) -> tuple[Tensor, Any]:
    """Logits `[num_tokens, vocab_size]` of one sequence's next tokens, and its cache."""
    given = {} if cache is None else {argument: cache}
    output = forward(input_ids=input_ids, use_cache=True, **given, **more)
    return output.logits[0], getattr(output, argument)


def _num_bytes(cache: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(cache))
