"""The training loop: one flat function over batches, with checkpoints and validation."""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aquiline.checkpoints.safeailab import read_head, write_head
from aquiline.drafters.eagle import DraftHead
from aquiline.targets.decoder import Decoder, config_from_hf, load_state
from aquiline.training.dataset import TrainingSet, open_training_set
from aquiline.training.features import (
    FeatureStore,
    compute_features,
    conversation_key,
    feature_stamp,
    open_features,
)
from aquiline.training.initial import new_head
from aquiline.training.learner import (
    Example,
    Learner,
    build_micro_batch,
    counts,
    gradients,
    refresh,
    replicate,
)
from aquiline.training.optim import make_optimisers, rate_factor, set_rate
from aquiline.training.settings import TrainSettings, changed_settings, settings_record
from aquiline.training.stream import Mixture, micro_batches
from aquiline.training.validation import measure_acceptance


@dataclass(frozen=True)
class TrainReport:
    """What a run did.

    Attributes:
        steps: optimiser steps in all.
        positions: positions seen in all.
        seconds: wall-clock of this call.
        acceptance: per validation set, n-α for n = 0 … (teacher-forced chain).
        stopped: "finished", or the signal that ended it early.
    """

    steps: int
    positions: int
    seconds: float
    acceptance: dict[str, list[float]]
    stopped: str


@dataclass(eq=False)
class _Run:
    """Everything that changes while training."""

    settings: TrainSettings
    target: Decoder
    head: DraftHead
    learner: Learner
    optimisers: list[torch.optim.Optimizer]
    mixture: Mixture
    store: FeatureStore | None
    replicas: list[Learner]
    pool: ThreadPoolExecutor
    free: list[Learner] = field(default_factory=list)
    step: int = 0
    seen: int = 0
    decay_from: int = 0
    decay_to: int = 0
    peak: float = 1.0
    stopped: str = ""
    started: float = field(default_factory=time.monotonic)


class TrainingDiverged(RuntimeError):
    """The loss or the gradient is not finite; the last checkpoint is the last good state."""


def train(settings: TrainSettings, *, resume: bool = False) -> TrainReport:
    """Trains a draft head.

    Args:
        settings: the run.
        resume: go on from the checkpoint in the output folder, where there is one.

    Raises:
        ValueError: for settings, data or a checkpoint that do not fit together.
        TrainingDiverged: at a loss that is not finite.
    """
    keep_freed_memory()
    output = Path(settings.output)
    output.mkdir(parents=True, exist_ok=True)
    run = _start(settings)
    if resume and (output / "checkpoint.pt").is_file():
        _restore(run, output / "checkpoint.pt")
    with _signals(run):
        acceptance = _loop(run)
    return TrainReport(run.step, run.seen, time.monotonic() - run.started, acceptance, run.stopped or "finished")


