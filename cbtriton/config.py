"""What a caller may ask for, and the frozen record of what an engine was built with.

`ContinuousBatchingConfig`, `WorkloadHints` and `KernelConfig` are requests: they may leave values open.
`cbtriton.resolve.resolve` turns them, once, into an `EngineConfig`, where every value is a number and each
choice made on the caller's behalf is a `Decision`. This module knows nothing of models, devices or memory.
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from cbtriton.cache_layout import CachedLayer, CacheLayout
from cbtriton.request import LogprobKind

if TYPE_CHECKING:
    from transformers import CompileConfig

_Record = TypeVar("_Record")

MAX_SEED = 2**63 - 1
"""Largest seed: seeds travel to the device in signed 64-bit columns."""

# Smallest and largest accepted value; None where there is no largest.
_INTEGERS: dict[str, tuple[int, int | None]] = {
    "page_size": (4, None),
    "num_blocks": (1, None),
    "max_batch_tokens": (1, None),
    "max_requests_per_batch": (1, None),
    "max_blocks_per_request": (0, None),
    "q_padding_interval_size": (0, None),
    "kv_padding_interval_size": (0, None),
    "default_compile_level": (0, 3),
    "seed": (0, MAX_SEED),
    "max_queue_size": (0, None),
}
_NUMBERS: dict[str, dict[str, float]] = {
    "max_memory_percent": {"above": 0.0, "maximum": 1.0},
    "safety_margin": {"minimum": 0.0, "maximum": 1.0},
    "cpu_offload_space": {"minimum": 0.0},
    "cpu_offload_space_safety_threshold": {"minimum": 0.0, "maximum": 1.0},
    "cpu_group_timeout": {"above": 0.0},
}
_BOOLEANS = (
    "allow_block_sharing",
    "use_async_batching",
    "auto_switch_to_flash",
    "per_request_processors",
    "drop_unsupported_processors",
    "disable_nccl_graph_mixing",
)
_OPTIONAL = frozenset(
    {
        "num_blocks",
        "max_batch_tokens",
        "max_memory_percent",
        "max_requests_per_batch",
        "max_blocks_per_request",
        "use_async_batching",
        "safety_margin",
        "seed",
        "cpu_offload_space",
        "cpu_group_timeout",
    }
)
_DEPRECATED = frozenset({"use_default_compile_configs", "max_cached_graphs", "block_size"})


@dataclass(slots=True)
class ContinuousBatchingConfig:
    """How continuous batching should run; None and, for the padding intervals, 0 leave a value to the engine.

    The object belongs to the caller: the engine works on a checked copy and never changes it.

    Attributes:
        page_size: Tokens per page, at least 4; any size works, not only powers of two.
        num_blocks: Blocks in the KV cache; None: from free memory.
        max_batch_tokens: Query tokens per step; None: from free memory.
        max_memory_percent: Share of the free device memory for the cache, above 0 and at most 1; None: 0.9
            without logits processing, 0.8 with, 0.6 where device and host share memory.
        max_requests_per_batch: Requests that run at a time; None: from workload hints, else 1024.
        max_blocks_per_request: Longest request of the decode path, in blocks; longer ones run on the varlen
            path, and 0 turns the decode path off. None: from workload hints, else the longest request
            allowed.
        allow_block_sharing: Whether requests with the same prefix share its blocks.
        use_async_batching: Whether the next step is prepared while one runs; None: where steps are captured.
        use_cuda_graph: Whether steps are captured as graphs of the device, for both paths or as (varlen, decode);
            None: where the device has graphs. Captured steps are padded.
        q_padding_interval_size: Query tokens are padded to multiples of this many tokens; 0: decided by the
            engine.
        kv_padding_interval_size: Context lengths are padded to multiples of this many tokens; 0: decided by
            the engine.
        varlen_compile_config: How to compile the varlen path, as a `CompileConfig` or a dict of its
            arguments.
        decode_compile_config: The same for the decode path.
        default_compile_level: 0 no compilation; 1 to 3 compile paths without a config of their own, ever
            harder.
        scheduler_type: Name of a registered scheduler, such as "fifo" or "prefill_first".
        safety_margin: Share of the blocks, 0 to 1, that new prefills leave free; None: the scheduler's own.
        return_logprobs: Whether outputs hold each token's log-probability, under the processed distribution (True or
            "processed") or the model's own ("raw").
        seed: Source of all random streams, 0 to 2**63 - 1; None: a random one.
        auto_switch_to_flash: Whether the fastest attention that can run here is picked.
        cpu_offload_space: GiB of host memory for the cache of preempted requests, pinned where there is a GPU;
            None: as the threshold allows; 0: their cache is computed again.
        cpu_offload_space_safety_threshold: Largest share of the available host memory for that, 0 to 1; 1: no
            limit, and with None all of it.
        max_queue_size: Requests that may wait to be taken in by the engine; 0: unlimited.
        per_request_processors: Whether requests may bring their own sampling arguments.
        drop_unsupported_processors: Whether unsupported logits processors are dropped with a warning; False:
            they raise.
        disable_nccl_graph_mixing: Distributed runs only: whether NCCL may assume that captured communication
            never overlaps with other communication.
        cpu_group_timeout: Seconds after which host communication of a distributed run gives up; None: never.
        use_default_compile_configs: Deprecated, becomes `default_compile_level` (True: 3, False: 0).
        max_cached_graphs: Deprecated, has no effect.
        block_size: Deprecated, becomes `page_size`.

    Raises:
        ValueError: A value lies outside its range; the message names field, value and range.
        TypeError: A value has the wrong type.
    """

    page_size: int = 256
    num_blocks: int | None = None
    max_batch_tokens: int | None = None
    max_memory_percent: float | None = None
    max_requests_per_batch: int | None = None
    max_blocks_per_request: int | None = None
    allow_block_sharing: bool = True
    use_async_batching: bool | None = None
    use_cuda_graph: bool | tuple[bool, bool] | None = None
    q_padding_interval_size: int = 0
    kv_padding_interval_size: int = 0
    varlen_compile_config: CompileConfig | dict[str, Any] | None = None
    decode_compile_config: CompileConfig | dict[str, Any] | None = None
    default_compile_level: int = 0
    scheduler_type: str = "fifo"
    safety_margin: float | None = None
    return_logprobs: bool | LogprobKind = False
    seed: int | None = None
    auto_switch_to_flash: bool = True
    cpu_offload_space: float | None = 0.0
    cpu_offload_space_safety_threshold: float = 0.8
    max_queue_size: int = 0
    per_request_processors: bool = False
    drop_unsupported_processors: bool = True
    disable_nccl_graph_mixing: bool = True
    cpu_group_timeout: float | None = 300.0
    use_default_compile_configs: bool | None = None
    max_cached_graphs: int | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        self._replace_deprecated()
        for name, (minimum, maximum) in _INTEGERS.items():
            if not self._is_open(name):
                setattr(self, name, check_integer(name, getattr(self, name), minimum, maximum))
        for name, bounds in _NUMBERS.items():
            if not self._is_open(name):
                setattr(self, name, check_number(name, getattr(self, name), **bounds))
        for name in _BOOLEANS:
            if not self._is_open(name):
                _check_boolean(name, getattr(self, name))
        self.use_cuda_graph = _check_graphs(self.use_cuda_graph)
        for name in ("varlen_compile_config", "decode_compile_config"):
            setattr(self, name, _check_compile_config(name, getattr(self, name)))
        if not isinstance(self.scheduler_type, str):
            raise TypeError(f"scheduler_type must be a name such as 'fifo', got {self.scheduler_type!r}")
        _check_logprobs(self.return_logprobs)

    def _is_open(self, name: str) -> bool:
        return name in _OPTIONAL and getattr(self, name) is None

    def _replace_deprecated(self) -> None:
        """Moves deprecated values to the fields that replace them: a copy has nothing left to warn about."""
        if self.block_size is not None:
            page_size = check_integer("block_size", self.block_size, *_INTEGERS["page_size"])
            self._supersede("block_size", "page_size", page_size)
        if self.use_default_compile_configs is not None:
            _check_boolean("use_default_compile_configs", self.use_default_compile_configs)
            level = 3 if self.use_default_compile_configs else 0
            self._supersede("use_default_compile_configs", "default_compile_level", level)
        if self.max_cached_graphs is not None:
            warnings.warn("max_cached_graphs has no effect any more; remove it", FutureWarning, stacklevel=4)
        self.block_size = self.use_default_compile_configs = self.max_cached_graphs = None

    def _supersede(self, old: str, new: str, value: int) -> None:
        default = next(field.default for field in dataclasses.fields(self) if field.name == new)
        current = getattr(self, new)
        if current not in (default, value):
            raise ValueError(
                f"{old}={getattr(self, old)!r} contradicts {new}={current!r}; remove {old}, it is deprecated"
            )
        warnings.warn(f"{old} is deprecated; set {new}={value!r} instead", FutureWarning, stacklevel=5)
        setattr(self, new, value)

    @classmethod
    def from_any(cls, config: object) -> ContinuousBatchingConfig:
        """A checked copy of `config`, which is not changed.

        Args:
            config: One of these objects, a transformers `ContinuousBatchingConfig`, a dict of fields, or None
                for the defaults.

        Raises:
            ValueError: A value is out of range, a key is unknown, or a field that exists only in the other
                class has been set.
            TypeError: `config` is something else.
        """
        # transformers has applied its deprecated fields already, and warned about them.
        return _from_any(cls, config, already_applied=_DEPRECATED)

    @property
    def cuda_graph_booleans(self) -> tuple[bool, bool]:
        """Whether graphs were asked for on the (varlen, decode) paths; an open choice counts as no."""
        if isinstance(self.use_cuda_graph, tuple):
            return self.use_cuda_graph
        return bool(self.use_cuda_graph), bool(self.use_cuda_graph)

    @property
    def fallback_max_blocks_per_request(self) -> int:
        """Blocks per request on the decode path that a caller may assume for an unknown workload."""
        return 32


@dataclass(frozen=True, slots=True)
class WorkloadHints:
    """What the caller knows about the requests to come. Hints shape defaults; they forbid nothing.

    Attributes:
        max_prompt_length: Tokens of the longest prompt; 0: unknown.
        max_generated_length: Tokens of the longest answer; 0: unknown.
        num_requests: Number of requests; 0: unknown.

    Raises:
        ValueError: A value is negative.
        TypeError: A value is not an integer.
    """

    max_prompt_length: int = 0
    max_generated_length: int = 0
    num_requests: int = 0

    def __post_init__(self) -> None:
        for name in ("max_prompt_length", "max_generated_length", "num_requests"):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), 0))

    @classmethod
    def from_any(cls, hints: object) -> WorkloadHints:
        """Hints from one of these objects, a transformers `WorkloadHints`, a dict, or None for no hints.

        Raises:
            ValueError: A value is negative or a key is unknown.
            TypeError: `hints` is something else.
        """
        return _from_any(cls, hints)

    @property
    def max_length(self) -> int:
        """Tokens of the longest request, prompt and answer; 0 unless both are known."""
        if self.max_prompt_length == 0 or self.max_generated_length == 0:
            return 0
        return self.max_prompt_length + self.max_generated_length


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Which implementation each kernel slot runs.

    Attributes:
        default: For slots left open: "triton", "reference" (plain torch), or "auto" for Triton where it runs
            natively and the reference elsewhere.
        prepare_inputs: Name of an implementation in `kernels/prepare_inputs/`; None: by `default`. An
            explicit choice never falls back to another one. The same holds for the other slots.
        kv_write: See `prepare_inputs`.
        varlen_attention: See `prepare_inputs`.
        decode_attention: See `prepare_inputs`.
        sample: See `prepare_inputs`.
        block_copy: See `prepare_inputs`.

    Raises:
        ValueError: `default` is not one of the three.
        TypeError: A slot is neither None nor a name.
    """

    default: str = "auto"
    prepare_inputs: str | None = None
    kv_write: str | None = None
    varlen_attention: str | None = None
    decode_attention: str | None = None
    sample: str | None = None
    block_copy: str | None = None

    def __post_init__(self) -> None:
        if self.default not in ("auto", "triton", "reference"):
            raise ValueError(
                f"default must be 'auto', 'triton' or 'reference', got {self.default!r}; "
                "name a single implementation in its own slot, such as varlen_attention='reference'"
            )
        for slot, name in self.slots().items():
            if name is not None and not isinstance(name, str):
                raise TypeError(f"{slot} must be the name of an implementation or None, got {name!r}")

    @classmethod
    def from_any(cls, config: object) -> KernelConfig:
        """A config from one of these objects, a dict, or None for the defaults.

        Raises:
            ValueError: A value or a key is unknown.
            TypeError: `config` is something else.
        """
        return _from_any(cls, config)

    def slots(self) -> dict[str, str | None]:
        """Slot name -> name of the implementation asked for, None where `default` decides."""
        return {name: value for name, value in _field_values(self).items() if name != "default"}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What sizing needs to know about a loaded model and its device.

    Attributes:
        vocab_size: Number of logits per token.
        num_embeddings: Rows of the input embedding; every valid prompt id is below it.
        max_position_embeddings: Positions that the model was made for; None where it names no limit.
        cached_layers: What each attention call keeps of a token, in the order of the calls; those that read what
            another one keeps are left out.
        activation_bytes_per_token: Bytes of what a forward pass holds at a time for each token, beside weights, cache
            and logits.
        device_type: Such as "cpu" or "cuda".
        available_memory_bytes: Memory that this process may still take on the device.
        available_host_memory_bytes: Memory that it may still take on the host; on a CPU, the same memory.
        logits_dtype_bytes: Bytes of one logit.
        has_repeated_layers: Whether the model is a list of layers that can be compiled one by one.
        has_graphs: Whether steps can be captured on the device.
        state_bytes_per_request: Bytes that each request keeps beside the pages; 0 where that is nothing.
        state_bytes_per_token: Bytes that each of its tokens adds to them.
        least_prompt_piece: Tokens of a prompt that run at once at least, where it has as many.
        is_paged: Whether attention works on pages. If not, the model runs on transformers' own cache.
        rope_switch_length: Sequences with more tokens than this have other rotary frequencies; None: all have the same.
    """

    vocab_size: int
    num_embeddings: int
    max_position_embeddings: int | None
    cached_layers: tuple[CachedLayer, ...]
    activation_bytes_per_token: int
    device_type: str
    available_memory_bytes: int
    available_host_memory_bytes: int = 0
    logits_dtype_bytes: int = 4
    has_repeated_layers: bool = False
    has_graphs: bool = False
    state_bytes_per_request: int = 0
    state_bytes_per_token: int = 0
    least_prompt_piece: int = 1
    is_paged: bool = True
    rope_switch_length: int | None = None

    @property
    def kept_states(self) -> str | None:
        """What requests keep beside the pages, for messages; None where that is nothing."""
        if not self.is_paged:
            return "transformers' own cache"
        return "recurrent layers" if self.state_bytes_per_request else None


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """What one purpose takes of the device's memory: its name, bytes, and what they are."""

    purpose: str
    num_bytes: int
    what: str


