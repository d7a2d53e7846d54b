"""The training loop: steps, metrics, validation, checkpoints, and an orderly end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from aquiline.drafters.eagle_network import HeadConfig, Network, build_network
from aquiline.training.card import write_card
from aquiline.training.processes import largest
from aquiline.training.running import (
    append_metrics,
    make_output,
    say_nothing_to_resume,
    say_unmeasured,
    stop_signals,
    validation_texts,
)
from aquiline.training.settings import TrainSettings
from aquiline.training.state import Run, keep_freed_memory, restore, save, start_run
from aquiline.training.step import StepReport, TrainingDiverged, fit_start, optimiser_step, rate
from aquiline.training.validation import Acceptance, measure_acceptance

__all__ = ["TrainReport", "TrainingDiverged", "train"]


@dataclass(frozen=True)
class TrainReport:
    """What a run did.

    Attributes:
        steps: optimiser steps in all.
        positions: positions seen in all.
        seconds: wall-clock of this call.
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
        resume: go on from the checkpoint in the output folder, where there is one.
        overwrite: start anew where there is one.
        build: makes the network of a new head; a subclass of a public network trains a variant of it.

    Raises:
        ValueError: for settings, data or a checkpoint that do not fit together, and for a checkpoint that
            is there and neither argument spoke of.
        TrainingDiverged: at a loss that is not finite.
    """
    threads = torch.get_num_threads()
    output = Path(settings.output)
    make_output(output, resume=resume, overwrite=overwrite)
    run = start_run(settings, build)
    keep_freed_memory()  # not before: what loading freed goes back
    there = resume and _is_there(run, output / "checkpoint.pt")
    if resume and not there and run.main:
        say_nothing_to_resume(output)
    if there:
        restore(run, output / "checkpoint.pt")
    elif (settings.kind, settings.init, settings.start) == ("eagle", None, "target"):
        share = fit_start(run)
        if run.main:
            print(f"the fusing linear explains {share:.0%} of the next feature's variance", flush=True)
    if run.main:
        say_unmeasured(run.sets.empty(settings.validation or settings.data))
    try:
        with stop_signals(partial(setattr, run, "stopped")):
            acceptance = _loop(run)
    finally:
        run.pool.shutdown()
        torch.set_num_threads(threads)
    return TrainReport(
        steps=run.step,
        positions=run.seen,
        seconds=time.monotonic() - run.began,
        acceptance={name: measured.alphas for name, measured in acceptance.items()},
        stopped=run.stopped or "finished",
    )


def _is_there(run: Run, checkpoint: Path) -> bool:
    here = int(checkpoint.is_file())
    somewhere, missing = largest(run.accelerator, here, 1 - here)
    if somewhere and missing:
        raise ValueError(f"{checkpoint} is not seen by every process; give an output folder that all machines share")
    return bool(here)


def _loop(run: Run) -> dict[str, Acceptance]:
    settings, output = run.settings, Path(run.settings.output)
    began, at_start = time.monotonic(), run.seen
    saved, validated = began, run.seen
    while run.seen < run.decay_to and not _heed(run, output):
        report = optimiser_step(run)
        if run.step % settings.log_steps == 0:
            _log_step(run, report, (run.seen - at_start) / (time.monotonic() - began))
        if run.seen - validated >= settings.validate_positions:
            validated = run.seen
            _validate(run)
        if time.monotonic() - saved >= settings.save_minutes * 60:
            save(run)
            saved = time.monotonic()
    save(run)
    if run.stopped:
        return {}
    acceptance = _validate(run)
    if run.main:
        write_card(run, acceptance)
    return acceptance


def _heed(run: Run, output: Path) -> bool:
    """Does what signals and the file ``decay`` ask for, in all processes at the same step.

    A signal reaches one process earlier than another, or one alone: who left at once would leave
    the others waiting for its gradients.

    Returns:
        Whether the run ends here.
    """
    number = signal.Signals[run.stopped] if run.stopped else 0
    asked = _asked_decay(output / "decay", int(run.seen * run.settings.decay_share)) if run.main else -1
    number, asked = largest(run.accelerator, int(number), asked)
    if number:
        run.stopped = signal.Signals(number).name
        return True
    if asked >= 0:
        run.peak = rate(run)
        run.decay_from, run.decay_to = run.seen, run.seen + asked
    _mix_for_decay(run)
    return run.seen >= run.decay_to


def _asked_decay(file: Path, usual: int) -> int:
    """Positions to go that a file asks for, or -1; the file is removed."""
    if not file.is_file():
        return -1
    text = file.read_text(encoding="utf-8", errors="replace").strip()
    file.unlink()
    if text and not text.isdecimal():
        print(f"{file} holds {text!r}; allowed: a number of positions, or nothing; training goes on as before")
        return -1
    return int(text) if text else usual


def _mix_for_decay(run: Run) -> None:
    """Mixes the data as the decay asks for, once it has begun."""
    weights = run.settings.decay_weights
    if weights and run.seen >= run.decay_from and tuple(run.mixture.weights) != weights:
        run.mixture.set_weights(weights)


def _log_step(run: Run, report: StepReport, speed: float) -> None:
    left = max(0, run.decay_to - run.seen) / speed
    _log(
        run,
        {
            "step": run.step,
            "positions": run.seen,
            "loss": report.loss,
            "token_loss": report.token_loss,
            "accuracy": report.accuracy,
            "gradient_norm": report.gradient_norm,
            "positions_per_second": speed,
            "lr_factor": rate(run),
            "seconds_left": left,
        },
        f"step {run.step:,} · {run.seen:,} of {run.decay_to:,} positions · loss {report.loss:.3f} · "
        f"accuracy {' '.join(f'{a:.3f}' for a in report.accuracy)} · {speed:,.0f} positions/s · "
        f"{left / 60:.0f} min left",
    )


def _validate(run: Run) -> dict[str, Acceptance]:
    """Measures the head on each validation split; every process does, so that none waits."""
    result = {}
    for path, data in run.sets.validation.items():
        began = time.monotonic()
        conversations = validation_texts(data, run.settings.max_length, run.target.device)
        steps = max(5, run.settings.ttt_steps + 1)
        measured = measure_acceptance(run.target, run.head, conversations, steps)
        result[path] = measured
        _log(
            run,
            {
                "validation": path,
                "step": run.step,
                "positions": run.seen,
                "alpha": measured.alphas,
                "accuracy": measured.accuracy,
                "rows": measured.rows,
                "tau_chain5": measured.tau_chain,
                "tau_tree": measured.tau_tree,
                "calibration_error": measured.calibration_error,
                "seconds": time.monotonic() - began,
            },
            f"validation {path} · n-α {' '.join(f'{a:.3f}' for a in measured.alphas)} · "
            f"τ {measured.tau_chain:.2f} (chain of 5), {measured.tau_tree:.2f} (fixed tree)",
        )
    return result


def _log(run: Run, record: dict[str, Any], line: str) -> None:
    if not run.main:
        return
    append_metrics(run.settings.output, record)
    print(line, flush=True)
    if run.settings.tensorboard:
        _to_tensorboard(run, record)


def _to_tensorboard(run: Run, record: dict[str, Any]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    prefix = f"validation {record['validation']}/" if "validation" in record else "train/"
    with SummaryWriter(run.settings.output) as writer:
        for name, value in record.items():
            for i, number in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(number, int | float):
                    tag = f"{prefix}{name}/{i}" if isinstance(value, list) else f"{prefix}{name}"
                    writer.add_scalar(tag, number, run.seen)
