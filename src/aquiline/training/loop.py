"""The training loop: steps, validation, checkpoints, the decay that can be asked for, and an orderly end."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from aquiline.drafters.eagle_network import HeadConfig, Network, build_network
from aquiline.models.files import locked
from aquiline.training.card import write_card
from aquiline.training.features import add_features, conversation_key, features_ahead
from aquiline.training.learners.learner import Example, gradients, refresh
from aquiline.training.metrics import StepReport, divergence, log_acceptance, log_step, name_unmeasured
from aquiline.training.optim import set_rate
from aquiline.training.processes import largest, take_from_main
from aquiline.training.run import Run, keep_freed_memory, restore, save, start_run
from aquiline.training.settings import EAGLE, TrainSettings
from aquiline.training.stream import micro_batches
from aquiline.training.validation import measure_acceptance, validation_texts

__all__ = ["TrainReport", "TrainingDiverged", "optimiser_step", "train"]


Place = tuple[int, int]
"""Where a conversation lies: the number of its set, and its index there."""

Text = tuple[Tensor, Tensor]
"""Tokens (n,) int64 and mask (n,) bool of a conversation."""


class TrainingDiverged(RuntimeError):
    """The loss or the gradient is not finite; the last checkpoint is the last good state."""


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
        resume: continue from the checkpoint in the output folder, where there is one.
        overwrite: start over where there is one.
        build: makes the network of a new EAGLE head; a subclass of a public network trains a variant of it.

    Raises:
        ValueError: for settings, data or a checkpoint that do not fit together, for a checkpoint that is there if
            neither argument says what to do with it, and for an output that another process writes.
        TrainingDiverged: at a loss that is not finite.
    """
    output = Path(settings.output)
    # Of the processes of one run, the first writes.
    with locked(output) if os.environ.get("RANK", "0") == "0" else nullcontext():
        _make_output(output, resume=resume, overwrite=overwrite)
        return _train(settings, resume, build)


def _train(settings: TrainSettings, resume: bool, build: Callable[[HeadConfig], Network]) -> TrainReport:
    threads = torch.get_num_threads()
    run = start_run(settings, build)
    keep_freed_memory()  # not before: what loading freed goes back
    try:
        if resume and _is_there(run, run.output / "checkpoint.pt"):
            restore(run, run.output / "checkpoint.pt")
        elif run.learner.fit_positions:
            _fit(run)
        if run.main:
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
    """Makes a run's folder; a run that lies there is resumed, given up, or the reason to stop."""
    output.mkdir(parents=True, exist_ok=True)
    if resume or not (output / "checkpoint.pt").is_file():
        return
    if not overwrite:
        raise ValueError(
            f"{output} holds the checkpoint of a run; continue it (--resume), give it up (--overwrite), or name "
            "another folder"
        )
    (output / "metrics.jsonl").unlink(missing_ok=True)


def _is_there(run: Run, checkpoint: Path) -> bool:
    here = int(checkpoint.is_file())
    somewhere, missing = largest(run.accelerator, here, 1 - here)
    if somewhere and missing:
        raise ValueError(f"{checkpoint} is not seen by every process; give an output folder that all machines share")
    if not here and run.main:  # the folder may be the wrong one
        print(f"there is no checkpoint in {run.output} to resume: the run starts from the beginning", flush=True)
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
    """Gives the untrained network a start in closed form from the first conversations of the mixture, and saves it."""
    before = run.mixture.state()
    chosen = run.mixture.next_batch(run.learner.fit_positions)
    run.mixture.restore(before)
    texts = {place: _text(run, *place) for place in chosen}
    line = run.learner.fit(run.pool.map(_example_of(run, texts), chosen))
    take_from_main(run.accelerator, run.learner.network.parameters())
    if run.main:
        print(line, flush=True)
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
    save(run)
    if run.stopped:
        return
    _validate(run)
    if run.main:
        run.learner.save(run.output / "head", next(iter(run.measured.values()), None))
        write_card(run)