@dataclass(frozen=True, slots=True)
class Decision:
    """One value that the engine chose: which field, what was asked for, what it became, and why."""

    field: str
    asked: object
    resolved: object
    why: str


CompileRegion = Literal["layer", "step"]


@dataclass(frozen=True, slots=True)
class CompileSettings:
    """How one path is compiled: arguments of `torch.compile`.

    Attributes:
        backend: Name of a backend, or a function.
        mode: The backend's mode; None for backends other than Inductor, and beside `options`.
        dynamic: True: one graph for all sizes; False: one per size; None: as `torch.compile` sees fit.
        fullgraph: Whether code that cannot be one graph is an error.
        options: The backend's options.
    """

    backend: str | Callable[..., Any]
    mode: str | None
    dynamic: bool | None
    fullgraph: bool
    options: dict[str, Any] | None = None

    @classmethod
    def of_level(cls, level: int) -> CompileSettings | None:
        """What a `default_compile_level` stands for."""
        if level == 0:
            return None
        mode = "default" if level == 1 else "max-autotune-no-cudagraphs"
        return cls("inductor", mode, dynamic=level < 3, fullgraph=True)

    @classmethod
    def of_config(cls, config: CompileConfig) -> CompileSettings:
        """What a `CompileConfig` asks for. Modes are Inductor's, and it takes either a mode or options."""
        takes_mode = config.backend == "inductor" and config.options is None
        return cls(
            config.backend, config.mode if takes_mode else None, config.dynamic, config.fullgraph, config.options
        )

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `torch.compile`."""
        return _field_values(self)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine was built with. Made by `cbtriton.resolve.resolve`, never changed afterwards.

    Attributes:
        page_size: Tokens per page.
        cache_layout: Which layers share blocks, and how many tokens a block holds.
        num_blocks: Blocks in the KV cache.
        num_host_blocks: Blocks of host memory for the cache of preempted requests; 0: it is computed again.
        max_batch_tokens: Query tokens per step.
        max_requests: Requests that run at a time: rows of the request table.
        max_blocks_per_request: Width of a block table in blocks, enough for `max_model_len`.
        max_decode_blocks: Longest request of the decode path in blocks; 0 where that path is off.
        max_model_len: Tokens of the longest sequence that can be in the cache. The last token of an answer
            never runs, so prompt and answer may have one token more in all.
        use_decode_path: Whether steps of one token per request take the decode path.
        share_blocks: Whether equal prefixes share blocks.
        keeps_states: Whether requests keep something beside the pages, so that each computes all of its tokens.
        least_prompt_piece: Tokens of a prompt that run at once at least, where it has as many.
        rope_switch_length: A sequence that gets longer than this computes its cache again, with other rotary
            frequencies; None: none does.
        async_depth: Steps that may be in flight while the next one is planned.
        varlen_compile: How steps of the varlen path are compiled; None: not at all.
        decode_compile: The same for the decode path.
        compile_region: What is compiled at a time: each decoder `layer`, all with the same graphs, or the whole `step`.
        captured_paths: The paths whose steps are captured as graphs; all of them padded.
        padded_paths: The paths whose steps are padded to few sizes.
        flexible_paths: The paths that are compiled for any size. All other steps run at exact sizes.
        q_interval: Query tokens of a padded step are a multiple of this.
        kv_interval: The longest context of a padded step is a multiple of this many tokens.
        scheduler_type: Name of the scheduling policy.
        safety_margin: Share of the blocks, 0 to 1, that new prefills leave free.
        logprobs: Which log-probabilities everybody's tokens come with; None: none.
        seed: Source of the random streams of requests without a seed of their own.
        max_queue_size: Requests that may wait to be taken in; 0: unlimited.
        per_request_processors: Whether requests may bring sampling arguments.
        has_processors: Whether any request may have more than temperature, top-k, top-p, min-p and a minimum length.
        drop_unsupported_processors: Whether unsupported logits processors are dropped with a warning.
        memory_budget: What the engine takes of the device's memory, by purpose; weights are there already.
        available_memory_bytes: What there was for it.
        decisions: The choices made for the caller, in the order in which they were made.
    """

    page_size: int
    cache_layout: CacheLayout
    num_blocks: int
    num_host_blocks: int
    max_batch_tokens: int
    max_requests: int
    max_blocks_per_request: int
    max_decode_blocks: int
    max_model_len: int
    use_decode_path: bool
    share_blocks: bool
    keeps_states: bool
    least_prompt_piece: int
    rope_switch_length: int | None
    async_depth: Literal[0, 1]
    varlen_compile: CompileSettings | None
    decode_compile: CompileSettings | None
    compile_region: CompileRegion
    captured_paths: tuple[Literal["varlen", "decode"], ...]
    padded_paths: tuple[Literal["varlen", "decode"], ...]
    flexible_paths: tuple[Literal["varlen", "decode"], ...]
    q_interval: int
    kv_interval: int
    scheduler_type: str
    safety_margin: float
    logprobs: LogprobKind | None
    seed: int
    max_queue_size: int
    per_request_processors: bool
    has_processors: bool
    drop_unsupported_processors: bool
    memory_budget: tuple[MemoryShare, ...] = ()
    available_memory_bytes: int = 0
    decisions: tuple[Decision, ...] = ()

    def describe(self) -> str:
        """The decisions, and behind them the memory budget, as tables with aligned columns."""
        decisions = [("field", "asked", "resolved", "why")]
        decisions += [(d.field, str(d.asked), str(d.resolved), d.why) for d in self.decisions]
        return _aligned(decisions) + "\n\n" + describe_memory(self.memory_budget, self.available_memory_bytes)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values that `json.dumps` accepts."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=repr))


