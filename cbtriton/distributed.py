"""Tensor parallel: several processes run one model, and the driver among them decides for all.

Every rank has the whole engine: its part of the weights and of each page, and a scheduler of its own. Schedulers that
are told the same do the same, so only what comes from outside has to be agreed on: which requests and cancellations
enter a step, pauses and stops (`agree`), and what a step came to (`share_results`). Messages are JSON of a closed set
of records, over a group of their own on the host. Nothing that is received is ever run or unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta
from enum import Enum, IntEnum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cbtriton.plan import SampledToken, StepResult
from cbtriton.request import LogprobParams, ProcessorParams, Request, RuleKind, SamplingParams, StopRules, TokenRule
from cbtriton.stopping import StopDecision

# Most messages are shorter, and go with a single collective operation.
_SHORT = 1024
_LENGTH_BYTES = 8
# A rank that waits for nothing in particular looks this often, in seconds, whether another one wants something.
IDLE_INTERVAL = 0.02
# `cpu_group_timeout=None`: process groups take no missing limit.
_NO_TIMEOUT = timedelta(days=365)

_RECORDS: dict[str, type] = {
    record.__name__: record
    for record in (
        LogprobParams,
        ProcessorParams,
        SampledToken,
        SamplingParams,
        StepResult,
        StopDecision,
        StopRules,
        TokenRule,
    )
}


class RankError(RuntimeError):
    """Another rank died, stopped answering or does something else; the message says which group and time limit."""


class Ending(IntEnum):
    """Whether a rank wants the session to end: not yet, when all is done, or at once."""

    NONE = 0
    SOFT = 1
    HARD = 2


class Action(Enum):
    """What comes next, the same on all ranks."""

    STEP = auto()
    PARK = auto()
    END = auto()


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What goes into the engine between two steps; what is unpinned may be among the requests.

    Attributes:
        requests: New ones, in order.
        cancelled: Ids of those to cancel.
        unpinned: Ids of pins to drop.
    """

    requests: tuple[Request, ...] = ()
    cancelled: tuple[str, ...] = ()
    unpinned: tuple[str, ...] = ()

    @property
    def has_any(self) -> bool:
        """Whether there is anything."""
        return bool(self.requests or self.cancelled or self.unpinned)


_NOTHING = Arrivals()


@dataclass(frozen=True, slots=True)
class Wishes:
    """What callers of one rank asked for since the last turn.

    Attributes:
        ending: Whether its session is to end.
        pauses: Whether somebody holds it in `pause`.
        is_idle: Whether no request is left. Here and below, only the driver's word counts.
        arrived: What they gave it.
    """

    ending: Ending
    pauses: bool
    is_idle: bool
    arrived: Arrivals = _NOTHING


@dataclass(frozen=True, slots=True)
class Turn:
    """What all ranks do next.

    Attributes:
        action: What it is.
        arrived: What goes into the engine before that.
    """

    action: Action
    arrived: Arrivals = _NOTHING


Decisions = Mapping[str, StopDecision | str]
"""What was decided on requests after their latest token, by id; a text says why the caller's functions failed."""


class Ranks:
    """The processes that run one model together. Here, one that runs it alone.

    Attributes:
        rank: Which of them this is.
        size: How many there are.
    """

    rank = 0
    size = 1

    @property
    def is_driver(self) -> bool:
        """Whether this one decides."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is no other."""
        return self.size == 1

    def least(self, number: int) -> int:
        """The least number that any rank has."""
        return number

    def of_driver(self, number: int) -> int:
        """The driver's number."""
        return number

    def any(self, is_so: bool) -> bool:
        """Whether it is so for any rank."""
        return is_so

    def union(self, names: Sequence[str]) -> tuple[str, ...]:
        """The names that any rank has, in a fixed order."""
        return tuple(names)

    def agree(self, wishes: Wishes, local_request: Callable[[str], Request]) -> Turn:
        """What all ranks do next.

        Args:
            wishes: Of this rank's callers.
            local_request: The request with an id that a caller of this rank submits. Asked for those that cannot be
                sent, since they have functions of callers.
        """
        return _turn(wishes, (wishes,))

    def share_results(self, result: StepResult, decisions: Decisions) -> tuple[StepResult, Decisions]:
        """The driver's results of a step; others give theirs, which are not looked at."""
        return result, decisions

    def share_tokens(self, token_ids: Tensor) -> None:
        """Makes `[num_samples]` int64 on the device those that the driver sampled."""

    @contextmanager
    def session(self) -> Iterator[None]:
        """Within the context, waiting for another rank has its time limit."""
        yield

    def explained(self, error: BaseException) -> BaseException:
        """The error that ended this rank, in words of ranks where another one is the reason."""
        return error

    def close(self) -> None:
        """Ends the group; other ranks that still wait for this one learn of it at once. Harmless when repeated."""


