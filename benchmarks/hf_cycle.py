"""Times a decoding cycle on a transformers model beside that model's own forward, interleaved.

    python benchmarks/hf_cycle.py --target gemma3-270m --dtype bfloat16

A cycle is one whole step of the loop: a tree of 16 nodes (of random tokens, so that the drafter
itself costs nothing), the forward through `aquiline.targets.hf` with an EAGLE-3 head's features
taken, acceptance, commit and extension. Beside it stands the model's own forward of 16 tokens with
its own cache and the logits of all positions. Each round times both, so that a disturbance of the
machine meets both. Prints the medians and their ratio; --json for machines.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aquiline.cache import truncate
from aquiline.decode import Occupant, new_state, prefill, step
from aquiline.drafters.drafter import Committed, Needs, Rows
from aquiline.models.resolve import resolve_target
from aquiline.sampling import SamplingParams, TokenChooser
from aquiline.stats import GenerationStats
from aquiline.targets.hf import HFTarget
from aquiline.targets.target import eagle3_layers
from aquiline.tree import DraftTree

PARENTS = (-1, 0, 0, 0, 0, 1, 1, 2, 3, 5, 5, 6, 9, 9, 12, 14)
"""A tree of 16 nodes and 7 levels, as a dynamic tree may look."""


@dataclass(frozen=True)
class RandomTree:
    """Drafts the same tree of random tokens each time; a `Drafter`."""

    tokens: Tensor
    needs: Needs

    def new_state(self, slots: int, capacity: int) -> None:
        return None

    def extend(self, committed: Committed, state: None) -> None:
        """Does nothing."""

    def propose(self, rows: Rows, state: None) -> DraftTree:
        root = torch.tensor(rows.roots)
        tokens = torch.cat((root[:, None], self.tokens.expand(len(root), -1)), dim=1)
        shape = torch.tensor(PARENTS).expand(len(root), -1)
        return DraftTree(tokens, shape, torch.full((len(root),), len(PARENTS)))

    def copy(self, source: int, slot: int, length: int, state: None) -> None:
        """Does nothing."""

    def reset(self, slot: int, length: int, state: None) -> None:
        """Does nothing."""


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    from transformers import AutoModelForCausalLM

    folder = resolve_target(options.target)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype)).eval()
    target = HFTarget(model)
    prompt = torch.randint(5, 5000, (1, options.context), generator=torch.Generator().manual_seed(0))
    runs = {
        "cycle of 16 nodes": our_cycle(target, prompt[0].tolist()),
        "transformers, 16 tokens": hf_forward(model, prompt, len(PARENTS)),
        "transformers, 1 token": hf_forward(model, prompt, 1),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.inference_mode():
        for number in range(-2, options.rounds):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                if number >= 0:
                    times[name].append(1000 * (time.perf_counter() - start))
    medians = {name: statistics.median(found) for name, found in times.items()}
    ratio = medians["cycle of 16 nodes"] / medians["transformers, 16 tokens"]
    if options.json:
        record = {"target": options.target, "dtype": options.dtype, "context": options.context}
        print(json.dumps(record | {"rounds": options.rounds, "milliseconds": medians, "ratio": ratio}))
        return
    for name, median in medians.items():
        print(f"{name:>24}: {median:7.2f} ms (fastest {min(times[name]):.2f})")
    print(f"{'ratio':>24}: {ratio:7.2f}   {options.target}, {options.dtype}, {options.context} tokens of context")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="gemma3-270m", help="as for `aquiline generate`")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--context", type=int, default=256, help="committed tokens")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def our_cycle(target: HFTarget, prompt: list[int]) -> Callable[[], object]:
    """One step of the loop; the next call begins at the same place."""
    nodes = torch.randint(5, 5000, (1, len(PARENTS) - 1), generator=torch.Generator().manual_seed(1))
    drafter = RandomTree(nodes, Needs(features=eagle3_layers(target.shape.num_layers)))
    state = new_state(target, drafter, 1, len(prompt) + 2 * len(PARENTS))
    occupant = Occupant(prompt, TokenChooser(SamplingParams(), 0, len(prompt)), GenerationStats())
    with torch.inference_mode():
        list(prefill(target, drafter, state, 0, occupant))
    tokens = list(occupant.tokens)

    def run() -> object:
        truncate(state.cache, 0, len(tokens) - 1)
        occupant.tokens = list(tokens)
        return step(target, drafter, state, [0])

    return run


def hf_forward(model: Any, prompt: Tensor, width: int) -> Callable[[], object]:
    """The model's own forward after the same context; each call removes its tokens from the cache again."""
    from transformers import DynamicCache

    cache = DynamicCache()
    with torch.inference_mode():
        model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    new = torch.randint(5, 5000, (1, width), generator=torch.Generator().manual_seed(1))

    def run() -> object:
        logits = model(new, past_key_values=cache, use_cache=True).logits
        cache.crop(-width)
        return logits

    return run


if __name__ == "__main__":
    main()