def describe_memory(budget: Sequence[MemoryShare], available: int) -> str:
    """A memory budget as a table with aligned columns, beside what is available."""
    total = sum(share.num_bytes for share in budget)
    rows = [("memory", "MiB", "what"), *((share.purpose, _mib(share.num_bytes), share.what) for share in budget)]
    return _aligned([*rows, ("in all", _mib(total), f"of {_mib(available)} available")])


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows)


def check_integer(name: str, value: object, minimum: int, maximum: int | None = None) -> int:
    """`value` as an int, if it is an integer (and no bool) in the range.

    Args:
        name: What the value is, for the message.
        value: Anything.
        minimum: Smallest accepted value.
        maximum: Largest accepted value; None: no limit.

    Raises:
        TypeError: It is not an integer.
        ValueError: It lies outside the range.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    number = int(value)
    if number < minimum or (maximum is not None and number > maximum):
        allowed = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        nearest = minimum if maximum is None or number < minimum else maximum
        raise ValueError(f"{name} must be {allowed}, got {number}; the nearest valid choice is {name}={nearest}")
    return number


def check_number(
    name: str,
    value: object,
    *,
    minimum: float = -math.inf,
    above: float | None = None,
    maximum: float | None = None,
) -> float:
    """`value` as a float, if it is a finite number (and no bool) in the range.

    Args:
        name: What the value is, for the message.
        value: Anything.
        minimum: Smallest accepted value.
        above: Where given, the value must be greater than this.
        maximum: Largest accepted value; None: no limit.

    Raises:
        TypeError: It is not a number.
        ValueError: It is NaN or infinite, or lies outside the range.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    number = float(value)
    too_small = number < minimum or (above is not None and number <= above)
    too_large = maximum is not None and number > maximum
    if too_small or too_large or not math.isfinite(number):
        allowed = f"greater than {above:g}" if above is not None else f"at least {minimum:g}"
        if maximum is not None:
            allowed += f" and at most {maximum:g}"
        raise ValueError(f"{name} must be a finite number {allowed}, got {number}; change {name}")
    return number


