"""`sample` against transformers' processors and against a plain Philox race."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from cbtriton.kernels._launch import uses_triton
from cbtriton.kernels.sample import reference
from cbtriton.kernels.sample.reference import philox

SLOT = "sample"
MAX_LEN = 64


def few(implementation, size: int, small: int) -> int:
    """`small` for Triton kernels, which the interpreter runs one row at a time, tens of milliseconds each."""
    return small if uses_triton(implementation) else size


@dataclass(slots=True)
class Batch:
    """One row of parameters per row of logits; the table's rows are in reverse order."""

    logits: Tensor
    temperature: list[float]
    top_k: list[int] = field(default_factory=list)
    top_p: list[float] = field(default_factory=list)
    min_p: list[float] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    min_positions: list[int] = field(default_factory=list)
    eos_ids: list[list[int]] = field(default_factory=list)
    return_logprobs: bool = True

    def arguments(self) -> tuple:
        """Arguments of `sample`."""
        size = len(self.logits)

        def column(values: list, default: object, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values or [default] * size, dtype=dtype)

        positions = column(self.positions, 5, torch.int32)
        return (
            self.logits,
            torch.arange(size, dtype=torch.int32).flip(0),
            positions,
            torch.full((size, max(MAX_LEN, int(positions.max()) + 1)), -7, dtype=torch.int32),
            column(self.temperature, None, torch.float32).flip(0),
            column(self.top_k, 0, torch.int32).flip(0),
            column(self.top_p, 1.0, torch.float32).flip(0),
            column(self.min_p, 0.0, torch.float32).flip(0),
            column(self.seeds, 0, torch.int64).flip(0),
            column(self.min_positions, 0, torch.int32).flip(0),
            column(self.eos_ids, [-1], torch.int32).flip(0),
            not any(self.temperature),
            any(self.top_k),
            any(p < 1 for p in self.top_p),
            any(self.min_p),
            bool(self.min_positions),
            self.return_logprobs,
        )

    def run(self, implementation) -> tuple[list[int], Tensor, list[int]]:
        """Tokens, log-probabilities, outcomes; checks the result's types and that the table holds the tokens."""
        arguments = self.arguments()
        logits, rows, positions, table = arguments[:4]
        untouched = logits.clone()
        tokens, logprobs, outcomes = implementation.sample(*arguments)
        assert [tokens.dtype, logprobs.dtype, outcomes.dtype] == [torch.int64, torch.float32, torch.int32]
        torch.testing.assert_close(logits, untouched, rtol=0, atol=0, equal_nan=True)
        expected_table = torch.full_like(table, -7)
        expected_table[rows, positions] = tokens.int()
        torch.testing.assert_close(table, expected_table, rtol=0, atol=0)
        return tokens.tolist(), logprobs, outcomes.tolist()


