"""`prepare_inputs` as one Triton kernel: for each group, a program per row and one for the padding behind the last."""

# Inside kernels this is Triton, whose types a checker of Python gets wrong.
# pyright: reportArgumentType=false, reportInvalidTypeForm=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbtriton.kernels._launch import launch, target_of
from cbtriton.kernels._op import kernel_op

# (tokens or rows per pass, warps)
_LAUNCHES = {
    "sm_80": (256, 2),
    "sm_90": (256, 2),
    "sm_100": (256, 2),
    "gfx942": (256, 2),
    "cpu": (64, 1),
    "interpreter": (64, 1),
}


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _prepare_inputs(
    token_table_ptr,
    block_tables_ptr,
    rows_ptr,
    starts_ptr,
    counts_ptr,
    page_sizes_ptr,
    input_ids_ptr,
    positions_ptr,
    slots_ptr,
    cu_seqlens_q_ptr,
    seq_lens_ptr,
    num_rows,
    num_tokens,
    stride_token_table: tl.int64,
    stride_group: tl.int64,
    stride_row: tl.int64,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    slots_ptr += group * num_tokens
    is_first = group == 0
    # Every program sums the counts before its own: a few loads from cache instead of a launch to wait for.
    before = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, entry, BLOCK):
        others = first + tl.arange(0, BLOCK)
        before += tl.load(counts_ptr + others, mask=others < entry, other=0)
    begin = tl.sum(before, axis=0)
    if is_first:
        tl.store(cu_seqlens_q_ptr + entry, begin)

    if entry == num_rows:
        for first in range(begin, num_tokens, BLOCK):
            tokens = first + tl.arange(0, BLOCK)
            mask = tokens < num_tokens
            zeros = tl.zeros([BLOCK], dtype=tl.int64)
            if is_first:
                tl.store(input_ids_ptr + tokens, zeros, mask=mask)
                tl.store(positions_ptr + tokens, zeros, mask=mask)
            tl.store(slots_ptr + tokens, zeros - 1, mask=mask)
    else:
        row = tl.load(rows_ptr + entry).to(tl.int64)
        start = tl.load(starts_ptr + entry)
        count = tl.load(counts_ptr + entry)
        page_size = tl.load(page_sizes_ptr + group)
        block_table_ptr = block_tables_ptr + group * stride_group + row * stride_row
        if is_first:
            tl.store(seq_lens_ptr + entry, tl.where(count > 0, start + count, 0))
        for first in range(0, count, BLOCK):
            offsets = first + tl.arange(0, BLOCK)
            mask = offsets < count
            positions = start + offsets
            blocks = tl.load(block_table_ptr + positions // page_size, mask=mask, other=0)
            tokens = begin + offsets
            if is_first:
                ids = tl.load(token_table_ptr + row * stride_token_table + positions, mask=mask, other=0)
                tl.store(input_ids_ptr + tokens, ids.to(tl.int64), mask=mask)
                tl.store(positions_ptr + tokens, positions.to(tl.int64), mask=mask)
            tl.store(slots_ptr + tokens, blocks.to(tl.int64) * page_size + positions % page_size, mask=mask)


@kernel_op("prepare_inputs_per_row")
def prepare_inputs(
    token_table: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    starts: Tensor,
    counts: Tensor,
    page_sizes: Tensor,
    num_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gathers what the model's forward needs from the request table; see `reference.prepare_inputs`."""
    num_rows = len(rows)
    input_ids = torch.empty(num_tokens, dtype=torch.int64, device=rows.device)
    positions = torch.empty_like(input_ids)
    slots = torch.empty((len(page_sizes), num_tokens), dtype=torch.int64, device=rows.device)
    cu_seqlens_q = rows.new_empty(num_rows + 1)
    seq_lens = rows.new_empty(num_rows)
    block, num_warps = _LAUNCHES[target_of(rows.device)]
    launch(
        _prepare_inputs,
        (num_rows + 1, len(page_sizes)),
        token_table,
        block_tables,
        rows,
        starts,
        counts,
        page_sizes,
        input_ids,
        positions,
        slots,
        cu_seqlens_q,
        seq_lens,
        num_rows,
        num_tokens,
        token_table.stride(0),
        block_tables.stride(0),
        block_tables.stride(1),
        BLOCK=block,
        num_warps=num_warps,
    )
    return input_ids, positions, slots, cu_seqlens_q, seq_lens


@prepare_inputs.register_fake
def _(
    token_table: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    starts: Tensor,
    counts: Tensor,
    page_sizes: Tensor,
    num_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    per_token = rows.new_empty(num_tokens, dtype=torch.int64)
    cu_seqlens_q = rows.new_empty(rows.shape[0] + 1)
    slots = rows.new_empty((len(page_sizes), num_tokens), dtype=torch.int64)
    return per_token, torch.empty_like(per_token), slots, cu_seqlens_q, torch.empty_like(rows)
