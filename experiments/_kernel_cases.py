"""The kernels' slots at chosen sizes: inputs, what else computes the same, and how a result is checked.

What `bench_kernels.py` and `gpu_check.py` time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cbtriton.kernel_set import REFERENCE

# Largest errors of attention, relative to its result's norm.
ALLOWED = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}
# top_h, top_k, top_p, min_p, typical_p, epsilon_cutoff, eta_cutoff.
FILTERS = {
    "typical-p": (0.0, 0, 1.0, 0.0, 0.95, 0.0, 0.0),
    "eta": (0.0, 0, 1.0, 0.0, 1.0, 0.0, 2e-3),
    "all filters": (0.9, 50, 0.95, 0.02, 0.95, 1e-3, 2e-3),
}

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Which cases are run.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Size of a head.
        pages: Page sizes.
        decode: (rows, context length) in the order of importance.
        prefill: (rows, query tokens, tokens before them), likewise.
        flex: Those of `decode` and `prefill` that FlexAttention, slow to compile, is tried on.
        vocab: Vocabulary.
        sampled: Rows that sample.
        written: Tokens written to the cache.
        prepared: (rows, tokens of each).
        copied: Blocks copied.
        table_shape: Rows and tokens of the request table.
        processed: Rows whose logits are processed and filtered, and whose log-probabilities are asked for.
        dtype: Of queries, keys, values and logits.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    pages: tuple[int, ...]
    decode: tuple[tuple[int, int], ...]
    prefill: tuple[tuple[int, int, int], ...]
    flex: tuple[tuple[int, ...], ...]
    vocab: int
    sampled: tuple[int, ...]
    written: tuple[int, ...]
    prepared: tuple[tuple[int, int], ...]
    copied: int
    table_shape: tuple[int, int]
    processed: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.dtype.itemsize * self.num_kv_heads * self.head_dim

    @property
    def pool_tokens(self) -> int:
        """Tokens of the largest case, and a page that belongs to nobody."""
        attended = [rows * length for rows, length in self.decode]
        attended += [rows * (count + context) for rows, count, context in self.prefill]
        copied = [2 * self.copied * page for page in self.pages]
        return max(*attended, *copied, *self.written) + (1 + max(rows for rows, _ in self.decode)) * max(self.pages)


REAL = Sizes(
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    pages=(16, 256),
    decode=tuple((rows, length) for length in (4096, 32768, 1024) for rows in (32, 8, 1, 128)),
    prefill=((1, 4096, 0), (4, 2048, 0), (1, 512, 8192)),
    flex=((32, 4096), (1, 4096, 0), (1, 512, 8192)),
    vocab=128_256,
    sampled=(1, 8, 64, 256),
    written=(64, 8192),
    prepared=((256, 1), (4, 2048)),
    copied=64,
    table_shape=(1024, 8192),
)
TINY = Sizes(
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    pages=(4, 16),
    decode=((1, 5), (3, 20)),
    prefill=((1, 9, 0), (2, 5, 0), (1, 4, 12)),
    flex=((1, 9, 0),),
    vocab=257,
    sampled=(1, 3),
    written=(3, 7),
    prepared=((3, 1), (2, 5)),
    copied=3,
    table_shape=(8, 64),
)


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs on the device, and how they are run.

    Attributes:
        num_bytes: Bytes that must move: each input read once, each output written once.
        num_flops: Floating-point operations that must be done.
        bind: An implementation's module -> the call that is timed.
        check: Result of such a call -> its error.
        allowed: Largest error of a right result.
        peers: What else computes the same.
        bind_plan: An attention module -> the call that plans a step.
    """

    num_bytes: float
    num_flops: float
    bind: Callable[[Any], Call]
    check: Callable[[Any], float]
    allowed: float
    peers: dict[str, Call]
    bind_plan: Callable[[Any], Call] | None = None


@dataclass(frozen=True, slots=True)
class Spec:
    """A case that is not built yet: its tensors would not all fit at a time."""

    slot: str
    name: str
    build: Callable[[], Case]
    only_peers: bool = False


class TooLargeError(ValueError):
    """A case needs more memory than this device has."""


