"""A pytest plugin: the tests of `tests/kernels` on the CPU backend instead of the interpreter.

`TRITON_INTERPRET=0 PYTHONPATH=tests/cpu_backend/plugins pytest -p native_kernels tests/kernels`
"""

from __future__ import annotations

from cbtriton.kernels import _launch
from cbtriton.kernels.cpu_backend import plugin

# Small, so that programs of persistent kernels come around to a second work item.
_PROCESSORS = 7

plugin.install()
_launch.native_target = lambda device: _launch.INTERPRETER
_launch.num_processors = lambda device: _PROCESSORS
