"""Measures the gain of the store of text: rewriting with `prediction`, prompts run again, and ordinary chat.

    python benchmarks/lookup_gain.py --output benchmarks/results/lookup-gain/long.json
    python benchmarks/lookup_gain.py --per-task 2 --tokens 128 --output benchmarks/results/lookup-gain/chat.json

At temperature 0, all cases but the second runs, which follow, take turns on every prompt:

- prediction: the output is expected, but every `--every`-th word of the expected text was changed;
- second run: the prompt ran before (`shared_lookup`);
- default and first run: ordinary chat, without and with the shared store, against the head alone and the default.

A ratio is the quotient of the decoding times of one output, and the median over prompts is reported.
Each case has a model of its own, because prices and calibration are learnt in use. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import aquiline
from aquiline.bench.environment import environment
from aquiline.bench.methods import Bed
from aquiline.bench.tasks import load_questions
from aquiline.stats import GenerationStats

PROMPTS = (
    "Explain in three paragraphs how a glacier forms.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "List ten ways to save water at home, with a sentence on each.",
    "Write a Python function that merges two sorted lists, and explain it.",
)
CASES = ("plain", "head alone", "default", "first run", "second run", "prediction")


def changed(text: str, every: int) -> str:
    """The text with every `every`-th word replaced."""
    words = text.split(" ")
    return " ".join("changed" if i % every == every - 1 else word for i, word in enumerate(words))


def seconds(stats: GenerationStats) -> float:
    return stats.emitted / stats.decode_tokens_per_second


def row(found: list[GenerationStats], others: dict[str, list[GenerationStats]]) -> dict[str, Any]:
    total = GenerationStats()
    for stats in found:
        total.add(stats)
    ratios = {
        f"against {name}": median(seconds(b) / seconds(a) for a, b in zip(found, each, strict=True))
        for name, each in others.items()
    }
    return {"tokens": total.emitted, "tau": total.mean_accept_length, "sources": dict(total.sources)} | ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", default="smollm2-eagle3")
    parser.add_argument("--per-task", type=int, default=0, help="ask N embedded questions of each task instead")
    parser.add_argument("--tokens", type=int, default=400, help="most tokens of an output (default: 400)")
    parser.add_argument("--every", type=int, default=40, help="every N-th word of the expected text is changed")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    usual, alone = aquiline.load(arguments.target), aquiline.load(arguments.target, draft=arguments.head)
    sharing, expecting = aquiline.load(arguments.target, shared_lookup=True), aquiline.load(arguments.target)
    plain = usual.plain()
    found: dict[str, list[GenerationStats]] = {case: [] for case in CASES}
    answers, equal = list[list[int]](), 0
    settings: dict[str, Any] = {"max_new_tokens": arguments.tokens, "temperature": 0}
    for loaded in (plain, alone, usual, sharing, expecting):
        loaded.generate("Name a river.", max_new_tokens=16, temperature=0)
    prompts = PROMPTS
    if arguments.per_task:
        prompts = tuple(question.turns[0] for question in load_questions(per_task=arguments.per_task))
    for number, prompt in enumerate(prompts):
        expected = plain.generate(prompt, **settings)
        text = changed(expected.text, arguments.every)
        runs = [
            ("plain", plain, {}),
            ("head alone", alone, {}),
            ("default", usual, {}),
            ("first run", sharing, {}),
            ("prediction", expecting, {"prediction": text}),
        ]
        shift = number % len(runs)
        for name, loaded, more in runs[shift:] + runs[:shift]:
            output = loaded.generate(prompt, **settings, **more)
            equal += output.token_ids == expected.token_ids
            found[name].append(output.stats)
        answers.append(expected.token_ids)
    for prompt, answer in zip(prompts, answers, strict=True):
        output = sharing.generate(prompt, **settings)
        equal += output.token_ids == answer
        found["second run"].append(output.stats)
    against = {name: found[name] for name in ("plain", "head alone", "default")}
    bed = Bed(usual.engine.target, usual.tokenizer, usual.engine.end_ids, usual.target_path, arguments.target, {})
    report = {
        "environment": environment(bed),
        "outputs": len(CASES) * len(found["plain"]),
        "equal to plain": equal,
        "cases": {name: row(each, against) for name, each in found.items()},
    }
    text = json.dumps(report, indent=1, ensure_ascii=False)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
