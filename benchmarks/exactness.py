"""Checks that chains and trees of drafts give plain decoding's bits (SmolLM2, bfloat16, CPU).

    python benchmarks/exactness.py

Feeds the same 120 tokens one by one, in chains of several lengths, and in chains with decoy
branches after them, and compares the bits of all logits and of the cache.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from aquiline import tree as trees
from aquiline.cache import KVCache, commit
from aquiline.models.resolve import resolve_target
from aquiline.targets.loading import load_target
from aquiline.targets.native import native
from aquiline.targets.packed import packed
from aquiline.targets.target import Target, TargetInput

PREFIX, LENGTH = 450, 120


def feed(target: Target, ids: list[int], width: int, decoys: int) -> tuple[torch.Tensor, KVCache]:
    """Logits (LENGTH, V) of the tokens after the prefix, fed `width` at a time."""
    cache = target.new_cache(1, len(ids) + width + decoys)
    none = torch.empty(1, 0, dtype=torch.int64)
    target.forward(TargetInput(torch.tensor([ids[:PREFIX]]), torch.arange(PREFIX)[None], None, cache, [0], (), none))
    commit(cache, torch.arange(PREFIX)[None], [0])
    rows = []
    for start in range(PREFIX, PREFIX + LENGTH, width):
        chain = ids[start : start + width]
        tokens = chain + [7 + i for i in range(decoys)]
        parents = [*range(-1, len(chain) - 1), *(i % len(chain) for i in range(decoys))]
        tree = trees.from_lists([(tokens, parents)])
        ancestors = trees.ancestors(tree.parents) if decoys else None
        out = target.forward(TargetInput(tree.tokens, start + trees.depths(tree.parents), ancestors, cache, [0]))
        rows.append(out.logits[0, : len(chain)])
        commit(cache, torch.arange(len(chain))[None], [0])
    return torch.cat(rows), cache


def main() -> None:
    """Prints a table and, on request, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    model = load_target(resolve_target("smollm2"), getattr(torch, arguments.dtype), torch.device("cpu"))
    target = native(model) or packed(model) or model
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 40000, (PREFIX + LENGTH,), generator=generator).tolist()
    records = []
    with torch.inference_mode():
        plain, plain_cache = feed(target, ids, 1, 0)
        used = slice(0, PREFIX + LENGTH)
        for width, decoys in ((2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (8, 0), (12, 0), (4, 4), (5, 11), (6, 26)):
            logits, cache = feed(target, ids, width, decoys)
            same = (logits == plain).all(1).float().mean().item()
            cached = torch.equal(cache.key_block[..., used, :], plain_cache.key_block[..., used, :])
            records.append({"chain": width, "decoys": decoys, "equal_rows": same, "equal_cache": cached})
            print(f"chain of {width:2}, {decoys:2} decoys: {same:.1%} of rows bit-equal, cache equal: {cached}")
    if arguments.output:
        arguments.output.write_text(json.dumps(records, indent=2) + "\n")


if __name__ == "__main__":
    main()
