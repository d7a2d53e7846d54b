"""Times the draft of a tree beside that of a chain: in one call of the kernels, and level by level, interleaved.

    python benchmarks/draft_trees.py

All trees take turns behind the same text; medians of the whole draft, its Python included. Writes
benchmarks/results/draft-trees.json. Needs the CPU kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import aquiline
from aquiline import decode
from aquiline.bench.environment import cpu_name
from aquiline.drafters.drafter import Rows
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.trees import parse_tree
from aquiline.sampling import SamplingParams, TokenChooser
from aquiline.stats import GenerationStats

RESULTS = Path(__file__).parent / "results"
TREES = ("chain:3", "chain:4", "chain:5", "dynamic:8,3,4", "dynamic:8,4,4", "dynamic:12,4,4", "dynamic:16,5,4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = aquiline.load("smollm2", "smollm2-eagle3", dtype="bfloat16", tree="chain:4")
    drafter = loaded.engine.drafter
    assert isinstance(drafter, EagleDrafter) and drafter._draft is not None
    whole = drafter._draft
    times: dict[tuple[str, float, str], list[float]] = {}
    with torch.inference_mode():
        state, rows = prefilled(loaded, drafter)
        for number in range(-3, options.rounds):
            # What a target's forward does to the caches.
            loaded.target.forward(forward_input(loaded, state))
            for temperature, row in rows.items():
                for tree in TREES:
                    drafter.policy = parse_tree(tree)  # type: ignore[assignment]
                    for path, draft in (("one call", whole), ("levels", None)):
                        drafter._draft = draft
                        began = time.perf_counter()
                        drafter.propose(row, state.drafter_state)
                        if number >= 0:
                            spent = 1000 * (time.perf_counter() - began)
                            times.setdefault((tree, temperature, path), []).append(spent)
    report = {
        "milliseconds": [
            {"tree": tree, "temperature": temperature, "path": path, "median": statistics.median(found)}
            for (tree, temperature, path), found in times.items()
        ],
        "environment": {
            "cpu": cpu_name(), "threads": options.threads, "rounds": options.rounds, "torch": torch.__version__,
            "load_average": os.getloadavg()[0], "date": time.strftime("%Y-%m-%d %H:%M"),
        },
    }  # fmt: skip
    (RESULTS / "draft-trees.json").write_text(json.dumps(report, indent=1) + "\n")
    for entry in report["milliseconds"]:
        print(f"T = {entry['temperature']:g}  {entry['tree']:16} {entry['path']:9} {entry['median']:.2f} ms")


def prefilled(loaded: Any, drafter: EagleDrafter) -> tuple[decode.DecodeState, dict[float, Rows]]:
    """A row behind a text of 200 tokens, and its settings by temperature."""
    text = loaded.tokenizer("The committee will publish its report on the harbour next week. " * 20)["input_ids"][:200]
    state = decode.new_state(loaded.target, drafter, 1, 512)
    choosers = {t: TokenChooser(SamplingParams(temperature=t, seed=0), 0, len(text)) for t in (0.0, 1.0)}
    occupant = decode.Occupant(list(text), choosers[0.0], GenerationStats())
    for _ in decode.prefill(loaded.target, drafter, state, 0, occupant):
        pass
    return state, {t: Rows([0], [occupant.tokens], [chooser]) for t, chooser in choosers.items()}


def forward_input(loaded: Any, state: decode.DecodeState) -> Any:
    from aquiline.targets.target import TargetInput

    at = int(state.cache.lengths[0])
    return TargetInput(torch.ones(1, 5, dtype=torch.int64), torch.arange(at, at + 5)[None], None, state.cache, [0])


if __name__ == "__main__":
    main()
