"""Paged attention as a transformers attention function.

The engine's own `PagedAttention` object is registered with transformers under a name of its own for as long as the
engine is attached to the model. It holds the step's context itself, because some models drop unknown keyword
arguments on the way. Pages hang on the attention modules, so that a graph compiled for one layer serves all; where a
module is called more than once in a pass they are found by call order. Layer indices are missing or repeat in some
models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from cbtriton.cache_layout import LayerPlace
from cbtriton.forward_context import ForwardContext
from cbtriton.kernel_set import KernelSet
from cbtriton.kv_cache import LayerCache

# What models pass on that does not change the result of packed causal attention.
HARMLESS_ARGUMENTS = frozenset(
    {
        "dropout",
        "position_ids",
        "use_cache",
        "cache",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "encoder_hidden_states",
        "attention_mask",
        "logits_to_keep",
        "layer_idx",
    }
)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one attention call of the model's forward pass is, recorded once at load.

    Attributes:
        window: Tokens that a query sees, itself included; 0 means all.
        chunk: A query sees tokens of its own chunk of so many positions; 0 means all.
        softcap: Soft cap of the scores; 0.0 means none.
        owner: Number of the call that keeps the keys and values: its own, or that of an earlier one with the same.
    """

    window: int
    chunk: int
    softcap: float
    owner: int

    @property
    def most_seen(self) -> int:
        """Tokens that a query sees at most, itself included; 0 means all."""
        return self.window or self.chunk


# Attribute of an attention module that holds its pages while an engine is attached.
_PAGES = "_cbtriton_pages"


@dataclass(slots=True, eq=False)
class _Group:
    """Where the layers of a group find the step's context."""

    context: ForwardContext | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PagedLayer:
    """One attention call's pages and static properties. Copies and pickles of a model have none.

    Attributes:
        key: See `LayerCache.key`.
        value: See `LayerCache.value`.
        is_owner: Whether the call writes the pages, or reads what another one wrote.
        window: See `AttentionCall.window`.
        chunk: See `AttentionCall.chunk`.
        softcap: See `AttentionCall.softcap`.
        group: The group; not its number, which would be a constant of a graph that other groups share.
    """

    key: Tensor
    value: Tensor
    is_owner: bool
    window: int
    chunk: int
    softcap: float
    group: _Group

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class PagedAttention:
    """Writes a step's keys and values to the cache and attends over it, one call per layer.

    Args:
        kernels: The chosen kernels.
        layers: Pages of each call that owns its keys and values, in call order.
        places: Where these are; the groups are their numbers.
        calls: Static properties of each call, in call order.
        modules: The module of each call, in call order.
    """

    def __init__(
        self,
        kernels: KernelSet,
        layers: tuple[LayerCache, ...],
        places: tuple[LayerPlace, ...],
        calls: tuple[AttentionCall, ...],
        modules: tuple[nn.Module, ...],
    ) -> None:
        self._kernels = kernels
        self._groups = tuple(_Group() for _ in range(1 + max(place.group for place in places)))
        owners = [number for number, call in enumerate(calls) if call.owner == number]
        pages = {
            owner: (layer, self._groups[place.group])
            # A model without attention has a placeholder that nobody calls.
            for owner, layer, place in zip(owners, layers, places, strict=bool(calls))
        }
        self._layers = tuple(
            PagedLayer(layer.key, layer.value, call.owner == number, call.window, call.chunk, call.softcap, group)
            for number, call in enumerate(calls)
            for layer, group in [pages[call.owner]]
        )
        self._modules = modules
        self._is_bound = len(set(modules)) == len(modules)
        self._next_call = 0

    def attach(self) -> None:
        """Hangs the pages on the modules."""
        if self._is_bound:
            for module, layer in zip(self._modules, self._layers, strict=True):
                setattr(module, _PAGES, layer)

    def detach(self) -> None:
        """Takes them off again; harmless when they are."""
        for module in self._modules:
            module.__dict__.pop(_PAGES, None)

    def begin(self, contexts: Sequence[ForwardContext]) -> None:
        """Makes `contexts`, one for each group, those that the coming forward pass works on."""
        for group, context in zip(self._groups, contexts, strict=True):
            group.context = context
        self._next_call = 0

    def end(self) -> None:
        """Forgets the contexts: a compiled step would otherwise have to hand out all of their tensors."""
        for group in self._groups:
            group.context = None
        self._next_call = 0

    def _layer_of(self, module: nn.Module) -> PagedLayer:
        if self._is_bound:
            return getattr(module, _PAGES)
        layer = self._layers[self._next_call]
        self._next_call += 1
        return layer

    def forward(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        s_aux: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Transformers' attention function.

        Args:
            module: The calling attention layer.
            query: `[1, num_heads, num_tokens, key_dim]`, any strides with the last one 1.
            key: `[1, num_kv_heads, num_tokens, key_dim]`, likewise.
            value: `[1, num_kv_heads, num_tokens, value_dim]`, likewise.
            attention_mask: Always None: no mask function is registered under this implementation's name.
            scaling: Factor of the scores; `key_dim ** -0.5` when the model leaves it out.
            s_aux: `[num_heads]` attention sinks, or None.
            alibi_slopes: `[num_heads]` float32, what a key's score changes by with each position, or None.

        Returns:
            `[1, num_tokens, num_heads, value_dim]` and None.
        """
        layer = self._layer_of(module)
        context = layer.group.context
        if context is None:
            raise RuntimeError("paged attention was called outside an engine step; detach the engine first")
        if layer.is_owner:
            keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
            self._kernels.kv_write(keys, values, layer.key, layer.value, context.slots)
        tokens = query[0].transpose(0, 1)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        where = (layer.key, layer.value, context.block_tables, context.rows)
        scoring = (scale, layer.window, layer.chunk, layer.softcap, s_aux, alibi_slopes)
        how = (context.attention_plan, *scoring, context.max_kv)
        if context.path == "decode":
            out = self._kernels.decode_attention(tokens, *where, context.seq_lens, *how)
        else:
            out = self._kernels.varlen_attention(tokens, *where, context.cu_seqlens_q, context.seq_lens, *how)
        return out.unsqueeze(0), None
