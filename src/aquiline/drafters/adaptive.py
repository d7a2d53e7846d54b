"""Switches drafting off while plain decoding is faster."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from aquiline import tree as trees
from aquiline.drafters.drafter import Committed, Drafter, Rows, check_wrappable
from aquiline.tree import DraftTree

SHORTEST_PAUSE, LONGEST_PAUSE = 32, 256
"""Plain steps before drafting is tried again: initial value and maximum."""

FIRST_JUDGED, CHECK_PLAIN, TRIAL = 8, 64, 4
"""For one row: drafted steps before the first judgement (the interval doubles each time), the maximum
interval, and the length of a trial after a pause. Several rows give the same evidence in fewer steps,
and an unprofitable step costs more there."""

_FEWEST_JUDGED, _FEWEST_TRIED = 3, 2
"""The same for many rows; the first drafted step is slow because it warms up."""

_WINDOW = 64
"""Window of the yield estimate in drafted steps, limited because texts change."""


@dataclass(eq=False)
class Payoff:
    """Yield and relative cost of drafted steps, for one number of rows.

    A machine's speed drifts by more than the difference in question, so costs are compared only
    between neighbouring steps: a run of drafted steps and the plain steps next to it give one ratio,
    and the median of the last five counts.

    Attributes:
        tokens: mean tokens per row of a drafted step.
        variance: variance of the same.
        seen: drafted steps that both estimates average, at most `_WINDOW`.
        ratios: seconds of drafted steps over seconds of plain ones.
        runs: mean seconds of the last run of drafted (True) and plain (False) steps.
        warm: kinds that have run at least once; the first step of each kind is slow.
    """

    tokens: float = 1.0
    variance: float = 0.0
    seen: int = 0
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    runs: dict[bool, float] = field(default_factory=dict)
    last: bool | None = None
    warm: set[bool] = field(default_factory=set)

    def record(self, drafted: bool, seconds: float, tokens: float) -> None:
        """Records a step of `seconds` that emitted `tokens` per row."""
        if drafted:
            self.seen = min(self.seen + 1, _WINDOW)
            difference = tokens - self.tokens
            self.tokens += difference / self.seen
            self.variance += (difference * (tokens - self.tokens) - self.variance) / self.seen
        if drafted not in self.warm:
            self.warm.add(drafted)
            return
        if drafted is self.last:
            # The time of an interrupted step (other processes, a slow consumer) is meaningless.
            usual = self.runs[drafted]
            self.runs[drafted] += (min(seconds, 3 * usual) - usual) / 4
        else:
            if len(self.runs) == 2:
                self.ratios.append(self.runs[True] / self.runs[False])
            self.runs[drafted] = seconds
        self.last = drafted

    def pays(self) -> bool:
        """True unless drafting is clearly slower; with few steps it stays uncertain, so True."""
        if len(self.runs) < 2 or self.seen < 2:
            return True
        doubt = 0.5 * ((self.variance + 0.1) / self.seen) ** 0.5
        return bool(self.tokens + doubt >= median([*self.ratios, self.runs[True] / self.runs[False]]))

    def doubt(self) -> None:
        """Gives the next steps more weight, because the text has changed during a pause."""
        self.seen = min(self.seen, FIRST_JUDGED)


@dataclass(eq=False)
class _Choice:
    """Measurements and decision for one number of rows; the best choice depends on the batch size.

    Attributes:
        left: steps of the current kind until the next decision.
        patience: drafted steps between two judgements.
        pause: plain steps before the next trial of drafting.
        checked: whether the last step was the plain step that a judgement needs.
    """

    batch: int = 1
    payoff: Payoff = field(default_factory=Payoff)
    drafting: bool = True
    left: int = 0
    patience: int = 0
    pause: int = SHORTEST_PAUSE
    checked: bool = False

    def __post_init__(self) -> None:
        self.patience = self.first
        self.left = self.first + 1

    @property
    def first(self) -> int:
        """Number of drafted steps before the first judgement."""
        return max(FIRST_JUDGED // self.batch, _FEWEST_JUDGED)

    @property
    def trial(self) -> int:
        """Number of drafted steps in a trial after a pause."""
        return max(TRIAL // self.batch, _FEWEST_TRIED)

    def decide(self) -> bool:
        """Returns True if the next step drafts."""
        if False not in self.payoff.warm and self.left <= self.first:
            return False  # once, early: plain decoding's first step warms up and is not measured
        self.left -= 1
        if self.left > 0:
            return self.drafting
        if not self.drafting:
            self.drafting, self.left = True, self.trial
            self.payoff.doubt()
            return True
        if not self.checked:
            self.checked, self.left = True, 1
            return False
        self.checked = False
        if self.payoff.pays():
            self.patience = min(2 * self.patience, CHECK_PLAIN)
            self.left, self.pause = self.patience, SHORTEST_PAUSE
        else:
            self.drafting, self.left, self.patience = False, self.pause, self.trial
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
        return self.drafting


@dataclass(eq=False)
class AdaptiveState:
    """The inner drafter's state and the current step.

    Attributes:
        began: start time of the current step's `propose`, or None between generations.
    """

    inner: Any
    began: float | None = None
    speculated: bool = True
    batch: int = 0


class Adaptive:
    """Measures cost and yield of drafting, and decodes plainly while drafting does not pay.

    Steps are timed in use. While drafting pays, every 64th step is plain, to measure its cost; while
    it does not, drafting is retried for a few steps after 32, 64, … 256 plain ones. Verification is
    exact, so these choices never change the output.

    Args:
        inner: the drafter. It receives every committed position in both modes.

    Raises:
        ValueError: for a drafter that needs every step, or that samples: step times would then
            influence which tokens a seed draws.
    """

    def __init__(self, inner: Drafter) -> None:
        check_wrappable(inner, "adaptive", "leave adaptive=False")
        self.inner, self.needs = inner, inner.needs
        # Speed depends on models and machine, so all generations share the measurements.
        self._choices: dict[int, _Choice] = {}

    def new_state(self, slots: int, capacity: int) -> AdaptiveState:
        return AdaptiveState(self.inner.new_state(slots, capacity))

    def extend(self, committed: Committed, state: AdaptiveState) -> None:
        self.inner.extend(committed, state.inner)
        if state.began is not None:
            emitted = sum(committed.counts) / max(len(committed.counts), 1)
            seconds = time.perf_counter() - state.began
            self._choice(state.batch).payoff.record(state.speculated, seconds, emitted)
            state.began = None

    def propose(self, rows: Rows, state: AdaptiveState) -> DraftTree:
        batch = len(rows.slots)
        state.speculated, state.batch, state.began = self._choice(batch).decide(), batch, time.perf_counter()
        return self.inner.propose(rows, state.inner) if state.speculated else trees.root_only(rows.roots)

    def copy(self, source: int, slot: int, length: int, state: AdaptiveState) -> None:
        self.inner.copy(source, slot, length, state.inner)

    def reset(self, slot: int, length: int, state: AdaptiveState) -> None:
        state.began = None
        self.inner.reset(slot, length, state.inner)

    def _choice(self, batch: int) -> _Choice:
        return self._choices.setdefault(batch, _Choice(batch))
