"""How a kernel's launcher becomes a `torch.library` operator.

Every implementation of every slot is decorated with `kernel_op`. This module knows nothing of what the kernels compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import update_wrapper
from typing import Generic, ParamSpec, TypeVar

import torch
from torch._ops import OpOverload
from torch.autograd import profiler
from torch.compiler import is_compiling

P = ParamSpec("P")
R = TypeVar("R")

_NAMESPACE = "cbtriton"
_KERNELS_PACKAGE = "cbtriton.kernels."


class KernelOp(Generic[P, R]):
    """A launcher and the operator made from it, callable like the launcher.

    While `torch.compile` or `torch.export` traces, a call becomes one opaque operator in the graph; while PyTorch's
    profiler records, it is one there, too. Otherwise the launcher runs directly: the dispatcher's way costs
    microseconds a call, several times per layer and step. Code that relies on dispatch without the compiler (fake
    tensors, dispatch modes) calls `op`.

    Attributes:
        launcher: The undecorated function.
        op: The registered operator, `torch.ops.cbtriton.<name>.default`.
    """

    launcher: Callable[P, R]
    op: OpOverload

    def __init__(self, name: str, launcher: Callable[P, R], mutates_args: Iterable[str]) -> None:
        self.launcher = launcher
        # `torch.library.custom_op` adds checks and autograd, which nothing here needs, and 60 us a call.
        self._library = torch.library.Library(_NAMESPACE, "FRAGMENT")
        self._library.define(name + torch.library.infer_schema(launcher, mutates_args=tuple(mutates_args)))
        self._library.impl(name, launcher, "CompositeExplicitAutograd")
        self._name = f"{_NAMESPACE}::{name}"
        self.op = getattr(getattr(torch.ops, _NAMESPACE), name).default
        update_wrapper(self, launcher)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the kernel; see the launcher for arguments and result."""
        # Dispatched operators are what a profiler sees.
        if is_compiling() or profiler._is_profiler_enabled:
            return self.op(*args, **kwargs)
        return self.launcher(*args, **kwargs)

    def register_fake(self, fake: Callable[P, R]) -> Callable[P, R]:
        """Decorator for the function that tells shapes and dtypes of the results without computing them."""
        torch.library.register_fake(self._name, fake, lib=self._library)
        return fake


def kernel_op(name: str, mutates_args: Iterable[str] = ()) -> Callable[[Callable[P, R]], KernelOp[P, R]]:
    """Decorator that registers a launcher as the operator `cbtriton::<name>`.

    Args:
        name: `<slot>_<implementation>`, unique in the process.
        mutates_args: Names of the tensor arguments that the launcher writes to. Results must not alias arguments.

    Raises:
        ImportError: The launcher's module was not imported as part of `cbtriton.kernels`.
    """

    def decorate(launcher: Callable[P, R]) -> KernelOp[P, R]:
        module = launcher.__module__
        if not module.startswith(_KERNELS_PACKAGE):
            raise ImportError(
                f"kernels must be imported as {_KERNELS_PACKAGE}<slot>.<name>, got the module name {module!r}; "
                "the repository's root on sys.path makes its folder importable as the package 'kernels', which would "
                "register every operator twice. Import cbtriton.kernels, and start Python without the root on "
                "sys.path (PYTHONSAFEPATH=1, or run a script instead of `python -m`)"
            )
        return KernelOp(name, launcher, mutates_args)

    return decorate
