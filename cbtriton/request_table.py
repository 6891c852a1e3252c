"""The device-resident table of running requests: tokens, block tables and sampling parameters, one row each.

A step sends only (row, start, count) per scheduled request; kernels gather everything else from here, and the sampler
writes the new token back, so that the next step never waits for the host. `StepInputs` writes what enters a row; the
`sample` kernel writes tokens. Rows are handed out by the scheduler.
"""

from __future__ import annotations

import torch

MAX_EOS_IDS = 16


class RequestTable:
    """Tensors of the table; see the attributes.

    One more row than requests takes what padding rows write; nothing is ever read from it.

    Args:
        num_rows: Requests that can run at once; the attributes have one row more.
        max_len: Longest sequence in tokens, the last generated token included.
        num_groups: Block tables of each request.
        max_blocks: Longest block table.
        device: Where the table lives.

    Attributes:
        padding_row: The row of no request.
        token_table: `[num_rows, max_len]` int32, prompt and generated tokens by position.
        block_tables: `[num_groups, num_rows, max_blocks]` int32; what lies in front of a group's window and behind
            the request's own blocks means nothing.
        temperature: `[num_rows]` float32; 0 for greedy rows.
        top_k: `[num_rows]` int32; 0 is off.
        top_p: `[num_rows]` float32; 1 is off.
        min_p: `[num_rows]` float32; 0 is off.
        seeds: `[num_rows]` int64.
        min_positions: `[num_rows]` int32; EOS ids cannot be sampled for positions below this.
        eos_ids: `[num_rows, MAX_EOS_IDS]` int32, padded with -1.
    """

    def __init__(self, num_rows: int, max_len: int, num_groups: int, max_blocks: int, device: torch.device) -> None:
        self.padding_row = num_rows
        num_rows += 1
        # Never read beyond what was written, so the (large) token table needs no initial value.
        self.token_table = torch.empty((num_rows, max_len), dtype=torch.int32, device=device)
        self.block_tables = torch.zeros((num_groups, num_rows, max_blocks), dtype=torch.int32, device=device)
        self.temperature = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.top_p = torch.ones(num_rows, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.min_positions = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.eos_ids = torch.full((num_rows, MAX_EOS_IDS), -1, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors; on a CPU, tokens take memory only once they are written."""
        return sum(column.nbytes for column in vars(self).values() if isinstance(column, torch.Tensor))
