"""Starts, saves and restores training runs."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aquiline.checkpoints.open import read_head
from aquiline.drafters.eagle_network import DraftHead, HeadConfig, Network, build_network
from aquiline.models.files import replacing
from aquiline.models.resolve import target_fingerprint
from aquiline.targets.decoder import Decoder
from aquiline.targets.loading import load_target
from aquiline.targets.target import Target, check_features
from aquiline.training.data.dataset import TrainingSet
from aquiline.training.features import FeatureSource, open_source
from aquiline.training.learners.eagle import EagleLearner
from aquiline.training.learners.eagle_start import new_head
from aquiline.training.learners.learner import Acceptance, Learner
from aquiline.training.learners.parallel import new_parallel
from aquiline.training.learners.small import new_small
from aquiline.training.learners.target_parts import draft_vocabulary, embedding_table, read_out_rows
from aquiline.training.optim import make_optimisers, rate_factor
from aquiline.training.processes import load_sharded, say, shards_target, start_processes, take_from_main
from aquiline.training.settings import EAGLE, SMALL, TrainSettings, changed_settings, settings_record
from aquiline.training.stream import Mixture, RunSets, check_sets, open_sets

FUSION_POSITIONS = 40_000
"""Positions that the fusing linear of a new EAGLE-1 head is fitted to."""


@dataclass(eq=False)
class Run:
    """A training run in progress.

    Attributes:
        settings: of the run.
        sets: training and validation sets.
        learner: the float32 master weights with their loss.
        optimisers: of the masters.
        mixture: order of the conversations.
        source: of their features; holds the frozen target.
        replicas: copies of the learner in the compute dtype, one per worker.
        pool: the workers.
        accelerator: knows the processes of a distributed run.
        sharded: the target's layers are spread over them.
        free: replicas that no worker uses now.
        measured: acceptance by validation set, as last measured.
        step, seen: optimiser steps and positions so far.
        decay_from, decay_to, peak: see `aquiline.training.optim.rate_factor`.
        stopped: name of the signal that ends the run, or empty.
    """

    settings: TrainSettings
    sets: RunSets
    learner: Learner
    optimisers: list[torch.optim.Optimizer]
    mixture: Mixture
    source: FeatureSource
    replicas: list[Learner]
    pool: ThreadPoolExecutor
    accelerator: Any
    sharded: bool = False
    free: list[Learner] = field(default_factory=list)
    measured: dict[str, Acceptance] = field(default_factory=dict)
    step: int = 0
    seen: int = 0
    decay_from: int = 0
    decay_to: int = 0
    peak: float = 1.0
    stopped: str = ""
    began: float = field(default_factory=time.monotonic)

    @property
    def main(self) -> bool:
        """True in the process that logs and saves."""
        return bool(self.accelerator.is_main_process)

    @property
    def target(self) -> Target:
        """The frozen target."""
        return self.source.target

    @property
    def output(self) -> Path:
        """Folder of the run."""
        return Path(self.settings.output)

    @property
    def rate(self) -> float:
        """Factor on the learning rates now."""
        warmup = self.settings.warmup_positions
        return rate_factor(self.seen, warmup=warmup, decay_from=self.decay_from, decay_to=self.decay_to, peak=self.peak)


def keep_freed_memory() -> None:
    """Tells glibc to keep freed memory: each step reuses it, and new pages would have to be zeroed."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        # M_MMAP_MAX 0: no mapping per block; M_TRIM_THRESHOLD, M_TOP_PAD: keep what was freed.
        for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 1 << 28)):
            libc.mallopt(option, value)


def start_run(settings: TrainSettings, build: Callable[[HeadConfig], Network] = build_network) -> Run:
    """Loads the target and the data, and makes or reads the head; `build` makes the network of a new EAGLE head.

    Raises:
        ValueError: for settings, data, target or head that do not fit together.
    """
    opened = open_sets(settings.target, settings.data, settings.validation or settings.data)
    accelerator, dtype = start_processes(), getattr(torch, str(settings.dtype))
    sharded = shards_target(settings.shard_target, accelerator.num_processes)
    if sharded:
        target = load_sharded(settings.target, dtype, accelerator)
    else:
        target = load_target(settings.target, dtype, accelerator.device)
    _check_lengths(settings, target)
    sets = list(opened.train)
    learner = _new_learner(settings, target, sets, build)
    take_from_main(accelerator, learner.network.parameters())
    named = learner.network.named_parameters()
    weights = settings.data_weights or tuple(float(s.lengths.sum()) for s in sets)
    workers = settings.workers or _cores(accelerator)
    # Grown here, before several threads would grow it at once.
    if isinstance(target, Decoder):
        target.rotary(torch.arange(settings.max_length, device=accelerator.device), settings.max_length)
    return Run(
        settings=settings,
        sets=opened,
        learner=learner,
        optimisers=make_optimisers(named, settings.lr, settings.muon_lr, settings.weight_decay, dtype),
        mixture=Mixture(sets, weights, settings.max_length, settings.seed, settings.limit_conversations),
        source=open_source(settings, target, learner, sets),
        replicas=[learner.replica() for _ in range(workers)],
        pool=ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)),
        accelerator=accelerator,
        sharded=sharded,
        decay_from=int(settings.total_positions * (1 - settings.decay_share)),
        decay_to=settings.total_positions,
    )


