"""Writes a plan to the device: what entered the request table, and the step's own small columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from cbtriton.padding import Bucket
from cbtriton.plan import BatchPlan, BlockTableUpdate, RowStart
from cbtriton.request import RuleKind, SamplingParams, TokenRule
from cbtriton.request_table import MAX_EOS_IDS, NO_DECAY, RequestTable


@dataclass(frozen=True, slots=True)
class SampleFeatures:
    """What any sampling row of the step asks for: the sampler leaves out whole stages that nobody needs.

    Rows that are truncated are processed as well, since the one works on what the other writes.
    """

    all_greedy: bool
    use_top_k: bool
    use_top_p: bool
    use_min_p: bool
    use_min_length: bool
    use_processors: bool = False
    use_truncation: bool = False


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The step's columns on the device, padded to its bucket; the next step's overwrite them.

    Attributes:
        rows: `[num_requests]` int32; the table's padding row for padding.
        starts: `[num_requests]` int32, position of each row's first token.
        counts: `[num_requests]` int32, tokens per row; 0 for padding rows.
        sample_rows: `[num_samples]` int32, table rows that get a new token; the table's padding row for padding.
        sample_positions: `[num_samples]` int32, the positions that those tokens take.
        logit_indices: `[num_samples]` int32, the query tokens whose logits they are drawn from.
        features: What the sampling rows ask for.
    """

    rows: Tensor
    starts: Tensor
    counts: Tensor
    sample_rows: Tensor
    sample_positions: Tensor
    logit_indices: Tensor
    features: SampleFeatures


