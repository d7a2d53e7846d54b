"""The gate: only a head that is clearly faster on new conversations, and no slower on the original ones, is served.

Both heads draft on the same texts, by the forward of training, and their acceptance is turned into tokens/s with this
machine's costs. The gain's interval comes from drawing conversations with replacement, the same ones for both heads.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aquiline.bench.measure import Case, measure
from aquiline.bench.methods import Bed, Method
from aquiline.check.forced import Answer, Forced, capture, forced_chains
from aquiline.check.forecast import StepCosts, expected_tokens, forecast, measure_costs, resampled
from aquiline.check.intervals import alphas
from aquiline.check.readings import Reading, as_stored, features_of
from aquiline.checkpoints.open import open_head, stored_eagle
from aquiline.drafters.drafter import Drafter
from aquiline.drafters.trees import Chain
from aquiline.engine.drafting import make_drafter
from aquiline.loading import load
from aquiline.renew.settings import RenewSettings
from aquiline.training.data.dataset import TrainingSet, open_training_set

WORTH, LOSS = 0.01, 0.01
"""Smallest gain on new conversations that is worth a swap, and largest loss on the original ones, of tokens/s."""

FEWEST = 12
"""Held-out conversations below which no head is clearly better."""

MOST = 60
"""Conversations of the original sets that are measured."""

LONGEST = 512
"""Tokens of a conversation that are measured."""

_TIMED = 3
"""Conversations on which the costs of a step are measured."""


@dataclass(frozen=True)
class Gain:
    """Forecast speeds on one kind of text.

    Attributes:
        old: tokens/s of the served head.
        new: of the candidate.
        gain: new over old, less 1.
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
    loaded = load(settings.target, None, dtype=settings.dtype, device=settings.device)
    name = Path(settings.target).name
    bed = Bed(loaded.target, loaded.tokenizer, loaded.engine.end_ids, loaded.target_path, name, {})
    costs = undisturbed(lambda: _costs(bed, old, texts[:_TIMED], settings.depth))
    readings = [as_stored(stored_eagle(open_head(head, bed.target.shape))) for head in (old, new)]
    served = compare(bed, readings, texts, costs, settings.depth)
    kept = compare(bed, readings, spread(original, MOST), costs, settings.depth)
    return decide(served, kept)


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
    bed: Bed, readings: Sequence[Reading], texts: Sequence[tuple[list[int], int]], costs: StepCosts, depth: int
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
        answer: Answer = capture(bed.target, tokens, prompt_length, names)
        if answer.starts:
            for reading, found in zip(readings, chains, strict=True):
                found += forced_chains(reading, [answer], bed.target, depth)
    if not chains[0]:
        return None
    counts = [([c.accepted for c in found], [c.offered for c in found]) for found in chains]
    rates = [tuple(rate.value for rate in alphas(*each)) for each in counts]
    old, new = (forecast(each, costs, longest=depth)[depth].tokens_per_second for each in rates)
    # The draws of both heads begin with one seed: they are of the same conversations.
    pairs = zip(*(resampled(*each) for each in counts), strict=True)
    gains = [expected_tokens(theirs, depth) / expected_tokens(mine, depth) - 1 for mine, theirs in pairs]
    low, high = (float(end) for end in np.percentile(gains, (2.5, 97.5)))
    return Gain(old, new, new / old - 1, low, high, rates[0], rates[1], len(chains[0]))


def _texts(sets: Sequence[TrainingSet]) -> Iterator[tuple[list[int], int]]:
    """Conversations up to the end of their first answer, and the length of the prompt before it."""
    for data in sets:
        for each in data:
            said = each.loss_mask[:LONGEST].nonzero()[0]
            if len(said) and said[0]:
                silent = (~each.loss_mask[said[0] : LONGEST]).nonzero()[0]
                end = int(said[0]) + int(silent[0]) if len(silent) else LONGEST
                yield each.input_ids[:end].tolist(), int(said[0])


def spread(texts: Sequence[tuple[list[int], int]], count: int) -> list[tuple[list[int], int]]:
    """At most `count` texts, evenly spread."""
    kept = min(count, len(texts))
    return [texts[i * len(texts) // kept] for i in range(kept)]


def _costs(bed: Bed, head: Path, texts: Sequence[tuple[list[int], int]], depth: int) -> StepCosts:
    def make(chain: Chain) -> Drafter:
        drafter = make_drafter(head, chain, bed.target, None).drafter
        assert drafter is not None
        return drafter

    cases = [Case("served", (str(i),), 0, (tuple(t[:n]),), 0.0, 32) for i, (t, n) in enumerate(texts)]
    long = [measure(bed, Method("long", make(Chain(depth)), ""), case) for case in cases]
    return measure_costs(bed, make, cases, long)


def undisturbed(measured: Callable[[], StepCosts]) -> StepCosts:
    """Measures again until no pause came in between, at most five times: a paused process times the pause."""
    pauses = 0

    def count(number: int, frame: object) -> None:
        nonlocal pauses
        pauses += 1

    before = signal.signal(signal.SIGCONT, count)
    try:
        for _ in range(5):
            start = pauses
            found = measured()
            if pauses == start:
                break
    finally:
        signal.signal(signal.SIGCONT, before)
    return found
