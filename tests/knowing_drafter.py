"""A drafter that knows the right continuation and errs at random, and checks how it is called."""

import random
from collections.abc import Callable, Sequence

from torch import Tensor

from aquiline import tree as trees
from aquiline.drafters.drafter import Committed, Needs, Rows
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
    the reset left off, the texts are those of the slots, and each step shows the tree that it
    verified with the target's logits.

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
        self.needs, self.check = Needs(features=features), check
        self.deepest: list[int | None] = []

    def new_state(self, slots: int, capacity: int) -> list[list[int]]:
        """Per slot, the token after each position taken in."""
        return [[] for _ in range(slots)]

    def extend(self, committed: Committed, state: list[list[int]]) -> None:
        rows, features = committed.rows, committed.features
        for i, (slot, count, text) in enumerate(zip(rows.slots, committed.counts, rows.texts, strict=True)):
            first = len(state[slot])
            state[slot] += text[len(text) - count :]
            assert state[slot] == list(text[1:]), f"slot {slot} holds {state[slot]}, the text is {text}"
            assert (features is None) == (not self.needs.features)
            if features is not None and self.check is not None:
                for offset in range(count):
                    self.check(text[: first + offset + 1], features[i, offset])
        assert (committed.tree is None) == (committed.logits is None)
        if committed.tree is not None and committed.logits is not None:
            assert committed.tree.tokens.shape == committed.logits.shape[:2]
            roots = [text[len(text) - 1 - count] for text, count in zip(rows.texts, committed.counts, strict=True)]
            assert committed.tree.tokens[:, 0].tolist() == roots

    def propose(self, rows: Rows, state: list[list[int]]) -> DraftTree:
        self.deepest.append(rows.max_depth)
        for slot, text in zip(rows.slots, rows.texts, strict=True):
            assert len(state[slot]) == len(text) - 1, f"slot {slot} was not extended up to its root"
        return trees.from_lists([self._tree(text, rows.depth(self.depth)) for text in rows.texts])

    def copy(self, source: int, slot: int, length: int, state: list[list[int]]) -> None:
        assert 0 <= length - 1 <= len(state[source]), "a copy cannot take more than there is"
        state[slot] = state[source][: length - 1]

    def reset(self, slot: int, length: int, state: list[list[int]]) -> None:
        kept = max(length - 1, 0)
        assert kept <= len(state[slot]), "a reset cannot keep more than there is"
        del state[slot][kept:]

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
            # After an error the draft continues below a wrong token, as real drafters do.
            node = first + (0 if wrong else children.index(right))
        return tokens, parents
