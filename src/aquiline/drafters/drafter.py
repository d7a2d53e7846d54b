"""What the decoding loop asks of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from aquiline.sampling import TokenChooser
from aquiline.targets.target import Feature
from aquiline.tree import DraftTree


class Drafter(Protocol):
    """Fills draft trees. Holds no request's state itself: that is in what `new_state` returns."""

    features: tuple[Feature, ...]
    """Target features that `extend` needs; empty for token-only drafters."""

    def new_state(self, rows: int, capacity: int) -> Any:
        """Allocates state for `rows` row slots of `capacity` positions."""
        ...

    def extend(
        self,
        tokens: Tensor,
        features: Tensor | None,
        num_new: Sequence[int],
        prefixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        state: Any,
    ) -> None:
        """Takes in newly committed positions (prefill chunks, chat turns, steps).

        Args:
            tokens: (B, T) int64; ``tokens[:, i]`` is the token *after* the position of
                ``features[:, i]`` (EAGLE's one-step shift).
            features: (B, T, F) target features, or None if `features` is empty.
            num_new: per row, how many of the T are real.
            prefixes: per row, all tokens up to and including the last real one; token-only
                drafters read these and may ignore `tokens`.
            rows: B row slots.
            state: mutated.
        """
        ...

    def propose(
        self,
        root: Tensor,
        prefixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        state: Any,
        max_depth: int | None = None,
    ) -> DraftTree:
        """Builds one tree per row below its root.

        Args:
            root: (B,) int64 last emitted tokens, already taken in by `extend`.
            prefixes: per row, all tokens up to and including the root.
            rows: B row slots.
            state: may be mutated.
            max_depth: deepest level worth drafting, from the remaining budget; ≥ 0.
        """
        ...

    def reset(self, row: int, length: int, state: Any) -> None:
        """Forgets all but the first `length` tokens of a row (0 frees the slot)."""
        ...


@runtime_checkable
class CopyingDrafter(Protocol):
    """A drafter that keeps something for every position, and gives it to rows that begin the same.

    Requests with a common beginning share the target's keys and values, and the shared positions
    are not passed to `extend` again. A drafter that reads `prefixes` needs nothing for that.
    """

    def copy_prefix(self, source: int, target: int, length: int, state: Any) -> None:
        """Lets row `target` hold the first `length` tokens of row `source`, as after `reset`."""
        ...


@runtime_checkable
class SamplingDrafter(Protocol):
    """A drafter that can also *draw* its drafts from its own distribution."""

    sampled: bool
    """The loop calls `propose_sampled` in place of `propose` in steps where a row samples."""

    def propose_sampled(
        self,
        root: Tensor,
        prefixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        state: Any,
        choosers: Sequence[TokenChooser],
        generator: torch.Generator,
        max_depth: int | None = None,
    ) -> DraftTree:
        """As `Drafter.propose`, with `DraftTree.draft_probs`.

        Args:
            root: (B,) int64.
            prefixes: per row, all tokens up to and including the root.
            rows: B row slots.
            state: may be mutated.
            choosers: per row, the settings that the target's tokens are chosen with.
            generator: source of the draws.
            max_depth: deepest level worth drafting.
        """
        ...


@runtime_checkable
class ObservingDrafter(Protocol):
    """A drafter that learns from what the target said at the nodes of its tree."""

    def observe(self, tree: DraftTree, logits: Tensor, rows: Sequence[int], state: Any) -> None:
        """Called after each step, before `extend`.

        Args:
            tree: the verified tree; root-only where no draft was asked for.
            logits: (B, N, V) target logits at its nodes.
            rows: B row slots.
            state: mutated.
        """
        ...
