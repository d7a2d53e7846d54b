"""Times decoding behind long texts: plainly, with a head that sees all positions, and with one that sees a window.

    python benchmarks/window_cost.py QUESTIONS --per-task 1 --output benchmarks/results/long-contexts/cost.json

Questions of `--tasks` stand behind other questions, up to each of `--lengths` tokens, and the target answers greedily.
One generation serves all three: blocks of 8 steps take turns, and the first step of a block, which ingests what the
drafter missed, is not counted. Chains of 4 drafts. Needs a quiet machine; runs with other `--skip` add to the output.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aquiline
from aquiline import decode
from aquiline import tree as trees
from aquiline.bench.contexts import behind
from aquiline.bench.environment import environment
from aquiline.bench.methods import Bed
from aquiline.bench.tasks import load_questions
from aquiline.checkpoints.open import read_head
from aquiline.drafters.drafter import Committed, Rows
from aquiline.drafters.eagle import EagleDrafter
from aquiline.drafters.trees import Chain
from aquiline.engine.text import encode_prompt
from aquiline.sampling import SamplingParams, TokenChooser
from aquiline.stats import GenerationStats
from aquiline.tree import DraftTree

BLOCK = 8


class Turns:
    """Drafters that all receive what is committed, and of which one proposes; None is plain decoding."""

    def __init__(self, drafters: dict[str, EagleDrafter | None]) -> None:
        self.drafters, self.active = drafters, ""
        self.needs = next(d.needs for d in drafters.values() if d is not None)

    def new_state(self, slots: int, capacity: int) -> dict[str, Any]:
        return {name: d.new_state(slots, capacity) for name, d in self.drafters.items() if d is not None}

    def propose(self, rows: Rows, state: dict[str, Any]) -> DraftTree:
        drafter = self.drafters[self.active]
        return trees.root_only(rows.roots) if drafter is None else drafter.propose(rows, state[self.active])

    def extend(self, committed: Committed, state: dict[str, Any]) -> None:
        for name, part in state.items():
            self.drafters[name].extend(committed, part)  # type: ignore[union-attr]

    def copy(self, source: int, slot: int, length: int, state: dict[str, Any]) -> None:
        raise AssertionError("one slot")

    def reset(self, slot: int, length: int, state: dict[str, Any]) -> None:
        raise AssertionError("one request")


def steps(target: Any, turns: Turns, prompt: list[int], count: int) -> Iterator[tuple[str, float, int]]:
    """Yields (name, seconds, tokens) of the counted steps of one answer."""
    state = decode.new_state(target, turns, 1, len(prompt) + 8 * count)
    chooser = TokenChooser(SamplingParams(temperature=0), 0, len(prompt))
    list(decode.prefill(target, turns, state, 0, decode.Occupant(list(prompt), chooser, GenerationStats())))
    names = list(turns.drafters)
    for step in range(count):
        turns.active = names[step // BLOCK % len(names)]
        began = time.perf_counter()
        emitted = sum(len(result.tokens) for result in decode.step(target, turns, state, [0], max_depth=16))
        if step % BLOCK:
            yield turns.active, time.perf_counter() - began, emitted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path, help="folder of question files")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", default="smollm2-eagle3")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--tasks", nargs="+", default=["sum", "rag"])
    parser.add_argument("--per-task", type=int, default=1)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--lengths", nargs="+", type=int, default=[500, 2000, 4000, 7000])
    parser.add_argument("--steps", type=int, default=144)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    plain = aquiline.load(options.target, draft=None)
    target, tokenizer = plain.engine.target, plain.tokenizer
    head = replace(read_head(options.head, target.shape, target.dtype), window=None)
    windowed = replace(head, window=options.window)
    packed: dict[str, Any] = {"packed": True, "form": "int8"}
    turns = Turns({
        "plain": None,
        "all positions": EagleDrafter(head, target, Chain(4), **packed),
        "window": EagleDrafter(windowed, target, Chain(4), **packed),
    })  # fmt: skip
    known = json.loads(options.output.read_text()) if options.output.exists() else {"runs": []}
    others = load_questions([options.questions])
    for task in options.tasks:
        chosen = [q for q in others if q.task == task][options.skip : options.skip + options.per_task]
        for question in chosen:
            for length in options.lengths:
                text = behind(question, others, length, tokenizer)
                prompt = encode_prompt(tokenizer, [{"role": "user", "content": text}])
                found = [[n, round(s, 6), k] for n, s, k in steps(target, turns, prompt, options.steps)]
                run = {"task": task, "question": question.id, "length": length, "prompt": len(prompt), "steps": found}
                known["runs"].append(run)
    bed = Bed(target, tokenizer, plain.engine.end_ids, plain.target_path, options.target, {})
    known |= {"environment": environment(bed), "window": options.window}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(known) + "\n", encoding="utf-8")
    for line in summary(known["runs"]):
        print(line)


def summary(runs: list[dict[str, Any]]) -> list[str]:
    """Per length: the median milliseconds of a step, and the tokens of a step, of each of the three."""
    lines = []
    for length in sorted({run["length"] for run in runs}):
        every = [step for run in runs if run["length"] == length for step in run["steps"]]
        for name in dict.fromkeys(step[0] for step in every):
            mine = [step for step in every if step[0] == name]
            middle = sorted(step[1] for step in mine)[len(mine) // 2]
            tokens = sum(step[2] for step in mine) / len(mine)
            lines.append(
                f"{length:>6} {name:14} {1000 * middle:6.1f} ms a step, {tokens:.2f} tokens, {len(mine)} steps"
            )
    return lines


if __name__ == "__main__":
    main()
