"""Measures the acceptance of heads on the target's own greedy answers to questions, for docs/heads.md.

    python benchmarks/head_acceptance.py QUESTIONS/mt_bench.jsonl smollm2-eagle3 smollm2-eagle

First turns only, teacher-forced chains and the fixed tree, in bfloat16.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import aquiline
from aquiline.checkpoints.open import read_head
from aquiline.engine.text import encode_prompt
from aquiline.targets.loading import load_target
from aquiline.training.learners.eagle import learn_head
from aquiline.training.validation import measure_acceptance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path)
    parser.add_argument("heads", nargs="+")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args()
    plain = aquiline.load("smollm2", draft=None, dtype="bfloat16", max_rows=16)
    lines = options.questions.read_text().splitlines()[: options.count]
    turns = [json.loads(line)["turns"][0] for line in lines]
    prompts = [encode_prompt(plain.engine.tokenizer, [{"role": "user", "content": turn}]) for turn in turns]
    answers = plain.generate(prompts, max_new_tokens=options.new_tokens, temperature=0)
    texts = [
        (torch.tensor(p + a.token_ids), torch.tensor([False] * len(p) + [True] * len(a.token_ids)))
        for p, a in zip(prompts, answers, strict=True)
    ]
    target = load_target(plain.target_path, torch.bfloat16)
    for name in options.heads:
        head = read_head(name, target.shape)
        found = measure_acceptance(learn_head(target, head), texts)
        alphas = " ".join(f"{alpha:.3f}" for alpha in found.alphas)
        taus = f"τ {found.tau_chain:.2f} (chain), {found.tau_tree:.2f} (tree)"
        print(f"{name}: n-α {alphas}, {taus}, {found.positions} positions")


if __name__ == "__main__":
    main()
