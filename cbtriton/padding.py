"""Padded sizes of a step. Every size that must not depend on the step's exact contents comes from here."""

from __future__ import annotations

from dataclasses import dataclass

from cbtriton.plan import BatchPlan, Path


@dataclass(frozen=True, slots=True)
class Bucket:
    """The sizes that a step runs at.

    Attributes:
        path: Which compiled or captured function runs it.
        num_tokens: Query tokens, padding included.
        num_requests: Rows, padding rows included.
        max_kv: Longest context that the step may hold, in tokens.
    """

    path: Path
    num_tokens: int
    num_requests: int
    max_kv: int

    @property
    def name(self) -> str:
        """Short readable key, for counters and logs."""
        return f"{self.path}:{self.num_tokens}x{self.num_requests}x{self.max_kv}"


@dataclass(frozen=True, slots=True)
class PaddingPolicy:
    """Rounds a step's sizes up to multiples of an interval.

    An interval of 1 means exact sizes, which is what an eager step on a host without captured graphs wants: padding
    would only add work there.

    Attributes:
        q_interval: Granularity of query tokens and rows, at least 1.
        kv_interval: Granularity of the longest context in tokens, at least 1.
        max_batch_tokens: No bucket has more query tokens than this.
        max_requests: No bucket has more rows than this.
    """

    q_interval: int
    kv_interval: int
    max_batch_tokens: int
    max_requests: int

    def bucket(self, plan: BatchPlan) -> Bucket:
        """The bucket that `plan` runs in: the smallest one that holds it."""
        num_rows = len(plan.rows)
        return Bucket(
            path=plan.path,
            num_tokens=min(_round_up(plan.num_tokens, self.q_interval), max(self.max_batch_tokens, plan.num_tokens)),
            num_requests=min(_round_up(num_rows, self.q_interval), max(self.max_requests, num_rows)),
            max_kv=_round_up(plan.max_seq_len, self.kv_interval),
        )


def _round_up(value: int, interval: int) -> int:
    return -(-value // interval) * interval
