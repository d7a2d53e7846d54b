"""Defines the settings of training sets and training runs: defaults, ranges, units and explanations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from functools import partial
from typing import Any

from aquiline.checks import SEEDS, check_settings, check_value, meanings, setting


@dataclass(frozen=True)
class PrepareSettings:
    """Settings of `prepare`; part of the training set's manifest."""

    max_length: int = setting(1024, "longest conversation", unit="tokens", allowed="≥ 8")
    overlong: str = setting(
        "truncate", "cut longer conversations at --max-length, or drop them", choices=("truncate", "drop")
    )
    validation_fraction: float = setting(
        0.02, "prompts that are held out for validation", unit="share", allowed="0 … < 1", flag="validation"
    )
    strict: bool = setting(False, "stop at the first unusable record instead of counting it")
    limit: int | None = setting(None, "stop after this many conversations", allowed="≥ 1", shown="all of them")

    def __post_init__(self) -> None:
        check_settings(self)


EAGLE, PARALLEL, SMALL = ("eagle3", "eagle"), ("medusa", "hydra"), ("small-model",)
KINDS = (*EAGLE, *PARALLEL, *SMALL)

_MUON_LR, _REGRESSED_LR = 0.02, 0.002
"""Larger steps undo a regression before they improve it."""

MAY_CHANGE = (
    "output", "save_minutes", "validate_positions", "validation", "log_steps", "workers", "tensorboard",
    "shard_target", "features", "keep_layers", "recompute",
)  # fmt: skip
"""Settings that a resumed run may change: none of them moves a bit of the head."""


def _by_kind(eagle: Any, others: Any) -> dict[str, Any]:
    """Defaults of EAGLE heads, and of the other kinds, which learn in fewer positions."""
    return dict.fromkeys(EAGLE, eagle) | dict.fromkeys((*PARALLEL, *SMALL), others)


_eagle = partial(setting, only=EAGLE)
_parallel = partial(setting, only=PARALLEL)
_positions = partial(setting, unit="positions", allowed="≥ 1")
_per_set = partial(setting, (), allowed="≥ 0")


