"""Modules whose `forward` is replaced for a while and then put back: the class's, or one that the module had itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class ReplacedForwards:
    """Remembers what was there."""

    def __init__(self) -> None:
        self._originals: list[tuple[nn.Module, Callable[..., Any] | None]] = []

    def replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Makes a module run `forward`."""
        self._originals.append((module, module.__dict__.get("forward")))
        module.forward = forward

    def put_back(self) -> None:
        """Makes all modules run what they ran before; harmless when nothing is replaced."""
        while self._originals:
            module, original = self._originals.pop()
            if original is None:
                # Somebody may have taken it off already.
                module.__dict__.pop("forward", None)
            else:
                module.forward = original
