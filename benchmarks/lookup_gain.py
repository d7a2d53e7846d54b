"""Measures the gain of the store of text: rewriting with `prediction`, prompts run again, and ordinary chat.

    python benchmarks/lookup_gain.py --output benchmarks/results/lookup_gain.json

Three cases, each interleaved with plain decoding, at temperature 0: an expected text of which every `--every`-th word
was changed, prompts that ran before (`shared_lookup`), and prompts without either, by default and by the head alone.
Needs a quiet machine for its speeds; tokens per forward and the counts by source need none.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import aquiline
from aquiline.stats import GenerationStats

PROMPTS = (
    "Explain in three paragraphs how a glacier forms.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "List ten ways to save water at home, with a sentence on each.",
    "Write a Python function that merges two sorted lists, and explain it.",
)


def changed(text: str, every: int) -> str:
    """The text with every `every`-th word replaced."""
    words = text.split(" ")
    return " ".join("changed" if i % every == every - 1 else word for i, word in enumerate(words))


def row(stats: GenerationStats, plain: GenerationStats) -> dict[str, Any]:
    speed = stats.decode_tokens_per_second / plain.decode_tokens_per_second
    return {"tau": stats.mean_accept_length, "sources": dict(stats.sources), "speed_against_plain": speed}


def total(outputs: list[Any]) -> GenerationStats:
    stats = GenerationStats()
    for output in outputs:
        stats.add(output.stats)
    return stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--tokens", type=int, default=400, help="most tokens of an output (default: 400)")
    parser.add_argument("--every", type=int, default=40, help="every N-th word of the expected text is changed")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    settings: dict[str, Any] = {"max_new_tokens": arguments.tokens, "temperature": 0}
    usual = aquiline.load(arguments.target, adaptive=False)
    sharing = aquiline.load(arguments.target, adaptive=False, shared_lookup=True)
    plain, cases = usual.plain(), dict[str, list[Any]]()
    for prompt in PROMPTS:
        expected = plain.generate(prompt, **settings)
        cases.setdefault("plain", []).append(expected)
        text = changed(expected.text, arguments.every)
        cases.setdefault("prediction", []).append(usual.generate(prompt, prediction=text, **settings))
        cases.setdefault("default", []).append(usual.generate(prompt, **settings))
        cases.setdefault("first run", []).append(sharing.generate(prompt, **settings))
        cases.setdefault("second run", []).append(sharing.generate(prompt, **settings))
    for name, outputs in cases.items():
        same = [output.token_ids for output in outputs] == [output.token_ids for output in cases["plain"]]
        print(f"{name}: {'' if same else 'NOT '}plain decoding's tokens")
    report = {name: row(total(outputs), total(cases["plain"])) for name, outputs in cases.items()}
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
