"""Attention layers of transformers that compute attention themselves: forwards that call the attention interface.

A handful of models, most of them older than the interface, multiply queries and keys in code of their own, which knows
nothing of pages. While the engine is attached, their layers run the forwards of this file instead: the same weights and
projections, and the attention function of the engine in the middle. Those with ALiBi hand on the slopes of their heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from cbtriton.replaced_forward import ReplacedForwards

AttentionFunction = Callable[..., tuple[Tensor, None]]
# Takes a layer, the attention function, and then what the layer's own forward takes.
Forward = Callable[..., Any]


class OwnAttention:
    """The layers of a model that compute attention themselves.

    Args:
        model: The model. Nothing is done if it has none of those that are known here.
    """

    def __init__(self, model: nn.Module) -> None:
        forwards = {module: _forward_of(module) for module in model.modules()}
        self._forwards = {module: forward for module, forward in forwards.items() if forward is not None}
        # The same in all layers.
        slopes = next((_alibi_slopes_of(module, model) for module in self._forwards), None)
        self._how = {} if slopes is None else {"alibi_slopes": slopes}
        self._needs_mask = any(type(module).__name__ in _NEED_A_MASK for module in self._forwards)
        self._replaced = ReplacedForwards()

    def attach(self, attention: AttentionFunction) -> None:
        """Makes the layers call `attention`."""
        runs = {forward: _run(forward, attention, self._how) for forward in self._forwards.values()}
        for module, forward in self._forwards.items():
            # Methods of one function, so that a graph compiled for one layer serves all.
            self._replaced.replace(module, MethodType(runs[forward], module))

    def detach(self) -> None:
        """Gives the layers back as they were; harmless when they are."""
        self._replaced.put_back()

    def arguments(self, device: torch.device) -> dict[str, Tensor]:
        """What the model has to be given besides tokens and positions, so that its code runs where no mask is made.

        Masks with four dimensions are handed on as they are.
        """
        return {"attention_mask": torch.zeros(1, 1, 1, 1, device=device)} if self._needs_mask else {}


def _run(forward: Forward, attention: AttentionFunction, how: dict[str, Any]) -> Forward:
    """What all layers of a model that have this forward run in place of their own."""

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, partial(_attend, attention, self, how), *args, **kwargs)

    return run


def _attend(
    attention: AttentionFunction,
    module: nn.Module,
    how: dict[str, Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    **more: Any,
) -> Tensor:
    """Attention of `[1, num_tokens, num_heads, head_dim]`; returns `[1, num_tokens, num_heads * head_dim]`."""
    heads_first = (x.transpose(1, 2) for x in (query, key, value))
    out, _ = attention(module, *heads_first, mask, scaling=scaling, **how, **more)
    return out.flatten(2)


def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> Tensor:
    """Slopes of ALiBi, `[num_heads]` float32 (Press et al. 2022, "Train Short, Test Long", section 3).

    Args:
        num_heads: Number of heads. Where it is no power of two, the slopes of the power of two below it come first, and
            then every other one of those of the power of two above it.
        max_bias: The last of a power of two is `2 ** -max_bias`.
    """

    def of_power(power: int) -> list[float]:
        return [2.0 ** (-max_bias * number / power) for number in range(1, power + 1)]

    below = 1 << num_heads.bit_length() - 1
    return torch.tensor([*of_power(below), *of_power(2 * below)[::2]][:num_heads])


# ------------------------------------------------------------------------------------------------------- forwards


def _falcon(
    self: Any,
    attend: Callable[..., Tensor],
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    fused = self.query_key_value(hidden_states)
    if self.new_decoder_architecture:
        # Groups of query heads with their key and value head behind them.
        groups = fused.unflatten(2, (self.num_kv_heads, -1, self.head_dim))
        query, key, value = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
    elif self.multi_query:
        query, key, value = fused.unflatten(2, (-1, self.head_dim)).split([self.num_heads, 1, 1], dim=2)
    else:
        query, key, value = fused.unflatten(2, (self.num_heads, 3, self.head_dim)).unbind(3)
    if alibi is None:
        query, key = _rotated(query, key, position_embeddings)
    out = attend(query, key, value, attention_mask, self.head_dim**-0.5)
    return self.dense(out), None


def _bloom(
    self: Any,
    attend: Callable[..., Tensor],
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    **_: Any,
) -> tuple[Tensor, None]:
    query, key, value = self.query_key_value(hidden_states).unflatten(2, (self.num_heads, 3, self.head_dim)).unbind(3)
    return self.dense(attend(query, key, value, attention_mask, self.inv_norm_factor)) + residual, None


def _mpt(
    self: Any,
    attend: Callable[..., Tensor],
    hidden_states: Tensor,
    position_bias: Tensor,
    cache: None = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    fused = self.Wqkv(hidden_states)
    if self.clip_qkv:
        fused = fused.clamp(-self.clip_qkv, self.clip_qkv)
    query, key, value = fused.unflatten(2, (3, self.n_heads, self.head_dim)).unbind(2)
    return self.out_proj(attend(query, key, value, None, self.softmax_scale)), None


def _gpt_neo(
    self: Any, attend: Callable[..., Tensor], hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any
) -> tuple[Tensor, None]:
    projections = (self.q_proj, self.k_proj, self.v_proj)
    query, key, value = (
        projection(hidden_states).unflatten(2, (self.num_heads, self.head_dim)) for projection in projections
    )
    window = self.config.window_size if self.attention_type == "local" else None
    # The model's own mask knows nothing of the window, and scores are not scaled.
    return self.out_proj(attend(query, key, value, None, 1.0, sliding_window=window)), None


def _gpt_neox_japanese(
    self: Any,
    attend: Callable[..., Tensor],
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, None, Tensor | None]:
    fused = self.query_key_value(hidden_states).unflatten(2, (self.num_attention_heads, -1))
    query, key, value = fused.split(self.head_size, dim=3)
    turned = _rotated(query[..., : self.rotary_ndims], key[..., : self.rotary_ndims], position_embeddings)
    query, key = (
        torch.cat([part, whole[..., self.rotary_ndims :]], dim=3)
        for part, whole in zip(turned, (query, key), strict=True)
    )
    out = attend(query, key, value, attention_mask, 1.0 / self.norm_factor)
    return self.dense(out), None, self.dense_bias


def _openai_gpt(
    self: Any, attend: Callable[..., Tensor], x: Tensor, attention_mask: Tensor | None = None, **_: Any
) -> list[Tensor]:
    query, key, value = self.c_attn(x).unflatten(2, (3, self.n_head, -1)).unbind(2)
    scaling = value.shape[-1] ** -0.5 if self.scale else 1.0
    return [self.c_proj(attend(query, key, value, attention_mask, scaling))]


def _bert_like(
    self: Any,
    attend: Callable[..., Tensor],
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    sinusoidal_pos: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    projections = (self.query, self.key, self.value)
    query, key, value = (
        projection(hidden_states).unflatten(2, (-1, self.attention_head_size)) for projection in projections
    )
    if sinusoidal_pos is not None:
        # Heads come second there.
        turned = [x.transpose(1, 2) for x in ((query, key, value) if self.rotary_value else (query, key))]
        turned = self.apply_rotary_position_embeddings(sinusoidal_pos, *turned)
        query, key, value = [*(x.transpose(1, 2) for x in turned), value][:3]
    return attend(query, key, value, attention_mask, self.attention_head_size**-0.5), None


def _bart_like(
    self: Any,
    attend: Callable[..., Tensor],
    hidden_states: Tensor,
    key_value_states: None = None,
    cache: None = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    projections = (self.q_proj, self.k_proj, self.v_proj)
    query, key, value = (
        projection(hidden_states).unflatten(2, (self.num_heads, self.head_dim)) for projection in projections
    )
    return self.out_proj(attend(query, key, value, attention_mask, self.scaling)), None


def _rotated(query: Tensor, key: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Turned by their positions (Su et al. 2021, "RoFormer"), the first half of a head's numbers with the second."""
    assert position_embeddings is not None
    cos, sin = (x.unsqueeze(2) for x in position_embeddings)

    def turned(heads: Tensor) -> Tensor:
        first, second = heads.chunk(2, dim=3)
        return heads * cos + torch.cat([-second, first], dim=3) * sin

    return turned(query), turned(key)


