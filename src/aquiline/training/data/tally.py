"""Counts what `prepare` reads, writes and rejects, and shows it."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from aquiline.training.data.conversations import Refusal, Refusals
from aquiline.training.data.dataset import SplitCounts


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
    """Counters of a run of `prepare`, and the file that lists its refusals."""

    strict: bool
    listed: IO[str]
    records: int = 0
    kept: int = 0
    tokens: int = 0
    refused: Refusals = field(default_factory=Refusals)
    adjusted: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=time.monotonic)

    def refuse(self, refusal: Refusal) -> None:
        """Counts and lists a refusal.

        Raises:
            ValueError: if the run is strict.
        """
        if self.strict:
            raise ValueError(f"{refusal}; without strict it would be counted and skipped")
        self.refused.add(refusal)
        self.listed.write(json.dumps(asdict(refusal), ensure_ascii=False) + "\n")

    def report(self, output: Path, train: SplitCounts, validation: SplitCounts) -> PrepareReport:
        """The report of a run that has ended."""
        return PrepareReport(
            output=output,
            records=self.records,
            train=train,
            validation=validation,
            refused=dict(self.refused.counts),
            adjusted=dict(self.adjusted),
            first_refusals=tuple(self.refused.first),
            seconds=time.monotonic() - self.began,
        )


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
            refused = tally.refused.counts.total()
            text = f"{tally.records:,} records, {tally.kept:,} kept, {refused:,} refused, {tally.tokens:,} tokens"
            bar.update(task, description=text)

        yield show
