"""`sample` in Triton: no sort, no synchronisation with the host, grids that depend on shapes only.

Two launches serve greedy and unfiltered rows, four serve steps in which any row filters:

1. `_scan` reads each row once, in blocks. Of greedy rows it notes each block's best token, of unfiltered rows each
   block's winner of the race, of rows with filters only the peak.
2. `_count` sorts the tokens of filtered rows into bins by their distance from the row's peak, and adds up the row's
   mass where a filter asks for it. It exits at once where a row has no filter; so does the next one.
3. `_collect` reads off the bins how far down a survivor can possibly be, and packs the tokens above into a buffer.
4. `_finish` merges the blocks' results. Of filtered rows it searches the exact thresholds among the packed tokens and
   draws. Where these are too many for the buffer (large flat distributions), it searches the row itself: slower, with
   the same result.

Thresholds are exact because nothing about them is a float. Scores are compared as integers in the order of the floats
(`key`), ties are counted, and probability mass is added up in fixed point, in units of 2^-40 of the likeliest
token's. Sums of integers do not depend on their order either, so atomics leave results reproducible. A threshold is
the largest key for which the weight of all tokens from there on reaches a target; the search for it splits the range
of keys in `pivots` parts with every pass.
"""

# Inside kernels this is Triton, whose types a checker of Python gets wrong.
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeForm=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from cbtriton.kernels._jit import INTERPRETED
from cbtriton.kernels._launch import INTERPRETER, ceil_div, launch, power_of_two, target_of
from cbtriton.kernels._logprobs import token_logprobs
from cbtriton.kernels._op import kernel_op
from cbtriton.kernels._processors import (
    INFINITY,
    MASS_UNIT,
    NO_KEY,
    flip,
    pack,
    process,
    to_keys,
    to_scores,
    truncate,
)

__all__ = ["process", "sample", "token_logprobs", "truncate"]


@dataclass(frozen=True, slots=True)
class _Choices:
    """Launch choices of a target.

    Attributes:
        block: Tokens per program of `_scan` and `_collect`, and per turn of `_count`; part of the result's rounding.
        turns: Blocks per program of `_count`.
        capacity: Candidates per row that fit into the buffer.
        tile: Candidates per turn of a search.
        pivots: Parts that one pass of a search splits a range in.
        num_warps: Warps of `_scan`, `_count` and `_collect`.
        num_finish_warps: Warps of `_finish` where rows are filtered.
    """

    block: int
    turns: int
    capacity: int
    tile: int
    pivots: int
    num_warps: int
    num_finish_warps: int


# The interpreter's capacity is small, so that small tests overflow it. On sm_100 the compiler spills with larger tiles.
_CHOICES = {
    "sm_80": _Choices(2048, 4, 8192, 1024, 8, 4, 16),
    "sm_90": _Choices(2048, 4, 8192, 1024, 8, 4, 16),
    "sm_100": _Choices(2048, 4, 8192, 512, 8, 4, 16),
    "gfx942": _Choices(2048, 4, 8192, 1024, 8, 4, 8),
    "cpu": _Choices(4096, 4, 8192, 256, 8, 1, 1),
    INTERPRETER: _Choices(4096, 2, 512, 256, 256, 1, 1),
}

_TOP_K = tl.constexpr(1)
_TOP_P = tl.constexpr(2)
_MIN_P = tl.constexpr(4)
_MIN_LENGTH = tl.constexpr(8)

# Triton 3.6 pays for every 32 bins with several instructions per token. What lies further down than 20 nats shares the
# last bin.
_NUM_BINS = tl.constexpr(512)
_BINS_PER_NAT = tl.constexpr(25.0)
# Rounding of a bound must not cut off a token that the exact filters would keep.
_BOUND_SLACK = tl.constexpr(1 + 1e-3)
_LN_2 = tl.constexpr(0.6931471805599453)
_NO_ITEM = tl.constexpr(-(2**63))
_LARGEST_INT = tl.constexpr(2**31 - 1)
# Entries before a row's candidates, with one to spare, so that these are aligned.
_HEADER = tl.constexpr(4)

# What a search counts.
_COUNT = tl.constexpr(0)
_MASS = tl.constexpr(1)
_TIES = tl.constexpr(2)

# Change with every step, so compiled code must not depend on their values.
_PER_STEP = ["flags", "num_eos"]


