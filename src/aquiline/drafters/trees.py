"""Defines the shapes of draft trees, and the one language that names them.

| text | tree |
|---|---|
| `chain`, `chain:4`, `chain:4,0.15` | `Chain(depth, min_prob)` |
| `static`, `static:0,1,0.0` | `StaticTree`: EAGLE-1's 25 nodes, or these paths of ranks |
| `dynamic`, `dynamic:32,5,8`, `dynamic:32,5,8,0.01` | `DynamicTree(num_nodes, depth, top_k, min_prob)` |

Without numbers, a chain has 5 tokens, the device chooses the dynamic tree, and a head with fewer levels cuts the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from aquiline.cache import check_fits
from aquiline.checks import integer, number, several

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

    The defaults are the tree that GPUs draft.

    Attributes:
        num_nodes: most nodes including the root, ≥ 2.
        depth: levels below the root, ≥ 1.
        top_k: candidates of each expanded node, and nodes expanded on each level, ≥ 1.
        min_prob: leave out nodes whose joint probability is below this, in [0, 1); 0 keeps
            the tree full. A node pays only if its probability exceeds its share of the cost.

    Source: EAGLE-2 (arXiv 2406.16858 §4); differs: float32 scores, ties go to the shallower node.
    """

    num_nodes: int = 60
    depth: int = 7
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

BareTree = type[Chain] | type[StaticTree] | type[DynamicTree]
"""A tree without numbers ("chain"); `sized` gives it those that suit the draft and the device."""

TREE_FORMS = "chain[:DEPTH[,MIN_PROB]], static[:PATH,…], dynamic[:NODES,DEPTH,TOPK[,MIN_PROB]]"
"""The language, for messages and help."""

_SHAPES: dict[str, BareTree] = {"chain": Chain, "static": StaticTree, "dynamic": DynamicTree}

_ARGUMENTS = re.compile(r"[-.,0-9a-zA-Z]+")  # int() and float() also read 1_0, +1, spaces and digits of other scripts


def names_tree(text: str) -> bool:
    """True if a text begins like a tree; a file of such a name is reached as ./chain."""
    return text.partition(":")[0] in _SHAPES


def parse_tree(text: str) -> TreePolicy | BareTree:
    """Parses a tree; one without numbers gives its class.

    Raises:
        ValueError: if the form is unknown or the numbers are invalid.
    """
    kind, colon, rest = text.partition(":")
    shape = _SHAPES.get(kind)
    if shape is not None and not colon:
        return shape
    arguments = _arguments(kind, rest.split(",")) if _ARGUMENTS.fullmatch(rest) else None
    if shape is None or arguments is None:
        raise ValueError(f"{text!r} is not a tree; allowed: {TREE_FORMS}")
    return shape(*arguments)


def _arguments(kind: str, parts: list[str]) -> tuple[Any, ...] | None:
    """Returns the arguments of a tree, or None for an unknown form."""
    try:
        if kind == "static":
            return (tuple(tuple(map(int, path.split("."))) for path in parts),)
        whole = {"chain": 1, "dynamic": 3}.get(kind)
        if whole is not None and len(parts) in (whole, whole + 1):
            return (*map(int, parts[:whole]), *map(float, parts[whole:]))
    except ValueError:
        pass  # not a number
    return None


def tree_text(tree: TreePolicy | BareTree) -> str:
    """Writes a tree as `parse_tree` reads it."""
    if isinstance(tree, type):
        return next(kind for kind, shape in _SHAPES.items() if shape is tree)
    if isinstance(tree, StaticTree):
        paths = ",".join(".".join(map(str, path)) for path in tree.paths)
        return "static" if tree == StaticTree() else f"static:{paths}"
    minimum = f",{tree.min_prob!r}" if tree.min_prob else ""
    if isinstance(tree, Chain):
        return f"chain:{tree.depth}{minimum}"
    return f"dynamic:{tree.num_nodes},{tree.depth},{tree.top_k}{minimum}"


def sized(tree: TreePolicy | BareTree, device: torch.device, levels: int | None = None) -> TreePolicy:
    """Gives a bare tree its numbers.

    Args:
        tree: returned as it is if it has numbers.
        device: of the target; each further node costs more on a CPU, so dynamic trees are smaller there.
        levels: most levels that the draft has, ≥ 1; chains and static trees are cut to them. None: no limit.
    """
    if not isinstance(tree, type):
        return tree
    if issubclass(tree, DynamicTree):
        return DynamicTree(num_nodes=32, depth=5, top_k=8) if device.type == "cpu" else DynamicTree()
    whole = tree()
    if levels is None or whole.depth <= levels:
        return whole
    return Chain(levels) if isinstance(whole, Chain) else StaticTree(tuple(paths_of(whole, levels)))


def _check_min_prob(value: float) -> None:
    if not 0 <= number("min_prob", value) < 1:
        raise ValueError(f"min_prob is {value}; allowed: in [0, 1)")


def paths_of(policy: Chain | StaticTree, depth: int) -> list[tuple[int, ...]]:
    """The paths of a policy down to `depth`, shallower first."""
    paths = policy.paths if isinstance(policy, StaticTree) else tuple((0,) * d for d in range(1, policy.depth + 1))
    return [path for path in paths if len(path) <= depth]
