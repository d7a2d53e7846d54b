"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Releases text until a stop string is complete, and holds back a possible start of one.

    An occurrence counts if its last character arrives while the scanner is armed; the text is cut
    at the earliest start among the stop strings that a piece completes. Only a suffix that is a
    prefix of a stop string is held back, so no text waits longer than necessary.

    Args:
        stops: non-empty strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def scan(self, piece: str, armed: bool = True) -> tuple[str, bool]:
        """Adds `piece`; returns the text to release, and whether a stop string ended it.

        Args:
            armed: False while the output is too short to end; occurrences completed then are ignored.
        """
        buffer, before = self._held + piece, len(self._held)
        if armed:
            # Occurrences that end within the held text were completed earlier; only ends inside `piece` count.
            found = [buffer.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops]
            starts = [start for start in found if start >= 0]
            if starts:
                self._held = ""
                return buffer[: min(starts)], True
        keep = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], False

    def flush(self) -> str:
        """Returns the held text; the output has ended, so no stop string can follow."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(stop) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
