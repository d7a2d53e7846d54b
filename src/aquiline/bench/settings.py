"""Defines the settings of benchmarks and of tuning, for their checks, ``--help`` and the docs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aquiline.checks import SEEDS, check_settings, check_value, setting

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


def _by_preset(name: str, usual: Any) -> str:
    """Describes a default: that of the standard run, and where --quick and --full differ from it."""

    def words(preset: str) -> str:
        value = PRESETS[preset].get(name, usual)
        numbers = value if isinstance(value, tuple) else (value,)
        return " ".join("all" if number is None else f"{number:g}" for number in numbers)

    others = (f"{words(preset)} with --{preset}" for preset in ("quick", "full") if words(preset) != words("standard"))
    return "; ".join((words("standard"), *others))


target_setting = partial(setting, "smollm2", "alias, folder, GGUF file or hub id of the target")
dtype_setting = partial(
    setting, None, "dtype of the weights; int8 and int4 quantise them", shown="bfloat16 or float32, the faster here"
)
device_setting = partial(setting, "cpu", "where the target runs")
threads_setting = partial(setting, None, "CPU threads", allowed="≥ 1", shown="PyTorch's choice")


@dataclass(frozen=True)
class BenchSettings:
    """A run of the benchmark."""

    target: str = target_setting()
    methods: tuple[str, ...] = setting(
        (), "measure these methods beside plain decoding; one whose head is missing is an error", shown="all available"
    )
    try_methods: tuple[str, ...] = setting(ALL_METHODS, "methods that are skipped where their heads are missing")
    questions: tuple[str, ...] = setting((), "folders or files of questions", shown="the embedded set")
    tasks: tuple[str, ...] = setting((), "measure on these tasks", shown="all")
    per_task: int | None = setting(
        10, "questions of each task", unit="questions", allowed="≥ 1", shown=_by_preset("per_task", 10)
    )
    max_new_tokens: int = setting(
        128, "upper bound on an answer", unit="tokens", allowed="≥ 1", shown=_by_preset("max_new_tokens", 128)
    )
    temperatures: tuple[float, ...] = setting(
        (0.0,), "sampling temperatures, each measured on its own; 0 is greedy", allowed="≥ 0",
        shown=_by_preset("temperatures", (0.0,)),
    )  # fmt: skip
    contexts: tuple[int, ...] = setting(
        (0,), "lengths of the prompts, each measured on its own: first turns behind other questions' texts; 0 leaves "
        "the questions alone", unit="tokens", allowed="≥ 0",
    )  # fmt: skip
    batch_sizes: tuple[int, ...] = setting(
        (1,), "requests decoded together; sizes above 1 run on --batch-task alone, first turns", unit="requests",
        allowed="≥ 1", shown=_by_preset("batch_sizes", (1,)),
    )  # fmt: skip
    batch_task: str | None = setting(None, "task for batch sizes above 1", shown="mt_bench, else the first task")
    heads: tuple[tuple[str, str], ...] = setting((), "(kind, folder) pairs of heads that do not ship")
    dtype: str | None = dtype_setting()
    device: str = device_setting()
    threads: int | None = threads_setting()
    seed: int = setting(0, "seed of sampled answers", allowed=SEEDS)
    output: str = setting("bench-results", "folder for the results; an interrupted run there is resumed")
    cost_curve: bool = setting(True, "time the target's forward by its number of tokens")
    reference_every: int = setting(
        1, "run transformers, and plain decoding's second run, on every n-th single question only", unit="questions",
        allowed="≥ 1", shown=_by_preset("reference_every", 1),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("temperatures", "batch_sizes", "contexts"):
            check_value(name, getattr(self, name), bool(getattr(self, name)), "one or more numbers")


@dataclass(frozen=True)
class TuneSettings:
    """A tuning run."""

    target: str = target_setting()
    draft: str = setting(
        "auto", "head to tune: a shipped name, a folder or a hub id; auto takes those that ship for the target"
    )
    prompts: tuple[str, ...] = setting((), "files or folders of prompts", shown="the embedded questions")
    num_prompts: int = setting(
        16, "upper bound on prompts; half of them propose, half confirm", unit="prompts", allowed="≥ 2"
    )
    max_new_tokens: int = setting(96, "upper bound on an answer", unit="tokens", allowed="≥ 2")
    temperature: float = setting(0.0, "sampling temperature of the answers; 0 is greedy", allowed="≥ 0")
    seed: int = setting(0, "seed of sampled answers", allowed=SEEDS)
    finalists: int = setting(
        3, "trees of each drafter that are measured beside plain decoding and the default", unit="trees", allowed="≥ 1"
    )
    output: str = setting("tuned.json", "file to write")
    dtype: str | None = dtype_setting()
    device: str = device_setting()
    threads: int | None = threads_setting()

    def __post_init__(self) -> None:
        check_settings(self)
        if Path(self.output).is_dir():
            raise ValueError(f"output is {self.output!r}, a folder; give the file to write")


def identity(settings: BenchSettings) -> dict[str, Any]:
    """Returns the settings that a resumed run must share with the original."""
    return {name: value for name, value in asdict(settings).items() if name != "output"}