def keep_freed_memory() -> None:
    """Tells glibc to reuse freed memory instead of returning it to the system.

    The loop frees and allocates the same tens of megabytes all the time; getting them back from
    the kernel means zeroing every page again.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 1 << 28)):
            libc.mallopt(option, value)


def load_target(folder: str | Path) -> Decoder:
    """Reads a target in bfloat16, frozen."""
    from safetensors.torch import load_file

    folder = Path(folder)
    config = config_from_hf(json.loads((folder / "config.json").read_text()))
    target = Decoder(config).to(torch.bfloat16)
    load_state(target, load_file(folder / "model.safetensors"), str(folder))
    return target.eval().requires_grad_(False)


def _start(settings: TrainSettings) -> _Run:
    target = load_target(settings.target)
    sets = [open_training_set(path) for path in settings.data]
    weights = settings.data_weights or tuple(float(s.lengths.sum()) for s in sets)
    if settings.init:
        head = read_head(settings.init, target.shape)
    else:
        head = new_head(settings, target, sets)
    head.network.float().train()
    rows = target.lm_head.weight.detach()
    if head.draft_to_target is not None:
        rows = rows[head.draft_to_target]
    learner = Learner(head.network, rows)
    named = list(head.network.named_parameters())
    optimisers = make_optimisers(named, settings.lr, settings.muon_lr, settings.weight_decay)
    store = None
    if settings.features:
        fingerprints = {str(i): s.fingerprint for i, s in enumerate(sets)}
        stamp = feature_stamp(settings.target, head.config.features, fingerprints, settings.max_length)
        store = open_features(settings.features, stamp)
    mixture = Mixture(sets, weights, settings.max_length, settings.seed, settings.limit_conversations)
    decay = int(settings.total_positions * (1 - settings.decay_share))
    workers = settings.workers or len(os.sched_getaffinity(0))
    target.rotary(torch.arange(settings.max_length), settings.max_length)  # before threads share it
    return _Run(
        settings, target, head, learner, optimisers, mixture, store,
        [replicate(learner) for _ in range(workers)], ThreadPoolExecutor(workers),
        decay_from=decay, decay_to=settings.total_positions,
    )  # fmt: skip


def _loop(run: _Run) -> dict[str, list[float]]:
    settings, output = run.settings, Path(run.settings.output)
    saved = time.monotonic()
    since_validation = 0
    acceptance: dict[str, list[float]] = {}
    began, at_start = time.monotonic(), run.seen
    while run.seen < run.decay_to and not run.stopped:
        _watch_decay(run, output)
        before = run.seen
        loss, entropies, accuracy, norm = _optimiser_step(run)
        since_validation += run.seen - before
        if run.step % settings.log_steps == 0:
            rate = (run.seen - at_start) / (time.monotonic() - began)
            record = {
                "step": run.step, "positions": run.seen, "loss": loss, "cross_entropy": entropies,
                "accuracy": accuracy, "gradient_norm": norm, "positions_per_second": rate,
                "lr_factor": run.optimisers[0].param_groups[0]["lr"] / settings.lr,
                "seconds_left": (run.decay_to - run.seen) / rate,
            }  # fmt: skip
            _log(output, record)
        if since_validation >= settings.validate_positions:
            since_validation = 0
            acceptance = _validate(run)
        if time.monotonic() - saved >= settings.save_minutes * 60:
            save(run)
            saved = time.monotonic()
    if run.stopped:
        save(run)
        return acceptance
    acceptance = _validate(run)
    save(run)
    return acceptance


def _watch_decay(run: _Run, output: Path) -> None:
    """Begins the decay when the time has come, or when a file ``decay`` asks for it."""
    asked = output / "decay"
    if asked.is_file():
        text = asked.read_text().strip()
        length = int(text) if text else int(run.seen * run.settings.decay_share)
        run.peak = _rate(run)
        run.decay_from, run.decay_to = run.seen, run.seen + length
        asked.unlink()
    weights = run.settings.decay_weights
    if weights and run.seen >= run.decay_from and tuple(run.mixture.weights) != weights:
        run.mixture.set_weights(weights)


def _optimiser_step(run: _Run) -> tuple[float, list[float], list[float], float]:
    settings = run.settings
    chosen = run.mixture.next_batch(settings.batch_positions)
    texts = [_text(run, source, index) for source, index in chosen]
    counted = counts([mask for _, mask in texts], settings.ttt_steps)
    scales = [settings.step_decay**i / max(1, count) for i, count in enumerate(counted)]
    groups = micro_batches([len(tokens) for tokens, _ in texts], settings.micro_positions, pack=settings.pack)
    for replica in run.replicas:
        refresh(replica, run.learner)
    run.free = list(run.replicas)

    def work(group: list[int]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        torch.set_num_threads(1)
        examples = [_example(run, *chosen[i], *texts[i]) for i in group]
        micro = build_micro_batch(examples, run.target.embed_tokens.weight, settings.ttt_steps, pack=settings.pack)
        replica = run.free.pop()
        result = gradients(replica, micro, scales)
        run.free.append(replica)
        return result

    total, sums = torch.zeros(()), torch.zeros(2, settings.ttt_steps)
    # In the order of the groups, whoever finishes first: the sum is the same for any workers.
    for loss, entropies, hits, grads in run.pool.map(work, groups):
        total += loss
        sums += torch.stack([entropies, hits])
        for parameter, grad in zip(run.learner.parameters(), grads, strict=True):
            if parameter.grad is None:
                parameter.grad = grad.float()
            else:
                parameter.grad += grad
    norm = torch.nn.utils.clip_grad_norm_(run.learner.parameters(), settings.clip)
    if not math.isfinite(float(total)) or not math.isfinite(float(norm)):
        raise TrainingDiverged(
            f"step {run.step + 1}: loss {float(total)}, gradient norm {float(norm)}; stopped. The "
            "last checkpoint is good: resume from it with a lower learning rate"
        )
    _update(run)
    run.step += 1
    run.seen += sum(len(tokens) for tokens, _ in texts)
    means = sums / torch.tensor(counted).clamp(min=1)
    return float(total), means[0].tolist(), means[1].tolist(), float(norm)


def _update(run: _Run) -> None:
    set_rate(run.optimisers, _rate(run))
    for optimiser in run.optimisers:
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)


def _rate(run: _Run) -> float:
    return rate_factor(
        run.seen,
        warmup=run.settings.warmup_positions,
        decay_from=run.decay_from,
        decay_to=run.decay_to,
        peak=run.peak,
    )


def _text(run: _Run, source: int, index: int) -> tuple[Tensor, Tensor]:
    """Tokens and mask of a conversation, cut to the maximal length."""
    row, length = run.mixture.sets[source][index], run.settings.max_length
    return (
        torch.from_numpy(row.input_ids[:length]).long(),
        torch.from_numpy(row.loss_mask[:length]),
    )


def _example(run: _Run, source: int, index: int, tokens: Tensor, mask: Tensor) -> Example:
    """Adds the features to a conversation, from the folder where they are known."""
    key = conversation_key(source, index)
    both = run.store.get(key) if run.store else None
    if both is None:
        both = target_features(run.target, run.head, tokens)
        if run.store:
            run.store.put(key, both)
    return split_features(run.head, tokens, mask, both)


def target_features(target: Decoder, head: DraftHead, tokens: Tensor) -> Tensor:
    """The head's features and "final", (T, F) or (T, F + H)."""
    wanted = tuple(dict.fromkeys((*head.config.features, "final")))
    return compute_features(target, tokens, wanted)


