"""Times what a generation does outside the networks' forwards, by phase.

    python benchmarks/engine_overhead.py --dtype bfloat16 int8

A cycle lasts from one event to the next. Clocks around the kernels' functions measure the forwards of the target and of
the draft network; all the rest of the cycle is outside: Python, PyTorch's small operations, the target's draw, and what
prepares a call. The default draft, plain decoding and temperatures take turns on each prompt; medians over the prompts.
Writes benchmarks/results/engine-overhead.json and .md. Needs the CPU kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import aquiline
from aquiline.bench.contexts import behind
from aquiline.bench.environment import cpu_name
from aquiline.bench.tasks import load_questions, spread
from aquiline.loading import Loaded
from aquiline.native import library
from aquiline.native.library import TOKENS

RESULTS = Path(__file__).parent / "results"
PHASES = ("draft", "target", "accept", "commit", "extend", "other")


@dataclass(eq=False)
class Clock:
    """Seconds inside the kernels' functions, by network; the draw of tokens counts as outside."""

    seconds: Counter[str] = field(default_factory=Counter)

    def timed(self, function: Callable[..., int], network: Callable[[Any], str]) -> Callable[..., int]:
        def run(struct: Any, call: Any) -> int:
            began = time.perf_counter()
            result = function(struct, call)
            self.seconds[network(struct)] += time.perf_counter() - began
            return result

        return run

    def install(self) -> None:
        """Puts the clock into the library that is loaded next."""
        opened = library.open_library

        def open_timed(path: Path) -> library.Library:
            found = opened(path)
            return replace(
                found,
                forward=self.timed(found.forward, lambda stack: "target" if stack.entry == TOKENS else "draft"),
                read_out=self.timed(found.read_out, lambda readout: "draft"),
                draft=self.timed(found.draft, lambda network: "draft"),
                ingest=self.timed(found.ingest, lambda network: "draft"),
            )

        library.open_library = open_timed


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    clock = Clock()
    clock.install()
    report: dict[str, Any] = {"cycles": [], "environment": environment(options)}
    for dtype in options.dtype:
        auto = aquiline.load("smollm2", dtype=dtype)
        methods = {"auto": auto, "plain": auto.plain()}
        prompts = prompts_for(auto, options)
        found: dict[tuple[str, float], list[dict[str, float]]] = {}
        for number in range(-1, options.prompts):  # the first round warms up
            for name, loaded in methods.items():
                for temperature in options.temperatures:
                    cycle = measure(loaded, clock, prompts[max(number, 0)], temperature, options.new_tokens)
                    if number >= 0:
                        found.setdefault((name, temperature), []).append(cycle)
        report["cycles"] += [
            {"dtype": dtype, "method": name, "temperature": temperature, **medians(cycles)}
            for (name, temperature), cycles in found.items()
        ]
    write(report)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float32", "int8", "int4"), default=["bfloat16"])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--context", type=int, default=0, help="tokens of a prompt; 0: the questions alone")
    parser.add_argument("--new-tokens", type=int, default=64)
    return parser.parse_args()


def prompts_for(loaded: Loaded, options: argparse.Namespace) -> list[str]:
    questions = load_questions()
    return [behind(q, questions, options.context, loaded.tokenizer) for q in spread(questions, options.prompts)]


def measure(loaded: Loaded, clock: Clock, prompt: str, temperature: float, new_tokens: int) -> dict[str, float]:
    """Milliseconds of a cycle and of its parts, the prompt and the first token left out."""
    settings = {"temperature": temperature, "seed": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    events = loaded.stream(prompt, **settings)
    next(events)
    clock.seconds.clear()
    began = time.perf_counter()
    *_, last = events
    wall = time.perf_counter() - began
    assert last.output is not None
    stats = last.output.stats
    each = 1000 / stats.steps
    parts = {phase: each * (stats.seconds.get(phase, 0.0) - clock.seconds[phase]) for phase in PHASES}
    outside = each * (wall - clock.seconds["target"] - clock.seconds["draft"])
    return {
        "cycle": each * wall,
        "target forward": each * clock.seconds["target"],
        "draft forward": each * clock.seconds["draft"],
        "outside": outside,
        **{f"outside: {phase}": milliseconds for phase, milliseconds in parts.items()},
        "outside: between": outside - sum(parts.values()),
        "share": outside / (each * wall),
        "nodes": stats.nodes / stats.steps,
        "tau": stats.mean_accept_length,
    }


def medians(cycles: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(cycle[name] for cycle in cycles) for name in cycles[0]}


def environment(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "threads": options.threads,
        "prompts": options.prompts,
        "context": options.context,
        "new_tokens": options.new_tokens,
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def write(report: dict[str, Any]) -> None:
    cycles = report["cycles"]
    heads = [f"{c['dtype']}, {c['method']}, T = {c['temperature']:g}" for c in cycles]
    lines = ["| median, ms | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for name in (name for name in cycles[0] if name not in ("dtype", "method", "temperature")):
        form = "{:.1%}" if name == "share" else "{:.2f}"
        lines.append(f"| {name} | " + " | ".join(form.format(cycle[name]) for cycle in cycles) + " |")
    lines += ["", str(report["environment"])]
    RESULTS.mkdir(parents=True, exist_ok=True)
    stem = RESULTS / "engine-overhead"
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
