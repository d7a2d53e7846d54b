"""Which nodes a drafter puts into its tree, the language that names trees, and how a static one is filled.

| text | tree |
|---|---|
| `chain`, `chain:4`, `chain:4,0.15` | `Chain(depth, min_prob)` |
| `static`, `static:0,1,0.0` | `StaticTree`: EAGLE-1's 25 nodes, or these paths of ranks |
| `dynamic:32,5,8`, `dynamic:32,5,8,0.01` | `DynamicTree(num_nodes, depth, top_k, min_prob)` |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aquiline.cache import check_fits
from aquiline.checks import integer, number, several
from aquiline.tree import DraftTree

EAGLE1_PATHS: tuple[tuple[int, ...], ...] = (
    *((i,) for i in range(4)),
    *((0, i) for i in range(3)),
    *((1, i) for i in range(2)),
    *((2, i) for i in range(2)),
    (3, 0),
    *((0, 0, i) for i in range(3)),
    *((0, 1, i) for i in range(2)),
    *((0, 2, i) for i in range(2)),
    (1, 0, 0),
    *((0, 0, 0, i) for i in range(3)),
    *((0, 0, 0, 0, i) for i in range(2)),
)
"""EAGLE-1's 25 nodes (arXiv 2401.15077, Fig. 9): (0, 2) is the third candidate of the best token."""


@dataclass(frozen=True)
class Chain:
    """A chain of the likeliest tokens.

    Attributes:
        depth: drafts, ≥ 1.
        min_prob: stop before a node whose joint probability is below this, in [0, 1).
    """

    depth: int = 5
    min_prob: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "depth", integer("chain depth", self.depth))
        if self.depth < 1:
            raise ValueError(f"chain depth is {self.depth}; allowed: ≥ 1 (draft=None decodes without drafts)")
        check_fits(f"chain depth {self.depth}", 1 + self.depth, "lower depth")
        _check_min_prob(self.min_prob)