def _processed(row: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """`[1, V]`: what transformers' processors make of one row, in its order."""
    scores = TemperatureLogitsWarper(temperature)(None, row.float()[None])
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return scores


def _random_logits(kind: str, size: int, vocab: int) -> Tensor:
    logits = torch.randn(size, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    if kind == "ties":
        return logits.round()
    if kind == "-inf":
        return logits.masked_fill(logits < -1, -torch.inf)
    if kind == "flat":
        return logits * 1e-3
    return logits.bfloat16() if kind == "bf16" else logits


@pytest.mark.parametrize("vocab", [50, 1003])
@pytest.mark.parametrize("kind", ["normal", "ties", "-inf", "flat", "bf16"])
def test_kept_sets_are_those_of_transformers(implementation, kind, vocab) -> None:
    """The drawn token is kept, and its log-probability tells the mass of all that are."""
    combinations = list(
        itertools.product([1, 7, 50, vocab, 0], [1e-6, 0.3, 0.9, 0.999, 1.0], [0.0, 0.05, 0.6], [0.7, 1.5])
    )
    # Few of them per kind and vocabulary, other ones for each.
    stride = few(implementation, 1, 23)
    combinations = combinations[len(kind) * vocab % stride :: stride]
    logits = _random_logits(kind, len(combinations), vocab)
    top_k, top_p, min_p, temperature = (list(column) for column in zip(*combinations, strict=True))
    batch = Batch(logits, temperature, top_k, top_p, min_p, seeds=list(range(len(combinations))))
    tokens, logprobs, outcomes = batch.run(implementation)
    assert not any(outcomes)
    for i, (k, p, m, t) in enumerate(combinations):
        kept = _processed(logits[i], t, k, p, m)[0]
        # Which of equally likely tokens top-p removes first depends on the sort, so scores are compared, not ids.
        score = logits[i].float()[tokens[i]] / t
        assert score in kept
        torch.testing.assert_close(
            logprobs[i], score - kept.logsumexp(0), rtol=1e-5, atol=2e-5, msg=f"{k=} {p=} {m=} {t=}"
        )


@pytest.mark.parametrize(
    ("probs", "filters", "kept"),
    [
        ([0.1, 0.2, 0.3, 0.4], {"top_p": 0.6}, {2, 3}),
        ([0.1, 0.2, 0.3, 0.4], {"top_p": 0.0}, {3}),
        ([0.1, 0.2, 0.3, 0.4], {"top_k": 1, "top_p": 0.8}, {3}),
        ([0.1, 0.2, 0.3, 0.4], {"top_k": 3, "top_p": 0.7}, {2, 3}),
        ([0.1, 0.2, 0.3, 0.4], {"min_p": 0.7}, {2, 3}),
        ([0.1, 0.2, 0.3, 0.4], {"min_p": 1.0}, {3}),
        ([0.2, 0.3, 0.3, 0.2], {"top_k": 1}, {1, 2}),
        ([0.2, 0.3, 0.3, 0.2], {"top_k": 3}, {0, 1, 2, 3}),
        ([0.1, 0.2, 0.3, 0.4], {"top_k": 4}, {0, 1, 2, 3}),
        ([0.1, 0.2, 0.3, 0.4], {"top_k": 9}, {0, 1, 2, 3}),
    ],
)
def test_exactly_the_kept_tokens_are_drawn(implementation, probs, filters, kept) -> None:
    size = few(implementation, 200, 16)
    logits = torch.tensor(probs).log().expand(size, -1).contiguous()
    columns = {name: [value] * size for name, value in filters.items()}
    tokens, logprobs, _ = Batch(logits, [1.0] * size, **columns, seeds=list(range(size))).run(implementation)
    assert set(tokens) == kept
    mass = sum(probs[token] for token in kept)
    torch.testing.assert_close(logprobs.exp(), torch.tensor([probs[token] / mass for token in tokens]))


def test_philox_known_answers(oracles) -> None:
    vectors = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, (low, high), expected in vectors:
        key = high << 32 | low
        key = key - 2**64 if key >= 2**63 else key
        assert tuple(philox(tuple(map(torch.tensor, counter)), torch.tensor(key)).tolist()) == expected
        assert oracles.philox_4x32_10(counter, (low, high)) == expected


@pytest.mark.parametrize("filters", [{}, {"top_k": 20}, {"top_p": 0.9}, {"top_k": 30, "top_p": 0.8, "min_p": 0.02}])
def test_the_winner_of_the_defined_race_is_drawn(implementation, oracles, filters) -> None:
    size, vocab = few(implementation, 40, 8), 67
    logits = _random_logits("normal", size, vocab)
    seeds = [(-1) ** i * (i * 2**57 + i) for i in range(size)]
    positions = [i * 997 for i in range(size)]
    columns = {name: [value] * size for name, value in filters.items()}
    batch = Batch(logits, [1.3] * size, **columns, seeds=seeds, positions=positions)
    tokens, _, _ = batch.run(implementation)
    expected = [
        oracles.race_winner(_processed(row, 1.3, **filters)[0].tolist(), seed % 2**64, position)
        for row, seed, position in zip(logits, seeds, positions, strict=True)
    ]
    assert tokens == expected


@pytest.mark.parametrize("filters", [{}, {"top_k": 10}, {"top_p": 0.95}])
@pytest.mark.parametrize("varies", ["seeds", "positions"])
def test_draws_follow_the_distribution(implementation, varies, filters) -> None:
    """Chi-square; with fixed seeds it cannot fail by chance, and the bound would be passed once in a million.

    Where an implementation is slow, the reference draws, and the implementation must agree on a few of the rows.
    """
    # The token table is as wide as the largest position.
    size, vocab = 100_000 if varies == "seeds" else 4000, 16
    row = torch.linspace(-2, 1.5, vocab)

    def batch(indices: list[int]) -> Batch:
        columns = {name: [value] * len(indices) for name, value in filters.items()} | {varies: indices}
        return Batch(row.expand(len(indices), -1).contiguous(), [0.8] * len(indices), **columns)

    indices = list(range(0, size, few(implementation, 1, size // 5)))
    tokens, _, _ = batch(indices).run(implementation)
    if len(indices) < size:
        subset, (tokens, _, _) = tokens, batch(list(range(size))).run(reference)
        assert subset == [tokens[i] for i in indices]
    expected = _processed(row, 0.8, **filters).softmax(-1)[0] * size
    counts = torch.bincount(torch.tensor(tokens), minlength=vocab)
    is_kept = expected > 0
    assert not counts[~is_kept].any()
    chi_square = ((counts - expected) ** 2 / expected)[is_kept].sum()
    assert chi_square < 56.5


def test_high_temperature_without_top_k_reaches_many_tokens(implementation) -> None:
    row = torch.randn(128, generator=torch.Generator().manual_seed(0))
    size = few(implementation, 200, 30)
    batch = Batch(row.expand(size, -1).contiguous(), [1.5] * size, positions=list(range(size)))
    assert len(set(batch.run(implementation)[0])) >= 20


def test_a_row_draws_the_same_alone_beside_others_and_in_any_order(implementation) -> None:
    size, vocab = 12, 300
    logits = _random_logits("normal", size, vocab)
    columns = _mixed_columns(size)
    together, together_logprobs, _ = Batch(logits, **columns).run(implementation)

    order = torch.randperm(size, generator=torch.Generator().manual_seed(1)).tolist()
    permuted = {name: [values[i] for i in order] for name, values in columns.items()}
    tokens, logprobs, _ = Batch(logits[order], **permuted).run(implementation)
    assert tokens == [together[i] for i in order]
    torch.testing.assert_close(logprobs, together_logprobs[order], rtol=1e-6, atol=1e-6)
    for i in range(0, size, few(implementation, 1, 2)):
        alone = {name: values[i : i + 1] for name, values in columns.items()}
        assert Batch(logits[i : i + 1], **alone).run(implementation)[0] == [together[i]]


def test_a_row_draws_the_same_within_a_padded_vocabulary(implementation) -> None:
    """Rows may lie apart; columns that the vocabulary does not reach are never read, and extra -inf change nothing."""
    size, vocab = 12, 301
    logits = _random_logits("normal", size, vocab)
    columns = _mixed_columns(size)
    expected, expected_logprobs, _ = Batch(logits, **columns).run(implementation)

    padded = torch.full((size, vocab + 977), torch.nan)[:, : vocab + 900]
    padded.copy_(torch.nn.functional.pad(logits, (0, 900), value=-torch.inf))
    assert not padded.is_contiguous()
    tokens, logprobs, outcomes = Batch(padded, **columns).run(implementation)
    assert tokens == expected
    assert not any(outcomes)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5)


def _mixed_columns(size: int) -> dict[str, list]:
    """Parameters of `size` rows of every kind; `size` is a multiple of 12."""
    return {
        "temperature": [0.0, 0.7, 1.0, 1.5] * (size // 4),
        "top_k": [0, 5, 0, 0, 40, 0] * (size // 6),
        "top_p": [1.0, 0.9, 1.0] * (size // 3),
        "min_p": [0.0, 0.0, 0.0, 0.1, 0.0, 0.0] * (size // 6),
        "seeds": [i * 12345678901 for i in range(size)],
        "positions": list(range(size)),
    }


@pytest.mark.parametrize(
    ("dtype", "vocab", "spread"),
    [
        (torch.float32, 1023, 3.0),
        (torch.float32, 1025, 3.0),
        (torch.float32, 1025, 0.01),
        (torch.bfloat16, 1023, 3.0),
        (torch.bfloat16, 1025, 0.01),
        (torch.bfloat16, 32_000, 6.0),
    ],
)
def test_tokens_are_those_of_the_reference(implementation, dtype, vocab, spread) -> None:
    """Rows of every kind; flat ones leave many candidates, and bf16 many ties."""
    columns = {
        "temperature": [0.0, 1.0, 0.8, 1.3, 1.0, 0.6],
        "top_k": [3, 0, 50, 0, 0, 400],
        "top_p": [1.0, 1.0, 1.0, 0.95, 1.0, 0.9],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.2, 0.01],
        "seeds": [-1, -(2**63), 2**63 - 1, 2**40, 7, -(2**33)],
        "positions": [1, 63, 7, 2**10, 0, 9],
    }
    logits = (torch.randn(6, vocab, generator=torch.Generator().manual_seed(3)) * spread).to(dtype)
    batch = Batch(logits, **columns)
    expected, expected_logprobs, _ = batch.run(reference)
    tokens, logprobs, outcomes = batch.run(implementation)
    assert tokens == expected
    assert not any(outcomes)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("takes_all", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kept_sets_of_a_thousand_rows_are_those_of_transformers(implementation, takes_all) -> None:
    """The vocabulary is so small that each kept token shows in the log-probability."""
    size, vocab = 1000, 61
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(size, vocab, generator=generator)
    logits[1::3] = (logits[1::3] * 4).round() / 4
    logits[2::3] = logits[2::3].masked_fill(torch.rand(size, vocab, generator=generator)[2::3] < 0.7, -torch.inf)
    combinations = list(itertools.product([1, 50, vocab], [0.0, 1e-6, 0.9, 1.0]))
    top_k, top_p = zip(*(combinations[i // 3 % len(combinations)] for i in range(size)), strict=True)

    rows = list(range(size))
    if uses_triton(implementation) and not takes_all:
        # Each combination once, each kind of logits with a third of them.
        rows = [3 * i + i % 3 for i in range(len(combinations))]
    batch = Batch(logits[rows], [1.0] * len(rows), [top_k[i] for i in rows], [top_p[i] for i in rows], seeds=rows)
    tokens, logprobs, _ = batch.run(implementation)
    for i, token, logprob in zip(rows, tokens, logprobs, strict=True):
        kept = _processed(logits[i], 1.0, top_k[i], top_p[i])[0]
        assert logits[i, token] in kept
        torch.testing.assert_close(logprob, logits[i, token] - kept.logsumexp(0), rtol=1e-6, atol=1e-5)


def test_of_equal_tokens_top_p_keeps_the_higher_ids(implementation) -> None:
    """The vocabulary is larger than the Triton kernels' buffer for candidates in the interpreter."""
    size, vocab = few(implementation, 300, 3), 601
    logits = torch.zeros(size, vocab)
    logits[:, 7] = 1.0
    tokens, logprobs, _ = Batch(logits, [1.0] * size, top_p=[0.1] * size, seeds=list(range(size))).run(implementation)
    mass = torch.tensor(1.0).exp() + vocab - 1
    num_ties = int((0.1 * mass - torch.tensor(1.0).exp()).ceil())
    assert set(tokens) <= {7, *range(vocab - num_ties, vocab)}
    expected = logits[0, tokens] - (torch.tensor(1.0).exp() + num_ties).log()
    torch.testing.assert_close(logprobs, expected)


def test_tiny_temperatures_overflow_nothing(implementation) -> None:
    logits = _random_logits("normal", 3, 40)
    batch = Batch(logits, [1e-6] * 3, top_k=[0, 5, 0], top_p=[1.0, 1.0, 0.9])
    tokens, logprobs, outcomes = batch.run(implementation)
    assert tokens == logits.argmax(-1).tolist()
    assert logprobs.tolist() == [0.0] * 3
    assert not any(outcomes)


def test_no_rows(implementation) -> None:
    arguments = list(Batch(torch.zeros(1, 9), [1.0], top_k=[2]).arguments())
    arguments[0], arguments[1], arguments[2] = torch.zeros(0, 9), arguments[1][:0], arguments[2][:0]
    tokens, logprobs, outcomes = implementation.sample(*arguments)
    assert [len(tokens), len(logprobs), len(outcomes)] == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("return_logprobs", [True, False])
def test_greedy_takes_the_first_of_the_best(implementation, dtype, return_logprobs) -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(2)).to(dtype)
    logits[0, [17, 18, 400]] = 9
    logits[1, 499] = 9
    batch = Batch(logits, [0.0] * 6, return_logprobs=return_logprobs)
    tokens, logprobs, outcomes = batch.run(implementation)
    assert tokens[:2] == [17, 499]
    assert tokens == logits.float().argmax(-1).tolist()
    assert not any(outcomes)
    expected = logits.float().log_softmax(-1).amax(-1) if return_logprobs else torch.zeros(6)
    torch.testing.assert_close(logprobs, expected)


def test_greedy_rows_ignore_filters_and_neighbours(implementation) -> None:
    logits = _random_logits("ties", 4, 60)
    batch = Batch(logits, [0.0, 1.0, 0.0, 0.5], top_k=[1, 3, 0, 0], top_p=[0.1, 1.0, 1.0, 0.5])
    tokens, logprobs, _ = batch.run(implementation)
    greedy = logits.argmax(-1).tolist()
    assert [tokens[0], tokens[2]] == [greedy[0], greedy[2]]
    torch.testing.assert_close(logprobs[[0, 2]], logits.log_softmax(-1).amax(-1)[[0, 2]])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": [4] * 3}, {"top_p": [0.9] * 3}])
def test_every_eos_is_suppressed_until_the_minimum_length(implementation, temperature, filters) -> None:
    logits = torch.zeros(3, 30)
    logits[:, [4, 11]] = 50
    logits[:, 20] = 30
    batch = Batch(
        logits,
        [temperature] * 3,
        **filters,
        positions=[9, 10, 9],
        min_positions=[10, 10, 0],
        eos_ids=[[11, 4, 99], [11, 4, -1], [11, 4, -1]],
    )
    tokens, logprobs, outcomes = batch.run(implementation)
    assert tokens[0] == 20
    assert {tokens[1], tokens[2]} <= {4, 11}
    assert logprobs[0] > -1e-3
    assert not any(outcomes)
    only_eos = replace(batch, logits=torch.full_like(logits, -torch.inf).index_fill(1, torch.tensor([4]), 1.0))
    assert only_eos.run(implementation)[2] == [1, 0, 0]


@pytest.mark.parametrize("filters", [{}, {"top_k": [3] * 6}, {"top_p": [0.9] * 6, "min_p": [0.1] * 6}])
@pytest.mark.parametrize("temperatures", [[0.0] * 6, [1.0] * 6, [0.0, 0.0, 1.0, 1.0, 0.0, 1.0]])
def test_unusable_rows_are_reported_and_harm_nobody(implementation, temperatures, filters) -> None:
    logits = _random_logits("normal", 6, 40)
    good = Batch(logits.clone(), temperatures, **filters, seeds=list(range(6)))
    expected, expected_logprobs, _ = good.run(implementation)
    logits[1, 7] = torch.nan
    logits[3] = -torch.inf
    logits[4, 7] = torch.inf
    tokens, logprobs, outcomes = replace(good, logits=logits).run(implementation)
    assert outcomes == [0, 2, 0, 1, 2, 0]
    for i in (0, 2, 5):
        assert tokens[i] == expected[i]
        assert logprobs[i] == expected_logprobs[i]
    assert [tokens[i] for i in (1, 3, 4)] == [0, 0, 0]


def test_operator_declares_what_it_does(implementation, opcheck) -> None:
    batch = Batch(_random_logits("normal", 4, 60), [0.0, 1.0, 0.7, 1.0], top_k=[0, 5, 0, 0], top_p=[1.0, 1.0, 0.9, 1.0])
    opcheck(implementation.sample, batch.arguments())
