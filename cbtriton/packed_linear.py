"""Linear layers of a CPU model, run by oneDNN from weights that were put into its own memory order once.

Owns the packed copies and the `forward` replacements that use them. The engine installs them while it runs
and removes them afterwards; the model's parameters, state dict and module types are never touched. Layers that always
get the same input, such as the projections to queries, keys and values, become one product. Knows nothing of requests,
caches or attention.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType, TracebackType
from typing import TypeGuard

import torch
import torch.nn.functional as F
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

LinearGroup = tuple[nn.Linear, ...]

_multiply_packed = torch.ops.mkldnn._linear_pointwise.default


@contextmanager
def record_linear_groups(model: nn.Module) -> Iterator[list[LinearGroup]]:
    """Notes which linear layers share their input in a forward pass that runs inside the context.

    A group are layers of one parent module that were called one after the other with the same tensor. The list is
    filled when the context ends; layers without a group are not in it.
    """
    parent_of = {child: parent for parent in model.modules() for child in parent.children()}
    calls: list[_Call] = []

    def note(module: nn.Linear, args: tuple[Tensor, ...]) -> None:
        version = 0 if args[0].is_inference() else args[0]._version
        calls.append(_Call(module, parent_of[module], args[0], version))

    handles = [module.register_forward_pre_hook(note) for module in parent_of if type(module) is nn.Linear]
    groups: list[LinearGroup] = []
    try:
        yield groups
    finally:
        for handle in handles:
            handle.remove()
    runs: list[list[_Call]] = []
    for call in calls:
        if runs and call.continues(runs[-1][-1]):
            runs[-1].append(call)
        else:
            runs.append([call])
    # What is called more than once in a pass is not always called with its group.
    times = Counter(call.module for call in calls)
    groups += [
        tuple(call.module for call in run)
        for run in runs
        if len(run) > 1 and all(times[call.module] == 1 for call in run)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A layer's call in the recorded pass, with the version of its input: what was changed since is another one."""

    module: nn.Linear
    parent: nn.Module
    input: Tensor
    version: int

    def continues(self, other: _Call) -> bool:
        return self.input is other.input and self.version == other.version and self.parent is other.parent


