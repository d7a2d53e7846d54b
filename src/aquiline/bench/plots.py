"""Draws charts as inline SVG, without a plotting package, scripts or downloads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# Okabe and Ito's colours, which most colour-blind readers can distinguish, and darker versions.
COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8f7a00",
    "#7e5bd6", "#1fa8a0", "#a6324a", "#7f7f7f", "#8c564b", "#9ccc3c",
)  # fmt: skip

WIDTH, HEIGHT = 960, 340
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 14, 54


@dataclass(frozen=True)
class Point:
    """A value with its interval, or None; in a bar chart, `x` is the index of a group."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """Points of one method, sorted by x."""

    label: str
    points: Sequence[Point]
    colour: str


@dataclass(frozen=True)
class Axes:
    """The frame of a chart.

    Attributes:
        title: description for screen readers.
        groups: names on the x axis; empty for a numeric axis.
        guide: y of a dashed line ("no gain"), or None.
        diagonal: draw y = x.
        y_max: end of the y axis; None fits the values.
    """

    title: str
    x_label: str
    y_label: str
    groups: Sequence[str] = ()
    guide: float | None = None
    diagonal: bool = False
    y_max: float | None = None


def bar_chart(axes: Axes, series: Sequence[Series]) -> str:
    """Draws grouped bars with their intervals."""
    top = _top(axes, series)
    slot = (WIDTH - LEFT - RIGHT) / max(len(axes.groups), 1)
    wide = slot * 0.86 / max(len(series), 1)
    marks = []
    for i, one in enumerate(series):
        for point in one.points:
            x = LEFT + slot * (point.x + 0.07) + wide * i
            y = _y(point.y, top)
            group = axes.groups[int(point.x)]
            marks.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(wide - 1, 1):.1f}" height="{_y(0, top) - y:.1f}" '
                f'fill="{one.colour}">{_tip(f"{one.label}, {group}", point)}</rect>'
            )
            marks.append(_whisker(x + wide / 2 - 0.5, point, top))
    names = [
        f'<text x="{LEFT + slot * (i + 0.5):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{escape(name)}</text>'
        for i, name in enumerate(axes.groups)
    ]
    return _figure(axes, series, top, [*names, *marks])


def line_chart(axes: Axes, series: Sequence[Series]) -> str:
    """Draws lines through points on a numeric x axis, with their intervals."""
    top = _top(axes, series)
    xs = [point.x for one in series for point in one.points] or [0.0, 1.0]
    first, last = (0.0, 1.0) if axes.diagonal else (min(xs), max(xs))
    span = (last - first) or 1.0

    def at(x: float) -> float:
        return LEFT + 12 + (x - first) / span * (WIDTH - LEFT - RIGHT - 24)

    marks = []
    ticks = sorted(set(xs)) if len(set(xs)) <= 12 and not axes.diagonal else _ticks(first, last)
    previous = -math.inf
    for tick in ticks:
        if at(tick) - previous < 26:
            continue  # labels of close points would overlap
        previous = at(tick)
        marks.append(f'<text x="{previous:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:g}</text>')
    if axes.diagonal:
        marks.append(
            f'<line class="guide" x1="{at(0):.1f}" y1="{_y(0, top):.1f}" x2="{at(1):.1f}" y2="{_y(1, top):.1f}"/>'
        )
    for one in series:
        path = " ".join(f"{at(p.x):.1f},{_y(p.y, top):.1f}" for p in one.points)
        marks.append(f'<polyline points="{path}" fill="none" stroke="{one.colour}" stroke-width="2"/>')
        for p in one.points:
            marks.append(_whisker(at(p.x), p, top))
            tip = _tip(f"{one.label}, {axes.x_label} {p.x:g}", p)
            marks.append(
                f'<circle cx="{at(p.x):.1f}" cy="{_y(p.y, top):.1f}" r="3.5" fill="{one.colour}">{tip}</circle>'
            )
    return _figure(axes, series, top, marks)


def _figure(axes: Axes, series: Sequence[Series], top: float, marks: Sequence[str]) -> str:
    lines = []
    for tick in _ticks(0, top):
        y = _y(tick, top)
        lines.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    if axes.guide is not None and axes.guide <= top:
        y = _y(axes.guide, top)
        lines.append(f'<line class="guide" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="rotate(-90 14 {middle})"'
    lines.append(f'<text x="14" y="{middle}" text-anchor="middle" {turned}>{escape(axes.y_label)}</text>')
    lines.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(axes.x_label)}</text>')
    legend = "".join(
        f'<span><i style="background:{one.colour}"></i>{escape(one.label)}</span>' for one in series if one.label
    )
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(axes.title, quote=True)}">'
        f"{''.join(lines)}{''.join(marks)}</svg><figcaption>{legend}</figcaption></figure>"
    )


def _whisker(x: float, point: Point, top: float) -> str:
    if point.low is None or point.high is None:
        return ""
    low, high = _y(point.low, top), _y(min(point.high, top), top)
    return f'<line class="whisker" x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}"/>'


def _tip(what: str, point: Point) -> str:
    interval = "" if point.low is None or point.high is None else f" ({point.low:.3g}–{point.high:.3g})"
    return f"<title>{escape(what)}: {point.y:.3g}{interval}</title>"


def _top(axes: Axes, series: Sequence[Series]) -> float:
    if axes.y_max is not None:
        return axes.y_max
    values = [max(p.y, p.high or p.y) for one in series for p in one.points]
    return max([*values, axes.guide or 0.0, 1e-9]) * 1.05


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top


def _ticks(first: float, last: float) -> list[float]:
    """Returns four to nine round numbers from `first` to `last`."""
    span = last - first
    power = 10 ** math.floor(math.log10(span / 5)) if span > 0 else 1.0
    step = next((power * m for m in (1, 2, 5, 10) if span / (power * m) <= 8), power)
    start = math.ceil(first / step - 1e-9)
    return [round(i * step, 10) for i in range(start, math.floor(last / step + 1e-9) + 1)]
