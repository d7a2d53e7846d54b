"""The seam between the decoding loop and its drafters: two records and one protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from aquiline.sampling import TokenChooser
from aquiline.targets.target import Feature
from aquiline.tree import DraftTree


@dataclass(frozen=True)
class Needs:
    """What a drafter needs from the loop, and from a wrapper around it.

    Attributes:
        features: target features that `extend` reads; empty for token-only drafters.
        every_step: its trees carry more than drafts, and it reads the target's logits at them
            (Lookahead's window), so no wrapper may skip or change them.
        samples: it draws its drafts where a row samples, and its trees then carry `draft_probs`.
            The output equals plain decoding in distribution, not token for token.
    """

    features: tuple[Feature, ...] = ()
    every_step: bool = False
    samples: bool = False


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows that decode in a step, B of them.

    Attributes:
        slots: B distinct slots.
        texts: per row, prompt and output so far. A live view: a step appends what it commits, so
            a text ends with the root in `propose` and with the last committed token in `extend`.
        choosers: per row, how the target's tokens are chosen.
        max_depth: deepest level worth drafting, from the remaining budgets, ≥ 0; None: no limit.
        generator: source of the draws of sampled drafts.
    """

    slots: Sequence[int]
    texts: Sequence[Sequence[int]]
    choosers: Sequence[TokenChooser]
    max_depth: int | None = None
    generator: torch.Generator = field(default_factory=torch.Generator)

    @property
    def roots(self) -> list[int]:
        """The last token of each text."""
        return [text[-1] for text in self.texts]

    @property
    def sample(self) -> bool:
        """True if a row samples."""
        return any(chooser.params.temperature > 0 for chooser in self.choosers)

    def depth(self, deepest: int) -> int:
        """`deepest`, or `max_depth` where that is less."""
        return deepest if self.max_depth is None else min(deepest, self.max_depth)

    def pick(self, indices: Sequence[int]) -> Rows:
        """Some of the rows, by their index in the batch."""
        return replace(
            self,
            slots=[self.slots[i] for i in indices],
            texts=[self.texts[i] for i in indices],
            choosers=[self.choosers[i] for i in indices],
        )


@dataclass(frozen=True, eq=False)
class Committed:
    """What became text: a chunk of a prompt, or what a step emitted.

    Attributes:
        rows: the rows; their texts end with the last committed token.
        tokens: (B, T) int64, padded; ``tokens[:, i]`` is the token *after* the position of
            ``features[:, i]`` (EAGLE's one-step shift).
        features: (B, T, F) target features, or None if `Needs.features` is empty.
        counts: per row, how many of the T are real.
        tree: the verified tree of a step, root-only where nothing was drafted; None for a prompt.
        logits: (B, N, V) target logits at the tree's nodes; None for a prompt.
    """

    rows: Rows
    tokens: Tensor
    features: Tensor | None
    counts: Sequence[int]
    tree: DraftTree | None = None
    logits: Tensor | None = None


class Drafter(Protocol):
    """Fills draft trees. Requests leave their traces in what `new_state` returns, not in the drafter."""

    @property
    def needs(self) -> Needs:
        """Constant over the drafter's life."""
        ...

    def new_state(self, slots: int, capacity: int) -> Any:
        """Allocates state for `slots` slots of `capacity` positions."""
        ...

    def propose(self, rows: Rows, state: Any) -> DraftTree:
        """Builds one tree per row below its root, on any device.

        Args:
            rows: the rows; `extend` has taken in all of their texts.
            state: may be mutated.
        """
        ...

    def extend(self, committed: Committed, state: Any) -> None:
        """Takes in newly committed positions, each exactly once and in order.

        Args:
            committed: prefill chunks, chat turns, steps.
            state: mutated.
        """
        ...

    def copy(self, source: int, slot: int, length: int, state: Any) -> None:
        """Makes an empty slot hold the first `length` tokens of slot `source`, as `reset` would keep them.

        Requests with a common beginning share the target's keys and values, and the shared
        positions are not passed to `extend` again. A drafter that reads texts alone does nothing.
        """
        ...

    def reset(self, slot: int, length: int, state: Any) -> None:
        """Forgets all but the first `length` tokens of a slot (0 frees it)."""
        ...


def check_wrappable(drafter: Drafter, wrapped: str, remedy: str) -> None:
    """Rejects a drafter whose trees must reach the target unchanged and in every step.

    A wrapper that skips, cuts or mixes trees would starve a window, or lose the distributions
    that sampled drafts are verified with.

    Args:
        drafter: the drafter.
        wrapped: what it cannot be, "merged" for example.
        remedy: what to do instead.

    Raises:
        ValueError: it needs every step, or it samples.
    """
    name = type(drafter).__name__
    if drafter.needs.every_step:
        raise ValueError(f"{name} must see every step and cannot be {wrapped}; {remedy}")
    if drafter.needs.samples:
        raise ValueError(f"{name} with sampled=True cannot be {wrapped}; {remedy}, or set sampled=False")
