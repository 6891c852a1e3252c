"""`decode_attention` with long contexts split over programs (Dao et al. 2023, "Flash-Decoding").

Three kernels. `plan` runs once per step and counts each row's splits. The attention kernel's programs, as many as the
device runs at once, take the work items (row, split, KV head) in turns and leave each item's normalised result and
log-sum-exp. The last kernel merges a row's items in ascending order, adds the sink and rounds.

A row is cut at multiples of a split size that follows from its own length alone, never from how many rows there are or
how long those are: its result is the same to the last bit alone and in any batch. No grid and no buffer depends on a
length on the device, so a captured launch stays right for every step of its bucket.
"""

# Inside kernels this is Triton, whose types a checker of Python gets wrong.
# pyright: reportArgumentType=false, reportInvalidTypeForm=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbtriton.kernels._attention_tile import (
    LOG2_E,
    LayerOptions,
    add_biases,
    add_values,
    first_seen,
    heads_per_program,
    layer_constants,
    load_page_ids,
    load_rows,
    load_slopes,
    score_factor,
    score_tile,
    softmax_step,
    store_rows,
    tile_slots,
)
from cbtriton.kernels._jit import narrow
from cbtriton.kernels._launch import ceil_div, launch, num_processors, pick, power_of_two, target_of
from cbtriton.kernels._op import kernel_op

# Tokens of the smallest split: the merge writes and reads 2 * GROUP / SPLIT of what the keys and values take (bf16).
_SPLIT = 256
# Splits of a row at most; longer rows have larger ones. Bounds the buffer of partial results.
_MAX_SPLITS = 64
_PLAN_BLOCK = 1024

# A row's bits do not depend on its neighbours; tests hold the module to it.
BATCH_INVARIANT = True


@dataclass(frozen=True, slots=True)
class _Launch:
    """Keys per step of the loop, warps, pipeline buffers, and programs that one processor runs at once."""

    tile: int
    num_warps: int
    num_stages: int
    per_processor: int


# By target and the bytes of a key head, up to which each entry holds. Registers and shared memory that these lead to
# are in `experiments/compile_report.py`.
_LAUNCHES = {
    "sm_80": {256: _Launch(64, 4, 3, 2), 512: _Launch(32, 4, 3, 2), 1024: _Launch(16, 4, 2, 2)},
    "sm_90": {
        160: _Launch(32, 2, 4, 5),
        256: _Launch(32, 4, 4, 4),
        512: _Launch(32, 4, 3, 2),
        1024: _Launch(16, 4, 3, 2),
    },
    "sm_100": {
        160: _Launch(32, 2, 4, 5),
        256: _Launch(32, 4, 4, 4),
        512: _Launch(32, 4, 3, 2),
        1024: _Launch(16, 4, 3, 2),
    },
    "gfx942": {256: _Launch(64, 4, 1, 2), 512: _Launch(32, 4, 1, 2), 1024: _Launch(16, 4, 1, 1)},
    "cpu": {4096: _Launch(64, 1, 1, 8)},
    "interpreter": {1024: _Launch(32, 1, 1, 1)},
}


