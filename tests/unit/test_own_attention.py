"""Slopes of ALiBi are those that transformers computes biases from."""

from __future__ import annotations

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_biases
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_biases
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor as mpt_biases

from cbtriton.own_attention import alibi_slopes


@pytest.mark.parametrize("num_heads", range(1, 72))
def test_slopes_are_those_of_transformers(num_heads: int) -> None:
    slopes = alibi_slopes(num_heads)
    two = torch.ones(1, 2, dtype=torch.int64)
    assert torch.allclose(slopes, bloom_biases(two, num_heads, torch.float32)[:, 0, 1], rtol=1e-6)
    # The biases of the last two of eight tokens: none, and one slope less.
    assert torch.allclose(-slopes, mpt_biases(num_heads, 8)[:, 0, -2], rtol=1e-6)
    assert torch.equal(slopes.bfloat16().float(), falcon_biases(two, num_heads, torch.float32)[:, 0, 1])


def test_a_larger_range_has_steeper_and_flatter_slopes() -> None:
    assert alibi_slopes(4, max_bias=4.0).tolist() == [2.0**-1, 2.0**-2, 2.0**-3, 2.0**-4]
