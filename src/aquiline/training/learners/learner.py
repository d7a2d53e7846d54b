"""Defines the protocol between the training loop and a method: EAGLE, Medusa, Hydra or a small model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from aquiline.targets.target import Feature

RANKS = 10
"""Candidates of a draft whose ranks are counted."""

GAMMAS = (0.7, 0.85, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5)
"""Exponents of a draft's probabilities among which the best for coupled drafts is found."""

_COUPLED_EVERY = 8
"""Of the positions, one in this many is raced: each sorts the vocabulary once per γ."""


@dataclass(frozen=True, eq=False)
class Example:
    """A conversation with its features.

    Attributes:
        tokens: (n,) int64.
        mask: (n,) bool, the token is the assistant's.
        features: (n, F) features that the head reads.
        final: (n, H) the target's "final" feature.
    """

    tokens: Tensor
    mask: Tensor
    features: Tensor
    final: Tensor


@dataclass(frozen=True, eq=False)
class Ranks:
    """Ranks of the target's own tokens among the drafts of one conversation.

    Attributes:
        rank: (depths, T) int64 rank of the target's token among the draft's candidates; `RANKS` if not among the best.
        valid: (depths, T) bool, the position counts.
        greedy: (depths, T) bool, the text after the position is the target's own choice: a chain may continue.
        confidence: (T,) probability of the best draft at the first depth.
        coupled: (len(GAMMAS), m) probability that the coupled first draft is the target's draw at temperature 1, at
            some of the positions; see `aquiline.drafters.coupled.agreement`.
    """

    rank: Tensor
    valid: Tensor
    greedy: Tensor
    confidence: Tensor
    coupled: Tensor


@dataclass(frozen=True)
class Acceptance:
    """Measured acceptance of a head.

    Attributes:
        alphas: n-α for n = 0 … depths - 1.
        accuracy: per depth, how often the draft's token is the target's, teacher-forced.
        by_rank: per depth, how often the candidate of each of `RANKS` ranks is the target's token.
        positions: at which chains began.
        tau_chain: tokens per target forward with a chain of at most 5, the target's own included.
        tau_tree: the same with EAGLE-1's fixed tree.
        calibration: per bin of confidence (0 … 0.1, …): positions, mean confidence, share accepted.
        calibration_error: expected calibration error, Σ share of positions · |confidence - accepted|.
        coupled: γ → share of first drafts accepted at temperature 1; empty without positions.
    """

    alphas: list[float]
    accuracy: list[float]
    by_rank: list[list[float]]
    positions: int
    tau_chain: float
    tau_tree: float
    calibration: list[tuple[int, float, float]]
    calibration_error: float
    coupled: Mapping[float, float]

    @property
    def gamma(self) -> float | None:
        """γ with the most accepted drafts; None without positions."""
        return max(self.coupled, key=self.coupled.__getitem__, default=None)


def raced(valid: Tensor) -> Tensor:
    """(m,) int64 of the positions in a (T,) bool mask where coupled drafts are measured."""
    return valid.nonzero()[::_COUPLED_EVERY, 0]


class Learner(Protocol):
    """A network in training, with its loss.

    The loop holds one with the float32 master weights, and a replica in the compute dtype for each worker.
    """

    @property
    def network(self) -> nn.Module:
        """The trained network: master weights, or a replica."""

    @property
    def features(self) -> tuple[Feature, ...]:
        """Target features that `Example.features` holds, besides the "final" one."""

    @property
    def depths(self) -> int:
        """Depths that the loss is computed for."""

    @property
    def packs(self) -> bool:
        """Conversations of a batch are put one after another instead of being padded."""

    @property
    def fit_positions(self) -> int:
        """Positions of data for `fit`; 0 for no fit."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the target."""

    def counts(self, masks: Sequence[Tensor]) -> list[int]:
        """Per depth, how many positions of these conversations count in the loss."""

    def batch(self, examples: Sequence[Example]) -> Any:
        """Lays conversations out for `loss`."""

    def loss(self, batch: Any, scales: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
        """Loss of a micro-batch.

        Args:
            batch: made by `batch`.
            scales: per depth, the weight of each position that counts.

        Returns:
            Scalar loss; per depth the summed loss of the distributions and the hits, (depths,) float32 each.
        """

    def replica(self) -> Learner:
        """A copy in the compute dtype, for one worker."""

    def fit(self, examples: Iterable[Example]) -> str:
        """Initialises the network in closed form; returns a line for the log on the quality of the fit."""

    def measure(self, tokens: Tensor, mask: Tensor) -> Ranks:
        """Compares the drafts of a conversation of at least 3 tokens with the target's own choices."""

    def describe(self) -> str:
        """One sentence for the model card: the drafted tokens, and the inputs of the network."""

    def save(self, folder: Path, measured: Acceptance | None) -> None:
        """Writes the network into a folder that drafters load.

        Args:
            folder: made if it does not exist.
            measured: its acceptance, where it is known.
        """


AnyLearner = TypeVar("AnyLearner", bound=Learner)


@torch.no_grad()
def refresh(replica: AnyLearner, learner: Learner) -> AnyLearner:
    """Copies the master weights into a replica, and returns it."""
    for mine, master in zip(replica.network.parameters(), learner.network.parameters(), strict=True):
        mine.copy_(master)
    return replica


def gradients(learner: Learner, batch: Any, scales: Sequence[float]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Loss, statistics and the gradient of each parameter, in order; see `Learner.loss`."""
    loss, totals, hits = learner.loss(batch, scales)
    grads = torch.autograd.grad(loss, list(learner.network.parameters()), materialize_grads=True)
    return loss.detach(), totals, hits, list(grads)
