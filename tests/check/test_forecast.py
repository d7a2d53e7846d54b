"""Forecasts against hand-made numbers, and the split of measured seconds into levels."""

from __future__ import annotations

import numpy as np
import pytest

from aquiline.bench.records import Record
from aquiline.check.forecast import StepCosts, best_length, costs_of, expected_tokens, forecast, resampled

CURVE = [{"tokens": float(n), "seconds": 0.010 + 0.001 * n} for n in (1, 2, 5, 9)]


def test_expected_tokens() -> None:
    assert expected_tokens([0.5, 0.4], 0) == 1
    assert expected_tokens([0.5, 0.4], 2) == pytest.approx(1 + 0.5 + 0.2)
    assert expected_tokens([0.5, 0.4], 4) == pytest.approx(1 + 0.5 + 0.2 + 0.08 + 0.032), "the last α goes on"


def test_a_forecast_weighs_tokens_against_seconds() -> None:
    costs = StepCosts(CURVE, first=0.002, level=0.001, rest=0.001)
    found = forecast([0.6, 0.5], costs)
    assert costs.step(0) == pytest.approx(0.012) and costs.step(3) == pytest.approx(0.014 + 0.002 + 0.002 + 0.001)
    assert found[0].tokens_per_second == pytest.approx(1 / 0.012)
    assert found[2].tokens_per_second == pytest.approx(1.9 / 0.017)
    assert best_length(found).length == max(range(9), key=lambda k: expected_tokens([0.6, 0.5], k) / costs.step(k))
    assert best_length(forecast([0.01], StepCosts(CURVE, 0.01, 0.01, 0.0))).length == 0, "plain decoding can win"
    assert found[2].low == found[2].high


def test_intervals_come_from_answers_drawn_again() -> None:
    costs = StepCosts(CURVE, 0.002, 0.001, 0.001)
    alike = [np.array([1, 0, 1, 0])] * 6
    assert {tuple(sample) for sample in resampled(alike, [np.ones(4, dtype=np.int64)] * 6)} == {(0.5,)}
    mixed = [np.array([1, 1, 1, 1]), np.array([0, 0, 0, 0])] * 3
    wide = forecast([0.5], costs, resampled(mixed, [np.ones(4, dtype=np.int64)] * 6))[1]
    assert wide.low < wide.tokens_per_second < wide.high


def record(steps: int, nodes: int, **phases: float) -> Record:
    return Record("m", "t", ["1"], 0, 0.0, 1, 0, [3], [[1]], ["length"], 1.0, [0.1], [[]], phases, steps, nodes)


def test_seconds_of_levels_come_from_two_lengths() -> None:
    short = [record(10, 10, draft=0.05, extend=0.01)]
    long = [record(10, 40, draft=0.11, extend=0.01, accept=0.02, commit=0.005, other=0.005, target=9.0, prefill=9.0)]
    costs = costs_of(CURVE, short, long)
    assert (costs.first, costs.level, costs.rest) == (pytest.approx(0.005), pytest.approx(0.002), pytest.approx(0.004))