@kernel_op("sample_fused", mutates_args=("token_table",))
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
    """Draws one token per row of `logits` and writes it into the token table; see the reference.

    The last dimension of every argument is contiguous; rows of `logits`, `token_table` and `eos_ids` may lie apart.
    """
    size, vocab_size = logits.shape
    device = logits.device
    target = target_of(device)
    choices = _CHOICES[target]
    block = min(choices.block, power_of_two(vocab_size))
    num_blocks = ceil_div(vocab_size, block)
    turns = min(choices.turns, num_blocks)
    is_filtered = not all_greedy and (use_top_k or use_top_p or use_min_p)
    flags = use_top_k * 1 + use_top_p * 2 + use_min_p * 4 + use_min_length * 8

    tokens = torch.empty(size, dtype=torch.int64, device=device)
    logprobs = torch.empty(size, dtype=torch.float32, device=device)
    outcomes = torch.empty(size, dtype=torch.int32, device=device)
    # Per row and block: peak of the scores, sum of exp(score - peak), the winner's place in the race, the winner.
    statistics = torch.empty(3, size, num_blocks, dtype=torch.float32, device=device)
    peaks, sums, finishes = statistics.unbind()
    winners = torch.empty(size, num_blocks, dtype=torch.int32, device=device)
    # Per row: mass, number of candidates, last bin of a candidate, nothing, candidates.
    num_items = _HEADER.value + choices.capacity if is_filtered else 0
    candidates = torch.empty(size, num_items, dtype=torch.int64, device=device)
    bins = torch.empty(size if is_filtered else 0, _NUM_BINS.value, dtype=torch.int32, device=device)

    row_arguments = (logits, rows, positions, temperature, top_k, top_p, min_p, min_positions, eos_ids)
    sizes = (vocab_size, logits.stride(0), eos_ids.stride(0), eos_ids.shape[1], flags)
    shared = {"BLOCK": block, "NUM_BLOCKS": num_blocks, "PADDED_BLOCKS": power_of_two(num_blocks)}
    is_nvidia = target.startswith("sm_")
    launch(
        _scan,
        (size, num_blocks),
        *row_arguments,
        *sizes,
        seeds,
        peaks,
        sums,
        finishes,
        winners,
        candidates,
        bins,
        BLOCK=block,
        NUM_BLOCKS=num_blocks,
        NUM_ITEMS=num_items,
        ALL_GREEDY=all_greedy,
        FILTERED=is_filtered,
        LOGPROBS=return_logprobs,
        NVIDIA=is_nvidia,
        num_warps=choices.num_warps,
        enable_fp_fusion=False,
    )
    if is_filtered:
        launch(
            _count,
            (size, ceil_div(num_blocks, turns)),
            *row_arguments,
            *sizes,
            peaks,
            candidates,
            bins,
            **shared,
            NUM_ITEMS=num_items,
            TURNS=turns,
            num_warps=choices.num_warps,
            enable_fp_fusion=False,
        )
        launch(
            _collect,
            (size, num_blocks),
            *row_arguments,
            *sizes,
            peaks,
            candidates,
            bins,
            **shared,
            NUM_ITEMS=num_items,
            num_warps=choices.num_warps,
            enable_fp_fusion=False,
        )
    launch(
        _finish,
        (size,),
        *row_arguments,
        *sizes,
        seeds,
        peaks,
        sums,
        finishes,
        winners,
        candidates,
        token_table,
        token_table.stride(0),
        tokens,
        logprobs,
        outcomes,
        NUM_BLOCKS=num_blocks,
        PADDED_BLOCKS=power_of_two(num_blocks),
        NUM_ITEMS=num_items,
        TILE=choices.tile,
        PIVOTS=choices.pivots,
        ALL_GREEDY=all_greedy,
        FILTERED=is_filtered,
        LOGPROBS=return_logprobs,
        NVIDIA=is_nvidia,
        num_warps=choices.num_finish_warps if is_filtered else 1,
        enable_fp_fusion=False,
    )
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


@triton.jit
def _eos_range(row, position, min_positions, eos_ids, eos_stride, num_eos, flags):
    """A row's EOS ids, and how many of them are suppressed."""
    is_too_short = (flags & _MIN_LENGTH) != 0
    if is_too_short:
        is_too_short = position < tl.load(min_positions + row)
    return eos_ids + row.to(tl.int64) * eos_stride, tl.where(is_too_short, num_eos, 0)


