"""`sample` in torch: the definition that other implementations are tested against.

Rows are treated by kind. Greedy rows need one pass over the vocabulary. Rows with filters are first cut down to the
few tokens that can survive at all (a cheap bound), then sorted, filtered and drawn among those. Only rows that sample
from the whole vocabulary draw random numbers for all of it.

A draw is a race: each surviving token finishes after `E / weight`, where `weight` is its unnormalised probability and
`E = -log(1 - u)` an exponential variate, and the first one wins. `u` comes from a counter-based generator and depends
on (seed, position, token id) only: `u = (word + 0.5) / 2^32`, where `word` is word `token_id % 4` of Philox-4x32-10
with the seed as key and the counter `(token_id // 4, position, 0, 0)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cbtriton.kernels._logprobs_reference import token_logprobs
from cbtriton.kernels._op import kernel_op
from cbtriton.kernels._processors_reference import process, truncate

__all__ = ["process", "sample", "token_logprobs", "truncate"]

_WORD_MASK = 0xFFFFFFFF
_ROUNDS = 10
# Rounding of the bound must not cut off a token that the exact filters would keep.
_BOUND_SLACK = 1 - 1e-3
# Random numbers drawn at a time for rows without filters.
_PIECE_NUMBERS = 1 << 16
# Outcomes of a row.
TOKEN, NOTHING_LEFT, UNUSABLE = range(3)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Parameters of the rows that are drawn, one entry per row.

    Attributes:
        positions: int64, where the new token goes.
        temperature: fp32, above 0.
        top_k: int64, in 1 … V, or 0 where off.
        top_p: fp32, 1 where off.
        min_p: fp32, 0 where off.
        seeds: int64.
    """

    positions: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor

    def select(self, index: Tensor) -> _Rows:
        return _Rows(
            self.positions[index],
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.min_p[index],
            self.seeds[index],
        )


