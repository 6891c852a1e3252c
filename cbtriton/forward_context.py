"""What the attention calls of one group need to know about the step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cbtriton.plan import Path


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The step's tensors, made once and read by every layer of a group. All live on the model's device.

    Attributes:
        path: Which attention slot runs.
        block_tables: `[num_rows, max_blocks]` int32, the group's own of the request table.
        rows: `[num_requests]` int32, the step's rows in the request table.
        cu_seqlens_q: `[num_requests + 1]` int32, prefix sums of the rows' query lengths.
        seq_lens: `[num_requests]` int32, context plus query tokens of each row; 0 for padding rows.
        slots: `[num_tokens]` int64, where each token's K and V go; -1 for padding.
        attention_plan: What the attention implementation computed once for the group's layers in this step.
        max_kv: Longest context that the step may hold, in tokens.
    """

    path: Path
    block_tables: Tensor
    rows: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    slots: Tensor
    attention_plan: Tensor
    max_kv: int
