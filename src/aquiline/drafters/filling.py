"""Fills draft trees: dynamic ones from a pool of candidates, static ones level by level."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aquiline.tree import DraftTree, from_lists, index_on


@dataclass(frozen=True, eq=False)
class Pool:
    """Candidate nodes of B dynamic trees in the order in which they were made, parents first.

    They stay on their device until the best are copied to the CPU.

    Attributes:
        tokens: per level (B, n) int64.
        scores: per level (B, n) float32 joint log-probabilities.
        parents: per level below the first, (B, n) int64 indices into the pool.
    """

    tokens: list[Tensor]
    scores: list[Tensor]
    parents: list[Tensor]

    @property
    def size(self) -> int:
        """Nodes of a row."""
        return sum(level.shape[1] for level in self.tokens)

    def add(self, tokens: Tensor, scores: Tensor, expanded: Tensor) -> int:
        """Adds a level of n nodes, all children of a node together; returns the pool's former size.

        Args:
            tokens: (B, n).
            scores: (B, n).
            expanded: (B, W) indices of the nodes that have n / W children each.
        """
        base, children = self.size, tokens.shape[1] // expanded.shape[1]
        self.tokens.append(tokens)
        self.scores.append(scores)
        self.parents.append(expanded if children == 1 else expanded.repeat_interleave(children, dim=1))
        return base

    def settled(self, scores: Tensor, limit: int, floor: float) -> bool:
        """True if no child of a level with `scores` (B, W) could be kept: it would score at most its parent's score."""
        full = self.size >= limit
        if not full and floor == -math.inf:
            return False
        facts = [scores.amax(1)]
        if full:
            facts.append(torch.cat(self.scores, dim=1).topk(limit).values[:, -1])
        best, *kept = torch.stack(facts).tolist()
        return all(score < floor or (full and kept[0][i] >= score) for i, score in enumerate(best))

    def best(self, roots: Sequence[int], limit: int, floor: float) -> DraftTree:
        """Packs each row's `limit` best nodes of at least `floor` under its root; barred ones score -inf.

        Equal scores prefer the earlier node. Children never score above their parents and come
        after them, so the nodes kept are connected.
        """
        floor = max(floor, torch.finfo(torch.float32).min)
        tokens, scores = torch.cat(self.tokens, dim=1), torch.cat(self.scores, dim=1)
        parents = torch.cat((torch.full_like(self.tokens[0], -1), *self.parents), dim=1)
        kept = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        if tokens.shape[1] > limit:
            kept = scores.sort(dim=1, descending=True, stable=True).indices[:, :limit].sort(dim=1).values
            tokens, parents, scores = tokens.gather(1, kept), parents.gather(1, kept), scores.gather(1, kept)
        ids, scores = to_host(torch.cat((tokens, parents, kept), dim=1), scores)
        rows, joint = [], []
        for root, numbers, values in zip(roots, ids.tolist(), scores.tolist(), strict=True):
            index, row = {-1: 0}, ([root], [-1])
            count = len(values)
            for token, parent, place, value in zip(
                numbers[:count], numbers[count : 2 * count], numbers[2 * count :], values, strict=True
            ):
                if value >= floor:
                    index[place] = len(index)
                    row[0].append(token)
                    row[1].append(index[parent])
            rows.append(row)
            joint.append([0.0, *(value for value in values if value >= floor)])
        tree = from_lists(rows)
        padded = [values + [-math.inf] * (tree.size - len(values)) for values in joint]
        return replace(tree, log_probs=torch.tensor(padded))


Candidates = Callable[[int, Sequence[int], Tensor, int], tuple[Tensor, Tensor]]
"""(depth from 1, W nodes of one level, (B, N) tokens so far, k) → the W nodes' children:
(B, W, k) log-probabilities and target ids."""


def parents_of(paths: Sequence[tuple[int, ...]]) -> list[int]:
    """The parents of a tree's nodes: the root, then one node per path."""
    index = {(): 0} | {path: i for i, path in enumerate(paths, 1)}
    return [-1, *(index[path[:-1]] for path in paths)]


def fill_tree(root: Tensor, paths: Sequence[tuple[int, ...]], candidates: Candidates) -> DraftTree:
    """Fills a static tree level by level, and copies it to the CPU once.

    Args:
        root: (B,) int64.
        paths: ranks, shallower first; every proper prefix of a path is a path.
        candidates: proposes children; called once per level, for the nodes that have any.
    """
    batch, parents, device = len(root), parents_of(paths), root.device
    tokens = root[:, None].repeat(1, len(parents))
    own: list[Tensor] = []  # per level, each node's log-probability given its parent
    levels = []
    for depth in range(1, max(len(path) for path in paths) + 1):
        nodes = [node for node, path in enumerate(paths, 1) if len(path) == depth]
        above = list(dict.fromkeys(parents[node] for node in nodes))
        ranks = [paths[node - 1][-1] for node in nodes]
        scores, ids = candidates(depth, above, tokens, 1 + max(ranks))
        places = [above.index(parents[node]) * ids.shape[2] + rank for node, rank in zip(nodes, ranks, strict=True)]
        picked = index_on(device, *places)
        levels.append(slice(nodes[0], nodes[-1] + 1))  # shallower first: a level's nodes are neighbours
        tokens[:, levels[-1]] = ids.flatten(1)[:, picked]
        own.append(scores.flatten(1)[:, picked].float())
    tokens, scores = to_host(tokens, torch.cat(own, dim=1))
    joint = torch.zeros(batch, len(parents))
    for level in levels:
        joint[:, level] = joint[:, parents[level]] + scores[:, level.start - 1 : level.stop - 1]
    return DraftTree(
        tokens=tokens,
        parents=torch.tensor(parents).expand(batch, -1),
        num_nodes=torch.full((batch,), len(parents)),
        log_probs=joint,
    )


def with_siblings(roots: Sequence[int], tokens: Tensor, scores: Tensor, floor: float) -> DraftTree:
    """Builds chains whose every node also has its next-best children.

    Args:
        roots: B.
        tokens: (B, L, k) children of each level, all of the first child of the level above, likeliest first.
        scores: (B, L, k) joint log-probabilities.
        floor: children of a smaller joint probability are left out.
    """
    least = math.log(floor) if floor > 0 else -math.inf
    rows, joint = [], []
    for root, levels, values in zip(roots, tokens.tolist(), scores.tolist(), strict=True):
        row, kept, above = ([root], [-1]), [0.0], 0
        for children, chances in zip(levels, values, strict=True):
            first = len(row[0])
            for token, chance in zip(children, chances, strict=True):
                if chance >= least and chance > -math.inf:
                    row[0].append(token)
                    row[1].append(above)
                    kept.append(chance)
            if len(row[0]) == first:
                break
            above = first
        rows.append(row)
        joint.append(kept)
    return from_lists(rows, log_probs=joint)


def to_host(ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Copies (…, A) int64 ids and (…, B) float32 scores to the CPU, both in one copy."""
    if ids.device.type == "cpu":
        return ids, scores
    both = torch.cat((ids, scores.view(torch.int32).long()), dim=-1).cpu()
    width = ids.shape[-1]
    return both[..., :width], both[..., width:].int().view(torch.float32)
