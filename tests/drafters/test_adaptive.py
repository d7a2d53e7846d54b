"""The choice between drafting and plain decoding, for each number of rows by itself."""

from __future__ import annotations

from math import exp
from random import Random

import pytest

from aquiline.drafters import adaptive
from aquiline.drafters.adaptive import Adaptive
from aquiline.drafters.drafter import Committed, Needs, Rows
from aquiline.tree import DraftTree, from_lists
from tests.drafters.loop import rows_of


class Clock:
    """A clock that stands still until it is moved."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(adaptive, "time", made)
    return made


class OneDraft:
    """Drafts one token, so that a drafted step is told from a plain one by its tree."""

    needs = Needs()

    def __init__(self) -> None:
        self.trees = {batch: from_lists([([1, 2], [-1, 0])] * batch) for batch in (1, 5, 8)}

    def new_state(self, slots: int, capacity: int) -> None:
        return None

    def propose(self, rows: Rows, state: None) -> DraftTree:
        return self.trees[len(rows.slots)]

    def extend(self, committed: Committed, state: None) -> None:
        """Takes nothing in."""

    def copy(self, source: int, slot: int, length: int, state: None) -> None:
        """Keeps nothing."""

    def reset(self, slot: int, length: int, state: None) -> None:
        """Keeps nothing."""


def decoded(
    clock: Clock,
    drafter: Adaptive,
    share: float,
    cost: float,
    steps: int,
    *,
    batch: int = 1,
    seed: int = 0,
    noise: float = 0.0,
) -> tuple[float, str]:
    """Tokens a second of `steps` steps, and their kinds.

    A drafted step takes `cost` seconds and emits 1 to 5 tokens, each draft accepted with probability
    `share`; a plain one takes 1 and emits 1; both a row, and counted is the mean of the rows.
    `noise`: spread of the logarithm of the machine's speed.
    """
    random, rows, state = Random(seed), rows_of(*[[1]] * batch), drafter.new_state(batch, 8)
    tokens = seconds = drift = 0.0
    kinds = ""
    for _ in range(steps):
        drafted = drafter.propose(rows, state).size > 1
        emitted = [1] * batch
        for row in range(batch):
            while drafted and emitted[row] < 5 and random.random() < share:
                emitted[row] += 1
        drift = 0.98 * drift + 0.2 * noise * random.gauss(0, 1)
        took = (cost if drafted else 1.0) * exp(drift + noise * random.gauss(0, 1) / 2)
        clock.now += took
        drafter.extend(Committed(rows, None, emitted), state)
        tokens, seconds, kinds = tokens + sum(emitted) / batch, seconds + took, kinds + "-d"[drafted]
    return tokens / seconds, kinds


def test_profitable_drafting_stays_on(clock: Clock) -> None:
    """Acceptance of 0.5 gives 1.94 tokens for 1.3 plain steps, whatever the first steps look like."""
    for seed in range(40):
        _, kinds = decoded(clock, Adaptive(OneDraft()), 0.5, 1.3, 600, seed=seed, noise=0.15)
        assert kinds[200:].count("-") <= 10, f"seed {seed}: {kinds}"


def test_unprofitable_drafting_costs_little(clock: Clock) -> None:
    """Acceptance of 0.1 gives 1.11 tokens for 1.4 plain steps."""
    speeds = [decoded(clock, Adaptive(OneDraft()), 0.1, 1.4, 1000, seed=seed)[0] for seed in range(40)]
    assert min(speeds) >= 0.97
    speeds = [decoded(clock, Adaptive(OneDraft()), 0.0, 1.4, 300, seed=seed)[0] for seed in range(5)]
    assert min(speeds) >= 0.95, "the first 300 tokens include the trial itself"


def test_a_busy_machine_does_not_end_what_pays_in_the_first_answers(clock: Clock) -> None:
    """Acceptance of 0.42 gives 1.70 tokens for 1.35 plain steps, whose times vary by half."""
    shares = []
    for seed in range(40):
        _, kinds = decoded(clock, Adaptive(OneDraft()), 0.42, 1.35, 96, seed=seed, noise=0.5)
        shares.append(kinds.count("d") / len(kinds))
    assert sum(shares) / len(shares) >= 0.85
    assert sum(share < 0.5 for share in shares) <= 4


def test_drafting_unprofitable_for_five_rows_costs_a_short_answer_little(clock: Clock) -> None:
    """Acceptance of 0.5 gives 1.94 tokens, a step of five rows takes 2.3 plain ones; the answer has 128 steps."""
    curve = [{"tokens": n, "seconds": seconds} for n, seconds in ((1, 1.0), (5, 1.0), (10, 2.3))]
    runs = [
        decoded(clock, Adaptive(OneDraft(), curve), 0.5, 2.3, 128, seed=seed, noise=0.05, batch=5) for seed in range(40)
    ]
    assert sum(kinds.count("d") for _, kinds in runs) / len(runs) <= 12
    assert sum(speed for speed, _ in runs) / len(runs) >= 0.965


def test_drafting_profitable_for_five_rows_stays_on(clock: Clock) -> None:
    for seed in range(40):
        _, kinds = decoded(clock, Adaptive(OneDraft()), 0.6, 1.7, 300, seed=seed, noise=0.15, batch=5)
        assert kinds[100:].count("-") <= 10, f"seed {seed}: {kinds}"


def test_a_draw_is_nearly_one(clock: Clock) -> None:
    """Acceptance of 0.23 gives 1.30 tokens for 1.3 to 1.4 plain steps: either way is as good."""
    for cost in (1.3, 1.35, 1.4):
        speeds = [decoded(clock, Adaptive(OneDraft()), 0.23, cost, 1000, seed=seed)[0] for seed in range(40)]
        assert sum(speeds) / len(speeds) >= 0.96


def test_a_text_that_begins_to_pay_is_noticed(clock: Clock) -> None:
    drafter = Adaptive(OneDraft())
    _, kinds = decoded(clock, drafter, 0.05, 1.4, 400)
    assert kinds[-30:].count("d") <= 8
    _, kinds = decoded(clock, drafter, 0.6, 1.4, 1200, seed=1)
    assert kinds[-300:].count("-") <= 8


def test_drafting_unprofitable_for_many_rows_stays_on_for_one(clock: Clock) -> None:
    drafter = Adaptive(OneDraft())
    decoded(clock, drafter, 0.1, 2.0, 100, batch=8)
    decoded(clock, drafter, 0.6, 1.2, 100)
    assert decoded(clock, drafter, 0.1, 2.0, 100, batch=8)[1].count("d") <= 10
    assert decoded(clock, drafter, 0.6, 1.2, 100)[1].count("-") <= 3


def test_drafting_is_tried_again_after_longer_and_longer_pauses(clock: Clock) -> None:
    _, kinds = decoded(clock, Adaptive(OneDraft()), 0.0, 2.0, 700)
    pauses = [len(pause) for pause in kinds.split("d") if len(pause) > 1]
    assert [pause // 64 for pause in pauses[:3]] == [1, 2, 4]
