"""Predicts the acceptance and speed of smaller trees from the verification of a large one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aquiline.bench.recorder import Step, nodes_of
from aquiline.drafters.trees import Chain, DynamicTree
from aquiline.targets.cost import seconds_at

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Profile:
    """All nodes of the recorded steps, padded to the largest tree: (steps, nodes) arrays.

    Attributes:
        score: joint draft log-probability; -inf for padding. Drafters without probabilities get
            minus the depth, so that shallower nodes come first.
        depth: levels below the root.
        rank: largest rank among siblings on the path to the node.
        accepted: whether the text continued through the node.
    """

    score: Floats
    depth: Ints
    rank: Ints
    accepted: Bools

    @property
    def steps(self) -> int:
        """Recorded steps."""
        return len(self.score)


@dataclass(frozen=True)
class Costs:
    """Costs of the parts of a step.

    Attributes:
        curve: seconds of the target's forward by number of tokens, see `cost_curve`.
        narrow: seconds of the drafter for a level of one node.
        wide: seconds of the drafter for a level of `width` nodes.
        width: number of nodes of the wide level.
        rest: seconds of accepting, committing and everything else.
    """

    curve: Sequence[dict[str, float]]
    narrow: float
    wide: float
    width: int
    rest: float

    def level(self, nodes: int) -> float:
        """Interpolates the seconds of a level of `nodes` nodes between the two measured levels."""
        share = (nodes - 1) / (self.width - 1) if self.width > 1 else 0.0
        return self.narrow + (self.wide - self.narrow) * share


@dataclass(frozen=True)
class Prediction:
    """Expected τ, mean number of drafted nodes, and seconds of a whole step, of a tree policy."""

    policy: Chain | DynamicTree
    tokens_per_step: float
    nodes: float
    seconds_per_step: float

    @property
    def tokens_per_second(self) -> float:
        """Expected decoding speed."""
        return self.tokens_per_step / self.seconds_per_step


def make_profile(steps: Sequence[Step]) -> Profile:
    """Converts recorded steps to arrays."""
    width = max((int(step.tree.num_nodes[step.index]) for step in steps), default=1)
    shape = (len(steps), max(width - 1, 1))
    score = np.full(shape, -np.inf)
    depth, rank = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    accepted = np.zeros(shape, dtype=np.bool_)
    for i, step in enumerate(steps):
        joint = None if step.tree.log_probs is None else step.tree.log_probs[step.index, 1:].tolist()
        for at, node in enumerate(nodes_of(step)):
            depth[i, at], rank[i, at], accepted[i, at] = len(node.ranks), max(node.ranks), node.accepted
            score[i, at] = -len(node.ranks) if joint is None else joint[at]
    return Profile(score, depth, rank, accepted)


def predict(profile: Profile, costs: Costs, policy: Chain | DynamicTree) -> Prediction:
    """Predicts the drafts of `policy` within the recorded trees, and the cost of its steps.

    The policy must not be larger than the recorded one, whose nodes are all that is known.
    """
    top_k = 1 if isinstance(policy, Chain) else policy.top_k
    limit = policy.depth if isinstance(policy, Chain) else policy.num_nodes - 1
    floor = np.log(policy.min_prob) if policy.min_prob > 0 else -np.inf
    fits = (profile.rank < top_k) & (profile.depth <= policy.depth) & (profile.score >= floor)
    fits &= np.isfinite(profile.score)
    order = np.argsort(np.where(fits, -profile.score, np.inf), axis=1, kind="stable")
    kept = np.zeros_like(fits)
    np.put_along_axis(kept, order[:, :limit], True, axis=1)
    kept &= fits
    nodes = kept.sum(axis=1)
    levels = np.where(kept, profile.depth, 0).max(axis=1)
    target = np.mean([seconds_at(costs.curve, 1 + count) for count in nodes.tolist()])
    # The root's level always runs; children of the deepest level are not computed.
    first = costs.level(1)
    fed = np.minimum(levels, policy.depth - 1).mean()
    seconds = float(target) + first + fed * costs.level(top_k) + costs.rest
    return Prediction(policy, 1 + float((kept & profile.accepted).sum(axis=1).mean()), float(nodes.mean()), seconds)


def candidates(largest: DynamicTree) -> list[Chain | DynamicTree]:
    """Returns chains and dynamic trees up to the size of the recorded one."""
    floors = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
    found: list[Chain | DynamicTree] = [
        Chain(depth, floor) for depth in range(1, largest.depth + 1) for floor in floors
    ]
    for depth in range(2, largest.depth + 1):
        for top_k in (k for k in (2, 3, 4, 6, 8) if k <= largest.top_k):
            room = 1 + top_k + (depth - 1) * top_k**2
            for nodes in (n for n in (4, 6, 8, 12, 16, 24, 32, 48, 64) if n <= min(largest.num_nodes, room)):
                found += [DynamicTree(nodes, depth, top_k, floor) for floor in (0.0, 0.03, 0.1)]
    return found
