"""What the Triton attention kernels share: tiles of the paged cache, scores, and the online softmax.

A kernel holds a block of query rows and walks over its keys one tile at a time, keeping for each row the running
maximum `peak` of its scores (in units of log2), the running sum `total` of `2^(score - peak)`, and the weighted sum of
values
(Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022, "FlashAttention").

Bits that a row ends with depend on its own keys only: tiles begin at multiples of the tile size from position 0, a
tile that a row sees nothing of leaves all three as they are, and the same arithmetic runs whether a tile is
masked or not (scores are masked before they are scaled, and the scaling is an explicit fused multiply-add, so that no
compiler contracts one and not the other).

Head sizes are split in two powers of two, `D = D0 + D1`, each a product of its own: padding 80 to 128 would waste 37%
of the multiplications. `D1` is 0 for powers of two, and masked where it is not exact.
"""

# Inside kernels this is Triton, whose types a checker of Python gets wrong.
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from cbtriton.kernels._jit import dot, dot_add, narrow
from cbtriton.kernels._launch import CPU, power_of_two

# Sides of a matrix product are at least this long on every GPU.
_MIN_DOT = 16
LOG2_E = tl.constexpr(1.4426950408889634)


def min_dot(target: str) -> int:
    """The shortest side of a matrix product: on CPUs there are no matrix instructions to fill."""
    return 1 if target == CPU else _MIN_DOT


def split_head_dim(dim: int, least: int) -> tuple[int, int]:
    """Two powers of two, both at least `least` or the second 0, whose sum is `dim` or the least above it."""
    first = max(least, 1 << dim.bit_length() - 1)
    rest = dim - first
    return first, 0 if rest <= 0 else max(least, power_of_two(rest))


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """Which code a layer needs.

    Attributes:
        has_window: Whether a query does not see all keys in front of it. A chunk is a window that stands still: kernels
            get its size in place of the window's.
        is_chunk: Whether it is one.
        has_softcap: Whether scores are capped.
        has_alibi: Whether heads have slopes.
    """

    has_window: bool
    is_chunk: bool
    has_softcap: bool
    has_alibi: bool

    @classmethod
    def of(cls, window: int, chunk: int, softcap: float, alibi_slopes: Tensor | None) -> LayerOptions:
        """Those of a call.

        Raises:
            ValueError: There are a window and a chunk.
        """
        if window and chunk:
            raise ValueError(f"a layer has a window or a chunk, got a window of {window} and chunks of {chunk}")
        return cls(window > 0 or chunk > 0, chunk > 0, softcap != 0.0, alibi_slopes is not None)


def layer_constants(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, layer: LayerOptions, target: str
) -> Mapping[str, Any]:
    """The constants that every attention kernel takes: `query [_, Hq, Dk]`, caches `[N, P, Hkv, D]`."""
    return constants_of_shapes(query.shape[1], *key_cache.shape[1:], value_cache.shape[3], layer, min_dot(target))


@cache
def constants_of_shapes(
    num_heads: int,
    page_size: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    layer: LayerOptions,
    least: int,
) -> Mapping[str, Any]:
    """The same from plain numbers; `least` is the shortest side of a product."""
    (d0, d1), (v0, v1) = split_head_dim(key_dim, least), split_head_dim(value_dim, least)
    return {
        "KV_HEADS": kv_heads,
        "GROUP": num_heads // kv_heads,
        "PAGE": page_size,
        "KEY_DIM": key_dim,
        "D0": d0,
        "D1": d1,
        "VALUE_DIM": value_dim,
        "V0": v0,
        "V1": v1,
        "HAS_WINDOW": layer.has_window,
        "IS_CHUNK": layer.is_chunk,
        "HAS_SOFTCAP": layer.has_softcap,
        "HAS_ALIBI": layer.has_alibi,
    }


def heads_per_program(group: int, target: str) -> int:
    """Query heads of a KV head that one decode program takes: a power of two, all of them if they are not too many."""
    return min(max(min_dot(target), power_of_two(group)), 64)


