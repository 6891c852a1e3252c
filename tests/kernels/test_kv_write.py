"""`kv_write` against plain loops. Slots that nobody writes must keep every bit, NaN included."""

from __future__ import annotations

import pytest
import torch

from cbtriton.kernels.cpu_backend.checking import poison_

SLOT = "kv_write"


def _caches(num_blocks: int, page_size: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> tuple:
    shape = (num_blocks, page_size, heads)
    return (
        poison_(torch.empty(*shape, key_dim, dtype=dtype)),
        poison_(torch.empty(*shape, value_dim, dtype=dtype)),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [1, 4, 16, 24, 48])
@pytest.mark.parametrize(("heads", "key_dim", "value_dim"), [(1, 16, 16), (3, 64, 40), (2, 80, 128)])
@pytest.mark.parametrize("num_padding", [0, 3])
def test_tokens_land_in_their_slots_and_nothing_else_changes(
    implementation, dtype, page_size, heads, key_dim, value_dim, num_padding
) -> None:
    generator = torch.Generator().manual_seed(page_size)
    num_tokens = 2 * page_size + 1
    key_cache, value_cache = _caches(4, page_size, heads, key_dim, value_dim, dtype)
    key = torch.randn(num_tokens + num_padding, heads, key_dim, generator=generator).to(dtype)
    value = torch.randn(num_tokens + num_padding, heads, value_dim, generator=generator).to(dtype)
    slots = torch.randperm(4 * page_size, generator=generator)[:num_tokens]
    slots = torch.cat([slots, torch.full((num_padding,), -1)])
    expected_key, expected_value = key_cache.clone(), value_cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected_key[slot // page_size, slot % page_size] = key[token]
            expected_value[slot // page_size, slot % page_size] = value[token]

    implementation.kv_write(key, value, key_cache, value_cache, slots)

    torch.testing.assert_close(key_cache, expected_key, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(value_cache, expected_value, rtol=0, atol=0, equal_nan=True)


def test_padding_in_the_middle_and_only_padding_write_nothing(implementation) -> None:
    key = torch.arange(3.0)[:, None, None].expand(3, 2, 8) + 1
    key_cache, value_cache = _caches(2, 4, 2, 8, 8, torch.float32)
    implementation.kv_write(key, key, key_cache, value_cache, torch.tensor([-1, -1, -1]))
    assert key_cache.isnan().all()
    assert value_cache.isnan().all()
    implementation.kv_write(key, -key, key_cache, value_cache, torch.tensor([7, -1, 0]))
    assert key_cache.flatten(0, 1)[:, 0, 0].nan_to_num(-9).tolist() == [3, -9, -9, -9, -9, -9, -9, 1]
    assert value_cache.flatten(0, 1)[:, 1, 7].nan_to_num(-9).tolist() == [-3, -9, -9, -9, -9, -9, -9, -1]


def test_slices_of_a_fused_projection_are_written_like_their_copies(implementation) -> None:
    fused = torch.randn(5, 3 * 4 * 16)
    key = fused[:, 64:128].unflatten(1, (4, 16))
    value = fused.view(5, 3, 4, 16)[:, 2].transpose(0, 1).contiguous().transpose(0, 1)
    assert not key.is_contiguous()
    assert not value.is_contiguous()
    key_cache, value_cache = _caches(2, 4, 4, 16, 16, torch.float32)
    implementation.kv_write(key, value, key_cache, value_cache, torch.tensor([3, 1, 7, 0, 2]))
    torch.testing.assert_close(key_cache.flatten(0, 1)[[3, 1, 7, 0, 2]], key, rtol=0, atol=0)
    torch.testing.assert_close(value_cache.flatten(0, 1)[[3, 1, 7, 0, 2]], value, rtol=0, atol=0)


def test_slots_beyond_two_to_the_31_elements(implementation) -> None:
    num_blocks = 4098
    key_cache = torch.empty(num_blocks, 256, 8, 256, dtype=torch.float16)
    value_cache = torch.empty(num_blocks, 256, 8, 16, dtype=torch.float16)
    assert key_cache[:-1].numel() > 2**31
    key, value = torch.randn(2, 8, 256).half(), torch.randn(2, 8, 16).half()
    slots = torch.tensor([num_blocks * 256 - 1, 3])
    implementation.kv_write(key, value, key_cache, value_cache, slots)
    torch.testing.assert_close(key_cache[-1, -1], key[0], rtol=0, atol=0)
    torch.testing.assert_close(value_cache[-1, -1], value[0], rtol=0, atol=0)
    torch.testing.assert_close(key_cache[0, 3], key[1], rtol=0, atol=0)


def test_tokens_beyond_two_to_the_31_elements_apart(implementation, attention_cases) -> None:
    tokens = torch.randn(2, 2, 16).half()
    caches = _caches(2, 4, 2, 16, 16, torch.float16)
    far = attention_cases.spread_out(tokens)
    implementation.kv_write(far, far, *caches, torch.tensor([6, 1]))
    for cache in caches:
        torch.testing.assert_close(cache.flatten(0, 1)[[6, 1]], tokens, rtol=0, atol=0)


def test_operator_declares_what_it_does(implementation, opcheck) -> None:
    key = torch.randn(3, 2, 8)
    caches = _caches(2, 4, 2, 8, 8, torch.float32)
    caches = tuple(cache.zero_() for cache in caches)
    opcheck(implementation.kv_write, (key, key, *caches, torch.tensor([1, -1, 6])))