class Bench:
    """Builds the cases on one device.

    Args:
        sizes: Which ones.
        device: Where.
    """

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self._sizes = sizes
        self._device = device
        tokens = sizes.pool_tokens
        if device.type == "cuda":
            # Attention's peers need as much again, in one piece.
            tokens = min(tokens, int(0.4 * torch.cuda.mem_get_info(device)[0]) // sizes.token_bytes)
        shape = (tokens, sizes.num_kv_heads, sizes.head_dim)
        self._keys, self._values = self._normal(*shape), self._normal(*shape)

    def specs(self) -> Iterator[Spec]:
        """All cases, the most telling ones first."""
        sizes = self._sizes
        yield from self._decode_specs(sizes.decode[:4])
        yield from self._prefill_specs()
        for kind in SAMPLERS:
            for rows in sizes.sampled:
                name = f"sample {kind} B={rows} V={sizes.vocab}"
                yield Spec("sample", name, partial(self._sample, rows, kind))
        for rows in sizes.processed:
            yield Spec("sample", f"process B={rows} V={sizes.vocab}", partial(self._process, rows))
            for kind in FILTERS:
                yield Spec("sample", f"truncate {kind} B={rows} V={sizes.vocab}", partial(self._truncate, rows, kind))
            yield Spec("sample", f"logprobs top 5 B={rows} V={sizes.vocab}", partial(self._logprobs, rows))
        for tokens in sizes.written:
            yield Spec("kv_write", f"kv_write T={tokens}", partial(self._kv_write, tokens))
        for rows, count in sizes.prepared:
            name = f"prepare_inputs R={rows} T={rows * count}"
            yield Spec("prepare_inputs", name, partial(self._prepare_inputs, rows, count))
        for page in sizes.pages:
            name = f"block_copy n={sizes.copied} page={page}"
            yield Spec("block_copy", name, partial(self._block_copy, page))
        yield from self._decode_specs(sizes.decode[4:])
        yield from self._flex_specs()

    def _decode_specs(self, cases: Sequence[tuple[int, int]]) -> Iterator[Spec]:
        for rows, length in cases:
            for page in self._sizes.pages:
                build = partial(self._attention, "decode_attention", rows, 1, length - 1, page, with_flex=False)
                yield Spec("decode_attention", _decode_name(rows, length, page), build)

    def _prefill_specs(self) -> Iterator[Spec]:
        for rows, count, context in self._sizes.prefill:
            for page in self._sizes.pages:
                build = partial(self._attention, "varlen_attention", rows, count, context, page, with_flex=False)
                yield Spec("varlen_attention", _prefill_name(rows, count, context, page), build)

    def _flex_specs(self) -> Iterator[Spec]:
        page = self._sizes.pages[0]
        for case in self._sizes.flex:
            if len(case) == 2:
                rows, length = case
                slot, name, spans = "decode_attention", _decode_name(rows, length, page), (rows, 1, length - 1)
            else:
                rows, count, context = case
                slot, name, spans = "varlen_attention", _prefill_name(rows, count, context, page), case
            yield Spec(slot, name, partial(self._attention, slot, *spans, page, with_flex=True), only_peers=True)

    # ---- attention

    def _attention(self, slot: str, rows: int, count: int, context: int, page: int, with_flex: bool) -> Case:
        sizes, device = self._sizes, self._device
        length = context + count
        keys, values = self._caches(page)
        num_blocks = -(-length // page)
        if rows * num_blocks >= len(keys):
            need = 2 * rows * length * sizes.token_bytes / 2**30
            raise TooLargeError(f"needs about {need:.1f} GiB, of which this device has too little left")
        # Block 0 belongs to nobody.
        blocks = torch.randperm(len(keys) - 1, device=device)[: rows * num_blocks] + 1
        tables = blocks.to(torch.int32).view(rows, num_blocks)
        entries = torch.randperm(rows, device=device).to(torch.int32)
        seq_lens = torch.full((rows,), length, dtype=torch.int32, device=device)
        cu_seqlens_q = torch.arange(rows + 1, dtype=torch.int32, device=device) * count
        # A slice of a fused projection, as models hand it over.
        fused = self._normal(rows * count, sizes.num_heads + 2 * sizes.num_kv_heads, sizes.head_dim)
        query = fused[:, : sizes.num_heads]
        scale = sizes.head_dim**-0.5
        lengths = (seq_lens,) if slot == "decode_attention" else (cu_seqlens_q, seq_lens)

        def bind_plan(module: Any) -> Call:
            return partial(module.plan, tables, entries, cu_seqlens_q, seq_lens, page, length)

        def bind(module: Any) -> Call:
            plan = bind_plan(module)()
            attend = getattr(module, slot)
            where = (query, keys, values, tables, entries, *lengths)
            return partial(attend, *where, plan, scale, 0, 0, 0.0, None, None, length)

        dense = self._dense(query, keys, values, tables, entries, rows, length)
        if device.type == "cuda":
            peers = dense.peers()
        else:
            peers = {"sdpa, in one piece": dense.sdpa}
            if count == 1:
                peers["gather and sdpa"] = lambda: self._dense(
                    query, keys, values, tables, entries, rows, length
                ).sdpa()
        pairs = rows * (count * context + count * (count + 1) / 2)
        return Case(
            num_bytes=rows * length * sizes.token_bytes + 2 * query.numel() * query.element_size() + 4 * tables.numel(),
            num_flops=4 * pairs * sizes.num_heads * sizes.head_dim,
            bind=bind,
            check=partial(_relative_error, expected=cache_call(dense.sdpa)),
            allowed=ALLOWED[sizes.dtype],
            peers={"flex": dense.flex(device)} if with_flex else peers,
            bind_plan=bind_plan,
        )

    def _dense(
        self, query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, entries: Tensor, rows: int, length: int
    ) -> DenseAttention:
        key, value = (self._gather(cache, tables, entries, length) for cache in (keys, values))
        whole = query.unflatten(0, (rows, -1))
        return DenseAttention(whole, key, value, length - whole.shape[1])

    @staticmethod
    def _gather(cache: Tensor, tables: Tensor, entries: Tensor, length: int) -> Tensor:
        """`[rows, length, Hkv, D]` in one piece."""
        blocks = tables[entries.long()]
        gathered = cache.index_select(0, blocks.flatten().long())
        return gathered.view(len(blocks), -1, *cache.shape[2:])[:, :length]

    # ---- the rest

    def _sample(self, num_rows: int, kind: str) -> Case:
        sizes, device = self._sizes, self._device
        sampler = SAMPLERS[kind]
        table_rows = max(num_rows, sizes.table_shape[0])
        logits = 3 * self._normal(num_rows, sizes.vocab)

        def column(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((table_rows,), value, dtype=dtype, device=device)

        args = (
            logits,
            torch.randperm(table_rows, device=device)[:num_rows].to(torch.int32),
            torch.randint(0, sizes.table_shape[1], (num_rows,), dtype=torch.int32, device=device),
            torch.zeros(table_rows, sizes.table_shape[1], dtype=torch.int32, device=device),
            column(sampler.temperature, torch.float32),
            column(sampler.top_k, torch.int32),
            column(sampler.top_p, torch.float32),
            column(0.0, torch.float32),
            torch.randint(-(2**62), 2**62, (table_rows,), device=device),
            column(0, torch.int32),
            torch.full((table_rows, 16), -1, dtype=torch.int32, device=device),
        )
        flags = (sampler.temperature == 0, sampler.top_k > 0, sampler.top_p < 1, False, False, False)

        def bind(module: Any) -> Call:
            return partial(module.sample, *args, *flags)

        def wrong_share(result: tuple[Tensor, Tensor, Tensor]) -> float:
            tokens, _, outcomes = result
            chosen = logits.gather(1, tokens[:, None].clamp(0, sizes.vocab - 1))[:, 0].float()
            is_right = (outcomes == 0) & (tokens >= 0) & (tokens < sizes.vocab) & (chosen >= sampler.least(logits))
            return 1 - is_right.float().mean().item()

        return Case(
            num_bytes=logits.numel() * logits.element_size(),
            num_flops=0,
            bind=bind,
            check=wrong_share,
            allowed=0.0,
            peers={"torch": partial(sampler.draw, logits)},
        )

    def _process(self, num_rows: int) -> Case:
        """Penalties, n-grams, a ban, a mask and a growing EOS on histories of which half repeats."""
        sizes, device = self._sizes, self._device
        length = sizes.table_shape[1] // 2
        rules = torch.zeros(num_rows, 512, 4, dtype=torch.int32, device=device)
        rules[:, 0] = torch.tensor([7, 1, -1, 0])

        def column(value: float, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full((num_rows,), value, dtype=dtype, device=device)

        history = torch.randint(0, sizes.vocab, (num_rows, length), dtype=torch.int32, device=device)
        arguments = (
            self._logits(num_rows),
            torch.arange(num_rows, dtype=torch.int32, device=device),
            column(length),
            history.repeat(1, 2),
            column(length // 4),
            *(column(value, torch.float32) for value in (1.2, 0.1, 0.1)),
            column(3),
            column(0),
            column(1),
            rules,
            torch.zeros(num_rows, 1024, dtype=torch.int32, device=device),
            column(1),
            torch.full((num_rows, -(-sizes.vocab // 32)), -2, dtype=torch.int32, device=device),
            column(0),
            torch.full((num_rows, 1), 2, dtype=torch.int32, device=device),
            column(length // 2),
            column(1e-3, torch.float32),
            column(1),
        )
        return Case(
            # Scores are float32, and the mask is a bit for each.
            num_bytes=num_rows * (sizes.vocab * (sizes.dtype.itemsize + 4 + 1 / 8) + 4 * length),
            num_flops=0,
            bind=lambda module: partial(module.process, *arguments),
            check=partial(_distance_of_shares, expected=cache_call(lambda: _reference("sample").process(*arguments))),
            allowed=1e-5,
            peers={},
        )

    def _truncate(self, num_rows: int, kind: str) -> Case:
        """Filters on a copy of the scores: they change them in place."""
        sizes, device = self._sizes, self._device
        scores = self._logits(num_rows).float()
        dtypes = (torch.float32, torch.int32, *[torch.float32] * 5)
        pairs = zip(FILTERS[kind], dtypes, strict=True)
        columns = [torch.full((num_rows,), value, dtype=dtype, device=device) for value, dtype in pairs]
        entries, is_truncated = (torch.arange(num_rows, dtype=torch.int32, device=device) for _ in range(2))
        is_truncated.fill_(1)
        temperature = torch.full((num_rows,), 0.8, device=device)

        def bind(module: Any) -> Call:
            def call() -> Tensor:
                kept = scores.clone()
                module.truncate(kept, entries, temperature, is_truncated, *columns)
                return kept

            return call

        return Case(
            num_bytes=3 * 4 * num_rows * sizes.vocab,
            num_flops=0,
            bind=bind,
            check=partial(_distance_of_shares, expected=cache_call(bind(_reference("sample")))),
            # Sums round differently, so a token on the border may stay or go.
            allowed=1e-3,
            peers={},
        )

    def _logprobs(self, num_rows: int) -> Case:
        logits = self._logits(num_rows)
        tokens = torch.randint(0, self._sizes.vocab, (num_rows,), device=self._device)
        heat = torch.ones(num_rows, device=self._device)

        def error(result: tuple[Tensor, Tensor, Tensor]) -> float:
            right = logits.double().log_softmax(-1)
            return (result[0] - right.gather(1, tokens[:, None])[:, 0]).abs().max().item()

        num_bytes = logits.numel() * logits.element_size()
        return Case(
            num_bytes, 0, lambda module: partial(module.token_logprobs, logits, tokens, heat, 5), error, 1e-4, {}
        )

    def _logits(self, num_rows: int) -> Tensor:
        """As of a language model: a few likely tokens and a long tail."""
        return 2.5 * self._normal(num_rows, self._sizes.vocab)

    def _kv_write(self, num_tokens: int) -> Case:
        sizes = self._sizes
        keys, values = self._caches(sizes.pages[0])
        fused = self._normal(num_tokens, sizes.num_heads + 2 * sizes.num_kv_heads, sizes.head_dim)
        key = fused[:, sizes.num_heads : sizes.num_heads + sizes.num_kv_heads]
        value = fused[:, sizes.num_heads + sizes.num_kv_heads :]
        num_slots = len(keys) * sizes.pages[0]
        slots = torch.randperm(num_slots, device=self._device)[:num_tokens]

        def wrong_share(_: object) -> float:
            written = [cache.flatten(0, 1)[slots] for cache in (keys, values)]
            return max((got != asked).float().mean().item() for got, asked in zip(written, (key, value), strict=True))

        def bind(module: Any) -> Call:
            # So that nothing is there already.
            keys.flatten(0, 1)[slots] = 0
            values.flatten(0, 1)[slots] = 0
            return partial(module.kv_write, key, value, keys, values, slots)

        num_bytes = 2 * num_tokens * sizes.token_bytes + 8 * num_tokens
        return Case(num_bytes, 0, bind, wrong_share, 0.0, {})

    def _prepare_inputs(self, rows: int, count: int) -> Case:
        sizes, device, page = self._sizes, self._device, self._sizes.pages[0]
        table_rows, max_len = sizes.table_shape
        token_table = torch.randint(0, sizes.vocab, (table_rows, max_len), dtype=torch.int32, device=device)
        block_tables = torch.randint(1, 10_000, (table_rows, -(-max_len // page)), dtype=torch.int32, device=device)
        entries = torch.randperm(table_rows, device=device)[:rows].to(torch.int32)
        starts = torch.randint(0, max_len - count, (rows,), dtype=torch.int32, device=device)
        counts = torch.full((rows,), count, dtype=torch.int32, device=device)
        page_sizes = torch.tensor([page], dtype=torch.int32, device=device)
        args = (token_table, block_tables[None], entries, starts, counts, page_sizes, rows * count)

        def bind(module: Any) -> Call:
            return partial(module.prepare_inputs, *args)

        def wrong_share(result: tuple[Tensor, ...]) -> float:
            pairs = zip(result, _reference("prepare_inputs").prepare_inputs(*args), strict=True)
            return max((got != expected).float().mean().item() for got, expected in pairs)

        return Case(rows * count * (4 + 3 * 8), 0, bind, wrong_share, 0.0, {})

    def _block_copy(self, page: int) -> Case:
        sizes = self._sizes
        keys, values = self._caches(page)
        blocks = torch.randperm(len(keys), device=self._device)[: 2 * sizes.copied]
        sources, targets = blocks.chunk(2)

        def bind(module: Any) -> Call:
            keys[targets] = 0
            values[targets] = 0
            return partial(module.block_copy, keys, values, sources, targets)

        def wrong_share(_: object) -> float:
            return max((x[targets] != x[sources]).float().mean().item() for x in (keys, values))

        return Case(2 * sizes.copied * page * sizes.token_bytes, 0, bind, wrong_share, 0.0, {})

    # ---- tensors

    def _caches(self, page: int) -> tuple[Tensor, Tensor]:
        """The pool as pages: `[N, page, Hkv, D]`, twice."""
        used = len(self._keys) // page * page
        keys, values = (pool[:used].unflatten(0, (-1, page)) for pool in (self._keys, self._values))
        return keys, values

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self._sizes.dtype, device=self._device)


def _decode_name(rows: int, length: int, page: int) -> str:
    return f"decode B={rows} L={length} page={page}"


def _prefill_name(rows: int, count: int, context: int, page: int) -> str:
    return f"prefill {rows}×{count}{f' on {context}' if context else ''} page={page}"


def cache_call(call: Call) -> Call:
    """The call, made once and only when its result is needed."""
    return cache(call)


def _reference(slot: str) -> Any:
    return importlib.import_module(f"cbtriton.kernels.{slot}.{REFERENCE}")


def _distance_of_shares(result: Tensor, expected: Call) -> float:
    return (result.softmax(-1) - expected().softmax(-1)).abs().max().item()


def _relative_error(result: Tensor, expected: Call) -> float:
    right = expected().float()
    return ((result.float() - right).norm() / right.norm()).item()


@dataclass(frozen=True, slots=True)
class Sampler:
    """One way to sample, and what torch's own operations make of it.

    Attributes:
        temperature: 0 means greedy.
        top_k: 0 means off.
        top_p: 1.0 means off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def draw(self, logits: Tensor) -> Tensor:
        """Draws without waiting for the device."""
        if self.temperature == 0:
            return logits.argmax(-1)
        if self.top_k:
            best, ids = logits.float().topk(self.top_k)
            return ids.gather(1, self._race(best)[:, None])[:, 0]
        if self.top_p < 1:
            ordered, ids = logits.float().sort(descending=True)
            ordered = ordered.masked_fill(~self._is_kept(ordered), -torch.inf)
            return ids.gather(1, self._race(ordered)[:, None])[:, 0]
        return self._race(logits.float())

    def least(self, logits: Tensor) -> Tensor:
        """`[rows]`: no logit below may be drawn, but for rounding."""
        if self.temperature == 0:
            return logits.max(-1).values.float()
        if self.top_k:
            return logits.float().topk(self.top_k).values[:, -1]
        if self.top_p < 1:
            ordered = logits.float().sort(descending=True).values
            # One step of bf16 at these magnitudes: sums in another order may keep one value more.
            return ordered.masked_fill(~self._is_kept(ordered), torch.inf).min(-1).values - 0.07
        return torch.full(logits.shape[:1], -torch.inf, device=logits.device)

    def _is_kept(self, ordered: Tensor) -> Tensor:
        shares = ordered.softmax(-1)
        return shares.cumsum(-1) - shares < self.top_p

    @staticmethod
    def _race(scores: Tensor) -> Tensor:
        return (scores.softmax(-1) / torch.empty_like(scores).exponential_()).argmax(-1)


SAMPLERS = {
    "greedy": Sampler(temperature=0.0),
    "top-k 50": Sampler(top_k=50),
    "top-p 0.9": Sampler(top_p=0.9),
    "unfiltered": Sampler(),
}


class DenseAttention:
    """The same attention over keys and values in one piece, through torch.

    Args:
        query: `[rows, count, Hq, D]`.
        key: `[rows, length, Hkv, D]`.
        value: `[rows, length, Hkv, D]`.
        context: Tokens before the first query token.
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, context: int) -> None:
        self._query, self._key, self._value = (x.transpose(1, 2) for x in (query, key, value))
        self._context = context
        self._count = query.shape[1]
        if self._count == 1:
            # A group's query heads become queries of one head: keys are then read once.
            grouped = self._query.reshape(len(query), key.shape[2], -1, key.shape[3])
            self._attend = partial(F.scaled_dot_product_attention, grouped, self._key, self._value)
        else:
            groups = query.shape[2] // key.shape[2]
            key, value = (x.repeat_interleave(groups, dim=1) for x in (self._key, self._value))
            self._attend = partial(F.scaled_dot_product_attention, self._query, key, value)

    def sdpa(self) -> Tensor:
        """Scaled dot product attention: `[rows * count, Hq, D]`."""
        if self._count == 1:
            return self._attend().flatten(1, 2)
        if not self._context:
            return _packed(self._attend(is_causal=True))
        from torch.nn.attention.bias import causal_lower_right

        bias: Any = causal_lower_right(self._count, self._context + self._count)
        return _packed(self._attend(attn_mask=bias))

    def peers(self) -> dict[str, Call]:
        """Torch's attention by backend; a backend that cannot do it raises when it is called."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def with_backend(backend: SDPBackend) -> Tensor:
            with sdpa_kernel(backend):
                return self.sdpa()

        backends = {"sdpa flash": SDPBackend.FLASH_ATTENTION}
        # The bias of a chunk is known to the flash backend only.
        if self._count == 1 or not self._context:
            backends["sdpa cudnn"] = SDPBackend.CUDNN_ATTENTION
        return {name: partial(with_backend, backend) for name, backend in backends.items()}

    def flex(self, device: torch.device) -> Call:
        """FlexAttention, compiled on a GPU; everything that can fail happens in the call."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        context, count = self._context, self._count

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return query + context >= key

        @cache
        def prepared() -> tuple[Callable[..., Any], Any]:
            attend = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention
            if count == 1:
                return attend, None
            return attend, create_block_mask(sees, None, None, count, context + count, device=str(device))

        def call() -> Any:
            attend, mask = prepared()
            return attend(self._query, self._key, self._value, block_mask=mask, enable_gqa=True)

        return call


def _packed(attended: Tensor) -> Tensor:
    """`[rows, H, count, D]` -> `[rows * count, H, D]`."""
    return attended.transpose(1, 2).flatten(0, 1)
