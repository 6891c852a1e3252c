"""Compilation of a step: what is compiled, for which path, and what the compiler did meanwhile.

The whole step can be one graph. Where a model is a list of layers, compiling a layer once and using its graph for all
takes a fraction of the seconds, so that is what happens there.
"""

from __future__ import annotations

import builtins
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, wraps
from itertools import chain
from operator import is_
from pathlib import PurePath
from traceback import FrameSummary
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters, get_compilation_metrics
from torch._inductor import config as inductor_config
from torch.fx.experimental import _config as shapes_config

from cbtriton.config import CompileSettings
from cbtriton.plan import Path
from cbtriton.replaced_forward import ReplacedForwards
from cbtriton.stats import Preparation

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
        preparations: What was compiled for which bucket.
        is_warm: Whether the warm-up is over.
    """

    def __init__(self) -> None:
        self.compilations = 0
        self.late_compilations = 0
        self.compile_time = 0.0
        self.preparations: list[Preparation] = []
        self.is_warm = False
        # Whether code for all sizes also serves those that make some stride equal to another.
        self._ignores_coincidences = True

    def fall_back(self) -> bool:
        """Lets the compiler look at sizes more closely from now on, which some models need; False if it does already.

        A size that makes some stride equal to another then has a graph of its own, compiled when it comes.
        """
        if not self._ignores_coincidences:
            return False
        _logger.warning("compiling again with graphs of their own for single sizes")
        self._ignores_coincidences = False
        self.__dict__.pop("_compiler_settings", None)
        return True

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
                f"{name} cannot be compiled{_place(error)}; set default_compile_level=0, or the path's compile config "
                f"to None. The compiler says: {error}"
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
                # Its keys are formulas of sizes, which take longer than what it saves: a second of a warm start.
                fake_tensor_cache_enabled=False,
            ),
            # 16-bit models round where they do when not compiled. It costs nothing that could be measured, and without
            # it some logits of a bf16 model were 4 off, as far as bf16 itself is from float32.
            inductor_config.patch(emulate_precision_casts=True),
            shapes_config.patch(  # pyright: ignore[reportAttributeAccessIssue]
                # Sizes that are equal by chance, such as rows and tokens of a decode step, are no promise.
                use_duck_shape=False,
                # Nor is one that makes some stride equal to another: there would be a graph for it, compiled while
                # requests wait. No size is ever 1, see `PaddingPolicy`.
                backed_size_oblivious=self._ignores_coincidences,
            ),
        )

    def _note(self, name: str, count: int) -> None:
        newest = get_compilation_metrics()[-count:]
        seconds = sum(metrics.dynamo_cumulative_compile_time_us or 0 for metrics in newest) / 1e6
        self.compilations += count
        self.compile_time += seconds
        self.preparations.append(Preparation("compile", name, count, seconds))
        if self.is_warm:
            self.late_compilations += count
            reasons = "; ".join(dict.fromkeys(str(metrics.recompile_reason) for metrics in newest))
            _logger.warning("compiled %d graphs late, %.1f s, for a step %s: %s", count, seconds, name, reasons)


def _place(error: TorchDynamoException) -> str:
    """The line of the model, or of what it calls, that the compiler could not go beyond, where it says so."""
    frames: Sequence[FrameSummary] = getattr(error, "real_stack", None) or ()
    if not frames:
        return ""
    frame = frames[-1]
    return f" because of {PurePath(frame.filename).name}, line {frame.lineno}, in {frame.name}: `{frame.line}`"


class CompiledLayers:
    """Replaces the `forward` of a model's layers by a compiled one.

    Args:
        layers: The layers, in the order in which they are called. Their code is the same, so each graph serves all of
            them.
        settings: How each path is compiled; None leaves a path as it is.
    """

    def __init__(self, layers: Sequence[nn.Module], settings: Mapping[Path, CompileSettings | None]) -> None:
        self._layers = layers
        self._graphs = {path: _SharedGraphs(how) for path, how in settings.items() if how is not None}
        self._current: _SharedGraphs | None = None
        self._replaced = ReplacedForwards()
        self._contents: _Contents | None = None

    def begin_step(self, path: Path) -> None:
        """Makes the layers run what is compiled for `path`, in one forward pass."""
        if not self._graphs:
            return
        self._current = self._graphs.get(path)
        if self._contents is None:
            self._install()
        if self._contents is None or self._contents.have_changed():
            self._contents = _Contents.of(self._layers)
            for graphs in self._graphs.values():
                graphs.forget_layers()
        if self._current is not None:
            self._current.begin_step()

    def uninstall(self) -> None:
        """Makes the layers run as they were; harmless when nothing is installed."""
        if self._contents is None:
            return
        self._contents = None
        self._replaced.put_back()

    def _install(self) -> None:
        for index, layer in enumerate(self._layers):
            self._replaced.replace(layer, self._replacement(index, layer.forward))

    def _replacement(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            graphs = self._current
            return forward(*args, **kwargs) if graphs is None else graphs.run(index, forward, args, kwargs)

        return run


class _SharedGraphs:
    """The graphs of one path, and which of them fits which layer.

    A graph's guards compare everything that was read when it was traced: arguments, weights, hooks, globals. That takes
    longer than most of a layer's kernels. Layers whose guards the same graph has passed differ in nothing that matters
    to it, so the first of them is checked in each step, on behalf of all.
    """

    def __init__(self, how: CompileSettings) -> None:
        # Dynamo keeps graphs with the code that it traced, and adds to its globals: nobody else's.
        self._traced = FunctionType(_call.__code__.replace(), {"__builtins__": builtins})
        self._compiled = torch.compile(self._traced, **how.arguments())
        self._is_one_graph = how.fullgraph
        self._functions: dict[CodeType, Callable[..., Any]] = {}
        self._fitting: dict[int, Callable[..., Any]] = {}
        self._checked: set[Callable[..., Any]] = set()

    def forget_layers(self) -> None:
        """Has each layer checked when it is called next."""
        self._fitting.clear()

    def begin_step(self) -> None:
        """Has one layer of each graph checked again: sizes and settings of torch may be others now."""
        self._checked.clear()

    def run(self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls `forward` of layer `index`, compiled; compiles it where no graph fits."""
        if not self._is_one_graph:
            # Whatever comes after a break is found by Dynamo only.
            return self._compiled(forward, *args, **kwargs)
        graph = self._fitting.get(index)
        if graph is None or graph not in self._checked:
            graph = self._find({"forward": forward, "args": args, "kwargs": kwargs})
            if graph is None:
                return self._compiled(forward, *args, **kwargs)
            self._fitting[index] = graph
            self._checked.add(graph)
        return graph(forward, *args, **kwargs)

    def _find(self, arguments: dict[str, Any]) -> Callable[..., Any] | None:
        # What PyTorch's documentation names for looking at compiled code. Dynamo itself would check every layer.
        for entry in _debug_get_cache_entry_list(self._traced):
            # Code is None once something that it needs is gone.
            if entry.code is not None and entry.guard_manager.check(arguments):
                if entry.code not in self._functions:
                    self._functions[entry.code] = FunctionType(entry.code, self._traced.__globals__)
                return self._functions[entry.code]
        return None


def _call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


@dataclass(frozen=True, slots=True, eq=False)
class _Contents:
    """Everything that hangs on some modules and their parts.

    Attributes:
        places: The dictionaries that hold it.
        values: What is in there.
    """

    places: tuple[dict[Any, Any], ...]
    values: tuple[Any, ...]

    @classmethod
    def of(cls, roots: Sequence[nn.Module]) -> _Contents:
        """What is there now."""
        parts = [vars(module) for root in roots for module in root.modules()]
        # Parameters, buffers, submodules and hooks are kept in dictionaries.
        inner = [value for part in parts for value in part.values() if isinstance(value, dict)]
        places = (*parts, *inner)
        return cls(places, cls._in(places))

    def have_changed(self) -> bool:
        """Whether anything was added, removed or replaced since."""
        values = self._in(self.places)
        return len(values) != len(self.values) or not all(map(is_, values, self.values))

    @staticmethod
    def _in(places: tuple[dict[Any, Any], ...]) -> tuple[Any, ...]:
        # Looked at in every step: most are empty.
        return tuple(chain.from_iterable(map(dict.values, filter(None, places))))
