"""Two drafters in one: prompt lookup first, or both in one tree.

Both wrappers accept any drafter that neither needs every step nor samples. The target receives the
joined trees, without draft probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from aquiline import tree as trees
from aquiline.cache import MOST_NODES
from aquiline.drafters.drafter import Committed, Drafter, Rows, check_wrappable
from aquiline.drafters.lookup import PromptLookup, merge
from aquiline.tree import DraftTree


@dataclass(eq=False)
class MixedState:
    """The states of the two drafters."""

    first: Any
    second: Any


class LookupFirst:
    """Drafts by prompt lookup if it finds a continuation, else with the other drafter.

    A continuation in the text costs nothing, and after a long match it is usually right, so the other
    drafter's network runs only where the text is new. Unlike in a merged tree, each row drafts from
    one of the two, and chains stay chains.

    Args:
        lookup: its `min_ngram` sets the minimum length of a match.
        other: the other drafter; it receives every committed position in either case.

    Raises:
        ValueError: if `other` needs every step, or samples.
    """

    def __init__(self, lookup: PromptLookup, other: Drafter) -> None:
        check_wrappable(other, "combined with prompt lookup", "use it alone")
        self.lookup, self.other, self.needs = lookup, other, other.needs

    def new_state(self, slots: int, capacity: int) -> MixedState:
        return MixedState(self.lookup.new_state(slots, capacity), self.other.new_state(slots, capacity))

    def extend(self, committed: Committed, state: MixedState) -> None:
        self.lookup.extend(committed, state.first)
        self.other.extend(committed, state.second)

    def propose(self, rows: Rows, state: MixedState) -> DraftTree:
        found = self.lookup.propose(rows, state.first)
        missing = [i for i, count in enumerate(found.num_nodes.tolist()) if count == 1]
        found = replace(found, sources=trees.node_sources(found, self.lookup.needs.source))
        if not missing:
            return found
        drafted = self.other.propose(rows.pick(missing), state.second)
        if len(missing) == len(rows.slots):
            return drafted
        return joined(found, replace(drafted, sources=trees.node_sources(drafted, self.needs.source)), missing)

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


def _paths(tree: DraftTree, row: int) -> list[list[int]]:
    """Returns the tokens of every node's path below the root, in node order."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    paths: list[list[int]] = [[]]
    for node in range(1, int(tree.num_nodes[row])):
        paths.append([*paths[parents[node]], tokens[node]])
    return paths[1:]
