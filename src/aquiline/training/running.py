"""What every training run does beside learning: lines of metrics, an orderly end, validation texts."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aquiline.training.data.dataset import TrainingSet

VALIDATION_POSITIONS = 15_000
"""How much of a validation split is measured: enough for ± 0.01, little beside a run."""


@contextmanager
def stop_signals(stop: Callable[[str], None]) -> Iterator[None]:
    """SIGTERM and SIGINT call `stop` with their name, so that a loop can end after its present step."""

    def handle(number: int, frame: object) -> None:
        name = signal.Signals(number).name
        # Not print: the signal may have come in the middle of one.
        os.write(2, f"{name}: the run saves and ends after this step\n".encode())
        stop(name)

    try:
        previous = {s: signal.signal(s, handle) for s in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread: whoever runs us handles signals
        previous = {}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def make_output(output: Path, *, resume: bool, overwrite: bool) -> None:
    """Makes a run's folder, and looks after what lies there.

    Args:
        output: the folder.
        resume: the run goes on from a checkpoint there.
        overwrite: a run that lies there is given up.

    Raises:
        ValueError: if there is a checkpoint, and neither was said.
    """
    output.mkdir(parents=True, exist_ok=True)
    if resume or not (output / "checkpoint.pt").is_file():
        return
    if not overwrite:
        raise ValueError(
            f"{output} holds the checkpoint of a run; go on with it (--resume), give it up (--overwrite), or name "
            "another folder"
        )
    (output / "metrics.jsonl").unlink(missing_ok=True)


def say_nothing_to_resume(output: Path) -> None:
    """Says that a run that should go on begins: the folder may be the wrong one."""
    print(f"there is no checkpoint in {output} to resume: the run begins anew", flush=True)


def diverged(step: int, loss: float, norm: float, output: str | Path) -> str:
    """What to say, and to do, about a loss or a gradient that is not finite."""
    what = f"step {step}: loss {loss}, gradient norm {norm}; stopped. "
    if not (Path(output) / "checkpoint.pt").is_file():
        return what + "Nothing was saved yet: start again with a lower learning rate (--lr, --muon-lr)"
    return what + (
        "The last checkpoint is good: begin in another folder with a lower learning rate (--lr, --muon-lr), for EAGLE "
        f"heads from its weights (--init {Path(output) / 'head'})"
    )


def say_unmeasured(empty: Sequence[str]) -> None:
    """Says before a run on which sets it will not be measured."""
    for path in empty:
        print(
            f"{path} holds no conversation for validation: acceptance is not measured there; "
            "prepare more conversations, or a larger share (--validation 0.2)",
            flush=True,
        )


def append_metrics(output: str | Path, record: Mapping[str, Any]) -> None:
    """Adds a line to a run's ``metrics.jsonl``, numbers to five digits."""
    with (Path(output) / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({name: _rounded(value) for name, value in record.items()}) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_rounded(v) for v in value]
    return value


def validation_texts(data: TrainingSet, max_length: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """The first conversations of a validation split, as (tokens, mask).

    Args:
        data: the split.
        max_length: conversations are cut to so many tokens.
        device: of the target.

    Yields:
        At least one, and then no more than `VALIDATION_POSITIONS` positions in all.
    """
    total = 0
    for row in data:
        tokens = torch.from_numpy(row.input_ids[:max_length]).long().to(device)
        total += len(tokens)
        if total > VALIDATION_POSITIONS and total > len(tokens):
            return
        yield tokens, torch.from_numpy(row.loss_mask[:max_length]).to(device)
