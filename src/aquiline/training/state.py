"""Everything that changes while training: how it starts, and how it is saved and restored."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aquiline.checkpoints.eagle.safeailab import write_head
from aquiline.checkpoints.open import read_head
from aquiline.drafters.eagle_network import DraftHead, HeadConfig, Network
from aquiline.models.resolve import target_fingerprint
from aquiline.targets.decoder import Decoder
from aquiline.targets.loading import load_target
from aquiline.targets.target import Feature, Target, check_features
from aquiline.training.data.dataset import TrainingSet
from aquiline.training.features import FeatureStore, announce_room, feature_stamp, open_features
from aquiline.training.learners.eagle import Learner, LossSettings, replicate
from aquiline.training.learners.initial import draft_vocabulary, new_head
from aquiline.training.learners.target_parts import embedding_table, read_out_rows
from aquiline.training.optim import make_optimisers
from aquiline.training.processes import shards_target, start_processes, take_from_main
from aquiline.training.run_sets import RunSets, check_sets, open_sets
from aquiline.training.settings import TrainSettings, changed_settings, settings_record
from aquiline.training.sharding import load_sharded
from aquiline.training.stream import Mixture


@dataclass(eq=False)
class Run:
    """A training run in progress.

    Attributes:
        settings: what was asked.
        target: frozen.
        sets: what it learns from and is measured on.
        embedding: (V, H) its embeddings.
        head: the head; its network holds the float32 master weights.
        learner: the masters with their loss.
        optimisers: of the masters.
        mixture: where the data comes from.
        store: feature folder, or None.
        layout: target features that are computed (and stored) for each conversation.
        replicas: bfloat16 copies, one per worker.
        pool: the workers.
        accelerator: knows the processes of a distributed run.
        sharded: the target's layers are spread over them.
        step, seen: optimiser steps and positions so far.
        decay_from, decay_to, peak: see `aquiline.training.optim.rate_factor`.
        stopped: name of the signal that ends the run, or empty.
    """

    settings: TrainSettings
    target: Target
    sets: RunSets
    embedding: Tensor
    head: DraftHead
    learner: Learner
    optimisers: list[torch.optim.Optimizer]
    mixture: Mixture
    store: FeatureStore | None
    layout: tuple[Feature, ...]
    replicas: list[Learner]
    pool: ThreadPoolExecutor
    accelerator: Any
    sharded: bool = False
    free: list[Learner] = field(default_factory=list)
    step: int = 0
    seen: int = 0
    decay_from: int = 0
    decay_to: int = 0
    peak: float = 1.0
    stopped: str = ""
    began: float = field(default_factory=time.monotonic)

    @property
    def main(self) -> bool:
        """Whether this process logs and saves."""
        return bool(self.accelerator.is_main_process)


def keep_freed_memory() -> None:
    """Tells glibc to reuse freed memory instead of returning it to the system.

    The loop frees and allocates the same tens of megabytes all the time; getting them back from
    the kernel means zeroing every page again.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        # M_MMAP_MAX 0: no mapping per block; M_TRIM_THRESHOLD, M_TOP_PAD: keep what was freed.
        for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 1 << 28)):
            libc.mallopt(option, value)


def start_run(settings: TrainSettings, build: Callable[[HeadConfig], Network]) -> Run:
    """Loads the target and the data, and makes or reads the head.

    Raises:
        ValueError: for settings, data, target or head that do not fit together.
    """
    opened = open_sets(settings.target, settings.data, settings.validation or settings.data)
    accelerator, dtype = start_processes(), getattr(torch, settings.dtype)
    sharded = shards_target(settings.shard_target, accelerator.num_processes)
    if sharded:
        target = load_sharded(settings.target, dtype, accelerator)
    else:
        target = load_target(settings.target, dtype, accelerator.device)
    _check_lengths(settings, target)
    sets = list(opened.train)
    head = _first_head(settings, target, sets, build)
    take_from_main(accelerator, head.network.parameters())
    learner = _learner(settings, target, head, sets)
    optimisers = make_optimisers(
        list(head.network.named_parameters()), settings.lr, settings.muon_lr, settings.weight_decay
    )
    weights = settings.data_weights or tuple(float(s.lengths.sum()) for s in sets)
    limit = settings.limit_conversations
    mixture = Mixture(sets, weights, settings.max_length, settings.seed, limit)
    store, layout = _features(settings, target, head, sets)
    on_cpu = accelerator.device.type == "cpu"
    cores = len(os.sched_getaffinity(0)) // accelerator.num_processes if on_cpu else 1
    workers = settings.workers or max(1, cores)
    # Grown here, before several threads would grow it at once.
    if isinstance(target, Decoder):
        target.rotary(torch.arange(settings.max_length, device=accelerator.device), settings.max_length)
    return Run(
        settings=settings,
        target=target,
        sets=opened,
        embedding=embedding_table(target),
        head=head,
        learner=learner,
        optimisers=optimisers,
        mixture=mixture,
        store=store,
        layout=layout,
        replicas=[replicate(learner) for _ in range(workers)],
        pool=ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)),
        accelerator=accelerator,
        sharded=sharded,
        decay_from=int(settings.total_positions * (1 - settings.decay_share)),
        decay_to=settings.total_positions,
    )


