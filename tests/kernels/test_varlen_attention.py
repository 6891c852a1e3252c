"""`varlen_attention` against fp64 loops over a poisoned pool."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from itertools import pairwise

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


@pytest.mark.parametrize(
    ("context", "options"),
    [
        (0, {}),
        (70, {"softcap": 8.0}),
        (0, {"window": 30, "softcap": 8.0}),
        (70, {"window": 30}),
        (0, {"window": 200}),
        (70, {"window": 200, "softcap": 8.0}),
        (70, {"chunk": 30}),
        (64, {"chunk": 64}),
        (70, {"chunk": 200, "softcap": 8.0}),
        (70, {"has_alibi": True}),
        (70, {"has_alibi": True, "chunk": 96}),
    ],
)
def test_long_prompts_match_fp64(implementation, oracles, attention_cases, context, options) -> None:
    shape = attention_cases.Shape(num_heads=1, num_kv_heads=1, key_dim=16, value_dim=16, **options)
    step = attention_cases.make_step(shape, torch.float32, [(3, 1), (context, 300), (5, 2)])
    torch.testing.assert_close(_varlen(implementation, step).double(), _expected(oracles, step), rtol=2e-5, atol=2e-5)


def test_a_prompt_gives_the_same_whole_and_in_chunks(implementation, attention_cases) -> None:
    shape = attention_cases.Shape()
    whole = attention_cases.make_step(shape, torch.float32, [(0, 40)])
    expected = _varlen(implementation, whole)
    for begin, end in ((0, 7), (7, 23), (23, 24), (24, 40)):
        seq_lens, cu_seqlens_q = (torch.tensor(x, dtype=torch.int32) for x in ([end], [0, end - begin]))
        plan = implementation.plan(whole.block_tables, whole.rows, cu_seqlens_q, seq_lens, shape.page_size, end)
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


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {}),
        (torch.float32, {"window": 37}),
        (torch.bfloat16, {"chunk": 37}),
        (torch.float32, {"alibi_slopes": torch.tensor([0.5, 0.03, 1e-3])}),
    ],
)
def test_bits_of_a_row_are_the_same_alone_in_any_batch_and_in_any_chunks(
    implementation, attention_cases, dtype, options
) -> None:
    if not getattr(implementation, "BATCH_INVARIANT", False):
        pytest.skip("this implementation does not promise it")
    shape = attention_cases.Shape(num_heads=3, num_kv_heads=1, page_size=24, has_sinks=True)
    entries = [(0, 90), (299, 1), (61, 5), (31, 33), (0, 1), (7, 64)]
    # Without the entries' own windows: a chunk sees keys that the whole row's first token does not.
    step = replace(attention_cases.make_step(shape, dtype, entries), **options)
    together = _varlen(implementation, step)
    begins = step.cu_seqlens_q.tolist()
    for i in range(len(entries)):
        alone = _varlen(implementation, attention_cases.entries_of(step, [i]))
        torch.testing.assert_close(alone, together[begins[i] : begins[i + 1]], rtol=0, atol=0)
    moved = _varlen(implementation, attention_cases.with_moved_pages(step))
    torch.testing.assert_close(moved, together, rtol=0, atol=0)
    prompt = attention_cases.entries_of(step, [0])
    # The interpreter multiplies matrices with a BLAS whose bits depend on a row's place in the matrix, so there chunks
    # end where blocks of ten tokens do.
    borders = (0, 10, 40, 90) if os.environ.get("TRITON_INTERPRET") == "1" else (0, 2, 33, 64, 90)
    for begin, end in pairwise(borders):
        chunk = replace(
            prompt,
            query=prompt.query[begin:end],
            cu_seqlens_q=torch.tensor([0, end - begin], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            max_kv=end,
        )
        torch.testing.assert_close(_varlen(implementation, chunk), together[begin:end], rtol=0, atol=0)


@pytest.mark.usefixtures("interpreted")
def test_a_decoding_row_has_the_same_bits_in_a_mixed_step_and_in_a_decode_step(attention_cases) -> None:
    flash = importlib.import_module("cbtriton.kernels.varlen_attention.flash")
    split_kv = importlib.import_module("cbtriton.kernels.decode_attention.split_kv")
    step = attention_cases.make_step(attention_cases.Shape(has_sinks=True), torch.float32, [(300, 1), (9, 3), (40, 1)])
    decodes = attention_cases.entries_of(step, [0, 2])
    mixed = _varlen(flash, step)
    tables = decodes.block_tables, decodes.rows, decodes.seq_lens
    caches = decodes.key_cache, decodes.value_cache
    alone = split_kv.decode_attention(
        decodes.query, *caches, *tables, decodes.plan(split_kv), *decodes.options, decodes.max_kv
    )
    torch.testing.assert_close(alone, mixed[[0, 4]], rtol=0, atol=0)


def test_queries_beyond_two_to_the_31_elements(implementation, oracles, attention_cases) -> None:
    step = attention_cases.make_step(attention_cases.Shape(page_size=4), torch.float32, [(6, 2)])
    far = attention_cases.spread_out(step.query)
    torch.testing.assert_close(
        _varlen(implementation, replace(step, query=far)).double(), _expected(oracles, step), rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize("softcap", [30.0, 50.0])
@pytest.mark.parametrize("size", [1e4, 3e38])
def test_scores_of_any_size_are_capped_to_the_cap(implementation, attention_cases, softcap, size) -> None:
    shape = attention_cases.Shape(num_heads=2, num_kv_heads=1, key_dim=16, value_dim=16, softcap=softcap)
    step = attention_cases.make_step(shape, torch.float32, [(1, 2)])
    block = step.block_tables[step.rows.long(), 0]
    step.query.zero_()
    step.query[:, :, 0] = torch.tensor([1.0, -1.0]) * size**0.5
    step.key_cache[block, :3] = 0
    step.key_cache[block, 0, 0, 0], step.key_cache[block, 1, 0, 0] = size**0.5, -(size**0.5)
    got = _varlen(implementation, replace(step, scale=1.0))
    values = step.value_cache[block, :3, 0][0].double()
    weights = torch.tensor([[softcap, -softcap, 0.0], [-softcap, softcap, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(got[1].double(), weights.softmax(-1) @ values, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(got[0].double(), weights[:, :2].softmax(-1) @ values[:2], rtol=2e-5, atol=2e-5)


def test_a_larger_max_kv_changes_nothing(implementation, attention_cases) -> None:
    step = attention_cases.make_step(attention_cases.Shape(), torch.float32, STEPS["mixed"])
    expected = _varlen(implementation, step)
    plan = implementation.plan(step.block_tables, step.rows, step.cu_seqlens_q, step.seq_lens, 16, 256)
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


def test_operator_declares_what_it_does(implementation, opcheck, attention_cases) -> None:
    step = attention_cases.make_step(attention_cases.Shape(window=9), torch.float32, STEPS["mixed"], 2)
    caches = step.key_cache.nan_to_num(), step.value_cache.nan_to_num()
    tables = step.block_tables, step.rows, step.cu_seqlens_q, step.seq_lens
    args = (step.query, *caches, *tables, step.plan(implementation), *step.options, step.max_kv)
    opcheck(implementation.varlen_attention, args)
