"""Training of Medusa and Hydra heads and of small models: one loop over lessons."""

from __future__ import annotations

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aquiline.models.resolve import target_fingerprint
from aquiline.targets.decoder import Decoder
from aquiline.targets.loading import load_target
from aquiline.training.data.dataset import TrainingSet
from aquiline.training.features import (
    FeatureStore,
    announce_room,
    compute_features,
    conversation_key,
    feature_stamp,
    open_features,
)
from aquiline.training.learners.initial import draft_vocabulary
from aquiline.training.learners.new_students import new_student, save_student
from aquiline.training.learners.regression import Regression
from aquiline.training.learners.student_validation import StudentAcceptance, measure_student
from aquiline.training.learners.students import HeadsStudent, Student, counted, lesson, student_loss
from aquiline.training.loop import TrainReport
from aquiline.training.optim import make_optimisers, rate_factor, set_rate
from aquiline.training.processes import refuse_several_processes
from aquiline.training.run_sets import RunSets, check_sets, open_sets
from aquiline.training.running import (
    append_metrics,
    diverged,
    make_output,
    say_nothing_to_resume,
    say_unmeasured,
    stop_signals,
    validation_texts,
)
from aquiline.training.settings import TrainSettings, changed_settings, settings_record
from aquiline.training.state import keep_freed_memory, positions_to_keep
from aquiline.training.step import TrainingDiverged
from aquiline.training.stream import Mixture, micro_batches


@dataclass(eq=False)
class _Run:
    """Everything that changes while training."""

    settings: TrainSettings
    sets: RunSets
    target: Decoder
    target_head: Tensor
    vocabulary: Tensor | None
    fingerprint: str
    student: Student
    replicas: list[Student]
    optimisers: list[torch.optim.Optimizer]
    mixture: Mixture
    store: FeatureStore | None
    step: int = 0
    seen: int = 0
    stopped: str = ""
    free: list[Student] = field(default_factory=list)
    acceptance: dict[str, StudentAcceptance] = field(default_factory=dict)


def train_heads(settings: TrainSettings, *, resume: bool = False, overwrite: bool = False) -> TrainReport:
    """Trains Medusa or Hydra heads or a small model; leaves it in the folder ``head`` of the output.

    Args:
        settings: the run.
        resume: go on from the checkpoint in the output folder, where there is one.
        overwrite: start anew where there is one.

    Raises:
        ValueError: for settings, data or a checkpoint that do not fit together, and for a checkpoint that
            is there and neither argument spoke of.
        TrainingDiverged: at a loss that is not finite.
    """
    refuse_several_processes(f"training of {settings.kind}")
    keep_freed_memory()
    began, threads, output = time.monotonic(), torch.get_num_threads(), Path(settings.output)
    make_output(output, resume=resume, overwrite=overwrite)
    run = _start(settings)
    if resume and not (output / "checkpoint.pt").is_file():
        say_nothing_to_resume(output)
    say_unmeasured(run.sets.empty(settings.validation or settings.data))
    if resume and (output / "checkpoint.pt").is_file():
        _restore(run, output / "checkpoint.pt")
    elif isinstance(run.student, HeadsStudent) and settings.regress_positions:
        _regress(run, run.student)
        _save(run)  # a killed run need not solve it again
    try:
        with stop_signals(partial(setattr, run, "stopped")), ThreadPoolExecutor(len(run.replicas)) as pool:
            _loop(run, pool)
    finally:
        torch.set_num_threads(threads)
    if not run.stopped:
        _validate(run)
    _save(run)
    alphas = {name: measured.alphas for name, measured in run.acceptance.items()}
    return TrainReport(run.step, run.seen, time.monotonic() - began, alphas, run.stopped or "finished")


def _regress(run: _Run, student: HeadsStudent) -> None:
    """Gives the heads a start; the conversations are the first ones of the data."""
    settings = run.settings
    ahead = Mixture(run.mixture.sets, run.mixture.weights, settings.max_length, settings.seed, run.mixture.limit)
    began, regression = time.monotonic(), Regression(student)
    there = sum(int(data.lengths.clip(max=settings.max_length).sum()) for data in run.mixture.sets)
    for source, index in ahead.next_batch(min(settings.regress_positions, there)):
        text = _text(run.mixture.sets[source], index, settings.max_length)
        regression.add(lesson([(*text, _final(run, source, index, text[0]))]))
    regression.solve()
    seconds = time.monotonic() - began
    _log(
        run,
        {"regressed_on": regression.rows, "seconds": seconds},
        f"heads begin as the regression of the feature ahead, over {regression.rows:,} positions ({seconds:.0f} s)",
    )


