"""Measures the acceptance of heads on the target's own answers to questions, for docs/heads.md.

    python benchmarks/head_acceptance.py QUESTIONS/mt_bench.jsonl smollm2-eagle3 smollm2-eagle
    python benchmarks/head_acceptance.py QUESTIONS/mt_bench.jsonl smollm2-eagle3 smollm2-medusa --temperature 1

First turns only, teacher-forced chains and the fixed tree, in bfloat16; and, for each γ, how often a first draft is
accepted at temperature 1 if it races with the target's noise, which is the γ that a head should name.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import aquiline
from aquiline.checkpoints.eagle.stored import head_from_stored
from aquiline.checkpoints.open import open_head, stored_eagle, stored_heads
from aquiline.checkpoints.parallel import heads_from_stored
from aquiline.engine.text import encode_prompt
from aquiline.targets.decoder import Decoder
from aquiline.targets.loading import load_target
from aquiline.training.learners.eagle import learn_head
from aquiline.training.learners.learner import Learner
from aquiline.training.learners.parallel import ParallelLearner
from aquiline.training.learners.target_parts import read_out_rows
from aquiline.training.validation import measure_acceptance


def learner_of(name: str, target: Decoder) -> Learner:
    """An EAGLE, Medusa or Hydra head that only `measure` is asked of."""
    opened = open_head(name, target.shape)
    stored = stored_heads(opened)
    if stored is None:
        return learn_head(target, head_from_stored(stored_eagle(opened), torch.float32))
    heads = heads_from_stored(stored, target.dtype)
    rows = read_out_rows(target, heads.draft_to_target)
    return ParallelLearner(heads.network, target, rows, heads.draft_to_target, stored.fingerprint or "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path)
    parser.add_argument("heads", nargs="+")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    plain = aquiline.load("smollm2", draft=None, dtype="bfloat16", max_rows=16)
    lines = options.questions.read_text().splitlines()[: options.count]
    turns = [json.loads(line)["turns"][0] for line in lines]
    prompts = [encode_prompt(plain.engine.tokenizer, [{"role": "user", "content": turn}]) for turn in turns]
    answers = plain.generate(prompts, max_new_tokens=options.new_tokens, temperature=options.temperature, seed=1)
    texts = [
        (torch.tensor(p + a.token_ids), torch.tensor([False] * len(p) + [True] * len(a.token_ids)))
        for p, a in zip(prompts, answers, strict=True)
    ]
    target = load_target(plain.target_path, torch.bfloat16)
    assert isinstance(target, Decoder)
    for name in options.heads:
        found = measure_acceptance(learner_of(name, target), texts)
        alphas = " ".join(f"{alpha:.3f}" for alpha in found.alphas)
        taus = f"τ {found.tau_chain:.2f} (chain), {found.tau_tree:.2f} (tree)"
        print(f"{name}: n-α {alphas}, {taus}, {found.positions} positions")
        shares = ", ".join(f"{gamma:g}: {share:.3f}" for gamma, share in found.coupled.items())
        print(f"  coupled first draft by γ, at every eighth position: {shares}; best {found.gamma:g}")


if __name__ == "__main__":
    main()
