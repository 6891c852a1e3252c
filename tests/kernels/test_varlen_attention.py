"""`varlen_attention` against fp64 loops over a poisoned pool."""

from __future__ import annotations

import pytest
import torch

SLOT = "varlen_attention"

# (context_len, query_len) of each entry
STEPS = {
    "one token": [(0, 1)],
    "one prompt": [(0, 33)],
    "prompts": [(0, 15), (0, 16), (0, 17), (0, 2)],
    "chunks": [(16, 16), (15, 2), (40, 9)],
    "only decodes": [(16, 1), (3, 1), (40, 1)],
    "mixed": [(16, 1), (0, 20), (31, 7), (5, 1)],
    "empty rows": [(0, 0), (9, 3), (0, 0), (4, 1), (0, 0)],
    "nothing": [(0, 0)],
}


def _varlen(implementation, step) -> torch.Tensor:
    return implementation.varlen_attention(
        step.query,
        step.key_cache,
        step.value_cache,
        step.block_tables,
        step.rows,
        step.cu_seqlens_q,
        step.seq_lens,
        step.plan(implementation),
        *step.options,
        step.max_kv,
    )


def _expected(oracles, step) -> torch.Tensor:
    tables = step.block_tables, step.rows, step.cu_seqlens_q, step.seq_lens
    return oracles.attention(step.query, step.key_cache, step.value_cache, *tables, *step.options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_shape_matches_fp64(implementation, oracles, attention_cases, shape, dtype) -> None:
    page = shape.page_size
    entries = [(0, page + 1), (page - 1, 1), (2 * page - 1, 4), (0, 1), (25, max(1, page - 1))]
    step = attention_cases.make_step(shape, dtype, entries)
    got = _varlen(implementation, step)
    assert got.dtype == dtype
    assert got.is_contiguous()
    tolerance = attention_cases.TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), _expected(oracles, step), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_padding", [0, 5])
@pytest.mark.parametrize("entries", STEPS.values(), ids=STEPS.keys())
def test_every_mix_matches_fp64_and_padding_gives_zeros(
    implementation, oracles, attention_cases, entries, num_padding
) -> None:
    step = attention_cases.make_step(attention_cases.Shape(), torch.float32, entries, num_padding)
    got = _varlen(implementation, step)
    torch.testing.assert_close(got.double(), _expected(oracles, step), rtol=2e-5, atol=2e-5)
    assert not got[len(got) - num_padding :].any()


@pytest.mark.parametrize("softcap", [0.0, 8.0])
@pytest.mark.parametrize("window", [0, 30, 700])
@pytest.mark.parametrize("context", [0, 100])
def test_long_prompts_match_fp64(implementation, oracles, attention_cases, context, window, softcap) -> None:
    shape = attention_cases.Shape(num_heads=1, num_kv_heads=1, key_dim=16, value_dim=16, window=window, softcap=softcap)
    step = attention_cases.make_step(shape, torch.float32, [(3, 1), (context, 1100), (5, 2)])
    torch.testing.assert_close(_varlen(implementation, step).double(), _expected(oracles, step), rtol=2e-5, atol=2e-5)


def test_a_prompt_gives_the_same_whole_and_in_chunks(implementation, attention_cases) -> None:
    shape = attention_cases.Shape()
    whole = attention_cases.make_step(shape, torch.float32, [(0, 40)])
    expected = _varlen(implementation, whole)
    for begin, end in ((0, 7), (7, 23), (23, 24), (24, 40)):
        seq_lens, cu_seqlens_q = (torch.tensor(x, dtype=torch.int32) for x in ([end], [0, end - begin]))
        plan = implementation.plan(whole.block_tables, whole.rows, seq_lens, shape.page_size, end)
        got = implementation.varlen_attention(
            whole.query[begin:end],
            whole.key_cache,
            whole.value_cache,
            whole.block_tables,
            whole.rows,
            cu_seqlens_q,
            seq_lens,
            plan,
            *whole.options,
            end,
        )
        torch.testing.assert_close(got, expected[begin:end], rtol=2e-6, atol=2e-6)


def test_a_larger_max_kv_changes_nothing(implementation, attention_cases) -> None:
    step = attention_cases.make_step(attention_cases.Shape(), torch.float32, STEPS["mixed"])
    expected = _varlen(implementation, step)
    plan = implementation.plan(step.block_tables, step.rows, step.seq_lens, 16, 256)
    got = implementation.varlen_attention(
        step.query,
        step.key_cache,
        step.value_cache,
        step.block_tables,
        step.rows,
        step.cu_seqlens_q,
        step.seq_lens,
        plan,
        *step.options,
        256,
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_operator_declares_what_it_does(implementation, attention_cases) -> None:
    step = attention_cases.make_step(attention_cases.Shape(window=9), torch.float32, STEPS["mixed"], 2)
    caches = step.key_cache.nan_to_num(), step.value_cache.nan_to_num()
    tables = step.block_tables, step.rows, step.cu_seqlens_q, step.seq_lens
    args = (step.query, *caches, *tables, step.plan(implementation), *step.options, step.max_kv)
    torch.library.opcheck(implementation.varlen_attention.op, args)