def _cores(accelerator: Any) -> int:
    """CPU cores for this process, of those of all; 1 if another device computes."""
    on_cpu = accelerator.device.type == "cpu"
    return max(1, len(os.sched_getaffinity(0)) // accelerator.num_processes) if on_cpu else 1


def _new_learner(
    settings: TrainSettings, target: Target, sets: list[TrainingSet], build: Callable[[HeadConfig], Network]
) -> Learner:
    if settings.kind in EAGLE:
        return _new_eagle(settings, target, sets, build)
    if not isinstance(target, Decoder):
        raise ValueError(
            f"kind is {settings.kind}; allowed: {' and '.join(EAGLE)} for {settings.target}, which only transformers "
            "computes; train an EAGLE head"
        )
    vocabulary = _loss_vocabulary(settings, target, sets)
    rows, fingerprint = read_out_rows(target, vocabulary), target_fingerprint(Path(settings.target))
    if settings.kind in SMALL:
        return new_small(settings, target, rows, fingerprint)
    learner = new_parallel(settings, target, rows, vocabulary, fingerprint)
    there = sum(int(data.lengths.clip(max=settings.max_length).sum()) for data in sets)
    learner.fit_positions = min(settings.regress_positions, there)
    return learner


def _new_eagle(
    settings: TrainSettings, target: Target, sets: list[TrainingSet], build: Callable[[HeadConfig], Network]
) -> EagleLearner:
    head = new_head(settings, target, sets, build) if settings.init is None else _read_head(settings, target)
    head.network.float().to(target.device).train()
    head.target_fingerprint = target_fingerprint(Path(settings.target))
    head.window = max(1, settings.max_length // 2)  # it sees up to twice as many: the longest text of its training
    vocabulary = head.draft_to_target
    if vocabulary is None:
        vocabulary = _loss_vocabulary(settings, target, sets)
    unfitted = (settings.kind, settings.init, settings.start) == ("eagle", None, "target")
    return EagleLearner(
        head=head,
        target=target,
        target_head=read_out_rows(target, vocabulary),
        embedding=embedding_table(target),
        rule=settings.loss,
        token_weight=settings.token_weight,
        feature_weight=settings.feature_weight,
        steps=settings.ttt_steps,
        packs=settings.pack,
        recompute=settings.recompute,
        fit_positions=FUSION_POSITIONS if unfitted else 0,
    )


def _read_head(settings: TrainSettings, target: Target) -> DraftHead:
    assert settings.init is not None
    head = read_head(settings.init, target.shape)
    if head.config.kind != settings.kind:
        raise ValueError(
            f"{settings.init} is of kind {head.config.kind}, and the run trains {settings.kind}; "
            f"give --method {head.config.kind} or another --init"
        )
    return head


def _loss_vocabulary(settings: TrainSettings, target: Target, sets: list[TrainingSet]) -> Tensor | None:
    """Token ids that the loss is computed over, or None for all."""
    size = settings.vocabulary_size(target.shape.vocab_size)
    return draft_vocabulary(sets, size, target.shape.vocab_size) if size < target.shape.vocab_size else None


def _check_lengths(settings: TrainSettings, target: Target) -> None:
    shape = target.shape
    if settings.max_length > shape.max_positions:
        raise ValueError(
            f"max_length is {settings.max_length}; allowed: ≤ {shape.max_positions}, the target's context; lower it"
        )
    check_features((*(settings.layers or ()), *settings.keep_layers), shape.num_layers)


def save(run: Run) -> list[OSError]:
    """Writes the features so far, the head and the checkpoint, each whole or not at all; the small head first.

    Returns:
        The errors of what could not be written, each also printed; its previous files are untouched.
    """
    if run.source.store:
        run.source.store.flush()
    lost: list[OSError] = []
    if not run.main:
        return lost
    for write in (save_head, _save_checkpoint):
        try:
            write(run)
        except OSError as error:
            say(f"could not save: {error}; make room; the previous files are untouched")
            lost.append(error)
    return lost


def save_head(run: Run) -> None:
    """Writes the head, with its measured acceptance if there is one."""
    run.learner.save(run.output / "head", next(iter(run.measured.values()), None))


def _save_checkpoint(run: Run) -> None:
    state = {
        "settings": settings_record(run.settings),
        "sets": run.sets.fingerprints,
        "network": run.learner.network.state_dict(),
        "optimisers": [optimiser.state_dict() for optimiser in run.optimisers],
        "mixture": run.mixture.state(),
        "progress": [run.step, run.seen, run.decay_from, run.decay_to],
        "peak": run.peak,
    }
    # A file of Python's: torch's own hides the system's error.
    with replacing(run.output / "checkpoint.pt") as scratch, scratch.open("wb") as file:
        torch.save(state, file)


def restore(run: Run, path: Path) -> None:
    """Continues from a checkpoint.

    Raises:
        ValueError: if it was made by an older version, with other settings, or from other data; says which.
    """
    state: dict[str, Any] = torch.load(path, weights_only=True, map_location=run.target.device)
    if "peak" not in state:
        raise ValueError(
            f"{path} was written by an older version, whose checkpoints hold no decay; start over in another folder, "
            "or finish the run with that version"
        )
    different = changed_settings(run.settings, state["settings"])
    if different:
        raise ValueError(
            f"{path} was made with other settings ({'; '.join(different)}); use those, or start over in another folder"
            + (f" (--init {run.output / 'head'} takes over the weights)" if run.settings.kind in EAGLE else "")
        )
    check_sets(run.sets, state, path)
    run.learner.network.load_state_dict(state["network"])
    for optimiser, saved in zip(run.optimisers, state["optimisers"], strict=True):
        optimiser.load_state_dict(saved)
    run.mixture.restore(state["mixture"])
    run.step, run.seen, run.decay_from, run.decay_to = state["progress"]
    run.peak = state["peak"]
