"""Logits processors in torch: the definition of `process` and `truncate`, which modules of the slot `sample` share.

The numbers are those of transformers' `LogitsProcessor` classes of the same names, on each request's whole history. The
order is theirs, too; presence and frequency penalties, which they lack, follow the repetition penalty.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cbtriton.kernels._op import kernel_op

# Kinds of rules, and the fields of one; see `process`.
BIAS, BAN, FORCE, SUPPRESS = range(4)
# What invalid values become, and what scores grow up to.
LARGEST = torch.finfo(torch.float32).max
# Tokens that top-h looks at.
TOP_H_TOKENS = 100
_NO_RULES: tuple[list[tuple[int, float]], ...] = ([], [], [], [])


@kernel_op("process_reference")
def process(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    token_table: Tensor,
    prompt_lengths: Tensor,
    repetition_penalty: Tensor,
    presence_penalty: Tensor,
    frequency_penalty: Tensor,
    no_repeat_ngram_size: Tensor,
    num_biases: Tensor,
    num_rules: Tensor,
    rules: Tensor,
    rule_prefixes: Tensor,
    has_token_mask: Tensor,
    token_masks: Tensor,
    min_positions: Tensor,
    eos_ids: Tensor,
    decay_starts: Tensor,
    decay_rates: Tensor,
    remove_invalid: Tensor,
) -> Tensor:
    """Scores after everything that comes before the temperature.

    A row's history are its entries of `token_table` before the position of the new token. In this order: biases are
    added; tokens of the history get the repetition penalty, those of them behind the prompt the presence penalty (once)
    and the frequency penalty (for each time); tokens that would repeat an n-gram, banned ones, those that the row's
    mask does not allow, and EOS ids that come too early become -inf; where tokens are forced, these become 0 and all
    others -inf; invalid values are replaced; EOS ids grow; suppressed tokens become -inf.

    A rule is `(token, kind and length, position, bias)`: what happens to `token` at `position` (-1: at any) if the end
    of the history is the rule's prefix. The second field is `kind + 4 * length`, with kind 0 for a bias, 1 for a ban, 2
    for a forced token, 3 for a suppressed one. The last field holds the bits of the bias as fp32, those of 0 for other
    kinds. Biases come first. The prefixes of a row's rules follow one another in `rule_prefixes`.

    Args:
        logits: `[S, V]`, any floating dtype, not changed.
        rows: `[S]` int32, each row's place in the tables below.
        positions: `[S]` int32, where in `token_table` the new token goes: the length of the history.
        token_table: `[num_rows, max_len]` int32. Ids outside the vocabulary count as tokens without a score.
        prompt_lengths: `[num_rows]` int32, tokens of the history that are no output.
        repetition_penalty: `[num_rows]` fp32; 1 is off.
        presence_penalty: `[num_rows]` fp32; 0 is off.
        frequency_penalty: `[num_rows]` fp32; 0 is off.
        no_repeat_ngram_size: `[num_rows]` int32; 0 is off.
        num_biases: `[num_rows]` int32, rules that are biases.
        num_rules: `[num_rows]` int32, all rules.
        rules: `[num_rows, max_rules, 4]` int32.
        rule_prefixes: `[num_rows, max_prefixes]` int32.
        has_token_mask: `[num_rows]` int32; where 0, all tokens are allowed.
        token_masks: `[num_rows, ceil(V / 32)]` int32. Bit `token % 32` of word `token // 32` is 1 where it is allowed.
        min_positions: `[num_rows]` int32; EOS ids come too early at positions below.
        eos_ids: `[num_rows, E]` int32, filled up with -1.
        decay_starts: `[num_rows]` int32. At positions beyond, EOS ids grow by `|score| * (2^(rate * distance) - 1)`,
            up to the largest number.
        decay_rates: `[num_rows]` fp32, base-2 logarithms of the factors.
        remove_invalid: `[num_rows]` int32; where not 0, NaN becomes 0, and infinities the largest numbers there are.

    Returns:
        `[S, V]` fp32.
    """
    scores = logits.to(torch.float32, copy=True)
    vocab_size = scores.shape[1]
    columns = (
        prompt_lengths,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        no_repeat_ngram_size,
        num_rules,
        has_token_mask,
        min_positions,
        decay_starts,
        decay_rates,
        remove_invalid,
    )
    # Asking a tensor for one number takes as long as most of what follows: all at once.
    parameters = zip(rows.tolist(), positions.tolist(), *(column[rows].tolist() for column in columns), strict=True)
    for score, parameter in zip(scores, parameters, strict=True):
        row, position, prompt_length, repetition, presence, frequency, size, number, *others = parameter
        is_masked, min_position, decay_start, decay_rate, is_repaired = others
        history = token_table[row, :position].long()
        active = _active_rules(rules[row, :number], rule_prefixes[row], history) if number else _NO_RULES
        for token, bias in active[BIAS]:
            score[token] += bias
        _penalise(score, history, prompt_length, repetition, presence, frequency)
        if size:
            score[_in_vocabulary(_repeating(history, size), vocab_size)] = -torch.inf
        _fill(score, active[BAN], -torch.inf)
        if is_masked:
            score[~_unpacked(token_masks[row], vocab_size)] = -torch.inf
        if position < min_position:
            score[_eos(eos_ids[row], vocab_size)] = -torch.inf
        if active[FORCE]:
            _fill(score.fill_(-torch.inf), active[FORCE], 0.0)
        if is_repaired:
            score.nan_to_num_(nan=0.0, posinf=LARGEST, neginf=-LARGEST)
        distance = position - decay_start
        if distance > 0:
            eos = _eos(eos_ids[row], vocab_size)
            growing = eos[score[eos].isfinite()]
            growth = score[growing].abs() * (math.pow(2.0, decay_rate * distance) - 1)
            score[growing] = (score[growing] + growth).clamp(max=LARGEST)
        _fill(score, active[SUPPRESS], -torch.inf)
    return scores


@process.register_fake
def _(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    token_table: Tensor,
    prompt_lengths: Tensor,
    repetition_penalty: Tensor,
    presence_penalty: Tensor,
    frequency_penalty: Tensor,
    no_repeat_ngram_size: Tensor,
    num_biases: Tensor,
    num_rules: Tensor,
    rules: Tensor,
    rule_prefixes: Tensor,
    has_token_mask: Tensor,
    token_masks: Tensor,
    min_positions: Tensor,
    eos_ids: Tensor,
    decay_starts: Tensor,
    decay_rates: Tensor,
    remove_invalid: Tensor,
) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float32)


def _active_rules(rules: Tensor, prefixes: Tensor, history: Tensor) -> tuple[list[tuple[int, float]], ...]:
    """Tokens and biases of the rules that hold at the end of `history`, by kind."""
    active: tuple[list[tuple[int, float]], ...] = ([], [], [], [])
    kinds, lengths = rules[:, 1] % 4, rules[:, 1] // 4
    found, wanted = history.tolist(), prefixes[: int(lengths.sum())].tolist()
    columns = (rules[:, 0], kinds, lengths, rules[:, 2], rules[:, 3].view(torch.float32))
    start = 0
    for token, kind, length, position, bias in zip(*(column.tolist() for column in columns), strict=True):
        is_here = position in (-1, len(found)) and length <= len(found)
        if is_here and found[len(found) - length :] == wanted[start : start + length]:
            active[kind].append((token, bias))
        start += length
    return active


def _penalise(
    score: Tensor, history: Tensor, prompt_length: int, repetition: float, presence: float, frequency: float
) -> None:
    vocab_size = len(score)
    if repetition != 1:
        seen = _in_vocabulary(history, vocab_size).unique()
        x = score[seen]
        score[seen] = torch.where(x < 0, x * repetition, x / repetition)
    if presence != 0 or frequency != 0:
        tokens, counts = _in_vocabulary(history[prompt_length:], vocab_size).unique(return_counts=True)
        score[tokens] -= (counts * frequency + presence).to(torch.float32)


def _repeating(history: Tensor, size: int) -> Tensor:
    """Tokens that would end an n-gram of `size` that the history holds already."""
    if len(history) < size:
        return history[:0]
    ngrams = history.unfold(0, size, 1)
    end = history[len(history) - size + 1 :]
    return ngrams[(ngrams[:, :-1] == end).all(-1), -1]


def _fill(score: Tensor, rules: list[tuple[int, float]], value: float) -> None:
    if rules:
        score[[token for token, _ in rules]] = value


def _eos(eos_ids: Tensor, vocab_size: int) -> Tensor:
    return _in_vocabulary(eos_ids[eos_ids >= 0].long(), vocab_size)


def _unpacked(mask: Tensor, vocab_size: int) -> Tensor:
    """`[vocab_size]` bool from words of 32 bits."""
    bits = mask[:, None] >> torch.arange(32, dtype=torch.int32, device=mask.device)
    return (bits & 1).bool().flatten()[:vocab_size]


def _in_vocabulary(tokens: Tensor, vocab_size: int) -> Tensor:
    return tokens[tokens < vocab_size]


@kernel_op("truncate_reference", mutates_args=("scores",))
def truncate(
    scores: Tensor,
    rows: Tensor,
    temperature: Tensor,
    is_truncated: Tensor,
    top_h: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    typical_p: Tensor,
    epsilon_cutoff: Tensor,
    eta_cutoff: Tensor,
) -> None:
    """Filters some rows in place: what goes becomes -inf. For rows with filters that `sample` does not have.

    These rows get all of their filters here, in transformers' order: top-h, top-k, top-p, min-p, typical-p, epsilon
    and eta cutoff. Where one depends on probabilities, these are of what the ones before it kept, at the row's
    temperature. Scores that are kept stay as they are. Rows without a finite score stay unfiltered.

    Top-h looks at the 100 likeliest tokens (of equal ones the lower ids) and keeps the first of them while their
    entropies do not add up to more than `top_h` of the entropy of all, and at least one.

    Args:
        scores: `[S, V]` fp32, changed.
        rows: `[S]` int32, each row's place in the columns below.
        temperature: `[num_rows]` fp32, above 0 in rows that are truncated.
        is_truncated: `[num_rows]` int32; where 0, the row stays as it is.
        top_h: `[num_rows]` fp32; 0 is off.
        top_k: `[num_rows]` int32; values outside 1 … V - 1 are off.
        top_p: `[num_rows]` fp32; 1 is off.
        min_p: `[num_rows]` fp32; 0 is off.
        typical_p: `[num_rows]` fp32; 1 is off.
        epsilon_cutoff: `[num_rows]` fp32; 0 is off.
        eta_cutoff: `[num_rows]` fp32; 0 is off.
    """
    columns = (temperature, top_h, top_k, top_p, min_p, typical_p, epsilon_cutoff, eta_cutoff)
    parameters = zip(*(column[rows].tolist() for column in columns), strict=True)
    all_ids = torch.arange(scores.shape[1], device=scores.device)
    is_asked = (is_truncated[rows] != 0) & scores.amax(-1).isfinite()
    for score, is_filtered, (heat, h, k, p, m, mass, epsilon, eta) in zip(
        scores, is_asked.tolist(), parameters, strict=True
    ):
        if not is_filtered:
            continue
        filters = (
            (h, h > 0, _keep_top_h),
            (k, k > 0, _keep_top_k),
            (p, p < 1, _keep_top_p),
            (m, m > 0, _keep_min_p),
            (mass, mass < 1, _keep_typical),
            (epsilon, epsilon > 0, _keep_above_epsilon),
            (eta, eta > 0, _keep_above_eta),
        )
        # Finite scores stay finite. Each filter sees what the ones before it kept, which is mostly little.
        scaled = (score / heat).clamp_(-LARGEST, LARGEST)
        ids = all_ids
        for value, is_on, keep in filters:
            if is_on:
                kept = keep(scaled, value)
                ids, scaled = ids.index_select(0, kept), scaled.index_select(0, kept)
        kept_scores = score.index_select(0, ids)
        score.fill_(-torch.inf).index_copy_(0, ids, kept_scores)


@truncate.register_fake
def _(
    scores: Tensor,
    rows: Tensor,
    temperature: Tensor,
    is_truncated: Tensor,
    top_h: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    typical_p: Tensor,
    epsilon_cutoff: Tensor,
    eta_cutoff: Tensor,
) -> None: ...


# Filters: the places of what is kept of the scores `[C]`, at the temperature and in order of token id; in that order.


def _keep_top_h(scaled: Tensor, share: float) -> Tensor:
    candidates = _keep_top_k(scaled, TOP_H_TOKENS)
    best, order = scaled.index_select(0, candidates).sort(descending=True, stable=True)
    entropies = torch.special.entr(best[:TOP_H_TOKENS].softmax(-1))
    number = max(int((entropies.cumsum(-1) <= entropies.sum() * share).sum()), 1)
    return candidates[order[:number]].sort().values


def _keep_top_k(scaled: Tensor, top_k: int) -> Tensor:
    return _where(scaled >= scaled.topk(min(top_k, len(scaled))).values[-1])


def _keep_top_p(scaled: Tensor, top_p: float) -> Tensor:
    weights = (scaled - scaled.amax()).exp_()
    # Tokens below this have less than 1 - top_p together, so all of them go. Rounding must not add to them.
    is_candidate = weights >= weights.sum() * ((1 - top_p) / len(weights) * (1 - 1e-3))
    removed_mass = weights.masked_fill(is_candidate, 0).sum(dtype=torch.float64)
    candidates = _where(is_candidate)
    candidates = candidates[scaled.index_select(0, candidates).argsort(stable=True)]
    cumulative = weights.index_select(0, candidates).cumsum(-1, dtype=torch.float64) + removed_mass
    number_removed = int(((cumulative / cumulative[-1]).float()[:-1] <= 1 - top_p).sum())
    return candidates[number_removed:].sort().values


def _keep_min_p(scaled: Tensor, min_p: float) -> Tensor:
    return _where((scaled - scaled.amax()).exp_() >= min(min_p, 1.0))


def _keep_typical(scaled: Tensor, mass: float) -> Tensor:
    logprobs = scaled.log_softmax(-1)
    probs = logprobs.exp()
    distances = logprobs.add_(torch.special.entr(probs).sum()).abs_()
    ascending, order = distances.sort()
    cumulative = probs.index_select(0, order).cumsum(-1, dtype=torch.float64)
    return _where(distances <= ascending[min(int((cumulative < mass).sum()), len(order) - 1)])


def _keep_above_epsilon(scaled: Tensor, epsilon: float) -> Tensor:
    return _where((scaled.softmax(-1) >= epsilon) | (scaled == scaled.amax()))


def _keep_above_eta(scaled: Tensor, eta: float) -> Tensor:
    entropy = float(torch.special.entr(scaled.softmax(-1)).sum())
    return _keep_above_epsilon(scaled, min(eta, math.sqrt(eta) * math.exp(-entropy)))


def _where(is_kept: Tensor) -> Tensor:
    return is_kept.nonzero().squeeze(1)
