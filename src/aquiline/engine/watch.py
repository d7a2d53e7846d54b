"""Watches acceptance in use: a running rate for each method and position, and an alarm when one falls.

The detector is a one-sided Page-Hinkley test (Page 1954; Hinkley 1971) on shares of `BLOCK` judged drafts. A share is
standardised with the mean and the deviation of all earlier ones, because drafts of one answer resemble each other:
blocks vary by several times what independent drafts would.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from aquiline.stats import Judged

logger = logging.getLogger("aquiline")

WINDOW = 1024
"""Judged drafts that a running rate averages over, exponentially weighted."""

BLOCK = 512
"""Judged drafts of a block, about three answers: fewer, and single answers look like changes."""

LEAST = 16
"""Blocks that must have set the standard before one is compared with it."""

SLACK, THRESHOLD = 0.75, 10.0
"""Standard deviations that a block may lie below the mean at no charge, and the sum of charges that is an alarm.

In simulations of steady traffic there is less than one alarm in a million judged drafts, and there are no more judged
drafts than emitted tokens. A fall of 0-α from 0.56 to 0.35 is found within 8,000 judged drafts in 95 % of the runs
(`tests/engine/test_watch.py`)."""


@dataclass(frozen=True)
class Alarm:
    """Acceptance fell.

    Attributes:
        method: what drafts ("head", "lookup", …).
        position: n of the n-α that fell: drafts at depth n + 1.
        before: mean until then.
        now: running rate at the alarm.
        judged: drafts of this method and position judged until then.
        time: seconds since the epoch.
    """

    method: str
    position: int
    before: float
    now: float
    judged: int
    time: float


@dataclass(eq=False)
class Series:
    """Acceptance of one method at one position."""

    rate: float = 0.0
    judged: int = 0
    accepted: int = 0  # in the present block
    size: int = 0  # of the present block
    blocks: int = 0
    mean: float = 0.0
    squares: float = 0.0
    charge: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=2 * LEAST))

    def add(self, accepted: bool) -> bool:
        """Counts a draft; True if it completes a block that raises the alarm."""
        self.judged += 1
        self.rate += (accepted - self.rate) / min(self.judged, WINDOW)
        self.accepted += accepted
        self.size += 1
        if self.size < BLOCK:
            return False
        share, self.size, self.accepted = self.accepted / BLOCK, 0, 0
        return self.compare(share)

    def compare(self, share: float) -> bool:
        """Takes the accepted share of a block; True if it raises the alarm."""
        if self.blocks >= LEAST:
            # Never less than independent drafts would vary.
            variance = max(self.squares / (self.blocks - 1), max(self.mean * (1 - self.mean), 0.01) / BLOCK)
            self.charge = max(0.0, self.charge + (self.mean - share) / math.sqrt(variance) - SLACK)
            if self.charge > THRESHOLD:
                return True
        self.recent.append(share)
        self._learn(share)
        return False

    def _learn(self, share: float) -> None:
        self.blocks += 1
        difference = share - self.mean
        self.mean += difference / self.blocks
        self.squares += difference * (share - self.mean)

    def restart(self, recent: bool = False) -> None:
        """Sets a new standard, from the blocks to come, or from the last ones."""
        self.blocks, self.mean, self.squares, self.charge = 0, 0.0, 0.0, 0.0
        for share in self.recent if recent else ():
            self._learn(share)


@dataclass(eq=False)
class Watch:
    """Acceptance of all requests of an engine.

    Attributes:
        alarms: the last 100; after an alarm, a new standard is set.
        raised: method → alarms so far.
    """

    alarms: deque[Alarm] = field(default_factory=lambda: deque(maxlen=100))
    raised: dict[str, int] = field(default_factory=dict)
    _series: dict[str, list[Series]] = field(default_factory=dict)

    def record(self, judged: Sequence[Judged]) -> None:
        """Counts the drafts that a step judged in one row, by depth."""
        for position, (method, accepted) in enumerate(judged):
            series = self._series.setdefault(method, [])
            series += [Series() for _ in range(position + 1 - len(series))]
            if series[position].add(accepted):
                self._raise(method, position, series[position])

    def _raise(self, method: str, position: int, series: Series) -> None:
        alarm = Alarm(method, position, series.mean, series.rate, series.judged, time.time())
        self.alarms.append(alarm)
        self.raised[method] = self.raised.get(method, 0) + 1
        series.restart()
        logger.warning(
            "%d-α of %s drafts fell from %.3f to %.3f: the texts have changed, or the draft no longer fits the target",
            position,
            method,
            alarm.before,
            alarm.now,
        )

    def expect_recent(self, method: str) -> None:
        """Measures a method from here on against its last blocks, as before another head takes over."""
        for series in self._series.get(method, []):
            series.restart(recent=True)

    def judged(self, method: str) -> int:
        """First drafts of a method that were judged so far."""
        return next((series.judged for series in self._series.get(method, [])), 0)

    @property
    def rates(self) -> dict[str, list[float]]:
        """Method → running n-α for n = 0, 1, …."""
        return {method: [each.rate for each in series] for method, series in list(self._series.items())}
