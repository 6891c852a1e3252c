"""Launches through `launches`: the same kernel with arguments that need other code."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

from cbtriton.kernels.cpu_backend import launches
from cbtriton.kernels.cpu_backend.launches import launch_compiled


@triton.jit
def affine(x, bias, out, factor, size, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x + i, mask=i < size) * factor + SHIFT
    if bias is not None:
        y += tl.load(bias + i, mask=i < size)
    tl.store(out + i, y, mask=i < size)


def check(size: int, factor: float, shift: int, dtype: torch.dtype, has_bias: bool) -> None:
    x, bias = torch.arange(64).to(dtype), torch.arange(64, 128).to(dtype) if has_bias else None
    out = torch.full((64,), -7, dtype=dtype)
    constants = {"BLOCK": 16, "SHIFT": shift}
    launch_compiled(affine, (triton.cdiv(size, 16),), (x, bias, out, factor, size), {"num_warps": 1}, constants)
    expected = torch.full((64,), -7, dtype=dtype)
    expected[:size] = (x * factor + shift + (bias if has_bias else 0))[:size].to(dtype)
    assert torch.equal(out, expected)


# Those with 1 come first: code in which a number is a constant must not be taken for others.
CASES = [
    (size, factor, shift, dtype, has_bias)
    for size, factor in ((1, 1), (40, 1), (1, 2), (40, 2), (40, 2**31), (40, 2.0))
    for shift in (0, 3)
    for dtype in (torch.float64, torch.int64)
    for has_bias in (False, True)
    if not (dtype == torch.int64 and isinstance(factor, float))
]


def test_every_kind_of_arguments_gets_its_own_code():
    for _ in range(2):
        for case in CASES:
            check(*case)


def test_the_second_launch_does_not_ask_triton(monkeypatch: pytest.MonkeyPatch):
    check(40, 2, 0, torch.float64, True)
    monkeypatch.setattr(type(affine), "run", lambda *_, **__: pytest.fail("went through Triton"))
    check(33, 5, 0, torch.float64, True)


def test_hooks_see_every_launch():
    check(40, 2, 0, torch.float64, True)
    seen = []

    def hook(metadata) -> None:
        seen.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        check(40, 2, 0, torch.float64, True)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert seen == ["affine"]


def test_arguments_of_the_same_kind_share_code():
    before = len(launches._compiled)
    for size in (17, 18, 64):
        check(size, 3, 11, torch.float64, True)
    assert len(launches._compiled) == before + 1