def split_features(head: DraftHead, tokens: Tensor, mask: Tensor, both: Tensor) -> Example:
    """Parts what `target_features` returned."""
    hidden = head.config.target_hidden_size
    width = hidden * len(head.config.features)
    return Example(tokens, mask, both[:, :width], both[:, -hidden:])


def _validate(run: _Run) -> dict[str, list[float]]:
    result = {}
    began = time.monotonic()
    for path in run.settings.validation or run.settings.data:
        data = open_training_set(path, split="validation")
        measured = measure_acceptance(
            run.target, run.head, _some(data, run.settings.max_length), run.settings.ttt_steps + 1
        )
        result[path] = measured.alphas
        _log(
            Path(run.settings.output),
            {
                "validation": path, "step": run.step, "positions": run.seen,
                "alpha": measured.alphas, "accuracy": measured.accuracy,
                "rows": measured.rows, "seconds": time.monotonic() - began,
            },
        )  # fmt: skip
    return result


def _some(data: TrainingSet, max_length: int, positions: int = 15_000) -> Iterator[tuple[Tensor, Tensor]]:
    total = 0
    for row in data:
        tokens = torch.from_numpy(row.input_ids[:max_length]).long()
        total += len(tokens)
        if total > positions:
            return
        yield tokens, torch.from_numpy(row.loss_mask[:max_length])


def save(run: _Run) -> None:
    """Writes the checkpoint and the head, each atomically."""
    output = Path(run.settings.output)
    state = {
        "settings": settings_record(run.settings),
        "network": run.head.network.state_dict(),
        "optimisers": [o.state_dict() for o in run.optimisers],
        "mixture": run.mixture.state(),
        "peak": run.peak,
        "progress": [run.step, run.seen, run.decay_from, run.decay_to],
    }
    if run.store:
        run.store.flush()
    scratch = output / f"checkpoint.partial-{os.getpid()}"
    try:
        torch.save(state, scratch)
        os.replace(scratch, output / "checkpoint.pt")
        write_head(output / "head", run.head)
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
    run.head.network.load_state_dict(state["network"])
    for optimiser, saved in zip(run.optimisers, state["optimisers"], strict=True):
        optimiser.load_state_dict(saved)
    run.mixture.restore(state["mixture"])
    run.step, run.seen, run.decay_from, run.decay_to = state["progress"]
    run.peak = state["peak"]


@contextmanager
def _signals(run: _Run) -> Iterator[None]:
    """SIGTERM and SIGINT end the loop after the present step."""

    def stop(number: int, frame: object) -> None:
        run.stopped = signal.Signals(number).name

    previous = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _log(output: Path, record: dict[str, Any]) -> None:
    rounded = {k: _round(v) for k, v in record.items()}
    line = json.dumps(rounded)
    with (output / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def _round(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_round(v) for v in value]
    return value
