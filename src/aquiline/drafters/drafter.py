"""The interface between the decoding loop and its drafters: two records and one protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from aquiline.drafters.prices import Prices
from aquiline.drafters.store import Prediction
from aquiline.sampling import TokenChooser
from aquiline.targets.target import Feature
from aquiline.tree import DraftTree, pick_rows


@dataclass(frozen=True)
class Needs:
    """Requirements of a drafter on the loop, and on wrappers.

    Attributes:
        features: target features that `extend` reads; empty for token-only drafters.
        every_step: its trees hold nodes other than drafts whose target logits it reads (Lookahead's
            window), so a wrapper must not skip or change them.
        samples: it draws drafts for rows that sample; its trees then have `draft_probs`, and the
            output equals plain decoding in distribution, not token for token.
        source: what drafts, as reported for each token: "head", "lookup", "model" (a small one) or
            "lookahead".
    """

    features: tuple[Feature, ...] = ()
    every_step: bool = False
    samples: bool = False
    source: str = "head"


@dataclass(frozen=True, eq=False)
class Drafting:
    """Drafting settings of one request; they change its speed, not its output.

    Attributes:
        enabled: False decodes this request plainly.
        depth: deepest level of its trees, ≥ 1; None: the drafter's.
        nodes: most drafted nodes of its trees, ≥ 1; None: the drafter's.
        expected: a text that the output may repeat, tried before the drafter.
    """

    enabled: bool = True
    depth: int | None = None
    nodes: int | None = None
    expected: Prediction | None = None

    @property
    def usual(self) -> bool:
        """True if the request asks for nothing of its own."""
        return self.enabled and self.depth is None and self.nodes is None and self.expected is None


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows that decode in a step, B of them.

    Attributes:
        slots: B distinct slots.
        texts: per row, prompt and output so far. A live view: a step appends committed tokens, so a
            text ends with the root in `propose` and with the last committed token in `extend`.
        choosers: per row, chooses the target's tokens.
        max_depth: deepest useful level given the remaining budgets, ≥ 0; None: no limit.
        generator: source of randomness for sampled drafts.
        drafting: per row, its request's settings; empty if all have the defaults.
    """

    slots: Sequence[int]
    texts: Sequence[Sequence[int]]
    choosers: Sequence[TokenChooser]
    max_depth: int | None = None
    generator: torch.Generator = field(default_factory=torch.Generator)
    drafting: Sequence[Drafting] = ()
    prices: Prices | None = None

    @property
    def roots(self) -> list[int]:
        """The last token of each text."""
        return [text[-1] for text in self.texts]

    @property
    def sample(self) -> bool:
        """True if a row samples."""
        return any(chooser.params.temperature > 0 for chooser in self.choosers)

    def depth(self, deepest: int) -> int:
        """Returns the smaller of `deepest` and `max_depth`."""
        return deepest if self.max_depth is None else min(deepest, self.max_depth)

    def pick(self, indices: Sequence[int]) -> Rows:
        """Selects rows by their index in the batch."""
        return replace(
            self,
            slots=[self.slots[i] for i in indices],
            texts=[self.texts[i] for i in indices],
            choosers=[self.choosers[i] for i in indices],
            drafting=[self.drafting[i] for i in indices] if self.drafting else (),
        )


@dataclass(frozen=True, eq=False)
class Committed:
    """Newly committed tokens: a chunk of a prompt, or the tokens of a step.

    Attributes:
        rows: the rows; their texts end with the committed tokens.
        features: (B, T, F) target features, padded, or None if `Needs.features` is empty; ``features[:, i]`` is that of
            the position *before* the i-th committed token (EAGLE's one-step shift).
        counts: per row, the number of committed tokens.
        tree: the verified tree of a step, root-only if nothing was drafted; None for a prompt.
        logits: (B, N, V) target logits at the tree's nodes; None for a prompt.
    """

    rows: Rows
    features: Tensor | None
    counts: Sequence[int]
    tree: DraftTree | None = None
    logits: Tensor | None = None

    def pick(self, indices: Sequence[int]) -> Committed:
        """Selects rows by their index in the batch."""
        index = list(indices)
        return Committed(
            rows=self.rows.pick(index),
            features=None if self.features is None else self.features[index],
            counts=[self.counts[i] for i in index],
            tree=None if self.tree is None else pick_rows(self.tree, index),
            logits=None if self.logits is None else self.logits[index],
        )


class Drafter(Protocol):
    """Proposes draft trees. All per-request state lives in the result of `new_state`."""

    @property
    def needs(self) -> Needs:
        """The drafter's requirements; they never change."""
        ...

    def new_state(self, slots: int, capacity: int) -> Any:
        """Allocates state for `slots` slots of `capacity` positions."""
        ...

    def propose(self, rows: Rows, state: Any) -> DraftTree:
        """Builds one tree per row below its root.

        Args:
            rows: the rows; `extend` has received all of their texts.
        """
        ...

    def extend(self, committed: Committed, state: Any) -> None:
        """Receives newly committed positions, each exactly once and in order.

        Args:
            committed: prefill chunks, chat turns, steps.
        """
        ...

    def copy(self, source: int, slot: int, length: int, state: Any) -> None:
        """Copies the first `length` tokens of slot `source` into an empty slot, as `reset` would keep them.

        Requests with a common prefix share the target's keys and values, and the shared positions are
        not passed to `extend` again. A drafter that reads only texts does nothing.
        """
        ...

    def reset(self, slot: int, length: int, state: Any) -> None:
        """Discards all but the first `length` tokens of a slot (0 frees it)."""
        ...


def check_wrappable(drafter: Drafter, wrapped: str, remedy: str) -> None:
    """Rejects a drafter whose trees must reach the target unchanged in every step.

    A wrapper that skips, cuts or mixes trees would deprive Lookahead of its window, or lose the
    distributions needed to verify sampled drafts.

    Args:
        wrapped: description for the error message, such as "merged".
        remedy: suggestion that ends the message.

    Raises:
        ValueError: if the drafter needs every step, or samples.
    """
    name = type(drafter).__name__
    if drafter.needs.every_step:
        raise ValueError(f"{name} must see every step and cannot be {wrapped}; {remedy}")
    if drafter.needs.samples:
        raise ValueError(f"{name} with sampled=True cannot be {wrapped}; {remedy}, or set sampled=False")
