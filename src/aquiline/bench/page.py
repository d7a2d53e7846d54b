"""Renders the report as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from aquiline.bench.environment import environment_line
from aquiline.bench.metrics import FIRST_TURNS, HF, PLAIN
from aquiline.bench.plots import COLOURS, Axes, Point, Series, bar_chart, line_chart
from aquiline.bench.tasks import title as task_title

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #fff; --line: #d9d9d9; --dim: #666; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #161616; --line: #3a3a3a; --dim: #a0a0a0; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 1240px; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } h3 { font-size: 1rem; margin-bottom: .3rem; }
p.dim, figcaption, dd { color: var(--dim); font-size: 13px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .5rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
figure { margin: .5rem 0 1.5rem; } svg { width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .grid { stroke: var(--line); } svg .guide { stroke: var(--dim); stroke-dasharray: 5 4; }
svg .whisker { stroke: var(--ink); stroke-width: 1.2; opacity: .7; }
figcaption span { margin-right: 1rem; white-space: nowrap; }
figcaption i { display: inline-block; width: 11px; height: 11px; margin-right: .35rem; border-radius: 2px; }
dt { font-weight: 600; margin-top: .5rem; } dd { margin: 0; }
.bad { color: #c62828; font-weight: 600; }
"""

Cell = Mapping[str, Any]


def render_html(results: Mapping[str, Any]) -> str:
    """Returns the page as HTML."""
    title = f"{results['environment']['target']}: methods side by side"
    body = [f"<h1>{escape(title)}</h1>", f'<p class="dim">{escape(environment_line(results))}</p>']
    for temperature in results["settings"]["temperatures"]:
        body += _temperature_part(results, temperature)
    body += [*_cost_part(results), *_agreement_part(results), *_methods_part(results), *_definitions_part(results)]
    return document(title, body)


