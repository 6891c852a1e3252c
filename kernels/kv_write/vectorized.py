"""`kv_write` as one Triton kernel: each program copies the keys and values of a few tokens."""

# Inside kernels this is Triton, whose types a checker of Python gets wrong.
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from cbtriton.kernels._launch import ceil_div, launch, power_of_two, target_of
from cbtriton.kernels._op import kernel_op

# (tokens per program, elements of a token per pass, warps): 4 x 1,024 bf16 numbers are one 16-byte access of each of
# 128 threads, four times.
_LAUNCHES = {
    "sm_80": (4, 1024, 4),
    "sm_90": (4, 1024, 4),
    "sm_100": (4, 1024, 4),
    "gfx942": (4, 1024, 4),
    "cpu": (16, 4096, 1),
    "interpreter": (16, 1024, 1),
}


@triton.jit
def _copy_tokens(
    source_ptr,
    cache_ptr,
    tokens,
    slots,
    stride_token,
    stride_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies `[HEADS, DIM]` of each token to its slot of a contiguous cache."""
    for first in tl.static_range(0, HEADS * DIM, BLOCK):
        elements = first + tl.arange(0, BLOCK)
        mask = (slots >= 0)[:, None] & (elements < HEADS * DIM)[None, :]
        sources = tokens[:, None] * stride_token + (elements // DIM * stride_head + elements % DIM)[None, :]
        values = tl.load(source_ptr + sources, mask=mask)
        tl.store(cache_ptr + slots[:, None] * (HEADS * DIM) + elements[None, :], values, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _kv_write(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slots_ptr,
    num_tokens,
    stride_key_token: tl.int64,
    stride_key_head: tl.int64,
    stride_value_token: tl.int64,
    stride_value_head: tl.int64,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slots = tl.load(slots_ptr + tokens, mask=tokens < num_tokens, other=-1)
    _copy_tokens(key_ptr, key_cache_ptr, tokens, slots, stride_key_token, stride_key_head, HEADS, KEY_DIM, KEY_BLOCK)
    _copy_tokens(
        value_ptr, value_cache_ptr, tokens, slots, stride_value_token, stride_value_head, HEADS, VALUE_DIM, VALUE_BLOCK
    )


@cache
def _config(target: str, heads: int, key_dim: int, value_dim: int) -> tuple[int, int, Mapping[str, Any]]:
    """Tokens of a program, warps, and the kernel's constants."""
    tokens, block, num_warps = _LAUNCHES[target]
    constants = {
        "HEADS": heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "TOKENS": tokens,
        "KEY_BLOCK": min(block, power_of_two(heads * key_dim)),
        "VALUE_BLOCK": min(block, power_of_two(heads * value_dim)),
    }
    return tokens, num_warps, constants


@kernel_op("kv_write_vectorized", mutates_args=("key_cache", "value_cache"))
def kv_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Writes each token's key and value to its slot; see `reference.kv_write`."""
    num_tokens, heads, key_dim = key.shape
    tokens, num_warps, constants = _config(target_of(key.device), heads, key_dim, value.shape[2])
    launch(
        _kv_write,
        (ceil_div(num_tokens, tokens),),
        key,
        value,
        key_cache,
        value_cache,
        slots,
        num_tokens,
        *key.stride()[:2],
        *value.stride()[:2],
        num_warps=num_warps,
        **constants,
    )


@kv_write.register_fake
def _(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    return None
