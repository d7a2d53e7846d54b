"""Compiles the results JSON, and renders Markdown from it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aquiline.bench import metrics
from aquiline.bench.environment import environment_line
from aquiline.bench.page import AGREEMENT, agreement_rows, interval, render_html
from aquiline.bench.records import Record, record_from_json, record_json
from aquiline.bench.tasks import Question, title
from aquiline.models.files import write_text

SCHEMA = 1
"""Version of the results JSON; see `docs/results-schema.md`."""


def compile_results(
    *,
    settings: Mapping[str, Any],
    environment: Mapping[str, Any],
    methods: Sequence[Mapping[str, Any]],
    not_run: Sequence[Mapping[str, str]],
    questions: Sequence[Question],
    skipped: Sequence[Mapping[str, Any]],
    records: Sequence[Record],
    divergences: Sequence[Mapping[str, Any]],
    curve: Sequence[Mapping[str, float]],
) -> dict[str, Any]:
    """Compiles the results of a run; all summaries follow from the records.

    Raises:
        ValueError: nothing was measured, because no question fits the context.
    """
    if not records:
        raise ValueError(
            f"nothing to measure: none of {len(questions)} questions fits the context together with "
            f"{settings['max_new_tokens']} new tokens; lower the budget or give shorter questions"
        )
    raw = [record_json(record) for record in records]
    records = [record_from_json(values) for values in raw]  # rounded as they are written
    chains = [method["label"] for method in methods if method["chain"]]
    return {
        "schema": SCHEMA,
        "settings": dict(settings),
        "environment": {**environment, "plain_spread": metrics.plain_spread(records)},
        "methods": [dict(method) for method in methods],
        "not_run": [dict(entry) for entry in not_run],
        "questions": dict(Counter(question.task for question in questions)),
        "skipped": [dict(entry) for entry in skipped],
        "definitions": metrics.DEFINITIONS,
        "summary": metrics.summarise(records, chains),
        "agreement": metrics.agreement(records),
        "divergences": [dict(entry) for entry in divergences],
        "cost_curve": [dict(point) for point in curve],
        "records": raw,
    }


def write_report(results: Mapping[str, Any], folder: Path) -> str:
    """Writes results.json, results.md and report.html; returns the Markdown."""
    markdown = render_markdown(results)
    for name, text in (
        ("results.json", json.dumps(results, ensure_ascii=False)),
        ("results.md", markdown),
        ("report.html", render_html(results)),
    ):
        write_text(folder / name, text)
    return markdown


def render_markdown(results: Mapping[str, Any]) -> str:
    """Renders the table of speedups and τ, the agreement, and the environment."""
    lines = [f"# {results['environment']['target']}: methods side by side", ""]
    for temperature in results["settings"]["temperatures"]:
        lines += _table(results, temperature)
        lines += _contexts(results, temperature)
    lines.append(
        "Cells: speedup against plain decoding in the same engine / τ. Last columns: medians over all prompts, with "
        "95 % bootstrap intervals."
    )
    lines += _agreement_lines(results)
    lines += ["", environment_line(results)]
    for entry in results["not_run"]:
        lines += ["", f"Not run: {entry['method']} ({entry['reason']})"]
    if results["skipped"]:
        lines += ["", f"Skipped, longer than the context: {len(results['skipped'])} prompts."]
    return "\n".join(lines) + "\n"


def _table(results: Mapping[str, Any], temperature: float) -> list[str]:
    tasks, cells = list(results["questions"]), _single(results, temperature)
    heads = ["method", *map(title, tasks), "all", "vs HF", "tokens/s"]
    lines = [f"T = {temperature:g}", "", _row(heads), _row(["---"] * len(heads))]
    for method in dict.fromkeys(m for m, _ in cells):
        whole = cells[method, "all"]
        row = [method, *(_speed_tau(cells.get((method, task))) for task in tasks)]
        row += [
            interval(whole["speedup_vs_plain"], 2, "x"),
            interval(whole["speedup_vs_hf"], 2, "x"),
            interval(whole["tokens_per_second"], 1),
        ]
        lines.append(_row(row))
    return [*lines, ""]


def _single(results: Mapping[str, Any], temperature: float) -> dict[tuple[str, str], Mapping[str, Any]]:
    """(method, task) → its cell in the smallest batch."""
    return {
        (c["method"], c["task"]): c
        for c in results["summary"]
        if c["temperature"] == temperature and c["batch"] == min(results["settings"]["batch_sizes"])
    }


def _contexts(results: Mapping[str, Any], temperature: float) -> list[str]:
    """Tabulates decoding behind long texts, where most of a request's time is its prefill."""
    tasks, cells = [task for task in results["questions"] if "@" in task], _single(results, temperature)
    if not tasks:
        return []
    methods = [m for m in dict.fromkeys(m for m, _ in cells) if m != metrics.PLAIN]
    heads = ["decoding, prefill not counted", "plain, tokens/s", *methods]
    lines = [_row(heads), _row(["---"] * len(heads))]
    for task in tasks:
        plain = cells.get((metrics.PLAIN, task))
        if plain is not None:
            shown = (_speed_tau(cells.get((method, task)), "decode_speedup_vs_plain") for method in methods)
            lines.append(_row([title(task), interval(plain["decode_tokens_per_second"], 1), *shown]))
    return [*lines, ""]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _speed_tau(cell: Mapping[str, Any] | None, speedup: str = "speedup_vs_plain") -> str:
    if cell is None or cell[speedup] is None:
        return "–"
    speed = f"{cell[speedup]['median']:.2f}x"
    return f"{speed} / {cell['tau']['value']:.2f}" if "tau" in cell else speed


def _agreement_lines(results: Mapping[str, Any]) -> list[str]:
    lines = ["Outputs compared with plain decoding's:", ""]
    lines += [_row(AGREEMENT), _row(["---"] * len(AGREEMENT)), *map(_row, agreement_rows(results))]
    if results["divergences"]:
        ties = sum(d["near_tie"] for d in results["divergences"])
        lines += ["", f"Differing outputs of our methods at T = 0: {len(results['divergences'])}, near-ties: {ties}."]
    return lines
