"""Settings of a training run of Medusa or Hydra heads or of a small model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from aquiline.training.losses import RULES
from aquiline.training.settings import check_limits, check_numbers

KINDS = ("medusa", "hydra", "small-model")


@dataclass(frozen=True)
class HeadsSettings:
    """A training run; names as in `aquiline.training.settings.TrainSettings` where they mean the same.

    Attributes:
        target: folder of the target.
        data: training sets made by `prepare`.
        output: folder for checkpoints, metrics and the result (its folder ``head``).
        kind: "medusa", "hydra" or "small-model".
        num_heads: K, heads of Medusa and Hydra.
        num_blocks: residual blocks of each head.
        regress_positions: heads begin as the regression of the feature ahead over so many
            positions of the data; 0 for none.
        own_lm_head: one LM head of the heads' own, trained, instead of the target's.
        num_layers: layers of the small model; half of them are copies of the target's first,
            half of its last ones.
        draft_vocab_size: ids that heads draft (None: 8192); for a small model, which can draft
            all, ids that the loss is computed over (None: all).
        data_weights: share of positions of each training set; empty: by their size.
        validation: training sets whose validation split is measured; empty: all of `data`.
        features: folder that keeps the target's features; None computes them each time. A
            folder of an EAGLE run on the same data serves as well.
        limit_conversations: for each set, use only so many (0: all).
        depth_decay: weight of depth i is depth_decay ** i.
        loss: "kl", "tv" or "lk", see `aquiline.training.losses`.
        max_length: conversations are cut to so many tokens.
        batch_positions: positions of an optimiser step.
        micro_positions: positions that go through the network together.
        lr: AdamW's learning rate.
        muon_lr: Muon's learning rate for matrices; 0 uses AdamW alone. None: 0.02, or 0.002 for heads
            that begin as a regression, which larger steps undo before they improve it.
        weight_decay: AdamW's.
        clip: bound on the gradient's norm.
        total_positions: length of the run, decay included.
        warmup_positions: learning rate rises over so many.
        decay_share: part of the run, at its end, in which the rate falls to 0.
        save_minutes: checkpoint interval.
        log_steps: metrics interval in optimiser steps.
        workers: micro-batches computed at a time; 0: one per core. The result does not depend on it.
        dtype: in which the target and the copies compute: "bfloat16" or "float32".
        seed: order of the data.
    """

    target: str
    data: tuple[str, ...]
    output: str
    kind: str
    num_heads: int = 4
    num_blocks: int = 1
    regress_positions: int = 40_000
    own_lm_head: bool = False
    num_layers: int = 4
    draft_vocab_size: int | None = None
    data_weights: tuple[float, ...] = ()
    validation: tuple[str, ...] = ()
    features: str | None = None
    limit_conversations: tuple[int, ...] = ()
    depth_decay: float = 0.8
    loss: str = "kl"
    max_length: int = 512
    batch_positions: int = 2048
    micro_positions: int = 512
    lr: float = 1e-3
    muon_lr: float | None = None
    weight_decay: float = 0.0
    clip: float = 0.5
    total_positions: int = 400_000
    warmup_positions: int = 20_000
    decay_share: float = 0.5
    save_minutes: float = 4.0
    log_steps: int = 5
    workers: int = 0
    dtype: str = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind!r} is not known; allowed: {', '.join(KINDS)}")
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype {self.dtype!r} is not allowed; allowed: bfloat16, float32")
        if self.loss not in RULES:
            raise ValueError(f"loss {self.loss!r} is not known; allowed: {', '.join(RULES)}")
        if not self.data:
            raise ValueError("no training data given; make a set with `prepare`")
        weights = self.data_weights
        if weights and (len(weights) != len(self.data) or min(weights) < 0 or not sum(weights)):
            raise ValueError(f"data_weights {weights} must give a share ≥ 0 for each of {len(self.data)} data sets")
        check_limits(self.limit_conversations, len(self.data))
        check_numbers(self, "≥ 1", "num_heads", "num_blocks", "num_layers", "draft_vocab_size", "batch_positions")
        check_numbers(self, "≥ 1", "micro_positions", "total_positions", "log_steps")
        check_numbers(self, "≥ 0", "regress_positions", "warmup_positions", "save_minutes", "workers")
        check_numbers(self, "≥ 0", "weight_decay", "muon_lr")
        check_numbers(self, "> 0", "lr", "clip", "depth_decay")
        check_numbers(self, "≥ 3", "max_length")
        check_numbers(self, "0 … 1", "decay_share")

    @property
    def matrix_rate(self) -> float:
        """Muon's learning rate."""
        if self.muon_lr is not None:
            return self.muon_lr
        return 0.002 if self.kind != "small-model" and self.regress_positions else 0.02

    def vocabulary_size(self, whole: int) -> int:
        """Ids that the loss is computed over, of a target of `whole` tokens."""
        usual = whole if self.kind == "small-model" else 8192
        return min(self.draft_vocab_size or usual, whole)

    def record(self) -> dict[str, Any]:
        """The settings as JSON-able values."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(self).items()
        }
