"""Compilation of a step: what is compiled, for which path, and what the compiler did meanwhile.

The whole step can be one graph. Where a model is a list of layers, compiling a layer once and using its graph for all
takes a fraction of the seconds, so that is what happens there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters, get_compilation_metrics
from torch._inductor import config as inductor_config
from torch.fx.experimental import _config as shapes_config

from cbtriton.config import CompileSettings
from cbtriton.plan import Path

_logger = logging.getLogger(__name__)

# Dynamo gives up on a function with more graphs than this, by default 8; fixed sizes need one for every bucket.
_MAX_GRAPHS = 1 << 16


class CompileError(RuntimeError):
    """A step could not be compiled; the message names the path and the reason."""


class CompileMonitor:
    """Counts graphs, and says in the log why one had to be compiled late.

    Attributes:
        compilations: Graphs that were compiled.
        late_compilations: Those of them that were compiled after the warm-up.
        compile_time: Seconds that all took.
        is_warm: Whether the warm-up is over.
    """

    def __init__(self) -> None:
        self.compilations = 0
        self.late_compilations = 0
        self.compile_time = 0.0
        self.is_warm = False

    @contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """Lets the step called `name` compile within the context, and notes what it compiled.

        Raises:
            CompileError: The compiler refused.
        """
        before = counters["stats"]["unique_graphs"]
        try:
            with ExitStack() as stack:
                for settings in self._compiler_settings:
                    stack.enter_context(settings)
                yield
        except TorchDynamoException as error:
            raise CompileError(
                f"{name} cannot be compiled: {error}. Set default_compile_level=0, or the path's compile config to None"
            ) from error
        count = counters["stats"]["unique_graphs"] - before
        if count > 0:
            self._note(name, count)

    @cached_property
    def _compiler_settings(self) -> tuple[AbstractContextManager[Any], ...]:
        """Settings of the compiler for the time of a step. Made once: that takes longer than to use them."""
        return (
            dynamo_config.patch(
                recompile_limit=_MAX_GRAPHS,
                accumulated_recompile_limit=_MAX_GRAPHS,
                # A hook on a part of one layer makes that layer another function.
                skip_nnmodule_hook_guards=False,
                # A model's numbers are constants. Dynamo takes them for variables first, and then starts again.
                specialize_float=True,
            ),
            # 16-bit models round where they do when not compiled. It costs nothing that could be measured, and without
            # it some logits of a bf16 model were 4 off, as far as bf16 itself is from float32.
            inductor_config.patch(emulate_precision_casts=True),
            # Sizes that are equal by chance, such as rows and tokens of a decode step, are no promise.
            shapes_config.patch(use_duck_shape=False),  # pyright: ignore[reportAttributeAccessIssue]
        )

    def _note(self, name: str, count: int) -> None:
        newest = get_compilation_metrics()[-count:]
        seconds = sum(metrics.dynamo_cumulative_compile_time_us or 0 for metrics in newest) / 1e6
        self.compilations += count
        self.compile_time += seconds
        if self.is_warm:
            self.late_compilations += count
            reasons = "; ".join(dict.fromkeys(str(metrics.recompile_reason) for metrics in newest))
            _logger.warning("compiled %d graphs late, %.1f s, for a step %s: %s", count, seconds, name, reasons)


class CompiledLayers:
    """Replaces the `forward` of a model's layers by a compiled one, path by path.

    Args:
        layers: The layers. Their code is the same, so each graph serves all of them.
        settings: How each path is compiled; None leaves a path as it is.
    """

    def __init__(self, layers: Sequence[nn.Module], settings: Mapping[Path, CompileSettings | None]) -> None:
        self._layers = layers
        self._compiled: dict[Path, list[Callable[..., Any]]] = {
            path: [torch.compile(layer.forward, **how.arguments()) for layer in layers]
            for path, how in settings.items()
            if how is not None
        }
        self._installed: Path | None = None
        self._originals: list[Callable[..., Any] | None] = []

    def install(self, path: Path) -> None:
        """Makes the layers run what was compiled for `path`."""
        if path == self._installed:
            return
        self.uninstall()
        if path not in self._compiled:
            return
        self._originals = [layer.__dict__.get("forward") for layer in self._layers]
        for layer, compiled in zip(self._layers, self._compiled[path], strict=True):
            layer.forward = compiled
        self._installed = path

    def uninstall(self) -> None:
        """Makes the layers run as they were; harmless when nothing is installed."""
        if self._installed is None:
            return
        self._installed = None
        for layer, original in zip(self._layers, self._originals, strict=True):
            if original is None:
                del layer.forward
            else:
                layer.forward = original
