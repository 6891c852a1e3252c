"""`prepare_inputs` in torch: the definition that other implementations are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from cbtriton.kernels._op import kernel_op


@kernel_op("prepare_inputs_reference")
def prepare_inputs(
    token_table: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    starts: Tensor,
    counts: Tensor,
    page_sizes: Tensor,
    num_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gathers what the model's forward needs from the request table.

    Entry i of the step runs tokens `starts[i] … starts[i] + counts[i] - 1` of table row `rows[i]`. Padding rows have
    count 0; padding tokens (behind the last real one) get id 0, position 0 and slot -1.

    Args:
        token_table: `[num_rows, max_len]` int32, the tokens of each request.
        block_tables: `[G, num_rows, max_blocks]` int32, the blocks of each request in each group of layers.
        rows: `[R]` int32.
        starts: `[R]` int32.
        counts: `[R]` int32.
        page_sizes: `[G]` int32, tokens per page of each group.
        num_tokens: T, the number of query tokens with padding; at least the sum of `counts`.

    Returns:
        `input_ids [T]` int64, `positions [T]` int64, `slots [G, T]` int64 (block * page_size + offset),
        `cu_seqlens_q [R + 1]` int32 (where each row's query tokens begin, and the last one's end) and
        `seq_lens [R]` int32 (tokens of each row after this step, 0 for padding rows).
    """
    cu_seqlens_q = torch.zeros(len(rows) + 1, dtype=torch.int32, device=rows.device)
    torch.cumsum(counts, 0, out=cu_seqlens_q[1:])
    tokens = torch.arange(num_tokens, device=rows.device)
    entries = torch.searchsorted(cu_seqlens_q[1:], tokens, right=True)
    is_real = entries < len(rows)
    entries = entries.clamp(max=len(rows) - 1)
    positions = (starts[entries] + tokens - cu_seqlens_q[entries]).masked_fill(~is_real, 0)
    token_rows = rows[entries]
    input_ids = token_table[token_rows, positions].to(torch.int64).masked_fill(~is_real, 0)
    sizes = page_sizes.to(torch.int64)[:, None]
    pages, offsets = positions // sizes, positions % sizes
    groups = torch.arange(len(page_sizes), device=rows.device)[:, None]
    blocks = block_tables[groups, token_rows, pages].to(torch.int64)
    slots = (blocks * sizes + offsets).masked_fill(~is_real, -1)
    seq_lens = torch.where(counts > 0, starts + counts, 0)
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
