"""Rotary embeddings with other frequencies for long sequences (`longrope`), told which sequences of a step are long.

transformers' own modules go by the largest position that they get, so that one long sequence would change the keys of
all others in a step. Which ones are long is for the scheduler to say: all tokens of a sequence have the same
frequencies, those that came before it got long as well, so its cache is computed again when it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cbtriton.replaced_forward import ReplacedForwards

_ROPE_TYPE = "longrope"


class SwitchedRope:
    """Gives each token of a step the frequencies of its own sequence.

    Args:
        model: The model. Nothing is done if no frequencies of it depend on lengths.

    Attributes:
        switch_length: Sequences with more tokens than this are long; None where there is no difference.

    Raises:
        ValueError: The model has several such lengths.
    """

    def __init__(self, model: Any) -> None:
        self._modules = tuple(module for module in model.modules() if _is_switched(module))
        self.switch_length = _switch_length(model.config.get_text_config()) if self._modules else None
        self._is_long: Tensor | None = None
        self._replaced = ReplacedForwards()

    def attach(self) -> None:
        """Puts the model's modules on what steps say."""
        if self.switch_length is None:
            return
        for module in self._modules:
            self._replaced.replace(module, partial(self._forward, module.forward, self.switch_length))

    def detach(self) -> None:
        """Gives the modules back as they were; harmless when they are."""
        self._replaced.put_back()

    def at(self, is_long: Tensor | None) -> AbstractContextManager[None]:
        """Tokens belong to long sequences or to others, `[num_tokens]` bool; None: modules decide as they always do."""
        return nullcontext() if is_long is None else self._told(is_long)

    @contextmanager
    def _told(self, is_long: Tensor) -> Iterator[None]:
        self._is_long = is_long
        yield
        self._is_long = None

    def _forward(
        self,
        forward: Callable[..., tuple[Tensor, ...]],
        length: int,
        x: Tensor,
        position_ids: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        if self._is_long is None:
            return forward(x, position_ids, *args, **kwargs)
        # The largest position decides: one more token with the first position of a long sequence, or none that has one.
        beyond = position_ids.new_full((*position_ids.shape[:-1], 1), length)
        long = forward(x, torch.cat([position_ids, beyond], dim=-1), *args, **kwargs)
        short = forward(x, position_ids.clamp(max=length - 1), *args, **kwargs)
        is_long = self._is_long[:, None]
        return tuple(torch.where(is_long, a[..., :-1, :], b) for a, b in zip(long, short, strict=True))


def _is_switched(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    return kinds == _ROPE_TYPE or (isinstance(kinds, Mapping) and _ROPE_TYPE in kinds.values())


def _switch_length(text_config: Any) -> int | None:
    parameters = getattr(text_config, "rope_parameters", None) or {}
    # Those of all layers, or of each type of layer.
    each = [one for one in (parameters, *parameters.values()) if isinstance(one, Mapping)]
    lengths = {one["original_max_position_embeddings"] for one in each if one.get("rope_type") == _ROPE_TYPE}
    if len(lengths) > 1:
        raise ValueError(f"rope type {_ROPE_TYPE} must change at one length for all layers, got {sorted(lengths)}")
    longest = getattr(text_config, "max_position_embeddings", None)
    return next((length for length in lengths if longest is None or longest > length), None)
