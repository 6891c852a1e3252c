"""Graphs without a device: what a step runs is recorded, and run again on the very same tensors.

Like a device's graph, a recording knows nothing of the Python around its operations. Sizes, addresses and numbers are
those of the capture; what lies at the addresses is read anew. Nothing may wait for a result while it is captured.
Beyond that, a replay destroys whatever the step computed before, and the outputs of all other graphs, which share
its memory: reading them too late, or something that was not computed anew, shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from cbtriton.graphs import CapturedStep, CaptureError, Step
from cbtriton.kernel_set import KernelSet

# Operations whose result the host waits for, whose size depends on what a tensor holds, or that take data of the host.
FORBIDDEN = frozenset(
    {"_local_scalar_dense", "equal", "is_nonzero", "lift_fresh", "masked_select", "nonzero", "_unique2", "unique_dim"}
)
INDEXING = frozenset({"index", "index_put", "index_put_"})
KERNELS = (
    "prepare_inputs",
    "kv_write",
    "varlen_attention",
    "varlen_plan",
    "decode_attention",
    "decode_plan",
    "sample",
    "process",
    "truncate",
    "block_copy",
)


@dataclass(frozen=True, slots=True)
class Operation:
    """A call, and the tensors that it made."""

    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    made: list[Tensor]

    def run(self) -> None:
        made = new_tensors(self.function(*self.args, **self.kwargs), (self.args, self.kwargs))
        for held, value in zip(self.made, made, strict=True):
            held.copy_(value)


def new_tensors(result: Any, arguments: Any) -> list[Tensor]:
    """The tensors of a result that are no views of an argument, and not an argument itself."""
    known = {address(tensor) for tensor in tree_leaves(arguments) if isinstance(tensor, Tensor)}
    tensors = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor) and tensor.numel()]
    return [tensor for tensor in tensors if address(tensor) not in known]


def address(tensor: Tensor) -> int:
    # Weights in oneDNN's own order have no storage that anybody could look at.
    return id(tensor) if tensor.layout is not torch.strided else tensor.untyped_storage().data_ptr()


def destroy(tensor: Tensor) -> None:
    if tensor.dtype is torch.bool:
        tensor.logical_not_()
    elif tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    else:
        # In range for whoever takes it for a token or a position, and wrong.
        tensor.fill_(1)


def within_bounds(plan: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An attention's plan that insists on what kernels rely on: no context is longer than `max_kv`."""

    def run(*args: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            seq_lens, max_kv = args[3], args[5]
            assert seq_lens.max() <= max_kv, "a graph was replayed for longer contexts than it was captured for"
        return plan(*args)

    return run


class Recording(TorchDispatchMode):
    """Notes the operations of the thread that enters it, each with the tensors it was called on."""

    # Compiled code without a code generator calls some.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        # Compiled code is refused under any other mode.
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "overloadpacket", func).__name__
        has_mask = name in INDEXING and any(index is not None and index.dtype is torch.bool for index in args[1])
        if name in FORBIDDEN or has_mask:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        return self.note(func, args, kwargs or {})

    def note(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        self.operations.append(Operation(function, args, kwargs, new_tensors(result, (args, kwargs))))
        return result


@dataclass(slots=True)
class RecordingCapturer:
    """A `Capturer` for tensors on a CPU.

    Attributes:
        refuse: Called with the number of each capture, from 0; what it returns is why that one fails, if anything.
        num_captures: Captures tried so far.
        num_released: How often everything was freed.
        num_bytes: Size of the outputs of all graphs, in allocations of 512 bytes.
    """

    refuse: Callable[[int], str | None] = lambda number: None
    num_captures: int = 0
    num_released: int = 0
    num_bytes: int = 0
    _outputs: list[tuple[Tensor, ...]] = field(default_factory=list)
    _recording: Recording | None = None

    def capture(self, step: Step) -> CapturedStep:
        step()
        number, self.num_captures = self.num_captures, self.num_captures + 1
        if (reason := self.refuse(number)) is not None:
            raise CaptureError(reason)
        recording = self._recording = Recording()
        try:
            with recording:
                outputs = step()
        except RuntimeError as error:
            raise CaptureError(str(error)) from error
        finally:
            self._recording = None
        self._outputs.append(outputs)
        self.num_bytes += sum(-(-output.nbytes // 512) * 512 for output in outputs)

        def replay() -> None:
            for others in self._outputs:
                for tensor in others:
                    destroy(tensor)
            for operation in recording.operations:
                for tensor in operation.made:
                    destroy(tensor)
            for operation in recording.operations:
                operation.run()

        return CapturedStep(replay, outputs)

    def release(self) -> None:
        self._outputs.clear()
        self.num_bytes = 0
        self.num_released += 1

    def record(self, kernels: KernelSet) -> KernelSet:
        """The kernels, each call of which is one recorded operation: its launches bypass the dispatcher."""
        plans = {name: within_bounds(getattr(kernels, name)) for name in ("varlen_plan", "decode_plan")}
        kernels = replace(kernels, **plans)
        return replace(kernels, **{name: self._recorded(getattr(kernels, name)) for name in KERNELS})

    def _recorded(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            # A compiler calls the kernel's operator, which comes through the dispatcher.
            if torch.compiler.is_compiling() or self._recording is None:
                return kernel(*args)
            with _disable_current_modes():
                return self._recording.note(kernel, args, {})

        return run
