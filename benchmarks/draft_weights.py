"""Measures the acceptance of an EAGLE head in bfloat16 and in int8, on the same questions and outputs.

python benchmarks/draft_weights.py QUESTIONS/mt_bench.jsonl --out benchmarks/results/draft-weights.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import aquiline
from aquiline.drafters.eagle import EagleDrafter
from aquiline.native.codes import WeightFormat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path, nargs="+")
    parser.add_argument("--heads", nargs="+", default=["smollm2-eagle3", "smollm2-eagle"])
    parser.add_argument("--count", type=int, default=16, help="questions of each file")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chats = [
        [{"role": "user", "content": json.loads(line)["turns"][0]}]
        for file in options.questions
        for line in file.read_text(encoding="utf-8").splitlines()[: options.count]
    ]
    record: dict[str, Any] = {"questions": len(chats), "depth": options.depth, "heads": {}}
    for name in options.heads:
        loaded = aquiline.load(
            "smollm2", name, tree=aquiline.Chain(options.depth), dtype="bfloat16", adaptive=False, max_rows=4
        )
        drafter = loaded.drafter
        assert isinstance(drafter, EagleDrafter)
        forms: list[WeightFormat | None] = [None, "int8"]
        record["heads"][name] = {}
        for form in forms:
            made = EagleDrafter(drafter.head, loaded.target, drafter.policy, packed=True, form=form)
            model = aquiline.load(loaded.target, made, tokenizer=loaded.tokenizer, adaptive=False, max_rows=4)
            outputs = model.generate(chats, max_new_tokens=options.new_tokens, temperature=0)
            steps = sum(output.stats.steps for output in outputs)
            tokens = sum(len(output.token_ids) for output in outputs)
            found = {"tokens": tokens, "steps": steps, "tau": tokens / steps}
            record["heads"][name][form or "bfloat16"] = found
            print(name, form or "bfloat16", found, flush=True)
    if options.out:
        options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
