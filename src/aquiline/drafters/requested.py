"""Drafts for each request as it asks: not at all, in smaller trees, or from a text that it expects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aquiline import tree as trees
from aquiline.drafters.drafter import Drafter, Drafting, Rows
from aquiline.drafters.mixed import joined
from aquiline.tree import DraftTree

PREDICTION_DEPTH = 16
"""Longest draft from an expected text: agreement lasts for many tokens, and one forward checks all of them."""


def propose_as_asked(drafter: Drafter | None, rows: Rows, state: Any) -> DraftTree:
    """Builds one tree per row, each as its request asks.

    Args:
        drafter: drafts for the rows without an expected text; None: nothing does.
    """
    if not rows.drafting:
        return trees.root_only(rows.roots) if drafter is None else drafter.propose(rows, state)
    packed, sources, left = [], [], []
    for i, (root, text, asked) in enumerate(zip(rows.roots, rows.texts, rows.drafting, strict=True)):
        found = _expected(asked, text, rows.choosers[i].prompt_length, rows.depth(PREDICTION_DEPTH))
        packed.append(([root, *found], list(range(-1, len(found)))))
        sources.append(["prediction"] * (1 + len(found)))
        if asked.enabled and not found:
            left.append(i)
    tree = trees.from_lists(packed, sources=sources)
    if drafter is None or not left:
        return tree
    drafted = drafter.propose(rows.pick(left), state)
    drafted = replace(drafted, sources=trees.node_sources(drafted, drafter.needs.source))
    return joined(tree, _cut(drafted, [rows.drafting[i] for i in left]), left)


def _expected(asked: Drafting, text: Sequence[int], prompt_length: int, depth: int) -> Sequence[int]:
    if asked.expected is None or not asked.enabled:
        return ()
    most = min(limit for limit in (depth, asked.depth, asked.nodes) if limit is not None)
    return asked.expected.continuation(text[prompt_length:], most)


def _cut(tree: DraftTree, asked: Sequence[Drafting]) -> DraftTree:
    """Drops nodes beyond each row's limits; parents precede their children, so no node loses its own."""
    assert tree.sources is not None
    rows, sources = [], []
    depths = [trees.row_depths(row) for row in tree.parents.tolist()]
    for (tokens, parents), names, levels, limits in zip(trees.to_lists(tree), tree.sources, depths, asked, strict=True):
        deepest = len(tokens) if limits.depth is None else limits.depth
        kept = [node for node in range(len(tokens)) if levels[node] <= deepest]
        kept = kept if limits.nodes is None else kept[: 1 + limits.nodes]
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        rows.append(([tokens[node] for node in kept], [place[parents[node]] for node in kept]))
        sources.append([names[node] for node in kept])
    return trees.from_lists(rows, sources=sources)
