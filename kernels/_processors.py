"""Logits processors in Triton, which modules of the slot `sample` share; see `_processors_reference` for what they do.

`process` writes a row's scores block by block. What a block needs to know of the history and the rules is gathered
before that, in one word per row and token: how often the token was generated, and a bit each for whether it stands in
the prompt, is banned (by a rule, or because it would repeat an n-gram), forced or suppressed. One program takes a row's
rules, others a piece of the history each. Only biases are left to the blocks, each of which goes through all of its
row's: sums of floats depend on their order.

`truncate` gives a row to one program, which filters it in place, one filter after the other. Each filter is a
threshold on ranks, which are integers in the order of the scores (typical-p: of the distance from the expected one);
thresholds are found as in `sample/fused`, by comparing counts or sums of fixed-point masses.
"""

# Inside kernels this is Triton, whose types a checker of Python gets wrong.
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbtriton.kernels._launch import INTERPRETER, ceil_div, launch, power_of_two, target_of
from cbtriton.kernels._op import kernel_op


@dataclass(frozen=True, slots=True)
class _Choices:
    """Launch choices of a target.

    Attributes:
        block: Scores per program of `_process`.
        piece: Tokens of the history per program of `_gather`; one further program takes the rules.
        num_warps: Warps of both.
        tile: Scores per turn of `_truncate`.
        pivots: Parts that one pass of a search splits a range in.
        num_truncate_warps: Warps of `_truncate`.
    """

    block: int
    piece: int
    num_warps: int
    tile: int
    pivots: int
    num_truncate_warps: int


# The interpreter's pieces are small, so that small tests have several.
_CHOICES = {
    "sm_80": _Choices(1024, 512, 4, 1024, 8, 16),
    "sm_90": _Choices(1024, 512, 4, 1024, 8, 16),
    "sm_100": _Choices(1024, 512, 4, 1024, 8, 16),
    "gfx942": _Choices(1024, 512, 4, 1024, 8, 8),
    "cpu": _Choices(4096, 4096, 1, 256, 8, 1),
    INTERPRETER: _Choices(128, 16, 1, 128, 256, 1),
}

_FORCE = tl.constexpr(2)

# Bits of a word. Those of the kinds of rules follow one another; what is below counts the times that a token was
# generated.
_IN_PROMPT = tl.constexpr(1 << 26)
_IS_BIASED = tl.constexpr(1 << 27)
_IS_BANNED = tl.constexpr(1 << 28)
_IS_FORCED = tl.constexpr(1 << 29)
_IS_SUPPRESSED = tl.constexpr(1 << 30)

LARGEST = tl.constexpr(3.4028234663852886e38)
INFINITY = tl.constexpr(float("inf"))
# Below the key of every finite score.
NO_KEY = tl.constexpr(-(2**31))
_LARGEST_INT = tl.constexpr(2**31 - 1)
MASS_UNIT = tl.constexpr(2.0**40)

# Ranks, and what of them a search adds up.
_SCORE = tl.constexpr(0)
_TYPICALITY = tl.constexpr(1)
_COUNT = tl.constexpr(0)
_MASS = tl.constexpr(1)

_TOP_H_TOKENS = tl.constexpr(100)
_NUM_BEST = tl.constexpr(128)


@kernel_op("process_triton")
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
    """See the reference. The last dimension of every argument is contiguous."""
    size, vocab_size = logits.shape
    choices = _CHOICES[target_of(logits.device)]
    scores = torch.empty(size, vocab_size, dtype=torch.float32, device=logits.device)
    words = torch.zeros(size, vocab_size, dtype=torch.int32, device=logits.device)
    has_forced = torch.empty(size, dtype=torch.int32, device=logits.device)
    shared = (
        rows,
        positions,
        token_table,
        token_table.stride(0),
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        rules,
        rules.stride(0),
        rule_prefixes,
        rule_prefixes.stride(0),
        words,
        has_forced,
        vocab_size,
    )
    launch(
        _gather,
        (size, 1 + ceil_div(token_table.shape[1], choices.piece)),
        *shared,
        prompt_lengths,
        no_repeat_ngram_size,
        num_rules,
        PIECE=choices.piece,
        MAX_RULES=power_of_two(rules.shape[1]),
        num_warps=choices.num_warps,
    )
    block = min(choices.block, power_of_two(vocab_size))
    launch(
        _process,
        (size, ceil_div(vocab_size, block)),
        *shared,
        logits,
        logits.stride(0),
        num_biases,
        has_token_mask,
        token_masks,
        token_masks.stride(0),
        min_positions,
        eos_ids,
        eos_ids.stride(0),
        eos_ids.shape[1],
        decay_starts,
        decay_rates,
        remove_invalid,
        scores,
        BLOCK=block,
        num_warps=choices.num_warps,
        enable_fp_fusion=False,
    )
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


