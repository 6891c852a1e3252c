"""Comparisons: intervals against formulas and simulated noise, verdicts that say no more than is known."""

from __future__ import annotations

import math
import random

import pytest

from cbtriton.comparison import Ratio, mean_ratio, ratio


def test_the_ratio_is_that_of_the_geometric_means_and_turns_round_with_its_sides() -> None:
    found, back = ratio([1.0, 4.0], [8.0, 8.0, 8.0]), ratio([8.0, 8.0, 8.0], [1.0, 4.0])
    assert found.value == pytest.approx(4.0)
    assert found.low is not None
    assert found.high is not None
    assert (back.low, back.high) == pytest.approx((1 / found.high, 1 / found.low))


def test_the_interval_is_welchs() -> None:
    """Equal spreads and sizes: 2 (n - 1) degrees of freedom, here 4, whose quantile is 2.776."""
    before, after = [math.exp(x) for x in (0.0, 0.1, 0.2)], [math.exp(x) for x in (1.0, 1.1, 1.2)]
    found = ratio(before, after)
    half = 2.776 * math.sqrt(2 * 0.01 / 3)
    assert (found.low, found.high) == pytest.approx((math.exp(1 - half), math.exp(1 + half)))


def test_one_degree_of_freedom_has_the_quantile_of_the_cauchy_distribution() -> None:
    found = mean_ratio([math.exp(0.0), math.exp(0.2)])
    assert found.high == pytest.approx(math.exp(0.1 + math.tan(math.pi * 0.475) * 0.1), rel=1e-4)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 3), (5, 3), (11, 40)])
def test_noise_alone_is_rarely_taken_for_a_difference(sizes: tuple[int, int]) -> None:
    rng = random.Random(0)

    def seen(factor: float) -> float:
        draws = [[rng.lognormvariate(0.0, 0.05) for _ in range(size)] for size in sizes]
        return ratio(draws[0], [factor * x for x in draws[1]]).is_evidence

    wrong = sum(seen(1.0) for _ in range(2000)) / 2000
    assert wrong < 0.065
    assert sum(seen(2.0) for _ in range(200)) / 200 > (0.55 if sizes == (2, 2) else 0.99)


def test_verdicts_say_no_more_than_is_known() -> None:
    assert ratio([10.0], [20.0]).verdict("faster", "slower").startswith("×2.000, and one repeat is no evidence")
    assert not ratio([10.0], [20.0]).is_evidence
    assert Ratio(1.1, 0.9, 1.3).verdict("faster", "slower").startswith("no difference seen (×1.100")
    assert Ratio(1.2, 1.1, 1.3).verdict("faster", "slower").startswith("faster (×1.200, 95 % interval 1.100 to 1.300")
    assert Ratio(0.8, 0.7, 0.9).verdict("faster", "slower").startswith("slower")
    assert not Ratio(1.2, 1.0, 1.4).is_evidence


def test_equal_figures_have_an_interval_without_width() -> None:
    assert ratio([3.0, 3.0], [3.0, 3.0]) == Ratio(1.0, 1.0, 1.0)
    assert mean_ratio([2.0]) == Ratio(2.0)


@pytest.mark.parametrize("figures", [[], [1.0, 0.0]])
def test_figures_that_have_no_logarithm_are_refused(figures: list[float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        ratio([1.0], figures)
