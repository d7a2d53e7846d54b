"""Forecasts tokens/s of chains by their length, from acceptance and this machine's measured costs.

    tokens(k)  = 1 + α₀ + α₀α₁ + … + α₀…αₖ₋₁         per forward of the target
    seconds(k) = target(1 + k) + first + (k − 1) · level + rest

Chains are drafted to their full length; a cut of unsure drafts (`chain:4,0.15`) makes them a little faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aquiline.bench.measure import Case, measure
from aquiline.bench.methods import Bed, Method
from aquiline.bench.records import Record
from aquiline.drafters.drafter import Drafter
from aquiline.drafters.trees import Chain
from aquiline.targets.cost import cost_curve, seconds_at

LONGEST = 8
"""Longest chain that is forecast."""

SIZES = (1, 2, 3, 4, 5, 6, 7, 9)
"""Tokens per forward that are timed."""


@dataclass(frozen=True)
class StepCosts:
    """Seconds of the parts of a step.

    Attributes:
        curve: of the target's forward by number of tokens, see `aquiline.targets.cost.cost_curve`.
        first: of the drafter's first level, with what it ingests; 0 for plain decoding.
        level: of each further level.
        rest: of accepting, committing and everything else.
    """

    curve: Sequence[dict[str, float]]
    first: float
    level: float
    rest: float

    def step(self, length: int) -> float:
        """Seconds of a step that drafts a chain of `length`; 0 is plain decoding."""
        drafting = self.first + (length - 1) * self.level if length else 0.0
        return seconds_at(self.curve, 1 + length) + drafting + self.rest


@dataclass(frozen=True)
class Forecast:
    """Expected speed of chains of one length.

    Attributes:
        length: drafted tokens per step; 0 is plain decoding.
        tokens_per_step: τ.
        seconds_per_step: of the whole step.
        low: lower end of tokens/s, from the interval of the acceptance; equal to `high` where it is not known.
        high: upper end.
    """

    length: int
    tokens_per_step: float
    seconds_per_step: float
    low: float
    high: float

    @property
    def tokens_per_second(self) -> float:
        """Expected decoding speed."""
        return self.tokens_per_step / self.seconds_per_step


def expected_tokens(alphas: Sequence[float], length: int) -> float:
    """τ of a chain; depths beyond the given ones accept like the last."""
    known = [*alphas[:length], *[alphas[-1]] * (length - len(alphas))]
    return 1.0 + sum(math.prod(known[: n + 1]) for n in range(length))


def forecast(
    alphas: Sequence[float], costs: StepCosts, samples: Sequence[Sequence[float]] = (), longest: int = LONGEST
) -> list[Forecast]:
    """Forecasts chains of every length up to `longest`.

    Args:
        alphas: n-α for n = 0, 1, …, at least one.
        costs: of a step.
        samples: further draws of `alphas`, such as `resampled` ones, for the interval.
        longest: longest chain.
    """
    found = []
    for length in range(longest + 1):
        tokens, seconds = expected_tokens(alphas, length), costs.step(length)
        drawn = [expected_tokens(sample, length) / seconds for sample in samples] or [tokens / seconds]
        low, high = (float(end) for end in np.percentile(drawn, (2.5, 97.5)))
        found.append(Forecast(length, tokens, seconds, low, high))
    return found


def best_length(forecasts: Sequence[Forecast]) -> Forecast:
    """The fastest; the shorter of equals."""
    return max(forecasts, key=lambda each: (each.tokens_per_second, -each.length))


def resampled(
    accepted: Sequence[npt.NDArray[np.int64]], offered: Sequence[npt.NDArray[np.int64]], draws: int = 500
) -> list[list[float]]:
    """n-α of answers drawn with replacement, for intervals; arguments as `aquiline.check.intervals.alphas`."""
    depths = max((int(chain.max()) for chain in offered if len(chain)), default=0)
    if depths == 0:
        return []
    hits = np.array([[(a > n).sum() for n in range(depths)] for a in accepted])
    tries = np.array([[(o > n).sum() for n in range(depths)] for o in offered])
    # A fixed seed: the same counts give the same interval.
    index = np.random.default_rng(0).integers(len(hits), size=(draws, len(hits)))
    rates = hits[index].sum(1) / np.maximum(tries[index].sum(1), 1)
    return [[float(value) for value in row] for row in rates]


def measure_costs(
    bed: Bed, make: Callable[[Chain], Drafter], cases: Sequence[Case], long: Sequence[Record]
) -> StepCosts:
    """Measures a drafter's costs beside the target's.

    Args:
        bed: the target.
        make: chain → drafter.
        cases: prompts for the runs with chains of 1.
        long: records of longer chains, all of one length.
    """
    curve = cost_curve(bed.target, SIZES, repeats=9)
    short = [measure(bed, Method("chain:1", make(Chain(1)), ""), case) for case in cases]
    return costs_of(curve, short, long)


def costs_of(curve: Sequence[dict[str, float]], short: Sequence[Record], long: Sequence[Record]) -> StepCosts:
    """Splits the drafting seconds of runs with chains of 1 and of longer ones into those of single levels."""
    length = sum(r.nodes for r in long) / max(sum(r.steps for r in long), 1)
    first, all_levels = (_per_step(records, ("draft",)) for records in (short, long))
    level = max(all_levels - first, 0.0) / max(length - 1, 1e-9)
    rest = _per_step(long, ("extend", "accept", "commit", "other"))
    return StepCosts(curve, first, level, rest)


def _per_step(records: Sequence[Record], phases: Sequence[str]) -> float:
    steps = max(sum(record.steps for record in records), 1)
    return sum(record.phases.get(phase, 0.0) for record in records for phase in phases) / steps