@triton.jit
def _gather(
    rows,
    positions,
    token_table,
    table_stride: tl.int64,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
    rules,
    rules_stride: tl.int64,
    rule_prefixes,
    prefixes_stride: tl.int64,
    words,
    has_forced,
    vocab_size,
    prompt_lengths,
    no_repeat_ngram_size,
    num_rules,
    PIECE: tl.constexpr,
    MAX_RULES: tl.constexpr,
):
    sample_index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + sample_index).to(tl.int64)
    length = tl.load(positions + sample_index)
    history = token_table + row * table_stride
    row_words = words + sample_index * vocab_size
    if tl.program_id(1) == 0:
        prefixes = rule_prefixes + row * prefixes_stride
        number = tl.load(num_rules + row)
        is_forced = _mark_rules(history, length, rules + row * rules_stride, prefixes, number, row_words, MAX_RULES)
        tl.store(has_forced + sample_index, is_forced)
    else:
        first = (tl.program_id(1) - 1) * PIECE
        size = tl.load(no_repeat_ngram_size + row)
        has_penalty = tl.load(repetition_penalty + row) != 1
        has_penalty = has_penalty | (tl.load(presence_penalty + row) != 0) | (tl.load(frequency_penalty + row) != 0)
        places = first + tl.arange(0, PIECE)
        if (first < length) & has_penalty:
            tokens = tl.load(history + places, mask=places < length, other=vocab_size)
            is_known = tokens < vocab_size
            is_output = places >= tl.load(prompt_lengths + row)
            tl.atomic_add(row_words + tokens, 1, mask=is_known & is_output, sem="relaxed")
            tl.atomic_or(row_words + tokens, _IN_PROMPT, mask=is_known & ~is_output, sem="relaxed")
        if (first < length) & (size > 0) & (size <= length):
            would_repeat = places + size <= length
            for i in range(size - 1):
                end = tl.load(history + length - size + 1 + i)
                would_repeat = would_repeat & (tl.load(history + places + i, mask=would_repeat, other=-1) == end)
            tokens = tl.load(history + places + size - 1, mask=would_repeat, other=vocab_size)
            tl.atomic_or(row_words + tokens, _IS_BANNED, mask=tokens < vocab_size, sem="relaxed")


@triton.jit
def _mark_rules(history, length, rules, prefixes, number, words, MAX_RULES: tl.constexpr):
    """Sets the bits of the rules that hold, and returns whether one of these forces a token."""
    places = tl.arange(0, MAX_RULES)
    is_rule = places < number
    tokens = tl.load(rules + places * 4, mask=is_rule, other=0)
    kinds_and_lengths = tl.load(rules + places * 4 + 1, mask=is_rule, other=0)
    positions = tl.load(rules + places * 4 + 2, mask=is_rule, other=-1)
    kinds = kinds_and_lengths & 3
    sizes = kinds_and_lengths >> 2
    starts = tl.cumsum(sizes, 0) - sizes
    holds = is_rule & ((positions == -1) | (positions == length)) & (sizes <= length)
    for i in range(tl.max(sizes)):
        is_inside = holds & (i < sizes)
        wanted = tl.load(prefixes + starts + i, mask=is_inside, other=0)
        found = tl.load(history + length - sizes + i, mask=is_inside, other=0)
        holds = holds & (wanted == found)
    bits = tl.full((MAX_RULES,), _IS_BIASED, tl.int32) << kinds
    tl.atomic_or(words + tokens, bits, mask=holds, sem="relaxed")
    return tl.max((holds & (kinds == _FORCE)).to(tl.int32))


