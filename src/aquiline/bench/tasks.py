"""Reads questions: the papers' tasks, a user's files, or the embedded set.

The format is that of EAGLE's and Spec-Bench's question files: JSON lines with ``question_id``,
``category`` and ``turns``. Lines with ``prompt`` instead of ``turns``, and plain text with one prompt
per line, are accepted too.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

EMBEDDED = Path(__file__).parent / "prompts"
"""Our own questions, five for each of the papers' six tasks."""

TITLES = {
    "mt_bench": "MT-bench",
    "humaneval": "HumanEval",
    "gsm8k": "GSM8K",
    "alpaca": "Alpaca",
    "sum": "CNN/DM",
    "qa": "Natural Questions",
    "translation": "Translation",
    "rag": "RAG",
}
"""Task → its title, in the papers' order; a user's file becomes a task named after the file."""

_ALIASES = {
    "mtbench": "mt_bench",
    "human_eval": "humaneval",
    "cnn_dm": "sum",
    "cnndm": "sum",
    "summarization": "sum",
    "nq": "qa",
    "natural_questions": "qa",
    "math_reasoning": "gsm8k",
}
_MT_BENCH_CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_MIXED = ("spec_bench", "question")
"""Names of files that hold several tasks, distinguished by category (Spec-Bench)."""


@dataclass(frozen=True)
class Question:
    """One question: its id is unique within the task, and it has at least one turn."""

    task: str
    id: str
    turns: tuple[str, ...]


def title(task: str) -> str:
    """Returns a task's title: "sum" → "CNN/DM", "sum@2000" → "CNN/DM, 2,000 tokens", a user's file by its name."""
    name, _, length = task.rpartition("@")
    if not name or not length.isdecimal():
        return TITLES.get(task, task)
    return f"{TITLES.get(name, name)}, {int(length):,} tokens"


def task_name(name: str) -> str:
    """Normalises a task's name: "MT-bench" → "mt_bench", "cnn-dm" → "sum"."""
    plain = name.strip().lower().replace("-", "_").replace(" ", "_").replace("/", "_")
    return _ALIASES.get(plain, plain)


def load_questions(
    sources: Sequence[str | Path] = (), tasks: Sequence[str] = (), per_task: int | None = None
) -> list[Question]:
    """Reads questions, task by task in the papers' order.

    Args:
        sources: folders (``TASK.jsonl``, ``TASK/question.jsonl``) and files (.jsonl, .txt);
            empty means the embedded set.
        tasks: tasks to keep; empty means all.
        per_task: upper bound on questions per task, spread evenly over the file, because question
            files are sorted by category.

    Raises:
        ValueError: for a missing or malformed file (with line and reason), an unknown task (lists the
            known ones), a question in two files, or no question at all.
    """
    if per_task is not None and per_task < 1:
        raise ValueError(f"questions per task is {per_task}; allowed: ≥ 1")
    found: dict[str, list[Question]] = {}
    origin: dict[tuple[str, str], Path] = {}
    for file in _files(sources or (EMBEDDED,)):
        for question in _read_file(file):
            # Results are stored by task and id: the second question would get the first one's results.
            first = origin.setdefault((question.task, question.id), file)
            if first is not file:
                raise ValueError(
                    f"question {question.id} of task {question.task} is in {first} and in {file}; omit one file, or "
                    "rename it, which makes it a separate task"
                )
            found.setdefault(question.task, []).append(question)
    wanted = [task_name(task) for task in tasks] or _ordered(found)
    for task, given in zip(wanted, tasks or wanted, strict=True):
        if task not in found:
            raise ValueError(f"unknown task {given!r}; allowed: {', '.join(_ordered(found)) or 'none'}")
    chosen = [q for task in dict.fromkeys(wanted) for q in spread(found[task], per_task)]
    if not chosen:
        raise ValueError(f"no questions in {', '.join(map(str, sources))}; give a folder or file with questions")
    return chosen


def _ordered(found: Iterable[str]) -> list[str]:
    order = {task: i for i, task in enumerate(TITLES)}
    return sorted(found, key=lambda task: (order.get(task, len(order)), task))


def spread(items: Sequence[T], count: int | None) -> list[T]:
    """At most `count` items, spread evenly over all; None keeps all."""
    if count is None or count >= len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def _files(sources: Sequence[str | Path]) -> list[Path]:
    files: list[Path] = []
    for source in sources:
        path = Path(source).expanduser()
        if path.is_dir():
            here = sorted(path.glob("*.jsonl")) + sorted(path.glob("*/question.jsonl"))
            if not here:
                raise ValueError(f"{path} has no question file; give a folder with TASK.jsonl or TASK/question.jsonl")
            files += here
        elif path.is_file():
            files.append(path)
        else:
            raise ValueError(f"{path} is neither a folder nor a file; give a file or a folder of questions")
    return files


def _read_file(path: Path) -> list[Question]:
    name = task_name(path.parent.name if path.stem == "question" else path.stem)
    questions: list[Question] = []
    seen: set[tuple[str, str]] = set()
    for number, raw in enumerate(path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        try:
            line = raw.decode("utf-8")
            if not line.strip():
                continue
            question = _parse(line, number, name, plain_text=path.suffix == ".txt")
            if (question.task, question.id) in seen:
                raise ValueError(f"question_id {question.id} occurs twice")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        seen.add((question.task, question.id))
        questions.append(question)
    return questions


def _parse(line: str, number: int, name: str, plain_text: bool) -> Question:
    if plain_text:
        return Question(name, str(number), (line.strip(),))
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    except RecursionError as error:
        raise ValueError("not a question (nested too deeply)") from error
    if not isinstance(record, dict):
        raise ValueError(f"expected an object with turns, got {type(record).__name__}")
    turns = record.get("turns", [record["prompt"]] if "prompt" in record else None)
    if turns is None:
        raise ValueError("the record has neither turns nor prompt")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise ValueError("turns must be a list of one or more non-empty texts")
    try:
        "".join(turns).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"turns hold half a surrogate pair ({error.object[error.start]!a}); remove it") from error
    task = _task_of(record) if name in _MIXED else name
    return Question(task, str(record.get("question_id", number)), tuple(turns))


def _task_of(record: dict[str, Any]) -> str:
    category = str(record.get("category", ""))
    if category in _MT_BENCH_CATEGORIES:
        return "mt_bench"
    task = task_name(category)
    if task not in TITLES:
        known = ", ".join((*_MT_BENCH_CATEGORIES, *TITLES))
        raise ValueError(f"category {category!r} is not a task; allowed: {known}")
    return task
