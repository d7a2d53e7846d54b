"""How often drafts are accepted, by what their drafter says of them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from aquiline import tree as trees
from aquiline.drafters.drafter import Committed, Rows
from aquiline.tree import DraftTree

_EDGES = (0.05, 0.15, 0.35, 0.6, 0.85)
"""Bounds of the bins of predicted probability."""

_DEEPEST = 3
"""Deeper levels share a bin."""

_PRIOR = 4.0
"""Accepted drafts, as many as were predicted, that every bin begins with."""

_MEMORY = 200.0
"""Predicted acceptances after which a bin's counts are halved, because texts change."""

LEVELS = 16
"""Levels whose yield is known apart."""


@dataclass(eq=False)
class _Bin:
    """Drafts whose parent was accepted: the sum of their probabilities, and how many were accepted."""

    predicted: float = _PRIOR
    accepted: float = _PRIOR

    def add(self, predicted: float, accepted: bool) -> None:
        self.predicted += predicted
        self.accepted += accepted
        if self.predicted > _MEMORY:
            self.predicted, self.accepted = self.predicted / 2, self.accepted / 2


class Calibration:
    """Corrects the probabilities of drafts by what became of earlier ones, online.

    A draft's probability given its parent is multiplied by accepted / predicted of its bin: by source, by whether the
    row samples, by depth and by probability. Heads that are calibrated already keep theirs.
    """

    def __init__(self) -> None:
        self._bins: defaultdict[tuple[str, bool, int, int], _Bin] = defaultdict(_Bin)
        self._firsts: defaultdict[tuple[bool, int], _Bin] = defaultdict(_Bin)

    def record(self, committed: Committed, source: str) -> None:
        """Learns from a verified tree; `source` drafted it where it does not say."""
        tree = committed.tree
        if tree is None or tree.log_probs is None or tree.size == 1:
            return
        for i, (text, count) in enumerate(zip(committed.rows.texts, committed.counts, strict=True)):
            nodes, emitted = _nodes(tree, i, source), text[len(text) - count :]
            accepted, sampled = [True], committed.rows.choosers[i].params.temperature > 0
            seen = set[int]()
            for token, parent, depth, chance, name in nodes:
                # The last emitted token is the target's own.
                taken = depth < count and emitted[depth - 1] == token
                accepted.append(accepted[parent] and taken)
                if accepted[parent]:
                    self._bins[_place(name, sampled, depth, chance)].add(chance, taken)
                    if parent not in seen:
                        self._firsts[sampled, depth].add(0.5, taken)
                seen.add(parent)

    def chances(self, tree: DraftTree, rows: Rows, source: str) -> list[list[float]]:
        """Returns per row and draft how likely it and all above it are accepted; a child never exceeds its parent."""
        found = []
        for i, chooser in enumerate(rows.choosers):
            joint, sampled = [1.0], chooser.params.temperature > 0
            for _, parent, depth, chance, name in _nodes(tree, i, source):
                known = self._bins.get(_place(name, sampled, depth, chance))
                factor = 1.0 if known is None else known.accepted / known.predicted
                joint.append(joint[parent] * min(chance * factor, 1.0))
            found.append(joint[1:])
        return found

    def yields(self, sampled: bool) -> Sequence[float]:
        """Returns by level how often its likeliest draft is accepted if its parent was, one half at first."""
        found = []
        for depth in range(1, LEVELS + 1):
            known = self._firsts.get((sampled, depth))
            found.append(0.5 if known is None else 0.5 * known.accepted / known.predicted)
        return found


def _place(source: str, sampled: bool, depth: int, chance: float) -> tuple[str, bool, int, int]:
    return source, sampled, min(depth, _DEEPEST), bisect_right(_EDGES, chance)


def _nodes(tree: DraftTree, row: int, source: str) -> list[tuple[int, int, int, float, str]]:
    """Returns (token, parent, depth, probability given the parent, source) of a row's drafts."""
    assert tree.log_probs is not None
    count = int(tree.num_nodes[row])
    tokens, parents = tree.tokens[row, :count].tolist(), tree.parents[row, :count].tolist()
    scores, depths, found = tree.log_probs[row, :count].tolist(), [0], []
    names = [source] * count if tree.sources is None else tree.sources[row]
    for node in range(1, count):
        parent = parents[node]
        depths.append(depths[parent] + 1)
        chance = math.exp(min(0.0, scores[node] - scores[parent]))
        found.append((tokens[node], parent, depths[node], chance, names[node]))
    return found


def pick_nodes(tree: DraftTree, kept: Sequence[Sequence[int]]) -> DraftTree:
    """Returns the tree of these drafts of each row, in increasing order, each with its parent."""
    rows, sources, scores = trees.to_lists(tree), [], []
    assert tree.log_probs is not None
    joint = tree.log_probs.tolist()
    for i, nodes in enumerate(kept):
        tokens, parents = rows[i]
        place = {node: new for new, node in enumerate((0, *nodes))} | {-1: -1}
        rows[i] = ([tokens[node] for node in (0, *nodes)], [place[parents[node]] for node in (0, *nodes)])
        scores.append([joint[i][node] for node in (0, *nodes)])
        sources.append([tree.sources[i][node] for node in (0, *nodes)] if tree.sources is not None else [])
    return trees.from_lists(rows, None if tree.sources is None else sources, scores)