def _first_head(
    settings: TrainSettings, target: Target, sets: list[TrainingSet], build: Callable[[HeadConfig], Network]
) -> DraftHead:
    if settings.init is None:
        head = new_head(settings, target, sets, build)
    else:
        head = read_head(settings.init, target.shape)
        if head.config.kind != settings.kind:
            raise ValueError(
                f"{settings.init} is an {head.config.kind} head, the run is for {settings.kind}; "
                f"say kind {head.config.kind}"
            )
    head.network.float().to(target.device).train()
    head.target_fingerprint = target_fingerprint(Path(settings.target))
    return head


def _learner(settings: TrainSettings, target: Target, head: DraftHead, sets: list[TrainingSet]) -> Learner:
    vocabulary = head.draft_to_target
    if vocabulary is None and settings.vocabulary_size(target.shape.vocab_size) < target.shape.vocab_size:
        size = settings.vocabulary_size(target.shape.vocab_size)
        vocabulary = draft_vocabulary(sets, size, target.shape.vocab_size)
    rows = read_out_rows(target, vocabulary)
    loss = LossSettings(settings.loss, settings.token_weight, settings.feature_weight)
    return Learner(head.network, rows, loss, recompute=settings.recompute)


def _features(
    settings: TrainSettings, target: Target, head: DraftHead, sets: list[TrainingSet]
) -> tuple[FeatureStore | None, tuple[Feature, ...]]:
    layout = tuple(dict.fromkeys((*head.config.features, *settings.keep_layers, "final")))
    if settings.features is None:
        return None, layout
    assert head.target_fingerprint is not None
    fingerprints = {str(i): s.fingerprint for i, s in enumerate(sets)}
    stamp = feature_stamp(head.target_fingerprint, layout, fingerprints, settings.max_length)
    store = open_features(settings.features, stamp)
    size = len(store.layout) * target.shape.hidden_size * target.dtype.itemsize
    announce_room(store, positions_to_keep(sets, settings) * size)
    return store, store.layout


def positions_to_keep(sets: Sequence[TrainingSet], settings: TrainSettings) -> int:
    """The most positions whose features a run can come to: those of its sets, or of its length."""
    limits = settings.limit_conversations or (0,) * len(sets)
    lengths = [data.lengths.clip(max=settings.max_length) for data in sets]
    there = sum(int(np.sort(part)[-limit:].sum()) for part, limit in zip(lengths, limits, strict=True))
    return min(there, settings.total_positions + settings.batch_positions + settings.max_length)


def _check_lengths(settings: TrainSettings, target: Target) -> None:
    shape = target.shape
    if settings.max_length > shape.max_positions:
        raise ValueError(
            f"max_length is {settings.max_length}, the target's context {shape.max_positions} tokens; lower it"
        )
    check_features((*(settings.layers or ()), *settings.keep_layers), shape.num_layers)


def save(run: Run) -> bool:
    """Writes the features so far, the checkpoint and the head, each atomically.

    Returns:
        False where the disk had no room; what was saved before is untouched then.
    """
    if run.store:
        run.store.flush()
    if not run.main:
        return True
    output = Path(run.settings.output)
    state = {
        "settings": settings_record(run.settings),
        "sets": run.sets.fingerprints,
        "network": run.head.network.state_dict(),
        "optimisers": [optimiser.state_dict() for optimiser in run.optimisers],
        "mixture": run.mixture.state(),
        "progress": [run.step, run.seen, run.decay_from, run.decay_to],
        "peak": run.peak,
    }
    scratch = output / f"checkpoint.partial-{os.getpid()}"
    try:
        torch.save(state, scratch)
        os.replace(scratch, output / "checkpoint.pt")
        write_head(output / "head", run.head)
    except (OSError, RuntimeError) as error:
        scratch.unlink(missing_ok=True)
        print(f"could not save in {output}: {error}; the previous checkpoint is untouched")
        return False
    return True


def restore(run: Run, path: Path) -> None:
    """Goes on from a checkpoint.

    Raises:
        ValueError: if it was made with other settings; says which.
    """
    state: dict[str, Any] = torch.load(path, weights_only=True, map_location=run.target.device)
    different = changed_settings(run.settings, state["settings"])
    if different:
        raise ValueError(
            f"{path} was made with other settings ({'; '.join(different)}); use those, or start "
            "anew in another folder (`init` takes over the weights)"
        )
    check_sets(run.sets, state, path)
    run.head.network.load_state_dict(state["network"])
    for optimiser, saved in zip(run.optimisers, state["optimisers"], strict=True):
        optimiser.load_state_dict(saved)
    run.mixture.restore(state["mixture"])
    run.step, run.seen, run.decay_from, run.decay_to = state["progress"]
    run.peak = state["peak"]
