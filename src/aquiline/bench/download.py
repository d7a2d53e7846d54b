"""Downloads the papers' questions from the model hub into files that `tasks` reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from aquiline.bench.tasks import task_name
from aquiline.models.files import replacing

LoadDataset = Callable[..., Iterable[Mapping[str, Any]]]
"""`datasets.load_dataset` with streaming=True."""


@dataclass(frozen=True)
class HubTask:
    """The place of a task's questions on the hub.

    Attributes:
        dataset: hub id.
        subset: configuration, or None.
        split: of the dataset.
        turns: record → the user's turns, worded as EAGLE's and Spec-Bench's files word them.
    """

    dataset: str
    subset: str | None
    split: str
    turns: Callable[[Mapping[str, Any]], list[str]]


def _alpaca(record: Mapping[str, Any]) -> list[str]:
    return ["\n".join(part for part in (record["instruction"], record.get("input", "")) if part)]


HUB_TASKS = {
    "mt_bench": HubTask("HuggingFaceH4/mt_bench_prompts", None, "train", lambda r: list(r["prompt"])),
    "humaneval": HubTask(
        "openai/openai_humaneval", None, "test", lambda r: ["Complete the code I provided.\n\n" + r["prompt"]]
    ),
    "gsm8k": HubTask("openai/gsm8k", "main", "test", lambda r: [r["question"]]),
    "alpaca": HubTask("tatsu-lab/alpaca", None, "train", _alpaca),
    "sum": HubTask("abisee/cnn_dailymail", "3.0.0", "test", lambda r: ["Summarize: " + r["article"]]),
    "qa": HubTask(
        "google-research-datasets/nq_open", None, "validation", lambda r: [r["question"].rstrip("?").capitalize() + "?"]
    ),
    "translation": HubTask(
        "wmt/wmt14", "de-en", "test", lambda r: ["Translate German to English: " + r["translation"]["de"]]
    ),
}
"""Tasks that a hub has; Spec-Bench's RAG questions exist as a file of that project only."""


def download_questions(
    folder: str | Path, tasks: Sequence[str] = (), count: int = 80, load: LoadDataset | None = None
) -> list[Path]:
    """Writes ``TASK.jsonl`` for each task, its first `count` questions; existing files are kept.

    The papers drew their questions once and published the draw; these are other questions of the
    same sets, so numbers compare in kind and not to the digit.

    Args:
        folder: made if it is not there; give it as the questions of a run.
        tasks: see `HUB_TASKS`; none means all of them.
        count: questions of each, ≥ 1.
        load: `datasets.load_dataset`; None imports it.

    Returns:
        The files, in the order of the tasks.

    Raises:
        ValueError: an unknown task or count.
        RuntimeError: the hub did not give a data set, or the package datasets is not there.
    """
    if count < 1:
        raise ValueError(f"count is {count}; allowed: ≥ 1")
    names = [task_name(task) for task in tasks] or list(HUB_TASKS)
    for name in names:
        if name not in HUB_TASKS:
            raise ValueError(f"task {name!r} cannot be downloaded; allowed: {', '.join(HUB_TASKS)}")
    load = load or _hub()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return [_download(folder / f"{name}.jsonl", HUB_TASKS[name], count, load) for name in names]


def _hub() -> LoadDataset:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise RuntimeError(
            'the papers\' questions are read with the package datasets: pip install "aquiline[datasets]", or leave the '
            "questions out to use the embedded set"
        ) from error
    load: LoadDataset = datasets.load_dataset
    return load


def _download(file: Path, task: HubTask, count: int, load: LoadDataset) -> Path:
    if file.is_file():
        return file
    try:
        records = list(islice(load(task.dataset, task.subset, split=task.split, streaming=True), count))
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RuntimeError(
            f"could not get {task.dataset} from the hub ({reason}); check the network, give question files, "
            "or leave the questions out to use the embedded set"
        ) from error
    with replacing(file) as scratch, scratch.open("w", encoding="utf-8") as stream:
        for i, record in enumerate(records):
            line = {"question_id": i, "category": record.get("category", ""), "turns": task.turns(record)}
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")
    return file
