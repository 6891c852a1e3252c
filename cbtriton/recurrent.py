"""Recurrent layers of a model, and their states: one for each row of the request table, beside the pages.

Such a layer (a gated delta net, Mamba, a short convolution, lightning attention) folds all earlier tokens into a state
whose size does not grow. The layers stay transformers' own: while attached, one is called for each sequence of the
packed step, with a cache of transformers that belongs to the request in that row; sequences with one token share a call
where the layer can do that. A request begins with an empty state, or with that of a request whose prompt it shares:
nothing of it can come out of the prefix cache.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from cbtriton.plan import BatchPlan
from cbtriton.replaced_forward import ReplacedForwards
from cbtriton.row_states import NewCache, RowStates, Span, tensors_of

_logger = logging.getLogger(__name__)

# What the argument with the cache is called, by layers and versions of transformers.
_CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values", "past_key_value", "layer_past")


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentMixer:
    """A recurrent layer, and what it was found to be able to do.

    Attributes:
        module: The layer.
        argument_names: Names of its arguments, in their order.
        layer_idx: Which layer of a cache is its own.
        cache_argument: Name of the argument that takes the cache.
        continues_in_chunks: Whether several tokens at once go on from a state. Mamba-1 of transformers forgets it.
        batches: Whether several sequences with a state and one token each can share a call.
        has_other_singles: Whether a single token gives something else than it does among several: some models bound
            time steps only there. `generate` has prompts in one piece, and then single tokens.
    """

    module: nn.Module
    argument_names: tuple[str, ...]
    layer_idx: int
    cache_argument: str
    continues_in_chunks: bool
    batches: bool
    has_other_singles: bool


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentLayout:
    """The recurrent layers of a model.

    Attributes:
        mixers: The layers, in the order in which they are called.
        new_cache: Makes an empty cache, of the kind that the model itself makes.
        state_bytes: Bytes of a request's states.
    """

    mixers: tuple[RecurrentMixer, ...] = ()
    new_cache: NewCache = lambda: None
    state_bytes: int = 0

    @property
    def has_other_singles(self) -> bool:
        """See `RecurrentMixer.has_other_singles`."""
        return any(mixer.has_other_singles for mixer in self.mixers)


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """How a layer was called in a pass over one sequence."""

    module: nn.Module
    named: dict[str, Any]


class MixerRecorder:
    """Notes calls of layers that take a cache. Which of them are recurrent shows when the pass is over.

    Args:
        rounding: How far results may be apart that are the same but for rounding, relative to the largest number.
    """

    def __init__(self, rounding: float) -> None:
        self._rounding = rounding
        self._calls: dict[nn.Module, _Call] = {}

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Watches the layers of a model."""
        handles = [
            module.register_forward_pre_hook(self._note, with_kwargs=True)
            for module in model.modules()
            if module is not model and _cache_argument(module) is not None
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls.setdefault(module, _Call(module, _by_name(_argument_names(module), args, kwargs)))

    def layout(self, model: Any, attention_modules: Sequence[nn.Module]) -> RecurrentLayout:
        """What was found, tried out on each layer.

        Args:
            model: The model.
            attention_modules: What called transformers' attention interface.
        """
        candidates = [module for module in self._calls if not set(module.modules()) & set(attention_modules)]
        # Of layers within layers the innermost one takes the cache for itself.
        inner = [module for module in candidates if not (set(module.modules()) - {module}) & set(candidates)]
        calls = [self._calls[module] for module in inner]
        for make_cache in _cache_factories(model) if calls else ():
            try:
                return _tried_out_all(calls, make_cache(), self._rounding)
            except Exception:  # Whatever it is: these layers do not work on such a cache.
                _logger.debug("layers do not work on the cache that %s makes", make_cache, exc_info=True)
        return RecurrentLayout()


class RecurrentStates:
    """The states of all running requests, and the calls of the layers that work on them.

    Args:
        layout: The layers.
    """

    def __init__(self, layout: RecurrentLayout) -> None:
        self._layout = layout
        self._rows = RowStates(layout.new_cache)
        self._spans: tuple[Span, ...] | None = None
        self._replaced = ReplacedForwards()

    @property
    def num_bytes(self) -> int:
        """Bytes of the states that are held."""
        return self._layout.state_bytes * len(self._rows)

    def attach(self) -> None:
        """Puts the layers on the states of requests."""
        for mixer in self._layout.mixers:
            self._replaced.replace(mixer.module, partial(self._forward, mixer, mixer.module.forward))

    def detach(self) -> None:
        """Gives the layers back as they were; harmless when they are. States stay."""
        self._replaced.put_back()

    @contextmanager
    def step(self, plan: BatchPlan) -> Iterator[None]:
        """The layers work on the states of a plan's rows, whose tokens lie one after the other, padding behind them."""
        if not self._layout.mixers:
            yield
            return
        self._spans = self._rows.begin_step(plan)
        try:
            yield
        finally:
            self._spans = None

    def _forward(self, mixer: RecurrentMixer, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._spans is None:
            raise RuntimeError("a recurrent layer was called outside an engine step; detach the engine first")
        call = _Sequences(mixer, forward, _by_name(mixer.argument_names, args, kwargs))
        outputs = _Outputs(call.num_tokens)
        together = [span for span in self._spans if span.is_single] if mixer.batches else []
        if len(together) > 1:
            index = [span.begin for span in together]
            outputs.put_singles(index, call.several(index, [span.cache for span in together]))
            alone = [span for span in self._spans if not span.is_single]
        else:
            alone = self._spans
        for span in alone:
            for begin, end in _pieces(mixer, span, span.end):
                outputs.put(slice(begin, end), call.one(begin, end, span.cache))
            if span.kept is not None and span.begin < span.end - 1:
                for begin, end in _pieces(mixer, span, span.end - 1):
                    call.one(begin, end, span.kept)
        return outputs.whole()


def _pieces(mixer: RecurrentMixer, span: Span, end: int) -> list[tuple[int, int]]:
    """The tokens of a sequence up to `end` as the layer can take them."""
    together = end if mixer.continues_in_chunks or not span.is_continued else span.begin
    if mixer.has_other_singles:
        # Those that were generated were single tokens the first time.
        together = min(together, span.prompt_end)
    singles = [(token, token + 1) for token in range(together, end)]
    return [(span.begin, together), *singles] if together > span.begin else singles


class _Sequences:
    """A call of a layer, cut into sequences.

    Args:
        mixer: The layer.
        forward: Its own function.
        named: All arguments by name; tensors `[1, num_tokens, …]` are cut.
    """

    def __init__(self, mixer: RecurrentMixer, forward: Callable[..., Any], named: Mapping[str, Any]) -> None:
        self._mixer = mixer
        self._forward = forward
        # A mask of the packed tokens would be one sequence's.
        self._named = {name: None if name == "attention_mask" else value for name, value in named.items()}
        self.num_tokens = _hidden_states(named).shape[1]

    def one(self, begin: int, end: int, cache: Any) -> Any:
        """The layer's result for one sequence, `[1, end - begin, …]`."""
        return self._run(lambda tensor: tensor[:, begin:end], cache)

    def several(self, index: Sequence[int], caches: Sequence[Any]) -> Any:
        """The layer's result for the single tokens of several sequences, `[num_sequences, 1, …]`."""
        stacked = _stack(caches, self._mixer.layer_idx)
        tokens = torch.tensor(index, device=_hidden_states(self._named).device)
        result = self._run(lambda tensor: tensor[0].index_select(0, tokens).unsqueeze(1), stacked)
        _unstack(stacked, caches, self._mixer.layer_idx)
        return result

    def _run(self, cut: Callable[[Tensor], Tensor], cache: Any) -> Any:
        def of_sequence(value: Any) -> Any:
            is_packed = isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == (1, self.num_tokens)
            return cut(value) if is_packed else value

        named = {name: tree_map(of_sequence, value) for name, value in self._named.items()}
        return self._forward(**{**named, self._mixer.cache_argument: cache})


class _Outputs:
    """Puts a layer's results for all sequences together: tensors with numbers for each token. Padding gets zeros."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._parts: list[Any] = []
        self._is_tuple = False

    def put(self, place: slice, result: Any) -> None:
        """Of one sequence."""
        for number, part in self._split(result, (1, place.stop - place.start)):
            self._room(number, part)[:, place] = part

    def put_singles(self, index: Sequence[int], result: Any) -> None:
        """Of sequences with one token each."""
        for number, part in self._split(result, (len(index), 1)):
            self._room(number, part)[0, list(index)] = part[:, 0]

    def whole(self) -> Any:
        """As the layer would have returned it."""
        return tuple(self._parts) if self._is_tuple else self._parts[0]

    def _split(self, result: Any, shape: tuple[int, int]) -> list[tuple[int, Tensor]]:
        """The tensors of a result that begin with `shape`; other ones, such as weights of attention, are dropped."""
        self._is_tuple = isinstance(result, tuple)
        parts = result if self._is_tuple else (result,)
        self._parts = self._parts or [None] * len(parts)
        return [
            (number, part)
            for number, part in enumerate(parts)
            if isinstance(part, Tensor) and part.dim() > 2 and part.shape[:2] == shape
        ]

    def _room(self, number: int, part: Tensor) -> Tensor:
        if self._parts[number] is None:
            self._parts[number] = part.new_zeros(1, self._num_tokens, *part.shape[2:])
        return self._parts[number]


def _cache_argument(module: nn.Module) -> str | None:
    names = inspect.signature(module.forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in names), None)


def _argument_names(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(module.forward).parameters)


def _by_name(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _hidden_states(named: Mapping[str, Any]) -> Tensor:
    """The first argument that has numbers for each token."""
    return next(
        value
        for value in named.values()
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3 and value.shape[0] == 1
    )


def _cache_factories(model: Any) -> Iterator[Callable[[], NewCache]]:
    """Ways to empty caches that the layers may work on: transformers' usual one, and the kind that the model makes."""
    from transformers import DynamicCache

    yield lambda: partial(DynamicCache, config=model.config)

    def of_model() -> NewCache:
        output = model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=model.device), use_cache=True)
        return type(next(cache for name in _CACHE_ARGUMENTS if (cache := getattr(output, name, None)) is not None))

    yield of_model


