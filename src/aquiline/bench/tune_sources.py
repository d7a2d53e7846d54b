"""What tuning chooses among: families of trees for one draft, and drafts that have only their default."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aquiline.bench.methods import Bed
from aquiline.bench.profile import Prediction, candidates
from aquiline.checkpoints.open import SHIPPED, Head, open_head, shipped_for
from aquiline.drafters.drafter import Drafter
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.lookup import PromptLookup
from aquiline.drafters.trees import Chain, DynamicTree, TreePolicy
from aquiline.engine.drafting import head_drafter, make_drafter

logger = logging.getLogger("aquiline")

LOOKUP_DEPTH = 10


@dataclass(frozen=True, eq=False)
class Candidate:
    """A method that could be chosen.

    Attributes:
        label: in the report.
        draft: what `load` takes; None for plain decoding.
        policy: its tree; None for plain decoding and for a draft's own default.
        drafter: ready to run.
        prediction: what it was proposed for; None where nothing was predicted.
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
        draft: what `load` takes.
        name: in labels.
        make: tree → drafter.
        probe: the tree whose acceptance is recorded.
        options: trees to choose among.
        default: the tree that load() takes, or None.
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
    lookup = _lookup_source()
    if draft == "auto":
        opened = (open_head(folder, bed.target.shape) for folder in shipped_for(bed.path))
        shipped = {head.kind: head for head in opened}
        if "eagle3" not in shipped:
            logger.info("no EAGLE-3 head ships for %s: load()'s default is prompt lookup", bed.name)
            return [lookup], [_as_it_is(bed, head) for head in shipped.values()]
        others = [_as_it_is(bed, head) for kind, head in shipped.items() if kind != "eagle3"]
        return [_eagle_source(bed, shipped["eagle3"], largest), lookup], [_default(bed), *others]
    head = open_head(draft, bed.target.shape)
    if head.kind in ("eagle", "eagle3"):
        return [_eagle_source(bed, head, largest), lookup], []
    return [lookup], [_as_it_is(bed, head)]


def _named(head: Head) -> str:
    """What `load` takes as the draft; the name of a shipped head holds on another machine too."""
    return head.path.name if head.path.parent == SHIPPED else str(head.path)


def _default(bed: Bed) -> Candidate:
    drafter, name = make_drafter("auto", None, bed.target, bed.path)
    return Candidate(f"auto: {name}", "auto", None, drafter)


def _as_it_is(bed: Bed, head: Head) -> Candidate:
    drafter, name = head_drafter(head, None, bed.target, bed.path)
    return Candidate(name, _named(head), None, drafter)


def _eagle_source(bed: Bed, head: Head, largest: DynamicTree) -> Source:
    def make(policy: TreePolicy | None) -> EagleDrafter:
        drafter, _ = head_drafter(head, policy, bed.target, bed.path)
        assert isinstance(drafter, EagleDrafter)
        return drafter

    name = f"{head.path.name} ({head.kind})"
    return Source(_named(head), name, make, largest, candidates(largest), make(None).policy)


def _lookup_source() -> Source:
    def make(policy: TreePolicy) -> Drafter:
        assert isinstance(policy, Chain)
        return PromptLookup(depth=policy.depth)

    depths = [Chain(depth) for depth in range(1, LOOKUP_DEPTH + 1)]
    default = Chain(PromptLookup().depth)
    return Source("prompt-lookup", "prompt lookup", make, Chain(LOOKUP_DEPTH), depths, default)