def _check_boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}")


def _check_logprobs(value: object) -> None:
    if not isinstance(value, (bool, str)):
        raise TypeError(f"return_logprobs must be True, False, 'processed' or 'raw', got {value!r}")
    if isinstance(value, str) and value not in get_args(LogprobKind):
        raise ValueError(f"return_logprobs must be True, False, 'processed' or 'raw', got {value!r}")


def _check_graphs(value: object) -> bool | tuple[bool, bool] | None:
    if value is None or isinstance(value, bool):
        return value
    # A yaml file can only write the pair as a list.
    if isinstance(value, (tuple, list)) and len(value) == 2:
        varlen, decode = value
        if isinstance(varlen, bool) and isinstance(decode, bool):
            return varlen, decode
    raise TypeError(f"use_cuda_graph must be None, a bool, or two bools for (varlen, decode), got {value!r}")


def _check_compile_config(name: str, value: object) -> CompileConfig | None:
    if value is None:
        return None
    from transformers import CompileConfig

    if isinstance(value, CompileConfig):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be None, a CompileConfig or a dict of its arguments, got {value!r}")
    try:
        return CompileConfig(**value)
    except TypeError as error:
        accepted = ", ".join(field.name for field in dataclasses.fields(CompileConfig))
        raise ValueError(f"{name} has an unknown key, got {list(value)}; accepted are {accepted}") from error


