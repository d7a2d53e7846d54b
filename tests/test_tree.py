"""The geometry of draft trees, each against its definition node by node."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aquiline.tree import DraftTree, ancestors, depths, from_lists, is_chain, root_only
from tests.tree_invariants import validate

Rows = list[tuple[list[int], list[int]]]


@st.composite
def forests(draw: st.DrawFn) -> Rows:
    """1 … 3 rows of trees of different sizes; siblings have distinct tokens."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 9))
        parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]
        rows.append((list(range(10, 10 + size)), parents))
    return rows


def path_to(parents: list[int], node: int) -> list[int]:
    """The node, its parent, … up to the root."""
    return [node, *(path_to(parents, parents[node]) if node else [])]


@settings(max_examples=200, deadline=None)
@given(forests())
def test_depths_and_ancestors_are_those_of_the_paths(rows: Rows) -> None:
    tree = from_lists(rows)
    validate(tree)
    deep, sees = depths(tree.parents), ancestors(tree.parents)
    assert tree.num_nodes.tolist() == [len(tokens) for tokens, _ in rows]
    for row, (tokens, parents) in enumerate(rows):
        for node in range(tree.size):
            # Padding attends to itself alone.
            path = path_to(parents, node) if node < len(tokens) else [node]
            assert [other for other in range(tree.size) if sees[row, node, other]] == sorted(path)
            assert int(deep[row, node]) == len(path) - 1
        assert tree.tokens[row, : len(tokens)].tolist() == tokens
        assert tree.parents[row].tolist() == [*parents, *[-1] * (tree.size - len(tokens))]


@settings(max_examples=200, deadline=None)
@given(forests())
def test_a_chain_is_one_in_every_row_and_without_padding(rows: Rows) -> None:
    chains = all(parents == list(range(-1, len(parents) - 1)) for _, parents in rows)
    assert is_chain(from_lists(rows)) == (chains and len({len(tokens) for tokens, _ in rows}) == 1)


def test_the_root_alone_is_plain_decoding() -> None:
    tree = root_only([4, 9])
    validate(tree)
    assert (tree.tokens.tolist(), tree.parents.tolist(), tree.num_nodes.tolist()) == ([[4], [9]], [[-1], [-1]], [1, 1])
    assert is_chain(tree)


@pytest.mark.parametrize(
    ("tokens", "parents", "count", "candidates", "words"),
    [
        ([1, 2], [0, 0], 2, None, "the root must have parent -1"),
        ([1, 2, 3], [-1, 0, 2], 3, None, "parent 2 not in 0 … 1"),
        ([1, 2, 3], [-1, -1, 0], 3, None, "parent -1 not in 0"),
        ([1, 2, 2], [-1, 0, 0], 3, None, "node 0 has two children with token 2"),
        ([1, 2, 2], [-1, 0, 0], 3, 3, "two children"),
        ([1, 2, 3], [-1, 0, 1], 4, None, "num_nodes 4 outside 1 … 3"),
    ],
)
def test_broken_trees_are_named(
    tokens: list[int], parents: list[int], count: int, candidates: int | None, words: str
) -> None:
    limits = None if candidates is None else torch.tensor([candidates])
    tree = DraftTree(torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([count]), num_candidates=limits)
    with pytest.raises(AssertionError, match=words):
        validate(tree)


def test_siblings_in_a_window_may_be_equal() -> None:
    tree = DraftTree(
        torch.tensor([[1, 2, 2]]), torch.tensor([[-1, 0, 0]]), torch.tensor([3]), num_candidates=torch.tensor([2])
    )
    validate(tree)
    assert not is_chain(tree)