def _tried_out_all(calls: Sequence[_Call], new_cache: NewCache, rounding: float) -> RecurrentLayout:
    cache = new_cache()
    tried = [_tried_out(call, cache, new_cache, rounding) for call in calls]
    mixers = tuple(mixer for mixer in tried if mixer is not None)
    return RecurrentLayout(mixers, new_cache, sum(tensor.nbytes for tensor in tensors_of(cache)))


def _tried_out(call: _Call, cache: Any, new_cache: NewCache, rounding: float) -> RecurrentMixer | None:
    """What a layer can do, seen on random numbers; None if it keeps keys and values, and so is no recurrent layer.

    Args:
        call: How the layer was called.
        cache: Takes the states that the layer makes.
        new_cache: Makes others.
        rounding: See `MixerRecorder`.
    """
    argument, index = _cache_argument(call.module), getattr(call.module, "layer_idx", None)
    if argument is None or not isinstance(index, int):
        return None
    hidden = _hidden_states(call.named)
    noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden)
    named = {name: noise if value is hidden else value for name, value in call.named.items()}
    names = _argument_names(call.module)
    mixer = RecurrentMixer(call.module, names, index, argument, True, batches=True, has_other_singles=False)
    sequences = _Sequences(mixer, call.module.forward, named)
    last = sequences.num_tokens
    whole = _tensor(sequences.one(0, last, cache))
    layers = getattr(cache, "layers", ())
    if index < len(layers) and getattr(layers[index], "keys", None) is not None:
        return None

    def same(one: Tensor, other: Tensor) -> bool:
        return bool((one - other).abs().max() <= rounding * whole.abs().max())

    other = new_cache()
    pieces = [sequences.one(0, 1, other), sequences.one(1, last, other)]
    continues = same(torch.cat([_tensor(piece) for piece in pieces], dim=1), whole)
    alone = new_cache()
    sequences.one(0, last - 1, alone)
    is_single_same = same(_tensor(sequences.one(last - 1, last, alone)), whole[:, last - 1 : last])
    return replace(
        mixer,
        continues_in_chunks=continues,
        batches=_batches(sequences, new_cache, last, same),
        has_other_singles=_bounds_time_steps(call.module) or not is_single_same,
    )