@triton.jit
def _split_size(length, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Tokens per split of a row: the least multiple of `SPLIT` that gives at most `MAX_SPLITS` splits."""
    return tl.maximum(tl.cdiv(length, SPLIT * MAX_SPLITS), 1) * SPLIT


@triton.jit
def _decode_length(entry, mask, cu_seqlens_q_ptr, seq_lens_ptr, ANY_QUERY_LEN: tl.constexpr):
    """Context lengths of the entries that this implementation computes, 0 for others."""
    lengths = tl.load(seq_lens_ptr + entry, mask=mask, other=0)
    if ANY_QUERY_LEN:
        begins = tl.load(cu_seqlens_q_ptr + entry, mask=mask, other=0)
        ends = tl.load(cu_seqlens_q_ptr + entry + 1, mask=mask, other=0)
        lengths = tl.where(ends - begins == 1, lengths, 0)
    return lengths


@triton.jit(do_not_specialize=["num_rows"])
def _plan(
    cu_seqlens_q_ptr,
    seq_lens_ptr,
    ends_ptr,
    num_rows,
    ANY_QUERY_LEN: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    before = 0
    for first in range(0, num_rows, BLOCK):
        entries = first + tl.arange(0, BLOCK)
        mask = entries < num_rows
        lengths = _decode_length(entries, mask, cu_seqlens_q_ptr, seq_lens_ptr, ANY_QUERY_LEN)
        counts = tl.cdiv(lengths, _split_size(lengths, SPLIT, MAX_SPLITS))
        tl.store(ends_ptr + entries, before + tl.cumsum(counts, axis=0), mask=mask)
        before += tl.sum(counts, axis=0)


@triton.jit
def _first_above(ends_ptr, num_rows, item):
    """The first entry whose end is above `item`: the row that the item belongs to."""
    low = tl.full([], 0, tl.int32)
    high = num_rows - 1
    while low < high:
        middle = (low + high) // 2
        is_above = tl.load(ends_ptr + middle) > item
        high = tl.where(is_above, middle, high)
        low = tl.where(is_above, low, middle + 1)
    return low


@triton.jit(do_not_specialize=["num_rows", "window_splits"])
def _attend_splits(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_tables_ptr,
    rows_ptr,
    cu_seqlens_q_ptr,
    seq_lens_ptr,
    ends_ptr,
    partial_ptr,
    lse_ptr,
    slopes_ptr,
    num_rows,
    window_splits,
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
    ANY_QUERY_LEN: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
):
    HEAD_BLOCKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    factor = score_factor(scale, HAS_SOFTCAP)
    num_items = num_rows * window_splits if HAS_WINDOW else tl.load(ends_ptr + num_rows - 1)
    # Heads of a token lie side by side, so neighbouring programs take heads of the same tokens.
    for work in range(tl.program_id(0), num_items * (KV_HEADS * HEAD_BLOCKS), tl.num_programs(0)):
        # The interpreter's loop variables are plain integers.
        item = tl.cast(work // (KV_HEADS * HEAD_BLOCKS), tl.int32)
        kv_head = work // HEAD_BLOCKS % KV_HEADS
        if HAS_WINDOW:
            # A window touches a bounded number of splits, wherever the row's end lies: no need to search.
            entry = item // window_splits
            length = _decode_length(entry, entry >= 0, cu_seqlens_q_ptr, seq_lens_ptr, ANY_QUERY_LEN)
            size = SPLIT
            first = first_seen(tl.maximum(length - 1, 0), window, IS_CHUNK)
            begin = (first // size + item % window_splits) * size
        else:
            entry = _first_above(ends_ptr, num_rows, item)
            length = tl.load(seq_lens_ptr + entry)
            size = _split_size(length, SPLIT, MAX_SPLITS)
            first = 0
            begin = (item - (tl.load(ends_ptr + entry) - tl.cdiv(length, size))) * size
        end = tl.minimum(begin + size, length)
        last = end - 1

        if begin < end:
            in_group = work % HEAD_BLOCKS * HEADS + tl.arange(0, HEADS)
            is_head = in_group < GROUP
            heads = kv_head * GROUP + in_group
            token = tl.load(cu_seqlens_q_ptr + entry) if ANY_QUERY_LEN else entry
            queries = token.to(tl.int64) * stride_query_token + heads * stride_query_head
            q0 = load_rows(query_ptr, queries, is_head, KEY_DIM, 0, D0)
            q1 = load_rows(query_ptr, queries, is_head, KEY_DIM, D0, D1) if D1 > 0 else q0
            key_ptr = key_cache_ptr + kv_head * KEY_DIM
            value_ptr = value_cache_ptr + kv_head * VALUE_DIM
            table_ptr = block_tables_ptr + tl.load(rows_ptr + entry).to(tl.int64) * stride_block_tables

            peak = tl.full([HEADS], float("-inf"), tl.float32)
            total = tl.zeros([HEADS], tl.float32)
            acc0 = tl.zeros([HEADS, V0], tl.float32)
            acc1 = tl.zeros([HEADS, V1 if V1 > 0 else 1], tl.float32)
            slopes = load_slopes(slopes_ptr, heads, is_head, scale, HAS_SOFTCAP) if HAS_ALIBI else peak
            low = tl.maximum(begin, first)
            tiles_begin = low // TILE * TILE
            pages = load_page_ids(table_ptr, tiles_begin, low, last, PAGE, TILE)
            for start in range(tiles_begin, end, TILE):
                slots = tile_slots(pages, start, low, last, PAGE, TILE)
                pages = load_page_ids(table_ptr, start + TILE, low, last, PAGE, TILE)
                scores = score_tile(
                    q0, q1, key_ptr, slots, KV_HEADS * KEY_DIM, scale, softcap, KEY_DIM, D0, D1, HAS_SOFTCAP
                )
                positions = start + tl.arange(0, TILE)
                if HAS_ALIBI:
                    # The query is the row's last token, which may lie in a later split.
                    scores = add_biases(scores, slopes, (positions - (length - 1))[None, :])
                is_seen = (positions >= low) & (positions <= last)
                scores = tl.where(is_seen[None, :], scores, float("-inf"))
                peak, total, weights, decay = softmax_step(peak, total, scores, factor)
                acc0, acc1 = add_values(
                    acc0, acc1, weights, decay, value_ptr, slots, KV_HEADS * VALUE_DIM, VALUE_DIM, V0, V1
                )

            parts = item.to(tl.int64) * (KV_HEADS * GROUP) + heads
            tl.store(lse_ptr + parts, peak + tl.log2(total), mask=is_head)
            store_rows(partial_ptr, parts * VALUE_DIM, is_head, acc0 / total[:, None], VALUE_DIM, 0, V0)
            if V1 > 0:
                store_rows(partial_ptr, parts * VALUE_DIM, is_head, acc1 / total[:, None], VALUE_DIM, V0, V1)


@triton.jit(do_not_specialize=["window_splits"])
def _merge_splits(
    cu_seqlens_q_ptr,
    seq_lens_ptr,
    ends_ptr,
    partial_ptr,
    lse_ptr,
    sinks_ptr,
    out_ptr,
    window_splits,
    window,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ANY_QUERY_LEN: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    entry, head = tl.program_id(0), tl.program_id(1)
    length = _decode_length(entry, entry >= 0, cu_seqlens_q_ptr, seq_lens_ptr, ANY_QUERY_LEN)
    if HAS_WINDOW:
        count = tl.cdiv(length, SPLIT) - first_seen(tl.maximum(length - 1, 0), window, IS_CHUNK) // SPLIT
        item = entry * window_splits
    else:
        count = tl.cdiv(length, _split_size(length, SPLIT, MAX_SPLITS))
        item = tl.load(ends_ptr + entry) - count
    dims = tl.arange(0, DIMS)
    is_dim = dims < VALUE_DIM

    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    if HAS_SINKS:
        # Once per row, whatever the number of splits: a score without a value.
        peak = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        total = tl.full([], 1.0, tl.float32)
    acc = tl.zeros([DIMS], tl.float32)
    first_part = tl.cast(item, tl.int64) * NUM_HEADS + head
    for i in range(count):
        offset = first_part + i * NUM_HEADS
        lse = tl.load(lse_ptr + offset)
        values = tl.load(partial_ptr + offset * VALUE_DIM + dims, mask=is_dim, other=0.0)
        new_peak = tl.maximum(peak, lse)
        decay = tl.exp2(peak - new_peak)
        share = tl.exp2(lse - new_peak)
        total = total * decay + share
        acc = acc * decay + values * share
        peak = new_peak

    token = entry
    if ANY_QUERY_LEN:
        # The other rows are not this kernel's to write.
        token = tl.load(cu_seqlens_q_ptr + entry)
        is_dim = dims < tl.where(length > 0, VALUE_DIM, 0)
    # Rows without any key are padding, and give zeros.
    acc = acc / tl.where(total == 0.0, 1.0, total)
    outs = (token.to(tl.int64) * NUM_HEADS + head) * VALUE_DIM + dims
    tl.store(out_ptr + outs, narrow(acc, out_ptr.dtype.element_ty), mask=is_dim)


def launch_plan(cu_seqlens_q: Tensor, seq_lens: Tensor, any_query_len: bool) -> Tensor:
    """Launches the plan of a step; arguments as in `attend`.

    Returns:
        `[R]` int32: the number of work items of each row and of all rows before it.
    """
    ends = seq_lens.new_empty(len(seq_lens))
    # No table to look up, but the same clear error where nothing runs Triton.
    target_of(seq_lens.device)
    launch(
        _plan,
        (1,),
        cu_seqlens_q,
        seq_lens,
        ends,
        len(seq_lens),
        ANY_QUERY_LEN=any_query_len,
        SPLIT=_SPLIT,
        MAX_SPLITS=_MAX_SPLITS,
        BLOCK=_PLAN_BLOCK,
        num_warps=4,
    )
    return ends


def attend(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    cu_seqlens_q: Tensor | None,
    seq_lens: Tensor,
    ends: Tensor,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    max_kv: int,
) -> None:
    """Launches attention of the rows with one query token, for this slot and for mixed steps of `varlen_attention`.

    Args:
        out: `[T, Hq, Dv]` contiguous. Written for the computed rows; without `cu_seqlens_q` for all rows.
        query: `[T, Hq, Dk]`, last stride 1.
        key_cache: `[N, P, Hkv, Dk]`, contiguous.
        value_cache: `[N, P, Hkv, Dv]`, contiguous.
        block_tables: `[num_rows, max_blocks]` int32.
        rows: `[R]` int32.
        cu_seqlens_q: `[R + 1]` int32 where rows have any number of query tokens: those with one are computed. None
            where row i's only query token is token i.
        seq_lens: `[R]` int32.
        ends: What `launch_plan` returned.
        scale: See `reference.decode_attention`; likewise the following.
        window: See there.
        chunk: See there.
        softcap: See there.
        sinks: See there.
        alibi_slopes: See there.
        max_kv: See there.
    """
    num_rows, (num_heads, key_dim) = len(rows), query.shape[1:]
    target = target_of(query.device)
    layer = LayerOptions.of(window, chunk, softcap, alibi_slopes)
    constants = layer_constants(query, key_cache, value_cache, layer, target)
    window = window or chunk
    config = pick(_LAUNCHES[target], key_dim * key_cache.itemsize, "bytes of a key head")
    heads = heads_per_program(constants["GROUP"], target)
    # With three buffers, products in fp32 beside slopes spill on sm_90 and sm_100.
    most_stages = 2 if layer.has_alibi and key_cache.dtype == torch.float32 else config.num_stages
    any_query_len = cu_seqlens_q is not None
    splits = ceil_div(max_kv, _SPLIT)
    if window:
        # Two more than fill the window: it may begin and end within one.
        splits = window_splits = min(splits, (window + _SPLIT - 2) // _SPLIT + 1)
    else:
        splits, window_splits = min(splits, _MAX_SPLITS), 0
    num_items = num_rows * splits
    partial = query.new_empty((num_items, num_heads, value_cache.shape[3]), dtype=torch.float32)
    lse = query.new_empty((num_items, num_heads), dtype=torch.float32)
    num_work = num_items * constants["KV_HEADS"] * ceil_div(constants["GROUP"], heads)
    launch(
        _attend_splits,
        (min(num_work, num_processors(query.device) * config.per_processor),),
        query,
        key_cache,
        value_cache,
        block_tables,
        rows,
        cu_seqlens_q,
        seq_lens,
        ends,
        partial,
        lse,
        alibi_slopes,
        num_rows,
        window_splits,
        scale,
        window,
        softcap,
        query.stride(0),
        query.stride(1),
        block_tables.stride(0),
        ANY_QUERY_LEN=any_query_len,
        SPLIT=_SPLIT,
        MAX_SPLITS=_MAX_SPLITS,
        HEADS=heads,
        TILE=config.tile,
        num_warps=config.num_warps,
        num_stages=min(config.num_stages, most_stages),
        **constants,
    )
    launch(
        _merge_splits,
        (num_rows, num_heads),
        cu_seqlens_q,
        seq_lens,
        ends,
        partial,
        lse,
        sinks,
        out,
        window_splits,
        window,
        NUM_HEADS=num_heads,
        VALUE_DIM=constants["VALUE_DIM"],
        DIMS=power_of_two(constants["VALUE_DIM"]),
        HAS_WINDOW=layer.has_window,
        IS_CHUNK=layer.is_chunk,
        HAS_SINKS=sinks is not None,
        ANY_QUERY_LEN=any_query_len,
        SPLIT=_SPLIT,
        MAX_SPLITS=_MAX_SPLITS,
        num_warps=1,
    )


@kernel_op("decode_attention_split_kv_plan")
def plan(
    block_tables: Tensor, rows: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor, page_size: int, max_kv: int
) -> Tensor:
    """Counts the splits of the step's rows.

    Args:
        block_tables: Not needed here.
        rows: Not needed here.
        cu_seqlens_q: Not needed here: every row has one query token.
        seq_lens: `[R]` int32, tokens of each row.
        page_size: Not needed here.
        max_kv: Not needed here.

    Returns:
        `[R]` int32: the number of splits of each row and of all rows before it.
    """
    return launch_plan(cu_seqlens_q, seq_lens, any_query_len=False)


@plan.register_fake
def _(
    block_tables: Tensor, rows: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor, page_size: int, max_kv: int
) -> Tensor:
    return torch.empty_like(seq_lens)


@kernel_op("decode_attention_split_kv")
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
    out = value_cache.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])
    attend(
        out,
        query,
        key_cache,
        value_cache,
        block_tables,
        rows,
        None,
        seq_lens,
        plan,
        scale,
        window,
        chunk,
        softcap,
        sinks,
        alibi_slopes,
        max_kv,
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