class StepInputsWriter:
    """Fills `StepInputs` and the request table from plans.

    All steps have their columns in one buffer, where captured steps look for them: those of a bucket always lie at the
    same place. What runs on the device runs in order, so a step's are written after the step before has read its own.

    Args:
        table: The request table; this writer and the `sample` kernel are the only ones that change it.
        vocab_size: Parameters that filter nothing for this vocabulary are treated as off.
        device: Where the columns go.
    """

    def __init__(self, table: RequestTable, vocab_size: int, device: torch.device) -> None:
        self._table = table
        self._vocab_size = vocab_size
        self._device = device
        # No bucket has more rows than the table, its padding row included.
        self._columns = torch.empty(6 * (table.padding_row + 1), dtype=torch.int32, device=device)
        # What the rows that are not greedy ask for, and those with processors, kept on the host so that no step has to
        # read it back.
        self._drawing: dict[int, SamplingParams] = {}
        self._processing: dict[int, SamplingParams] = {}
        self._row_min_position: dict[int, int] = {}

    def fill(self, plan: BatchPlan, bucket: Bucket) -> StepInputs:
        """Applies the plan's table changes and returns its columns."""
        if plan.row_starts:
            self._start_rows(plan.row_starts)
        if plan.table_updates:
            self._update_block_tables(plan.table_updates)
        rows = [row.row for row in plan.rows]
        starts = [row.start for row in plan.rows]
        counts = [row.count for row in plan.rows]
        sample_rows: list[int] = []
        sample_positions: list[int] = []
        logit_indices: list[int] = []
        end = 0
        for row in plan.rows:
            end += row.count
            if row.samples:
                sample_rows.append(row.row)
                sample_positions.append(row.start + row.count)
                logit_indices.append(end - 1)
        features = self._features(sample_rows, sample_positions)
        return self._write(bucket, (rows, starts, counts), (sample_rows, sample_positions, logit_indices), features)

    def padding(self, bucket: Bucket, features: SampleFeatures) -> StepInputs:
        """A step of padding rows only: it has the sizes of `bucket`, and changes nothing that anybody reads."""
        return self._write(bucket, ([], [], []), ([], [], []), features)

    def _write(
        self,
        bucket: Bucket,
        requests: tuple[list[int], list[int], list[int]],
        samples: tuple[list[int], list[int], list[int]],
        features: SampleFeatures,
    ) -> StepInputs:
        scrap, zeros = [self._table.padding_row], [0]
        more_requests = bucket.num_requests - len(requests[0])
        more_samples = bucket.num_samples - len(samples[0])
        # One tensor, one copy.
        packed = self._on_host(
            [
                *chain(requests[0], scrap * more_requests),
                *chain(requests[1], zeros * more_requests),
                *chain(requests[2], zeros * more_requests),
                *chain(samples[0], scrap * more_samples),
                *chain(samples[1], zeros * more_samples),
                *chain(samples[2], zeros * more_samples),
            ]
        )
        buffer = self._columns[: len(packed)].copy_(packed, non_blocking=True)
        columns = buffer.split([bucket.num_requests] * 3 + [bucket.num_samples] * 3)
        return StepInputs(
            rows=columns[0],
            starts=columns[1],
            counts=columns[2],
            sample_rows=columns[3],
            sample_positions=columns[4],
            logit_indices=columns[5],
            features=features,
        )

    def _features(self, sample_rows: Sequence[int], sample_positions: Sequence[int]) -> SampleFeatures:
        drawn = [self._drawing[row] for row in sample_rows if row in self._drawing]
        processed = [self._processing[row] for row in sample_rows if row in self._processing]
        return SampleFeatures(
            all_greedy=not drawn,
            use_top_k=any(0 < params.top_k < self._vocab_size for params in drawn),
            use_top_p=any(params.top_p < 1.0 for params in drawn),
            use_min_p=any(params.min_p > 0.0 for params in drawn),
            use_min_length=any(
                position < self._row_min_position[row]
                for row, position in zip(sample_rows, sample_positions, strict=True)
            ),
            use_processors=bool(processed),
            use_truncation=any(params.is_truncated for params in processed),
        )

    def _start_rows(self, row_starts: Sequence[RowStart]) -> None:
        table = self._table
        for start in row_starts:
            self._drawing.pop(start.row, None)
            if not start.sampling.is_greedy:
                self._drawing[start.row] = start.sampling
            self._processing.pop(start.row, None)
            if start.sampling.has_processors or start.sampling.is_truncated:
                self._processing[start.row] = start.sampling
            self._row_min_position[start.row] = start.prompt_length + start.sampling.min_new_tokens
            table.token_table[start.row, : len(start.token_ids)] = self._to_device(start.token_ids)
        rows = self._to_device([start.row for start in row_starts]).long()
        sampling = [start.sampling for start in row_starts]
        floats = self._to_device(list(map(_floats, sampling)), torch.float32)
        for column, values in zip(self._float_columns(), floats.unbind(1), strict=True):
            column[rows] = values
        table.seeds[rows] = self._to_device([params.seed for params in sampling], torch.int64)
        integers = self._to_device([[*_integers(s), self._row_min_position[s.row]] for s in row_starts])
        for column, values in zip(self._integer_columns(), integers.unbind(1), strict=True):
            column[rows] = values
        eos = [sorted(start.eos_token_ids) for start in row_starts]
        table.eos_ids[rows] = self._to_device([ids + [-1] * (MAX_EOS_IDS - len(ids)) for ids in eos])
        for start in row_starts:
            if start.sampling.processors.rules:
                self._write_rules(start.row, start.sampling.processors.rules)

    def _float_columns(self) -> tuple[Tensor, ...]:
        """In the order of `_floats`."""
        table = self._table
        return (
            table.temperature,
            table.top_p,
            table.min_p,
            table.top_h,
            table.typical_p,
            table.epsilon_cutoff,
            table.eta_cutoff,
            table.repetition_penalty,
            table.presence_penalty,
            table.frequency_penalty,
            table.decay_rates,
        )

    def _integer_columns(self) -> tuple[Tensor, ...]:
        """In the order of `_integers`, and the minimum position."""
        table = self._table
        return (
            table.prompt_lengths,
            table.has_long_rope,
            table.top_k,
            table.is_truncated,
            table.no_repeat_ngram_size,
            table.num_biases,
            table.num_rules,
            table.decay_starts,
            table.remove_invalid,
            table.has_token_mask,
            table.min_positions,
        )

    def _write_rules(self, row: int, rules: Sequence[TokenRule]) -> None:
        fields = [
            [rule.token, rule.kind + 4 * len(rule.prefix), -1 if rule.position is None else rule.position]
            for rule in rules
        ]
        biases = self._to_device([rule.bias for rule in rules], torch.float32)
        self._table.rules[row, : len(rules), :3] = self._to_device(fields)
        self._table.rules[row, : len(rules), 3] = biases.view(torch.int32)
        prefixes = list(chain.from_iterable(rule.prefix for rule in rules))
        if prefixes:
            self._table.rule_prefixes[row, : len(prefixes)] = self._to_device(prefixes)

    def _update_block_tables(self, updates: Sequence[BlockTableUpdate]) -> None:
        changes = [
            (entries.group, update.row, entries.first_index + offset, block_id)
            for update in updates
            for entries in update.entries
            for offset, block_id in enumerate(entries.block_ids)
        ]
        groups, rows, columns, block_ids = self._to_device(changes).unbind(1)
        self._table.block_tables[groups.long(), rows.long(), columns.long()] = block_ids

    def _to_device(self, values: object, dtype: torch.dtype = torch.int32) -> Tensor:
        return self._on_host(values, dtype).to(self._device, non_blocking=True)

    def _on_host(self, values: object, dtype: torch.dtype = torch.int32) -> Tensor:
        """A tensor that a copy to the device may go on reading after it has been given up."""
        host = torch.tensor(values, dtype=dtype)
        return host if self._device.type == "cpu" else host.pin_memory()


def _floats(params: SamplingParams) -> tuple[float, ...]:
    processors = params.processors
    return (
        params.temperature,
        params.top_p,
        params.min_p,
        params.top_h,
        params.typical_p,
        params.epsilon_cutoff,
        params.eta_cutoff,
        processors.repetition_penalty,
        processors.presence_penalty,
        processors.frequency_penalty,
        math.log2(processors.decay_factor),
    )


def _integers(start: RowStart) -> tuple[int, ...]:
    params, processors = start.sampling, start.sampling.processors
    return (
        start.prompt_length,
        int(start.has_long_rope),
        params.top_k,
        int(params.is_truncated),
        processors.no_repeat_ngram_size,
        sum(rule.kind == RuleKind.BIAS for rule in processors.rules),
        len(processors.rules),
        NO_DECAY if processors.decay_start is None else processors.decay_start,
        int(processors.remove_invalid_values),
        int(params.host is not None and params.host.has_mask),
    )
