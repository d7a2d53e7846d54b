"""Runs methods by turns on every question, and keeps every result at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from aquiline.bench.agreement import WrongTokens, complaint, find_divergences
from aquiline.bench.contexts import in_contexts
from aquiline.bench.environment import environment
from aquiline.bench.measure import Case, measure
from aquiline.bench.methods import Bed, Method, MethodSpec, check_methods, make_method
from aquiline.bench.metrics import HF, PLAIN
from aquiline.bench.records import Record, RunLog, record_from_json, record_json
from aquiline.bench.report import compile_results, write_report
from aquiline.bench.settings import BenchSettings, identity
from aquiline.bench.tasks import Question, load_questions, task_name
from aquiline.engine.text import encode_prompt
from aquiline.loading import load
from aquiline.models.files import locked
from aquiline.targets.cost import cost_curve

logger = logging.getLogger("aquiline")

WARM_UP_TOKENS = 8


@dataclass(frozen=True, eq=False)
class BenchReport:
    """The results of a finished run (docs/results-schema.md), their table, and the folder of all reports."""

    results: dict[str, Any]
    markdown: str
    folder: Path


@dataclass(frozen=True, eq=False)
class _Group:
    """Questions that are decoded together, under one temperature."""

    questions: tuple[Question, ...]
    temperature: float
    turns: int

    @property
    def batch(self) -> int:
        return len(self.questions)


@dataclass(eq=False)
class _Run:
    settings: BenchSettings
    bed: Bed
    contestants: list[tuple[Method, int]]
    log: RunLog
    done: dict[tuple[Any, ...], Record]
    records: list[Record] = field(default_factory=list)
    divergences: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    warm: set[tuple[str, int]] = field(default_factory=set)


def run_bench(settings: BenchSettings, bed: Bed | None = None, *, quiet: bool = False) -> BenchReport:
    """Measures methods side by side and writes results.json, results.md and report.html.

    Args:
        settings: the run.
        bed: a target that is loaded already; None loads the one that the settings name.
        quiet: no progress bar.

    Raises:
        ValueError: unknown names, malformed files, missing heads, nothing to measure, or an output
            folder that holds a run with other settings, or that another process writes.
        WrongTokens: a method's greedy output differs from plain decoding's beyond what rounding
            explains; the report is written first.
    """
    with locked(Path(settings.output)):
        return _run_bench(settings, bed, quiet)


def _run_bench(settings: BenchSettings, bed: Bed | None, quiet: bool) -> BenchReport:
    questions = load_questions(settings.questions, settings.tasks, settings.per_task)
    specs = check_methods([*settings.methods, *(m for m in settings.try_methods if m not in settings.methods)])
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    bed = bed or open_bed(settings)
    questions = in_contexts(questions, settings.contexts, bed.tokenizer)
    methods, missing = _available(specs, bed, frozenset(settings.methods))
    folder = Path(settings.output)
    folder.mkdir(parents=True, exist_ok=True)
    log = RunLog(folder / "records.jsonl", identity(settings))
    try:
        known = [record_from_json(values) for values in log.of_kind("record")]
        done = {(record.case, record.method, record.repeat): record for record in known}
        run = _Run(settings, bed, _contestants(methods), log, done)
        _run_all(run, questions, quiet)
        if settings.cost_curve and not log.of_kind("cost"):
            log.append("cost", {"curve": cost_curve(bed.target)})
        results = compile_results(
            settings=identity(settings),
            environment=environment(bed),
            methods=[{name: getattr(m, name) for name in ("label", "settings", "head", "chain")} for m in methods],
            not_run=missing,
            questions=questions,
            skipped=run.skipped,
            records=run.records,
            divergences=run.divergences,
            curve=log.of_kind("cost")[0]["curve"] if settings.cost_curve else [],
        )
    finally:
        log.close()
    markdown = write_report(results, folder)
    wrong = complaint(results["divergences"], bed.target.dtype, bed.target.exact)
    if wrong is not None:
        raise WrongTokens(f"{wrong}; see {folder / 'report.html'}")
    return BenchReport(results, markdown, folder)


def open_bed(settings: BenchSettings) -> Bed:
    """Loads the parts that all methods share."""
    loaded = load(settings.target, None, dtype=settings.dtype, device=settings.device)
    engine = loaded.engine
    if engine.tokenizer is None:
        raise ValueError(f"{settings.target} has no tokenizer, and the questions are texts")
    return Bed(
        engine.target, engine.tokenizer, engine.end_ids, loaded.target_path, settings.target, dict(settings.heads)
    )


def _available(
    specs: Sequence[MethodSpec], bed: Bed, demanded: frozenset[str]
) -> tuple[list[Method], list[dict[str, str]]]:
    """Builds the methods; only `demanded` ones must not be missing."""
    methods, missing = [], []
    for spec in specs:
        try:
            methods.append(make_method(spec, bed))
        except ValueError as error:
            if spec.label in demanded:
                raise
            logger.info("not run: %s: %s", spec.label, error)
            missing.append({"method": spec.label, "reason": str(error)})
    return methods, missing


def _contestants(methods: Sequence[Method]) -> list[tuple[Method, int]]:
    """Adds a second plain run half a round away from the first: their spread is the noise."""
    order = [(method, 0) for method in methods]
    order.insert(1 + len(methods) // 2, (methods[0], 1))
    return order


def _groups(run: _Run, questions: Sequence[Question]) -> list[_Group]:
    """Plans the groups that are decoded together, in order."""
    groups, settings = [], run.settings
    tasks = list(dict.fromkeys(q.task for q in questions))
    first = "mt_bench" if "mt_bench" in tasks else tasks[0]
    batch_task = task_name(settings.batch_task) if settings.batch_task else first
    if batch_task not in tasks:
        raise ValueError(f"batch task {settings.batch_task!r} is not among the tasks; allowed: {', '.join(tasks)}")
    for temperature in settings.temperatures:
        for size in settings.batch_sizes:
            if size == 1:
                groups += [_Group((q,), temperature, len(q.turns)) for q in questions]
                continue
            mine = [q for q in questions if q.task == batch_task and _fits(run, q, 0, _prompt(run, q, 0, ()))]
            # The last group is filled up from the first questions, so that all are of one size.
            for start in range(0, len(mine), size):
                chosen = tuple(mine[i % len(mine)] for i in range(start, start + size))
                groups.append(_Group(chosen, temperature, 1))
    return groups


def _run_all(run: _Run, questions: Sequence[Question], quiet: bool) -> None:
    from rich.console import Console
    from rich.progress import Progress

    groups = _groups(run, questions)
    taking_part = [_taking_part(run, group, number) for number, group in enumerate(groups)]
    with Progress(console=Console(stderr=True), disable=quiet) as bar:
        task = bar.add_task("measuring", total=sum(map(len, taking_part)))
        for number, (group, contestants) in enumerate(zip(groups, taking_part, strict=True)):
            _run_group(run, group, number, contestants)
            bar.advance(task, len(contestants))


def _taking_part(run: _Run, group: _Group, number: int) -> list[tuple[Method, int]]:
    """Selects a group's contestants; of single questions, each reference runs on some only, and on different ones."""
    every = run.settings.reference_every
    if group.batch > 1 or every == 1:
        return run.contestants
    left_out = [(HF, 0)] if number % every else []
    if (number - 1) % every:
        left_out.append((PLAIN, 1))
    return [(method, repeat) for method, repeat in run.contestants if (method.label, repeat) not in left_out]


