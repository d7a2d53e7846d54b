"""Statistics of the check: against scipy-free references, enumeration and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from aquiline.check.intervals import alphas, rate, sign_test, signed_rank, student, wilson


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [(0.975, 8, 2.306), (0.975, 29, 2.0452), (0.995, 11, 3.1058), (0.9995, 11, 4.437), (0.95, 30, 1.6973)],
)
def test_quantiles_of_students_t(probability: float, freedom: int, value: float) -> None:
    assert student(probability, freedom) == pytest.approx(value, rel=0.01)


def test_wilsons_interval() -> None:
    low, high = wilson(0.5, 10)  # Newcombe (1998): 0.2366 … 0.7634
    assert (low, high) == (pytest.approx(0.2366, abs=1e-4), pytest.approx(0.7634, abs=1e-4))
    assert wilson(0.0, 20)[0] == pytest.approx(0.0, abs=1e-12) and wilson(0.0, 20)[1] > 0.1


def test_signed_ranks_equal_the_enumeration_of_all_signs() -> None:
    given = [0.5, -0.1, 0.3, 0.3, -0.7, 0.2, 0.0]
    sizes = np.abs([d for d in given if d])
    ranks = [float((sizes < s).sum() + ((sizes == s).sum() + 1) / 2) for s in sizes]
    seen = sum(r for r, d in zip(ranks, [d for d in given if d], strict=True) if d > 0)
    sums = [sum(itertools.compress(ranks, signs)) for signs in itertools.product((0, 1), repeat=len(ranks))]
    assert signed_rank(given) == pytest.approx(np.mean([s >= seen for s in sums]))
    assert signed_rank([1.0] * 12) == pytest.approx(2.0**-12)
    assert signed_rank([]) == 1.0 and signed_rank([0.0, 0.0]) == 1.0


def test_a_sign_test_counts_both_tails() -> None:
    assert sign_test(0, 10) == pytest.approx(2 / 2**10)
    assert sign_test(5, 5) == 1.0 and sign_test(0, 0) == 1.0
    assert sign_test(2, 8) == pytest.approx(2 * (1 + 10 + 45) / 2**10)


def test_intervals_cover_clustered_rates() -> None:
    """Answers differ in their own rate: the interval holds the common mean about as often as it says."""
    generator = np.random.default_rng(4)
    covered = 0
    for _ in range(400):
        trials = generator.integers(10, 40, size=20)
        own = generator.beta(4, 4, size=20)
        found = rate(generator.binomial(trials, own).tolist(), trials.tolist())
        covered += found.low <= 0.5 <= found.high
    assert 0.92 <= covered / 400 <= 0.99
    independent = wilson(0.5, 500)
    assert found.high - found.low > independent[1] - independent[0], "clusters widen it"


def test_acceptance_by_depth_counts_judged_chains() -> None:
    accepted, offered = [np.array([0, 2, 1]), np.array([2])], [np.array([1, 2, 2]), np.array([2])]
    first, second = alphas(accepted, offered)
    assert (first.value, first.count) == (pytest.approx(3 / 4), 4)
    assert (second.value, second.count) == (pytest.approx(2 / 3), 3)
    assert alphas([], []) == []
    assert math.isclose(rate([3], [4]).value, 0.75) and rate([0], [0]).count == 0
