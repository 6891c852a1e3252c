"""Columns of a step: what is padding belongs to the row of no request."""

from __future__ import annotations

import torch

from cbtriton.padding import Bucket
from cbtriton.plan import BatchPlan, RowStart, ScheduledRow
from cbtriton.request import SamplingParams
from cbtriton.request_table import RequestTable
from cbtriton.step_inputs import SampleFeatures, StepInputs, StepInputsWriter

GREEDY = SampleFeatures(all_greedy=True, use_top_k=False, use_top_p=False, use_min_p=False, use_min_length=False)


def writer(num_rows: int = 3) -> StepInputsWriter:
    return StepInputsWriter(RequestTable(num_rows, 16, 1, 2, 100, torch.device("cpu")), 100, torch.device("cpu"))


def columns(inputs: StepInputs) -> list[list[int]]:
    names = ("rows", "starts", "counts", "sample_rows", "sample_positions", "logit_indices")
    return [getattr(inputs, name).tolist() for name in names]


def test_what_a_bucket_has_beyond_the_plan_is_padding() -> None:
    rows = (ScheduledRow("a", 1, 2, 4, 3, samples=False), ScheduledRow("b", 1, 0, 6, 1, samples=True))
    starts = (RowStart(0, [1, 2, 3, 4, 5, 6, 7], 7, SamplingParams(), frozenset()),)
    plan = BatchPlan("varlen", rows, starts, (), (), num_tokens=4, max_seq_len=7)
    inputs = writer().fill(plan, Bucket("varlen", 8, 4, 3, 16))
    assert columns(inputs) == [[2, 0, 3, 3], [4, 6, 0, 0], [3, 1, 0, 0], [0, 3, 3], [7, 0, 0], [3, 0, 0]]


def test_steps_of_a_bucket_have_their_columns_at_the_same_place_and_overwrite_those_of_the_step_before() -> None:
    writing, bucket = writer(num_rows=5), Bucket("decode", 2, 2, 2, 16)
    first = writing.padding(bucket, GREEDY)
    writing.padding(Bucket("varlen", 9, 5, 5, 32), GREEDY)
    rows = (ScheduledRow("a", 1, 2, 4, 1, samples=True),)
    starts = (RowStart(2, [1, 2, 3, 4, 5], 5, SamplingParams(), frozenset()),)
    plan = BatchPlan("decode", rows, starts, (), (), num_tokens=1, max_seq_len=5)
    second = writing.fill(plan, bucket)
    assert columns(first) == columns(second) == [[2, 5], [4, 0], [1, 0], [2, 5], [5, 0], [0, 0]]


def test_a_step_of_padding_only_touches_the_row_of_no_request() -> None:
    inputs = writer(num_rows=5).padding(Bucket("decode", 2, 2, 3, 16), GREEDY)
    assert columns(inputs) == [[5, 5], [0, 0], [0, 0], [5, 5, 5], [0, 0, 0], [0, 0, 0]]
    assert inputs.features is GREEDY


def test_the_row_of_no_request_lies_behind_those_of_requests() -> None:
    table = RequestTable(3, 16, 2, 5, 100, torch.device("cpu"))
    assert table.padding_row == 3
    assert {len(column) for column in (table.token_table, table.temperature, table.eos_ids)} == {4}
    assert table.block_tables.shape == (2, 4, 5)
