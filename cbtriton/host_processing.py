"""Functions of callers that have a say in single requests' tokens: logits processors, token masks, stopping criteria.

They run in Python on the host, one request at a time, and see nothing but their own request's tokens. Whatever one of
them raises, or returns in a form that nobody understands, ends that request and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cbtriton.plan import HostRow
from cbtriton.request_table import RequestTable


class HostProcessor:
    """Applies callers' functions to the rows of a step.

    Args:
        table: The request table; its token masks are written here.
        vocab_size: Number of token ids that the model can produce.
        device: Where the table and the scores are.
    """

    def __init__(self, table: RequestTable, vocab_size: int, device: torch.device) -> None:
        self._table = table
        self._vocab_size = vocab_size
        self._device = device

    def write_masks(self, rows: Sequence[HostRow]) -> dict[int, str]:
        """Asks for the masks of a step's rows and puts them into the table, before the step runs.

        Returns:
            Why rows have none, by their index among the sampling rows.
        """
        errors: dict[int, str] = {}
        for row in rows:
            if not row.processing.has_mask:
                continue
            try:
                self._table.token_masks[row.row] = self._mask(row).to(self._device)
            except Exception as error:  # The caller's function: its errors are that request's alone.
                errors[row.sample_index] = f"its token mask failed: {type(error).__name__}: {error}"
        return errors

    def process(self, scores: Tensor, rows: Sequence[HostRow]) -> dict[int, str]:
        """Passes the scores of a step's rows through their processors.

        Args:
            scores: `[num_samples, vocab_size]` float32, changed in these rows.
            rows: The rows.

        Returns:
            Why rows have no scores, by their index.
        """
        errors: dict[int, str] = {}
        for row in rows:
            if not row.processing.processors:
                continue
            token_ids = torch.tensor([row.token_ids], device=self._device)
            score = scores[row.sample_index : row.sample_index + 1]
            try:
                for processor in row.processing.processors:
                    score = _checked(processor, processor(token_ids, score), self._vocab_size)
                scores[row.sample_index] = score[0]
            except Exception as error:  # Likewise.
                errors[row.sample_index] = f"its logits processors failed: {type(error).__name__}: {error}"
        return errors

    def _mask(self, row: HostRow) -> Tensor:
        """`[ceil(vocab_size / 32)]` int32, from what the row's functions allow."""
        processing = row.processing
        words = torch.full((-(-self._vocab_size // 32),), -1, dtype=torch.int32)
        if processing.token_mask is not None:
            words &= _words(processing.token_mask(row.token_ids[row.prompt_length :]), self._vocab_size)
        if processing.prefix_allowed_tokens_fn is not None:
            allowed = processing.prefix_allowed_tokens_fn(0, torch.tensor(row.token_ids, device=self._device))
            mask = torch.zeros(self._vocab_size, dtype=torch.bool)
            mask[torch.as_tensor(allowed, dtype=torch.int64, device="cpu")] = True
            words &= pack_mask(mask)
        return words


def pack_mask(mask: Tensor) -> Tensor:
    """`[ceil(V / 32)]` int32 from `[V]` bool: bit `token % 32` of word `token // 32` is that of a token."""
    padded = torch.nn.functional.pad(mask, (0, -len(mask) % 32))
    # A sum of different powers of two wraps into the sign bit as it should.
    bits = 1 << torch.arange(32, dtype=torch.int32)
    return (padded.view(-1, 32) * bits).sum(-1, dtype=torch.int32)


def is_met(criterion: Callable[[Any, Any], Any], token_ids: list[int]) -> bool:
    """Whether a stopping criterion ends a request with these tokens; it sees them as `[1, n]` int64, and no scores.

    Raises:
        Exception: Whatever the criterion raises.
    """
    return bool(torch.as_tensor(criterion(torch.tensor([token_ids]), None)).any())


def _words(mask: Any, vocab_size: int) -> Tensor:
    mask = torch.as_tensor(mask, device="cpu").squeeze()
    num_words = -(-vocab_size // 32)
    if mask.dtype == torch.bool and mask.shape == (vocab_size,):
        return pack_mask(mask)
    if mask.dtype == torch.int32 and mask.shape == (num_words,):
        return mask
    raise ValueError(
        f"token_mask must return {vocab_size} bools or {num_words} int32 words of 32 tokens each, got "
        f"{tuple(mask.shape)} {str(mask.dtype).removeprefix('torch.')}"
    )


def _checked(processor: object, scores: Any, vocab_size: int) -> Tensor:
    if isinstance(scores, Tensor) and scores.shape == (1, vocab_size) and scores.is_floating_point():
        return scores
    found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    name = getattr(processor, "__name__", type(processor).__name__)
    raise ValueError(f"{name} must return scores of shape {(1, vocab_size)}, got {found}")