@triton.jit
def _load_logits(logits, ids, vocab_size, eos, num_suppressed):
    """A tile of a row in fp32; -inf beyond the row and for suppressed EOS ids, +inf for NaN."""
    x = tl.load(logits + ids, mask=ids < vocab_size, other=-INFINITY).to(tl.float32)
    for i in range(num_suppressed):
        x = tl.where(ids == tl.load(eos + i), -INFINITY, x)
    return tl.where(x == x, x, INFINITY)


@triton.jit
def _filters(row, vocab_size, top_k, top_p, min_p, flags):
    """A row's `k` (0 is off), `p` (1 is off), `m` (0 is off), and whether any of them is on."""
    k = 0
    p = 1.0
    m = 0.0
    if (flags & _TOP_K) != 0:
        k = tl.load(top_k + row)
        k = tl.where((k > 0) & (k < vocab_size), k, 0)
    if (flags & _TOP_P) != 0:
        p = tl.load(top_p + row)
    if (flags & _MIN_P) != 0:
        m = tl.load(min_p + row)
    return k, p, m, (k > 0) | (p < 1) | (m > 0)


@triton.jit
def _exponential(words, NVIDIA: tl.constexpr):
    """Exponential variates from uint32 words, precise to about 1e-6 of their value.

    Small ones win races. For them 1 - u rounds too coarsely for a logarithm, and a power series is exact enough.
    """
    u = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1 - 5.9604644775390625e-08)
    series = u * (1 / 7) + 1 / 6
    series = tl.fma(series, u, 1 / 5)
    series = tl.fma(series, u, 1 / 4)
    series = tl.fma(series, u, 1 / 3)
    series = tl.fma(series, u, 1 / 2)
    series = tl.fma(series, u, 1.0)
    logarithm = libdevice.fast_log2f(1 - u) if NVIDIA and not INTERPRETED else tl.log2(1 - u)
    return tl.where(u < 0.125, series * u, logarithm * -_LN_2)


@triton.jit(do_not_specialize=_PER_STEP)
def _scan(
    logits,
    rows,
    positions,
    temperature,
    top_k,
    top_p,
    min_p,
    min_positions,
    eos_ids,
    vocab_size,
    logits_stride: tl.int64,
    eos_stride,
    num_eos,
    flags,
    seeds,
    peaks,
    sums,
    finishes,
    winners,
    candidates,
    bins,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_ITEMS: tl.constexpr,
    ALL_GREEDY: tl.constexpr,
    FILTERED: tl.constexpr,
    LOGPROBS: tl.constexpr,
    NVIDIA: tl.constexpr,
):
    sample_index = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.load(rows + sample_index)
    position = tl.load(positions + sample_index)
    eos, num_suppressed = _eos_range(row, position, min_positions, eos_ids, eos_stride, num_eos, flags)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = _load_logits(logits + sample_index * logits_stride, ids, vocab_size, eos, num_suppressed)
    place = sample_index * NUM_BLOCKS + block
    peak = tl.max(x)
    heat = 0.0 if ALL_GREEDY else tl.load(temperature + row)
    if heat == 0:
        tl.store(peaks + place, peak)
        tl.store(winners + place, tl.min(tl.where(x == peak, ids, _LARGEST_INT)))
        if LOGPROBS:
            base = tl.where((peak > -INFINITY) & (peak < INFINITY), peak, 0.0)
            tl.store(sums + place, tl.sum(tl.exp(x - base)))
    if not ALL_GREEDY:  # noqa: SIM102 (a constant: what follows is not compiled)
        if heat != 0:
            peak = to_scores(peak, heat)
            tl.store(peaks + place, peak)
            is_filtered = False
            if FILTERED:
                _, _, _, is_filtered = _filters(row, vocab_size, top_k, top_p, min_p, flags)
            if is_filtered:
                if block == 0:
                    tl.store(bins + sample_index * _NUM_BINS + tl.arange(0, _NUM_BINS), 0)
                    tl.store(candidates + sample_index * NUM_ITEMS, 0)
                    tl.store(candidates + sample_index * NUM_ITEMS + 1, 0)
            else:
                base = tl.where((peak > -INFINITY) & (peak < INFINITY), peak, 0.0)
                weights = tl.exp(to_scores(x, heat) - base)
                groups = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
                zero = groups * 0
                w0, w1, w2, w3 = tl.philox(tl.load(seeds + row), groups, zero + position, zero, zero)
                words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK,))
                race = weights / _exponential(words, NVIDIA)
                best = tl.max(race)
                tl.store(finishes + place, best)
                tl.store(winners + place, tl.min(tl.where(race == best, ids, _LARGEST_INT)))
                if LOGPROBS:
                    tl.store(sums + place, tl.sum(weights))


