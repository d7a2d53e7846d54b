"""Times what the engine adds to its forwards, and the cost of a long context, interleaved.

    python benchmarks/engine_overhead.py --dtype bfloat16

Three questions, each a ratio of medians measured in turn:

- the generation loop against a bare loop over `target.forward` (plain decoding, same prompt);
- a plain token and a speculative cycle after a long context against those after a short one;
- the share of a speculative cycle that is neither the target's nor the draft's forward.

Writes benchmarks/results/engine-overhead-<dtype>.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from forward_cost import bandwidth, bare_loop, prompt

import aquiline
from aquiline.bench.environment import cpu_name
from aquiline.drafters.trees import Chain
from aquiline.loading import Loaded

RESULTS = Path(__file__).parent / "results"
FORWARDS = ("target", "draft", "extend")


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    fast = aquiline.load("smollm2", dtype=options.dtype, tree=Chain(options.depth), draft="smollm2-eagle3")
    plain = fast.plain()
    times: dict[str, list[float]] = {}
    for round_number in range(-1, options.rounds):
        for name, milliseconds in measure(plain, fast, options).items():
            if round_number >= 0:
                times.setdefault(name, []).append(milliseconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    short, long = (f"{c} tokens" for c in options.contexts)
    report = {
        "ratios": {
            "generation loop over bare loop": medians["generation loop"] / medians["bare loop"],
            f"plain token, {long} over {short}": medians[f"plain, {long}"] / medians[f"plain, {short}"],
            f"speculative cycle, {long} over {short}": medians[f"cycle, {long}"] / medians[f"cycle, {short}"],
            "share of a cycle outside the forwards": medians[f"outside, {short}"] / medians[f"cycle, {short}"],
        },
        "milliseconds": {name: {"median": medians[name], "all": values} for name, values in times.items()},
        "environment": {
            "cpu": cpu_name(),
            "threads": options.threads,
            "dtype": options.dtype,
            "chain": options.depth,
            "torch": torch.__version__,
            "load_average": os.getloadavg()[0],
            "read_gigabytes_per_second": round(bandwidth(), 1),
            "date": time.strftime("%Y-%m-%d %H:%M"),
        },
    }
    write(report, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--contexts", type=int, nargs=2, default=[100, 1500], help="committed tokens, short and long")
    parser.add_argument("--depth", type=int, default=4, help="drafted tokens of a cycle")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def measure(plain: Loaded, fast: Loaded, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds per plain token or speculative cycle, prefill left out where the engine reports it."""
    times: dict[str, float] = {}
    start = prompt(options.contexts[0], plain.target.shape.vocab_size)
    began = time.perf_counter()
    with torch.inference_mode():
        bare_loop(plain.target, start, options.new_tokens)
    times["bare loop"] = 1000 * (time.perf_counter() - began) / options.new_tokens
    began = time.perf_counter()
    run(plain, start[0].tolist(), options.new_tokens)
    times["generation loop"] = 1000 * (time.perf_counter() - began) / options.new_tokens
    for context in options.contexts:
        tokens = prompt(context, plain.target.shape.vocab_size)[0].tolist()
        name = f"{context} tokens"
        stats = run(plain, tokens, options.new_tokens)
        times[f"plain, {name}"] = 1000 * stats.decode_seconds / stats.steps
        stats = run(fast, tokens, options.new_tokens)
        times[f"cycle, {name}"] = 1000 * stats.decode_seconds / stats.steps
        outside = sum(seconds for phase, seconds in stats.seconds.items() if phase not in (*FORWARDS, "prefill"))
        times[f"outside, {name}"] = 1000 * outside / stats.steps
    return times


def run(loaded: Loaded, tokens: list[int], new_tokens: int) -> Any:
    output = loaded.generate(tokens, max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
    return output.stats


def write(report: dict[str, Any], options: argparse.Namespace) -> None:
    lines = ["| ratio of medians | |", "|---|---|"]
    lines += [f"| {name} | {ratio:.3f} |" for name, ratio in report["ratios"].items()]
    lines += ["", "| milliseconds | median |", "|---|---|"]
    lines += [f"| {name} | {entry['median']:.2f} |" for name, entry in report["milliseconds"].items()]
    lines += ["", str(report["environment"])]
    RESULTS.mkdir(parents=True, exist_ok=True)
    stem = RESULTS / f"engine-overhead-{options.dtype}"
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
