"""The choice between drafting and plain decoding, for each number of rows by itself."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from random import Random

import pytest

from aquiline.drafters.adaptive import Adaptive, _Choice
from aquiline.drafters.drafter import Drafter
from aquiline.drafters.lookahead import Lookahead
from aquiline.drafters.lookup import PromptLookup
from aquiline.drafters.mixed import Merged


def decoded(
    choice: _Choice, share: float, cost: float, steps: int, *, seed: int = 0, noise: float = 0.0
) -> tuple[float, str]:
    """Tokens a second of `steps` steps, and their kinds.

    A drafted step takes `cost` seconds and emits 1 to 5 tokens, each draft accepted with probability
    `share`; a plain one takes 1 and emits 1; both a row, and counted is the mean of the rows.
    `noise`: spread of the logarithm of the machine's speed.
    """
    random = Random(seed)
    tokens = seconds = drift = 0.0
    kinds = ""
    for _ in range(steps):
        drafted = choice.decide()
        rows = [1] * choice.batch
        for row in range(choice.batch):
            while drafted and rows[row] < 5 and random.random() < share:
                rows[row] += 1
        emitted = sum(rows) / choice.batch
        drift = 0.98 * drift + 0.2 * noise * random.gauss(0, 1)
        took = (cost if drafted else 1.0) * exp(drift + noise * random.gauss(0, 1) / 2)
        choice.payoff.record(drafted, took, emitted)
        tokens, seconds, kinds = tokens + emitted, seconds + took, kinds + "-d"[drafted]
    return tokens / seconds, kinds


def test_what_pays_stays_on() -> None:
    """Acceptance of 0.5 gives 1.94 tokens for 1.3 plain steps, whatever the first steps look like."""
    for seed in range(40):
        choice = _Choice()
        _, kinds = decoded(choice, 0.5, 1.3, 600, seed=seed, noise=0.15)
        assert kinds[200:].count("-") <= 10, f"seed {seed}: {kinds}"


def test_what_does_not_pay_costs_little() -> None:
    """Acceptance of 0.1 gives 1.11 tokens for 1.4 plain steps."""
    speeds = [decoded(_Choice(), 0.1, 1.4, 1000, seed=seed)[0] for seed in range(40)]
    assert min(speeds) >= 0.97
    speeds = [decoded(_Choice(), 0.0, 1.4, 300, seed=seed)[0] for seed in range(5)]
    assert min(speeds) >= 0.95, "the first 300 tokens include the trial itself"


def test_what_does_not_pay_for_five_rows_costs_a_short_answer_little() -> None:
    """Acceptance of 0.5 gives 1.94 tokens, a step of five rows takes 2.3 plain ones; the answer has 128 steps."""
    runs = [decoded(_Choice(5), 0.5, 2.3, 128, seed=seed, noise=0.05) for seed in range(40)]
    assert sum(kinds.count("d") for _, kinds in runs) / len(runs) <= 12
    assert sum(speed for speed, _ in runs) / len(runs) >= 0.965


def test_what_pays_for_five_rows_stays_on() -> None:
    for seed in range(40):
        _, kinds = decoded(_Choice(5), 0.6, 1.7, 300, seed=seed, noise=0.15)
        assert kinds[100:].count("-") <= 10, f"seed {seed}: {kinds}"


def test_a_draw_is_nearly_one() -> None:
    """Acceptance of 0.23 gives 1.30 tokens for 1.3 to 1.4 plain steps: either way is as good."""
    for cost in (1.3, 1.35, 1.4):
        speeds = [decoded(_Choice(), 0.23, cost, 1000, seed=seed)[0] for seed in range(40)]
        assert sum(speeds) / len(speeds) >= 0.96


def test_a_text_that_begins_to_pay_is_noticed() -> None:
    choice = _Choice()
    _, kinds = decoded(choice, 0.05, 1.4, 400)
    assert kinds[-30:].count("d") <= 8
    _, kinds = decoded(choice, 0.6, 1.4, 1200, seed=1)
    assert kinds[-300:].count("-") <= 8


def test_what_does_not_pay_for_many_rows_stays_on_for_one() -> None:
    adaptive = Adaptive(PromptLookup())
    many, one = adaptive._choice(8), adaptive._choice(1)
    decoded(many, 0.1, 2.0, 100)
    decoded(one, 0.6, 1.2, 100)
    assert decoded(many, 0.1, 2.0, 100)[1].count("d") <= 10
    assert decoded(one, 0.6, 1.2, 100)[1].count("-") <= 3


def test_drafting_is_tried_again_after_longer_and_longer_pauses() -> None:
    _, kinds = decoded(_Choice(), 0.0, 2.0, 500)
    pauses = [len(pause) for pause in kinds.split("d") if len(pause) > 1]
    assert [pause // 32 for pause in pauses[:3]] == [1, 2, 4]


@pytest.mark.parametrize(
    "make", [Adaptive, lambda inner: Merged(PromptLookup(), inner), lambda inner: Merged(inner, PromptLookup())]
)
def test_a_drafter_with_a_window_is_refused(make: Callable[[Drafter], object]) -> None:
    with pytest.raises(ValueError, match="Lookahead"):
        make(Lookahead())
