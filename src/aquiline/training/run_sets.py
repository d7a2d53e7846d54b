"""The training sets of a run, opened and checked before anything is computed.

What is wrong with them shows here, and not at the first validation, hours later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aquiline.training.data.dataset import TrainingSet, open_training_set

_SHORTEST = 3
"""Tokens of the shortest conversation that has a row to learn or to measure."""


@dataclass(frozen=True, eq=False)
class RunSets:
    """What a run learns from, and by path what it is measured on: sets that hold a conversation."""

    train: tuple[TrainingSet, ...]
    validation: Mapping[str, TrainingSet]

    @property
    def fingerprints(self) -> list[str]:
        """Of the sets it learns from: a checkpoint's place in the data means something in these alone."""
        return [data.fingerprint for data in self.train]

    def empty(self, asked: Sequence[str]) -> list[str]:
        """Those of the asked validation sets that hold nothing to measure."""
        return [path for path in asked if path not in self.validation]


def open_sets(target: str | Path, data: Sequence[str], validation: Sequence[str]) -> RunSets:
    """Opens all sets of a run.

    Args:
        target: folder of the target.
        data: training sets.
        validation: sets whose validation split is measured.

    Raises:
        ValueError: for a set that is missing, damaged, empty, or prepared for another tokenizer.
    """
    train = tuple(open_training_set(path) for path in data)
    measured = {path: open_training_set(path, split="validation") for path in validation}
    _check_tokenizer(Path(target), [*train, *measured.values()])
    for part in train:
        if not _usable(part):
            raise ValueError(
                f"{part.path} holds no training conversation of {_SHORTEST} tokens or more; prepare more "
                "conversations, or hold fewer out (--validation)"
            )
    return RunSets(train, {path: part for path, part in measured.items() if _usable(part)})


def _usable(part: TrainingSet) -> bool:
    return len(part) > 0 and int(part.lengths.max()) >= _SHORTEST


def _check_tokenizer(target: Path, sets: Sequence[TrainingSet]) -> None:
    """Opens the sets again with the target's hash; sets that `prepare` did not make have none."""
    prepared = [part for part in sets if re.fullmatch("[0-9a-f]{64}", str(part.manifest.get("tokenizer_hash")))]
    if not prepared:
        return
    from aquiline.training.data.prepare import load_tokenizer, tokenizer_hash

    own = tokenizer_hash(load_tokenizer(target))
    for path in dict.fromkeys(part.path for part in prepared):
        open_training_set(path, tokenizer_hash=own)


def check_sets(sets: RunSets, checkpoint: Mapping[str, Any], path: Path) -> None:
    """Refuses to go on in other data than a checkpoint was made with.

    Args:
        sets: of the run now.
        checkpoint: what was saved; before sets were recorded there, nothing is checked.
        path: of the checkpoint.

    Raises:
        ValueError: naming the sets that were prepared anew in the meantime.
    """
    before = checkpoint.get("sets", sets.fingerprints)
    pairs = zip(sets.train, sets.fingerprints, before, strict=True)
    changed = [str(part.path) for part, now, then in pairs if now != then]
    if changed:
        raise ValueError(
            f"{', '.join(changed)} was prepared anew since {path} was written, and its place in the data means nothing "
            "there; put the set back, or start anew in another folder (`init` takes over the weights)"
        )
