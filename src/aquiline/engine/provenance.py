"""Traces emitted text to its tokens, and these to the drafts that they came from."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from aquiline.engine.request import Piece


@dataclass(eq=False)
class _Origin:
    """A token whose piece was not reported yet, and the number of its characters that were not released yet."""

    tokens: list[int]
    source: str = "target"
    step: int = 0
    characters: int = 0


@dataclass(eq=False)
class Provenance:
    """Assigns the characters of an output to the tokens that they were decoded from.

    Text is released later than it is decoded where it may begin a stop string; since both happen
    in order, counting characters is enough. A character of several tokens belongs to the last one.
    """

    _origins: deque[_Origin] = field(default_factory=deque)
    _unnamed: list[_Origin] = field(default_factory=list)

    def token(self, token: int) -> None:
        """Adds the next token; the text decoded from now on is its own."""
        self._unnamed.append(_Origin([token]))
        self._origins.append(self._unnamed[-1])

    def name(self, sources: Sequence[str], step: int) -> None:
        """Names what drafted each token added since the last call, and the step that emitted them."""
        for origin, source in zip(self._unnamed, sources, strict=True):
            origin.source, origin.step = source, step
        self._unnamed.clear()

    def decoded(self, text: str) -> None:
        """Notes that the last token completed `text`."""
        self._origins[-1].characters += len(text)

    def pieces(self, text: str, ended: bool) -> list[Piece]:
        """Splits released text by its origin.

        Args:
            text: the characters that follow those of the last call.
            ended: True for the last call, which also returns the tokens whose text was cut off.
        """
        found, start, last = [], 0, self._origins[-1] if self._origins else None
        while self._origins:
            origin = self._origins[0]
            piece = text[start : start + origin.characters]
            if not piece and origin.characters and not ended:
                break  # held back
            if piece or origin.tokens:
                found.append(Piece(piece, origin.tokens, origin.source, origin.step))
                origin.tokens = []  # the rest of the text, if any, belongs to the same token
            start += len(piece)
            origin.characters -= len(piece)
            if origin.characters and not ended:
                break
            # The last token stays: the decoder may complete its text at the end of the output.
            if origin is last and not ended:
                break
            self._origins.popleft()
        return found
