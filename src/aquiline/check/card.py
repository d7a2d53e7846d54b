"""What a head's card promises: the tables of n-α in its README.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Promise:
    """Acceptance that a card states.

    Attributes:
        data: what it was measured on.
        alphas: n-α for n = 0, 1, ….
    """

    data: str
    alphas: tuple[float, ...]


def promises(head: Path) -> list[Promise]:
    """Reads the rows of Markdown tables with columns ``0-α``, ``1-α``, … in the card of a head's folder."""
    card = head / "README.md"
    if not card.is_file():
        return []
    found, columns = [], list[int]()
    for line in card.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith("|"):
            columns = []
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        named = [i for i, cell in enumerate(cells) if re.fullmatch(r"\d-α", cell)]
        columns = named or columns
        values = tuple(_numbers(cells, columns)) if not named else ()
        if len(values) > 1:  # a single column tells how training went
            found.append(Promise(cells[0], values))
    return found


def _numbers(cells: list[str], columns: list[int]) -> Iterator[float]:
    """The shares in some columns, up to the first that is none."""
    for column in columns:
        if column >= len(cells) or not re.fullmatch(r"0?\.\d+|1\.0*", cells[column]):
            return
        yield float(cells[column])
