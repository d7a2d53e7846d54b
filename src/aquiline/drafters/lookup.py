"""Prompt lookup: drafts what followed the end of the text where it occurred before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from aquiline import tree as trees
from aquiline.cache import check_fits
from aquiline.checks import integer
from aquiline.drafters.drafter import Committed, Needs, Rows
from aquiline.drafters.store import BREAK, LEAST, LONGEST, Found, Store
from aquiline.tree import DraftTree

SHARED_TOKENS = 1 << 18
"""Tokens of earlier outputs that a shared store keeps; they take at most 11 MB."""

_SEGMENT = 64
"""Outputs reach the shared store in pieces of this size, and whole when their slot is reused."""


@dataclass(eq=False)
class LookupState:
    """Per slot: its text, where its output starts, and how much of it the shared store holds."""

    texts: list[Store]
    outputs: list[int]
    shared: list[int]


@dataclass(frozen=True, eq=False)
class Continued:
    """What a text is likely to continue with.

    Attributes:
        tokens, parents: a tree, root first.
        chances: per draft, how likely it and all above it are right; None for branches.
        source: "lookup" or "shared".
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    chances: Sequence[float] | None
    source: str


class PromptLookup:
    """Drafts what followed the end of the text where it occurred before.

    Needs neither a head nor training; pays where the output repeats the input (summaries, edits,
    code) or earlier outputs. The longest match wins; its length and the agreement of its occurrences
    decide how much is drafted, and whether from the text itself or from earlier outputs.

    Args:
        depth: longest continuation, ≥ 1.
        max_ngram: longest n-gram that is indexed, ≥ `min_ngram`; lengths double from `min_ngram`.
        min_ngram: shortest match, ≥ 1.
        num_branches: 1 drafts one chain; larger values merge the continuations of this many occurrences into a
            tree, whatever their chances.
        shared: a store of earlier outputs, which this drafter extends; None: the text alone.

    Source: prompt-lookup-decoding (Saxena 2023), SuffixDecoding (arXiv 2411.04975).
    """

    needs = Needs(source="lookup")

    def __init__(
        self,
        depth: int = 16,
        max_ngram: int = 8,
        min_ngram: int = 2,
        num_branches: int = 1,
        shared: Store | None = None,
    ) -> None:
        for name, value in (("depth", depth), ("min_ngram", min_ngram), ("num_branches", num_branches)):
            integer(f"prompt lookup: {name}", value, 1)
        if integer("prompt lookup: max_ngram", max_ngram) < min_ngram:
            raise ValueError(f"prompt lookup: max_ngram {max_ngram} is below min_ngram {min_ngram}")
        size = 1 + num_branches * depth
        check_fits(f"prompt lookup of {num_branches} × {depth} tokens", size, "lower depth or num_branches")
        self.depth, self.max_ngram, self.min_ngram, self.num_branches = depth, max_ngram, min_ngram, num_branches
        self.shared = shared
        self.orders = tuple(min_ngram << i for i in range((max_ngram // min_ngram).bit_length()))

    def new_state(self, slots: int, capacity: int) -> LookupState:
        return LookupState([Store(self.orders) for _ in range(slots)], [0] * slots, [0] * slots)

    def extend(self, committed: Committed, state: LookupState) -> None:
        """Indexes the new tokens."""
        rows = committed.rows
        for slot, text, chooser in zip(rows.slots, rows.texts, rows.choosers, strict=True):
            store = state.texts[slot]
            store.extend(text[len(store.tokens) :])
            if self.shared is not None:
                state.outputs[slot] = chooser.prompt_length
                if len(store.tokens) - max(state.shared[slot], chooser.prompt_length) >= _SEGMENT:
                    self._share(slot, state)

    def propose(self, rows: Rows, state: LookupState) -> DraftTree:
        return packed(self.continuations(rows, state))

    def continuations(self, rows: Rows, state: LookupState) -> list[Continued]:
        """Returns what each row's text is likely to continue with."""
        depth, found = rows.depth(self.depth), []
        for slot, text in zip(rows.slots, rows.texts, strict=True):
            if self.num_branches > 1:
                branches = state.texts[slot].branches(text[-LONGEST:], depth, self.num_branches)
                found.append(Continued(*merge(text[-1], branches), None, self.needs.source))
                continue
            best, source = self.find(slot, text[-LONGEST:], depth, state)
            found.append(Continued([text[-1], *best.tokens], range(-1, len(best.tokens)), best.chances, source))
        return found

    def find(
        self, slot: int, context: Sequence[int], depth: int, state: LookupState, least: float = LEAST
    ) -> tuple[Found, str]:
        """Continues a context (the end of a slot's text, with drafts after it or not) from the better source.

        Args:
            slot: its text is searched first.
            context: at least its last `LONGEST` tokens.

        Returns:
            The continuation and its source, "lookup" or "shared".
        """
        own = state.texts[slot].find(context, depth, least)
        if self.shared is None or own.match >= LONGEST:
            return own, self.needs.source
        other = self.shared.find(context, depth, least)
        better = other.match > own.match and max(other.chances[:1], default=0) > max(own.chances[:1], default=0)
        return (other, "shared") if better else (own, self.needs.source)

    def copy(self, source: int, slot: int, length: int, state: LookupState) -> None:
        """Does nothing: the next `extend` indexes the whole text."""

    def reset(self, slot: int, length: int, state: LookupState) -> None:
        """Clears the slot; the next `extend` indexes the kept tokens again."""
        self._share(slot, state)
        state.texts[slot], state.outputs[slot], state.shared[slot] = Store(self.orders), 0, 0

    def _share(self, slot: int, state: LookupState) -> None:
        """Appends the unshared rest of a slot's output to the shared store, preceded by its context."""
        text, start = state.texts[slot].tokens, max(state.shared[slot], state.outputs[slot])
        if self.shared is not None and len(text) > start > 0:
            self.shared.extend((*text[max(start - LONGEST, 0) :], BREAK))
            state.shared[slot] = len(text)


def packed(found: Sequence[Continued]) -> DraftTree:
    """Packs the rows' continuations into trees, with their sources."""
    scores = [[0.0, *map(math.log, row.chances)] for row in found if row.chances is not None]
    return trees.from_lists(
        [(row.tokens, row.parents) for row in found],
        [[row.source] * len(row.tokens) for row in found],
        scores if len(scores) == len(found) else None,
    )


def merge(root: int, continuations: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Merges continuations with common prefixes into one tree, as (tokens, parents)."""
    tokens, parents = [root], [-1]
    children: dict[tuple[int, int], int] = {}
    for continuation in continuations:
        node = 0
        for token in continuation:
            child = children.get((node, token))
            if child is None:
                child = len(tokens)
                children[(node, token)] = child
                tokens.append(token)
                parents.append(node)
            node = child
    return tokens, parents
