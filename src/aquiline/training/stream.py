"""Opens and checks the data sets of a run, and draws the conversations of each step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from aquiline.training.data.dataset import TrainingSet, open_training_set

_SHORTEST = 3
"""Tokens of the shortest conversation that has a row to learn or to measure."""


@dataclass(frozen=True, eq=False)
class RunSets:
    """Training sets, and by path the validation sets that hold a conversation."""

    train: tuple[TrainingSet, ...]
    validation: Mapping[str, TrainingSet]

    @property
    def fingerprints(self) -> list[str]:
        """Fingerprints of the training sets, without which a checkpoint's place in the data means nothing."""
        return [data.fingerprint for data in self.train]


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
    from aquiline.training.data.tokens import load_tokenizer, tokenizer_hash

    own = tokenizer_hash(load_tokenizer(target))
    for path in dict.fromkeys(part.path for part in prepared):
        open_training_set(path, tokenizer_hash=own)


def check_sets(sets: RunSets, checkpoint: Mapping[str, Any], path: Path) -> None:
    """Rejects a resume if the training data changed; old checkpoints hold no fingerprints to compare.

    Raises:
        ValueError: naming the sets that were prepared again.
    """
    before = checkpoint.get("sets", sets.fingerprints)
    pairs = zip(sets.train, sets.fingerprints, before, strict=True)
    changed = [str(part.path) for part, now, then in pairs if now != then]
    if changed:
        raise ValueError(
            f"{', '.join(changed)} was prepared again since {path} was written, whose place in the data is now "
            "meaningless; put the set back, or start over in another folder"
        )


@dataclass(eq=False)
class Mixture:
    """Endless shuffled conversations of several training sets, mixed by shares of positions.

    Attributes:
        sets: the training sets.
        weights: share of the positions that each should make up; any positive scale.
        max_length: conversations are cut to this many tokens.
        seed: decides the order.
        limit: for each set, use at most this many conversations (0: all); cached features pay only for a
            repeated subset.
        cursors: per set, conversations taken so far over all epochs.
        drawn: per set, positions taken since the weights were last set.
    """

    sets: Sequence[TrainingSet]
    weights: Sequence[float]
    max_length: int
    seed: int
    limit: Sequence[int] = ()
    cursors: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    _orders: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cursors = self.cursors or [0] * len(self.sets)
        self.drawn = self.drawn or [0] * len(self.sets)

    def set_weights(self, weights: Sequence[float]) -> None:
        """Changes the mixture from here on."""
        self.weights, self.drawn = list(weights), [0] * len(self.sets)

    def state(self) -> dict[str, Any]:
        """The state from which a checkpoint continues exactly here."""
        return {"cursors": list(self.cursors), "drawn": list(self.drawn), "weights": list(self.weights)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken."""
        self.cursors, self.drawn = list(state["cursors"]), list(state["drawn"])
        self.weights = list(state["weights"])

    def next_batch(self, positions: int) -> list[tuple[int, int]]:
        """Takes conversations, as (set, index), until they hold at least `positions` positions."""
        batch: list[tuple[int, int]] = []
        total = 0
        while total < positions:
            source = self._poorest()
            index = self._next(source)
            length = min(int(self.sets[source].lengths[index]), self.max_length)
            batch.append((source, index))
            self.drawn[source] += length
            total += length
        return batch

    def _poorest(self) -> int:
        """The set that is furthest below its share."""
        return min(
            (i for i in range(len(self.sets)) if self.weights[i] > 0),
            key=lambda i: self.drawn[i] / self.weights[i],
        )

    def _next(self, source: int) -> int:
        size = self._size(source)
        epoch, place = divmod(self.cursors[source], size)
        self.cursors[source] += 1
        if (source, epoch) not in self._orders:
            self._orders = {k: v for k, v in self._orders.items() if k[0] != source}
            subset = self._shuffled(len(self.sets[source]), source, 0)[:size]
            order = self._shuffled(size, source, epoch) if epoch else range(size)
            self._orders[source, epoch] = [subset[i] for i in order]
        return self._orders[source, epoch][place]

    def _size(self, source: int) -> int:
        size = len(self.sets[source])
        limit = self.limit[source] if self.limit else 0
        return min(size, limit) if limit else size

    def _shuffled(self, size: int, source: int, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(((self.seed * 1_000_003 + source) * 1_000_003 + epoch) % (1 << 64))
        order: list[int] = torch.randperm(size, generator=generator).tolist()
        return order


def micro_batches(lengths: Sequence[int], positions: int, *, pack: bool = False) -> list[list[int]]:
    """Splits a batch into groups that go through the network together.

    Similar lengths go together, so that padding stays small: a group of k conversations
    occupies k · longest positions (packed: the sum of its lengths), at most `positions`
    unless it is a single conversation.

    Args:
        lengths: length of each conversation.
        positions: bound on a group.
        pack: the group is one row, conversation after conversation.
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups:
            group = groups[-1]
            widest = lengths[group[0]]
            occupied = sum(lengths[j] for j in group) if pack else widest * len(group)
            if occupied + (lengths[i] if pack else widest) <= positions:
                group.append(i)
                continue
        groups.append([i])
    return groups
