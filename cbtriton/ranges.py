"""Named ranges that profilers show: what the engine did from when to when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

Ranges = Callable[[str], AbstractContextManager[object]]


def ranges_for(device: torch.device) -> Ranges:
    """How ranges are marked on this device.

    On CPUs a range is seen by PyTorch's profiler, on CUDA devices also by tools that read NVTX. Neither costs more
    than a microsecond while nobody looks. Code that is compiled must have none: a compiler would take them for
    something that can change.
    """
    return _nvtx_range if device.type == "cuda" else _range


def _range(name: str) -> AbstractContextManager[object]:
    # PyTorch's own takes several microseconds even where no profiler runs.
    return torch.profiler.record_function(name) if torch.autograd.profiler._is_profiler_enabled else nullcontext()


@contextmanager
def _nvtx_range(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)
    try:
        with _range(name):
            yield
    finally:
        torch.cuda.nvtx.range_pop()
