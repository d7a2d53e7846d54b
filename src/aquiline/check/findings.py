"""Judges a check's figures: what makes it fail, and what is worth a note."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aquiline.bench.methods import Bed
from aquiline.check.card import Promise
from aquiline.check.diagnosis import DEPTHS, ERROR, LEAST, Diagnosis
from aquiline.check.intervals import Rate
from aquiline.check.readings import moved_tokens
from aquiline.check.report import Finding, Steps
from aquiline.check.template import OtherTemplate
from aquiline.checkpoints.open import Head, trained_for

USELESS = 0.1
"""A head whose 0-α surely lies below this drafts nothing worth a forward."""

BELOW_CARD = 0.5
"""A 0-α that surely lies below this share of the lowest one in the card is not explained by other texts."""

DISAGREEMENT = 0.02
"""Share of steps by which engine and training may differ to one side."""


def reading_findings(diagnosis: Diagnosis | None) -> Iterator[Finding]:
    """The reading that accepts clearly more, with its remedy; a note where too few answers were there to tell."""
    if diagnosis is None:
        text = f"fewer than {LEAST} answers: no other reading of the head was tried; give more prompts"
        yield Finding(False, text)
        return
    named = diagnosis.named
    if named is None:
        return
    gain, shared = named.gain, named.overlap_gain
    yield Finding(
        True,
        f"read with {named.reading.name}, the head accepts {named.accepted:.3f} drafts per chain of {DEPTHS}, not "
        f"{diagnosis.accepted:.3f} ({gain.value:+.3f}, 95 % interval {gain.low:+.3f} … {gain.high:+.3f}), "
        f"and the overlap with the target's distributions grows by {shared.value:.3f} ({shared.low:+.3f} … "
        f"{shared.high:+.3f}; chance {named.chance:.2g} over all readings, named below {ERROR:g}); "
        f"remedy: {named.reading.remedy}",
    )


def acceptance_findings(forced: Sequence[Rate], steps: Steps, promises: Sequence[Promise]) -> Iterator[Finding]:
    """Acceptance in the engine against training, against the card, and against nothing at all."""
    if not forced:
        yield Finding(True, "no answer has a second token, so that no draft was judged; give other prompts")
        return
    difference = steps.more - steps.fewer
    if steps.chance < ERROR and abs(difference) > DISAGREEMENT * steps.compared:
        yield Finding(
            True,
            f"engine and training disagree: of {steps.compared} chains below the same tokens the engine accepted "
            f"fewer drafts in {steps.fewer} and more in {steps.more} (chance {steps.chance:.2g}); this is a "
            "bug of the engine, report it with the head",
        )
    first = forced[0]
    if first.high < USELESS:
        yield Finding(True, f"0-α is {first}, surely below {USELESS}; the head drafts hardly anything that is accepted")
    lowest = min((promise.alphas[0] for promise in promises), default=None)
    if lowest is not None and first.high < BELOW_CARD * lowest:
        yield Finding(
            True,
            f"0-α is {first}, and the lowest in the head's card is {lowest:.3f}; texts alone do not explain less than "
            f"{BELOW_CARD:.0%} of it",
        )


def template_findings(other: OtherTemplate | None) -> Iterator[Finding]:
    """The chat template in the head's folder, if it renders prompts unlike the target's."""
    remedy = "put it into the target's folder as chat_template.jinja"
    if other is not None and other.gain is not None and other.clear:
        yield Finding(
            True,
            "the head was trained with the chat template in its folder, not with the target's: behind prompts of the "
            f"head's template, the overlap with the target's distributions on the same answers grows by {other.gain} "
            f"(chance {other.chance:.2g}, named below {ERROR:g}); {remedy}",
        )
    elif other is not None:
        yield Finding(
            False,
            "the chat template in the head's folder renders prompts unlike the target's; if the head was trained with "
            f"it, {remedy}",
        )


def other_findings(head: Head, bed: Bed, parted: int, answers: int) -> Iterator[Finding]:
    """Facts about the files that explain low acceptance, and answers that the engine did not repeat."""
    if bed.path is not None and trained_for(head, bed.path) is False:
        text = (
            "the head was trained for another target (fingerprints differ); use the head of this target, or train one"
        )
        yield Finding(False, text)
    moved = moved_tokens(head.path, bed.path)
    if moved:
        own, target = next(iter(moved.items()))
        yield Finding(
            False,
            f"the tokenizer in the head's folder gives {len(moved)} tokens other ids than the target's, such as {own} "
            f"in place of {target}",
        )
    if parted:
        yield Finding(
            False,
            f"{parted} of {answers} answers of the engine part from plain decoding's; `aquiline check --lossless` "
            "judges them",
        )
    yield from (Finding(False, note) for note in head.report.notes)
