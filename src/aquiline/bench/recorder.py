"""A drafter that remembers which of its drafts became text: confidence against acceptance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from aquiline.bench.metrics import BINS
from aquiline.drafters.drafter import Drafter, ObservingDrafter, SamplingDrafter
from aquiline.tree import DraftTree


@dataclass(frozen=True)
class JudgedNode:
    """A drafted node whose parent was accepted, so that the target decided about it.

    Attributes:
        depth: levels below the root, ≥ 1.
        ranks: position among its siblings at every level, from the root down: (0, 2) is the third
            child of the first child.
        confidence: the draft's probability of the token given its parent, or None.
        accepted: whether the text runs through it.
    """

    depth: int
    ranks: tuple[int, ...]
    confidence: float | None
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
class _Recorder:
    """Passes everything on to `inner`; keeps references only, so that it costs the run nothing."""

    inner: Any
    steps: list[Step] = field(default_factory=list)
    _open: tuple[DraftTree, list[int]] | None = None

    @property
    def features(self) -> Any:
        return self.inner.features

    def new_state(self, rows: int, capacity: int) -> Any:
        return self.inner.new_state(rows, capacity)

    def reset(self, row: int, length: int, state: Any) -> None:
        self.inner.reset(row, length, state)

    def propose(
        self,
        root: Tensor,
        prefixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        state: Any,
        max_depth: int | None = None,
    ) -> DraftTree:
        tree: DraftTree = self.inner.propose(root, prefixes, rows, state, max_depth)
        self._open = (tree, list(rows))
        return tree

    def extend(
        self,
        tokens: Tensor,
        features: Tensor | None,
        num_new: Sequence[int],
        prefixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        state: Any,
    ) -> None:
        # A prefill of another row may come between: only the very rows of the tree close the step.
        if self._open is not None and self._open[1] == list(rows):
            for i, (prefix, count) in enumerate(zip(prefixes, num_new, strict=True)):
                self.steps.append(Step(self._open[0], i, list(prefix[len(prefix) - count :])))
            self._open = None
        self.inner.extend(tokens, features, num_new, prefixes, rows, state)


class _Copying(_Recorder):
    def copy_prefix(self, source: int, target: int, length: int, state: Any) -> None:
        self.inner.copy_prefix(source, target, length, state)


class _Observing(_Recorder):
    def observe(self, tree: DraftTree, logits: Tensor, rows: Sequence[int], state: Any) -> None:
        self.inner.observe(tree, logits, rows, state)


class _Drawing(_Recorder):
    @property
    def sampled(self) -> bool:
        return bool(self.inner.sampled)

    def propose_sampled(self, root: Tensor, prefixes: Any, rows: Sequence[int], *rest: Any) -> DraftTree:
        tree: DraftTree = self.inner.propose_sampled(root, prefixes, rows, *rest)
        self._open = (replace(tree, draft_probs=None), list(rows))  # the whole laws are large
        return tree


def recorded(drafter: Drafter) -> Any:
    """Wraps a drafter; the wrapper has `steps` and exactly the optional methods that `drafter` has."""
    parts = [
        part
        for part, has in (
            (_Copying, hasattr(drafter, "copy_prefix")),
            (_Observing, isinstance(drafter, ObservingDrafter)),
            (_Drawing, isinstance(drafter, SamplingDrafter)),
        )
        if has
    ]
    return type("Recorder", (*parts, _Recorder), {})(drafter)


def judged_nodes(steps: Sequence[Step]) -> Iterator[JudgedNode]:
    """The candidates below accepted nodes, in the order of the steps and of the trees."""
    for step in steps:
        tree, row = step.tree, step.index
        limits = tree.num_nodes if tree.num_candidates is None else tree.num_candidates
        tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
        scores = None if tree.log_probs is None else tree.log_probs[row].tolist()
        accepted: dict[int, int] = {0: 0}  # node → depth
        ranks: dict[int, tuple[int, ...]] = {0: ()}
        children: dict[int, int] = {}
        for node in range(1, int(limits[row])):
            parent = parents[node]
            ranks[node] = (*ranks[parent], children.get(parent, 0))
            children[parent] = children.get(parent, 0) + 1
            if parent not in accepted:
                continue
            depth = accepted[parent] + 1
            taken = depth < len(step.emitted) and step.emitted[depth - 1] == tokens[node]
            if taken:
                accepted[node] = depth
            confidence = None if scores is None else math.exp(min(0.0, scores[node] - scores[parent]))
            yield JudgedNode(depth, ranks[node], confidence, taken)


def calibration_bins(nodes: Iterator[JudgedNode]) -> list[tuple[int, float, int]]:
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
