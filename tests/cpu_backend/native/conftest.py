"""Puts the CPU backend into the process. The files here run in a process of their own, see `test_native.py`."""

from __future__ import annotations

from cbtriton.kernels.cpu_backend import plugin

plugin.install()
