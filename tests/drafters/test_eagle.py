"""The trees of EAGLE drafters against the definition: each path drafted by itself, the whole text at once."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.eagle_network import DraftHead, forward_network, new_draft_cache
from aquiline.drafters.trees import Chain, DynamicTree, StaticTree, TreePolicy
from aquiline.targets.rope import RotaryTable
from aquiline.tree import DraftTree
from tests import tiny
from tests.drafters.loop import extend, rows_of
from tests.tree_invariants import validate

TEXTS = ([5, 9, 2, 7, 7, 1, 3], [8, 4, 60])
"""Each with the root as its last token."""

HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"kind": "eagle3"},
    "eagle3.1": {"kind": "eagle3", "norm_output": True, "fc_norm": True, "norm_before_residual": True},
    "eagle3 of two layers": {"kind": "eagle3", "num_layers": 2},
    "eagle": {"kind": "eagle"},
}


@cache
def head(name: str) -> DraftHead:
    return tiny.head(**HEADS[name])


def features(name: str, row: int) -> Tensor:
    """Features of all positions but the root's."""
    width = 48 * len(head(name).config.features)
    generator = torch.Generator().manual_seed(row)
    return torch.randn(1, len(TEXTS[row]) - 1, width, generator=generator, dtype=torch.float64)


@cache
def laws(name: str, row: int, path: tuple[int, ...]) -> tuple[tuple[float, int], ...]:
    """(Log-probability, target id) of all draft tokens after a text and a path, the likeliest first.

    Without a cache, a tree or levels: every row of the network is computed again for every path.
    """
    made, target, text = head(name), tiny.decoder("llama"), TEXTS[row]
    network, rotary = made.network, RotaryTable(made.config.layer.rope, torch.float64)
    hidden, drafted = network.fuse(features(name, row)), list[int]()
    for token in (*path, None):
        tokens = [*text, *drafted]
        embedded = target.embed(torch.tensor([tokens[1:]]))
        positions = torch.arange(hidden.shape[1])[None]
        empty = new_draft_cache(network, 1, 64, 256)
        stream = forward_network(network, embedded, hidden, positions, None, empty, [0], rotary)[:, -1:]
        if token is not None:
            hidden = torch.cat((hidden, network.feedback(stream)), dim=1)
            drafted.append(token)
    logits = target.project(stream) if made.config.kind == "eagle" else network.logits(stream)
    log_probs = logits[0, 0].float().log_softmax(-1)
    ids = range(tiny.VOCAB) if made.draft_to_target is None else made.draft_to_target.tolist()
    return tuple(sorted(zip(log_probs.tolist(), ids, strict=True), reverse=True))


def score(name: str, row: int, path: tuple[int, ...]) -> float:
    """Joint log-probability of a path."""
    return sum(next(value for value, token in laws(name, row, path[:i]) if token == path[i]) for i in range(len(path)))


