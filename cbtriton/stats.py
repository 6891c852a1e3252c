"""Counters and step records that the engine fills and `ContinuousBatchingManager.stats()` returns.

Times are in seconds. The counters are plain numbers without locks: one thread (the engine's) writes them,
readers get a copy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

# What these tell is a state, not something that adds up.
_STATES = frozenset(
    (
        "blocks_total",
        "blocks_in_use",
        "blocks_cached",
        "blocks_pinned",
        "blocks_free",
        "num_running",
        "num_waiting",
        "host_blocks_total",
        "host_blocks_in_use",
        "host_cache_bytes",
        "cache_bytes",
        "weight_bytes",
        "packed_weight_bytes",
        "table_bytes",
        "state_bytes",
        "graph_bytes",
    )
)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step held and how long its stages took.

    Attributes:
        index: Number of the step, from 0.
        start_time: `time.perf_counter()` when scheduling began.
        path: `varlen` or `decode`.
        num_rows: Requests in the step.
        prefill_tokens: Tokens run of rows that had more than one token left to run.
        decode_tokens: Tokens run of rows that had exactly one left.
        bucket: Name of the sizes that the step ran at.
        padding_tokens: Tokens added to reach the bucket's size.
        kv_tokens: Tokens of the longest context.
        padding_kv_tokens: Tokens that the bucket's longest context may have beyond that.
        num_preempted: Requests that lost their blocks while this step was planned.
        blocks_in_use: Blocks referenced by requests.
        blocks_cached: Blocks that hold a reusable prefix and belong to no request.
        num_waiting: Requests not running.
        schedule_time: Seconds to decide what runs.
        prepare_time: Seconds to fill the step's inputs.
        run_time: Seconds from launch to result.
        update_time: Seconds to commit the result.
    """

    index: int
    start_time: float
    path: str
    num_rows: int
    prefill_tokens: int
    decode_tokens: int
    bucket: str
    padding_tokens: int
    kv_tokens: int
    padding_kv_tokens: int
    num_preempted: int
    blocks_in_use: int
    blocks_cached: int
    num_waiting: int
    schedule_time: float
    prepare_time: float
    run_time: float
    update_time: float


@dataclass(frozen=True, slots=True)
class Preparation:
    """What steps of one bucket cost once, before they could run.

    Attributes:
        kind: `compile` or `capture`.
        bucket: Name of the sizes.
        graphs: Graphs that were made; 0 where a capture failed.
        seconds: Time that it took.
    """

    kind: Literal["compile", "capture"]
    bucket: str
    graphs: int
    seconds: float


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine was made. `prompt_tokens` counts admitted prompts once, even after a preemption.

    `buckets` counts the padded steps by the name of their bucket; `kv_tokens` adds up the longest context of each step.
    `compilations` counts graphs of the compiler, `late_compilations` those that a step waited for after a warm-up;
    `compile_time` is the seconds of both. `captures` counts graphs of the device, `capture_failures` those that could
    not be captured, `capture_time` the seconds of both, `replays` the steps that ran from a graph; `graph_bytes` is the
    memory that graphs hold now, beside their nodes. `preparations` has an entry each time that a bucket was compiled or
    captured: first all of the one kind, then all of the other.

    `offloads` counts preemptions whose blocks went to host memory; those of all others are computed again. `restores`
    counts requests that came back from there, with `restored_tokens` tokens; the prefix cache may have had more when
    they did. `failed_swaps` counts requests that compute again because such a copy failed. `host_blocks_in_use` of
    `host_blocks_total` hold something; all of them take `host_cache_bytes`.

    `host_processed_tokens` counts tokens for which functions of their callers ran on the host.

    `blocks_pinned` of the `blocks_in_use` hold pinned prefixes, whether requests use them or not. `table_bytes` are the
    tokens, blocks and parameters of all requests, `state_bytes` the states of recurrent layers that are held;
    `bytes_by_purpose` has all that holds memory between two steps.
    """

    steps: int = 0
    decode_steps: int = 0
    requests_added: int = 0
    requests_finished: int = 0
    requests_failed: int = 0
    requests_cancelled: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    generated_tokens: int = 0
    prefix_cached_tokens: int = 0
    prefix_queried_tokens: int = 0
    padding_tokens: int = 0
    kv_tokens: int = 0
    padding_kv_tokens: int = 0
    dropped_tokens: int = 0
    host_processed_tokens: int = 0
    preemptions: int = 0
    offloads: int = 0
    restores: int = 0
    restored_tokens: int = 0
    failed_swaps: int = 0
    forks: int = 0
    blocks_total: int = 0
    blocks_in_use: int = 0
    blocks_cached: int = 0
    blocks_pinned: int = 0
    blocks_free: int = 0
    num_running: int = 0
    num_waiting: int = 0
    schedule_time: float = 0.0
    prepare_time: float = 0.0
    run_time: float = 0.0
    update_time: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)
    cache_bytes: int = 0
    host_blocks_total: int = 0
    host_blocks_in_use: int = 0
    host_cache_bytes: int = 0
    weight_bytes: int = 0
    packed_weight_bytes: int = 0
    table_bytes: int = 0
    state_bytes: int = 0
    compilations: int = 0
    late_compilations: int = 0
    compile_time: float = 0.0
    captures: int = 0
    capture_failures: int = 0
    capture_time: float = 0.0
    replays: int = 0
    graph_bytes: int = 0
    preparations: tuple[Preparation, ...] = ()

    def since(self, earlier: EngineStats) -> EngineStats:
        """The same with everything that adds up counted from `earlier` on, a snapshot of the same engine."""
        changes: dict[str, Any] = {
            f.name: getattr(self, f.name) - getattr(earlier, f.name)
            for f in fields(self)
            if f.name not in _STATES and f.name not in ("buckets", "preparations")
        }
        return replace(
            self,
            **changes,
            buckets=dict(Counter(self.buckets) - Counter(earlier.buckets)),
            preparations=tuple((Counter(self.preparations) - Counter(earlier.preparations)).elements()),
        )

    @property
    def bytes_by_purpose(self) -> dict[str, int]:
        """Bytes of memory that are held between two steps, by purpose; on a CPU a cache takes what is written only."""
        return {
            "weights": self.weight_bytes,
            "packed weights": self.packed_weight_bytes,
            "cache": self.cache_bytes,
            "host cache": self.host_cache_bytes,
            "tables": self.table_bytes,
            "states": self.state_bytes,
            "graphs": self.graph_bytes,
        }

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the looked-up prompt tokens that the prefix cache provided, 0…1."""
        return self.prefix_cached_tokens / self.prefix_queried_tokens if self.prefix_queried_tokens else 0.0

    @property
    def padding_waste(self) -> float:
        """(padded - real) / padded of the query tokens over all steps, 0…1."""
        return waste(self.padding_tokens, self.prefill_tokens + self.decode_tokens)

    @property
    def kv_padding_waste(self) -> float:
        """(padded - real) / padded of the longest contexts over all steps, 0…1."""
        return waste(self.padding_kv_tokens, self.kv_tokens)

    @property
    def cache_use(self) -> float:
        """Share of the blocks that requests hold, 0…1."""
        return self.blocks_in_use / self.blocks_total if self.blocks_total else 0.0


def waste(padding: int, real: int) -> float:
    """(padded - real) / padded, 0…1; 0 where there is nothing."""
    return padding / (padding + real) if padding else 0.0
