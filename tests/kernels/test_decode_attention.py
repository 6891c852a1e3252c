"""`decode_attention` against fp64 loops over a poisoned pool."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

SLOT = "decode_attention"


def _decode(implementation, step) -> torch.Tensor:
    return implementation.decode_attention(
        step.query,
        step.key_cache,
        step.value_cache,
        step.block_tables,
        step.rows,
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
    entries = [(length - 1, 1) for length in (1, max(1, page - 1), page, page + 1, 3 * page, 61)]
    step = attention_cases.make_step(shape, dtype, entries)
    got = _decode(implementation, step)
    assert got.dtype == dtype
    assert got.is_contiguous()
    tolerance = attention_cases.TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), _expected(oracles, step), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lengths", [[520, 1, 519, 3, 2, 260], [260] * 3, [5, 800], [1]])
def test_rows_of_any_mix_of_lengths_match_fp64(implementation, oracles, attention_cases, lengths) -> None:
    shape = attention_cases.Shape(num_heads=6, num_kv_heads=2, page_size=48)
    step = attention_cases.make_step(shape, torch.float32, [(length - 1, 1) for length in lengths])
    torch.testing.assert_close(_decode(implementation, step).double(), _expected(oracles, step), rtol=2e-5, atol=2e-5)


def test_slopes_are_exact_far_from_the_first_token(implementation, oracles, attention_cases) -> None:
    shape = attention_cases.Shape(num_heads=4, num_kv_heads=2, key_dim=16, value_dim=16, page_size=48, has_alibi=True)
    step = attention_cases.make_step(shape, torch.float32, [(4999, 1), (16, 1)])
    # In float32 a steep slope times these positions would be rounded by as much as neighbours differ.
    step = replace(step, alibi_slopes=torch.tensor([60.0, 1.0, 1e-3, 0.0]))
    torch.testing.assert_close(_decode(implementation, step).double(), _expected(oracles, step), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("length", [1, 255, 256, 257, 512, 513, 700])
def test_chunks_around_splits_match_fp64(implementation, oracles, attention_cases, length) -> None:
    for chunk in (255, 256, 512):
        shape = attention_cases.Shape(num_heads=2, num_kv_heads=1, key_dim=16, value_dim=16, chunk=chunk)
        step = attention_cases.make_step(shape, torch.float32, [(length - 1, 1), (2, 1)])
        got = _decode(implementation, step).double()
        torch.testing.assert_close(got, _expected(oracles, step), rtol=2e-5, atol=2e-5)


def test_a_window_and_chunks_at_once_are_refused(implementation, attention_cases) -> None:
    step = attention_cases.make_step(attention_cases.Shape(window=5), torch.float32, [(20, 1)])
    with pytest.raises(ValueError, match="a layer has a window or a chunk, got a window of 5 and chunks of 8"):
        _decode(implementation, replace(step, chunk=8))


@pytest.mark.parametrize(("dtype", "with_sinks"), [(torch.float32, True), (torch.bfloat16, False)])
def test_rows_that_share_their_first_blocks_match_fp64(
    implementation, oracles, attention_cases, dtype, with_sinks
) -> None:
    shape = attention_cases.Shape(num_heads=6, num_kv_heads=2, page_size=24, has_sinks=with_sinks)
    lengths = [200, 97, 98, 260, 150, 120, 70, 96]
    step = attention_cases.make_step(shape, dtype, [(length - 1, 1) for length in lengths])
    rows = step.rows.long()
    # Rows 0 to 3 share four blocks, rows 4 and 5 three others; row 6 shares too few and row 7 shares none.
    for members, num_blocks in (((0, 1, 2, 3), 4), ((4, 5), 3), ((0, 6), 2)):
        for member in members[1:]:
            step.block_tables[rows[member], :num_blocks] = step.block_tables[rows[members[0]], :num_blocks]
    tolerance = attention_cases.TOLERANCE[dtype]
    got = _decode(implementation, step).double()
    torch.testing.assert_close(got, _expected(oracles, step), rtol=tolerance, atol=tolerance)


def test_a_row_gives_the_same_alone_and_beside_others(implementation, attention_cases) -> None:
    shape = attention_cases.Shape()
    step = attention_cases.make_step(shape, torch.float32, [(29, 1), (3, 1), (40, 1), (40, 1)])
    together = _decode(implementation, step)
    for i, length in enumerate(step.seq_lens.tolist()):
        row, seq_len = step.rows[i : i + 1], step.seq_lens[i : i + 1]
        plan = implementation.plan(step.block_tables, row, step.cu_seqlens_q[:2], seq_len, shape.page_size, length)
        alone = implementation.decode_attention(
            step.query[i : i + 1],
            step.key_cache,
            step.value_cache,
            step.block_tables,
            row,
            seq_len,
            plan,
            *step.options,
            length,
        )
        torch.testing.assert_close(alone[0], together[i], rtol=1e-6, atol=1e-6)


def test_more_heads_share_a_kv_head_than_a_program_takes(implementation, oracles, attention_cases) -> None:
    shape = attention_cases.Shape(num_heads=71, num_kv_heads=1, key_dim=16, value_dim=16)
    step = attention_cases.make_step(shape, torch.float32, [(20, 1), (0, 1)])
    torch.testing.assert_close(_decode(implementation, step).double(), _expected(oracles, step), rtol=2e-5, atol=2e-5)


# Around the tiles and the splits of the kernels that have them.
LENGTHS = [1, 32, 33, 255, 257, 513]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {"window": 300}),
        (torch.float32, {"chunk": 300}),
        (torch.bfloat16, {"has_alibi": True}),
    ],
)
def test_bits_of_a_row_are_the_same_alone_and_in_any_batch(implementation, attention_cases, dtype, options) -> None:
    if not getattr(implementation, "BATCH_INVARIANT", False):
        pytest.skip("this implementation does not promise it")
    shape = attention_cases.Shape(num_heads=3, num_kv_heads=1, page_size=24, has_sinks=True, **options)
    step = attention_cases.make_step(shape, dtype, [(length - 1, 1) for length in LENGTHS])
    together = _decode(implementation, step)
    for i in (0, 2, 4, 5):
        alone = _decode(implementation, attention_cases.entries_of(step, [i]))
        torch.testing.assert_close(alone[0], together[i], rtol=0, atol=0)
    order = torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(0)).tolist()
    elsewhere = attention_cases.entries_of(attention_cases.with_moved_pages(step), order)
    torch.testing.assert_close(_decode(implementation, elsewhere), together[order], rtol=0, atol=0)


def test_padding_rows_give_zeros_and_a_larger_max_kv_changes_nothing(implementation, oracles, attention_cases) -> None:
    step = attention_cases.make_step(attention_cases.Shape(), torch.float32, [(0, 0), (20, 1), (0, 0)], num_padding=2)
    # Entry 1 owns query token 1; the padding rows have tokens of their own here.
    step.cu_seqlens_q.copy_(torch.tensor([1, 1, 2, 2]))
    plan = implementation.plan(step.block_tables, step.rows, step.cu_seqlens_q, step.seq_lens, 16, 64)
    got = implementation.decode_attention(
        step.query,
        step.key_cache,
        step.value_cache,
        step.block_tables,
        step.rows,
        step.seq_lens,
        plan,
        *step.options,
        64,
    )
    torch.testing.assert_close(got.double(), _expected(oracles, step), rtol=2e-5, atol=2e-5)
    assert not got[[0, 2]].any()
    assert got[1].any()


def test_softcap_is_stable_for_huge_scores(implementation, attention_cases) -> None:
    step = attention_cases.make_step(attention_cases.Shape(softcap=30.0), torch.float32, [(20, 1), (7, 1)])
    step.query.mul_(1e6)
    got = _decode(implementation, step)
    assert got.isfinite().all()
    assert got.any()


@pytest.mark.parametrize("softcap", [30.0, 50.0])
@pytest.mark.parametrize("size", [1e4, 3e38])
def test_scores_of_any_size_are_capped_to_the_cap(implementation, attention_cases, softcap, size) -> None:
    shape = attention_cases.Shape(num_heads=2, num_kv_heads=1, key_dim=16, value_dim=16, softcap=softcap)
    step = attention_cases.make_step(shape, torch.float32, [(2, 1)])
    block = step.block_tables[step.rows.long(), 0]
    step.query.zero_()
    step.query[0, :, 0] = torch.tensor([1.0, -1.0]) * size**0.5
    # Scores of head 0 are size, -size and 0; those of head 1 the opposite.
    step.key_cache[block, :3] = 0
    step.key_cache[block, 0, 0, 0], step.key_cache[block, 1, 0, 0] = size**0.5, -(size**0.5)
    got = _decode(implementation, replace(step, scale=1.0))
    values = step.value_cache[block, :3, 0][0].double()
    weights = torch.tensor([[softcap, -softcap, 0.0], [-softcap, softcap, 0.0]], dtype=torch.float64).softmax(-1)
    torch.testing.assert_close(got[0].double(), weights @ values, rtol=2e-5, atol=2e-5)


def test_a_huge_sink_takes_all_and_a_tiny_one_takes_nothing(implementation, oracles, attention_cases) -> None:
    step = attention_cases.make_step(attention_cases.Shape(has_sinks=True), torch.float32, [(20, 1), (7, 1)])
    step.sinks.copy_(torch.tensor([200.0, -200.0, 0.0, 200.0]))
    got = _decode(implementation, step)
    torch.testing.assert_close(got.double(), _expected(oracles, step), rtol=2e-5, atol=2e-5)
    assert got[:, [0, 3]].abs().max() < 1e-30
    assert got[:, 1].any()


def test_blocks_beyond_two_to_the_31_elements(implementation) -> None:
    num_blocks, page_size = 4098, 256
    key_cache = torch.empty(num_blocks, page_size, 8, 256, dtype=torch.float16)
    value_cache = torch.empty(num_blocks, page_size, 8, 16, dtype=torch.float16)
    key_cache[-1, :2], value_cache[-1, 0], value_cache[-1, 1] = 0.5, 1.0, 3.0
    table = torch.tensor([[num_blocks - 1]], dtype=torch.int32)
    row, length = torch.zeros(1, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    plan = implementation.plan(table, row, torch.tensor([0, 1], dtype=torch.int32), length, page_size, 2)
    query = torch.ones(1, 8, 256, dtype=torch.float16)
    got = implementation.decode_attention(
        query, key_cache, value_cache, table, row, length, plan, 1.0, 0, 0, 0.0, None, None, 2
    )
    assert (got == 2.0).all()


def test_queries_beyond_two_to_the_31_elements(implementation, oracles, attention_cases) -> None:
    step = attention_cases.make_step(attention_cases.Shape(page_size=4), torch.float32, [(6, 1), (2, 1)])
    far = attention_cases.spread_out(step.query)
    torch.testing.assert_close(
        _decode(implementation, replace(step, query=far)).double(), _expected(oracles, step), rtol=2e-5, atol=2e-5
    )


def test_operator_declares_what_it_does(implementation, opcheck, attention_cases) -> None:
    step = attention_cases.make_step(attention_cases.Shape(has_sinks=True), torch.float32, [(20, 1), (7, 1)])
    caches = step.key_cache.nan_to_num(), step.value_cache.nan_to_num()
    args = (step.query, *caches, step.block_tables, step.rows, step.seq_lens, step.plan(implementation))
    opcheck(implementation.decode_attention, (*args, *step.options, step.max_kv))
