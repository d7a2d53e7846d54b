"""Collects the contestants of tuning: families of trees for one draft, and drafts that have only their default."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aquiline.bench.methods import Bed, shown
from aquiline.bench.profile import Prediction, candidates
from aquiline.checkpoints.open import Head, open_head, shipped_for
from aquiline.drafters.drafter import Drafter
from aquiline.drafters.trees import Chain, DynamicTree, TreePolicy
from aquiline.engine.drafting import make_drafter

logger = logging.getLogger("aquiline")

LOOKUP_DEPTH = 10


@dataclass(frozen=True, eq=False)
class Candidate:
    """A method that could be chosen.

    Attributes:
        label: its name in the report.
        draft: name or folder for `load`; None for plain decoding.
        policy: its tree; None for plain decoding and for a draft's own default.
        drafter: ready to run.
        prediction: the speed it was proposed for; None where nothing was predicted.
    """

    label: str
    draft: str | None
    policy: TreePolicy | None
    drafter: Drafter | None
    prediction: Prediction | None = None


@dataclass(frozen=True, eq=False)
class Source:
    """A drafter family to tune.

    Attributes:
        draft: name or folder for `load`.
        name: its name in labels.
        make: tree → drafter.
        probe: the tree whose acceptance is recorded.
        options: trees to choose among.
        default: load()'s default tree, or None.
    """

    draft: str
    name: str
    make: Callable[[TreePolicy], Drafter]
    probe: DynamicTree | Chain
    options: Sequence[Chain | DynamicTree]
    default: TreePolicy | None = None


def find_sources(bed: Bed, draft: str, largest: DynamicTree) -> tuple[list[Source], list[Candidate]]:
    """Families to propose trees from, and drafts that run as they are.

    Args:
        bed: the target.
        draft: "auto" (all heads that ship for the target), or a head's name or folder.
        largest: the tree of an EAGLE head whose acceptance is recorded.

    Raises:
        ValueError: a head that does not fit.
    """
    lookup = _lookup_source(bed)
    if draft == "auto":
        opened = (open_head(folder, bed.target.shape) for folder in shipped_for(bed.path))
        shipped = {head.kind: head for head in opened}
        if "eagle3" not in shipped:
            logger.info("no EAGLE-3 head ships for %s: load()'s default is prompt lookup", bed.name)
            return [lookup], [_as_it_is(bed, head) for head in shipped.values()]
        others = [_as_it_is(bed, head) for kind, head in shipped.items() if kind != "eagle3"]
        return [_eagle_source(bed, shipped["eagle3"], largest), lookup], [_as_it_is(bed, "auto"), *others]
    head = open_head(draft, bed.target.shape)
    if head.kind in ("eagle", "eagle3"):
        return [_eagle_source(bed, head, largest), lookup], []
    return [lookup], [_as_it_is(bed, head)]


def _as_it_is(bed: Bed, draft: Head | str) -> Candidate:
    """Makes a contestant of a draft with its default tree."""
    made = make_drafter(draft, None, bed.target, bed.path)
    if isinstance(draft, Head):
        return Candidate(made.name, shown(draft), None, made.drafter)
    return Candidate(f"{draft}: {made.name}", draft, None, made.drafter)


def _eagle_source(bed: Bed, head: Head, largest: DynamicTree) -> Source:
    return _source(bed, head, shown(head), f"{head.path.name} ({head.kind})", largest, candidates(largest))


def _lookup_source(bed: Bed) -> Source:
    depths = [Chain(depth) for depth in range(1, LOOKUP_DEPTH + 1)]
    return _source(bed, "prompt-lookup", "prompt-lookup", "prompt lookup", Chain(LOOKUP_DEPTH), depths)


def _source(
    bed: Bed,
    opened: Head | str,
    draft: str,
    name: str,
    probe: DynamicTree | Chain,
    options: Sequence[Chain | DynamicTree],
) -> Source:
    def make(policy: TreePolicy) -> Drafter:
        drafter = make_drafter(opened, policy, bed.target, bed.path).drafter
        assert drafter is not None
        return drafter

    default = make_drafter(opened, None, bed.target, bed.path).tree
    return Source(draft, name, make, probe, options, default)