def optimiser_step(run: Run) -> StepReport:
    """Takes the next batch, sums its gradients and moves the weights.

    Conversations are independent, so each worker thread takes whole micro-batches and computes
    them with one core: no barriers inside a step. Every process of a distributed run takes
    every n-th micro-batch of the same batch, and gradients are summed.

    Raises:
        TrainingDiverged: if the loss or the gradient is not finite.
    """
    settings, learner = run.settings, run.learner
    chosen = run.mixture.next_batch(settings.batch_positions)
    texts = {place: _text(run, *place) for place in chosen}
    masks = [texts[place][1] for place in chosen]
    lengths, counted = [len(mask) for mask in masks], learner.counts(masks)
    scales = [settings.step_decay**depth / max(1, count) for depth, count in enumerate(counted)]
    groups = micro_batches(lengths, settings.micro_positions, pack=learner.packs)
    mine = groups[run.accelerator.process_index :: run.accelerator.num_processes]
    example = _example_of(run, {chosen[i]: texts[chosen[i]] for group in mine for i in group})
    for replica in run.replicas:
        refresh(replica, learner)
    run.free = list(run.replicas)

    def work(group: list[int]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        examples = [example(chosen[i]) for i in group]
        replica = run.free.pop()
        result = gradients(replica, replica.batch(examples), scales)
        run.free.append(replica)
        return result

    sums = torch.zeros(3, learner.depths)
    parameters = list(learner.network.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    # In the order of the groups, whoever finishes first: the sum is the same for any workers.
    for loss, losses, hits, grads in run.pool.map(work, mine):
        sums += torch.stack([losses.float().cpu(), hits.cpu(), torch.full_like(hits.cpu(), loss.item())])
        for parameter, grad in zip(parameters, grads, strict=True):
            assert parameter.grad is not None
            parameter.grad += grad
    sums = _reduce(run, parameters, sums)
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, settings.clip))
    _move(run, float(sums[2, 0]), norm)
    run.seen += sum(lengths)
    means = sums / torch.tensor(counted).clamp(min=1)
    return StepReport(float(sums[2, 0]), means[0].tolist(), means[1].tolist(), norm)


def _example_of(run: Run, texts: dict[Place, Text]) -> Callable[[Place], Example]:
    """How a worker makes the example of one of this process's conversations."""
    ahead: dict[str, Tensor] = {}
    if run.sharded:
        tokens = {conversation_key(*place): text[0] for place, text in texts.items()}
        ahead = features_ahead(run.source, tokens, run.settings.batch_positions, run.accelerator, run.pool.map)

    def example(place: Place) -> Example:
        torch.set_num_threads(1)
        return add_features(run.source, conversation_key(*place), *texts[place], step=run.step, ahead=ahead)

    return example


def _text(run: Run, source: int, index: int) -> Text:
    """Tokens and mask of a conversation, cut to the maximal length."""
    row, length = run.mixture.sets[source][index], run.settings.max_length
    tokens = torch.from_numpy(row.input_ids[:length]).long().to(run.target.device)
    return tokens, torch.from_numpy(row.loss_mask[:length]).to(run.target.device)


def _reduce(run: Run, parameters: list[torch.nn.Parameter], sums: Tensor) -> Tensor:
    """Adds up gradients and statistics of all processes."""
    if run.accelerator.num_processes == 1:
        return sums
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([g.flatten() for g in grads] + [sums.flatten().to(grads[0].device)])
    flat = run.accelerator.reduce(flat, reduction="sum")
    pieces = torch.split(flat, [*(g.numel() for g in grads), sums.numel()])
    for grad, piece in zip(grads, pieces[:-1], strict=True):
        grad.copy_(piece.view_as(grad))
    return torch.as_tensor(pieces[-1]).view_as(sums).cpu()


def _move(run: Run, loss: float, norm: float) -> None:
    if not math.isfinite(loss) or not math.isfinite(norm):
        init = run.settings.kind in EAGLE
        raise TrainingDiverged(divergence(run.step + 1, loss, norm, run.output, init=init))
    set_rate(run.optimisers, run.rate)
    for optimiser in run.optimisers:
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    run.step += 1


def _heed(run: Run) -> bool:
    """Does what signals and the file ``decay`` ask for, in all processes at the same step.

    A signal reaches one process earlier than another, or one alone: who left at once would leave
    the others waiting for its gradients.

    Returns:
        Whether the run ends here.
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
    """Positions to go that a file asks for, or -1; the file is removed."""
    if not file.is_file():
        return -1
    text = file.read_text(encoding="utf-8", errors="replace").strip()
    file.unlink()
    if text and not text.isdecimal():
        print(f"{file} holds {text!r}; allowed: a number of positions, or nothing; training continues as before")
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
