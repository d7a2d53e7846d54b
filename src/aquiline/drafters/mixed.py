"""Two drafters in one: prompt lookup first, or both in one tree.

Both wrappers accept any drafter that neither needs every step nor samples. The target receives the
joined trees, without draft probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from aquiline import tree as trees
from aquiline.cache import MOST_NODES
from aquiline.drafters.drafter import Committed, Drafter, Rows, check_wrappable
from aquiline.drafters.lookup import LEAST, LookupState, PromptLookup, merge
from aquiline.drafters.store import LONGEST
from aquiline.tree import DraftTree


@dataclass(eq=False)
class MixedState:
    """The states of the two drafters."""

    first: Any
    second: Any


class LookupFirst:
    """Drafts by prompt lookup if it is likely right, else with the other drafter, continued by prompt lookup.

    A continuation in the text costs nothing, and after a long match it is usually right, so the other
    drafter's network runs only where the text is new. What follows its likeliest draft in the text is
    appended while it is likely enough to pay. Unlike in a merged tree, chains stay chains.

    Args:
        lookup: its `min_ngram` sets the minimum length of a match.
        other: the other drafter; it receives every committed position in either case.
        least: smallest chance of the first token for which prompt lookup drafts alone.

    Raises:
        ValueError: if `other` needs every step, or samples.
    """

    def __init__(self, lookup: PromptLookup, other: Drafter, least: float = 0.5) -> None:
        check_wrappable(other, "combined with prompt lookup", "use it alone")
        self.lookup, self.other, self.least, self.needs = lookup, other, least, other.needs

    def new_state(self, slots: int, capacity: int) -> MixedState:
        return MixedState(self.lookup.new_state(slots, capacity), self.other.new_state(slots, capacity))

    def extend(self, committed: Committed, state: MixedState) -> None:
        self.lookup.extend(committed, state.first)
        self.other.extend(committed, state.second)

    def propose(self, rows: Rows, state: MixedState) -> DraftTree:
        found = self.lookup.propose(rows, state.first)
        missing = [i for i in range(len(rows.slots)) if not self._likely(found, i)]
        found = replace(found, sources=trees.node_sources(found, self.lookup.needs.source))
        if not missing:
            return found
        left = rows.pick(missing)
        drafted = self.other.propose(left, state.second)
        drafted = replace(drafted, sources=trees.node_sources(drafted, self.needs.source))
        drafted = self._continued(drafted, left, state.first)
        return drafted if len(missing) == len(rows.slots) else joined(found, drafted, missing)

    def _likely(self, found: DraftTree, row: int) -> bool:
        if int(found.num_nodes[row]) == 1:
            return False
        return found.log_probs is None or float(found.log_probs[row, 1]) >= math.log(self.least)

    def _continued(self, tree: DraftTree, rows: Rows, state: LookupState) -> DraftTree:
        """Appends what follows each row's likeliest leaf in the texts, as long as their joint chance suffices."""
        if tree.log_probs is None or self.lookup.num_branches > 1:
            return tree
        assert tree.sources is not None
        packed, sources, scores = trees.to_lists(tree), [list(row) for row in tree.sources], tree.log_probs.tolist()
        grown = False
        for i, (tokens, parents) in enumerate(packed):
            scores[i] = scores[i][: len(tokens)]
            leaves = set(range(1, len(tokens))) - set(parents)
            leaf = max(leaves, key=scores[i].__getitem__, default=0)
            path = _path(tokens, parents, leaf)
            depth = rows.depth(len(path) + self.lookup.depth) - len(path)
            chance = math.exp(scores[i][leaf])
            if not leaf or depth < 1 or chance < LEAST:
                continue
            context = [*rows.texts[i][-LONGEST:], *path][-LONGEST:]
            found, source = self.lookup.find(rows.slots[i], context, depth, state, LEAST / chance)
            for token, joint in zip(found.tokens, found.chances, strict=True):
                parents.append(leaf)
                leaf, grown = len(tokens), True
                tokens.append(token)
                scores[i].append(math.log(chance * joint))
                sources[i].append(source)
        return trees.from_lists(packed, sources, scores) if grown else tree

    def copy(self, source: int, slot: int, length: int, state: MixedState) -> None:
        self.lookup.copy(source, slot, length, state.first)
        self.other.copy(source, slot, length, state.second)

    def reset(self, slot: int, length: int, state: MixedState) -> None:
        self.lookup.reset(slot, length, state.first)
        self.other.reset(slot, length, state.second)


