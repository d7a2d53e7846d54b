"""A drafter that knows the right continuation and errs at random, and checks how it is called."""

import random
from collections.abc import Callable, Sequence

from torch import Tensor

from aquiline import tree as trees
from aquiline.targets.target import Feature
from aquiline.tree import DraftTree

Known = Callable[[Sequence[int]], Sequence[int]]
"""Text so far → the tokens that come next (as many as are known)."""


def known_from(texts: Sequence[Sequence[int]]) -> Known:
    """Knows the given texts: continues whatever begins one of them."""
    known = [list(text) for text in texts]

    def continuation(prefix: Sequence[int]) -> Sequence[int]:
        prefix = list(prefix)
        return next((text[len(prefix) :] for text in known if text[: len(prefix)] == prefix), [])

    return continuation


class KnowingDrafter:
    """Drafts trees around the right continuation, so that acceptance and rejection both happen.

    It also asserts the protocol: positions arrive once and in order, after a reset from where
    the reset left off, and `prefixes` are what they should be.

    Args:
        known: the continuation of a text.
        vocab_size: of the target.
        depth: longest draft.
        error: probability that a level does not contain the right token.
        branches: children of each node on the main path; the right one is at a random place.
        seed: of the errors, which depend on the text alone.
        check: called with the text up to a position and its features, where features are asked.
        features: the target features to ask for.
    """

    def __init__(
        self,
        known: Known,
        vocab_size: int,
        *,
        depth: int = 4,
        error: float = 0.25,
        branches: int = 2,
        seed: int = 0,
        features: tuple[Feature, ...] = (),
        check: Callable[[Sequence[int], Tensor], None] | None = None,
    ) -> None:
        self.known, self.vocab_size, self.depth = known, vocab_size, depth
        self.error, self.branches, self.seed = error, branches, seed
        self.features, self.check = features, check
        self.deepest: list[int | None] = []

    def new_state(self, rows: int, capacity: int) -> list[list[int]]:
        """Per row, the token after each position taken in."""
        return [[] for _ in range(rows)]

    def extend(
        self,
        tokens: Tensor,
        features: Tensor | None,
        num_new: Sequence[int],
        prefixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        state: list[list[int]],
    ) -> None:
        for i, (row, count, prefix) in enumerate(zip(rows, num_new, prefixes, strict=True)):
            first = len(state[row])
            state[row] += tokens[i, :count].tolist()
            assert state[row] == list(prefix[1:]), f"row {row} holds {state[row]}, the text is {prefix}"
            assert (features is None) == (not self.features)
            if features is not None and self.check is not None:
                for offset in range(count):
                    self.check(prefix[: first + offset + 1], features[i, offset])

    def propose(
        self,
        root: Tensor,
        prefixes: Sequence[Sequence[int]],
        rows: Sequence[int],
        state: list[list[int]],
        max_depth: int | None = None,
    ) -> DraftTree:
        self.deepest.append(max_depth)
        depth = self.depth if max_depth is None else min(self.depth, max_depth)
        assert root.tolist() == [prefix[-1] for prefix in prefixes]
        for row, prefix in zip(rows, prefixes, strict=True):
            assert len(state[row]) == len(prefix) - 1, f"row {row} was not extended up to its root"
        return trees.from_lists([self._tree(prefix, depth) for prefix in prefixes], root.device)

    def reset(self, row: int, length: int, state: list[list[int]]) -> None:
        kept = max(length - 1, 0)
        assert kept <= len(state[row]), "a reset cannot keep more than there is"
        del state[row][kept:]

    def copy_prefix(self, source: int, target: int, length: int, state: list[list[int]]) -> None:
        assert 0 <= length - 1 <= len(state[source]), "a copy cannot take more than there is"
        state[target] = state[source][: length - 1]

    def _tree(self, prefix: Sequence[int], depth: int) -> tuple[list[int], list[int]]:
        rng = random.Random(f"{self.seed}/{len(prefix)}/{prefix[-1]}")
        tokens, parents, node = [prefix[-1]], [-1], 0
        for right in list(self.known(prefix))[:depth]:
            wrong = rng.random() < self.error
            pool = [token for token in range(self.vocab_size) if token != right]
            children = rng.sample(pool, min(self.branches, len(pool)))
            if not wrong:
                children[rng.randrange(len(children))] = right
            first = len(tokens)
            tokens += children
            parents += [node] * len(children)
            # After an error the draft goes on below a wrong token, as real drafters do.
            node = first + (0 if wrong else children.index(right))
        return tokens, parents