def _bounds_time_steps(module: Any) -> bool:
    """Whether time steps have a lower bound among several tokens, which shows only where one would be below it."""
    limit = getattr(module, "time_step_limit", None)
    return isinstance(limit, list | tuple) and limit[0] > 0


def _batches(sequences: _Sequences, new_cache: NewCache, last: int, same: Callable[[Tensor, Tensor], bool]) -> bool:
    """Whether a call for two sequences with different states gives what two calls give, twice in a row."""
    alone, together = [new_cache(), new_cache()], [new_cache(), new_cache()]
    for caches in (alone, together):
        for begin, cache in enumerate(caches):
            sequences.one(begin, last, cache)
    try:
        for index in ([0, 1], [1, 0]):
            expected = [_tensor(sequences.one(i, i + 1, cache)) for i, cache in zip(index, alone, strict=True)]
            if not same(_tensor(sequences.several(index, together)), torch.cat(expected)):
                return False
    except Exception:  # Whatever it is: then each sequence has a call of its own.
        return False
    return True


def _tensor(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def _stack(caches: Sequence[Any], layer_idx: int) -> Any:
    """A cache whose layer has the states of all of `caches`."""
    stacked = copy.copy(caches[0])
    stacked.layers = list(stacked.layers)
    stacked.layers[layer_idx] = layer = copy.copy(stacked.layers[layer_idx])
    others = [vars(cache.layers[layer_idx]) for cache in caches]
    for name, value in vars(layer).items():
        if isinstance(value, Tensor):
            setattr(layer, name, torch.cat([other[name] for other in others]))
        elif isinstance(value, dict):
            joined = {
                key: torch.cat([other[name][key] for other in others]) if isinstance(state, Tensor) else state
                for key, state in value.items()
            }
            setattr(layer, name, joined)
    return stacked


def _unstack(stacked: Any, caches: Sequence[Any], layer_idx: int) -> None:
    """Copies the states of each sequence to its own cache, in place."""
    for name, value in vars(stacked.layers[layer_idx]).items():
        for number, cache in enumerate(caches):
            own = vars(cache.layers[layer_idx])[name]
            if isinstance(value, Tensor):
                own.copy_(value[number : number + 1])
            elif isinstance(value, dict):
                for key, state in value.items():
                    if isinstance(state, Tensor):
                        own[key].copy_(state[number : number + 1])
