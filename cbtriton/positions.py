"""Positions of packed tokens in models that do not simply take them.

Some models count positions from behind their padding token. Others look them up by the length of a cache, which there
is none of: their position embeddings are told the positions directly, and attention layers that scale queries by their
position get something that stands for the cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from cbtriton.replaced_forward import ReplacedForwards

# What such an embedding calls the length of the cache, by version of transformers.
_LENGTH_ARGUMENTS = {"cache_length", "past_key_values_length"}
_NUM_TOKENS = 3


class PositionEmbeddings:
    """Tells a model's position embeddings where the tokens of a step stand.

    Args:
        model: The model. Nothing is done if it takes positions itself.
    """

    def __init__(self, model: nn.Module) -> None:
        takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._modules = () if takes_positions else tuple(filter(_takes_positions_or_length, model.modules()))
        self._tuned = tuple(filter(_tunes_temperature, model.modules()))
        self._positions: Tensor | None = None
        self._replaced = ReplacedForwards()

    def attach(self) -> None:
        """Puts the embeddings on the positions of steps."""
        for module in self._modules:
            self._replaced.replace(module, partial(self._forward, module.forward))
        tuned = self._tuned_forward()
        for module in self._tuned:
            self._replaced.replace(module, MethodType(tuned, module))

    def detach(self) -> None:
        """Gives the embeddings back as they were; harmless when they are."""
        self._replaced.put_back()

    def at(self, positions: Tensor) -> AbstractContextManager[None]:
        """Tokens stand at these positions, `[num_tokens]` int64."""
        return self._told(positions) if self._modules or self._tuned else nullcontext()

    @contextmanager
    def _told(self, positions: Tensor) -> Iterator[None]:
        self._positions = positions
        yield
        self._positions = None

    def _forward(self, forward: Callable[..., Tensor], *args: Any, position_ids: None = None, **kwargs: Any) -> Tensor:
        return forward(*args, position_ids=self._positions, **kwargs)

    def _tuned_forward(self) -> Callable[..., Any]:
        """A method for all of these layers, so that a graph compiled for one serves all."""
        told = self

        def forward(self: Any, *args: Any, cache: None = None, **kwargs: Any) -> Any:
            assert told._positions is not None
            return type(self).forward(self, *args, cache=_Positions(told._positions), **kwargs)

        return forward


class _Positions:
    """Stands for a cache that is asked for nothing but its length, and keeps nothing.

    Args:
        positions: `[num_tokens]` int64, where the tokens of the step stand.
    """

    def __init__(self, positions: Tensor) -> None:
        self._positions = positions

    def get_seq_length(self, *_: Any) -> Tensor:
        """What has to be added to 0, 1, 2, … for each token."""
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Those of the step: the others are in the pages."""
        return keys, values


def _takes_positions_or_length(module: nn.Module) -> bool:
    names = set(inspect.signature(module.forward).parameters)
    return isinstance(module, nn.Embedding) and "position_ids" in names and bool(names & _LENGTH_ARGUMENTS)


def _tunes_temperature(module: nn.Module) -> bool:
    """Whether an attention layer scales queries by their position, which it counts from the length of its cache."""
    is_tuned = getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True)
    # A forward that somebody put on the layer is its own affair.
    return bool(is_tuned) and "forward" not in vars(module) and "cache" in inspect.signature(module.forward).parameters


def position_offset(model: Any, arguments: Mapping[str, Any]) -> int:
    """What the model adds to positions 0, 1, 2, … when it counts them itself, and not when they are given.

    Models after RoBERTa begin behind their padding token.

    Args:
        model: The model.
        arguments: What it has to be given besides tokens and positions.
    """
    device = model.device
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    # Any token but the one for padding, which has no position.
    token = next(token for token in (3, 4) if token != getattr(model.config, "pad_token_id", None))
    input_ids = torch.full((1, _NUM_TOKENS), token, device=device)
    positions = torch.arange(_NUM_TOKENS, device=device)
    run = partial(model, input_ids=input_ids, use_cache=False, **arguments)
    given = _lookups(tables, lambda: run(position_ids=positions[None]))
    counted = _lookups(tables, run)
    for module in tables:
        if module in given and torch.equal(given[module], positions) and module in counted:
            differences = (counted[module] - positions).unique().tolist()
            if len(differences) == 1:
                return differences[0]
    return 0


def _lookups(tables: Sequence[nn.Module], run: Callable[[], object]) -> dict[nn.Module, Tensor]:
    """What one run looks up in each table, for one token after the other."""
    seen: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].numel() == _NUM_TOKENS:
            seen[module] = args[0].flatten()

    handles = [table.register_forward_pre_hook(note) for table in tables]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return seen
