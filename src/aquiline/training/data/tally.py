"""The counters of `prepare`, its progress line, and its report."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from aquiline.training.data.conversations import Refusal
from aquiline.training.data.dataset import SplitCounts

_KEPT_REFUSALS = 20


@dataclass(frozen=True)
class PrepareReport:
    """Counts of what `prepare` read, wrote and skipped.

    `refused` and `adjusted` count by reason; `first_refusals` holds the messages of the first twenty.
    The folder's ``refused.jsonl`` lists all of them.
    """

    output: Path
    records: int
    train: SplitCounts
    validation: SplitCounts
    refused: Mapping[str, int]
    adjusted: Mapping[str, int]
    first_refusals: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        lines = [f"{self.output}: {self.records:,} records read in {self.seconds:.1f} s"]
        for name, split in (("train", self.train), ("validation", self.validation)):
            lines.append(
                f"  {name}: {split.conversations:,} conversations, {split.tokens:,} tokens, "
                f"{split.loss_tokens:,} with loss"
            )
        lines += [f"  refused: {reason}: {count:,}" for reason, count in self.refused.items()]
        lines += [f"  adjusted: {reason}: {count:,}" for reason, count in self.adjusted.items()]
        return "\n".join(lines)


@dataclass
class Tally:
    """Mutable counters of a run, and its list of refusals."""

    strict: bool
    refusals: IO[str]
    records: int = 0
    kept: int = 0
    tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    adjusted: Counter[str] = field(default_factory=Counter)
    first_refusals: list[str] = field(default_factory=list)

    def refuse(self, refusal: Refusal) -> None:
        """Counts and records a refusal, or raises it if the run is strict."""
        if self.strict:
            raise ValueError(f"{refusal}; without strict it would be counted and skipped")
        self.refused[refusal.reason] += 1
        if len(self.first_refusals) < _KEPT_REFUSALS:
            self.first_refusals.append(str(refusal))
        self.refusals.write(json.dumps(asdict(refusal), ensure_ascii=False) + "\n")


@contextlib.contextmanager
def progress_line(shown: bool) -> Iterator[Callable[[Tally], None]]:
    """Yields a function that shows a tally on standard error, or does nothing if not `shown`."""
    if not shown:
        yield lambda tally: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("reading")

        def show(tally: Tally) -> None:
            refused = sum(tally.refused.values())
            bar.update(
                task,
                description=f"{tally.records:,} records, {tally.kept:,} kept, "
                f"{refused:,} refused, {tally.tokens:,} tokens",
            )

        yield show
