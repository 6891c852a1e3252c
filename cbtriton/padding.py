"""Padded sizes of a step. Every size that must not depend on the step's exact contents comes from here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from cbtriton.config import EngineConfig, WorkloadHints
from cbtriton.plan import BatchPlan, Path

_NO_HINTS = WorkloadHints()
# What compilers tune a graph for that serves any size.
_TYPICAL_ROWS = 16
_TYPICAL_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Bucket:
    """The sizes that a step runs at.

    Attributes:
        path: Which compiled or captured function runs it.
        num_tokens: Query tokens, padding included.
        num_requests: Rows, padding rows included.
        num_samples: Rows that get a new token, padding rows included.
        max_kv: Longest context that the step may hold, in tokens.
    """

    path: Path
    num_tokens: int
    num_requests: int
    num_samples: int
    max_kv: int

    @property
    def name(self) -> str:
        """Short readable key, for counters and logs."""
        return f"{self.path}:{self.num_tokens}x{self.num_requests}x{self.max_kv}"


@dataclass(frozen=True, slots=True)
class PaddingPolicy:
    """Rounds the sizes of a step up, so that many steps share one compiled variant or captured graph.

    Tokens and contexts go up to multiples of an interval, rows to powers of two; each size stops at the largest one
    that a step can have. Every row of a padded step samples, so that no size depends on where prompts end. A flexible
    path has graphs that serve any size: it only keeps sizes at 2 or more, because compilers make a constant of a 1, and
    rounds contexts, whose size is a constant of the graph. All other steps run at exact sizes.

    Attributes:
        q_interval: Granularity of query tokens, at least 1.
        kv_interval: Granularity of the longest context in tokens, at least 1.
        max_batch_tokens: No step has more query tokens than this.
        max_requests: No step has more rows than this.
        max_kv: No context is longer than this many tokens.
        max_decode_kv: No context on the decode path is longer than this many tokens.
        padded_paths: The paths that are padded.
        flexible_paths: The paths that are compiled for any size; none of the padded ones.
    """

    q_interval: int
    kv_interval: int
    max_batch_tokens: int
    max_requests: int
    max_kv: int
    max_decode_kv: int
    padded_paths: tuple[Path, ...]
    flexible_paths: tuple[Path, ...] = ()

    @classmethod
    def of(cls, config: EngineConfig) -> PaddingPolicy:
        """The policy that an engine's configuration describes."""
        return cls(
            q_interval=config.q_interval,
            kv_interval=config.kv_interval,
            max_batch_tokens=config.max_batch_tokens,
            # Each row runs at least one token.
            max_requests=min(config.max_requests, config.max_batch_tokens),
            max_kv=config.max_blocks_per_request * min(config.cache_layout.page_sizes),
            max_decode_kv=config.max_decode_blocks * config.page_size,
            padded_paths=config.padded_paths,
            flexible_paths=config.flexible_paths,
        )

    def bucket(self, plan: BatchPlan) -> Bucket:
        """The bucket that `plan` runs in: the smallest one that holds it."""
        num_rows, path = len(plan.rows), plan.path
        if path not in self.padded_paths:
            num_samples = sum(row.samples for row in plan.rows)
            if path in self.flexible_paths:
                return self._flexible(path, plan.num_tokens, num_rows, num_samples, plan.max_seq_len)
            return Bucket(path, plan.num_tokens, num_rows, num_samples, plan.max_seq_len)
        num_requests = self._pad_rows(num_rows)
        num_tokens = num_requests if path == "decode" else self._pad_tokens(plan.num_tokens)
        return Bucket(path, num_tokens, num_requests, num_requests, self._pad_kv(path, plan.max_seq_len))

    def buckets(self, path: Path, hints: WorkloadHints = _NO_HINTS) -> tuple[Bucket, ...]:
        """Every bucket that a step of `path` can fall into, largest first; none where the path is not padded.

        Args:
            path: The path.
            hints: Bounds the number of rows and the lengths of contexts, where known. A step of other requests than
                the hinted ones may fall outside.
        """
        if path not in self.padded_paths:
            return ()
        num_rows = min(self.max_requests, hints.num_requests or self.max_requests)
        longest = self._reachable(path, hints)
        rows = list(_size_classes(self._pad_rows, num_rows))
        contexts = list(_size_classes(lambda size: self._pad_kv(path, size), longest))
        if path == "decode":
            found = [Bucket(path, r.padded, r.padded, r.padded, kv.padded) for r, kv in product(rows, contexts)]
        else:
            tokens = _size_classes(self._pad_tokens, min(self.max_batch_tokens, num_rows * longest))
            found = [
                Bucket(path, t.padded, r.padded, r.padded, kv.padded)
                for t, r, kv in product(tokens, rows, contexts)
                if self._is_varlen(t, r, kv)
            ]
        return tuple(sorted(found, key=lambda b: (b.num_tokens, b.num_requests, b.max_kv), reverse=True))

    def prepared_buckets(self, path: Path, hints: WorkloadHints = _NO_HINTS) -> tuple[Bucket, ...]:
        """What has to be run once so that no step of `path` meets anything new: see `buckets` for the padded ones.

        On a flexible path one bucket stands for all with its longest context. Compilers take its sizes for typical.
        """
        if path not in self.flexible_paths:
            return self.buckets(path, hints)
        rows = min(self.max_requests, hints.num_requests or self.max_requests, _TYPICAL_ROWS)
        tokens = rows if path == "decode" else max(rows, min(self.max_batch_tokens, _TYPICAL_TOKENS))
        contexts = _size_classes(lambda size: self._pad_kv(path, size), self._reachable(path, hints))
        found = [self._flexible(path, tokens, rows, rows, kv.padded) for kv in contexts]
        return tuple(reversed(found))

    def _flexible(self, path: Path, num_tokens: int, num_rows: int, num_samples: int, max_kv: int) -> Bucket:
        num_rows, num_samples = max(2, num_rows), max(2, num_samples)
        return Bucket(path, max(num_rows, num_tokens), num_rows, num_samples, self._pad_kv(path, max_kv))

    def _is_varlen(self, tokens: _SizeClass, rows: _SizeClass, kv: _SizeClass) -> bool:
        """Whether some varlen step has sizes in these three classes.

        A row runs at least one token and no more than its context has. Where the decode path takes contexts of that
        length, some row runs more than one.
        """
        has_longer_row = kv.high <= self.max_decode_kv
        if has_longer_row and kv.high == 1:
            return False
        return max(tokens.low, rows.low + has_longer_row) <= min(tokens.high, rows.high * kv.high)

    def _reachable(self, path: Path, hints: WorkloadHints) -> int:
        # The last token of an answer never runs.
        return min(self._longest(path), (hints.max_length or self.max_kv + 1) - 1)

    def _longest(self, path: Path) -> int:
        return min(self.max_kv, self.max_decode_kv) if path == "decode" else self.max_kv

    def _pad_tokens(self, num_tokens: int) -> int:
        return _at_most(_round_up(num_tokens, self.q_interval), self.max_batch_tokens, num_tokens)

    def _pad_rows(self, num_rows: int) -> int:
        return _at_most(1 << (num_rows - 1).bit_length(), self.max_requests, num_rows)

    def _pad_kv(self, path: Path, num_tokens: int) -> int:
        return _at_most(_round_up(num_tokens, self.kv_interval), self._longest(path), num_tokens)


@dataclass(frozen=True, slots=True)
class _SizeClass:
    """The real sizes `low` to `high` that have the same padded size."""

    low: int
    high: int
    padded: int


def _size_classes(pad: Callable[[int], int], largest: int) -> Iterator[_SizeClass]:
    """Splits the sizes from 1 to `largest` by their padded size."""
    low = 1
    while low <= largest:
        padded = pad(low)
        yield _SizeClass(low, min(padded, largest), padded)
        low = padded + 1


def _round_up(value: int, interval: int) -> int:
    return -(-value // interval) * interval


def _at_most(padded: int, limit: int, real: int) -> int:
    """`padded` within its limit, which only the engine's check of the model exceeds: that runs at its real size."""
    return max(min(padded, limit), real)
