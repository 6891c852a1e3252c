"""`varlen_attention` in Triton: a kernel for rows with several query tokens, `split_kv` for those with one.

A program takes a block of query tokens of one row, with all query heads of one KV head side by side, so that keys and
values are loaded once for the whole group. It walks over the tiles that all its tokens see without a mask, and then
over those at the diagonal, or at the window's edge, with one; both do the same arithmetic, and tiles are aligned to
position 0 and not to the chunk. A token's bits are therefore the same whatever the chunk around it, and whatever else
is in the batch. The exception is a chunk of a single token, which goes the way of decoding requests.

Grids and buffers depend on padded sizes only, so that a captured launch stays right for every step of its bucket.
"""

# Inside kernels this is Triton, whose types a checker of Python gets wrong.
# pyright: reportArgumentType=false, reportInvalidTypeForm=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbtriton.kernels._attention_tile import (
    LayerOptions,
    add_biases,
    add_values,
    first_seen,
    layer_constants,
    load_page_ids,
    load_rows,
    load_slopes,
    score_factor,
    score_tile,
    sink_step,
    softmax_step,
    store_shares,
    tile_slots,
)
from cbtriton.kernels._launch import ceil_div, launch, pick, target_of
from cbtriton.kernels._op import kernel_op
from cbtriton.kernels.decode_attention import split_kv

# A row's bits do not depend on its neighbours; tests hold the module to it.
BATCH_INVARIANT = True


