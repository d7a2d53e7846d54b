"""Text and tokens: how far two sequences agree."""

from __future__ import annotations

from aquiline.engine.text import common_prefix


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == common_prefix([1, 2, 3], [1, 2]) == 2
    assert common_prefix([], [1]) == common_prefix([2], [1]) == 0
    assert common_prefix([1, 2], (1, 2)) == 2
