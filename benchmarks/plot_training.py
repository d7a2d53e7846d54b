"""Draws acceptance against positions seen, out of the metrics that `aquiline train` writes.

    pip install matplotlib
    python benchmarks/plot_training.py benchmarks/results/training/smollm2-eagle3.json docs/smollm2-eagle3.png

The JSON file lists the stages of a head in order: `metrics` (a metrics.jsonl beside it, or null
where none was kept), `positions`, and `mt_bench` (n-α measured after the stage).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

WINDOW = 8
"""Logged steps that a plotted point averages: single steps see other conversations."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    file = options.stages
    stages = json.loads(file.read_text())["stages"]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    start, drawn = 0, False
    measured: list[tuple[float, list[float]]] = []
    for stage in stages:
        if stage["metrics"]:
            draw_stage(axes, file.parent / stage["metrics"], start, first=not drawn)
            drawn = True
        start += stage["positions"]
        axes.axvline(start / 1e6, color="0.85", linewidth=1)
        if stage["mt_bench"]:
            measured.append((start / 1e6, stage["mt_bench"]))
    for depth in range(2):
        places, alphas = [m[0] for m in measured], [m[1][depth] for m in measured]
        axes.plot(places, alphas, "o--", color=f"C{depth}", label=f"{depth}-α, MT-bench")
    axes.set(xlabel="million positions seen", ylabel="acceptance (greedy)", title=file.stem, ylim=(0, None))
    axes.legend(fontsize=8)
    figure.savefig(options.picture, dpi=110)


def draw_stage(axes: Any, metrics: Path, start: int, *, first: bool) -> None:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [row for row in rows if "accuracy" in row and "loss" in row]
    groups = [rows[i : i + WINDOW] for i in range(0, len(rows) - WINDOW + 1, WINDOW)]
    places = [(start + sum(row["positions"] for row in group) / len(group)) / 1e6 for group in groups]
    mean = [sum(row["accuracy"][0] for row in group) / len(group) for group in groups]
    axes.plot(places, mean, color="C3", linewidth=1, label="first step, training text" if first else None)


if __name__ == "__main__":
    main()