@triton.jit
def _row_peak(peaks, sample_index, NUM_BLOCKS: tl.constexpr, PADDED_BLOCKS: tl.constexpr):
    """A row's best score, and whether the row is usable."""
    blocks = tl.arange(0, PADDED_BLOCKS)
    peak = tl.max(tl.load(peaks + sample_index * NUM_BLOCKS + blocks, mask=blocks < NUM_BLOCKS, other=-INFINITY))
    return peak, (peak < INFINITY) & (peak > -INFINITY)


@triton.jit
def _to_bins(scores, peak):
    """Distance from the peak in bins; never decreases with the distance."""
    return tl.minimum((peak - scores) * _BINS_PER_NAT, _NUM_BINS - 1).to(tl.int32)


@triton.jit(do_not_specialize=_PER_STEP)
def _count(
    logits,
    rows,
    positions,
    temperature,
    top_k,
    top_p,
    min_p,
    min_positions,
    eos_ids,
    vocab_size,
    logits_stride: tl.int64,
    eos_stride,
    num_eos,
    flags,
    peaks,
    candidates,
    bins,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
    NUM_ITEMS: tl.constexpr,
    TURNS: tl.constexpr,
):
    sample_index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + sample_index)
    heat = tl.load(temperature + row)
    k, p, _, is_filtered = _filters(row, vocab_size, top_k, top_p, min_p, flags)
    peak, is_usable = _row_peak(peaks, sample_index, NUM_BLOCKS, PADDED_BLOCKS)
    if (heat != 0) & is_filtered & is_usable:
        # With top-k, top-p refers to the mass of what top-k keeps.
        needs_mass = (p < 1) & (k == 0)
        position = tl.load(positions + sample_index)
        eos, num_suppressed = _eos_range(row, position, min_positions, eos_ids, eos_stride, num_eos, flags)
        counts = tl.full((_NUM_BINS,), 0, tl.int32)
        mass = tl.full((), 0, tl.int64)
        for turn in range(TURNS):
            ids = (tl.program_id(1) * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
            x = _load_logits(logits + sample_index * logits_stride, ids, vocab_size, eos, num_suppressed)
            scores = to_scores(x, heat)
            counts += tl.histogram(_to_bins(scores, peak), _NUM_BINS, mask=scores > -INFINITY)
            if needs_mass:
                mass += tl.sum((tl.exp(scores - peak) * MASS_UNIT).to(tl.int64))
        places = bins + sample_index * _NUM_BINS + tl.arange(0, _NUM_BINS)
        tl.atomic_add(places, counts, mask=counts > 0, sem="relaxed")
        if needs_mass:
            tl.atomic_add(candidates + sample_index * NUM_ITEMS, mass, sem="relaxed")


@triton.jit
def _last_bin(counts, total, k, p, m):
    """The last bin with a token that filters may keep, judged by the bins' counts and edges.

    Top-k: the bin of the k-th token. Top-p: the last one that, with all below, may have more than the mass that can
    go. Rows with top-k need all that it keeps, because its mass is what top-p refers to.
    """
    places = tl.arange(0, _NUM_BINS)
    last = _NUM_BINS - 1
    if k > 0:
        last = tl.minimum(tl.sum((tl.cumsum(counts, 0) < k).to(tl.int32)), _NUM_BINS - 1)
    else:
        if p < 1:
            bounds = counts.to(tl.float32) * tl.exp(places.to(tl.float32) * (-1 / _BINS_PER_NAT)) * _BOUND_SLACK
            removable = total.to(tl.float32) / MASS_UNIT * (1 - p)
            may_stay = tl.cumsum(bounds, 0, reverse=True) > removable
            last = tl.maximum(tl.sum(may_stay.to(tl.int32)) - 1, 0)
        if m > 0:
            distance = tl.minimum(-tl.log(m) * _BINS_PER_NAT * _BOUND_SLACK, _NUM_BINS - 2.0)
            last = tl.minimum(last, tl.maximum(distance, 0.0).to(tl.int32) + 1)
    return last


@triton.jit(do_not_specialize=_PER_STEP)
def _collect(
    logits,
    rows,
    positions,
    temperature,
    top_k,
    top_p,
    min_p,
    min_positions,
    eos_ids,
    vocab_size,
    logits_stride: tl.int64,
    eos_stride,
    num_eos,
    flags,
    peaks,
    candidates,
    bins,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
    NUM_ITEMS: tl.constexpr,
):
    sample_index = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.load(rows + sample_index)
    heat = tl.load(temperature + row)
    k, p, m, is_filtered = _filters(row, vocab_size, top_k, top_p, min_p, flags)
    peak, is_usable = _row_peak(peaks, sample_index, NUM_BLOCKS, PADDED_BLOCKS)
    if (heat != 0) & is_filtered & is_usable:
        position = tl.load(positions + sample_index)
        eos, num_suppressed = _eos_range(row, position, min_positions, eos_ids, eos_stride, num_eos, flags)
        items = candidates + sample_index * NUM_ITEMS
        counts = tl.load(bins + sample_index * _NUM_BINS + tl.arange(0, _NUM_BINS))
        last = _last_bin(counts, tl.load(items), k, p, m)
        if block == 0:
            tl.store(items + 2, last.to(tl.int64))
        ids = block * BLOCK + tl.arange(0, BLOCK)
        x = _load_logits(logits + sample_index * logits_stride, ids, vocab_size, eos, num_suppressed)
        scores = to_scores(x, heat)
        is_candidate = (scores > -INFINITY) & (_to_bins(scores, peak) <= last)
        number = tl.sum(is_candidate.to(tl.int32))
        if number > 0:
            ranks = tl.cumsum(is_candidate.to(tl.int32), 0)
            places = tl.atomic_add(items + 1, number.to(tl.int64), sem="relaxed") + ranks + (_HEADER - 1)
            tl.store(items + places, pack(to_keys(scores), ids), mask=is_candidate & (places < NUM_ITEMS))


@triton.jit
def _load_items(start, source, TILE: tl.constexpr):
    """Keys, token ids and weights of a tile of a row's candidates; `NO_KEY` and weight 0 where there is none.

    They come from the buffer, or from the row itself where the buffer was too small. `source` is what `_finish` made.
    A weight is `exp(score - peak)`, the same number in all kernels.
    """
    is_packed, number, items, logits, vocab_size, eos, num_suppressed, heat, peak, last = source
    places = start + tl.arange(0, TILE)
    if is_packed:
        packed = tl.load(items + places, mask=places < number, other=_NO_ITEM)
        keys = (packed >> 32).to(tl.int32)
        ids = packed.to(tl.int32)
    else:
        scores = to_scores(_load_logits(logits, places, vocab_size, eos, num_suppressed), heat)
        is_candidate = (scores > -INFINITY) & (_to_bins(scores, peak) <= last)
        keys = tl.where(is_candidate, to_keys(scores), NO_KEY)
        ids = places
    scores = flip(keys).to(tl.float32, bitcast=True)
    return keys, ids, tl.where(keys == NO_KEY, 0.0, tl.exp(scores - peak))


@triton.jit
def _search(low, high, goal, tie, source, KIND: tl.constexpr, TILE: tl.constexpr, PIVOTS: tl.constexpr):
    """The largest threshold in `low … high - 1` from which on candidates reach a goal; `low` if none does.

    `_COUNT` compares keys and counts, `_MASS` compares keys and adds up mass, `_TIES` compares ids of the candidates
    whose key is `tie`, and counts.
    """
    number = source[1]
    low = tl.full((), low, tl.int64)
    high = tl.full((), high, tl.int64)
    steps = tl.arange(0, PIVOTS)
    while high - low > 1:
        step = (high - low + PIVOTS - 1) // PIVOTS
        pivots = (low + step * steps).to(tl.int32)
        reached = tl.full((PIVOTS, TILE), 0, tl.int64 if KIND == _MASS else tl.int32)
        for start in range(0, number, TILE):
            keys, ids, weights = _load_items(start, source, TILE)
            if KIND == _TIES:
                keys = tl.where(keys == tie, ids, NO_KEY)
            is_above = keys[None, :] >= pivots[:, None]
            if KIND == _MASS:
                reached += tl.where(is_above, (weights * MASS_UNIT).to(tl.int64)[None, :], 0)
            else:
                reached += is_above.to(tl.int32)
        passed = tl.sum(((tl.sum(reached, 1) >= goal) & (steps > 0)).to(tl.int32))
        low += step * passed
        high = tl.minimum(high, low + step)
    return low.to(tl.int32)


@triton.jit
def _top_p_threshold(total, end, p, source, TILE: tl.constexpr, PIVOTS: tl.constexpr):
    """Key of the least likely tokens that top-p keeps any of, and the lowest id that it keeps among these.

    Args:
        total: Mass of the tokens that take part, which are the row's likeliest.
        end: Above the key of every score.
        p: Below 1.
        source: See `_load_items`.
        TILE: Candidates per turn.
        PIVOTS: See `_search`.
    """
    # Fractions of the mass are compared in fp32, so what rounds to 1 - p may go as well.
    share = 1 - p
    next_share = (share.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    removable = ((share.to(tl.float64) + next_share.to(tl.float64)) * 0.5 * total.to(tl.float64)).to(tl.int64)
    key = _search(NO_KEY + 1, end, tl.maximum(total - removable, 1), 0, source, _MASS, TILE, PIVOTS)

    from_key = tl.full((TILE,), 0, tl.int64)
    ties = tl.full((TILE,), 0, tl.int32)
    tie_mass = tl.full((TILE,), 1, tl.int64)
    for start in range(0, source[1], TILE):
        keys, _, weights = _load_items(start, source, TILE)
        masses = (weights * MASS_UNIT).to(tl.int64)
        from_key += tl.where(keys >= key, masses, 0)
        ties += (keys == key).to(tl.int32)
        tie_mass = tl.maximum(tie_mass, tl.where(keys == key, masses, 0))
    num_ties = tl.sum(ties)
    # Whatever is left of the removable mass goes to ties, lowest ids first; one token stays in any case.
    rest = removable - (total - tl.sum(from_key))
    num_removed = tl.minimum(tl.maximum(rest, 0) // tl.max(tie_mass), num_ties - 1)
    first_id = 0
    if num_removed > 0:
        first_id = _search(0, source[4], num_ties - num_removed, key, source, _TIES, TILE, PIVOTS)
    return key, first_id


@triton.jit
def _draw_filtered(
    total, k, p, m, seed, position, source, TILE: tl.constexpr, PIVOTS: tl.constexpr, NVIDIA: tl.constexpr
):
    """The winner among the tokens that pass the filters, and their mass.

    Args:
        total: Mass of the whole row.
        k: See `_filters`; so are `p` and `m`.
        p: See `k`.
        m: See `k`.
        seed: The row's seed.
        position: Where the token goes.
        source: See `_load_items`.
        TILE: Candidates per turn.
        PIVOTS: See `_search`.
        NVIDIA: See `_exponential`.
    """
    number = source[1]
    end = to_keys(source[8]) + 1
    least = NO_KEY + 1
    first_id = 0
    if k > 0:
        least = _search(NO_KEY + 1, end, k, 0, source, _COUNT, TILE, PIVOTS)
        if p < 1:
            kept = tl.full((TILE,), 0, tl.int64)
            for start in range(0, number, TILE):
                keys, _, weights = _load_items(start, source, TILE)
                kept += tl.where(keys >= least, (weights * MASS_UNIT).to(tl.int64), 0)
            total = tl.sum(kept)
    if p < 1:
        least, first_id = _top_p_threshold(total, end, p, source, TILE, PIVOTS)

    best = tl.full((TILE,), 0, tl.int64)
    kept = tl.full((TILE,), 0, tl.int64)
    for start in range(0, number, TILE):
        keys, ids, weights = _load_items(start, source, TILE)
        is_kept = ((keys > least) | ((keys == least) & (ids >= first_id))) & (weights >= tl.minimum(m, 1.0))
        kept += tl.where(is_kept, (weights * MASS_UNIT).to(tl.int64), 0)
        groups = ids // 4
        zero = groups * 0
        w0, w1, w2, w3 = tl.philox(seed, groups, zero + position, zero, zero)
        lane = ids % 4
        words = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
        race = tl.where(is_kept, weights / _exponential(words, NVIDIA), 0.0)
        # Positive floats are in the order of their bits. Of equal ones the lowest id wins.
        best = tl.maximum(best, pack(race.to(tl.int32, bitcast=True), ids ^ _LARGEST_INT))
    return tl.max(best).to(tl.int32) ^ _LARGEST_INT, tl.sum(kept)


@triton.jit(do_not_specialize=_PER_STEP)
def _finish(
    logits,
    rows,
    positions,
    temperature,
    top_k,
    top_p,
    min_p,
    min_positions,
    eos_ids,
    vocab_size,
    logits_stride: tl.int64,
    eos_stride,
    num_eos,
    flags,
    seeds,
    peaks,
    sums,
    finishes,
    winners,
    candidates,
    token_table,
    table_stride: tl.int64,
    tokens,
    logprobs,
    outcomes,
    NUM_BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
    NUM_ITEMS: tl.constexpr,
    TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
    ALL_GREEDY: tl.constexpr,
    FILTERED: tl.constexpr,
    LOGPROBS: tl.constexpr,
    NVIDIA: tl.constexpr,
):
    sample_index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + sample_index)
    position = tl.load(positions + sample_index)
    row_logits = logits + sample_index * logits_stride
    blocks = tl.arange(0, PADDED_BLOCKS)
    is_block = blocks < NUM_BLOCKS
    places = sample_index * NUM_BLOCKS + blocks
    peak, is_usable = _row_peak(peaks, sample_index, NUM_BLOCKS, PADDED_BLOCKS)
    token = 0
    logprob = 0.0
    if is_usable:
        heat = 0.0
        is_filtered = False
        if not ALL_GREEDY:
            heat = tl.load(temperature + row)
            if FILTERED:
                k, p, m, is_filtered = _filters(row, vocab_size, top_k, top_p, min_p, flags)
                is_filtered = is_filtered & (heat != 0)
                if is_filtered:
                    items = candidates + sample_index * NUM_ITEMS
                    number = tl.load(items + 1)
                    is_packed = number <= NUM_ITEMS - _HEADER
                    eos, num_suppressed = _eos_range(row, position, min_positions, eos_ids, eos_stride, num_eos, flags)
                    source = (
                        is_packed,
                        tl.where(is_packed, number.to(tl.int32), vocab_size),
                        items + _HEADER,
                        row_logits,
                        vocab_size,
                        eos,
                        num_suppressed,
                        heat,
                        peak,
                        tl.load(items + 2).to(tl.int32),
                    )
                    token, kept = _draw_filtered(
                        tl.load(items), k, p, m, tl.load(seeds + row), position, source, TILE, PIVOTS, NVIDIA
                    )
                    if LOGPROBS:
                        logprob = -tl.log(kept.to(tl.float32) / MASS_UNIT)
        if not is_filtered:
            block_peaks = tl.load(peaks + places, mask=is_block, other=-INFINITY)
            block_winners = tl.load(winners + places, mask=is_block, other=_LARGEST_INT)
            scales = tl.exp(block_peaks - peak)
            if heat == 0:
                token = tl.min(tl.where(block_peaks == peak, block_winners, _LARGEST_INT))
            else:
                race = tl.load(finishes + places, mask=is_block, other=0.0) * scales
                token = tl.min(tl.where(race == tl.max(race), block_winners, _LARGEST_INT))
            if LOGPROBS:
                logprob = -tl.log(tl.sum(tl.load(sums + places, mask=is_block, other=0.0) * scales))
        if LOGPROBS:
            x = tl.load(row_logits + token).to(tl.float32)
            logprob += to_scores(x, tl.where(heat == 0, 1.0, heat)) - peak
    tl.store(tokens + sample_index, token.to(tl.int64))
    tl.store(logprobs + sample_index, logprob)
    tl.store(outcomes + sample_index, tl.where(is_usable, 0, tl.where(peak == -INFINITY, 1, 2)))
    tl.store(token_table + row.to(tl.int64) * table_stride + position, token)
