"""Two drafters in one tree: prompt lookup merged into an EAGLE tree.

A head knows how the target writes, a lookup knows what the text says. Together they cost one
forward; what both propose is one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from aquiline import tree as trees
from aquiline.cache import MOST_NODES
from aquiline.drafters.drafter import CopyingDrafter, Drafter, ObservingDrafter
from aquiline.drafters.lookup import merge
from aquiline.tree import DraftTree


@dataclass(eq=False)
class MergedState:
    """The states of both drafters."""

    first: Any
    second: Any


class Merged:
    """Drafts the union of two drafters' trees.

    Args:
        first: a drafter; may need target features.
        second: another one that needs no features, or the same ones.
        num_nodes: most nodes including the root, ≥ 2; the first drafter's come first. None: as
            many as fit at the end of a context.
    """

    def __init__(self, first: Drafter, second: Drafter, num_nodes: int | None = None) -> None:
        if second.features not in ((), first.features):
            raise ValueError(
                f"the merged drafters need different target features ({first.features} and {second.features}); "
                "give the one that needs none as the second"
            )
        for part in (first, second):
            if isinstance(part, ObservingDrafter):
                raise ValueError(f"a {type(part).__name__} drafts in a window and cannot be merged; use it by itself")
        num_nodes = MOST_NODES if num_nodes is None else num_nodes
        if not 2 <= num_nodes <= MOST_NODES:
            raise ValueError(f"merged: num_nodes is {num_nodes}; allowed: 2 … {MOST_NODES}")
        self.first, self.second, self.num_nodes = first, second, num_nodes
        self.features = first.features

    def new_state(self, rows: int, capacity: int) -> MergedState:
        """Allocates both drafters' states."""
        return MergedState(self.first.new_state(rows, capacity), self.second.new_state(rows, capacity))

    def extend(
        self,
        tokens: Tensor,
        features: Tensor | None,
        num_new: Sequence[int],
        prefixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        state: MergedState,
    ) -> None:
        """See `Drafter.extend`."""
        self.first.extend(tokens, features, num_new, prefixes, rows, state.first)
        self.second.extend(tokens, features, num_new, prefixes, rows, state.second)

    def propose(
        self,
        root: Tensor,
        prefixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        state: MergedState,
        max_depth: int | None = None,
    ) -> DraftTree:
        """See `Drafter.propose`. The union has no log-probabilities: a lookup knows none."""
        both = [
            self.first.propose(root, prefixes, rows, state.first, max_depth),
            self.second.propose(root, prefixes, rows, state.second, max_depth),
        ]
        assert all(tree.num_candidates is None for tree in both), "a window cannot be merged"
        packed = []
        for row, token in enumerate(root.tolist()):
            paths = [path for tree in both for path in _paths(tree, row)]
            tokens, parents = merge(token, paths)
            packed.append((tokens[: self.num_nodes], parents[: self.num_nodes]))
        return trees.from_lists(packed, root.device)

    def reset(self, row: int, length: int, state: MergedState) -> None:
        """See `Drafter.reset`."""
        self.first.reset(row, length, state.first)
        self.second.reset(row, length, state.second)

    def copy_prefix(self, source: int, target: int, length: int, state: MergedState) -> None:
        """See `CopyingDrafter.copy_prefix`."""
        for drafter, inner in ((self.first, state.first), (self.second, state.second)):
            if isinstance(drafter, CopyingDrafter):
                drafter.copy_prefix(source, target, length, inner)


def _paths(tree: DraftTree, row: int) -> list[list[int]]:
    """The tokens of every node's path below the root, in node order."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    paths: list[list[int]] = [[]]
    for node in range(1, int(tree.num_nodes[row])):
        paths.append([*paths[parents[node]], tokens[node]])
    return paths[1:]
