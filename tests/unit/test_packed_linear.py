"""Packed linear layers: same numbers as plain ones, and no trace left behind."""

from __future__ import annotations

import copy
import platform
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cbtriton.packed_linear import PackedLinears

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


def test_compiles_to_one_graph_of_plain_products() -> None:
    layer, x = make_layer(), make_input(6)
    with packed(layer):
        layer.weight.mul_(3)
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x).double(), exact(layer, x), rtol=1e-5, atol=1e-5)


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


def test_refresh_without_a_change_does_nothing() -> None:
    with packed(Tied()) as linears:
        assert linears.refresh() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", ["one_element", "data_copy", "data_replaced", "parameter", "shape"])
def test_refresh_sees_the_change_and_only_that_layer(change: str, dtype: torch.dtype) -> None:
    touched, untouched = make_layer(dtype), make_layer(dtype)
    x = make_input(6, dtype=dtype)
    new = make_layer(dtype).weight.flip(0).clone()
    with packed(nn.ModuleList([touched, untouched])) as linears:
        if change == "one_element":
            touched.weight[1, 2] = 30
        elif change == "data_copy":
            touched.weight.data.copy_(new)
        elif change == "data_replaced":
            touched.weight.data = new
        elif change == "parameter":
            touched.weight = nn.Parameter(new, requires_grad=False)
        else:
            touched.weight = nn.Parameter(torch.cat([new, new]), requires_grad=False)
            touched.bias = nn.Parameter(touched.bias.repeat(2), requires_grad=False)
        assert linears.refresh() == 1
        assert linears.refresh() == 0
        for layer in (touched, untouched):
            got = layer(x).double()
            torch.testing.assert_close(got, exact(layer, x), rtol=torch.finfo(dtype).eps, atol=2e-5)


def test_refresh_drops_a_layer_that_can_no_longer_be_packed() -> None:
    layer = make_layer()
    with packed(layer) as linears:
        layer.double()
        assert linears.refresh() == 1
        assert linears.packed_bytes == 0
        assert "forward" not in layer.__dict__
        x = make_input(6).double()
        assert torch.equal(layer(x), exact(layer, x))


def test_refresh_keeps_shared_weights_shared_and_splits_them_when_they_part() -> None:
    model, ids = Tied().requires_grad_(False), torch.arange(6)
    with packed(model) as linears:
        held = linears.packed_bytes
        model.up.weight.mul_(0.5)
        assert linears.refresh() == 2
        assert linears.packed_bytes == held
        model.again.weight = nn.Parameter(-model.up.weight, requires_grad=False)
        assert linears.refresh() == 1
        assert linears.packed_bytes == held + 4 * IN * IN
        got = model(ids)
    torch.testing.assert_close(got, model(ids), rtol=1e-4, atol=1e-4)


def test_repack_reads_the_weights_again() -> None:
    layer, x = make_layer(), make_input(6)
    with packed(layer) as linears:
        layer.weight.data[OUT - 1, 0] = 30
        linears.repack()
        torch.testing.assert_close(layer(x).double(), exact(layer, x), rtol=1e-5, atol=1e-5)


def test_repack_when_not_installed_does_nothing() -> None:
    model = Tied()
    before = snapshot(model)
    linears = PackedLinears(model, memory_limit_bytes=LIMIT)
    linears.repack()
    assert linears.refresh() == 0
    assert snapshot(model) == before


def test_bias_is_read_at_each_call() -> None:
    layer, x = make_layer(torch.bfloat16), make_input(6, dtype=torch.bfloat16)
    with packed(layer):
        layer.bias.add_(3)
        torch.testing.assert_close(layer(x).double(), exact(layer, x), rtol=2**-8, atol=1e-5)
