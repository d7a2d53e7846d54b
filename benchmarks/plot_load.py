"""Draws tokens/s and latency by number of clients, as `serve_load.py` recorded them.

pip install matplotlib
python benchmarks/plot_load.py benchmarks/results/serve-load.json docs/serve.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = (
    ("tokens_per_second", "tokens/s, all clients", 1),
    ("first_token_p50", "ms to the first token, median", 1000),
    ("between_pieces_p50", "ms between pieces, median", 1000),
)


def main() -> None:
    result = json.loads(Path(sys.argv[1]).read_text())
    runs = result["runs"]
    names = sorted({name for run in runs for name in run["medians"]})
    figure, axes = plt.subplots(1, len(PANELS), figsize=(10, 3.2), layout="constrained")
    for axis, (key, label, scale) in zip(axes, PANELS, strict=True):
        for number, name in enumerate(names):
            points = [(run["clients"], scale * run["medians"][name][key]) for run in runs if name in run["medians"]]
            axis.plot(*zip(*points, strict=True), "o-", color=f"C{number}", label=name)
        axis.set(xlabel="clients", title=label, ylim=(0, None), xscale="log", xticks=[run["clients"] for run in runs])
        axis.set_xticklabels([str(run["clients"]) for run in runs])
        axis.minorticks_off()
        axis.title.set_fontsize(9)
    axes[0].legend(fontsize=8)
    figure.savefig(sys.argv[2], dpi=110)


if __name__ == "__main__":
    main()
