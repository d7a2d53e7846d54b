"""Prints the table of docs/interop.md from the summaries in interop/results.

python interop/report.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def row(run: dict[str, Any]) -> str:
    """Counts as theirs / ours: all chains, then those that accepted at least 1, 2, … drafts."""
    pairs = zip(
        [run["theirs"]["drafts"], *run["theirs"]["accepted"]],
        [run["ours"]["drafts"], *run["ours"]["accepted"]],
        strict=True,
    )
    counts = " | ".join(f"{theirs:,} / {ours:,}" for theirs, ours in pairs)
    head = f"`{run['head']}` ({run['model.safetensors'][:8]})"
    return f"| {run['engine']} | {head} | {counts} | {run['outputs_as_ours']} | {run['outputs_as_plain']} |"


def main() -> None:
    runs = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    runs = [run for run in runs if "theirs" in run]
    depths = range(1, 1 + max(len(run["theirs"]["accepted"]) for run in runs))
    titles = [
        "engine",
        "head",
        "chains",
        *(f"≥ {i}" for i in depths),
        "outputs as ours",
        "outputs as its plain decoding",
    ]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    print("\n".join(row(run) for run in runs))


if __name__ == "__main__":
    main()
