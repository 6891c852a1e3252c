"""What the two reference attentions share: the step's plan, and attention over rows gathered from the paged cache.

Keys and values are gathered by token, in groups of rows of similar length, and attended to with one large call per
group. On a CPU that call is torch's flash attention, which reads grouped query heads without repeating keys and
returns the log-sum-exp that attention sinks need; soft-capped scores, differing head sizes and other devices take an
explicit path that computes in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Keys and values gathered for one call. Larger copies leave the cores' caches before attention reads them, and come
# from fresh memory pages at every call; smaller ones are dominated by the cost of the calls.
_GATHER_BYTES = 2 << 20
# Query tokens per masked call: bounds the mask and the explicit path's scores, and lets early queries skip late keys.
_QUERIES_PER_CALL = 512
# Where the mask is another one for each head.
_BIASED_QUERIES_PER_CALL = 64
# Shorter common beginnings are not worth a call of their own.
_MIN_SHARED_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Scoring:
    """How scores are made, the same for every row of a layer.

    Attributes:
        scale: Multiplies the dot products.
        window: Each query sees only this many keys, its own included; 0 means all.
        chunk: Each query sees only keys of its own chunk of so many positions; 0 means all.
        softcap: Scores become `softcap * tanh(score / softcap)`; 0.0 means off.
        sinks: `[Hq]`, an additional logit per head in the softmax's denominator; None means none.
        alibi_slopes: `[Hq]`, what the score of a key changes by with each position that it is nearer; None means none.
    """

    scale: float
    window: int
    chunk: int
    softcap: float
    sinks: Tensor | None
    alibi_slopes: Tensor | None

    def __post_init__(self) -> None:
        if self.window and self.chunk:
            raise ValueError(
                f"a layer has a window or a chunk, got a window of {self.window} and chunks of {self.chunk}"
            )

    def first_seen(self, position: int) -> int:
        """The first key that the query at `position` sees."""
        if self.chunk:
            return position // self.chunk * self.chunk
        return max(0, position - self.window + 1) if self.window else 0

    def mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """What is added to scores: `[Q, K]` float32, or `[Hq, Q, K]` with slopes.

        Args:
            queries: `[Q]`, positions.
            keys: `[K]`, positions.
        """
        distances = keys - queries[:, None]
        allowed = distances <= 0
        if self.window:
            allowed &= distances > -self.window
        if self.chunk:
            allowed &= keys // self.chunk == queries[:, None] // self.chunk
        added = _additive_mask(allowed)
        return added if self.alibi_slopes is None else added + self.alibi_slopes[:, None, None] * distances


def plan_slots(
    block_tables: Tensor, rows: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor, page_size: int, max_kv: int
) -> Tensor:
    """The cache slot of every token that the step's rows attend to.

    Args:
        block_tables: `[num_rows, max_blocks]` int32.
        rows: `[R]` int32, the table row of each entry of the step.
        cu_seqlens_q: `[R + 1]` int32, prefix sums of the query lengths; not needed here.
        seq_lens: `[R]` int32, tokens of each entry after this step; 0 for padding.
        page_size: Tokens per page.
        max_kv: At least the longest of `seq_lens`, and at least 1.

    Returns:
        `[R, max_kv]` int64. Behind a row's length its last token's slot is repeated, so that whatever is gathered
        there was written.
    """
    last = (seq_lens - 1).clamp(min=0)
    positions = torch.minimum(torch.arange(max_kv, device=rows.device), last[:, None])
    blocks = block_tables[rows].gather(1, positions // page_size)
    return blocks.to(torch.int64) * page_size + positions % page_size


def attend_single(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: Tensor, lengths: list[int], scoring: Scoring
) -> Tensor:
    """Attention of one query token per row over the row's whole context.

    Rows that begin with the same cached blocks attend to those together: one call over the shared keys, read once, for
    the queries of all, merged with what each row's own keys give.

    Args:
        query: `[R, Hq, Dk]`.
        key_cache: `[N, P, Hkv, Dk]`.
        value_cache: `[N, P, Hkv, Dv]`.
        plan: `[R, max_kv]` int64 from `plan_slots`.
        lengths: Context length of each row in tokens; rows of length 0 give zeros.
        scoring: How scores are made.

    Returns:
        `[R, Hq, Dv]` of the cache's dtype.
    """
    num_kv_heads, value_dim = value_cache.shape[2:]
    keys, values = key_cache.view(-1, *key_cache.shape[2:]), value_cache.view(-1, num_kv_heads, value_dim)
    query = query.unflatten(1, (num_kv_heads, -1))
    sinks = None if scoring.sinks is None else scoring.sinks.view(num_kv_heads, -1)
    out = values.new_zeros(*query.shape[:3], value_dim)
    lse = torch.full(query.shape[:3], -torch.inf, device=out.device)
    has_flash = _has_flash(query, keys, values, scoring)
    has_all_keys = not scoring.window and not scoring.chunk
    families = _families(plan, lengths) if has_flash and has_all_keys and scoring.alibi_slopes is None else []

    # Where the keys begin that a row attends to by itself.
    begins = [scoring.first_seen(max(0, length - 1)) for length in lengths]
    for family in families:
        for row in family.rows:
            begins[row] = family.num_shared
    counts = [length - begin for length, begin in zip(lengths, begins, strict=True)]
    token_bytes = (keys.shape[2] + value_dim) * num_kv_heads * keys.element_size()
    for group in _groups(counts, max_tokens=_GATHER_BYTES // token_bytes):
        longest, shortest = counts[group[0]], counts[group[-1]]
        index = torch.tensor(group, device=plan.device)
        last = torch.tensor([[lengths[row] - 1] for row in group], device=plan.device)
        first = torch.tensor([[begins[row]] for row in group], device=plan.device)
        positions = last - torch.arange(longest - 1, -1, -1, device=plan.device)
        # What lies in front of the first one may be anybody's by now.
        slots = plan[index[:, None], torch.maximum(positions, first)].flatten()
        key = keys.index_select(0, slots).unflatten(0, positions.shape).transpose(1, 2)
        value = values.index_select(0, slots).unflatten(0, positions.shape).transpose(1, 2)
        mask = _additive_mask(positions >= first)[:, None, None, :] if longest != shortest else None
        if scoring.alibi_slopes is not None:
            slopes = scoring.alibi_slopes.view(1, num_kv_heads, -1, 1)
            biases = slopes * (positions - last)[:, None, None, :]
            mask = biases if mask is None else biases + mask
        if has_flash:
            out[index], lse[index] = _flash(query[index], key, value, mask, scoring.scale)
        else:
            out[index] = _attend_explicit(query[index], key, value, mask, scoring, sinks)

    for family in families:
        _merge_shared(out, lse, query, keys, values, plan[family.rows[0], : family.num_shared], family, scoring.scale)
    if has_flash and sinks is not None:
        out = _with_sinks(out, lse, sinks)
    return out.flatten(1, 2)


@dataclass(frozen=True, slots=True)
class _Family:
    """Rows whose first `num_shared` tokens lie in the same slots, and that have more tokens than these."""

    rows: list[int]
    num_shared: int


def _families(plan: Tensor, lengths: list[int]) -> list[_Family]:
    """Groups the rows that share enough of their context to gain from attending to it together."""
    by_first_slot: dict[int, list[int]] = {}
    for row, (slot, length) in enumerate(zip(plan[:, 0].tolist(), lengths, strict=True)):
        if length > _MIN_SHARED_TOKENS:
            by_first_slot.setdefault(slot, []).append(row)
    families: list[_Family] = []
    for rows in by_first_slot.values():
        if len(rows) > 1:
            slots = plan[rows]
            common = (slots == slots[0]).to(torch.int32).cumprod(1).sum(1).tolist()
            # Each row's last token is its own, and what the plan repeats behind it does not count.
            num_shared = {row: min(count, lengths[row] - 1) for row, count in zip(rows, common, strict=True)}
            members = [row for row, count in num_shared.items() if count >= _MIN_SHARED_TOKENS]
            if len(members) > 1:
                families.append(_Family(members, min(num_shared[row] for row in members)))
    return families


def _merge_shared(
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    family: _Family,
    scale: float,
) -> None:
    """Adds the keys in `slots` to what a family's rows attend to: changes their `out [R, Hkv, G, Dv]` and `lse`."""
    index = torch.tensor(family.rows, device=out.device)
    own_query = query[index]
    num_rows, _, num_groups, _ = own_query.shape
    # The queries of all rows and their groups, by KV head: [1, Hkv, rows * G, Dk].
    shared_out, shared_lse = _flash(
        own_query.transpose(0, 1).flatten(1, 2).unsqueeze(0),
        keys.index_select(0, slots).transpose(0, 1).unsqueeze(0),
        values.index_select(0, slots).transpose(0, 1).unsqueeze(0),
        None,
        scale,
    )
    shared_out = shared_out[0].unflatten(1, (num_rows, num_groups)).transpose(0, 1)
    shared_lse = shared_lse[0].unflatten(1, (num_rows, num_groups)).transpose(0, 1)
    total = torch.logaddexp(shared_lse, lse[index])
    merged = shared_out * (shared_lse - total).exp().unsqueeze(-1)
    merged += out[index] * (lse[index] - total).exp().unsqueeze(-1)
    out[index], lse[index] = merged.to(out.dtype), total