def document(title: str, body: Sequence[str]) -> str:
    """Returns a self-contained page with the style of the reports."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_STYLE}</style></head>'
        f"<body>{''.join(body)}</body></html>\n"
    )


def _temperature_part(results: Mapping[str, Any], temperature: float) -> list[str]:
    cells = [c for c in results["summary"] if c["temperature"] == temperature]
    smallest = min(results["settings"]["batch_sizes"])
    single = [c for c in cells if c["batch"] == smallest]
    tasks = list(results["questions"])
    groups = [*(task_title(task) for task in tasks), "all"]
    colours = {m["label"]: COLOURS[i % len(COLOURS)] for i, m in enumerate(results["methods"])}

    def by_task(value: Callable[[Cell], Point | None], leave_out: Sequence[str]) -> list[Series]:
        return [
            Series(label, points, colour)
            for label, colour in colours.items()
            if label not in leave_out and (points := _points(single, label, [*tasks, "all"], value))
        ]

    out = [f"<h2>Temperature {temperature:g}</h2>", _table(single, list(colours)), *_detail_tables(single)]
    axes = Axes("Speedup by task", "", "speedup against plain", groups, guide=1.0)
    out += ["<h3>Speedup by task</h3>", bar_chart(axes, by_task(_speedup_point, [PLAIN]))]
    axes = Axes("Mean accept length by task", "", "τ", groups, guide=1.0)
    out += ["<h3>τ by task</h3>", bar_chart(axes, by_task(_tau_point, [PLAIN, HF]))]
    whole = {c["method"]: c for c in single if c["task"] == "all"}
    depth = [
        Series(label, [Point(i + 1, share) for i, share in enumerate(whole[label]["acceptance_by_depth"])], colour)
        for label, colour in colours.items()
        if whole.get(label, {}).get("acceptance_by_depth")
    ]
    axes = Axes("Acceptance by depth", "depth", "share of forwards", y_max=1.0)
    out += ["<h3>Acceptance by depth</h3>", line_chart(axes, depth)]
    judged = [
        Series(f"{label} (ECE {whole[label]['ece']:.3f})", _reliability(whole[label]["calibration"]), colour)
        for label, colour in colours.items()
        if "calibration" in whole.get(label, {})
    ]
    axes = Axes("Calibration", "draft's confidence", "share accepted", diagonal=True, y_max=1.0)
    out += ["<h3>Calibration</h3>", line_chart(axes, judged)] if judged else []
    return out + _batch_part(results, cells, colours)


def _batch_part(results: Mapping[str, Any], cells: Sequence[Cell], colours: Mapping[str, str]) -> list[str]:
    sizes = sorted(results["settings"]["batch_sizes"])
    if len(sizes) < 2:
        return []
    # Larger batches run on one task's first turns; the single ones are compared on these too.
    task = next((c["task"] for c in cells if c["batch"] == sizes[-1] and c["task"] != "all"), None)
    if task is None:
        return []  # too long for the context
    series = []
    for label, colour in colours.items():
        of_task = [c for c in cells if c["method"] == label and c["task"] == task]
        of_task += [c for c in cells if c["method"] == label and c["task"] == f"{task}, {FIRST_TURNS}"]
        mine = {c["batch"]: c for c in of_task}
        points = [replace(p, x=size) for size in sizes if size in mine and (p := _speedup_point(mine[size]))]
        if label != PLAIN and points:
            series.append(Series(label, points, colour))
    axes = Axes("Speedup by batch size", "batch size", "speedup against plain", guide=1.0)
    title = f"Speedup by batch size ({task_title(task)}, first turns)"
    return [f"<h3>{escape(title)}</h3>", line_chart(axes, series)]


def _points(
    cells: Sequence[Cell], label: str, tasks: Sequence[str], value: Callable[[Cell], Point | None]
) -> list[Point]:
    mine = {c["task"]: c for c in cells if c["method"] == label}
    found = [(i, value(mine[task])) for i, task in enumerate(tasks) if task in mine]
    return [replace(point, x=i) for i, point in found if point is not None]


def _speedup_point(cell: Cell) -> Point | None:
    value = cell["speedup_vs_plain"]
    return None if value is None else Point(0, value["median"], value["low"], value["high"])


def _tau_point(cell: Cell) -> Point | None:
    value = cell.get("tau")
    return None if value is None else Point(0, value["value"], value["low"], value["high"])


def _reliability(bins: Sequence[tuple[int, float, int]]) -> list[Point]:
    return [Point(confidence / count, accepted / count) for count, confidence, accepted in bins if count]


def _table(cells: Sequence[Cell], labels: Sequence[str]) -> str:
    heads = (
        "method", "speedup vs plain", "vs HF", "τ", "nodes / forward", "tokens/s", "first token",
        "inter-token p50 / p95", "draft", "target", "rest", "peak memory (added)",
    )  # fmt: skip
    whole = {c["method"]: c for c in cells if c["task"] == "all"}
    return _wide_table(heads, [_row(whole[label]) for label in labels if label in whole])


PHASES = ("prefill", "draft", "target", "accept", "commit", "extend", "other")


def _detail_tables(cells: Sequence[Cell]) -> list[str]:
    """Returns tables of the time per phase and of the chains' n-α, over all tasks."""
    whole = [c for c in cells if c["task"] == "all"]
    split = [[c["method"], *(f"{c['phases'].get(p, 0.0):.1%}" for p in PHASES)] for c in whole if c["phases"]]
    chains = [c for c in whole if c.get("alpha")]
    depth = max((len(c["alpha"]) for c in chains), default=0)
    alphas = [[c["method"], *(f"{a:.3f}" for a in c["alpha"]), *["–"] * (depth - len(c["alpha"]))] for c in chains]
    return [
        *_titled_table("Time split", ("method", *PHASES), split),
        *_titled_table("n-α", ("method", *(f"{n}-α" for n in range(depth))), alphas),
    ]


def _titled_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"<h3>{escape(title)}</h3>", _wide_table(heads, rows)] if rows else []


def _wide_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    body = "".join(_tr("td", row) for row in rows)
    return f'<div class="wide"><table>{_tr("th", heads)}{body}</table></div>'