@triton.jit
def _ends_with(history, length, prefix, prefix_length):
    """Whether the last tokens of a history are those of a prefix."""
    is_end = prefix_length <= length
    if is_end:
        for i in range(prefix_length):
            is_end = is_end & (tl.load(prefix + i) == tl.load(history + length - prefix_length + i))
    return is_end


@triton.jit
def _process(
    rows,
    positions,
    token_table,
    table_stride: tl.int64,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
    rules,
    rules_stride: tl.int64,
    rule_prefixes,
    prefixes_stride: tl.int64,
    words,
    has_forced,
    vocab_size,
    logits,
    logits_stride: tl.int64,
    num_biases,
    has_token_mask,
    token_masks,
    masks_stride: tl.int64,
    min_positions,
    eos_ids,
    eos_stride,
    num_eos,
    decay_starts,
    decay_rates,
    remove_invalid,
    scores,
    BLOCK: tl.constexpr,
):
    sample_index = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.load(rows + sample_index).to(tl.int64)
    length = tl.load(positions + sample_index)
    history = token_table + row * table_stride
    ids = block * BLOCK + tl.arange(0, BLOCK)
    is_token = ids < vocab_size
    x = tl.load(logits + sample_index * logits_stride + ids, mask=is_token, other=0).to(tl.float32)
    word = tl.load(words + sample_index * vocab_size + ids, mask=is_token, other=0)

    rule = rules + row * rules_stride
    prefix = rule_prefixes + row * prefixes_stride
    for _ in range(tl.load(num_biases + row)):
        token = tl.load(rule)
        size = tl.load(rule + 1) >> 2
        position = tl.load(rule + 2)
        is_here = (token // BLOCK == block) & ((position == -1) | (position == length))
        if is_here:
            is_here = _ends_with(history, length, prefix, size)
        if is_here:
            x = tl.where(ids == token, x + tl.load(rule + 3).to(tl.float32, bitcast=True), x)
        rule += 4
        prefix += size

    repetition = tl.load(repetition_penalty + row)
    presence = tl.load(presence_penalty + row)
    frequency = tl.load(frequency_penalty + row)
    count = word & (_IN_PROMPT - 1)
    repeated = tl.where(x < 0, x * repetition, tl.div_rn(x, repetition))
    x = tl.where((word & (_IS_BIASED - 1)) != 0, repeated, x)
    x -= count.to(tl.float32) * frequency + tl.where(count > 0, presence, 0.0)
    x = tl.where((word & _IS_BANNED) != 0, -INFINITY, x)
    if tl.load(has_token_mask + row) != 0:
        mask = tl.load(token_masks + row * masks_stride + (ids >> 5), mask=is_token, other=0)
        x = tl.where(((mask >> (ids & 31)) & 1) != 0, x, -INFINITY)
    if length < tl.load(min_positions + row):
        for i in range(num_eos):
            x = tl.where(ids == tl.load(eos_ids + row * eos_stride + i), -INFINITY, x)
    if tl.load(has_forced + sample_index) != 0:
        x = tl.where((word & _IS_FORCED) != 0, 0.0, -INFINITY)
    if tl.load(remove_invalid + row) != 0:
        x = tl.where(x == x, tl.minimum(tl.maximum(x, -LARGEST), LARGEST), 0.0)
    distance = length - tl.load(decay_starts + row)
    if distance > 0:
        growth = tl.exp2(tl.load(decay_rates + row) * distance.to(tl.float32)) - 1
        for i in range(num_eos):
            is_eos = (ids == tl.load(eos_ids + row * eos_stride + i)) & (tl.abs(x) <= LARGEST)
            x = tl.where(is_eos, tl.minimum(x + tl.abs(x) * growth, LARGEST), x)
    x = tl.where((word & _IS_SUPPRESSED) != 0, -INFINITY, x)
    tl.store(scores + sample_index * vocab_size + ids, x, mask=is_token)


@kernel_op("truncate_triton", mutates_args=("scores",))
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
    """See the reference. The last dimension of every argument is contiguous."""
    size, vocab_size = scores.shape
    choices = _CHOICES[target_of(scores.device)]
    best = torch.empty(size, _NUM_BEST.value, dtype=torch.int64, device=scores.device)
    launch(
        _truncate,
        (size,),
        scores,
        scores.stride(0),
        rows,
        temperature,
        is_truncated,
        top_h,
        top_k,
        top_p,
        min_p,
        typical_p,
        epsilon_cutoff,
        eta_cutoff,
        best,
        vocab_size,
        TILE=choices.tile,
        PIVOTS=choices.pivots,
        num_warps=choices.num_truncate_warps,
        enable_fp_fusion=False,
    )


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


@triton.jit
def to_scores(x, temperature):
    """Finite logits stay finite at any temperature. Zeros lose their sign, because equal scores need equal keys."""
    scores = tl.minimum(tl.maximum(tl.div_rn(x, temperature), -LARGEST), LARGEST)
    scores = tl.where(scores == 0, 0.0, scores)
    return tl.where((x == INFINITY) | (x == -INFINITY), x, scores)


@triton.jit
def to_keys(scores):
    """Integers in the order of the scores."""
    return flip(scores.to(tl.int32, bitcast=True))


@triton.jit
def flip(bits):
    """Bits of floats as integers of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def pack(high, low):
    """Two int32, the second not negative, in one int64 with the order of pairs."""
    return (high.to(tl.int64) << 32) | low.to(tl.int64)


@triton.jit
def _load_scores(start, source, TILE: tl.constexpr):
    """Token ids and scores of a tile of a row; -inf where there is none, inf for NaN. `_truncate` makes `source`."""
    scores, vocab_size, heat = source
    ids = start + tl.arange(0, TILE)
    x = tl.load(scores + ids, mask=ids < vocab_size, other=-INFINITY)
    return ids, to_scores(tl.where(x == x, x, INFINITY), heat)


@triton.jit
def _ranks(x, peak, shift, RANK: tl.constexpr):
    """Integers that grow with the score, or fall with the distance of its surprise from the expected one.

    Args:
        x: Scores.
        peak: The largest.
        shift: Surprise of the peak, less the expected one; only for `_TYPICALITY`.
        RANK: Which of the two.
    """
    ranks = -tl.abs((peak - x) + shift).to(tl.int32, bitcast=True) if RANK == _TYPICALITY else to_keys(x)
    return tl.where(x > -INFINITY, ranks, NO_KEY)


@triton.jit
def _search(
    high,
    goal,
    peak,
    shift,
    source,
    RANK: tl.constexpr,
    OF: tl.constexpr,
    TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """The largest threshold below `high` from which on tokens reach a goal; below all ranks if none does."""
    vocab_size = source[1]
    low = tl.full((), NO_KEY + 1, tl.int64)
    high = tl.full((), high, tl.int64)
    steps = tl.arange(0, PIVOTS)
    while high - low > 1:
        step = (high - low + PIVOTS - 1) // PIVOTS
        pivots = (low + step * steps).to(tl.int32)
        reached = tl.full((PIVOTS, TILE), 0, tl.int64 if OF == _MASS else tl.int32)
        for start in range(0, vocab_size, TILE):
            _, x = _load_scores(start, source, TILE)
            is_above = _ranks(x, peak, shift, RANK)[None, :] >= pivots[:, None]
            if OF == _MASS:
                reached += tl.where(is_above, _masses(x, peak)[None, :], 0)
            else:
                reached += is_above.to(tl.int32)
        passed = tl.sum(((tl.sum(reached, 1) >= goal) & (steps > 0)).to(tl.int32))
        low += step * passed
        high = tl.minimum(high, low + step)
    return low.to(tl.int32)


@triton.jit
def _masses(x, peak):
    """Fixed-point masses, in units of 2^-40 of the peak's."""
    return (tl.exp(x - peak) * MASS_UNIT).to(tl.int64)


@triton.jit
def _above(threshold, peak, shift, source, RANK: tl.constexpr, TILE: tl.constexpr):
    """Count and mass of the tokens whose rank is above a threshold, and how many are on it."""
    count = tl.full((TILE,), 0, tl.int32)
    ties = tl.full((TILE,), 0, tl.int32)
    mass = tl.full((TILE,), 0, tl.int64)
    for start in range(0, source[1], TILE):
        _, x = _load_scores(start, source, TILE)
        ranks = _ranks(x, peak, shift, RANK)
        count += (ranks > threshold).to(tl.int32)
        ties += (ranks == threshold).to(tl.int32)
        mass += tl.where(ranks > threshold, _masses(x, peak), 0)
    return tl.sum(count), tl.sum(ties), tl.sum(mass)


@triton.jit
def _keep(threshold, num_removed_ties, peak, shift, source, RANK: tl.constexpr, TILE: tl.constexpr):
    """Removes what ranks below a threshold, and of what is on it the first ones."""
    # What another thread wrote is read from here on.
    tl.debug_barrier()
    num_ties = 0
    for start in range(0, source[1], TILE):
        ids, x = _load_scores(start, source, TILE)
        ranks = _ranks(x, peak, shift, RANK)
        ties = (ranks == threshold).to(tl.int32)
        goes = (ranks < threshold) | ((ties > 0) & (num_ties + tl.cumsum(ties, 0) <= num_removed_ties))
        tl.store(source[0] + ids, -INFINITY, mask=goes & (ids < source[1]))
        num_ties += tl.sum(ties)
    tl.debug_barrier()


@triton.jit
def _peak(source, TILE: tl.constexpr):
    """The largest score of a row."""
    best = tl.full((TILE,), -INFINITY, tl.float32)
    for start in range(0, source[1], TILE):
        _, x = _load_scores(start, source, TILE)
        best = tl.maximum(best, x)
    return tl.max(best)


@triton.jit
def _statistics(peak, source, TILE: tl.constexpr):
    """A row's mass in units of the peak's, and its entropy in nats."""
    mass = tl.full((TILE,), 0, tl.float32)
    moment = tl.full((TILE,), 0, tl.float32)
    for start in range(0, source[1], TILE):
        _, x = _load_scores(start, source, TILE)
        weights = tl.exp(x - peak)
        mass += weights
        moment += tl.where(weights > 0, weights * (peak - x), 0.0)
    total = tl.sum(mass)
    return total, tl.log(total) + tl.sum(moment) / total


@triton.jit
def _keep_top_h(share, peak, best, source, TILE: tl.constexpr, PIVOTS: tl.constexpr):
    end = to_keys(peak) + 1
    least = _search(end, _TOP_H_TOKENS, peak, 0.0, source, _SCORE, _COUNT, TILE, PIVOTS)
    number, _, _ = _above(least, peak, 0.0, source, _SCORE, TILE)
    # Places for the best tokens; those with the least score, of which not all may be among them, in order of id.
    num_ties = 0
    num_above = 0
    for start in range(0, source[1], TILE):
        ids, x = _load_scores(start, source, TILE)
        keys = _ranks(x, peak, 0.0, _SCORE)
        is_above = (keys > least).to(tl.int32)
        is_tie = (keys == least).to(tl.int32)
        places = tl.where(
            is_above > 0, num_above + tl.cumsum(is_above, 0) - 1, number + num_ties + tl.cumsum(is_tie, 0) - 1
        )
        is_best = (is_above + is_tie > 0) & (places < _TOP_H_TOKENS)
        tl.store(best + places, pack(keys, ids ^ _LARGEST_INT), mask=is_best)
        num_above += tl.sum(is_above)
        num_ties += tl.sum(is_tie)
    tl.debug_barrier()

    places = tl.arange(0, _NUM_BEST)
    is_best = places < tl.minimum(num_above + num_ties, _TOP_H_TOKENS)
    items = tl.load(best + places, mask=is_best, other=-(2**63))
    weights = tl.where(is_best, tl.exp(flip((items >> 32).to(tl.int32)).to(tl.float32, bitcast=True) - peak), 0.0)
    probs = weights / tl.sum(weights)
    entropies = tl.where(probs > 0, -probs * tl.log(probs), 0.0)
    reached = tl.sum(tl.where(items[None, :] >= items[:, None], entropies[None, :], 0.0), 1)
    is_kept = is_best & ((reached <= share * tl.sum(entropies)) | (items == tl.max(items)))
    last = tl.min(tl.where(is_kept, items, 2**63 - 1))
    for start in range(0, source[1], TILE):
        ids, x = _load_scores(start, source, TILE)
        goes = pack(_ranks(x, peak, 0.0, _SCORE), ids ^ _LARGEST_INT) < last
        tl.store(source[0] + ids, -INFINITY, mask=goes & (ids < source[1]))
    tl.debug_barrier()


@triton.jit
def _keep_top_p(p, peak, source, TILE: tl.constexpr, PIVOTS: tl.constexpr):
    _, _, total = _above(NO_KEY, peak, 0.0, source, _SCORE, TILE)
    # Fractions of the mass are compared in fp32, so what rounds to 1 - p may go as well.
    share = 1 - p
    next_share = (share.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    removable = ((share.to(tl.float64) + next_share.to(tl.float64)) * 0.5 * total.to(tl.float64)).to(tl.int64)
    goal = tl.maximum(total - removable, 1)
    key = _search(to_keys(peak) + 1, goal, peak, 0.0, source, _SCORE, _MASS, TILE, PIVOTS)
    _, num_ties, mass = _above(key, peak, 0.0, source, _SCORE, TILE)
    _, _, mass_with_ties = _above(key - 1, peak, 0.0, source, _SCORE, TILE)
    # Whatever is left of the removable mass goes to ties, lowest ids first; one token stays in any case.
    tie_mass = tl.maximum((mass_with_ties - mass) // tl.maximum(num_ties, 1), 1)
    rest = tl.maximum(removable - (total - mass_with_ties), 0)
    num_removed = tl.minimum(rest // tie_mass, num_ties - 1).to(tl.int32)
    _keep(key, num_removed, peak, 0.0, source, _SCORE, TILE)


@triton.jit
def _keep_typical(share, peak, source, TILE: tl.constexpr, PIVOTS: tl.constexpr):
    mass, entropy = _statistics(peak, source, TILE)
    shift = tl.log(mass) - entropy
    _, _, total = _above(NO_KEY, peak, shift, source, _TYPICALITY, TILE)
    goal = tl.maximum((share.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
    rank = _search(1, goal, peak, shift, source, _TYPICALITY, _MASS, TILE, PIVOTS)
    _keep(rank, 0, peak, shift, source, _TYPICALITY, TILE)


@triton.jit
def _keep_likely(least, peak, source, TILE: tl.constexpr):
    """Removes tokens with less than `least` of the peak's mass."""
    tl.debug_barrier()
    for start in range(0, source[1], TILE):
        ids, x = _load_scores(start, source, TILE)
        goes = (tl.exp(x - peak) < least) & (x < peak)
        tl.store(source[0] + ids, -INFINITY, mask=goes & (ids < source[1]))
    tl.debug_barrier()


@triton.jit
def _truncate(
    scores,
    scores_stride: tl.int64,
    rows,
    temperature,
    is_truncated,
    top_h,
    top_k,
    top_p,
    min_p,
    typical_p,
    epsilon_cutoff,
    eta_cutoff,
    best,
    vocab_size,
    TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    sample_index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + sample_index)
    if tl.load(is_truncated + row) != 0:
        source = (scores + sample_index * scores_stride, vocab_size, tl.load(temperature + row))
        peak = _peak(source, TILE)
        if (peak > -INFINITY) & (peak < INFINITY):
            h = tl.load(top_h + row)
            if h > 0:
                _keep_top_h(h, peak, best + sample_index * _NUM_BEST, source, TILE, PIVOTS)
            k = tl.load(top_k + row)
            if (k > 0) & (k < vocab_size):
                key = _search(to_keys(peak) + 1, k, peak, 0.0, source, _SCORE, _COUNT, TILE, PIVOTS)
                _keep(key, 0, peak, 0.0, source, _SCORE, TILE)
            p = tl.load(top_p + row)
            if p < 1:
                _keep_top_p(p, peak, source, TILE, PIVOTS)
            m = tl.load(min_p + row)
            if m > 0:
                _keep_likely(m, peak, source, TILE)
            share = tl.load(typical_p + row)
            if share < 1:
                _keep_typical(share, peak, source, TILE, PIVOTS)
                peak = _peak(source, TILE)
            epsilon = tl.load(epsilon_cutoff + row)
            if epsilon > 0:
                mass, _ = _statistics(peak, source, TILE)
                _keep_likely(epsilon * mass, peak, source, TILE)
            eta = tl.load(eta_cutoff + row)
            if eta > 0:
                mass, entropy = _statistics(peak, source, TILE)
                least = tl.minimum(eta, tl.sqrt(eta) * tl.exp(-entropy))
                _keep_likely(least * mass, peak, source, TILE)
