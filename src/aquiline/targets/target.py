"""Defines the interface between the decoding loop and a target model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aquiline.cache import KVCache

Feature = int | str
"""Name of a target feature: boundary k of the residual stream (0 … n), or "final"."""


@dataclass(frozen=True)
class TargetShape:
    """Sizes of a target, which heads and caches must match.

    Attributes:
        vocab_size: V, rows of the LM head.
        hidden_size: H, width of the residual stream.
        num_layers: n, decoder layers.
        max_positions: context length in tokens.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int


@dataclass(frozen=True, eq=False)
class TargetInput:
    """T tokens of B rows for one forward.

    Attributes:
        tokens: (B, T) int64.
        positions: (B, T) int64 positions in the sequence (tree: length + depth).
        ancestors: (B, T, T) bool; ``[b, i, j]`` is True if token i attends to token j. None means
            causal order. Committed positions are visible to all tokens (within the window).
        cache: holds the rows.
        rows: B distinct rows of the cache.
        features: features to return.
        logits_at: (B, K) int64 indices into T; None means all, K = 0 none.
    """

    tokens: Tensor
    positions: Tensor
    ancestors: Tensor | None
    cache: KVCache
    rows: Sequence[int]
    features: Sequence[Feature] = ()
    logits_at: Tensor | None = None


@dataclass(frozen=True, eq=False)
class TargetOutput:
    """The result of one forward.

    Attributes:
        logits: (B, K, V) float32 at the requested positions (by default all T).
        features: (B, T, F), the requested features concatenated in that order, or None.
        best: (B, K) int64 on the CPU, the arg-max of the logits, -1 where one is NaN; None if the target does not find
            it on the way.
    """

    logits: Tensor
    features: Tensor | None
    best: Tensor | None = None


class Target(Protocol):
    """A causal language model with an explicit cache."""

    @property
    def shape(self) -> TargetShape:
        """Sizes that heads and caches must match."""

    @property
    def dtype(self) -> torch.dtype:
        """dtype of embeddings and features."""

    @property
    def device(self) -> torch.device:
        """Device of the input tokens and the results."""

    @property
    def exact(self) -> bool:
        """True if a token's logits and features have the same bits whatever else is in the forward.

        Then all drafters and trees are lossless in every dtype; else rounding may decide near-ties.
        """

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """Allocates an empty cache for `rows` rows of `capacity` positions."""

    def forward(self, inputs: TargetInput) -> TargetOutput:
        """Runs the tokens after the committed positions of their rows.

        Writes keys and values into slots ``lengths[b] … lengths[b] + T - 1`` and does not advance the
        lengths: the call is idempotent, and `aquiline.cache.commit` keeps the accepted nodes.

        Raises:
            ValueError: for a feature that the target does not have.
        """

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the input embeddings, (*tokens.shape, H)."""

    def project(self, hidden: Tensor) -> Tensor:
        """Applies the LM head, with its scale and soft-cap, to "final" features: (…, H) → (…, V) float32."""


def check_features(features: Sequence[Feature], num_layers: int) -> None:
    """Raises ValueError unless every feature names a boundary 0 … n or "final"."""
    for feature in features:
        if feature == "final" or (isinstance(feature, int) and 0 <= feature <= num_layers):
            continue
        raise ValueError(f'unknown target feature {feature!r}; allowed: 0 … {num_layers} or "final"')


def eagle3_layers(num_layers: int) -> tuple[int, int, int]:
    """Returns EAGLE-3's default features: the residual stream entering layers 2, n//2, n-3.

    Raises:
        ValueError: for fewer than 7 layers, where the three would coincide or reorder.
    """
    if num_layers < 7:
        raise ValueError(
            f"the default EAGLE-3 features need at least 7 layers, this target has {num_layers}; name three"
        )
    return 2, num_layers // 2, num_layers - 3
