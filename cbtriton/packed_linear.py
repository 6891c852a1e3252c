"""Linear layers of a CPU model, run by oneDNN from weights that were put into its own memory order once.

Owns the packed copies and the `forward` replacements that use them. The engine installs them while it runs
and removes them afterwards; the model's parameters, state dict and module types are never touched. Knows
nothing of requests, caches or attention.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType, TracebackType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

_PACKABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Each oneDNN call costs about 25 us before it multiplies anything. Measured on two AVX2 cores, that made
# weights of 65,536 elements and less slower at every number of rows; from 110,592 on they gain.
_MIN_WEIGHT_ELEMENTS = 100_000

# oneDNN picks the memory order for an expected number of rows. At 1...1024 rows the order for 16 was within
# noise of the best; the one for a single row was up to 1.8 times slower from 2 rows on, and the one without a
# hint up to 1.4 times slower on a language model's head.
_ROWS_HINT = 16

# A 16-bit weight that is packed as float32 has twice the bytes to read. With 1...3 rows reading is most of
# the work and the plain product is up to twice as fast; from 4 rows on it pays more for missing instructions
# than it saves (4 times slower at 64 rows). float32 weights need no such limit: even at 1 row, a gain from 2.
_MIN_ROWS_UPCAST = 4

_NUM_SAMPLED_ROWS = 4


@dataclass(frozen=True, slots=True)
class PackingReport:
    """What an installation decided, for the log and the result file.

    Attributes:
        layers: Linear layers that run from packed weights; 0 when nothing was packed.
        bytes: Size of the packed copies.
        compute_dtype: Type the products are computed in, such as `float32`; `+` joins several, empty if none.
        reason: Why this was decided.
    """

    layers: int
    bytes: int
    compute_dtype: str
    reason: str


class PackedLinears:
    """Packed weights for a model's plain linear layers, in force between `install` and `uninstall`.

    A layer takes part when its type is exactly `nn.Linear`, its weight is an ordinary CPU parameter in
    float32, bfloat16 or float16 that is large enough to gain, and nobody has replaced its `forward` or hooked
    in before it. A weight that several modules share is packed once. float32 weights are computed in float32,
    16-bit weights in their own type where oneDNN supports that on this CPU, else in float32 with the result
    rounded back, which is what a 16-bit product with float32 accumulation gives.

    A packed layer runs its plain product whenever gradients, autocast or the compiler are involved. The
    packed copies do not follow changes of the weights: call `refresh` or `repack` after one. Copies and
    pickles of the model run plain products. Not thread-safe: install, refresh and uninstall between steps.

    Attributes:
        report: Decision of the latest `install`.
    """

    def __init__(self, model: nn.Module, *, memory_limit_bytes: int) -> None:
        """Prepares nothing yet; `install` does the work.

        Args:
            model: Its linear layers are looked up anew at each installation.
            memory_limit_bytes: If the packed copies together needed more than this, none is made.

        Raises:
            ValueError: The limit is negative.
        """
        if memory_limit_bytes < 0:
            raise ValueError(f"memory_limit_bytes must be at least 0, got {memory_limit_bytes}; set 0 to pack no layer")
        self._model = model
        self._memory_limit_bytes = memory_limit_bytes
        self._forwards: list[_PackedForward] = []
        self.report = PackingReport(0, 0, "", "not installed yet")

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed copies held now."""
        weights = {forward.weight for forward in self._forwards}
        return sum(weight.packed.nbytes for weight in weights if weight is not None)

    def install(self) -> PackingReport:
        """Packs the weights and lets the layers use them; without effect when installed.

        Returns:
            What was decided, also kept as `report`. The model is unchanged if packing fails half-way.
        """
        if not self._forwards:
            modules = [module for module in self._model.modules() if _can_pack(module)]
            self.report = _decide(modules, self._memory_limit_bytes)
            if self.report.layers:
                self._attach(modules)
        return self.report

    def uninstall(self) -> None:
        """Gives the layers their own `forward` back and frees the copies; harmless when not installed."""
        self._detach(self._forwards)

    def repack(self) -> None:
        """Packs all weights again after they changed; without effect when not installed."""
        if self._forwards:
            self.uninstall()
            self.install()

    def refresh(self) -> int:
        """Packs those weights again that were changed or replaced since they were packed.

        Sees every change that autograd's version counter sees and, by comparing a few rows of each weight,
        whole-tensor writes that pass it by (`.data`, shared memory). Use `repack` after such a write to a few
        rows only.

        Returns:
            The number of layers concerned. One that can no longer be packed runs its plain product.
        """
        stale = [forward for forward in self._forwards if not forward.is_current()]
        self._detach(stale)
        self._attach(forward.module for forward in stale if _can_pack(forward.module))
        return len(stale)

    def __enter__(self) -> PackedLinears:
        """Installs."""
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Uninstalls, whatever happened inside."""
        self.uninstall()

    def _attach(self, modules: Iterable[nn.Linear]) -> None:
        weights: dict[Tensor, _PackedWeight] = {}
        forwards: list[_PackedForward] = []
        for module in modules:
            if module.weight not in weights:
                weights[module.weight] = _PackedWeight.of(module.weight)
            forwards.append(_PackedForward(module, weights[module.weight]))
        for forward in forwards:
            forward.module.forward = forward
        self._forwards += forwards

    def _detach(self, forwards: list[_PackedForward]) -> None:
        for forward in forwards:
            forward.weight = None
            if forward.module.__dict__.get("forward") is forward:
                del forward.module.forward
        self._forwards = [forward for forward in self._forwards if forward.weight is not None]


@dataclass(slots=True, eq=False)
class _PackedForward:
    """The `forward` of one layer while it is installed.

    Without a weight it is the plain product: somebody may have wrapped it and go on calling it once removed.
    """

    module: nn.Linear
    weight: _PackedWeight | None

    def __call__(self, input: Tensor) -> Tensor:
        weight = self.weight
        if (
            weight is None
            or torch.compiler.is_compiling()
            or (torch.is_grad_enabled() and self._requires_grad(input))
            or not weight.serves(input)
        ):
            return nn.Linear.forward(self.module, input)
        return weight.product(input, self.module._parameters["bias"])

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return MethodType, (nn.Linear.forward, self.module)

    def is_current(self) -> bool:
        return self.weight is not None and self.weight.mark.matches(self.module.weight)

    def _requires_grad(self, input: Tensor) -> bool:
        return input.requires_grad or any(parameter.requires_grad for parameter in self.module.parameters())


@dataclass(frozen=True, slots=True, eq=False)
class _PackedWeight:
    """A weight in oneDNN's order.

    Attributes:
        packed: Opaque tensor, in the type that the product is computed in.
        dtype: Type of the original weight and of the inputs and outputs.
        min_input_elements: Inputs with fewer elements than this are faster without packing.
        mark: Tells whether the original still is what was packed.
    """

    packed: Tensor
    dtype: torch.dtype
    min_input_elements: int
    mark: _WeightMark

    @staticmethod
    def of(weight: Tensor) -> _PackedWeight:
        compute_dtype = _compute_dtype(weight.dtype)
        min_rows = 0 if compute_dtype is weight.dtype else _MIN_ROWS_UPCAST
        dense = weight.detach().to(compute_dtype)
        return _PackedWeight(
            packed=torch.ops.mkldnn._reorder_linear_weight(dense, _ROWS_HINT),
            dtype=weight.dtype,
            min_input_elements=min_rows * weight.shape[1],
            mark=_WeightMark.of(weight),
        )

    def serves(self, input: Tensor) -> bool:
        return (
            input.dtype is self.dtype
            and input.numel() >= self.min_input_elements
            and not torch.is_autocast_enabled("cpu")
        )

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        linear = torch.ops.mkldnn._linear_pointwise.default
        compute_dtype = self.packed.dtype
        if compute_dtype is self.dtype:
            return linear(input, self.packed, bias, "none", [], "")
        if bias is not None:
            bias = bias.to(compute_dtype)
        return linear(input.to(compute_dtype), self.packed, bias, "none", [], "").to(self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class _WeightMark:
    """What a weight looked like when it was packed: where it was, its version, and a few of its rows."""

    identity: tuple[int, int, torch.dtype, torch.Size]
    rows: Tensor

    @staticmethod
    def of(weight: Tensor) -> _WeightMark:
        return _WeightMark(_identity(weight), _sampled_rows(weight).clone())

    def matches(self, weight: Tensor) -> bool:
        return self.identity == _identity(weight) and torch.equal(self.rows, _sampled_rows(weight))


def _identity(weight: Tensor) -> tuple[int, int, torch.dtype, torch.Size]:
    version = 0 if weight.is_inference() else weight._version
    return weight.data_ptr(), version, weight.dtype, weight.shape


def _sampled_rows(weight: Tensor) -> Tensor:
    return weight.detach()[:: max(1, len(weight) // _NUM_SAMPLED_ROWS)]


def _can_pack(module: nn.Module) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear or "forward" in module.__dict__ or module._forward_pre_hooks:
        return False
    weight = module._parameters.get("weight")
    return (
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.dtype in _PACKABLE_DTYPES
        and weight.numel() >= _MIN_WEIGHT_ELEMENTS
    )


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return dtype
    if dtype is torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return dtype
    return torch.float32


def _decide(modules: list[nn.Linear], memory_limit_bytes: int) -> PackingReport:
    if not torch.backends.mkldnn.is_available():
        return PackingReport(0, 0, "", "this build of torch has no oneDNN")
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return PackingReport(0, 0, "", f"gains are known for x86-64 only, this is {platform.machine()}")
    if not modules:
        return PackingReport(0, 0, "", "no plain linear layer on the CPU is large enough to gain")
    weights = {module.weight for module in modules}
    needed = sum(weight.numel() * _compute_dtype(weight.dtype).itemsize for weight in weights)
    if needed > memory_limit_bytes:
        reason = f"the packed copies need {needed:,} bytes, more than the limit of {memory_limit_bytes:,}"
        return PackingReport(0, 0, "", reason)
    compute_names = _names(_compute_dtype(weight.dtype) for weight in weights)
    upcast_names = _names(weight.dtype for weight in weights if _compute_dtype(weight.dtype) != weight.dtype)
    reason = "oneDNN multiplies faster from packed weights"
    if upcast_names:
        reason += f"; in float32 because it has no {'/'.join(upcast_names)} products on this CPU"
    return PackingReport(len(modules), needed, "+".join(compute_names), reason)


def _names(dtypes: Iterable[torch.dtype]) -> list[str]:
    return sorted({str(dtype).removeprefix("torch.") for dtype in dtypes})
