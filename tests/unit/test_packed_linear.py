"""Packed linear layers: same numbers as plain ones, and no trace left behind."""

from __future__ import annotations

import copy
import platform
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cbtriton import packed_linear
from cbtriton.packed_linear import PackedLinears, record_linear_groups

IN, OUT = 512, 256
LIMIT = 1 << 30
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or platform.machine().lower() not in ("x86_64", "amd64"),
    reason="packing needs oneDNN on x86-64",
)


def make_layer(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(IN, OUT, bias=bias).to(dtype).requires_grad_(False)


def make_input(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, IN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())


def packed(model: nn.Module) -> PackedLinears:
    linears = PackedLinears(model, memory_limit_bytes=LIMIT)
    assert linears.install().layers > 0
    return linears


class Tied(nn.Module):
    """A language model in miniature: embedding, two layers that share a weight, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(OUT, IN)
        self.up = nn.Linear(IN, IN, bias=False)
        self.again = nn.Linear(IN, IN, bias=False)
        self.again.weight = self.up.weight
        self.head = nn.Linear(IN, OUT, bias=False)
        self.head.weight = self.embed.weight
        self.small = nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.again(torch.tanh(self.up(self.embed(ids))))))


class Siblings(nn.Module):
    """Three layers with the same input, one of another width, and one that gets something else."""

    def __init__(self, dtype: torch.dtype = torch.float32, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(IN, out, bias) for out in (OUT, OUT // 2, OUT // 4))
        self.down = nn.Linear(OUT, OUT, bias)
        self.to(dtype).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = self.query(x), self.key(x), self.value(x)
        return query, key, value, self.down(query)

    def exact(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(exact(layer, x) for layer in (self.query, self.key, self.value))


def groups_of(model: nn.Module, *inputs: torch.Tensor) -> list[tuple[nn.Linear, ...]]:
    with record_linear_groups(model) as groups, torch.no_grad():
        model(*inputs)
    return groups


def grouped(model: Siblings) -> PackedLinears:
    linears = PackedLinears(
        model, memory_limit_bytes=LIMIT, groups=groups_of(model, make_input(2, dtype=model.key.weight.dtype))
    )
    report = linears.install()
    # `down` is too small to gain.
    assert (report.layers, report.products) == (3, 1)
    return linears


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(), (1,), (2,), (5,), (63,), (65,), (1, 7), (2, 3, 4), (0,), (1, 0)])
def test_float32_equals_plain_product_for_any_leading_shape(shape: tuple[int, ...], bias: bool) -> None:
    layer, x = make_layer(bias=bias), make_input(*shape)
    expected = exact(layer, x)
    with packed(layer):
        got = layer(x)
    assert got.shape == expected.shape
    assert got.dtype is torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 4, 17, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_result_is_the_exact_one_rounded_once(dtype: torch.dtype, rows: int, bias: bool) -> None:
    layer, x = make_layer(dtype, bias), make_input(rows, dtype=dtype)
    expected = exact(layer, x)
    plain_error = (layer(x).double() - expected).abs().max()
    with packed(layer):
        got = layer(x)
    assert got.dtype is dtype
    half_ulp = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(got.double(), expected, rtol=1.01 * half_ulp, atol=1e-5)
    assert (got.double() - expected).abs().max() <= plain_error + 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", ["transposed", "every_second_column", "every_second_row", "expanded"])
def test_input_that_is_not_contiguous(view: str, dtype: torch.dtype) -> None:
    base = make_input(IN, dtype=dtype)
    x = {
        "transposed": base.t(),
        "every_second_column": torch.cat([base, base], dim=1)[:, ::2],
        "every_second_row": base[::2],
        "expanded": base[:1].expand(9, IN),
    }[view]
    layer = make_layer(dtype)
    with packed(layer):
        got = layer(x)
    torch.testing.assert_close(got.double(), exact(layer, x), rtol=torch.finfo(dtype).eps, atol=2e-5)


def test_weight_that_is_not_contiguous() -> None:
    layer = make_layer()
    layer.weight = nn.Parameter(layer.weight.t().contiguous().t(), requires_grad=False)
    x = make_input(6)
    with packed(layer):
        torch.testing.assert_close(layer(x).double(), exact(layer, x), rtol=1e-5, atol=1e-5)


def test_packed_weight_is_what_is_read() -> None:
    """Without this, a `forward` that ignores the packed copy would pass every other test of values."""
    layer, x = make_layer(), make_input(6)
    before = layer(x)
    with packed(layer):
        layer.weight.zero_()
        torch.testing.assert_close(layer(x), before, rtol=1e-5, atol=1e-5)


def test_rows_do_not_mix() -> None:
    layer, x = make_layer(), make_input(33)
    with packed(layer):
        alone = torch.cat([layer(row[None]) for row in x])
        x_poisoned = x.clone()
        x_poisoned[7] = float("nan")
        together = layer(x_poisoned)
    assert together[7].isnan().all()
    keep = torch.arange(33) != 7
    torch.testing.assert_close(together[keep], alone[keep], rtol=1e-5, atol=1e-5)


def test_inference_mode_and_other_thread() -> None:
    layer, x = make_layer(), make_input(6)
    with torch.inference_mode():
        linears = packed(layer)
    results: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: results.append(layer(x)))
    thread.start()
    thread.join()
    linears.uninstall()
    torch.testing.assert_close(results[0].double(), exact(layer, x), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- when the plain product must run


@pytest.mark.parametrize("trained", ["input", "weight", "bias"])
def test_gradients_are_those_of_the_plain_layer(trained: str) -> None:
    def grads(install: bool) -> list[torch.Tensor | None]:
        layer, x = make_layer(), make_input(6)
        leaves = {"input": x, "weight": layer.weight, "bias": layer.bias}
        leaves[trained].requires_grad_(True)
        linears = packed(layer) if install else None
        layer(x).square().sum().backward()
        if linears is not None:
            linears.uninstall()
        return [leaf.grad for leaf in leaves.values()]

    for got, expected in zip(grads(install=True), grads(install=False), strict=True):
        if got is None or expected is None:
            assert got is expected
        else:
            assert torch.equal(got, expected)


def test_autocast_keeps_its_output_type() -> None:
    layer, x = make_layer(), make_input(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = layer(x)
        with packed(layer):
            got = layer(x)
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, expected)


def test_wrong_input_type_gives_the_plain_layers_error() -> None:
    layer = make_layer()
    with packed(layer), pytest.raises(RuntimeError, match="dtype"):
        layer(make_input(6).double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_packed_layers_are_one_graph_with_the_same_bits(dtype: torch.dtype) -> None:
    model = Siblings(dtype)
    # What another test compiled of the same code would count as a recompilation.
    torch._dynamo.reset()
    with grouped(model), torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for rows in (6, 2, 9):
                x = make_input(rows, dtype=dtype)
                assert all(map(torch.equal, compiled(x), model(x)))


# ---------------------------------------------------------------- nothing is left behind


def snapshot(model: nn.Module) -> list[tuple[type, set[str], object]]:
    return [(type(m), set(m.__dict__), m.__dict__.get("forward")) for m in model.modules()]


def test_uninstall_leaves_no_trace() -> None:
    model = Tied()
    before, keys = snapshot(model), list(model.state_dict())
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    linears = packed(model)
    assert list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] == [entry[0] for entry in before]
    assert snapshot(model) != before
    linears.uninstall()
    assert snapshot(model) == before
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert linears.packed_bytes == 0


def test_uninstall_after_an_exception() -> None:
    model = Tied()
    before = snapshot(model)
    with pytest.raises(IndexError), packed(model):
        model(torch.tensor([OUT + 1]))
    assert snapshot(model) == before


def test_install_and_uninstall_twice() -> None:
    model = Tied()
    before = snapshot(model)
    linears = packed(model)
    held = linears.packed_bytes
    assert linears.install().layers == 3
    assert linears.packed_bytes == held
    linears.uninstall()
    linears.uninstall()
    assert snapshot(model) == before
    with linears:
        assert linears.packed_bytes == held
    assert snapshot(model) == before


def test_two_installations_on_one_model_do_not_disturb_each_other() -> None:
    model = Tied()
    before, ids = snapshot(model), torch.arange(6)
    expected = model(ids).detach()
    first = packed(model)
    second = PackedLinears(model, memory_limit_bytes=LIMIT)
    assert second.install().layers == 0
    second.uninstall()
    with torch.no_grad():
        torch.testing.assert_close(model(ids), expected, rtol=1e-4, atol=1e-4)
    first.uninstall()
    assert snapshot(model) == before


def test_failed_packing_leaves_the_model_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tied()
    before, calls = snapshot(model), []
    reorder = torch.ops.mkldnn._reorder_linear_weight

    def failing(weight: torch.Tensor, rows: int) -> torch.Tensor:
        calls.append(rows)
        if len(calls) == 2:
            raise MemoryError
        return reorder(weight, rows)

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", failing)
    with pytest.raises(MemoryError):
        PackedLinears(model, memory_limit_bytes=LIMIT).install()
    assert snapshot(model) == before


def test_wrapper_put_on_top_stays_and_sees_new_weights_after_uninstall() -> None:
    layer, x = make_layer(), make_input(6)
    linears = packed(layer)
    inner = layer.forward
    layer.forward = lambda input: 2 * inner(input)
    linears.uninstall()
    layer.weight.mul_(3)
    torch.testing.assert_close(layer(x).double(), 2 * exact(layer, x), rtol=1e-5, atol=1e-5)


def test_copy_of_a_packed_model_follows_its_own_weights() -> None:
    layer, x = make_layer(), make_input(6)
    with packed(layer):
        twin = copy.deepcopy(layer)
    twin.weight.mul_(3)
    torch.testing.assert_close(twin(x).double(), exact(twin, x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer(x).double(), exact(layer, x), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- which layers take part


def test_shared_weights_are_packed_once() -> None:
    model = Tied()
    ids = torch.arange(6)
    expected = model(ids).detach()
    with packed(model) as linears, torch.no_grad():
        assert linears.report.layers == 3
        assert linears.report.bytes == linears.packed_bytes == 4 * (IN * IN + OUT * IN)
        torch.testing.assert_close(model(ids), expected, rtol=1e-4, atol=1e-4)


def test_layers_that_are_not_plain_stay_as_they_are() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    subclass = Doubled(IN, OUT)
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(IN, OUT))
    hooked = make_layer()
    hooked.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    replaced = make_layer()
    replaced.forward = lambda input: input
    double = make_layer(torch.float64)
    meta = nn.Linear(IN, OUT, device="meta")
    small = nn.Linear(8, 8)
    model = nn.ModuleList([subclass, parametrized, hooked, replaced, double, meta, small])
    before = snapshot(model)
    report = PackedLinears(model, memory_limit_bytes=LIMIT).install()
    assert snapshot(model) == before
    assert (report.layers, report.bytes, report.compute_dtype) == (0, 0, "")
    assert "no plain linear layer" in report.reason


def test_forward_hooks_still_run() -> None:
    layer, x = make_layer(), make_input(6)

    def add_one(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output + 1

    layer.register_forward_hook(add_one)
    with packed(layer):
        torch.testing.assert_close(layer(x).double(), exact(layer, x) + 1, rtol=1e-5, atol=1e-5)


def test_memory_limit_is_inclusive_and_explained() -> None:
    model = Tied()
    before, needed = snapshot(model), 4 * (IN * IN + OUT * IN)
    refused = PackedLinears(model, memory_limit_bytes=needed - 1)
    report = refused.install()
    assert snapshot(model) == before
    assert refused.packed_bytes == report.layers == report.bytes == 0
    assert f"{needed:,}" in report.reason
    assert f"{needed - 1:,}" in report.reason
    with PackedLinears(model, memory_limit_bytes=needed) as linears:
        assert linears.packed_bytes == needed


def test_negative_memory_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0, got -1"):
        PackedLinears(Tied(), memory_limit_bytes=-1)


def test_report_names_the_compute_types() -> None:
    model = nn.ModuleList([make_layer(torch.float32), make_layer(torch.bfloat16)])
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    with packed(model) as linears:
        report = linears.report
        assert report.compute_dtype == ("bfloat16+float32" if native else "float32")
        assert ("no bfloat16 products" in report.reason) == (not native)
        assert report.bytes == linears.packed_bytes == IN * OUT * (6 if native else 8)


# ---------------------------------------------------------------- weights that change


def test_a_new_installation_reads_the_weights_again() -> None:
    layer, x = make_layer(), make_input(6)
    linears = packed(layer)
    linears.uninstall()
    layer.weight.data[OUT - 1, 0] = 30
    with linears:
        torch.testing.assert_close(layer(x).double(), exact(layer, x), rtol=1e-5, atol=1e-5)


def test_bias_is_read_at_each_call() -> None:
    layer, x = make_layer(torch.bfloat16), make_input(6, dtype=torch.bfloat16)
    with packed(layer):
        layer.bias.add_(3)
        torch.testing.assert_close(layer(x).double(), exact(layer, x), rtol=2**-8, atol=1e-5)


# ---------------------------------------------------------------- layers that share their input


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (3,), (4,), (33,), (1, 9), (0,)])
def test_a_group_gives_what_its_layers_give(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    model, x = Siblings(dtype, bias), make_input(*shape, dtype=dtype)
    with grouped(model):
        outputs = model(x)
    for output, expected in zip(outputs, model.exact(x), strict=False):
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(output.double(), expected, rtol=max(rounding, 1e-5), atol=max(rounding, 1e-5))


def test_a_group_takes_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, calls = Siblings(), make_input(5), []
    multiply = packed_linear._packed_product
    monkeypatch.setattr(packed_linear, "_packed_product", lambda *args: calls.append(1) or multiply(*args))
    with grouped(model):
        model(x)
    assert len(calls) == 1


def test_members_called_out_of_order_or_with_other_inputs_are_right() -> None:
    model, x, y = Siblings(), make_input(5), make_input(5, seed=2)
    with grouped(model):
        for layer, input in [
            (model.value, x),
            (model.query, x),
            (model.key, y),
            (model.value, x),
            (model.query, y),
            (model.key, y),
        ]:
            torch.testing.assert_close(layer(input).double(), exact(layer, input), rtol=1e-5, atol=1e-5)
        # The same tensor with other contents, as static buffers have it.
        y.copy_(x)
        for layer in (model.query, model.key):
            torch.testing.assert_close(layer(y).double(), exact(layer, x), rtol=1e-5, atol=1e-5)


def test_a_group_that_was_read_whole_keeps_nothing() -> None:
    model, x = Siblings(), make_input(5)
    watched = weakref.ref(x)
    with grouped(model):
        model(x)
        del x
        assert watched() is None


def test_only_neighbours_of_one_parent_with_the_same_unchanged_input_are_groups() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after, self.once, self.twice, self.again = (nn.Linear(IN, IN) for _ in range(5))
            self.child = Siblings()
            self.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> None:
            self.child(x)
            y = x.clone()
            self.before(y)
            y.add_(1)
            self.after(y)
            self.once(x), self.twice(x)
            self.twice(x.clone()), self.again(x.clone())

    model = Mixed()
    child = model.child
    assert groups_of(model, make_input(3)) == [(child.query, child.key, child.value)]


def test_layers_that_cannot_be_stacked_stay_apart() -> None:
    model = Siblings()
    model.key.bias = None
    groups = groups_of(model, make_input(2))
    assert PackedLinears(model, memory_limit_bytes=LIMIT, groups=groups).install().products == 1
    assert [layer for layer in (model.query, model.key, model.value) if "forward" in layer.__dict__] == [model.query]


def test_gradients_of_a_group_are_those_of_the_plain_layers() -> None:
    model = Siblings().requires_grad_(True)
    x = make_input(5).requires_grad_()
    plain = torch.autograd.grad(sum(out.sum() for out in model(x)), [x, *model.parameters()])
    with grouped(model):
        mine = torch.autograd.grad(sum(out.sum() for out in model(x)), [x, *model.parameters()])
    for got, expected in zip(mine, plain, strict=True):
        torch.testing.assert_close(got, expected)
