"""Which implementation each slot runs, decided once and never silently changed."""

from __future__ import annotations

import pytest
import torch

from cbtriton import KernelConfig
from cbtriton.kernel_set import TRITON, choose_kernels, implementations

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_runs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize("default", ["auto", "reference"])
def test_the_references_run_where_triton_cannot_run_natively(default: str) -> None:
    assert {name for _, name in choose_kernels(KernelConfig(default=default), CPU).names} == {"reference"}


def test_auto_does_not_take_the_interpreter_for_a_native_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert {name for _, name in choose_kernels(KernelConfig(), CPU).names} == {"reference"}
    assert dict(choose_kernels(KernelConfig(default="triton"), CPU).names) == TRITON


@pytest.mark.parametrize("config", [KernelConfig(default="triton"), KernelConfig(kv_write="vectorized")])
def test_asking_for_triton_where_nothing_runs_it_is_an_error_that_tells_what_to_do(config: KernelConfig) -> None:
    with pytest.raises(RuntimeError, match=r"no Triton target .* cpu.*TRITON_INTERPRET=1.*kernels=reference"):
        choose_kernels(config, CPU)


def test_an_unknown_implementation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="decode_attention has no implementation 'flash'; available: reference, si"):
        choose_kernels(KernelConfig(decode_attention="flash"), CPU)


def test_the_triton_implementation_of_every_slot_exists() -> None:
    assert list(TRITON) == list(KernelConfig().slots())
    assert all(name in implementations(slot) for slot, name in TRITON.items())
