"""Validated settings of a benchmark run, and the presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

ALL_METHODS = (
    "plain",
    "hf",
    "auto",
    "prompt-lookup",
    "lookahead",
    "small-model",
    "medusa",
    "hydra",
    "eagle",
    "eagle2",
    "eagle3:chain",
    "eagle3:dynamic",
    "eagle3+lookup",
)
QUICK_METHODS = ("plain", "hf", "auto", "prompt-lookup", "medusa", "eagle3:chain", "eagle3:dynamic")


@dataclass(frozen=True)
class BenchSettings:
    """Settings of a benchmark run.

    Attributes:
        target: alias, folder, GGUF file or hub id.
        methods: see `aquiline.bench.methods.METHODS`; plain decoding always runs. A missing head is
            an error.
        try_methods: methods to run if their heads exist; otherwise they are listed as not run.
        questions: folders or files of questions; empty: the embedded set.
        tasks: tasks to run; empty: all.
        per_task: questions per task; None: all.
        max_new_tokens: upper bound on tokens per answer.
        temperatures: each runs separately.
        batch_sizes: rows decoded together; sizes above 1 run only the first turns of `batch_task`.
        batch_task: task for the larger batches; None: MT-bench, else the first task.
        heads: (kind, folder) pairs, for heads that do not ship.
        dtype: dtype of the weights; None: the fastest on this machine.
        device: where the target runs.
        threads: CPU threads; None: PyTorch's choice.
        seed: seed of sampled answers.
        output: folder for results; an interrupted run there is resumed.
        cost_curve: measure the cost of the target's forward by its number of tokens.
        reference_every: run transformers' `generate` and plain decoding's second run, which scale and
            qualify the other numbers, only on every n-th single question each, in turn.
    """

    target: str = "smollm2"
    methods: tuple[str, ...] = ()
    try_methods: tuple[str, ...] = ALL_METHODS
    questions: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    per_task: int | None = 10
    max_new_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0,)
    batch_sizes: tuple[int, ...] = (1,)
    batch_task: str | None = None
    heads: tuple[tuple[str, str], ...] = ()
    dtype: str | None = None
    device: str = "cpu"
    threads: int | None = None
    seed: int = 0
    output: str = "bench-results"
    cost_curve: bool = True
    reference_every: int = 1

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; allowed: ≥ 1")
        if not self.temperatures or not min(self.temperatures) >= 0:
            raise ValueError(f"temperatures are {self.temperatures}; allowed: one or more numbers ≥ 0")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError(f"batch sizes are {self.batch_sizes}; allowed: one or more integers ≥ 1")
        if self.per_task is not None and self.per_task < 1:
            raise ValueError(f"per_task is {self.per_task}; allowed: ≥ 1, or None for all questions")
        if self.reference_every < 1:
            raise ValueError(f"reference_every is {self.reference_every}; allowed: ≥ 1")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads is {self.threads}; allowed: ≥ 1")


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quick": {"try_methods": QUICK_METHODS, "per_task": 2, "max_new_tokens": 48, "batch_sizes": (1, 4)},
    # Ten questions fill two batches of five, the five embedded ones fill one: none is decoded twice.
    "standard": {"batch_sizes": (1, 5), "reference_every": 2},
    "full": {
        "per_task": None,
        "max_new_tokens": 256,
        "temperatures": (0.0, 1.0),
        "batch_sizes": (1, 2, 4, 8),
    },
}
"""Preset → fields of `BenchSettings`: about 3 minutes, about 40, and hours on two cores."""


def identity(settings: BenchSettings) -> dict[str, Any]:
    """Returns the settings that a resumed run must share with the original."""
    return {name: value for name, value in asdict(settings).items() if name != "output"}
