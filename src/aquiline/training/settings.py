"""Settings of a training run, checked when they are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aquiline.training.losses import RULES

MAY_CHANGE = (
    "output",
    "save_minutes",
    "validate_positions",
    "validation",
    "log_steps",
    "workers",
    "tensorboard",
    "shard_target",
    "features",
    "keep_layers",
    "recompute",
)
"""Settings that a resumed run may change without becoming another run: none of them moves a bit of the head."""


@dataclass(frozen=True)
class TrainSettings:
    """A training run.

    Attributes:
        target: folder of the target (config.json, model.safetensors).
        data: training sets made by `prepare`.
        output: folder for checkpoints, metrics and the head.
        kind: "eagle3" or "eagle" (EAGLE-1/2).
        data_weights: share of positions of each training set; empty: by their size.
        decay_weights: shares while the learning rate decays; empty: as `data_weights`.
        validation: training sets whose validation split is measured; empty: all of `data`.
        init: head to start from, in any dialect, or the name of a shipped one; None makes a new one.
        start: where a new head starts: at the "target" (its last layer and LM head, or a least-squares
            fit for EAGLE-1), or at "random" weights.
        features: folder that keeps the target's features; None computes them each time.
        keep_layers: further layers that the folder keeps, so that heads that read them can share it.
        limit_conversations: for each set, use only so many (0: all), to repeat cached features.
        layers: feature layers of an EAGLE-3 head, one or more; None: 2, n/2, n-3.
        draft_vocab_size: ids that an EAGLE-3 head drafts (the vocabulary of `init` wins), and
            that the loss of an EAGLE-1 head is computed over.
        ttt_steps: unrolled steps; for EAGLE-1, more than 1 is HASS-style.
        step_decay: weight of step i is step_decay ** i.
        loss: "kl", "tv" or "lk", see `aquiline.training.losses`.
        token_weight: weight of the loss between distributions.
        feature_weight: weight of SmoothL1 on the target's last feature; EAGLE-1 needs it, EAGLE-3
            leaves it out (0).
        feature_noise: features get uniform noise of ± this much (EAGLE-1).
        max_length: conversations are cut to so many tokens.
        batch_positions: positions of an optimiser step.
        micro_positions: positions that go through the network together; a step adds up their gradients.
        recompute: gradient checkpointing: less memory for an unroll of long conversations, a third more work.
        pack: lay conversations behind one another with a block mask instead of padding.
        lr: AdamW's learning rate.
        muon_lr: Muon's learning rate for matrices; 0 uses AdamW alone.
        weight_decay: AdamW's.
        clip: bound on the gradient's norm.
        total_positions: length of the run, decay included.
        warmup_positions: learning rate rises over so many.
        decay_share: part of the run, at its end, in which the rate falls to 0. A file
            ``decay`` in the output folder begins the decay at once, or stretches it: its
            content is the positions to go, or nothing for `decay_share` of what was seen.
        save_minutes: checkpoint interval.
        validate_positions: validation interval.
        log_steps: metrics interval in optimiser steps.
        workers: micro-batches computed at a time, each by one thread; 0: one per core. The
            result does not depend on it.
        shard_target: each process of several keeps a part of each of the target's layers; the head stays
            whole. The result does not depend on it.
        dtype: in which the target and the copies of the head compute: "bfloat16" or "float32".
        tensorboard: also write TensorBoard events into the output folder.
        seed: order of the data and noise.
    """

    target: str
    data: tuple[str, ...]
    output: str
    kind: str = "eagle3"
    data_weights: tuple[float, ...] = ()
    decay_weights: tuple[float, ...] = ()
    validation: tuple[str, ...] = ()
    init: str | None = None
    start: str = "target"
    features: str | None = None
    keep_layers: tuple[int, ...] = ()
    limit_conversations: tuple[int, ...] = ()
    layers: tuple[int, ...] | None = None
    draft_vocab_size: int = 8192
    ttt_steps: int = 4
    step_decay: float = 0.8
    loss: str = "kl"
    token_weight: float = 1.0
    feature_weight: float = 0.0
    feature_noise: float = 0.0
    max_length: int = 512
    batch_positions: int = 4096
    micro_positions: int = 512
    recompute: bool = False
    pack: bool = False
    lr: float = 1e-3
    muon_lr: float = 0.02
    weight_decay: float = 0.0
    clip: float = 0.5
    total_positions: int = 3_000_000
    warmup_positions: int = 100_000
    decay_share: float = 0.3
    save_minutes: float = 4.0
    validate_positions: int = 200_000
    log_steps: int = 5
    workers: int = 0
    shard_target: bool = False
    dtype: str = "bfloat16"
    tensorboard: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("eagle3", "eagle"):
            raise ValueError(f"kind {self.kind!r} is not known; allowed: eagle3, eagle")
        if self.kind == "eagle" and self.layers is not None:
            raise ValueError(f"layers {self.layers} have no effect on kind eagle, which reads the final feature")
        if self.start not in ("target", "random"):
            raise ValueError(f"start {self.start!r} is not known; allowed: target, random")
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype {self.dtype!r} is not allowed; allowed: bfloat16, float32")
        if not self.data:
            raise ValueError("no training data given; make a set with `prepare`")
        for name in ("data_weights", "decay_weights"):
            weights = getattr(self, name)
            if weights and (len(weights) != len(self.data) or min(weights) < 0 or not sum(weights)):
                raise ValueError(f"{name} {weights} must give a share ≥ 0 for each of {len(self.data)} data sets")
        if self.loss not in RULES:
            raise ValueError(f"loss {self.loss!r} is not known; allowed: {', '.join(RULES)}")
        if self.kind == "eagle" and not self.token_weight and not self.feature_weight:
            raise ValueError("token_weight and feature_weight are both 0: there is nothing to learn")
        check_limits(self.limit_conversations, len(self.data))
        check_numbers(self, "≥ 1", "ttt_steps", "batch_positions", "micro_positions", "total_positions")
        check_numbers(self, "≥ 1", "draft_vocab_size", "validate_positions", "log_steps")
        check_numbers(self, "≥ 0", "warmup_positions", "save_minutes", "workers", "weight_decay", "muon_lr")
        check_numbers(self, "≥ 0", "token_weight", "feature_weight", "feature_noise")
        check_numbers(self, "> 0", "lr", "clip", "step_decay")
        check_numbers(self, "≥ 3", "max_length")
        check_numbers(self, "0 … 1", "decay_share")


_BOUNDS: dict[str, Callable[[float], bool]] = {
    "≥ 1": lambda value: value >= 1,
    "≥ 3": lambda value: value >= 3,
    "≥ 0": lambda value: value >= 0,
    "> 0": lambda value: value > 0,
    "0 … 1": lambda value: 0 <= value <= 1,
}


def check_numbers(settings: Any, allowed: str, *names: str) -> None:
    """Refuses settings outside a range, NaN among them; None is not looked at.

    Raises:
        ValueError: naming the setting, its value and the range.
    """
    for name in names:
        value = getattr(settings, name)
        if value is not None and not _BOUNDS[allowed](value):
            raise ValueError(f"{name} is {value}; allowed: {allowed}")


def check_limits(limits: Sequence[int], sets: int) -> None:
    """Refuses `limit_conversations` that do not give each training set its limit.

    Raises:
        ValueError: naming them.
    """
    if limits and (len(limits) != sets or min(limits) < 0):
        raise ValueError(f"limit_conversations {tuple(limits)} must give a number ≥ 0 for each of {sets} data sets")


def settings_record(settings: TrainSettings) -> dict[str, Any]:
    """Settings as JSON-able values."""
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(settings).items()
    }


def changed_settings(settings: TrainSettings, saved: Mapping[str, Any]) -> list[str]:
    """Names what a resumed run would change, as "name: old → new"; harmless changes left out."""
    now = settings_record(settings)
    return [
        f"{name}: {saved.get(name)!r} → {now[name]!r}"
        for name in now
        if name not in MAY_CHANGE and saved.get(name) != now[name]
    ]
