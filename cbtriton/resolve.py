"""Turns what was asked for into an `EngineConfig`: one pure function, called once when a manager is made.

Every value that the caller left open becomes a number here and leaves a `Decision` behind. Nothing else in
the package infers a setting. The module knows sizes, not tensors: the caller measures the model and its
device first.
"""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from cbtriton.cache_layout import CacheLayout
from cbtriton.config import (
    CompileRegion,
    CompileSettings,
    ContinuousBatchingConfig,
    Decision,
    EngineConfig,
    MemoryShare,
    ModelFacts,
    WorkloadHints,
    describe_memory,
)
from cbtriton.request import LogprobKind

_Value = TypeVar("_Value")
_Path = Literal["varlen", "decode"]
_PATHS: tuple[_Path, ...] = ("varlen", "decode")

_MAX_REQUESTS = 1024
_MIN_BATCH_TOKENS = 256
_MAX_BATCH_TOKENS = 8192
_MAX_BATCH_TOKENS_CPU = 2048
_SHARED_MEMORY_DEVICES = ("cpu", "mps")
# Ids, positions and slots of a token.
_COLUMN_BYTES = 24
# Parameters of a request, most of them rules of logits processors; see `RequestTable`.
_PARAMETER_BYTES = 12_288 + 256
_Q_INTERVAL = 64
_KV_INTERVAL = 16384
_GIB = 2**30


@dataclass(slots=True)
class _Log:
    """Collects the decisions of one `resolve` call."""

    decisions: list[Decision] = field(default_factory=list)

    def decide(self, name: str, asked: object, resolved: _Value, why: str) -> _Value:
        """Records why `name` became `resolved`, which is returned."""
        self.decisions.append(Decision(name, asked, resolved, why))
        return resolved


