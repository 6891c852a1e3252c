"""Which implementation each slot runs, decided once and never silently changed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cbtriton import KernelConfig
from cbtriton.kernel_set import ON_CPU, TRITON, choose_kernels, implementations
from cbtriton.kernels import _launch
from cbtriton.kernels.cpu_backend.availability import why_unavailable

CPU = torch.device("cpu")


NO_COMPILER = "a compiler is missing"


@pytest.fixture(autouse=True)
def nothing_is_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "INTERPRETED", False)
    _launch._native_target.cache_clear()


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_launch, "why_unavailable", lambda: NO_COMPILER)
    yield
    _launch._native_target.cache_clear()


def names(config: KernelConfig) -> dict[str, str]:
    return dict(choose_kernels(config, CPU).names)


@pytest.mark.usefixtures("without_compiler")
def test_auto_takes_the_references_where_triton_cannot_run_natively_and_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert set(names(KernelConfig()).values()) == {"reference"}
    assert f"kernels=auto runs the torch references on cpu: {NO_COMPILER}" in caplog.text


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
@pytest.mark.parametrize("default", ["auto", "triton"])
def test_a_cpu_with_a_compiler_runs_triton_and_does_not_split_rows(
    default: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert names(KernelConfig(default=default)) == TRITON | ON_CPU
    assert not caplog.text


def test_the_references_run_where_they_are_asked_for() -> None:
    assert set(names(KernelConfig(default="reference")).values()) == {"reference"}


def test_auto_does_not_take_the_interpreter_for_a_native_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "INTERPRETED", True)
    assert set(names(KernelConfig()).values()) == {"reference"}
    assert names(KernelConfig(default="triton")) == TRITON


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("config", [KernelConfig(default="triton"), KernelConfig(kv_write="vectorized")])
def test_asking_for_triton_where_nothing_runs_it_is_an_error_that_tells_what_to_do(config: KernelConfig) -> None:
    with pytest.raises(RuntimeError, match=f"no Triton target .* cpu: {NO_COMPILER}.*kernels=reference"):
        choose_kernels(config, CPU)


def test_an_unknown_implementation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="decode_attention has no implementation 'flash'; available: reference, si"):
        choose_kernels(KernelConfig(decode_attention="flash"), CPU)


def test_the_triton_implementation_of_every_slot_exists() -> None:
    assert list(TRITON) == list(KernelConfig().slots())
    assert all(name in implementations(slot) for slot, name in (*TRITON.items(), *ON_CPU.items()))
