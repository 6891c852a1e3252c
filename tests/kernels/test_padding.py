"""A step padded to its bucket gives what the bare step gives, whatever the padded tails of its buffers held before."""

from __future__ import annotations

import importlib

import pytest
import torch

# Implementations of prepare_inputs, kv_write and decode_attention that are run one after the other.
CHAINS = {"reference": ("reference", "reference", "reference"), "triton": ("per_row", "vectorized", "split_kv")}
PAGE_SIZE, HEADS, DIM = 4, 1, 16


def _decode_step(names: tuple[str, str, str], num_rows: int, bucket: int) -> tuple[torch.Tensor, ...]:
    """Runs one decode step of rows with contexts 0, 1, 2, …, padded to `bucket` rows."""
    slots = ("prepare_inputs", "kv_write", "decode_attention")
    prepare, write, attention = (
        importlib.import_module(f"cbtriton.kernels.{slot}.{name}") for slot, name in zip(slots, names, strict=True)
    )
    generator = torch.Generator().manual_seed(0)
    tables = torch.arange(1, 17 * 5 + 1, dtype=torch.int32).view(17, 5)
    tokens = torch.arange(17 * 20, dtype=torch.int32).view(17, 20)
    caches = torch.randn(2, 17 * 5 + 1, PAGE_SIZE, HEADS, DIM, generator=generator)
    key, value, query = torch.randn(3, 17, HEADS, DIM, generator=generator)

    def padded(values: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.cat([values[:num_rows], values.new_full((bucket - num_rows, *values.shape[1:]), fill)])

    rows = padded(torch.arange(17, dtype=torch.int32), 0)
    starts = padded(torch.arange(17, dtype=torch.int32), 0)
    counts = padded(torch.ones(17, dtype=torch.int32), 0)
    ids, positions, slots, cu_seqlens_q, seq_lens = prepare.prepare_inputs(
        tokens, tables[None], rows, starts, counts, torch.tensor([PAGE_SIZE], dtype=torch.int32), bucket
    )
    write.kv_write(padded(key, torch.nan), padded(value, torch.nan), caches[0], caches[1], slots[0])
    plan = attention.plan(tables, rows, cu_seqlens_q, seq_lens, PAGE_SIZE, 20)
    out = attention.decode_attention(
        padded(query, torch.nan), caches[0], caches[1], tables, rows, seq_lens, plan, 0.25, 0, 0, 0.0, None, None, 20
    )
    assert not out[num_rows:].any()
    return ids[:num_rows], positions[:num_rows], out[:num_rows], caches


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7, 8, 9, 17])
def test_a_batch_gives_the_same_in_a_larger_bucket(chain, num_rows) -> None:
    bucket = 1 << num_rows.bit_length()
    bare = _decode_step(CHAINS[chain], num_rows, num_rows)
    padded = _decode_step(CHAINS[chain], num_rows, bucket)
    for got, expected in zip(padded, bare, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert bare[3].isfinite().all()