@dataclass(frozen=True, slots=True)
class PackingReport:
    """What an installation decided, for the log and the result file.

    Attributes:
        layers: Linear layers that run from packed weights; 0 when nothing was packed.
        products: Products that these take; fewer where layers that share their input are one product.
        bytes: Size of the packed copies.
        compute_dtype: Type the products are computed in, such as `float32`; `+` joins several, empty if none.
        reason: Why this was decided.
    """

    layers: int
    products: int
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

    The layers of a group are multiplied together when the first of them is called; the others find their outputs if
    they are called with the very same input, and multiply on their own if not.

    A packed layer runs its plain product whenever gradients or autocast are involved. The packed copies do not follow
    changes of the weights: uninstall before one and install again. Copies and pickles of the model run plain
    products. Not thread-safe: install and uninstall between steps.

    Attributes:
        report: Decision of the latest `install`.
    """

    def __init__(self, model: nn.Module, *, memory_limit_bytes: int, groups: Sequence[LinearGroup] = ()) -> None:
        """Prepares nothing yet; `install` does the work.

        Args:
            model: Its linear layers are looked up anew at each installation.
            memory_limit_bytes: If the packed copies together needed more than this, none is made.
            groups: Layers that share their input, as `record_linear_groups` finds them.

        Raises:
            ValueError: The limit is negative.
        """
        if memory_limit_bytes < 0:
            raise ValueError(f"memory_limit_bytes must be at least 0, got {memory_limit_bytes}; set 0 to pack no layer")
        self._model = model
        self._memory_limit_bytes = memory_limit_bytes
        self._groups = groups
        self._products: list[_Product] = []
        self.report = PackingReport(0, 0, 0, "", "not installed yet")

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed copies held now."""
        return sum(packed.nbytes for packed in {product.packed for product in self._products})

    def install(self) -> PackingReport:
        """Packs the weights and lets the layers use them; without effect when installed.

        Returns:
            What was decided, also kept as `report`. The model is unchanged if packing fails half-way.
        """
        if not self._products:
            groups = _all_groups([module for module in self._model.modules() if _is_plain(module)], self._groups)
            self.report = _decide(groups, self._memory_limit_bytes)
            if self.report.layers:
                self._attach(groups)
        return self.report

    def uninstall(self) -> None:
        """Gives the layers their own `forward` back and frees the copies; harmless when not installed."""
        for product in self._products:
            for module in product.modules:
                module.__dict__.pop(_PLACE, None)
                if getattr(module.__dict__.get("forward"), "__func__", None) is _forward:
                    del module.forward
        self._products = []

    def __enter__(self) -> PackedLinears:
        """Installs."""
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Uninstalls, whatever happened inside."""
        self.uninstall()

    def _attach(self, groups: Iterable[LinearGroup]) -> None:
        packed: dict[tuple[Tensor, ...], Tensor] = {}
        products: list[_Product] = []
        for group in groups:
            weights = tuple(module.weight for module in group)
            if weights not in packed:
                packed[weights] = _pack(weights)
            products.append(_Product(group, packed[weights]))
        for product in products:
            for index, module in enumerate(product.modules):
                setattr(module, _PLACE, _Place(product, index))
                # A method and not an object of ours: a graph that was compiled for one layer serves others only if
                # they run the same function.
                module.forward = MethodType(_forward, module)
        self._products = products


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """Outputs of a product that its other layers have not come for yet."""

    input: Tensor
    outputs: tuple[Tensor, ...]


class _Product:
    """One product that serves one layer, or all layers of a group.

    Attributes:
        modules: The layers, in the order in which they are called.
        packed: Their weights in oneDNN's order, stacked.
    """

    def __init__(self, modules: LinearGroup, packed: Tensor) -> None:
        self.modules = modules
        self.packed = packed
        # Kept, because a compiler takes it for a constant, and tensors in oneDNN's order for something to be read.
        self._dtype = packed.dtype
        self._sizes = [module.out_features for module in modules]
        self._waiting: _Waiting | None = None

    def output(self, index: int, input: Tensor) -> Tensor:
        """What layer `index` gives for `input`, `[..., out_features]`."""
        if len(self.modules) == 1:
            return self._multiply(input)
        waiting = self._waiting
        if index == 0 or waiting is None or waiting.input is not input:
            waiting = _Waiting(input, self._multiply(input).split(self._sizes, dim=-1))
        # Nothing outlives the last layer: neither memory, nor anything that a compiler would have to keep.
        self._waiting = None if index == len(self.modules) - 1 else waiting
        return waiting.outputs[index]

    def _multiply(self, input: Tensor) -> Tensor:
        # Read at each call: somebody may have changed or replaced them.
        weights: list[Tensor] = [module.weight for module in self.modules]
        biases: list[Tensor] = [module.bias for module in self.modules if module.bias is not None]
        size = sum(self._sizes)
        if self._dtype is input.dtype:
            bias = _stack(biases) if biases else None
            if torch.compiler.is_compiling():
                return torch.ops.cbtriton.packed_product.default(input, self.packed, bias, size)
            return _packed_product(input, self.packed, bias, size)
        multiply = torch.ops.cbtriton.packed_linear.default if torch.compiler.is_compiling() else _packed_linear
        return multiply(input, self.packed, weights, biases, size)


# Attribute of a layer that says where its outputs come from, while that is so.
_PLACE = "_cbtriton_packed"


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Which output of which product is a layer's. Copies and pickles have none: they follow their own weights."""

    product: _Product
    index: int

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _forward(self: nn.Linear, input: Tensor) -> Tensor:
    """`forward` of a layer while it is packed, and the plain product where somebody goes on calling it afterwards."""
    place = self.__dict__.get(_PLACE)
    if (
        place is None
        or input.dtype is not self.weight.dtype
        or torch.is_autocast_enabled("cpu")
        or (torch.is_grad_enabled() and _requires_grad(self, input))
    ):
        return nn.Linear.forward(self, input)
    return place.product.output(place.index, input)


def _requires_grad(module: nn.Linear, input: Tensor) -> bool:
    return input.requires_grad or any(parameter.requires_grad for parameter in module.parameters())


def _packed_product(input: Tensor, packed: Tensor, bias: Tensor | None, size: int) -> Tensor:
    """`input` times the packed weights plus `bias`, `[..., size]`; all of one dtype.

    An operation of its own besides oneDNN's, which Inductor takes over only for weights that it packed itself, and
    besides `packed_linear`, because lists of tensors take 6 us to get through the dispatcher.
    """
    return _multiply_packed(input, packed, bias, "none", [], "")


