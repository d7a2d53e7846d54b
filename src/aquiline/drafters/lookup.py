"""Prompt lookup: the continuation of the last n-gram where it occurred before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aquiline import tree as trees
from aquiline.cache import check_fits
from aquiline.checks import integer
from aquiline.drafters.drafter import Committed, Needs, Rows
from aquiline.tree import DraftTree


@dataclass(eq=False)
class LookupState:
    """Per slot: n-gram → sorted end positions, and the number of tokens indexed so far."""

    index: list[dict[tuple[int, ...], list[int]]]
    seen: list[int] = field(default_factory=list)


class PromptLookup:
    """Drafts the tokens that followed the longest matching n-gram earlier in the same text.

    Needs neither a head nor training; pays where the output repeats the input (summaries, edits,
    code). Several earlier continuations form a tree.

    Args:
        depth: longest continuation, ≥ 1.
        max_ngram: longest n-gram tried first, ≥ 1.
        min_ngram: shortest n-gram, 1 … max_ngram.
        num_branches: earlier occurrences that are merged into the tree, most recent first, ≥ 1.

    Source: prompt-lookup-decoding (Saxena 2023); differs: several continuations as a tree.
    """

    needs = Needs(source="lookup")

    def __init__(self, depth: int = 5, max_ngram: int = 4, min_ngram: int = 2, num_branches: int = 1) -> None:
        for name, value in (("depth", depth), ("min_ngram", min_ngram), ("num_branches", num_branches)):
            integer(f"prompt lookup: {name}", value, 1)
        if integer("prompt lookup: max_ngram", max_ngram) < min_ngram:
            raise ValueError(f"prompt lookup: max_ngram {max_ngram} is below min_ngram {min_ngram}")
        size = 1 + num_branches * depth
        check_fits(f"prompt lookup of {num_branches} × {depth} tokens", size, "lower depth or num_branches")
        self.depth, self.max_ngram, self.min_ngram, self.num_branches = depth, max_ngram, min_ngram, num_branches

    def new_state(self, slots: int, capacity: int) -> LookupState:
        return LookupState([{} for _ in range(slots)], [0] * slots)

    def extend(self, committed: Committed, state: LookupState) -> None:
        """Indexes the n-grams that end at the new tokens."""
        for slot, text in zip(committed.rows.slots, committed.rows.texts, strict=True):
            index = state.index[slot]
            for end in range(state.seen[slot] + 1, len(text) + 1):
                for size in range(self.min_ngram, min(self.max_ngram, end) + 1):
                    index.setdefault(tuple(text[end - size : end]), []).append(end)
            state.seen[slot] = max(state.seen[slot], len(text))

    def propose(self, rows: Rows, state: LookupState) -> DraftTree:
        depth = rows.depth(self.depth)
        packed = []
        for slot, text in zip(rows.slots, rows.texts, strict=True):
            continuations = [text[end : end + depth] for end in self._matches(state.index[slot], text)]
            packed.append(merge(text[-1], continuations))
        return trees.from_lists(packed)

    def copy(self, source: int, slot: int, length: int, state: LookupState) -> None:
        """Does nothing: the next `extend` indexes the whole text."""

    def reset(self, slot: int, length: int, state: LookupState) -> None:
        """Clears the slot; the next `extend` indexes the kept tokens again."""
        state.index[slot], state.seen[slot] = {}, 0

    def _matches(self, index: dict[tuple[int, ...], list[int]], text: Sequence[int]) -> list[int]:
        """Returns the positions after earlier occurrences of the longest recurring n-gram, latest first."""
        for size in range(min(self.max_ngram, len(text)), self.min_ngram - 1, -1):
            ends = index.get(tuple(text[-size:]), [])
            earlier = [end for end in ends[-self.num_branches - 1 :] if end < len(text)]
            if earlier:
                return earlier[::-1][: self.num_branches]
        return []


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
