"""A pytest plugin: the tests of `tests/kernels` on the CPU backend instead of the interpreter.

`TRITON_INTERPRET=0 PYTHONPATH=tests/cpu_backend/plugins pytest -p native_kernels tests/kernels`
"""

from __future__ import annotations

import functools

import torch

from cbtriton.kernels import _launch
from cbtriton.kernels.cpu_backend.checking import poison_
from cbtriton.kernels.cpu_backend.compiler import is_checking

# Small, so that programs of persistent kernels come around to a second work item.
_PROCESSORS = 7
_POISONED_BYTES = 1 << 26


def _poisoned(make):
    """A function that makes a tensor of undefined contents, with poison as the contents where there is any."""

    @functools.wraps(make)
    def poisoned(*args, **options):
        tensor = make(*args, **options)
        if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.nbytes <= _POISONED_BYTES:
            try:
                poison_(tensor)
            except TypeError:
                return tensor
        return tensor

    return poisoned


_launch.num_processors = lambda device: _PROCESSORS
if is_checking():
    torch.empty, torch.empty_like = _poisoned(torch.empty), _poisoned(torch.empty_like)
    torch.Tensor.new_empty = _poisoned(torch.Tensor.new_empty)