def _start(settings: TrainSettings) -> _Run:
    opened = open_sets(settings.target, settings.data, settings.validation or settings.data)
    target = load_target(settings.target, getattr(torch, settings.dtype))
    if not isinstance(target, Decoder):
        raise ValueError(
            f"{settings.target}: training reads the target through our own decoder, which cannot compute it"
        )
    sets = opened.train
    if settings.max_length > target.shape.max_positions:
        raise ValueError(
            f"max_length is {settings.max_length}, the target's context {target.shape.max_positions} tokens; lower it"
        )
    vocabulary, rows = None, target.lm_head.weight.detach()
    size = settings.vocabulary_size(target.shape.vocab_size)
    if size < target.shape.vocab_size:
        vocabulary = draft_vocabulary(sets, size, target.shape.vocab_size)
        rows = rows[vocabulary].contiguous()
    student = new_student(settings, target, rows)
    named = list(student.network.named_parameters())
    optimisers = make_optimisers(named, settings.lr, settings.muon_lr, settings.weight_decay)
    fingerprint = target_fingerprint(Path(settings.target))
    store = None
    if settings.features:
        stamp = feature_stamp(
            fingerprint, ("final",), {str(i): s.fingerprint for i, s in enumerate(sets)}, settings.max_length
        )
        store = open_features(settings.features, stamp)
        size = len(store.layout) * target.shape.hidden_size * target.dtype.itemsize
        announce_room(store, positions_to_keep(sets, settings) * size)
    weights = settings.data_weights or tuple(float(s.lengths.sum()) for s in sets)
    mixture = Mixture(sets, weights, settings.max_length, settings.seed, settings.limit_conversations)
    # Grown here, before several threads would grow it at once.
    target.rotary(torch.arange(settings.max_length), settings.max_length)
    workers = settings.workers or max(1, len(os.sched_getaffinity(0)))
    replicas = [student.replica() for _ in range(workers)]
    return _Run(
        settings, opened, target, rows, vocabulary, fingerprint, student, replicas, optimisers, mixture, store
    )  # fmt: skip


def _loop(run: _Run, pool: ThreadPoolExecutor) -> None:
    settings = run.settings
    began, at_start, saved = time.monotonic(), run.seen, time.monotonic()
    while run.seen < settings.total_positions and not run.stopped:
        loss, losses, accuracy, norm = _optimiser_step(run, pool)
        if run.step % settings.log_steps == 0:
            speed = (run.seen - at_start) / (time.monotonic() - began)
            record = {
                "step": run.step, "positions": run.seen, "loss": loss, "token_loss": losses, "accuracy": accuracy,
                "gradient_norm": norm, "positions_per_second": speed, "lr_factor": _rate(run),
            }  # fmt: skip
            left = (settings.total_positions - run.seen) / speed / 60
            _log(
                run,
                record,
                f"step {run.step:,} · {run.seen:,} of {settings.total_positions:,} positions · loss {loss:.3f} · "
                f"accuracy {' '.join(f'{a:.3f}' for a in accuracy)} · {speed:,.0f} positions/s · {left:.0f} min left",
            )
        if time.monotonic() - saved >= settings.save_minutes * 60:
            _save(run)
            saved = time.monotonic()


def _optimiser_step(run: _Run, pool: ThreadPoolExecutor) -> tuple[float, list[float], list[float], float]:
    """Takes the next batch in parallel micro-batches, one core each, and moves the weights."""
    settings, student = run.settings, run.student
    chosen = run.mixture.next_batch(settings.batch_positions)
    texts = [_text(run.mixture.sets[source], index, settings.max_length) for source, index in chosen]
    counts = [sum(int(counted(m, student.first + d).sum()) for _, m in texts) for d in range(student.depths)]
    scales = [settings.step_decay**depth / max(1, count) for depth, count in enumerate(counts)]
    lengths = [len(tokens) for tokens, _ in texts]
    for replica in run.replicas:
        _refresh(replica, student)
    run.free = list(run.replicas)

    def work(group: list[int]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        torch.set_num_threads(1)
        given = lesson([(*texts[i], _final(run, *chosen[i], texts[i][0])) for i in group])
        replica = run.free.pop()
        loss, losses, hits = student_loss(replica, given, run.target_head, scales, settings.loss)
        parameters = list(replica.network.parameters())
        grads = torch.autograd.grad(loss, parameters, materialize_grads=True)
        run.free.append(replica)
        return loss.detach(), losses, hits, list(grads)

    total, sums = 0.0, torch.zeros(2, student.depths)
    parameters = list(student.network.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    # In the order of the groups, whoever finishes first: the sum is the same for any workers.
    for loss, losses, hits, grads in pool.map(work, micro_batches(lengths, settings.micro_positions, pack=True)):
        total += float(loss)
        sums += torch.stack((losses, hits)).float()
        for parameter, grad in zip(parameters, grads, strict=True):
            assert parameter.grad is not None
            parameter.grad += grad
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, settings.clip))
    _move(run, total, norm)
    run.seen += sum(lengths)
    means = sums / torch.tensor(counts).clamp(min=1)
    return total, means[0].tolist(), means[1].tolist(), norm


