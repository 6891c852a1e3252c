"""How kernels are timed, and what a device reaches at best."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Protocol

import torch

# Below this floor a time is latency, and a share of the roofline would mean nothing.
SMALLEST_FLOOR_US = 2.0

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Timing:
    """Median time on the device and on the host of a call, and the first call's time."""

    time_us: float
    launch_us: float
    first_call_s: float


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device reaches at best, as measured; copying counts bytes read and written.

    Attributes:
        copy_gb_per_s: A large copy within the device.
        matmul_tflop_per_s: A large matrix product of random numbers: bf16 on GPUs, float32 on CPUs.
        empty_us: What the clock shows for a call that does nothing; it is part of every other time.
    """

    copy_gb_per_s: float
    matmul_tflop_per_s: float
    empty_us: float

    def floor_us(self, num_bytes: float, num_flops: float) -> float:
        """The least time that so much work takes."""
        return max(num_bytes / (1e3 * self.copy_gb_per_s), num_flops / (1e6 * self.matmul_tflop_per_s))


class Timer(Protocol):
    """Measures calls that run on one device."""

    def measure(self, call: Call) -> Timing:
        """Times a call."""
        ...

    def in_turns(self, calls: Mapping[str, Call]) -> dict[str, Timing]:
        """Times calls beside one another."""
        ...

    def ceilings(self) -> Ceilings:
        """What the device can do."""
        ...


class CudaTimer:
    """Times calls by events, each after the L2 cache was filled with something else.

    Filling it takes the device longer than the host needs to launch the call behind it, so the time between the two
    events is the device's alone. It only reads: lines that still had to be written back would slow the call down.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._filler = torch.ones(1 << 29, device=device)
        self._sum = torch.empty((), device=device)

    def measure(self, call: Call) -> Timing:
        """See `Timer.measure`."""
        first_call_s = self._wall_seconds(call)
        self._wall_seconds(call)
        repeats = min(40, max(7, int(0.06 / self._wall_seconds(call))))
        pairs = [(self._event(), self._event()) for _ in range(repeats)]
        for begin, finish in pairs:
            torch.sum(self._filler, dim=0, out=self._sum)
            begin.record()
            call()
            finish.record()
        torch.cuda.synchronize(self._device)
        launches = []
        for _ in range(15):
            started = time.perf_counter()
            call()
            launches.append(time.perf_counter() - started)
        torch.cuda.synchronize(self._device)
        times = [begin.elapsed_time(finish) for begin, finish in pairs]
        return Timing(1e3 * median(times), 1e6 * median(launches), first_call_s)

    def in_turns(self, calls: Mapping[str, Call]) -> dict[str, Timing]:
        """See `Timer.in_turns`. Nobody else has the device, so one call's time follows the other's."""
        return {name: self.measure(call) for name, call in calls.items()}

    def ceilings(self) -> Ceilings:
        """See `Timer.ceilings`."""
        source = torch.rand(1 << 30, device=self._device)
        target = torch.empty_like(source)
        copy_us = self.measure(partial(target.copy_, source)).time_us
        del source, target
        size = 8192
        left, right = (torch.randn(size, size, device=self._device, dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(left)
        matmul_us = self.measure(partial(torch.matmul, left, right, out=out)).time_us
        empty_us = self.measure(lambda: None).time_us
        return Ceilings(2 * (4 << 30) / (1e3 * copy_us), 2 * size**3 / (1e6 * matmul_us), empty_us)

    @staticmethod
    def _event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def _wall_seconds(self, call: Call) -> float:
        torch.cuda.synchronize(self._device)
        started = time.perf_counter()
        call()
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - started


class CpuTimer:
    """Times calls of this process by the clock, taking turns, each after its data has left the caches.

    A step's weights pass through the caches between two calls of a kernel; so does a filler here. Whatever else the
    machine does meets all contestants.

    Args:
        seconds: Time for each contestant, the filler's included.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._filler = torch.ones(1 << 25)

    def measure(self, call: Call) -> Timing:
        """See `Timer.measure`."""
        return self.in_turns({"": call})[""]

    def in_turns(self, calls: Mapping[str, Call]) -> dict[str, Timing]:
        """Times calls beside one another."""
        first = {name: self._seconds_of(call) for name, call in calls.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        end = time.perf_counter() + self._seconds * len(calls)
        fewest = 7 if sum(first.values()) < self._seconds else 3
        while len(next(iter(times.values()))) < fewest or time.perf_counter() < end:
            for name, call in calls.items():
                self._filler.sum()
                times[name].append(self._seconds_of(call))
        # Whoever launches a call here runs it, too.
        medians = {name: 1e6 * median(own) for name, own in times.items()}
        return {name: Timing(medians[name], medians[name], first[name]) for name in calls}

    def ceilings(self) -> Ceilings:
        """See `Timer.ceilings`. Kernels add up in float32, which is what the matrix product is measured in."""
        source = torch.rand(1 << 26)
        target = torch.empty_like(source)
        copy_us = self.measure(partial(target.copy_, source)).time_us
        size = 1536
        left, right = torch.randn(size, size), torch.randn(size, size)
        matmul_us = self.measure(partial(torch.matmul, left, right)).time_us
        empty_us = self.measure(lambda: None).time_us
        return Ceilings(2 * (4 << 26) / (1e3 * copy_us), 2 * size**3 / (1e6 * matmul_us), empty_us)

    @staticmethod
    def _seconds_of(call: Call) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin


class DryTimer:
    """Runs a call once, and makes up its time."""

    def measure(self, call: Call) -> Timing:
        """See `Timer.measure`."""
        call()
        return Timing(100.0, 1.0, 0.001)

    def in_turns(self, calls: Mapping[str, Call]) -> dict[str, Timing]:
        """See `Timer.in_turns`."""
        return {name: self.measure(call) for name, call in calls.items()}

    def ceilings(self) -> Ceilings:
        """So low that tiny cases have a share of the roofline."""
        return Ceilings(copy_gb_per_s=0.1, matmul_tflop_per_s=0.001, empty_us=1.0)
