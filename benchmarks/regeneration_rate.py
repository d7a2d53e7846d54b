"""Compares regeneration in batches with the bare forwards that it needs.

    python benchmarks/regeneration_rate.py --rows 32

Greedy answers of a fixed length to `rows` prompts at once, by the engine that `aquiline prepare
--regenerate` uses, against a bare loop over `target.forward` of the same shape. Both include the
prompts. Interleaved; medians. Writes benchmarks/results/regeneration-rate.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
from forward_cost import bandwidth
from torch import Tensor

import aquiline
from aquiline.bench.environment import cpu_name
from aquiline.cache import commit
from aquiline.targets.target import Target, TargetInput

RESULT = Path(__file__).parent / "results" / "regeneration-rate.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    plain = aquiline.load("smollm2", draft=None, max_rows=options.rows)
    generator = torch.Generator().manual_seed(0)
    shape = (options.rows, options.prompt_tokens)
    prompts = torch.randint(0, plain.target.shape.vocab_size, shape, generator=generator)
    seconds: dict[str, list[float]] = {"bare forwards": [], "engine": []}
    for round_number in range(-1, options.rounds):
        for name in seconds:
            began = time.perf_counter()
            if name == "engine":
                plain.generate(prompts.tolist(), max_new_tokens=options.new_tokens, temperature=0, ignore_eos=True)
            else:
                with torch.inference_mode():
                    bare_forwards(plain.target, prompts, options.new_tokens)
            if round_number >= 0:
                seconds[name].append(time.perf_counter() - began)
    rates = {n: options.rows * options.new_tokens / statistics.median(s) for n, s in seconds.items()}
    report = {
        "tokens_per_second": rates,
        "engine_over_bare": rates["engine"] / rates["bare forwards"],
        "seconds": seconds,
        "settings": vars(options),
        "environment": {
            "cpu": cpu_name(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "dtype": str(plain.target.dtype),
            "load_average": os.getloadavg()[0],
            "read_gigabytes_per_second": round(bandwidth(), 1),
            "date": time.strftime("%Y-%m-%d %H:%M"),
        },
    }
    RESULT.write_text(json.dumps(report, indent=1) + "\n")
    print(f"bare {rates['bare forwards']:.0f}, engine {rates['engine']:.0f} tokens/s: {report['engine_over_bare']:.2f}")


def bare_forwards(target: Target, tokens: Tensor, new_tokens: int) -> None:
    """Greedy tokens for all rows of (B, P) prompts, and nothing else."""
    rows = list(range(len(tokens)))
    cache = target.new_cache(len(rows), tokens.shape[1] + new_tokens)
    length = 0
    for _ in range(new_tokens):
        width = tokens.shape[1]
        positions = (length + torch.arange(width))[None].expand(len(rows), -1)
        last = torch.full((len(rows), 1), width - 1)
        logits = target.forward(TargetInput(tokens, positions, None, cache, rows, logits_at=last)).logits
        commit(cache, torch.arange(width)[None].expand(len(rows), -1), rows)
        length += width
        tokens = logits[:, -1].argmax(-1, keepdim=True)


if __name__ == "__main__":
    main()
