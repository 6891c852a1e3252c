"""`prepare_inputs` against plain loops."""

from __future__ import annotations

import pytest
import torch

SLOT = "prepare_inputs"

# (table row, first position, number of tokens) of each entry; count 0 is padding
STEPS = {
    "one token": [(0, 0, 1)],
    "decode": [(3, 7, 1), (0, 0, 1), (2, 47, 1)],
    "mixed, out of order": [(2, 0, 5), (0, 16, 1), (3, 3, 13), (1, 47, 1)],
    "padding rows behind": [(1, 4, 3), (0, 0, 0), (0, 0, 0)],
    "padding row between": [(1, 4, 3), (0, 0, 0), (2, 1, 2)],
    "only padding": [(0, 0, 0)],
}


def _tables(*page_sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(page_sizes[0])
    num_groups, num_blocks = len(page_sizes), -(-48 // min(page_sizes))
    token_table = torch.randint(1, 1000, (4, 48), generator=generator, dtype=torch.int32)
    block_tables = torch.randperm(num_groups * 4 * num_blocks, generator=generator).to(torch.int32)
    return token_table, block_tables.view(num_groups, 4, num_blocks)


def _sizes(*page_sizes: int) -> torch.Tensor:
    return torch.tensor(page_sizes, dtype=torch.int32)


def _columns(step: list[tuple[int, int, int]]) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=torch.int32) for column in zip(*step, strict=True)]


@pytest.mark.parametrize("page_sizes", [(1,), (4,), (16,), (24,), (48,), (4, 4), (16, 4, 24)], ids=str)
@pytest.mark.parametrize("num_padding", [0, 1, 6])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_matches_plain_loops(implementation, oracles, step, num_padding, page_sizes) -> None:
    tables, columns, sizes = _tables(*page_sizes), _columns(step), _sizes(*page_sizes)
    num_tokens = int(columns[2].sum()) + num_padding
    got = implementation.prepare_inputs(*tables, *columns, sizes, num_tokens)
    want = oracles.prepare_inputs(*tables, *columns, sizes, num_tokens)
    assert [tensor.tolist() for tensor in got] == list(want)
    assert [tensor.dtype for tensor in got] == [torch.int64] * 3 + [torch.int32] * 2


def test_slots_do_not_wrap_at_32_bits(implementation) -> None:
    token_table = torch.ones(1, 8, dtype=torch.int32)
    block_tables = torch.tensor([[[2**30, 2**30 + 1]]], dtype=torch.int32)
    columns = _columns([(0, 3, 2)])
    _, _, slots, _, _ = implementation.prepare_inputs(token_table, block_tables, *columns, _sizes(4), 2)
    assert slots.tolist() == [[2**32 + 3, 2**32 + 4]]


def test_operator_declares_what_it_does(implementation, opcheck) -> None:
    args = (*_tables(4, 8), *_columns(STEPS["mixed, out of order"]), _sizes(4, 8), 24)
    opcheck(implementation.prepare_inputs, args)