def _packed_linear(input: Tensor, packed: Tensor, weights: list[Tensor], biases: list[Tensor], size: int) -> Tensor:
    """`input` times the stacked weights plus the stacked biases, `[..., size]` in the input's dtype.

    For weights that are packed in another dtype than the input's.

    Args:
        input: `[..., in_features]`.
        packed: What `_pack` made of `weights`.
        weights: `[*, in_features]` each, `size` rows in all.
        biases: One for each weight, or none.
        size: So that nothing has to be read from tensors whose layout only oneDNN knows.
    """
    dtype = packed.dtype
    if input.numel() < _MIN_ROWS_UPCAST * input.shape[-1]:
        return _stack([F.linear(input, *parts) for parts in zip(weights, *([biases] if biases else []), strict=True)])
    bias = _stack(biases).to(dtype) if biases else None
    return _multiply_packed(input.to(dtype), packed, bias, "none", [], "").to(input.dtype)


def _stack(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=-1)


# Defined at the lowest level: a layer calls it several times per step, and `torch.library.custom_op` adds 60 us a call.
_library = torch.library.Library("cbtriton", "FRAGMENT")
_library.define("packed_product(Tensor input, Tensor packed, Tensor? bias, int size) -> Tensor")
_library.define("packed_linear(Tensor input, Tensor packed, Tensor[] weights, Tensor[] biases, int size) -> Tensor")
for _key in ("CPU", "MkldnnCPU"):
    _library.impl("packed_product", _packed_product, _key)
    _library.impl("packed_linear", _packed_linear, _key)


@torch.library.register_fake("cbtriton::packed_product")
def _(input: Tensor, packed: Tensor, bias: Tensor | None, size: int) -> Tensor:
    return input.new_empty(*input.shape[:-1], size)


@torch.library.register_fake("cbtriton::packed_linear")
def _(input: Tensor, packed: Tensor, weights: list[Tensor], biases: list[Tensor], size: int) -> Tensor:
    return input.new_empty(*input.shape[:-1], size)


def _pack(weights: Sequence[Tensor]) -> Tensor:
    dtype = _compute_dtype(weights[0].dtype)
    dense = torch.cat([weight.detach().to(dtype) for weight in weights])
    return torch.ops.mkldnn._reorder_linear_weight(dense, _ROWS_HINT)


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear or "forward" in module.__dict__ or module._forward_pre_hooks:
        return False
    weight = module._parameters.get("weight")
    return type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.dtype in _PACKABLE_DTYPES


def _all_groups(modules: Sequence[nn.Linear], groups: Iterable[LinearGroup]) -> list[LinearGroup]:
    """The layers that gain, each in one group: those that can be one product, then the others alone."""
    plain = set(modules)
    together = [group for group in groups if plain.issuperset(group) and _can_join(group)]
    taken = {module for group in together for module in group}
    every = together + [(module,) for module in modules if module not in taken]
    return [group for group in every if sum(m.weight.numel() for m in group) >= _MIN_WEIGHT_ELEMENTS]


def _can_join(group: LinearGroup) -> bool:
    return len({(m.in_features, m.weight.dtype, m.bias is None) for m in group}) == 1


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return dtype
    if dtype is torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return dtype
    return torch.float32


def _decide(groups: list[LinearGroup], memory_limit_bytes: int) -> PackingReport:
    if not torch.backends.mkldnn.is_available():
        return _refuse("this build of torch has no oneDNN")
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return _refuse(f"gains are known for x86-64 only, this is {platform.machine()}")
    if not groups:
        return _refuse("no plain linear layer on the CPU is large enough to gain")
    stacks = {tuple(module.weight for module in group) for group in groups}
    weights = [weight for stack in stacks for weight in stack]
    needed = sum(weight.numel() * _compute_dtype(weight.dtype).itemsize for weight in weights)
    if needed > memory_limit_bytes:
        return _refuse(f"the packed copies need {needed:,} bytes, more than the limit of {memory_limit_bytes:,}")
    compute_names = _names(_compute_dtype(weight.dtype) for weight in weights)
    upcast_names = _names(weight.dtype for weight in weights if _compute_dtype(weight.dtype) != weight.dtype)
    reason = "oneDNN multiplies faster from packed weights"
    if upcast_names:
        reason += f"; in float32 because it has no {'/'.join(upcast_names)} products on this CPU"
    return PackingReport(sum(map(len, groups)), len(groups), needed, "+".join(compute_names), reason)


def _refuse(reason: str) -> PackingReport:
    return PackingReport(0, 0, 0, "", reason)


def _names(dtypes: Iterable[torch.dtype]) -> list[str]:
    return sorted({str(dtype).removeprefix("torch.") for dtype in dtypes})
