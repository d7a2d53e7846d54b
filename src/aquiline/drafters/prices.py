"""The price of a draft: what its verification costs on this machine, in tokens that the time would have made.

A step of n tokens takes t(n) seconds and drafting a level takes d. Text grows by r tokens a second. So a draft pays if
its chance to be accepted exceeds r times the seconds that it adds, and the drafts that maximise
expected tokens - r · seconds also maximise tokens a second, with r their own speed (Dinkelbach 1967).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

_KNOTS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of tokens whose cost is learned; it is linear between them and beyond the last."""

_SIZES = np.arange(_KNOTS[-1] + 1.0)

_SLOPE = 0.06
"""Cost of a further token where nothing was measured, as a share of the first."""

_RECENT = 15
"""Steps that tell how fast the machine is now."""

_TRUST = 4
"""Steps that a measured curve counts as."""


class Costs:
    """Seconds of a verifying step by its number of tokens.

    The shape of the curve and the speed of the machine are learned apart: other processes slow all steps alike, often
    by more than the difference between two sizes. The median of recent steps, each divided by the curve, is the
    speed; what a step deviates from it corrects the curve at its size.

    Args:
        curve: measured ``{"tokens": n, "seconds": s}``, at least two from n = 1 up; see `aquiline.targets.cost`.
            Empty: a line.
    """

    def __init__(self, curve: Sequence[dict[str, float]] = ()) -> None:
        sizes = [int(point["tokens"]) for point in curve] or [1, 2]
        values = [point["seconds"] / curve[0]["seconds"] for point in curve] or [1, 1 + _SLOPE]
        self._shape = [_interpolated(sizes, values, knot) for knot in _KNOTS]
        self._seen = [_TRUST if curve else 0] * len(_KNOTS)
        self._unit = curve[0]["seconds"] if curve else 1.0
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._curve: list[float] = []  # by tokens up to the last knot; empty: not computed since it changed

    def seconds(self, tokens: int) -> float:
        """Returns the seconds of a step of `tokens`, rows times their padded trees, at the machine's present speed."""
        return self._unit * self._relative(tokens)

    def record(self, tokens: int, seconds: float) -> None:
        """Learns from a step."""
        if len(self._recent) >= 2:
            self._correct(tokens, seconds / self.seconds(tokens))
        self._recent.append(seconds / self._relative(tokens))
        self._unit = median(self._recent)

    def _correct(self, tokens: int, ratio: float) -> None:
        knot = min(bisect_left(_KNOTS, tokens), len(_KNOTS) - 1)
        self._seen[knot] += 1
        factor = min(max(ratio, 0.5), 2.0) ** max(1 / self._seen[knot], 0.05)
        last = max(i for i, seen in enumerate(self._seen) if seen)
        # Larger sizes that were never seen move along.
        for i in range(knot, len(_KNOTS) if knot == last else knot + 1):
            self._shape[i] *= factor
        self._curve = []

    def _relative(self, tokens: int) -> float:
        if not self._curve:
            self._curve = np.interp(_SIZES, _KNOTS, self._shape).tolist()
        return self._curve[tokens] if tokens < len(self._curve) else _interpolated(_KNOTS, self._shape, tokens)


def _interpolated(sizes: Sequence[int], values: Sequence[float], at: int) -> float:
    """Reads a curve of at least two points between them, or beyond by its last slope."""
    right = min(max(bisect_left(sizes, at), 1), len(sizes) - 1)
    left = right - 1
    return values[left] + (values[right] - values[left]) * (at - sizes[left]) / (sizes[right] - sizes[left])


@dataclass(frozen=True, eq=False)
class Prices:
    """The prices of a step.

    Attributes:
        rate: tokens of all rows per second, > 0, that drafts must outdo.
        costs: seconds of the verifying step.
        yields: by level from the first, how often its likeliest draft is accepted if its parent was.
    """

    rate: float
    costs: Costs
    yields: Sequence[float]

    def floors(self, rows: int, depth: int, level: float) -> list[float]:
        """Returns by level the probability of its likeliest drafts, summed over rows, from which the next level pays.

        Args:
            rows: B.
            depth: levels, ≥ 1.
            level: seconds of drafting a level.
        """
        base, found = self.costs.seconds(rows), []
        for below in range(1, depth + 1):
            node = (self.costs.seconds(rows * (below + 2)) - base) / (below + 1)
            found.append(self.rate * (level + node) / self.yields[min(below, len(self.yields) - 1)])
        return found

    def nodes(self, chances: Sequence[Sequence[float]]) -> int:
        """Returns how many drafts of each row pay; trees are padded, so all rows have the same number.

        Args:
            chances: per row, the drafts' chances to be accepted, best first.
        """
        rows, best, gain = len(chances), (-math.inf, 0), 0.0
        for count in range(max(map(len, chances)) + 1):
            gain += sum(row[count - 1] for row in chances if 0 < count <= len(row))
            best = max(best, (gain - self.rate * self.costs.seconds(rows * (1 + count)), -count))
        return -best[1]
