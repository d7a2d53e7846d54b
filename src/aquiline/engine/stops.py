"""Stop strings, found while the text arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Passes text on until a stop string is complete, and holds back what may become one.

    An occurrence counts when its last character arrives while the scanner is armed; the text is
    cut at the earliest start among the strings that a piece completes. Only an ending that is the
    beginning of a stop string is held back, so nothing waits longer than it must.

    Args:
        stops: non-empty strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def scan(self, piece: str, armed: bool = True) -> tuple[str, bool]:
        """Takes in `piece`; returns the text that may be shown, and whether a stop string ended it.

        Args:
            piece: the next characters.
            armed: False while the output is too short to end; occurrences completed then pass.
        """
        buffer, before = self._held + piece, len(self._held)
        if armed:
            # What ended within `held` was completed earlier: only ends inside `piece` count.
            found = [buffer.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops]
            starts = [start for start in found if start >= 0]
            if starts:
                self._held = ""
                return buffer[: min(starts)], True
        keep = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], False

    def flush(self) -> str:
        """Returns what is held back: the output ended, no stop string can follow."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(stop) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
