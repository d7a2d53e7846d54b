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
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A batch of B draft trees, padded to N nodes.

    The tensors lie on the CPU, where the loop reads them without waiting for a device;
    `draft_probs` alone stays where it was computed.

    Attributes:
        tokens: (B, N) int64, target vocabulary ids; node 0 is the root.
        parents: (B, N) int64; ``parents[:, 0] == -1`` and ``parents[:, i] < i``. Padding
            nodes have parent -1 as well.
        num_nodes: (B,) int64, nodes of each row including the root, 1 … N.
        log_probs: (B, N) float32 joint draft log-probability of each node given the root,
            or None where the drafter has none.
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


def root_only(roots: Sequence[int]) -> DraftTree:
    """Returns the tree of plain decoding: the root alone."""
    return from_lists([([root], [-1]) for root in roots])


def from_lists(
    rows: Sequence[tuple[Sequence[int], Sequence[int]]],
    sources: Sequence[Sequence[str]] | None = None,
    log_probs: Sequence[Sequence[float]] | None = None,
) -> DraftTree:
    """Packs per-row ``(tokens, parents)`` lists into one padded tree.

    Args:
        rows: B pairs; each starts with the root (parent -1).
        sources: per row and node, what drafted it; see `DraftTree`.
        log_probs: per row and node, its joint log-probability.
    """
    width = max(len(tokens) for tokens, _ in rows)
    tokens = [[*t, *[0] * (width - len(t))] for t, _ in rows]
    parents = [[*p, *[-1] * (width - len(p))] for _, p in rows]
    return DraftTree(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        parents=torch.tensor(parents, dtype=torch.int64),
        num_nodes=torch.tensor([len(t) for t, _ in rows], dtype=torch.int64),
        log_probs=None
        if log_probs is None
        else torch.tensor([[*p, *[-torch.inf] * (width - len(p))] for p in log_probs]),
        sources=sources,
    )


def to_lists(tree: DraftTree) -> list[tuple[list[int], list[int]]]:
    """Returns the rows as ``(tokens, parents)``, without padding; `from_lists` packs them again."""
    rows = zip(tree.tokens.tolist(), tree.parents.tolist(), tree.num_nodes.tolist(), strict=True)
    return [(tokens[:count], parents[:count]) for tokens, parents, count in rows]


def path_tokens(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    """Returns the tokens from below the root down to a node."""
    path = []
    while node > 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


def node_sources(tree: DraftTree, source: str) -> list[list[str]]:
    """Returns what drafted each node, per row without padding; `source` where the tree does not say."""
    counts = tree.num_nodes.tolist()
    if tree.sources is None:
        return [[source] * count for count in counts]
    return [list(names[:count]) for names, count in zip(tree.sources, counts, strict=True)]


def on_host(tree: DraftTree) -> DraftTree:
    """Moves a tree to the CPU, except for `draft_probs`; returns a tree that is there already unchanged."""
    if tree.tokens.device.type == "cpu":
        return tree
    tensors = {name: getattr(tree, name) for name in ("log_probs", "num_candidates")}
    optional = {name: None if tensor is None else tensor.cpu() for name, tensor in tensors.items()}
    return DraftTree(
        tree.tokens.cpu(),
        tree.parents.cpu(),
        tree.num_nodes.cpu(),
        **optional,
        draft_probs=tree.draft_probs,
        sources=tree.sources,
    )


def to_device(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Copies CPU tensors to a device, all of them in one copy; returns them as they are for the CPU.

    Args:
        tensors: those with the widest elements first, which keeps all of them aligned.
    """
    if device.type == "cpu":
        return list(tensors)
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    moved = torch.split(torch.cat(parts).to(device), [len(part) for part in parts])
    return [part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(moved, tensors, strict=True)]


@lru_cache(maxsize=512)
def index_on(device: torch.device, *indices: int) -> Tensor:
    """Returns indices as an int64 tensor, copied to the device once: rows and static trees repeat their indices."""
    return torch.tensor(indices, dtype=torch.int64, device=device)


def select(device: torch.device, rows: Sequence[int]) -> slice | Tensor:
    """Returns what picks `rows` along an axis: a slice where they are neighbours, so that reads are views."""
    first = rows[0]
    if all(row == first + i for i, row in enumerate(rows)):
        return slice(first, first + len(rows))
    return index_on(device, *rows)


def pick_rows(tree: DraftTree, indices: Sequence[int]) -> DraftTree:
    """Returns the trees of the rows with these indices."""
    found = {each.name: getattr(tree, each.name) for each in fields(tree) if each.name != "sources"}
    sources = None if tree.sources is None else [tree.sources[i] for i in indices]
    picked = {name: tensor[list(indices)] for name, tensor in found.items() if tensor is not None}
    return replace(tree, **picked, sources=sources)


def is_chain(tree: DraftTree) -> bool:
    """True if every row is one unpadded chain, so that plain causal attention fits it."""
    chain = list(range(-1, tree.size - 1))
    return all(parents == chain for parents in tree.parents.tolist())


def depths(parents: Tensor) -> Tensor:
    """Returns (B, N) int64 levels below the root; the root and padding have 0.

    Args:
        parents: (B, N) int64 on the CPU with ``parents[:, i] < i``, -1 for the root and padding.
    """
    return torch.tensor([row_depths(row) for row in parents.tolist()], dtype=torch.int64)


def row_depths(parents: Sequence[int]) -> list[int]:
    """Returns the depths of one row."""
    levels: list[int] = []
    for parent in parents:
        levels.append(levels[parent] + 1 if parent >= 0 else 0)
    return levels


def along(values: Tensor, paths: Sequence[Sequence[int]], padded: Tensor | None) -> Tensor:
    """Takes the nodes on each row's path, padded: (B, N, F) → (B, A, F).

    Args:
        paths: per row, node indices in increasing order, root first.
        padded: (B, A) `paths` padded with -1, on the device of `values`, where they are there already.
    """
    width = max(1, *map(len, paths))
    if all(not path or path[-1] == len(path) - 1 for path in paths):
        return values[:, :width]
    if len(paths) == 1:
        return values.index_select(1, torch.tensor(paths[0], device=values.device) if padded is None else padded[0])
    if padded is None:
        padded = torch.tensor([[*path, *[0] * (width - len(path))] for path in paths], device=values.device)
    return values.gather(1, padded.clamp(min=0)[:, :, None].expand(-1, -1, values.shape[2]))


def ancestors(parents: Tensor) -> Tensor:
    """Returns (B, N, N) bool; ``[b, i, j]`` says that node i may attend to node j.

    True on the diagonal and for every node on the path from the root to i. Padding nodes
    (parent -1, not node 0) attend to themselves alone.

    Args:
        parents: as for `depths`.
    """
    batch, size = parents.shape
    seen = bytearray()
    for row in parents.tolist():
        lines: list[bytearray] = []
        for node, parent in enumerate(row):
            line = lines[parent].copy() if parent >= 0 else bytearray(size)
            line[node] = 1
            lines.append(line)
        seen += b"".join(lines)
    return torch.frombuffer(seen, dtype=torch.bool).view(batch, size, size)
