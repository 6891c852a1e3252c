"""Log-probabilities in torch: the definition of `token_logprobs`, which modules of the slot `sample` share."""

from __future__ import annotations

import torch
from torch import Tensor

from cbtriton.kernels._op import kernel_op


@kernel_op("token_logprobs_reference")
def token_logprobs(
    logits: Tensor, token_ids: Tensor, temperature: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of given tokens, and the likeliest tokens with theirs.

    Args:
        logits: `[S, V]`, any floating dtype, not changed.
        token_ids: `[S]` int64, in 0 … V - 1.
        temperature: `[S]` fp32, divides the logits; 0 counts as 1.
        num_top: Likeliest tokens per row, in 0 … V; of equal ones the lower ids.

    Returns:
        `logprobs [S]` fp32; `top_ids [S, num_top]` int64, likeliest first; `top_logprobs [S, num_top]` fp32. Rows with
        NaN or +inf, or without anything finite, mean nothing.
    """
    scores = logits.float() / temperature.where(temperature != 0, 1)[:, None]
    top_ids = _likeliest(scores, num_top)
    results = scores.log_softmax(-1)
    return results.gather(1, token_ids[:, None]).squeeze(1), top_ids, results.gather(1, top_ids)


def _likeliest(scores: Tensor, number: int) -> Tensor:
    """`[S, number]` int64: ids by falling score, equal ones by id, which `topk` of the scores would not promise."""
    # Integers in the order of the floats; -0.0 counts as 0.0.
    bits = (scores + 0.0).view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    return ((keys << 32) - torch.arange(scores.shape[1], device=scores.device)).topk(number).indices


@token_logprobs.register_fake
def _(logits: Tensor, token_ids: Tensor, temperature: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    return fake_token_logprobs(logits, num_top)


def fake_token_logprobs(logits: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """What `token_logprobs` returns, without values."""
    size = logits.shape[0]
    return (
        logits.new_empty(size, dtype=torch.float32),
        logits.new_empty((size, num_top), dtype=torch.int64),
        logits.new_empty((size, num_top), dtype=torch.float32),
    )
