"""Prompt lookup where the text repeats itself, another drafter where it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from aquiline import tree as trees
from aquiline.drafters.drafter import CopyingDrafter, Drafter
from aquiline.drafters.lookup import LookupState, PromptLookup
from aquiline.tree import DraftTree


@dataclass(eq=False)
class LookupFirstState:
    """States of the two drafters."""

    lookup: LookupState
    other: Any


class LookupFirst:
    """Takes a lookup's continuation where there is one, and asks the other drafter elsewhere.

    A continuation found in the text costs nothing, and after a long match it is usually right, so
    the other drafter's network runs only where the text is new. Unlike a merged tree, a row drafts
    from one of the two, and chains stay chains.

    Args:
        lookup: its `min_ngram` decides how long a match must be to be preferred.
        other: the other drafter; it takes in every committed position either way.
    """

    def __init__(self, lookup: PromptLookup, other: Drafter) -> None:
        self.lookup, self.other = lookup, other
        self.features = other.features

    def new_state(self, rows: int, capacity: int) -> LookupFirstState:
        """See `Drafter.new_state`."""
        return LookupFirstState(self.lookup.new_state(rows, capacity), self.other.new_state(rows, capacity))

    def extend(
        self,
        tokens: Tensor,
        features: Tensor | None,
        num_new: Sequence[int],
        prefixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        state: LookupFirstState,
    ) -> None:
        """See `Drafter.extend`."""
        self.lookup.extend(tokens, None, num_new, prefixes, rows, state.lookup)
        self.other.extend(tokens, features, num_new, prefixes, rows, state.other)

    def propose(
        self,
        root: Tensor,
        prefixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        state: LookupFirstState,
        max_depth: int | None = None,
    ) -> DraftTree:
        """See `Drafter.propose`."""
        found = self.lookup.propose(root, prefixes, rows, state.lookup, max_depth)
        missing = [i for i, count in enumerate(found.num_nodes.tolist()) if count == 1]
        if not missing:
            return found
        drafted = self.other.propose(
            root[missing], [prefixes[i] for i in missing], [rows[i] for i in missing], state.other, max_depth
        )
        return drafted if len(missing) == len(rows) else _joined(found, drafted, missing)

    def reset(self, row: int, length: int, state: LookupFirstState) -> None:
        """See `Drafter.reset`."""
        self.lookup.reset(row, length, state.lookup)
        self.other.reset(row, length, state.other)

    def copy_prefix(self, source: int, target: int, length: int, state: LookupFirstState) -> None:
        """See `CopyingDrafter.copy_prefix`; the lookup reads whole prefixes and needs none."""
        if isinstance(self.other, CopyingDrafter):
            self.other.copy_prefix(source, target, length, state.other)


def _joined(found: DraftTree, drafted: DraftTree, missing: Sequence[int]) -> DraftTree:
    """The rows of `found`, those in `missing` replaced by the rows of `drafted`."""
    rows = []
    for tree in (found, drafted):
        counts = tree.num_nodes.tolist()
        pairs = zip(tree.tokens.tolist(), tree.parents.tolist(), counts, strict=True)
        rows.append([(tokens[:count], parents[:count]) for tokens, parents, count in pairs])
    for i, row in zip(missing, rows[1], strict=True):
        rows[0][i] = row
    return trees.from_lists(rows[0], found.tokens.device)
