"""Runs the training loop: steps, validation, checkpoints, the decay on request, and an orderly end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from aquiline.drafters.eagle_network import HeadConfig, Network, build_network
from aquiline.models.files import check_room, locked
from aquiline.training.card import write_card
from aquiline.training.learners.learner import refresh
from aquiline.training.metrics import log_acceptance, log_step, name_unmeasured
from aquiline.training.processes import is_main_process, largest, say, take_from_main
from aquiline.training.run import Run, keep_freed_memory, restore, save, save_head, start_run
from aquiline.training.settings import TrainSettings
from aquiline.training.step import example_of, optimiser_step, read_text
from aquiline.training.validation import measure_acceptance, validation_texts


@dataclass(frozen=True)
class TrainReport:
    """Result of a call of `train`.

    Attributes:
        steps: optimiser steps of the run, resumed ones included.
        positions: positions seen, likewise.
        seconds: wall-clock time of this call.
        acceptance: per validation set, n-α for n = 0 … (see `aquiline.training.validation`).
        stopped: "finished", or the signal that ended it early.
    """

    steps: int
    positions: int
    seconds: float
    acceptance: dict[str, list[float]]
    stopped: str


def train(
    settings: TrainSettings,
    *,
    resume: bool = False,
    overwrite: bool = False,
    build: Callable[[HeadConfig], Network] = build_network,
) -> TrainReport:
    """Trains a draft head; leaves it with a model card in the folder ``head`` of the output.

    Args:
        settings: the run.
        resume: continue from the checkpoint in the output folder, where there is one.
        overwrite: start over where there is one.
        build: makes the network of a new EAGLE head; a subclass of a public network trains a variant of it.

    Raises:
        ValueError: for settings, data or a checkpoint that do not fit together, for a checkpoint that is there if
            neither argument says what to do with it, and for an output that another process writes or that has no
            room for a checkpoint.
        OSError: at the end, if what it leaves does not fit; before, that costs a message.
        TrainingDiverged: at a loss that is not finite.
    """
    output = Path(settings.output)
    # Of the processes of one run, the first writes.
    with locked(output) if is_main_process() else nullcontext():
        _make_output(output, resume=resume, overwrite=overwrite)
        return _train(settings, resume, build)


def _train(settings: TrainSettings, resume: bool, build: Callable[[HeadConfig], Network]) -> TrainReport:
    threads = torch.get_num_threads()
    run = start_run(settings, build)
    if run.main:
        _check_room(run)
    keep_freed_memory()  # not before: what loading freed goes back
    try:
        if resume and _is_there(run, run.output / "checkpoint.pt"):
            restore(run, run.output / "checkpoint.pt")
        elif run.learner.fit_positions:
            _fit(run)
        name_unmeasured(run)
        with _stop_signals(partial(setattr, run, "stopped")):
            _loop(run)
    finally:
        run.pool.shutdown()
        torch.set_num_threads(threads)
    finished = not run.stopped
    return TrainReport(
        steps=run.step,
        positions=run.seen,
        seconds=time.monotonic() - run.began,
        acceptance={name: measured.alphas for name, measured in run.measured.items()} if finished else {},
        stopped=run.stopped or "finished",
    )


def _make_output(output: Path, *, resume: bool, overwrite: bool) -> None:
    """Creates the output folder; a checkpoint in it is resumed, overwritten or rejected."""
    output.mkdir(parents=True, exist_ok=True)
    if resume or not (output / "checkpoint.pt").is_file():
        return
    if not overwrite:
        raise ValueError(
            f"{output} holds the checkpoint of a run; continue it (--resume), start over (--overwrite), or name "
            "another folder"
        )
    (output / "metrics.jsonl").unlink(missing_ok=True)


def _check_room(run: Run) -> None:
    """Rejects a disk without room for two checkpoints and two heads: a new one is written before the old one goes."""
    parameters = sum(parameter.numel() for parameter in run.learner.network.parameters())
    checkpoint = run.output / "checkpoint.pt"
    there = checkpoint.stat().st_size if checkpoint.is_file() else 0
    # A parameter takes 4 bytes and up to 8 of the optimiser's in a checkpoint, and 2 in a head.
    check_room(run.output, 2 * (12 + 2) * parameters - there)


def _is_there(run: Run, checkpoint: Path) -> bool:
    here = int(checkpoint.is_file())
    somewhere, missing = largest(run.accelerator, here, 1 - here)
    if somewhere and missing:
        raise ValueError(f"{checkpoint} is not visible to every process; give an output folder that all machines share")
    if not here:  # the folder may be the wrong one
        say(f"{run.output} holds no checkpoint to resume: the run starts from the beginning")
    return bool(here)


def _ending() -> Iterator[signal.Signals]:
    """Yields the signals that end a run; not SIGHUP where `nohup` has the process ignore it."""
    yield from (signal.SIGTERM, signal.SIGINT)
    lost = getattr(signal, "SIGHUP", None)  # Windows has none
    if lost is not None and signal.getsignal(lost) is not signal.SIG_IGN:
        yield lost


@contextmanager
def _stop_signals(stop: Callable[[str], None]) -> Iterator[None]:
    """SIGTERM, SIGINT and SIGHUP (a lost terminal) call `stop` with their name; the loop then ends after its step."""

    def handle(number: int, frame: object) -> None:
        name = signal.Signals(number).name
        # Not print: the signal may have come in the middle of one.
        os.write(2, f"{name}: the run saves and ends after this step\n".encode())
        stop(name)

    try:
        previous = {s: signal.signal(s, handle) for s in _ending()}
    except ValueError:  # not the main thread: whoever runs us handles signals
        previous = {}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _fit(run: Run) -> None:
    """Initialises the network in closed form from the first conversations of the mixture, and saves it."""
    before = run.mixture.state()
    chosen = run.mixture.next_batch(run.learner.fit_positions)
    run.mixture.restore(before)
    texts = {place: read_text(run, place) for place in chosen}
    line = run.learner.fit(run.pool.map(example_of(run, texts), chosen))
    take_from_main(run.accelerator, run.learner.network.parameters())
    say(line)
    save(run)  # a killed run need not solve it again


def _loop(run: Run) -> None:
    settings = run.settings
    began, at_start = time.monotonic(), run.seen
    saved, validated = began, run.seen
    while run.seen < run.decay_to and not _heed(run):
        report = optimiser_step(run)
        if run.step % settings.log_steps == 0:
            log_step(run, report, (run.seen - at_start) / (time.monotonic() - began))
        if run.seen - validated >= settings.validate_positions:
            validated = run.seen
            _validate(run)
        if time.monotonic() - saved >= settings.save_minutes * 60:
            save(run)
            saved = time.monotonic()
    lost = save(run)
    if run.stopped:
        if lost:  # a resume would repeat what was done since the last checkpoint
            raise lost[-1]
        return
    _validate(run)
    if run.main:
        save_head(run)
        write_card(run)


def _heed(run: Run) -> bool:
    """Obeys signals and the file ``decay``, in all processes at the same step.

    A signal reaches one process earlier than another, or one alone: who left at once would leave
    the others waiting for its gradients.

    Returns:
        True if the run ends here.
    """
    number = signal.Signals[run.stopped] if run.stopped else 0
    asked = _asked_decay(run.output / "decay", int(run.seen * run.settings.decay_share)) if run.main else -1
    number, asked = largest(run.accelerator, int(number), asked)
    if number:
        run.stopped = signal.Signals(number).name
        return True
    if asked >= 0:
        run.peak = run.rate
        run.decay_from, run.decay_to = run.seen, run.seen + asked
    weights = run.settings.decay_weights
    if weights and run.seen >= run.decay_from and tuple(run.mixture.weights) != weights:
        run.mixture.set_weights(weights)
    return run.seen >= run.decay_to


def _asked_decay(file: Path, usual: int) -> int:
    """Reads and removes the file ``decay``; returns the positions that remain, or -1 without a file."""
    if not file.is_file():
        return -1
    text = file.read_text(encoding="utf-8", errors="replace").strip()
    file.unlink()
    if text and not text.isdecimal():
        say(f"{file} holds {text!r}; allowed: a number of positions, or nothing; training continues as before")
        return -1
    return int(text) if text else usual


def _validate(run: Run) -> None:
    """Measures the head on each validation split; every process does, so that none waits."""
    replica = run.replicas[0]
    refresh(replica, run.learner)
    for path, data in run.sets.validation.items():
        began = time.monotonic()
        texts = validation_texts(data, run.settings.max_length, run.target.device)
        run.measured[path] = measure_acceptance(replica, texts)
        log_acceptance(run, path, run.measured[path], time.monotonic() - began)