class TensorParallelRanks(Ranks):
    """Several, one of each part of the model. All of them must be made, and asked, in the same order.

    Args:
        model_group: The process group that the model's own communication uses.
        timeout: Seconds after which waiting for another rank ends in an error; None: never.
    """

    def __init__(self, model_group: dist.ProcessGroup, timeout: float | None) -> None:
        self._model_group = model_group
        self._timeout = _NO_TIMEOUT if timeout is None else timedelta(seconds=timeout)
        members = dist.get_process_group_ranks(model_group)
        self._driver = members[0]
        self.rank, self.size = members.index(dist.get_rank()), len(members)
        self._group: Any = dist.new_group(
            members, self._timeout, "gloo", use_local_synchronization=len(members) < dist.get_world_size()
        )

    def least(self, number: int) -> int:
        """See `Ranks`."""
        return min(self._exchange(number))

    def of_driver(self, number: int) -> int:
        """See `Ranks`."""
        return self._exchange(number)[0]

    def any(self, is_so: bool) -> bool:
        """See `Ranks`."""
        return any(self._exchange(is_so))

    def union(self, names: Sequence[str]) -> tuple[str, ...]:
        """See `Ranks`."""
        return tuple(sorted({name for each in self._exchange(list(names)) for name in each}))

    def agree(self, wishes: Wishes, local_request: Callable[[str], Request]) -> Turn:
        """See `Ranks`."""
        mine: dict[str, Any] = {"ending": wishes.ending, "pauses": wishes.pauses}
        if self.is_driver:
            mine["is_idle"] = wishes.is_idle
            mine["requests"] = [_encoded_request(request) for request in wishes.arrived.requests]
            mine["cancelled"], mine["unpinned"] = wishes.arrived.cancelled, wishes.arrived.unpinned
        every = self._exchange(mine)
        driver, arrived = every[0], wishes.arrived
        if not self.is_driver:
            requests = tuple(_decoded_request(each, local_request) for each in driver["requests"])
            arrived = Arrivals(requests, tuple(driver["cancelled"]), tuple(driver["unpinned"]))
        agreed = Wishes(Ending(driver["ending"]), driver["pauses"], driver["is_idle"], arrived)
        others = (Wishes(Ending(each["ending"]), each["pauses"], is_idle=True) for each in every[1:])
        return _turn(agreed, (agreed, *others))

    def share_results(self, result: StepResult, decisions: Decisions) -> tuple[StepResult, Decisions]:
        """See `Ranks`."""
        sent = [_encoded(result), {name: _encoded(each) for name, each in decisions.items()}] if self.is_driver else []
        every = self._exchange(sent)
        if self.is_driver:
            return result, decisions
        return _decoded(every[0][0]), {name: _decoded(each) for name, each in every[0][1].items()}

    def share_tokens(self, token_ids: Tensor) -> None:
        """See `Ranks`."""
        dist.broadcast(token_ids, src=self._driver, group=self._model_group)

    @contextmanager
    def session(self) -> Iterator[None]:
        """See `Ranks`."""
        # Of the model's own communication: half an hour by default. There is no public way to read or write it.
        library = dist.distributed_c10d
        before = library._get_default_timeout(dist.get_backend(self._model_group))
        library._set_pg_timeout(self._timeout, self._model_group)
        try:
            yield
        finally:
            library._set_pg_timeout(before, self._model_group)

    def explained(self, error: BaseException) -> BaseException:
        """See `Ranks`."""
        # Plain errors with such a text are what gloo has.
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            return error
        if isinstance(error, RankError):
            return error
        explained = RankError(f"{self._lost('communicated with the others in a step')}: {error}")
        explained.__cause__ = error
        return explained

    def _lost(self, what: str) -> str:
        return (
            f"rank {self.rank} of {self.size} {what}, and one is gone or did not answer within "
            f"cpu_group_timeout={self._timeout.total_seconds():g} s; look for the first error among the ranks"
        )

    def close(self) -> None:
        """See `Ranks`."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _exchange(self, value: Any) -> list[Any]:
        """What every rank gave, by rank.

        Raises:
            RankError: Some rank did not answer.
        """
        if self._group is None:
            raise RankError("the group of ranks was closed")
        message = json.dumps(value).encode()
        head = len(message).to_bytes(_LENGTH_BYTES, "little") + message[: _SHORT - _LENGTH_BYTES]
        try:
            heads = self._gather(head, _SHORT)
            lengths = [int.from_bytes(each[:_LENGTH_BYTES], "little") for each in heads]
            messages = [each[_LENGTH_BYTES:] for each in heads]
            if max(lengths) > _SHORT - _LENGTH_BYTES:
                messages = self._gather(message, max(lengths))
        except RuntimeError as error:
            raise RankError(f"{self._lost('waited for the others')}: {error}") from error
        return [json.loads(each[:length]) for each, length in zip(messages, lengths, strict=True)]

    def _gather(self, message: bytes, size: int) -> list[bytes]:
        mine = torch.frombuffer(bytearray(message.ljust(size, b"\0")), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine, group=self._group)
        return [each.numpy().tobytes() for each in every]


def ranks_of(model: Any, timeout: float | None) -> Ranks:
    """The processes that run `model` under transformers' tensor-parallel plan; one alone where there is none.

    Args:
        model: The model, as this process has loaded it.
        timeout: Seconds after which waiting for another rank ends in an error; None: never.

    Raises:
        ValueError: The model is spread in another way, or its heads do not divide.
    """
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or not dist.is_initialized():
        return Ranks()
    names = mesh.mesh_dim_names or ()
    other = [name for name in names if name != "tp" and mesh[name].size() > 1]
    if other:
        raise ValueError(
            f"a model can be spread over a tensor-parallel group only, got a mesh with {', '.join(other)}; load it "
            "with tp_plan='auto' alone"
        )
    parallel = mesh["tp"] if "tp" in names else mesh
    if parallel.size() == 1:
        return Ranks()
    _check_heads(model, parallel.size())
    return TensorParallelRanks(parallel.get_group(), timeout)


def ranks_on_this_host() -> int:
    """Processes of this run that share the host, and its memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if dist.is_available() and dist.is_initialized() else 1


