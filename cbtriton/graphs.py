"""Captured steps: which there are, when a step is captured, and what happens where that fails.

The device launches all kernels of a captured step at once, without the Python that launched them before. A graph holds
on to everything that it found when it was captured: sizes, addresses and plain numbers. `GraphStore` decides; a
`Capturer` captures, and is the only one here that knows the device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from cbtriton.padding import Bucket
from cbtriton.plan import Path
from cbtriton.stats import Preparation
from cbtriton.step_inputs import SampleFeatures

_logger = logging.getLogger(__name__)

Outputs = tuple[Tensor, Tensor, Tensor]
Step = Callable[[], Outputs]


class CaptureError(RuntimeError):
    """A step cannot be captured; the message is the reason."""


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What may differ between the steps of an engine and is fixed in a graph.

    Attributes:
        bucket: The sizes.
        features: What the sampler does.
    """

    bucket: Bucket
    features: SampleFeatures


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A graph and its own outputs.

    Attributes:
        replay: Enqueues the step, which reads its inputs where they lay when it was captured.
        outputs: What the latest replay gave, until the next replay of any graph.
    """

    replay: Callable[[], None]
    outputs: Outputs


class Capturer(Protocol):
    """Captures steps into graphs that share their memory, since one runs at a time."""

    def capture(self, step: Step) -> CapturedStep:
        """Runs `step` once as it is, so that nothing is left to be compiled or looked up, and captures it.

        Raises:
            CaptureError: It cannot be captured. Whatever it raises when run as it is comes out unchanged.
        """
        ...

    def release(self) -> None:
        """Waits for what is running and frees all graphs and their memory. More can be captured afterwards."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory that is set aside for the graphs."""
        ...


class GraphStore:
    """The captured steps of one engine.

    Args:
        capturer: What captures; None where no path is captured.
        paths: The paths whose steps are captured. All other steps run as they are.

    Attributes:
        captures: Graphs captured so far.
        failures: Keys that could not be captured.
        replays: Steps that were replayed.
        capture_time: Seconds that captures took, the runs before them and failures included.
        preparations: What was captured for which bucket.
        num_bytes: Memory that is set aside for the graphs there are.
    """

    def __init__(self, capturer: Capturer | None, paths: tuple[Path, ...]) -> None:
        if capturer is None and paths:
            raise ValueError(f"paths must be empty where nothing captures, got {paths}; set use_cuda_graph=False")
        self._capturer = capturer
        self._paths = paths
        self._captured: dict[GraphKey, CapturedStep] = {}
        self._failed: set[GraphKey] = set()
        self.captures = 0
        self.failures = 0
        self.replays = 0
        self.capture_time = 0.0
        self.preparations: list[Preparation] = []
        self.num_bytes = 0

    def takes(self, path: Path) -> bool:
        """Whether steps of this path are captured."""
        return path in self._paths

    def prepare(self, key: GraphKey, step: Step) -> None:
        """Makes sure that a step of `key` meets nothing new: captures it, or runs it where it is not captured."""
        if self._graph(key, step) is None:
            step()

    def run(self, key: GraphKey, step: Step) -> Outputs:
        """Replays `step`, captured now if it has not been, or runs it where it is not captured."""
        graph = self._graph(key, step)
        if graph is None:
            return step()
        graph.replay()
        self.replays += 1
        return graph.outputs

    def clear(self) -> None:
        """Frees all graphs. Steps are captured anew when they come."""
        if self._capturer is not None and (self._captured or self._failed):
            self._captured.clear()
            self._failed.clear()
            self._capturer.release()
            self.num_bytes = 0

    def _graph(self, key: GraphKey, step: Step) -> CapturedStep | None:
        if key not in self._captured and key not in self._failed and self.takes(key.bucket.path):
            self._capture(key, step)
        return self._captured.get(key)

    def _capture(self, key: GraphKey, step: Step) -> None:
        assert self._capturer is not None
        start = time.perf_counter()
        try:
            self._captured[key] = self._capturer.capture(step)
            self.captures += 1
            self.num_bytes = self._capturer.num_bytes
        except CaptureError as error:
            self._failed.add(key)
            self.failures += 1
            if self.failures == 1:
                _logger.warning(
                    "a step %s cannot be captured and runs without a graph, and so will others like it: %s",
                    key.bucket.name,
                    error,
                )
        finally:
            seconds = time.perf_counter() - start
            self.capture_time += seconds
            self.preparations.append(Preparation("capture", key.bucket.name, int(key in self._captured), seconds))


def capturer_for(device: torch.device) -> Capturer | None:
    """What captures steps on `device`; None where it has no graphs."""
    return CudaCapturer(device) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class _CaptureStream:
    """Where all captures of a device run: libraries keep memory for each stream, and torch allows one at a time."""

    stream: torch.cuda.Stream
    lock: Lock

    @classmethod
    @cache
    def of(cls, device: torch.device) -> _CaptureStream:
        return cls(torch.cuda.Stream(device), Lock())


class CudaCapturer:
    """Captures into CUDA graphs (on ROCm into HIP graphs) with one memory pool.

    Args:
        device: Where the steps run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = _CaptureStream.of(device)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._abandoned: list[torch.cuda.CUDAGraph] = []
        # The last one is in use; one more for each capture that failed.
        self._pools = [torch.cuda.graph_pool_handle()]

    def capture(self, step: Step) -> CapturedStep:
        """See `Capturer.capture`."""
        current, side = torch.cuda.current_stream(self._device), self._side.stream
        with self._side.lock, torch.cuda.stream(side):
            side.wait_stream(current)
            # On the same stream, so that libraries set up what they keep for each stream outside of the graph.
            step()
            current.wait_stream(side)
            # The allocator does not give up what it caches for others while it serves a capture.
            torch.cuda.empty_cache()
            return self._capture(step)

    def _capture(self, step: Step) -> CapturedStep:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may go on using the device meanwhile.
            graph.capture_begin(pool=self._pools[-1], capture_error_mode="thread_local")
            try:
                outputs = step()
            except BaseException:
                with suppress(RuntimeError):  # All that it would say is that the capture has failed.
                    graph.capture_end()
                raise
            graph.capture_end()
        except Exception as error:
            self._abandon(graph)
            raise CaptureError(f"{type(error).__name__}: {error}") from error
        self._graphs.append(graph)
        return CapturedStep(graph.replay, outputs)

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Tidies up after a failure: `capture_end` then leaves allocators in the belief that a capture goes on.

        They would refuse the next capture into the same pool, and ask the graph about each allocation: it must live on.
        """
        self._abandoned.append(graph)
        index = torch.cuda.current_device()
        with suppress(RuntimeError):  # Raised where the capture had ended before the failure.
            torch._C._cuda_endAllocateToPool(index, self._pools[-1])  # pyright: ignore[reportAttributeAccessIssue]
            torch._C._cuda_releasePool(index, self._pools[-1])
        self._pools.append(torch.cuda.graph_pool_handle())

    def release(self) -> None:
        """See `Capturer.release`."""
        torch.cuda.synchronize(self._device)
        for graph in (*self._graphs, *self._abandoned):
            graph.reset()
        self._graphs.clear()
        # A pool without graphs cannot be captured into again.
        self._pools = [torch.cuda.graph_pool_handle()]
        torch.cuda.empty_cache()

    @property
    def num_bytes(self) -> int:
        """See `Capturer.num_bytes`."""
        segments = [segment for pool in self._pools for segment in torch.cuda.memory_snapshot(pool)]
        return sum(segment["total_size"] for segment in segments)