class Merged:
    """Drafts the union of two drafters' trees; nodes that both propose are merged.

    A head predicts the target's style, a lookup repeats the text; together they cost one forward.

    Args:
        first: a drafter; may need target features.
        second: another drafter without features, or with the same ones.
        num_nodes: upper bound on nodes including the root, ≥ 2; the first drafter's have priority.
            None: as many as fit at the end of a context.

    Raises:
        ValueError: for a drafter that needs every step or samples, different features, or
            `num_nodes` out of range.
    """

    def __init__(self, first: Drafter, second: Drafter, num_nodes: int | None = None) -> None:
        for part in (first, second):
            check_wrappable(part, "merged", "use it alone")
        if second.needs.features not in ((), first.needs.features):
            raise ValueError(
                f"the merged drafters need different target features ({first.needs.features} and "
                f"{second.needs.features}); pass the one without features as the second"
            )
        num_nodes = MOST_NODES if num_nodes is None else num_nodes
        if not 2 <= num_nodes <= MOST_NODES:
            raise ValueError(f"merged: num_nodes is {num_nodes}; allowed: 2 … {MOST_NODES}")
        self.first, self.second, self.num_nodes, self.needs = first, second, num_nodes, first.needs

    def new_state(self, slots: int, capacity: int) -> MixedState:
        return MixedState(self.first.new_state(slots, capacity), self.second.new_state(slots, capacity))

    def extend(self, committed: Committed, state: MixedState) -> None:
        self.first.extend(committed, state.first)
        self.second.extend(committed, state.second)

    def propose(self, rows: Rows, state: MixedState) -> DraftTree:
        """Builds the union, without log-probabilities, which a lookup cannot provide."""
        both = (self.first.propose(rows, state.first), self.second.propose(rows, state.second))
        firsts = trees.node_sources(both[0], self.first.needs.source)
        packed, sources = [], []
        for row, token in enumerate(rows.roots):
            tokens, parents = merge(token, [path for tree in both for path in _paths(tree, row)])
            packed.append((tokens[: self.num_nodes], parents[: self.num_nodes]))
            # The first drafter's nodes keep their order and come first.
            others = [self.second.needs.source] * (len(tokens) - len(firsts[row]))
            sources.append([*firsts[row], *others][: self.num_nodes])
        return trees.from_lists(packed, sources=sources)

    def copy(self, source: int, slot: int, length: int, state: MixedState) -> None:
        self.first.copy(source, slot, length, state.first)
        self.second.copy(source, slot, length, state.second)

    def reset(self, slot: int, length: int, state: MixedState) -> None:
        self.first.reset(slot, length, state.first)
        self.second.reset(slot, length, state.second)


def joined(found: DraftTree, drafted: DraftTree, missing: Sequence[int]) -> DraftTree:
    """The rows of `found`, those in `missing` replaced by the rows of `drafted`; both with sources."""
    assert found.sources is not None and drafted.sources is not None
    rows, sources = trees.to_lists(found), list(found.sources)
    for i, row, names in zip(missing, trees.to_lists(drafted), drafted.sources, strict=True):
        rows[i], sources[i] = row, names
    return trees.from_lists(rows, sources=sources)


def _path(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    """Returns the tokens from below the root down to a node."""
    path = []
    while node > 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


def _paths(tree: DraftTree, row: int) -> list[list[int]]:
    """Returns the tokens of every node's path below the root, in node order."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    paths: list[list[int]] = [[]]
    for node in range(1, int(tree.num_nodes[row])):
        paths.append([*paths[parents[node]], tokens[node]])
    return paths[1:]
