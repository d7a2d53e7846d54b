"""Drafts what pays: prunes trees by their price, and decodes plainly while drafting costs more than it yields."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from aquiline import tree as trees
from aquiline.drafters.calibration import Calibration, pick_nodes
from aquiline.drafters.drafter import Committed, Drafter, Rows, check_wrappable
from aquiline.drafters.prices import Costs, Prices
from aquiline.tree import DraftTree

CREDIT, TRIAL, MOST = 7.0, 1.5, 24.0
"""For one row, in plain steps: what drafting may lose at first, what in a trial after a pause, and what it may save up
for later texts. Several rows give the same evidence in fewer steps, and a lost step costs more there."""

SHORTEST_PAUSE, LONGEST_PAUSE = 64, 256
"""Plain steps before drafting is tried again: initial value and maximum."""

FIRST_CHECK, CHECK_PLAIN = 8, 64
"""Drafted steps between the plain ones that show what plain decoding costs now: at first, for one row, and at most."""

_WINDOW = 64
"""Drafted steps that the yield and the cost average, because texts change."""


@dataclass(eq=False)
class Account:
    """What drafting has gained over plain decoding; the unit is a plain step.

    Each number of rows has its own, and so have steps in which rows sample: fewer of their drafts are accepted.

    A drafted step gains the tokens of a row less its cost. Whoever judges by the mean of few steps gives up by chance
    what pays; here one unlucky step costs what it lost, and drafting ends when the credit is used up.

    Attributes:
        batch: number of rows.
        balance: what drafting has gained since the last pause, at most `MOST`.
        tokens: mean tokens per row of a drafted step.
        cost: mean cost of one.
        seen: steps that the means count, of which the first four are a guess.
        drafting: whether steps currently draft.
        left: steps of the current kind until the next plain check, or the next trial.
        run: drafted steps between two checks.
        pause: plain steps before the next trial.
        checked: a plain step was timed, without which nothing is saved up.
    """

    batch: int = 1
    balance: float = 0.0
    tokens: float = 1.5
    cost: float = 1.3
    seen: int = 4
    drafting: bool = True
    left: int = 0
    run: int = 0
    pause: int = SHORTEST_PAUSE
    checked: bool = False

    def __post_init__(self) -> None:
        self.run = self.left = max(FIRST_CHECK // self.batch, 2)

    @property
    def credit(self) -> float:
        """What drafting may lose."""
        return CREDIT / self.batch

    def decide(self) -> bool:
        """Returns True if the next step drafts."""
        self.left -= 1
        if self.left >= 0:
            return self.drafting
        if self.drafting:
            self.run = self.left = min(2 * self.run, CHECK_PLAIN)
            self.checked = True
            return False
        self.drafting, self.run, self.left = True, FIRST_CHECK, FIRST_CHECK
        self.balance = TRIAL / self.batch - self.credit
        return True

    def record(self, tokens: float, cost: float) -> None:
        """Records a drafted step."""
        self.seen = min(self.seen + 1, _WINDOW)
        self.tokens += (tokens - self.tokens) / self.seen
        self.cost += (cost - self.cost) / self.seen
        self.balance = min(self.balance + tokens - cost, MOST if self.checked else 0.0)
        if self.balance > 0:
            self.pause = SHORTEST_PAUSE
        if self.balance < -self.credit:
            self.drafting, self.left = False, self.pause
            self.pause = min(2 * self.pause, LONGEST_PAUSE)


@dataclass(eq=False)
class AdaptiveState:
    """The inner drafter's state and the current step.

    Attributes:
        began: start time of the current step's verification, or None between generations.
        spent: seconds of its draft.
        drafted: whether it drafted.
        size: tokens that it verifies, padding included.
    """

    inner: Any
    began: float | None = None
    spent: float = 0.0
    drafted: bool = True
    batch: int = 0
    size: int = 0


class Adaptive:
    """Measures cost and yield of drafting, and drafts what pays.

    Steps are timed in use. While drafting pays, every 64th step is plain, to measure its cost; while
    it does not, drafting is retried for a few steps after 64, 128, 256 plain ones. Verification is
    exact, so these choices never change the output.

    Args:
        inner: the drafter. It receives every committed position in both modes.
        curve: measured seconds by number of tokens, see `Costs`; trees are then pruned to the nodes that pay, and
            drafters know the `Prices`. None: the inner drafter's trees stay as they are.

    Raises:
        ValueError: for a drafter that needs every step, or that samples: step times would then
            influence which tokens a seed draws.
    """

    def __init__(self, inner: Drafter, curve: Sequence[dict[str, float]] | None = None) -> None:
        check_wrappable(inner, "adaptive", "leave adaptive=False")
        self.inner, self.needs, self.prunes = inner, inner.needs, curve is not None
        # Speed depends on models and machine, so all generations share the measurements.
        self._costs, self._calibration = Costs(curve or ()), Calibration()
        self._accounts: dict[tuple[int, bool], Account] = {}
        self._spent: deque[float] = deque(maxlen=15)

    def new_state(self, slots: int, capacity: int) -> AdaptiveState:
        return AdaptiveState(self.inner.new_state(slots, capacity))

    def extend(self, committed: Committed, state: AdaptiveState) -> None:
        if state.began is not None:
            self._costs.record(state.size, time.perf_counter() - state.began)
            if state.drafted:
                self._settle(committed, state)
            state.began = None
        self.inner.extend(committed, state.inner)

    def _settle(self, committed: Committed, state: AdaptiveState) -> None:
        """Books a drafted step."""
        self._calibration.record(committed, self.needs.source)
        self._spent.append(state.spent)
        # The time of an interrupted draft (other processes) is meaningless.
        spent = min(state.spent, 3 * median(self._spent))
        cost = (spent + self._costs.seconds(state.size)) / self._costs.seconds(state.batch)
        self._account(state.batch, committed.rows.sample).record(
            sum(committed.counts) / max(len(committed.counts), 1), cost
        )

    def propose(self, rows: Rows, state: AdaptiveState) -> DraftTree:
        began, batch = time.perf_counter(), len(rows.slots)
        account = self._account(batch, rows.sample)
        state.drafted, state.batch = account.decide(), batch
        tree = self._drafted(rows, state, account) if state.drafted else trees.root_only(rows.roots)
        state.began, state.size = time.perf_counter(), batch * tree.size
        state.spent = state.began - began
        return tree

    def _drafted(self, rows: Rows, state: AdaptiveState, account: Account) -> DraftTree:
        if not self.prunes:
            return self.inner.propose(rows, state.inner)
        rate = max(account.tokens / account.cost, 1.0) * account.batch / self._costs.seconds(account.batch)
        prices = Prices(rate, self._costs, self._calibration.yields(rows.sample))
        tree = self.inner.propose(replace(rows, prices=prices), state.inner)
        if tree.log_probs is None or tree.size == 1:
            return tree
        chances = self._calibration.chances(tree, rows, self.needs.source)
        order = [sorted(range(len(row)), key=row.__getitem__, reverse=True) for row in chances]
        count = prices.nodes([[row[i] for i in best] for row, best in zip(chances, order, strict=True)])
        if count >= tree.size - 1:
            return tree
        return pick_nodes(tree, [sorted(node + 1 for node in best[:count]) for best in order])

    def copy(self, source: int, slot: int, length: int, state: AdaptiveState) -> None:
        self.inner.copy(source, slot, length, state.inner)

    def reset(self, slot: int, length: int, state: AdaptiveState) -> None:
        state.began = None
        self.inner.reset(slot, length, state.inner)

    def _account(self, batch: int, sampled: bool) -> Account:
        return self._accounts.setdefault((batch, sampled), Account(batch))
