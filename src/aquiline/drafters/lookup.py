"""Prompt lookup: the continuation of the last n-gram where it occurred before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from aquiline import tree as trees
from aquiline.cache import check_fits
from aquiline.checks import integer
from aquiline.targets.target import Feature
from aquiline.tree import DraftTree


@dataclass(eq=False)
class LookupState:
    """Per row: n-gram → positions after which it ended, in order, and tokens indexed so far."""

    index: list[dict[tuple[int, ...], list[int]]]
    seen: list[int] = field(default_factory=list)


class PromptLookup:
    """Drafts what followed the longest matching n-gram earlier in the same text.

    Needs no head and no training; pays where the output repeats the input (summaries, edits,
    code). Several earlier continuations make a tree.

    Args:
        depth: longest continuation, ≥ 1.
        max_ngram: longest n-gram tried first, ≥ 1.
        min_ngram: shortest n-gram, 1 … max_ngram.
        num_branches: earlier occurrences that are merged into the tree, most recent first, ≥ 1.

    Source: prompt-lookup-decoding (Saxena 2023); differs: several continuations as a tree.
    """

    features: tuple[Feature, ...] = ()

    def __init__(self, depth: int = 5, max_ngram: int = 4, min_ngram: int = 2, num_branches: int = 1) -> None:
        for name, value in (("depth", depth), ("min_ngram", min_ngram), ("num_branches", num_branches)):
            integer(f"prompt lookup: {name}", value, 1)
        if integer("prompt lookup: max_ngram", max_ngram) < min_ngram:
            raise ValueError(f"prompt lookup: max_ngram {max_ngram} is below min_ngram {min_ngram}")
        size = 1 + num_branches * depth
        check_fits(f"prompt lookup of {num_branches} × {depth} tokens", size, "lower depth or num_branches")
        self.depth, self.max_ngram, self.min_ngram, self.num_branches = depth, max_ngram, min_ngram, num_branches

    def new_state(self, rows: int, capacity: int) -> LookupState:
        """Empty indices for `rows` rows."""
        return LookupState([{} for _ in range(rows)], [0] * rows)

    def extend(
        self,
        tokens: Tensor,
        features: Tensor | None,
        num_new: Sequence[int],
        prefixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        state: LookupState,
    ) -> None:
        """Indexes the n-grams that end at the new tokens."""
        for row, prefix in zip(rows, prefixes, strict=True):
            index = state.index[row]
            for end in range(state.seen[row] + 1, len(prefix) + 1):
                for size in range(self.min_ngram, min(self.max_ngram, end) + 1):
                    index.setdefault(tuple(prefix[end - size : end]), []).append(end)
            state.seen[row] = max(state.seen[row], len(prefix))

    def propose(
        self,
        root: Tensor,
        prefixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        state: LookupState,
        max_depth: int | None = None,
    ) -> DraftTree:
        """See `Drafter.propose`."""
        depth = self.depth if max_depth is None else min(self.depth, max_depth)
        packed = []
        for row, prefix in zip(rows, prefixes, strict=True):
            continuations = [prefix[end : end + depth] for end in self._matches(state.index[row], prefix)]
            packed.append(merge(prefix[-1], continuations))
        return trees.from_lists(packed, root.device)

    def _matches(self, index: dict[tuple[int, ...], list[int]], prefix: Sequence[int]) -> list[int]:
        """Positions after earlier occurrences of the longest n-gram that has one, latest first."""
        for size in range(min(self.max_ngram, len(prefix)), self.min_ngram - 1, -1):
            ends = index.get(tuple(prefix[-size:]), [])
            earlier = [end for end in ends[-self.num_branches - 1 :] if end < len(prefix)]
            if earlier:
                return earlier[::-1][: self.num_branches]
        return []

    def reset(self, row: int, length: int, state: LookupState) -> None:
        """Forgets a row; what is kept is indexed again at the next `extend`."""
        state.index[row], state.seen[row] = {}, 0


def merge(root: int, continuations: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Merges continuations with common beginnings into one tree, as (tokens, parents)."""
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