def _move(run: _Run, loss: float, norm: float) -> None:
    if not math.isfinite(loss) or not math.isfinite(norm):
        raise TrainingDiverged(diverged(run.step + 1, loss, norm, run.settings.output))
    set_rate(run.optimisers, _rate(run))
    for optimiser in run.optimisers:
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    run.step += 1


def _rate(run: _Run) -> float:
    total = run.settings.total_positions
    begin = int(total * (1 - run.settings.decay_share))
    return rate_factor(run.seen, warmup=run.settings.warmup_positions, decay_from=begin, decay_to=total, peak=1.0)


@torch.no_grad()
def _refresh(replica: Student, student: Student) -> None:
    for mine, master in zip(replica.network.parameters(), student.network.parameters(), strict=True):
        mine.copy_(master)


def _text(data: TrainingSet, index: int, length: int) -> tuple[Tensor, Tensor]:
    row = data[index]
    return torch.from_numpy(row.input_ids[:length]).long(), torch.from_numpy(row.loss_mask[:length])


def _final(run: _Run, source: int, index: int, tokens: Tensor) -> Tensor:
    """The target's "final" feature of a conversation, from the folder where it is known."""
    layout = run.store.layout if run.store else ("final",)
    key = conversation_key(source, index)
    rows = run.store.get(key) if run.store else None
    if rows is None:
        rows = compute_features(run.target, tokens, layout)
        if run.store:
            run.store.put(key, rows)
    width = run.target.shape.hidden_size
    place = layout.index("final") * width
    return rows[:, place : place + width]


def _validate(run: _Run) -> None:
    """Measures the student on the validation splits."""
    replica = run.replicas[0]
    _refresh(replica, run.student)
    for path, data in run.sets.validation.items():
        conversations = validation_texts(data, run.settings.max_length, run.target.device)
        measured = measure_student(replica, run.target, run.vocabulary, conversations)
        run.acceptance[path] = measured
        _log(
            run,
            {"validation": path, "alpha": measured.alphas, "tau_chain": measured.tau, "rows": measured.rows},
            f"validation {path} · n-α {' '.join(f'{a:.3f}' for a in measured.alphas)} · "
            f"τ {measured.tau:.2f} (chain of {len(measured.alphas)}, {measured.rows:,} rows)",
        )


def _save(run: _Run) -> None:
    """Writes the features so far, the checkpoint and the head, each atomically."""
    if run.store:
        run.store.flush()
    output = Path(run.settings.output)
    state = {
        "settings": settings_record(run.settings),
        "sets": run.sets.fingerprints,
        "network": run.student.network.state_dict(),
        "optimisers": [optimiser.state_dict() for optimiser in run.optimisers],
        "mixture": run.mixture.state(),
        "progress": [run.step, run.seen],
    }
    scratch = output / f"checkpoint.partial-{os.getpid()}"
    measured = next(iter(run.acceptance.values()), None)
    try:
        torch.save(state, scratch)
        os.replace(scratch, output / "checkpoint.pt")
        accuracies = measured.accuracies if measured else ()
        save_student(
            output / "head", run.student, run.settings, run.target, run.vocabulary, run.fingerprint, accuracies
        )
    except (OSError, RuntimeError) as error:
        scratch.unlink(missing_ok=True)
        print(f"could not save in {output}: {error}; the previous checkpoint is untouched")


def _restore(run: _Run, path: Path) -> None:
    state: dict[str, Any] = torch.load(path, weights_only=True)
    different = changed_settings(run.settings, state["settings"])
    if different:
        raise ValueError(
            f"{path} was made with other settings ({'; '.join(different)}); use those, or start anew in another folder"
        )
    check_sets(run.sets, state, path)
    run.student.network.load_state_dict(state["network"])
    for optimiser, saved_state in zip(run.optimisers, state["optimisers"], strict=True):
        optimiser.load_state_dict(saved_state)
    run.mixture.restore(state["mixture"])
    run.step, run.seen = state["progress"]


def _log(run: _Run, record: dict[str, Any], line: str) -> None:
    append_metrics(run.settings.output, record)
    print(line, flush=True)
