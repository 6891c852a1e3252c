"""What each kernel must compute, written as plainly as possible: loops, Python integers, fp64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
) -> Tensor:
    """`[T, Hq, Dv]` fp64; one query token and one head at a time."""
    page_size, num_kv_heads = key_cache.shape[1:3]
    num_heads = query.shape[1]
    out = torch.zeros(len(query), num_heads, value_cache.shape[-1], dtype=torch.float64)
    for i, row in enumerate(rows.tolist()):
        first, end = cu_seqlens_q[i : i + 2].tolist()
        for token in range(first, end):
            last = int(seq_lens[i]) - end + token
            begin = max(0, last - window + 1) if window else 0
            if chunk:
                begin = last - last % chunk
            positions = torch.arange(begin, last + 1)
            blocks, offsets = block_tables[row, positions // page_size], positions % page_size
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                keys = key_cache[blocks, offsets, kv_head].double()
                scores = keys @ query[token, head].double() * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                if alibi_slopes is not None:
                    scores = scores - alibi_slopes[head].double() * (last - positions)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head].double()[None]])
                weights = scores.softmax(0)[: len(positions)]
                out[token, head] = weights @ value_cache[blocks, offsets, kv_head].double()
    return out


def prepare_inputs(
    token_table: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    starts: Tensor,
    counts: Tensor,
    page_sizes: Tensor,
    num_tokens: int,
) -> tuple[list[int], list[int], list[list[int]], list[int], list[int]]:
    """The five results as lists."""
    ids, positions, ends, seq_lens = [], [], [0], []
    slots: list[list[int]] = [[] for _ in page_sizes]
    for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
        for position in range(start, start + count):
            ids.append(int(token_table[row, position]))
            positions.append(position)
            for group, page_size in enumerate(page_sizes.tolist()):
                block = int(block_tables[group, row, position // page_size])
                slots[group].append(block * page_size + position % page_size)
        ends.append(ends[-1] + count)
        seq_lens.append(start + count if count else 0)
    padding = num_tokens - len(ids)
    slots = [of_group + [-1] * padding for of_group in slots]
    return ids + [0] * padding, positions + [0] * padding, slots, ends, seq_lens


def philox_4x32_10(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & 0xFFFFFFFF, (low >> 32) ^ c3 ^ k1, low & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def race_winner(log_weights: list[float], seed: int, position: int) -> int:
    """The token that wins the race among those with a finite log-weight."""
    finish_times = {}
    for token, log_weight in enumerate(log_weights):
        if log_weight > -math.inf:
            key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
            word = philox_4x32_10((token // 4, position, 0, 0), key)[token % 4]
            finish_times[token] = math.log(-math.log1p(-(word + 0.5) * 2.0**-32)) - log_weight
    return min(finish_times, key=finish_times.__getitem__)