def attend_sequence(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, length: int, scoring: Scoring
) -> Tensor:
    """Causal attention of one row's query tokens, the last ones of its context.

    Args:
        query: `[q, Hq, Dk]`.
        key_cache: `[N, P, Hkv, Dk]`.
        value_cache: `[N, P, Hkv, Dv]`.
        slots: `[max_kv]` int64, the row of `plan_slots`.
        length: Context length in tokens, the query tokens included.
        scoring: How scores are made.

    Returns:
        `[q, Hq, Dv]` of the cache's dtype.
    """
    num_kv_heads, value_dim = value_cache.shape[2:]
    keys, values = key_cache.view(-1, *key_cache.shape[2:]), value_cache.view(-1, num_kv_heads, value_dim)
    sinks = None if scoring.sinks is None else scoring.sinks.view(num_kv_heads, -1, 1)
    pieces = []
    end = length - len(query)
    for piece in query.split(_QUERIES_PER_CALL if scoring.alibi_slopes is None else _BIASED_QUERIES_PER_CALL):
        begin = scoring.first_seen(end)
        positions = torch.arange(begin, end + len(piece), device=slots.device)
        mask = scoring.mask(positions[end - begin :], positions)
        if scoring.alibi_slopes is not None:
            mask = mask.unflatten(0, (num_kv_heads, -1))
        end += len(piece)
        seen = slots[begin:end]
        attended = _attend(
            piece.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3),
            keys.index_select(0, seen).transpose(0, 1).unsqueeze(1),
            values.index_select(0, seen).transpose(0, 1).unsqueeze(1),
            mask,
            scoring,
            sinks,
        )
        pieces.append(attended.permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(pieces)


def _groups(seen: list[int], max_tokens: int) -> Iterator[list[int]]:
    """Splits the rows that see anything into groups, longest rows first, of at most `max_tokens` gathered tokens.

    Every row of a group is gathered at the length of the group's first, so rows of similar length come together.
    A row longer than `max_tokens` is a group of its own.
    """
    group: list[int] = []
    for row in sorted(range(len(seen)), key=seen.__getitem__, reverse=True):
        if not seen[row]:
            break
        if group and (len(group) + 1) * seen[group[0]] > max_tokens:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _additive_mask(allowed: Tensor) -> Tensor:
    """fp32: 0 where allowed, else -inf."""
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill_(~allowed, -torch.inf)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring, sinks: Tensor | None
) -> Tensor:
    """Attention over gathered keys, on the fastest path that can do it.

    Args:
        query: `[B, H, Q, Dk]`.
        key: `[B, H or 1, K, Dk]`.
        value: `[B, H or 1, K, Dv]`.
        mask: Added to the scores, broadcastable to `[B, H, Q, K]`; every query sees at least one key.
        scoring: How scores are made.
        sinks: Broadcastable to `[B, H, Q]`.

    Returns:
        `[B, H, Q, Dv]` of the value's dtype.
    """
    if not _has_flash(query, key, value, scoring):
        return _attend_explicit(query, key, value, mask, scoring, sinks)
    out, lse = _flash(query, key, value, mask, scoring.scale)
    return out if sinks is None else _with_sinks(out, lse, sinks)


def _has_flash(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> bool:
    return query.device.type == "cpu" and key.shape[-1] == value.shape[-1] and scoring.softcap == 0.0


def _flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention `[B, H, Q, D]` and the log-sum-exp of its scores, `[B, H, Q]` fp32; arguments as in `_attend`."""
    key, value = (x.expand(-1, query.shape[1], -1, -1) for x in (key, value))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=mask, scale=scale)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    # exp(lse) / (exp(lse) + exp(sink)): the share of the softmax that the keys keep
    return (out * torch.sigmoid(lse - sinks).unsqueeze(-1)).to(out.dtype)


def _attend_explicit(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring, sinks: Tensor | None
) -> Tensor:
    scores = query.float() @ key.float().transpose(-1, -2) * scoring.scale
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if mask is not None:
        scores = scores + mask
    num_keys = scores.shape[-1]
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[..., None].expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(-1)[..., :num_keys]
    return (weights @ value.float()).to(value.dtype)