# By the module of transformers and the class in it.
_FORWARDS: dict[tuple[str, str], Forward] = {
    ("falcon.modeling_falcon", "FalconAttention"): _falcon,
    ("bloom.modeling_bloom", "BloomAttention"): _bloom,
    ("mpt.modeling_mpt", "MptAttention"): _mpt,
    ("gpt_neo.modeling_gpt_neo", "GPTNeoSelfAttention"): _gpt_neo,
    ("gpt_neox_japanese.modeling_gpt_neox_japanese", "GPTNeoXJapaneseAttention"): _gpt_neox_japanese,
    ("openai.modeling_openai", "Attention"): _openai_gpt,
    ("rembert.modeling_rembert", "RemBertSelfAttention"): _bert_like,
    ("megatron_bert.modeling_megatron_bert", "MegatronBertSelfAttention"): _bert_like,
    ("big_bird.modeling_big_bird", "BigBirdSelfAttention"): _bert_like,
    ("git.modeling_git", "GitSelfAttention"): _bert_like,
    ("roformer.modeling_roformer", "RoFormerSelfAttention"): _bert_like,
    ("xglm.modeling_xglm", "XGLMAttention"): _bart_like,
    ("trocr.modeling_trocr", "TrOCRAttention"): _bart_like,
    ("mvp.modeling_mvp", "MvpAttention"): _bart_like,
}
# Their model works on the mask that it believes to have made.
_NEED_A_MASK = frozenset({"MptAttention"})


def _forward_of(module: nn.Module) -> Forward | None:
    """That of the layer's class, or of the one of transformers that it derives from in the same file."""
    for cls in type(module).__mro__:
        prefix, _, place = cls.__module__.partition("transformers.models.")
        if not prefix and cls.__module__ == type(module).__module__ and (place, cls.__name__) in _FORWARDS:
            return _FORWARDS[place, cls.__name__]
    return None


def _alibi_slopes_of(module: Any, model: Any) -> Tensor | None:
    forward, device = _forward_of(module), model.device
    if forward is _bloom:
        return alibi_slopes(module.num_heads).to(device)
    if forward is _mpt:
        # Biases are made with the default of the function, whatever the configuration says.
        return alibi_slopes(module.n_heads).to(device)
    if forward is _falcon and model.config.alibi:
        # Rounded in the model, which scales them with the scores.
        return (alibi_slopes(module.num_heads).bfloat16().float() * module.inv_norm_factor).to(device)
    return None
