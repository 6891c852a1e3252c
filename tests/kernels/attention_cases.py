"""Steps that both attention slots are tested on, over a pool whose unused slots are poisoned: they hold NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cbtriton.kernels.cpu_backend.checking import poison_


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes and options of one layer."""

    page_size: int = 16
    num_heads: int = 4
    num_kv_heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    chunk: int = 0
    has_alibi: bool = False


# One changes at a time, then together. Groups of 1 to 33 query heads per KV head.
SHAPES = {
    "plain": Shape(),
    "page 1": Shape(page_size=1),
    "page 4": Shape(page_size=4),
    "page 24": Shape(page_size=24),
    "page 48": Shape(page_size=48),
    "no grouping": Shape(num_heads=3, num_kv_heads=3),
    "group 3": Shape(num_heads=9, num_kv_heads=3),
    "group 5": Shape(num_heads=5, num_kv_heads=1),
    "group 8": Shape(num_heads=8, num_kv_heads=1),
    "head 16": Shape(key_dim=16, value_dim=16),
    "head 40": Shape(key_dim=40, value_dim=40),
    "head 80": Shape(key_dim=80, value_dim=80),
    "head 96": Shape(key_dim=96, value_dim=96),
    "head 128": Shape(key_dim=128, value_dim=128),
    "head 192": Shape(key_dim=192, value_dim=192, num_heads=2),
    "head 256": Shape(key_dim=256, value_dim=256, num_heads=2),
    "group 16": Shape(num_heads=16, num_kv_heads=1),
    "group 33": Shape(num_heads=33, num_kv_heads=1, key_dim=16, value_dim=16),
    "6 KV heads": Shape(num_heads=6, num_kv_heads=6, key_dim=16, value_dim=16),
    "value smaller": Shape(key_dim=96, value_dim=64),
    "value larger": Shape(key_dim=40, value_dim=80, num_heads=6),
    "window 1": Shape(window=1),
    "window 5": Shape(window=5, page_size=4),
    "window 40": Shape(window=40),
    "softcap": Shape(softcap=5.0),
    "sinks": Shape(has_sinks=True),
    "sinks, window, group 8": Shape(has_sinks=True, window=19, num_heads=8, num_kv_heads=1),
    "softcap, sinks, window": Shape(softcap=20.0, has_sinks=True, window=7, page_size=24),
    "value smaller, window, sinks": Shape(key_dim=80, value_dim=16, window=11, has_sinks=True),
    "chunk 1": Shape(chunk=1),
    "chunk 5": Shape(chunk=5, page_size=4),
    "chunk 40": Shape(chunk=40),
    "chunk 16, page 16": Shape(chunk=16),
    "chunk 48, sinks, page 24, group 8": Shape(chunk=48, has_sinks=True, page_size=24, num_heads=8, num_kv_heads=1),
    "slopes": Shape(has_alibi=True),
    "slopes, no grouping": Shape(has_alibi=True, num_heads=3, num_kv_heads=3, key_dim=40, value_dim=40),
    "slopes, softcap, sinks, window": Shape(has_alibi=True, softcap=5.0, has_sinks=True, window=40, page_size=24),
    "slopes, chunk, group 5": Shape(has_alibi=True, chunk=24, num_heads=5, num_kv_heads=1),
}
# The others only in fp32: what a dtype changes does not depend on sizes, and float16 takes the way of bfloat16.
IN_BFLOAT16 = ("plain", "group 3", "head 80", "head 256", "page 24", "softcap, sinks, window", "value larger")
IN_BFLOAT16 += ("chunk 40", "slopes", "slopes, softcap, sinks, window")
IN_FLOAT16 = ("head 80", "softcap, sinks, window")
# Error of one output element for standard normal inputs: rounding of the result, of the weights and of sinks.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def dtypes_of(name: str) -> list[torch.dtype]:
    """In which dtypes a shape is tested."""
    halves = {torch.bfloat16: IN_BFLOAT16, torch.float16: IN_FLOAT16}
    return [torch.float32, *(dtype for dtype, names in halves.items() if name in names)]