def _from_any(cls: type[_Record], config: object, already_applied: frozenset[str] = frozenset()) -> _Record:
    """A new `cls` from None, another `cls`, a dict, or the transformers dataclass of the same name."""
    if config is None:
        return cls()
    if isinstance(config, Mapping):
        return cls(**_known_keys(cls, config))
    if isinstance(config, cls):
        return cls(**_field_values(config))
    is_namesake = any(base.__name__ == cls.__name__ for base in type(config).__mro__)
    if is_namesake and dataclasses.is_dataclass(config):
        return cls(**_shared_fields(cls, config, already_applied))
    raise TypeError(
        f"expected a {cls.__name__} (of cbtriton or transformers), a dict of its fields, or None, "
        f"got {type(config).__name__}"
    )


def _field_names(record: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(record)]


def _field_values(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _field_names(record)}


def _known_keys(cls: type, config: Mapping[Any, Any]) -> dict[str, Any]:
    unknown = [key for key in config if key not in _field_names(cls)]
    if unknown:
        accepted = ", ".join(_field_names(cls))
        raise ValueError(f"{cls.__name__} has no field {unknown}; its fields are {accepted}")
    return dict(config)


def _shared_fields(cls: type, config: Any, already_applied: frozenset[str]) -> dict[str, Any]:
    own = _field_names(cls)
    extra = [field for field in dataclasses.fields(config) if field.name not in own]
    changed = {field.name: getattr(config, field.name) for field in extra if _is_changed(config, field)}
    if changed:
        raise ValueError(f"{cls.__name__} does not know {changed}; leave these fields at their defaults")
    values = _field_values(config)
    return {name: values[name] for name in own if name in values and name not in already_applied}


def _is_changed(record: Any, field: dataclasses.Field[Any]) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return getattr(record, field.name) != field.default_factory()
    return getattr(record, field.name) != field.default
