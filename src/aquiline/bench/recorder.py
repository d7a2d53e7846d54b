"""Records which of a drafter's drafts became text, with their confidences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aquiline.bench.metrics import BINS
from aquiline.drafters.drafter import Committed, Drafter, Needs, Rows
from aquiline.tree import DraftTree


@dataclass(frozen=True)
class Node:
    """A drafted node and its fate.

    Attributes:
        ranks: position among its siblings at every level, from the root down: (0, 2) is the third
            child of the first child.
        confidence: the draft's probability of the token given its parent, or None.
        judged: its parent was accepted, so the target decided about it.
        accepted: the text runs through it.
    """

    ranks: tuple[int, ...]
    confidence: float | None
    judged: bool
    accepted: bool


@dataclass(eq=False)
class Step:
    """One row's tree and the tokens that the step emitted.

    Attributes:
        tree: the whole batch's tree.
        index: the row's index in it.
        emitted: accepted drafts and the target's own token after them.
    """

    tree: DraftTree
    index: int
    emitted: list[int]


@dataclass(eq=False)
class Recorder:
    """Passes everything on to a drafter; keeps references only, so that it costs the run nothing.

    Attributes:
        inner: the drafter.
        steps: drafts and emitted tokens, per row and step that asked for drafts.
    """

    inner: Drafter
    steps: list[Step] = field(default_factory=list)

    @property
    def needs(self) -> Needs:
        return self.inner.needs

    def new_state(self, slots: int, capacity: int) -> Any:
        return self.inner.new_state(slots, capacity)

    def propose(self, rows: Rows, state: Any) -> DraftTree:
        return self.inner.propose(rows, state)

    def extend(self, committed: Committed, state: Any) -> None:
        rows, tree = committed.rows, committed.tree
        if tree is not None and rows.max_depth != 0:
            kept = replace(tree, draft_probs=None)  # the whole distributions are large
            for i, (text, count) in enumerate(zip(rows.texts, committed.counts, strict=True)):
                self.steps.append(Step(kept, i, list(text[len(text) - count :])))
        self.inner.extend(committed, state)

    def copy(self, source: int, slot: int, length: int, state: Any) -> None:
        self.inner.copy(source, slot, length, state)

    def reset(self, slot: int, length: int, state: Any) -> None:
        self.inner.reset(slot, length, state)


def nodes_of(step: Step) -> Iterator[Node]:
    """Yields the nodes of a step's tree that may be accepted, in the order of the tree, without the root."""
    tree, row = step.tree, step.index
    limits = tree.num_nodes if tree.num_candidates is None else tree.num_candidates
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    scores = None if tree.log_probs is None else tree.log_probs[row].tolist()
    ranks: list[tuple[int, ...]] = [()]
    accepted, children = [True], [0] * len(tokens)
    for node in range(1, int(limits[row])):
        parent = parents[node]
        ranks.append((*ranks[parent], children[parent]))
        children[parent] += 1
        depth = len(ranks[node])
        # The last emitted token is the target's own, not a draft.
        taken = depth < len(step.emitted) and step.emitted[depth - 1] == tokens[node]
        accepted.append(accepted[parent] and taken)
        confidence = None if scores is None else math.exp(min(0.0, scores[node] - scores[parent]))
        yield Node(ranks[node], confidence, accepted[parent], accepted[node])


def judged_nodes(steps: Sequence[Step]) -> Iterator[Node]:
    """Yields the candidates below accepted nodes, in the order of the steps and of the trees."""
    return (node for step in steps for node in nodes_of(step) if node.judged)


def calibration_bins(nodes: Iterator[Node]) -> list[tuple[int, float, int]]:
    """Per bin of confidence, [judged, sum of confidences, accepted]; empty without confidences."""
    counts, sums, hits = [0] * BINS, [0.0] * BINS, [0] * BINS
    for node in nodes:
        if node.confidence is None:
            continue
        bin_ = min(int(node.confidence * BINS), BINS - 1)
        counts[bin_] += 1
        sums[bin_] += node.confidence
        hits[bin_] += node.accepted
    return list(zip(counts, sums, hits, strict=True)) if any(counts) else []
