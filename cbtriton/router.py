"""Brings outputs from the engine's thread to whoever waits for them.

Owns the outputs that nobody has taken yet and the registered handlers. Thread-safe; knows no engine.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from threading import Condition, RLock

from cbtriton.request import GenerationOutput

Handler = Callable[[GenerationOutput], None]


@dataclass(slots=True)
class _Entry:
    """An output in the queue; `is_taken` once somebody has received it by its id."""

    output: GenerationOutput
    is_taken: bool = False


@dataclass(frozen=True, slots=True)
class _Registration:
    loop: asyncio.AbstractEventLoop
    handler: Handler


class OutputRouter:
    """A queue of outputs that can be read in order of arrival or by request id, and handlers on event loops.

    Args:
        lock: Guards the router. The owner holds it to change in one moment what `get` asks it about and what is queued.
    """

    def __init__(self, lock: RLock) -> None:
        self._changed = Condition(lock)
        self._arrivals: deque[_Entry] = deque()
        self._by_id: dict[str, deque[_Entry]] = {}
        self._num_taken = 0
        self._handlers: dict[str, _Registration] = {}

    def deliver(self, outputs: Iterable[GenerationOutput]) -> None:
        """Hands outputs to their handlers, or queues them where there is none."""
        with self._changed:
            for output in outputs:
                if output.request_id in self._handlers:
                    self._call_handler(output)
                else:
                    entry = _Entry(output)
                    self._arrivals.append(entry)
                    self._by_id.setdefault(output.request_id, deque()).append(entry)
            self._changed.notify_all()

    def deliver_to_handlers(self, outputs: Iterable[GenerationOutput]) -> None:
        """Hands outputs to their handlers and drops those that have none."""
        with self._changed:
            for output in outputs:
                if output.request_id in self._handlers:
                    self._call_handler(output)

    def wake(self) -> None:
        """Makes waiting readers ask again whether anything can still come."""
        with self._changed:
            self._changed.notify_all()

    def register(self, request_id: str, loop: asyncio.AbstractEventLoop, handler: Handler) -> None:
        """Delivers a request's outputs, those already queued first, to `handler` on `loop`.

        The handler is removed with the request's final output.
        """
        with self._changed:
            self._handlers[request_id] = _Registration(loop, handler)
            while request_id in self._handlers and (output := self._pop(request_id)) is not None:
                self._call_handler(output)

    def get(
        self, request_id: str | Collection[str] | None, timeout: float | None, may_come: Callable[[], bool]
    ) -> GenerationOutput | None:
        """The next output, or the next one of `request_id`, without disturbing the order of the others.

        Args:
            request_id: Whose output; of several the one that came first; None for whoever's comes first.
            timeout: Seconds to wait at most; None waits for as long as something may come.
            may_come: Whether waiting makes sense; called with the lock held whenever anything changed. May raise, which
                ends the wait.

        Returns:
            None after `timeout`, or as soon as nothing can come any more.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                output = self._pop(request_id)
                if output is not None:
                    return output
                if not may_come():
                    return None
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    return None
                self._changed.wait(remaining)

    def _pop(self, request_id: str | Collection[str] | None) -> GenerationOutput | None:
        if request_id is not None and not isinstance(request_id, str):
            wanted = request_id
            names = (entry.output.request_id for entry in self._arrivals if not entry.is_taken)
            request_id = next((name for name in names if name in wanted), "")
        if request_id is not None:
            entries = self._by_id.get(request_id)
            if not entries:
                return None
            entry = entries.popleft()
            if not entries:
                del self._by_id[request_id]
            self._take(entry)
            return entry.output
        while self._arrivals:
            entry = self._arrivals.popleft()
            if entry.is_taken:
                self._num_taken -= 1
                continue
            # Of one id, the first to arrive is the first in its own queue too.
            entries = self._by_id[entry.output.request_id]
            entries.popleft()
            if not entries:
                del self._by_id[entry.output.request_id]
            return entry.output
        return None

    def _take(self, entry: _Entry) -> None:
        entry.is_taken = True
        self._num_taken += 1
        # Who only reads by id never pops arrivals: clear them when most are gone.
        if self._num_taken > 64 and 2 * self._num_taken > len(self._arrivals):
            self._arrivals = deque(kept for kept in self._arrivals if not kept.is_taken)
            self._num_taken = 0

    def _call_handler(self, output: GenerationOutput) -> None:
        registration = self._handlers[output.request_id]
        if output.is_finished():
            del self._handlers[output.request_id]
        try:
            registration.loop.call_soon_threadsafe(registration.handler, output)
        except RuntimeError:
            # A client that is gone leaves a closed loop behind: its output has no receiver any more.
            if not registration.loop.is_closed():
                raise
