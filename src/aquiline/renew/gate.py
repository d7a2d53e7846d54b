"""The gate: only a head that is clearly faster on new conversations, and no slower on the original ones, is served.

Both heads draft on the same texts, by the forward of training. They have the same sizes, so a step costs the same with
either, and the ratio of their forecast tokens/s is that of their tokens per step. Its interval comes from drawing
conversations with replacement, the same ones for both heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aquiline.bench.tasks import spread
from aquiline.check.forced import Forced, Ints, capture, forced_chains
from aquiline.check.forecast import expected_tokens, resampled
from aquiline.check.intervals import alphas
from aquiline.check.readings import Reading, as_stored, features_of
from aquiline.checkpoints.open import open_head, stored_eagle
from aquiline.loading import load
from aquiline.renew.settings import LONGEST, RenewSettings
from aquiline.targets.target import Target
from aquiline.training.data.dataset import TrainingSet, open_training_set

WORTH, LOSS = 0.01, 0.01
"""Smallest gain on new conversations that is worth a swap, and largest loss on the original ones, of tokens/s."""

FEWEST = 12
"""Held-out conversations below which no head is clearly better."""

MOST = 60
"""Conversations of the original sets that are measured."""


Chains = tuple[Sequence[Ints], Sequence[Ints]]
"""Per text, the accepted and the judged drafts of each chain."""


@dataclass(frozen=True)
class Gain:
    """Speeds on one kind of text.

    Attributes:
        old: tokens per step with the served head.
        new: with the candidate.
        gain: of tokens/s, new over old, less 1.
        low: lower end of its 95 % interval.
        high: upper end.
        old_alphas: n-α of the served head.
        new_alphas: of the candidate.
        conversations: that were measured.
    """

    old: float
    new: float
    gain: float
    low: float
    high: float
    old_alphas: tuple[float, ...]
    new_alphas: tuple[float, ...]
    conversations: int


@dataclass(frozen=True)
class Verdict:
    """What the gate decided.

    Attributes:
        better: the candidate is to be served.
        reason: why, or why not.
        served: gain on held-out served conversations; None where there were too few.
        original: gain on the validation splits of the original sets; None where they hold nothing.
    """

    better: bool
    reason: str
    served: Gain | None = None
    original: Gain | None = None


def judge(settings: RenewSettings, old: Path, new: Path, held_out: Path) -> Verdict:
    """Compares a candidate with the served head.

    Args:
        old: folder of the served head.
        new: folder of the candidate.
        held_out: training set whose validation split is the newest conversations.
    """
    texts = list(_texts([open_training_set(held_out, split="validation")]))
    if len(texts) < FEWEST:
        return Verdict(False, f"{len(texts)} held-out conversations; {FEWEST} are needed")
    original = list(_texts([open_training_set(path, split="validation") for path in settings.data]))
    target = load(settings.target, None, dtype=settings.dtype, device=settings.device).target
    readings = [as_stored(stored_eagle(open_head(head, target.shape))) for head in (old, new)]
    served = compare(target, readings, texts, settings.depth)
    return decide(served, compare(target, readings, spread(original, MOST), settings.depth))


def decide(served: Gain | None, original: Gain | None) -> Verdict:
    """Serves the candidate if it is clearly better on served conversations and no worse on the original ones."""
    if served is None:
        return Verdict(False, "no held-out answer could be measured", served, original)
    figures = f"{served.gain:+.1%} ({served.low:+.1%} … {served.high:+.1%}) tokens/s on held-out conversations"
    if served.low <= 0 or served.gain < WORTH:
        return Verdict(False, f"not clearly better: {figures}", served, original)
    if original is not None and original.gain < -LOSS:
        lost = f"{original.gain:+.1%} ({original.low:+.1%} … {original.high:+.1%}) on the original data"
        return Verdict(False, f"worse elsewhere: {lost}", served, original)
    return Verdict(True, f"better: {figures}", served, original)


def compare(
    target: Target, readings: Sequence[Reading], texts: Sequence[tuple[list[int], int]], depth: int
) -> Gain | None:
    """Forecasts both heads on the same texts.

    Args:
        readings: the served head and the candidate.
        texts: tokens and the prompt's length.
        depth: length of the chains.

    Returns:
        None if no text holds a draft to judge.
    """
    names = features_of(list(readings))
    chains: list[list[Forced]] = [[], []]
    for tokens, prompt_length in texts:
        answer = capture(target, tokens, prompt_length, names)
        if answer.starts:
            for reading, found in zip(readings, chains, strict=True):
                found += forced_chains(reading, [answer], target, depth)
    if not chains[0]:
        return None
    old, new = (([c.accepted for c in found], [c.offered for c in found]) for found in chains)
    return gain(old, new, depth)


def gain(old: Chains, new: Chains, depth: int) -> Gain:
    """Forecasts two heads of the same sizes from their chains on the same texts.

    Args:
        old: of the served head: per text, accepted and judged drafts of each chain.
        new: of the candidate.
        depth: length of the chains that the engine drafts.
    """
    rates = [tuple(rate.value for rate in alphas(*each)) for each in (old, new)]
    before, after = (expected_tokens(each, depth) for each in rates)
    # The draws of both heads begin with one seed: they are of the same texts.
    pairs = zip(resampled(*old), resampled(*new), strict=True)
    gains = [expected_tokens(theirs, depth) / expected_tokens(mine, depth) - 1 for mine, theirs in pairs]
    low, high = (float(end) for end in np.percentile(gains, (2.5, 97.5)))
    return Gain(before, after, after / before - 1, low, high, rates[0], rates[1], len(old[0]))


def _texts(sets: Sequence[TrainingSet]) -> Iterator[tuple[list[int], int]]:
    """Conversations up to the end of their first answer, and the length of the prompt before it."""
    for data in sets:
        for each in data:
            said = each.loss_mask[:LONGEST].nonzero()[0]
            if len(said) and said[0]:
                silent = (~each.loss_mask[said[0] : LONGEST]).nonzero()[0]
                end = int(said[0]) + int(silent[0]) if len(silent) else LONGEST
                yield each.input_ids[:end].tolist(), int(said[0])