@dataclass(frozen=True)
class TrainSettings:
    """A training run. A setting without effect on the run's kind is rejected; `None` means the kind's default."""

    target: str = setting(MISSING, "folder of the target: config.json and model.safetensors")
    data: tuple[str, ...] = setting(MISSING, "training sets made by `aquiline prepare`")
    output: str = setting(MISSING, "folder for checkpoints, metrics and the finished head")
    kind: str = setting("eagle3", "what to train", choices=KINDS, flag="method")
    data_weights: tuple[float, ...] = _per_set("share of positions of each training set", shown="by their size")
    decay_weights: tuple[float, ...] = _per_set(
        "shares of the sets while the learning rate decays", shown="as --data-weights"
    )
    validation: tuple[str, ...] = setting(
        (), "training sets whose validation split is measured", shown="those that are trained on"
    )
    init: str | None = _eagle(
        None, "start from this head: a folder in any dialect, or the name of a shipped one", shown="a new head"
    )
    start: str = _eagle(
        "target",
        "where a new head starts: at the target's last layer and LM head (eagle: a least-squares fit), or random",
        choices=("target", "random"),
    )
    features: str | None = setting(
        None,
        "folder that keeps the target's features for later epochs and runs on the same sets",
        shown="compute them each time",
    )
    keep_layers: tuple[int, ...] = setting(
        (),
        "further feature layers to keep in --features, for heads that read them",
        unit="layer boundaries",
        allowed="≥ 0",
    )
    limit_conversations: tuple[int, ...] = _per_set(
        "for each set, use only this many conversations; 0 uses all", shown="all"
    )
    layers: tuple[int, ...] | None = setting(
        None,
        "feature layers that the head reads",
        unit="layer boundaries",
        allowed="≥ 0",
        shown="2, n/2 and n-3",
        only=("eagle3",),
    )
    draft_vocab_size: int | None = setting(
        None,
        "most frequent tokens that the head drafts; eagle and small-model draft every token, and compute their loss "
        "over these",
        unit="tokens",
        allowed="≥ 1",
        shown="8,192; all for small-model",
        by_kind=_by_kind(8192, 8192) | dict.fromkeys(SMALL, None),
    )
    ttt_steps: int = _eagle(
        4,
        "steps that the network is unrolled on its own output; for eagle, more than 1 is HASS-style",
        unit="steps",
        allowed="≥ 1",
    )
    num_heads: int = _parallel(4, "heads, each for one position ahead", unit="heads", allowed="≥ 1")
    num_blocks: int = _parallel(1, "residual blocks of each head", unit="blocks", allowed="≥ 1")
    regress_positions: int = _parallel(
        40_000,
        "fit each head to the feature ahead by least squares before the first step; 0 does not",
        unit="positions",
        allowed="≥ 0",
    )
    own_lm_head: bool = _parallel(False, "train one LM head for all heads instead of reading the target's")
    num_layers: int = setting(
        4, "layers of the small model: copies of the target's first and last", unit="layers", allowed="≥ 1", only=SMALL
    )
    step_decay: float = setting(0.8, "weight of depth i in the loss is this to the power of i", allowed="> 0")
    loss: str = setting(
        "kl",
        "loss between distributions: cross-entropy, total variation, or -log acceptance",
        choices=("kl", "tv", "lk"),
    )
    token_weight: float = _eagle(1.0, "weight of the loss between distributions", allowed="≥ 0")
    feature_weight: float = _eagle(
        0.0,
        "weight of the SmoothL1 loss on the target's last feature, which EAGLE-1 was published with",
        allowed="≥ 0",
    )
    feature_noise: float = _eagle(
        0.0, "uniform noise of at most this size on the features that the head reads", allowed="≥ 0"
    )
    max_length: int = setting(512, "conversations are cut to this length", unit="tokens", allowed="≥ 3")
    batch_positions: int = _positions(None, "size of an optimiser step", by_kind=_by_kind(4096, 2048))
    micro_positions: int = _positions(512, "part of a step that a worker computes at a time; gradients add up")
    recompute: bool = _eagle(False, "gradient checkpointing: less memory for long conversations, a third more work")
    pack: bool = _eagle(False, "put conversations into one row with a block mask instead of padding them")
    lr: float = setting(1e-3, "AdamW's learning rate", allowed="> 0")
    muon_lr: float = setting(
        None,
        "Muon's learning rate for matrices; 0 uses AdamW alone (medusa, hydra without regression: 0.02)",
        allowed="≥ 0",
        by_kind=_by_kind(_MUON_LR, _MUON_LR) | dict.fromkeys(PARALLEL, _REGRESSED_LR),
    )
    weight_decay: float = setting(0.0, "AdamW's weight decay", allowed="≥ 0")
    clip: float = setting(0.5, "bound on the norm of the gradient", allowed="> 0")
    total_positions: int = _positions(None, "length of the run, decay included", by_kind=_by_kind(3_000_000, 400_000))
    warmup_positions: int = setting(
        None,
        "the learning rate rises over these",
        unit="positions",
        allowed="≥ 0",
        by_kind=_by_kind(100_000, 20_000),
    )
    decay_share: float = setting(
        None,
        "last part of the run, in which the learning rate falls to 0; a file `decay` in the output folder, empty or "
        "with a number of positions, starts the fall at once",
        unit="share",
        allowed="0 … 1",
        by_kind=_by_kind(0.3, 0.5),
    )
    save_minutes: float = setting(4.0, "time between checkpoints", unit="minutes", allowed="≥ 0")
    validate_positions: int = _positions(200_000, "training between two validations")
    log_steps: int = setting(5, "optimiser steps between two lines of metrics", unit="steps", allowed="≥ 1")
    workers: int = setting(
        0,
        "micro-batches computed at a time, each by one thread; the result does not depend on it",
        allowed="≥ 0",
        shown="0, one per core",
    )
    shard_target: bool = setting(
        False, "each of several processes keeps a part of every layer of the target; the result does not depend on it"
    )
    dtype: str | None = setting(
        None,
        "dtype in which the target and the copies of the head compute",
        choices=("bfloat16", "float32"),
        shown="bfloat16 or float32, the faster here",
    )
    tensorboard: bool = setting(False, "also write TensorBoard events into the output folder")
    seed: int = setting(0, "order of the data, noise and random weights", allowed=SEEDS)

    def __post_init__(self) -> None:
        check_value("kind", self.kind, self.kind in KINDS, ", ".join(KINDS))
        self._fill()
        check_settings(self)
        self._check_effect()
        check_value("data", self.data, bool(self.data), "one or more training sets; make one with `aquiline prepare`")
        for name in ("data_weights", "decay_weights", "limit_conversations"):
            values = getattr(self, name)
            good = len(values) in (0, len(self.data))
            check_value(name, values, good, f"a number for each of {len(self.data)} data sets; add or drop some")
            if values and not sum(values) and name != "limit_conversations":
                raise ValueError(f"{name} is {values}; allowed: a share > 0 for at least one of the data sets")
        if self.kind == "eagle" and not self.token_weight and not self.feature_weight:
            raise ValueError("token_weight is 0, like feature_weight; give one of them a weight > 0")

    def _fill(self) -> None:
        """Gives settings that are None the default of their kind."""
        for name, (_, meaning) in meanings(self).items():
            if getattr(self, name) is None and meaning.by_kind:
                object.__setattr__(self, name, meaning.by_kind[self.kind])
        if self.kind in PARALLEL and not self.regress_positions and self.muon_lr == _REGRESSED_LR:
            object.__setattr__(self, "muon_lr", _MUON_LR)
        if self.dtype is None:
            import torch

            from aquiline.targets.packed import fast_bfloat16

            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            object.__setattr__(self, "dtype", "bfloat16" if fast_bfloat16(device) else "float32")

    def _check_effect(self) -> None:
        for name, (each, meaning) in meanings(self).items():
            value = getattr(self, name)
            if meaning.only and self.kind not in meaning.only and value != each.default:
                kinds = " and ".join(meaning.only)
                raise ValueError(f"{name} is {value}; allowed: with kind {kinds}, not {self.kind}; leave it out")

    def vocabulary_size(self, whole: int) -> int:
        """Tokens that are drafted or, where all are, that the loss is computed over.

        Args:
            whole: size of the target's vocabulary.
        """
        return min(self.draft_vocab_size or whole, whole)


def settings_of(*kinds: str) -> set[str]:
    """Names of the settings that have an effect on each of some kinds."""
    return {name for name, (_, meaning) in meanings(TrainSettings).items() if set(kinds) <= set(meaning.only or KINDS)}


def settings_record(settings: TrainSettings) -> dict[str, Any]:
    """The settings that have an effect, as JSON-able values."""
    names = settings_of(settings.kind)
    kept = {name: getattr(settings, name) for name in meanings(settings) if name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()}


def changed_settings(settings: TrainSettings, saved: Mapping[str, Any]) -> list[str]:
    """Lists what a resumed run may not change, but would, each as "name: old → new"."""
    return [
        f"{name}: {saved.get(name)!r} → {value!r}"
        for name, value in settings_record(settings).items()
        if name not in MAY_CHANGE and saved.get(name) != value
    ]