def best(name: str, row: int, path: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    return [(*path, token) for _, token in laws(name, row, path)[:count]]


def expected_paths(name: str, row: int, policy: TreePolicy) -> set[tuple[int, ...]]:
    """The nodes of a row's tree, as paths of tokens, as the papers define them."""
    if isinstance(policy, StaticTree):
        known: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
        for ranks in policy.paths:
            known[ranks] = best(name, row, known[ranks[:-1]], ranks[-1] + 1)[-1]
        return {path for ranks, path in known.items() if ranks}
    shape = policy if isinstance(policy, DynamicTree) else DynamicTree(policy.depth + 1, policy.depth, 1)
    level = best(name, row, (), shape.top_k)
    pool = list(level)
    for _ in range(shape.depth - 1):
        level = [child for path in level for child in best(name, row, path, shape.top_k)]
        pool += level
        level = sorted(level, key=lambda path: -score(name, row, path))[: shape.top_k]
    kept = sorted(pool, key=lambda path: -score(name, row, path))[: shape.num_nodes - 1]
    return {path for path in kept if score(name, row, path) >= torch.tensor(max(policy.min_prob, 1e-30)).log()}


def proposed(name: str, policy: TreePolicy) -> DraftTree:
    """Proposes for both texts at once; the first one came in two pieces."""
    drafter = EagleDrafter(head(name), tiny.decoder("llama"), policy)
    state = drafter.new_state(3, 16)
    rows = [2, 0]
    for row, (slot, text) in enumerate(zip(rows, TEXTS, strict=True)):
        cut = 3 if row == 0 else len(text) - 1  # so that what is pending differs in length
        for first, last in ((0, cut), (cut, len(text) - 1)):
            if first < last:
                extend(drafter, state, slot, text[: last + 1], features(name, row)[:, first:last])
            if row == 0 and first == 0:  # a step between the pieces, whose own keys and values must be forgotten
                drafter.propose(rows_of(text[: cut + 1], slots=[slot]), state)
    return drafter.propose(rows_of(*TEXTS, slots=rows), state)


POLICIES = {
    "chain": Chain(4),
    "cautious chain": Chain(5, min_prob=0.02),
    "static": StaticTree(),
    "dynamic": DynamicTree(num_nodes=14, depth=4, top_k=3),
    "wide": DynamicTree(num_nodes=25, depth=3, top_k=5),
    "pruned": DynamicTree(num_nodes=14, depth=4, top_k=3, min_prob=0.01),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", HEADS)
def test_a_tree_equals_its_paths_one_by_one(name: str, policy: str) -> None:
    with torch.inference_mode():
        tree = proposed(name, POLICIES[policy])
        validate(tree)
        assert tree.log_probs is not None
        for row in range(len(TEXTS)):
            paths: list[tuple[int, ...]] = [()]
            for node in range(1, int(tree.num_nodes[row])):
                paths.append((*paths[int(tree.parents[row, node])], int(tree.tokens[row, node])))
                assert float(tree.log_probs[row, node]) == pytest.approx(score(name, row, paths[-1]), abs=1e-4)
            assert set(paths[1:]) == expected_paths(name, row, POLICIES[policy])


def test_drafts_after_a_reset_and_a_copy_are_those_of_a_fresh_start() -> None:
    """Rows that keep a beginning, their own or another's, draft what a fresh row drafts."""
    name, text, keep = "eagle3", TEXTS[0], 4
    drafter = EagleDrafter(head(name), tiny.decoder("llama"), POLICIES["dynamic"])
    state = drafter.new_state(3, 16)
    given = features(name, 0)
    other = [*text[:keep], 30, 31, 32]
    changed = torch.cat((given[:, : keep - 1], given[:, keep - 1 :] + 1), dim=1)
    extend(drafter, state, 0, other, changed)
    drafter.propose(rows_of(other), state)
    drafter.copy(0, 1, keep, state)
    drafter.reset(0, keep, state)
    with torch.inference_mode():
        trees = []
        for slot, first in ((0, keep - 1), (1, keep - 1), (2, 0)):
            extend(drafter, state, slot, text, given[:, first:])
            trees.append(drafter.propose(rows_of(text, slots=[slot]), state))
    fresh = trees.pop()
    for tree in trees:
        assert tree.tokens.tolist() == fresh.tokens.tolist() and tree.parents.tolist() == fresh.parents.tolist()
        torch.testing.assert_close(tree.log_probs, fresh.log_probs)


def test_no_deeper_than_asked() -> None:
    drafter = EagleDrafter(head("eagle3"), tiny.decoder("llama"), POLICIES["dynamic"])
    for depth in (0, 1, 2):
        state = drafter.new_state(1, 16)
        text = TEXTS[0]
        extend(drafter, state, 0, text, features("eagle3", 0))
        tree = drafter.propose(rows_of(text, max_depth=depth), state)
        deepest, parents = [0], tree.parents[0].tolist()
        for node in range(1, tree.size):
            deepest.append(deepest[parents[node]] + 1)
        assert max(deepest) == depth
