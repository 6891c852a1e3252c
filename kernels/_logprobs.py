"""Log-probabilities in Triton, which modules of the slot `sample` share; see `_logprobs_reference` for what they are.

`_scan` reads a row once, in blocks, and leaves each block's peak, its sum of exponentials and its likeliest tokens;
`_merge` makes a row's of them. A token is one integer in the order of scores, and of ids that fall: the next likeliest
one is the largest that is smaller than the last.
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
from cbtriton.kernels._logprobs_reference import fake_token_logprobs
from cbtriton.kernels._op import kernel_op
from cbtriton.kernels._processors import INFINITY, flip, pack, to_keys, to_scores


@dataclass(frozen=True, slots=True)
class _Choices:
    """Launch choices of a target.

    Attributes:
        block: Scores per program of `_scan`.
        tile: Blocks or their tokens per turn of `_merge`.
        num_warps: Warps of both.
    """

    block: int
    tile: int
    num_warps: int


# The interpreter's are small, so that small tests have several blocks and turns.
_CHOICES = {
    "sm_80": _Choices(1024, 1024, 4),
    "sm_90": _Choices(1024, 1024, 4),
    "sm_100": _Choices(1024, 1024, 4),
    "gfx942": _Choices(1024, 1024, 4),
    "cpu": _Choices(1024, 1024, 1),
    INTERPRETER: _Choices(128, 16, 1),
}
_NO_ITEM = tl.constexpr(-(2**63))
_LARGEST_INT = tl.constexpr(2**31 - 1)


@kernel_op("token_logprobs_triton")
def token_logprobs(
    logits: Tensor, token_ids: Tensor, temperature: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See the reference. The last dimension of every argument is contiguous; rows of `logits` may lie apart."""
    size, vocab_size = logits.shape
    device = logits.device
    choices = _CHOICES[target_of(device)]
    block = min(choices.block, power_of_two(vocab_size))
    num_blocks = ceil_div(vocab_size, block)
    # A block of the last few tokens may have fewer than are wanted.
    num_per_block = min(num_top, block)
    peaks, sums = torch.empty(2, size, num_blocks, dtype=torch.float32, device=device).unbind()
    items = torch.empty(size, num_blocks, num_per_block, dtype=torch.int64, device=device)
    results = torch.empty(size, dtype=torch.float32, device=device)
    top_ids = torch.empty(size, num_top, dtype=torch.int64, device=device)
    top_logprobs = torch.empty(size, num_top, dtype=torch.float32, device=device)
    launch(
        _scan,
        (size, num_blocks),
        logits,
        logits.stride(0),
        vocab_size,
        temperature,
        num_per_block,
        peaks,
        sums,
        items,
        BLOCK=block,
        num_warps=choices.num_warps,
        enable_fp_fusion=False,
    )
    launch(
        _merge,
        (size,),
        logits,
        logits.stride(0),
        token_ids,
        temperature,
        num_blocks,
        num_per_block,
        num_top,
        peaks,
        sums,
        items,
        results,
        top_ids,
        top_logprobs,
        TILE=choices.tile,
        num_warps=choices.num_warps,
        enable_fp_fusion=False,
    )
    return results, top_ids, top_logprobs


@token_logprobs.register_fake
def _(logits: Tensor, token_ids: Tensor, temperature: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    return fake_token_logprobs(logits, num_top)


@triton.jit
def _heat(temperature, sample_index):
    heat = tl.load(temperature + sample_index)
    return tl.where(heat == 0, 1.0, heat)


@triton.jit(do_not_specialize=["num_per_block"])
def _scan(
    logits,
    logits_stride: tl.int64,
    vocab_size,
    temperature,
    num_per_block,
    peaks,
    sums,
    items,
    BLOCK: tl.constexpr,
):
    sample_index = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + sample_index * logits_stride + ids, mask=ids < vocab_size, other=-INFINITY).to(tl.float32)
    scores = to_scores(x, _heat(temperature, sample_index))
    place = sample_index * tl.num_programs(1) + block
    peak = tl.max(scores)
    tl.store(peaks + place, peak)
    tl.store(sums + place, tl.sum(tl.exp(scores - tl.where(peak > -INFINITY, peak, 0.0))))
    packed = tl.where(ids < vocab_size, pack(to_keys(scores), ids ^ _LARGEST_INT), _NO_ITEM)
    for i in range(num_per_block):
        best = tl.max(packed)
        tl.store(items + place * num_per_block + i, best)
        packed = tl.where(packed == best, _NO_ITEM, packed)


@triton.jit(do_not_specialize=["num_blocks", "num_per_block", "num_top"])
def _merge(
    logits,
    logits_stride: tl.int64,
    token_ids,
    temperature,
    num_blocks,
    num_per_block,
    num_top,
    peaks,
    sums,
    items,
    results,
    top_ids,
    top_logprobs,
    TILE: tl.constexpr,
):
    sample_index = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, TILE)
    peak = -INFINITY
    for start in range(0, num_blocks, TILE):
        is_block = start + places < num_blocks
        block_peaks = tl.load(peaks + sample_index * num_blocks + start + places, mask=is_block, other=-INFINITY)
        peak = tl.maximum(peak, tl.max(block_peaks))
    total = 0.0
    for start in range(0, num_blocks, TILE):
        is_block = start + places < num_blocks
        block_peaks = tl.load(peaks + sample_index * num_blocks + start + places, mask=is_block, other=-INFINITY)
        block_sums = tl.load(sums + sample_index * num_blocks + start + places, mask=is_block, other=0.0)
        total += tl.sum(block_sums * tl.exp(block_peaks - peak))
    log_total = tl.log(total)
    token = tl.load(token_ids + sample_index)
    x = tl.load(logits + sample_index * logits_stride + token).to(tl.float32)
    tl.store(results + sample_index, to_scores(x, _heat(temperature, sample_index)) - peak - log_total)

    number = num_blocks * num_per_block
    last = tl.full((), 2**63 - 1, tl.int64)
    for i in range(num_top):
        best = tl.full((TILE,), _NO_ITEM, tl.int64)
        for start in range(0, number, TILE):
            is_item = start + places < number
            packed = tl.load(items + sample_index * number + start + places, mask=is_item, other=_NO_ITEM)
            best = tl.maximum(best, tl.where(packed < last, packed, _NO_ITEM))
        last = tl.max(best)
        score = flip((last >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
        tl.store(top_ids + sample_index * num_top + i, (last.to(tl.int32) ^ _LARGEST_INT).to(tl.int64))
        tl.store(top_logprobs + sample_index * num_top + i, score - peak - log_total)
