"""Combines two drafters: prompt lookup first, or both in one tree.

Both wrappers accept any drafter that neither needs every step nor samples. The target receives the
joined trees, without draft probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aquiline import tree as trees
from aquiline.cache import MOST_NODES
from aquiline.drafters.drafter import Committed, Drafter, Rows, check_wrappable
from aquiline.drafters.lookup import LookupState, PromptLookup, merge, packed
from aquiline.drafters.store import LEAST, LONGEST
from aquiline.tree import DraftTree


class _Both:
    """Drafters that all receive every committed position, each with its own state."""

    def __init__(self, *parts: Drafter) -> None:
        self.parts = parts

    def new_state(self, slots: int, capacity: int) -> list[Any]:
        return [part.new_state(slots, capacity) for part in self.parts]

    def extend(self, committed: Committed, state: list[Any]) -> None:
        for part, own in zip(self.parts, state, strict=True):
            part.extend(committed, own)

    def copy(self, source: int, slot: int, length: int, state: list[Any]) -> None:
        for part, own in zip(self.parts, state, strict=True):
            part.copy(source, slot, length, own)

    def reset(self, slot: int, length: int, state: list[Any]) -> None:
        for part, own in zip(self.parts, state, strict=True):
            part.reset(slot, length, own)


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
        both = _Both(lookup, other)
        self.new_state, self.extend, self.copy, self.reset = both.new_state, both.extend, both.copy, both.reset

    def propose(self, rows: Rows, state: list[Any]) -> DraftTree:
        found = self.lookup.continuations(rows, state[0])
        missing = [
            i
            for i, each in enumerate(found)
            if len(each.tokens) == 1 or (each.chances is not None and each.chances[0] < self.least)
        ]
        if not missing:
            return packed(found)
        if len(missing) == len(found):
            return self._continued(self.other.propose(rows, state[1]), rows, state[0])
        left = rows.pick(missing)
        drafted = self._continued(self.other.propose(left, state[1]), left, state[0])
        drafted = replace(drafted, sources=trees.node_sources(drafted, self.needs.source))
        return joined(packed(found), drafted, missing)

    def _continued(self, tree: DraftTree, rows: Rows, state: LookupState) -> DraftTree:
        """Appends what follows each row's likeliest leaf in the texts, as long as their joint chance suffices."""
        if tree.log_probs is None or self.lookup.num_branches > 1:
            return tree
        grown, scores = trees.to_lists(tree), tree.log_probs.tolist()
        sources: list[list[str]] | None = None
        for i, (tokens, parents) in enumerate(grown):
            leaves = set(range(1, len(tokens))) - set(parents)
            leaf = max(leaves, key=scores[i].__getitem__, default=0)
            path = trees.path_tokens(tokens, parents, leaf)
            depth = rows.depth(len(path) + self.lookup.depth) - len(path)
            chance = math.exp(scores[i][leaf])
            if not leaf or depth < 1 or chance < LEAST:
                continue
            context = [*rows.texts[i][-LONGEST:], *path][-LONGEST:]
            found, source = self.lookup.find(rows.slots[i], context, depth, state, LEAST / chance)
            if not found.tokens:
                continue
            sources = sources or trees.node_sources(tree, self.needs.source)
            scores[i] = scores[i][: len(tokens)]
            for token, joint in zip(found.tokens, found.chances, strict=True):
                parents.append(leaf)
                leaf = len(tokens)
                tokens.append(token)
                scores[i].append(math.log(chance * joint))
                sources[i].append(source)
        if sources is None:
            return tree
        counted = [row[: len(tokens)] for row, (tokens, _) in zip(scores, grown, strict=True)]
        return trees.from_lists(grown, sources, counted)


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
        both = _Both(first, second)
        self.new_state, self.extend, self.copy, self.reset = both.new_state, both.extend, both.copy, both.reset

    def propose(self, rows: Rows, state: list[Any]) -> DraftTree:
        """Builds the union, without log-probabilities, which a lookup cannot provide."""
        both = (self.first.propose(rows, state[0]), self.second.propose(rows, state[1]))
        firsts = trees.node_sources(both[0], self.first.needs.source)
        parts, packed, sources = [trees.to_lists(tree) for tree in both], [], []
        for row, token in enumerate(rows.roots):
            known = [(part[row], node) for part in parts for node in range(1, len(part[row][0]))]
            tokens, parents = merge(token, [trees.path_tokens(*found, node) for found, node in known])
            packed.append((tokens[: self.num_nodes], parents[: self.num_nodes]))
            # The first drafter's nodes keep their order and come first.
            others = [self.second.needs.source] * (len(tokens) - len(firsts[row]))
            sources.append([*firsts[row], *others][: self.num_nodes])
        return trees.from_lists(packed, sources=sources)


def joined(found: DraftTree, drafted: DraftTree, missing: Sequence[int]) -> DraftTree:
    """The rows of `found`, those in `missing` replaced by the rows of `drafted`; both with sources."""
    assert found.sources is not None and drafted.sources is not None
    rows, sources = trees.to_lists(found), list(found.sources)
    for i, row, names in zip(missing, trees.to_lists(drafted), drafted.sources, strict=True):
        rows[i], sources[i] = row, names
    if found.log_probs is None or drafted.log_probs is None:
        return trees.from_lists(rows, sources=sources)
    scores = found.log_probs.tolist()
    for i, row in zip(missing, drafted.log_probs.tolist(), strict=True):
        scores[i] = row
    scores = [score[: len(tokens)] for score, (tokens, _) in zip(scores, rows, strict=True)]
    return trees.from_lists(rows, sources, scores)
