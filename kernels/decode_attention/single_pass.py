"""`decode_attention` as the simplest Triton kernel that does it all: one program walks over one row's whole context.

Read this one first. It is the definition of `split_kv` without the splits, and right for short contexts or many rows;
few rows with long contexts leave most of a GPU idle.
"""

# Inside kernels this is Triton, whose types a checker of Python gets wrong.
# pyright: reportArgumentType=false, reportInvalidTypeForm=false

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from cbtriton.kernels._attention_tile import (
    LayerOptions,
    add_biases,
    add_values,
    constants_of_shapes,
    first_seen,
    heads_per_program,
    load_page_ids,
    load_rows,
    load_slopes,
    min_dot,
    score_factor,
    score_tile,
    sink_step,
    softmax_step,
    store_shares,
    tile_slots,
)
from cbtriton.kernels._launch import ceil_div, launch, pick, target_of
from cbtriton.kernels._op import kernel_op

# A row's bits do not depend on its neighbours; tests hold the module to it.
BATCH_INVARIANT = True


@dataclass(frozen=True, slots=True)
class _Launch:
    """Keys per step of the loop, warps and pipeline buffers."""

    tile: int
    num_warps: int
    num_stages: int


# By target and the bytes of a key head, up to which each entry holds.
_LAUNCHES = {
    "sm_80": {256: _Launch(64, 4, 3), 512: _Launch(32, 4, 3), 1024: _Launch(16, 4, 2)},
    "sm_90": {256: _Launch(32, 4, 4), 512: _Launch(32, 4, 3), 1024: _Launch(16, 4, 3)},
    "sm_100": {256: _Launch(32, 4, 4), 512: _Launch(32, 4, 3), 1024: _Launch(16, 4, 3)},
    "gfx942": {256: _Launch(64, 4, 1), 512: _Launch(32, 4, 1), 1024: _Launch(16, 4, 1)},
    "cpu": {4096: _Launch(64, 1, 1)},
    "interpreter": {1024: _Launch(32, 1, 1)},
}


@triton.jit
def _decode(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_tables_ptr,
    rows_ptr,
    seq_lens_ptr,
    sinks_ptr,
    slopes_ptr,
    out_ptr,
    scale,
    window,
    softcap,
    stride_query_row: tl.int64,
    stride_query_head: tl.int64,
    stride_block_tables: tl.int64,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
):
    HEAD_BLOCKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    # Heads of a token lie side by side, so neighbouring programs take heads of the same tokens.
    entry, kv_head = tl.program_id(1).to(tl.int64), tl.program_id(0) // HEAD_BLOCKS
    in_group = tl.program_id(0) % HEAD_BLOCKS * HEADS + tl.arange(0, HEADS)
    is_head = in_group < GROUP
    heads = kv_head * GROUP + in_group

    queries = entry * stride_query_row + heads * stride_query_head
    q0 = load_rows(query_ptr, queries, is_head, KEY_DIM, 0, D0)
    q1 = load_rows(query_ptr, queries, is_head, KEY_DIM, D0, D1) if D1 > 0 else q0
    key_ptr = key_cache_ptr + kv_head * KEY_DIM
    value_ptr = value_cache_ptr + kv_head * VALUE_DIM
    table_ptr = block_tables_ptr + tl.load(rows_ptr + entry).to(tl.int64) * stride_block_tables

    length = tl.load(seq_lens_ptr + entry)
    last = length - 1
    # Rows without any key are padding: their position is 0 here, and no tile follows.
    first = first_seen(tl.maximum(last, 0), window, IS_CHUNK) if HAS_WINDOW else 0
    factor = score_factor(scale, HAS_SOFTCAP)
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc0 = tl.zeros([HEADS, V0], tl.float32)
    acc1 = tl.zeros([HEADS, V1 if V1 > 0 else 1], tl.float32)
    slopes = load_slopes(slopes_ptr, heads, is_head, scale, HAS_SOFTCAP) if HAS_ALIBI else peak
    begin = first // TILE * TILE
    pages = load_page_ids(table_ptr, begin, first, tl.maximum(last, 0), PAGE, TILE)
    for start in range(begin, length, TILE):
        slots = tile_slots(pages, start, first, last, PAGE, TILE)
        pages = load_page_ids(table_ptr, start + TILE, first, last, PAGE, TILE)
        scores = score_tile(q0, q1, key_ptr, slots, KV_HEADS * KEY_DIM, scale, softcap, KEY_DIM, D0, D1, HAS_SOFTCAP)
        positions = start + tl.arange(0, TILE)
        if HAS_ALIBI:
            scores = add_biases(scores, slopes, (positions - last)[None, :])
        is_seen = (positions >= first) & (positions <= last)
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        peak, total, weights, decay = softmax_step(peak, total, scores, factor)
        acc0, acc1 = add_values(acc0, acc1, weights, decay, value_ptr, slots, KV_HEADS * VALUE_DIM, VALUE_DIM, V0, V1)

    shares = tl.full([HEADS], 1.0, tl.float32)
    if HAS_SINKS:
        total, shares = sink_step(peak, total, sinks_ptr, heads, is_head)
    # Rows without any key are padding, and give zeros.
    shares = shares / tl.where(total == 0.0, 1.0, total)
    outs = (entry * (KV_HEADS * GROUP) + heads) * VALUE_DIM
    store_shares(out_ptr, outs, is_head, acc0, acc1, shares, VALUE_DIM, V0, V1)


def plan(
    block_tables: Tensor, rows: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor, page_size: int, max_kv: int
) -> Tensor:
    """Nothing needs to be planned: an empty tensor."""
    return seq_lens.new_empty(0)


@cache
def _config(
    target: str,
    num_heads: int,
    page_size: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    itemsize: int,
    layer: LayerOptions,
    has_sinks: bool,
) -> tuple[int, Mapping[str, Any]]:
    """Programs of a row, and options and constants of the launch."""
    config = pick(_LAUNCHES[target], key_dim * itemsize, "bytes of a key head")
    constants = constants_of_shapes(num_heads, page_size, kv_heads, key_dim, value_dim, layer, min_dot(target))
    heads = heads_per_program(constants["GROUP"], target)
    options = {
        "HAS_SINKS": has_sinks,
        "HEADS": heads,
        "TILE": config.tile,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **constants,
    }
    return kv_heads * ceil_div(constants["GROUP"], heads), options


@kernel_op("decode_attention_single_pass")
def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    plan: Tensor,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    max_kv: int,
) -> Tensor:
    """Attention of one query token per row; see `reference.decode_attention`."""
    num_rows, num_heads, _ = query.shape
    value_dim = value_cache.shape[3]
    sizes = (num_heads, *key_cache.shape[1:], value_dim, key_cache.itemsize)
    layer = LayerOptions.of(window, chunk, softcap, alibi_slopes)
    programs, options = _config(target_of(query.device), *sizes, layer, sinks is not None)
    out = value_cache.new_empty(num_rows, num_heads, value_dim)
    launch(
        _decode,
        (programs, num_rows),
        query,
        key_cache,
        value_cache,
        block_tables,
        rows,
        seq_lens,
        sinks,
        alibi_slopes,
        out,
        scale,
        window or chunk,
        softcap,
        *query.stride()[:2],
        block_tables.stride(0),
        **options,
    )
    return out


@decode_attention.register_fake
def _(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    plan: Tensor,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    max_kv: int,
) -> Tensor:
    return value_cache.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])