def _row(c: Cell) -> list[str]:
    phases = dict(c["phases"])
    draft, target = phases.pop("draft", 0.0) + phases.pop("extend", 0.0), phases.pop("target", 0.0)
    gaps, first, memory = c["inter_token_seconds"], c["first_token_seconds"], c["memory"]
    return [
        c["method"],
        interval(c["speedup_vs_plain"], 2),
        interval(c["speedup_vs_hf"], 2),
        f"{c['tau']['value']:.2f}" if "tau" in c else "–",
        f"{c['nodes_per_step']:.1f}" if "tau" in c else "–",
        interval(c["tokens_per_second"], 1),
        f"{first['p50'] * 1000:.0f} ms" if first else "–",
        f"{gaps['p50'] * 1000:.1f} / {gaps['p95'] * 1000:.1f} ms" if gaps else "–",
        *((f"{share:.0%}" for share in (draft, target, sum(phases.values()))) if c["phases"] else ("–",) * 3),
        f"{memory['peak_bytes'] / 1e6:.0f} MB (+{memory['added_bytes'] / 1e6:.0f})" if memory["peak_bytes"] else "–",
    ]


def interval(value: Mapping[str, float] | None, digits: int, unit: str = "") -> str:
    """Formats a median with its interval."""
    if value is None:
        return "–"
    return f"{value['median']:.{digits}f}{unit} ({value['low']:.{digits}f}–{value['high']:.{digits}f})"


def _tr(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _cost_part(results: Mapping[str, Any]) -> list[str]:
    curve = results["cost_curve"]
    if not curve:
        return []
    points = [Point(p["tokens"], p["seconds"] * 1e3, p["low"] * 1e3, p["high"] * 1e3) for p in curve]
    axes = Axes("Cost of the target's forward by number of tokens", "tokens in the forward", "milliseconds")
    return ["<h2>Cost of the target's forward</h2>", line_chart(axes, [Series("", points, COLOURS[0])])]


AGREEMENT = ("T", "batch", "method", "equal outputs", "tokens before the first difference")
"""Columns of `agreement_rows`."""


def agreement_rows(results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Per temperature, batch size and method: outputs that equal plain decoding's."""
    return [
        (
            f"{c['temperature']:g}", str(c["batch"]), c["method"], f"{c['equal']} of {c['outputs']}",
            f"{c['tokens_before_divergence']} of {c['tokens']}",
        )
        for c in results["agreement"]
    ]  # fmt: skip


def _agreement_part(results: Mapping[str, Any]) -> list[str]:
    out = ["<h2>Agreement with plain decoding</h2>", _wide_table(AGREEMENT, agreement_rows(results))]
    for d in results["divergences"]:
        where = (
            f"{d['method']}, {d['task']} {d['question']} turn {d['turn']}, batch {d['batch']}, token {d['position']}"
        )
        verdict = "a near-tie" if d["near_tie"] else "NOT a near-tie"
        gap = "one output had ended" if d["gap"] is None else f"gap {d['gap']:.3g}, kernels' noise {d['noise']:.3g}"
        tone = "dim" if d["near_tie"] else "bad"
        out.append(f'<p class="{tone}">{escape(f"{where}: {gap}: {verdict}")}</p>')
    return out


def _methods_part(results: Mapping[str, Any]) -> list[str]:
    rows = [(m["label"], m["settings"], m["head"] or "–") for m in results["methods"]]
    out = ["<h2>Methods</h2>", _wide_table(("method", "settings", "head"), rows)]
    out += [f'<p class="dim">Not run: {escape(e["method"])}: {escape(e["reason"])}</p>' for e in results["not_run"]]
    if results["skipped"]:
        out.append(f'<p class="dim">Skipped, longer than the context: {len(results["skipped"])} prompts.</p>')
    return out


def _definitions_part(results: Mapping[str, Any]) -> list[str]:
    items = [f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in results["definitions"].items()]
    return ["<h2>What the numbers mean</h2>", "<dl>", *items, "</dl>"]
