"""What running requests keep beside the pages: a cache of transformers for each row of the request table."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PretrainedConfig

from cbtriton.plan import BatchPlan

NewCache = Callable[[], Any]


class RequestStates(Protocol):
    """Whatever works on such caches."""

    @property
    def num_bytes(self) -> int:
        """Bytes that are held."""
        ...

    def attach(self) -> None:
        """Puts the model on the states of requests."""
        ...

    def detach(self) -> None:
        """Gives it back as it was; harmless when it is. States stay."""
        ...

    def step(self, plan: BatchPlan) -> AbstractContextManager[None]:
        """Within the context, the model works on the states of the plan's rows."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """A sequence's tokens in a packed step.

    Attributes:
        begin: The first one.
        end: Behind the last one.
        prompt_end: Behind the last one that is part of the prompt; at most `end`.
        is_continued: Whether there is a state of earlier tokens.
        cache: Where the state is.
        kept: Another one that is to get all of the tokens but the last; None where nobody wants that.
    """

    begin: int
    end: int
    prompt_end: int
    is_continued: bool
    cache: Any
    kept: Any | None

    @property
    def is_single(self) -> bool:
        """Whether it is one token that goes on from a state."""
        return self.is_continued and self.end - self.begin == 1


class RowStates:
    """The caches. Each plan must pass through here once, in order: it says which begin, fork and end.

    Args:
        new_cache: Makes an empty cache.
    """

    def __init__(self, new_cache: NewCache) -> None:
        self._new_cache = new_cache
        self._caches: dict[int, Any] = {}
        self._prompt_lengths: dict[int, int] = {}
        # As they are before the last token of the prompt.
        self._kept: dict[int, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        return iter([*self._caches.values(), *self._kept.values()])

    def __len__(self) -> int:
        return len(self._caches) + len(self._kept)

    def begin_step(self, plan: BatchPlan) -> tuple[Span, ...]:
        """The sequences of a step, whose tokens lie one after the other."""
        for row in plan.rows_left:
            self._caches.pop(row, None)
            self._kept.pop(row, None)
        for start in plan.row_starts:
            self._prompt_lengths[start.row] = start.prompt_length
            if start.forked_row in self._kept:
                self._caches[start.row] = copy.deepcopy(self._kept[start.forked_row])
        for forked in plan.forked_rows:
            self._kept.pop(forked, None)
        spans, begin = [], 0
        for row in plan.rows:
            if row.start == 0:
                self._caches[row.row] = self._new_cache()
            cache = self._caches[row.row]
            if row.keeps_state:
                self._kept[row.row] = copy.deepcopy(cache)
            kept = self._kept[row.row] if row.keeps_state else None
            num_of_prompt = min(row.count, max(0, self._prompt_lengths[row.row] - row.start))
            spans.append(Span(begin, begin + row.count, begin + num_of_prompt, row.start > 0, cache, kept))
            begin += row.count
        return tuple(spans)


def tensors_of(cache: Any) -> Iterator[Tensor]:
    """All tensors of a cache, each once, however deep they lie in its parts."""
    pending, seen = [cache], set[int]()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, list | tuple):
            pending += value
        elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module | PretrainedConfig):
            pending += vars(value).values()