@kernel_op("sample_reference", mutates_args=("token_table",))
def sample(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    token_table: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    min_positions: Tensor,
    eos_ids: Tensor,
    all_greedy: bool,
    use_top_k: bool,
    use_top_p: bool,
    use_min_p: bool,
    use_min_length: bool,
    return_logprobs: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws one token per row of `logits` and writes it into the token table.

    Logits are divided by the temperature and filtered by top-k, top-p and min-p, in this order, as transformers'
    processors do: top-k keeps what ties with the k-th token; top-p keeps the token that crosses the threshold, and at
    least one; min-p is relative to the most likely token that is left. Greedy rows take the most likely token, the
    lowest id of equal ones, without filters.

    Args:
        logits: `[S, V]`, any floating dtype, not changed.
        rows: `[S]` int32, each row's place in the tables below.
        positions: `[S]` int32, where in `token_table` the new token goes.
        token_table: `[num_rows, max_len]` int32, changed at `[rows, positions]`.
        temperature: `[num_rows]` fp32; 0 means greedy.
        top_k: `[num_rows]` int32; values outside 1 … V - 1 mean off.
        top_p: `[num_rows]` fp32; 1.0 means off.
        min_p: `[num_rows]` fp32; 0.0 means off.
        seeds: `[num_rows]` int64, all 64 bits are used.
        min_positions: `[num_rows]` int32; `eos_ids` cannot be drawn at positions below.
        eos_ids: `[num_rows, E]` int32, filled up with -1.
        all_greedy: No row has a temperature above 0.
        use_top_k: Whether any row filters by top-k; False skips it. Likewise the following three.
        use_top_p: See `use_top_k`.
        use_min_p: See `use_top_k`.
        use_min_length: See `use_top_k`.
        return_logprobs: Whether log-probabilities are computed; if not they are 0.

    Returns:
        `tokens [S]` int64; `logprobs [S]` fp32 under the processed distribution (greedy rows: the softmax of the logits
        without suppressed EOS ids); `outcomes [S]` int32, 0 for a token, 1 where all of a row's logits are -inf, 2
        where they hold NaN or +inf (its token is 0 then).
    """
    if use_min_length:
        logits = _suppress_eos(logits, positions < min_positions[rows], eos_ids[rows])
    best, tokens = logits.max(dim=-1)
    valid = torch.isfinite(best)
    outcomes = torch.full_like(tokens, UNUSABLE, dtype=torch.int32)
    outcomes.masked_fill_(best == -torch.inf, NOTHING_LEFT).masked_fill_(valid, TOKEN)
    logprobs = torch.zeros(len(logits), dtype=torch.float32, device=logits.device)
    is_greedy = valid if all_greedy else valid & (temperature[rows] == 0)
    if return_logprobs:
        greedy = is_greedy.nonzero().squeeze(1)
        logprobs[greedy] = best[greedy].float() - logits[greedy].float().logsumexp(-1)
    if not all_greedy:
        params = _Rows(
            positions=positions.to(torch.int64),
            temperature=temperature[rows],
            top_k=_top_k_or_off(top_k[rows].to(torch.int64), logits.shape[1], use_top_k),
            top_p=top_p[rows] if use_top_p else torch.ones_like(logprobs),
            min_p=min_p[rows] if use_min_p else torch.zeros_like(logprobs),
            seeds=seeds[rows],
        )
        is_drawn = valid & ~is_greedy
        has_top_k = params.top_k > 0
        is_filtered = has_top_k | (params.top_p < 1) | (params.min_p > 0)
        kinds = ((has_top_k, _draw_top_k), (is_filtered & ~has_top_k, _draw_nucleus), (~is_filtered, _draw_unfiltered))
        for is_kind, draw in kinds:
            drawn = (is_drawn & is_kind).nonzero().squeeze(1)
            if len(drawn):
                tokens[drawn], drawn_logprobs = draw(logits[drawn].float(), params.select(drawn))
                if return_logprobs:
                    logprobs[drawn] = drawn_logprobs
    tokens.masked_fill_(~valid, 0)
    token_table[rows, positions] = tokens.to(token_table.dtype)
    return tokens, logprobs, outcomes


@sample.register_fake
def _(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    token_table: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    min_positions: Tensor,
    eos_ids: Tensor,
    all_greedy: bool,
    use_top_k: bool,
    use_top_p: bool,
    use_min_p: bool,
    use_min_length: bool,
    return_logprobs: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (logits.shape[0],)
    return (
        logits.new_empty(shape, dtype=torch.int64),
        logits.new_empty(shape, dtype=torch.float32),
        logits.new_empty(shape, dtype=torch.int32),
    )


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: Tensor) -> Tensor:
    """Philox-4x32-10.

    Args:
        counter: Four int64 tensors that broadcast, each holding 32-bit unsigned numbers.
        key: int64, all 64 bits are used, broadcasts with the counter.

    Returns:
        The four 32-bit output words as int64, in a new last dimension.
    """
    key_low, key_high = key & _WORD_MASK, (key >> 32) & _WORD_MASK
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter, key)[:4]
    for _ in range(_ROUNDS):
        # A product may wrap into negative numbers; its bits are right all the same. Bits above a word's 32 are only
        # cleared before the next multiplication, where they would matter.
        product_0, product_2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0 = (product_2 >> 32).bitwise_xor_(c1).bitwise_xor_(key_low).bitwise_and_(_WORD_MASK)
        c2 = (product_0 >> 32).bitwise_xor_(c3).bitwise_xor_(key_high).bitwise_and_(_WORD_MASK)
        c1, c3 = product_2, product_0
        key_low, key_high = (key_low + 0x9E3779B9) & _WORD_MASK, (key_high + 0xBB67AE85) & _WORD_MASK
    return torch.stack((c0, c1, c2, c3), dim=-1).bitwise_and_(_WORD_MASK)


def _exponential(words: Tensor) -> Tensor:
    """Exponential variates (fp32, in (0, 17)) from 32-bit words.

    The race is won at small values, where -log(1 - u) keeps its relative precision in fp32 and -log(u) would not.
    """
    u = words.to(torch.float32).add_(0.5).mul_(2.0**-32)
    return u.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()


def _suppress_eos(logits: Tensor, is_too_short: Tensor, eos_ids: Tensor) -> Tensor:
    """A copy of `logits` in which rows that are too short cannot end."""
    is_suppressed = is_too_short[:, None] & (eos_ids >= 0) & (eos_ids < logits.shape[1])
    entries, columns = is_suppressed.nonzero(as_tuple=True)
    return logits.index_put((entries, eos_ids[entries, columns].to(torch.int64)), logits.new_tensor(-torch.inf))


def _top_k_or_off(top_k: Tensor, vocab_size: int, use_top_k: bool) -> Tensor:
    return top_k.where((top_k > 0) & (top_k < vocab_size) & use_top_k, 0)


def _draw_unfiltered(logits: Tensor, params: _Rows) -> tuple[Tensor, Tensor]:
    """Draws from whole rows, in pieces of few rows whose random numbers stay in cache. `logits [n, V]` fp32."""
    vocab_size = logits.shape[1]
    scores = logits / params.temperature[:, None]
    groups_of_four = torch.arange(-(-vocab_size // 4), device=logits.device)
    zero = groups_of_four.new_zeros(())
    drawn = []
    for piece in torch.arange(len(logits), device=logits.device).split(max(1, _PIECE_NUMBERS // vocab_size)):
        counter = (groups_of_four, params.positions[piece, None], zero, zero)
        words = philox(counter, params.seeds[piece, None]).flatten(1)[:, :vocab_size]
        weights = scores[piece]
        weights = weights.sub_(weights.amax(-1, keepdim=True)).exp_()
        drawn.append(weights.div_(_exponential(words)).argmax(-1, keepdim=True))
    tokens = torch.cat(drawn)
    return tokens.squeeze(1), (scores.gather(1, tokens) - scores.logsumexp(-1, keepdim=True)).squeeze(1)


def _draw_top_k(logits: Tensor, params: _Rows) -> tuple[Tensor, Tensor]:
    """Draws from rows with top-k, and possibly the other filters. `logits [n, V]` fp32."""
    scores = logits / params.temperature[:, None]
    best = scores.topk(int(params.top_k.max())).values
    kth = best.gather(1, params.top_k[:, None] - 1)
    removed_mass = torch.zeros_like(kth, dtype=torch.float64)
    return _draw_candidates(*_gather_candidates(scores, scores >= kth), removed_mass, params)


def _draw_nucleus(logits: Tensor, params: _Rows) -> tuple[Tensor, Tensor]:
    """Draws from rows with top-p or min-p, without top-k. `logits [n, V]` fp32.

    Tokens under `(1 - top_p) / V` have less than `1 - top_p` together, so top-p removes them all.
    """
    scores = logits / params.temperature[:, None]
    weights = (scores - scores.amax(-1, keepdim=True)).exp_()
    top_p_bound = weights.sum(-1, keepdim=True) * (1 - params.top_p[:, None]) / logits.shape[1]
    is_candidate = weights >= torch.maximum(top_p_bound, params.min_p[:, None]) * _BOUND_SLACK
    removed_mass = weights.masked_fill_(is_candidate, 0).sum(-1, keepdim=True).to(torch.float64)
    return _draw_candidates(*_gather_candidates(scores, is_candidate), removed_mass, params)


def _draw_candidates(candidates: Tensor, ids: Tensor, removed_mass: Tensor, params: _Rows) -> tuple[Tensor, Tensor]:
    """Filters candidates exactly and draws among what is left.

    Args:
        candidates: `[n, C]` fp32 scores in order of token id, filled up with -inf.
        ids: `[n, C]` int64, their token ids.
        removed_mass: `[n, 1]` fp64, sum of `exp(score - best score)` of the tokens that are no candidates and count
            for top-p.
        params: The rows' parameters.

    Returns:
        `tokens [n]` int64 and `logprobs [n]` fp32.
    """
    peak = candidates.amax(-1, keepdim=True)
    if (params.top_p < 1).any():
        candidates = _filter_top_p(candidates, peak, removed_mass, params.top_p[:, None])
    if (params.min_p > 0).any():
        probs = candidates.softmax(-1)
        candidates = candidates.masked_fill(probs < params.min_p[:, None] * probs.amax(-1, keepdim=True), -torch.inf)

    entries, columns = (candidates > -torch.inf).nonzero(as_tuple=True)
    survivors = ids[entries, columns]
    zero = survivors.new_zeros(())
    words = philox((survivors // 4, params.positions[entries], zero, zero), params.seeds[entries])
    noise = torch.full_like(candidates, torch.inf)
    noise[entries, columns] = _exponential(words.gather(1, survivors[:, None] % 4).squeeze(1))
    winner = ((candidates - peak).exp_() / noise).argmax(-1, keepdim=True)
    logprobs = candidates.gather(1, winner) - candidates.logsumexp(-1, keepdim=True)
    return ids.gather(1, winner).squeeze(1), logprobs.squeeze(1)


def _gather_candidates(scores: Tensor, is_candidate: Tensor) -> tuple[Tensor, Tensor]:
    """Packs each row's candidates to the left: scores (filled up with -inf) and token ids, in order of id."""
    counts = is_candidate.sum(-1)
    entries, ids = is_candidate.nonzero(as_tuple=True)
    columns = torch.arange(len(ids), device=ids.device) - (counts.cumsum(0) - counts)[entries]
    shape = (len(scores), int(counts.max()))
    packed = scores.new_full(shape, -torch.inf)
    packed[entries, columns] = scores[entries, ids]
    packed_ids = ids.new_zeros(shape)
    packed_ids[entries, columns] = ids
    return packed, packed_ids


def _filter_top_p(candidates: Tensor, peak: Tensor, removed_mass: Tensor, top_p: Tensor) -> Tensor:
    """Removes candidates from the unlikely end while all that is removed has at most `1 - top_p`."""
    ascending, order = candidates.sort(dim=-1, stable=True)
    cumulative = (ascending - peak).exp_().cumsum(-1, dtype=torch.float64) + removed_mass
    is_removed = (cumulative / cumulative[:, -1:]).float() <= 1 - top_p
    is_removed[:, -1] = False
    is_removed &= top_p < 1
    return candidates.masked_fill(torch.zeros_like(is_removed).scatter_(1, order, is_removed), -torch.inf)
