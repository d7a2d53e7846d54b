"""Draft trees: tokens and parents; everything else about a tree is derived here.

A tree of N nodes is two integer arrays. Node 0 is the root: the last token that was
emitted, which the target has not seen yet. ``parents[i] < i``, so one left-to-right pass
visits every parent before its children::

    tokens   7 3 5 9        7 ── 3 ── 9
    parents -1 0 0 1          └─ 5
    depths   0 1 1 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A batch of B draft trees, padded to N nodes.

    Attributes:
        tokens: (B, N) int64, target vocabulary ids; node 0 is the root.
        parents: (B, N) int64; ``parents[:, 0] == -1`` and ``parents[:, i] < i``. Padding
            nodes have parent -1 as well.
        num_nodes: (B,) int64, nodes of each row including the root, 1 … N.
        log_probs: (B, N) float32 joint draft log-probability of each node given the root,
            or None where the drafter has none (prompt lookup).
        draft_probs: (B, N, V) float32, only for *sampled* drafts: row i is the distribution
            that the children of node i were drawn from, without replacement.
        num_candidates: (B,) int64 or None; nodes from this index on are forwarded but never
            accepted (Lookahead's window).
        sources: per row and node, what drafted it ("head", "lookup", …); None: all nodes come
            from the drafter that its `Needs.source` names. Only mixed drafters set it.
    """

    tokens: Tensor
    parents: Tensor
    num_nodes: Tensor
    log_probs: Tensor | None = None
    draft_probs: Tensor | None = None
    num_candidates: Tensor | None = None
    sources: Sequence[Sequence[str]] | None = None

    @property
    def size(self) -> int:
        """N, the padded number of nodes including the root."""
        return self.tokens.shape[1]


def root_only(roots: Sequence[int], device: torch.device | str = "cpu") -> DraftTree:
    """Returns the tree of plain decoding: the root alone.

    Args:
        roots: B last emitted tokens.
        device: where the tensors are made.
    """
    return from_lists([([root], [-1]) for root in roots], device)


def from_lists(
    rows: Sequence[tuple[Sequence[int], Sequence[int]]],
    device: torch.device | str = "cpu",
    sources: Sequence[Sequence[str]] | None = None,
) -> DraftTree:
    """Packs per-row ``(tokens, parents)`` lists into one padded tree.

    Args:
        rows: B pairs; each starts with the root (parent -1).
        device: where the tensors are made.
        sources: per row and node, what drafted it; see `DraftTree`.
    """
    width = max(len(tokens) for tokens, _ in rows)
    tokens = [list(t) + [0] * (width - len(t)) for t, _ in rows]
    parents = [list(p) + [-1] * (width - len(p)) for _, p in rows]
    return DraftTree(
        tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
        parents=torch.tensor(parents, dtype=torch.int64, device=device),
        num_nodes=torch.tensor([len(t) for t, _ in rows], dtype=torch.int64, device=device),
        sources=sources,
    )


def to_lists(tree: DraftTree) -> list[tuple[list[int], list[int]]]:
    """Returns the rows as ``(tokens, parents)``, without padding; `from_lists` packs them again."""
    rows = zip(tree.tokens.tolist(), tree.parents.tolist(), tree.num_nodes.tolist(), strict=True)
    return [(tokens[:count], parents[:count]) for tokens, parents, count in rows]


def node_sources(tree: DraftTree, source: str) -> list[list[str]]:
    """Returns what drafted each node, per row without padding; `source` where the tree does not say."""
    counts = tree.num_nodes.tolist()
    if tree.sources is None:
        return [[source] * count for count in counts]
    return [list(names[:count]) for names, count in zip(tree.sources, counts, strict=True)]


def on_device(tree: DraftTree, device: torch.device) -> DraftTree:
    """Moves a tree's tensors to `device`; the tree itself where they are there already."""
    if tree.tokens.device == device:
        return tree
    optional = {name: getattr(tree, name) for name in ("log_probs", "draft_probs", "num_candidates")}
    moved = {name: None if tensor is None else tensor.to(device) for name, tensor in optional.items()}
    return DraftTree(
        tree.tokens.to(device), tree.parents.to(device), tree.num_nodes.to(device), **moved, sources=tree.sources
    )


def is_chain(tree: DraftTree) -> bool:
    """True if every row is one unpadded chain, so that plain causal attention fits it."""
    expected = torch.arange(-1, tree.size - 1, device=tree.parents.device)
    return bool((tree.parents == expected).all())


def depths(parents: Tensor) -> Tensor:
    """Returns (B, N) int64 levels below the root; the root and padding have 0.

    Args:
        parents: (B, N) int64 with ``parents[:, i] < i``, -1 for the root and padding.
    """
    result = torch.zeros_like(parents)
    for node in range(1, parents.shape[1]):
        parent = parents[:, node]
        above = result.gather(1, parent.clamp(min=0)[:, None])[:, 0] + 1
        result[:, node] = torch.where(parent < 0, torch.zeros_like(above), above)
    return result


def ancestors(parents: Tensor) -> Tensor:
    """Returns (B, N, N) bool; ``[b, i, j]`` says that node i may attend to node j.

    True on the diagonal and for every node on the path from the root to i. Padding nodes
    (parent -1, not node 0) attend to themselves alone.
    """
    batch, size = parents.shape
    result = torch.eye(size, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    rows = torch.arange(batch, device=parents.device)
    for node in range(1, size):
        parent = parents[:, node]
        inherited = result[rows, parent.clamp(min=0)] & (parent >= 0)[:, None]
        result[:, node] |= inherited
    return result
