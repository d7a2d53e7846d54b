"""The choice between drafting and plain decoding, for each number of rows by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aquiline.drafters.adaptive import Adaptive, _Choice
from aquiline.drafters.drafter import Drafter
from aquiline.drafters.lookahead import Lookahead
from aquiline.drafters.merged import Merged
from aquiline.drafters.prompt_lookup import PromptLookup


def taught(speeds: dict[int, tuple[float, float]]) -> Adaptive:
    """One that has seen 9 steps of each kind: rows → tokens a second of plain and of drafted steps."""
    made = Adaptive(PromptLookup())
    for rows, (plain, drafted) in speeds.items():
        choice = made._choices.setdefault(rows, _Choice())
        for _ in range(9):
            choice.plain.update(1.0, plain)
            choice.drafted.update(1.0, drafted)
    return made


def test_what_does_not_pay_for_many_rows_stays_on_for_one() -> None:
    adaptive = taught({8: (2.0, 1.0), 1: (1.0, 3.0)})
    many = [adaptive._decide(8) for _ in range(40)]
    assert many.count(False) >= 32
    alone = [adaptive._decide(1) for _ in range(40)]
    assert alone.count(False) == 1, "only the step that measures plain decoding"


def test_drafting_is_tried_again_after_longer_and_longer_pauses() -> None:
    adaptive = taught({1: (2.0, 1.0)})
    steps = "".join("d" if adaptive._decide(1) else "-" for _ in range(300))
    pauses = [len(pause) for pause in steps.split("d") if pause]
    assert pauses[:3] == [32, 64, 128]


@pytest.mark.parametrize(
    "make", [Adaptive, lambda inner: Merged(PromptLookup(), inner), lambda inner: Merged(inner, PromptLookup())]
)
def test_a_drafter_with_a_window_is_refused(make: Callable[[Drafter], object]) -> None:
    with pytest.raises(ValueError, match="Lookahead"):
        make(Lookahead())
