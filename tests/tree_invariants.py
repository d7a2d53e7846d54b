"""The invariants of a draft tree, checked node by node."""

from __future__ import annotations

from aquiline.tree import DraftTree


def validate(tree: DraftTree) -> None:
    """Raises AssertionError if an invariant of `DraftTree` does not hold (a drafter's bug)."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    for row, count in enumerate(tree.num_nodes.tolist()):
        assert 1 <= count <= tree.size, f"row {row}: num_nodes {count} outside 1 … {tree.size}"
        assert parents[row][0] == -1, f"row {row}: the root must have parent -1"
        seen: set[tuple[int, int]] = set()
        limit = count if tree.num_candidates is None else int(tree.num_candidates[row])
        for node in range(1, count):
            parent = parents[row][node]
            assert 0 <= parent < node, f"row {row} node {node}: parent {parent} not in 0 … {node - 1}"
            if node < limit:
                edge = (parent, tokens[row][node])
                assert edge not in seen, f"row {row}: node {parent} has two children with token {edge[1]}"
                seen.add(edge)