def _check_heads(model: Any, size: int) -> None:
    plan = getattr(model, "tp_plan", None) or {}
    if not any(name.endswith(("k_proj", "v_proj", "qkv_proj")) for name in plan):
        return
    config = model.config.get_text_config()
    heads = {
        name: number
        for name in ("num_attention_heads", "num_key_value_heads")
        if isinstance(number := getattr(config, name, None), int)
    }
    wrong = {name: number for name, number in heads.items() if number % size}
    if wrong:
        sizes = " and ".join(f"{name}={number}" for name, number in wrong.items())
        raise ValueError(
            f"heads must divide among the ranks of a tensor-parallel group, got {sizes} for {size} ranks; start as "
            "many ranks as divide all of them"
        )


def _turn(driver: Wishes, every: Sequence[Wishes]) -> Turn:
    """What comes of all ranks' wishes, the driver's among them."""
    if any(wishes.ending is Ending.HARD for wishes in every):
        return Turn(Action.END)
    if any(wishes.pauses for wishes in every):
        return Turn(Action.PARK, driver.arrived)
    is_done = driver.is_idle and not driver.arrived.has_any
    if is_done and all(wishes.ending is Ending.SOFT for wishes in every):
        return Turn(Action.END)
    return Turn(Action.STEP, driver.arrived)


# ------------------------------------------------------------------------------------------------------- messages


def _encoded(value: Any) -> Any:
    """A record, or what records are made of, as JSON has it."""
    if isinstance(value, RuleKind):
        return {"RuleKind": int(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_encoded(each) for each in value]
    if isinstance(value, frozenset):
        return {"frozenset": sorted(value)}
    if isinstance(value, dict):
        return {"dict": list(value.items())}
    if is_dataclass(value) and type(value).__name__ in _RECORDS:
        return {type(value).__name__: {each.name: _encoded(getattr(value, each.name)) for each in fields(value)}}
    raise TypeError(f"{type(value).__name__} cannot be sent to other ranks")


def _decoded(value: Any) -> Any:
    """What was encoded; sequences are tuples."""
    if isinstance(value, list):
        return tuple(_decoded(each) for each in value)
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "RuleKind":
        return RuleKind(content)
    if kind == "frozenset":
        return frozenset(content)
    if kind == "dict":
        return dict(content)
    return _RECORDS[kind](**{name: _decoded(each) for name, each in content.items()})


def _encoded_request(request: Request) -> dict[str, Any]:
    if request.sampling.host is not None or request.stop.criteria or request.embeds is not None:
        return {"request_id": request.request_id, "is_local": True}
    return {
        "request_id": request.request_id,
        "is_local": False,
        "prompt_ids": request.prompt_ids,
        "sampling": _encoded(request.sampling),
        "stop": _encoded(request.stop),
        "streaming": request.streaming,
        "record_timestamps": request.record_timestamps,
        "cache_salt": request.cache_salt,
        "parent_id": request.parent_id,
        "is_pin": request.is_pin,
    }


def _decoded_request(message: dict[str, Any], local_request: Callable[[str], Request]) -> Request:
    if message["is_local"]:
        return local_request(message["request_id"])
    return Request(
        request_id=message["request_id"],
        prompt_ids=message["prompt_ids"],
        sampling=_decoded(message["sampling"]),
        stop=_decoded(message["stop"]),
        streaming=message["streaming"],
        record_timestamps=message["record_timestamps"],
        cache_salt=message["cache_salt"],
        parent_id=message["parent_id"],
        is_pin=message["is_pin"],
    )
