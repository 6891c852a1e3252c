"""`block_copy` against indexing."""

from __future__ import annotations

import pytest
import torch

SLOT = "block_copy"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("sources", "targets"), [([], []), ([2], [0]), ([4, 4, 1], [3, 0, 5])])
def test_targets_become_their_sources_and_the_rest_stays(implementation, dtype, sources, targets) -> None:
    key_cache = torch.randn(6, 5, 3, 16).to(dtype)
    value_cache = torch.randn(6, 5, 3, 8).to(dtype)
    before = key_cache.clone(), value_cache.clone()
    implementation.block_copy(
        key_cache, value_cache, torch.tensor(sources, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64)
    )
    origin = list(range(6))
    for source, target in zip(sources, targets, strict=True):
        origin[target] = source
    torch.testing.assert_close(key_cache, before[0][origin], rtol=0, atol=0)
    torch.testing.assert_close(value_cache, before[1][origin], rtol=0, atol=0)


def test_blocks_beyond_two_to_the_31_elements(implementation) -> None:
    num_blocks = 4098
    key_cache = torch.empty(num_blocks, 256, 8, 256, dtype=torch.float16)
    value_cache = torch.empty(num_blocks, 256, 8, 16, dtype=torch.float16)
    key_cache[1], value_cache[1] = 1.5, 2.5
    key_cache[-2], value_cache[-2] = 3.5, 4.5
    sources, targets = torch.tensor([1, num_blocks - 2]), torch.tensor([num_blocks - 1, 2])
    implementation.block_copy(key_cache, value_cache, sources, targets)
    assert (key_cache[-1] == 1.5).all()
    assert (value_cache[-1] == 2.5).all()
    assert (key_cache[2] == 3.5).all()
    assert (value_cache[2] == 4.5).all()


def test_operator_declares_what_it_does(implementation, opcheck) -> None:
    key_cache, value_cache = torch.randn(6, 5, 3, 16), torch.randn(6, 5, 3, 8)
    args = (key_cache, value_cache, torch.tensor([4, 1]), torch.tensor([3, 0]))
    opcheck(implementation.block_copy, args)
