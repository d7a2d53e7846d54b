"""Indexes texts token by token, and continues a context as it was continued before.

An index is that of LZ77: a table from an n-gram's hash to its latest end, and for every end the one before it with
the same hash. Adding a token and finding a context take constant time. A token takes 28 to 40 bytes with three
lengths of n-grams: 4, and for each length 4 and its share of a table of 4 to 8.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BREAK, START = -1, -2
"""BREAK separates two texts in a store; no match or continuation crosses it. START precedes a text, so that a context
at the beginning of one matches only there."""

LONGEST = 16
"""Matches are measured up to this length."""

BELIEFS = (0.0, 0.3, 0.59, 0.69, 0.79, 0.79, 0.86, 0.86, 0.86, 0.87, 0.88, 0.9, 0.9, 0.9, 0.9, 0.9, 0.98)
"""Share of correct tokens after a match of n tokens, by n up to `LONGEST`. Measured on SmolLM2's own answers to
160 conversations (27,000 matches), except for n = 1."""

OTHER_BELIEFS = (0.0, 0.2, 0.26, 0.35, 0.39, 0.42, 0.49, 0.53, 0.59, 0.63, 0.68, 0.69, 0.7, 0.74, 0.79, 0.8, 0.97)
"""The same where the match lies in another text, and is longer than any in the text itself. Measured on the first 256
tokens of SmolLM2's answers to 500 conversations (20,000 matches), except for n = 1; smoothed."""

LEAST = 0.1
"""Tokens less likely to be right are not drafted: on a CPU a further token costs 4 to 10 % of a token's time."""

_OCCURRENCES = 8
"""Occurrences of a context, the latest ones, that vote on its continuation."""


@dataclass(frozen=True)
class Found:
    """A continuation.

    Attributes:
        tokens: its tokens, possibly none.
        chances: per token, how likely it and all tokens before it are right, in (0, 1].
        match: length of the context that was found, up to `LONGEST`; 0 if none was.
    """

    tokens: Sequence[int] = ()
    chances: Sequence[float] = ()
    match: int = 0


class Store:
    """A text that grows at its end, with an index of its n-grams.

    Args:
        orders: increasing lengths of the n-grams, each ≥ 1.
        limit: tokens to keep, ≥ 1; the oldest half is dropped when there are more. None keeps all.
        beliefs: share of correct tokens after a match, by its length up to `LONGEST`.
    """

    def __init__(
        self, orders: Sequence[int] = (2, 4, 8), limit: int | None = None, beliefs: Sequence[float] = BELIEFS
    ) -> None:
        self.orders, self.limit, self.beliefs = tuple(orders), limit, tuple(beliefs)
        self.tokens = array("i")
        self._clear(1024)

    def _clear(self, size: int) -> None:
        """Empties the index; `size`, a power of two, is that of its tables."""
        self._mask = size - 1
        self._latest = [array("i", [0]) * size for _ in self.orders]
        self._earlier = [array("i", [0]) for _ in self.orders]  # by end, and an end is ≥ 1
        self._indexed = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens."""
        self.tokens.extend(tokens)
        if self.limit is not None and len(self.tokens) > self.limit:
            del self.tokens[: len(self.tokens) - (self.limit + 1) // 2]
            self._clear(self._mask + 1)
        if len(self.tokens) > self._mask:
            self._clear(1 << len(self.tokens).bit_length())
        text, mask = self.tokens, self._mask
        for end in range(self._indexed + 1, len(text) + 1):
            for order, latest, earlier in zip(self.orders, self._latest, self._earlier, strict=True):
                if order > end:
                    earlier.append(0)
                    continue
                place = hash(tuple(text[end - order : end])) & mask
                earlier.append(latest[place])
                latest[place] = end
        self._indexed = len(text)

    def find(self, context: Sequence[int], depth: int, least: float) -> Found:
        """Continues a context as it was continued before.

        The longest indexed n-gram that ends the context decides which occurrences count. They vote on each
        token; ties go to the latest. A token's chance is (votes − 1 + b) / voters: each repetition
        counts as certain, and the match alone as its belief b.

        Args:
            context: at least the last `LONGEST` tokens, or all if there are fewer.
            least: return no token whose chance is below this.
        """
        matches = self._matches(context)
        if not matches:
            return Found()
        best = max(length for length, _ in matches)
        voters = [end for length, end in matches if 2 * length >= best]
        return self._voted(voters, best, depth, least)

    def branches(self, context: Sequence[int], depth: int, count: int) -> list[list[int]]:
        """Returns the continuations of the latest `count` occurrences, the latest first."""
        matches = self._matches(context)
        return [list(self._after(end, depth)) for _, end in matches[:count]]

    def _matches(self, context: Sequence[int]) -> list[tuple[int, int]]:
        """Returns (length, end) of the occurrences of the longest indexed n-gram that go on, the latest first."""
        text = self.tokens
        for i in range(len(self.orders) - 1, -1, -1):
            order = self.orders[i]
            if order > len(context):
                continue
            wanted = array("i", context[len(context) - order :])
            end, found = self._latest[i][hash(tuple(wanted)) & self._mask], []
            earlier = self._earlier[i]
            for _ in range(2 * _OCCURRENCES):  # other n-grams may have the same hash
                if not end:
                    break
                if end < len(text) and text[end] >= 0 and text[end - order : end] == wanted:
                    found.append((self._length(context, end, order), end))
                    if len(found) == _OCCURRENCES:
                        break
                end = earlier[end]
            if found:
                return found
        return []

    def _length(self, context: Sequence[int], end: int, known: int) -> int:
        most = min(LONGEST, end, len(context))
        while known < most and self.tokens[end - known - 1] == context[-known - 1] != BREAK:
            known += 1
        return known

    def _after(self, end: int, depth: int) -> Sequence[int]:
        following = self.tokens[end : end + depth]
        return following[: following.index(BREAK)] if BREAK in following else following

    def _voted(self, voters: Sequence[int], match: int, depth: int, least: float) -> Found:
        following = [self._after(end, depth) for end in voters]
        tokens, chances, joint = list[int](), list[float](), 1.0
        while len(tokens) < depth:
            at = len(tokens)
            votes: dict[int, int] = {}
            for text in following:
                if at < len(text):
                    votes[text[at]] = votes.get(text[at], 0) + 1
            if not votes:
                break
            token = max(votes, key=votes.__getitem__)  # the first of equals, so the latest
            joint *= (votes[token] - 1 + self.beliefs[min(match + at, LONGEST)]) / len(following)
            if joint < least:
                break
            tokens.append(token)
            chances.append(joint)
            following = [text for text in following if at < len(text) and text[at] == token]
        return Found(tokens, chances, match)


class Prediction:
    """A text that the output is expected to repeat, in part or whole.

    The output is looked up in it by its longest match, so it is found again after a change.

    Attributes:
        proposed: number of tokens drafted so far.

    Source: OpenAI's Predicted Outputs.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._store, self.proposed = Store(), 0
        self._store.extend((*_BEFORE, *tokens))

    def continuation(self, output: Sequence[int], depth: int) -> Sequence[int]:
        """Returns what the text has after `output`, at most `depth` tokens."""
        context = output[-LONGEST:] if len(output) >= LONGEST else [*_BEFORE, *output][-LONGEST:]
        found = list(self._store.find(context, depth, LEAST).tokens)
        self.proposed += len(found)
        return found


_BEFORE = (START,) * LONGEST
"""Precedes both the expected text and the output: where an output begins, so does the text."""
