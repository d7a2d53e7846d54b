"""Speculation that switches itself off where it does not pay."""

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
"""Plain steps before drafting is tried again: the first time, and at most."""

FIRST_JUDGED, CHECK_PLAIN, TRIAL = 8, 64, 4
"""Drafted steps before the first judgement (the next ones come after twice as many each), at most
between two judgements, and of a trial after a pause: for one row. Several rows tell as much in fewer
steps, and there a step that does not pay costs more."""

_FEWEST_JUDGED, _FEWEST_TRIED = 3, 2
"""The same for many rows: the first drafted step pays for warming up."""

_WINDOW = 64
"""Drafted steps that the estimate of their yield remembers: texts change."""


@dataclass(eq=False)
class Payoff:
    """What drafted steps yield, and what they cost beside plain ones, for one number of rows.

    A machine's speed drifts by more than what is to be decided, so costs are compared only between
    steps that followed each other: a run of drafted steps and the plain ones right before or after
    it give one ratio, and the median of the last five counts.

    Attributes:
        tokens: mean tokens per row of a drafted step.
        variance: of the same.
        seen: drafted steps that these rest on, at most `_WINDOW`.
        ratios: seconds of drafted steps over seconds of plain ones.
        runs: mean seconds of the last run of drafted (True) and of plain (False) steps.
        last: the kind of the last step.
        warm: kinds of which a step was seen; the first of each pays for warming up.
    """

    tokens: float = 1.0
    variance: float = 0.0
    seen: int = 0
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    runs: dict[bool, float] = field(default_factory=dict)
    last: bool | None = None
    warm: set[bool] = field(default_factory=set)

    def record(self, drafted: bool, seconds: float, tokens: float) -> None:
        """Takes in one step of `seconds` that emitted `tokens` per row."""
        if drafted:
            self.seen = min(self.seen + 1, _WINDOW)
            difference = tokens - self.tokens
            self.tokens += difference / self.seen
            self.variance += (difference * (tokens - self.tokens) - self.variance) / self.seen
        if drafted not in self.warm:
            self.warm.add(drafted)
            return
        if drafted is self.last:
            # A step that was interrupted (another process, a slow consumer) says nothing about its cost.
            usual = self.runs[drafted]
            self.runs[drafted] += (min(seconds, 3 * usual) - usual) / 4
        else:
            if len(self.runs) == 2:
                self.ratios.append(self.runs[True] / self.runs[False])
            self.runs[drafted] = seconds
        self.last = drafted

    def pays(self) -> bool:
        """Whether drafting may still be the faster way: in doubt it is, and few steps leave doubt."""
        if len(self.runs) < 2 or self.seen < 2:
            return True
        doubt = 0.5 * ((self.variance + 0.1) / self.seen) ** 0.5
        return bool(self.tokens + doubt >= median([*self.ratios, self.runs[True] / self.runs[False]]))

    def doubt(self) -> None:
        """Lets what comes next weigh more: after a pause the text is another."""
        self.seen = min(self.seen, FIRST_JUDGED)


@dataclass(eq=False)
class _Choice:
    """What is known and decided for one number of rows: what pays for one need not for another.

    Attributes:
        batch: the number of rows.
        payoff: what was measured.
        drafting: whether steps draft now.
        left: steps of the present kind until the next decision.
        patience: drafted steps between two judgements.
        pause: plain steps before the next trial of drafting.
        checked: the last step was the plain one that a judgement needs.
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
        """Drafted steps before the first judgement."""
        return max(FIRST_JUDGED // self.batch, _FEWEST_JUDGED)

    @property
    def trial(self) -> int:
        """Drafted steps of a trial after a pause."""
        return max(TRIAL // self.batch, _FEWEST_TRIED)

    def decide(self) -> bool:
        """Whether the next step drafts."""
        if False not in self.payoff.warm and self.left <= self.first:
            return False  # once, early: plain's first step pays for warming up, and is not measured
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
    """Per decode state: the inner drafter's state and the step under way.

    Attributes:
        inner: state of the inner drafter.
        began: when the present step's `propose` began, or None between generations.
        speculated: whether that step drafted.
        batch: its number of rows.
    """

    inner: Any
    began: float | None = None
    speculated: bool = True
    batch: int = 0


class Adaptive:
    """Watches what speculation costs and yields, and falls back towards plain decoding.

    Steps are timed where they run. While drafting pays, every 64th step is plain, to know what plain
    costs; while it does not, drafting is tried again for a few steps after 32, 64, … 256 plain ones.
    The output cannot depend on these choices: verification is exact.

    Args:
        inner: the drafter. It takes in every committed position either way.

    Raises:
        ValueError: a drafter that must see every step, or that samples: how long steps take would
            then decide which tokens a seed draws.
    """

    def __init__(self, inner: Drafter) -> None:
        check_wrappable(inner, "adaptive", "leave adaptive=False")
        self.inner, self.needs = inner, inner.needs
        # Speed is a fact about models and machine, so all generations share it.
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
        """A root-only tree while speculation does not pay."""
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
