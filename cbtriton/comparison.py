"""Whether two sets of repeated measurements differ, or only seem to.

Times and rates vary by a factor rather than by an amount, so everything happens on logarithms: Welch's interval for the
difference of two means, turned back into an interval of the ratio.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

# Student's t, two-sided 95 %, by degrees of freedom; between two entries the larger value, which is the careful one.
_T95 = {
    **dict(enumerate((12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228), start=1)),
    **{12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980},
}


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times larger one figure is than another.

    Attributes:
        value: Ratio of the geometric means.
        low: Lower end of its 95 % confidence interval; None where there are too few repeats for one.
        high: Upper end.
    """

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def is_evidence(self) -> bool:
        """Whether there is an interval, and it does not hold 1."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high

    def verdict(self, more: str, less: str) -> str:
        """A sentence.

        Args:
            more: What a ratio above 1 means, such as `faster`.
            less: What one below 1 means.
        """
        if self.low is None or self.high is None:
            return f"×{self.value:.3f}, and one repeat is no evidence; set measure.repeats=5"
        interval = f"×{self.value:.3f}, 95 % interval {self.low:.3f} to {self.high:.3f}"
        if not self.is_evidence:
            return f"no difference seen ({interval})"
        return f"{more if self.value > 1 else less} ({interval})"


def ratio(before: Sequence[float], after: Sequence[float]) -> Ratio:
    """`after` over `before`, two independent sets of repeats, with Welch's interval on logarithms.

    Args:
        before: Positive figures of the repeats of one setting.
        after: Of the other.

    Raises:
        ValueError: If a set is empty or a figure is not positive.
    """
    first, second = _logarithms(before), _logarithms(after)
    difference = fmean(second) - fmean(first)
    if len(first) < 2 or len(second) < 2:
        return Ratio(math.exp(difference))
    parts = [(variance(logs) / len(logs), len(logs) - 1) for logs in (first, second)]
    total = sum(part for part, _ in parts)
    freedom = total**2 / sum(part**2 / n for part, n in parts) if total else math.inf
    return _interval(difference, total, freedom)


def mean_ratio(ratios: Sequence[float]) -> Ratio:
    """The geometric mean of ratios seen in different settings, with Student's interval on logarithms.

    Args:
        ratios: Positive, one for each setting.

    Raises:
        ValueError: If there is none or one is not positive.
    """
    logs = _logarithms(ratios)
    if len(logs) < 2:
        return Ratio(math.exp(logs[0]))
    return _interval(fmean(logs), variance(logs) / len(logs), len(logs) - 1)


def _interval(mean: float, squared_error: float, freedom: float) -> Ratio:
    known = sorted(_T95)
    half = _T95[known[max(bisect_right(known, freedom), 1) - 1]] * math.sqrt(squared_error)
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def _logarithms(figures: Sequence[float]) -> list[float]:
    if not figures or min(figures) <= 0:
        raise ValueError(f"figures must be positive and at least one, got {list(figures)}")
    return [math.log(figure) for figure in figures]
