"""Sources shaped like services' traffic: distributions against their formulas, structure, and repeatability."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from cbtriton.traffic import MultiTurn, OpenLoop, PrefixTree, Rollouts, Source
from cbtriton.workloads import Lengths, Synthetic, Workload

VOCAB = 1000
SHORT = Synthetic(num_requests=20_000, prompt_lengths=Lengths(1, 1), new_tokens=Lengths(1, 1))


def build(source: Source) -> Workload:
    return source.build(None, VOCAB)


def gaps(workload: Workload) -> list[float]:
    return [later - earlier for earlier, later in pairwise((0.0, *workload.arrival_times))]


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gaps_between_arrivals_have_the_mean_and_the_deviation_of_their_distribution(cv: float) -> None:
    drawn = gaps(build(OpenLoop(SHORT, rate=5.0, coefficient_of_variation=cv)))
    assert statistics.fmean(drawn) == pytest.approx(1 / 5, rel=0.06)
    assert statistics.stdev(drawn) / statistics.fmean(drawn) == pytest.approx(cv, rel=0.06)


def test_a_variation_of_one_is_a_poisson_process_and_of_zero_a_steady_beat() -> None:
    poisson = build(OpenLoop(SHORT, rate=5.0))
    per_second = Counter(map(int, poisson.arrival_times))
    counts = [per_second[second] for second in range(int(poisson.arrival_times[-1]))]
    assert statistics.variance(counts) == pytest.approx(statistics.fmean(counts), rel=0.06)
    beat = build(OpenLoop(replace(SHORT, num_requests=4), rate=5.0, coefficient_of_variation=0))
    assert beat.arrival_times == pytest.approx((0.2, 0.4, 0.6, 0.8))


def test_an_open_loop_changes_nothing_but_the_arrivals_of_its_prompts() -> None:
    prompts = Synthetic(num_requests=5)
    assert replace(build(OpenLoop(prompts, 1.0)), arrival_times=()) == build(prompts)
    with pytest.raises(ValueError, match="those of multi_turn have"):
        build(OpenLoop(MultiTurn(), 1.0))


def test_prompts_of_a_prefix_tree_share_whole_nodes_of_every_level() -> None:
    tree = PrefixTree(num_requests=400, depth=3, branching=2, tokens_per_level=16, prompt_lengths=Lengths(1, 4))
    workload = build(tree)
    for level in range(1, 4):
        assert len({prompt[: 16 * level] for prompt in workload.prompts}) == 2**level
        assert len({prompt[16 * (level - 1) : 16 * level] for prompt in workload.prompts}) == 2**level
    leaves = Counter(prompt[:48] for prompt in workload.prompts)
    assert min(leaves.values()) > 400 / 8 / 2
    assert {len(prompt) for prompt in workload.prompts} == {49, 50, 51, 52}


def test_each_turn_goes_on_from_the_one_before_and_its_answer_and_comes_later() -> None:
    source = MultiTurn(num_conversations=50, num_turns=3, rate=4.0, seconds_between_turns=2.0, system_prompt=10)
    workload = build(source)
    turns = list(zip(workload.prompts, workload.max_new_tokens, workload.arrival_times, strict=True))
    assert len(turns) == 150
    assert len({prompt[:10] for prompt in workload.prompts}) == 1
    waits = []
    firsts = [turn for turn in turns if not any(turn[0][: len(t[0])] == t[0] for t in turns if t is not turn)]
    assert len(firsts) == 50
    for first in firsts:
        conversation = sorted((t for t in turns if t[0][: len(first[0])] == first[0]), key=lambda t: len(t[0]))
        assert len(conversation) == 3
        for (prompt, num_new, arrival), (longer, _, later) in pairwise(conversation):
            assert longer[: len(prompt)] == prompt
            assert 8 <= len(longer) - len(prompt) - num_new <= 64
            assert later > arrival
            waits.append(later - arrival)
    assert statistics.fmean(waits) == pytest.approx(2.0, rel=0.25)
    assert max(first[2] for first in firsts) == pytest.approx(50 / 4.0, rel=0.4)


def test_rollouts_repeat_each_prompt_and_few_of_them_are_long() -> None:
    workload = build(Rollouts(num_prompts=50, num_samples=40))
    assert [len(set(workload.prompts[start : start + 40])) for start in range(0, 2000, 40)] == [1] * 50
    assert len(set(workload.prompts)) == 50
    lengths = sorted(workload.max_new_tokens)
    # The median of a log-normal distribution is its geometric mean; here a twentieth is beyond four times that.
    assert lengths[1000] == pytest.approx((8 * 512) ** 0.5, rel=0.1)
    assert sum(length > 4 * 64 for length in lengths) / 2000 == pytest.approx(0.091, abs=0.03)


@pytest.mark.parametrize("source", [OpenLoop(Synthetic(), 1.0), PrefixTree(), MultiTurn(), Rollouts()])
def test_a_source_depends_on_its_seed_only(source: OpenLoop | PrefixTree | MultiTurn | Rollouts) -> None:
    assert build(source) == build(source)
    assert build(replace(source, seed=1)) != build(source)
    assert all(4 <= token < VOCAB for prompt in build(source).prompts for token in prompt)


def test_numbers_out_of_range_are_refused() -> None:
    for wrong in ({"rate": 0.0}, {"rate": 1.0, "coefficient_of_variation": -1.0}):
        with pytest.raises(ValueError, match="rate must be above 0 and coefficient_of_variation at least 0"):
            OpenLoop(Synthetic(), **wrong)
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        PrefixTree(depth=0)
    with pytest.raises(ValueError, match="num_turns must be at least 1, got 0"):
        MultiTurn(num_turns=0)
    with pytest.raises(ValueError, match=r"seconds_between_turns must be above 0 .* got 2\.0, 0 and 64"):
        MultiTurn(seconds_between_turns=0)
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        Rollouts(num_samples=0)
