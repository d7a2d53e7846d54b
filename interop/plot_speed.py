"""Draws the tokens/s of every engine that `speed.py` recorded.

pip install matplotlib
python interop/plot_speed.py interop/results/speed.json docs/speed.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from report import SPEED_ENGINES, median, rates


def main() -> None:
    run = json.loads(Path(sys.argv[1]).read_text())
    found = sorted((*median(rates(run, name)), name) for name in SPEED_ENGINES if name in run["engines"])
    middles, lows, highs, names = zip(*found, strict=True)
    errors = [
        [m - low for m, low in zip(middles, lows, strict=True)],
        [h - m for m, h in zip(middles, highs, strict=True)],
    ]
    colours = ["C1" if name.startswith("aquiline") else "0.6" for name in names]
    labels = [SPEED_ENGINES[name].replace("*", "").replace("`", "") for name in names]
    figure, axes = plt.subplots(figsize=(8, 0.35 * len(names) + 1), layout="constrained")
    bars = axes.barh(labels, middles, xerr=errors, color=colours, ecolor="0.3")
    axes.bar_label(bars, [f"{middle:.0f}" for middle in middles], padding=4, fontsize=8)
    axes.margins(x=0.12)
    axes.set(xlabel=f"tokens/s, median of {run['prompts']} prompts; {run['cpu']}, {run['threads']} threads")
    figure.savefig(sys.argv[2], dpi=110)


if __name__ == "__main__":
    main()
