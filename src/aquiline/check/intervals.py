"""Acceptance rates with intervals, from counts that are clustered by answer.

Positions of one answer resemble each other, so an answer is the unit that is drawn: rates are ratios of sums over
answers, with Student's t over the answers' residuals. Pure functions; nothing here knows a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rate:
    """A rate with its interval.

    Attributes:
        value: the rate, or a difference of rates.
        low: lower end.
        high: upper end.
        count: trials.
    """

    value: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f}–{self.high:.3f})"


def rate(successes: Sequence[float], trials: Sequence[float], confidence: float = 0.95) -> Rate:
    """Share of successes: the wider of the clustered interval and Wilson's, cut to 0 … 1.

    Args:
        successes: per answer.
        trials: per answer.
        confidence: of the two-sided interval.
    """
    total = float(np.sum(trials))
    if total == 0:
        return Rate(0.0, 0.0, 1.0, 0)
    value, error = ratio(successes, trials)
    reach = student(0.5 + confidence / 2, len(trials) - 1) * error if len(trials) > 1 else 0.0
    low, high = wilson(value, total, confidence)
    return Rate(value, max(0.0, min(low, value - reach)), min(1.0, max(high, value + reach)), int(total))


def ratio(values: Sequence[float], sizes: Sequence[float]) -> tuple[float, float]:
    """Σ values / Σ sizes and its standard error over answers; the error is infinite for a single answer."""
    value, size = np.asarray(values, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    total, count = float(size.sum()), len(size)
    mean = float(value.sum()) / total
    if count < 2:
        return mean, math.inf
    residual = value - mean * size
    return mean, math.sqrt(float((residual**2).sum()) * count / (count - 1)) / total


def difference(gains: Sequence[float], sizes: Sequence[int]) -> Rate:
    """Mean gain per trial of paired answers, with its 95 % interval."""
    value, error = ratio(gains, sizes)
    reach = student(0.975, len(sizes) - 1) * error
    return Rate(value, value - reach, value + reach, sum(sizes))


def wilson(share: float, count: float, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share of `count` independent trials."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    middle, scale = share + z * z / (2 * count), 1 + z * z / count
    reach = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - reach) / scale, (middle + reach) / scale


def student(probability: float, freedom: int) -> float:
    """Quantile of Student's t: the Cornish-Fisher expansion, within 1 % from 8 degrees of freedom on.

    Source: Abramowitz and Stegun, 26.7.5.
    """
    z, v = NormalDist().inv_cdf(probability), float(max(freedom, 1))
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / v ** (i + 1) for i, term in enumerate(terms))


def sign_test(fewer: int, more: int) -> float:
    """Two-sided probability of so uneven a split of `fewer + more` pairs, where either side is equally likely."""
    count, least = fewer + more, min(fewer, more)
    tail = sum(math.comb(count, k) for k in range(least + 1))
    return min(1.0, 2 * tail / (1 << count))


def signed_rank(differences: Sequence[float]) -> float:
    """Wilcoxon's signed-rank test: probability of positive ranks so high where signs are chance; exact, one-sided.

    Zeros are left out; equal sizes share the mean of their ranks.
    """
    kept = np.array([d for d in differences if d], dtype=np.float64)
    size = np.abs(kept)
    # Twice the ranks, which are whole numbers even where ranks are shared.
    ranks = (size[:, None] > size).sum(1) * 2 + (size[:, None] == size).sum(1) + 1
    ways = np.zeros(int(ranks.sum()) + 1)
    ways[0] = 1.0
    for rank in ranks.tolist():
        ways[rank:] = (ways[rank:] + ways[: len(ways) - rank]) / 2
        ways[:rank] /= 2
    return float(ways[int(ranks[kept > 0].sum()) :].sum())


def alphas(accepted: Sequence[npt.NDArray[np.int64]], offered: Sequence[npt.NDArray[np.int64]]) -> list[Rate]:
    """n-α for every n with an offered draft.

    Args:
        accepted: per answer, the accepted drafts of each chain.
        offered: per answer, the depth to which each chain was judged.
    """
    depths = max((int(chain.max()) for chain in offered if len(chain)), default=0)
    return [rate([int((a > n).sum()) for a in accepted], [int((o > n).sum()) for o in offered]) for n in range(depths)]
