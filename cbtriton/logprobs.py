"""Log-probabilities that single requests want: raw or processed, of the likeliest tokens, of their prompts.

What the engine gives everybody comes with the step itself. This is for rows that ask for something else: computed
behind the step from its logits, for them alone, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cbtriton.plan import LogprobRow, SampledToken, ScoredPrompt

TokenLogprobs = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """What some rows of a step asked for.

    Attributes:
        rows: Whose it is.
        chosen: `[len(rows)]` float32, of their new tokens.
        top_ids: `[len(rows), num_top]` int64, the likeliest tokens of each.
        top: `[len(rows), num_top]` float32.
    """

    rows: tuple[LogprobRow, ...]
    chosen: Tensor
    top_ids: Tensor
    top: Tensor

    def to_host(self, copy: Callable[[Tensor], Tensor]) -> RowLogprobs:
        """The same in host memory."""
        return RowLogprobs(self.rows, copy(self.chosen), copy(self.top_ids), copy(self.top))

    def add_to(self, tokens: Sequence[SampledToken]) -> list[SampledToken]:
        """The step's tokens, those of the rows with their log-probabilities."""
        tokens = list(tokens)
        columns = (self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist())
        for row, chosen, ids, top in zip(self.rows, *columns, strict=True):
            number = row.params.num_top
            # What the row filters out has no probability, and is not among the likeliest.
            likeliest = {id: value for id, value in zip(ids[:number], top[:number], strict=True) if value > -torch.inf}
            token = tokens[row.sample_index]
            tokens[row.sample_index] = replace(token, logprob=chosen, top_logprobs=likeliest if number else None)
        return tokens


def row_logprobs(
    kernel: TokenLogprobs, rows: Sequence[LogprobRow], logits: Tensor, scores: Tensor, token_ids: Tensor
) -> Iterator[RowLogprobs]:
    """What rows ask for, for each kind of log-probability at once.

    Args:
        kernel: `token_logprobs` of the slot `sample`.
        rows: Who asks.
        logits: `[num_samples, vocab_size]`, the model's own.
        scores: `[num_samples, vocab_size]` float32, after all processors and filters, before the temperature.
        token_ids: `[num_samples]` int64, the tokens that were drawn.
    """
    for kind, values in (("raw", logits), ("processed", scores)):
        asking = tuple(row for row in rows if row.params.kind == kind)
        if asking:
            index = torch.tensor([row.sample_index for row in asking], device=values.device)
            heats = [0.0 if kind == "raw" else row.temperature for row in asking]
            temperature = torch.tensor(heats, dtype=torch.float32, device=values.device)
            num_top = max(row.params.num_top for row in asking)
            yield RowLogprobs(asking, *kernel(values[index], token_ids[index], temperature, num_top))


def prompt_logprobs(kernel: TokenLogprobs, prompts: Sequence[ScoredPrompt], logits: Tensor) -> Tensor:
    """`[num_targets]` float32, of all prompts' target tokens, one after the other.

    Args:
        kernel: `token_logprobs` of the slot `sample`.
        prompts: Pieces of prompts.
        logits: `[num_targets, vocab_size]`, from which each target would have been drawn.
    """
    targets = torch.tensor([token for prompt in prompts for token in prompt.target_ids], device=logits.device)
    return kernel(logits, targets, torch.zeros_like(targets, dtype=torch.float32), 0)[0]


def by_prompt(logprobs: Tensor, prompts: Sequence[ScoredPrompt]) -> tuple[tuple[float, ...], ...]:
    """What `prompt_logprobs` returned, apart for each prompt."""
    pieces = logprobs.split([len(prompt.target_ids) for prompt in prompts])
    return tuple(tuple(piece.tolist()) for piece in pieces)