@dataclass(frozen=True, slots=True)
class Step:
    """Arguments of one call, except the plan."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    rows: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    scale: float
    window: int
    chunk: int
    softcap: float
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    max_kv: int

    def plan(self, implementation) -> Tensor:
        """The implementation's plan for this step."""
        tables = self.block_tables, self.rows, self.cu_seqlens_q, self.seq_lens
        return implementation.plan(*tables, self.key_cache.shape[1], self.max_kv)

    @property
    def options(self) -> tuple:
        """What follows the plan, except `max_kv`."""
        return self.scale, self.window, self.chunk, self.softcap, self.sinks, self.alibi_slopes


def make_step(shape: Shape, dtype: torch.dtype, entries: list[tuple[int, int]], num_padding: int = 0) -> Step:
    """A step of `(context_len, query_len)` entries with scattered blocks; slots outside of contexts are poison, NaN.

    With a window or a chunk, slots that no query sees are poison too: their blocks may have been given back.
    """
    generator = torch.Generator().manual_seed(len(entries) + shape.page_size)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(dtype)

    lengths = [context + query if query else 0 for context, query in entries]
    max_blocks = -(-max(*lengths, 1) // shape.page_size)
    num_blocks = len(entries) * max_blocks + 1
    # Block 0 belongs to nobody, as after its owner has left.
    blocks = torch.randperm(num_blocks - 1, generator=generator)[: len(entries) * max_blocks] + 1
    rows = torch.randperm(len(entries), generator=generator)
    slots = num_blocks, shape.page_size, shape.num_kv_heads
    key_cache = poison_(torch.empty(*slots, shape.key_dim, dtype=dtype))
    value_cache = poison_(torch.empty(*slots, shape.value_dim, dtype=dtype))
    tables = torch.zeros(len(entries), max_blocks, dtype=torch.int32)
    for i, (row, (context, _)) in enumerate(zip(rows.tolist(), entries, strict=True)):
        used = -(-lengths[i] // shape.page_size)
        tables[row, :used] = blocks[i * max_blocks : i * max_blocks + used]
        first_seen = max(0, context - shape.window + 1) if shape.window else 0
        if shape.chunk:
            first_seen = context // shape.chunk * shape.chunk
        for position in range(first_seen, lengths[i]):
            block = tables[row, position // shape.page_size]
            key_cache[block, position % shape.page_size] = normal(shape.num_kv_heads, shape.key_dim)
            value_cache[block, position % shape.page_size] = normal(shape.num_kv_heads, shape.value_dim)
    counts = [query for _, query in entries]
    # A slice of a fused projection, as models hand it over.
    fused = normal(sum(counts) + num_padding, 3 * shape.num_heads, shape.key_dim)
    return Step(
        query=fused[:, shape.num_heads : 2 * shape.num_heads],
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=tables,
        rows=rows.to(torch.int32),
        cu_seqlens_q=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        scale=shape.key_dim**-0.5,
        window=shape.window,
        softcap=shape.softcap,
        chunk=shape.chunk,
        sinks=normal(shape.num_heads) if shape.has_sinks else None,
        # From steep to hardly any, and one that is not a power of two.
        alibi_slopes=0.7 * 2.0 ** -torch.arange(shape.num_heads).float() if shape.has_alibi else None,
        max_kv=max(*lengths, 1),
    )


def entries_of(step: Step, order: list[int]) -> Step:
    """The same caches and tables, with only some of the entries, in some order."""
    begins = step.cu_seqlens_q.tolist()
    counts = [begins[i + 1] - begins[i] for i in order]
    return replace(
        step,
        query=torch.cat([step.query[begins[i] : begins[i + 1]] for i in order]),
        rows=step.rows[order],
        cu_seqlens_q=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        seq_lens=step.seq_lens[order],
        max_kv=int(step.seq_lens[order].max()),
    )


def with_moved_pages(step: Step) -> Step:
    """The same contents in other blocks."""
    order = torch.randperm(len(step.key_cache), generator=torch.Generator().manual_seed(1))
    return replace(
        step,
        key_cache=step.key_cache[order],
        value_cache=step.value_cache[order],
        block_tables=order.argsort()[step.block_tables.long()].to(torch.int32),
    )


def spread_out(tokens: Tensor) -> Tensor:
    """`tokens [2, heads, dim]` more than 2^31 elements apart, in memory that is never touched in between."""
    far = torch.empty(2**31 + 4096 + tokens[0].numel(), dtype=tokens.dtype)
    spread = far.as_strided(tokens.shape, (2**31 + 4096, tokens.shape[2], 1))
    return spread.copy_(tokens)
