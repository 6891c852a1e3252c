"""`decode_attention` in torch: the definition that other implementations are tested against."""

from __future__ import annotations

from torch import Tensor

from cbtriton.kernels._attention_reference import Scoring, attend_single
from cbtriton.kernels._attention_reference import plan_slots as plan
from cbtriton.kernels._op import kernel_op

__all__ = ["decode_attention", "plan"]


@kernel_op("decode_attention_reference")
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
    """Attention of one query token per row, the last of its row's context.

    Args:
        query: `[R, Hq, Dk]`, of the caches' dtype, last stride 1.
        key_cache: `[N, P, Hkv, Dk]`, contiguous; `Hkv` divides `Hq`.
        value_cache: `[N, P, Hkv, Dv]`, contiguous.
        block_tables: `[num_rows, max_blocks]` int32.
        rows: `[R]` int32, the table row of each entry.
        seq_lens: `[R]` int32, tokens of each row, the query token included; rows with 0 give zeros.
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
        `[R, Hq, Dv]` contiguous, of the caches' dtype.
    """
    scoring = Scoring(scale, window, chunk, softcap, sinks, alibi_slopes)
    return attend_single(query, key_cache, value_cache, plan, seq_lens.tolist(), scoring)


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
