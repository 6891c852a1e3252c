"""Compiled layers compute what the plain ones do, whatever has changed since their guards were checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list as look_up
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.utils import counters

from cbtriton import compile as compiling
from cbtriton.compile import CompiledLayers, CompileMonitor
from cbtriton.config import CompileSettings

WIDTH = 8
settings_of_module = {"shift": 1.0}


class Part(nn.Module):
    """A linear layer whose result depends on everything that Python lets it depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x) * self.scale + settings_of_module["shift"]
        if self.training:
            out = out - 1
        if torch.is_grad_enabled():
            out = out + 3
        return out + torch.ones(()).element_size()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor, *, shift: float = 0.0) -> Tensor:
        # The number of tokens becomes a part of a graph for fixed sizes.
        return self.part(x) + x + x.shape[0] + shift


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(4)).eval()

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        for layer in self.layers:
            x = layer(x, shift=shift)
        return x


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def layers(model: Model) -> Iterator[CompiledLayers]:
    """The model's layers, compiled on the decode path, after two steps."""
    how = CompileSettings(backend="eager", mode=None, dynamic=False, fullgraph=True)
    layers = CompiledLayers(tuple(model.layers), {"varlen": None, "decode": how})
    for _ in range(2):
        assert_same(model, layers)
    yield layers
    layers.uninstall()


def tokens(count: int) -> Tensor:
    return torch.randn(count, WIDTH, dtype=torch.float32, generator=torch.Generator().manual_seed(count))


def assert_same(model: Model, layers: CompiledLayers, count: int = 3, shift: float = 0.0) -> None:
    """A compiled step of so many tokens gives what the plain layers do."""
    layers.begin_step("varlen")
    expected = model(tokens(count), shift)
    layers.begin_step("decode")
    with CompileMonitor().watch("decode"):
        actual = model(tokens(count), shift)
    # The same kernels in the same order: not even rounding differs.
    assert torch.equal(actual, expected)


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def put_hook(model: Model) -> Callable[[], None]:
    return model.layers[2].part.register_forward_hook(lambda module, args, output: 2 * output).remove


def replace_part(model: Model) -> None:
    model.layers[2].part = nn.Linear(WIDTH, WIDTH)


def replace_weight(model: Model) -> None:
    model.layers[2].part.linear.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))


def replace_forward_of_part(model: Model) -> None:
    model.layers[2].part.forward = torch.sin


def replace_forward_of_layer(model: Model) -> None:
    model.layers[2].forward = lambda x, *, shift: x.cos()


def set_attribute(model: Model) -> None:
    model.layers[2].part.scale = 0.25


def train(model: Model) -> None:
    model.layers[2].part.train()


CHANGES = [
    put_hook,
    replace_part,
    replace_weight,
    replace_forward_of_part,
    replace_forward_of_layer,
    set_attribute,
    train,
]


@pytest.mark.parametrize("is_installed", [True, False])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_changed_on_one_layer_between_steps_holds(model, layers, change, is_installed):
    before = model(tokens(3))
    if not is_installed:
        layers.uninstall()
    undo = change(model)
    for count in (3, 3, 5):
        assert_same(model, layers, count)
    assert not torch.equal(model(tokens(3)), before)
    if undo is not None:
        undo()
        for _ in range(2):
            assert_same(model, layers)
        assert torch.equal(model(tokens(3)), before)


def test_settings_of_torch_and_of_modules_hold(model, layers, monkeypatch):
    graphs = num_graphs()
    with torch.enable_grad():
        assert_same(model, layers)
    torch.set_default_dtype(torch.float64)
    try:
        assert_same(model, layers)
    finally:
        torch.set_default_dtype(torch.float32)
    monkeypatch.setitem(settings_of_module, "shift", 2.0)
    assert_same(model, layers)
    # Each is one graph for all layers, and one more for those whose input has a gradient.
    assert num_graphs() == graphs + 4


def test_no_layer_runs_a_graph_of_other_sizes_or_arguments(model, layers):
    graphs = num_graphs()
    for count, shift in ((3, 0.0), (5, 0.0), (3, 0.0), (3, 1.5), (5, 1.5), (3, 0.0)):
        for _ in range(2):
            assert_same(model, layers, count, shift)
    assert num_graphs() == graphs + 3
    # Whoever forbids to compile gets plain layers and not graphs that do not fit.
    with torch.compiler.set_stance("eager_on_recompile"):
        assert_same(model, layers, 7)
        assert_same(model, layers, 3)


def test_graphs_that_need_something_that_is_gone_are_not_run(model, layers):
    # As Dynamo does when a class that a guard knows is collected.
    with mock.patch.object(compiling, "_debug_get_cache_entry_list", wraps=look_up) as looking:
        assert_same(model, layers)
    for entry in look_up(*looking.call_args.args):
        entry.guard_manager.extra_state.invalidate(entry, DeletedGuardManagerWrapper("it is gone"))
    for _ in range(2):
        assert_same(model, layers)


def test_a_step_checks_the_guards_of_one_layer(model, layers):
    with mock.patch.object(compiling, "_debug_get_cache_entry_list", wraps=look_up) as looking:
        for _ in range(3):
            assert_same(model, layers)
        assert looking.call_count == 3
        # Other sizes are another graph, which each layer has to be checked for once.
        assert_same(model, layers, 5)
        assert_same(model, layers, 5)
        assert looking.call_count == 3 + len(model.layers) + 1


def test_two_kinds_of_layers_are_checked_each(model, layers):
    model.layers[2].part.scale = 0.25
    assert_same(model, layers)
    assert_same(model, layers)
    with mock.patch.object(compiling, "_debug_get_cache_entry_list", wraps=look_up) as looking:
        assert_same(model, layers)
    assert looking.call_count == 2


def test_layers_are_given_back_as_they_were(model, layers):
    layers.uninstall()
    layers.uninstall()
    assert all("forward" not in layer.__dict__ for layer in model.layers)
    own = model.layers[1].forward
    model.layers[1].forward = replaced = lambda x, *, shift: own(2 * x, shift=shift)
    assert_same(model, layers)
    layers.uninstall()
    assert model.layers[1].__dict__["forward"] is replaced


def test_code_in_pieces_stays_compiled(model):
    calls: list[str] = []

    def backend(graph, inputs):
        def run(*args):
            calls.append(graph.code)
            return graph(*args)

        return run

    layer = model.layers[0]
    layer.part.register_forward_hook(lambda module, args, output: torch._dynamo.graph_break())
    layers = CompiledLayers((layer,), {"decode": CompileSettings(backend, None, False, fullgraph=False)})
    steps = []
    for _ in range(3):
        layers.begin_step("decode")
        with CompileMonitor().watch("decode"):
            layer(tokens(3))
        steps.append(calls[:])
        calls.clear()
    layers.uninstall()
    assert len(steps[0]) > 1
    assert steps[0] == steps[1] == steps[2]
