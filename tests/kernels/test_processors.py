"""`process` and `truncate` of the slot `sample` against transformers' own processors on the same histories."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import generation
from transformers.generation import logits_process

from cbtriton.kernels._jit import INTERPRETED
from cbtriton.kernels._launch import uses_triton
from cbtriton.kernels._processors_reference import BAN, BIAS, FORCE, LARGEST, SUPPRESS

SLOT = "sample"
VOCAB, MAX_LEN, EOS = 203, 60, (4, 9)
OFF = 2**31 - 1


@dataclass(slots=True)
class Row:
    """A request: its history, and its processors under transformers' names."""

    history: list[int]
    prompt_length: int
    options: dict[str, Any] = field(default_factory=dict)

    def rules(self) -> list[tuple[tuple[int, ...], int, int, float]]:
        """Sequence, kind, position, bias."""
        get = self.options.get
        found = [(tuple(sequence), BIAS, -1, bias) for sequence, bias in get("sequence_bias", [])]
        found += [(tuple(sequence), BAN, -1, 0.0) for sequence in get("bad_words_ids", [])]
        found += [((token,), FORCE, position, 0.0) for position, tokens in get("forced", []) for token in tokens]
        found += [((token,), SUPPRESS, -1, 0.0) for token in get("suppress_tokens", [])]
        return found + [((t,), SUPPRESS, self.prompt_length, 0.0) for t in get("begin_suppress_tokens", [])]

    def expected(self, logits: Tensor) -> Tensor:
        """`[V]`: what transformers' processors make of one row, in its order."""
        return self.apply(
            {
                "sequence_bias": lambda v: generation.SequenceBiasLogitsProcessor(v),
                "repetition_penalty": lambda v: generation.RepetitionPenaltyLogitsProcessor(v),
                "additive": lambda v: self.additive_penalties,
                "no_repeat_ngram_size": lambda v: generation.NoRepeatNGramLogitsProcessor(v),
                "bad_words_ids": lambda v: generation.NoBadWordsLogitsProcessor(v, list(EOS)),
                "allowed": lambda v: generation.PrefixConstrainedLogitsProcessor(lambda *_: v, 1),
                "min_length": lambda v: generation.MinLengthLogitsProcessor(v, list(EOS)),
                "forced": lambda v: self.forced,
                "remove_invalid_values": lambda v: generation.InfNanRemoveLogitsProcessor(),
                "decay": lambda v: self.decay,
                "suppress_tokens": lambda v: generation.SuppressTokensLogitsProcessor(v),
                "begin_suppress_tokens": lambda v: generation.SuppressTokensAtBeginLogitsProcessor(
                    v, self.prompt_length
                ),
            },
            logits,
        )

    def truncated(self, scores: Tensor, temperature: float) -> Tensor:
        """`[V]`: `scores` without what transformers' filters remove."""
        filters = {
            "top_h": logits_process.TopHLogitsWarper,
            "top_k": generation.TopKLogitsWarper,
            "top_p": generation.TopPLogitsWarper,
            "min_p": generation.MinPLogitsWarper,
            "typical_p": generation.TypicalLogitsWarper,
            "epsilon_cutoff": generation.EpsilonLogitsWarper,
            "eta_cutoff": generation.EtaLogitsWarper,
        }
        kept = self.apply(filters, (scores / temperature).clamp(-LARGEST, LARGEST))
        return scores.masked_fill(kept == -torch.inf, -torch.inf)

    def apply(self, steps: dict[str, Any], scores: Tensor) -> Tensor:
        scores = scores.float()[None]
        for name, make in steps.items():
            if name in self.options:
                scores = make(self.options[name])(torch.tensor([self.history]), scores)
        return scores[0]

    def additive_penalties(self, _: Tensor, scores: Tensor) -> Tensor:
        """Transformers has none of these."""
        presence, frequency = self.options["additive"]
        scores = scores.clone()
        output = self.history[self.prompt_length :]
        for token in set(output):
            scores[0, token] -= presence + frequency * output.count(token)
        return scores

    def decay(self, ids: Tensor, scores: Tensor) -> Tensor:
        """In transformers scores may grow to inf, which is no number to draw by."""
        grown = generation.ExponentialDecayLengthPenalty(self.options["decay"], list(EOS), self.prompt_length)
        return torch.where(scores.isfinite(), grown(ids, scores).clamp(max=LARGEST), scores)

    def forced(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Forced BOS and EOS differ in the position alone."""
        for position, tokens in self.options["forced"]:
            scores = generation.ForcedEOSTokenLogitsProcessor(position + 1, tokens)(ids, scores)
        return scores


def column(values: list[Any], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def process(implementation: Any, rows: list[Row], logits: Tensor) -> Tensor:
    """Runs `process`; the table's rows are in reverse order, and what lies behind a history is never read."""
    size = len(rows)
    table = torch.full((size, MAX_LEN), -(10**6), dtype=torch.int32)
    rules, prefixes = torch.full((size, 40, 4), -7, dtype=torch.int32), torch.full((size, 90), -7, dtype=torch.int32)
    for row, request in zip(reversed(range(size)), rows, strict=True):
        table[row, : len(request.history)] = column(request.history, torch.int32)
        start = 0
        for i, (sequence, kind, position, bias) in enumerate(request.rules()):
            fields = [sequence[-1], kind + 4 * (len(sequence) - 1), position]
            rules[row, i] = torch.cat([column(fields, torch.int32), column([bias], torch.float32).view(torch.int32)])
            prefixes[row, start : start + len(sequence) - 1] = column(sequence[:-1], torch.int32)
            start += len(sequence) - 1

    def of(name: str, off: Any) -> list[Any]:
        return [request.options.get(name, off) for request in reversed(rows)]

    before = logits.clone()
    scores = implementation.process(
        logits,
        torch.arange(size, dtype=torch.int32).flip(0),
        column([len(request.history) for request in rows], torch.int32),
        table,
        column([request.prompt_length for request in reversed(rows)], torch.int32),
        column(of("repetition_penalty", 1.0), torch.float32),
        column([presence for presence, _ in of("additive", (0, 0))], torch.float32),
        column([frequency for _, frequency in of("additive", (0, 0))], torch.float32),
        column(of("no_repeat_ngram_size", 0), torch.int32),
        column([len(request.options.get("sequence_bias", [])) for request in reversed(rows)], torch.int32),
        column([len(request.rules()) for request in reversed(rows)], torch.int32),
        rules,
        prefixes,
        column([int("allowed" in request.options) for request in reversed(rows)], torch.int32),
        torch.stack([packed(request.options.get("allowed", []), logits.shape[1]) for request in reversed(rows)]),
        column(of("min_length", 0), torch.int32),
        column([[*EOS, -1]] * size, torch.int32),
        column(
            [
                request.prompt_length + request.options["decay"][0] if "decay" in request.options else OFF
                for request in reversed(rows)
            ],
            torch.int32,
        ),
        column([math.log2(factor) for _, factor in of("decay", (0, 1.0))], torch.float32),
        column([int(flag) for flag in of("remove_invalid_values", False)], torch.int32),
    )
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    return scores


def packed(allowed: list[int], vocab_size: int) -> Tensor:
    """A mask's words of 32 bits; bits behind the vocabulary are set."""
    bits = [token in allowed or token >= vocab_size for token in range(-(-vocab_size // 32) * 32)]
    words = [sum(bit << i for i, bit in enumerate(bits[start : start + 32])) for start in range(0, len(bits), 32)]
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def truncate(implementation: Any, rows: list[Row], scores: Tensor, temperatures: list[float]) -> Tensor:
    """Runs `truncate` on a copy, with the columns in reverse order."""
    scores = scores.clone()

    def of(name: str, off: Any) -> list[Any]:
        return [request.options.get(name, off) for request in reversed(rows)]

    offs = {"top_h": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    offs |= {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
    implementation.truncate(
        scores,
        torch.arange(len(rows), dtype=torch.int32).flip(0),
        column(temperatures[::-1], torch.float32),
        column([int(bool(request.options)) for request in reversed(rows)], torch.int32),
        *(column(of(name, off), torch.int32 if name == "top_k" else torch.float32) for name, off in offs.items()),
    )
    return scores


def random_row(chance: random.Random, options: dict[str, Any], length: int | None = None) -> Row:
    """Few different tokens, so that they and their n-grams come again."""
    length = chance.randrange(1, MAX_LEN) if length is None else length
    history = [chance.choice((1, 2, 3, 4, 130, 202)) for _ in range(length)]
    return Row(history, chance.randrange(1, length + 1), options)


def random_logits(size: int, seed: int = 0, vocab_size: int = VOCAB) -> Tensor:
    return 3 * torch.randn(size, vocab_size, generator=torch.Generator().manual_seed(seed))


def assert_scores(scores: Tensor, rows: list[Row], logits: Tensor) -> None:
    assert scores.dtype == torch.float32
    for score, row, x in zip(scores, rows, logits, strict=True):
        expected = row.expected(x)
        allowed = 1e-5 * expected.abs().clamp(min=1)
        assert ((score == expected) | ((score - expected).abs() <= allowed)).all(), row


SEQUENCES = [[[1], 2.5], [[130], -math.inf], [[2, 3], -4.0], [[1, 2, 3], 1.5], [[3, 3, 202], 0.25], [[4, 202], -1.0]]
PROCESSORS = {
    "sequence_bias": SEQUENCES,
    "repetition_penalty": 1.7,
    "additive": (0.7, 0.4),
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[7], [1, 2], [2, 1, 130], [4], [3] * 9],
    "allowed": [0, 1, 4, 31, 32, 63, 64, 130, 201, 202],
    "min_length": 20,
    "forced": [(5, [7])],
    "remove_invalid_values": True,
    "decay": (3, 1.04),
    "suppress_tokens": [0, 5, 202],
    "begin_suppress_tokens": [1, 4],
}


def rows_with(options: dict[str, Any], seed: int, number: int) -> list[Row]:
    chance = random.Random(seed)
    rows = [random_row(chance, dict(options)) for _ in range(number)]
    # The places where something begins or ends: the first output token, histories of one token, forced positions.
    rows += [Row([1, 2, 3], 3, dict(options)), Row([130], 1, dict(options)), Row([1, 2, 3, 1, 2], 2, dict(options))]
    return rows


@pytest.mark.parametrize("name", PROCESSORS)
def test_each_processor_alone_gives_the_scores_of_transformers(implementation, name) -> None:
    options = {name: PROCESSORS[name]}
    rows = rows_with(options, seed=len(name), number=5 if uses_triton(implementation) else 40)
    logits = random_logits(len(rows))
    logits[0, 30:40] = -torch.inf
    if name == "bad_words_ids":
        # An EOS id alone is no bad word; the engine leaves it out of the rules.
        for row in rows:
            row.options[name] = [word for word in row.options[name] if word != [4]]
    if name == "remove_invalid_values":
        logits[1:, 50], logits[1:, 51], logits[1:, 52] = torch.nan, torch.inf, -torch.inf
    assert_scores(process(implementation, rows, logits), rows, logits)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 59, 70])
def test_ngrams_of_every_size_are_those_of_transformers(implementation, size) -> None:
    chance = random.Random(size)
    rows = [random_row(chance, {"no_repeat_ngram_size": size}, length) for length in (1, 2, 4, 17, 58, 59)]
    rows.append(Row([1, 2] * 15, 4, {"no_repeat_ngram_size": size}))
    logits = random_logits(len(rows))
    assert_scores(process(implementation, rows, logits), rows, logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_combinations_side_by_side_give_the_scores_of_transformers(implementation, dtype) -> None:
    chance = random.Random(3)
    rows = []
    for _ in range(10 if uses_triton(implementation) else 150):
        names = [name for name in PROCESSORS if chance.random() < 0.4]
        options = {name: PROCESSORS[name] for name in names} | ({"forced": [(9, [7, 4])]} if "forced" in names else {})
        if "bad_words_ids" in names:
            options["bad_words_ids"] = chance.sample([[7], [1, 2], [2, 1, 130], [3] * 9], 3)
        rows.append(random_row(chance, options))
    logits = random_logits(len(rows)).to(dtype)
    assert_scores(process(implementation, rows, logits), rows, logits)


def random_options(chance: random.Random, tokens: tuple[int, ...], length: int) -> dict[str, Any]:
    """A random combination of processors and filters with random values, for a history of this length."""

    def some(most: int) -> list[int]:
        return chance.sample(tokens, chance.randint(1, most))

    def sequences() -> list[list[int]]:
        return [chance.choices(tokens, k=size) for size in range(1, 2 + chance.randrange(5))]

    choices = {
        "sequence_bias": lambda: [[words, chance.choice((-math.inf, -20.0, 4.0, 9.0))] for words in sequences()],
        "repetition_penalty": lambda: chance.uniform(0.5, 2.0),
        "additive": lambda: (chance.uniform(-2.0, 2.0), chance.uniform(-1.0, 1.0)),
        "no_repeat_ngram_size": lambda: chance.randint(1, 5),
        "bad_words_ids": lambda: [words for words in sequences() if words not in ([token] for token in EOS)] + [[2]],
        "min_length": lambda: chance.randint(1, MAX_LEN),
        "forced": lambda: [(length - chance.randrange(2), [2])],
        "remove_invalid_values": lambda: True,
        "decay": lambda: (chance.randrange(9), chance.uniform(1.0, 1.01)),
        "suppress_tokens": lambda: some(5),
        "begin_suppress_tokens": lambda: some(5),
        "top_h": lambda: chance.uniform(0.1, 1.0),
        "top_k": lambda: chance.choice((1, 5, 50, 2_000)),
        "top_p": lambda: chance.uniform(0.3, 1.0),
        "min_p": lambda: chance.uniform(1e-4, 0.2),
        "typical_p": lambda: chance.uniform(0.2, 1.0),
        "epsilon_cutoff": lambda: chance.uniform(1e-5, 1e-3),
        "eta_cutoff": lambda: chance.uniform(1e-5, 1e-3),
    }
    return {name: value() for name, value in choices.items() if chance.random() < 0.4}


@pytest.mark.parametrize("number", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_random_combinations_of_random_values_give_the_scores_of_transformers(implementation, number) -> None:
    # The interpreter takes most of a minute for a row of the large one.
    vocab_size = 1_003 if uses_triton(implementation) and INTERPRETED else 49_152
    tokens = (0, 1, 4, 9, vocab_size // 3, vocab_size // 2, vocab_size - 2, vocab_size - 1)
    chance, rows = random.Random(11), []
    for _ in range(number):
        length = chance.randrange(1, MAX_LEN)
        prompt_length = chance.choice((length, chance.randint(1, length)))
        rows.append(Row(chance.choices(tokens, k=length), prompt_length, random_options(chance, tokens, length)))
    logits = random_logits(number, seed=3, vocab_size=vocab_size)
    temperatures = [chance.uniform(0.3, 1.8) for _ in rows]
    scores = process(implementation, rows, logits)
    assert_scores(scores, rows, logits)
    kept = truncate(implementation, rows, scores, temperatures)
    for got, row, score, heat in zip(kept, rows, scores, temperatures, strict=True):
        expected = row.truncated(score, heat)
        differ = got != expected
        assert (got[differ] == -torch.inf).logical_xor(expected[differ] == -torch.inf).all()
        # Sums over so many tokens round differently, so one that is on the border may stay or go.
        probs = (score / heat).clamp(-LARGEST, LARGEST).softmax(-1)
        assert probs[differ].sum() < 1e-5, row


def test_tokens_outside_the_vocabulary_have_no_score_and_count_in_ngrams(implementation) -> None:
    rows = [Row([500, 1, 600, 500, 1], 2, {"repetition_penalty": 2.0, "no_repeat_ngram_size": 3, "additive": (1, 1)})]
    logits = random_logits(1)
    expected = logits.clone()
    expected[0, 1] = (expected[0, 1] * 2 if expected[0, 1] < 0 else expected[0, 1] / 2) - 2
    torch.testing.assert_close(process(implementation, rows, logits), expected)


def test_rows_of_logits_may_lie_apart(implementation) -> None:
    rows = rows_with({"repetition_penalty": 1.5, "suppress_tokens": [202]}, seed=2, number=1)
    padded = torch.full((len(rows), VOCAB + 50), torch.nan)
    padded[:, :VOCAB] = random_logits(len(rows))
    assert_scores(process(implementation, rows, padded[:, :VOCAB]), rows, padded[:, :VOCAB])


FILTERS = {
    "top_h": [0.3, 0.7],
    "top_k": [7, 150],
    "top_p": [0.0, 0.4, 0.97],
    "min_p": [0.02, 0.5],
    "typical_p": [0.05, 0.5, 0.95],
    "epsilon_cutoff": [0.001, 0.1],
    "eta_cutoff": [0.002, 0.3],
}


@pytest.mark.parametrize("name", FILTERS)
def test_each_filter_alone_keeps_what_transformers_keeps(implementation, name) -> None:
    rows = [Row([1], 1, {name: value}) for value in FILTERS[name]] * 2
    scores = random_logits(len(rows))
    scores[len(rows) // 2 :] *= 0.1
    temperatures = [0.7 + 0.2 * i for i in range(len(rows))]
    kept = truncate(implementation, rows, scores, temperatures)
    assert (kept == -torch.inf).any(-1)[: len(rows) // 2].all()
    for got, row, score, heat in zip(kept, rows, scores, temperatures, strict=True):
        torch.testing.assert_close(got, row.truncated(score, heat), rtol=0, atol=0, msg=str(row))


def test_random_chains_of_filters_keep_what_transformers_keeps(implementation) -> None:
    chance = random.Random(5)
    number = 8 if uses_triton(implementation) else 200
    rows = []
    for _ in range(number):
        names = [name for name in FILTERS if chance.random() < 0.5]
        rows.append(Row([1], 1, {name: chance.choice(FILTERS[name]) for name in names}))
    scores = random_logits(number, seed=1) * torch.linspace(0.1, 1.5, number)[:, None]
    scores[1::4, ::3] = -torch.inf
    temperatures = [chance.choice((0.5, 1.0, 1.6)) for _ in rows]
    kept = truncate(implementation, rows, scores, temperatures)
    for got, row, score, heat in zip(kept, rows, scores, temperatures, strict=True):
        torch.testing.assert_close(got, row.truncated(score, heat), rtol=0, atol=0, msg=str(row))


def test_of_equal_tokens_top_p_keeps_the_higher_ids_and_top_h_the_lower_ones(implementation) -> None:
    scores = torch.zeros(3, VOCAB)
    scores[:, 11] = 1.0
    rows = [Row([1], 1, {"top_p": 0.5}), Row([1], 1, {"top_h": 0.5}), Row([1], 1, {"typical_p": 0.5})]
    top_p, top_h, typical = (
        (row > -torch.inf).nonzero().flatten().tolist() for row in truncate(implementation, rows, scores, [1.0] * 3)
    )
    mass = math.e + VOCAB - 1
    assert top_p == [11, *range(VOCAB - math.ceil(0.5 * mass - math.e), VOCAB)]
    assert top_h == list(range(len(top_h)))
    assert 11 in top_h
    assert 40 < len(top_h) < 60
    assert typical == [id for id in range(VOCAB) if id != 11]


def test_the_likeliest_of_what_typical_p_keeps_survives_any_cutoff(implementation) -> None:
    """It is not the likeliest token of all."""
    scores = torch.linspace(0, 0.1, VOCAB)[None].repeat(2, 1)
    scores[:, 11] = 2.0
    rows = [Row([1], 1, {"typical_p": 0.5, name: 0.9}) for name in ("epsilon_cutoff", "eta_cutoff")]
    kept = truncate(implementation, rows, scores, [1.0] * 2)
    for got, row, score in zip(kept, rows, scores, strict=True):
        expected = row.truncated(score, 1.0)
        assert expected[11] == -torch.inf
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert (kept[0] > -torch.inf).sum() == 1


def test_a_score_that_the_temperature_makes_infinite_is_the_only_one_left(implementation) -> None:
    scores = random_logits(1)
    scores[0, 7] = LARGEST
    options = {"top_p": 0.9, "typical_p": 0.9, "eta_cutoff": 1e-3}
    kept = truncate(implementation, [Row([1], 1, options)], scores, [0.5])
    assert (kept[0] > -torch.inf).nonzero().flatten().tolist() == [7]


def test_rows_without_a_usable_score_stay_as_they_are(implementation) -> None:
    rows = [Row([1], 1, {"top_h": 0.5, "typical_p": 0.5})] * 4
    scores = random_logits(4)
    scores[0] = -torch.inf
    scores[1, 7], scores[2, 7] = torch.nan, torch.inf
    kept = truncate(implementation, rows, scores, [1.0] * 4)
    torch.testing.assert_close(kept[:3], scores[:3], rtol=0, atol=0, equal_nan=True)
    assert not kept[3].equal(scores[3])


def test_operators_declare_what_they_do(implementation, opcheck) -> None:
    i32, f32 = torch.int32, torch.float32
    index, table = torch.tensor([0, 1], dtype=i32), torch.tensor([[3, 4, 3, 0], [5, 5, 0, 0]], dtype=i32)
    rules = torch.tensor([[[3, 1, -1, 0]], [[6, 0, -1, 2**30]]], dtype=i32)
    opcheck(
        implementation.process,
        (
            random_logits(2),
            index,
            torch.tensor([3, 2], dtype=i32),
            table,
            *(torch.full((2,), value, dtype=dtype) for value, dtype in ((1, i32), (1.5, f32), (0.1, f32), (0.2, f32))),
            torch.full((2,), 2, dtype=i32),
            torch.tensor([0, 1], dtype=i32),
            torch.ones(2, dtype=i32),
            rules,
            torch.zeros(2, 1, dtype=i32),
            torch.tensor([0, 1], dtype=i32),
            torch.full((2, -(-VOCAB // 32)), -2, dtype=i32),
            torch.full((2,), 3, dtype=i32),
            torch.full((2, 1), 4, dtype=i32),
            torch.full((2,), 1, dtype=i32),
            torch.full((2,), 0.1, dtype=f32),
            torch.ones(2, dtype=i32),
        ),
    )
    columns = (
        (1.0, f32),
        (1, i32),
        (0.5, f32),
        (9, i32),
        (0.9, f32),
        (0.01, f32),
        (0.9, f32),
        (1e-3, f32),
        (1e-3, f32),
    )
    opcheck(
        implementation.truncate,
        (random_logits(2), index, *(torch.full((2,), value, dtype=dtype) for value, dtype in columns)),
    )