@dataclass(frozen=True)
class StaticTree:
    """A fixed tree of candidate ranks (EAGLE-1, Medusa).

    Attributes:
        paths: one tuple of ranks per node; every proper prefix of a path must be a path.
    """

    paths: tuple[tuple[int, ...], ...] = EAGLE1_PATHS

    def __post_init__(self) -> None:
        paths = [
            tuple(integer("tree path rank", rank) for rank in several("tree path", path, "a tuple of ranks"))
            for path in several("tree paths", self.paths, "several tuples of ranks")
        ]
        known = set(paths)
        if not paths or len(known) != len(paths):
            raise ValueError("a static tree needs at least one path and no path twice")
        for path in paths:
            if not path or min(path) < 0:
                raise ValueError(f"tree path {path} is not valid; allowed: ranks ≥ 0, at least one")
            if len(path) > 1 and path[:-1] not in known:
                raise ValueError(f"tree path {path} lacks its parent {path[:-1]}; add it")
        check_fits(f"a static tree of {len(paths)} paths", 1 + len(paths), "give fewer paths")
        # Shallower first: a node's index must exceed its parent's.
        object.__setattr__(self, "paths", tuple(sorted(paths, key=lambda path: (len(path), path))))

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return max(len(path) for path in self.paths)


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's context-aware tree: expand by joint probability, then keep the best nodes.

    Attributes:
        num_nodes: most nodes including the root, ≥ 2.
        depth: levels below the root, ≥ 1.
        top_k: candidates of each expanded node, and nodes expanded on each level, ≥ 1.
        min_prob: leave out nodes whose joint probability is below this, in [0, 1); 0 keeps
            the tree full. A node pays only if its probability exceeds its share of the cost.

    Source: EAGLE-2 (arXiv 2406.16858 §4); differs: float32 scores, ties go to the shallower node.
    """

    num_nodes: int = 60
    depth: int = 6
    top_k: int = 10
    min_prob: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("num_nodes", 2), ("depth", 1), ("top_k", 1)):
            object.__setattr__(self, name, integer(name, getattr(self, name), least))
        _check_min_prob(self.min_prob)
        room = 1 + self.top_k + (self.depth - 1) * self.top_k**2
        if self.num_nodes > room:
            raise ValueError(
                f"num_nodes {self.num_nodes} cannot be filled: depth {self.depth} and top_k {self.top_k} make at most "
                f"{room} nodes; lower num_nodes or raise depth or top_k"
            )
        check_fits(f"num_nodes {self.num_nodes}", self.num_nodes, "lower num_nodes")
        # All expanded nodes lie in the draft network's own cache.
        expanded = (self.depth - 1) * self.top_k
        check_fits(f"expanding top_k {self.top_k} nodes on {self.depth - 1} levels", expanded, "lower top_k or depth")


TreePolicy = Chain | StaticTree | DynamicTree

TREE_FORMS = "chain[:DEPTH[,MIN_PROB]], static[:PATH,…], dynamic:NODES,DEPTH,TOPK[,MIN_PROB]"
"""The language, for messages and help."""


def names_tree(text: str) -> bool:
    """Whether a text begins like a tree; a file of such a name is reached as ./chain."""
    return text.partition(":")[0] in ("chain", "static", "dynamic")


def parse_tree(text: str) -> TreePolicy:
    """Parses a tree.

    Raises:
        ValueError: if the form is unknown or the numbers are invalid.
    """
    kind, colon, rest = text.partition(":")
    arguments = _arguments(kind, rest.split(",") if colon else [])
    if arguments is None:
        raise ValueError(f"{text!r} is not a tree; allowed: {TREE_FORMS}")
    makers: dict[str, type[Any]] = {"chain": Chain, "static": StaticTree, "dynamic": DynamicTree}
    tree: TreePolicy = makers[kind](*arguments)
    return tree


def _arguments(kind: str, parts: list[str]) -> tuple[Any, ...] | None:
    """The arguments of a tree, or None for an unknown form."""
    try:
        if kind == "static":
            return (tuple(tuple(map(int, path.split("."))) for path in parts),) if parts else ()
        whole = {"chain": 1, "dynamic": 3}.get(kind)
        if whole is not None and (len(parts) in (whole, whole + 1) or (kind == "chain" and not parts)):
            return (*map(int, parts[:whole]), *map(float, parts[whole:]))
    except ValueError:
        pass  # not a number
    return None


def tree_text(tree: TreePolicy) -> str:
    """Writes a tree as `parse_tree` reads it."""
    if isinstance(tree, StaticTree):
        paths = ",".join(".".join(map(str, path)) for path in tree.paths)
        return "static" if tree == StaticTree() else f"static:{paths}"
    minimum = f",{tree.min_prob!r}" if tree.min_prob else ""
    if isinstance(tree, Chain):
        return f"chain:{tree.depth}{minimum}"
    return f"dynamic:{tree.num_nodes},{tree.depth},{tree.top_k}{minimum}"


def _check_min_prob(value: float) -> None:
    if not 0 <= number("min_prob", value) < 1:
        raise ValueError(f"min_prob is {value}; allowed: in [0, 1)")


def best_nodes(scores: Sequence[float], limit: int, min_score: float) -> list[int]:
    """Indices of the `limit` best scores at or above `min_score`, in increasing order.

    Equal scores prefer the lower index. If children never score above their parents and come
    after them, the result is closed under parents.
    """
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:limit]
    return sorted(i for i in order if scores[i] >= min_score)


Candidates = Callable[[int, Sequence[int], Tensor, int], tuple[Tensor, Tensor]]
"""(depth from 1, W nodes of one level, (B, N) tokens so far, k) → the W nodes' children:
(B, W, k) log-probabilities and target ids."""


def paths_of(policy: Chain | StaticTree, depth: int) -> list[tuple[int, ...]]:
    """The paths of a policy down to `depth`, shallower first."""
    paths = policy.paths if isinstance(policy, StaticTree) else tuple((0,) * d for d in range(1, policy.depth + 1))
    return [path for path in paths if len(path) <= depth]


def parents_of(paths: Sequence[tuple[int, ...]]) -> list[int]:
    """The parents of a tree's nodes: the root, then one node per path."""
    index = {(): 0} | {path: i for i, path in enumerate(paths, 1)}
    return [-1, *(index[path[:-1]] for path in paths)]


def fill_tree(root: Tensor, paths: Sequence[tuple[int, ...]], candidates: Candidates) -> DraftTree:
    """Fills a static tree level by level.

    Args:
        root: (B,) int64.
        paths: ranks, shallower first; every proper prefix of a path is a path.
        candidates: proposes children; called once per level, for the nodes that have any.
    """
    batch, parents = len(root), parents_of(paths)
    tokens = root[:, None].repeat(1, len(parents))
    joint = torch.zeros(batch, len(parents), device=root.device)
    for depth in range(1, max(len(path) for path in paths) + 1):
        nodes = [node for node, path in enumerate(paths, 1) if len(path) == depth]
        fathers = [parents[node] for node in nodes]
        above = list(dict.fromkeys(fathers))
        ranks = [paths[node - 1][-1] for node in nodes]
        scores, ids = candidates(depth, above, tokens, 1 + max(ranks))
        slots = [above.index(father) for father in fathers]
        tokens[:, nodes] = ids[:, slots, ranks]
        joint[:, nodes] = joint[:, fathers] + scores[:, slots, ranks].float()
    return DraftTree(
        tokens=tokens,
        parents=torch.tensor(parents, device=root.device).expand(batch, -1),
        num_nodes=torch.full((batch,), len(parents), device=root.device),
        log_probs=joint,
    )
