"""Finds the reading under which a head accepts clearly more than as its files say.

Every reading drafts on the same answers, so readings are compared answer by answer. Two figures are compared: drafts
accepted per start of a chain, and the overlap of the drafts' distributions with the target's, which tells small
mistakes from chance with fewer answers. A reading is named if

- either figure is higher on more answers than chance explains: Wilcoxon's signed-rank test, one-sided, at `ERROR`
  divided by the number of comparisons (Bonferroni), so that a head for which no reading is better is accused of
  anything with a probability of at most `ERROR`;
- and it accepts at least `WORTH` more tokens per forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aquiline.check.forced import Answer, Forced, forced_chains
from aquiline.check.intervals import Rate, difference, ratio, signed_rank
from aquiline.check.readings import Reading
from aquiline.targets.target import Target

DEPTHS = 3
"""Depth of the compared chains: a wrong feedback shows from depth 2 on."""

ERROR = 0.01
"""Probability of accusing a good head, at most."""

WORTH = 0.005
"""Gain in tokens per forward that is worth naming."""

LEAST = 12
"""Answers below which no reading could be named, even if it were better on each of them."""


@dataclass(frozen=True, eq=False)
class Compared:
    """A reading against that of the files.

    Attributes:
        reading: the reading.
        accepted: drafts accepted per start of a chain of `DEPTHS`.
        gain: of them, over the files' reading, with its 95 % interval.
        overlap_gain: mean overlap of the draft's and the target's distributions, over the files' reading; as `gain`.
        chance: probability of the clearer of the two gains if signs were chance, times the number of comparisons.
        answers: that it was compared on: all, or a third if it was clearly worse there.
        clear: whether it is named.
    """

    reading: Reading
    accepted: float
    gain: Rate
    overlap_gain: Rate
    chance: float
    answers: int
    clear: bool


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """Readings, the best one first.

    Attributes:
        accepted: drafts accepted per start as the files say.
        compared: the others.
    """

    accepted: float
    compared: tuple[Compared, ...]

    @property
    def named(self) -> Compared | None:
        """The clear reading that comes closest to the target's distributions."""
        return next((each for each in self.compared if each.clear), None)


def diagnose(
    base: Reading,
    readings: Sequence[Reading],
    answers: Sequence[Answer],
    target: Target,
    advance: Callable[[int], None] = lambda done: None,
) -> Diagnosis:
    """Compares readings; those that are clearly worse on a third of the answers are left there.

    Args:
        base: as the files say.
        readings: the others.
        answers: at least `LEAST`.
        target: the target.
        advance: told how many readings were compared.
    """
    usable = [answer for answer in answers if answer.starts]
    usual = forced_chains(base, usable, target, DEPTHS)
    few = usable[: max(LEAST, len(usable) // 3)]
    compared = []
    for reading in readings:
        found = forced_chains(reading, few, target, DEPTHS)
        if not _worse(found, usual[: len(few)]) and len(few) < len(usable):
            found += forced_chains(reading, usable[len(few) :], target, DEPTHS)
        compared.append(_compare(reading, found, usual[: len(found)], 2 * len(readings)))
        advance(len(compared))
    order = sorted(compared, key=lambda each: (-each.clear, -each.overlap_gain.value))
    return Diagnosis(ratio(_accepted(usual), _starts(usual))[0], tuple(order))


def _compare(reading: Reading, found: Sequence[Forced], usual: Sequence[Forced], comparisons: int) -> Compared:
    starts, before = _starts(found), ratio(_accepted(usual), _starts(usual))[0]
    gains = [f - u for f, u in zip(_accepted(found), _accepted(usual), strict=True)]
    closer = [(f.overlap - u.overlap) / DEPTHS for f, u in zip(found, usual, strict=True)]
    chance = min(1.0, comparisons * min(signed_rank(gains), signed_rank(closer)))
    more, shared = difference(gains, starts), difference(closer, starts)
    clear = chance < ERROR and more.value / (1 + before) >= WORTH
    return Compared(reading, before + more.value, more, shared, chance, len(found), clear)


def _worse(found: Sequence[Forced], usual: Sequence[Forced]) -> bool:
    """Whether both figures lie more than a standard error below the files' reading."""
    gains = [f - u for f, u in zip(_accepted(found), _accepted(usual), strict=True)]
    closer = [f.overlap - u.overlap for f, u in zip(found, usual, strict=True)]
    pairs = (ratio(differences, _starts(found)) for differences in (gains, closer))
    return all(value < -error for value, error in pairs)


def _accepted(chains: Sequence[Forced]) -> list[float]:
    return [float(each.accepted.sum()) for each in chains]


def _starts(chains: Sequence[Forced]) -> list[int]:
    return [len(each.accepted) for each in chains]
