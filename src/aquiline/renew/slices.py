"""Trains a candidate from the served head, one stage per process, so that any stage may be paused or killed.

    python -m aquiline.renew.slices FOLDER

does the next stage: writes the training set, trains (a killed run resumes from its checkpoint), or asks the gate and
acts on its verdict. The candidate lies in FOLDER/training until then.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aquiline.checkpoints.eagle.safeailab import write_head
from aquiline.checkpoints.open import open_head, read_head
from aquiline.models.cache_folder import appearing_whole
from aquiline.models.files import filling, write_text
from aquiline.models.tokenizer import token_table
from aquiline.renew.gate import judge
from aquiline.renew.settings import LONGEST, RenewSettings, read_settings
from aquiline.renew.store import Conversation, read_store
from aquiline.renew.versions import conclude, current
from aquiline.targets.loading import target_shape
from aquiline.targets.target import TargetShape
from aquiline.training.data.dataset import FORMAT, SplitWriter, TokenisedConversation, open_training_set
from aquiline.training.loop import train
from aquiline.training.settings import TrainSettings

ORIGINAL_SHARE = 0.4
"""Share of the positions that the original mixture makes up."""

HELD_OUT, MOST_HELD_OUT = 0.2, 100
"""Share of the conversations that are held out, the newest ones, and their largest number."""

NEWEST = 200_000
"""Tokens of the conversations that are trained on, the newest of those that are left."""

EPOCHS = 2
"""Passes over them."""

RATE = 0.25
"""Factor on the learning rates of a new head: a trained one needs small steps."""

NICENESS = 10
"""A tenth of a core that another process wants, too. 19 is a seventieth, with which no candidate is ever finished on a
busy machine; requests stop the process anyway."""


def advance(folder: Path) -> str:
    """Does the next stage of the candidate; returns its name."""
    settings, work = read_settings(folder), folder / "training"
    work.mkdir(exist_ok=True)
    if not (work / "set" / "manifest.json").is_file():
        write_set(folder, settings)
        return "set"
    base = folder / "versions" / f"{int(open_training_set(work / 'set').manifest['base']):04d}"
    if not (work / "candidate" / "config.json").is_file():
        if not (work / "run" / "head" / "README.md").is_file():
            train(train_settings(folder, settings), resume=True)
        if (work / "run" / "head" / "README.md").is_file():  # else a signal ended the run
            average(base, work / "run" / "head", work / "candidate", target_shape(settings.target))
        return "train"
    if not (work / "verdict.json").is_file():
        verdict = judge(settings, base, work / "candidate", work / "set")
        write_text(work / "verdict.json", json.dumps(asdict(verdict) | {"base": int(base.name)}))
    conclude(folder)
    return "gate"


def average(served: Path, trained: Path, candidate: Path, target: TargetShape) -> None:
    """Writes the mean of the served head and the trained one: it keeps most of the gain and forgets less.

    Args:
        served: folder of the head that the training began from.
        trained: folder of its result.
        candidate: folder to write.
        target: sizes of the target.

    Source: Wortsman et al. 2022 (arXiv 2109.01903), with equal shares.
    """
    head = read_head(trained, target)
    before = read_head(served, target).network.state_dict()
    mean = {name: (weight + before[name]) / 2 for name, weight in head.network.state_dict().items()}
    head.network.load_state_dict(mean)
    card = (trained / "README.md").read_text(encoding="utf-8")
    note = f"The weights are the mean of the trained head, which this card describes, and of version {served.name}.\n"
    with filling(candidate) as scratch:
        write_head(scratch, head)
        (scratch / "README.md").write_text(f"{card}\n{note}", encoding="utf-8")


def write_set(folder: Path, settings: RenewSettings) -> None:
    """Writes the stored conversations as a training set; the newest are its validation split.

    Raises:
        ValueError: if the store holds no conversation of the target's tokens that is short enough.
    """
    served, size = current(folder), target_shape(settings.target).vocab_size
    stored = [each for each in read_store(folder / "conversations") if len(each.tokens) <= LONGEST]
    found = [each for each in stored if min(each.tokens) >= 0 and max(each.tokens) < size]
    if not found:
        raise ValueError(f"{folder / 'conversations'} holds no conversation of at most {LONGEST} tokens below {size}")
    assert served is not None, "a renewal begins with a version"
    held = min(int(len(found) * HELD_OUT), MOST_HELD_OUT)
    splits = {"train": _newest(found[: len(found) - held]), "validation": found[len(found) - held :]}
    table = token_table(Path(settings.target))
    counts: dict[str, Any] = {}
    with appearing_whole(folder / "training" / "set") as scratch:
        for split, conversations in splits.items():
            with SplitWriter(scratch / f"{split}.arrow") as writer:
                for number, each in enumerate(conversations):
                    writer.add(_example(each, f"{split}:{number}"))
            counts[split] = asdict(writer.counts)
        manifest: dict[str, Any] = {"format": FORMAT, "tokenizer_hash": _hash(settings) if table else ""}
        manifest |= {"counts": counts, "base": served.number}
        (scratch / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def _newest(conversations: Sequence[Conversation]) -> list[Conversation]:
    """The last conversations with at most `NEWEST` tokens, at least one of them."""
    room, found = NEWEST, list[Conversation]()
    for each in reversed(conversations):
        room -= len(each.tokens)
        if room < 0 and found:
            break
        found.append(each)
    return found[::-1]


def _example(conversation: Conversation, name: str) -> TokenisedConversation:
    tokens = np.array(conversation.tokens, dtype=np.int32)
    return TokenisedConversation(tokens, np.arange(len(tokens)) >= conversation.prompt_length, name, "served")


def _hash(settings: RenewSettings) -> str:
    from aquiline.training.data.tokens import load_tokenizer, tokenizer_hash

    return tokenizer_hash(load_tokenizer(Path(settings.target)))


def train_settings(folder: Path, settings: RenewSettings) -> TrainSettings:
    """The run of a candidate; the same each time, so that it can resume."""
    made = open_training_set(folder / "training" / "set")
    base = folder / "versions" / f"{int(made.manifest['base']):04d}"
    original = [open_training_set(path) for path in settings.data]
    sizes = [float(each.lengths.sum()) for each in original]
    weights = [ORIGINAL_SHARE * size / sum(sizes) for size in sizes]
    longest = max(int(each.lengths.max()) for each in (made, *original))
    positions = int(EPOCHS * made.lengths.sum() / (1 - ORIGINAL_SHARE))
    usual = TrainSettings(settings.target, ("",), "", "eagle3")
    fields: dict[str, Any] = {
        "target": settings.target,
        "data": (*settings.data, str(folder / "training" / "set")),
        "data_weights": (*weights, 1 - ORIGINAL_SHARE),
        # For the card: the gate measures on the original data.
        "validation": (str(folder / "training" / "set"),),
        "validate_positions": max(positions, 1),
        "output": str(folder / "training" / "run"),
        "init": str(base),
        "kind": open_head(base).kind,
        "max_length": min(longest, LONGEST),
        "total_positions": max(positions, 1),
        "warmup_positions": positions // 20,
        "decay_share": 0.5,
        "ttt_steps": 3,
        "batch_positions": 1024,
        "lr": RATE * usual.lr,
        "muon_lr": RATE * usual.muon_lr,
        "save_minutes": 0.5,
        "workers": 1,
    }
    return TrainSettings(**(fields | dict(settings.train)))


def lower_priority() -> None:
    """Takes a low priority and one thread; on Linux, ends with the server that started it."""
    os.nice(NICENESS)
    torch.set_num_threads(1)
    if sys.platform == "linux":
        with suppress(OSError):  # not every kernel groups sessions
            # Niceness counts within a session alone; this lowers the session against all others.
            Path("/proc/self/autogroup").write_text(str(NICENESS))
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            sys.exit("the server has ended")


def main() -> None:
    """Does the next stage of the folder on the command line."""
    lower_priority()
    print(advance(Path(sys.argv[1])), flush=True)


if __name__ == "__main__":
    main()