@dataclass(frozen=True, slots=True)
class _Budget:
    """What an engine takes of the device's memory, as a function of the blocks and of the tokens per step.

    Attributes:
        facts: The model and the device.
        layout: What a block is.
        wanted_requests: Requests that are to run at a time.
        is_fixed: Whether that many rows are made, even if there are fewer blocks.
        is_captured: Whether steps are captured: graphs have logits and activations of their own.
    """

    facts: ModelFacts
    layout: CacheLayout
    wanted_requests: int
    is_fixed: bool
    is_captured: bool

    def num_requests(self, num_blocks: int) -> int:
        """Rows of the request table: each running request holds a block in every group."""
        return (
            self.wanted_requests
            if self.is_fixed
            else min(self.wanted_requests, num_blocks // self.layout.peak_blocks(1, 1))
        )

    def max_model_len(self, num_blocks: int) -> int:
        """Tokens of the longest sequence."""
        # Where every layer has a window, sequences of any length fit; but the tables must end somewhere.
        at_most = self.facts.max_position_embeddings or num_blocks * max(self.layout.page_sizes)
        return self.layout.num_fitting_tokens(num_blocks, at_most)

    def shares(self, num_blocks: int, step_tokens: int) -> tuple[MemoryShare, ...]:
        """What each purpose takes."""
        facts, layout = self.facts, self.layout
        requests, length = self.num_requests(num_blocks), self.max_model_len(num_blocks)
        # One row more, for padding; see `RequestTable`.
        tokens_and_blocks = 4 * (length + 1 + len(layout.page_sizes) * layout.max_pages(length))
        mask = 4 * -(-facts.vocab_size // 32)
        tables = (requests + 1) * (tokens_and_blocks + _PARAMETER_BYTES + mask)
        sampled = min(requests, step_tokens)
        # The model's logits, and what sampling makes of them in float32.
        logits = sampled * facts.vocab_size * (facts.logits_dtype_bytes + 4)
        activations = step_tokens * (facts.activation_bytes_per_token + _COLUMN_BYTES)
        shares = [
            MemoryShare("cache", num_blocks * layout.block_bytes, f"{num_blocks} blocks of {layout.block_bytes} bytes"),
            MemoryShare("tables", tables, f"{requests} requests of up to {length} tokens"),
            MemoryShare("logits", logits, f"{sampled} rows that sample, {facts.vocab_size} each"),
            MemoryShare("activations", activations, f"a step of {step_tokens} tokens"),
        ]
        if facts.kept_states is not None:
            tokens = num_blocks * min(layout.page_sizes)
            states = requests * facts.state_bytes_per_request + tokens * facts.state_bytes_per_token
            shares.append(MemoryShare("states", states, f"{facts.kept_states} of {requests} requests"))
        if self.is_captured:
            shares.append(MemoryShare("graphs", logits + activations, "the same once more"))
        return tuple(shares)

    def num_bytes(self, num_blocks: int, step_tokens: int) -> int:
        """What all purposes take."""
        return sum(share.num_bytes for share in self.shares(num_blocks, step_tokens))

    def largest(self, num_bytes: Callable[[int], int], at_most: int) -> int:
        """The largest number up to `at_most` for which `num_bytes` is available, else 0; `num_bytes` never falls."""
        low, high = 0, max(0, at_most)
        while low < high:
            middle = (low + high + 1) // 2
            fits = num_bytes(middle) <= self.facts.available_memory_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


def resolve(
    config: ContinuousBatchingConfig,
    hints: WorkloadHints,
    facts: ModelFacts,
    *,
    has_logits_processing: bool,
    scheduler_types: Mapping[str, float],
    has_processors: bool = False,
) -> EngineConfig:
    """Every setting of an engine, from what was asked for and what is known.

    Args:
        config: What was asked for; not changed. It is checked again, since its fields can be assigned.
        hints: What is known about the requests.
        facts: What is known about the model and the device.
        has_logits_processing: Whether logits go through processors, which need memory of the vocabulary's
            size.
        scheduler_types: Name of each scheduler -> its own safety margin, a share of the blocks.
        has_processors: Whether requests that bring no arguments have more than temperature, top-k, top-p, min-p and a
            minimum length.

    Raises:
        ValueError: A value is out of range, the scheduler is unknown, or there is no memory for a single
            block.
    """
    config = ContinuousBatchingConfig.from_any(config)
    log = _Log()
    if facts.kept_states is not None:
        _refuse_graphs(config, facts.kept_states)
    captured_paths = _captured_paths(config, facts, log)
    layout = CacheLayout.of(facts.cached_layers, config.page_size)
    default_margin = _scheduler_margin(config, scheduler_types)

    wanted_requests, requests_why = _wanted_requests(config, hints)
    budget = _Budget(facts, layout, wanted_requests, config.max_requests_per_batch is not None, bool(captured_paths))
    num_blocks = _num_blocks(config, hints, budget, has_logits_processing, log)
    max_requests = _max_requests(config, budget, requests_why, num_blocks, log)
    max_model_len = _max_model_len(config, budget, num_blocks, log)
    max_batch_tokens = _max_batch_tokens(config, budget, num_blocks, log)
    max_decode_blocks = _max_decode_blocks(config, hints, max_model_len, log)
    compiled: dict[_Path, CompileSettings | None] = {path: _compile_settings(config, path) for path in _PATHS}
    padded_paths = _padded_paths(config, compiled, captured_paths, log)
    flexible_paths: tuple[_Path, ...] = tuple(path for path in _PATHS if compiled[path] and path not in padded_paths)
    return EngineConfig(
        page_size=config.page_size,
        cache_layout=layout,
        num_blocks=num_blocks,
        num_host_blocks=_num_host_blocks(config, facts, layout, num_blocks, log),
        max_batch_tokens=max_batch_tokens,
        max_requests=max_requests,
        max_blocks_per_request=layout.max_pages(max_model_len),
        max_decode_blocks=max_decode_blocks,
        max_model_len=max_model_len,
        use_decode_path=max_decode_blocks > 0,
        share_blocks=_share_blocks(config, facts, log),
        keeps_states=facts.kept_states is not None,
        least_prompt_piece=facts.least_prompt_piece,
        rope_switch_length=facts.rope_switch_length,
        async_depth=_async_depth(config, captured_paths, log),
        varlen_compile=compiled["varlen"],
        decode_compile=compiled["decode"],
        compile_region=_compile_region(facts, compiled, log),
        captured_paths=captured_paths,
        padded_paths=padded_paths,
        flexible_paths=flexible_paths,
        q_interval=_interval(config, "q_padding_interval_size", _Q_INTERVAL if padded_paths else 1, log),
        kv_interval=_interval(
            config, "kv_padding_interval_size", _KV_INTERVAL if padded_paths or flexible_paths else 1, log
        ),
        scheduler_type=config.scheduler_type,
        safety_margin=_safety_margin(config, default_margin, log),
        logprobs=_logprob_kind(config.return_logprobs),
        seed=_seed(config, log),
        max_queue_size=config.max_queue_size,
        per_request_processors=config.per_request_processors,
        has_processors=has_processors or config.per_request_processors,
        drop_unsupported_processors=config.drop_unsupported_processors,
        memory_budget=budget.shares(num_blocks, max_batch_tokens),
        available_memory_bytes=facts.available_memory_bytes,
        decisions=tuple(log.decisions),
    )


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Host memory that this process may still take, in bytes.

    The smallest of what the kernel calls available and what each enclosing control group (version 1 or 2)
    leaves; file pages that a group could drop count as free.

    Args:
        root: Where `proc` and `sys` are mounted.

    Raises:
        RuntimeError: The platform does not tell.
    """
    available = [*_kernel_available(root), *_control_group_rooms(root)]
    if not available:
        available = [_free_pages_bytes()]
    return max(0, min(available))


def _refuse_graphs(config: ContinuousBatchingConfig, kept_states: str) -> None:
    """Raises if steps of a model should be compiled or captured whose requests keep something beside the pages.

    Raises:
        ValueError: They should.
    """
    asked = {
        "default_compile_level": config.default_compile_level or None,
        "varlen_compile_config": config.varlen_compile_config,
        "decode_compile_config": config.decode_compile_config,
        "use_cuda_graph": config.use_cuda_graph if any(config.cuda_graph_booleans) else None,
    }
    for name, value in asked.items():
        if value is not None:
            raise ValueError(
                f"{name} must be left out for a model with {kept_states}, called for each sequence of a step: no "
                f"graph is the same for two steps; got {value!r}"
            )


def _share_blocks(config: ContinuousBatchingConfig, facts: ModelFacts, log: _Log) -> bool:
    if config.allow_block_sharing and facts.kept_states is not None:
        why = f"a cached prefix has nothing of {facts.kept_states}"
        return log.decide("allow_block_sharing", True, False, why)
    return config.allow_block_sharing


def _captured_paths(config: ContinuousBatchingConfig, facts: ModelFacts, log: _Log) -> tuple[_Path, ...]:
    asked = config.use_cuda_graph
    if facts.kept_states is not None:
        return log.decide("use_cuda_graph", asked, (), f"{facts.kept_states}: called for each sequence")
    if facts.has_graphs:
        if asked is None:
            log.decide("use_cuda_graph", None, (True, True), f"{facts.device_type} has graphs")
            return _PATHS
        return tuple(path for path, is_captured in zip(_PATHS, config.cuda_graph_booleans, strict=True) if is_captured)
    if any(config.cuda_graph_booleans):
        warnings.warn(
            f"use_cuda_graph={asked!r} has no effect: {facts.device_type} has no graphs; set use_cuda_graph=None",
            UserWarning,
            stacklevel=3,
        )
    log.decide("use_cuda_graph", asked, (False, False), f"{facts.device_type} has no graphs")
    return ()


def _scheduler_margin(config: ContinuousBatchingConfig, scheduler_types: Mapping[str, float]) -> float:
    if config.scheduler_type not in scheduler_types:
        known = ", ".join(sorted(scheduler_types))
        raise ValueError(f"scheduler_type must be one of {known}, got {config.scheduler_type!r}; pick or register one")
    return scheduler_types[config.scheduler_type]


def _wanted_requests(config: ContinuousBatchingConfig, hints: WorkloadHints) -> tuple[int, str]:
    if config.max_requests_per_batch is not None:
        return config.max_requests_per_batch, "as asked"
    if 0 < hints.num_requests < _MAX_REQUESTS:
        return hints.num_requests, "the hinted number of requests"
    return _MAX_REQUESTS, "the preset"


def _num_blocks(
    config: ContinuousBatchingConfig, hints: WorkloadHints, budget: _Budget, has_logits_processing: bool, log: _Log
) -> int:
    facts, layout = budget.facts, budget.layout
    fewest = layout.peak_blocks(1, 1)
    if config.num_blocks is not None:
        if config.num_blocks < fewest:
            raise ValueError(
                f"num_blocks must be at least {fewest} for this model, whose layers are in {fewest} groups with a "
                f"block each, got {config.num_blocks}"
            )
        return config.num_blocks
    share = _memory_share(config, facts, has_logits_processing, log)
    step_tokens = config.max_batch_tokens or _MIN_BATCH_TOKENS
    at_most = int(share * facts.available_memory_bytes) // layout.block_bytes
    fitting = budget.largest(lambda number: budget.num_bytes(number, step_tokens), at_most)
    if fitting < fewest:
        least = budget.shares(fewest, step_tokens)
        raise ValueError(
            f"no memory for the cache: {share:g} of the {facts.available_memory_bytes} bytes available may be cache, "
            f"and {fewest} blocks of {layout.block_bytes} bytes with steps of {step_tokens} tokens take "
            f"{sum(part.num_bytes for part in least)} bytes in all; free memory, lower page_size, max_batch_tokens or "
            "max_requests_per_batch, raise max_memory_percent, or set num_blocks\n"
            f"{describe_memory(least, facts.available_memory_bytes)}"
        )
    why = f"{share:g} of {facts.available_memory_bytes} bytes available, {layout.block_bytes} bytes per block"
    if fitting < at_most:
        why = f"what steps of {step_tokens} tokens leave of {facts.available_memory_bytes} bytes available"
    for useful, reason in _useful_blocks(config, hints, budget):
        if useful < fitting:
            fitting, why = useful, reason
    return log.decide("num_blocks", None, fitting, why)


def _num_host_blocks(
    config: ContinuousBatchingConfig, facts: ModelFacts, layout: CacheLayout, num_blocks: int, log: _Log
) -> int:
    asked, threshold = config.cpu_offload_space, config.cpu_offload_space_safety_threshold
    if asked == 0:
        return 0
    if facts.kept_states is not None:
        return log.decide("cpu_offload_space", asked, 0, f"{facts.kept_states}: computed again")
    block_bytes = layout.block_bytes
    # Where device and host share their memory, the cache takes its part of it first.
    cache_bytes = num_blocks * block_bytes if facts.device_type in _SHARED_MEMORY_DEVICES else 0
    available = max(0, facts.available_host_memory_bytes - cache_bytes)
    allowed = int(threshold * available)
    num_allowed = allowed // block_bytes
    why = f"{num_allowed} blocks of {block_bytes} bytes; {threshold:g} of {available} bytes of host memory available"
    if asked is None:
        log.decide("cpu_offload_space", None, num_allowed * block_bytes / _GIB, why)
        return num_allowed
    wanted = int(asked * _GIB)
    if wanted < block_bytes:
        raise ValueError(
            f"cpu_offload_space={asked!r} GiB holds no block: a block of {config.page_size} tokens takes {block_bytes} "
            "bytes; raise it, lower page_size, or set cpu_offload_space=0"
        )
    if threshold == 1 or wanted <= allowed:
        return wanted // block_bytes
    warnings.warn(
        f"cpu_offload_space={asked!r} GiB is capped at {allowed / _GIB:.3g} GiB, which is "
        f"cpu_offload_space_safety_threshold={threshold:g} of the {available / _GIB:.3g} GiB of host memory available; "
        "ask for less, or raise the threshold (1: no cap)",
        UserWarning,
        stacklevel=3,
    )
    log.decide("cpu_offload_space", asked, num_allowed * block_bytes / _GIB, why)
    return num_allowed


def _memory_share(config: ContinuousBatchingConfig, facts: ModelFacts, has_logits_processing: bool, log: _Log) -> float:
    if config.max_memory_percent is not None:
        return config.max_memory_percent
    if facts.device_type in _SHARED_MEMORY_DEVICES:
        return log.decide("max_memory_percent", None, 0.6, "host and device share memory")
    if has_logits_processing:
        return log.decide("max_memory_percent", None, 0.8, "room for logits processing")
    return log.decide("max_memory_percent", None, 0.9, "no logits processing")


def _useful_blocks(
    config: ContinuousBatchingConfig, hints: WorkloadHints, budget: _Budget
) -> Iterator[tuple[int, str]]:
    """Numbers of blocks beyond which more would stay empty, each with its reason.

    Layers with a window could do with fewer for requests that run, but keep what leaves it as cached prefixes.
    """
    longest, layout, positions = 0, budget.layout, budget.facts.max_position_embeddings
    if positions is not None:
        longest = layout.peak_blocks(positions, positions)
        yield budget.wanted_requests * longest, f"{budget.wanted_requests} requests of {positions} positions"
    if hints.max_length > 0 and hints.num_requests > 0:
        # Hints may be wrong, and a manager may outlive them: one request of any length must still fit.
        hinted = hints.num_requests * layout.peak_blocks(hints.max_length + config.page_size, hints.max_length)
        yield (
            max(hinted, longest),
            f"{hints.num_requests} hinted requests of {hints.max_length} tokens, or one of the longest",
        )


def _max_requests(config: ContinuousBatchingConfig, budget: _Budget, why: str, num_blocks: int, log: _Log) -> int:
    if config.max_requests_per_batch is not None:
        return config.max_requests_per_batch
    fitting = budget.num_requests(num_blocks)
    if fitting < budget.wanted_requests:
        why = "each running request holds at least one block of its own"
    return log.decide("max_requests_per_batch", None, fitting, why)


def _max_model_len(config: ContinuousBatchingConfig, budget: _Budget, num_blocks: int, log: _Log) -> int:
    fitting = budget.max_model_len(num_blocks)
    if fitting == budget.facts.max_position_embeddings:
        return log.decide("max_model_len", None, fitting, "the positions of the model")
    return log.decide("max_model_len", None, fitting, f"{num_blocks} blocks of {config.page_size} tokens")


def _max_decode_blocks(config: ContinuousBatchingConfig, hints: WorkloadHints, max_model_len: int, log: _Log) -> int:
    longest = _blocks_for(max_model_len, config.page_size)
    if config.max_blocks_per_request is not None:
        return min(config.max_blocks_per_request, longest)
    hinted = _blocks_for(hints.max_length, config.page_size)
    if 0 < hinted < longest:
        why = f"hinted requests of {hints.max_length} tokens; longer ones run on the varlen path"
        return log.decide("max_blocks_per_request", None, hinted, why)
    return log.decide("max_blocks_per_request", None, longest, f"sequences of up to {max_model_len} tokens")


def _max_batch_tokens(config: ContinuousBatchingConfig, budget: _Budget, num_blocks: int, log: _Log) -> int:
    facts = budget.facts
    if config.max_batch_tokens is not None:
        # A rest of one token more than a piece can neither run as one nor leave another.
        least = 1 if facts.least_prompt_piece == 1 else 2 * facts.least_prompt_piece - 1
        if config.max_batch_tokens < least:
            raise ValueError(
                f"max_batch_tokens must be at least {least} for this model, whose layers do something else with single "
                f"tokens of a prompt, got {config.max_batch_tokens}"
            )
        return config.max_batch_tokens
    at_most, why = _MAX_BATCH_TOKENS, "the most; memory would hold more"
    if budget.facts.device_type == "cpu":
        at_most, why = _MAX_BATCH_TOKENS_CPU, "on a CPU a longer step only delays everybody's next token"
    fitting = budget.largest(lambda number: budget.num_bytes(num_blocks, number), at_most)
    if fitting < _MIN_BATCH_TOKENS:
        room = budget.facts.available_memory_bytes - budget.num_bytes(num_blocks, 0)
        fitting, why = _MIN_BATCH_TOKENS, f"the least; {room} bytes besides the cache"
    elif fitting < at_most:
        why = "what the cache leaves of the memory"
    return log.decide("max_batch_tokens", None, fitting, why)


def _async_depth(config: ContinuousBatchingConfig, captured_paths: tuple[_Path, ...], log: _Log) -> Literal[0, 1]:
    is_async = config.use_async_batching
    if is_async is None:
        why = "it pays where steps are captured as graphs"
        is_async = log.decide("use_async_batching", None, bool(captured_paths), why)
    return 1 if is_async else 0


def _compile_settings(config: ContinuousBatchingConfig, path: _Path) -> CompileSettings | None:
    explicit = config.varlen_compile_config if path == "varlen" else config.decode_compile_config
    if explicit is not None:
        # What was given as a dict became one of these when the configuration was checked.
        assert not isinstance(explicit, dict)
        return CompileSettings.of_config(explicit)
    return CompileSettings.of_level(config.default_compile_level)


def _compile_region(facts: ModelFacts, compiled: Mapping[_Path, CompileSettings | None], log: _Log) -> CompileRegion:
    if not any(compiled.values()):
        return "step"
    if facts.has_repeated_layers:
        return log.decide("compile_region", None, "layer", "all layers share their graphs: a fraction of the seconds")
    return log.decide("compile_region", None, "step", "the model is no list of layers that could share their graphs")


def _padded_paths(
    config: ContinuousBatchingConfig,
    compiled: Mapping[_Path, CompileSettings | None],
    captured_paths: tuple[_Path, ...],
    log: _Log,
) -> tuple[_Path, ...]:
    """The paths whose steps are padded: all where an interval above 1 was asked for, else those with fixed sizes."""
    if max(config.q_padding_interval_size, config.kv_padding_interval_size) > 1:
        return _PATHS
    fixed: tuple[_Path, ...] = tuple(
        path
        for path, settings in compiled.items()
        if path in captured_paths or (settings is not None and not settings.dynamic)
    )
    if fixed:
        return log.decide("padded_paths", None, fixed, "compiled or captured for fixed sizes")
    why = "graphs for any size" if any(compiled.values()) else "nothing is compiled or captured"
    return log.decide("padded_paths", None, (), f"{why}, so steps run at their exact sizes")


def _interval(config: ContinuousBatchingConfig, name: str, preset: int, log: _Log) -> int:
    asked = getattr(config, name)
    if asked > 0:
        return asked
    return log.decide(name, asked, preset, "the preset" if preset > 1 else "no step is padded")


def _safety_margin(config: ContinuousBatchingConfig, default_margin: float, log: _Log) -> float:
    if config.safety_margin is not None:
        return config.safety_margin
    return log.decide("safety_margin", None, default_margin, f"the {config.scheduler_type} scheduler's own")


def _logprob_kind(asked: bool | LogprobKind) -> LogprobKind | None:
    if asked is False:
        return None
    return "processed" if asked is True else asked


def _seed(config: ContinuousBatchingConfig, log: _Log) -> int:
    if config.seed is not None:
        return config.seed
    return log.decide("seed", None, secrets.randbits(63), "drawn at random; set it to repeat this run")


def _blocks_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


def _kernel_available(root: Path) -> Iterator[int]:
    for line in _read_text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _control_group_rooms(root: Path) -> Iterator[int]:
    """What each control group around this process leaves of its limit in bytes, where it has a limit."""
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = mount / path.strip("/")
        # Inside a container the path may be the host's; the container's own limit is then at the mount point.
        for folder in {group, *group.parents, mount}:
            if folder == mount or mount in folder.parents:
                yield from _room(folder, *names)


def _room(folder: Path, limit_name: str, usage_name: str, droppable_name: str) -> Iterator[int]:
    limit, usage = _read_text(folder / limit_name).strip(), _read_text(folder / usage_name).strip()
    if not (limit.isdigit() and usage.isdigit()):
        return
    stat = dict(line.split() for line in _read_text(folder / "memory.stat").splitlines())
    yield int(limit) - int(usage) + int(stat.get(droppable_name, 0))


def _read_text(path: Path) -> str:
    """The file's text; empty where it does not exist or may not be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _free_pages_bytes() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError) as error:
        raise RuntimeError(
            "this platform does not tell how much memory is available; set num_blocks and max_batch_tokens"
        ) from error
