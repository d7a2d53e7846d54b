"""Speculation that switches itself off where it does not pay."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from aquiline import tree as trees
from aquiline.drafters.drafter import CopyingDrafter, Drafter, ObservingDrafter
from aquiline.tree import DraftTree


@dataclass
class SpeedEstimate:
    """Running means of what one kind of step costs and yields.

    Attributes:
        seconds: mean seconds of a step.
        tokens: mean tokens that a step emits per row.
        steps: steps seen.
    """

    seconds: float = 0.0
    tokens: float = 1.0
    steps: int = 0

    def update(self, seconds: float, tokens: float) -> None:
        """Takes in one step; old ones fade with a half-life of about 22 steps."""
        self.steps += 1
        weight = max(1 / self.steps, 1 / 32)
        # A step that was interrupted (another process, a slow consumer) says nothing about its cost.
        seconds = min(seconds, 3 * self.seconds) if self.seconds else seconds
        self.seconds += weight * (seconds - self.seconds)
        self.tokens += weight * (tokens - self.tokens)

    @property
    def rate(self) -> float:
        """Tokens per second and row."""
        return self.tokens / self.seconds if self.seconds else 0.0


SHORTEST_PAUSE, LONGEST_PAUSE = 32, 512
"""Plain steps before drafting is tried again: the first time, and at most."""


@dataclass(eq=False)
class _Choice:
    """What is known and decided for one number of rows: what pays for one need not for another.

    Attributes:
        plain: speed of plain steps.
        drafted: speed of steps that drafted.
        drafting: whether steps draft now.
        left: steps until the next decision; the first ones gather estimates.
        pause: plain steps before the next trial of drafting.
    """

    plain: SpeedEstimate = field(default_factory=SpeedEstimate)
    drafted: SpeedEstimate = field(default_factory=SpeedEstimate)
    drafting: bool = True
    left: int = 8
    pause: int = SHORTEST_PAUSE


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

    Steps are timed where they run. While drafting is the faster way, every 64th step is plain, to
    know what plain costs; while plain is faster, drafting is tried again for a few steps after
    32, 64, … 512 plain ones. The output cannot depend on these choices: verification is exact.

    Args:
        inner: the drafter. It takes in every committed position either way.

    Raises:
        ValueError: for a drafter that must see every step.
    """

    PROBE = 4
    CHECK_PLAIN = 64

    def __init__(self, inner: Drafter) -> None:
        if isinstance(inner, ObservingDrafter):
            raise ValueError(f"{type(inner).__name__} must see every step and cannot be adaptive; use it by itself")
        self.inner = inner
        self.features = inner.features
        # Speed is a fact about models and machine, so it is shared by all generations.
        self._choices: dict[int, _Choice] = {}

    def new_state(self, rows: int, capacity: int) -> AdaptiveState:
        """See `Drafter.new_state`."""
        return AdaptiveState(self.inner.new_state(rows, capacity))

    def extend(
        self,
        tokens: Tensor,
        features: Tensor | None,
        num_new: Sequence[int],
        prefixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        state: AdaptiveState,
    ) -> None:
        """See `Drafter.extend`."""
        self.inner.extend(tokens, features, num_new, prefixes, rows, state.inner)
        if state.began is not None:
            emitted = sum(num_new) / max(len(num_new), 1)
            choice = self._choice(state.batch)
            estimate = choice.drafted if state.speculated else choice.plain
            estimate.update(time.perf_counter() - state.began, emitted)
            state.began = None

    def propose(
        self,
        root: Tensor,
        prefixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        state: AdaptiveState,
        max_depth: int | None = None,
    ) -> DraftTree:
        """See `Drafter.propose`; a root-only tree while speculation does not pay."""
        state.speculated, state.batch, state.began = self._decide(len(rows)), len(rows), time.perf_counter()
        if not state.speculated:
            return trees.root_only(root)
        return self.inner.propose(root, prefixes, rows, state.inner, max_depth)

    def reset(self, row: int, length: int, state: AdaptiveState) -> None:
        """See `Drafter.reset`."""
        state.began = None
        self.inner.reset(row, length, state.inner)

    def copy_prefix(self, source: int, target: int, length: int, state: AdaptiveState) -> None:
        """See `CopyingDrafter.copy_prefix`."""
        if isinstance(self.inner, CopyingDrafter):
            self.inner.copy_prefix(source, target, length, state.inner)

    def _choice(self, batch: int) -> _Choice:
        return self._choices.setdefault(batch, _Choice())

    def _decide(self, batch: int) -> bool:
        """Whether the next step drafts."""
        choice = self._choice(batch)
        plain, drafted = choice.plain, choice.drafted
        if plain.steps < 2:
            # The first steps of a batch size also pay for warming up: two plain ones, then drafts.
            return drafted.steps < 2
        choice.left -= 1
        if choice.left > 0:
            return choice.drafting
        if choice.drafting and drafted.steps >= 2 and drafted.rate < plain.rate:
            choice.drafting, choice.left = False, choice.pause
            choice.pause = min(2 * choice.pause, LONGEST_PAUSE)
        elif choice.drafting:
            choice.pause, choice.left = SHORTEST_PAUSE, self.CHECK_PLAIN
            return False
        else:
            choice.drafting, choice.left = True, self.PROBE
        return choice.drafting
