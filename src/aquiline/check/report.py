"""A finished check as text, as JSON, and as a page with charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from aquiline.bench.page import document
from aquiline.bench.plots import COLOURS, Axes, Point, Series, line_chart
from aquiline.check.card import Promise
from aquiline.check.diagnosis import DEPTHS, Diagnosis
from aquiline.check.forecast import Forecast, best_length
from aquiline.check.intervals import Rate


@dataclass(frozen=True)
class Finding:
    """One result in words.

    Attributes:
        failed: it makes the check fail.
        text: a sentence, with the remedy where there is one.
    """

    failed: bool
    text: str


@dataclass(frozen=True)
class Steps:
    """The engine's chains beside teacher-forced ones that begin at the same tokens.

    Attributes:
        compared: steps of the engine.
        fewer: steps in which the engine accepted fewer drafts.
        more: steps in which it accepted more.
        chance: probability of so uneven a split if both sides were equally likely.
    """

    compared: int
    fewer: int
    more: int
    chance: float


@dataclass(frozen=True, eq=False)
class CheckReport:
    """A finished check; fields that a forecast alone lacks are empty.

    Attributes:
        head: its name, and None for a forecast from assumed acceptance.
        target: its name.
        answers: texts that were measured.
        forced: n-α with chains from every token of the answers.
        same: n-α of teacher-forced chains from the tokens where the engine's began.
        engine: n-α of the engine.
        promises: of the head's card.
        steps: engine against teacher-forced.
        speed: measured tokens/s of the engine's run, decoding alone; and the length of its chains.
        forecasts: by length.
        diagnosis: None with too few answers.
        findings: in words.
    """

    head: str | None
    target: str
    answers: int
    forced: Sequence[Rate]
    same: Sequence[Rate]
    engine: Sequence[Rate]
    promises: Sequence[Promise]
    steps: Steps | None
    speed: tuple[float, int] | None
    forecasts: Sequence[Forecast]
    diagnosis: Diagnosis | None
    findings: Sequence[Finding]

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not any(finding.failed for finding in self.findings)


def check_json(report: CheckReport) -> dict[str, Any]:
    """JSON-able values."""
    record: dict[str, Any] = {"passed": report.passed, "head": report.head, "target": report.target}
    record |= {"answers": report.answers, "findings": [asdict(finding) for finding in report.findings]}
    for name, rates in (("forced", report.forced), ("same_starts", report.same), ("engine", report.engine)):
        record[name] = [asdict(rate) for rate in rates]
    record["card"] = [asdict(promise) for promise in report.promises]
    record["steps"] = None if report.steps is None else asdict(report.steps)
    record["measured"] = (
        None if report.speed is None else dict(zip(("tokens_per_second", "length"), report.speed, strict=True))
    )
    record["forecast"] = [asdict(f) | {"tokens_per_second": f.tokens_per_second} for f in report.forecasts]
    record["best_length"] = best_length(report.forecasts).length if report.forecasts else None
    record["readings"] = [
        {"name": each.reading.name, "remedy": each.reading.remedy, "accepted": each.accepted, "gain": asdict(each.gain),
         "overlap_gain": asdict(each.overlap_gain), "chance": each.chance, "answers": each.answers,
         "clear": each.clear}
        for each in (report.diagnosis.compared if report.diagnosis else ())
    ]  # fmt: skip
    return record


def check_text(report: CheckReport) -> str:
    """Tables and the verdict."""
    parts = []
    if report.engine:
        parts.append(f"Acceptance by depth, {report.answers} answers (95 % intervals)\n{_acceptance(report)}")
    if report.forecasts:
        parts.append(f"Forecast for chains on this machine\n{_forecast(report)}")
    if report.diagnosis is not None and report.diagnosis.compared:
        parts.append(
            f"Other readings of the head, drafts accepted per chain of {DEPTHS}\n{_readings(report.diagnosis)}"
        )
    words = [f"{'FAIL' if finding.failed else 'note'}: {finding.text}" for finding in report.findings]
    if report.head is not None:
        words.append("check failed" if not report.passed else "check passed")
    return "\n\n".join([*parts, "\n".join(words)]).rstrip()


def check_page(report: CheckReport) -> str:
    """A self-contained HTML page: acceptance and forecast as charts, and the text."""
    title = f"{report.head or 'assumed acceptance'} for {report.target}"
    lines = [
        Series("teacher-forced", _points(report.forced), COLOURS[0]),
        Series("engine", _points(report.engine), COLOURS[1]),
        *(
            Series(f"card: {promise.data}", [Point(n, a) for n, a in enumerate(promise.alphas)], colour)
            for promise, colour in zip(report.promises, COLOURS[2:], strict=False)
        ),
    ]
    body = [f"<h1>{escape(title)}</h1>"]
    if report.engine:
        axes = Axes("Acceptance by position", "n, accepted drafts before", "n-α", y_max=1.0)
        body += ["<h2>Acceptance by position</h2>", line_chart(axes, lines)]
    if report.forecasts:
        speed = [Point(f.length, f.tokens_per_second, f.low, f.high) for f in report.forecasts]
        axes = Axes("Forecast", "length of the chains", "tokens/s", guide=report.forecasts[0].tokens_per_second)
        body += ["<h2>Forecast</h2>", line_chart(axes, [Series("tokens/s", speed, COLOURS[0])])]
    return document(title, [*body, f"<pre>{escape(check_text(report))}</pre>"])


def _points(rates: Sequence[Rate]) -> list[Point]:
    return [Point(n, rate.value, rate.low, rate.high) for n, rate in enumerate(rates)]


def _acceptance(report: CheckReport) -> str:
    count = max(len(report.forced), len(report.engine))
    rows = [
        ["teacher-forced, every token", *map(str, report.forced)],
        ["teacher-forced, the engine's starts", *map(str, report.same)],
        ["engine", *map(str, report.engine)],
        *(
            [f"card: {promise.data}", *(f"{alpha:.3f}" for alpha in promise.alphas[:count])]
            for promise in report.promises
        ),
    ]
    return markdown(["", *(f"{n}-α" for n in range(count))], rows)


def _forecast(report: CheckReport) -> str:
    best, plain = best_length(report.forecasts), report.forecasts[0].tokens_per_second
    rows = [
        [
            f"{'→ ' if each is best else ''}{'plain' if not each.length else f'chain:{each.length}'}",
            f"{each.tokens_per_step:.2f}",
            f"{1000 * each.seconds_per_step:.1f}",
            f"{each.tokens_per_second:.1f}" + (f" ({each.low:.1f}–{each.high:.1f})" if each.low < each.high else ""),
            f"{each.tokens_per_second / plain:.2f}×",
        ]
        for each in report.forecasts
    ]
    text = markdown(["", "τ", "ms per step", "tokens/s", "over plain"], rows)
    if report.speed is None:
        return text
    return f"{text}\nmeasured with chain:{report.speed[1]}: {report.speed[0]:.1f} tokens/s"


def _readings(diagnosis: Diagnosis) -> str:
    rows = [["as its files say", f"{diagnosis.accepted:.3f}", "", "", ""]]
    for each in diagnosis.compared:
        gain = f"{each.gain.value:+.3f} ({each.gain.low:+.3f} … {each.gain.high:+.3f})"
        rows.append(
            [f"{'→ ' if each.clear else ''}{each.reading.name}", f"{each.accepted:.3f}", gain, f"{each.chance:.2g}",
             str(each.answers)]
        )  # fmt: skip
    return markdown(["", "accepted", "gain", "chance", "answers"], rows)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; short rows are filled."""
    table = [list(header), *([*row, *[""] * (len(header) - len(row))] for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    lines = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in table]
    return "\n".join([lines[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *lines[1:]])