def _run_group(run: _Run, group: _Group, number: int, contestants: Sequence[tuple[Method, int]]) -> None:
    answers: list[list[str]] = [[] for _ in group.questions]
    for turn in range(group.turns):
        case = _case(run, group, turn, answers)
        if case is None:
            return
        # Rotated, so that no method always runs first or after the same one.
        shift = (number + turn) % len(contestants)
        for method, repeat in (*contestants[shift:], *contestants[:shift]):
            _run_one(run, method, case, repeat)
        plain = _collect(run, case, contestants)
        decode = run.bed.tokenizer.decode
        for row, output in zip(answers, plain.outputs, strict=True):
            row.append(decode(output, skip_special_tokens=True).strip())


def _collect(run: _Run, case: Case, contestants: Sequence[tuple[Method, int]]) -> Record:
    """Puts the case's records in the order of the methods, checks them, returns plain decoding's."""
    records = [run.done[case.key, method.label, repeat] for method, repeat in contestants]
    run.records += records
    plain = run.done[case.key, PLAIN, 0]
    if case.temperature == 0:
        # Transformers has kernels of its own: its divergences are reported, but are not errors.
        ours = [record for record in records if record.method != HF]
        run.divergences += find_divergences(run.bed.target, ours, plain, case.prompts)
    return plain


def _case(run: _Run, group: _Group, turn: int, answers: Sequence[Sequence[str]]) -> Case | None:
    """Encodes the prompts of a turn, with plain decoding's answers so far; None if one does not fit."""
    prompts = [_prompt(run, q, turn, given) for q, given in zip(group.questions, answers, strict=True)]
    if not all(_fits(run, q, turn, prompt) for q, prompt in zip(group.questions, prompts, strict=True)):
        return None
    ids = tuple(question.id for question in group.questions)
    return Case(
        group.questions[0].task, ids, turn, tuple(prompts), group.temperature, run.settings.max_new_tokens,
        run.settings.seed,
    )  # fmt: skip


def _prompt(run: _Run, question: Question, turn: int, answers: Sequence[str]) -> tuple[int, ...]:
    return tuple(encode_turns(run.bed, question.turns[: turn + 1], answers))


def _fits(run: _Run, question: Question, turn: int, prompt: Sequence[int]) -> bool:
    """Returns True if prompt and answer fit the context; records those that do not."""
    if len(prompt) + run.settings.max_new_tokens <= run.bed.target.shape.max_positions:
        return True
    entry = {"task": question.task, "question": question.id, "turn": turn, "prompt_tokens": len(prompt)}
    if entry not in run.skipped:
        run.skipped.append(entry)
    return False


def encode_turns(bed: Bed, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
    """Encodes a conversation whose last user turn waits for its answer.

    Args:
        bed: gives the tokenizer; without a chat template, the texts are joined by blank lines.
        turns: the user's turns.
        answers: the answers to all but the last.
    """
    if not getattr(bed.tokenizer, "chat_template", None):
        parts = [text for pair in zip(turns[:-1], answers, strict=True) for text in pair]
        return encode_prompt(bed.tokenizer, "\n\n".join([*parts, turns[-1]]), raw=True)
    messages = [{"role": "user", "content": turns[0]}]
    for answer, turn in zip(answers, turns[1:], strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    return encode_prompt(bed.tokenizer, messages)


def _run_one(run: _Run, method: Method, case: Case, repeat: int) -> None:
    key = case.key, method.label, repeat
    if key in run.done:
        return
    if (method.label, len(case.prompts)) not in run.warm:
        run.warm.add((method.label, len(case.prompts)))
        measure(run.bed, method, replace(case, max_new_tokens=min(WARM_UP_TOKENS, case.max_new_tokens)))
    record = measure(run.bed, method, case, repeat)
    run.done[key] = record
    run.log.append("record", record_json(record))
