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
    """Finds the families to propose trees from, and the drafts that run with their default tree.

    Args:
        bed: the target.
        draft: "auto" (all heads that ship for the target; of these, only EAGLE-3's tree is tuned), or a head's name
            or folder.
        largest: the tree of an EAGLE head whose acceptance is recorded.

    Raises:
        ValueError: a head that does not fit.
    """
    auto = draft == "auto"
    heads = [open_head(name, bed.target.shape) for name in (shipped_for(bed.path) if auto else [draft])]
    tuned = [head for head in heads if head.kind == "eagle3" or (head.kind == "eagle" and not auto)]
    others = [_with_default(bed, head) for head in heads if head not in tuned]
    if auto and tuned:
        others.insert(0, _with_default(bed, "auto"))
    elif auto:
        logger.info("no EAGLE-3 head ships for %s: load()'s default is prompt lookup", bed.name)
    depths = [Chain(depth) for depth in range(1, LOOKUP_DEPTH + 1)]
    lookup = _source(bed, "prompt-lookup", "prompt lookup", depths[-1], depths)
    options = candidates(largest)
    eagles = [_source(bed, head, f"{head.path.name} ({head.kind})", largest, options) for head in tuned]
    return [*eagles, lookup], others


def _with_default(bed: Bed, draft: Head | str) -> Candidate:
    made = make_drafter(draft, None, bed.target, bed.path)
    label = made.name if isinstance(draft, Head) else f"{draft}: {made.name}"
    return Candidate(label, _loadable(draft), None, made.drafter)


def _source(
    bed: Bed, draft: Head | str, name: str, probe: DynamicTree | Chain, options: Sequence[Chain | DynamicTree]
) -> Source:
    def make(policy: TreePolicy) -> Drafter:
        drafter = make_drafter(draft, policy, bed.target, bed.path).drafter
        assert drafter is not None
        return drafter

    default = make_drafter(draft, None, bed.target, bed.path).tree
    return Source(_loadable(draft), name, make, probe, options, default)


def _loadable(draft: Head | str) -> str:
    return shown(draft) if isinstance(draft, Head) else draft