@triton.jit
def load_page_ids(table_ptr, start, first, last, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Pages of the tile that begins at position `start`; positions outside `first … last` as in `tile_slots`.

    One number where tiles lie within pages, else `[TILE]`. Kernels load it one tile ahead and carry it through the
    loop: a load in the loop that other loads wait for keeps these from being pipelined.
    """
    if PAGE % TILE == 0:
        # Any tile that holds one of the positions has a single page.
        pages = tl.load(table_ptr + tl.minimum(start, last) // PAGE)
    else:
        positions = tl.minimum(tl.maximum(start + tl.arange(0, TILE), first), last)
        pages = tl.load(table_ptr + positions // PAGE)
    return pages


@triton.jit
def tile_slots(pages, start, first, last, PAGE: tl.constexpr, TILE: tl.constexpr):
    """`[TILE]` int64 slots of a tile's tokens; positions outside `first … last` stand for the nearest one inside.

    What lies outside belongs to nobody, or to others by now. It may be NaN, and no mask would help: 0 * NaN is NaN.
    """
    positions = tl.minimum(tl.maximum(start + tl.arange(0, TILE), first), last)
    return pages.to(tl.int64) * PAGE + positions % PAGE


@triton.jit
def load_heads(ptr, slots, stride_slot, DIM: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr):
    """`[TILE, SIZE]` numbers of each slot's head, from number `FIRST`; 0 beyond the head's size."""
    dims = FIRST + tl.arange(0, SIZE)
    pointers = ptr + slots[:, None] * stride_slot + dims[None, :]
    if FIRST + SIZE <= DIM:
        return tl.load(pointers)
    return tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)


@triton.jit
def load_rows(ptr, offsets, is_row, DIM: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr):
    """`[BM, SIZE]` numbers of each query row; 0 beyond the head's size and for rows that are none."""
    dims = FIRST + tl.arange(0, SIZE)
    return tl.load(ptr + offsets[:, None] + dims[None, :], mask=is_row[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def store_rows(ptr, offsets, is_row, values, DIM: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr):
    """Writes what `load_rows` would read."""
    dims = FIRST + tl.arange(0, SIZE)
    tl.store(ptr + offsets[:, None] + dims[None, :], values, mask=is_row[:, None] & (dims < DIM)[None, :])


@triton.jit
def score_tile(
    q0,
    q1,
    key_ptr,
    slots,
    stride_slot,
    scale,
    softcap,
    DIM: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """`[BM, TILE]` scores, before `score_factor`."""
    scores = dot(q0, tl.trans(load_heads(key_ptr, slots, stride_slot, DIM, 0, D0)))
    if D1 > 0:
        scores = dot_add(q1, tl.trans(load_heads(key_ptr, slots, stride_slot, DIM, D0, D1)), scores)
    if HAS_SOFTCAP:
        # softcap * tanh(z), in a form that no size of z can overflow
        z = scores * (scale / softcap)
        scores = softcap * (2.0 / (1.0 + tl.exp2(z * (-2.0 * LOG2_E))) - 1.0)
    return scores


@triton.jit
def score_factor(scale, HAS_SOFTCAP: tl.constexpr):
    """What takes the scores of `score_tile` to units of log2."""
    return tl.full([], LOG2_E, tl.float32) if HAS_SOFTCAP else scale * LOG2_E


@triton.jit
def first_seen(position, window, IS_CHUNK: tl.constexpr):
    """The first key that the query at `position` sees, of a chunk or of a window that moves with it."""
    return position // window * window if IS_CHUNK else tl.maximum(position - window + 1, 0)


@triton.jit
def load_slopes(slopes_ptr, heads, is_head, scale, HAS_SOFTCAP: tl.constexpr):
    """`[BM]` slopes of each row's head in units of `score_tile`, before `score_factor`."""
    slopes = tl.load(slopes_ptr + heads, mask=is_head, other=0.0)
    return slopes if HAS_SOFTCAP else slopes / scale


@triton.jit
def add_biases(scores, slopes, distances):
    """Scores with each row's slope times the distances `[BM or 1, TILE]` from its position to the keys."""
    return tl.fma(
        tl.broadcast_to(distances.to(tl.float32), scores.shape), tl.broadcast_to(slopes[:, None], scores.shape), scores
    )


@triton.jit
def softmax_step(peak, total, scores, factor):
    """Takes a tile's masked scores into the running softmax.

    Returns:
        The new `peak` and `total`, the tile's weights `[BM, TILE]`, and the factor `[BM]` of what was summed before.
    """
    new_peak = tl.maximum(peak, tl.max(scores, axis=1) * factor)
    # Rows that have seen nothing yet keep -inf; only the exponents need a number in its place.
    safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(tl.fma(scores, factor, -safe_peak[:, None]))
    decay = tl.exp2(peak - safe_peak)
    return new_peak, total * decay + tl.sum(weights, axis=1), weights, decay


@triton.jit
def sink_step(peak, total, sinks_ptr, heads, is_head):
    """Takes each row's sink into the running softmax: a score without a value.

    Returns:
        The new `total`, and the factor `[BM]` of what was summed before.
    """
    sinks = tl.load(sinks_ptr + heads, mask=is_head, other=float("-inf")).to(tl.float32) * LOG2_E
    new_peak = tl.maximum(peak, sinks)
    safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    decay = tl.exp2(peak - safe_peak)
    return total * decay + tl.exp2(sinks - safe_peak), decay


@triton.jit
def store_shares(
    out_ptr, offsets, is_row, acc0, acc1, shares, VALUE_DIM: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr
):
    """Writes the weighted sums times `shares [BM]`, rounded to the output's dtype."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    store_rows(out_ptr, offsets, is_row, narrow(acc0 * shares[:, None], dtype), VALUE_DIM, 0, V0)
    if V1 > 0:
        store_rows(out_ptr, offsets, is_row, narrow(acc1 * shares[:, None], dtype), VALUE_DIM, V0, V1)


@triton.jit
def add_values(
    acc0, acc1, weights, decay, value_ptr, slots, stride_slot, DIM: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr
):
    """Adds a tile's weighted values to both parts of the sum."""
    p = narrow(weights, value_ptr.dtype.element_ty)
    acc0 = dot_add(p, load_heads(value_ptr, slots, stride_slot, DIM, 0, V0), acc0 * decay[:, None])
    if V1 > 0:
        acc1 = dot_add(p, load_heads(value_ptr, slots, stride_slot, DIM, V0, V1), acc1 * decay[:, None])
    return acc0, acc1
