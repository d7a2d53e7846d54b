"""Measures how rounding the weights changes perplexity and agreement with float32, for docs/benchmarks.md.

    python benchmarks/quality.py QUESTIONS --out benchmarks/results/quality.json

Texts are the first questions of each file and the target's own greedy float32 continuations of them. Perplexity is
that of the questions and of the continuations; agreement is the share of positions of the continuations where the
likeliest token is float32's.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import aquiline
from aquiline.targets.target import Target, TargetInput

DTYPES = ("float32", "bfloat16", "int8", "int4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path, help="folder of *.jsonl with turns")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--count", type=int, default=3, help="questions of each file")
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    exact = aquiline.load(options.target, None, dtype="float32", max_rows=8)
    chats = [
        [{"role": "user", "content": json.loads(line)["turns"][0][:500]}]
        for file in sorted(options.questions.glob("*.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()[: options.count]
    ]
    outputs = exact.generate(chats, max_new_tokens=options.new_tokens, temperature=0)
    texts = [(list(out.prompt_tokens), list(out.token_ids)) for out in outputs]
    expected = [_logits(exact.target, prompt + answer) for prompt, answer in texts]
    results = {}
    for dtype in DTYPES:
        target = exact.target if dtype == "float32" else aquiline.load(options.target, None, dtype=dtype).target
        results[dtype] = _compare(target, texts, expected)
        print(dtype, *(f"{name} {value:.4f}" for name, value in results[dtype].items()), flush=True)
    record = {
        "target": options.target,
        "path": exact.target.describe() if hasattr(exact.target, "describe") else type(exact.target).__name__,
        "questions": len(texts),
        "question_tokens": sum(len(prompt) - 1 for prompt, _ in texts),
        "continuation_tokens": sum(len(answer) for _, answer in texts),
        "dtypes": results,
    }
    if options.out:
        options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _logits(target: Target, tokens: list[int]) -> Tensor:
    cache = target.new_cache(1, len(tokens))
    return (
        target.forward(TargetInput(torch.tensor([tokens]), torch.arange(len(tokens))[None], None, cache, [0]))
        .logits[0]
        .float()
    )


def _compare(target: Target, texts: list[tuple[list[int], list[int]]], expected: list[Tensor]) -> dict[str, Any]:
    losses: tuple[list[Tensor], list[Tensor]] = ([], [])
    same, divergence = [], []
    for (prompt, answer), exact in zip(texts, expected, strict=True):
        logits = _logits(target, prompt + answer)
        found = logits.log_softmax(-1)
        loss = -found[:-1].gather(1, torch.tensor(prompt + answer)[1:, None])[:, 0]
        losses[0].append(loss[: len(prompt) - 1])
        losses[1].append(loss[len(prompt) - 1 :])
        at = slice(len(prompt) - 1, -1)
        same.append(logits[at].argmax(-1) == exact[at].argmax(-1))
        truth = exact[at].log_softmax(-1)
        divergence.append((truth.exp() * (truth - found[at])).sum(-1))
    return {
        "perplexity_questions": math.exp(torch.cat(losses[0]).mean().item()),
        "perplexity_continuations": math.exp(torch.cat(losses[1]).mean().item()),
        "top1_agreement": torch.cat(same).float().mean().item(),
        "divergence": torch.cat(divergence).mean().item(),
    }


if __name__ == "__main__":
    main()