@dataclass(frozen=True, slots=True)
class _Launch:
    """Query rows (tokens x heads of a group) per program, keys per step of the loop, warps, pipeline buffers."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


# By target and the bytes of a key head, up to which each entry holds. Registers and shared memory that these lead to
# are in `experiments/compile_report.py`; nearly every choice is the largest one that neither spills nor narrows loads.
_LAUNCHES = {
    "sm_80": {
        128: _Launch(128, 32, 4, 4),
        192: _Launch(128, 64, 8, 3),
        256: _Launch(128, 32, 8, 4),
        512: _Launch(64, 32, 8, 3),
    },
    "sm_90": {
        128: _Launch(128, 64, 4, 3),
        160: _Launch(128, 128, 8, 2),
        256: _Launch(128, 64, 8, 3),
        512: _Launch(64, 64, 8, 2),
    },
    "sm_100": {
        128: _Launch(128, 64, 4, 3),
        160: _Launch(128, 128, 8, 2),
        256: _Launch(128, 64, 8, 3),
        512: _Launch(64, 64, 8, 2),
    },
    "gfx942": {
        192: _Launch(128, 64, 4, 1),
        256: _Launch(128, 32, 4, 1),
        512: _Launch(64, 16, 4, 1),
    },
    "cpu": {4096: _Launch(64, 64, 1, 1)},
    "interpreter": {1024: _Launch(32, 32, 1, 1)},
}
# Products of fp32 matrices have no matrix instructions without rounding, and unroll into very many others.
_FP32_LAUNCHES = {
    "sm_80": {1024: _Launch(16, 16, 4, 3)},
    "sm_90": {1024: _Launch(16, 16, 4, 3)},
    "sm_100": {1024: _Launch(16, 16, 4, 3)},
    "gfx942": {1024: _Launch(16, 16, 4, 1)},
    "cpu": _LAUNCHES["cpu"],
    "interpreter": _LAUNCHES["interpreter"],
}


@triton.jit
def _row_of_block(cu_seqlens_q_ptr, num_rows, block, TOKENS: tl.constexpr):
    """The last entry whose blocks begin at or before `block`; those of entry i begin at `cu[i] // TOKENS + i`."""
    low = tl.full([], 0, tl.int32)
    high = num_rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        begins_before = tl.load(cu_seqlens_q_ptr + middle) // TOKENS + middle <= block
        low = tl.where(begins_before, middle, low)
        high = tl.where(begins_before, high, middle - 1)
    return low


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def _prefill(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_tables_ptr,
    rows_ptr,
    cu_seqlens_q_ptr,
    seq_lens_ptr,
    sinks_ptr,
    slopes_ptr,
    out_ptr,
    num_rows,
    num_blocks,
    scale,
    window,
    softcap,
    stride_query_token: tl.int64,
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
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    HEAD_BLOCKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    work = tl.program_id(0)
    # The last blocks of a row have the most keys and begin first, so that short ones fill the gaps at the end.
    block = num_blocks - 1 - work // (KV_HEADS * HEAD_BLOCKS)
    kv_head = work // HEAD_BLOCKS % KV_HEADS
    entry = _row_of_block(cu_seqlens_q_ptr, num_rows, block, TOKENS)
    begin = tl.load(cu_seqlens_q_ptr + entry)
    query_len = tl.load(cu_seqlens_q_ptr + entry + 1) - begin
    first_token = (block - begin // TOKENS - entry) * TOKENS

    if (query_len > 1) & (first_token < query_len):
        length = tl.load(seq_lens_ptr + entry)
        context = length - query_len
        rows = tl.arange(0, ROWS)
        in_row = first_token + rows // HEADS
        in_group = work % HEAD_BLOCKS * HEADS + rows % HEADS
        is_row = (rows < TOKENS * HEADS) & (in_row < query_len) & (in_group < GROUP)
        heads = kv_head * GROUP + in_group
        queries = (begin + in_row).to(tl.int64) * stride_query_token + heads * stride_query_head
        q0 = load_rows(query_ptr, queries, is_row, KEY_DIM, 0, D0)
        q1 = load_rows(query_ptr, queries, is_row, KEY_DIM, D0, D1) if D1 > 0 else q0
        key_ptr = key_cache_ptr + kv_head * KEY_DIM
        value_ptr = value_cache_ptr + kv_head * VALUE_DIM
        table_ptr = block_tables_ptr + tl.load(rows_ptr + entry).to(tl.int64) * stride_block_tables

        # Row r sees keys up to its own position, and with a window or a chunk none before its `first_seen`.
        positions = (context + in_row)[:, None]
        last = context + tl.minimum(first_token + TOKENS, query_len) - 1
        factor = score_factor(scale, HAS_SOFTCAP)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc0 = tl.zeros([ROWS, V0], tl.float32)
        acc1 = tl.zeros([ROWS, V1 if V1 > 0 else 1], tl.float32)
        slopes = load_slopes(slopes_ptr, heads, is_row, scale, HAS_SOFTCAP) if HAS_ALIBI else peak

        if HAS_WINDOW:
            first = first_seen(context + first_token, window, IS_CHUNK)
            masked_begin = first // TILE * TILE
            pages = load_page_ids(table_ptr, masked_begin, first, last, PAGE, TILE)
        else:
            first = 0
            masked_begin = (context + first_token + 1) // TILE * TILE
            pages = load_page_ids(table_ptr, 0, first, last, PAGE, TILE)
            for start in range(0, masked_begin, TILE):
                slots = tile_slots(pages, start, first, last, PAGE, TILE)
                pages = load_page_ids(table_ptr, start + TILE, first, last, PAGE, TILE)
                scores = score_tile(
                    q0, q1, key_ptr, slots, KV_HEADS * KEY_DIM, scale, softcap, KEY_DIM, D0, D1, HAS_SOFTCAP
                )
                if HAS_ALIBI:
                    scores = add_biases(scores, slopes, (start + tl.arange(0, TILE))[None, :] - positions)
                peak, total, weights, decay = softmax_step(peak, total, scores, factor)
                acc0, acc1 = add_values(
                    acc0, acc1, weights, decay, value_ptr, slots, KV_HEADS * VALUE_DIM, VALUE_DIM, V0, V1
                )
        for start in range(masked_begin, last + 1, TILE):
            slots = tile_slots(pages, start, first, last, PAGE, TILE)
            pages = load_page_ids(table_ptr, start + TILE, first, last, PAGE, TILE)
            scores = score_tile(
                q0, q1, key_ptr, slots, KV_HEADS * KEY_DIM, scale, softcap, KEY_DIM, D0, D1, HAS_SOFTCAP
            )
            keys = (start + tl.arange(0, TILE))[None, :]
            if HAS_ALIBI:
                scores = add_biases(scores, slopes, keys - positions)
            is_seen = keys <= positions
            if HAS_WINDOW:
                is_seen = is_seen & (keys >= first_seen(positions, window, IS_CHUNK))
            scores = tl.where(is_seen, scores, float("-inf"))
            peak, total, weights, decay = softmax_step(peak, total, scores, factor)
            acc0, acc1 = add_values(
                acc0, acc1, weights, decay, value_ptr, slots, KV_HEADS * VALUE_DIM, VALUE_DIM, V0, V1
            )

        shares = tl.full([ROWS], 1.0, tl.float32)
        if HAS_SINKS:
            total, shares = sink_step(peak, total, sinks_ptr, heads, is_row)
        # Rows of the block that are no query token may have seen nothing.
        shares = shares / tl.where(total == 0.0, 1.0, total)
        outs = ((begin + in_row).to(tl.int64) * (KV_HEADS * GROUP) + heads) * VALUE_DIM
        store_shares(out_ptr, outs, is_row, acc0, acc1, shares, VALUE_DIM, V0, V1)


@kernel_op("varlen_attention_flash_plan")
def plan(
    block_tables: Tensor, rows: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor, page_size: int, max_kv: int
) -> Tensor:
    """Counts the splits of the rows with one query token.

    Args:
        block_tables: Not needed here.
        rows: Not needed here.
        cu_seqlens_q: `[R + 1]` int32, where each row's query tokens begin.
        seq_lens: `[R]` int32, tokens of each row.
        page_size: Not needed here.
        max_kv: Not needed here.

    Returns:
        `[R]` int32, see `decode_attention.split_kv`.
    """
    return split_kv.launch_plan(cu_seqlens_q, seq_lens, any_query_len=True)


@plan.register_fake
def _(
    block_tables: Tensor, rows: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor, page_size: int, max_kv: int
) -> Tensor:
    return torch.empty_like(seq_lens)


@kernel_op("varlen_attention_flash")
def varlen_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    cu_seqlens_q: Tensor,
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
    """Causal attention of each row's query tokens; see `reference.varlen_attention`."""
    num_tokens, num_heads, key_dim = query.shape
    target = target_of(query.device)
    layer = LayerOptions.of(window, chunk, softcap, alibi_slopes)
    constants = layer_constants(query, key_cache, value_cache, layer, target)
    launches = _FP32_LAUNCHES if key_cache.dtype == torch.float32 else _LAUNCHES
    config = pick(launches[target], key_dim * key_cache.itemsize, "bytes of a key head")
    heads = min(constants["GROUP"], config.rows)
    tokens = config.rows // heads
    num_blocks = num_tokens // tokens + len(rows)
    # Zeros are the result of padding tokens, which belong to no row.
    out = value_cache.new_zeros(num_tokens, num_heads, value_cache.shape[3])
    launch(
        _prefill,
        (num_blocks * constants["KV_HEADS"] * ceil_div(constants["GROUP"], heads),),
        query,
        key_cache,
        value_cache,
        block_tables,
        rows,
        cu_seqlens_q,
        seq_lens,
        sinks,
        alibi_slopes,
        out,
        len(rows),
        num_blocks,
        scale,
        window or chunk,
        softcap,
        query.stride(0),
        query.stride(1),
        block_tables.stride(0),
        HAS_SINKS=sinks is not None,
        ROWS=config.rows,
        HEADS=heads,
        TOKENS=tokens,
        TILE=config.tile,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **constants,
    )
    tables = block_tables, rows, cu_seqlens_q, seq_lens
    how = (scale, window, chunk, softcap, sinks, alibi_slopes)
    split_kv.attend(out, query, key_cache, value_cache, *tables, plan, *how, max_kv)
    return out


@varlen_attention.register_fake
def _(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    cu_seqlens_q: Tensor,
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
