"""`varlen_attention` in torch: the definition that other implementations are tested against."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from cbtriton.kernels._attention_reference import Scoring, attend_sequence, attend_single
from cbtriton.kernels._attention_reference import plan_slots as plan
from cbtriton.kernels._op import kernel_op

__all__ = ["plan", "varlen_attention"]


@kernel_op("varlen_attention_reference")
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
    """Causal attention of each row's query tokens, the last ones of its context, in any mix of lengths.

    Query token j of a row with q query tokens and context length L sees keys `0 … L - q + j`. Rows with one query
    token are computed together; each longer one by itself.

    Args:
        query: `[T, Hq, Dk]`, of the caches' dtype, last stride 1.
        key_cache: `[N, P, Hkv, Dk]`, contiguous; `Hkv` divides `Hq`.
        value_cache: `[N, P, Hkv, Dv]`, contiguous.
        block_tables: `[num_rows, max_blocks]` int32.
        rows: `[R]` int32, the table row of each entry.
        cu_seqlens_q: `[R + 1]` int32, where each row's query tokens begin; rows without any are ignored, and query
            tokens behind the last row's give zeros.
        seq_lens: `[R]` int32, tokens of each row, its query tokens included.
        plan: What this module's `plan` returned for the step.
        scale: Multiplies the dot products.
        window: Each query sees only the last `window` keys, its own included; 0 means all.
        chunk: Each query sees only keys of its own chunk: positions `i * chunk … (i + 1) * chunk - 1`; 0 means all. Not
            together with a window.
        softcap: Scores become `softcap * tanh(score / softcap)`; 0.0 means off.
        sinks: `[Hq]`, an additional logit per head in the softmax's denominator; None means none.
        alibi_slopes: `[Hq]` float32; each score gets a head's slope times how far the key is behind the query, a number
            up to 0 (Press et al. 2022, "Train Short, Test Long"); None means none.
        max_kv: At least the longest of `seq_lens`.

    Returns:
        `[T, Hq, Dv]` contiguous, of the caches' dtype.
    """
    scoring = Scoring(scale, window, chunk, softcap, sinks, alibi_slopes)
    begins, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()
    counts = [end - begin for begin, end in pairwise(begins)]
    out = value_cache.new_empty(len(query), query.shape[1], value_cache.shape[3])
    out[begins[-1] :] = 0
    for i, count in enumerate(counts):
        if count > 1:
            span = slice(begins[i], begins[i + 1])
            out[span] = attend_sequence(query[span], key_cache, value_cache, plan[i], lengths[i], scoring)
    if singles := [i for i, count in enumerate(counts) if count == 1]:
        tokens = torch.tensor([begins[i] for i in singles], device=query.device)
        entries = torch.tensor(singles, device=query.device)
        single_lengths = [lengths[i] for i in singles]
        out[tokens] = attend_single(query[tokens], key_cache, value_cache, plan[entries], single_lengths, scoring)
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
